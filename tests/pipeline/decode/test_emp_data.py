"""What is found in bodies of EMP is what msgspec reads there."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode.arrays import Numbers
from crosswire.pipeline.decode.emp_data import Data, find


class Carried(msgspec.Struct):
    """What `$deliver` has, as far as its values are looked at."""

    destination: str
    json: msgspec.Raw = msgspec.Raw(b"")
    text: str | None = None
    base64: str | None = None
    properties: dict[str, Any] | None = None


class Numbered(msgspec.Struct):
    id: int


BEFORE = b'{"op":"a", "data": '


def found(data: bytes) -> tuple[Data, bytes] | None:
    """The members of a body with this data, and the data itself; None if it was not found."""
    body = BEFORE + data + b"}"
    whole = np.frombuffer(b"{" + body + b'"}}', np.uint8)
    found = find(whole, np.array([0, 1]), np.array([0, len(body)]), np.array([True, True]))
    if found.opened[1] < 0:
        return None
    assert found.opened[1] == 1 + len(BEFORE)
    return found, bytes(whole[found.opened[1] : found.closed[1]])


def value_of(data: bytes, member: tuple[Numbers, Numbers]) -> bytes | None:
    start, length = int(member[0][1]) - 1 - len(BEFORE), int(member[1][1])
    return None if length < 0 else data[start : start + length]


def string_of(data: bytes, member: tuple[Numbers, Numbers]) -> str | None:
    value = value_of(data, member)
    return None if value is None else msgspec.json.decode(b'"%b"' % value, type=str)


names = st.sampled_from(
    ["destination", "json", "text", "base64", "properties", "id", "i", "ids", "texts", "t\\xt"]
)
texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["x" * 40, "ü" * 30])
ordinary_numbers = st.integers(-(10**17), 10**17) | st.floats(-1e9, 1e9).map(
    lambda number: round(number, 3)
)
ordinary = st.recursive(
    st.none() | st.booleans() | ordinary_numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
odd_numbers = ["1e999", "-", "01", "1.", ".5", "1e5", "-0", "1E+400", "9" * 30, "NaN"]
odd_strings = ['"\\ud800"', '"\\ude00\\ud83d"', '"\\ud83d\\ude00"', '"\\x"', '"\\u12g4"', '"\t"']
odd_others = ["", "tru", "nul", "falsey", "[1,]", "{,}", "[", "}", '{"a"}', "[" * 32 + "]" * 32]
odd = st.sampled_from([*odd_numbers, *odd_strings, *odd_others])


@st.composite
def objects(draw: st.DrawFn) -> str:
    """JSON written in some way, with members twice, and values that may be none."""
    space = st.sampled_from(["", "", " ", "\n\t\r"])
    members = []
    for name in draw(st.lists(names, max_size=4)):
        key = json.dumps(name) if draw(st.integers(0, 9)) else '"\\u0069d"'
        escaped = draw(st.booleans())
        written = json.dumps(draw(ordinary), ensure_ascii=escaped)
        if not draw(st.integers(0, 5)):
            written = draw(odd)
        members.append(f"{draw(space)}{key}{draw(space)}:{draw(space)}{written}{draw(space)}")
    return "{" + ",".join(members) + "}"


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """An octet of it is another, or missing."""
    raw = draw(objects()).encode()
    index = draw(st.integers(1, len(raw) - 1))
    kind = draw(st.sampled_from(["same", "same", "octet", "gone"]))
    if kind == "same":
        return raw
    octet = draw(st.sampled_from(b'"\\{}[],:0e-\x1f \xff\xc3\xed')) if kind == "octet" else None
    return raw[:index] + (b"" if octet is None else bytes([octet])) + raw[index + 1 :]


@settings(max_examples=400)
@given(changed())
def test_what_is_found_is_what_msgspec_reads(changed: bytes) -> None:
    if (answer := found(changed)) is None:
        return
    columns, data = answer
    data.decode()
    msgspec.json.decode(data, type=msgspec.Raw)
    if columns.carries[1]:
        carried = msgspec.json.decode(data, type=Carried)
        assert string_of(data, columns.destination) == carried.destination
        assert string_of(data, columns.text) == carried.text
        assert string_of(data, columns.base64) == carried.base64
        assert (value_of(data, columns.json) or b"") == bytes(carried.json)
        properties = value_of(data, columns.properties)
        assert (properties and msgspec.json.decode(properties)) == carried.properties
        assert bool(columns.is_escaped[1]) == (b"\\" in (value_of(data, columns.text) or b""))
    if columns.has_message_id[1]:
        try:
            number = msgspec.json.decode(data, type=Numbered).id
        except msgspec.ValidationError:
            assert not columns.has_id[1]
        else:
            assert columns.has_id[1] and columns.id[1] == number


@settings(max_examples=300)
@given(st.dictionaries(texts, ordinary, max_size=4), st.booleans(), st.booleans())
def test_ordinary_data_is_found(data: dict[str, Any], escaped: bool, spaced: bool) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    written = json.dumps(data, ensure_ascii=escaped, separators=separators)
    answer = found(written.encode())
    assert answer is not None and answer[1] == written.encode()


@pytest.mark.parametrize("members", [{"text": 'a"b'}, {"json": [1]}, {"base64": "QQ=="}, {}])
@pytest.mark.parametrize("properties", [None, {}, {"a": 1.5, "b": [True, None]}])
def test_what_the_hub_writes_is_found(members: dict[str, Any], properties: Any) -> None:
    data = {"id": -7, "destination": "queue/ü", "attempt": 1, "properties": properties, **members}
    answer = found(json.dumps(data).encode())
    assert answer is not None
    columns, _ = answer
    assert (
        columns.carries[1]
        and columns.has_message_id[1]
        and columns.has_id[1]
        and columns.id[1] == -7
    )


@pytest.mark.parametrize("depth", [32, 33])
def test_what_is_nested_deep_is_not_looked_at(depth: int) -> None:
    data = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    assert (found(data) is not None) == (depth == 32)
