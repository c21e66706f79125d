"""JSON, compiled: where usual values end, and the texts that strings and base64 stand for.

A result of NONE means that a value is unusual, not that it is wrong: numbers that may be too large,
escapes that stand for no character. msgspec then decides. What these functions accept, msgspec
accepts too, as a whole and in parts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.ascii_codes import (
    BACKSLASH,
    EQUALS,
    HYPHEN,
    LINE_FEED,
    LOWER,
    LOWER_E,
    LOWER_F,
    LOWER_N,
    LOWER_T,
    LOWER_U,
    NINE,
    PLUS,
    POINT,
    QUOTE,
    RETURN,
    SPACE,
    TAB,
    ZERO,
)
from crosswire.pipeline.decode.kernels import (
    INTS,
    OCTETS,
    OUT_INTS,
    OUT_OCTETS,
    OUT_TRUTHS,
    kernel,
    subroutine,
)
from crosswire.pipeline.decode.scanners.octets import hexadecimal_digit, octet_at, valid_utf8
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


# The same octet eight times.
_ONES: Final = np.uint64(0x0101010101010101)
_HIGHEST: Final = _ONES << np.uint64(7)
_QUOTES: Final = _ONES * np.uint64(QUOTE)
_SLASHES: Final = _ONES * np.uint64(BACKSLASH)
_SPACES: Final = _ONES * np.uint64(SPACE)

_MOST_DIGITS: Final = 18
"""Of a number, so that it fits into 64 bits; its exponent may have two more."""
_UNFIT: Final = -1

_UNIT_BYTES: Final = len(r"\u0000")
_FIRST_HIGH, _FIRST_LOW, _LAST_LOW = 0xD800, 0xDC00, 0xDFFF
"""Surrogates, of which a high and a low one stand for one character."""

_TRUE: Final = np.frombuffer(b"true", np.uint8)
_FALSE: Final = np.frombuffer(b"false", np.uint8)
_NULL: Final = np.frombuffer(b"null", np.uint8)

# The octet that an escape stands for, by its letter.
_PLAIN: Final = np.zeros(256, np.uint8)
_PLAIN[list(b'"\\/bfnrt')] = list(b'"\\/\b\f\n\r\t')

_SEXTETS: Final = np.full(256, _UNFIT, np.int64)
_SEXTETS[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")] = range(64)
_PAD: Final = EQUALS


# ------------------------------------------------------------------------------------ passing over


@subroutine
def after_space(data: Bytes, at: int, end: int) -> int:
    """The position of the first octet that is no space; `end` if there is none."""
    # Compiled, `in` is a call: too slow here.
    while at < end:
        octet = octet_at(data, at)
        if octet > SPACE or not (
            octet == SPACE or octet == LINE_FEED or octet == RETURN or octet == TAB
        ):
            break
        at += 1
    return at


@subroutine
def _unit(data: Bytes, at: int, end: int) -> int:
    """The number in \\u and four digits at `at`; _UNFIT if it is something else."""
    if (
        end - at < _UNIT_BYTES
        or octet_at(data, at) != BACKSLASH
        or octet_at(data, at + 1) != LOWER_U
    ):
        return _UNFIT
    unit = 0
    for index in range(at + 2, at + _UNIT_BYTES):
        digit = hexadecimal_digit(octet_at(data, index))
        if digit < 0:
            return _UNFIT
        unit = unit << 4 | digit
    return unit


@subroutine
def _escape_end(data: Bytes, at: int, end: int) -> int:
    """The position after the escape at `at`; the two escapes of a surrogate pair are taken
    together. NONE for half a pair, which stands for no character."""
    if at + 1 < end and _PLAIN[octet_at(data, at + 1)] != 0:
        return at + 2
    unit = _unit(data, at, end)
    if unit < _FIRST_HIGH or unit > _LAST_LOW:
        return at + _UNIT_BYTES if unit >= 0 else NONE
    if unit < _FIRST_LOW and _FIRST_LOW <= _unit(data, at + _UNIT_BYTES, end) <= _LAST_LOW:
        return at + 2 * _UNIT_BYTES
    return NONE


@subroutine
def _word(data: Bytes, at: int) -> np.uint64:
    """Eight octets as a number; the compiler makes one load of it."""
    word = np.uint64(0)
    for index in range(8):
        word |= np.uint64(data[np.uint64(at + index)]) << np.uint64(8 * index)
    return word


@subroutine
def _has_special(word: np.uint64) -> bool:
    """Whether one of the eight octets is a quote, a backslash or a control character.

    An octet x is below n, up to 128, if x - n sets its highest bit and x has not set it. A quote or
    backslash is below 1 after the exclusive or. A borrow can only make octets above a match look
    like one, which changes nothing.
    """
    quotes, slashes = word ^ _QUOTES, word ^ _SLASHES
    below = (quotes - _ONES) & ~quotes | (slashes - _ONES) & ~slashes | (word - _SPACES) & ~word
    return bool(below & _HIGHEST != 0)


@subroutine
def string_end(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """The position of the closing quote of a string whose first octet is at `at`, and whether the
    string has escapes. NONE if it is not closed, or not valid.

    Eight octets at a time up to the next special one, then one by one.
    """
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
            if octet < SPACE or octet == QUOTE or octet == BACKSLASH:
                break
            together |= np.uint64(octet)
            at += 1
        if at >= end or octet < SPACE:
            return NONE, escaped
        if octet == QUOTE:
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
    while at < end and ZERO <= octet_at(data, at) <= NINE:
        at += 1
    return at


@subroutine
def number_end(data: Bytes, at: int, end: int) -> tuple[int, bool]:
    """The position after a number, NONE if it is unusual; and whether it is an integer."""
    if at < end and octet_at(data, at) == HYPHEN:
        at += 1
    start = at
    at = _digits_end(data, at, end)
    digits = at - start
    if digits == 0 or (digits > 1 and octet_at(data, start) == ZERO):
        return NONE, False
    whole = True
    if at < end and octet_at(data, at) == POINT:
        start, whole = at + 1, False
        at = _digits_end(data, start, end)
        if at == start:
            return NONE, False
        digits += at - start
    if at < end and octet_at(data, at) | LOWER == LOWER_E:
        at, whole = at + 1, False
        if at < end and octet_at(data, at) in (PLUS, HYPHEN):
            at += 1
        start = at
        at = _digits_end(data, start, end)
        if not 0 < at - start <= 2:
            return NONE, False
    return at if digits <= _MOST_DIGITS else NONE, whole


@subroutine
def follows(data: Bytes, at: int, end: int, word: Bytes) -> bool:
    """Whether the word is at `at`."""
    same, index = end - at >= len(word), 0
    while same and index < len(word):
        same = octet_at(data, at + index) == octet_at(word, index)
        index += 1
    return same


@subroutine
def scalar_end(data: Bytes, at: int, end: int) -> int:
    """The position after the value at `at`, which is no string, object or array; NONE if it is
    unusual."""
    first = octet_at(data, at)
    if first == LOWER_T or first == LOWER_N:
        word = _TRUE if first == LOWER_T else _NULL
        return at + len(word) if follows(data, at, end, word) else NONE
    if first == LOWER_F:
        return at + len(_FALSE) if follows(data, at, end, _FALSE) else NONE
    return number_end(data, at, end)[0]


# ---------------------------------------------------------------------------------------- strings


@subroutine
def _code_point(data: Bytes, at: int, end: int) -> int:
    """The code point of the character that the escape at `at` stands for."""
    plain = _PLAIN[octet_at(data, at + 1)]
    if plain != 0:
        return int(plain)
    unit = _unit(data, at, end)
    if unit < _FIRST_HIGH or unit > _LAST_LOW:
        return unit
    low = _unit(data, at + _UNIT_BYTES, end) - _FIRST_LOW
    return 0x10000 + ((unit - _FIRST_HIGH) << 10) + low


@subroutine
def _width(point: int) -> int:
    """The number of octets that a code point takes in UTF-8."""
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
    """The position of the next backslash; `end` if there is none."""
    while at + 8 <= end and not _has_special(_word(data, at)):
        at += 8
    while at < end and octet_at(data, at) != BACKSLASH:
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
    """The texts that JSON strings stand for: slices without quotes that `string_end` accepted."""

    def measure(self, sizes: Numbers) -> None:
        """Add the lengths that the texts have in UTF-8."""
        _measure_unescaped(self._octets, self._starts, self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Copy what is not escaped, and write the characters of escapes."""
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
    """Whether texts are whole groups of four digits, with padding only at their end."""
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
    """The octets that texts stand for which are `surely_base64`."""

    def measure(self, sizes: Numbers) -> None:
        """Add three octets for four digits, without padding."""
        _measure_base64(self._octets, self._starts, self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Write three octets for four digits."""
        _write_base64(self._octets, self._starts, self._lengths, out, at)
