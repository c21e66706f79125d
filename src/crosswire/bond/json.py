"""Bond as JSON, in the mapping of Bond's Simple JSON, by schema.

    struct          an object with the fields of the struct and its bases; keys are field names,
                    or the attribute JsonName
    number, bool    as in JSON; what JSON lacks is "NaN", "Infinity" or "-Infinity"
    string          a string, and so is wstring
    enum            its constant's name, or the number if it has none; both are read
    list, set       an array
    map             an array of key, value, key, value …; if keys are texts an object is read too
    blob            an array of the bytes as signed numbers; unsigned ones are read too
    nullable        null, or an array of the one value; a value without the array is read too
    bonded          the struct

A field that is `nothing` is omitted. When reading, unknown keys are skipped, and null or a missing
key leave a field at its default. Numbers must fit their type.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, isnan, nan
from struct import error as StructError  # noqa: N812 - it is a class
from struct import pack, unpack
from typing import Any, Final, TypeAlias

import msgspec

from crosswire.bond.dialect import ordered
from crosswire.bond.explain import explain
from crosswire.bond.schema import (
    DEFAULT_LIMITS,
    NOTHING,
    BlobType,
    BondedType,
    DataType,
    DecodeLimits,
    EnumDef,
    FieldDef,
    ListType,
    MapType,
    NullableType,
    PrimitiveType,
    SetType,
    StructDef,
    Type,
)
from crosswire.bond.values import Bonded, OrderedSet
from crosswire.errors import BondDecodeError, BondEncodeError, BondSchemaError

__all__ = ["decode", "encode", "from_builtins", "to_builtins"]

_Writer: TypeAlias = Callable[[Any, int], Any]
_Reader: TypeAlias = Callable[[Any, int, list[int]], Any]

_WORDS: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
_TEXTS: Final = (DataType.STRING, DataType.WSTRING)
_FLOATS: Final = (DataType.FLOAT, DataType.DOUBLE)
_EXACT_INTEGERS: Final = 1 << 53  # below it every integer is a double exactly


def encode(value: Any, struct: StructDef, *, omit_defaults: bool = False) -> bytes:
    """JSON, UTF-8. All fields are written, as Bond's C++ does, or as its C# only those that a
    binary encoding would hold. Raises BondEncodeError.
    """
    try:
        return msgspec.json.encode(to_builtins(value, struct, omit_defaults=omit_defaults))
    except UnicodeEncodeError as error:
        raise BondEncodeError("a surrogate, which JSON in UTF-8 can't hold") from error


def decode(data: bytes | str, struct: StructDef, *, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """A `struct.python_class`. Raises BondDecodeError."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BondDecodeError(f"not JSON: {error}") from None
    except RecursionError:
        raise BondDecodeError("nested deeper than the limit allows") from None
    return from_builtins(found, struct, limits=limits)


def to_builtins(value: Any, struct: StructDef, *, omit_defaults: bool = False) -> dict[str, Any]:
    """What `encode` writes, as dict, list, str, int, float, bool and None."""
    try:
        found: dict[str, Any] = _struct_writer(struct, omit_defaults)(value, DEFAULT_LIMITS.depth)
    except (AttributeError, KeyError, OverflowError, StructError, TypeError, ValueError) as error:
        raise explain(value, struct, error) from error
    return found


def from_builtins(found: Any, struct: StructDef, *, limits: DecodeLimits = DEFAULT_LIMITS) -> Any:
    """A `struct.python_class` from what JSON was decoded to. Raises BondDecodeError."""
    try:
        return _struct_reader(struct)(found, limits.depth, [limits.values])
    except _JsonFault as fault:
        raise BondDecodeError(fault.text()) from None


# --------------------------------------------------------------------------------------- writing


def _struct_writer(struct: StructDef, omit_defaults: bool) -> _Writer:
    key = ("json", "short writer" if omit_defaults else "writer")
    found: _Writer | None = struct.codecs.get(key)
    if found is not None:
        return found
    plan: list[tuple[str, str, FieldDef, _Writer]] = []

    def write(value: Any, depth: int) -> dict[str, Any]:
        if depth <= 0:
            raise BondEncodeError("nested deeper than the limit allows, or a value inside itself")
        found: dict[str, Any] = {}
        for name, attribute, field, write_field in plan:
            item = getattr(value, attribute)
            if item is None and field.default is NOTHING:
                if field.is_required:
                    raise BondEncodeError("required, and nothing", path=field.name)
            elif not (omit_defaults and _is_default(item, field)):
                found[name] = write_field(item, depth - 1)
        return found

    struct.codecs[key] = write  # before its fields: it may be one of them
    plan += [
        (name, field.python_name, field, _writer(field.type, omit_defaults))
        for name, field in _json_fields(struct).items()
    ]
    return write


def _is_default(value: Any, field: FieldDef) -> bool:
    if not field.may_be_omitted or field.default is NOTHING:
        return False
    match field.type:
        case PrimitiveType() | EnumDef():
            return bool(value == field.default)
        case NullableType():
            return value is None
        case _:
            return not len(value)


