"""What MicroMsg2's messages say before their payloads, all rows at once: where they go, properties
as JSON, and what those among them say that are known.

A kernel reads properties as `wire.micromsg2.values` does, as long as they are written as one writes
them. The others are read in Python: a number with zeros before it, a property that is there twice,
what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.errors import FrameError
from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
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
from crosswire.pipeline.decode.readings.micromsg2 import (
    PREFIXES,
    PartialMessage,
    Properties,
    describe_properties,
)
from crosswire.pipeline.decode.scanners.micromsg2 import DESTINATION, PROPERTIES
from crosswire.pipeline.decode.scanners.octets import octet_at, valid_utf8, valid_utf8_escaped
from crosswire.pipeline.decode.text import (
    Fixed,
    Raw,
    copy_octets,
    distinct,
    put_quoted,
    slices,
    text,
)
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

# The texts: what `Properties` has, in its order, and the destination's name.
TEXT, IDENTIFIER, REPLY_TO, CONTENT_TYPE, ERROR, NAME = range(6)
_TEXTS: Final = 6

BARE: Final = len(PREFIXES)
"""For a name that begins with no prefix."""

_BETWEEN: Final = 255
"""Stands between a name and an identifier: no text has it."""

_KNOWN: Final = (b"correlation-id", b"reply-to", b"content-type", b"error")
_KNOWN_OCTETS: Final = np.frombuffer(b"".join(_KNOWN), np.uint8).copy()
_KNOWN_ENDS: Final = np.cumsum([0] + [len(name) for name in _KNOWN])

_NOTHING: Final = b"{}"
_MOST: Final = 16
"""Properties of a message: among more, none is looked for twice."""

_MOST_WIDTH: Final = 8
_MOST_AROUND: Final = 4
"""How many octets one takes at most: six in JSON, where it is a control character, and itself,
twice in an identifier; and all together."""

_INTEGER_DIGITS: Final = 18
_REAL_DIGITS: Final = 15
_MOST_REAL_DIGITS: Final = 17
"""Digits that a double gives back as they were, whatever they are; and how many it can need."""

_DOUBTFUL_BYTES: Final = 20
"""A property takes at least so many whose number has digits between these."""

_SMALL_ZEROS: Final = 4
"""Zeros behind the point of a number that is written with an exponent."""

# What a value is, by its prefix: for Python to find out; a number, or one if a double gives back
# its digits; text behind the prefix; text.
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
def _find(data: Bytes, start: int, end: int, octet: int) -> int:
    """Where it is, or the end."""
    for index in range(start, end):
        if octet_at(data, index) == octet:
            return index
    return end


@subroutine
def _digits_end(data: Bytes, start: int, end: int) -> int:
    for index in range(start, end):
        if not 48 <= octet_at(data, index) <= 57:
            return index
    return end


@subroutine
def _zeros_end(data: Bytes, start: int, end: int) -> int:
    for index in range(start, end):
        if octet_at(data, index) != 48:
            return index
    return end


@subroutine
def _integer(data: Bytes, start: int, end: int) -> int:
    """What stands behind an N: a number as JSON has it, or what else it is."""
    signed = start < end and octet_at(data, start) in (43, 45)
    first = start + 1 if signed else start
    if first == end or _digits_end(data, first, end) < end:
        return _PLAIN
    if octet_at(data, start) == 43 or end - first > _INTEGER_DIGITS:
        return _ODD
    zero = octet_at(data, first) == 48
    return _ODD if zero and (signed or end - first > 1) else _NUMBER


@subroutine
def _real(data: Bytes, start: int, end: int) -> int:
    """What stands behind a D, likewise."""
    if start == end or not (45 <= octet_at(data, start) <= 57 or octet_at(data, start) == 43):
        return _PLAIN
    first = start + 1 if octet_at(data, start) == 45 else start
    point = _digits_end(data, first, end)
    if point == first or point >= end - 1 or octet_at(data, point) != 46:
        return _ODD
    digits = end - first - 1
    if _digits_end(data, point + 1, end) < end or digits > _MOST_REAL_DIGITS:
        return _ODD
    number = _NUMBER if digits <= _REAL_DIGITS else _DOUBTFUL
    whole_is_zero = octet_at(data, first) == 48
    if octet_at(data, point + 1) == 48 and point + 2 == end:
        return _ODD if whole_is_zero and point > first + 1 else number
    if octet_at(data, end - 1) == 48 or (whole_is_zero and point > first + 1):
        return _ODD
    is_small = whole_is_zero and _zeros_end(data, point + 1, end) > point + _SMALL_ZEROS
    return _ODD if is_small else number


@subroutine
def _kind(data: Bytes, start: int, end: int) -> int:
    prefix = octet_at(data, start) if start < end else 0
    kind = _PLAIN
    if prefix == 84:
        kind = _PREFIXED
    elif prefix == 78:
        kind = _integer(data, start + 1, end)
    elif prefix == 68:
        kind = _real(data, start + 1, end)
    if kind in (_PLAIN, _PREFIXED) and _find(data, start, end, 37) < end:
        return kind if valid_utf8_escaped(data, start, end) else _ODD
    return kind


@subroutine
def _put(data: Bytes, start: int, end: int, in_json: bool, out: Bytes, position: int) -> int:
    """A text without its escapes; gives the place behind it."""
    index = start
    while index < end:
        octet = octet_at(data, index)
        index += 1
        if octet == 37:
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
    out[position] = 34
    position = _put(data, start if kind == _PLAIN else start + 1, end, True, out, position + 1)
    out[position] = 34
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
    """Is it a name, and none of those that are there already?"""
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
    """Which of those whose value is told; NONE if none."""
    for index in range(len(_KNOWN_ENDS) - 1):
        begin, length = _KNOWN_ENDS[index], _KNOWN_ENDS[index + 1] - _KNOWN_ENDS[index]
        if length == end - start and _same(data, start, _KNOWN_OCTETS, begin, length):
            return index + IDENTIFIER
    return NONE


@subroutine
def _doubt(doubtful: Numbers, row: int, start: int, end: int) -> None:
    """The first one counts them."""
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
    """Write the JSON, and note where the known ones have their values; gives the place behind it,
    or _ODD."""
    if not valid_utf8(data, start, end):
        return _ODD
    at, count = start, 0
    while at <= end:
        stop = _find(data, at, end, 59)
        colon = _find(data, at, stop, 58)
        if colon == stop or count == _MOST or not _is_new(data, at, colon, met, count):
            return _ODD
        kind = _kind(data, colon + 1, stop)
        if kind == _ODD:
            return _ODD
        met[count, 0], met[count, 1] = at, colon - at
        out[position], out[position + 1] = 44 if count else 123, 34
        position = _put(data, at, colon, False, out, position + 2)
        out[position], out[position + 1] = 34, 58
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
    out[position] = 125
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
    """What stands behind a name: values of known properties. Gives the place behind them."""
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
    """Frames are far apart in memory: what is asked for together comes together."""
    touched = 0
    for index in range(begin, end):
        touched += octet_at(data, starts[index])
    return touched


_AHEAD: Final = 64


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
    """What is odd keeps NONE as the length of its texts. Gives how much is written."""
    met, known = np.empty((_MOST, 2), np.int64), np.empty((_TEXTS, 2), np.int64)
    position = 2
    for row in range(len(names)):
        if row % _AHEAD == 0:
            met[0, 0] = _touch(data, names, row, min(row + _AHEAD, len(names)))
        size = name_sizes[row]
        if size < 0:
            continue
        start, end = properties[row], properties[row] + property_sizes[row]
        if start < end and octet_at(data, end - 1) == 59:
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
    """What rows have to say, and behind the last, what messages have that were `begun` before.

    The texts are slices of `octets`, one of NONE bytes where there is none: `starts` and `lengths`
    by what it is, and by row. Behind a NAME and a REPLY_TO is the IDENTIFIER, if there is one: so
    both together are a slice too, which is the same for a question and its answer. `prefixes` say
    what names begin with. `wrong` are rows whose properties are none. Of a handshake there is a
    NAME alone: who sent it.
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
        """What the chosen ones have of those rows."""
        lengths = np.where(chosen, self.lengths[which][rows], NONE)
        return Raw(self.octets, self.starts[which][rows], lengths)

    def column(
        self, which: int, rows: Numbers, chosen: Flags, otherwise: str | None = None
    ) -> pa.Array:
        """The same; null, or something else, where there is none."""
        lengths = np.where(chosen, self.lengths[which][rows], NONE)
        there = lengths != NONE
        if otherwise is None and not there.any():
            return null_column(len(rows))
        part = Raw(self.octets, self.starts[which][rows], lengths)
        if otherwise is None:
            return text(len(rows), part, valid=there)
        return text(len(rows), part, Fixed(otherwise, chosen & ~there), valid=chosen)

    def keys(self, which: int, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Starts and lengths of names with identifiers; see `key_of`."""
        identifiers = self.lengths[IDENTIFIER][rows]
        return self.starts[which][rows], self.lengths[which][rows] + identifiers + 1

    def _resolve(self, rows: Numbers, starts: Numbers, lengths: Numbers) -> None:
        """Numbers that would not come back as they are written make a row odd."""
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
    """The same texts, from Python: they stand behind those that there are."""

    def __init__(self, first_row: int) -> None:
        self._offset = first_row
        self.octets = bytearray()
        self.starts: list[list[int]] = []
        self.lengths: list[list[int]] = []
        self.prefixes: list[int] = []

    def add(self, name: str, properties: Properties) -> None:
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
    """Name and identifier of a question as `HeaderColumns.keys` has them."""
    _, name, identifier = key
    if identifier is None:
        return name.encode()
    return b"".join((name.encode(), bytes((_BETWEEN,)), identifier.encode()))
