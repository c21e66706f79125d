"""The recorded bytes of single connections in a lake, around a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.files import LakeFile, find
from crosswire.lake.schemas import DATA, OPEN

__all__ = ["RecordedRun", "read_connection"]

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


class RecordedRun(NamedTuple):
    """Bytes that were read or written at once."""

    direction: str
    offset: int
    time: int
    data: bytes


def read_connection(
    lake: Path, connection: str, time_us: int, most_bytes: int, go_on: Callable[[], None]
) -> tuple[list[RecordedRun], bool]:
    """The runs of a connection up to shortly after a time, in order, at most this many bytes of the
    last ones; and whether they begin with the connection. `go_on` is called before each file is
    read, and ends the search by what it raises. Raises LakeError."""
    runs: list[RecordedRun] = []
    size_bytes = 0
    for file in sorted(
        find(lake, ("wire",)), key=lambda each: (each.date, each.last), reverse=True
    ):
        go_on()
        found: list[dict[str, Any]] = []
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
            return runs, size_bytes <= most_bytes
        if size_bytes > most_bytes:
            break
    while runs and size_bytes > most_bytes:
        size_bytes -= len(runs.pop(0).data)
    return runs, False


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
