"""Masks Epoxy's secret: the token of `Credentials` in the layer data of any message."""

from __future__ import annotations

from crosswire.wire.epoxy.comm import find_credentials
from crosswire.wire.epoxy.frames import EpoxyLimits
from crosswire.wire.epoxy.layout import (
    COUNT_SIZE,
    FRAMELET_HEADER_SIZE,
    FRAMELET_STRUCT,
    TYPE_LAYER_DATA,
    TYPES,
)
from crosswire.wire.masking import EVERYTHING, Mask

__all__ = ["EpoxyMask"]


class EpoxyMask(Mask):
    """Goes from framelet to framelet; only layer data is held back until it is whole."""

    def __init__(self, framelet_bytes: int = EpoxyLimits().framelet_bytes) -> None:
        super().__init__()
        self._framelet_bytes = framelet_bytes
        self._framelets = 0

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        at_hand = len(buffer) - position
        if not self._framelets:
            if at_hand < COUNT_SIZE:
                return 0, COUNT_SIZE, []
            self._framelets = int.from_bytes(buffer[position : position + COUNT_SIZE], "little")
            return COUNT_SIZE if self._framelets else EVERYTHING, 0, []
        if at_hand < FRAMELET_HEADER_SIZE:
            return 0, FRAMELET_HEADER_SIZE, []
        kind, size = FRAMELET_STRUCT.unpack_from(buffer, position)
        if kind not in TYPES or size > self._framelet_bytes:
            # A violation: the connection ends, and no secret can follow.
            return EVERYTHING, 0, []
        length = FRAMELET_HEADER_SIZE + size
        if kind != TYPE_LAYER_DATA:
            self._framelets -= 1
            return length, 0, []
        if at_hand < length:
            return 0, length, []
        self._framelets -= 1
        start = position + FRAMELET_HEADER_SIZE
        return length, 0, _secrets(buffer[start : position + length], start)


def _secrets(layer_data: bytes, start: int) -> list[tuple[int, int]]:
    token = find_credentials(layer_data)
    if token is None:
        return []
    secret = token.encode()
    at = layer_data.rfind(secret)
    if at < 0:
        # The token is encoded in a way that can't be found: mask all of it.
        return [(start, start + len(layer_data))]
    return [(start + at, start + at + len(secret))]
