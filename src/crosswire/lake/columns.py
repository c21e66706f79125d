"""Arrow columns made directly of buffers.

`pyarrow.array` would do the same, but it imports pandas where that is installed, which stops a
running hub for half a second; and here a column with one repeated value costs nothing per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["binary", "booleans", "int32s", "integers", "maps", "numbers", "optional_text", "text"]

_INT64: Final = 1 << 63


def integers(values: Any) -> pa.Array:
    """A column of 64-bit integers; values beyond them become the largest or smallest one."""
    try:
        column = np.asarray(values, np.int64)
    except OverflowError:
        column = np.asarray([min(max(each, -_INT64), _INT64 - 1) for each in values], np.int64)
    return pa.Array.from_buffers(pa.int64(), len(column), [None, pa.py_buffer(column)])


def int32s(values: Any) -> pa.Array:
    """A column of 32-bit integers. Raises OverflowError for larger ones."""
    column = np.asarray(values, np.int32)
    return pa.Array.from_buffers(pa.int32(), len(column), [None, pa.py_buffer(column)])


def booleans(values: Sequence[bool]) -> pa.Array:
    """A column of booleans, which Arrow packs into bits."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def text(values: Sequence[str]) -> pa.Array:
    """A column of strings. Raises OverflowError for more than 2 GiB of them."""
    count = len(values)
    # Many columns of a batch have one value only, such as the node; comparing is cheaper than
    # encoding each.
    if count and values.count(values[0]) == count:
        one = values[0].encode()
        offsets = np.arange(count + 1, dtype=np.int32) * len(one)
        return _variable(pa.string(), offsets, one * count)
    joined = "".join(values)
    if joined.isascii():
        # Lengths in characters are lengths in bytes: one call encodes all.
        return _variable(pa.string(), _offsets(map(len, values), count), joined.encode())
    encoded = [each.encode() for each in values]
    return _variable(pa.string(), _offsets(map(len, encoded), count), b"".join(encoded))


def optional_text(values: Sequence[str]) -> pa.Array:
    """A column of strings, null where a string is empty."""
    whole = text(values)
    valid = _bits([bool(each) for each in values])
    return pa.Array.from_buffers(pa.string(), len(values), [valid, *whole.buffers()[1:]])


def binary(values: Sequence[bytes | None]) -> pa.Array:
    """A column of bytes, null for None. Raises OverflowError for more than 2 GiB of them."""
    count = len(values)
    if None in values:
        present = [each or b"" for each in values]
        valid = _bits([each is not None for each in values])
        return _variable(pa.binary(), _offsets(map(len, present), count), b"".join(present), valid)
    certain: Sequence[bytes] = values  # type: ignore[assignment]
    return _variable(pa.binary(), _offsets(map(len, certain), count), b"".join(certain))


def maps(values: Sequence[dict[str, bytes]]) -> pa.Array:
    """A column of maps from strings to bytes."""
    offsets = _offsets(map(len, values), len(values))
    keys = text([key for each in values for key in each])
    items = binary([item for each in values for item in each.values()])
    return pa.MapArray.from_arrays(int32s(offsets), keys, items)


def numbers(column: pa.ChunkedArray) -> Any:
    """The values of a 64-bit integer column without nulls, as a numpy array."""
    parts = [
        np.frombuffer(chunk.buffers()[1], np.int64, len(chunk), 8 * chunk.offset)
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _offsets(lengths: Iterable[int], count: int) -> Any:
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=offsets[1:])
    # Arrow's string and binary columns have offsets of 32 bits.
    if offsets[-1] >= 1 << 31:
        raise OverflowError("more than 2 GiB in one column")
    return offsets.astype(np.int32)


def _variable(kind: pa.DataType, offsets: Any, data: bytes, valid: Any = None) -> pa.Array:
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def _bits(values: Sequence[bool]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.asarray(values, bool), bitorder="little"))
