"""The parts of a binary encoding, and the readers and writers of all that nests.

A Dialect defines how an encoding writes a number, a text, the head of a field and of a container;
`fast` and `compact` have theirs. The rest is the same in all of them and is here: containers,
bonded, skipping unknown fields. Structs are compiled, in `codegen`.

Every reader has the signature `(data, pos, end, depth, budget) → (value, pos)`: `end` is where the
message ends, `depth` how many levels may still be entered, `budget[0]` how many values may still be
created. A count is compared with the remaining bytes and with the budget before anything is
created. Reading past the end raises IndexError or struct.error, which `binary` turns into
BondDecodeError.
"""

# ruff: noqa: ARG002 - all readers have one shape

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, TypeAlias

from crosswire.bond.schema import (
    BlobType,
    BondedType,
    DataType,
    EnumDef,
    ListType,
    MapType,
    NullableType,
    PrimitiveType,
    SetType,
    StructDef,
    Type,
)
from crosswire.bond.values import Bonded, OrderedSet
from crosswire.errors import BondDecodeError, BondEncodeError

__all__ = [
    "PROMOTIONS",
    "Dialect",
    "Reader",
    "Writer",
    "bytes_of",
    "check_room",
    "ordered",
    "out_of_values",
    "too_deep",
    "too_short",
    "type_name",
    "wrong_type",
]

Reader: TypeAlias = Callable[[bytes, int, int, int, list[int]], tuple[Any, int]]
Writer: TypeAlias = Callable[[bytearray, Any, int], None]

_U8, _U16, _U32, _U64 = DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64
_I8, _I16, _I32, _I64 = DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64

# The other types on the wire that a field accepts: the narrower ones of its own kind.
PROMOTIONS: Final[dict[DataType, tuple[DataType, ...]]] = {
    _U16: (_U8,),
    _U32: (_U8, _U16),
    _U64: (_U8, _U16, _U32),
    _I16: (_I8,),
    _I32: (_I8, _I16),
    _I64: (_I8, _I16, _I32),
    DataType.DOUBLE: (DataType.FLOAT,),
}

_STRING, _WSTRING = int(DataType.STRING), int(DataType.WSTRING)
_NAMES: Final = {int(each): each.name.lower() for each in DataType}


def type_name(wire: int) -> str:
    """The name of a tag, for messages."""
    return _NAMES.get(wire, f"type {wire}")


SKIPPED_FIELD: Final = 8
"""What an unknown field, or a base's end that isn't expected, takes of `DecodeLimits.values`.
Skipping is interpreted: it takes about as long as reading 8 values by generated code."""


def too_deep(pos: int) -> BondDecodeError:
    """The error for structs and containers beyond `DecodeLimits.depth`."""
    return BondDecodeError("nested deeper than the limit allows", offset=pos)


def too_short(pos: int) -> BondDecodeError:
    """The error for a length or count that the remaining bytes can't contain."""
    return BondDecodeError("a length that exceeds what is left", offset=pos)


def out_of_values(pos: int) -> BondDecodeError:
    """The error for more values than `DecodeLimits.values`."""
    return BondDecodeError("more values than the limit allows", offset=pos)


def wrong_type(wire: int, expected: str, pos: int) -> BondDecodeError:
    """The error for a tag that the schema does not allow."""
    return BondDecodeError(f"{type_name(wire)} where {expected} is expected", offset=pos)


def check_room(count: int, size: int, weight: int, pos: int, end: int, budget: list[int]) -> None:
    """Raises BondDecodeError for a count that the remaining bytes or the budget don't allow."""
    if count * size > end - pos:
        raise too_short(pos)
    budget[0] -= count * weight
    if budget[0] < 0:
        raise out_of_values(pos)


def bytes_of(value: Any) -> bytes | bytearray:
    """A blob's bytes. Raises TypeError for other values."""
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, memoryview):
        return value.tobytes()
    raise TypeError(f"a blob must be bytes, not {type(value).__name__}")


def ordered(items: Any) -> Iterable[Any]:
    """A set's items in the order of writing: its own if it has one, else ascending."""
    return sorted(items) if isinstance(items, set | frozenset) else items


