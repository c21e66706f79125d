"""Epoxy's decoder: one direction, live or captured, from bytes to frames."""

from __future__ import annotations

from collections.abc import Mapping

from crosswire.wire.contract import Decoder, Limits, Placed, one_of
from crosswire.wire.epoxy.frames import DEFAULTS, EpoxyLimits, measure, scan

__all__ = ["EpoxyDecoder"]

_SYNC_BYTES = 65536
"""The largest frame that is accepted while searching for the first one."""


class EpoxyDecoder(Decoder):
    """One direction of Epoxy. Both have the same format; the handshake is ordinary frames."""

    limits: EpoxyLimits

    def __init__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,  # noqa: ARG002  the directions don't depend on one another
        hints: Mapping[str, int] | None = None,  # noqa: ARG002
    ) -> None:
        super().__init__(sender, one_of(limits, DEFAULTS), late=late)

    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        return scan(buffer, position, self.offset, self.limits, placed)

    def _measure(self, buffer: bytes, position: int) -> int | None:
        return measure(buffer, position, _SYNC_BYTES)
