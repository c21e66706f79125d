"""Machine code that is kept on disk: used again as it is, and never after its sources changed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from crosswire.pipeline.decode.kernels import INT, fingerprint, kernel, lazy_kernel, subroutine

LAYOUT = "HEAD_BYTES = 4\nSIZES = (1, 2)\n"
ADDING = """
    from crosswire.pipeline.decode.kernels import subroutine

    @subroutine
    def added(number):
        return number + 100
"""
KERNELS = """
    import numpy as np

    from copied import layout
    from copied.adding import added
    from copied.layout import SIZES
    from crosswire.pipeline.decode.kernels import INT, kernel, lazy_kernel

    TABLE = np.array(SIZES)

    @kernel(INT, returns=INT)
    def total(number):
        return added(number) + layout.HEAD_BYTES + TABLE[0]

    @lazy_kernel
    def lazy_total(number):
        return total(number) + later(number)

    @lazy_kernel
    def later(number):
        return layout.HEAD_BYTES
"""
RUN = """
    from copied.kernels import lazy_total, total
    results = total(0), lazy_total(0)
    print(*results, sum(total.stats.cache_hits.values()), sum(lazy_total.stats.cache_hits.values()))
"""


class Package:
    """A package with kernels, in a folder of its own, used by a process each time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"
        }
        self.environment["XDG_CACHE_HOME"] = str(folder / "home")
        self.environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
        (folder / "copied").mkdir()
        self.write("__init__", "")
        self.write("layout", LAYOUT)
        self.write("adding", ADDING)
        self.write("kernels", KERNELS)

    def write(self, module: str, source: str) -> None:
        (self.folder / "copied" / f"{module}.py").write_text(textwrap.dedent(source))

    def run(self) -> tuple[int, int, int, int]:
        """What both kernels return, and whether each was loaded instead of compiled."""
        done = subprocess.run(
            [sys.executable, "-B", "-c", textwrap.dedent(RUN)],
            capture_output=True,
            text=True,
            env=self.environment,
        )
        assert done.returncode == 0, done.stderr
        one, two, *hits = map(int, done.stdout.split())
        return one, two, hits[0], hits[1]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_a_second_process_does_not_compile(package: Package) -> None:
    assert package.run() == (105, 109, 0, 0)
    assert package.run() == (105, 109, 1, 1)


def test_a_constant_of_another_module_changes(package: Package) -> None:
    package.run()
    package.write("layout", LAYOUT.replace("4", "8"))
    assert package.run() == (109, 117, 0, 0)
    assert package.run() == (109, 117, 1, 1)
    # What was compiled before is still there for who goes back.
    package.write("layout", LAYOUT)
    assert package.run() == (105, 109, 1, 1)


def test_an_array_changes_with_a_constant_of_another_module(package: Package) -> None:
    package.run()
    package.write("layout", LAYOUT.replace("(1, 2)", "(5, 2)"))
    assert package.run() == (109, 113, 0, 0)


def test_a_function_of_another_module_changes(package: Package) -> None:
    package.run()
    package.write("adding", ADDING.replace("100", "200"))
    assert package.run() == (205, 209, 0, 0)


def test_a_comment_in_another_module_changes_nothing(package: Package) -> None:
    package.run()
    package.write("layout", f"# Of all frames.\n{LAYOUT}")
    assert package.run() == (105, 109, 1, 1)


def test_a_package_that_can_not_be_written(package: Package) -> None:
    """A file where the folder would be: permissions would not hinder root."""
    (package.folder / "copied" / "__pycache__").write_text("")
    assert package.run() == (105, 109, 0, 0)
    assert package.run() == (105, 109, 1, 1)
    package.write("layout", LAYOUT.replace("4", "8"))
    assert package.run() == (109, 117, 0, 0)


def test_no_folder_at_all(package: Package) -> None:
    (package.folder / "copied" / "__pycache__").write_text("")
    (package.folder / "home").write_text("")
    assert package.run() == (105, 109, 0, 0)
    assert package.run() == (105, 109, 0, 0)


SIZE = 4
TABLE = np.array([1, 2, 3])


def of_size(number: int) -> int:
    return number + SIZE


def of_table(number: int) -> int:
    return int(TABLE[number])


def of_call(number: int) -> int:
    return inner(number)


@subroutine
def inner(number: int) -> int:
    return number + SIZE


@pytest.mark.parametrize("function", [of_size, of_call])
def test_a_fingerprint_has_the_values_of_constants(
    function: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(function)
    assert fingerprint(function) == before
    monkeypatch.setitem(globals(), "SIZE", 5)
    assert fingerprint(function) != before
    monkeypatch.setitem(globals(), "SIZE", np.uint8(4))
    assert fingerprint(function) != before


def test_a_fingerprint_has_the_content_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(of_table)
    monkeypatch.setitem(globals(), "TABLE", np.array([1, 2, 4]))
    assert fingerprint(of_table) != before


def test_a_fingerprint_has_what_a_function_encloses() -> None:
    def adding(amount: int) -> Callable[[int], int]:
        return lambda number: number + amount

    assert fingerprint(adding(1)) == fingerprint(adding(1))
    assert fingerprint(adding(1)) != fingerprint(adding(2))


def test_a_fingerprint_has_the_members_of_enumerations(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = set()
    for size in (4, 5, 4):
        monkeypatch.setitem(globals(), "SIZE", IntEnum("Size", {"SMALL": size}))
        prints.add(fingerprint(of_size))
    assert len(prints) == 2


@pytest.mark.parametrize("value", [{"of": 4}, namedtuple("Size", "width height")])
def test_what_may_change_unnoticed_is_refused(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SIZE", value)
    with pytest.raises(TypeError, match="no constant"):
        fingerprint(of_size)


def test_kernels_call_one_another() -> None:
    doubled = njit(lambda number: 2 * number)

    @lazy_kernel
    def quadrupled(number: int) -> int:
        return doubled(doubled(number))  # type: ignore[no-any-return]

    @kernel(INT, returns=INT)
    def with_one(number: int) -> int:
        return quadrupled(number) + 1

    assert with_one(3) == 13