def _json_fields(struct: StructDef) -> dict[str, FieldDef]:
    fields: dict[str, FieldDef] = {}
    for field in struct.all_fields:
        if field.json_name in fields:
            raise BondSchemaError(
                f"struct {struct.full_name} and its bases have two fields {field.json_name}, "
                "which JSON can't distinguish"
            )
        fields[field.json_name] = field
    return fields


def _writer(kind: Type, omit_defaults: bool) -> _Writer:
    match kind:
        case PrimitiveType():
            return _scalar_writer(kind)
        case EnumDef():
            names = {number: name for name, number in reversed(kind.by_name.items())}
            return lambda value, _: names.get(_integer(value, -(1 << 31), (1 << 31) - 1), value)
        case StructDef():
            return lambda value, depth: _struct_writer(kind, omit_defaults)(value, depth)
        case BondedType():
            return lambda value, depth: _write_bonded(value, depth, omit_defaults)
        case BlobType():
            return lambda value, _: memoryview(value).cast("b").tolist()
        case NullableType():
            write = _writer(kind.element, omit_defaults)
            return lambda value, depth: None if value is None else [write(value, _inner(depth))]
        case ListType() | SetType():
            return _list_writer(kind, _writer(kind.element, omit_defaults))
        case MapType():
            return _map_writer(
                _writer(kind.key, omit_defaults), _writer(kind.element, omit_defaults)
            )


def _scalar_writer(kind: PrimitiveType) -> _Writer:
    if kind.is_integer:
        return lambda value, _: _integer(value, kind.minimum, kind.maximum)
    if kind.wire is DataType.BOOL:
        return lambda value, _: {True: True, False: False}[value]
    if kind.wire in _TEXTS:
        return lambda value, _: str.__str__(value)
    return lambda value, _: _write_float(value, kind)


