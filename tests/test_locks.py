"""What is installed: every file of it has a hash, and nothing else is fetched."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ["requirements.lock", "requirements-java.lock", "requirements-sbom.lock"]


def locked(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """The packages of a lock, each with its hashes."""
    text = re.sub(r"^\s*#.*$", "", (ROOT / name).read_text(), flags=re.M)
    found: dict[str, tuple[Requirement, list[str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            described, *hashes = line.split("--hash=")
            requirement = Requirement(described.strip())
            found[canonicalize_name(requirement.name)] = requirement, hashes
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_one_version_and_its_hashes(name: str) -> None:
    packages = locked(name)
    assert packages
    for requirement, hashes in packages.values():
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each.strip()) for each in hashes)


def test_the_lock_has_what_the_package_asks_for() -> None:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    packages = locked("requirements.lock")
    for requirement in (Requirement(each) for group in groups for each in group):
        name = canonicalize_name(requirement.name)
        if name == project["name"] or (requirement.marker and not requirement.marker.evaluate()):
            continue
        # A bound above versions with known holes is only of use if it is one.
        assert any(each.operator in (">=", "==", "~=") for each in requirement.specifier), name
        (version,) = packages[name][0].specifier
        assert requirement.specifier.contains(version.version), requirement


def test_the_build_back_end_is_the_one_in_the_lock() -> None:
    (back_end,) = (Requirement(each) for each in PROJECT["build-system"]["requires"])
    known = locked("requirements.lock")[canonicalize_name(back_end.name)][0]
    assert str(known.specifier) == str(back_end.specifier)


def test_make_installs_nothing_without_hashes() -> None:
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    installs = [each for each in lines if re.search(r"\$\(PIP\)\s|pip install", each)]
    # Not the beginning of the command itself.
    used = [each for each in installs if "PIP :=" not in each]
    assert len(used) == 4
    for line in used:
        # Our own package is built from this folder, by a back end of the lock.
        is_own = "--no-deps --no-build-isolation --editable ." in line
        assert is_own or "--require-hashes" in line, line


def test_what_makes_the_locks_is_in_the_lock() -> None:
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    (compiles,) = (each for each in lines if each.startswith("COMPILE ="))
    # Then a package that has to be built for its metadata is built by what is installed.
    assert "--no-build-isolation" in compiles
    assert {"pip-tools", "setuptools", "hatchling"} <= locked("requirements.lock").keys()
