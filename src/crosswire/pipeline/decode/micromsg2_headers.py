"""The headers of MicroMsg2's messages, all rows at once: the destination, the properties as JSON,
and the values of well-known properties.

A kernel reads properties as `wire.micromsg2.values` does, if they are written in the usual way. The
others are read in Python: a number with leading zeros, a property that is there twice, what is not
valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.errors import FrameError
from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.ascii_codes import (
    CLOSING_BRACE,
    COLON,
    COMMA,
    HYPHEN,
    NINE,
    OPENING_BRACE,
    PLUS,
    POINT,
    QUOTE,
    ZERO,
)
from crosswire.pipeline.decode.contract import FrameRows, null_column
from crosswire.pipeline.decode.kernels import (
    INT,
    INTS,
    OCTETS,
    OUT_INTS,
    OUT_OCTETS,
    OUT_TABLE,
    kernel,
    subroutine,
)
from crosswire.pipeline.decode.meanings.micromsg2 import (
    PREFIXES,
    PartialMessage,
    Properties,
    describe_properties,
)
from crosswire.pipeline.decode.scanners.micromsg2 import DESTINATION, PROPERTIES
from crosswire.pipeline.decode.scanners.octets import (
    find_octet,
    octet_at,
    valid_utf8,
    valid_utf8_escaped,
)
from crosswire.pipeline.decode.text import (
    Fixed,
    Raw,
    copy_octets,
    distinct,
    put_quoted,
    slices,
    text,
)
from crosswire.wire.micromsg2 import layout
from crosswire.wire.micromsg2.values import parse_properties

__all__ = [
    "BARE",
    "CONTENT_TYPE",
    "ERROR",
    "IDENTIFIER",
    "NAME",
    "REPLY_TO",
    "TEXT",
    "HeaderColumns",
    "key_of",
]

# The texts of a row: the fields of `Properties`, in their order, and the destination's name.
TEXT, IDENTIFIER, REPLY_TO, CONTENT_TYPE, ERROR, NAME = range(6)
_TEXTS: Final = 6

BARE: Final = len(PREFIXES)
"""The prefix code of a name that begins with none."""

_BETWEEN: Final = 255
"""Separates a name from an identifier: UTF-8 never contains it."""

_KNOWN: Final = (b"correlation-id", b"reply-to", b"content-type", b"error")
_KNOWN_OCTETS: Final = np.frombuffer(b"".join(_KNOWN), np.uint8).copy()
_KNOWN_ENDS: Final = np.cumsum([0] + [len(name) for name in _KNOWN])

_NOTHING: Final = b"{}"
_MOST: Final = 16
"""Properties of a message that the kernel reads: each is compared with all before it."""

_MOST_WIDTH: Final = 8
_MOST_AROUND: Final = 4
"""Octets that one octet of properties becomes at most: six in JSON, of a control character, and two
more in an identifier, which is written twice. And what a row adds: braces and separators."""

_INTEGER_DIGITS: Final = 18
_REAL_DIGITS: Final = 15
_MOST_REAL_DIGITS: Final = 17
"""A double gives any 15 digits back as they were, and needs 17 at most."""

_DOUBTFUL_BYTES: Final = 20
"""The least size of a property whose number has 16 or 17 digits: name, colon, prefix, point."""

_SMALL_ZEROS: Final = 4
"""With as many zeros after the point, Python writes a number with an exponent."""

# Kinds of values: for Python to read; a number; a number if a double gives back its digits; text
# after a prefix; text without one.
_ODD, _NUMBER, _DOUBTFUL, _PREFIXED, _PLAIN = range(-1, 4)

_NAME_OCTETS: Final = np.zeros(256, np.bool_)
for _octet in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-":
    _NAME_OCTETS[_octet] = True
_PREFIX_OCTETS: Final = np.frombuffer("".join(PREFIXES).encode(), np.uint8).copy()
_PREFIX_ENDS: Final = np.cumsum([0] + [len(prefix) for prefix in PREFIXES])
_HEXADECIMAL: Final = np.zeros(256, np.int64)
for _octet in b"0123456789abcdefABCDEF":
    _HEXADECIMAL[_octet] = int(chr(_octet), 16)


# ----------------------------------------------------------------------------------------- values


@subroutine
def _digits_end(data: Bytes, start: int, end: int) -> int:
    for index in range(start, end):
        if not ZERO <= octet_at(data, index) <= NINE:
            return index
    return end


@subroutine
def _zeros_end(data: Bytes, start: int, end: int) -> int:
    for index in range(start, end):
        if octet_at(data, index) != ZERO:
            return index
    return end


@subroutine
def _integer(data: Bytes, start: int, end: int) -> int:
    """The kind of value after an N: a number that is the same in JSON, or another kind."""
    signed = start < end and octet_at(data, start) in (PLUS, HYPHEN)
    first = start + 1 if signed else start
    if first == end or _digits_end(data, first, end) < end:
        return _PLAIN
    if octet_at(data, start) == PLUS or end - first > _INTEGER_DIGITS:
        return _ODD
    zero = octet_at(data, first) == ZERO
    return _ODD if zero and (signed or end - first > 1) else _NUMBER


@subroutine
def _real(data: Bytes, start: int, end: int) -> int:
    """The kind of value after a D, likewise."""
    if start == end:
        return _PLAIN
    # From the hyphen to the nine: signs, the point and digits, and the slash.
    sign = octet_at(data, start)
    if not (HYPHEN <= sign <= NINE or sign == PLUS):
        return _PLAIN
    first = start + 1 if sign == HYPHEN else start
    point = _digits_end(data, first, end)
    if point == first or point >= end - 1 or octet_at(data, point) != POINT:
        return _ODD
    digits = end - first - 1
    if _digits_end(data, point + 1, end) < end or digits > _MOST_REAL_DIGITS:
        return _ODD
    number = _NUMBER if digits <= _REAL_DIGITS else _DOUBTFUL
    whole_is_zero = octet_at(data, first) == ZERO
    if octet_at(data, point + 1) == ZERO and point + 2 == end:
        return _ODD if whole_is_zero and point > first + 1 else number
    if octet_at(data, end - 1) == ZERO or (whole_is_zero and point > first + 1):
        return _ODD
    is_small = whole_is_zero and _zeros_end(data, point + 1, end) > point + _SMALL_ZEROS
    return _ODD if is_small else number


@subroutine
def _kind(data: Bytes, start: int, end: int) -> int:
    prefix = octet_at(data, start) if start < end else 0
    kind = _PLAIN
    if prefix == layout.VALUE_TEXT:
        kind = _PREFIXED
    elif prefix == layout.VALUE_NUMBER:
        kind = _integer(data, start + 1, end)
    elif prefix == layout.VALUE_DATE:
        kind = _real(data, start + 1, end)
    if kind in (_PLAIN, _PREFIXED) and find_octet(data, start, end, layout.ESCAPE) < end:
        return kind if valid_utf8_escaped(data, start, end) else _ODD
    return kind


@subroutine
def _put(data: Bytes, start: int, end: int, in_json: bool, out: Bytes, position: int) -> int:
    """Write a text without its escapes; returns the position after it."""
    index = start
    while index < end:
        octet = octet_at(data, index)
        index += 1
        if octet == layout.ESCAPE:
            high, low = octet_at(data, index), octet_at(data, index + 1)
            octet = _HEXADECIMAL[high] << 4 | _HEXADECIMAL[low]
            index += 2
        if in_json:
            position = put_quoted(octet, out, position)
        else:
            out[position] = octet
            position += 1
    return position


@subroutine
def _put_value(data: Bytes, start: int, end: int, kind: int, out: Bytes, position: int) -> int:
    if kind in (_NUMBER, _DOUBTFUL):
        return _put(data, start + 1, end, False, out, position)
    out[position] = QUOTE
    position = _put(data, start if kind == _PLAIN else start + 1, end, True, out, position + 1)
    out[position] = QUOTE
    return position + 1


# ------------------------------------------------------------------------------------- properties


@subroutine
def _same(some: Bytes, start: int, others: Bytes, begin: int, length: int) -> bool:
    for index in range(length):
        if octet_at(some, start + index) != octet_at(others, begin + index):
            return False
    return True


@subroutine
def _is_new(data: Bytes, start: int, end: int, names: Numbers, count: int) -> bool:
    """Whether it is a name, and none of the first `count` in `names`."""
    for index in range(start, end):
        if not _NAME_OCTETS[octet_at(data, index)]:
            return False
    for index in range(count):
        same_length = names[index, 1] == end - start
        if same_length and _same(data, start, data, names[index, 0], end - start):
            return False
    return start < end


@subroutine
def _known(data: Bytes, start: int, end: int) -> int:
    """Which of the well-known properties it is; NONE if none."""
    for index in range(len(_KNOWN_ENDS) - 1):
        begin, length = _KNOWN_ENDS[index], _KNOWN_ENDS[index + 1] - _KNOWN_ENDS[index]
        if length == end - start and _same(data, start, _KNOWN_OCTETS, begin, length):
            return index + IDENTIFIER
    return NONE


@subroutine
def _doubt(doubtful: Numbers, row: int, start: int, end: int) -> None:
    """Note a number that has to be compared. The first column counts them."""
    doubtful[0, 0] += 1
    index = doubtful[0, 0]
    doubtful[0, index], doubtful[1, index], doubtful[2, index] = row, start, end - start


@subroutine
def _read(
    data: Bytes,
    start: int,
    end: int,
    met: Numbers,
    known: Numbers,
    doubtful: Numbers,
    row: int,
    out: Bytes,
    position: int,
) -> int:
    """Write properties as JSON, and note where well-known ones have their values; returns the
    position after it, or _ODD."""
    if not valid_utf8(data, start, end):
        return _ODD
    at, count = start, 0
    while at <= end:
        stop = find_octet(data, at, end, layout.ITEM_SEPARATOR)
        colon = find_octet(data, at, stop, layout.VALUE_SEPARATOR)
        if colon == stop or count == _MOST or not _is_new(data, at, colon, met, count):
            return _ODD
        kind = _kind(data, colon + 1, stop)
        if kind == _ODD:
            return _ODD
        met[count, 0], met[count, 1] = at, colon - at
        out[position], out[position + 1] = COMMA if count else OPENING_BRACE, QUOTE
        position = _put(data, at, colon, False, out, position + 2)
        out[position], out[position + 1] = QUOTE, COLON
        after = _put_value(data, colon + 1, stop, kind, out, position + 2)
        if kind == _DOUBTFUL:
            _doubt(doubtful, row, position + 2, after)
        position = after
        which = _known(data, at, colon)
        if which != NONE and not (which == REPLY_TO and kind in (_NUMBER, _DOUBTFUL)):
            known[which, 0] = colon + 1 if kind == _PLAIN else colon + 2
            known[which, 1] = stop
        count += 1
        at = stop + 1
    out[position] = CLOSING_BRACE
    return position + 1


# --------------------------------------------------------------------------------------- all texts


@subroutine
def _prefix(data: Bytes, start: int, length: int) -> int:
    for which in range(BARE):
        begin, size = _PREFIX_ENDS[which], _PREFIX_ENDS[which + 1] - _PREFIX_ENDS[which]
        if size <= length and _same(data, start, _PREFIX_OCTETS, begin, size):
            return which
    return BARE


@subroutine
def _put_known(
    data: Bytes,
    known: Numbers,
    out: Bytes,
    position: int,
    starts: Numbers,
    lengths: Numbers,
    row: int,
) -> int:
    """Write what follows a name: the values of well-known properties. Returns the position after
    them.

    The identifier is written after the name and again after the reply address: with each of them it
    is one slice, the key by which requests and responses are matched.
    """
    for which in (IDENTIFIER, REPLY_TO, IDENTIFIER, CONTENT_TYPE, ERROR):
        repeated = which == IDENTIFIER and starts[which, row] > 0
        if known[which, 0] == NONE or (repeated and known[REPLY_TO, 0] == NONE):
            continue
        if which == IDENTIFIER:
            out[position] = _BETWEEN
            position += 1
        after = _put(data, known[which, 0], known[which, 1], False, out, position)
        starts[which, row], lengths[which, row] = position, after - position
        position = after
    return position


@subroutine
def _touch(data: Bytes, starts: Numbers, begin: int, end: int) -> int:
    """Read an octet of each of the next rows. Frames are far apart in memory: the processor waits
    for such reads together instead of one by one."""
    touched = 0
    for index in range(begin, end):
        touched += octet_at(data, starts[index])
    return touched


_AHEAD: Final = 64
"""Rows for which that is done at once."""


@kernel(
    *(OCTETS, INTS, INTS, INTS, INTS),
    *(OUT_OCTETS, OUT_TABLE, OUT_TABLE, OUT_INTS, OUT_TABLE),
    returns=INT,
)
def _read_all(
    data: Bytes,
    names: Numbers,
    name_sizes: Numbers,
    properties: Numbers,
    property_sizes: Numbers,
    out: Bytes,
    starts: Numbers,
    lengths: Numbers,
    prefixes: Numbers,
    doubtful: Numbers,
) -> int:
    """Write the texts of all rows. Rows for Python keep NONE as the length of their texts. Returns
    how many octets are written."""
    met, known = np.empty((_MOST, 2), np.int64), np.empty((_TEXTS, 2), np.int64)
    position = 2
    for row in range(len(names)):
        if row % _AHEAD == 0:
            met[0, 0] = _touch(data, names, row, min(row + _AHEAD, len(names)))
        size = name_sizes[row]
        if size < 0:
            continue
        start, end = properties[row], properties[row] + property_sizes[row]
        if start < end and octet_at(data, end - 1) == layout.ITEM_SEPARATOR:
            end -= 1
        if start < end:
            known[:, 0] = NONE
            doubts = doubtful[0, 0]
            after = _read(data, start, end, met, known, doubtful, row, out, position)
            if after == _ODD:
                doubtful[0, 0] = doubts
                continue
            starts[TEXT, row], lengths[TEXT, row] = position, after - position
            position = after
        elif property_sizes[row] >= 0:
            starts[TEXT, row], lengths[TEXT, row] = 0, 2
        starts[NAME, row], lengths[NAME, row] = position, size
        prefixes[row] = _prefix(data, names[row], size)
        copy_octets(data, names[row], out, position, size)
        position += size
        if start < end:
            position = _put_known(data, known, out, position, starts, lengths, row)
    return position


# ------------------------------------------------------------------------------------------- rows


class HeaderColumns:
    """The texts of rows, and after the last row, of messages that were `begun` in earlier batches.

    They are slices of `octets`: `starts` and `lengths` by text and by row, a length of NONE where
    there is none. A NAME and a REPLY_TO are followed by the IDENTIFIER, if there is one: both
    together are a slice too, which is the same for a request and its response. `prefixes` are codes
    of what names begin with. `wrong` are rows whose properties are not valid. A handshake has a
    NAME only: the identity of its sender.
    """

    def __init__(self, rows: FrameRows, begun: Sequence[PartialMessage]) -> None:
        name_sizes, sizes = rows.slices[DESTINATION][1], rows.slices[PROPERTIES][1]
        shape = _TEXTS, len(rows) + len(begun)
        self.starts, self.lengths = np.zeros(shape, np.int64), np.full(shape, NONE)
        self.prefixes = np.full(shape[1], BARE)
        self.wrong: dict[int, FrameError] = {}
        room = _MOST_WIDTH * np.maximum(sizes, 0) + np.maximum(name_sizes, 0) + _MOST_AROUND
        out = np.empty(len(_NOTHING) + int(room.sum()), np.uint8)
        out[: len(_NOTHING)] = np.frombuffer(_NOTHING, np.uint8)
        doubtful = np.empty((3, 1 + int(np.maximum(sizes, 0).sum()) // _DOUBTFUL_BYTES), np.int64)
        doubtful[0, 0] = 0
        written = _read_all(
            rows.octets,
            *rows.slices[DESTINATION],
            *rows.slices[PROPERTIES],
            out,
            self.starts,
            self.lengths,
            self.prefixes,
            doubtful,
        )
        self.octets: Bytes = out[:written]
        if doubtful[0, 0]:
            self._resolve(*doubtful[:, 1 : 1 + doubtful[0, 0]])
        odd = (name_sizes >= 0) & (self.lengths[NAME, : len(rows)] == NONE)
        if begun or odd.any():
            self._read_odd(rows, odd, begun)

    def part(self, which: int, rows: Numbers, chosen: Flags) -> Raw:
        """A text of those rows that are chosen."""
        lengths = np.where(chosen, self.lengths[which][rows], NONE)
        return Raw(self.octets, self.starts[which][rows], lengths)

    def column(
        self, which: int, rows: Numbers, chosen: Flags, otherwise: str | None = None
    ) -> pa.Array:
        """The same as a column; null, or `otherwise`, where there is none."""
        lengths = np.where(chosen, self.lengths[which][rows], NONE)
        there = lengths != NONE
        if otherwise is None and not there.any():
            return null_column(len(rows))
        part = Raw(self.octets, self.starts[which][rows], lengths)
        if otherwise is None:
            return text(len(rows), part, valid=there)
        return text(len(rows), part, Fixed(otherwise, chosen & ~there), valid=chosen)

    def keys(self, which: int, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Starts and lengths of names with their identifiers; see `key_of`."""
        identifiers = self.lengths[IDENTIFIER][rows]
        return self.starts[which][rows], self.lengths[which][rows] + identifiers + 1

    def _resolve(self, rows: Numbers, starts: Numbers, lengths: Numbers) -> None:
        """Leave rows to Python whose numbers a double would not give back as they are written."""
        written = slices(self.octets, starts, lengths).cast(pa.string())
        given = written.cast(pa.float64()).cast(pa.string())
        self.lengths[:, rows[~pc.equal(written, given).to_numpy(zero_copy_only=False)]] = NONE

    def _read_odd(self, rows: FrameRows, odd: Flags, begun: Sequence[PartialMessage]) -> None:
        (names, name_sizes), (properties, sizes) = rows.slices[DESTINATION], rows.slices[PROPERTIES]
        length = np.where(odd, properties + sizes - names, NONE)
        code, firsts = distinct(rows.octets, names, length, name_sizes)
        written = _PythonTexts(len(self.octets))
        errors = {}
        for row in firsts.tolist():
            name = rows.part(row, DESTINATION).decode()
            try:
                described = describe_properties(parse_properties(rows.part(row, PROPERTIES)))
            except FrameError as error:
                error.__traceback__ = None
                errors[int(code[row])] = error
                described = describe_properties({})
            written.add(name, described)
        for each in begun:
            written.add(each.destination, describe_properties(each.properties))
        chosen = np.flatnonzero(odd)
        if errors:
            self.wrong = {
                row: errors[int(code[row])] for row in chosen.tolist() if int(code[row]) in errors
            }
        which = np.append(code[chosen], len(firsts) + np.arange(len(begun)))
        chosen = np.append(chosen, len(rows) + np.arange(len(begun)))
        self.starts[:, chosen] = np.array(written.starts)[which].T
        self.lengths[:, chosen] = np.array(written.lengths)[which].T
        self.prefixes[chosen] = np.array(written.prefixes)[which]
        self.octets = np.append(self.octets, np.frombuffer(written.octets, np.uint8))


