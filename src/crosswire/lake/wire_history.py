"""The recorded bytes of single connections in a lake, around a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.files import LakeFile, date_of, find
from crosswire.lake.schemas import DATA, OPEN

__all__ = ["RecordedConnection", "RecordedRun", "read_connection"]

_COLUMNS: Final = (
    "connection",
    "direction",
    "kind",
    "offset",
    "length",
    "time",
    "data",
    "protocol",
)
_LATE_US: Final = 5_000_000
"""How long after a step its bytes may be recorded."""
_EARLY_US: Final = 10_000_000
"""How long before a step its bytes may have passed."""


class RecordedRun(NamedTuple):
    """Bytes that were read or written at once."""

    direction: str
    offset: int
    time: int
    data: bytes


class RecordedConnection(NamedTuple):
    """What a lake has of a connection. `is_whole`: it begins with the connection; `is_complete`:
    there was time to read everything around the time that was asked for."""

    runs: list[RecordedRun]
    is_whole: bool
    is_complete: bool


def read_connection(
    lake: Path,
    connection: str,
    time_us: int,
    most_bytes: int,
    is_over: Callable[[], bool],
    *,
    whole: bool = True,
) -> RecordedConnection:
    """The runs of a connection up to shortly after a time, in order, at most this many bytes of the
    last ones; if not the `whole` connection, only what is near the time. `is_over` is called before
    each file is read, and ends the search when it is true: what was recorded long before the time
    is missing then. Raises LakeError."""
    runs: list[RecordedRun] = []
    size_bytes = 0
    for file in _files_until(lake, time_us + _LATE_US):
        if is_over():
            is_complete = bool(runs) and runs[0].time < time_us - _EARLY_US
            return RecordedConnection(runs, False, is_complete)
        try:
            found = list(_rows(file, connection, time_us + _LATE_US))
        except FileNotFoundError:
            # Joined into another, or expired, since it was listed.
            continue
        some = [
            RecordedRun(row["direction"], row["offset"], row["time"], row["data"] or b"")
            for row in found
            if row["kind"] == DATA
        ]
        runs = some + runs
        size_bytes += sum(len(run.data) for run in some)
        if any(row["kind"] == OPEN for row in found):
            return RecordedConnection(runs, size_bytes <= most_bytes, True)
        is_enough = not whole and bool(runs) and runs[0].time < time_us - _EARLY_US
        if is_enough or size_bytes > most_bytes:
            break
    while runs and size_bytes > most_bytes:
        size_bytes -= len(runs.pop(0).data)
    return RecordedConnection(runs, False, True)


def _files_until(lake: Path, until_us: int) -> list[LakeFile]:
    """Files with rows up to a time, the newest first. Those of a node are in order of time: a
    lake of months is not read to find a minute of it."""
    last_date = date_of(until_us)
    by_node: dict[str, list[LakeFile]] = {}
    for file in find(lake, ("wire",)):
        if file.date <= last_date:
            by_node.setdefault(file.node, []).append(file)
    found: list[LakeFile] = []
    for files in by_node.values():
        files.sort(key=_order)
        found += files[: bisect_right(files, until_us, key=_first_time)]
    return sorted(found, key=_order, reverse=True)


def _order(file: LakeFile) -> tuple[str, int]:
    return file.date, file.last


def _first_time(file: LakeFile) -> int:
    """The time of the first row, by the statistics of the file; 0 if they are not there."""
    try:
        with pq.ParquetFile(file.path) as opened:
            groups = opened.metadata
            index = opened.schema_arrow.get_field_index("time")
            known = groups.row_group(0).column(index).statistics if groups.num_row_groups else None
    except FileNotFoundError:
        return 0
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"{file.path} can't be read: {' '.join(str(error).split())}") from error
    return 0 if known is None or not known.has_min_max else int(known.min)


def _rows(file: LakeFile, connection: str, until_us: int) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file.path, page_checksum_verification=True) as opened:
            groups = [
                index
                for index in range(opened.metadata.num_row_groups)
                if _may_have(opened.metadata.row_group(index), connection, until_us)
            ]
            if not groups:
                return
            for batch in opened.iter_batches(4096, groups, list(_COLUMNS), use_threads=False):
                fits = pc.and_(
                    pc.equal(batch.column("connection"), connection),
                    pc.less_equal(batch.column("time"), until_us),
                )
                if pc.any(fits).as_py():
                    yield from batch.filter(fits).to_pylist()
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"{file.path} can't be read: {' '.join(str(error).split())}") from error


def _may_have(group: Any, connection: str, until_us: int) -> bool:
    """By the statistics of a row group."""
    for index in range(group.num_columns):
        column = group.column(index)
        known = column.statistics
        if known is None or not known.has_min_max:
            continue
        if column.path_in_schema == "time" and known.min > until_us:
            return False
        if column.path_in_schema == "connection" and not known.min <= connection <= known.max:
            return False
    return True
