"""Where `data` is in the bodies of EMP, and where the members are that the hub's operations have.

A body is searched for `"data":`, and the object after it is read once from start to end, which
checks it too. Only what is certain is given: of a body that is unusual, nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.ascii_codes import (
    CLOSING_BRACE,
    CLOSING_BRACKET,
    COLON,
    COMMA,
    HYPHEN,
    LOWER_J,
    LOWER_N,
    OPENING_BRACE,
    OPENING_BRACKET,
    QUOTE,
    ZERO,
)
from crosswire.pipeline.decode.json import (
    after_space,
    follows,
    number_end,
    scalar_end,
    string_end,
)
from crosswire.pipeline.decode.kernels import INTS, OCTETS, OUT_TABLE, TRUTHS, kernel, subroutine
from crosswire.pipeline.decode.meanings.emp import MOST_AROUND
from crosswire.pipeline.decode.scanners.octets import octet_at

__all__ = ["Data", "find"]

_MOST_DEEP: Final = 32

# The rows of the table that the kernel fills in, a column for each body; from _MEMBERS on: start
# and length of the value of a member, of strings without their quotes.
_OPENED, _CLOSED, _FLAGS, _ID, _MEMBERS = range(5)
_DESTINATION, _TEXT, _BASE64, _JSON, _PROPERTIES, _NUMBER = range(6)
_HEIGHT: Final = _MEMBERS + 2 * _NUMBER

# Flags: the message in it is uncertain, or its id; `text` has escapes; it has an id.
_DOUBTFUL: Final = 1
_ID_DOUBTFUL: Final = 2
_ESCAPED: Final = 4
_HAS_ID: Final = 8

# The name before `data`, and the names of its members.
_BEFORE: Final = np.frombuffer(b'"data":', np.uint8)
_NAMED_DESTINATION: Final = np.frombuffer(b"destination", np.uint8)
_NAMED_TEXT: Final = np.frombuffer(b"text", np.uint8)
_NAMED_BASE64: Final = np.frombuffer(b"base64", np.uint8)
_NAMED_JSON: Final = np.frombuffer(b"json", np.uint8)
_NAMED_PROPERTIES: Final = np.frombuffer(b"properties", np.uint8)
_NAMED_ID: Final = np.frombuffer(b"id", np.uint8)


@subroutine
def _member(data: Bytes, start: int, end: int) -> int:
    """The member with this name; NONE for any other."""
    size = end - start
    found, name = NONE, _NAMED_ID
    if size == 2:
        found = _NUMBER
    elif size == 4 and octet_at(data, start) == LOWER_J:
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
    negative = octet_at(data, start) == HYPHEN
    number = 0
    for index in range(start + negative, end):
        number = number * 10 + octet_at(data, index) - ZERO
    out[_ID, row] = -number if negative else number
    out[_FLAGS, row] |= _HAS_ID


@subroutine
def _note(
    data: Bytes, member: int, start: int, end: int, escaped: bool, row: int, out: Numbers
) -> None:
    """Note the value of a member. A name that occurs twice makes the body uncertain."""
    if member == _NUMBER:
        _note_id(data, start, end, row, out)
        return
    first = octet_at(data, start)
    index = _MEMBERS + 2 * member
    twice = out[index + 1, row] != NONE
    # null stands for an absent member, but for `json`, whose value it is.
    if first == LOWER_N and not twice and member not in (_JSON, _DESTINATION):
        return
    if member == _JSON:
        right = True
    elif member == _PROPERTIES:
        right = first == OPENING_BRACE
    else:
        right = first == QUOTE
        start, end = start + 1, end - 1
    if twice or not right:
        out[_FLAGS, row] |= _DOUBTFUL
        return
    out[index, row], out[index + 1, row] = start, end - start
    if member == _TEXT and escaped:
        out[_FLAGS, row] |= _ESCAPED


@subroutine
def _value_at(data: Bytes, at: int, end: int) -> int:
    """The position of the value whose name ends at `at`, NONE if there is none."""
    at = after_space(data, at, end)
    if at >= end or octet_at(data, at) != COLON:
        return NONE
    at = after_space(data, at + 1, end)
    return at if at < end else NONE


@subroutine
def _object_end(data: Bytes, at: int, end: int, row: int, out: Numbers) -> int:
    """The position after the object at `at`, NONE if it is unusual. Notes its members.

    Without recursion: `objects` is a stack with a bit for each level that is open, the innermost
    last, set for an object and not for an array. `is_first` is whether a level has just been
    opened, `has_value` whether a value has just ended: then a comma or the end of the level
    follows.
    """
    depth, objects = 1, 1
    at += 1
    is_first, has_value = True, False
    member, begun = NONE, at
    while True:
        at = after_space(data, at, end)
        if at >= end:
            return NONE
        octet = octet_at(data, at)
        if (is_first or has_value) and octet == (CLOSING_BRACE if objects & 1 else CLOSING_BRACKET):
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
            if octet != COMMA:
                return NONE
            at += 1
            has_value = False
            continue
        if objects & 1:
            if octet != QUOTE:
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
        if octet == OPENING_BRACE or octet == OPENING_BRACKET:
            if depth == _MOST_DEEP:
                return NONE
            depth += 1
            objects = objects << 1 | (octet == OPENING_BRACE)
            at += 1
            is_first = True
            continue
        escaped = False
        if octet == QUOTE:
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
    """The position after the first `"data":`, NONE if it is not near."""
    for index in range(at, min(end, at + MOST_AROUND) - len(_BEFORE) + 1):
        if octet_at(data, index) == QUOTE and follows(data, index, end, _BEFORE):
            return index + len(_BEFORE)
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
        if opened >= end or octet_at(data, opened) != OPENING_BRACE:
            continue
        closed = _object_end(data, opened, end, row, out)
        if closed >= 0 and opened - start + end - closed <= MOST_AROUND:
            out[_OPENED, row], out[_CLOSED, row] = opened, closed


@dataclass(frozen=True)
class Data:
    """`data` of bodies: octets[opened:closed], NONE where it was not found.

    `carries` is whether it certainly has the members of a message, with strings as they are written
    and without quotes. `has_message_id` is whether it is certain which `id` it has, `has_id`
    whether there is one.
    """

    opened: Numbers
    closed: Numbers
    carries: Flags
    has_message_id: Flags
    has_id: Flags
    id: Numbers
    is_escaped: Flags
    """Whether `text` has escapes."""
    destination: tuple[Numbers, Numbers]
    text: tuple[Numbers, Numbers]
    base64: tuple[Numbers, Numbers]
    json: tuple[Numbers, Numbers]
    properties: tuple[Numbers, Numbers]


def find(octets: Bytes, starts: Numbers, lengths: Numbers, chosen: Flags) -> Data:
    """The data of the bodies that are chosen."""
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
