"""Compact Binary v1 and v2: variable-length integers, one-byte field heads for low ids.

    struct      v2: length of what follows (variable uint32); fields, STOP_BASE after each
                base's, STOP
    field       bits 0–4 the tag, bits 5–7 the id if it is 0–5; 6: the id is the next byte;
                7: the next two (little-endian)
    integer     int8, uint8 one byte; uint16–64 variable; int16–64 zigzagged, then variable
    list, set   bits 0–4 the tag of the elements; v2: bits 5–7 count + 1 if that is below 8, else
                0; count (variable uint32, v2: only if those bits are 0); elements
    map         tag of the keys (1), of the values (1), count, key, value, key, value …

The rest is in `scalars`. `decode` and `encode` use a schema; the `_tree` ones need none.
"""

# ruff: noqa: ARG001 - all readers have one shape, and all writers

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from crosswire.bond import binary, scalars
from crosswire.bond.binary import Buffer
from crosswire.bond.dialect import Dialect, Reader, Writer, type_name
from crosswire.bond.schema import DEFAULT_LIMITS, DataType, DecodeLimits, StructDef
from crosswire.bond.tree import TreeStruct
from crosswire.errors import BondDecodeError

__all__ = [
    "COMPACT1",
    "COMPACT2",
    "decode",
    "decode_prefix",
    "decode_tree",
    "encode",
    "encode_tree",
]

_TYPES: Final = {int(each): each for each in DataType if each > DataType.STOP_BASE}

_UNSIGNED: Final = {DataType.UINT16: 16, DataType.UINT32: 32, DataType.UINT64: 64}
_SIGNED: Final = {DataType.INT16: 16, DataType.INT32: 32, DataType.INT64: 64}


class CompactBinary(Dialect):
    """Compact Binary v1; v2 derives from it."""

    name = "compact"
    magic = b"\x43\x42\x01\x00"

    def __init__(self) -> None:
        unsigned, signed = _UNSIGNED.items(), _SIGNED.items()
        self.readers = {
            **{tag: _unsigned_reader(bits) for tag, bits in unsigned},
            **{tag: _signed_reader(bits) for tag, bits in signed},
            **scalars.READERS,
        }
        self.writers = {
            **{tag: _unsigned_writer(bits) for tag, bits in unsigned},
            **{tag: _signed_writer(bits) for tag, bits in signed},
            **scalars.WRITERS,
        }
        self.run_readers = {
            **{tag: _unsigned_run_reader(bits) for tag, bits in unsigned},
            **{tag: _signed_run_reader(bits) for tag, bits in signed},
            **scalars.RUN_READERS,
        }
        self.run_writers = {
            **{tag: _unsigned_run_writer(bits) for tag, bits in unsigned},
            **{tag: _signed_run_writer(bits) for tag, bits in signed},
            **scalars.RUN_WRITERS,
        }
        self.exact_bytes = dict(scalars.EXACT_BYTES)
        self.least_bytes = {
            **dict.fromkeys(_TYPES.values(), 1),
            **scalars.EXACT_BYTES,
            **dict.fromkeys((DataType.LIST, DataType.SET), 2),
            DataType.MAP: 3,
        }

    def field_head(self, wire: DataType, field_id: int) -> bytes:
        if field_id <= 5:
            return bytes((wire | field_id << 5,))
        if field_id <= 0xFF:
            return bytes((wire | 0xC0, field_id))
        return bytes((wire | 0xE0, field_id & 0xFF, field_id >> 8))

    def read_field_head(self, data: bytes, pos: int) -> tuple[int, int, int]:
        head = data[pos]
        field_id = head >> 5
        if field_id < 6:
            return head & 0x1F, field_id, pos + 1
        if field_id == 6:
            return head & 0x1F, data[pos + 1], pos + 2
        return head & 0x1F, data[pos + 1] | data[pos + 2] << 8, pos + 3

    def read_list_head(self, data: bytes, pos: int) -> tuple[DataType, int, int]:
        element = _type(data[pos], pos)
        count, pos = self.read_length(data, pos + 1)
        return element, count, pos

    def write_list_head(self, out: bytearray, element: DataType, count: int) -> None:
        out.append(element)
        scalars.write_length(out, count)

    def read_map_head(self, data: bytes, pos: int) -> tuple[DataType, DataType, int, int]:
        key, element = _type(data[pos], pos), _type(data[pos + 1], pos + 1)
        count, pos = self.read_length(data, pos + 2)
        return key, element, count, pos

    def write_map_head(self, out: bytearray, key: DataType, element: DataType, count: int) -> None:
        out.append(key)
        out.append(element)
        scalars.write_length(out, count)

    def read_length(self, data: bytes, pos: int) -> tuple[int, int]:
        length = data[pos]
        return (length, pos + 1) if length < 0x80 else scalars.read_varint(data, pos, 32)

    def write_length(self, out: bytearray, length: int) -> None:
        scalars.write_length(out, length)