def _integer(value: Any, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError(f"{value} is not in {low}–{high}")
    return int.__index__(value)


def _write_float(value: Any, kind: PrimitiveType) -> float | str:
    value = float(value)
    if isfinite(value):
        return value if kind.wire is DataType.DOUBLE else _single(value)
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _single(value: float) -> float:
    return float(unpack("<f", pack("<f", value))[0])


def _write_bonded(value: Any, depth: int, omit_defaults: bool) -> Any:
    bonded = value if isinstance(value, Bonded) else Bonded(value)
    if bonded.struct is None:
        raise BondEncodeError("a bonded of an unknown struct has no names")
    return _struct_writer(bonded.struct, omit_defaults)(bonded.decode(), depth)


def _list_writer(kind: ListType | SetType, write_one: _Writer) -> _Writer:
    def write(value: Any, depth: int) -> list[Any]:
        if isinstance(value, str | bytes | dict):
            raise TypeError(f"{type(value).__name__} where {kind.text} is expected")
        inner = _inner(depth)
        return [write_one(item, inner) for item in ordered(value)]

    return write


def _map_writer(write_key: _Writer, write_one: _Writer) -> _Writer:
    def write(value: Any, depth: int) -> list[Any]:
        inner = _inner(depth)
        found: list[Any] = []
        for key, item in value.items():
            found += (write_key(key, inner), write_one(item, inner))
        return found

    return write


def _inner(depth: int) -> int:
    if depth <= 0:
        raise BondEncodeError("nested deeper than the limit allows, or a value inside itself")
    return depth - 1


# --------------------------------------------------------------------------------------- reading


class _JsonFault(Exception):
    """What is wrong, and the way to it, innermost step first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def text(self) -> str:
        path = "".join(reversed(self.steps)).lstrip(".")
        return f"{path}: {self.reason}" if path else self.reason


def _mismatch(found: Any, expected: str) -> _JsonFault:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a truth value"}
    word = "null" if found is None else names.get(type(found), "a number")
    return _JsonFault(f"{word} where {expected} is expected")


def _struct_reader(struct: StructDef) -> _Reader:
    found: _Reader | None = struct.codecs.get(("json", "reader"))
    if found is not None:
        return found
    plan: list[tuple[str, FieldDef, _Reader]] = []

    def read(found: Any, depth: int, budget: list[int]) -> Any:
        if type(found) is not dict:
            raise _mismatch(found, f"an object ({struct.full_name})")
        _enter(depth)
        values = []
        for name, field, read_field in plan:
            item = found.get(name)
            try:
                if item is not None:
                    values.append(read_field(item, depth - 1, budget))
                elif field.is_required and not _takes_null(field, name in found):
                    raise _JsonFault("required, and missing")
                else:
                    values.append(field.initial())
            except _JsonFault as fault:
                fault.steps.append(f".{name}")
                raise
        return struct.python_class(*values)

    struct.codecs["json", "reader"] = read  # before its fields: it may be one of them
    plan += [(name, field, _reader(field.type)) for name, field in _json_fields(struct).items()]
    return read


def _takes_null(field: FieldDef, is_there: bool) -> bool:
    return is_there and isinstance(field.type, NullableType)


def _enter(depth: int) -> None:
    if depth <= 0:
        raise _JsonFault("nested deeper than the limit allows")


def _charge(count: int, budget: list[int]) -> None:
    budget[0] -= count
    if budget[0] < 0:
        raise _JsonFault("more values than the limit allows")


def _reader(kind: Type) -> _Reader:
    match kind:
        case PrimitiveType():
            return _scalar_reader(kind)
        case EnumDef():
            return lambda found, _depth, _budget: _read_enum(found, kind)
        case StructDef():
            return lambda found, depth, budget: _struct_reader(kind)(found, depth, budget)
        case BondedType():
            return lambda found, depth, budget: Bonded(
                _struct_reader(kind.struct)(found, depth, budget)
            )
        case BlobType():
            return lambda found, _depth, _budget: _read_blob(found)
        case NullableType():
            return _nullable_reader(kind)
        case ListType():
            return _list_reader(kind)
        case SetType():
            read = _list_reader(kind)
            return lambda found, depth, budget: OrderedSet(read(found, depth, budget))
        case MapType():
            return _map_reader(kind)


def _scalar_reader(kind: PrimitiveType) -> _Reader:
    if kind.is_integer:
        low, high, text = kind.minimum, kind.maximum, kind.text
        return lambda found, _depth, _budget: _read_integer(found, low, high, text)
    if kind.wire in _FLOATS:
        return lambda found, _depth, _budget: _read_float(found, kind)
    wanted = bool if kind.wire is DataType.BOOL else str

    def read(found: Any, _depth: int, _budget: list[int]) -> Any:
        if type(found) is not wanted:
            raise _mismatch(found, kind.text)
        return found

    return read


def _read_integer(found: Any, low: int, high: int, text: str) -> int:
    if type(found) is float and found.is_integer() and abs(found) < _EXACT_INTEGERS:
        found = int(found)
    if type(found) is not int:
        raise _mismatch(found, text)
    if not low <= found <= high:
        raise _JsonFault(f"{found} is not in {low}–{high} ({text})")
    return found


def _read_float(found: Any, kind: PrimitiveType) -> float:
    if type(found) is str and found in _WORDS:
        return _WORDS[found]
    if type(found) not in (int, float):
        raise _mismatch(found, kind.text)
    try:
        return float(found) if kind.wire is DataType.DOUBLE else _single(float(found))
    except OverflowError:
        raise _JsonFault(f"{found} is too large for a {kind.text}") from None


def _read_enum(found: Any, kind: EnumDef) -> int:
    if type(found) is str:
        number = kind.by_name.get(found)
        if number is None:
            raise _JsonFault(f"{found!r} is not in {kind.full_name}")
    else:
        number = _read_integer(found, -(1 << 31), (1 << 31) - 1, kind.full_name)
    return kind.members.get(number, number)


def _read_blob(found: Any) -> bytes:
    if type(found) is not list:
        raise _mismatch(found, "an array of bytes")
    for number, item in enumerate(found):
        if type(item) is not int or not -128 <= item <= 255:
            fault = _JsonFault("not a byte")
            fault.steps.append(f"[{number}]")
            raise fault
    return bytes([item & 0xFF for item in found])


def _nullable_reader(kind: NullableType) -> _Reader:
    read_one = _reader(kind.element)
    # A bare array would be taken for the array around the value.
    is_array = isinstance(kind.element, ListType | SetType | MapType | BlobType | NullableType)

    def read(found: Any, depth: int, budget: list[int]) -> Any:
        _enter(depth)
        if found is None or found == []:
            return None
        _charge(kind.element.weight, budget)
        if type(found) is list and len(found) == 1:
            return read_one(found[0], depth - 1, budget)
        if is_array or type(found) is list:
            raise _mismatch(found, "null or an array of one")
        return read_one(found, depth - 1, budget)

    return read


def _list_reader(kind: ListType | SetType) -> _Reader:
    read_one = _reader(kind.element)

    def read(found: Any, depth: int, budget: list[int]) -> list[Any]:
        if type(found) is not list:
            raise _mismatch(found, f"an array ({kind.text})")
        _enter(depth)
        _charge(len(found) * kind.element.weight, budget)
        items: list[Any] = []
        try:
            for item in found:
                items.append(read_one(item, depth - 1, budget))
        except _JsonFault as fault:
            fault.steps.append(f"[{len(items)}]")
            raise
        return items

    return read


def _map_reader(kind: MapType) -> _Reader:
    read_key, read_one = _reader(kind.key), _reader(kind.element)
    has_text_keys = kind.key.wire in _TEXTS
    weight = kind.key.weight + kind.element.weight

    def read(found: Any, depth: int, budget: list[int]) -> dict[Any, Any]:
        if type(found) is dict and has_text_keys:
            pairs = list(found.items())
        elif type(found) is list and len(found) % 2 == 0:
            pairs = list(zip(found[::2], found[1::2], strict=True))
        else:
            raise _mismatch(found, f"an array of keys and values ({kind.text})")
        _enter(depth)
        _charge(len(pairs) * weight, budget)
        items: dict[Any, Any] = {}
        for key, item in pairs:
            try:
                items[read_key(key, depth - 1, budget)] = read_one(item, depth - 1, budget)
            except _JsonFault as fault:
                fault.steps.append(f"[{key!r}]")
                raise
        return items

    return read
