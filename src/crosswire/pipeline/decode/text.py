"""Arrow columns of text, written for all rows at once: no Python object for any row.

    text(count, Coded(codes, words), Quoted(octets, starts, sizes), …)

gives a column in which each row is the concatenation of its parts. There are two passes over the
rows: in the first, each part adds its sizes, from which the offsets and the size of the buffer
follow; in the second, each part writes. So the buffer is allocated once, and no text is copied
twice.

`distinct` gives equal texts the same number, so that what takes Python to find out is found out
once for all rows that have them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.ascii_codes import BACKSLASH, LOWER_U, QUOTE, SPACE, ZERO
from crosswire.pipeline.decode.kernels import (
    INT,
    INTS,
    NATURAL,
    NATURALS,
    OCTETS,
    OUT_INTS,
    OUT_NATURALS,
    OUT_OCTETS,
    TRUTHS,
    kernel,
    subroutine,
)

__all__ = [
    "Coded",
    "Decimal",
    "Fixed",
    "Flags",
    "Hexadecimal",
    "Quoted",
    "Raw",
    "TextPart",
    "Vocabulary",
    "binary",
    "by_code",
    "copy_octets",
    "distinct",
    "hashes",
    "json_parts",
    "octets_of",
    "put_quoted",
    "slices",
    "text",
    "words",
]

Flags = NDArray[np.bool_]

_MOST_BYTES: Final = (1 << 31) - 1
"""Arrow's offsets in a text column have 32 bits."""


@subroutine
def copy_octets(octets: Bytes, start: int, out: Bytes, position: int, length: int) -> None:
    """Copy octets[start:start + length] to out[position:]. With unsigned indexes, which can't count
    from the end, the compiler copies with vector instructions."""
    source, target = np.uint64(start), np.uint64(position)
    for index in range(np.uint64(length)):
        out[target + index] = octets[source + index]


# By octet: how many octets it takes in a JSON string, and the letter after the backslash if it is
# two.
_LETTER_WIDTH: Final = 2
_WIDTHS: Final = np.ones(256, np.int64)
_WIDTHS[:SPACE] = len(r"\u0000")
_LETTERS: Final = np.zeros(256, np.uint8)
for _octet, _letter in zip(b'"\\\b\f\n\r\t', b'"\\bfnrt', strict=True):
    _WIDTHS[_octet] = _LETTER_WIDTH
    _LETTERS[_octet] = _letter
_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8).copy()
# As octets: compared with a wider number, an octet would be widened first.
_SPACE, _QUOTE, _BACKSLASH = np.array([SPACE, QUOTE, BACKSLASH], np.uint8)


@subroutine
def _is_plain(octets: Bytes, start: int, length: int) -> bool:
    """Whether none of these octets is escaped in a JSON string. Without a branch, and with numbers
    of the octets' size, the compiler uses vector instructions."""
    source, plain = np.uint64(start), True
    for index in range(np.uint64(length)):
        octet = octets[source + index]
        plain &= (octet >= _SPACE) & (octet != _QUOTE) & (octet != _BACKSLASH)
    return plain


# ------------------------------------------------------------------------------------------- parts


class TextPart(ABC):
    """A part of the texts of rows."""

    @abstractmethod
    def measure(self, sizes: Numbers) -> None:
        """Add the number of its octets to each row's size."""

    @abstractmethod
    def write(self, out: Bytes, at: Numbers) -> None:
        """Write its octets of each row to out[at[row]:], and add their number to at[row]."""


@kernel(INTS, INTS, OUT_INTS)
def _measure_coded(codes: Numbers, lengths: Numbers, sizes: Numbers) -> None:
    for row in range(len(codes)):
        if codes[row] >= 0:
            sizes[row] += lengths[codes[row]]


@kernel(INTS, INTS, OCTETS, OUT_OCTETS, OUT_INTS)
def _write_coded(codes: Numbers, ends: Numbers, texts: Bytes, out: Bytes, at: Numbers) -> None:
    for row in range(len(codes)):
        code = codes[row]
        if code >= 0:
            start = ends[code - 1] if code else 0
            copy_octets(texts, start, out, at[row], ends[code] - start)
            at[row] += ends[code] - start


