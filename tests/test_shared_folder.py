"""Folders that several processes of a test run share."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.shared_folder import make_once


def ask(folder: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    def make() -> None:
        folder.mkdir()
        with (folder / "made").open("x") as file:
            file.write("once")

    barrier.wait()
    make_once(folder, "1", make)
    assert (folder / "made").read_text() == "once"
    assert (folder / "installed").read_text() == "1"


def test_processes_that_ask_at_once_make_it_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(4)
    processes = [spawn.Process(target=ask, args=(tmp_path / "it", barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def test_another_version_and_one_that_failed_are_made_anew(tmp_path: Path) -> None:
    folder, made = tmp_path / "it", []

    def make() -> None:
        made.append(sorted(path.name for path in tmp_path.glob("it/*")))
        folder.mkdir()

    def fail() -> None:
        make()
        raise OSError("no network")

    make_once(folder, "1", make)
    with pytest.raises(OSError, match="no network"):
        make_once(folder, "2", fail)
    make_once(folder, "2", make)
    make_once(folder, "2", make)
    assert made == [[], [], []]
