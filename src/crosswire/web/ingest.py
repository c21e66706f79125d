"""Batches over HTTP: staged as Arrow streams, then committed or dropped as a whole.

The protocol of Spark's sink: tasks stage their rows as attempts, possibly several times; the driver
commits one attempt per task. A batch that is committed again is not sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Final

import msgspec

from crosswire.errors import InvalidEnvelope
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey
from crosswire.web.arrow_rows import read_part
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import NameQuery, SortKey, page_of
from crosswire.web.state import Removed
from crosswire.web.times import Moment, at_s

__all__ = ["INGEST_OPERATIONS"]

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
    name: str = ask.path["attempt"]
    staging.claim(owner, ask.connection)
    async with ask.work.turn() as turn:
        for destination in part.totals:
            ask.require("produce", destination)
            await turn.pause()
        for _ in staging.check_part(owner, batch, name, part):
            await turn.pause()
    await ask.admitted()
    ask.server.enter_turn()
    receipt = staging.stage(owner, batch, name, query.part, part, ask.now(), is_checked=True)
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
    staging.claim(owner, ask.connection)
    is_checked = not staging.is_committed(owner, batch, asked.run)
    if is_checked:
        # Rights may have been withdrawn since the attempts were staged. A batch that is committed
        # already is not checked again: the response only confirms it.
        require = partial(ask.require, "produce")
        async with ask.work.turn() as turn:
            for _ in staging.check_commit(owner, batch, asked.attempts, require):
                await turn.pause()
        ask.server.enter_turn()
    decided = staging.commit(
        owner,
        batch,
        asked.attempts,
        ask.now(),
        run=asked.run,
        once=asked.once,
        is_checked=is_checked,
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
    """A producer and its last batch."""

    principal: str
    producer: str
    batch: int
    """The number of the batch."""
    messages: int
    time: Moment
    """When it was committed."""
    done: bool
    """Whether all of its messages are in their destinations."""


class StagedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A staged batch that is not committed."""

    principal: str
    producer: str
    batch: int
    attempts: int
    messages: int
    size_bytes: int


class ProducerRows(msgspec.Struct, frozen=True):
    """A page of producers."""

    producers: list[ProducerRow]
    next: str
    """The cursor of the next page; empty after the last."""


class StagedRows(msgspec.Struct, frozen=True):
    """A page of batches that are not committed."""

    staged: list[StagedRow]
    """The batches, by user, producer and number."""
    staged_bytes: int
    """The size of all that is staged, on other pages as well."""
    next: str
    """The cursor of the next page; empty after the last."""


async def list_producers(ask: OperationRequest) -> ProducerRows:
    """A page of producers with their last batches."""
    query: NameQuery = ask.query
    staging = ask.hub.staging
    producers = staging.producers()

    def key(owner: ProducerKey) -> SortKey | None:
        name = f"{owner.principal}\0{owner.producer}"
        return (0.0, name) if query.contains in owner.producer else None

    async with ask.work.turn() as turn:
        page, following = await page_of(list(producers), key, query, turn)
    return ProducerRows(
        [
            ProducerRow(
                principal=owner.principal,
                producer=owner.producer,
                batch=producers[owner].record.batch,
                messages=producers[owner].record.messages,
                time=at_s(producers[owner].record.time),
                done=producers[owner].is_done,
            )
            for owner in page
        ],
        following,
    )


async def list_staged(ask: OperationRequest) -> StagedRows:
    """A page of the batches that are not committed."""
    query: NameQuery = ask.query
    staging = ask.hub.staging

    def key(row: StagedRow) -> SortKey | None:
        name = f"{row.principal}\0{row.producer}\0{row.batch:020}"
        return (0.0, name) if query.contains in row.producer else None

    async with ask.work.turn() as turn:
        page, following = await page_of(_staged(ask), key, query, turn)
    return StagedRows(page, staging.staged_bytes, following)


def _staged(ask: OperationRequest) -> Iterator[StagedRow]:
    # A copy: batches come and go between the turns in which it is read.
    for owner, batch, attempts in list(ask.hub.staging.waiting()):
        yield StagedRow(
            principal=owner.principal,
            producer=owner.producer,
            batch=batch,
            attempts=len(attempts),
            messages=sum(each.messages for each in attempts),
            size_bytes=sum(each.size_bytes for each in attempts),
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


INGEST_OPERATIONS: Final = (
    Operation(
        name="list_producers",
        tag="bulk",
        method="GET",
        path="/v1/ingest",
        summary="Producers of batches with their last commits",
        handler=list_producers,
        query=NameQuery,
        answer=ProducerRows,
        needs="observe",
    ),
    Operation(
        name="list_staged",
        tag="bulk",
        method="GET",
        path="/v1/staged",
        summary="Batches that are staged and not committed",
        handler=list_staged,
        query=NameQuery,
        answer=StagedRows,
        needs="observe",
    ),
    Operation(
        name="remove_producer",
        tag="bulk",
        method="DELETE",
        path="/v1/ingest/{producer}",
        summary="Remove a producer and what it staged; its next batch may have any number",
        handler=remove_producer,
        query=OwnerQuery,
        answer=Removed,
    ),
    Operation(
        name="stage",
        tag="bulk",
        method="POST",
        path="/v1/ingest/{producer}/{batch:id}/attempts/{attempt}",
        summary="Stage a part of an attempt to write a batch; answered when it is on disk",
        handler=stage,
        query=PartQuery,
        takes="arrow",
        answer=StageResponse,
        needs="principal",
    ),
    Operation(
        name="commit",
        tag="bulk",
        method="POST",
        path="/v1/ingest/{producer}/{batch:id}/commit",
        summary="Commit a batch: send and publish what these attempts staged, exactly once",
        handler=commit,
        body=CommitRequest,
        answer=CommitResponse,
        needs="principal",
    ),
    Operation(
        name="abort",
        tag="bulk",
        method="POST",
        path="/v1/ingest/{producer}/{batch:id}/abort",
        summary="Drop what was staged of a batch",
        handler=abort,
        body=AbortRequest,
        answer=Aborted,
        needs="principal",
    ),
)
