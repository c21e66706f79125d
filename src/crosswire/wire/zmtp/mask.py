"""Where ZMTP carries a secret: the password in PLAIN's HELLO, the first command of a client."""

from __future__ import annotations

from typing import Final

from crosswire.errors import FrameError
from crosswire.wire.masking import EVERYTHING, Mask
from crosswire.wire.zmtp.frames import COMMAND, GREETING_BYTES, ZmtpLimits, read_header

__all__ = ["ZmtpMask"]

_HELLO: Final = b"\x05HELLO"
_MECHANISM: Final = slice(12, 32)


class ZmtpMask(Mask):
    """The greeting tells the mechanism; with any but PLAIN there is nothing to hide."""

    def __init__(self, command_bytes: int = ZmtpLimits().command_bytes) -> None:
        super().__init__()
        self._command_bytes = command_bytes
        self._greeted = False

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        at_hand = len(buffer) - position
        if not self._greeted:
            if at_hand < GREETING_BYTES:
                return 0, GREETING_BYTES, []
            greeting = buffer[position : position + GREETING_BYTES]
            self._greeted = True
            plain = greeting[_MECHANISM].rstrip(b"\0") == b"PLAIN"
            return GREETING_BYTES if plain else EVERYTHING, 0, []
        try:
            flags, body, stop = read_header(buffer, position, 0, self._command_bytes, "command")
        except FrameError:
            return EVERYTHING, 0, []
        if not flags & COMMAND and body:
            return EVERYTHING, 0, []
        if not body or stop > len(buffer):
            return 0, stop - position, []
        return EVERYTHING, 0, _secrets(buffer[body:stop], body)


def _secrets(command: bytes, start: int) -> list[tuple[int, int]]:
    if not command.startswith(_HELLO):
        return []
    user = len(_HELLO) + 1
    password = user + (command[user - 1] if len(command) >= user else 0) + 1
    return [(start + min(password, len(command)), start + len(command))]
