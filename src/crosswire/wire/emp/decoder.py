"""EMP's decoder: one direction, from bytes to frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from crosswire.wire.contract import Decoder, Limits, Placed, one_of
from crosswire.wire.emp.frames import DEFAULTS, scan
from crosswire.wire.emp.layout import (
    BODY_OFFSET,
    HEADER_SIZE,
    LAST_TYPE,
    LENGTH_OFFSET,
    LENGTH_SIZE,
    MIN_LENGTH,
    TYPE_OFFSET,
    UNUSED_OFFSET,
)

__all__ = ["EmpDecoder"]

_SYNC_BYTES: Final = 65536


class EmpDecoder(Decoder):
    """One direction of EMP. Both are read alike: the handshake consists of ordinary messages."""

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
        """Unused bytes are zero and types are few, which distinguishes a header from text."""
        head = buffer[position : position + HEADER_SIZE]
        if len(head) < HEADER_SIZE:
            return 0
        length = int.from_bytes(head[LENGTH_OFFSET : LENGTH_OFFSET + LENGTH_SIZE])
        if head[TYPE_OFFSET] > LAST_TYPE or any(head[UNUSED_OFFSET:BODY_OFFSET]):
            return None
        return LENGTH_SIZE + length if MIN_LENGTH <= length <= _SYNC_BYTES else None
