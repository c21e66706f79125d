"""Filters: read, printed, and compiled, against an evaluator that is slow and plain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.errors import InvalidFilter
from crosswire.hub.filters import MOST_TERMS, Filter, Term

OPERATORS = ["=", "!=", "<", "<=", ">", ">=", "~", "&"]


def naive(term: Term, properties: dict[str, Any]) -> bool:
    """The rules one after the other."""
    if term.key not in properties:
        return False
    found, wanted = properties[term.key], term.value
    if isinstance(found, bool):
        found = "true" if found else "false"
    both_text = isinstance(found, str) and isinstance(wanted, str)
    both_numbers = not isinstance(found, str) and not isinstance(wanted, str)
    match term.operator:
        case "=":
            return (both_text or both_numbers) and found == wanted
        case "!=":
            return not ((both_text or both_numbers) and found == wanted)
        case "<":
            return found.startswith(wanted) if both_text else both_numbers and found < wanted
        case ">":
            return found.endswith(wanted) if both_text else both_numbers and found > wanted
        case "<=":
            return both_numbers and found <= wanted
        case ">=":
            return both_numbers and found >= wanted
        case "&":
            return both_text and wanted in found
        case "~":
            return both_text and wanted not in found
    raise AssertionError(term.operator)


keys = st.sampled_from(["a", "b", "c-1", "First_Name", "user.name", "é=;"])
short_text = st.text("ab", max_size=3) | st.sampled_from(["true", "false", "N1", "1", "é;%"])
numbers = st.integers(-3, 3) | st.sampled_from([-1.5, 0.0, 1.0, 2.0, 1e22, 2**62])
terms = st.builds(Term, keys, st.sampled_from(OPERATORS), numbers | short_text)
filters = st.lists(terms, max_size=4).map(lambda drawn: Filter(tuple(drawn)))
properties = st.dictionaries(keys, numbers | short_text | st.booleans())


@settings(max_examples=500)
@given(filters, properties)
def test_compiled_it_does_what_the_plain_one_does(chosen: Filter, message: dict[str, Any]) -> None:
    expected = all(naive(term, message) for term in chosen.terms)
    assert chosen.compile()(message) is expected


@given(filters)
def test_what_is_printed_reads_the_same(chosen: Filter) -> None:
    assert Filter.parse(str(chosen)) == chosen


@given(st.text("ab=<>!~&;%ND1.", max_size=12))
def test_any_text_is_a_filter_or_is_refused(text: str) -> None:
    try:
        read = Filter.parse(text)
    except InvalidFilter as error:
        assert 0 <= error.position <= len(text)
    else:
        assert Filter.parse(str(read)) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", ()),
        (";", ()),
        ("price>N10;name&Tacme", (Term("price", ">", 10), Term("name", "&", "acme"))),
        ("price>N10;", (Term("price", ">", 10),)),
        ("k<=D1413198000.0", (Term("k", "<=", 1413198000.0),)),
        ("k>=N-5", (Term("k", ">=", -5),)),
        ("k!=Tacme", (Term("k", "!=", "acme"),)),
        ("k~N10", (Term("k", "~", 10),)),
        ("name=Ta%20b", (Term("name", "=", "a b"),)),
        ("name=acme", (Term("name", "=", "acme"),)),
        ("name=Nope", (Term("name", "=", "Nope"),)),
        ("name=T", (Term("name", "=", ""),)),
        ("name=", (Term("name", "=", ""),)),
        ("a=Tb=c", (Term("a", "=", "b=c"),)),
        ("a%3Db=N1", (Term("a=b", "=", 1),)),
        ("first_name=Tx", (Term("first_name", "=", "x"),)),
    ],
)
def test_read(text: str, read: tuple[Term, ...]) -> None:
    assert Filter.parse(text).terms == read


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        (";;", 0, "empty term"),
        ("a=N1;;b=N2", 5, "empty term"),
        ("price", 0, "no operator in 'price'"),
        ("a=N1;price", 5, "no operator"),
        ("=N1", 0, "no property"),
        ("a=N1;b=T%zz", 5, "hexadecimal"),
        ("a=T%ff", 0, "UTF-8"),
        ("%4=N1", 0, "hexadecimal"),
        (";".join(["a=N1"] * (MOST_TERMS + 1)), 0, "more than 100"),
    ],
)
def test_refused(text: str, position: int, says: str) -> None:
    with pytest.raises(InvalidFilter, match=says) as caught:
        Filter.parse(text)
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("n=N5", True),
        ("n=D5.0", True),
        ("n=T5", False),
        ("n!=T5", True),
        ("n!=N5", False),
        ("n>N4;n<N6", True),
        ("n>D4.5", True),
        ("n<T6", False),
        ("n&T5", False),
        ("n~T9", False),
        ("n~N9", False),
        ("d>N1413197999", True),
        ("d<=D1413198000.0", True),
        ("t<Tacm", True),
        ("t>Tme", True),
        ("t<=Tacme", False),
        ("t>=Tacme", False),
        ("t&Tcm", True),
        ("t&TCM", False),
        ("t~Tcm", False),
        ("t~Tx", True),
        ("t>N1", False),
        ("t~N1", False),
        ("t!=N1", True),
        ("yes=Ttrue", True),
        ("yes=N1", False),
        ("yes<Ttr", True),
        ("no!=Ttrue", True),
        ("gone=T", False),
        ("gone!=Tx", False),
        ("gone!=N1", False),
        ("gone~Tx", False),
        ("gone>N0", False),
    ],
)
def test_holds(text: str, holds: bool) -> None:
    message = {"n": 5, "d": 1413198000.0, "t": "acme", "yes": True, "no": False}
    assert Filter.parse(text).compile()(message) is holds
