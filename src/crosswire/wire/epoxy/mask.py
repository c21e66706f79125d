"""Where Epoxy carries a secret: the token of `Credentials` in any message's layer data."""

from __future__ import annotations

from typing import Final

from crosswire.wire.epoxy.comm import find_credentials
from crosswire.wire.epoxy.frames import EpoxyLimits
from crosswire.wire.masking import EVERYTHING, Mask

__all__ = ["EpoxyMask"]

_LAYER_DATA: Final = b"LY"
_KINDS: Final = frozenset({b"CG", b"HR", b"LY", b"PD", b"ED", b"ER"})
_COUNT: Final = 2
_HEAD: Final = 6


class EpoxyMask(Mask):
    """Walks from framelet to framelet; only layer data is held until it is whole."""

    def __init__(self, framelet_bytes: int = EpoxyLimits().framelet_bytes) -> None:
        super().__init__()
        self._framelet_bytes = framelet_bytes
        self._framelets = 0

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        at_hand = len(buffer) - position
        if not self._framelets:
            if at_hand < _COUNT:
                return 0, _COUNT, []
            self._framelets = int.from_bytes(buffer[position : position + _COUNT], "little")
            return _COUNT if self._framelets else EVERYTHING, 0, []
        if at_hand < _HEAD:
            return 0, _HEAD, []
        kind = buffer[position : position + 2]
        size = int.from_bytes(buffer[position + 2 : position + _HEAD], "little")
        if kind not in _KINDS or size > self._framelet_bytes:
            # It ends the connection here.
            return EVERYTHING, 0, []
        length = _HEAD + size
        if kind != _LAYER_DATA:
            self._framelets -= 1
            return length, 0, []
        if at_hand < length:
            return 0, length, []
        self._framelets -= 1
        return length, 0, _secrets(buffer[position + _HEAD : position + length], position + _HEAD)


def _secrets(layer_data: bytes, start: int) -> list[tuple[int, int]]:
    token = find_credentials(layer_data)
    if token is None:
        return []
    secret = token.encode()
    at = layer_data.rfind(secret)
    if at < 0:
        # Not written as we would: all of it, then.
        return [(start, start + len(layer_data))]
    return [(start + at, start + at + len(secret))]
