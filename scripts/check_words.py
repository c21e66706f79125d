"""Check identifiers, comments, strings and docs for words that a reader would not search for.

Usage: python scripts/check_words.py [--count] PATH...

Looks into identifiers, comments and strings of Python files, and into the prose of Markdown files.
Quoted protocol vocabulary can be excused in ALLOWED. Exits with 1 if something is found; `--count`
prints the number of findings of each file instead of the lines.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RULED_OUT: Final[dict[str, str]] = {
    r"said|saying|sayings|say|says": "what the value is: messages, description, fields, states",
    r"told|tell|tells|telling": "report, notify, send, distinguish",
    r"spoken|hear|hears|heard|hearing": "received, reported, read",
    r"behind": "after, following",
    r"let go|lets go|letting go|let it go|let them go": "release, drop, free",
    r"(?<!in )(?<!take )(?<!takes )(?<!took )place|places": "index, position, path, address",
    r"so often|so many|in so many words|so long as|so much": "count, number, explicitly, while",
    r"unless .{0,20}(?:says|told) otherwise|otherwise told": "by default",
    r"change[sd]? (?:its|their|his) mind": "is reconfigured, reverts",
    r"of its own accord|by itself alone": "automatically",
    r"whoever|whosoever": "the caller, the peer, the consumer",
}
"""A pattern of whole words, and what to write instead."""

ALLOWED: Final[tuple[str, ...]] = (
    r'"behind"',  # a field of the HTTP API
    r"place ?holder\w*",
    # Names in the state that streams of the pipeline have stored.
    r'"(?:said|said_yes|is_told|place)"',
    # A field of the hub's API for reading its log.
    r'"behind"',
)
"""What is no finding although it contains a word of the list."""

_PATTERNS: Final = [
    (re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])", re.IGNORECASE), instead)
    for pattern, instead in RULED_OUT.items()
]
_ALLOWED: Final = re.compile("|".join(ALLOWED), re.IGNORECASE)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines in which words count, with their numbers."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
            # Names are split at underscores and humps, so that they read like text.
            text = token.string
            if token.type == tokenize.NAME:
                text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).replace("_", " ")
            for offset, line in enumerate(text.splitlines()):
                yield token.start[0] + offset, line


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, the word and what to write instead."""
    for number, text in texts_of(path):
        excused = _ALLOWED.sub("", text)
        for pattern, instead in _PATTERNS:
            for match in pattern.finditer(excused):
                yield number, match.group(), instead


def main(arguments: list[str]) -> int:
    """Print what is found in the files of the paths."""
    counts: Counter[Path] = Counter()
    is_counting = "--count" in arguments
    for root in map(Path, (each for each in arguments if each != "--count")):
        paths = sorted([*root.rglob("*.py"), *root.rglob("*.md")]) if root.is_dir() else [root]
        for path in paths:
            for number, word, instead in findings(path):
                counts[path] += 1
                if not is_counting:
                    print(f"{path}:{number}: {word!r}: write {instead}")
    if is_counting:
        for path, count in counts.most_common():
            print(f"{count:5} {path}")
    print(f"{counts.total()} findings in {len(counts)} files", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
