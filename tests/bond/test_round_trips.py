"""Random schemas and values through all encodings, with and without the schema."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosswire.bond import binary, json, schemadef
from crosswire.bond.schema import DEFAULT_LIMITS, StructDef
from crosswire.bond.tree import TreeField, TreeStruct
from crosswire.errors import BondSchemaError

from .samples import dialects
from .strategies import samples

random_samples = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@random_samples
@given(samples())
def test_values_survive(sample: tuple[StructDef, list[Any]]) -> None:
    struct, values = sample
    for dialect, value in product(dialects(), values):
        wire = binary.encode(dialect, value, struct)
        again, size = binary.decode(dialect, wire, struct, DEFAULT_LIMITS)
        assert again == value
        assert size == len(wire)
        assert binary.encode(dialect, again, struct) == wire


@random_samples
@given(samples())
def test_trees_are_equal_and_encode_to_each_other(sample: tuple[StructDef, list[Any]]) -> None:
    struct, values = sample
    for value in values:
        wires = {each: binary.encode(each, value, struct) for each in dialects()}
        trees = [binary.decode_tree(each, wire, DEFAULT_LIMITS)[0] for each, wire in wires.items()]
        assert all(tree == trees[0] for tree in trees)
        for dialect, wire in wires.items():
            assert binary.encode_tree(dialect, trees[0]) == wire


@random_samples
@given(samples(), st.randoms(use_true_random=False))
def test_fields_are_read_in_any_order_among_unknown_ones(
    sample: tuple[StructDef, list[Any]], random: Any
) -> None:
    struct, values = sample
    for dialect, value in product(dialects(), values):
        wire = binary.encode(dialect, value, struct)
        tree = binary.decode_tree(dialect, wire, DEFAULT_LIMITS)[0]
        levels = []
        for level in tree.levels:
            strangers = [
                TreeField(20_000 + field.id // 8, field.type, field.value) for field in level
            ]
            mixed = [*level, *strangers]
            random.shuffle(mixed)
            levels.append(tuple(mixed))
        strange = binary.encode_tree(dialect, TreeStruct(tuple(levels)))
        assert binary.decode(dialect, strange, struct, DEFAULT_LIMITS)[0] == value


@random_samples
@given(samples())
def test_simple_json_survives(sample: tuple[StructDef, list[Any]]) -> None:
    struct, values = sample
    for omit_defaults, value in product((False, True), values):
        try:
            text = json.encode(value, struct, omit_defaults=omit_defaults)
        except BondSchemaError:  # two fields of one name, in a struct and its base
            return
        assert json.decode(text, struct) == value


@random_samples
@given(samples())
def test_the_schema_itself_survives(sample: tuple[StructDef, list[Any]]) -> None:
    struct, values = sample
    dumped = schemadef.dump(struct, list_sub_types=True)
    loaded = schemadef.load(dumped)
    assert schemadef.dump(loaded, list_sub_types=True) == dumped
    for dialect, value in product(dialects(), values):
        wire = binary.encode(dialect, value, struct)
        again, _ = binary.decode(dialect, wire, loaded, DEFAULT_LIMITS)
        assert binary.encode(dialect, again, loaded) == wire
