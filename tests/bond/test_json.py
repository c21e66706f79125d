"""Bond's Simple JSON: what is written, what is read, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from crosswire.bond import idl, json
from crosswire.bond.schema import DecodeLimits, StructDef
from crosswire.bond.values import Bonded, OrderedSet
from crosswire.errors import BondDecodeError, BondEncodeError, BondSchemaError

from .samples import struct


def declared(body: str) -> StructDef:
    return idl.parse(f"namespace n {body}").struct("n.S")


PARAMS = struct("examples.calc.Params")
SPECIMEN = declared(
    'enum E { A, B = 5 } struct T { 0: int8 x; } struct B { 0: string base = "b"; }'
    "struct S : B { 0: vector<T> items; 1: map<string, int32> table; 2: map<int32, T> byNumber;"
    " 3: nullable<int32> number; 4: nullable<vector<int8>> numbers; 5: blob bytes; 6: E e = A;"
    ' 7: bonded<T> lazy; 8: double d; 9: set<string> unique; [JsonName("other")] 10: bool renamed;'
    " 11: string maybe = nothing; 12: wstring wide; 13: uint64 big; 14: float f; }"
)
T = SPECIMEN.field("lazy").type.struct  # type: ignore[union-attr]


def test_what_is_written() -> None:
    value = SPECIMEN.python_class(
        base="x",
        items=[T.python_class(x=1), T.python_class()],
        table={"k": 1, "l": -2},
        byNumber={7: T.python_class(x=2)},
        number=5,
        numbers=[1],
        bytes=b"\x00\xff",
        e=5,
        lazy=Bonded(T.python_class(x=3)),
        d=1.5,
        unique=OrderedSet(["b", "a"]),
        renamed=True,
        maybe="",
        wide="é",
        big=2**64 - 1,
        f=-math.inf,
    )
    text = json.encode(value, SPECIMEN)
    assert text.decode() == (
        '{"base":"x","items":[{"x":1},{"x":0}],"table":["k",1,"l",-2],"byNumber":[7,{"x":2}],'
        '"number":[5],"numbers":[[1]],"bytes":[0,-1],"e":"B","lazy":{"x":3},"d":1.5,'
        '"unique":["b","a"],"other":true,"maybe":"","wide":"é","big":18446744073709551615,'
        '"f":"-Infinity"}'
    )
    assert json.decode(text, SPECIMEN) == value


def test_defaults_are_written_or_left_out() -> None:
    empty = SPECIMEN.python_class()
    assert json.encode(empty, SPECIMEN, omit_defaults=True) == b'{"lazy":{}}'
    full = json.to_builtins(empty, SPECIMEN)
    assert full["number"] is None
    assert full["base"] == "b"
    assert full["e"] == "A"
    assert "maybe" not in full
    assert json.from_builtins(full, SPECIMEN) == empty


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, {}),
        ({"unknown": [1, {"x": None}]}, {}),
        ({"base": None, "items": None, "e": None, "number": None}, {}),
        ({"e": "B"}, {"e": 5}),
        ({"e": 5}, {"e": 5}),
        ({"e": -9}, {"e": -9}),
        ({"number": 5}, {"number": 5}),
        ({"number": [5]}, {"number": 5}),
        ({"number": []}, {"number": None}),
        ({"numbers": [[]]}, {"numbers": []}),
        ({"table": {"k": 1}}, {"table": {"k": 1}}),
        ({"table": ["k", 1]}, {"table": {"k": 1}}),
        ({"bytes": [-1, 255, 0]}, {"bytes": b"\xff\xff\x00"}),
        ({"d": 3}, {"d": 3.0}),
        ({"d": "Infinity"}, {"d": math.inf}),
        ({"big": 5.0}, {"big": 5}),
        ({"f": 0.1}, {"f": 0.10000000149011612}),
    ],
)
def test_what_is_read(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json.from_builtins(found, SPECIMEN) == SPECIMEN.python_class(**expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"base":"\xff"}'.encode("latin-1"), "not JSON"),
        ("[]", "an array where an object"),
        ('{"base":5}', "base: a number where string"),
        ('{"items":5}', "items: a number where an array"),
        ('{"items":[{},{"x":128}]}', r"items\[1\]\.x: 128 is not in -128–127"),
        ('{"items":[null]}', r"items\[0\]: null where an object"),
        ('{"table":["k"]}', "table: an array where an array of keys and values"),
        ('{"table":["k","v"]}', r"table\['k'\]: a string where int32"),
        ('{"byNumber":{"7":{}}}', "byNumber: an object where"),
        ('{"number":[1,2]}', "number: an array where null or an array of one"),
        ('{"numbers":5}', "numbers: a number where"),
        ('{"bytes":[256]}', r"bytes\[0\]: not a byte"),
        ('{"bytes":"AA=="}', "bytes: a string where an array of bytes"),
        ('{"e":"C"}', r"e: 'C' is not in n\.E"),
        ('{"e":2147483648}', "e: 2147483648 is not in"),
        ('{"big":-1}', "big: -1 is not in"),
        ('{"big":1.5}', "big: a number where uint64"),
        ('{"big":1e300}', "big: a number where uint64"),
        ('{"big":true}', "big: a truth value where uint64"),
        ('{"other":1}', "other: a number where bool"),
        ('{"f":1e300}', "f: 1e\\+300 is too large"),
        ('{"d":"much"}', "d: a string where double"),
        ("[" * 100_000, "not JSON|nested deeper"),
    ],
)
def test_what_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(BondDecodeError, match=reason):
        json.decode(text, SPECIMEN)


def test_required_fields_must_be_there() -> None:
    kind = declared("struct S { 0: required int8 a; 1: required nullable<int8> b; }")
    assert json.decode('{"a":1,"b":null}', kind) == kind.python_class(a=1)
    for text in ('{"a":1}', '{"b":null}', '{"a":null,"b":null}'):
        with pytest.raises(BondDecodeError, match="required, and missing"):
            json.decode(text, kind)


def test_deep_json_is_refused() -> None:
    kind = declared("struct S { 0: nullable<S> next; }")
    text = '{"next":[' * 40 + "{}" + "]}" * 40
    with pytest.raises(BondDecodeError, match="nested deeper"):
        json.decode(text, kind)
    circle = kind.python_class()
    circle.next = circle
    with pytest.raises(BondEncodeError, match="nested deeper"):
        json.encode(circle, kind)


def test_values_are_counted() -> None:
    kind = declared("struct T { 0: int8 a; 1: int8 b; } struct S { 0: vector<T> x; }")
    text = '{"x":[' + ",".join(["{}"] * 100) + "]}"
    assert len(json.decode(text, kind).x) == 100
    with pytest.raises(BondDecodeError, match="more values"):
        json.decode(text, kind, limits=DecodeLimits(values=299))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"x": 2**31}, "x: 2147483648 is not in"),
        ({"x": "1"}, "x: str where int32"),
        ({"operation": "Add"}, "operation: str where"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(BondEncodeError, match=reason):
        json.encode(PARAMS.python_class(**values), PARAMS)


def test_surrogates_cannot_be_written() -> None:
    with pytest.raises(BondEncodeError, match="surrogate"):
        json.encode(SPECIMEN.python_class(wide="\ud800"), SPECIMEN)


def test_two_fields_of_one_name_cannot_be_distinguished() -> None:
    kind = declared("struct B { 0: int8 x; } struct S : B { 0: int8 x; }")
    with pytest.raises(BondSchemaError, match="two fields x"):
        json.encode(kind.python_class(), kind)


def test_the_calculator() -> None:
    value = json.decode('{"x":67,"y":87,"operation":"Mul"}', PARAMS)
    assert (value.x, value.y, value.operation) == (67, 87, 3)
    assert json.encode(value, PARAMS) == b'{"x":67,"y":87,"operation":"Mul"}'
