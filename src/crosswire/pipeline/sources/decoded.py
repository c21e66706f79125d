"""From bytes to frames: bronze.wire through the product's own decoders, in one crossing."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as Spark's users know it

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import LOST
from crosswire.pipeline.decode.connection_rows import MOST_OPEN, WANTED
from crosswire.pipeline.decode.row_schema import columns_of, completed
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import BATCH_BYTES, from_tap, read_tap, tap_files

if TYPE_CHECKING:
    from crosswire.pipeline.decode.columnar import ColumnarDecoder

__all__ = ["decode", "decode_captures", "decode_tap"]

_MOST_READERS: Final = 8
"""So many tasks may read all files; with more, it is quicker to send every row to its task."""


def decode(wire: DataFrame, *, payloads: bool = True, arranged: bool = False) -> DataFrame:
    """bronze.wire → rows of frames, violations and directions (see `decode.row_schema`).

    A connection's rows go to one task, in order. Without `payloads` what messages carry stays
    behind. `arranged`: the rows come straight from the reassembly, which has them so already.
    """
    rows = wire.where(F.col("kind") != LOST).select(*WANTED)
    if not arranged:
        rows = rows.repartition("node", "connection").sortWithinPartitions(
            "node", "connection", "seq"
        )

    columns = columns_of(payloads=payloads)
    return completed(rows.mapInArrow(partial(_decoded, payloads=payloads), columns))


def _decoded(batches: Iterator[pa.RecordBatch], *, payloads: bool) -> Iterator[pa.RecordBatch]:
    """Of connections one after the other."""
    from crosswire.pipeline.decode.columnar import ColumnarDecoder

    _collect_rarely()
    yield from _wanted(batches, ColumnarDecoder(payloads=payloads, grouped=True), payloads)


def _wanted(
    batches: Iterable[pa.RecordBatch], decoder: ColumnarDecoder, payloads: bool
) -> Iterator[pa.RecordBatch]:
    """All rows, and of their columns those that somebody asks for: Spark copies every one."""
    names = columns_of(payloads=payloads).names
    for batch in batches:
        for made in decoder.add(batch):
            yield made.select(names)
    for made in decoder.finish():
        yield made.select(names)


def _collect_rarely() -> None:
    """What is known of connections has no cycles, and there is much of it: looking for some takes
    longer than reading the bytes."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def decode_captures(captures: Captures, *, payloads: bool = True) -> DataFrame:
    """What `decode` makes of capture files, where they are read: their bytes never come into
    Spark."""
    columns = columns_of(payloads=payloads)
    return completed(captures.through(partial(_decoded, payloads=payloads), columns))


def decode_tap(
    spark: SparkSession, folders: Iterable[str], *, payloads: bool = True, since_us: int = 0
) -> DataFrame:
    """What `decode` makes of the `wire/` folders of lakes, in the quickest way that there is.

    On one machine with a few cores each task reads the files itself, and no row goes through Spark
    before it is decoded. `spark.crosswire.batchBytes` says how many bytes a task takes in at once,
    `spark.crosswire.openConnections` how many connections it keeps ready to go on.
    """
    folders = list(folders)
    context = spark.sparkContext
    paths = None
    is_local = (context.master or "").startswith("local")
    if is_local and context.defaultParallelism <= _MOST_READERS:
        paths = tap_files(folders, since_us=since_us)
    if paths is None:
        return decode(from_tap(spark, folders, since_us=since_us), payloads=payloads)
    tasks = context.defaultParallelism
    batch_bytes = _setting(spark, "spark.crosswire.batchBytes", BATCH_BYTES)
    most_open = _setting(spark, "spark.crosswire.openConnections", MOST_OPEN)

    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from crosswire.pipeline.decode.columnar import ColumnarDecoder

        _collect_rarely()
        for number in (each for batch in numbers for each in batch.column(0).to_pylist()):
            batches = read_tap(
                paths, since_us=since_us, part=number, parts=tasks, batch_bytes=batch_bytes
            )
            decoder = ColumnarDecoder(payloads=payloads, most_open=most_open)
            yield from _wanted(batches, decoder, payloads)

    numbers = spark.range(0, tasks, 1, tasks)
    return completed(numbers.mapInArrow(run, columns_of(payloads=payloads)))


def _setting(spark: SparkSession, name: str, default: int) -> int:
    text = spark.conf.get(name, str(default)) or ""
    if not text.isdecimal():
        raise InvalidInput(f"{name} is a number, not {text!r}")
    return int(text)
