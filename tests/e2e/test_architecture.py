"""docs/architecture.md names files and functions that exist, and all that a message passes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.journey import SOURCES, by_file, trace

PROTOCOLS = ("emp", "emqp", "relink", "epoxy", "micromsg2")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """A section of the page, up to the next of its level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the page has no section {title!r}"
    return found[1]


def listed() -> dict[str, set[str]]:
    """Functions by file, as the journey of a message on the page has them."""
    items = re.findall(r"^- `([\w/]+\.py)`: (.*?)(?=^- |^$)", section("The journey of a message"),
                       re.DOTALL | re.MULTILINE)  # fmt: skip
    return {file: set(re.findall(r"`([\w.]+)`", functions)) for file, functions in items}


@pytest.mark.alone  # on a slow machine timers come in between
async def test_the_page_has_what_a_message_passes(tmp_path: Path) -> None:
    files = {file: set(each) for file, each in by_file(await trace(tmp_path / "data")).items()}
    page = listed()
    missing = {file: each - page.get(file, set()) for file, each in files.items()}
    invented = {file: each - files.get(file, set()) for file, each in page.items()}
    assert {file: each for file, each in missing.items() if each} == {}
    assert {file: each for file, each in invented.items() if each} == {}


def test_the_page_counts_them() -> None:
    page = listed()
    functions = sum(map(len, page.values()))
    assert f"passes\n{len(page)} files and {functions} functions" in PAGE


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_0-9]+/[\w/]+\.py)`", PAGE))))
def test_files_on_the_page_exist(path: str) -> None:
    root = ROOT if path.startswith("scripts/") else SOURCES
    names = ("frames",) if path.startswith("pipeline/tables") else PROTOCOLS
    for name in names if "NAME" in path else ("",):
        assert (root / path.replace("NAME", name)).is_file()


def defined(path: Path) -> set[str]:
    """Classes, functions and methods of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_the_journey_of_a_byte_names_what_exists() -> None:
    """`name` in `file`, or several names before one file."""
    text = " ".join(section("The journey of a byte").split())
    pairs = re.findall(
        r"((?:(?:the compiled )?`[\w.]+`(?:, | and )?)+) (?:\w+ )?in `([\w/]+\.py)`", text
    )
    assert len(pairs) > 8
    for names, path in pairs:
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in defined(SOURCES / path), f"{path} has no {name}"


def test_the_diagrams_are_those_of_the_tables() -> None:
    script = ROOT / "scripts" / "draw_states.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
