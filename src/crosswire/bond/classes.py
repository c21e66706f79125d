"""Python classes made from schemas at run time: slotted, typed, with defaults.

Structs become msgspec.Structs: their constructor, comparison and repr run natively, and decoding
makes them by position (benchmarks/bond.py has them beside a slotted class written by hand).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, cast

import msgspec

from crosswire.bond import schema
from crosswire.bond.values import Bonded, OrderedSet

__all__ = ["make_enum", "make_struct", "python_names"]

# ASCII only: Python normalises other identifiers in source, but not in getattr.
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def python_names(fields: Iterable[schema.FieldDef], *, taken: set[str]) -> None:
    """Set each field's `python_name`: legal, and not yet used by a base.

    A name that Python reserves or a base has used gets underscores behind it; one that is no ASCII
    identifier becomes `field_ID`. Code is generated from these names and from no others.
    """
    for field in fields:
        name = field.name if _IDENTIFIER.match(field.name) else f"field_{field.id}"
        if name.startswith("__"):
            name = f"field{name}"
        while keyword.iskeyword(name) or name in taken:
            name += "_"
        taken.add(name)
        field.python_name = name


def make_struct(struct: schema.StructDef) -> type[Any]:
    """The class of a struct; its base's class is its base."""
    bases = (struct.base.python_class,) if struct.base is not None else (msgspec.Struct,)
    _making.add(struct)
    try:
        fields = [(each.python_name, _field_hint(each), _default(each)) for each in struct.fields]
    finally:
        _making.discard(struct)
    return msgspec.defstruct(
        _class_name(struct.name),
        fields,
        bases=bases,
        module=struct.namespace or "bond",
        namespace={"__bond_struct__": struct, "__doc__": f"Bond struct {struct.full_name}."},
    )


def make_enum(enum: schema.EnumDef) -> type[IntEnum]:
    """The IntEnum of an enumeration."""
    members: dict[str, int] = {}
    for name, value in enum.by_name.items():
        legal = name
        while legal == "mro" or legal.startswith("_") or keyword.iskeyword(legal):
            legal = f"{legal.lstrip('_') or 'value'}_"
        while legal in members:
            legal += "_"
        members[legal] = value
    made = IntEnum(_class_name(enum.name), members, module=enum.namespace or "bond")  # type: ignore[misc]
    return cast("type[IntEnum]", made)


def _class_name(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "Struct"


def _field_hint(field: schema.FieldDef) -> Any:
    hint = _hint(field.type)
    return hint | None if field.default is schema.NOTHING else hint


def _default(field: schema.FieldDef) -> Any:
    kind = field.type
    if field.default is schema.NOTHING or isinstance(kind, schema.NullableType):
        return None
    if isinstance(kind, schema.PrimitiveType | schema.EnumDef | schema.BlobType):
        return field.initial()
    return msgspec.field(default_factory=kind.initial)


# Structs whose class is being made: where they speak of each other in a circle, one says Any.
_making: set[schema.StructDef] = set()
_MAX_MAKING: Final = 50


def _hint(kind: schema.Type) -> Any:
    """The annotation of a value."""
    match kind:
        case schema.PrimitiveType():
            return type(kind.start)
        case schema.BlobType():
            return bytes
        case schema.ListType():
            return list[_hint(kind.element)]  # type: ignore[misc]
        case schema.SetType():
            return OrderedSet[_hint(kind.element)]  # type: ignore[misc]
        case schema.MapType():
            return dict[_hint(kind.key), _hint(kind.element)]  # type: ignore[misc]
        case schema.NullableType():
            return _hint(kind.element) | None
        case schema.BondedType():
            return Bonded
        case schema.EnumDef():
            return kind.python_class | int
        case schema.StructDef():
            if kind in _making or len(_making) > _MAX_MAKING:
                return Any
            return kind.python_class
