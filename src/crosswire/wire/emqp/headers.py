"""eMQP's headers, parsed and serialized: flags and `name:value`, separated by commas.

A value with a comma is URL-encoded, and so is every value that was a property in another protocol.
A JSON object is read too, since the specification's table for REQUEST calls the headers a
dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from crosswire.envelope import Property

__all__ = ["KNOWN", "NO_HEADERS", "Headers", "format_number"]

KNOWN: Final = frozenset(
    {
        "reply-requested",
        "retry-count",
        "timeout",
        "guarantee",
        "nohaste",
        "run_count",
        "interval",
        "cron",
    }
)
"""Names that the protocol defines; all others are properties of the message."""

_CACHED_CHARACTERS = 256
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_DECIMAL: Final = re.compile(r"-?[0-9]+\.[0-9]+")
_NUMBER: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{0,15})?)\s*")
_WHOLE: Final = re.compile(r"\s*([0-9]{1,19})(?:\.0*)?\s*")
_MOST_TIMEOUT_S: Final = 10 * 365 * 86_400
_INT64 = 1 << 63
_ESCAPED: Final = re.compile(r"^\w|t(?=imeout$)|r(?=eply-requested)")
_JSON: Final = msgspec.json.Decoder(dict[str, bool | int | float | str | None])


class Headers:
    """The headers of one command, in their order; immutable.

    `str()` returns exactly the text that was parsed. Of a repeated header the first counts. Invalid
    values are treated as absent, so that a peer's mistake ends nothing.
    """

    __slots__ = ("_values", "items")

    def __init__(self, items: Iterable[str] = ()) -> None:
        self.items = tuple(items)
        values: dict[str, str | None] = {}
        for item in self.items:
            name, colon, value = item.strip().partition(":")
            if name:
                values.setdefault(name, value if colon else None)
        self._values = values

    @classmethod
    def parse(cls, text: str) -> Headers:
        """Never raises: any text is a list of headers, possibly unknown ones."""
        if not text:
            return NO_HEADERS
        return _parse_cached(text) if len(text) <= _CACHED_CHARACTERS else _parse(text)

    @classmethod
    def of(
        cls,
        *,
        reply_requested: bool = False,
        guarantee: bool = False,
        retry_count: int = 0,
        timeout_s: float = 0,
        nohaste: bool = False,
        run_count: int | None = None,
        properties: Mapping[str, Property] | None = None,
    ) -> Headers:
        """Headers in the order in which the deployed client sends them, then properties."""
        items = []
        if reply_requested:
            items.append("reply-requested")
        if guarantee:
            items.append("guarantee")
        if retry_count > 0:
            items.append(f"retry-count:{retry_count}")
        if timeout_s > 0:
            items.append(f"timeout:{format_number(timeout_s)}")
        if nohaste:
            items.append("nohaste")
        if run_count is not None:
            items.append(f"run_count:{run_count}")
        items += [_print(name, value) for name, value in (properties or {}).items()]
        return cls(items)

    def __str__(self) -> str:
        return ",".join(self.items)

    def __repr__(self) -> str:
        return f"Headers({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Headers) and self.items == other.items

    def __hash__(self) -> int:
        return hash(self.items)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> str | None:
        """A header's value, URL-decoded; None if the header is absent or a flag."""
        value = self._values.get(name)
        return None if value is None else unquote(value.strip())

    def having(self, name: str, value: str | None = None) -> Headers:
        """A copy with one more header at the end, unless there is one of that name."""
        if name in self._values:
            return self
        return Headers((*self.items, name if value is None else f"{name}:{value}"))

    def without(self, *names: str) -> Headers:
        """A copy without the headers of these names."""
        return Headers(
            item for item in self.items if item.strip().partition(":")[0] not in set(names)
        )

    # Headers that the protocol defines.

    @property
    def reply_requested(self) -> bool:
        """Whether the client waits for the result."""
        return self._flag("reply-requested")

    @property
    def guarantee(self) -> bool:
        """Whether the receipt must wait for the disk, and a lost job be repeated."""
        return self._flag("guarantee")

    @property
    def nohaste(self) -> bool:
        """Of a schedule: whether its first run waits for the interval."""
        return self._flag("nohaste")

    @property
    def retry_count(self) -> int:
        """How often a failed job is tried again; 0 by default."""
        return self._whole("retry-count") or 0

    @property
    def timeout_s(self) -> float | None:
        """How long a job may take; None if it is not limited, or to more than 10 years."""
        timeout_s = self._number("timeout")
        return timeout_s if timeout_s and timeout_s <= _MOST_TIMEOUT_S else None

    @property
    def run_count(self) -> int | None:
        """How often a schedule fires in total; None if it is not limited, or no valid count."""
        return self._whole("run_count")

    @property
    def interval_s(self) -> float | None:
        """The interval of a SCHEDULE of 7 parts."""
        return self._number("interval")

    @property
    def cron(self) -> str | None:
        """The cron expression of a SCHEDULE of 7 parts."""
        return self.get("cron") or None

    def _flag(self, name: str) -> bool:
        if name not in self._values:
            return False
        value = self._values[name]
        return value is None or value.strip().lower() not in ("false", "0", "no")

    def _number(self, name: str) -> float | None:
        value = self._values.get(name)
        match = _NUMBER.fullmatch(value) if value is not None else None
        return float(match[1]) if match else None

    def _whole(self, name: str) -> int | None:
        value = self._values.get(name)
        match = _WHOLE.fullmatch(value) if value is not None else None
        number = int(match[1]) if match else _INT64
        return number if number < _INT64 else None

    # All others.

    def properties(self) -> dict[str, Property]:
        """The headers that the protocol does not define, as a message's properties.

        Digits become an integer, a decimal a float, `true` and `false` a boolean, a flag `true`,
        and anything else text. The type is determined before URL-decoding, so that an escaped digit
        makes text of what looks like a number.
        """
        return {
            unquote(name): True if value is None else _read(value.strip())
            for name, value in self._values.items()
            if name not in KNOWN
        }


