"""Where MicroMsg2 carries a secret: the extension `x-auth` of a client's handshakes."""

from __future__ import annotations

import re
from typing import Final

from crosswire.wire.masking import EVERYTHING, Mask
from crosswire.wire.micromsg2.frames import is_handshake

__all__ = ["MicroMsg2Mask"]

_AUTH: Final = re.compile(rb"(?:^|;)\s*x-auth:([^;]*)", re.IGNORECASE)
_VALUE: Final = re.compile(rb"(?:^|,)[^,=:]*[=:]?([^,]*)")
_CLIENT_HANDSHAKES: Final = 2


class MicroMsg2Mask(Mask):
    """Both handshakes of a client, each when it is whole; there are no secrets behind them."""

    def __init__(self) -> None:
        super().__init__()
        self._handshakes = _CLIENT_HANDSHAKES

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        if not self._handshakes or not is_handshake(buffer[position]):
            return EVERYTHING, 0, []
        at_hand = len(buffer) - position
        secrets: list[tuple[int, int]] = []
        if at_hand < 4:
            return 0, 4, []
        at = 4 + buffer[position + 3]
        for _ in ("required", "optional"):
            if at_hand < at + 2:
                return 0, at + 2, []
            start = at + 2
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
