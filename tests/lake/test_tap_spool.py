"""The tap's spool: order, gaps, what a kill and a full disk leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from crosswire.lake.schemas import BACKWARD, DATA, FIN, FORWARD, GAP, LOST, OPEN
from crosswire.lake.tap_spool import Peers, Spool, WireRow
from crosswire.lake.verification import verify
from tests.lake.crash import read_lake

NOW = 1_790_000_000_000_000
COLUMNS = ["seq", "connection", "direction", "kind", "offset", "length", "data", "late"]


def peers(name: str = "c1") -> Peers:
    return Peers(name, "emp", "emp", "10.0.0.1", 4000, "10.0.0.2", 5040)


def opened(name: str = "c1") -> WireRow:
    return WireRow(peers(name), FORWARD, OPEN, 0, 0, NOW)


def data(offset: int, some: bytes, direction: str = FORWARD, name: str = "c1") -> WireRow:
    return WireRow(peers(name), direction, DATA, offset, len(some), NOW, some)


def spool(lake: Path, memory_bytes: int = 1 << 20) -> Spool:
    return Spool(lake, "n1", memory_bytes=memory_bytes)


def rows(lake: Path) -> list[dict[str, Any]]:
    return read_lake(lake, "wire", COLUMNS)


def kinds(lake: Path) -> list[str]:
    return [row["kind"] for row in rows(lake)]


def test_both_directions_of_a_connection_are_in_one_file_in_order(tmp_path: Path) -> None:
    one = spool(tmp_path)
    end = WireRow(peers(), FORWARD, FIN, 4, 0, NOW)
    one.add([opened(), data(0, b"ab"), data(0, b"xyz", BACKWARD), data(2, b"cd"), end], NOW)
    one.close(NOW)
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    found = [(row["direction"], row["kind"], row["offset"], row["data"]) for row in rows(tmp_path)]
    assert found == [
        (FORWARD, OPEN, 0, None),
        (FORWARD, DATA, 0, b"ab"),
        (BACKWARD, DATA, 0, b"xyz"),
        (FORWARD, DATA, 2, b"cd"),
        (FORWARD, FIN, 4, None),
    ]


def test_numbers_go_on_over_files_and_lives(tmp_path: Path) -> None:
    for _ in range(2):
        one = spool(tmp_path)
        one.add([opened(), data(0, b"ab")], NOW)
        assert one.seal() == 2
        one.add([data(2, b"cd")], NOW)
        one.close(NOW)
    assert [row["seq"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert not list(verify(tmp_path))


def test_numbers_go_on_when_retention_took_every_file(tmp_path: Path) -> None:
    one = spool(tmp_path)
    one.add([opened()], NOW)
    one.close(NOW)
    for file in tmp_path.rglob("*.parquet"):
        file.unlink()
    one = spool(tmp_path)
    one.add([opened()], NOW)
    one.close(NOW)
    assert [row["seq"] for row in rows(tmp_path)] == [2]


def test_what_a_kill_left_is_sealed_at_the_next_start(tmp_path: Path) -> None:
    spool(tmp_path).add([opened(), data(0, b"ab")], NOW)
    one = spool(tmp_path)
    assert kinds(tmp_path) == [OPEN, DATA]
    one.close(NOW)
    assert kinds(tmp_path) == [OPEN, DATA, LOST]
    assert not list(verify(tmp_path))


def test_an_orderly_end_loses_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        spool(tmp_path).close(NOW)
    assert kinds(tmp_path) == []


def test_a_spool_is_sealed_once_even_if_it_was_not_removed(tmp_path: Path) -> None:
    one = spool(tmp_path)
    one.add([opened(), data(0, b"ab")], NOW)
    (path,) = (tmp_path / ".spool").glob("*.spool")
    left = path.read_bytes()
    one.seal()
    path.write_bytes(left)
    spool(tmp_path)
    assert [row["seq"] for row in rows(tmp_path)] == [1, 2]


def test_a_torn_spool_is_sealed_up_to_the_tear(tmp_path: Path) -> None:
    one = spool(tmp_path)
    one.add([opened()], NOW)
    one.add([data(0, b"ab")], NOW)
    (path,) = (tmp_path / ".spool").glob("*.spool")
    path.write_bytes(path.read_bytes()[:-1])
    spool(tmp_path)
    assert kinds(tmp_path) == [OPEN]


def test_a_full_disk_becomes_a_row_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = spool(tmp_path)
    one.add([opened(), data(0, b"ab")], NOW)
    with monkeypatch.context() as broken:
        written = os.write

        def full(descriptor: int, some: memoryview) -> int:
            if len(some) > 8:
                return written(descriptor, some[:8])
            raise OSError(28, "No space left on device")

        broken.setattr("os.write", full)
        one.add([data(2, b"lost")], NOW)
        one.add([opened("c2"), data(0, b"gone", name="c2")], NOW)
    one.add([data(6, b"ef"), data(4, b"late", name="c2")], NOW)
    one.close(NOW)
    found = [
        (row["connection"], row["kind"], row["offset"], row["length"]) for row in rows(tmp_path)
    ]
    assert found == [
        ("c1", OPEN, 0, 0),
        ("c1", DATA, 0, 2),
        ("", LOST, 0, 8),
        ("c1", GAP, 2, 4),
        ("c1", DATA, 6, 2),
        ("c2", DATA, 4, 4),
    ]
    assert [row["late"] for row in rows(tmp_path)] == [False] * 5 + [True]
    assert not list(verify(tmp_path))


def test_when_files_can_not_be_sealed_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = spool(tmp_path, memory_bytes=2000)
    one.add([opened()], NOW)
    with monkeypatch.context() as broken:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr("crosswire.lake.tap_spool.write", full)
        for number in range(20):
            one.add([data(number * 500, bytes(500))], NOW)
            with pytest.raises(OSError, match="No space"):
                one.seal()
        assert one.size_bytes < 3000
    one.seal()
    one.add([data(10_000, b"on")], NOW)
    one.close(NOW)
    assert kinds(tmp_path)[-3:] == [LOST, GAP, DATA]
    lengths = [row["length"] for row in rows(tmp_path) if row["kind"] in (DATA, GAP)]
    assert sum(lengths) == 10_002
