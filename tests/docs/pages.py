"""The blocks of code in a page of the docs, and what a comment above one asks for.

<!-- not run: REASON -->            it is shown only
<!-- file: NAME -->                 it is written to a file of that name
<!-- until: TEXT -->                a command for another terminal: it goes on in the
                                    background, and the page continues when it printed TEXT
<!-- with: NAME -->                 a fragment of Python: `FRAMES` has what is around it
<!-- exit: N -->                    its last command ends with this code
<!-- output -->                     text: what the block before it printed
<!-- hub -->                        anywhere: a hub runs while the page's blocks do
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["DATA", "PAGES", "ROOT", "RUNNABLE", "Block", "blocks", "needs_hub", "titles"]

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")], key=lambda path: path.as_posix()
)

RUNNABLE: Final = frozenset({"console", "python", "sh", "toml"})
DATA: Final = frozenset({"", "ini", "json", "mermaid", "sql", "text", "yaml"})

_COMMENTS: Final = frozenset({"not run", "file", "until", "with", "exit", "output"})
_COMMENT: Final = re.compile(r"<!-- (not run|file|until|with|exit|output)(?:: (.+?))? -->")
_FENCE: Final = re.compile(r"^(```+)([a-z]*)$")


class Block(NamedTuple):
    """`line` is that of its first line of code; `asked` has the comments above it."""

    page: Path
    line: int
    language: str
    text: str
    asked: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    asked: dict[str, str] = {}
    for number, line in lines:
        if found := _COMMENT.fullmatch(line.strip()):
            asked[found[1]] = found[2] or ""
        elif fence := _FENCE.match(line):
            code: list[str] = []
            for _, inside in lines:
                if inside == fence[1]:
                    break
                code.append(inside)
            yield Block(page, number + 1, fence[2], "\n".join(code) + "\n", asked)
            asked = {}
        elif line.strip():
            asked = {}


def needs_hub(page: Path) -> bool:
    """Whether a hub must run on the default ports."""
    return "<!-- hub -->" in page.read_text().splitlines()


def titles(page: Path) -> list[str]:
    """Its headings, outside of blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return re.findall(r"^#+ (.+)$", text, re.M)
