"""Schemas that travel as data."""

from __future__ import annotations

from typing import Any

import pytest

from crosswire.bond import core_module, idl, marshal, schemadef
from crosswire.bond.schema import NOTHING, BondedType, ListType, Modifier, NullableType
from crosswire.errors import BondDecodeError, BondSchemaError

from .samples import COMPAT, struct

SCHEMA = (COMPAT / "compat.schema.dat").read_bytes()


def core(struct_name: str, /, **values: Any) -> Any:
    return core_module().struct(f"bond.{struct_name}").python_class(**values)


def test_reads_one_of_bonds_own() -> None:
    root = schemadef.load(SCHEMA)
    assert root.full_name == "unittest.compat.Compat"
    assert root.attributes == {"bar": "foo", "qux": "baz"}
    assert isinstance(root.field("m_nullable_string").type, NullableType)
    generic = root.field("m_generic2").type
    assert generic.text == "unittest.compat.Generic2<float>"
    assert root.field("m_enum1").json_name == "enum1"
    assert root.field("m_enum2").default == 3


def test_writes_what_it_read() -> None:
    root = schemadef.load(SCHEMA)
    assert schemadef.dump(schemadef.load(schemadef.dump(root)), protocol=marshal.FAST_V1)
    again = schemadef.load(schemadef.dump(root, list_sub_types=True))
    assert [(field.id, field.type.text) for field in again.all_fields] == [
        (field.id, field.type.text) for field in root.all_fields
    ]


def test_modifiers_defaults_and_bonded_survive() -> None:
    kind = struct("samples.Modifiers")
    again = schemadef.load(schemadef.dump(kind))
    assert [field.modifier for field in again.fields] == [field.modifier for field in kind.fields]
    assert [field.default for field in again.fields] == [field.default for field in kind.fields]
    assert again.field("must").modifier is Modifier.REQUIRED
    assert again.field("maybe_text").default is NOTHING
    assert isinstance(
        schemadef.load(schemadef.dump(struct("samples.Poly"))).fields[0].type, BondedType
    )


def test_without_sub_types_a_nullable_is_a_list() -> None:
    kind = idl.parse("namespace n struct S { 0: nullable<int8> x; 1: blob y; }").struct("n.S")
    plain = schemadef.load(schemadef.dump(kind))
    assert [type(field.type) for field in plain.fields] == [ListType, ListType]
    told = schemadef.load(schemadef.dump(kind, list_sub_types=True))
    assert [field.type.text for field in told.fields] == ["nullable<int8>", "blob"]


def test_a_recursive_schema_survives() -> None:
    kind = core_module().struct("bond.SchemaDef")
    again = schemadef.load(schemadef.dump(kind, list_sub_types=True))
    assert marshal.marshal(marshal.unmarshal(SCHEMA, again), again) == SCHEMA


BT_STRUCT, BT_LIST, BT_SET, BT_MAP, BT_INT8, BT_STRING = 10, 11, 12, 13, 14, 9


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"type": {"struct_def": 5}}, "without a struct 5"),
        ({"type": {"id": BT_LIST}}, "incomplete type 11"),
        ({"type": {"id": 99}}, "incomplete type 99"),
        ({"type": {"id": 127}}, "incomplete type 127"),
        ({"type": {"id": BT_MAP, "element": {"id": BT_INT8}}}, "without keys"),
        ({"type": {"id": BT_SET, "element": {}}}, "keys of type"),
        ({"type": {}}, "contains itself"),
        ({"type": {"id": BT_INT8}, "default": {"int_value": 300}}, "the default 300"),
        ({"type": {"id": BT_INT8}, "modifier": 9}, "unknown modifier"),
    ],
)
def test_contradictions_are_refused(field: dict[str, Any], reason: str) -> None:
    def kind(source: dict[str, Any]) -> Any:
        inner = {
            key: kind(each) if key in ("element", "key") else each for key, each in source.items()
        }
        return core("TypeDef", **inner)

    metadata = core(
        "Metadata",
        name="x",
        modifier=field.get("modifier", 0),
        default_value=core("Variant", **field.get("default", {})),
    )
    made = core("FieldDef", metadata=metadata, id=0, type=kind(field["type"]))
    declared = core(
        "StructDef", metadata=core("Metadata", name="S", qualified_name="n.S"), fields=[made]
    )
    with pytest.raises(BondSchemaError, match=reason):
        schemadef.from_value(core("SchemaDef", structs=[declared]))


def test_bases_in_a_circle_are_refused() -> None:
    one = core("StructDef", base_def=core("TypeDef", struct_def=0))
    with pytest.raises(BondSchemaError):
        schemadef.from_value(core("SchemaDef", structs=[one]))


def test_a_long_line_of_bases_is_refused() -> None:
    line = [core("StructDef", metadata=core("Metadata", name="S0"))]
    for index in range(70):
        line.append(core("StructDef", base_def=core("TypeDef", struct_def=index)))
    with pytest.raises(BondSchemaError, match="too many structs"):
        schemadef.from_value(core("SchemaDef", structs=line))
    assert schemadef.from_value(core("SchemaDef", structs=line[:64]))


def test_a_root_must_be_a_struct() -> None:
    with pytest.raises(BondSchemaError, match="not a struct"):
        schemadef.from_value(core("SchemaDef", root=core("TypeDef", id=BT_STRING)))


def test_bytes_that_are_no_schema_are_refused() -> None:
    with pytest.raises(BondDecodeError):
        schemadef.load(b"nonsense")
