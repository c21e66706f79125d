"""The Spark source `pcap`: TCP segments of capture files, and the runs of bytes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from crosswire.errors import InvalidInput
from crosswire.pipeline import register
from crosswire.pipeline.sources.assemble import Assembler
from crosswire.pipeline.sources.capture import Segments, Split, read, splits, whole
from crosswire.pipeline.sources.classify import PortMap
from crosswire.pipeline.sources.index import (
    Mapped,
    Ordered,
    Survey,
    collect,
    keep_small,
    shares,
    survey,
)
from crosswire.pipeline.sources.packets import gather
from crosswire.pipeline.sources.reassembly import Segment
from crosswire.pipeline.sources.rows import end_of
from crosswire.pipeline.tables.wire import COLUMNS as WIRE_COLUMNS

__all__ = [
    "SPLIT_BYTES",
    "Captures",
    "Change",
    "PcapDataSource",
    "reassemble",
    "segment_rows",
    "segments_of",
    "wire_of_segments",
    "wire_of_share",
]

SPLIT_BYTES: Final = 64 * 1024 * 1024

Change = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_FLOW_BYTES: Final = 36

# Up to here every task walks over all files; beyond, their segments are shuffled.
_MOST_CORES: Final = 16
_MOST_FILES: Final = 4096
_MOST_BYTES: Final = 16 << 30
_PACKETS_OF_A_SHARE: Final = 8_000_000
"""What a task keeps of a packet takes about 50 bytes."""
_FEW_PACKETS: Final = 4096

_COLUMNS: Final = {
    "flow": "binary",
    "forward": "boolean",
    "time_ns": "bigint",
    "file": "int",
    "record": "bigint",
    "number": "bigint",
    "acknowledgement": "bigint",
    "flags": "smallint",
    "length": "int",
    "payload": "binary",
    "source": "string",
    "source_port": "int",
    "destination": "string",
    "destination_port": "int",
}
_READABLE: Final = (
    "time_ns",
    "source",
    "source_port",
    "destination",
    "destination_port",
    "number",
    "acknowledgement",
    "flags",
    "length",
    "payload",
)
_FOR_REASSEMBLY: Final = tuple(_COLUMNS)[:10]


# ---------------------------------------------------------------------------------------- source


class PcapDataSource(DataSource):
    """`spark.read.format("pcap").load(path)`: a row per TCP segment with bytes, SYN, FIN or RST.

    Options: `path` (or `paths`, a line each), `splitBytes`, `columns` (comma separated; Spark does
    not tell a source which ones it needs), `since` (µs; earlier packets are left out); `splits`
    instead of paths, as JSON, for who has looked for them already.

    `spark.readStream` reads folders: new captures, and what is added to old ones. Of much that
    waits a batch takes `maxBytesPerTrigger`, at least a file.
    """

    @classmethod
    def name(cls) -> str:
        return "pcap"

    def _columns(self) -> list[str]:
        chosen = self.options.get("columns")
        columns = chosen.replace(" ", "").split(",") if chosen else list(_READABLE)
        for column in columns:
            if column not in _COLUMNS:
                raise InvalidInput(f"pcap has no column {column!r}; it has {', '.join(_COLUMNS)}")
        return columns

    def schema(self) -> str:
        return ", ".join(f"{column} {_COLUMNS[column]}" for column in self._columns())

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
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
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        from crosswire.pipeline.sources.growing import PcapStreamReader

        return PcapStreamReader(
            self._paths(),
            self._reader(),
            int(self.options.get("splitBytes", SPLIT_BYTES)),
            int(self.options.get("maxBytesPerTrigger", 0)),
        )


@dataclass
class PcapPartition(InputPartition):
    file: int
    split: Split


class PcapReader(DataSourceReader):
    def __init__(
        self,
        paths: list[str],
        parts: list[Split],
        columns: list[str],
        split_bytes: int,
        since_us: int,
    ) -> None:
        self._paths = paths
        self._parts = parts
        self._columns = columns
        self._split_bytes = split_bytes
        self._since_ns = since_us * 1000

    def partitions(self) -> list[InputPartition]:
        if self._parts:
            files = {path: file for file, path in enumerate(sorted({p.path for p in self._parts}))}
            return [PcapPartition(files[part.path], part) for part in self._parts]
        if not self._paths:
            raise InvalidInput("pcap needs the path of a capture file")
        return [
            PcapPartition(file, split)
            for file, path in enumerate(self._paths)
            for split in splits(path, self._split_bytes)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PcapPartition)
        for segments in read(partition.split):
            yield _batch(segments, partition.file, self._columns, self._since_ns)


def _batch(segments: Segments, file: int, columns: list[str], since_ns: int) -> pa.RecordBatch:
    chosen = segments.chosen
    if since_ns:
        chosen = chosen[segments.times[chosen] >= since_ns]
    count = len(chosen)
    make = {
        "flow": lambda: _slices(segments.flows[chosen]),
        "forward": lambda: pa.array(segments.forwards[chosen]),
        "time_ns": lambda: pa.array(segments.times[chosen]),
        "file": lambda: pa.array(np.full(count, file, np.int32)),
        "record": lambda: pa.array(segments.records[chosen]),
        "number": lambda: pa.array(segments.numbers[chosen]),
        "acknowledgement": lambda: pa.array(segments.acknowledgements[chosen]),
        "flags": lambda: pa.array(segments.flags[chosen]),
        "length": lambda: pa.array(segments.lengths[chosen]),
        "payload": lambda: _payloads(segments, chosen),
        "source": lambda: pa.array([end[0] for end in _ends(segments, chosen, 0)]),
        "source_port": lambda: pa.array([end[1] for end in _ends(segments, chosen, 0)], pa.int32()),
        "destination": lambda: pa.array([end[0] for end in _ends(segments, chosen, 1)]),
        "destination_port": lambda: pa.array(
            [end[1] for end in _ends(segments, chosen, 1)], pa.int32()
        ),
    }
    return pa.RecordBatch.from_arrays([make[name]() for name in columns], names=columns)


def _slices(rows: Any) -> pa.Array:
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
    data = np.ascontiguousarray(rows)
    return pa.Array.from_buffers(
        pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _payloads(segments: Segments, chosen: Any) -> pa.Array:
    offsets = np.zeros(len(chosen) + 1, np.int32)
    data = np.empty(int(segments.payload_sizes[chosen].sum()), np.uint8)
    gather(segments.data, chosen, segments.payload_starts, segments.payload_sizes, offsets, data)
    return pa.Array.from_buffers(
        pa.binary(), len(chosen), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _ends(segments: Segments, chosen: Any, which: int) -> Iterator[tuple[str, int]]:
    """Address and port of who sent it (0), or of who was to get it (1)."""
    for index in chosen.tolist():
        flow = segments.flows[index].tobytes()
        lower = bool(segments.forwards[index]) is (which == 0)
        yield end_of(flow[:18] if lower else flow[18:])


# ---------------------------------------------------------------------------------------- runs


def segments_of(spark: SparkSession, parts: list[Split], *, since_us: int = 0) -> DataFrame:
    """The TCP segments of parts of capture files, as the reassembly needs them."""
    if not parts:
        shape = ", ".join(f"{name} {_COLUMNS[name]}" for name in _FOR_REASSEMBLY)
        return spark.createDataFrame([], shape)
    return _source(spark, since_us).option("splits", msgspec.json.encode(parts).decode()).load()


def _source(spark: SparkSession, since_us: int) -> DataFrameReader:
    register(spark)
    columns = ",".join(_FOR_REASSEMBLY)
    return spark.read.format("pcap").option("columns", columns).option("since", since_us)


class Captures:
    """Capture files, to be read as bronze.wire, or as what a function makes of it on the way.

    Plain files are looked at once, here; what is added to them later is not read. Every task takes
    its share of the flows out of the files themselves. Where one of them is compressed, or they are
    too large or too many for that, or tasks are, segments are shuffled: `shuffle` says so at once.
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
    ) -> None:
        self._spark = spark
        self._paths = list(paths)
        self._ports = PortMap(dict(ports or {}))
        self._since_us = since_us
        self._split_bytes = split_bytes
        self._survey: Survey | None = None
        self._shares = 0
        if not shuffle:
            self._survey, self._shares = _plan(self._paths, spark.sparkContext.defaultParallelism)

    @property
    def is_shuffled(self) -> bool:
        """To read them twice costs more than to read again what was made of them."""
        return self._survey is None

    def wire(self) -> DataFrame:
        """bronze.wire: connections together and in order within a partition."""
        return self.through(iter, WIRE_COLUMNS)

    def through(self, change: Change, columns: StructType) -> DataFrame:
        """What `change` makes of batches of bronze.wire, where these are made: they don't cross
        into Java before."""
        if self._survey is None:
            source = _source(self._spark, self._since_us).option("splitBytes", self._split_bytes)
            segments = source.option("paths", "\n".join(self._paths)).load()
            return reassemble(segments, self._ports, change, columns)
        files, ports, since_ns = self._survey.files, self._ports, self._since_us * 1000
        owners = shares(self._survey, self._shares)

        def read_share(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for share in batch.column(0).to_pylist():
                    yield from change(wire_of_share(files, owners, share, ports, since_ns))

        numbers = self._spark.range(0, self._shares, 1, self._shares)
        return numbers.mapInArrow(read_share, columns)


def _plan(paths: list[str], cores: int) -> tuple[Survey | None, int]:
    """What is in the files and into how many shares to divide it, if that is the way to go."""
    if cores > _MOST_CORES or len(paths) > _MOST_FILES:
        return None, 0
    files = [whole(path) for path in paths]
    plain = [file for file in files if file is not None]
    if len(plain) < len(files) or sum(file.size_bytes for file in plain) > _MOST_BYTES:
        return None, 0
    surveyed = survey(plain)
    packets = int(surveyed.packets.sum())
    if surveyed.packets.max() > _PACKETS_OF_A_SHARE // 2:
        return None, 0
    count = max(min(cores, 1 + packets // _FEW_PACKETS), -(-2 * packets // _PACKETS_OF_A_SHARE))
    return surveyed, count


def wire_of_share(
    files: list[Split],
    owners: npt.NDArray[np.int32],
    share: int,
    ports: PortMap,
    since_ns: int,
) -> Iterator[pa.RecordBatch]:
    """bronze.wire of a share of the flows in these files. Raises InvalidInput."""
    opened = [Mapped(file) for file in files]
    assembler = Assembler(ports)
    segments = collect(opened, owners, share, since_ns)
    for batch in chain(assembler.feed(segments), assembler.finish()):
        yield batch
        keep_small(opened)


def reassemble(
    segments: DataFrame,
    ports: PortMap,
    change: Change = iter,
    columns: StructType = WIRE_COLUMNS,
) -> DataFrame:
    """Segments of any number of flows → what `change` makes of batches of bronze.wire."""
    arranged = segments.repartition("flow").sortWithinPartitions(
        "flow", "time_ns", "file", "record"
    )

    def assemble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from change(wire_of_segments(batches, ports))

    return arranged.mapInArrow(assemble, columns)


def wire_of_segments(batches: Iterable[pa.RecordBatch], ports: PortMap) -> Iterator[pa.RecordBatch]:
    """bronze.wire of segments, sorted by flow and time."""
    assembler = Assembler(ports)
    for batch in batches:
        yield from assembler.feed(_ordered(batch))
    yield from assembler.finish()


def _ordered(batch: pa.RecordBatch) -> Ordered:
    """As they are."""
    count = batch.num_rows
    offsets, payload = _binary(batch.column("payload"))
    flow_offsets, flow_bytes = _binary(batch.column("flow"))
    flows = flow_bytes[flow_offsets[0] : flow_offsets[-1]].reshape(count, _FLOW_BYTES)
    first = np.ones(count, np.bool_)
    first[1:] = (flows[1:] != flows[:-1]).any(axis=1)

    def column(name: str, kind: Any) -> Any:
        return batch.column(name).to_numpy(zero_copy_only=False).astype(kind, copy=False)

    return Ordered(
        order=np.arange(count, dtype=np.int32),
        keys=flows[first],
        data=(payload,),
        flows=np.cumsum(first, dtype=np.int32) - np.int32(1),
        forwards=column("forward", np.bool_),
        times=column("time_ns", np.int64),
        numbers=column("number", np.uint32),
        acknowledgements=column("acknowledgement", np.uint32),
        flags=column("flags", np.uint8),
        lengths=column("length", np.int32),
        sizes=np.diff(offsets).astype(np.int32),
        sources=np.zeros(count, np.int32),
        starts=offsets[:-1].astype(np.int64),
    )


def _binary(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """Offsets and bytes of a column without nulls."""
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, offsets, data = column.buffers()
    own = np.frombuffer(offsets, kind)[column.offset : column.offset + len(column) + 1]
    return own, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def segment_rows(batch: pa.RecordBatch) -> Iterator[tuple[bytes, Segment]]:
    names = ("forward", "time_ns", "number", "acknowledgement", "flags", "length", "payload")
    columns = [batch.column(name).to_pylist() for name in names]
    return zip(batch.column("flow").to_pylist(), map(Segment._make, zip(*columns)), strict=True)  # noqa: B905