class _PythonTexts:
    """The texts of rows that Python reads; they follow those of the kernel in `octets`."""

    def __init__(self, first_row: int) -> None:
        self._offset = first_row
        self.octets = bytearray()
        self.starts: list[list[int]] = []
        self.lengths: list[list[int]] = []
        self.prefixes: list[int] = []

    def add(self, name: str, properties: Properties) -> None:
        """Add the texts of a row, in the order in which the kernel writes them."""
        self.starts.append([0] * _TEXTS)
        self.lengths.append([NONE] * _TEXTS)
        found = (at for at, prefix in enumerate(PREFIXES) if name.startswith(prefix))
        self.prefixes.append(next(found, BARE))
        self._put(TEXT, properties.text)
        self._put(NAME, name)
        self._put(IDENTIFIER, properties.identifier)
        if properties.reply_to is not None:
            self._put(REPLY_TO, properties.reply_to)
            self._put(IDENTIFIER, properties.identifier)
        self._put(CONTENT_TYPE, properties.content_type)
        self._put(ERROR, properties.error)

    def _put(self, which: int, value: str | None) -> None:
        if value is None:
            return
        if which == IDENTIFIER:
            self.octets.append(_BETWEEN)
        encoded = value.encode()
        self.starts[-1][which] = self._offset + len(self.octets)
        self.lengths[-1][which] = len(encoded)
        self.octets += encoded


def key_of(key: tuple[bool, str, str | None]) -> bytes:
    """The name and identifier of an earlier request as `HeaderColumns.keys` has them."""
    _, name, identifier = key
    if identifier is None:
        return name.encode()
    return b"".join((name.encode(), bytes((_BETWEEN,)), identifier.encode()))
