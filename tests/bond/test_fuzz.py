"""Any bytes at all: a value or BondDecodeError, in bounded time and memory."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.bond import binary, idl, json, marshal, schemadef
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import DEFAULT_LIMITS
from crosswire.errors import BondDecodeError, BondSchemaError, BondSyntaxError

from .samples import COMPAT, VECTORS, dialects, struct, vectors

EACH = pytest.mark.parametrize("dialect", dialects(), ids=lambda each: each.name)
NAMES = sorted({each["type"] for each in vectors()})
SCHEMA = (COMPAT / "compat.schema.dat").read_bytes()
MANY = settings(max_examples=80, deadline=None)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes with some of them changed, cut out, doubled or added."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["set", "cut", "add", "double"])):
            case "set" if at < len(data):
                data[at] = draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 127, 255])))
            case "cut":
                del data[at : at + draw(st.integers(1, 5))]
            case "add":
                data[at:at] = draw(st.binary(min_size=1, max_size=6))
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 20))]
    return bytes(data)


@st.composite
def damaged_vectors(draw: st.DrawFn) -> tuple[str, bytes]:
    vector = draw(st.sampled_from(vectors()))
    wire = bytes.fromhex(vector["wire"])
    good = wire[4:] if vector["encoding"].endswith("marshalled") else wire
    return vector["type"], draw(damaged(good))


any_bytes = st.tuples(st.sampled_from(NAMES), st.binary(max_size=200))


@EACH
@MANY
@given(sample=st.one_of(damaged_vectors(), any_bytes))
def test_any_bytes_with_a_schema(dialect: Dialect, sample: tuple[str, bytes]) -> None:
    """What is read can be written, and is then read as the same."""
    kind, data = struct(sample[0]), sample[1]
    try:
        value, size = binary.decode(dialect, data, kind, DEFAULT_LIMITS)
    except BondDecodeError:
        return
    assert 0 < size <= len(data)
    wire = binary.encode(dialect, value, kind)
    again, _ = binary.decode(dialect, wire, kind, DEFAULT_LIMITS)
    assert binary.encode(dialect, again, kind) == wire


@EACH
@MANY
@given(sample=st.one_of(damaged_vectors(), any_bytes))
def test_any_bytes_without_one(dialect: Dialect, sample: tuple[str, bytes]) -> None:
    try:
        tree, size = binary.decode_tree(dialect, sample[1], DEFAULT_LIMITS)
    except BondDecodeError:
        return
    assert 0 < size <= len(sample[1])
    wire = binary.encode_tree(dialect, tree)
    assert binary.decode_tree(dialect, wire, DEFAULT_LIMITS) == (tree, len(wire))


@MANY
@given(st.one_of(st.binary(max_size=100), damaged(SCHEMA)))
def test_any_bytes_as_a_schema(data: bytes) -> None:
    try:
        kind = schemadef.load(data)
    except (BondDecodeError, BondSchemaError):
        return
    wire = schemadef.dump(kind, list_sub_types=True)
    assert schemadef.dump(schemadef.load(wire), list_sub_types=True) == wire


@MANY
@given(
    st.sampled_from(["samples.Containers", "samples.Modifiers", "samples.Derived"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["list_int32", "inner", "must", "count", "x"]), inner)
        ),
        max_leaves=20,
    ),
)
def test_any_json(name: str, found: Any) -> None:
    kind = struct(name)
    try:
        value = json.from_builtins(found, kind)
    except BondDecodeError:
        return
    assert json.decode(json.encode(value, kind), kind) == value


@MANY
@given(damaged(b'{"list_int32":[1],"inner":{"number":5},"map_string_int32":["a",1]}'))
def test_damaged_json(text: bytes) -> None:
    kind = struct("samples.Containers")
    try:
        value = json.decode(text, kind)
    except BondDecodeError:
        return
    assert json.decode(json.encode(value, kind), kind) == value


@MANY
@given(damaged((VECTORS / "samples.bond").read_bytes()))
def test_damaged_files(text: bytes) -> None:
    try:
        idl.parse(text.decode("utf-8", "replace"), "damaged.bond")
    except BondSyntaxError as error:
        assert error.line >= 1
        assert error.column >= 1


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x0A, 0x0B, 0x2B, 0x6A, 0x8B, 0xCB, 0xEA, 0xFF])
def test_long_runs_of_one_byte_stay_small(dialect: Dialect, byte: int) -> None:
    data = bytes([byte]) * 50_000
    tracemalloc.start()
    try:
        for name in ("samples.Containers", "samples.Empty", "bond.SchemaDef"):
            with suppress(BondDecodeError):
                binary.decode(dialect, data, struct(name), DEFAULT_LIMITS)
        with suppress(BondDecodeError):
            binary.decode_tree(dialect, data, DEFAULT_LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data)
    finally:
        tracemalloc.stop()


@MANY
@given(st.binary(max_size=60))
def test_any_bytes_unmarshalled(data: bytes) -> None:
    for magic in (each.magic for each in dialects()):
        try:
            tree = marshal.unmarshal_tree(magic + data)
        except BondDecodeError:
            continue
        assert marshal.unmarshal_tree(marshal.marshal_tree(tree)) == tree
