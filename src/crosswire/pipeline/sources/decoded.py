"""From bytes to frames: bronze.wire through scanners and decoders, as one step of a Spark job."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as Spark's users know it

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import LOST
from crosswire.pipeline.decode.decoded_connection import MOST_OPEN, WIRE_COLUMNS
from crosswire.pipeline.decode.row_schema import columns_of, completed
from crosswire.pipeline.sources.pcap import Captures
from crosswire.pipeline.sources.tap import BATCH_BYTES, from_tap, read_tap, tap_files
from crosswire.pipeline.spark import cores_of, is_local_master

__all__ = ["decode", "decode_captures", "decode_tap"]

_MOST_READERS: Final = 8
"""Up to this many tasks each read all files; with more it is faster to send rows to their task."""


def decode(wire: DataFrame, *, payloads: bool = True, arranged: bool = False) -> DataFrame:
    """bronze.wire → rows of frames, violations and directions (see `decode.row_schema`).

    A connection's rows go to one task, in order. Without `payloads` the columns that only messages
    have are left out. `arranged`: the rows come from the reassembly, which orders them so.
    """
    rows = wire.where(F.col("kind") != LOST).select(*WIRE_COLUMNS)
    if not arranged:
        rows = rows.repartition("node", "connection").sortWithinPartitions(
            "node", "connection", "seq"
        )

    columns = columns_of(payloads=payloads)
    return completed(rows.mapInArrow(partial(_decoded, payloads=payloads), columns))


def _decoded(batches: Iterator[pa.RecordBatch], *, payloads: bool) -> Iterator[pa.RecordBatch]:
    """Decode connections that follow one another."""
    yield from _decode_batches(batches, payloads=payloads, grouped=True)


def _decode_batches(
    batches: Iterable[pa.RecordBatch], *, payloads: bool, **options: Any
) -> Iterator[pa.RecordBatch]:
    """All rows, and of their columns only those that are needed: Spark copies each one."""
    # Only workers decode: the driver, which imports this module too, does without the kernels.
    from crosswire.pipeline.decode.columnar import ColumnarDecoder

    _collect_rarely()
    decoder = ColumnarDecoder(payloads=payloads, **options)
    names = columns_of(payloads=payloads).names
    for batch in batches:
        for made in decoder.add(batch):
            yield made.select(names)
    for made in decoder.finish():
        yield made.select(names)


def _collect_rarely() -> None:
    """Make garbage collections rare: the many objects of connections have no reference cycles, and
    looking for some takes longer than reading the bytes."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def decode_captures(captures: Captures, *, payloads: bool = True) -> DataFrame:
    """The rows that `decode` gives for capture files, decoded in the task that reads them: their
    bytes never pass through Spark."""
    columns = columns_of(payloads=payloads)
    return completed(captures.through(partial(_decoded, payloads=payloads), columns))


def decode_tap(
    spark: SparkSession, folders: Iterable[str], *, payloads: bool = True, since_us: int = 0
) -> DataFrame:
    """The rows that `decode` gives for the `wire/` folders of lakes, in the fastest way.

    On one machine with a few cores each task reads the files itself, and no row passes through
    Spark before it is decoded. `spark.crosswire.batchBytes` is how many bytes a task reads at once,
    `spark.crosswire.openConnections` how many open connections it keeps as objects.
    """
    folders = list(folders)
    paths = None
    if is_local_master(spark) and cores_of(spark) <= _MOST_READERS:
        paths = tap_files(folders, since_us=since_us)
    if paths is None:
        return decode(from_tap(spark, folders, since_us=since_us), payloads=payloads)
    tasks = cores_of(spark)
    batch_bytes = _setting(spark, "spark.crosswire.batchBytes", BATCH_BYTES)
    most_open = _setting(spark, "spark.crosswire.openConnections", MOST_OPEN)

    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (each for batch in numbers for each in batch.column(0).to_pylist()):
            batches = read_tap(
                paths, since_us=since_us, part=number, parts=tasks, batch_bytes=batch_bytes
            )
            yield from _decode_batches(batches, payloads=payloads, most_open=most_open)

    numbers = spark.range(0, tasks, 1, tasks)
    return completed(numbers.mapInArrow(run, columns_of(payloads=payloads)))


def _setting(spark: SparkSession, name: str, default: int) -> int:
    text = spark.conf.get(name, str(default)) or ""
    if not text.isdecimal():
        raise InvalidInput(f"{name} is a number, not {text!r}")
    return int(text)
