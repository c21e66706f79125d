"""Reads TOML into frozen structs, and reports all mistakes at once, with lines and hints."""

from __future__ import annotations

import difflib
import re
import tomllib
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

__all__ = ["Lines", "Mistake", "dotted", "read", "read_valid"]

T = TypeVar("T", bound=msgspec.Struct)


class Mistake(msgspec.Struct, frozen=True, order=True):
    """An error in a file: line (0 if unknown), key, what is wrong, and how to correct it."""

    line: int
    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        prefix = f"line {self.line}: " if self.line else ""
        where = f"{self.where}: " if self.where else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{prefix}{where}{self.what}{hint}"


def read(text: str, kind: type[T]) -> tuple[T | None, list[Mistake]]:
    """The struct and no mistakes; or None and all mistakes, ordered by line."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return None, [_syntax(error)]
    mistakes: list[Mistake] = []
    _check(tree, kind, (), Lines(text), mistakes)
    if mistakes:
        return None, sorted(mistakes)
    try:
        return msgspec.convert(tree, kind), []
    except msgspec.ValidationError as error:
        return None, [Mistake(0, "", str(error))]


def read_valid(text: str, kind: type[T]) -> tuple[T | None, set[str]]:
    """The struct of those top-level keys that are right by themselves, and the names of the others;
    None for what is not TOML. So one mistake does not hide those that only a struct shows."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None, set()
    valid, wrong = {}, set()
    for name, value in tree.items():
        mistakes: list[Mistake] = []
        _check({name: value}, kind, (), Lines(""), mistakes)
        if mistakes:
            wrong.add(name)
        else:
            valid[name] = value
    try:
        return msgspec.convert(valid, kind), wrong
    except msgspec.ValidationError:
        return None, wrong


def _syntax(error: tomllib.TOMLDecodeError) -> Mistake:
    found = re.search(r"^(.*) \(at line (\d+), column \d+\)$", str(error))
    if found is None:
        return Mistake(0, "", f"not TOML: {error}")
    return Mistake(int(found[2]), "", f"not TOML: {found[1]}")


class Lines:
    """The line of each key: tomllib does not report it, so the text is searched once."""

    _HEAD = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?$")
    _KEY = re.compile(
        r"""^\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*="""
    )
    _PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str | int, ...], int] = {}
        table: tuple[str | int, ...] = ()
        counts: dict[tuple[str | int, ...], int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if head := self._HEAD.match(line):
                table = self._parts(head[2])
                if head[1] == "[[":
                    counts[table] = counts.get(table, -1) + 1
                    table = (*table, counts[table])
                self._lines.setdefault(table, number)
            elif key := self._KEY.match(line):
                self._lines.setdefault((*table, *self._parts(key[1])), number)

    def _parts(self, dotted: str) -> tuple[str, ...]:
        return tuple("".join(part) for part in self._PART.findall(dotted))

    def of(self, path: tuple[str | int, ...]) -> int:
        """The first line of this key, or of the innermost table around it; 0 if there is none."""
        while path:
            inside = [line for key, line in self._lines.items() if key[: len(path)] == path]
            if inside:
                return min(inside)
            path = path[:-1]
        return 0


Path = tuple[str | int, ...]


def _check(value: Any, kind: Any, path: Path, lines: Lines, mistakes: list[Mistake]) -> None:
    """Check each table and value separately, so that one mistake does not hide the next."""
    kind = _without_none(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        _check_table(value, kind, path, lines, mistakes)
    elif get_origin(kind) is dict and isinstance(value, dict):
        for name, inner in value.items():
            _check(inner, get_args(kind)[1], (*path, name), lines, mistakes)
    elif get_origin(kind) in (list, tuple) and isinstance(value, list):
        for number, inner in enumerate(value):
            _check(inner, get_args(kind)[0], (*path, number), lines, mistakes)
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            mistakes.append(Mistake(lines.of(path), dotted(path), str(error), _choices(kind)))


def _check_table(
    table: dict[str, Any],
    kind: type[msgspec.Struct],
    path: Path,
    lines: Lines,
    mistakes: list[Mistake],
) -> None:
    kinds = get_type_hints(kind, include_extras=True)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    before = len(mistakes)
    for name, value in table.items():
        if name in fields:
            _check(value, kinds[fields[name].name], (*path, name), lines, mistakes)
            continue
        here = (*path, name)
        close = difflib.get_close_matches(name, fields, 1)
        hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(sorted(fields))
        mistakes.append(Mistake(lines.of(here), dotted(here), "unknown key", hint))
    for name, field in fields.items():
        if field.required and name not in table:
            mistakes.append(Mistake(lines.of(path), dotted(path), f"{name} is missing"))
    if len(mistakes) == before:
        try:
            msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            mistakes.append(Mistake(lines.of(path), dotted(path), str(error)))


def _choices(kind: Any) -> str:
    """The allowed values, where they are a list."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    return ""


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        some = [arm for arm in get_args(kind) if arm is not type(None)]
        if len(some) == 1:
            return some[0]
    return kind


def dotted(path: Path) -> str:
    """The key as users write it: `table.key`, `tables[1].key`, counted from 1."""
    text = ""
    for part in path:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text
