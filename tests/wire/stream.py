"""What the tests of all protocols share: a stream of one direction, and a pipe between two ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from crosswire.wire.contract import Connection


@dataclass(frozen=True)
class Stream:
    """Bytes of one direction, and what a decoder needs to read them."""

    data: bytes
    hints: dict[str, int] = field(default_factory=dict)
    peer: bytes = b""


def pump(a: Connection, b: Connection, now: float = 0.0) -> None:
    """Move bytes both ways until neither end has any to send."""
    while True:
        from_a = b"".join(a.data_to_send())
        if from_a:
            b.receive_data(from_a, now)
        from_b = b"".join(b.data_to_send())
        if from_b:
            a.receive_data(from_b, now)
        if not from_a and not from_b:
            return
