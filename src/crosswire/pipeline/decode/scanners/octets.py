"""Compiled functions that read numbers and check text in captured bytes."""

from __future__ import annotations

import numpy as np

from crosswire.pipeline.decode.arrays import Bytes
from crosswire.pipeline.decode.ascii_codes import (
    LOWER,
    LOWER_A,
    LOWER_F,
    NINE,
    NOT_ASCII,
    PERCENT,
    ZERO,
)
from crosswire.pipeline.decode.kernels import subroutine

__all__ = [
    "big_endian",
    "find_octet",
    "hexadecimal_digit",
    "little_endian",
    "octet_at",
    "valid_utf8",
    "valid_utf8_escaped",
]


@subroutine
def octet_at(data: Bytes, at: int) -> int:
    """The octet as a signed number, since numba makes a float of a signed and an unsigned one.

    Its index is unsigned: a signed one could count from the end, as in Python, and the compiled
    code would compare it with 0 at each access.
    """
    return int(np.int64(data[np.uint64(at)]))


@subroutine
def big_endian(data: Bytes, at: int, size: int) -> int:
    """A big-endian number of up to 8 bytes. One of 8 bytes gives the same 64 bits, as a signed
    number: from 2⁶³ on it is negative, which the callers check where it is a length."""
    number = 0
    for index in range(at, at + size):
        number = number << 8 | octet_at(data, index)
    return number


@subroutine
def little_endian(data: Bytes, at: int, size: int) -> int:
    """The same, little-endian."""
    number = 0
    for index in range(at + size - 1, at - 1, -1):
        number = number << 8 | octet_at(data, index)
    return number


@subroutine
def find_octet(data: Bytes, start: int, end: int, octet: int) -> int:
    """The first position of an octet in data[start:end]; `end` if it is not there."""
    for index in range(start, end):
        if octet_at(data, index) == octet:
            return index
    return end


@subroutine
def hexadecimal_digit(octet: int) -> int:
    """The value of a digit in either case; negative for any other character."""
    if ZERO <= octet <= NINE:
        return octet - ZERO
    octet |= LOWER
    return octet - LOWER_A + 10 if LOWER_A <= octet <= LOWER_F else -1


@subroutine
def _utf8_state_after(state: int, octet: int) -> int:
    """A state machine for UTF-8, an octet at a time: 0 between characters, -1 for what is not
    UTF-8. In between: how many octets are missing, and in the next two bytes of the number the
    least and the greatest that the next octet may be.

    The bounds of the second octet exclude overlong forms (E0, F0), surrogates (ED) and what is
    above U+10FFFF (F4); C0, C1 and F5 to FF begin no character.
    """
    if state == 0:
        if octet < NOT_ASCII:
            return 0
        if 0xC2 <= octet <= 0xDF:
            return 1 | 0x80 << 8 | 0xBF << 16
        if 0xE0 <= octet <= 0xEF:
            low = 0xA0 if octet == 0xE0 else 0x80
            high = 0x9F if octet == 0xED else 0xBF
            return 2 | low << 8 | high << 16
        if 0xF0 <= octet <= 0xF4:
            low = 0x90 if octet == 0xF0 else 0x80
            high = 0x8F if octet == 0xF4 else 0xBF
            return 3 | low << 8 | high << 16
        return -1
    if octet < (state >> 8 & 0xFF) or octet > state >> 16:
        return -1
    left = (state & 0xFF) - 1
    return left | 0x80 << 8 | 0xBF << 16 if left else 0


@subroutine
def valid_utf8(data: Bytes, start: int, end: int) -> bool:
    """Whether `bytes.decode` accepts data[start:end].

    Nearly all text is ASCII. The first loop finds that out without a branch and with indexes that
    can't be negative, so that the compiler turns it into vector instructions.
    """
    together = np.uint8(0)
    for index in range(np.uint64(start), np.uint64(end)):
        together |= data[index]
    if together < NOT_ASCII:
        return True
    state = 0
    for index in range(start, end):
        state = _utf8_state_after(state, octet_at(data, index))
        if state < 0:
            return False
    return state == 0


@subroutine
def valid_utf8_escaped(data: Bytes, start: int, end: int) -> bool:
    """Whether the % escapes of a text, which is known to be UTF-8, are whole and stand for UTF-8.

    An escaped octet may be a part of a character whose other octets are not escaped: the text is
    checked as a whole.
    """
    state = 0
    index = start
    while index < end:
        octet = octet_at(data, index)
        index += 1
        if octet == PERCENT:
            if index + 2 > end:
                return False
            high = hexadecimal_digit(octet_at(data, index))
            low = hexadecimal_digit(octet_at(data, index + 1))
            if high < 0 or low < 0:
                return False
            octet = high << 4 | low
            index += 2
        state = _utf8_state_after(state, octet)
        if state < 0:
            return False
    return state == 0
