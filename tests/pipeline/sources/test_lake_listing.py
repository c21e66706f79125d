"""Days that can't have changed are not listed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crosswire.pipeline.sources import lake_listing
from crosswire.pipeline.sources.lake_listing import LakeListing
from crosswire.pipeline.stores import LocalStore, StoreEntry


class Looked:
    """Counts how often folders are listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: list[str] = []
        entries = LocalStore.entries

        def counted(store: LocalStore, folder: str) -> list[StoreEntry]:
            self.folders.append(folder)
            return entries(store, folder)

        monkeypatch.setattr(LocalStore, "entries", counted)


def add(folder: Path, day: str, name: str, *, age_s: float = 60.0) -> None:
    path = folder / f"date={day}"
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(b"rows")
    changed = path.stat().st_mtime - age_s
    os.utime(path, (changed, changed))


def test_only_days_that_changed_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, "2026-11-02", "b.parquet")
    add(tmp_path, "2026-11-01", ".hidden.parquet")
    add(tmp_path, "2026-11-01", "a.parquet")
    listing, looked = LakeListing(), Looked(monkeypatch)
    first = list(listing(str(tmp_path)))
    assert first == [
        (f"{tmp_path}/date=2026-11-01/a.parquet", 4),
        (f"{tmp_path}/date=2026-11-02/b.parquet", 4),
    ]
    add(tmp_path, "2026-11-02", "c.parquet", age_s=30.0)
    looked.folders.clear()
    assert list(listing(str(tmp_path))) == [
        *first,
        (f"{tmp_path}/date=2026-11-02/c.parquet", 4),
    ]
    assert looked.folders == ["", "date=2026-11-02"]


def test_a_folder_that_has_just_changed_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the resolution of its time it may change without another time."""
    monkeypatch.setattr(lake_listing, "_SETTLED_S", 3600.0)
    add(tmp_path, "2026-11-01", "a.parquet", age_s=0.0)
    listing, looked = LakeListing(), Looked(monkeypatch)
    list(listing(str(tmp_path)))
    looked.folders.clear()
    list(listing(str(tmp_path)))
    assert "date=2026-11-01" in looked.folders


def test_days_that_retention_removed_are_gone(tmp_path: Path) -> None:
    add(tmp_path, "2026-11-01", "a.parquet")
    add(tmp_path, "2026-11-02", "b.parquet")
    listing = LakeListing()
    assert len(list(listing(str(tmp_path)))) == 2
    (tmp_path / "date=2026-11-01" / "a.parquet").unlink()
    (tmp_path / "date=2026-11-01").rmdir()
    assert len(list(listing(str(tmp_path)))) == 1


def test_what_does_not_belong_there_is_shown(tmp_path: Path) -> None:
    add(tmp_path, "2026-11-01", "a.parquet")
    (tmp_path / "stray").touch()
    assert set(LakeListing().everything(str(tmp_path))) == {
        f"{tmp_path}/date=2026-11-01/a.parquet",
        f"{tmp_path}/stray",
    }
