"""Which bytes of a frame hold which of its fields.

Each protocol's `ranges.py` has the function `ranges`, which follows its `layout.py`: no bytes are
searched for, so a value that occurs twice is not confused. Bytes that are no field of the frame
(lengths, types, flags, padding) have a range too, under the name that the layout gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Final, NamedTuple, TypeAlias

import msgspec

from crosswire.wire.contract import Decoder, Frame, Gap, Unsynchronized

__all__ = ["FieldPath", "FieldRange", "RangeList", "field_ranges"]

FieldPath: TypeAlias = tuple[str | int, ...]
"""From `fields` to a value: names of members, and indexes in lists."""

_MOST_RANGES: Final = 1000
"""A frame may have 65,536 parts of no bytes: beyond this no more are distinguished."""
_MOST_LEVELS: Final = 8
"""Of JSON; what is nested deeper has the range of what it is in."""


class FieldRange(NamedTuple):
    """Bytes [start, end) of the frame; `is_field` if `path` leads to a value in `fields`."""

    path: FieldPath
    start: int
    end: int
    is_field: bool


class RangeList:
    """Collects the ranges of a frame. It has a limit: what is added beyond it is left out."""

    def __init__(self) -> None:
        self.found: list[FieldRange] = []

    def field(self, start: int, end: int, *path: str | int) -> None:
        """These bytes hold a field."""
        if len(self.found) < _MOST_RANGES:
            self.found.append(FieldRange(path, start, end, True))

    def layout(self, start: int, end: int, name: str) -> None:
        """These bytes hold what is no field; there may be none."""
        if start < end and len(self.found) < _MOST_RANGES:
            self.found.append(FieldRange((name,), start, end, False))

    def json(self, text: bytes, at: int, names: frozenset[str]) -> None:
        """The members of a JSON object at `at` that have these names, and what is in them. The
        text has been parsed before: it is valid."""
        for path, start, end in _json_values(text):
            if path and path[0] in names:
                self.field(at + start, at + end, *path)


def field_ranges(protocol: str, frame: Frame, data: bytes, decoder: Decoder) -> list[FieldRange]:
    """The ranges in `data`, the whole bytes of a frame that this decoder has read. Empty for what
    is no frame of the protocol (gaps, encrypted bytes)."""
    found = RangeList()
    if isinstance(frame, Gap | Unsynchronized):
        return found.found
    import_module(f"crosswire.wire.{protocol}.ranges").ranges(frame, data, decoder, found)
    return found.found


# ------------------------------------------------------------------------------------------- JSON

# A string, a sign, or a number or word. Possessive, so that no text takes more than one pass; a
# string without an end matches, too, or the search for one would begin again at each quote in it.
_TOKEN: Final = re.compile(rb'("(?:[^"\\]|\\.)*+("?))|([{}\[\],:])|([^\s{}\[\],:"]++)', re.S)


class _OpenValue:
    """An object or array whose end is not reached."""

    __slots__ = ("index", "is_object", "key", "path", "start")

    def __init__(self, path: FieldPath, start: int, is_object: bool) -> None:
        self.path = path
        self.start = start
        self.is_object = is_object
        self.key: str | None = None
        self.index = 0

    @property
    def next_path(self) -> FieldPath:
        """Of the value that follows."""
        return (*self.path, (self.key or "") if self.is_object else self.index)


def _json_values(text: bytes) -> Iterator[tuple[FieldPath, int, int]]:
    """Path, start and end of all values, from the inside out; without recursion."""
    open_values: list[_OpenValue] = []
    for token in _TOKEN.finditer(text):
        string, closing, sign, word = token.groups()
        if string is not None and not closing:
            return
        last = open_values[-1] if open_values else None
        start, end = token.end() - len(string or sign or word), token.end()
        if sign in (b"{", b"["):
            path: FieldPath = () if last is None else last.path
            if last is not None and len(path) <= _MOST_LEVELS:
                # Deeper ones are not shown: without longer paths, depth costs nothing.
                path = last.next_path
            open_values.append(_OpenValue(path, start, sign == b"{"))
        elif sign in (b"}", b"]") and last is not None:
            open_values.pop()
            if len(last.path) <= _MOST_LEVELS:
                yield last.path, last.start, end
        elif sign == b"," and last is not None:
            last.key = None
            last.index += 1
        elif string is not None and last is not None and last.is_object and last.key is None:
            last.key = msgspec.json.decode(string, type=str)
        elif not sign and last is not None and len(last.path) < _MOST_LEVELS:
            yield last.next_path, start, end
