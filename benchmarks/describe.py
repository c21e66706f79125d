"""What a row of `silver.frames` costs before it is a row: bytes to columns to descriptions, beside
the decoder and a description of each frame, in µs of one core.

Messages carry 512 bytes, sent by who opened the connection. The columns' way has three parts: the
scan, making lists of its columns, and `describe_rows`; both ways end with all descriptions made.
Payloads are taken along. Seconds are those of the processor, so that who else uses the machine is
not counted.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from bulk import CASES, rate

from crosswire.pipeline.protocols import reading_of
from crosswire.pipeline.protocols.contract import Rows
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.bulk import BulkScanner, Columns
from crosswire.wire.contract import Frame

MESSAGES = 20_000


def listed(columns: Columns, data: bytes) -> Rows:
    """Of a single run: what stands where in the stream stands there in the data."""
    return Rows(
        data=data,
        payloads=True,
        position=columns.offset.tolist(),
        forward=[True] * len(columns),
        frame=columns.frame.tolist(),
        offset=columns.offset.tolist(),
        length=columns.length.tolist(),
        number=columns.number.tolist(),
        detail=columns.detail.tolist(),
        sequence=columns.sequence.tolist(),
        slices=tuple(
            (starts.tolist(), lengths.tolist())
            for starts, lengths in map(columns.slice, columns.slice_names)
        ),
    )


def scan(scanner: BulkScanner, sender: str, data: np.ndarray) -> Columns:
    at, ends = np.zeros(1, np.int64), np.array([len(data)])
    return scanner.scan(data, at, ends, scanner.fresh(sender, 1))


def by_rows(name: str, rows: Rows) -> None:
    deque(reading_of(name)().describe_rows(rows, 0, len(rows.frame)), maxlen=0)


def by_frames(name: str, sender: str, said: bytes) -> None:
    reading = reading_of(name)()
    for offset, length, frame in protocol(name).decoder(sender).feed(said):
        assert isinstance(frame, Frame)
        reading.describe(True, frame, offset, length)


def bench(name: str) -> None:
    entry = protocol(name)
    sender = entry.roles[0]
    scanner, make = CASES[name]
    opening, message = make()
    said = opening + b"".join(message(number) for number in range(MESSAGES))
    data = np.frombuffer(said, np.uint8)
    columns = scan(scanner, sender, data)
    rows = listed(columns, said)
    count = len(columns)

    print(f"{entry.title}: {count / MESSAGES:.0f} rows for each message")
    times = {
        "scan": 1e6 / rate(lambda: scan(scanner, sender, data), count),
        "lists": 1e6 / rate(lambda: listed(columns, said), count),
        "describe_rows": 1e6 / rate(lambda: by_rows(name, rows), count),
    }
    together = sum(times.values())
    decoded = 1e6 / rate(lambda: by_frames(name, sender, said), count)
    for title, spent in times.items():
        print(f"  {title:<24} {spent:8.2f} µs a row")
    print(f"  {'together':<24} {together:8.2f} µs a row {decoded / together:6.1f} ×")
    print(f"  {'decoder and describe':<24} {decoded:8.2f} µs a row")


def main() -> None:
    for name in PROTOCOL_NAMES:
        bench(name)


if __name__ == "__main__":
    main()
