"""Commands that a page lists, with a word about each beside it, are ones that the program has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosswire.cli.parsers import options_last, parser_of, split_command
from tests.docs.pages import PAGES, ROOT

PLACEHOLDER = re.compile(r"[\[\]|…]|\b[A-Z][A-Z_-]+\b")


def listed(page: Path) -> Iterator[str]:
    """Whole commands of indented blocks: those with placeholders are patterns."""
    for line in page.read_text().splitlines():
        command = (
            re.split(r" {2,}|\t", line.strip())[0]
            .split(" # ")[0]
            .split(" > ")[0]
            .removesuffix(" &")
        )
        if line.startswith("    crosswire ") and not PLACEHOLDER.search(command):
            yield command


COMMANDS = sorted({(str(page.relative_to(ROOT)), each) for page in PAGES for each in listed(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_one(page: str, command: str) -> None:
    command, arguments = split_command(shlex.split(command)[1:])
    parser = parser_of(command, arguments)
    try:
        parser.parse_args(options_last(parser, arguments))
    except SystemExit:
        pytest.fail(f"{page} has a command that the program does not understand")


def test_some_were_found() -> None:
    assert len(COMMANDS) > 20
