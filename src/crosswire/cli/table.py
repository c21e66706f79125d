"""Rows for people: columns on a terminal, with nothing in them that a terminal would obey."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["harmless", "in_short", "print_row", "print_table"]


def harmless(text: str) -> str:
    """Text of a peer, with control characters made visible."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def in_short(fields: dict[str, Any]) -> str:
    """name=value name=value, JSON where a value is not plain text."""
    return " ".join(f"{harmless(name)}={_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return harmless(text) if text and " " not in text else harmless(repr(text))


def print_row(cells: Sequence[object], widths: Sequence[int], *, indent: int = 0) -> None:
    """A line on standard output, harmless; cut to the terminal, whole where there is none."""
    parts = [
        f"{cell:>{-width}}" if width < 0 else f"{cell:<{width}}"
        for cell, width in zip((harmless(str(each)) for each in cells), widths, strict=True)
    ]
    line = (" " * indent + "  ".join(parts)).rstrip()
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        line = line if len(line) <= columns else line[: columns - 1] + "…"
    print(line)


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0) -> None:
    """A table whose columns are as wide as they must be. `>name` is a column of numbers, which
    stand to the right."""
    names = [name.removeprefix(">") for name in head]
    table = [[harmless(str(cell)) for cell in row] for row in (names, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    if not head[-1].startswith(">"):
        widths[-1] = 0
    widths = [
        -width if name.startswith(">") else width for name, width in zip(head, widths, strict=True)
    ]
    for row in table:
        print_row(row, widths, indent=indent)
