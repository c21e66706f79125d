"""Bond's rules in the binary encodings: omission, promotion, inheritance, limits, bad bytes."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest

from crosswire.bond import binary, compact, fast, idl
from crosswire.bond.bonded import DIALECTS
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import DEFAULT_LIMITS, DataType, DecodeLimits, StructDef
from crosswire.bond.tree import Nan, TreeField, TreeStruct
from crosswire.bond.values import Bonded, OrderedSet
from crosswire.errors import BondDecodeError, BondEncodeError

from .samples import dialects, struct

EACH = pytest.mark.parametrize("dialect", dialects(), ids=lambda each: each.name)


def declared(body: str) -> StructDef:
    return idl.parse(f"namespace n {body}").struct("n.S")


def through(dialect: Dialect, value: Any, written: StructDef, read: StructDef) -> Any:
    return decode(dialect, binary.encode(dialect, value, written), read)


def decode(
    dialect: Dialect, data: bytes, read: StructDef, limits: DecodeLimits = DEFAULT_LIMITS
) -> Any:
    return binary.decode(dialect, data, read, limits)[0]


# ------------------------------------------------------------------------------------- omission


def test_only_optional_fields_at_their_default_are_left_out() -> None:
    kind = declared(
        "struct T {} struct S { 0: int32 a = 7; 1: required int32 b; 2: required_optional int32 c;"
        " 3: T t; 4: bonded<T> u; 5: vector<int8> v; 6: required vector<int8> w;"
        " 7: vector<int8> x = nothing; 8: nullable<int8> y; 9: string z = nothing; }"
    )
    tree = fast.decode_tree(fast.encode(kind.python_class(), kind))
    assert [field.id for field in tree] == [1, 2, 3, 4, 6]
    tree = fast.decode_tree(fast.encode(kind.python_class(a=0, x=[], y=0, z=""), kind))
    assert [field.id for field in tree] == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_minus_zero_is_zero_and_nan_is_not_the_default() -> None:
    kind = declared("struct S { 0: double a; 1: float b; }")
    assert fast.encode(kind.python_class(a=-0.0, b=-0.0), kind) == b"\x00"
    again = fast.decode(fast.encode(kind.python_class(a=math.nan), kind), kind)
    assert math.isnan(again.a)


@EACH
def test_required_fields_must_be_there(dialect: Dialect) -> None:
    kind = declared("struct B { 0: required string name; } struct S : B { 0: int8 x; }")
    empty = declared("struct B {} struct S : B { 0: int8 x; 9: int8 y; }")
    with pytest.raises(BondDecodeError, match=r"required field n\.S\.name is missing"):
        through(dialect, empty.python_class(x=1), empty, kind)
    with pytest.raises(BondDecodeError, match=r"required field n\.S\.name is missing"):
        through(dialect, empty.python_class(y=1), empty, kind)


def test_required_and_nothing_cannot_be_written() -> None:
    kind = declared("struct S { 0: required int8 x = nothing; }")
    with pytest.raises(BondEncodeError, match="required, and nothing"):
        fast.encode(kind.python_class(), kind)


# ------------------------------------------------------------------------ other schemas' bytes

NARROWER = [
    ("uint8", "uint16"),
    ("uint8", "uint64"),
    ("uint16", "uint32"),
    ("uint32", "uint64"),
    ("int8", "int16"),
    ("int8", "int64"),
    ("int16", "int32"),
    ("int32", "int64"),
    ("float", "double"),
]


@EACH
@pytest.mark.parametrize(("narrow", "wide"), NARROWER)
def test_narrower_numbers_are_promoted(dialect: Dialect, narrow: str, wide: str) -> None:
    old = declared(
        f"struct S {{ 0: {narrow} a; 1: vector<{narrow}> b; 2: map<string, {narrow}> c; }}"
    )
    new = declared(f"struct S {{ 0: {wide} a; 1: vector<{wide}> b; 2: map<string, {wide}> c; }}")
    value = old.python_class(a=5, b=[1, 2], c={"k": 3})
    again = through(dialect, value, old, new)
    assert (again.a, again.b, again.c) == (5, [1, 2], {"k": 3})


@EACH
@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((wide, narrow) for narrow, wide in NARROWER),
        ("int32", "uint32"),
        ("uint8", "int16"),
        ("string", "wstring"),
        ("int32", "double"),
        ("bool", "uint8"),
        ("vector<int32>", "set<int32>"),
        ("vector<int32>", "vector<string>"),
        ("map<int8, int8>", "map<string, int8>"),
        ("map<int8, int8>", "map<int8, string>"),
        ("vector<int32>", "blob"),
        ("nullable<int32>", "nullable<string>"),
    ],
)
def test_other_types_are_refused(dialect: Dialect, old: str, new: str) -> None:
    written, read = (
        declared(f"struct S {{ 0: required {old} a; }}"),
        declared(f"struct S {{ 0: required {new} a; }}"),
    )
    with pytest.raises(BondDecodeError, match="is expected"):
        through(dialect, written.python_class(), written, read)


@EACH
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vector<int8>", "blob"),
        ("blob", "vector<int8>"),
        ("list<int32>", "vector<int32>"),
        ("nullable<int32>", "vector<int32>"),
        ("T", "bonded<T>"),
        ("bonded<T>", "T"),
        ("E", "int32"),
        ("int32", "E"),
    ],
)
def test_the_same_on_the_wire_is_the_same(dialect: Dialect, old: str, new: str) -> None:
    body = "enum E {{ A }} struct T {{ 0: int8 x; }} struct S {{ 0: required {} a{}; }}"
    written = declared(body.format(old, " = A" if old == "E" else ""))
    read = declared(body.format(new, " = A" if new == "E" else ""))
    wire = binary.encode(dialect, written.python_class(), written)
    assert binary.encode(dialect, decode(dialect, wire, read), read) == wire


@EACH
def test_a_derived_struct_is_read_as_its_base_and_back(dialect: Dialect) -> None:
    derived, base = struct("samples.Derived"), struct("samples.Base")
    value = derived.python_class(count=1, label="x", offset=2, flag=True, ratio=0.5, note="n")
    sliced = through(dialect, value, derived, base)
    assert sliced == base.python_class(count=1, label="x")
    grown = through(dialect, sliced, base, derived)
    assert grown == derived.python_class(count=1, label="x")


@EACH
def test_enum_values_without_a_name_are_kept(dialect: Dialect) -> None:
    params = struct("examples.calc.Params")
    value = through(dialect, params.python_class(operation=-7), params, params)
    assert value.operation == -7
    operation = params.field("operation").type.python_class  # type: ignore[union-attr]
    named = through(dialect, params.python_class(operation=3), params, params)
    assert named.operation is operation.Mul


# --------------------------------------------------------------------------------------- bonded


@EACH
def test_bonded_keeps_what_its_schema_does_not_know(dialect: Dialect) -> None:
    poly, derived = struct("samples.Poly"), struct("samples.Derived")
    inner = derived.python_class(count=1, note="far below")
    again = through(dialect, poly.python_class(one=Bonded(inner)), poly, poly)
    assert again.one == Bonded(inner)
    assert again.one.decode() == struct("samples.Base").python_class(count=1)
    assert again.one.decode(derived) == inner
    for other in dialects():
        assert through(other, again, poly, poly).one.decode(derived) == inner


def test_a_struct_may_stand_for_a_bonded() -> None:
    poly, base = struct("samples.Poly"), struct("samples.Base")
    value = poly.python_class(one=base.python_class(count=3))
    assert fast.decode(fast.encode(value, poly), poly).one.decode().count == 3


def test_bonded_refuses_what_is_no_struct() -> None:
    with pytest.raises(BondEncodeError, match="must hold a Bond struct, not int"):
        Bonded(5)
    poly = struct("samples.Poly")
    with pytest.raises(BondEncodeError, match=r"one: int where|Bond struct, not int"):
        fast.encode(poly.python_class(one=5), poly)


# ----------------------------------------------------------------------------------- containers


def test_sets_keep_their_order_and_plain_ones_are_sorted() -> None:
    kind = declared("struct S { 0: set<int32> s; }")
    kept = fast.decode(fast.encode(kind.python_class(s=OrderedSet([3, -4, 1])), kind), kind)
    assert list(kept.s) == [3, -4, 1]
    assert kept == kind.python_class(s={1, -4, 3})
    plain = fast.decode(fast.encode(kind.python_class(s={3, -4, 1}), kind), kind)
    assert list(plain.s) == [-4, 1, 3]


def test_a_nullable_holds_one_at_most() -> None:
    nullable, vector = (
        declared(f"struct S {{ 0: {each}<int8> x; }}") for each in ("nullable", "vector")
    )
    with pytest.raises(BondDecodeError, match="a nullable with 2 values"):
        fast.decode(fast.encode(vector.python_class(x=[1, 2]), vector), nullable)


def test_wstrings_pass_lone_surrogates() -> None:
    kind = declared("struct S { 0: wstring x; }")
    value = kind.python_class(x="a\ud800b")
    assert compact.decode(compact.encode(value, kind), kind) == value


def test_compact_v2_counts_small_containers_in_their_type() -> None:
    kind = declared("struct S { 0: vector<bool> x; }")
    small = compact.encode(kind.python_class(x=[True] * 6), kind, version=2)
    large = compact.encode(kind.python_class(x=[True] * 7), kind, version=2)
    assert small.hex() == "09" + "0b" + "e2" + "01" * 6 + "00"
    assert large.hex() == "0b" + "0b" + "0207" + "01" * 7 + "00"


# --------------------------------------------------------------------------- values that are wrong


@pytest.mark.parametrize("dialect", dialects(), ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("int8", 128, "a: 128 is not in -128–127"),
        ("uint16", -1, "a: -1 is not in 0–65535"),
        ("uint32", 2**32, "is not in"),
        ("int64", 2**63, "is not in"),
        ("int32", "5", "a: str where int32 is expected"),
        ("int32", 1.5, "a: float where int32 is expected"),
        ("bool", "true", "a: str where bool is expected"),
        ("string", b"x", "a: bytes where string is expected"),
        ("string", "\ud800", "surrogate"),
        ("double", "x", "a: str where double is expected"),
        ("float", 1e300, "too large for a float"),
        ("blob", "x", "a: str where blob is expected"),
        ("vector<int8>", [1, 300], r"a\[1\]: 300 is not in"),
        ("vector<string>", "abc", "a: str where"),
        ("vector<T>", [5], r"a\[0\]: int where n\.T is expected"),
        ("map<string, int8>", {"k": 300}, r"a\['k'\]: 300"),
        ("map<string, int8>", [1], "a: list where map"),
        ("nullable<T>", 5, r"a: int where n\.T is expected"),
        ("E", 2**31, "is not in"),
        ("E", "A", r"a: str where n\.E is expected"),
        ("T", None, r"a: NoneType where n\.T is expected"),
        ("vector<int8>", None, "a: NoneType where"),
    ],
)
def test_wrong_values_are_named(dialect: Dialect, kind: str, value: Any, reason: str) -> None:
    default = " = A" if kind == "E" else ""
    made = declared(
        f"enum E {{ A }} struct T {{ 0: int8 x; }} struct S {{ 0: {kind} a{default}; }}"
    )
    with pytest.raises(BondEncodeError, match=reason):
        binary.encode(dialect, made.python_class(a=value), made)


@EACH
def test_a_value_inside_itself_is_refused(dialect: Dialect) -> None:
    kind = declared("struct S { 0: nullable<S> next; 1: vector<bonded<S>> more; }")
    circle = kind.python_class()
    circle.next = circle
    with pytest.raises(BondEncodeError, match="nested deeper"):
        binary.encode(dialect, circle, kind)
    circle.next, circle.more = None, [Bonded(circle)]
    with pytest.raises(BondEncodeError, match="nested deeper"):
        binary.encode(dialect, circle, kind)


# ---------------------------------------------------------------------------------- limits


def nested(dialect: Dialect, levels: int) -> bytes:
    """A struct in a struct in a struct …, `levels` of them."""
    tree = TreeStruct(((),))
    for _ in range(levels - 1):
        tree = TreeStruct(((TreeField(0, DataType.STRUCT, tree),),))
    return binary.encode_tree(dialect, tree, 10_000)


@EACH
def test_depth_is_limited_everywhere(dialect: Dialect) -> None:
    empty = declared("struct S {}")
    linked = declared("struct S { 0: vector<S> x; 1: nullable<S> y; }")
    assert binary.decode_tree(dialect, nested(dialect, 64), DEFAULT_LIMITS)
    assert decode(dialect, nested(dialect, 64), empty) == empty.python_class()
    with pytest.raises(BondDecodeError, match="nested deeper"):
        binary.decode_tree(dialect, nested(dialect, 65), DEFAULT_LIMITS)
    if not dialect.has_struct_length:  # else it is skipped by its length
        with pytest.raises(BondDecodeError, match="nested deeper"):
            decode(dialect, nested(dialect, 65), empty)
    value = linked.python_class()
    for _ in range(31):
        value = linked.python_class(x=[value])
    assert through(dialect, value, linked, linked) == value
    with pytest.raises(BondEncodeError, match="nested deeper"):
        binary.encode(dialect, linked.python_class(x=[linked.python_class(y=value)]), linked)


@EACH
def test_lists_in_lists_without_end_are_refused(dialect: Dialect) -> None:
    head = dialect.field_head(DataType.LIST, 0)
    one = bytearray()
    dialect.write_list_head(one, DataType.LIST, 1)
    wire = head + bytes(one) * 5000
    if dialect.has_struct_length:
        wire = b"\xff\xff\x01" + wire + b"\x00" * 40_000
    for read in (declared("struct S {}"), declared("struct S { 0: vector<vector<int8>> x; }")):
        with pytest.raises(BondDecodeError):
            decode(dialect, wire, read)
    with pytest.raises(BondDecodeError):
        binary.decode_tree(dialect, wire, DEFAULT_LIMITS)


COUNTED = ["list<int64>", "set<double>", "map<int8, string>", "vector<T>", "blob", "vector<bool>"]


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("name", ["fast", "compact"])
def test_a_count_that_exceeds_the_rest_allocates_nothing(kind: str, name: str) -> None:
    dialect = DIALECTS[name]
    made = declared(f"struct T {{}} struct S {{ 0: required {kind} x; }}")
    wire = binary.encode(dialect, made.python_class(), made)
    assert wire[-2:] == b"\x00\x00"  # the count, STOP
    wire = wire[:-2] + b"\xff\xff\xff\xff\x0f" + bytes(1000)
    tracemalloc.start()
    try:
        for _ in range(2):
            with pytest.raises(BondDecodeError, match="exceeds what is left"):
                decode(dialect, wire, made)
            with pytest.raises(BondDecodeError, match="exceeds what is left"):
                binary.decode_tree(dialect, wire, DEFAULT_LIMITS)
            with pytest.raises(BondDecodeError, match="exceeds what is left"):
                decode(dialect, wire, declared("struct S {}"))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@EACH
def test_small_structs_that_become_large_objects_are_counted(dialect: Dialect) -> None:
    fields = " ".join(f"{each}: vector<int8> f{each};" for each in range(20))
    kind = declared(f"struct T {{ {fields} }} struct S {{ 0: vector<T> x; }}")
    item = kind.fields[0].type.element.python_class()  # type: ignore[union-attr]
    wire = binary.encode(dialect, kind.python_class(x=[item] * 1000), kind)
    assert len(decode(dialect, wire, kind).x) == 1000
    with pytest.raises(BondDecodeError, match="more values"):
        decode(dialect, wire, kind, DecodeLimits(values=20_000))
    with pytest.raises(BondDecodeError, match="more values"):
        binary.decode_tree(dialect, wire, DecodeLimits(values=2000))


@EACH
def test_many_structs_inside_each_other_and_many_fields(dialect: Dialect) -> None:
    fields = " ".join(f"{each}: int32 f{each};" for each in range(300))
    chain = "".join(f"struct T{each} {{ 1: T{each - 1} t; }}" for each in range(1, 62))
    kind = declared(f"struct T0 {{ {fields} }} {chain} struct S {{ 0: T61 t; }}")
    value = kind.python_class()
    inner = value.t
    for _ in range(61):
        inner = inner.t
    for each in range(300):
        setattr(inner, f"f{each}", each)
    assert through(dialect, value, kind, kind) == value


# ------------------------------------------------------------------------------------ bad bytes


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ("", "ends in the middle"),
        ("1f0000", "is not a type"),
        ("0b0000 1f 01 00", "is not a type"),
        ("0b0000 00 00 00", "is not a type"),
        ("0b0000 09 ffffffffff01", "more than 32 bits"),
        ("0b0000 09 ffffffff1f", "more than 32 bits"),
        ("09 0500 7f 00", "exceeds what is left"),
        ("12 0600 02 000000", "exceeds what is left"),
        ("09 0500 01 ff 00", "not utf-8|not UTF-8"),
    ],
)
def test_fast_refuses(wire: str, reason: str) -> None:
    kind = declared("struct S { 5: string a; 6: wstring b; }")
    with pytest.raises(BondDecodeError, match=reason):
        fast.decode(bytes.fromhex(wire), kind)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["u", ""])
def test_compact_refuses_numbers_that_do_not_fit(bits: int, sign: str) -> None:
    kind = declared(f"struct S {{ 0: {sign}int{bits} a; 1: vector<{sign}int{bits}> b; }}")
    most = (bits + 6) // 7
    tag = kind.fields[0].type.wire
    for number in (b"\xff" * (most - 1) + b"\x7f", b"\x80" * most + b"\x01"):
        for wire in (bytes((tag,)) + number, bytes((0x2B, tag, 1)) + number):
            with pytest.raises(BondDecodeError, match=f"more than {bits} bits"):
                compact.decode(wire + bytes(20), kind)


def test_compact_accepts_numbers_with_idle_bytes() -> None:
    kind = declared("struct S { 0: uint32 a; }")
    assert compact.decode(b"\x05\x87\x80\x00\x00", kind).a == 7


def test_compact_v2_refuses_a_struct_of_another_length() -> None:
    params = struct("examples.calc.Params")
    good = compact.encode(params.python_class(x=1), params, version=2)
    for length in (good[0] - 1, good[0] + 1):
        wire = bytes((length,)) + good[1:] + b"\x00"
        with pytest.raises(BondDecodeError, match="does not end where its length ends"):
            compact.decode(wire, params, version=2)
        with pytest.raises(BondDecodeError, match="does not end where its length ends"):
            compact.decode_tree(wire, version=2)


def test_compact_has_two_versions() -> None:
    with pytest.raises(ValueError, match="not 3"):
        compact.decode(b"\x00", struct("samples.Empty"), version=3)


def test_errors_say_where() -> None:
    with pytest.raises(BondDecodeError) as caught:
        fast.decode(bytes.fromhex("09 0500 7f 00"), declared("struct S { 5: string a; }"))
    assert caught.value.offset == 4
    assert str(caught.value).endswith("(at byte 4)")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: type) -> None:
    params = struct("examples.calc.Params")
    wire = fast.encode(params.python_class(x=5), params)
    assert fast.decode(kind(wire), params).x == 5
    assert fast.decode_tree(kind(wire)).find(1) == 5


# ---------------------------------------------------------------------------------------- trees


def test_trees_keep_the_bits_of_nans_and_bad_utf8() -> None:
    wire = bytes.fromhex("07 0000 010080ff08 0100 0100000000 00f0ff09 0200 02 fffe00")
    tree = fast.decode_tree(wire)
    assert isinstance(tree.find(0), Nan)
    assert math.isnan(float(tree.find(1)))
    assert fast.encode_tree(compact.decode_tree(compact.encode_tree(tree))) == wire


@pytest.mark.parametrize(
    "tree",
    [
        TreeStruct(()),
        TreeStruct(((TreeField(0, DataType.INT8, 300),),)),
        TreeStruct(((TreeField(0, DataType.STRING, 5),),)),
        TreeStruct(((TreeField(70000, DataType.BOOL, True),),)),
    ],
)
@EACH
def test_trees_that_are_none_are_refused(dialect: Dialect, tree: TreeStruct) -> None:
    with pytest.raises(BondEncodeError):
        binary.encode_tree(dialect, tree)
