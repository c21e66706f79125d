"""Find class names that stand for different things: the same name in more than one module.

Usage: python scripts/check_names.py src

Protocols are built alike, so some names are meant to recur in their packages; they are listed in
PARALLEL. A leading underscore does not make another name. Exits with 1 if duplicates are left.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

PARALLEL: Final[dict[str, frozenset[str]]] = {
    "crosswire/wire/*/frames.py": frozenset({"Command", "Message", "Ping", "Pong", "Request"}),
    "crosswire/wire/*/events.py": frozenset(
        {"Acknowledged", "MessageReceived", "RequestReceived", "ResponseReceived"}
    ),
    "crosswire/wire/*/decoder.py": frozenset({"Stage"}),
    # Errors are a part of frames.py or a module of their own; so are states of connection.py.
    "crosswire/wire/*/*.py": frozenset({"Error", "ErrorCode", "State"}),
    # Each protocol's ends derive from those of contract.py.
    "crosswire/cli/bench/*.py": frozenset({"BenchConsumer", "BenchPeer", "BenchProducer"}),
}
"""Names that may recur, by the files in which they may. All files of a name must match."""

PUBLIC: Final = {"crosswire/client/message.py": "Message"}
"""Names that users of the package have for what protocols' frames are called too, by file."""


def classes(path: Path) -> Iterator[str]:
    """The names of all classes that a module's code defines, without leading underscores."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")


def is_parallel(name: str, files: list[str]) -> bool:
    """Whether a pattern of PARALLEL allows the name in all of these files."""
    return any(
        name in names and all(_matches(file, pattern) for file in files)
        for pattern, names in PARALLEL.items()
    )


def _matches(file: str, pattern: str) -> bool:
    # A star stands for one part of the path, not for several.
    parts, patterns = file.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def duplicates(root: Path) -> dict[str, list[str]]:
    """Names that several modules under `root` define and that are not parallel, with the files."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in root.rglob("*.py"):
        file = path.relative_to(root).as_posix()
        for name in classes(path):
            if PUBLIC.get(file) != name:
                found[name].add(file)
    return {
        name: files
        for name, files in sorted((name, sorted(files)) for name, files in found.items())
        if len(files) > 1 and not is_parallel(name, files)
    }


def main() -> int:
    """Print duplicates, and give the exit code."""
    found = duplicates(Path(sys.argv[1] if len(sys.argv) > 1 else "src"))
    for name, files in found.items():
        print(f"{name}: {', '.join(files)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
