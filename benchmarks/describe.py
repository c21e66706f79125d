"""The cost of a row of `silver.frames`: columnar scan and description, compared with the decoder
and a description per frame, in µs of one core.

Messages carry 512 bytes and are sent by the side that opened the connection. The columnar path has
two parts: the scan, and the description of its rows; both paths include payloads and end with all
descriptions made. Times are CPU times, so that other programs on the machine matter less.
"""

from __future__ import annotations

import numpy as np
from bulk import CASES, rate

from crosswire.pipeline.decode.batch_scan import columnar_protocol
from crosswire.pipeline.decode.contract import FrameRows, Readings
from crosswire.pipeline.decode.readings import reading_of
from crosswire.pipeline.decode.scanners.scanner import BulkScanner, Columns
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
        slices=tuple(map(columns.slice, columns.slice_names)),
    )


def by_columns(name: str, rows: FrameRows) -> None:
    reading = reading_of(name)()
    known = {0: reading}
    columnar_protocol(name).describe(rows, Readings(known, np.ones(1, np.bool_), known.__getitem__))


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


def main() -> None:
    for name in PROTOCOL_NAMES:
        bench(name)


if __name__ == "__main__":
    main()
