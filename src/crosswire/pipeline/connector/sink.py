"""Writing to a hub from Spark, each row exactly once: tasks stage, the driver commits.

    task     rows → parts of an Arrow stream → staged in the hub under a random attempt name
    driver   commit with the attempts that Spark reports as successful; the hub drops all others

Staged rows are not visible to consumers. A task that is attempted twice, one after the other or at
the same time (speculation), stages under two names, and Spark reports one of them. If the driver
fails after the commit and before Spark has noted it, Spark writes the batch again: the hub
recognizes it by producer and number, answers that it is committed, and keeps nothing of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from crosswire.errors import ClientError, InvalidInput
from crosswire.pipeline.connector.address import HubAddress, path_of
from crosswire.pipeline.connector.layout import SinkLayout
from crosswire.pipeline.connector.options import address_of, check_names
from crosswire.pipeline.spark_features import HAS_STREAM_BATCHES, DataSourceStreamArrowWriter

__all__ = ["CrosswireStreamWriter", "CrosswireWriter", "StagedTask"]

_ARROW: Final = "application/vnd.apache.arrow.stream"
_PART_BYTES: Final = 4 * 1024 * 1024
_PART_NAMES: Final = 10_000
"""The hub takes messages for this many destinations in one request."""
_BATCH_ROWS: Final = 1000
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_OPTIONS: Final = (
    "batch",
    "contentType",
    "destination",
    "hub",
    "patienceS",
    "producer",
    "token",
    "topic",
)
_SPARKS_OWN: Final = ("checkpointLocation", "queryName")


@dataclass(frozen=True)
class SinkBatch:
    """What identifies a batch in the hub: producer and number. `run` is the query's id: the hub
    refuses a second query that uses the same producer. `once`: the producer writes one batch only,
    so that the hub need not remember it for long."""

    producer: str
    number: int
    run: str = ""
    once: bool = False


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """What a task reports to the driver: the attempt under which its rows are staged, and the
    numbers of parts and messages, which the commit compares with what the hub has."""

    batch: SinkBatch
    attempt: str
    parts: int
    messages: int


class CrosswireWriter(DataSourceArrowWriter):
    """For `df.write`. Without the option `producer` every write gets a random one, and is committed
    once.

    Raises InvalidInput for options or columns that can't be written.
    """

    def __init__(self, schema: StructType, options: Mapping[str, str], overwrite: bool) -> None:
        check_names(options, _OPTIONS, of="sink")
        if overwrite:
            raise InvalidInput("messages are added, never replaced: write with mode append")
        self._hub = address_of(options)
        self._layout = SinkLayout.of(schema, options)
        self._batch = _batch_of(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        """Stage a task's rows. Runs on an executor, once per attempt."""
        return _write(self._hub, self._batch, self._layout, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the rows of these tasks messages. Runs on the driver."""
        _commit(self._hub, self._batch, _staged(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Drop what was staged."""
        _abort(self._hub, self._batch)


class CrosswireStreamWriter(DataSourceStreamArrowWriter):
    """For `df.writeStream`. The producer is the option, else the query's id, which its checkpoint
    keeps over restarts. In the mode `complete`, which Spark calls with `overwrite`, every batch is
    the whole result, sent again. Raises InvalidInput for options or columns that can't be written.
    """

    def __init__(
        self,
        schema: StructType,
        options: Mapping[str, str],
        overwrite: bool,  # noqa: ARG002
    ) -> None:
        if "batch" in options:
            raise InvalidInput("a stream numbers its batches itself: leave out the option batch")
        check_names(options, (*_OPTIONS, *_SPARKS_OWN), of="sink")
        self._hub = address_of(options)
        self._layout = SinkLayout.of(schema, options)
        self._columns = to_arrow_schema(schema)
        self._producer = _producer_of(options)

    def write(self, iterator: Iterator[Any]) -> StagedTask:
        """Stage a task's rows. Runs on an executor, once per attempt. Spark 4.0 gives single rows,
        later versions Arrow batches."""
        query, number = _local(_QUERY), _local(_BATCH)
        batch = SinkBatch(self._producer or f"query-{query}", int(number), query)
        rows = iterator if HAS_STREAM_BATCHES else _in_batches(iterator, self._columns)
        return _write(self._hub, batch, self._layout, rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Make the rows of these tasks messages. Runs on the driver."""
        staged = _staged(messages)
        if staged:
            _commit(self._hub, _one_batch(staged, batchId), staged)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop what was staged. Without a report of a task the batch's producer is unknown here;
        the hub then drops it after a time."""
        staged = _staged(messages)
        if staged:
            _abort(self._hub, _one_batch(staged, batchId))


# ------------------------------------------------------------------------------------- on executors


def _write(
    hub: HubAddress, batch: SinkBatch, layout: SinkLayout, rows: Iterator[pa.RecordBatch]
) -> StagedTask:
    """Stage all rows under an attempt name that no other attempt can have: executors of two runs of
    the same query may be alive at the same time."""
    context = TaskContext.get()
    task = f"{context.partitionId()}-{context.attemptNumber()}" if context is not None else "0"
    attempt = f"{task}-{uuid.uuid4().hex}"
    path = path_of("v1/ingest", batch.producer, batch.number, "attempts", attempt)
    parts = messages = 0
    is_committed = False
    for part in _parts(layout.convert(each) for each in rows):
        if is_committed:
            continue
        # Parts are numbered: one that is sent again, because its answer was lost, is kept once.
        query = {"part": parts, "run": batch.run}
        answer = hub.post_bytes(path, _stream(part), _ARROW, query)
        # Committed by an earlier run whose success Spark has not noted: the rest of the rows is
        # read, as Spark demands, but not sent.
        is_committed = answer["committed"]
        if not is_committed:
            parts += 1
            messages += sum(each.num_rows for each in part)
    return StagedTask(batch, attempt, parts, messages)


def _in_batches(rows: Iterator[Row], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    while chunk := list(islice(rows, _BATCH_ROWS)):
        # Times of rows have no time zone: they are in that of this machine.
        values = [
            {
                name: value.astimezone(UTC) if isinstance(value, datetime) else value
                for name, value in row.asDict(recursive=True).items()
            }
            for row in chunk
        ]
        yield pa.RecordBatch.from_pylist(values, columns)


def _parts(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Requests of a few MiB, and not too many destinations: small batches together, large ones in
    pieces."""
    part: list[pa.RecordBatch] = []
    size_bytes = names = 0
    for batch in batches:
        for piece in _pieces(batch):
            named = _names(piece)
            is_full = size_bytes + piece.nbytes > _PART_BYTES or names + named > _PART_NAMES
            if part and is_full:
                yield part
                part, size_bytes, names = [], 0, 0
            part.append(piece)
            size_bytes += piece.nbytes
            names += named
    if part:
        yield part


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or (batch.nbytes <= _PART_BYTES and _names(batch) <= _PART_NAMES):
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def _names(batch: pa.RecordBatch) -> int:
    """How many destinations it has."""
    return int(pc.count_distinct(batch.column("destination")).as_py())


def _stream(batches: list[pa.RecordBatch]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue()


def _local(name: str) -> str:
    """A property of the query that a task belongs to. Spark's Python API for writers has no other
    way to the query's id and the batch's number."""
    context = TaskContext.get()
    value = context.getLocalProperty(name) if context is not None else None
    if value is None:
        raise InvalidInput(f"Spark has not set {name} for this task: is it another version?")
    return value


# ------------------------------------------------------------------------------------ on the driver


def _commit(hub: HubAddress, batch: SinkBatch, staged: Sequence[StagedTask]) -> None:
    """Returns when all rows are messages. A large commit takes several requests: once the hub has
    noted it, it completes it, also after a restart, and each request waits for that."""
    # A task without rows has staged nothing, and the hub knows no attempt of it.
    named = [
        {"attempt": each.attempt, "parts": each.parts, "messages": each.messages}
        for each in staged
        if each.parts
    ]
    asked = {"attempts": named, "run": batch.run, "once": batch.once}
    path = path_of("v1/ingest", batch.producer, batch.number, "commit")
    while not hub.post(path, asked)["done"]:
        pass  # the hub answers when it is done, or after some seconds


def _abort(hub: HubAddress, batch: SinkBatch) -> None:
    """One request without retries, errors ignored: the hub drops staged rows after a time anyway,
    and an error here would hide the one that led to the abort."""
    path = path_of("v1/ingest", batch.producer, batch.number, "abort")
    with suppress(ClientError):
        hub.post(path, {}, repeatable=False)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    """The reports of tasks that succeeded; Spark has None for others."""
    return [each for each in messages if isinstance(each, StagedTask)]


def _one_batch(staged: Sequence[StagedTask], number: int) -> SinkBatch:
    batches = {each.batch for each in staged}
    if len(batches) != 1 or staged[0].batch.number != number:
        raise InvalidInput(f"batch {number} got reports of tasks of other batches: {batches}")
    return staged[0].batch


# ------------------------------------------------------------------------------------------ options


def _producer_of(options: Mapping[str, str]) -> str:
    producer = options.get("producer", "")
    if "/" in producer or not producer.isprintable() or len(producer.encode()) > 200:
        raise InvalidInput(f"{producer!r} can't be a producer: up to 200 bytes, without slashes")
    return producer


def _batch_of(options: Mapping[str, str]) -> SinkBatch:
    """The batch of the options `producer` and `batch`, which may be written again without doubling
    rows; without them a new one."""
    producer, number = _producer_of(options), options.get("batch")
    if producer and number is not None:
        if not number.isdecimal():
            raise InvalidInput(f"batch is a number, not {number!r}")
        return SinkBatch(producer, int(number))
    if producer or number is not None:
        raise InvalidInput("a batch job that names its producer needs the option batch too")
    return SinkBatch(f"write-{uuid.uuid4().hex}", 0, once=True)
