"""Write the pages of the reference that are made from the code; a test compares them with it.

Usage: python scripts/make_reference.py

    docs/reference/command-line.md    what every command prints for --help
    docs/reference/configuration.md   every setting with its type and default
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Union

import msgspec

from crosswire.access import User
from crosswire.cli.parsers import COMMANDS, leaves, parser_of
from crosswire.config import Config, ScheduleEntry
from crosswire.hub.policies import QueuePolicy, TopicPolicy
from crosswire.listeners import LISTENERS

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
COLUMNS: Final = "96"
LISTS: Final[dict[str, tuple[str, type]]] = {
    "queues": ("[queues.NAME]", QueuePolicy),
    "topics": ("[topics.NAME]", TopicPolicy),
    "schedules": ("[[schedules]]", ScheduleEntry),
    "users": ("[[users]]", User),
}
"""Tables that there may be several of: the heading, and what one is read as."""


# The command line.


def help_of(parser: argparse.ArgumentParser) -> str:
    """What a parser prints for --help."""
    return "\n".join(line.rstrip() for line in parser.format_help().rstrip().splitlines())


def command_line() -> Iterator[str]:
    version = ".".join(map(str, sys.version_info[:2]))
    yield f"""# Command line

<!-- Made by scripts/make_reference.py with Python {version}: change the code, not this page. -->

Every command with its options, as `--help` prints them. Exit codes are 0 for done, 1 for failed and
2 for wrong usage. Results go to standard output, everything else to standard error.
"""
    for name in COMMANDS:
        parser = parser_of(name)
        yield f"## {name}\n\n```text\n{help_of(parser)}\n```\n"
        for leaf in leaves(parser):
            if leaf is not parser:
                words = leaf.prog.removeprefix("crosswire ")
                yield f"### {words}\n\n```text\n{help_of(leaf)}\n```\n"


# The configuration.


def type_name(given: Any) -> str:
    """A type in words for people who write TOML."""
    origin, arguments = typing.get_origin(given), typing.get_args(given)
    if origin is typing.Annotated:
        bounds = [meta for meta in arguments[1:] if isinstance(meta, msgspec.Meta)]
        return type_name(arguments[0]) + "".join(map(_bounds, bounds))
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(each) for each in arguments if each is not type(None))
    if origin in (tuple, list):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"table of {type_name(arguments[1])}"
    if isinstance(given, type) and issubclass(given, msgspec.Struct):
        return "table"
    names = {bool: "boolean", int: "integer", float: "number", str: "text", Any: "any"}
    return names.get(given, getattr(given, "__name__", str(given)))


def _bounds(meta: msgspec.Meta) -> str:
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below", "min_length": "at least"}
    found = [f"{word} {getattr(meta, name):g}" for name, word in words.items() if _has(meta, name)]
    return f" {' '.join(found)}" if found else ""


def _has(meta: msgspec.Meta, name: str) -> bool:
    return isinstance(getattr(meta, name, None), int | float)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value in ((), {}, [], ""):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if isinstance(value, msgspec.Struct):
        return ", ".join(
            f"`{each.name}` {default_of(each)}" for each in msgspec.structs.fields(value)
        )
    return f"`{value}`"


def described(struct: type) -> str:
    """Its docstring, without the ends of lines."""
    return re.sub(r"\s*\n\s*", " ", (struct.__doc__ or "").strip())


def table_of(heading: str, struct: type) -> Iterator[str]:
    """A section for a table, and for those in it."""
    hints = typing.get_type_hints(struct, include_extras=True)
    rows, inner = [], []
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        plain = [each for each in (kind, *typing.get_args(kind)) if isinstance(each, type)]
        tables = [each for each in plain if issubclass(each, msgspec.Struct)]
        # The retries of a queue are one line of it.
        if (tables and not heading.startswith("[queues")) or (
            struct is Config and field.name in LISTS
        ):
            inner.append((field.name, tables))
        elif struct is Config and field.name == "listen":
            continue
        else:
            rows.append((f"`{field.name}`", type_name(kind), default_of(field)))
    yield f"## {heading}\n\n{wrapped(described(struct))}\n"
    if rows:
        yield "| setting | type | default |\n|---|---|---|\n" + "".join(
            f"| {' | '.join(row)} |\n" for row in rows
        )
    path = "" if struct is Config else heading.strip("[]") + "."
    for name, tables in inner:
        if struct is Config and name in LISTS:
            yield from table_of(*LISTS[name])
        else:
            yield from table_of(f"[{path}{name}]", tables[0])


def wrapped(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def configuration() -> Iterator[str]:
    yield """# Configuration

<!-- Made by scripts/make_reference.py: change the code, not this page. -->

Every setting of `crosswire.toml`, with its type and default; all are optional unless *required*.
`crosswire check FILE` reports mistakes with their lines. [Operating a hub](../operating.md)
explains what the settings are for.
"""
    yield from table_of("The top of the file", Config)
    yield "## [listen]\n\nAn address `HOST:PORT` for each listener, or `off`.\n"
    yield "| listener | default |\n|---|---|\n" + "".join(
        f"| `{name}` | `127.0.0.1:{port}` |\n" for name, port in LISTENERS.items()
    )


PAGES: Final = {"command-line.md": command_line, "configuration.md": configuration}


def pages() -> dict[Path, str]:
    """The text of each page, as the code would have it."""
    os.environ["COLUMNS"] = COLUMNS
    return {FOLDER / name: "\n".join(make()) for name, make in PAGES.items()}


if __name__ == "__main__":
    outdated = [
        path for path, text in pages().items() if not path.exists() or path.read_text() != text
    ]
    if "--check" in sys.argv:
        print(*(f"{path} is not what the code has" for path in outdated), sep="\n", end="")
        sys.exit(1 if outdated else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
