"""The cost of a row of `silver.frames`: columnar scan and description, compared with the decoder
and a description per frame, in µs of one core; and the rate at which a stream decodes.

    python benchmarks/describe.py [--protocols emp …] [--connections 50] [--messages 200]

Messages carry 512 bytes and are sent by the side that opened the connection. The columnar path has
two parts: the scan, and the description of its rows; both paths include payloads and end with all
descriptions made.

For the stream, both sides of some connections send messages, and their rows come in ten batches.
After each batch the state of every connection is saved, and the next one loads it. It is compared
with decoding frame by frame, whose connections stay in memory and are never saved. Times are CPU
times, so that other programs on the machine matter less.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from bulk import CASES, rate
from from_tests import ConnectionRows, reading_of

from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.contract import FrameRows, Memories
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS
from crosswire.pipeline.decode.meanings import memory_of
from crosswire.pipeline.decode.protocols import columnar_protocol
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.decode.scanners.scanner import BulkScanner, Columns
from crosswire.pipeline.stream.columns import DECODED, STATES
from crosswire.pipeline.stream.stream_decoder import StreamDecoder
from crosswire.pipeline.stream.watermarks import CompleteUpTo
from crosswire.pipeline.tables.finality import KEPT
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Frame

MESSAGES = 20_000


def scan(scanner: BulkScanner, sender: str, data: np.ndarray) -> Columns:
    at, ends = np.zeros(1, np.int64), np.array([len(data)])
    return scanner.scan(data, at, ends, scanner.new_states(sender, 1))


def rows_of(columns: Columns, data: np.ndarray) -> FrameRows:
    """Rows of a single run of bytes: offsets in the stream are offsets in the data."""
    count = len(columns)
    return FrameRows(
        octets=data,
        payloads=True,
        owner=np.zeros(count, np.int64),
        position=columns.offset,
        forward=np.ones(count, np.bool_),
        frame=columns.frame,
        offset=columns.offset,
        length=columns.length,
        number=columns.number,
        detail=columns.detail,
        sequence=columns.sequence,
        trailing=columns.offset + columns.length - sum(columns.slice(columns.slice_names[0])),
        cut_before=np.zeros(count, np.int64),
        slices=tuple(map(columns.slice, columns.slice_names)),
    )


def by_columns(name: str, rows: FrameRows) -> None:
    known = {0: memory_of(name)()}
    columnar_protocol(name).describe(rows, Memories(known, np.ones(1, np.bool_), known.__getitem__))


def by_frames(name: str, sender: str, data: bytes) -> None:
    reading = reading_of(name)()
    for offset, length, frame in protocol(name).decoder(sender).feed(data):
        assert isinstance(frame, Frame)
        reading.describe(True, frame, offset, length)


def bench(name: str) -> None:
    entry = protocol(name)
    sender = entry.roles[0]
    scanner, make = CASES[name]
    opening, message = make()
    wire = opening + b"".join(message(number) for number in range(MESSAGES))
    data = np.frombuffer(wire, np.uint8)
    columns = scan(scanner, sender, data)
    rows = rows_of(columns, data)
    count = len(columns)

    print(f"{entry.title}: {count / MESSAGES:.0f} rows for each message")
    times = {
        "scan": 1e6 / rate(lambda: scan(scanner, sender, data), count),
        "describe in columns": 1e6 / rate(lambda: by_columns(name, rows), count),
    }
    together = sum(times.values())
    decoded = 1e6 / rate(lambda: by_frames(name, sender, wire), count)
    for title, spent in times.items():
        print(f"  {title:<24} {spent:8.2f} µs a row")
    print(f"  {'together':<24} {together:8.2f} µs a row {decoded / together:6.1f} ×")
    print(f"  {'decoder and describe':<24} {decoded:8.2f} µs a row")


# ----------------------------------------------------------------------------------------- streams

BATCHES = 10
ORDER = [("node", "ascending"), ("connection", "ascending"), ("seq", "ascending")]


def batches_of(name: str, connections: int, messages: int) -> list[pa.Table]:
    """The rows of all connections in ten batches, by time."""
    traffic = SampleTraffic(protocols=(name,), connections=connections, messages=messages)
    rows = pa.concat_tables(traffic.wire()).select(WIRE_COLUMNS).sort_by("time")
    size = -(-len(rows) // BATCHES)
    return [rows.slice(start, size).combine_chunks() for start in range(0, len(rows), size)]


def by_stream(batches: list[pa.Table]) -> int:
    """Decode the batches, each with the states that the one before it has saved."""
    states: pa.Table | None = None
    made = 0
    for batch in batches:
        rows = batch.append_column(KEPT, pa.repeat(True, len(batch)))
        if states is not None:
            rows = pa.concat_tables([rows, states], promote_options="default").sort_by(ORDER)
        else:
            rows = rows.append_column("state", pa.nulls(len(rows), pa.binary())).sort_by(ORDER)
        decoder = StreamDecoder(payloads=True, now=CompleteUpTo())
        found = [out for part in rows.to_batches() for out in decoder.add(part)]
        found += decoder.finish()
        made += sum(map(len, found))
        # A batch has either states or rows of the tables.
        saved = pa.Table.from_batches(
            [out for out in found if out["table"][0].as_py() == STATES], DECODED
        )
        saved = saved.select(["node", "connection", "payload"])
        states = saved.rename_columns(["node", "connection", "state"])
        states = states.append_column("seq", pa.repeat(pa.scalar(-1, pa.int64()), len(states)))
    return made


def row_by_row(batches: list[pa.Table]) -> int:
    """Decode the batches frame by frame; connections are kept from one to the next."""
    collected = Batches(ARROW)
    connections: dict[str, ConnectionRows] = {}
    made = 0
    for batch in batches:
        for row in zip(*(batch[name].to_pylist() for name in WIRE_COLUMNS), strict=True):
            if row[1] not in connections:
                connections[row[1]] = ConnectionRows(row, collected, payloads=True)
            connections[row[1]].add(row)
        made += len(collected.take())
    for connection in connections.values():
        connection.finish()
    return made + len(collected.take())


def bench_stream(name: str, connections: int, messages: int) -> None:
    batches = batches_of(name, connections, messages)
    size = sum(pc.sum(batch["length"]).as_py() for batch in batches)
    stream = rate(lambda: by_stream(batches), size)
    plain = rate(lambda: row_by_row(batches), size)
    for title, speed in (("stream", stream), ("frame by frame", plain)):
        print(f"  {title:<24} {speed / 1e6:8.1f} MB/s {speed / plain:6.1f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of decoding")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOL_NAMES, default=PROTOCOL_NAMES)
    parser.add_argument("--connections", type=int, default=50, help="of the stream")
    parser.add_argument("--messages", type=int, default=200, help="of each connection")
    options = parser.parse_args()
    for name in options.protocols:
        bench(name)
        bench_stream(name, options.connections, options.messages)


if __name__ == "__main__":
    main()
