"""Fast Binary v1: fixed-width numbers, three-byte field heads.

    struct      fields, STOP_BASE after each base's, STOP
    field       tag (1), id (2, little-endian), value
    integer     little-endian, as wide as its type
    list, set   tag of the elements (1), count (variable uint32), elements
    map         tag of the keys (1), of the values (1), count, key, value, key, value …

The rest is in `scalars`. `decode` and `encode` use a schema; the `_tree` ones need none.
"""

from __future__ import annotations

from typing import Any, Final

from crosswire.bond import binary, scalars
from crosswire.bond.binary import Buffer
from crosswire.bond.dialect import Dialect, type_name
from crosswire.bond.schema import DEFAULT_LIMITS, DataType, DecodeLimits, StructDef
from crosswire.bond.tree import TreeStruct
from crosswire.errors import BondDecodeError

__all__ = ["FAST", "decode", "decode_prefix", "decode_tree", "encode", "encode_tree"]

_TYPES: Final = {int(each): each for each in DataType if each > DataType.STOP_BASE}


class FastBinary(Dialect):
    """Fast Binary v1."""

    name = "fast"
    magic = b"\x4d\x46\x01\x00"

    def __init__(self) -> None:
        formats = scalars.FORMATS
        self.readers = {
            **{tag: scalars.fixed_reader(code) for tag, code in formats.items()},
            **scalars.READERS,
        }
        self.writers = {
            **{tag: scalars.fixed_writer(code) for tag, code in formats.items()},
            **scalars.WRITERS,
        }
        self.run_readers = {
            **{tag: scalars.fixed_run_reader(code) for tag, code in formats.items()},
            **scalars.RUN_READERS,
        }
        self.run_writers = {
            **{tag: scalars.fixed_run_writer(code) for tag, code in formats.items()},
            **scalars.RUN_WRITERS,
        }
        self.exact_bytes = {
            **scalars.EXACT_BYTES,
            **dict.fromkeys((DataType.UINT16, DataType.INT16), 2),
            **dict.fromkeys((DataType.UINT32, DataType.INT32), 4),
            **dict.fromkeys((DataType.UINT64, DataType.INT64), 8),
        }
        self.least_bytes = {
            **self.exact_bytes,
            **dict.fromkeys((DataType.STRING, DataType.WSTRING, DataType.STRUCT), 1),
            **dict.fromkeys((DataType.LIST, DataType.SET), 2),
            DataType.MAP: 3,
        }

    def field_head(self, wire: DataType, field_id: int) -> bytes:
        return bytes((wire, field_id & 0xFF, field_id >> 8))

    def read_field_head(self, data: bytes, pos: int) -> tuple[int, int, int]:
        wire = data[pos]
        if wire <= DataType.STOP_BASE:
            return wire, 0, pos + 1
        return wire, data[pos + 1] | data[pos + 2] << 8, pos + 3

    def read_list_head(self, data: bytes, pos: int) -> tuple[DataType, int, int]:
        element = _type(data, pos)
        count, pos = self.read_length(data, pos + 1)
        return element, count, pos

    def write_list_head(self, out: bytearray, element: DataType, count: int) -> None:
        out.append(element)
        scalars.write_length(out, count)

    def read_map_head(self, data: bytes, pos: int) -> tuple[DataType, DataType, int, int]:
        key, element = _type(data, pos), _type(data, pos + 1)
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


def _type(data: bytes, pos: int) -> DataType:
    found = _TYPES.get(data[pos])
    if found is None:
        raise BondDecodeError(f"{type_name(data[pos])} is not a type of elements", offset=pos)
    return found


FAST: Final = FastBinary()


def encode(value: Any, struct: StructDef) -> bytes:
    """The bytes of a struct. Raises BondEncodeError."""
    return binary.encode(FAST, value, struct)


def decode(data: Buffer, struct: StructDef, *, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """A `struct.python_class`. Bytes after the struct are ignored. Raises BondDecodeError."""
    return binary.decode(FAST, data, struct, limits)[0]


def decode_prefix(
    data: Buffer, struct: StructDef, *, limits: DecodeLimits = DEFAULT_LIMITS
) -> tuple[Any, int]:
    """As `decode`, with the number of bytes that the struct took."""
    return binary.decode(FAST, data, struct, limits)


def encode_tree(tree: TreeStruct) -> bytes:
    """The bytes of a tree. Raises BondEncodeError."""
    return binary.encode_tree(FAST, tree)


def decode_tree(data: Buffer, *, limits: DecodeLimits = DEFAULT_LIMITS) -> TreeStruct:
    """A struct without its schema. Raises BondDecodeError."""
    return binary.decode_tree(FAST, data, limits)[0]
