"""One fuzzing process: `python -m tests.fuzz.target PROTOCOL ROLE MODE [libFuzzer's flags]`.

MODE is `guided`, by the code that inputs reach, or `unguided`, which is ten times as fast.

The first input byte chooses how the rest is used: as a capture, cut in two or joined late, or as
what a peer sends to a connection, in its handshake or after it.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext

import atheris

NAME, ROLE, MODE = sys.argv[1:4]

# The registry imports a protocol when it is asked for: that has to happen in here, or its code
# would not be instrumented, and the fuzzer not guided by what it reaches.
with atheris.instrument_imports(include=["crosswire"]) if MODE == "guided" else nullcontext():
    import msgspec

    from crosswire.wire import protocol
    from crosswire.wire.contract import ConnectionClosed, ConnectionFailed

    ENTRY = protocol(NAME)
    OFFERED = importlib.import_module(f"tests.wire.{NAME}.strategies")


def fuzz(data: bytes) -> None:
    how, wire = data[0] if data else 0, data[1:]
    if how & 1:
        as_a_capture(wire, cut=how >> 2, late=bool(how & 2))
    else:
        as_a_peer(wire, handshake=bool(how & 2))


def as_a_capture(wire: bytes, *, cut: int, late: bool) -> None:
    hints = {hint.name: cut & 7 for hint in ENTRY.hints}
    whole, pieces = (ENTRY.decoder(ROLE, late=late, hints=hints or None) for _ in range(2))
    rows = whole.rows(wire)
    parts = pieces.rows(wire[:cut])
    again = ENTRY.decoder(ROLE, late=late, hints=hints or None)
    again.load(pieces.dump())
    parts += again.rows(wire[cut:])
    assert msgspec.json.encode(rows) == msgspec.json.encode(parts), "the cut made a difference"
    placed = sum(row.length for row in rows if row.layer == 0)
    assert placed + whole.pending + whole.unread == len(wire), "bytes don't add up"


def as_a_peer(wire: bytes, *, handshake: bool) -> None:
    if handshake:
        connection = ENTRY.connection(ROLE, 0.0)
    else:
        connection = OFFERED.open_pair()[ENTRY.roles[-1] == ROLE]
    connection.receive_data(wire, 1.0)
    connection.handle_deadline(1e6)
    connection.receive_eof()
    ends = [e for e in connection.events() if isinstance(e, ConnectionClosed | ConnectionFailed)]
    assert len(ends) <= 1, "more than one end"


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[4:]], fuzz)
    atheris.Fuzz()
