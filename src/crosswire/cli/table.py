"""Tables on a terminal, without control characters from peers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["harmless", "in_short", "lines_of", "print_row", "print_table"]


def harmless(text: str) -> str:
    """The text with control characters escaped: a peer's text must not control the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def in_short(fields: dict[str, Any]) -> str:
    """`name=value name=value`; values that are not text are JSON."""
    return " ".join(f"{harmless(name)}={_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return harmless(text) if text and " " not in text else harmless(repr(text))


def print_row(cells: Sequence[object], widths: Sequence[int], *, indent: int = 0) -> None:
    """Print one line, cut to the width of the terminal; not cut if output is no terminal.

    A negative width aligns its cell to the right. Control characters in cells are made visible.
    """
    _print_line(_line(cells, widths, indent))


def _line(cells: Sequence[object], widths: Sequence[int], indent: int = 0) -> str:
    parts = [
        f"{cell:>{-width}}" if width < 0 else f"{cell:<{width}}"
        for cell, width in zip((harmless(str(each)) for each in cells), widths, strict=True)
    ]
    return (" " * indent + "  ".join(parts)).rstrip()


def _print_line(line: str) -> None:
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        line = line if len(line) <= columns else line[: max(columns - 1, 0)] + "…"
    print(line)


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    indent: int = 0,
    empty: str = "",
) -> None:
    """Print a table with columns as wide as their cells. `>name` is aligned to the right.

    Without rows, `empty` goes to standard error instead, if it is given.
    """
    rows = list(rows)
    if empty and not rows:
        print(f"{empty[:1].upper()}{empty[1:]}.", file=sys.stderr)
        return
    for line in lines_of(head, rows, indent=indent):
        _print_line(line)


def lines_of(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0
) -> list[str]:
    """The lines of a table, not cut; as `print_table` prints them."""
    names = [name.removeprefix(">") for name in head]
    table = [[harmless(str(cell)) for cell in row] for row in (names, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    if not head[-1].startswith(">"):
        widths[-1] = 0
    widths = [
        -width if name.startswith(">") else width for name, width in zip(head, widths, strict=True)
    ]
    return [_line(row, widths, indent) for row in table]
