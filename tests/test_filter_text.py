"""Filters as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import InvalidFilter
from crosswire.filter_text import wire_filter
from crosswire.hub.filters import Filter


@pytest.mark.parametrize(
    ("written", "wire"),
    [
        ("", ""),
        ("price>10", "price>N10"),
        ("price > 10", "price>N10"),
        (" price>=-3 ; name & acme ; ", "price>=N-3;name&Tacme"),
        ("rate<0.5", "rate<D0.5"),
        ("rate<1e3", "rate<D1000.0"),
        ("price>N10;name&Tacme", "price>N10;name&Tacme"),
        ("time>D1413198000.0", "time>D1413198000.0"),
        ("name = acme inc", "name=Tacme%20inc"),
        ("name=acme%20inc", "name=Tacme%20inc"),
        ("name = 'a;b>c'", "name=Ta%3Bb%3Ec"),
        ('name = "Tea"', "name=TTea"),
        ('number = "10"', "number=T10"),
        ('share = "100%"', "share=T100%25"),
        ("name = it's", "name=Tit%27s"),
        ("name = no!'x", "name=Tno%21%27x"),
        ("name=", "name=T"),
        ("paid=true", "paid=Ttrue"),
        ("N=Nothing", "N=TNothing"),
    ],
)
def test_what_is_written_is_read(written: str, wire: str) -> None:
    assert wire_filter(written) == wire
    assert wire_filter(wire) == wire


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("price==10", "unknown operator '=='"),
        ("price=>10", "unknown operator '=>'"),
        ("price<>10", "unknown operator '<>'"),
        ("price = >10", "is no operator"),
        ("name =~ acme", "unknown operator '=~'"),
        ("price", "no operator in 'price'"),
        (">10", "no property before"),
        ("a=1;;b=2", "an empty term"),
        ("name='acme", "a quote that is not closed"),
        ("name='acme' inc", "nothing may follow the quote"),
        ("share=100%", "write %25"),
    ],
)
def test_what_is_wrong_is_refused(written: str, message: str) -> None:
    with pytest.raises(InvalidFilter, match=message):
        wire_filter(written)


def test_the_position_is_that_of_the_term() -> None:
    with pytest.raises(InvalidFilter) as refused:
        wire_filter("a=1;price==10")
    assert refused.value.position == 4


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
        max_size=5,
    )
)
def test_a_number_without_a_prefix_is_that_number(values: dict[str, int | float]) -> None:
    keys = {f"k{index}": value for index, value in enumerate(values.values())}
    written = " ; ".join(f"{key} = {value!r}" for key, value in keys.items())
    assert Filter.parse(wire_filter(written)).compile()(keys)


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",), blacklist_characters="'")))
def test_text_in_quotes_is_that_text(text: str) -> None:
    assert Filter.parse(wire_filter(f"name = '{text}'")).compile()({"name": text})


def test_long_text_takes_time_in_proportion() -> None:
    """Each quote must not be compared with all of the text before it."""
    quotes = "'" * 200_000
    assert wire_filter(f"name = x{quotes}") == "name=Tx" + "%27" * len(quotes)


@given(st.text(max_size=40))
def test_any_text_is_refused_or_read(text: str) -> None:
    try:
        wire = wire_filter(text)
    except InvalidFilter:
        return
    assert wire_filter(wire) == wire
    Filter.parse(wire)
