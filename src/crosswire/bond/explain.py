"""Why a value could not be encoded: field and reason, searched for after a failure only.

Encoders don't check values, which would cost time for each of them: they let Python raise, and the
error is explained here.
"""

from __future__ import annotations

from math import isfinite
from struct import error as StructError  # noqa: N812 - it is a class
from struct import pack
from typing import Any

from crosswire.bond.schema import (
    NOTHING,
    BlobType,
    BondedType,
    DataType,
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
from crosswire.bond.values import Bonded
from crosswire.errors import BondEncodeError

__all__ = ["explain", "find_fault"]

_INT32 = (-(1 << 31), (1 << 31) - 1)


def explain(value: Any, struct: StructDef, cause: Exception) -> BondEncodeError:
    """The error to raise for `value`, which failed to encode with `cause`."""
    try:
        fault = find_fault(value, struct, "", 64)
    except RecursionError:
        fault = None
    return fault or BondEncodeError(f"{type(value).__name__} as {struct.full_name}: {cause}")


def find_fault(value: Any, kind: Type, path: str, depth: int) -> BondEncodeError | None:
    """The error in `value` as a `kind`, or None."""
    if depth <= 0:
        return BondEncodeError("nested deeper than the limit allows", path=path)
    match kind:
        case PrimitiveType() | EnumDef():
            return _scalar_fault(value, kind, path)
        case StructDef():
            return _struct_fault(value, kind, path, depth)
        case BondedType():
            if isinstance(value, Bonded) or hasattr(value, "__bond_struct__"):
                return None
            return _mismatch(value, kind, path)
        case BlobType():
            if isinstance(value, bytes | bytearray | memoryview):
                return None
            return _mismatch(value, kind, path)
        case NullableType():
            return None if value is None else find_fault(value, kind.element, path, depth - 1)
        case ListType() | SetType():
            if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__"):
                return _mismatch(value, kind, path)
            items = ((f"{path}[{number}]", item) for number, item in enumerate(value))
            return _first(find_fault(item, kind.element, where, depth - 1) for where, item in items)
        case MapType():
            if not isinstance(value, dict):
                return _mismatch(value, kind, path)
            return _first(
                find_fault(key, kind.key, f"{path} key {key!r}", depth - 1)
                or find_fault(item, kind.element, f"{path}[{key!r}]", depth - 1)
                for key, item in value.items()
            )


def _struct_fault(value: Any, kind: StructDef, path: str, depth: int) -> BondEncodeError | None:
    if not all(hasattr(value, field.python_name) for field in kind.all_fields):
        return _mismatch(value, kind, path)
    return _first(
        _field_fault(getattr(value, field.python_name), field, path, depth)
        for field in kind.all_fields
    )


def _field_fault(value: Any, field: FieldDef, path: str, depth: int) -> BondEncodeError | None:
    where = f"{path}.{field.python_name}" if path else field.python_name
    if field.default is NOTHING and value is None:
        if field.is_required:
            return BondEncodeError("required, and nothing", path=where)
        return None
    return find_fault(value, field.type, where, depth - 1)


def _scalar_fault(value: Any, kind: PrimitiveType | EnumDef, path: str) -> BondEncodeError | None:
    if isinstance(kind, EnumDef) or kind.is_integer:
        low, high = _INT32 if isinstance(kind, EnumDef) else (kind.minimum, kind.maximum)
        if not isinstance(value, int):
            return _mismatch(value, kind, path)
        if not low <= value <= high:
            return BondEncodeError(f"{value} is not in {low}–{high} ({kind.text})", path=path)
        return None
    if kind.wire in (DataType.STRING, DataType.WSTRING):
        if not isinstance(value, str):
            return _mismatch(value, kind, path)
        if kind.wire is DataType.STRING and any("\ud800" <= char <= "\udfff" for char in value):
            return BondEncodeError("a surrogate, which UTF-8 can't hold", path=path)
        return None
    if kind.wire is DataType.BOOL:
        return None if value in (True, False) else _mismatch(value, kind, path)
    if not isinstance(value, int | float):
        return _mismatch(value, kind, path)
    if kind.wire is DataType.FLOAT and isfinite(value):
        try:
            pack("<f", value)
        except (OverflowError, StructError):
            return BondEncodeError(f"{value} is too large for a float", path=path)
    return None


def _mismatch(value: Any, kind: Type, path: str) -> BondEncodeError:
    return BondEncodeError(f"{type(value).__name__} where {kind.text} is expected", path=path)


def _first(faults: Any) -> BondEncodeError | None:
    return next((fault for fault in faults if fault is not None), None)