class Dialect(ABC):
    """One encoding: its name, its magic in marshalled data, and how it writes values and heads."""

    name: ClassVar[str]
    magic: ClassVar[bytes]
    has_struct_length: ClassVar[bool] = False

    # By tag: readers and writers of one value and of many, and a value's least and exact size.
    readers: dict[DataType, Reader]
    writers: dict[DataType, Writer]
    run_readers: dict[DataType, Callable[[bytes, int, int, int], tuple[list[Any], int]]]
    run_writers: dict[DataType, Callable[[bytearray, list[Any]], None]]
    least_bytes: dict[DataType, int]
    exact_bytes: dict[DataType, int]

    @abstractmethod
    def field_head(self, wire: DataType, field_id: int) -> bytes:
        """Tag and id of a field."""

    @abstractmethod
    def read_field_head(self, data: bytes, pos: int) -> tuple[int, int, int]:
        """(tag, id, position after it); the id of STOP and STOP_BASE is 0."""

    @abstractmethod
    def read_list_head(self, data: bytes, pos: int) -> tuple[DataType, int, int]:
        """(tag of the elements, count, position after it)."""

    @abstractmethod
    def write_list_head(self, out: bytearray, element: DataType, count: int) -> None:
        """Append tag of the elements and count, of a list or set."""

    @abstractmethod
    def read_map_head(self, data: bytes, pos: int) -> tuple[DataType, DataType, int, int]:
        """(tag of the keys, tag of the values, count, position after it)."""

    @abstractmethod
    def write_map_head(self, out: bytearray, key: DataType, element: DataType, count: int) -> None:
        """Append tags of keys and values, and count."""

    @abstractmethod
    def read_length(self, data: bytes, pos: int) -> tuple[int, int]:
        """(length of a text or struct, position after it)."""

    @abstractmethod
    def write_length(self, out: bytearray, length: int) -> None:
        """Append a length."""

    # ---------------------------------------------------------------------------------- skipping

    def skip(
        self, data: bytes, pos: int, end: int, wire: int, depth: int, budget: list[int]
    ) -> int:
        """The position after a value of an unknown field. It takes time, so it uses up the budget,
        too."""
        # Its keys are DataType, and a number from the wire may be none of them: that finds nothing.
        size = self.exact_bytes.get(wire)  # type: ignore[call-overload]  # an int finds an IntEnum
        if size is not None:
            if pos + size > end:
                raise too_short(pos)
            return pos + int(size)
        if wire in (_STRING, _WSTRING):
            length, pos = self.read_length(data, pos)
            pos += length if wire == _STRING else 2 * length
            if pos > end:
                raise too_short(pos)
            return pos
        read = self.readers.get(wire)  # type: ignore[call-overload]  # an int finds an IntEnum
        if read is not None:
            return int(read(data, pos, end, depth, budget)[1])
        if not depth:
            raise too_deep(pos)
        if wire == DataType.STRUCT:
            return self.skip_struct(data, pos, end, depth, budget)
        if wire == DataType.LIST or wire == DataType.SET:
            element, count, pos = self.read_list_head(data, pos)
            return self._skip_run(data, pos, end, element, count, depth - 1, budget)
        if wire == DataType.MAP:
            key, element, count, pos = self.read_map_head(data, pos)
            least = self.least_bytes[key] + self.least_bytes[element]
            check_room(count, least, 2, pos, end, budget)
            for _ in range(count):
                pos = self.skip(data, pos, end, key, depth - 1, budget)
                pos = self.skip(data, pos, end, element, depth - 1, budget)
            return pos
        raise BondDecodeError(f"{type_name(wire)} is not a type", offset=pos)

    def skip_struct(self, data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> int:
        """The position after a struct."""
        if not depth:
            raise too_deep(pos)
        if self.has_struct_length:
            length, pos = self.read_length(data, pos)
            if length > end - pos:
                raise too_short(pos)
            return pos + length
        return self.skip_fields(data, pos, end, depth, budget)

    def skip_fields(self, data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> int:
        """The position after a struct's STOP, from within it."""
        while True:
            wire, _, pos = self.read_field_head(data, pos)
            if wire == DataType.STOP:
                return pos
            check_room(1, 0, SKIPPED_FIELD, pos, end, budget)
            if wire != DataType.STOP_BASE:
                pos = self.skip(data, pos, end, wire, depth - 1, budget)

    def _skip_run(
        self,
        data: bytes,
        pos: int,
        end: int,
        element: DataType,
        count: int,
        depth: int,
        budget: list[int],
    ) -> int:
        size = self.exact_bytes.get(element)
        if size is not None:
            check_room(count, size, 0, pos, end, budget)
            return pos + count * size
        check_room(count, self.least_bytes[element], 1, pos, end, budget)
        for _ in range(count):
            pos = self.skip(data, pos, end, element, depth, budget)
        return pos

    # ----------------------------------------------------------------------------------- reading

    def readers_of(
        self, kind: Type, struct_reader: Callable[[StructDef], Reader]
    ) -> dict[int, Reader]:
        """Readers of a `kind`, for each tag that it may have on the wire."""
        match kind:
            case PrimitiveType():
                tags = (kind.wire, *PROMOTIONS.get(kind.wire, ()))
                return {int(tag): self.readers[tag] for tag in tags}
            case EnumDef():
                tags = (kind.wire, *PROMOTIONS[kind.wire])
                return {int(tag): _enum_reader(kind, self.readers[tag]) for tag in tags}
            case StructDef():
                return {int(DataType.STRUCT): struct_reader(kind)}
            case BondedType():
                return {int(DataType.STRUCT): self._bonded_reader(kind)}
            case BlobType():
                return {int(DataType.LIST): self._read_blob}
            case NullableType():
                return {int(DataType.LIST): self._nullable_reader(kind, struct_reader)}
            case ListType():
                return {int(DataType.LIST): self._list_reader(kind, struct_reader)}
            case SetType():
                read = self._list_reader(kind, struct_reader)
                return {int(DataType.SET): _set_reader(read)}
            case MapType():
                return {int(DataType.MAP): self._map_reader(kind, struct_reader)}

    def _read_blob(
        self, data: bytes, pos: int, end: int, depth: int, budget: list[int]
    ) -> tuple[bytes, int]:
        if not depth:
            raise too_deep(pos)
        element, count, pos = self.read_list_head(data, pos)
        if element not in (DataType.INT8, DataType.UINT8):
            raise wrong_type(element, "int8", pos)
        stop = pos + count
        if stop > end:
            raise too_short(pos)
        return data[pos:stop], stop

    def _bonded_reader(self, kind: BondedType) -> Reader:
        def read(
            data: bytes, pos: int, end: int, depth: int, budget: list[int]
        ) -> tuple[Bonded, int]:
            stop = self.skip_struct(data, pos, end, depth, budget)
            return Bonded.from_bytes(data[pos:stop], self.name, kind.struct), stop

        return read

    def _list_reader(
        self, kind: ListType | SetType, struct_reader: Callable[[StructDef], Reader]
    ) -> Reader:
        by_tag = self.readers_of(kind.element, struct_reader)
        runs = self.run_readers if isinstance(kind.element, PrimitiveType) else {}
        weight = kind.element.weight
        expected = kind.element.text

        def read(
            data: bytes, pos: int, end: int, depth: int, budget: list[int]
        ) -> tuple[list[Any], int]:
            if not depth:
                raise too_deep(pos)
            tag, count, pos = self.read_list_head(data, pos)
            read_one = by_tag.get(tag)
            if read_one is None:
                raise wrong_type(tag, expected, pos)
            check_room(count, self.least_bytes[tag], weight, pos, end, budget)
            read_run = runs.get(tag)
            if read_run is not None:
                return read_run(data, pos, end, count)
            items: list[Any] = []
            add = items.append
            depth -= 1
            for _ in range(count):
                item, pos = read_one(data, pos, end, depth, budget)
                add(item)
            return items, pos

        return read

    def _nullable_reader(
        self, kind: NullableType, struct_reader: Callable[[StructDef], Reader]
    ) -> Reader:
        by_tag = self.readers_of(kind.element, struct_reader)
        weight = kind.element.weight
        expected = kind.element.text

        def read(data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> tuple[Any, int]:
            if not depth:
                raise too_deep(pos)
            tag, count, pos = self.read_list_head(data, pos)
            read_one = by_tag.get(tag)
            if read_one is None:
                raise wrong_type(tag, expected, pos)
            if count == 0:
                return None, pos
            if count > 1:
                raise BondDecodeError(f"a nullable with {count} values", offset=pos)
            check_room(1, self.least_bytes[tag], weight, pos, end, budget)
            return read_one(data, pos, end, depth - 1, budget)

        return read

    def _map_reader(self, kind: MapType, struct_reader: Callable[[StructDef], Reader]) -> Reader:
        keys = self.readers_of(kind.key, struct_reader)
        elements = self.readers_of(kind.element, struct_reader)
        weight = kind.key.weight + kind.element.weight

        def read(
            data: bytes, pos: int, end: int, depth: int, budget: list[int]
        ) -> tuple[dict[Any, Any], int]:
            if not depth:
                raise too_deep(pos)
            key_tag, tag, count, pos = self.read_map_head(data, pos)
            read_key, read_one = keys.get(key_tag), elements.get(tag)
            if read_key is None:
                raise wrong_type(key_tag, kind.key.text, pos)
            if read_one is None:
                raise wrong_type(tag, kind.element.text, pos)
            least = self.least_bytes[key_tag] + self.least_bytes[tag]
            check_room(count, least, weight, pos, end, budget)
            items = {}
            depth -= 1
            for _ in range(count):
                key, pos = read_key(data, pos, end, depth, budget)
                items[key], pos = read_one(data, pos, end, depth, budget)
            return items, pos

        return read

    # ----------------------------------------------------------------------------------- writing

    def writer_of(self, kind: Type, struct_writer: Callable[[StructDef], Writer]) -> Writer:
        """A writer of a `kind`, without the head of its field."""
        match kind:
            case PrimitiveType() | EnumDef():
                return self.writers[kind.wire]
            case StructDef():
                return struct_writer(kind)
            case BondedType():
                return self._write_bonded
            case BlobType():
                return self._write_blob
            case NullableType():
                return self._nullable_writer(kind, struct_writer)
            case ListType() | SetType():
                return self._list_writer(kind, struct_writer)
            case MapType():
                return self._map_writer(kind, struct_writer)

    def _write_bonded(self, out: bytearray, value: Any, depth: int) -> None:
        bonded = value if isinstance(value, Bonded) else Bonded(value)
        out += bonded.encode(self.name, depth=depth)

    def _write_blob(self, out: bytearray, value: Any, depth: int) -> None:
        check_depth(depth)
        data = bytes_of(value)
        self.write_list_head(out, DataType.INT8, len(data))
        out += data

    def _nullable_writer(
        self, kind: NullableType, struct_writer: Callable[[StructDef], Writer]
    ) -> Writer:
        write_one = self.writer_of(kind.element, struct_writer)
        tag = kind.element.wire

        def write(out: bytearray, value: Any, depth: int) -> None:
            check_depth(depth)
            if value is None:
                self.write_list_head(out, tag, 0)
            else:
                self.write_list_head(out, tag, 1)
                write_one(out, value, depth - 1)

        return write

    def _list_writer(
        self, kind: ListType | SetType, struct_writer: Callable[[StructDef], Writer]
    ) -> Writer:
        write_one = self.writer_of(kind.element, struct_writer)
        tag = kind.element.wire
        is_set = isinstance(kind, SetType)
        write_run = self.run_writers.get(tag)

        def write(out: bytearray, value: Any, depth: int) -> None:
            check_depth(depth)
            if isinstance(value, str | bytes | dict):  # iterable, but surely a mistake
                raise TypeError(f"{type(value).__name__} where {kind.text} is expected")
            self.write_list_head(out, tag, len(value))
            items = ordered(value) if is_set else value
            if write_run is not None:
                write_run(out, list(items))
                return
            depth -= 1
            for item in items:
                write_one(out, item, depth)

        return write

    def _map_writer(self, kind: MapType, struct_writer: Callable[[StructDef], Writer]) -> Writer:
        write_key = self.writer_of(kind.key, struct_writer)
        write_one = self.writer_of(kind.element, struct_writer)
        key_tag, tag = kind.key.wire, kind.element.wire

        def write(out: bytearray, value: Any, depth: int) -> None:
            check_depth(depth)
            self.write_map_head(out, key_tag, tag, len(value))
            depth -= 1
            for key, item in value.items():
                write_key(out, key, depth)
                write_one(out, item, depth)

        return write


def check_depth(depth: int) -> None:
    if depth <= 0:
        raise BondEncodeError("nested deeper than the limit allows, or a value inside itself")


def _enum_reader(kind: EnumDef, read_number: Reader) -> Reader:
    member = kind.members.get

    def read(data: bytes, pos: int, end: int, depth: int, budget: list[int]) -> tuple[int, int]:
        number, pos = read_number(data, pos, end, depth, budget)
        known = member(number)
        return number if known is None else known, pos

    return read


def _set_reader(read_list: Reader) -> Reader:
    def read(
        data: bytes, pos: int, end: int, depth: int, budget: list[int]
    ) -> tuple[OrderedSet[Any], int]:
        items, pos = read_list(data, pos, end, depth, budget)
        return OrderedSet(items), pos

    return read
