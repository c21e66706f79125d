"""The Python classes of structs and enumerations."""

from __future__ import annotations

import typing
from enum import IntEnum

import pytest

from crosswire.bond import fast, idl
from crosswire.bond.schema import PRIMITIVES, FieldDef, StructDef
from crosswire.bond.values import Bonded, OrderedSet
from crosswire.errors import BondSchemaError

from .samples import struct


def test_feels_like_a_dataclass() -> None:
    params = struct("examples.calc.Params").python_class
    value = params(x=67, y=87)
    assert repr(value) == "Params(x=67, y=87, operation=<Operation.Add: 0>)"
    assert value == params(67, 87)
    assert value != params(67, 88)
    with pytest.raises(TypeError):
        params(z=1)
    with pytest.raises(AttributeError):
        value.z = 1


def test_mutable_defaults_are_not_shared() -> None:
    containers = struct("samples.Containers").python_class
    one, other = containers(), containers()
    one.list_int32.append(1)
    one.set_string.add("x")
    one.inner.number = 5
    assert other == containers()


def test_defaults() -> None:
    value = struct("samples.Modifiers").python_class()
    assert (value.seven, value.text_default, value.true_default) == (7, "abc", True)
    assert value.maybe_number is value.maybe_vector is value.maybe_text is None


def test_classes_derive_as_structs_do() -> None:
    derived, base = struct("samples.Derived"), struct("samples.Base")
    assert issubclass(derived.python_class, base.python_class)
    # A derived struct is written as the base it is handed in for, as C# slices it.
    value = derived.python_class(count=5, note="n")
    assert fast.decode(fast.encode(value, base), base) == base.python_class(count=5)


def test_types_are_annotated() -> None:
    hints = typing.get_type_hints(struct("samples.Containers").python_class)
    inner = struct("samples.Inner").python_class
    assert hints["list_int32"] == list[int]
    assert hints["set_string"] == OrderedSet[str]
    assert hints["map_uint64_struct"] == dict[int, inner]  # type: ignore[valid-type]
    assert hints["nullable_struct"] == inner | None
    assert hints["bonded_inner"] is Bonded
    recursive = typing.get_type_hints(struct("bond.TypeDef").python_class)
    assert recursive["element"] == typing.Any | None


def test_names_that_python_reserves() -> None:
    kind = idl.parse(
        "namespace n enum E { None, mro, _x_, __y__, ok, name }"
        "struct B { 0: int8 x; 1: int8 from; }"
        "struct S : B { 0: int8 x; 1: int8 class_; 2: int8 __init__; 3: int8 größe; 4: E e = None;"
        " 5: int8 self; 6: int8 data; 7: int8 pos; }"
    ).struct("n.S")
    names = [field.python_name for field in kind.all_fields]
    assert names == [
        *("x", "from_", "x_", "class_", "field__init__", "field_3", "e", "self", "data", "pos")
    ]
    value = kind.python_class(*range(1, 7), 1, 8, 9, 10)
    assert fast.decode(fast.encode(value, kind), kind) == value
    enum = kind.field("e").type.python_class  # type: ignore[union-attr]
    assert issubclass(enum, IntEnum)
    assert [each.name for each in enum] == ["None_", "mro_", "x__", "y___", "ok", "name"]


@pytest.mark.parametrize("name", ["a b", "x = 1\nimport os", "", "f(", "été", "\0", "1"])
def test_no_name_reaches_generated_code_unchecked(name: str) -> None:
    kind = StructDef(name, namespace=name).complete([FieldDef(3, name, PRIMITIVES["int8"])])
    assert kind.fields[0].python_name == "field_3"
    value = kind.python_class(field_3=5)
    assert fast.decode(fast.encode(value, kind), kind).field_3 == 5


def test_field_ids_are_checked() -> None:
    with pytest.raises(BondSchemaError, match="65535"):
        FieldDef(65536, "x", PRIMITIVES["int8"])
    with pytest.raises(BondSchemaError, match="twice"):
        StructDef("S").complete([FieldDef(0, each, PRIMITIVES["int8"]) for each in "ab"])


def test_ordered_sets() -> None:
    value = OrderedSet([2, 1, 2])
    value.add(0)
    value.discard(1)
    value.discard(9)
    assert list(value) == [2, 0]
    assert value == {0, 2}
    assert 2 in value
    assert repr(value) == "OrderedSet([2, 0])"
