"""Where `data` is in the bodies of EMP, and where in it is what the hub's own operations carry.

A body is passed over up to `"data":` and then once through the object behind it, which is checked
on the way. What is found is sure; of a body in which it is not, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.json import (
    after_space,
    follows,
    number_end,
    scalar_end,
    string_end,
)
from crosswire.pipeline.decode.kernels import INTS, OCTETS, OUT_TABLE, TRUTHS, kernel, subroutine
from crosswire.pipeline.decode.readings.emp import MOST_AROUND
from crosswire.pipeline.decode.scanners.octets import octet_at

__all__ = ["Data", "find"]

_MOST_DEEP: Final = 32

# What there is to say of a body: from _MEMBERS on, where a member's value starts and how long it
# is. Strings are meant without their quotes.
_OPENED, _CLOSED, _FLAGS, _ID, _MEMBERS = range(5)
_DESTINATION, _TEXT, _BASE64, _JSON, _PROPERTIES, _NUMBER = range(6)
_HEIGHT: Final = _MEMBERS + 2 * _NUMBER

# Flags: it can't be told what it carries, or which id it has; there are escapes in `text`; it has
# an id.
_DOUBTFUL: Final = 1
_ID_DOUBTFUL: Final = 2
_ESCAPED: Final = 4
_HAS_ID: Final = 8

# What stands before `data`, and what its members are called.
_BEFORE: Final = np.frombuffer(b'"data":', np.uint8)
_NAMED_DESTINATION: Final = np.frombuffer(b"destination", np.uint8)
_NAMED_TEXT: Final = np.frombuffer(b"text", np.uint8)
_NAMED_BASE64: Final = np.frombuffer(b"base64", np.uint8)
_NAMED_JSON: Final = np.frombuffer(b"json", np.uint8)
_NAMED_PROPERTIES: Final = np.frombuffer(b"properties", np.uint8)
_NAMED_ID: Final = np.frombuffer(b"id", np.uint8)


@subroutine
def _member(data: Bytes, start: int, end: int) -> int:
    """Which one has this name."""
    size = end - start
    found, name = NONE, _NAMED_ID
    if size == 2:
        found = _NUMBER
    elif size == 4 and octet_at(data, start) == 106:
        found, name = _JSON, _NAMED_JSON
    elif size == 4:
        found, name = _TEXT, _NAMED_TEXT
    elif size == 6:
        found, name = _BASE64, _NAMED_BASE64
    elif size == 10:
        found, name = _PROPERTIES, _NAMED_PROPERTIES
    elif size == 11:
        found, name = _DESTINATION, _NAMED_DESTINATION
    return found if found != NONE and follows(data, start, end, name) else NONE


@subroutine
def _note_id(data: Bytes, start: int, end: int, row: int, out: Numbers) -> None:
    if out[_FLAGS, row] & _HAS_ID:
        out[_FLAGS, row] |= _ID_DOUBTFUL
        return
    stop, whole = number_end(data, start, end)
    if stop != end or not whole:
        out[_FLAGS, row] |= _ID_DOUBTFUL
        return
    negative = octet_at(data, start) == 45
    number = 0
    for index in range(start + negative, end):
        number = number * 10 + octet_at(data, index) - 48
    out[_ID, row] = -number if negative else number
    out[_FLAGS, row] |= _HAS_ID


@subroutine
def _note(
    data: Bytes, member: int, start: int, end: int, escaped: bool, row: int, out: Numbers
) -> None:
    """The value of one of the members that are looked for."""
    if member == _NUMBER:
        _note_id(data, start, end, row, out)
        return
    first = octet_at(data, start)
    index = _MEMBERS + 2 * member
    twice = out[index + 1, row] != NONE
    if first == 110 and not twice and member not in (_JSON, _DESTINATION):
        return
    if member == _JSON:
        right = True
    elif member == _PROPERTIES:
        right = first == 123
    else:
        right = first == 34
        start, end = start + 1, end - 1
    if twice or not right:
        out[_FLAGS, row] |= _DOUBTFUL
        return
    out[index, row], out[index + 1, row] = start, end - start
    if member == _TEXT and escaped:
        out[_FLAGS, row] |= _ESCAPED


@subroutine
def _value_at(data: Bytes, at: int, end: int) -> int:
    """Where the value begins whose name ends at `at`."""
    at = after_space(data, at, end)
    if at >= end or octet_at(data, at) != 58:
        return NONE
    at = after_space(data, at + 1, end)
    return at if at < end else NONE


@subroutine
def _object_end(data: Bytes, at: int, end: int, row: int, out: Numbers) -> int:
    """Behind the object that begins at `at`; NONE where it is doubtful. What is open is an object
    where its bit in `objects` is set, the innermost being the last."""
    depth, objects = 1, 1
    at += 1
    is_first, has_value = True, False
    member, begun = NONE, at
    while True:
        at = after_space(data, at, end)
        if at >= end:
            return NONE
        octet = octet_at(data, at)
        if (is_first or has_value) and octet == (125 if objects & 1 else 93):
            at += 1
            depth -= 1
            if depth == 0:
                return at
            objects >>= 1
            is_first, has_value = False, True
            if depth == 1 and member != NONE:
                _note(data, member, begun, at, False, row, out)
            continue
        if has_value:
            if octet != 44:
                return NONE
            at += 1
            has_value = False
            continue
        if objects & 1:
            if octet != 34:
                return NONE
            stop, escaped = string_end(data, at + 1, end)
            if stop < 0:
                return NONE
            if depth == 1:
                member = _member(data, at + 1, stop)
                if escaped:
                    out[_FLAGS, row] |= _DOUBTFUL | _ID_DOUBTFUL
            at = _value_at(data, stop + 1, end)
            if at < 0:
                return NONE
            octet = octet_at(data, at)
        if depth == 1:
            begun = at
        if octet == 123 or octet == 91:
            if depth == _MOST_DEEP:
                return NONE
            depth += 1
            objects = objects << 1 | (octet == 123)
            at += 1
            is_first = True
            continue
        escaped = False
        if octet == 34:
            stop, escaped = string_end(data, at + 1, end)
            at = stop + 1 if stop >= 0 else NONE
        else:
            at = scalar_end(data, at, end)
        if at < 0:
            return NONE
        if depth == 1 and member != NONE:
            _note(data, member, begun, at, escaped, row, out)
        is_first, has_value = False, True


@subroutine
def _name_end(data: Bytes, at: int, end: int) -> int:
    """Behind the first `"data":`, if it is near."""
    for index in range(at, min(end, at + MOST_AROUND) - 6):
        if octet_at(data, index) == 34 and follows(data, index, end, _BEFORE):
            return index + 7
    return NONE


@kernel(OCTETS, INTS, INTS, TRUTHS, OUT_TABLE)
def _find(data: Bytes, starts: Numbers, lengths: Numbers, chosen: Flags, out: Numbers) -> None:
    for row in range(len(starts)):
        out[_OPENED, row] = out[_CLOSED, row] = NONE
        out[_FLAGS, row] = out[_ID, row] = 0
        for index in range(_MEMBERS, _HEIGHT, 2):
            out[index, row], out[index + 1, row] = 0, NONE
        if not chosen[row]:
            continue
        start, end = starts[row], starts[row] + lengths[row]
        opened = _name_end(data, start, end)
        if opened < 0:
            continue
        opened = after_space(data, opened, end)
        if opened >= end or octet_at(data, opened) != 123:
            continue
        closed = _object_end(data, opened, end, row, out)
        if closed >= 0 and opened - start + end - closed <= MOST_AROUND:
            out[_OPENED, row], out[_CLOSED, row] = opened, closed


@dataclass(frozen=True)
class Data:
    """`opened` and `closed` are where it is, and NONE where it was not found. Of what was found,
    with strings as they are written and without quotes: `carries` what the hub's own operations
    do, with an id where `has_message_id` and `has_id`."""

    opened: Numbers
    closed: Numbers
    carries: Flags
    has_message_id: Flags
    has_id: Flags
    id: Numbers
    is_escaped: Flags
    """Is `text`?"""
    destination: tuple[Numbers, Numbers]
    text: tuple[Numbers, Numbers]
    base64: tuple[Numbers, Numbers]
    json: tuple[Numbers, Numbers]
    properties: tuple[Numbers, Numbers]


def find(octets: Bytes, starts: Numbers, lengths: Numbers, chosen: Flags) -> Data:
    """In these bodies, if they are chosen."""
    out = np.empty((_HEIGHT, len(starts)), np.int64)
    _find(octets, starts, lengths, chosen, out)
    found = out[_OPENED] >= 0
    members = [(out[at], out[at + 1]) for at in range(_MEMBERS, _HEIGHT, 2)]
    return Data(
        opened=out[_OPENED],
        closed=out[_CLOSED],
        carries=found & (out[_FLAGS] & _DOUBTFUL == 0) & (members[_DESTINATION][1] >= 0),
        has_message_id=found & (out[_FLAGS] & _ID_DOUBTFUL == 0),
        has_id=out[_FLAGS] & _HAS_ID != 0,
        id=out[_ID],
        is_escaped=out[_FLAGS] & _ESCAPED != 0,
        destination=members[_DESTINATION],
        text=members[_TEXT],
        base64=members[_BASE64],
        json=members[_JSON],
        properties=members[_PROPERTIES],
    )
