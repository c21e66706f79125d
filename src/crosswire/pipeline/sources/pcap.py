"""The Spark source `pcap`: TCP segments of capture files, and the runs of bytes in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from crosswire.errors import DecoderStateError, InvalidInput
from crosswire.lake.schemas import BACKWARD, FORWARD, WIRE
from crosswire.pipeline.batches import Batches
from crosswire.pipeline.sources.capture import Segments, Split, read, splits
from crosswire.pipeline.sources.classify import Classified, Classifier, PortMap
from crosswire.pipeline.sources.packets import gather
from crosswire.pipeline.sources.reassembly import REORDER_BYTES, Flow, Segment
from crosswire.pipeline.tables.wire import COLUMNS as WIRE_COLUMNS

__all__ = [
    "NODE",
    "FlowRows",
    "PcapDataSource",
    "from_captures",
    "reassemble",
    "segment_rows",
    "segments_of",
]

NODE: Final = "pcap"
"""What stands for the hub's node where there is none."""

SPLIT_BYTES: Final = 64 * 1024 * 1024

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
        paths = self.options.get("paths") or self.options.get("path") or ""
        return PcapReader(
            [path for path in paths.split("\n") if path],
            msgspec.json.decode(self.options.get("splits", "[]"), type=list[Split]),
            self._columns(),
            int(self.options.get("splitBytes", SPLIT_BYTES)),
            int(self.options.get("since", 0)),
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
        yield _end(flow[:18] if lower else flow[18:])


def _end(end: bytes) -> tuple[str, int]:
    address = ip_address(end[:16])
    assert isinstance(address, IPv6Address)
    return str(address.ipv4_mapped or address), int.from_bytes(end[16:])


# ---------------------------------------------------------------------------------------- runs


def segments_of(spark: SparkSession, parts: list[Split], *, since_us: int = 0) -> DataFrame:
    """The TCP segments of parts of capture files, as the reassembly needs them."""
    if not parts:
        shape = ", ".join(f"{name} {_COLUMNS[name]}" for name in _FOR_REASSEMBLY)
        return spark.createDataFrame([], shape)
    return _source(spark, since_us).option("splits", msgspec.json.encode(parts).decode()).load()


def _source(spark: SparkSession, since_us: int) -> DataFrameReader:
    spark.dataSource.register(PcapDataSource)
    columns = ",".join(_FOR_REASSEMBLY)
    return spark.read.format("pcap").option("columns", columns).option("since", since_us)


def from_captures(
    spark: SparkSession,
    paths: Iterable[str],
    *,
    ports: Mapping[int, str] | None = None,
    since_us: int = 0,
    split_bytes: int = SPLIT_BYTES,
) -> DataFrame:
    """bronze.wire of capture files: connections together and in order within a partition."""
    source = _source(spark, since_us).option("splitBytes", split_bytes)
    segments = source.option("paths", "\n".join(paths)).load()
    return reassemble(segments, PortMap(dict(ports or {})))


def reassemble(
    segments: DataFrame, ports: PortMap, *, reorder_bytes: int = REORDER_BYTES
) -> DataFrame:
    """Segments of any number of flows → bronze.wire."""
    arranged = segments.repartition("flow").sortWithinPartitions(
        "flow", "time_ns", "file", "record"
    )

    def assemble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        collected = Batches(WIRE)
        flows = groupby(chain.from_iterable(map(segment_rows, batches)), key=itemgetter(0))
        for flow, rows in flows:
            for row in _wire_rows(flow, rows, ports, reorder_bytes):
                collected.add(row, row[6])
                if collected.full:
                    yield collected.take()
        yield collected.take()

    return arranged.mapInArrow(assemble, WIRE_COLUMNS)


def segment_rows(batch: pa.RecordBatch) -> Iterator[tuple[bytes, Segment]]:
    names = ("forward", "time_ns", "number", "acknowledgement", "flags", "length", "payload")
    columns = [batch.column(name).to_pylist() for name in names]
    return zip(batch.column("flow").to_pylist(), map(Segment._make, zip(*columns)), strict=True)  # noqa: B905


def _wire_rows(
    flow: bytes, rows: Iterable[tuple[bytes, Segment]], ports: PortMap, reorder_bytes: int
) -> Iterator[tuple[Any, ...]]:
    wire = FlowRows(flow, ports, reorder_bytes=reorder_bytes)
    for _, segment in rows:
        yield from wire.add(segment)
    yield from wire.finish()


class _FlowState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `FlowRows.dump()`."""

    version: int
    flow: Any
    classifier: Any
    number: int
    seq: int
    name: str


_STATE: Final = msgspec.msgpack.Decoder(_FlowState)
_STATE_VERSION: Final = 1


class FlowRows:
    """Turns the segments of one flow, given in order, into rows of bronze.wire."""

    def __init__(self, flow: bytes, ports: PortMap, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._forward, self._backward = _end(flow[:18]), _end(flow[18:])
        self._flow = Flow(reorder_bytes=reorder_bytes)
        self._classifier = Classifier(self._forward[1], self._backward[1], ports)
        self._number, self._seq = -1, 0
        self._name = ""

    def add(self, segment: Segment) -> Iterator[tuple[Any, ...]]:
        """To be used up before the next one is added."""
        for run in self._flow.add(segment):
            for item in self._classifier.add(run):
                yield self._row(item)

    def finish(self) -> Iterator[tuple[Any, ...]]:
        """The flow has no more segments."""
        for run in self._flow.finish():
            for item in self._classifier.add(run):
                yield self._row(item)
        for item in self._classifier.finish():
            yield self._row(item)

    def is_settled(self, now_ns: int) -> bool:
        """Nothing more can come of what was seen of it."""
        return self._flow.is_settled(now_ns)

    def _row(self, item: Classified) -> tuple[Any, ...]:
        run = item.run
        ends = (self._forward, self._backward)
        connector, acceptor = ends if item.opener_is_forward else ends[::-1]
        if run.connection != self._number:
            self._number, self._seq = run.connection, 0
            self._name = _name(connector, acceptor, run.time_ns)
        row = _wire_row(item, self._name, self._seq, connector, acceptor)
        self._seq += 1
        return row

    def dump(self) -> bytes:
        """The whole state between two segments, to be given to `load`: small, versioned."""
        return msgspec.msgpack.encode(
            _FlowState(
                _STATE_VERSION,
                self._flow.save(),
                self._classifier.save(),
                self._number,
                self._seq,
                self._name,
            )
        )

    def load(self, state: bytes) -> None:
        """Go on where `dump` was called. Raises DecoderStateError."""
        try:
            saved = _STATE.decode(state)
            if saved.version != _STATE_VERSION:
                raise ValueError(f"it has version {saved.version}, this is {_STATE_VERSION}")
            self._flow.restore(saved.flow)
            self._classifier.restore(saved.classifier)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise DecoderStateError(f"state of a flow is damaged: {error}") from None
        self._number, self._seq, self._name = saved.number, saved.seq, saved.name


def _wire_row(
    item: Classified,
    name: str,
    seq: int,
    connector: tuple[str, int],
    acceptor: tuple[str, int],
) -> tuple[Any, ...]:
    run = item.run
    return (
        NODE,
        seq,
        name,
        FORWARD if item.forward else BACKWARD,
        run.kind,
        run.offset,
        run.length,
        run.time_ns // 1000,
        run.data,
        run.late,
        item.spoken.protocol,
        item.spoken.listener,
        *connector,
        *acceptor,
    )


def _name(connector: tuple[str, int], acceptor: tuple[str, int], time_ns: int) -> str:
    """Unique, since two connections between the same ends can't begin at once."""
    (here, here_port), (there, there_port) = connector, acceptor
    seconds, rest = divmod(time_ns // 1000, 1_000_000)
    return f"{here}:{here_port}-{there}:{there_port}@{seconds}.{rest:06}"
