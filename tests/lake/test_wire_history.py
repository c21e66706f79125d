"""What a lake has of a connection around a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from crosswire.lake.files import write
from crosswire.lake.schemas import WIRE
from crosswire.lake.wire_history import RecordedConnection, read_connection

SECOND = 1_000_000
MINUTE = 60 * SECOND


def record(
    lake: Path, seq: int, time_us: int, *, kind: str = "data", connection: str = "c"
) -> None:
    """A file with one row: two bytes, or the beginning of the connection."""
    data = f"{seq:02}".encode() if kind == "data" else None
    row: dict[str, Any] = {
        "node": "n", "seq": seq, "connection": "c", "direction": "forward", "kind": kind,
        "offset": 2 * seq, "length": len(data or b""), "time": time_us, "data": data,
        "late": False, "protocol": "emp", "listener": "emp", "connector_address": "",
        "connector_port": 0, "acceptor_address": "", "acceptor_port": 0,
    }  # fmt: skip
    write(lake, "wire", pa.Table.from_pylist([row], schema=WIRE))


def read(
    lake: Path, time_us: int, *, most: int = 1000, is_over: Callable[[], bool] = lambda: False
) -> RecordedConnection:
    return read_connection(lake, "c", time_us, most, is_over)


def fill(lake: Path) -> None:
    """A connection of 30 minutes, with bytes in each."""
    record(lake, 0, 0, kind="open")
    for minute in range(1, 30):
        record(lake, minute, minute * MINUTE)


def texts(found: RecordedConnection) -> list[bytes]:
    return [run.data for run in found.runs]


def test_runs_up_to_a_time_from_the_beginning_on(tmp_path: Path) -> None:
    fill(tmp_path)
    found = read(tmp_path, 3 * MINUTE)
    assert texts(found) == [b"01", b"02", b"03"]
    assert found.is_whole
    assert found.is_complete


def test_only_the_last_bytes(tmp_path: Path) -> None:
    fill(tmp_path)
    found = read(tmp_path, 20 * MINUTE, most=4)
    assert texts(found) == [b"19", b"20"]
    assert not found.is_whole
    assert found.is_complete


def test_what_is_near_a_time(tmp_path: Path) -> None:
    fill(tmp_path)
    found = read_connection(tmp_path, "c", 20 * MINUTE, 1000, lambda: False, whole=False)
    assert texts(found) == [b"19", b"20"]
    assert not found.is_whole
    assert found.is_complete


def test_files_after_the_time_are_not_read(tmp_path: Path) -> None:
    fill(tmp_path)
    asked: list[None] = []

    def is_over() -> bool:
        asked.append(None)
        return False

    read(tmp_path, 2 * MINUTE, is_over=is_over)
    assert len(asked) == 3


def test_without_time_for_the_beginning_what_is_near_is_enough(tmp_path: Path) -> None:
    fill(tmp_path)
    left = iter(range(3))
    found = read(tmp_path, 20 * MINUTE, is_over=lambda: next(left, None) is None)
    assert texts(found) == [b"18", b"19", b"20"]
    assert not found.is_whole
    assert found.is_complete


def test_without_time_for_what_is_near_it_is_not_complete(tmp_path: Path) -> None:
    fill(tmp_path)
    assert not read(tmp_path, 20 * MINUTE, is_over=lambda: True).is_complete


def test_a_lake_without_recordings(tmp_path: Path) -> None:
    assert read(tmp_path, MINUTE) == RecordedConnection([], False, True)
