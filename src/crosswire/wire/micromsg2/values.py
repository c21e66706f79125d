"""The text in MicroMsg2's frames: names, URL encoding, typed values, lists of them.

    properties    key:value;key:value;              values typed: N number, D date, T text
    command       name;key=value,key=value          error frames are laid out alike
    extensions    name:key=value,key=value;name     in a handshake

Names are FIELDs (specification, "Definitions"): written in lower case, read in any case and with
underscores. Invalid text raises MalformedFrame without an offset, which the caller adds.
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
from crosswire.errors import FrameTooLarge, MalformedFrame
from crosswire.wire.micromsg2.layout import (
    ARGUMENT_SEPARATOR,
    ARGUMENT_VALUE_SEPARATOR,
    ESCAPE,
    ITEM_SEPARATOR,
    VALUE_DATE,
    VALUE_NUMBER,
    VALUE_SEPARATOR,
    VALUE_TEXT,
)

__all__ = [
    "MAX_CALL_BYTES",
    "MAX_ITEMS",
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

_ITEM: Final = chr(ITEM_SEPARATOR)
_VALUE: Final = chr(VALUE_SEPARATOR)
_ARGUMENT: Final = chr(ARGUMENT_SEPARATOR)
_EQUALS: Final = chr(ARGUMENT_VALUE_SEPARATOR)
_PERCENT: Final = chr(ESCAPE)
_N: Final = chr(VALUE_NUMBER)
_D: Final = chr(VALUE_DATE)
_T: Final = chr(VALUE_TEXT)

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+").fullmatch
_NOT_FIELD: Final = re.compile(r"[^a-z0-9-]")
_SAFE: Final = re.compile(r"[A-Za-z0-9_.~/-]*").fullmatch
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})").search
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,19}").fullmatch
# Every digit can be matched in one way only, and numbers have a length: a run of digits that two
# repetitions could share would be tried in every division, which takes minutes for 60 KB of them.
_DATE: Final = re.compile(
    r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?"
).fullmatch
MAX_CALL_BYTES: Final = 64 * 1024
"""The size of a COMMAND or ERROR: far more than any filter needs."""
MAX_ITEMS: Final = 1000
"""How many arguments a COMMAND or ERROR, and how many extensions a handshake may have."""

_LONG: Final = 1 << 63
_SHORT: Final = 64


class Extension(msgspec.Struct, frozen=True, gc=False):
    """An extension as a handshake names it; property values are text.

    The properties of `x-auth` are a secret, so `repr` hides them.
    """

    name: str
    properties: dict[str, str] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        shown = "…" if self.name.lower() == "x-auth" else repr(self.properties)
        return f"Extension({self.name!r}, {shown})"


# ------------------------------------------------------------------------------ names and escapes


def is_field(name: str) -> bool:
    """Whether it may be written as a name."""
    return bool(name) and not _NOT_FIELD.search(name)


def field(name: str) -> str:
    """A name of another protocol as FIELD: in lower case, other characters become hyphens."""
    return _NOT_FIELD.sub("-", name.lower()) or "-"


def quote(text: str) -> str:
    """URL-encode all but letters, digits and `_.~/-`."""
    return text if _SAFE(text) else _quote(text, safe="/")


def unquote(text: str) -> str:
    """URL-decode: `+` stays a plus, escapes must be UTF-8. Raises MalformedFrame."""
    if _PERCENT not in text:
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
    """A FILTER_VALUE (specification, "Filters"). Without a known prefix, or without a number after
    N or D, it is text as it is.

    So is a number beyond 64 bits: the specification asks for `long`, and no digit may be lost. A
    date has at most 400 digits on either side of its point, more than any float is written with.
    """
    kind = text[:1]
    if kind == _T:
        return unquote(text[1:])
    if kind == _N and _NUMBER(text, 1):
        number = int(text[1:])
        if -_LONG <= number < _LONG:
            return number
    elif kind == _D and _DATE(text, 1):
        date = float(text[1:])
        if isfinite(date):
            return date
    return unquote(text)


def serialize_value(value: Property) -> str:
    """Booleans, integers beyond 64 bits, infinities and NaN are written as text."""
    if isinstance(value, str):
        return _T + quote(value)
    if isinstance(value, bool):
        return _T + ("true" if value else "false")
    if isinstance(value, int):
        return f"{_N if -_LONG <= value < _LONG else _T}{value}"
    return f"{_D}{value!r}" if isfinite(value) else f"{_T}{value}"


# ----------------------------------------------------------------------------------------- lists


def _items(text: str) -> list[str]:
    """Between semicolons; a trailing one is allowed, and one alone is an empty list."""
    if text.endswith(_ITEM):
        text = text[:-1]
    return text.split(_ITEM) if text else []


def _check_count(raw: bytes, separator: int) -> None:
    """Counted before they are split: each item takes much more memory than its bytes."""
    if (count := raw.count(separator)) > MAX_ITEMS:
        raise FrameTooLarge(f"a list of {count} items, more than {MAX_ITEMS}")


def parse_properties(raw: bytes) -> dict[str, Value]:
    """A message's properties, by name. Raises MalformedFrame."""
    return dict(
        [
            _property(item) if len(item) <= _SHORT else _property.__wrapped__(item)
            for item in _items(_text(raw))
        ]
    )


