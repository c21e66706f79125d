"""Python classes made from schemas at run time: slotted, typed, with defaults.

Structs become msgspec.Structs: their constructor, comparison and repr run natively, and decoding
creates them by position (benchmarks/bond.py compares them with a slotted class written by hand).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol, cast

import msgspec

__all__ = ["NamedField", "make_enum", "make_struct", "set_python_names"]

# ASCII only: Python normalises other identifiers in source, but not in getattr.
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class NamedField(Protocol):
    """A field of a schema."""

    id: int
    name: str
    python_name: str


def set_python_names(fields: Iterable[NamedField], *, taken: set[str]) -> None:
    """Set each field's `python_name`: legal, and not yet used by a base.

    Underscores are appended to a name that Python reserves or a base has used; one that is not an
    ASCII identifier becomes `field_ID`. Code is generated from these names and from no others.
    """
    for field in fields:
        name = field.name if _IDENTIFIER.match(field.name) else f"field_{field.id}"
        if name.startswith("__"):
            name = f"field{name}"
        while keyword.iskeyword(name) or name in taken:
            name += "_"
        taken.add(name)
        field.python_name = name


def make_struct(
    struct: Any, fields: Sequence[tuple[str, Any, Any]], *, base: type[Any] | None
) -> type[Any]:
    """The class of a StructDef. `fields` are names, annotations and defaults of its own fields,
    `base` is the class of its base."""
    return msgspec.defstruct(
        _class_name(struct.name),
        fields,
        bases=(msgspec.Struct if base is None else base,),
        module=struct.namespace or "bond",
        namespace={"__bond_struct__": struct, "__doc__": f"Bond struct {struct.full_name}."},
    )


def make_enum(name: str, constants: Mapping[str, int], *, module: str) -> type[IntEnum]:
    """The IntEnum of an enumeration; an underscore is appended to names that Python reserves."""
    members: dict[str, int] = {}
    for constant, value in constants.items():
        legal = constant
        while legal == "mro" or legal.startswith("_") or keyword.iskeyword(legal):
            legal = f"{legal.lstrip('_') or 'value'}_"
        while legal in members:
            legal += "_"
        members[legal] = value
    # mypy reads the functional form only where the name and members are literals.
    made = IntEnum(_class_name(name), members, module=module)  # type: ignore[misc]  # see above
    return cast("type[IntEnum]", made)


def _class_name(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "Struct"
