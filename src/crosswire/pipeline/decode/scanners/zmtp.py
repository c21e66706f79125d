"""ZMTP for the columnar scanner of what stands on it: greeting, commands, messages' parts."""

from __future__ import annotations

from typing import Final

import numpy as np

from crosswire.pipeline.decode.scanners.scanner import (
    NONE,
    ODD,
    TAIL,
    Bytes,
    Numbers,
    big,
    compiled,
    octet_at,
)
from crosswire.wire.zmtp.layout import FLAG_COMMAND, FLAG_LONG, FLAG_MORE, GREETING_SIZE

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
"""So many of a message's parts are looked at: eMQP has no use for more."""

_SOCKET_TYPE = np.frombuffer(b"socket-type", np.uint8)


def word(text: str) -> int:
    """A word of at most 8 letters, as `word_at` gives it."""
    return int.from_bytes(text.encode("ascii"))


@compiled
def word_at(data: Bytes, start: int, end: int) -> int:
    """The word in these bytes as a number; NONE if it is longer than 8."""
    return big(data, start, end - start) if end - start <= 8 else NONE


_CURVE: Final = word("CURVE")
_SLIP: Final = word("^RROR")


@compiled
def greeting_at(data: Bytes, position: int, end: int) -> int:
    """Where the mechanism's name ends. TAIL and ODD as ever; CURVE is for the decoder."""
    if end - position < GREETING_SIZE:
        return TAIL
    if data[position] != 0xFF or data[position + 9] != 0x7F or data[position + 10] < 3:
        return ODD
    name, name_end = position + 12, position + 32
    while name_end > name and data[name_end - 1] == 0:
        name_end -= 1
    for index in range(name, name_end):
        if data[index] < 0x20 or data[index] > 0x7E:
            return ODD
    if name == name_end or word_at(data, name, name_end) == _CURVE:
        return ODD
    return name_end


@compiled
def command_at(data: Bytes, position: int, end: int, limit: int) -> tuple[int, int, int]:
    """Where the command ends, or TAIL or ODD; where its name is, from the octet of its length on,
    and where that ends."""
    if end - position < 2:
        return TAIL, 0, 0
    flags = data[position]
    if flags == FLAG_COMMAND:
        body = position + 2
        size = octet_at(data, position + 1)
    elif flags == FLAG_COMMAND | FLAG_LONG:
        body = position + 9
        if body > end:
            return TAIL, 0, 0
        size = big(data, position + 1, 8)
    else:
        return ODD, 0, 0
    if size < 0 or size > limit or body + size - position > limit:
        return ODD, 0, 0
    stop = body + size
    if stop > end:
        return TAIL, 0, 0
    if size == 0 or data[body] == 0 or body + 1 + octet_at(data, body) > stop:
        return ODD, 0, 0
    if size >= 5 and word_at(data, body, body + 5) == _SLIP:
        return ODD, 0, 0
    name_end = body + 1 + octet_at(data, body)
    for index in range(body + 1, name_end):
        if data[index] >= 0x80:
            return ODD, 0, 0
    return stop, body, name_end


@compiled
def socket_type_at(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Where the metadata in these bytes has the type of the socket; nothing if it isn't told, and
    ODD if it's told twice or this is no metadata."""
    found, found_end = position, position
    times = 0
    while position < end:
        name_end = position + 1 + octet_at(data, position)
        value = name_end + 4
        if name_end == position + 1 or value > end:
            return ODD, ODD
        value_end = value + big(data, name_end, 4)
        if value_end > end:
            return ODD, ODD
        same = name_end - position - 1 == len(_SOCKET_TYPE)
        for index in range(position + 1, name_end):
            octet = data[index]
            if octet >= 0x80:
                return ODD, ODD
            if 65 <= octet <= 90:
                octet |= 32
            same = same and octet == _SOCKET_TYPE[index - position - 1]
        if same:
            found, found_end = value, value_end
            times += 1
        position = value_end
    return (found, found_end) if times < 2 else (ODD, ODD)


@compiled
def message_at(
    data: Bytes, position: int, end: int, limit: int, most: int, parts: Numbers
) -> tuple[int, int]:
    """Where the message ends, or TAIL or ODD; and how many parts it has, the first KEPT_PARTS of
    which are then in `parts`, start and end of each."""
    at, count = position, 0
    while True:
        if end - at < 2:
            return TAIL, 0
        flags = data[at]
        if flags > 3:
            return ODD, 0
        body, size = at + 2, octet_at(data, at + 1)
        if flags & FLAG_LONG:
            body = at + 9
            if body > end:
                return TAIL, 0
            size = big(data, at + 1, 8)
        if size < 0 or size > limit or body + size - position > limit:
            return ODD, 0
        at = body + size
        if at > end:
            return TAIL, 0
        if count < KEPT_PARTS:
            parts[2 * count] = body
            parts[2 * count + 1] = at
        count += 1
        if not flags & FLAG_MORE:
            return at, count
        if count == most:
            return ODD, 0
