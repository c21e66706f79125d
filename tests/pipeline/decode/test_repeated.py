"""The input of the benchmark for very large inputs is valid."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from crosswire.lake.verification import verify
from crosswire.pipeline.decode.columnar import ColumnarDecoder
from crosswire.pipeline.decode.row_schema import DIRECTIONS, FRAMES, VIOLATIONS
from crosswire.pipeline.sources.tap import read_tap, tap_files
from crosswire.testing.traffic import SampleTraffic
from tests.pipeline.repeated import (
    Counted,
    Numbers,
    Repeated,
    count,
    long_connections,
    many_connections,
)

LONG = long_connections(SampleTraffic(seed=3, connections=10, messages=12, payload_bytes=64))
MANY = many_connections(SampleTraffic(seed=3, connections=50, messages=1, payload_bytes=64))


@pytest.mark.parametrize("made", [LONG, MANY], ids=["long", "many"])
def test_repeated_rows_are_read_without_a_violation(made: Repeated) -> None:
    found = count(made.tables(5))
    assert found == made.expected(5)
    assert found.frames > 500 and not found.violations
    assert found.directions == 2 * made.connections(5)
    assert found.bytes == made.size_bytes(5)


@pytest.mark.parametrize("made", [LONG, MANY], ids=["long", "many"])
def test_the_pipeline_reads_the_same_from_the_files(made: Repeated, tmp_path: Path) -> None:
    *_, written = made.write(tmp_path, 4, file_bytes=1)
    assert written == made.size_bytes(4)
    assert list(verify(tmp_path)) == []
    paths = tap_files([str(tmp_path / "wire")])
    assert paths is not None and len(paths) >= 4
    rows: Counter[str] = Counter()
    size = 0
    for part in range(2):
        decoder = ColumnarDecoder(payloads=False)
        batches = read_tap(paths, part=part, parts=2)
        given = (decoder.add(batch) for batch in batches)
        for decoded in chain(chain.from_iterable(given), decoder.finish()):
            rows.update(decoded.column("table").to_pylist())
            size += _seen(decoded)
    counted = Counted(rows[FRAMES], rows[VIOLATIONS], rows[DIRECTIONS], size)
    assert counted == made.expected(4)


def _seen(rows: pa.RecordBatch) -> int:
    found = zip(rows.column("table").to_pylist(), rows.column("length").to_pylist(), strict=True)
    return sum(length for table, length in found if table == DIRECTIONS)


def test_every_repetition_has_connections_and_links_of_its_own() -> None:
    rows = pa.concat_tables(MANY.tables(3)).to_pylist()
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert len({row["connection"] for row in rows}) == 150
    hellos = [
        row["data"][8:]
        for row in rows
        if row["protocol"] == "relink" and row["direction"] == "backward" and row["offset"] == 8
    ]
    assert len(hellos) == len(set(hellos)) == 30


def test_time_goes_on_in_every_connection() -> None:
    for made in (LONG, MANY):
        last: dict[str, int] = {}
        for row in pa.concat_tables(made.tables(3)).to_pylist():
            assert row["time"] > last.get(row["connection"], 0)
            last[row["connection"]] = row["time"]


def test_numbers_begin_anew_after_the_highest() -> None:
    data = np.frombuffer(b"..\xff\xfe....\x00\x01", np.uint8).copy()
    numbers = Numbers(">u2", 1, 65535, np.array([2, 8]), np.array([1, 65534]))
    numbers.advance(data, 2)
    assert data.tobytes() == b"..\x00\x01....\xff\xfe"
