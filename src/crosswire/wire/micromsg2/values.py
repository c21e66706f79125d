"""The text inside MicroMsg2's frames: names, URL encoding, typed values, lists of them.

    properties    key:value;key:value;              values typed: N number, D date, T text
    command       name;key=value,key=value          error frames are laid out alike
    extensions    name:key=value,key=value;name     in a handshake

Names are FIELDs: written in lower case, read in any case and with underscores. Whatever is wrong is
raised as MalformedFrame without a place, which the caller knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Final, TypeAlias
from urllib.parse import quote as _quote
from urllib.parse import unquote as _unquote

import msgspec

from crosswire.envelope import Property
from crosswire.errors import MalformedFrame

__all__ = [
    "Extension",
    "Value",
    "field",
    "is_field",
    "parse_arguments",
    "parse_call",
    "parse_extensions",
    "parse_properties",
    "parse_value",
    "quote",
    "serialize_arguments",
    "serialize_call",
    "serialize_extensions",
    "serialize_properties",
    "serialize_value",
    "unquote",
]

Value: TypeAlias = int | float | str

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+").fullmatch
_NOT_FIELD: Final = re.compile(r"[^a-z0-9-]")
_SAFE: Final = re.compile(r"[A-Za-z0-9_.~/-]*").fullmatch
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})").search
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,19}").fullmatch
_DATE: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?").fullmatch
_LONG: Final = 1 << 63
_SHORT: Final = 64


class Extension(msgspec.Struct, frozen=True, gc=False):
    """An extension as a handshake names it; property values are text.

    What `x-auth` carries is a secret, so it is not shown.
    """

    name: str
    properties: dict[str, str] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        shown = "…" if self.name.lower() == "x-auth" else repr(self.properties)
        return f"Extension({self.name!r}, {shown})"


# ------------------------------------------------------------------------------ names and escapes


def is_field(name: str) -> bool:
    """May it be written as a name?"""
    return bool(name) and not _NOT_FIELD.search(name)


def field(name: str) -> str:
    """A name from elsewhere as FIELD: lower case, hyphens for what FIELD does not allow."""
    return _NOT_FIELD.sub("-", name.lower()) or "-"


def quote(text: str) -> str:
    return text if _SAFE(text) else _quote(text, safe="/")


def unquote(text: str) -> str:
    """`+` is a plus, escapes are UTF-8."""
    if "%" not in text:
        return text
    if _BAD_ESCAPE(text):
        raise MalformedFrame("a % that is not followed by two hexadecimal digits")
    try:
        return _unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise MalformedFrame("escapes that are not UTF-8") from None


def _text(raw: bytes) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"text is not UTF-8: {error.reason}") from None


def _checked(name: str, what: str) -> str:
    if not _NAME(name):
        reason = f"{name[:40]!r} is no name for" if name else "an empty name for"
        raise MalformedFrame(f"{reason} {what}")
    return name


# ---------------------------------------------------------------------------------------- values


def parse_value(text: str) -> Value:
    """A FILTER_VALUE. What has no known prefix, or no number behind N or D, is text as it is.

    So is a number that no 64 bits hold: the text asks for `long`, and nothing may be lost.
    """
    kind = text[:1]
    if kind == "T":
        return unquote(text[1:])
    if kind == "N" and _NUMBER(text, 1):
        number = int(text[1:])
        if -_LONG <= number < _LONG:
            return number
    elif kind == "D" and _DATE(text, 1):
        date = float(text[1:])
        if isfinite(date):
            return date
    return unquote(text)


def serialize_value(value: Property) -> str:
    """Booleans, numbers beyond 64 bits and what is not finite are written as text."""
    if isinstance(value, str):
        return "T" + quote(value)
    if isinstance(value, bool):
        return "Ttrue" if value else "Tfalse"
    if isinstance(value, int):
        return f"N{value}" if -_LONG <= value < _LONG else f"T{value}"
    return f"D{value!r}" if isfinite(value) else f"T{value}"


# ----------------------------------------------------------------------------------------- lists


def _items(text: str) -> list[str]:
    """Between semicolons; a trailing one is allowed, and one alone is an empty list."""
    if text.endswith(";"):
        text = text[:-1]
    return text.split(";") if text else []


def parse_properties(raw: bytes) -> dict[str, Value]:
    """Raises MalformedFrame."""
    return dict(
        [
            _property(item) if len(item) <= _SHORT else _property.__wrapped__(item)
            for item in _items(_text(raw))
        ]
    )


# Most properties are one of a few that come again and again: so both ways are remembered.


@lru_cache(maxsize=4096)
def _property(item: str) -> tuple[str, Value]:
    key, colon, value = item.partition(":")
    if not colon:
        raise MalformedFrame(f"property {key[:40]!r} has no value")
    return _checked(key, "a property"), parse_value(value)


def serialize_properties(properties: Mapping[str, Property]) -> bytes:
    parts = []
    for key, value in properties.items():
        size = len(value) if isinstance(value, str) else 0
        # Floats are left out: -0.0 equals 0.0, but is not written alike.
        if len(key) + size <= _SHORT and value.__class__ is not float:
            parts.append(_item(key, value))
        else:
            parts.append(_item.__wrapped__(key, value))
    return "".join(parts).encode()


@lru_cache(maxsize=4096, typed=True)
def _item(key: str, value: Property) -> str:
    return f"{field(key)}:{serialize_value(value)};"


def parse_arguments(text: str, what: str, separators: str = "=") -> dict[str, str]:
    """Pairs between commas. Raises MalformedFrame."""
    arguments: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        ends = [end for separator in separators if (end := pair.find(separator)) >= 0]
        if not ends:
            raise MalformedFrame(f"{pair[:40]!r} is no key and value of {what}")
        key, value = pair[: min(ends)], pair[min(ends) + 1 :]
        arguments[_checked(key, f"an argument of {what}")] = unquote(value)
    return arguments


def serialize_arguments(arguments: Mapping[str, str]) -> str:
    return ",".join(f"{key}={quote(value)}" for key, value in arguments.items())


def parse_call(raw: bytes) -> tuple[str, dict[str, str]]:
    """Name and arguments of a COMMAND or ERROR. Raises MalformedFrame."""
    name, _, arguments = _text(raw).partition(";")
    return _checked(name, "a command or error"), parse_arguments(arguments, name)


def serialize_call(name: str, arguments: Mapping[str, str]) -> bytes:
    return (f"{name};{serialize_arguments(arguments)}" if arguments else name).encode()


def parse_extensions(raw: bytes) -> tuple[Extension, ...]:
    """A handshake's list; properties are read with `=` and, as the text has it too, with `:`."""
    extensions = []
    for item in _items(_text(raw)):
        name, _, properties = item.partition(":")
        _checked(name, "an extension")
        extensions.append(Extension(name, parse_arguments(properties, name, "=:")))
    return tuple(extensions)


def serialize_extensions(extensions: Iterable[Extension]) -> bytes:
    return ";".join(
        f"{item.name}:{serialize_arguments(item.properties)}" if item.properties else item.name
        for item in extensions
    ).encode()
