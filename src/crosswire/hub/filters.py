"""Filters: which messages a subscription wants, by their properties. Read, printed, compiled.

A filter is MicroMsg2's, in every protocol: terms `key op value` between semicolons, all of which
must hold. A value is typed as a property is: `N10` a number, `D1413198000.0` a date, `Tacme` or
`acme` text, URL-encoded.

    price>N10;name&Tacme        more than 10, and "acme" somewhere in the name

    operator    numbers and dates       text
    =  !=       equal, not equal        equal, not equal
    <  >        less, greater           starts with, ends with
    <= >=       …or equal               never holds
    &  ~        never holds             contains, does not contain

Numbers and dates compare with one another; a boolean property is the text `true` or `false`. What
is ordered or searched must be of the filter's type, or the term doesn't hold; `=` never holds
between types and `!=` always does. A missing property holds no term.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from crosswire.envelope import Property
from crosswire.errors import InvalidFilter, MalformedFrame
from crosswire.wire.micromsg2.values import Value, parse_value, quote, serialize_value, unquote

__all__ = ["Filter", "Predicate", "Term"]

Predicate: TypeAlias = Callable[[Mapping[str, Property]], bool]

MOST_TERMS: Final = 100
"""Every term is asked of every message, so a subscriber can't have any number of them."""

_TERM: Final = re.compile(r"([^=!<>~&]*)(!=|<=|>=|=|<|>|~|&)(.*)", re.DOTALL)


class Term(msgspec.Struct, frozen=True):
    """One condition; `value` is a number, a date (a float) or text."""

    key: str
    operator: str
    value: Value

    def __str__(self) -> str:
        return f"{quote(self.key)}{self.operator}{serialize_value(self.value)}"


class Filter(msgspec.Struct, frozen=True):
    """All terms must hold; without any, every message passes."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Raises InvalidFilter with the position of the error."""
        text = text.removesuffix(";")
        if text.count(";") >= MOST_TERMS:
            raise InvalidFilter(f"more than {MOST_TERMS} terms")
        terms = []
        position = 0
        for item in text.split(";") if text else ():
            terms.append(_parse_term(item, position))
            position += len(item) + 1
        return cls(tuple(terms))

    def __str__(self) -> str:
        return ";".join(map(str, self.terms))

    def compile(self) -> Predicate:
        """A function of a message's properties, made once for many messages."""
        tests = [_compile(term) for term in self.terms]
        if not tests:
            return _everything
        if len(tests) == 1:
            return tests[0]

        def all_hold(properties: Mapping[str, Property]) -> bool:
            for test in tests:  # noqa: SIM110  a generator costs more than the tests
                if not test(properties):
                    return False
            return True

        return all_hold


def _parse_term(item: str, position: int) -> Term:
    match = _TERM.fullmatch(item)
    if match is None:
        reason = f"no operator in {item[:40]!r}" if item else "an empty term"
        raise InvalidFilter(reason, position=position)
    key, symbol, value = match.groups()
    if not key:
        raise InvalidFilter("no property before the operator", position=position)
    try:
        return Term(unquote(key), symbol, parse_value(value))
    except MalformedFrame as error:
        raise InvalidFilter(error.reason, position=position) from None


def _everything(_properties: Mapping[str, Property]) -> bool:
    return True


def _compile(term: Term) -> Predicate:
    make = _ON_TEXT if isinstance(term.value, str) else _ON_NUMBERS
    return make[term.operator](term.key, term.value)


# A predicate is asked for every message and subscription: each operator has its own, with nothing
# left to decide but the property's type. bool is no number here, so types are compared exactly.

_NUMBERS: Final = (int, float)
_Maker: TypeAlias = Callable[[str, "Value"], Predicate]


def _never(_key: str, _value: Value) -> Predicate:
    return lambda _properties: False


def _number_equals(key: str, value: Value) -> Predicate:
    def test(properties: Mapping[str, Property]) -> bool:
        found = properties.get(key)
        return found.__class__ in _NUMBERS and found == value

    return test


def _number_differs(key: str, value: Value) -> Predicate:
    def test(properties: Mapping[str, Property]) -> bool:
        found = properties.get(key)
        return found is not None and (found.__class__ not in _NUMBERS or found != value)

    return test


def _ordered(compare: Callable[[Any, Any], bool]) -> _Maker:
    def make(key: str, value: Value) -> Predicate:
        def test(properties: Mapping[str, Property]) -> bool:
            found = properties.get(key)
            return found.__class__ in _NUMBERS and compare(found, value)

        return test

    return make


def _as_text(found: object) -> str | None:
    """The text of a property, None if it is missing or a number."""
    if found.__class__ is str:
        return found
    if found is True:
        return "true"
    return "false" if found is False else None


def _text_equals(key: str, value: Value) -> Predicate:
    return lambda properties: _as_text(properties.get(key)) == value


def _text_differs(key: str, value: Value) -> Predicate:
    def test(properties: Mapping[str, Property]) -> bool:
        found = properties.get(key)
        return found is not None and _as_text(found) != value

    return test


def _searched(search: Callable[[str, Any], bool]) -> _Maker:
    def make(key: str, value: Value) -> Predicate:
        def test(properties: Mapping[str, Property]) -> bool:
            found = _as_text(properties.get(key))
            return found is not None and search(found, value)

        return test

    return make


_ON_NUMBERS: Final[dict[str, _Maker]] = {
    "=": _number_equals,
    "!=": _number_differs,
    "<": _ordered(operator.lt),
    "<=": _ordered(operator.le),
    ">": _ordered(operator.gt),
    ">=": _ordered(operator.ge),
    "&": _never,
    "~": _never,
}

_ON_TEXT: Final[dict[str, _Maker]] = {
    "=": _text_equals,
    "!=": _text_differs,
    "<": _searched(str.startswith),
    "<=": _never,
    ">": _searched(str.endswith),
    ">=": _never,
    "&": _searched(str.__contains__),
    "~": _searched(lambda found, value: value not in found),
}
