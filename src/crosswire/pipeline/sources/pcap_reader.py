"""Reads parts of capture files as rows of TCP segments, for the Spark source `pcap`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from crosswire.capture.flows import END_BYTES, FlowEnd, end_of
from crosswire.errors import InvalidInput
from crosswire.pipeline.sources.capture_reader import Segments, Split, read, splits
from crosswire.pipeline.sources.packet_kernels import Packets, copy_slices

__all__ = ["COLUMNS", "FOR_REASSEMBLY", "READABLE", "PcapPartition", "PcapReader"]

COLUMNS: Final = {
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
READABLE: Final = (
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
FOR_REASSEMBLY: Final = tuple(COLUMNS)[:10]


@dataclass
class PcapPartition(InputPartition):
    """A part of a capture, and the number of its file: segments of the same time are put in the
    order of files."""

    file: int
    split: Split


class PcapReader(DataSourceReader):
    """Reads whole captures (`paths`) or chosen `parts` of them, without packets before `since_us`.

    Raises InvalidInput for what is no capture, or damaged.
    """

    def __init__(
        self,
        paths: list[str],
        parts: list[Split],
        columns: list[str],
        split_bytes: int,
        since_us: int,
        *,
        skip_damaged: bool = False,
    ) -> None:
        self._paths = paths
        self._parts = parts
        self._columns = columns
        self._split_bytes = split_bytes
        self._since_ns = since_us * 1000
        self._skip_damaged = skip_damaged

    def partitions(self) -> list[InputPartition]:
        """A partition for each part."""
        if self._parts:
            paths = dict.fromkeys(part.path for part in self._parts)
            files = {path: file for file, path in enumerate(paths)}
            return [PcapPartition(files[part.path], part) for part in self._parts]
        if not self._paths:
            raise InvalidInput("pcap needs the path of a capture file")
        return [
            PcapPartition(file, split)
            for file, path in enumerate(self._paths)
            for split in splits(path, self._split_bytes, skip_damaged=self._skip_damaged)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The segments of a part, in the order of the file."""
        assert isinstance(partition, PcapPartition)
        for segments in read(partition.split):
            yield _batch(segments, partition.file, self._columns, self._since_ns)


def _batch(segments: Segments, file: int, columns: list[str], since_ns: int) -> pa.RecordBatch:
    packets, flows, offsets = segments.packets, segments.flows, segments.offsets
    if since_ns:
        chosen = packets["time_ns"] >= since_ns
        packets, flows, offsets = packets[chosen], flows[chosen], offsets[chosen]
    count = len(packets)

    def number(name: str, kind: Any) -> pa.Array:
        return pa.array(packets[name].astype(kind))

    # Functions, since only the chosen columns are made: addresses as text cost the most.
    make = {
        "flow": lambda: _slices(flows),
        "forward": lambda: pa.array(packets["forward"].copy()),
        "time_ns": lambda: number("time_ns", np.int64),
        "file": lambda: pa.array(np.full(count, file, np.int32)),
        "record": lambda: pa.array(offsets),
        "number": lambda: number("number", np.int64),
        "acknowledgement": lambda: number("acknowledgement", np.int64),
        "flags": lambda: number("flags", np.int16),
        "length": lambda: number("length", np.int32),
        "payload": lambda: _payloads(segments.data, packets),
        "source": lambda: pa.array([end[0] for end in _ends(packets, flows, 0)]),
        "source_port": lambda: pa.array([end[1] for end in _ends(packets, flows, 0)], pa.int32()),
        "destination": lambda: pa.array([end[0] for end in _ends(packets, flows, 1)]),
        "destination_port": lambda: pa.array(
            [end[1] for end in _ends(packets, flows, 1)], pa.int32()
        ),
    }
    return pa.RecordBatch.from_arrays([make[name]() for name in columns], names=columns)


def _slices(rows: npt.NDArray[np.uint8]) -> pa.Array:
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
    # Copied, since the next block overwrites them while Spark has this batch.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers)


def _payloads(data: npt.NDArray[np.uint8], packets: Packets) -> pa.Array:
    offsets = np.zeros(len(packets) + 1, np.int32)
    np.cumsum(packets["size"], out=offsets[1:])
    payload = np.empty(int(offsets[-1]), np.uint8)
    starts = np.ascontiguousarray(packets["start"])
    copy_slices(data, np.arange(len(packets)), starts, offsets, payload)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(payload)]
    return pa.Array.from_buffers(pa.binary(), len(packets), buffers)


def _ends(packets: Packets, flows: npt.NDArray[np.uint8], which: int) -> Iterator[FlowEnd]:
    """Address and port of the senders (0) or the receivers (1)."""
    for forward, flow in zip(packets["forward"].tolist(), flows, strict=True):
        lower = forward is (which == 0)
        yield end_of((flow[:END_BYTES] if lower else flow[END_BYTES:]).tobytes())