class CompactBinary2(CompactBinary):
    name = "compact2"
    magic = b"\x43\x42\x02\x00"
    has_struct_length = True

    def __init__(self) -> None:
        super().__init__()
        self.least_bytes = {
            **self.least_bytes,
            **dict.fromkeys((DataType.LIST, DataType.SET), 1),
            DataType.STRUCT: 2,
        }

    def read_list_head(self, data: bytes, pos: int) -> tuple[DataType, int, int]:
        head = data[pos]
        element = _type(head & 0x1F, pos)
        if head >> 5:
            return element, (head >> 5) - 1, pos + 1
        count, pos = self.read_length(data, pos + 1)
        return element, count, pos

    def write_list_head(self, out: bytearray, element: DataType, count: int) -> None:
        if count < 7:
            out.append(element | count + 1 << 5)
        else:
            super().write_list_head(out, element, count)


def _type(tag: int, pos: int) -> DataType:
    found = _TYPES.get(tag)
    if found is None:
        raise BondDecodeError(f"{type_name(tag)} is not a type of elements", offset=pos)
    return found


# -------------------------------------------------------------------------------------- integers


def _unsigned_reader(bits: int) -> Reader:
    def read(data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> tuple[int, int]:
        value = data[pos]
        return (value, pos + 1) if value < 0x80 else scalars.read_varint(data, pos, bits)

    return read


def _signed_reader(bits: int) -> Reader:
    def read(data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> tuple[int, int]:
        value = data[pos]
        pos += 1
        if value > 0x7F:
            value, pos = scalars.read_varint(data, pos - 1, bits)
        return value >> 1 ^ -(value & 1), pos

    return read


def _unsigned_run_reader(bits: int) -> Callable[[bytes, int, int, int], tuple[list[Any], int]]:
    def read(data: bytes, pos: int, end: int, count: int) -> tuple[list[int], int]:
        ones = data[pos : pos + count]
        if ones.isascii():  # every number in one byte
            return list(ones), pos + count
        items: list[int] = []
        add = items.append
        for _ in range(count):
            value = data[pos]
            if value < 0x80:
                pos += 1
            elif data[pos + 1] < 0x80:
                value += (data[pos + 1] << 7) - 0x80
                pos += 2
            else:
                value, pos = scalars.read_varint(data, pos, bits)
            add(value)
        return items, pos

    return read


def _signed_run_reader(bits: int) -> Callable[[bytes, int, int, int], tuple[list[Any], int]]:
    read_unsigned = _unsigned_run_reader(bits)

    def read(data: bytes, pos: int, end: int, count: int) -> tuple[list[int], int]:
        items, pos = read_unsigned(data, pos, end, count)
        return [value >> 1 ^ -(value & 1) for value in items], pos

    return read


def _unsigned_writer(bits: int) -> Writer:
    def write(out: bytearray, value: Any, depth: int) -> None:
        scalars.write_varint(out, value, bits)

    return write


def _signed_writer(bits: int) -> Writer:
    def write(out: bytearray, value: Any, depth: int) -> None:
        # -2v - 1 is what zigzag makes of a negative number
        scalars.write_varint(out, value << 1 if value >= 0 else ~(value << 1), bits)

    return write


def _unsigned_run_writer(bits: int) -> Callable[[bytearray, list[Any]], None]:
    def write(out: bytearray, items: list[Any]) -> None:
        for value in items:
            if 0 <= value < 0x80:
                out.append(value)
            else:
                scalars.write_varint(out, value, bits)

    return write


def _signed_run_writer(bits: int) -> Callable[[bytearray, list[Any]], None]:
    write_unsigned = _unsigned_run_writer(bits)

    def write(out: bytearray, items: list[Any]) -> None:
        write_unsigned(out, [value << 1 if value >= 0 else ~(value << 1) for value in items])

    return write


COMPACT1: Final = CompactBinary()
COMPACT2: Final = CompactBinary2()


def _version(version: int) -> CompactBinary:
    if version not in (1, 2):
        raise ValueError(f"Compact Binary has versions 1 and 2, not {version}")
    return COMPACT2 if version == 2 else COMPACT1


def encode(value: Any, struct: StructDef, *, version: int = 1) -> bytes:
    """The bytes of a struct. Raises BondEncodeError."""
    return binary.encode(_version(version), value, struct)


def decode(
    data: Buffer, struct: StructDef, *, version: int = 1, limits: DecodeLimits = DEFAULT_LIMITS
) -> Any:
    """A `struct.python_class`. Bytes after the struct are ignored. Raises BondDecodeError."""
    return binary.decode(_version(version), data, struct, limits)[0]


def decode_prefix(
    data: Buffer, struct: StructDef, *, version: int = 1, limits: DecodeLimits = DEFAULT_LIMITS
) -> tuple[Any, int]:
    """As `decode`, with the number of bytes that the struct took."""
    return binary.decode(_version(version), data, struct, limits)


def encode_tree(tree: TreeStruct, *, version: int = 1) -> bytes:
    """The bytes of a tree. Raises BondEncodeError."""
    return binary.encode_tree(_version(version), tree)


def decode_tree(
    data: Buffer, *, version: int = 1, limits: DecodeLimits = DEFAULT_LIMITS
) -> TreeStruct:
    """A struct without its schema. Raises BondDecodeError."""
    return binary.decode_tree(_version(version), data, limits)[0]
