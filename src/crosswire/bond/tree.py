"""Bond data without a schema: ids, tags and values, enough to write it again in any encoding.

What only a schema defines is unknown: names, defaults that were omitted, whether an int32 is an
enumeration, whether a list is a nullable or a blob. Lists and sets of 8 bit integers are kept as
bytes. Order is kept everywhere. Texts that are not UTF-8 are preserved (`surrogateescape`), and so
are the bits of every NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import Any, Final

import msgspec

from crosswire.bond.dialect import (
    Dialect,
    check_depth,
    check_room,
    out_of_values,
    too_deep,
    too_short,
    type_name,
)
from crosswire.bond.schema import DataType
from crosswire.errors import BondDecodeError, BondEncodeError

__all__ = ["Nan", "TreeField", "TreeList", "TreeMap", "TreeStruct", "read_tree", "write_tree"]


class Nan(msgspec.Struct, frozen=True, gc=False):
    """A NaN of a float or double, as its little-endian bytes, so that all its bits are kept."""

    bits: bytes

    def __float__(self) -> float:
        return float("nan")


class TreeField(msgspec.Struct, frozen=True):
    """A field: a number, a text, a TreeStruct, TreeList or TreeMap."""

    id: int
    type: DataType
    value: Any


class TreeStruct(msgspec.Struct, frozen=True):
    """The fields of each level, the root of its bases first, the struct's own last."""

    levels: tuple[tuple[TreeField, ...], ...]

    def __iter__(self) -> Iterator[TreeField]:
        for level in self.levels:
            yield from level

    def find(self, field_id: int, *, level: int = -1) -> Any:
        """The value of a field, None if it is missing; `level` 0 is the root of the bases."""
        for field in self.levels[level]:
            if field.id == field_id:
                return field.value
        return None


class TreeList(msgspec.Struct, frozen=True):
    """A list or set; in the schema it may be a list, vector, nullable or blob."""

    element: DataType
    items: list[Any] | bytes


class TreeMap(msgspec.Struct, frozen=True):
    """A map, as pairs in their order: keys may occur twice."""

    key: DataType
    element: DataType
    items: list[tuple[Any, Any]]


# As plain integers and tables: an enumeration member costs more than reading a number.
_STOP, _STOP_BASE, _STRUCT = int(DataType.STOP), int(DataType.STOP_BASE), int(DataType.STRUCT)
_LIST, _SET, _MAP = int(DataType.LIST), int(DataType.SET), int(DataType.MAP)
_STRING = int(DataType.STRING)
_BYTES: Final = (DataType.INT8, DataType.UINT8)
_FLOATS: Final = (int(DataType.FLOAT), int(DataType.DOUBLE))
_TYPES: Final = {int(each): each for each in DataType}


# --------------------------------------------------------------------------------------- reading


def read_tree(
    dialect: Dialect, data: bytes, pos: int, end: int, depth: int, budget: list[int]
) -> tuple[TreeStruct, int]:
    """The struct at `pos`; the signature is that of a `dialect.Reader`."""
    if not depth:
        raise too_deep(pos)
    depth -= 1
    stop = -1
    if dialect.has_struct_length:
        length, pos = dialect.read_length(data, pos)
        stop = pos + length
        if stop > end:
            raise too_short(pos)
    levels: list[tuple[TreeField, ...]] = []
    fields: list[TreeField] = []
    while True:
        tag, field_id, pos = dialect.read_field_head(data, pos)
        budget[0] -= 2  # base levels too: each costs its sender a byte
        if budget[0] < 0:
            raise out_of_values(pos)
        if tag > _STOP_BASE:
            value, pos = _read(dialect, data, pos, end, tag, depth, budget)
            fields.append(TreeField(field_id, _TYPES[tag], value))
            continue
        levels.append(tuple(fields))
        fields = []
        if tag == _STOP:
            break
    if stop >= 0 and pos != stop:
        raise BondDecodeError("a struct that does not end where its length ends", offset=pos)
    return TreeStruct(tuple(levels)), pos


