"""The Spark source `pcap`: TCP segments of capture files, and the runs of bytes in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import BACKWARD, FORWARD, WIRE
from crosswire.pipeline.batches import Batches
from crosswire.pipeline.sources.capture import Segments, Split, read, splits
from crosswire.pipeline.sources.classify import Classified, PortMap, classify
from crosswire.pipeline.sources.packets import gather
from crosswire.pipeline.sources.reassembly import REORDER_BYTES, Flow, Segment
from crosswire.pipeline.tables.wire import COLUMNS as WIRE_COLUMNS

__all__ = ["NODE", "PcapDataSource", "from_captures", "reassemble"]

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
    not tell a source which ones it needs), `since` (µs; earlier packets are left out).
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
        self, paths: list[str], columns: list[str], split_bytes: int, since_us: int
    ) -> None:
        self._paths = paths
        self._columns = columns
        self._split_bytes = split_bytes
        self._since_ns = since_us * 1000

    def partitions(self) -> list[InputPartition]:
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


def from_captures(
    spark: SparkSession,
    paths: Iterable[str],
    *,
    ports: Mapping[int, str] | None = None,
    since_us: int = 0,
    split_bytes: int = SPLIT_BYTES,
) -> DataFrame:
    """bronze.wire of capture files: connections together and in order within a partition."""
    spark.dataSource.register(PcapDataSource)
    segments = (
        spark.read.format("pcap")
        .option("paths", "\n".join(paths))
        .option("columns", ",".join(_FOR_REASSEMBLY))
        .option("splitBytes", split_bytes)
        .option("since", since_us)
        .load()
    )
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
        flows = groupby(chain.from_iterable(map(_rows, batches)), key=itemgetter(0))
        for flow, rows in flows:
            for row in _wire_rows(flow, rows, ports, reorder_bytes):
                collected.add(row, row[6])
                if collected.full:
                    yield collected.take()
        yield collected.take()

    return arranged.mapInArrow(assemble, WIRE_COLUMNS)


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[bytes, Segment]]:
    names = ("forward", "time_ns", "number", "acknowledgement", "flags", "length", "payload")
    columns = [batch.column(name).to_pylist() for name in names]
    return zip(batch.column("flow").to_pylist(), map(Segment._make, zip(*columns)), strict=True)  # noqa: B905


def _wire_rows(
    flow: bytes, rows: Iterable[tuple[bytes, Segment]], ports: PortMap, reorder_bytes: int
) -> Iterator[tuple[Any, ...]]:
    forward, backward = _end(flow[:18]), _end(flow[18:])
    assembler = Flow(reorder_bytes=reorder_bytes)
    runs = chain(
        chain.from_iterable(assembler.add(segment) for _, segment in rows), _finish(assembler)
    )
    number, seq = -1, 0
    name = ""
    for item in classify(runs, forward[1], backward[1], ports):
        run = item.run
        connector, acceptor = (forward, backward) if item.opener_is_forward else (backward, forward)
        if run.connection != number:
            number, seq = run.connection, 0
            name = _name(connector, acceptor, run.time_ns)
        yield _wire_row(item, name, seq, connector, acceptor)
        seq += 1


def _finish(flow: Flow) -> Iterator[Any]:
    """Called when the runs before it are used up, not when the chain is made."""
    yield from flow.finish()


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