NO_HEADERS: Final = Headers()


def _parse(text: str) -> Headers:
    if text.lstrip().startswith("{"):
        try:
            members = _JSON.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            return Headers(text.split(","))
        return Headers(
            _known(name, value) if name in KNOWN else _print(name, value)
            for name, value in members.items()
            if name and value is not None
        )
    return Headers(text.split(","))


_parse_cached = lru_cache(maxsize=1024)(_parse)


def _known(name: str, value: Property) -> str:
    """A defined header from a JSON object, in the form of the list."""
    if value is True:
        return name
    if isinstance(value, bool):
        return f"{name}:false"
    return f"{name}:{quote(value, safe=' *') if isinstance(value, str) else format_number(value)}"


def _print(name: str, value: Property) -> str:
    """A property as a header, escaped so that its name is not one that the protocol defines.

    Deployed workers search for `timeout:` and `reply-requested` anywhere in the text.
    """
    key = quote(name, safe="")
    if name in KNOWN or name.endswith("timeout") or "reply-requested" in name:
        key = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", key)
    if isinstance(value, bool):
        return f"{key}:{'true' if value else 'false'}"
    if isinstance(value, int):
        return f"{key}:{value}" if -_INT64 <= value < _INT64 else f"{key}:{_text(str(value))}"
    if isinstance(value, float):
        return f"{key}:{_decimal(value)}"
    return f"{key}:{_text(value)}"


def _text(value: str) -> str:
    """URL-encoded; text that would be read as another type has its first character escaped."""
    text = quote(value, safe="")
    return text if isinstance(_read(text), str) else f"%{ord(text[0]):02X}{text[1:]}"


def _decimal(value: float) -> str:
    """Digits, a point, digits; infinities and NaN as Python writes them, which is read as text."""
    if value - value != 0:
        return str(value)
    text = f"{Decimal(repr(value)):f}"
    return text if "." in text else f"{text}.0"


def format_number(value: float) -> str:
    """A number, as an integer if it is one: the deployed worker can't read a fraction."""
    return str(int(value)) if value == int(value) else _decimal(value)


def _read(value: str) -> Property:
    if _INTEGER.fullmatch(value) and -_INT64 <= (number := int(value)) < _INT64:
        return number
    if _DECIMAL.fullmatch(value) and isfinite(decimal := float(value)):
        return decimal
    if value in ("true", "false"):
        return value == "true"
    return unquote(value)
