"""Filters as people write them, turned into the form that hubs read: in the client library, on the
command line and over HTTP.

    price > 10; name & "acme inc"        price>N10;name&Tacme%20inc

Spaces around keys, operators and values don't count. A number is a number, and what is in quotes is
text as it is; anything else is text, URL-encoded as in the hub's form. That form is accepted too:
`N10` and `D1.5` are numbers, `Tacme` is the text `acme`. So text that begins with T, or looks like
a number, is written in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from crosswire.errors import InvalidFilter, MalformedFrame
from crosswire.wire.micromsg2.values import parse_value, quote, serialize_value, unquote

__all__ = ["wire_filter"]

_OPERATORS: Final = ("=", "!=", "<", "<=", ">", ">=", "&", "~")
_SYMBOLS: Final = "=!<>~&"
_TERM: Final = re.compile(r"([^=!<>~&\"']*)([=!<>~&]+)(.*)", re.DOTALL)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_DECIMAL: Final = re.compile(
    r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?"
)


def wire_filter(text: str) -> str:
    """The filter in the hub's form; one in that form already stays the same.

    Raises InvalidFilter, with the position of the term that is wrong.
    """
    return ";".join(_term(item, position) for item, position in _items(text))


def _items(text: str) -> Iterator[tuple[str, int]]:
    """What is between semicolons that are not in quotes, and where it begins."""
    begin, opened = 0, ""
    is_key, is_before_value = True, False
    for index, character in enumerate(text):
        if opened:
            opened = "" if character == opened else opened
        elif character == ";":
            yield text[begin:index], begin
            begin, is_key, is_before_value = index + 1, True, False
        elif character in _SYMBOLS and (is_key or is_before_value):
            is_key, is_before_value = False, True
        elif is_before_value and not character.isspace():
            # Only at the beginning of a value: `it's` is text with an apostrophe.
            opened = character if character in "\"'" else ""
            is_before_value = False
    if opened:
        raise InvalidFilter("a quote that is not closed", position=begin)
    if text[begin:].strip():
        yield text[begin:], begin


def _term(item: str, position: int) -> str:
    match = _TERM.fullmatch(item)
    if match is None:
        reason = f"no operator in {item.strip()[:40]!r}" if item.strip() else "an empty term"
        raise InvalidFilter(reason, position=position)
    key, operator, value = (each.strip() for each in match.groups())
    if not key:
        raise InvalidFilter("no property before the operator", position=position)
    if operator not in _OPERATORS:
        known = " ".join(_OPERATORS)
        raise InvalidFilter(f"unknown operator {operator!r}: use one of {known}", position=position)
    if value and value[0] in _SYMBOLS:
        raise InvalidFilter(
            f"{operator} {value[:1]} is no operator: put the value in quotes, if it begins so",
            position=position,
        )
    try:
        return quote(unquote(key)) + operator + _value(value)
    except MalformedFrame as error:
        hint = "put the value in quotes, or write %25"
        raise InvalidFilter(f"{error.reason}: {hint}", position=position) from None
    except ValueError as error:
        raise InvalidFilter(str(error), position=position) from None


def _value(value: str) -> str:
    if value[:1] in ('"', "'") and value:
        if len(value) < 2 or value[-1] != value[0]:
            raise ValueError(f"{value[:40]}: nothing may follow the quote")
        return "T" + quote(value[1:-1])
    if _INTEGER.fullmatch(value):
        return serialize_value(int(value))
    if _DECIMAL.fullmatch(value):
        return serialize_value(float(value))
    if value[:1] in ("N", "D") and not isinstance(parse_value(value), str):
        return value
    return "T" + quote(unquote(value.removeprefix("T")))
