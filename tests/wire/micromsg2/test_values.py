"""Typed values, names and URL encoding."""

from __future__ import annotations

import pytest
from hypothesis import given

from crosswire.wire.micromsg2.values import (
    Value,
    field,
    parse_properties,
    parse_value,
    serialize_properties,
    serialize_value,
)
from tests.wire.micromsg2.strategies import properties


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("N1", 1),
        ("N-5", -5),
        ("N+5", 5),
        ("N9223372036854775807", 2**63 - 1),
        ("N-9223372036854775808", -(2**63)),
        ("N9223372036854775808", "N9223372036854775808"),
        ("N" + "9" * 5000, "N" + "9" * 5000),
        ("N", "N"),
        ("Nope", "Nope"),
        ("N1.5", "N1.5"),
        ("N 1", "N 1"),
        ("N١", "N١"),  # digits of another script
        ("D1413198000.0", 1413198000.0),
        ("D1", 1.0),
        ("D.5", 0.5),
        ("D1e+22", 1e22),
        ("D", "D"),
        ("Dnan", "Dnan"),
        ("Dinf", "Dinf"),
        ("D1e999", "D1e999"),
        ("D1_0", "D1_0"),
        ("T", ""),
        ("TN1", "N1"),
        ("THello%20%22world%22", 'Hello "world"'),
        ("Ta+b", "a+b"),
        ("T%C3%A9", "é"),
        ("", ""),
        ("42", "42"),
        ("hello%20you", "hello you"),
        ("n1", "n1"),
    ],
)
def test_read(text: str, value: Value) -> None:
    read = parse_value(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "N1"),
        (1413198000.0, "D1413198000.0"),
        ('Hello "world"', "THello%20%22world%22"),
        (True, "Ttrue"),
        (False, "Tfalse"),
        (2**63, "T9223372036854775808"),
        (float("inf"), "Tinf"),
        ("a;b:c,d=e", "Ta%3Bb%3Ac%2Cd%3De"),
        ("", "T"),
    ],
)
def test_written(value: Value, text: str) -> None:
    assert serialize_value(value) == text


@given(properties)
def test_round_trip(values: dict[str, Value]) -> None:
    read = parse_properties(serialize_properties(values))
    assert list(map(repr, read.items())) == list(map(repr, values.items()))


def test_values_that_are_equal_but_of_another_kind_are_written_apart() -> None:
    """Whatever was written before."""
    for value, text in (
        (1, b"N1"),
        (True, b"Ttrue"),
        (1.0, b"D1.0"),
        (0.0, b"D0.0"),
        (-0.0, b"D-0.0"),
    ):
        assert serialize_properties({"k": value}) == b"k:" + text + b";"


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b"", {}),
        (b";", {}),
        (b"first_name:jonas;twitter:jgauffin;", {"first_name": "jonas", "twitter": "jgauffin"}),
        (b"Name:Tx", {"Name": "x"}),
        (b"a:N1;a:N2", {"a": 2}),
        (b"a:b:c", {"a": "b:c"}),
    ],
)
def test_properties_in_every_spelling(raw: bytes, read: dict[str, Value]) -> None:
    assert parse_properties(raw) == read


@pytest.mark.parametrize(
    ("name", "written"),
    [("price", "price"), ("first_name", "first-name"), ("User.Name", "user-name"), ("é", "-")],
)
def test_a_name_from_elsewhere_is_written_as_field(name: str, written: str) -> None:
    assert field(name) == written
