"""The Spark source `pcap` as a stream: captures in folders, new ones and what is added to old ones.

An offset says of each capture how far it was read. A batch that is repeated reads the same records,
however the files have grown since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture_reader import Split, advance
from crosswire.pipeline.sources.new_input import CaptureRead, InputPosition, NewInputFinder
from crosswire.pipeline.sources.pcap_reader import PcapPartition, PcapReader

__all__ = ["PcapStreamReader"]

Offset = dict[str, str]
"""By path, a CaptureRead as JSON."""

_EVERYTHING: Final = 1 << 62
_READ: Final = msgspec.json.Decoder(CaptureRead)


class PcapStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(
        self, paths: list[str], reader: PcapReader, split_bytes: int, batch_bytes: int
    ) -> None:
        if not paths:
            raise InvalidInput("pcap needs the path of a capture file, or of a folder of them")
        self._paths = paths
        self._reader = reader
        self._split_bytes = split_bytes
        self._batch_bytes = batch_bytes
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxBytes(self._batch_bytes) if self._batch_bytes else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._found({}, patient=False)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """At least a file further, if there is one."""
        found = self._found(start, patient=True) if self._target is None else self._target
        most_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        taken, size_bytes = dict(start), 0
        for path in sorted(found):
            if found[path] == start.get(path):
                continue
            before = _READ.decode(start[path]).end if path in start else 0
            size_bytes += _READ.decode(found[path]).end - before
            if most_bytes is not None and size_bytes > most_bytes and taken != start:
                break
            taken[path] = found[path]
        return taken

    def _found(self, start: Offset, *, patient: bool) -> Offset:
        finder = NewInputFinder(
            self._paths,
            lambda _: (),
            batch_bytes=_EVERYTHING,
            split_bytes=self._split_bytes,
            patient=patient,
            records=False,
        )
        position = InputPosition(
            captures={path: _READ.decode(read) for path, read in start.items()}
        )
        for arrived in finder.look(position):
            position = arrived.position
        return {
            path: msgspec.json.encode(read).decode() for path, read in position.captures.items()
        }

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        files = {path: number for number, path in enumerate(sorted(end))}
        return [
            PcapPartition(files[path], part)
            for path in sorted(end)
            if start.get(path) != end[path]
            for part in self._parts(path, start.get(path), _READ.decode(end[path]))
        ]

    def _parts(self, path: str, before: str | None, until: CaptureRead) -> Iterator[Split]:
        known = None if before is None else _READ.decode(before)
        if not Path(path).exists():
            raise InvalidInput(f"{path} was taken away before it was read")
        same = known is not None and known.head == until.head and known.end <= until.end
        first, layout = (known.end, known.layout) if known is not None and same else (0, None)
        parts, _, _ = advance(path, self._split_bytes, first, layout)
        for part in parts:
            if until.layout is None:
                yield part  # compressed: one part
            elif part.start < until.end:
                end = until.end if part.end is None else min(part.end, until.end)
                yield replace(part, end=end)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        assert partition is not None
        return self._reader.read(partition)
