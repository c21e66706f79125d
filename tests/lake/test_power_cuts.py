"""What the lake has after a power cut that loses every name and content that was not synced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from crosswire.durable_files import make_folder, replace_file
from crosswire.lake import files
from crosswire.lake.files import find, is_covered
from crosswire.testing.simulation.files import SimulatedFiles
from tests.lake.ledger_files import fill


class Loser(Random):
    """All that can be lost is lost."""

    def random(self) -> float:
        return 1.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SimulatedFiles]:
    found = SimulatedFiles(tmp_path, Loser())
    found.open()
    yield found
    found.close()


def test_what_was_not_synced_is_lost(tmp_path: Path, disk: SimulatedFiles) -> None:
    make_folder(tmp_path / "made" / "deep")
    (tmp_path / "made" / "deep" / "file").write_bytes(b"x")
    replace_file(tmp_path / "whole", b"first")
    (tmp_path / "whole").unlink()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_bytes(b"x")
    disk.cut_power()
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["deep", "made", "whole"]
    assert (tmp_path / "whole").read_bytes() == b"first"
    (tmp_path / "whole").write_bytes(b"second")
    disk.cut_power()
    assert (tmp_path / "whole").read_bytes() == b"first"


def test_published_files_are_there(tmp_path: Path, disk: SimulatedFiles) -> None:
    fill(tmp_path / "lake", (1, 3), (4, 9))
    disk.cut_power()
    assert [(each.first, each.last) for each in find(tmp_path / "lake")] == [(1, 3), (4, 9)]


def test_files_of_a_process_that_was_killed_before_it_synced_them(
    tmp_path: Path, disk: SimulatedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there, so nobody makes them again and the store deletes its rows: from then on they
    must not be lost."""
    lake = tmp_path / "lake"
    fill(lake, (1, 3))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files, "sync_folder", _killed)
        fill(lake, (4, 9))
    assert is_covered(lake, "ledger", "n1", 1, 9)
    disk.cut_power()
    assert is_covered(lake, "ledger", "n1", 1, 9)


def _killed(_folder: Path) -> None:
    raise KeyboardInterrupt
