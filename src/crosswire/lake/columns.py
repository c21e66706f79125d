"""Arrow columns of Python values, made from their buffers.

`pyarrow.array` would do, but it imports pandas where that is installed, which takes a running hub
half a second; and a column with one value only costs nothing per row here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["binary", "booleans", "int32s", "integers", "maps", "numbers", "optional_text", "text"]

_INT64: Final = 1 << 63


def integers(values: Any) -> pa.Array:
    """64 bits; what is beyond them is as far as they go."""
    try:
        column = np.asarray(values, np.int64)
    except OverflowError:
        column = np.asarray([min(max(each, -_INT64), _INT64 - 1) for each in values], np.int64)
    return pa.Array.from_buffers(pa.int64(), len(column), [None, pa.py_buffer(column)])


def int32s(values: Any) -> pa.Array:
    column = np.asarray(values, np.int32)
    return pa.Array.from_buffers(pa.int32(), len(column), [None, pa.py_buffer(column)])


def booleans(values: Sequence[bool]) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def text(values: Sequence[str]) -> pa.Array:
    count = len(values)
    if count and values.count(values[0]) == count:
        one = values[0].encode()
        offsets = np.arange(count + 1, dtype=np.int32) * len(one)
        return _variable(pa.string(), offsets, one * count)
    joined = "".join(values)
    if joined.isascii():
        return _variable(pa.string(), _offsets(map(len, values), count), joined.encode())
    encoded = [each.encode() for each in values]
    return _variable(pa.string(), _offsets(map(len, encoded), count), b"".join(encoded))


def optional_text(values: Sequence[str]) -> pa.Array:
    """Nothing where a text is empty."""
    whole = text(values)
    valid = _bits([bool(each) for each in values])
    return pa.Array.from_buffers(pa.string(), len(values), [valid, *whole.buffers()[1:]])


def binary(values: Sequence[bytes | None]) -> pa.Array:
    """At most 2 GiB of them."""
    count = len(values)
    if None in values:
        present = [each or b"" for each in values]
        valid = _bits([each is not None for each in values])
        return _variable(pa.binary(), _offsets(map(len, present), count), b"".join(present), valid)
    certain: Sequence[bytes] = values  # type: ignore[assignment]
    return _variable(pa.binary(), _offsets(map(len, certain), count), b"".join(certain))


def maps(values: Sequence[dict[str, bytes]]) -> pa.Array:
    offsets = _offsets(map(len, values), len(values))
    keys = text([key for each in values for key in each])
    items = binary([item for each in values for item in each.values()])
    return pa.MapArray.from_arrays(int32s(offsets), keys, items)


def numbers(column: pa.ChunkedArray) -> Any:
    """The values of an integer column without gaps, for numpy."""
    parts = [
        np.frombuffer(chunk.buffers()[1], np.int64, len(chunk), 8 * chunk.offset)
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _offsets(lengths: Iterable[int], count: int) -> Any:
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=offsets[1:])
    if offsets[-1] >= 1 << 31:
        raise OverflowError("more than 2 GiB in one column")
    return offsets.astype(np.int32)


def _variable(kind: pa.DataType, offsets: Any, data: bytes, valid: Any = None) -> pa.Array:
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def _bits(values: Sequence[bool]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.asarray(values, bool), bitorder="little"))
