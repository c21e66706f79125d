"""The Spark source `pcap` as a stream: new captures in folders, and what is appended to old ones.

An offset has for each capture how far it was read. Spark stores it before a batch runs, so a batch
that is repeated after a failure reads the same records, however much the files have grown since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture_reader import Split, advance, capture_state
from crosswire.pipeline.sources.new_input import CaptureRead, InputPosition, NewInputFinder
from crosswire.pipeline.sources.pcap_reader import PcapPartition, PcapReader
from crosswire.pipeline.spark_features import (
    HAS_LIMITS,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

__all__ = ["PcapStreamReader"]

Offset = dict[str, str]
"""By path, a CaptureRead as JSON."""

_EVERYTHING: Final = 1 << 62
_READ: Final = msgspec.json.Decoder(CaptureRead)


class PcapStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Finds new parts of captures on the driver; tasks read them as PcapReader does.

    Raises InvalidInput for what can't be read.
    """

    def __init__(
        self, paths: list[str], reader: PcapReader, split_bytes: int, batch_bytes: int
    ) -> None:
        if not paths:
            raise InvalidInput("pcap needs the path of a capture file, or of a folder of them")
        if batch_bytes and not HAS_LIMITS:
            raise InvalidInput("this version of Spark knows no maxBytesPerTrigger")
        self._paths = paths
        self._reader = reader
        self._split_bytes = split_bytes
        self._batch_bytes = batch_bytes
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802
        """Nothing was read."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxBytesPerTrigger`."""
        return ReadMaxBytes(self._batch_bytes) if self._batch_bytes else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end: what is appended from now on is for the next run."""
        self._target = self._found({}, patient=False)

    def latestOffset(  # noqa: N802
        self, start: Offset | None = None, limit: ReadLimit | None = None
    ) -> Offset:
        """The offset after the next batch: within the limit, but at least one file, so that a file
        larger than the limit is read at all. Spark 4.0 gives no start: then it is after all."""
        if start is None:
            return self._found({}, patient=True)
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
        """The parts between two offsets. Raises InvalidInput if a capture of them was removed."""
        # By path over all known captures: repeated batches number files alike.
        files = {path: number for number, path in enumerate(sorted(end))}
        return [
            PcapPartition(files[path], part)
            for path in sorted(end)
            if start.get(path) != end[path]
            for part in self._parts(path, start.get(path), _READ.decode(end[path]))
        ]

    def _parts(self, path: str, before: str | None, until: CaptureRead) -> Iterator[Split]:
        known = None if before is None else _READ.decode(before)
        if capture_state(path) is None:
            raise InvalidInput(f"{path} was removed before it was read")
        # Another head: the name was given to a new capture, which is read from its beginning.
        same = known is not None and known.head == until.head and known.end <= until.end
        first, layout = (known.end, known.layout) if known is not None and same else (0, None)
        parts, _, _ = advance(path, self._split_bytes, first, layout)
        for part in parts:
            if until.layout is None:
                yield part  # compressed: one part
            elif part.start < until.end:
                # The file may have grown since the offset was made.
                end = until.end if part.end is None else min(part.end, until.end)
                yield replace(part, end=end)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The segments of a part."""
        assert partition is not None
        return self._reader.read(partition)
