"""Batches over HTTP: staged as Arrow streams, then committed or dropped as a whole.

The protocol of Spark's sink: tasks stage their rows as attempts, possibly several times; the driver
commits one attempt per task. A batch that is committed again is not sent again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Final

import msgspec

from crosswire.errors import InvalidEnvelope
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey
from crosswire.web.arrow_rows import read_part
from crosswire.web.contract import OperationRequest
from crosswire.web.state import Removed

__all__ = ["abort", "commit", "list_producers", "remove_producer", "stage"]

_WAIT_S: Final = 10.0
_LAST_BATCH: Final = (1 << 63) - 1
_READERS: Final = ThreadPoolExecutor(2, thread_name_prefix="crosswire-ingest")
"""More threads would not help: most of reading rows is Python code, under one interpreter lock."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PartQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The index of a part, from 0. `run` distinguishes two queries with the same producer name."""

    part: Count
    run: str = ""


class StageResponse(msgspec.Struct, frozen=True):
    """The part is on disk. If `committed`, its batch was committed before and it was not stored."""

    messages: int
    committed: bool


async def stage(ask: OperationRequest) -> StageResponse:
    """Store a part of an attempt; answered when it is on disk.

    Raises InvalidEnvelope for a body that is not valid, Forbidden, and StagingFull.
    """
    query: PartQuery = ask.query
    owner, batch = _owner(ask), _batch(ask)
    staging = ask.hub.staging
    if staging.is_committed(owner, batch, query.run):
        return StageResponse(0, committed=True)
    read = partial(
        read_part, ask.body, connection=f"ingest/{owner.producer}", principal=owner.principal
    )
    # Decoding takes long: on the event loop it would delay all connections.
    part = await asyncio.get_running_loop().run_in_executor(_READERS, read)
    for destination in part.totals:
        ask.require("produce", destination)
    receipt = staging.stage(owner, batch, ask.path["attempt"], query.part, part, ask.now())
    ask.server.context.count("staged", "http", by=part.messages)
    await receipt
    return StageResponse(part.messages, committed=False)


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts to send, in order. A producer that commits only `once` is removed soon after."""

    attempts: list[NamedAttempt]
    run: str = ""
    once: bool = False


class CommitResponse(msgspec.Struct, frozen=True):
    """The commit is durable. `done`: all messages are in their destinations; if not, repeat the
    request."""

    batch: int
    messages: int
    done: bool


async def commit(ask: OperationRequest) -> CommitResponse:
    """Make the commit durable and send what the attempts staged.

    Raises BatchConflict for a batch that can't follow the last one, AttemptLost for an attempt that
    is not staged, and Forbidden.
    """
    asked: CommitRequest = ask.body
    owner, batch = _owner(ask), _batch(ask)
    staging = ask.hub.staging
    if not staging.is_committed(owner, batch, asked.run):
        # Rights may have been withdrawn since the attempts were staged. A batch that is committed
        # already is not checked again: the response only confirms it.
        for destination in staging.destinations(owner, batch, asked.attempts):
            ask.require("produce", destination)
    decided = staging.commit(
        owner, batch, asked.attempts, ask.now(), run=asked.run, once=asked.once
    )
    # The commit can't be undone from here on. Sending a large batch may take longer than clients
    # wait for a response: they get `done` false and repeat the request.
    try:
        async with asyncio.timeout(_WAIT_S):
            await decided.receipt
    except TimeoutError:
        return CommitResponse(batch, decided.messages, done=False)
    return CommitResponse(batch, decided.messages, done=True)


class AbortRequest(msgspec.Struct, frozen=True):
    """An empty object."""


class Aborted(msgspec.Struct, frozen=True):
    """How many attempts were dropped."""

    attempts: int


async def abort(ask: OperationRequest) -> Aborted:
    """Drop all staged attempts of a batch; answered after the commit."""
    dropped = ask.hub.staging.abort(_owner(ask), _batch(ask))
    await ask.hub.committed()
    return Aborted(dropped)


class ProducerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A producer and its last batch; `time` of its commit is in seconds since 1970."""

    principal: str
    producer: str
    batch: int
    messages: int
    time: float
    done: bool


class StagedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A staged batch that is not committed."""

    principal: str
    producer: str
    batch: int
    attempts: int
    messages: int
    size_bytes: int


class ProducerRows(msgspec.Struct, frozen=True):
    """Producers, batches that are not committed, and the size of all that is staged."""

    producers: list[ProducerRow]
    staged: list[StagedRow]
    staged_bytes: int


def list_producers(ask: OperationRequest) -> ProducerRows:
    """Producers with their last batches, and what is staged."""
    staging = ask.hub.staging
    return ProducerRows(
        [
            ProducerRow(
                principal=owner.principal,
                producer=owner.producer,
                batch=producer.record.batch,
                messages=producer.record.messages,
                time=producer.record.time,
                done=producer.is_done,
            )
            for owner, producer in staging.producers().items()
        ],
        [
            StagedRow(
                principal=owner.principal,
                producer=owner.producer,
                batch=batch,
                attempts=len(attempts),
                messages=sum(each.messages for each in attempts),
                size_bytes=sum(each.size_bytes for each in attempts),
            )
            for owner, batch, attempts in staging.waiting()
        ],
        staging.staged_bytes,
    )


class OwnerQuery(msgspec.Struct, frozen=True):
    """The principal that the producer belongs to."""

    principal: str = ""


async def remove_producer(ask: OperationRequest) -> Removed:
    """Remove a producer and what it staged; its next batch may have any number."""
    query: OwnerQuery = ask.query
    ask.hub.staging.forget(ProducerKey(query.principal, ask.path["producer"]))
    await ask.hub.committed()
    return Removed(ask.path["producer"])


def _owner(ask: OperationRequest) -> ProducerKey:
    return ProducerKey(ask.principal, ask.path["producer"])


def _batch(ask: OperationRequest) -> int:
    batch: int = ask.path["batch"]
    if batch > _LAST_BATCH:
        raise InvalidEnvelope(f"{batch} is not a batch number: it has more than 64 bits")
    return batch
