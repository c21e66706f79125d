"""JSON in columns: compiled functions that are sure of ordinary values, and what strings stand for.

What comes out NONE is not wrong but doubtful, and for msgspec to judge: numbers that may be too
large, escapes that stand for no character. What is passed over msgspec reads, whole and in parts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.kernels import (
    INTS,
    OCTETS,
    OUT_INTS,
    OUT_OCTETS,
    OUT_TRUTHS,
    kernel,
    subroutine,
)
from crosswire.pipeline.decode.scanners.octets import octet_at, valid_utf8
from crosswire.pipeline.decode.text import Raw, copy_octets

__all__ = [
    "Base64",
    "Unescaped",
    "after_space",
    "follows",
    "number_end",
    "scalar_end",
    "string_end",
    "surely_base64",
]


# Eight octets each, alike.
_ONES: Final = np.uint64(0x0101010101010101)
_HIGHEST: Final = _ONES << np.uint64(7)
_QUOTES: Final = _ONES * np.uint64(34)
_SLASHES: Final = _ONES * np.uint64(92)
_SPACES: Final = _ONES * np.uint64(32)

_MOST_DIGITS: Final = 18
"""Of a number in all, so that it fits 64 bits; its power of ten has two."""
_UNFIT: Final = -1

_TRUE: Final = np.frombuffer(b"true", np.uint8)
_FALSE: Final = np.frombuffer(b"false", np.uint8)
_NULL: Final = np.frombuffer(b"null", np.uint8)

# The octet that an escape stands for, by its letter.
_PLAIN: Final = np.zeros(256, np.uint8)
_PLAIN[list(b'"\\/bfnrt')] = list(b'"\\/\b\f\n\r\t')

_SEXTETS: Final = np.full(256, _UNFIT, np.int64)
_SEXTETS[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")] = range(64)
_PAD: Final = 61


# ------------------------------------------------------------------------------------ passing over


@subroutine
def after_space(data: Bytes, at: int, end: int) -> int:
    # The compiled `in` is a call; where it counts it is spelled out.
    while at < end:
        octet = octet_at(data, at)
        if octet > 32 or not (octet == 32 or octet == 10 or octet == 13 or octet == 9):
            break
        at += 1
    return at


@subroutine
def _digit(octet: int) -> int:
    if 48 <= octet <= 57:
        return octet - 48
    octet |= 32
    return octet - 87 if 97 <= octet <= 102 else _UNFIT


@subroutine
def _unit(data: Bytes, at: int, end: int) -> int:
    """What stands as \\u and four digits at `at`."""
    if end - at < 6 or octet_at(data, at) != 92 or octet_at(data, at + 1) != 117:
        return _UNFIT
    unit = 0
    for index in range(at + 2, at + 6):
        digit = _digit(octet_at(data, index))
        if digit < 0:
            return _UNFIT
        unit = unit << 4 | digit
    return unit


@subroutine
def _escape_end(data: Bytes, at: int, end: int) -> int:
    """Behind the escape that begins at `at`; two of them that stand for one character are one."""
    if at + 1 < end and _PLAIN[octet_at(data, at + 1)] != 0:
        return at + 2
    unit = _unit(data, at, end)
    if unit < 0xD800 or unit > 0xDFFF:
        return at + 6 if unit >= 0 else NONE
    if unit < 0xDC00 and 0xDC00 <= _unit(data, at + 6, end) <= 0xDFFF:
        return at + 12
    return NONE


@subroutine
def _word(data: Bytes, at: int) -> np.uint64:
    """Eight octets; the compiler makes one load of it."""
    word = np.uint64(0)
    for index in range(8):
        word |= np.uint64(data[np.uint64(at + index)]) << np.uint64(8 * index)
    return word


@subroutine
def _has_special(word: np.uint64) -> bool:
    """Is one of the eight a quote, a backslash or a control character? Taking away more than an
    octet is worth leaves its highest bit set, which in text it is not."""
    quotes, slashes = word ^ _QUOTES, word ^ _SLASHES
    below = (quotes - _ONES) & ~quotes | (slashes - _ONES) & ~slashes | (word - _SPACES) & ~word
    return bool(below & _HIGHEST != 0)


@subroutine
def string_end(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """The closing quote of the string that is open at `at`, and whether it has escapes."""
    start, together, escaped = at, np.uint64(0), False
    while True:
        while at + 8 <= end:
            word = _word(data, at)
            if _has_special(word):
                break
            together |= word
            at += 8
        octet = 0
        while at < end:
            octet = octet_at(data, at)
            if octet < 32 or octet == 34 or octet == 92:
                break
            together |= np.uint64(octet)
            at += 1
        if at >= end or octet < 32:
            return NONE, escaped
        if octet == 34:
            break
        escaped = True
        at = _escape_end(data, at, end)
        if at < 0:
            return NONE, escaped
    if together & _HIGHEST != 0 and not valid_utf8(data, start, at):
        return NONE, escaped
    return at, escaped


@subroutine
def _digits_end(data: Bytes, at: int, end: int) -> int:
    while at < end and 48 <= octet_at(data, at) <= 57:
        at += 1
    return at


@subroutine
def number_end(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """Behind the number that begins at `at`, and whether it is a whole one."""
    if at < end and octet_at(data, at) == 45:
        at += 1
    start = at
    at = _digits_end(data, at, end)
    digits = at - start
    if digits == 0 or (digits > 1 and octet_at(data, start) == 48):
        return NONE, False
    whole = True
    if at < end and octet_at(data, at) == 46:
        start, whole = at + 1, False
        at = _digits_end(data, start, end)
        if at == start:
            return NONE, False
        digits += at - start
    if at < end and octet_at(data, at) | 32 == 101:
        at, whole = at + 1, False
        if at < end and octet_at(data, at) in (43, 45):
            at += 1
        start = at
        at = _digits_end(data, start, end)
        if not 0 < at - start <= 2:
            return NONE, False
    return at if digits <= _MOST_DIGITS else NONE, whole


@subroutine
def follows(data: Bytes, at: int, end: int, word: Bytes) -> bool:
    """Does the word stand at `at`?"""
    same, index = end - at >= len(word), 0
    while same and index < len(word):
        same = octet_at(data, at + index) == octet_at(word, index)
        index += 1
    return same


@subroutine
def scalar_end(data: Bytes, at: int, end: int) -> int:
    """Behind the value that begins at `at` and is neither string, object nor array."""
    first = octet_at(data, at)
    if first == 116 or first == 110:
        word = _TRUE if first == 116 else _NULL
        return at + 4 if follows(data, at, end, word) else NONE
    if first == 102:
        return at + 5 if follows(data, at, end, _FALSE) else NONE
    return number_end(data, at, end)[0]


# ---------------------------------------------------------------------------------------- strings


@subroutine
def _code_point(data: Bytes, at: int, end: int) -> int:
    """Of the character for which the escape at `at` stands."""
    plain = _PLAIN[octet_at(data, at + 1)]
    if plain != 0:
        return int(plain)
    unit = _unit(data, at, end)
    if unit < 0xD800 or unit > 0xDFFF:
        return unit
    return 0x10000 + ((unit - 0xD800) << 10) + _unit(data, at + 6, end) - 0xDC00


@subroutine
def _width(point: int) -> int:
    """In UTF-8."""
    return 1 + (point > 0x7F) + (point > 0x7FF) + (point > 0xFFFF)


@subroutine
def _write_point(point: int, out: Bytes, position: int) -> int:
    width = _width(point)
    for index in range(position + width - 1, position, -1):
        out[index] = 0x80 | point & 0x3F
        point >>= 6
    out[position] = point | (0xF00 >> width & 0xF0 if width > 1 else 0)
    return position + width


@subroutine
def _plain_end(data: Bytes, at: int, end: int) -> int:
    """Behind what stands for itself."""
    while at + 8 <= end and not _has_special(_word(data, at)):
        at += 8
    while at < end and octet_at(data, at) != 92:
        at += 1
    return at


@kernel(OCTETS, INTS, INTS, OUT_INTS)
def _measure_unescaped(octets: Bytes, starts: Numbers, lengths: Numbers, sizes: Numbers) -> None:
    for row in range(len(starts)):
        at = starts[row]
        end = at + lengths[row]
        while at < end:
            plain = _plain_end(octets, at, end)
            sizes[row] += plain - at
            at = plain
            if at < end:
                sizes[row] += _width(_code_point(octets, at, end))
                at = _escape_end(octets, at, end)


@kernel(OCTETS, INTS, INTS, OUT_OCTETS, OUT_INTS)
def _write_unescaped(
    octets: Bytes, starts: Numbers, lengths: Numbers, out: Bytes, at: Numbers
) -> None:
    for row in range(len(starts)):
        start, position = starts[row], at[row]
        end = start + lengths[row]
        while start < end:
            plain = _plain_end(octets, start, end) - start
            copy_octets(octets, start, out, position, plain)
            start, position = start + plain, position + plain
            if start < end:
                position = _write_point(_code_point(octets, start, end), out, position)
                start = _escape_end(octets, start, end)
        at[row] = position


class Unescaped(Raw):
    """What JSON strings stand for; given without their quotes, and sure to be right."""

    def measure(self, sizes: Numbers) -> None:
        _measure_unescaped(self._octets, self._starts, self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        _write_unescaped(self._octets, self._starts, self._lengths, out, at)


@subroutine
def _padding(data: Bytes, start: int, end: int) -> int:
    if start == end or octet_at(data, end - 1) != _PAD:
        return 0
    return 1 + (octet_at(data, end - 2) == _PAD)


@kernel(OCTETS, INTS, INTS, OUT_TRUTHS)
def _judge_base64(octets: Bytes, starts: Numbers, lengths: Numbers, sure: Flags) -> None:
    for row in range(len(starts)):
        start, length = starts[row], lengths[row]
        if length < 0 or length % 4:
            continue
        end = start + length - _padding(octets, start, start + length)
        sure[row] = True
        for index in range(start, end):
            if _SEXTETS[octets[index]] < 0:
                sure[row] = False
                break


def surely_base64(octets: Bytes, starts: Numbers, lengths: Numbers) -> Flags:
    """Whether texts are whole groups of four, with padding only at their end."""
    sure = np.zeros(len(starts), np.bool_)
    _judge_base64(octets, starts, lengths, sure)
    return sure


@kernel(OCTETS, INTS, INTS, OUT_INTS)
def _measure_base64(octets: Bytes, starts: Numbers, lengths: Numbers, sizes: Numbers) -> None:
    for row in range(len(starts)):
        if lengths[row] > 0:
            end = starts[row] + lengths[row]
            sizes[row] += lengths[row] // 4 * 3 - _padding(octets, starts[row], end)


@kernel(OCTETS, INTS, INTS, OUT_OCTETS, OUT_INTS)
def _write_base64(
    octets: Bytes, starts: Numbers, lengths: Numbers, out: Bytes, at: Numbers
) -> None:
    for row in range(len(starts)):
        if lengths[row] <= 0:
            continue
        start, end, position = starts[row], starts[row] + lengths[row], at[row]
        stop = position + lengths[row] // 4 * 3 - _padding(octets, start, end)
        for index in range(start, end, 4):
            group = 0
            for each in range(index, index + 4):
                group = group << 6 | max(_SEXTETS[octets[each]], 0)
            for shift in (16, 8, 0):
                if position < stop:
                    out[position] = group >> shift & 0xFF
                    position += 1
        at[row] = stop


class Base64(Raw):
    """What texts stand for that are `surely_base64`."""

    def measure(self, sizes: Numbers) -> None:
        _measure_base64(self._octets, self._starts, self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        _write_base64(self._octets, self._starts, self._lengths, out, at)
