"""Bytes of Bond's own C# and C++: read, and written again to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from crosswire.bond import binary, compact, fast, marshal, schemadef
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import DEFAULT_LIMITS
from crosswire.errors import BondDecodeError

from .samples import COMPAT, core_module, struct, vectors

PLAIN = {"fast_binary_v1": fast.FAST, "compact_binary_v1": compact.COMPACT1}
VECTORS = [pytest.param(each, id=each["name"]) for each in vectors()]


def parts(vector: dict[str, Any]) -> tuple[Dialect, bytes]:
    """How the vector is encoded, and its struct without the magic."""
    wire = bytes.fromhex(vector["wire"])
    if vector["encoding"] in PLAIN:
        return PLAIN[vector["encoding"]], wire
    return marshal.protocol_of(wire), wire[4:]


@pytest.mark.parametrize("vector", VECTORS)
def test_decodes_and_encodes_to_the_same_bytes(vector: dict[str, Any]) -> None:
    dialect, wire = parts(vector)
    declared = struct(vector["type"])
    value, size = binary.decode(dialect, wire, declared, DEFAULT_LIMITS)
    assert size == len(wire)
    assert binary.encode(dialect, value, declared) == wire


@pytest.mark.parametrize("vector", VECTORS)
def test_tree_encodes_to_the_same_bytes(vector: dict[str, Any]) -> None:
    dialect, wire = parts(vector)
    tree, size = binary.decode_tree(dialect, wire, DEFAULT_LIMITS)
    assert size == len(wire)
    assert binary.encode_tree(dialect, tree) == wire


@pytest.mark.parametrize("vector", VECTORS)
def test_bytes_after_the_struct_are_ignored(vector: dict[str, Any]) -> None:
    dialect, wire = parts(vector)
    value, size = binary.decode(dialect, wire + b"\xff\x10", struct(vector["type"]), DEFAULT_LIMITS)
    assert size == len(wire)
    assert binary.encode(dialect, value, struct(vector["type"])) == wire


@pytest.mark.parametrize("vector", VECTORS)
def test_every_cut_is_refused(vector: dict[str, Any]) -> None:
    dialect, wire = parts(vector)
    for cut in range(len(wire)):
        with pytest.raises(BondDecodeError):
            binary.decode(dialect, wire[:cut], struct(vector["type"]), DEFAULT_LIMITS)
        with pytest.raises(BondDecodeError):
            binary.decode_tree(dialect, wire[:cut], DEFAULT_LIMITS)


@pytest.mark.parametrize("vector", [each for each in VECTORS if "marshalled" in each.id])
def test_marshalled_round_trip(vector: dict[str, Any]) -> None:
    wire = bytes.fromhex(vector["wire"])
    declared = struct(vector["type"])
    value = marshal.unmarshal(wire, declared)
    assert marshal.marshal(value, declared, protocol=marshal.protocol_of(wire)) == wire


# ---------------------------------------------------------------------------- one large object

FAST_OBJECT = (COMPAT / "compat.fast.dat").read_bytes()
COMPACT_OBJECT = (COMPAT / "compat.compact.dat").read_bytes()
SCHEMA = (COMPAT / "compat.schema.dat").read_bytes()


def test_compat_trees_are_equal_and_whole() -> None:
    from_fast, fast_size = binary.decode_tree(fast.FAST, FAST_OBJECT, DEFAULT_LIMITS)
    from_compact, compact_size = binary.decode_tree(
        compact.COMPACT1, COMPACT_OBJECT, DEFAULT_LIMITS
    )
    assert from_fast == from_compact
    assert (fast_size, compact_size) == (len(FAST_OBJECT), len(COMPACT_OBJECT))


def test_compat_each_encodes_to_the_other() -> None:
    assert compact.encode_tree(fast.decode_tree(FAST_OBJECT)) == COMPACT_OBJECT
    assert fast.encode_tree(compact.decode_tree(COMPACT_OBJECT)) == FAST_OBJECT


def test_compat_schema_encodes_to_itself() -> None:
    schema = core_module().struct("bond.SchemaDef")
    assert marshal.marshal(marshal.unmarshal(SCHEMA, schema), schema) == SCHEMA


def test_compat_by_its_schema_is_the_same_from_both() -> None:
    declared = schemadef.load(SCHEMA)
    from_fast = fast.decode(FAST_OBJECT, declared)
    from_compact = compact.decode(COMPACT_OBJECT, declared)
    # NaNs differ from themselves, so the values are compared as written.
    assert fast.encode(from_fast, declared) == fast.encode(from_compact, declared)
    assert compact.encode(from_fast, declared) == compact.encode(from_compact, declared)


def test_compat_by_its_schema_encodes_to_the_same_bytes() -> None:
    declared = schemadef.load(SCHEMA)
    assert fast.encode(fast.decode(FAST_OBJECT, declared), declared) == FAST_OBJECT
    assert compact.encode(compact.decode(COMPACT_OBJECT, declared), declared) == COMPACT_OBJECT


def test_compat_survives_compact_v2() -> None:
    tree = fast.decode_tree(FAST_OBJECT)
    assert compact.decode_tree(compact.encode_tree(tree, version=2), version=2) == tree
