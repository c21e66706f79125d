"""Where EMP carries a secret: the token of `$authenticate`, in whichever request that is."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from crosswire.errors import MalformedFrame
from crosswire.wire.emp.frames import Request
from crosswire.wire.masking import EVERYTHING, Mask

__all__ = ["EmpMask"]

_OPERATION: Final = "$authenticate"
_PLAIN: Final = frozenset({"op", "data", "token", _OPERATION})
_STRING: Final = re.compile(rb'"((?:[^"\\]|\\.)*)("|$)', re.DOTALL)
_REQUEST: Final = 5
_HEAD: Final = 5
_BODY: Final = 16


class EmpMask(Mask):
    """Only requests are looked at, each when it is whole: `op` may stand behind `data`."""

    def __init__(self, frame_bytes: int = 64 * 1024 * 1024) -> None:
        super().__init__()
        self._frame_bytes = frame_bytes

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        if len(buffer) - position < _HEAD:
            return 0, _HEAD, []
        length = 4 + int.from_bytes(buffer[position : position + 4])
        if length - 4 > self._frame_bytes:
            # It ends the connection here.
            return EVERYTHING, 0, []
        if buffer[position + 4] != _REQUEST or length < _BODY:
            return length, 0, []
        if len(buffer) - position < length:
            return 0, length, []
        start = position + _BODY
        body = buffer[start : position + length]
        return length, 0, [(start + at, start + end) for at, end in _secrets(body)]


def _secrets(body: bytes) -> list[tuple[int, int]]:
    """Nearly all requests are told apart by one search: only escapes could hide the name."""
    if b"authenticate" not in body and b"\\u" not in body:
        return []
    try:
        if Request(1, body).call().op != _OPERATION:
            return []
    except MalformedFrame:
        # It may be meant as one. What can't be read can't be trusted either.
        pass
    return [found.span(1) for found in _STRING.finditer(body) if _text(found[1]) not in _PLAIN]


def _text(inside: bytes) -> str:
    try:
        return msgspec.json.decode(b'"' + inside + b'"', type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
