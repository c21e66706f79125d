"""Finds MicroMsg2's secret: the values of the extension `x-auth` in a client's handshakes."""

from __future__ import annotations

import re
from typing import Final

from crosswire.wire.masking import EVERYTHING, Mask
from crosswire.wire.micromsg2.frames import is_handshake
from crosswire.wire.micromsg2.layout import (
    CLIENT_HANDSHAKES,
    EXTENSIONS_LENGTH_SIZE,
    HANDSHAKE_HEADER_SIZE,
    IDENTITY_LENGTH_OFFSET,
    IDENTITY_OFFSET,
)

__all__ = ["MicroMsg2Mask"]

_AUTH: Final = re.compile(rb"(?:^|;)\s*x-auth:([^;]*)", re.IGNORECASE)
_VALUE: Final = re.compile(rb"(?:^|,)[^,=:]*[=:]?([^,]*)")


class MicroMsg2Mask(Mask):
    """Judges both handshakes of a client, each when it is complete; no secrets follow them."""

    def __init__(self) -> None:
        super().__init__()
        self._handshakes = CLIENT_HANDSHAKES

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        if not self._handshakes or not is_handshake(buffer[position]):
            return EVERYTHING, 0, []
        at_hand = len(buffer) - position
        secrets: list[tuple[int, int]] = []
        if at_hand < HANDSHAKE_HEADER_SIZE:
            return 0, HANDSHAKE_HEADER_SIZE, []
        at = IDENTITY_OFFSET + buffer[position + IDENTITY_LENGTH_OFFSET]
        for _ in ("required", "optional"):
            start = at + EXTENSIONS_LENGTH_SIZE
            if at_hand < start:
                return 0, start, []
            at = start + int.from_bytes(buffer[position + at : position + start])
            if at_hand < at:
                return 0, at, []
            secrets += _secrets(buffer[position + start : position + at], position + start)
        self._handshakes -= 1
        return at, 0, secrets


def _secrets(extensions: bytes, start: int) -> list[tuple[int, int]]:
    return [
        (start + auth.start(1) + value.start(1), start + auth.start(1) + value.end(1))
        for auth in _AUTH.finditer(extensions)
        for value in _VALUE.finditer(auth[1])
    ]
