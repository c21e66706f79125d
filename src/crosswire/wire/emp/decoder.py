"""EMP's decoder: one direction, live or captured, from bytes to frames."""

from __future__ import annotations

from collections.abc import Mapping

from crosswire.wire.contract import Decoder, Limits, Placed, one_of
from crosswire.wire.emp.frames import DEFAULTS, scan

__all__ = ["EmpDecoder"]

_SYNC_BYTES = 65536


class EmpDecoder(Decoder):
    """One direction of EMP. Both read alike: the handshake is made of ordinary messages."""

    def __init__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,  # noqa: ARG002  EMP's directions don't depend on one another
        hints: Mapping[str, int] | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__(sender, one_of(limits, DEFAULTS), late=late)

    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        return scan(buffer, position, self.offset, self.limits.frame_bytes, placed)

    def _measure(self, buffer: bytes, position: int) -> int | None:
        """Peers send the unused bytes as zero and few types: enough to tell a header from text."""
        head = buffer[position : position + 8]
        if len(head) < 8:
            return 0
        length = int.from_bytes(head[:4])
        if head[4] > 6 or any(head[5:8]) or not 4 <= length <= _SYNC_BYTES:
            return None
        return 4 + length
