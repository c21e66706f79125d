"""Lines of the code that gives frames their meaning, by part: `python scripts/count_lines.py`.

With a commit (`python scripts/count_lines.py COMMIT`) as they were there.
"""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE, TESTS = "src/crosswire/pipeline", "tests/pipeline"
PARTS = {
    "row by row, in src": (f"{SOURCE}/decode/readings/*", f"{SOURCE}/decode/connection_rows.py"),
    "row by row, the tests' oracle": (f"{TESTS}/decode/oracle/*",),
    "what both have in common": (f"{SOURCE}/decode/meanings/*",),
    "scanners": (f"{SOURCE}/decode/scanners/*",),
    "all else in columns": (f"{SOURCE}/decode/*",),
    "batch and stream": (
        *(f"{SOURCE}/batch.py", f"{SOURCE}/tables/registry.py", f"{SOURCE}/stream/run.py"),
        *(f"{SOURCE}/stream/driver.py", f"{SOURCE}/stream/wire_tables.py"),
    ),
    "tests that hold them equal": (f"{TESTS}/decode/*",),
}
"""A file belongs to the first part that has a pattern for it."""


def output_of(*command: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def files(commit: str | None) -> dict[str, str]:
    """The Python files of the pipeline and its tests: paths, and their text."""
    listing = ("ls-files",) if commit is None else ("ls-tree", "-r", "--name-only", commit)
    paths = [each for each in output_of(*listing, SOURCE, TESTS).split() if each.endswith(".py")]
    if commit is None:
        return {each: (ROOT / each).read_text() for each in paths}
    return {each: output_of("show", f"{commit}:{each}") for each in paths}


def main() -> None:
    """Print the lines of each part."""
    counts = dict.fromkeys(PARTS, 0)
    for path, text in files(sys.argv[1] if len(sys.argv) > 1 else None).items():
        part = next((name for name, own in PARTS.items() if any(fnmatch(path, p) for p in own)), "")
        if part:
            counts[part] += len(text.splitlines())
    for name, count in counts.items():
        print(f"{name:<30}{count:>7,}")


if __name__ == "__main__":
    main()
