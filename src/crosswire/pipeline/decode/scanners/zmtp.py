"""ZMTP for the columnar scanner of eMQP: greeting, commands, parts of messages."""

from __future__ import annotations

from typing import Final

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.ascii_codes import (
    LOWER,
    NOT_ASCII,
    SPACE,
    TILDE,
    UPPER_A,
    UPPER_Z,
)
from crosswire.pipeline.decode.kernels import subroutine
from crosswire.pipeline.decode.scanners.octets import big_endian, octet_at
from crosswire.pipeline.decode.scanners.scanner import INCOMPLETE, SCRATCH, UNSURE
from crosswire.wire.zmtp import layout

__all__ = [
    "KEPT_PARTS",
    "command_at",
    "greeting_at",
    "message_at",
    "socket_type_at",
    "word",
    "word_at",
]

KEPT_PARTS: Final = 9
"""Of a message, bounds of as many parts are noted: eMQP has no use for more."""

_WORD_BYTES: Final = 8

_SOCKET_TYPE: Final = np.frombuffer(layout.PROPERTY_SOCKET_TYPE.lower().encode(), np.uint8)


def word(text: str | bytes) -> int:
    """A word of at most 8 letters as a number, as `word_at` gives it: to compare in one step."""
    return int.from_bytes(text.encode("ascii") if isinstance(text, str) else text)


@subroutine
def word_at(data: Bytes, start: int, end: int) -> int:
    """The word in these bytes as a number; NONE if it has more than 8 letters.

    Words that begin with zeros are equal to shorter ones: callers exclude them.
    """
    return big_endian(data, start, end - start) if end - start <= _WORD_BYTES else NONE


_CURVE: Final = word(layout.MECHANISM_CURVE)
_MISSPELLED_ERROR: Final = word(layout.MISSPELLED_ERROR)
_MISSPELLED_BYTES: Final = len(layout.MISSPELLED_ERROR)


@subroutine
def greeting_at(data: Bytes, position: int, end: int) -> int:
    """The end of the mechanism's name, or INCOMPLETE or UNSURE.

    All of a connection with CURVE is for the Decoder: its frames can't be read, only measured.
    """
    if end - position < layout.GREETING_SIZE:
        return INCOMPLETE
    if (
        data[position] != layout.SIGNATURE_START
        or data[position + layout.SIGNATURE_END_OFFSET] != layout.SIGNATURE_END
        or data[position + layout.MAJOR_OFFSET] < layout.MIN_MAJOR
    ):
        return UNSURE
    name = position + layout.MECHANISM_OFFSET
    name_end = name + layout.MECHANISM_SIZE
    while name_end > name and data[name_end - 1] == 0:
        name_end -= 1
    for index in range(name, name_end):
        if data[index] < SPACE or data[index] > TILDE:
            return UNSURE
    if name == name_end or word_at(data, name, name_end) == _CURVE:
        return UNSURE
    return name_end


@subroutine
def command_at(data: Bytes, position: int, end: int, limit: int) -> tuple[int, int, int]:
    """The end of the command, or INCOMPLETE or UNSURE; start and end of its name, the octet with
    the name's length included."""
    if end - position < layout.SHORT_HEADER_SIZE:
        return INCOMPLETE, 0, 0
    flags = data[position]
    if flags == layout.FLAG_COMMAND:
        body = position + layout.SHORT_HEADER_SIZE
        size = octet_at(data, position + layout.SIZE_OFFSET)
    elif flags == layout.FLAG_COMMAND | layout.FLAG_LONG:
        body = position + layout.LONG_HEADER_SIZE
        if body > end:
            return INCOMPLETE, 0, 0
        size = big_endian(data, position + layout.SIZE_OFFSET, layout.LONG_SIZE_SIZE)
    else:
        return UNSURE, 0, 0
    # A size of 8 bytes from 2⁶³ on is negative; once it is compared with the limit, sums are safe.
    if size < 0 or size > limit or body + size - position > limit:
        return UNSURE, 0, 0
    stop = body + size
    if stop > end:
        return INCOMPLETE, 0, 0
    if size == 0 or data[body] == 0:
        return UNSURE, 0, 0
    name_end = body + layout.NAME_LENGTH_SIZE + octet_at(data, body)
    if name_end > stop:
        return UNSURE, 0, 0
    misspelled_end = body + _MISSPELLED_BYTES
    if misspelled_end <= stop and word_at(data, body, misspelled_end) == _MISSPELLED_ERROR:
        return UNSURE, 0, 0
    for index in range(body + layout.NAME_LENGTH_SIZE, name_end):
        if data[index] >= NOT_ASCII:
            return UNSURE, 0, 0
    return stop, body, name_end


@subroutine
def socket_type_at(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Start and end of the socket's type in this metadata; an empty slice if it is not there, and
    UNSURE if it is there twice or this is no metadata."""
    found, found_end = position, position
    times = 0
    while position < end:
        name = position + layout.PROPERTY_NAME_LENGTH_SIZE
        name_end = name + octet_at(data, position)
        value = name_end + layout.PROPERTY_VALUE_LENGTH_SIZE
        if name_end == name or value > end:
            return UNSURE, UNSURE
        value_end = value + big_endian(data, name_end, layout.PROPERTY_VALUE_LENGTH_SIZE)
        if value_end > end:
            return UNSURE, UNSURE
        same = name_end - name == len(_SOCKET_TYPE)
        for index in range(name, name_end):
            octet = data[index]
            if octet >= NOT_ASCII:
                return UNSURE, UNSURE
            # Names of properties are compared without regard to case (RFC 37).
            if UPPER_A <= octet <= UPPER_Z:
                octet |= LOWER
            same = same and octet == _SOCKET_TYPE[index - name]
        if same:
            found, found_end = value, value_end
            times += 1
        position = value_end
    return (found, found_end) if times < 2 else (UNSURE, UNSURE)


@subroutine
def message_at(
    data: Bytes, position: int, end: int, limit: int, most_parts: int, progress: Numbers
) -> tuple[int, int]:
    """The end of the message, or INCOMPLETE or UNSURE; and the number of its parts.

    Start and end of the first KEPT_PARTS are noted in `progress` from SCRATCH on. A command between
    the parts of a message is allowed, and for the Decoder.
    """
    at, count = position, 0
    while True:
        if end - at < layout.SHORT_HEADER_SIZE:
            return INCOMPLETE, 0
        flags = data[at]
        if flags > layout.LAST_MESSAGE_FLAGS:
            return UNSURE, 0
        body = at + layout.SHORT_HEADER_SIZE
        size = octet_at(data, at + layout.SIZE_OFFSET)
        if flags & layout.FLAG_LONG:
            body = at + layout.LONG_HEADER_SIZE
            if body > end:
                return INCOMPLETE, 0
            size = big_endian(data, at + layout.SIZE_OFFSET, layout.LONG_SIZE_SIZE)
        # The limit holds for the whole message, with the headers of its parts.
        if size < 0 or size > limit or body + size - position > limit:
            return UNSURE, 0
        at = body + size
        if at > end:
            return INCOMPLETE, 0
        if count < KEPT_PARTS:
            progress[SCRATCH + 2 * count] = body
            progress[SCRATCH + 2 * count + 1] = at
        count += 1
        if not flags & layout.FLAG_MORE:
            return at, count
        if count == most_parts:
            return UNSURE, 0
