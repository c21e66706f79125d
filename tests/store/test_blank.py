"""Databases without any of the hub's own files: of other programs, of older hubs, of new ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import rocksdict

from crosswire.errors import StoreDamaged, StoreFailed
from crosswire.store.rocks import RocksStore, table_options
from tests.store.committing import close


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in folder.iterdir()}


def make(folder: Path, **rows: bytes) -> None:
    database = rocksdict.Rdict(str(folder), table_options(1 << 20))
    for key, value in rows.items():
        database[key.encode()] = value
    database.close()


@pytest.mark.parametrize("has_engine_config", [True, False])
def test_the_database_of_another_program_is_left_alone(
    tmp_path: Path, has_engine_config: bool
) -> None:
    make(tmp_path, user=b"1", sschedule=b"theirs", d=b"theirs")
    if not has_engine_config:
        (tmp_path / "rocksdict-config.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(StoreFailed, match="of another program") as refused:
        RocksStore(tmp_path)
    assert not isinstance(refused.value, StoreDamaged)
    assert "\n" not in str(refused.value)
    assert contents(tmp_path) == before


def test_a_first_start_that_was_killed_is_begun_anew(tmp_path: Path) -> None:
    make(tmp_path)
    store = RocksStore(tmp_path)
    assert store.node
    assert not store.damage
    asyncio.run(close(store))
    again = RocksStore(tmp_path)
    assert again.node == store.node
    asyncio.run(close(again))


def test_garbage_in_current_is_one_plain_line(tmp_path: Path) -> None:
    asyncio.run(close(RocksStore(tmp_path)))
    (tmp_path / "CURRENT").write_bytes(b"nonsense\0\xff\n" * 3)
    with pytest.raises(StoreDamaged, match="CURRENT") as refused:
        RocksStore(tmp_path)
    assert "nonsense" not in str(refused.value)
    assert "\n" not in str(refused.value)