def _read(
    dialect: Dialect, data: bytes, pos: int, end: int, tag: int, depth: int, budget: list[int]
) -> tuple[Any, int]:
    if tag == _STRING:
        length, pos = dialect.read_length(data, pos)
        stop = pos + length
        if stop > end:
            raise BondDecodeError("a string that exceeds what is left", offset=pos)
        return data[pos:stop].decode("utf-8", "surrogateescape"), stop
    read = dialect.readers.get(tag)  # type: ignore[call-overload]  # an int finds an IntEnum
    if read is not None:
        value, stop = read(data, pos, end, depth, budget)
        if tag in _FLOATS and isnan(value):
            value = Nan(data[pos:stop])
        return value, stop
    if tag == _STRUCT:
        return read_tree(dialect, data, pos, end, depth, budget)
    if tag in (_LIST, _SET):
        return _read_list(dialect, data, pos, end, depth, budget)
    if tag == _MAP:
        return _read_map(dialect, data, pos, end, depth, budget)
    raise BondDecodeError(f"{type_name(tag)} is not a type", offset=pos)


def _read_list(
    dialect: Dialect, data: bytes, pos: int, end: int, depth: int, budget: list[int]
) -> tuple[TreeList, int]:
    if not depth:
        raise too_deep(pos)
    element, count, pos = dialect.read_list_head(data, pos)
    check_room(1, 0, 2, pos, end, budget)  # the list itself
    if element in _BYTES:
        stop = pos + count
        if stop > end:
            raise BondDecodeError("a list that exceeds what is left", offset=pos)
        return TreeList(element, data[pos:stop]), stop
    check_room(count, dialect.least_bytes[element], 2, pos, end, budget)
    read_run = dialect.run_readers.get(element)
    if read_run is not None and element not in _FLOATS:
        items, pos = read_run(data, pos, end, count)
        return TreeList(element, items), pos
    items = []
    for _ in range(count):
        item, pos = _read(dialect, data, pos, end, element, depth - 1, budget)
        items.append(item)
    return TreeList(element, items), pos


def _read_map(
    dialect: Dialect, data: bytes, pos: int, end: int, depth: int, budget: list[int]
) -> tuple[TreeMap, int]:
    if not depth:
        raise too_deep(pos)
    key_tag, tag, count, pos = dialect.read_map_head(data, pos)
    least = dialect.least_bytes[key_tag] + dialect.least_bytes[tag]
    check_room(count, least, 4, pos, end, budget)
    check_room(1, 0, 2, pos, end, budget)  # the map itself
    items = []
    for _ in range(count):
        key, pos = _read(dialect, data, pos, end, key_tag, depth - 1, budget)
        item, pos = _read(dialect, data, pos, end, tag, depth - 1, budget)
        items.append((key, item))
    return TreeMap(key_tag, tag, items), pos


# --------------------------------------------------------------------------------------- writing


def write_tree(dialect: Dialect, out: bytearray, tree: TreeStruct, depth: int) -> None:
    """Append the struct in `dialect`. Raises BondEncodeError."""
    check_depth(depth)
    if not tree.levels:
        raise BondEncodeError("a tree without levels")
    body = bytearray() if dialect.has_struct_length else out
    last = len(tree.levels) - 1
    for number, level in enumerate(tree.levels):
        for field in level:
            body += dialect.field_head(field.type, field.id)
            _write(dialect, body, field.type, field.value, depth - 1)
        body.append(DataType.STOP if number == last else DataType.STOP_BASE)
    if dialect.has_struct_length:
        dialect.write_length(out, len(body))
        out += body


def _write(dialect: Dialect, out: bytearray, tag: DataType, value: Any, depth: int) -> None:
    if isinstance(value, TreeStruct):
        write_tree(dialect, out, value, depth)
    elif isinstance(value, TreeList):
        check_depth(depth)
        dialect.write_list_head(out, value.element, len(value.items))
        if isinstance(value.items, bytes):
            out += value.items
        else:
            for item in value.items:
                _write(dialect, out, value.element, item, depth - 1)
    elif isinstance(value, TreeMap):
        check_depth(depth)
        dialect.write_map_head(out, value.key, value.element, len(value.items))
        for key, item in value.items:
            _write(dialect, out, value.key, key, depth - 1)
            _write(dialect, out, value.element, item, depth - 1)
    elif isinstance(value, Nan):
        out += value.bits
    elif tag == _STRING:
        text = value.encode("utf-8", "surrogateescape")
        dialect.write_length(out, len(text))
        out += text
    else:
        dialect.writers[tag](out, value, depth)
