"""Finds EMP's secret: the token in a request of the operation `$authenticate`."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from crosswire.errors import MalformedFrame
from crosswire.wire.emp.frames import Request
from crosswire.wire.emp.layout import (
    JSON_OFFSET,
    LENGTH_OFFSET,
    LENGTH_SIZE,
    TYPE_OFFSET,
    TYPE_REQUEST,
    UNUSED_OFFSET,
)
from crosswire.wire.masking import EVERYTHING, Mask

__all__ = ["EmpMask"]

_OPERATION: Final = "$authenticate"
_PLAIN: Final = frozenset({"op", "data", "token", _OPERATION})
# A lone backslash at the end belongs to an unterminated string: without that case the search would
# begin anew at each quote inside of it, which takes quadratic time.
_STRING: Final = re.compile(rb'"((?:[^"\\]|\\.)*+\\?)("|$)', re.DOTALL)


class EmpMask(Mask):
    """Judges requests only, each when it is complete: `op` may follow `data` in the JSON."""

    def __init__(self, frame_bytes: int = 64 * 1024 * 1024) -> None:
        super().__init__()
        self._frame_bytes = frame_bytes

    def _judge(self, buffer: bytes, position: int) -> tuple[int, int, list[tuple[int, int]]]:
        if len(buffer) - position < UNUSED_OFFSET:
            # A length and a type are needed to judge.
            return 0, UNUSED_OFFSET, []
        start = position + LENGTH_OFFSET
        size = LENGTH_SIZE + int.from_bytes(buffer[start : start + LENGTH_SIZE])
        if size - LENGTH_SIZE > self._frame_bytes:
            # The connection refuses it and ends: no request can follow.
            return EVERYTHING, 0, []
        if buffer[position + TYPE_OFFSET] != TYPE_REQUEST or size < JSON_OFFSET:
            return size, 0, []
        if len(buffer) - position < size:
            return 0, size, []
        start = position + JSON_OFFSET
        body = buffer[start : position + size]
        return size, 0, [(start + at, start + end) for at, end in _secrets(body)]


def _secrets(body: bytes) -> list[tuple[int, int]]:
    """Where the strings are, except the names in _PLAIN, of a body that may authenticate.

    Of nearly all requests one search decides: only escapes could hide the operation's name.
    """
    if b"authenticate" not in body and b"\\u" not in body:
        return []
    try:
        if Request(1, body).call().op != _OPERATION:
            return []
    except MalformedFrame:
        # It may have been meant as one, so its strings are masked too.
        pass
    return [found.span(1) for found in _STRING.finditer(body) if _text(found[1]) not in _PLAIN]


def _text(inside: bytes) -> str:
    try:
        return msgspec.json.decode(b'"' + inside + b'"', type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
