"""Random .bond files, and values for the structs in them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from crosswire.bond import idl
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
from crosswire.bond.values import Bonded, OrderedSet

SCALARS = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float", "double", "string", "wstring", "Color"),
)
IDS = st.one_of(st.integers(0, 8), st.sampled_from([254, 255, 256, 65534, 65535]))


@st.composite
def files(draw: st.DrawFn) -> str:
    """A namespace `any` with an enum and structs S0, S1 …; each may use those before it."""
    lines = ["namespace any", "enum Color { Red, Green = 7, Blue = -5 }"]
    lines.append("struct Pair<T, U> { 0: T first; 1: vector<U> rest; }")
    for number in range(draw(st.integers(1, 4))):
        base = f" : S{number - 1}" if number and draw(st.booleans()) else ""
        ids = draw(st.lists(IDS, unique=True, max_size=6))
        fields = [draw(_fields(field_id, number)) for field_id in ids]
        lines.append(f"struct S{number}{base} {{ {' '.join(fields)} }}")
    return "\n".join(lines)


@st.composite
def _fields(draw: st.DrawFn, field_id: int, number: int) -> str:
    kind = draw(_types(number, 2))
    modifier = draw(st.sampled_from(["", "", "optional ", "required ", "required_optional "]))
    default = ""
    is_struct = kind.startswith(("S", "bonded", "Pair"))
    if kind == "Color":
        default = " = " + draw(st.sampled_from(["Red", "Green", "Blue"]))
    elif not is_struct and modifier in ("", "optional ") and draw(st.booleans()):
        default = draw(st.sampled_from([" = nothing", _some_default(kind)]))
    # Ids differ, so these names do; across bases they may be the same.
    return f"{field_id}: {modifier}{kind} f{field_id}{default};"


def _some_default(kind: str) -> str:
    if kind in ("float", "double"):
        return " = 1.5"
    if "int" in kind and "<" not in kind:
        return " = 7"
    return {"string": ' = "abc"', "wstring": ' = L"abc"', "bool": " = true"}.get(kind, "")


@st.composite
def _types(draw: st.DrawFn, number: int, depth: int) -> str:
    simple = st.sampled_from([*SCALARS, "blob"])
    if not depth:
        return draw(simple)
    inner = _types(number, depth - 1)
    key = draw(st.sampled_from(SCALARS))
    choices: list[st.SearchStrategy[str]] = [
        simple,
        inner.map(lambda each: f"vector<{each}>"),
        inner.map(lambda each: f"list<{each}>"),
        inner.map(lambda each: f"nullable<{each}>"),
        inner.map(lambda each: f"map<{key}, {each}>"),
        inner.map(lambda each: f"Pair<{key}, {each}>"),
        st.just(f"set<{key}>"),
        st.just(f"nullable<S{number}>"),
    ]
    if number:
        earlier = f"S{draw(st.integers(0, number - 1))}"
        choices += [st.just(earlier), st.just(f"bonded<{earlier}>")]
    return draw(st.one_of(choices))


@st.composite
def structs(draw: st.DrawFn) -> StructDef:
    module = idl.parse(draw(files()), "any.bond")
    names = [name for name in module.structs if name.startswith("any.S")]
    return module.structs[draw(st.sampled_from(sorted(names)))]


def values(kind: Type, depth: int = 3) -> st.SearchStrategy[Any]:
    """A value of a type; below `depth` whatever can be empty is."""
    match kind:
        case PrimitiveType():
            return _scalars(kind)
        case EnumDef():
            numbers = st.one_of(st.sampled_from(sorted(kind.members)), st.integers(-9, 9))
            return numbers.map(lambda number: kind.members.get(number, number))
        case BlobType():
            return st.binary(max_size=20)
        case StructDef():
            return _struct_values(kind, depth - 1)
        case BondedType():
            return _struct_values(kind.struct, depth - 1).map(Bonded)
    if depth <= 0:
        return st.builds(kind.initial)
    match kind:
        case NullableType():
            return st.none() | values(kind.element, depth - 1)
        case ListType():
            return st.lists(values(kind.element, depth - 1), max_size=9)
        case SetType():
            return st.lists(values(kind.element, depth - 1), max_size=9).map(OrderedSet)
        case MapType():
            return st.dictionaries(
                values(kind.key, depth - 1), values(kind.element, depth - 1), max_size=9
            )


def _scalars(kind: PrimitiveType) -> st.SearchStrategy[Any]:
    if kind.is_integer:
        return st.integers(kind.minimum, kind.maximum)
    if kind.wire is DataType.BOOL:
        return st.booleans()
    if kind.wire in (DataType.STRING, DataType.WSTRING):
        return st.text(max_size=20)
    return st.floats(allow_nan=False, width=32 if kind.wire is DataType.FLOAT else 64)


def _struct_values(struct: StructDef, depth: int) -> st.SearchStrategy[Any]:
    return st.builds(
        struct.python_class,
        **{field.python_name: _field_values(field, depth) for field in struct.all_fields},
    )


def _field_values(field: FieldDef, depth: int) -> st.SearchStrategy[Any]:
    given = values(field.type, depth)
    if field.default is NOTHING:
        return st.none() | given
    return given if field.is_required else st.builds(field.initial) | given


@st.composite
def samples(draw: st.DrawFn) -> tuple[StructDef, list[Any]]:
    """A struct and a few values of it: making the strategy costs more than drawing from it."""
    struct = draw(structs())
    some = values(struct)
    return struct, [draw(some) for _ in range(3)]
