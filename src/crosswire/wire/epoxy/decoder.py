"""Epoxy's decoder: one direction, live or captured, from bytes to frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crosswire.errors import FrameTooLarge
from crosswire.wire.contract import Decoder, Limits, Placed, one_of
from crosswire.wire.epoxy.frames import DEFAULTS, EpoxyLimits, framelets_of, measure, scan, scan_one
from crosswire.wire.epoxy.layout import TYPE_LAYER_DATA

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
        self.most_bytes: int | None = None
        """Set by an owner that does not know the peer: the limit of a frame. Its payload and error
        don't count once `on_layer_data` has set this to None."""
        self.on_layer_data: Callable[[bytes], None] | None = None

    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        while self.most_bytes is not None and position < len(buffer):
            self._check_size(buffer, position, self.most_bytes)
            start = position
            position, need = scan_one(buffer, position, self.offset, self.limits, placed)
            if position == start:
                return position, need
        return scan(buffer, position, self.offset, self.limits, placed)

    def _check_size(self, buffer: bytes, position: int, most_bytes: int) -> None:
        """Raises FrameTooLarge as soon as a frame is known to be above the limit, which is before
        its payload: that comes after the layer data."""
        for kind, start, end in framelets_of(buffer, position):
            if kind == TYPE_LAYER_DATA and end <= len(buffer) and self.on_layer_data is not None:
                self.on_layer_data(buffer[start:end])
                if self.most_bytes is None:
                    return
            if end - position > most_bytes:
                raise FrameTooLarge(
                    f"a frame of more than {most_bytes} bytes, from a peer without credentials",
                    offset=self.offset + position,
                    length=min(start, len(buffer)) - position,
                )

    def _measure(self, buffer: bytes, position: int) -> int | None:
        return measure(buffer, position, _SYNC_BYTES)