# Peers send a few properties again and again, so both directions are cached; long ones are not,
# since they would fill the memory.


@lru_cache(maxsize=4096)
def _property(item: str) -> tuple[str, Value]:
    key, colon, value = item.partition(_VALUE)
    if not colon:
        raise MalformedFrame(f"property {key[:40]!r} has no value")
    return _checked(key, "a property"), parse_value(value)


def serialize_properties(properties: Mapping[str, Property]) -> bytes:
    """A message's properties; their names become FIELDs."""
    parts = []
    for key, value in properties.items():
        size = len(value) if isinstance(value, str) else 0
        # Floats are not cached: -0.0 equals 0.0, but is written differently.
        if len(key) + size <= _SHORT and value.__class__ is not float:
            parts.append(_item(key, value))
        else:
            parts.append(_item.__wrapped__(key, value))
    return "".join(parts).encode()


@lru_cache(maxsize=4096, typed=True)
def _item(key: str, value: Property) -> str:
    return f"{field(key)}{_VALUE}{serialize_value(value)}{_ITEM}"


def parse_arguments(text: str, what: str, separators: str = _EQUALS) -> dict[str, str]:
    """Pairs between commas; the first of `separators` ends a key. Raises MalformedFrame."""
    arguments: dict[str, str] = {}
    for pair in text.split(_ARGUMENT) if text else ():
        ends = [end for separator in separators if (end := pair.find(separator)) >= 0]
        if not ends:
            raise MalformedFrame(f"{pair[:40]!r} is no key and value of {what}")
        key, value = pair[: min(ends)], pair[min(ends) + 1 :]
        arguments[_checked(key, f"an argument of {what}")] = unquote(value)
    return arguments


def serialize_arguments(arguments: Mapping[str, str]) -> str:
    """Pairs between commas, their values URL-encoded."""
    return _ARGUMENT.join(f"{key}{_EQUALS}{quote(value)}" for key, value in arguments.items())


def parse_call(raw: bytes) -> tuple[str, dict[str, str]]:
    """Name and arguments of a COMMAND or ERROR. Raises MalformedFrame, or FrameTooLarge."""
    if len(raw) > MAX_CALL_BYTES:
        raise FrameTooLarge(f"a command of {len(raw)} bytes, more than {MAX_CALL_BYTES}")
    _check_count(raw, ARGUMENT_SEPARATOR)
    name, _, arguments = _text(raw).partition(_ITEM)
    return _checked(name, "a command or error"), parse_arguments(arguments, name)


def serialize_call(name: str, arguments: Mapping[str, str]) -> bytes:
    """The payload of a COMMAND or ERROR."""
    return (f"{name}{_ITEM}{serialize_arguments(arguments)}" if arguments else name).encode()


def parse_extensions(raw: bytes) -> tuple[Extension, ...]:
    """A handshake's list. Properties are read with `=` and with `:`: the specification has both.

    Raises MalformedFrame, or FrameTooLarge for too many.
    """
    _check_count(raw, ITEM_SEPARATOR)
    _check_count(raw, ARGUMENT_SEPARATOR)
    extensions = []
    for item in _items(_text(raw)):
        name, _, properties = item.partition(_VALUE)
        _checked(name, "an extension")
        extensions.append(Extension(name, parse_arguments(properties, name, _EQUALS + _VALUE)))
    return tuple(extensions)


def serialize_extensions(extensions: Iterable[Extension]) -> bytes:
    """A handshake's list."""
    return _ITEM.join(
        f"{item.name}{_VALUE}{serialize_arguments(item.properties)}"
        if item.properties
        else item.name
        for item in extensions
    ).encode()
