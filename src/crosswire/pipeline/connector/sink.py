"""Writing to a hub from Spark, each row once: tasks stage, the driver's commit names what counts.

    task     rows → parts of an Arrow stream → staged in the hub under a name of its own
    driver   commit: the names that Spark says count; what else was staged is dropped by the hub

A task that is tried again, or twice at the same time, stages under another name. A batch that is
written again after its commit is known to the hub by its producer and number, and not kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.taskcontext import TaskContext

from crosswire.errors import ClientError, InvalidInput
from crosswire.pipeline.connector.address import HubAddress, path_of
from crosswire.pipeline.connector.layout import SinkLayout
from crosswire.pipeline.connector.options import address_of, check_names

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["CrosswireStreamWriter", "CrosswireWriter", "StagedTask"]

_ARROW: Final = "application/vnd.apache.arrow.stream"
_PART_BYTES: Final = 4 * 1024 * 1024
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
    """What the hub knows a batch by: its producer and its number; `run` is the query's own id, so
    that another query with the same producer is found out."""

    producer: str
    number: int
    run: str = ""
    once: bool = False


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """What a task tells the driver: where its rows wait, and how many there are."""

    batch: SinkBatch
    attempt: str
    parts: int
    messages: int


class CrosswireWriter(DataSourceArrowWriter):
    """`df.write`. Without a `producer` of its own every write is one, and is committed once.

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
        return _write(self._hub, self._batch, self._layout, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _commit(self._hub, self._batch, _staged(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        _abort(self._hub, self._batch)


class CrosswireStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`. The producer is the query, as its checkpoint knows it, unless an option
    names it. In the mode `complete`, which asks to `overwrite`, every batch is the whole result,
    sent anew. Raises InvalidInput for options or columns that can't be written."""

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
        self._producer = _producer_of(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        query, number = _local(_QUERY), _local(_BATCH)
        batch = SinkBatch(self._producer or f"query-{query}", int(number), query)
        return _write(self._hub, batch, self._layout, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        staged = _staged(messages)
        if staged:
            _commit(self._hub, _one_batch(staged, batchId), staged)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        staged = _staged(messages)
        if staged:
            _abort(self._hub, _one_batch(staged, batchId))


# ------------------------------------------------------------------------------------- on executors


def _write(
    hub: HubAddress, batch: SinkBatch, layout: SinkLayout, rows: Iterator[pa.RecordBatch]
) -> StagedTask:
    """Stage all rows as an attempt that nobody else can have."""
    context = TaskContext.get()
    task = f"{context.partitionId()}-{context.attemptNumber()}" if context is not None else "0"
    attempt = f"{task}-{uuid.uuid4().hex}"
    path = path_of("v1/ingest", batch.producer, batch.number, "attempts", attempt)
    parts = messages = 0
    is_committed = False
    for part in _parts(layout.convert(each) for each in rows):
        if is_committed:
            continue
        query = {"part": parts, "run": batch.run}
        answer = hub.post_bytes(path, _stream(part), _ARROW, query)
        # Then it was written before, and Spark has yet to learn of it.
        is_committed = answer["committed"]
        if not is_committed:
            parts += 1
            messages += sum(each.num_rows for each in part)
    return StagedTask(batch, attempt, parts, messages)


def _parts(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Small batches together, large ones in pieces: requests of a few MiB."""
    part: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        for piece in _pieces(batch):
            if part and size_bytes + piece.nbytes > _PART_BYTES:
                yield part
                part, size_bytes = [], 0
            part.append(piece)
            size_bytes += piece.nbytes
    if part:
        yield part


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    if batch.nbytes <= _PART_BYTES or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def _stream(batches: list[pa.RecordBatch]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue()


def _local(name: str) -> str:
    """What Spark says about the query that a task belongs to."""
    context = TaskContext.get()
    value = context.getLocalProperty(name) if context is not None else None
    if value is None:
        raise InvalidInput(f"this Spark does not say which query a task is of: {name} is not set")
    return value


# ------------------------------------------------------------------------------------ on the driver


def _commit(hub: HubAddress, batch: SinkBatch, staged: Sequence[StagedTask]) -> None:
    """Returns when all rows are where they go. What is decided is asked for until it is done."""
    named = [
        {"attempt": each.attempt, "parts": each.parts, "messages": each.messages}
        for each in staged
        if each.parts
    ]
    asked = {"attempts": named, "run": batch.run, "once": batch.once}
    path = path_of("v1/ingest", batch.producer, batch.number, "commit")
    while not hub.post(path, asked)["done"]:
        pass  # it answers when it is done, or after some seconds


def _abort(hub: HubAddress, batch: SinkBatch) -> None:
    """Once, and no more than a wish: the hub drops by itself what nobody comes back for, and a
    failure here would be reported instead of the one that brought us here."""
    path = path_of("v1/ingest", batch.producer, batch.number, "abort")
    with suppress(ClientError):
        hub.post(path, {}, repeatable=False)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    """Those of tasks that succeeded."""
    return [each for each in messages if isinstance(each, StagedTask)]


def _one_batch(staged: Sequence[StagedTask], number: int) -> SinkBatch:
    batches = {each.batch for each in staged}
    if len(batches) != 1 or staged[0].batch.number != number:
        raise InvalidInput(f"tasks of other batches than {number} reported to it: {batches}")
    return staged[0].batch


# ------------------------------------------------------------------------------------------ options


def _producer_of(options: Mapping[str, str]) -> str:
    producer = options.get("producer", "")
    if "/" in producer or not producer.isprintable() or len(producer.encode()) > 200:
        raise InvalidInput(f"{producer!r} can't be a producer: up to 200 bytes, without slashes")
    return producer


def _batch_of(options: Mapping[str, str]) -> SinkBatch:
    """Of a write that names its producer and batch, that one: to be repeated as often as it takes.
    Else one that never was."""
    producer, number = _producer_of(options), options.get("batch")
    if producer and number is not None:
        if not number.isdecimal():
            raise InvalidInput(f"batch is a number, not {number!r}")
        return SinkBatch(producer, int(number))
    if producer or number is not None:
        raise InvalidInput("a batch job that names its producer needs the option batch too")
    return SinkBatch(f"write-{uuid.uuid4().hex}", 0, once=True)
