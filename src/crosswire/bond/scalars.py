"""Numbers and texts, as all binary encodings write them.

    bool, int8, uint8     one byte
    float, double         4 and 8 bytes, little-endian
    string                length in bytes, UTF-8
    wstring               length in 16 bit units, UTF-16 little-endian; lone surrogates pass

A length is a variable-length uint32: seven bits in each byte, the lowest first; the high bit is set
if another byte follows. Compact Binary's integers are written like that, too.
"""

# ruff: noqa: ARG001 - all readers have one shape, and all writers

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, unpack_from
from typing import Any, Final

from crosswire.bond.schema import DataType
from crosswire.errors import BondDecodeError

__all__ = [
    "EXACT_BYTES",
    "FORMATS",
    "READERS",
    "RUN_READERS",
    "RUN_WRITERS",
    "WRITERS",
    "fixed_reader",
    "fixed_run_reader",
    "fixed_run_writer",
    "fixed_writer",
    "read_varint",
    "write_length",
    "write_varint",
]

# The struct module's letters.
FORMATS: Final = {
    DataType.UINT8: "B",
    DataType.UINT16: "H",
    DataType.UINT32: "I",
    DataType.UINT64: "Q",
    DataType.INT8: "b",
    DataType.INT16: "h",
    DataType.INT32: "i",
    DataType.INT64: "q",
    DataType.FLOAT: "f",
    DataType.DOUBLE: "d",
}

EXACT_BYTES: Final = {
    DataType.BOOL: 1,
    DataType.UINT8: 1,
    DataType.INT8: 1,
    DataType.FLOAT: 4,
    DataType.DOUBLE: 8,
}

_BOOLS: Final = {True: 1, False: 0}


# ---------------------------------------------------------------------------- variable integers


def read_varint(data: bytes, pos: int, bits: int) -> tuple[int, int]:
    """The number at `pos` and the position after it. Raises IndexError past the end."""
    most = (bits + 6) // 7
    value = shift = 0
    for byte in data[pos : pos + most]:
        if byte < 0x80:
            value |= byte << shift
            if value >> bits:
                raise _too_long(pos, bits)
            return value, pos + shift // 7 + 1
        value |= (byte & 0x7F) << shift
        shift += 7
    if shift < 7 * most:
        raise IndexError("a variable integer without an end")
    raise _too_long(pos, bits)


def _too_long(pos: int, bits: int) -> BondDecodeError:
    return BondDecodeError(f"a variable integer of more than {bits} bits", offset=pos)


def write_varint(out: bytearray, value: int, bits: int) -> None:
    """Append `value`. Raises ValueError if it does not fit, TypeError if it is not an integer."""
    if value < 0 or value >> bits:
        raise ValueError(f"{value} does not fit {bits} bits")
    add = out.append
    while value > 0x7F:
        add(value & 0x7F | 0x80)
        value >>= 7
    add(value)


def write_length(out: bytearray, length: int) -> None:
    """Append a length."""
    if length < 0x80:
        out.append(length)
    else:
        write_varint(out, length, 32)


# ------------------------------------------------------------------------------- fixed numbers


def fixed_reader(code: str) -> Callable[[bytes, int, int, int, list[int]], tuple[Any, int]]:
    """A Reader of one little-endian number."""
    layout = Struct(f"<{code}")
    unpack, size = layout.unpack_from, layout.size

    def read(data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> tuple[Any, int]:
        return unpack(data, pos)[0], pos + size

    return read


def fixed_writer(code: str) -> Callable[[bytearray, Any, int], None]:
    """A Writer of one little-endian number."""
    pack = Struct(f"<{code}").pack

    def write(out: bytearray, value: Any, depth: int) -> None:
        out += pack(value)

    return write


def fixed_run_reader(code: str) -> Callable[[bytes, int, int, int], tuple[list[Any], int]]:
    """A reader of `count` numbers at once."""
    size = Struct(f"<{code}").size

    def read(data: bytes, pos: int, end: int, count: int) -> tuple[list[Any], int]:
        return list(unpack_from(f"<{count}{code}", data, pos)), pos + count * size

    return read


def fixed_run_writer(code: str) -> Callable[[bytearray, list[Any]], None]:
    """A writer of many numbers at once."""

    def write(out: bytearray, items: list[Any]) -> None:
        out += Struct(f"<{len(items)}{code}").pack(*items)

    return write


# ------------------------------------------------------------------------------ truth and texts


def _read_bool(
    data: bytes,
    pos: int,
    end: int,
    depth: int,
    budget: list[int],
) -> tuple[bool, int]:
    return data[pos] != 0, pos + 1


def _write_bool(out: bytearray, value: Any, depth: int) -> None:
    out.append(_BOOLS[value])


def _read_bools(data: bytes, pos: int, end: int, count: int) -> tuple[list[bool], int]:
    stop = pos + count
    return [byte != 0 for byte in data[pos:stop]], stop


def _write_bools(out: bytearray, items: list[Any]) -> None:
    out += bytes([_BOOLS[item] for item in items])


def _read_string(
    data: bytes,
    pos: int,
    end: int,
    depth: int,
    budget: list[int],
) -> tuple[str, int]:
    length = data[pos]
    pos += 1
    if length > 0x7F:
        length, pos = read_varint(data, pos - 1, 32)
    stop = pos + length
    if stop > end:
        raise BondDecodeError("a string that exceeds what is left", offset=pos)
    try:
        return data[pos:stop].decode(), stop
    except UnicodeDecodeError as error:
        raise BondDecodeError("a string that is not UTF-8", offset=pos + error.start) from None


def _write_string(out: bytearray, value: Any, depth: int) -> None:
    text = value.encode()
    write_length(out, len(text))
    out += text


def _read_wstring(
    data: bytes,
    pos: int,
    end: int,
    depth: int,
    budget: list[int],
) -> tuple[str, int]:
    length = data[pos]
    pos += 1
    if length > 0x7F:
        length, pos = read_varint(data, pos - 1, 32)
    stop = pos + 2 * length
    if stop > end:
        raise BondDecodeError("a wstring that exceeds what is left", offset=pos)
    return data[pos:stop].decode("utf-16-le", "surrogatepass"), stop


def _write_wstring(out: bytearray, value: Any, depth: int) -> None:
    text = value.encode("utf-16-le", "surrogatepass")
    write_length(out, len(text) // 2)
    out += text


READERS: Final = {
    DataType.BOOL: _read_bool,
    DataType.UINT8: fixed_reader("B"),
    DataType.INT8: fixed_reader("b"),
    DataType.FLOAT: fixed_reader("f"),
    DataType.DOUBLE: fixed_reader("d"),
    DataType.STRING: _read_string,
    DataType.WSTRING: _read_wstring,
}

WRITERS: Final = {
    DataType.BOOL: _write_bool,
    DataType.UINT8: fixed_writer("B"),
    DataType.INT8: fixed_writer("b"),
    DataType.FLOAT: fixed_writer("f"),
    DataType.DOUBLE: fixed_writer("d"),
    DataType.STRING: _write_string,
    DataType.WSTRING: _write_wstring,
}

RUN_READERS: Final = {
    DataType.BOOL: _read_bools,
    **{tag: fixed_run_reader(FORMATS[tag]) for tag in EXACT_BYTES if tag in FORMATS},
}

RUN_WRITERS: Final = {
    DataType.BOOL: _write_bools,
    **{tag: fixed_run_writer(FORMATS[tag]) for tag in EXACT_BYTES if tag in FORMATS},
}
