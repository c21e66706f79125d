"""Finds ZMTP's secret: the password in PLAIN's HELLO, the first command of a client."""

from __future__ import annotations

from typing import Final

from crosswire.errors import FrameError
from crosswire.wire.masking import EVERYTHING, Mask
from crosswire.wire.zmtp.frames import ZmtpLimits, read_header
from crosswire.wire.zmtp.layout import (
    COMMAND_HELLO,
    CREDENTIAL_LENGTH_SIZE,
    FLAG_COMMAND,
    GREETING_SIZE,
    MECHANISM_OFFSET,
    MECHANISM_PLAIN,
    MECHANISM_SIZE,
    NAME_LENGTH_SIZE,
)

__all__ = ["ZmtpMask"]

_HELLO: Final = len(COMMAND_HELLO).to_bytes(NAME_LENGTH_SIZE) + COMMAND_HELLO.encode()
_MECHANISM: Final = slice(MECHANISM_OFFSET, MECHANISM_OFFSET + MECHANISM_SIZE)


class ZmtpMask(Mask):
    """Judges the greeting, which names the mechanism, and with PLAIN the command after it.

    NULL has no secrets, CURVE's are encrypted.
    """

    def __init__(self, command_bytes: int = ZmtpLimits().command_bytes) -> None:
        super().__init__()
        self._command_bytes = command_bytes
        self._greeted = False

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        at_hand = len(buffer) - position
        if not self._greeted:
            if at_hand < GREETING_SIZE:
                return 0, GREETING_SIZE, []
            greeting = buffer[position : position + GREETING_SIZE]
            self._greeted = True
            plain = greeting[_MECHANISM].rstrip(b"\0") == MECHANISM_PLAIN.encode()
            return GREETING_SIZE if plain else EVERYTHING, 0, []
        try:
            flags, body, stop = read_header(buffer, position, 0, self._command_bytes, "command")
        except FrameError:
            return EVERYTHING, 0, []
        if not flags & FLAG_COMMAND and body:
            return EVERYTHING, 0, []
        if not body or stop > len(buffer):
            return 0, stop - position, []
        return EVERYTHING, 0, _secrets(buffer[body:stop], body)


def _secrets(command: bytes, start: int) -> list[tuple[int, int]]:
    if not command.startswith(_HELLO):
        return []
    user_length = len(_HELLO)
    user = user_length + CREDENTIAL_LENGTH_SIZE
    user_size = command[user_length] if len(command) >= user else 0
    password = user + user_size + CREDENTIAL_LENGTH_SIZE
    return [(start + min(password, len(command)), start + len(command))]