class Coded(TextPart):
    """One of some words by its code; empty where the code is NONE."""

    def __init__(self, codes: Numbers, words: Sequence[str]) -> None:
        self._codes = codes
        encoded = [word.encode() for word in words]
        self._lengths = np.array([len(word) for word in encoded], np.int64)
        self._texts = np.frombuffer(b"".join(encoded), np.uint8)

    def measure(self, sizes: Numbers) -> None:
        """Add the length of each row's word."""
        _measure_coded(self._codes, self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Copy each row's word."""
        _write_coded(self._codes, np.cumsum(self._lengths), self._texts, out, at)


class Fixed(Coded):
    """The same word in the rows that are chosen."""

    def __init__(self, word: str, chosen: Flags) -> None:
        super().__init__(chosen.astype(np.int64) - 1, [word])


@kernel(INTS, OUT_INTS)
def _measure_raw(lengths: Numbers, sizes: Numbers) -> None:
    for row in range(len(lengths)):
        if lengths[row] > 0:
            sizes[row] += lengths[row]


@kernel(OCTETS, INTS, INTS, OUT_OCTETS, OUT_INTS)
def _write_raw(octets: Bytes, starts: Numbers, lengths: Numbers, out: Bytes, at: Numbers) -> None:
    for row in range(len(starts)):
        length = lengths[row]
        if length > 0:
            copy_octets(octets, starts[row], out, at[row], length)
            at[row] += length


class Raw(TextPart):
    """Slices of `octets`, unchanged, which must be UTF-8; empty where the length is NONE."""

    def __init__(self, octets: Bytes, starts: Numbers, lengths: Numbers) -> None:
        self._octets, self._starts, self._lengths = octets, starts, lengths

    def measure(self, sizes: Numbers) -> None:
        """Add the lengths that are not NONE."""
        _measure_raw(self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Copy the slices."""
        _write_raw(self._octets, self._starts, self._lengths, out, at)


@kernel(OCTETS, INTS, INTS, OUT_INTS)
def _measure_quoted(octets: Bytes, starts: Numbers, lengths: Numbers, sizes: Numbers) -> None:
    for row in range(len(starts)):
        if lengths[row] >= 0:
            size = 2 + lengths[row]
            if not _is_plain(octets, starts[row], lengths[row]):
                for index in range(starts[row], starts[row] + lengths[row]):
                    size += _WIDTHS[octets[index]] - 1
            sizes[row] += size


@subroutine
def put_quoted(octet: int, out: Bytes, position: int) -> int:
    """Write an octet as it is in a JSON string; returns the position after it."""
    width = _WIDTHS[octet]
    if width == 1:
        out[position] = octet
        return position + 1
    out[position] = BACKSLASH
    if width == _LETTER_WIDTH:
        out[position + 1] = _LETTERS[octet]
    else:
        out[position + 1] = LOWER_U
        out[position + 2] = out[position + 3] = ZERO
        out[position + 4] = _DIGITS[octet >> 4]
        out[position + 5] = _DIGITS[octet & 15]
    return position + int(width)


@kernel(OCTETS, INTS, INTS, OUT_OCTETS, OUT_INTS)
def _write_quoted(
    octets: Bytes, starts: Numbers, lengths: Numbers, out: Bytes, at: Numbers
) -> None:
    for row in range(len(starts)):
        start, length = starts[row], lengths[row]
        if length < 0:
            continue
        position = at[row]
        out[position] = QUOTE
        position += 1
        if _is_plain(octets, start, length):
            copy_octets(octets, start, out, position, length)
            position, length = position + length, 0
        for index in range(start, start + length):
            position = put_quoted(octets[index], out, position)
        out[position] = QUOTE
        at[row] = position + 1


class Quoted(Raw):
    """The same slices as JSON strings, with their quotes."""

    def measure(self, sizes: Numbers) -> None:
        """Add the lengths with quotes and escapes."""
        _measure_quoted(self._octets, self._starts, self._lengths, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Copy the slices that need no escape as a whole, the others octet by octet."""
        _write_quoted(self._octets, self._starts, self._lengths, out, at)


@kernel(OCTETS, INTS, INTS, OUT_OCTETS, OUT_INTS)
def _write_hexadecimal(
    octets: Bytes, starts: Numbers, lengths: Numbers, out: Bytes, at: Numbers
) -> None:
    for row in range(len(starts)):
        position = at[row]
        for index in range(lengths[row]):
            octet = octets[starts[row] + index]
            out[position + 2 * index] = _DIGITS[octet >> 4]
            out[position + 2 * index + 1] = _DIGITS[octet & 15]
        at[row] = position + 2 * max(lengths[row], 0)


class Hexadecimal(Raw):
    """Slices of any octets, two hexadecimal digits each."""

    def measure(self, sizes: Numbers) -> None:
        """Add twice the lengths."""
        sizes += 2 * np.maximum(self._lengths, 0)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Write two digits for each octet."""
        _write_hexadecimal(self._octets, self._starts, self._lengths, out, at)


@kernel(NATURALS, TRUTHS, OUT_INTS)
def _measure_decimal(values: NDArray[np.uint64], chosen: Flags, sizes: Numbers) -> None:
    ten = np.uint64(10)
    for row in range(len(values)):
        if chosen[row]:
            value, size = values[row], 1
            while value >= ten:
                value //= ten
                size += 1
            sizes[row] += size


@kernel(NATURALS, TRUTHS, OUT_OCTETS, OUT_INTS)
def _write_decimal(values: NDArray[np.uint64], chosen: Flags, out: Bytes, at: Numbers) -> None:
    ten = np.uint64(10)
    for row in range(len(values)):
        if not chosen[row]:
            continue
        value, size = values[row], 1
        while value >= ten:
            value //= ten
            size += 1
        value = values[row]
        for index in range(at[row] + size - 1, at[row] - 1, -1):
            out[index] = _DIGITS[value % ten]
            value //= ten
        at[row] += size


class Decimal(TextPart):
    """Numbers, none of them negative, in the rows that are chosen."""

    def __init__(self, values: NDArray[Any], chosen: Flags) -> None:
        self._values, self._chosen = values.astype(np.uint64, copy=False), chosen

    def measure(self, sizes: Numbers) -> None:
        """Add the numbers of digits."""
        _measure_decimal(self._values, self._chosen, sizes)

    def write(self, out: Bytes, at: Numbers) -> None:
        """Write digits, the last one first."""
        _write_decimal(self._values, self._chosen, out, at)


def json_parts(column: pa.Array) -> list[TextPart]:
    """A column of texts or of numbers, none of them negative, as JSON values."""
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    null = Fixed("null", is_null)
    if pa.types.is_integer(column.type):
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        return [null, Decimal(values, ~is_null)]
    octets, starts, lengths = octets_of(column)
    return [null, Quoted(octets, starts, np.where(is_null, NONE, lengths))]


def octets_of(column: pa.Array) -> tuple[Bytes, Numbers, Numbers]:
    """The octets of a column of texts, and the start and length of each text in them."""
    _, offsets, values = column.buffers()
    cuts = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
    octets = np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8)
    return octets, cuts[:-1], cuts[1:] - cuts[:-1]


# ----------------------------------------------------------------------------------------- columns


def text(count: int, *parts: TextPart, valid: Flags | None = None) -> pa.Array:
    """A column of the concatenated parts; null where it is not `valid`."""
    offsets, out = _laid_out(count, parts)
    return pa.StringArray.from_buffers(
        count, pa.py_buffer(offsets), pa.py_buffer(out), *_bitmap(valid)
    )


def words(codes: Numbers, some: Sequence[str]) -> pa.Array:
    """A column of words; null where the code is NONE."""
    return text(len(codes), Coded(codes, some), valid=codes >= 0)


def slices(octets: Bytes, starts: Numbers, lengths: Numbers) -> pa.Array:
    """A column of octets; null where the length is NONE."""
    return binary(len(starts), Raw(octets, starts, lengths), valid=lengths >= 0)


def binary(count: int, *parts: TextPart, valid: Flags | None = None) -> pa.Array:
    """The same as `text`, of parts that need not be UTF-8."""
    offsets, out = _laid_out(count, parts)
    buffers = [*_bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _laid_out(count: int, parts: Sequence[TextPart]) -> tuple[NDArray[np.int32], Bytes]:
    sizes = np.zeros(count, np.int64)
    for part in parts:
        part.measure(sizes)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if count else 0
    if total > _MOST_BYTES:
        raise OverflowError(f"a column of {total} bytes is more than Arrow can hold in one")
    offsets = np.zeros(count + 1, np.int32)
    offsets[1:] = ends
    out = np.empty(total, np.uint8)
    at = ends - sizes
    for part in parts:
        part.write(out, at)
    return offsets, out


def _bitmap(valid: Flags | None) -> tuple[pa.Buffer | None]:
    if valid is None or valid.all():
        return (None,)
    return (pa.py_buffer(np.packbits(valid, bitorder="little")),)


# ---------------------------------------------------------------------------------------- distinct


@kernel(OCTETS, INTS, INTS, OUT_NATURALS)
def _hash(octets: Bytes, starts: Numbers, lengths: Numbers, out: NDArray[np.uint64]) -> None:
    prime = np.uint64(0x100000001B3)
    for row in range(len(starts)):
        key = np.uint64(0xCBF29CE484222325)
        for index in range(starts[row], starts[row] + lengths[row]):
            key = (key ^ np.uint64(octets[index])) * prime
        out[row] = key ^ key >> np.uint64(29)


def hashes(column: pa.Array) -> NDArray[np.uint64]:
    """A hash of each text of a column (FNV-1a, mixed once more), the same in every process."""
    out = np.empty(len(column), np.uint64)
    _hash(*octets_of(column), out)
    return out


T = TypeVar("T", bound=Hashable)


class Vocabulary(Generic[T]):
    """Codes of values, in the order in which they first occur."""

    def __init__(self) -> None:
        self._codes: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def __iter__(self) -> Iterator[T]:
        return iter(self._codes)

    def code(self, value: T | None) -> int:
        """The code of a value, a new one if it has none; NONE for None."""
        return NONE if value is None else self._codes.setdefault(value, len(self._codes))

    def codes(self, values: Iterable[T | None]) -> Numbers:
        """The code of each value."""
        return np.array([self.code(value) for value in values], np.int64)


@subroutine
def _key_of(octets: Bytes, start: int, length: int, key: np.uint64) -> np.uint64:
    """A hash of octets, four at a time, starting from `key`, which is secret.

    Four and not eight: a peer that chooses the octets controls only half of the key, and can't undo
    with the next four what the multiplication has moved into the other half.
    """
    prime, half = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
    at, end = np.uint64(start), np.uint64(start + length)
    key = (key ^ np.uint64(length)) * prime
    while at < end:
        word = np.uint64(0)
        if at + np.uint64(4) <= end:
            for index in range(np.uint64(4)):
                word |= np.uint64(octets[at + index]) << np.uint64(8) * index
        else:
            for index in range(end - at):
                word |= np.uint64(octets[at + index]) << np.uint64(8) * index
        key = ((key ^ key >> half) ^ word) * prime
        at += np.uint64(4)
    key ^= key >> half
    return key * prime


@subroutine
def _are_same(octets: Bytes, one: int, other: int, length: int) -> bool:
    """Whether two slices are equal. Compared to the end even if they differ: without a branch the
    compiler uses vector instructions."""
    this, that, differs = np.uint64(one), np.uint64(other), np.uint8(0)
    for index in range(np.uint64(length)):
        differs |= octets[this + index] ^ octets[that + index]
    return bool(differs == 0)


@kernel(OCTETS, INTS, INTS, INTS, NATURAL, OUT_INTS, OUT_INTS, returns=INT)
def _number(
    octets: Bytes,
    starts: Numbers,
    lengths: Numbers,
    tags: Numbers,
    seed: np.uint64,
    codes: Numbers,
    firsts: Numbers,
) -> int:
    """A hash table with open addressing, at most half full; a slot holds a code.

    Returns the number of codes. The full texts are compared, not only their hashes.
    """
    room = 16
    while room < 2 * len(starts):
        room *= 2
    slots = np.full(room, NONE, np.int64)
    hashes = np.empty(len(starts), np.uint64)
    mask = np.uint64(room - 1)
    found = 0
    for row in range(len(starts)):
        start, length = starts[row], lengths[row]
        if length < 0:
            codes[row] = NONE
            continue
        key = _key_of(octets, start, length, seed ^ np.uint64(tags[row]))
        key ^= key >> np.uint64(29)
        position = key & mask
        while slots[position] >= 0:
            code = slots[position]
            first = firsts[code]
            if (
                hashes[code] == key
                and tags[first] == tags[row]
                and lengths[first] == length
                and _are_same(octets, starts[first], start, length)
            ):
                break
            position = (position + np.uint64(1)) & mask
        if slots[position] < 0:
            slots[position] = found
            hashes[found] = key
            firsts[found] = row
            found += 1
        codes[row] = slots[position]
    return found


_SEED: Final = np.random.default_rng().integers(1 << 63, dtype=np.uint64)
"""Of this process: no peer can choose names that all fall on the same slot."""


def by_code(codes: Numbers, values: Sequence[Any] | Numbers, otherwise: Any) -> NDArray[Any]:
    """The value of each code; `otherwise` for NONE, which as an index is the last element."""
    return np.append(np.asarray(values, type(otherwise)), otherwise)[codes]


def distinct(
    octets: Bytes, starts: Numbers, lengths: Numbers, tags: Numbers | None = None
) -> tuple[Numbers, Numbers]:
    """Codes of the slices, and for each code the first row that has it.

    Rows have the same code if their octets and their tags are the same; NONE if the length is.
    """
    if tags is None:
        tags = np.zeros(len(starts), np.int64)
    codes, firsts = np.empty(len(starts), np.int64), np.empty(len(starts), np.int64)
    found = _number(octets, starts, lengths, tags, _SEED, codes, firsts)
    return codes, firsts[:found]
