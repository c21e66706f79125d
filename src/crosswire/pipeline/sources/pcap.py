"""The Spark source `pcap`: TCP segments of capture files, and the runs of bytes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from crosswire.capture.classify import PortMap
from crosswire.capture.flows import FLOW_BYTES
from crosswire.capture.packet_counts import CLOCK_STEP, CLOCK_STEP_NS, PacketCounts
from crosswire.capture.reassembly import Segment
from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.assembler import Assembler, plain
from crosswire.pipeline.sources.capture_reader import Split, plain_file, read, splits
from crosswire.pipeline.sources.flow_shares import (
    FlowShare,
    MappedFile,
    OrderedSegments,
    Survey,
    check_mapped,
    collect,
    survey,
)
from crosswire.pipeline.sources.packet_kernels import PACKET
from crosswire.pipeline.sources.pcap_reader import COLUMNS, FOR_REASSEMBLY, READABLE, PcapReader
from crosswire.pipeline.sources.pcap_stream import PcapStreamReader
from crosswire.pipeline.sources.rotation import in_rotation, rotations
from crosswire.pipeline.spark import cores_of, is_local_master
from crosswire.pipeline.stores import is_local
from crosswire.pipeline.tables.wire import COLUMNS as WIRE_COLUMNS

__all__ = [
    "SPLIT_BYTES",
    "STEADY",
    "Captures",
    "Change",
    "PcapDataSource",
    "count_packets",
    "reassemble",
    "segment_rows",
    "segments_of",
    "steady",
    "wire_of_segments",
    "wire_of_share",
]

SPLIT_BYTES: Final = 64 * 1024 * 1024

Change = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

# Up to these limits every task walks over all files; beyond them segments are shuffled: walking
# costs tasks × bytes, a shuffle costs bytes, but about 20 times as much for each.
_MOST_SHARES: Final = 16
_SHARE_BYTES: Final = 64 * 1024 * 1024
"""For a task of a cluster: some seconds of work. On one machine there is a share for each core."""
_MOST_FILES: Final = 4096
_MOST_BYTES: Final = 16 << 30
_PACKETS_OF_A_SHARE: Final = 8_000_000
"""A task keeps about 50 bytes for each packet."""
_FEW_PACKETS: Final = 4096
_MOST_JOINED_BYTES: Final = 64 << 20
"""Segments that were joined from fragments are not in the file: a task keeps them in memory."""


# ---------------------------------------------------------------------------------------- source


class PcapDataSource(DataSource):
    """`spark.read.format("pcap").load(path)`: a row per TCP segment with bytes, SYN, FIN or RST.

    Options: `path` (or `paths`, a line each), `splitBytes`, `columns` (comma separated; Spark does
    not pass on to a source which ones it needs), `since` (µs; earlier packets are left out);
    `skipDamaged` (true: a capture is read up to where it is damaged or truncated, instead of ending
    the query); `splits` instead of paths, as JSON, for a caller that has found the parts already.

    `spark.readStream` reads folders: new captures, and what is appended to old ones. A batch takes
    at most `maxBytesPerTrigger`, but at least one file.
    """

    @classmethod
    def name(cls) -> str:
        """For `format("pcap")`."""
        return "pcap"

    def _columns(self) -> list[str]:
        chosen = self.options.get("columns")
        columns = chosen.replace(" ", "").split(",") if chosen else list(READABLE)
        for column in columns:
            if column not in COLUMNS:
                raise InvalidInput(f"pcap has no column {column!r}; it has {', '.join(COLUMNS)}")
        return columns

    def schema(self) -> str:
        """The columns that the options choose. Raises InvalidInput for unknown ones."""
        return ", ".join(f"{column} {COLUMNS[column]}" for column in self._columns())

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """For `spark.read`."""
        return self._reader()

    def _paths(self) -> list[str]:
        paths = self.options.get("paths") or self.options.get("path") or ""
        return [path for path in paths.split("\n") if path]

    def _reader(self) -> PcapReader:
        return PcapReader(
            self._paths(),
            msgspec.json.decode(self.options.get("splits", "[]"), type=list[Split]),
            self._columns(),
            int(self.options.get("splitBytes", SPLIT_BYTES)),
            int(self.options.get("since", 0)),
            skip_damaged=self.options.get("skipDamaged", "false").lower() == "true",
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """For `spark.readStream`."""
        return PcapStreamReader(
            self._paths(),
            self._reader(),
            int(self.options.get("splitBytes", SPLIT_BYTES)),
            int(self.options.get("maxBytesPerTrigger", 0)),
        )


# ---------------------------------------------------------------------------------------- runs


def segments_of(spark: SparkSession, parts: list[Split], *, since_us: int = 0) -> DataFrame:
    """The TCP segments of parts of capture files, with the columns that reassembly needs."""
    if not parts:
        shape = ", ".join(f"{name} {COLUMNS[name]}" for name in FOR_REASSEMBLY)
        return spark.createDataFrame([], shape)
    splits = msgspec.json.encode([replace(part, counts=None) for part in parts])
    return _source(spark, since_us).option("splits", splits.decode()).load()


def _source(spark: SparkSession, since_us: int) -> DataFrameReader:
    spark.dataSource.register(PcapDataSource)
    columns = ",".join(FOR_REASSEMBLY)
    return spark.read.format("pcap").option("columns", columns).option("since", since_us)


class Captures:
    """Capture files, read as bronze.wire or as what a function makes of it on the way.

    Plain files are surveyed once, here; what is appended to them later is not read. Every task then
    reads its share of the flows from the files themselves. Segments are shuffled instead where a
    file is compressed, where files are too large or too many, where there are many cores, or on
    request (`shuffle`).
    """

    def __init__(
        self,
        spark: SparkSession,
        paths: Iterable[str],
        *,
        ports: Mapping[int, str] | None = None,
        since_us: int = 0,
        shuffle: bool = False,
        split_bytes: int = SPLIT_BYTES,
        skip_damaged: bool = False,
    ) -> None:
        self._spark = spark
        paths = in_rotation(paths)
        self._ports = PortMap(dict(ports or {}))
        self._since_us = since_us
        self._survey: Survey | None = None
        self._counts: PacketCounts | None = None
        self._shares = 0
        self._splits: list[Split] = []
        if not shuffle:
            cores = cores_of(spark) if is_local_master(spark) else None
            self._survey, self._shares = _plan(paths, cores, skip_damaged=skip_damaged)
        if self._survey is None:
            self._splits = [
                split
                for path in paths
                for split in splits(path, split_bytes, skip_damaged=skip_damaged)
            ]

    @property
    def is_shuffled(self) -> bool:
        """Whether segments are shuffled: then reading the captures twice costs more than storing
        what was made of them."""
        return self._survey is None

    def counts(self) -> PacketCounts:
        """What became of all packets."""
        if self._counts is None:
            self._counts = (
                count_packets(self._spark, self._splits)
                if self._survey is None
                else self._survey.counts
            )
        return self._counts

    def wire(self) -> DataFrame:
        """bronze.wire; a connection is in one partition, and its rows are in order there."""
        return self.through(_plain, WIRE_COLUMNS)

    def through(self, change: Change, columns: StructType) -> DataFrame:
        """What `change` makes of batches of bronze.wire in the task that makes these: only the
        result is sent to the JVM, which costs more than the decoding."""
        if self._survey is None:
            segments = segments_of(self._spark, self._splits, since_us=self._since_us)
            paths = dict.fromkeys(split.path for split in self._splits)
            written = rotations(list(paths)) if self.counts().packets[CLOCK_STEP] else None
            return reassemble(segments, self._ports, change, columns, written=written)
        files, ports, since_ns = self._survey.files, self._ports, self._since_us * 1000
        shares = self._survey.shares(self._shares)

        def read_share(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from change(wire_of_share(files, shares[number], ports, since_ns))

        numbers = self._spark.range(0, self._shares, 1, self._shares)
        return numbers.mapInArrow(read_share, columns)


def count_packets(
    spark: SparkSession, parts: list[Split], earlier: Mapping[str, int] | None = None
) -> PacketCounts:
    """What became of the packets in parts of capture files; tasks count those of parts in which
    they are not counted yet. `earlier` are the times (ns) of the last packets that were read
    before, by path: a rotated file may follow one of these."""
    counts = [part.counts for part in parts]
    unknown = [
        (index, msgspec.json.encode(part).decode())
        for index, part in enumerate(parts)
        if part.counts is None
    ]

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                found = PacketCounts()
                for _ in read(msgspec.json.decode(row["part"], type=Split), found):
                    pass  # only the counts matter here
                text = msgspec.json.encode(found).decode()
                yield pa.RecordBatch.from_pylist([{"index": row["index"], "counts": text}])

    if unknown:
        given = spark.createDataFrame(unknown, "index bigint, part string")
        made = given.repartition(_tasks_for(spark, len(unknown)))
        for row in made.mapInArrow(count, "index bigint, counts string").collect():
            counts[row["index"]] = msgspec.json.decode(row["counts"], type=PacketCounts)
    by_file: dict[str, PacketCounts] = {}
    for part, found in zip(parts, counts, strict=True):
        assert found is not None
        by_file.setdefault(part.path, PacketCounts()).merge(found)
    return _over_files(by_file, earlier or {})


def _over_files(by_file: Mapping[str, PacketCounts], earlier: Mapping[str, int]) -> PacketCounts:
    """The sum of files, with clock steps from one rotated file to the next."""
    total = PacketCounts()
    paths = in_rotation({*by_file, *earlier})
    last_ns: dict[int, int] = {}
    for path, rotation in zip(paths, rotations(paths), strict=True):
        own = by_file.get(path)
        # A file that was begun before knows its own last time.
        if own is not None and path not in earlier:
            own.follow(last_ns.get(rotation, 0))
        if own is not None:
            total.merge(own)
        last_ns[rotation] = (own.last_ns if own is not None else 0) or earlier.get(path, 0)
    return total


def _tasks_for(spark: SparkSession, parts: int) -> int:
    """Tasks for a number of parts: one for each on a cluster, where executors may join later."""
    return min(parts, 4 * cores_of(spark)) if is_local_master(spark) else parts


def _plan(paths: list[str], cores: int | None, *, skip_damaged: bool) -> tuple[Survey | None, int]:
    """A survey of the files and the number of shares; (None, 0) if segments have to be shuffled.

    `cores` is None on a cluster: executors may join later, so only sizes decide there.
    """
    if len(paths) > _MOST_FILES or not all(map(is_local, paths)) or (cores or 0) > _MOST_SHARES:
        return None, 0
    files = [plain_file(path, skip_damaged=skip_damaged) for path in paths]
    plain = [file for file in files if file is not None]
    size_bytes = sum(file.size_bytes for file in plain)
    if len(plain) < len(files) or size_bytes > _MOST_BYTES:
        return None, 0
    wanted = 1 + size_bytes // _SHARE_BYTES if cores is None else cores
    if wanted > _MOST_SHARES:
        return None, 0
    surveyed = survey(plain)
    packets = int(surveyed.packets.sum())
    # A bucket can't be divided: one large flow would fill the memory of its task.
    if surveyed.packets.max() > _PACKETS_OF_A_SHARE // 2:
        return None, 0
    if surveyed.joined_bytes > _MOST_JOINED_BYTES:
        return None, 0
    # Fewer for small captures, more where a share would be too large.
    count = max(min(wanted, 1 + packets // _FEW_PACKETS), -(-2 * packets // _PACKETS_OF_A_SHARE))
    return surveyed, count


def _plain(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return map(plain, batches)


def wire_of_share(
    files: list[Split], share: FlowShare, ports: PortMap, since_ns: int
) -> Iterator[pa.RecordBatch]:
    """bronze.wire of a share of the flows in these files. Raises InvalidInput."""
    opened = [MappedFile(file) for file in files]
    assembler = Assembler(ports)
    segments = collect(files, opened, share, since_ns)
    check_mapped(opened)
    for batch in chain(assembler.feed(segments), assembler.finish()):
        yield batch
        check_mapped(opened)


def reassemble(
    segments: DataFrame,
    ports: PortMap,
    change: Change = _plain,
    columns: StructType = WIRE_COLUMNS,
    *,
    written: Sequence[int] | None = None,
) -> DataFrame:
    """Shuffle segments by flow, reassemble them and give what `change` makes of the batches.
    `written` is for captures during which the clock was set back: see `steady`."""
    arranged = segments.repartition("flow")
    names, time = arranged.columns, "time_ns"
    if written is not None:
        arranged, time = steady(arranged, written), STEADY
    # File and record decide between segments of the same time, so that the result does not depend
    # on how the shuffle went.
    arranged = arranged.sortWithinPartitions("flow", time, "file", "record").select(*names)

    def assemble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from change(wire_of_segments(batches, ports))

    return arranged.mapInArrow(assemble, columns)


STEADY: Final = "steady"


def steady(segments: DataFrame, written: Sequence[int]) -> DataFrame:
    """Segments with their times as a clock would have them that was never set back, in the column
    `steady`: see `flow_shares`. By number of file, `written` is the rotation it belongs to."""
    rotation = F.element_at(F.array(*map(F.lit, written)), F.col("file") + 1)
    own = Window.partitionBy("flow", "rotation").orderBy("file", "record")
    drop = F.coalesce(F.lag("time_ns").over(own) - F.col("time_ns"), F.lit(0))
    rows = segments.withColumn("rotation", rotation)
    rows = rows.withColumn("drop", F.when(drop > CLOCK_STEP_NS, drop).otherwise(0))
    rows = rows.withColumn(STEADY, F.col("time_ns") + F.sum("drop").over(own))
    return rows.drop("rotation", "drop")


def wire_of_segments(batches: Iterable[pa.RecordBatch], ports: PortMap) -> Iterator[pa.RecordBatch]:
    """bronze.wire of segments, sorted by flow and time."""
    assembler = Assembler(ports)
    for batch in batches:
        yield from assembler.feed(_ordered(batch))
    yield from assembler.finish()


def _ordered(batch: pa.RecordBatch) -> OrderedSegments:
    """Segments that are sorted already. Flows are numbered by comparing neighbours."""
    count = batch.num_rows
    offsets, payload = _binary(batch.column("payload"))
    flow_offsets, flow_bytes = _binary(batch.column("flow"))
    flows = flow_bytes[flow_offsets[0] : flow_offsets[-1]].reshape(count, FLOW_BYTES)
    first = np.ones(count, np.bool_)
    first[1:] = (flows[1:] != flows[:-1]).any(axis=1)
    packets = np.zeros(count, PACKET)
    packets["flow"] = np.cumsum(first) - 1
    packets["start"], packets["size"] = offsets[:-1], np.diff(offsets)
    for name in ("forward", "time_ns", "number", "acknowledgement", "flags", "length"):
        packets[name] = batch.column(name).to_numpy(zero_copy_only=False)
    return OrderedSegments(np.arange(count, dtype=np.int32), flows[first], (payload,), packets)


def _binary(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Offsets and bytes of a column without nulls."""
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, offsets, data = column.buffers()
    own = np.frombuffer(offsets, kind)[column.offset : column.offset + len(column) + 1]
    return own, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def segment_rows(batch: pa.RecordBatch) -> Iterator[tuple[bytes, Segment]]:
    """The flow's key and the segment of each row of a batch."""
    names = ("forward", "time_ns", "number", "acknowledgement", "flags", "length", "payload")
    columns = [batch.column(name).to_pylist() for name in names]
    return zip(batch.column("flow").to_pylist(), map(Segment._make, zip(*columns)), strict=True)  # noqa: B905
