"""The ledger of one node in a lake: steps of single messages, found by the files' statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from crosswire.errors import LakeError
from crosswire.lake.files import LakeFile, find

__all__ = ["LedgerHistory"]

_GROUPS: Final = 200_000
"""Row groups whose statistics are kept."""


class _LedgerGroup(NamedTuple):
    """A row group of a file, as the footer describes it."""

    number: int
    first_id: int
    last_id: int


class LedgerHistory:
    """Finds rows of the ledger. May be used by several threads."""

    def __init__(self, lake: Path, node: str) -> None:
        self._lake = lake
        self._node = node
        self._lock = Lock()
        self._groups: dict[Path, list[_LedgerGroup]] = {}
        self._count = 0

    def rows(
        self, ids: set[int], details: set[str], go_on: Callable[[], None]
    ) -> Iterator[dict[str, Any]]:
        """Rows of these messages, and rows with one of these details next to them; in order of
        `seq` within a file, the files from the newest on. `go_on` is called before each file is
        read, and ends the search by what it raises. Raises LakeError."""
        least, most = min(ids), max(ids)
        files = [file for file in find(self._lake, ("ledger",)) if file.node == self._node]
        wanted = pa.array(sorted(ids), pa.int64())
        for file in sorted(files, key=lambda each: -each.last):
            go_on()
            try:
                chosen = [
                    each.number
                    for each in self._of(file)
                    if each.first_id <= most and each.last_id >= least
                ]
                if chosen:
                    yield from self._read(file.path, chosen, wanted, details)
            except FileNotFoundError:
                # Joined into another, or expired. What it had is in a larger file, or gone.
                continue

    def _of(self, file: LakeFile) -> list[_LedgerGroup]:
        with self._lock:
            known = self._groups.get(file.path)
        if known is None:
            known = list(_footer(file.path))
            with self._lock:
                if self._count + len(known) > _GROUPS:
                    self._groups.clear()
                    self._count = 0
                self._groups[file.path] = known
                self._count += len(known)
        return known

    @staticmethod
    def _read(
        path: Path, groups: list[int], wanted: pa.Array, details: set[str]
    ) -> Iterator[dict[str, Any]]:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as opened:
                for batch in opened.iter_batches(16_384, groups, use_threads=False):
                    fits = pc.is_in(batch.column("id"), value_set=wanted)
                    if details:
                        texts = pa.array(sorted(details), pa.string())
                        fits = pc.or_(fits, pc.is_in(batch.column("detail"), value_set=texts))
                    if pc.any(fits).as_py():
                        yield from batch.filter(fits).to_pylist()
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise LakeError(f"{path} can't be read: {' '.join(str(error).split())}") from error


def _footer(path: Path) -> Iterator[_LedgerGroup]:
    try:
        metadata = pq.read_metadata(path)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    column = metadata.schema.names.index("id")
    for index in range(metadata.num_row_groups):
        statistics = metadata.row_group(index).column(column).statistics
        if statistics is None or not statistics.has_min_max:
            yield _LedgerGroup(index, 0, (1 << 63) - 1)
        else:
            yield _LedgerGroup(index, statistics.min, statistics.max)
