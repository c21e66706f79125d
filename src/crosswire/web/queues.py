"""Queues over HTTP: list, show, create, pause, purge, move and delete them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from crosswire.envelope import MICROSECONDS, Envelope
from crosswire.errors import InvalidDestination, UnknownMessage
from crosswire.hub.attachment import Consumer
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.policies import QueuePolicy
from crosswire.hub.queues import Queue
from crosswire.web.consumers import (
    ConsumerRow,
    FlowRates,
    consumer_rows,
    flow_of,
    is_own_or_observed,
)
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.dead_selection import MessageSelection, selected_ids
from crosswire.web.messages import SHOWN_BYTES, JsonMessage, show_message
from crosswire.web.numbers import Few, Id
from crosswire.web.paging import NameQuery, page_of_names
from crosswire.web.property_filter import property_predicate
from crosswire.web.replays import ReplayRequest, ReplayRow
from crosswire.web.state import Removed
from crosswire.web.times import Moment, at_us
from crosswire.web.turn import Turn

__all__ = ["QUEUE_OPERATIONS"]

_PURGED_AT_ONCE: Final = 256
_BROWSED_AT_ONCE: Final = 64
_KIND: Final = "queue/"
_NEVER_US: Final = 1 << 53
"""After every time that a message was accepted; as a number of JSON it is exact."""

QueueSort = Literal["name", "length", "size", "age", "in", "out", "consumers", "dead"]


class QueuesQuery(NameQuery, frozen=True, kw_only=True):
    """A page of queues. By default in order of names; by a number the largest comes first."""

    sort: QueueSort = "name"
    """By what the list is sorted: `age` is that of the oldest message, `in` and `out` are rates."""
    state: Literal["", "backlog", "paused", "stopped", "dead"] = ""
    """Only queues with a backlog, that are paused or stopped, or that have dead letters."""


class Peek(msgspec.Struct, frozen=True, kw_only=True):
    """How many of its messages to show, from those with ids after `after`."""

    messages: Few = 0
    """How many messages the response has at most."""
    after: Id = 0
    """Only messages with larger ids: `next` of the page before."""


class QueueFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with what waits in it."""

    name: str
    length: int
    """Messages that are not settled."""
    size_bytes: int
    held: int
    """Messages that consumers have and did not settle yet."""
    dead_letters: int
    """Messages in its queue of dead letters."""
    oldest: Moment | None
    """When its oldest message was accepted; null if it has none."""
    oldest_age_s: float
    """The age of that message."""
    rates: FlowRates
    paused: bool
    stopped: str = ""
    """Why nothing is delivered from it, if its cursor is damaged."""


class QueueRow(QueueFacts, frozen=True, kw_only=True):
    """A queue with what waits in it."""

    consumers: int


class QueuePage(msgspec.Struct, frozen=True):
    """A page of queues, without those of dead letters."""

    queues: list[QueueRow]
    next: str
    """The cursor of the next page; empty after the last."""


class QueueDetail(QueueFacts, frozen=True, kw_only=True):
    """A queue with its policy and the requested messages."""

    consumers: list[ConsumerRow]
    """Up to 20 of them; `/v1/consumers?queue=` lists all. Who may not observe sees its own only."""
    consumer_count: int
    """How many there are, or how many of one's own."""
    policy: QueuePolicy
    messages: list[JsonMessage]
    next: str
    """`after` of the request for the next messages; empty after the last."""


class NewQueue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a queue, without `queue/`."""

    name: str


class CreatedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """The queue is there."""

    name: str
    created: bool
    """False if there was one of that name."""


class QueueChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of a queue."""

    paused: bool
    """Whether nothing is delivered from it. Messages are accepted all the same."""


class QueuePurge(MessageSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The messages to delete: all by default."""


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted; messages that consumers hold are kept."""

    purged: int
    """How many messages were deleted."""
    matched: int
    """How many messages were selected."""
    dry_run: bool


class MoveRequest(MessageSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The messages to move, and where to."""

    destination: str
    """A queue or a topic."""
    rate: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    """Messages per second; 0 for no limit."""


async def list_queues(ask: OperationRequest) -> QueuePage:
    """A page of queues: of all for observers, of those that they have a right to for others."""
    query: QueuesQuery = ask.query

    def keep(names: list[str]) -> list[str]:
        if query.contains:
            names = [each for each in names if each.find(query.contains, len(_KIND)) >= 0]
        if not ask.is_observer:
            names = [each for each in names if ask.may_see(each)]
        return _with_state(ask, names, query.state) if query.state else names

    sort_values = None
    if query.sort != "name":
        sort_values = functools.partial(_SORTS[query.sort], ask)
    if query.sort != "name" or query.state:
        await ask.work.know_stored(ask.server, ask.hub)
    async with ask.work.turn() as turn:
        names = await ask.work.index.names(ask.hub, "queue", turn)
        page, following = await page_of_names(
            names, query, turn, prefix=_KIND, keep=keep, values=sort_values
        )
        rows = []
        for destination in page:
            # Not one that was deleted meanwhile, which `hub.queue` would create again.
            if destination in ask.hub.store.destinations():
                rows.append(_row(ask, ask.hub.queue(destination)))
            await turn.pause()
    return QueuePage(rows, following)


def _with_state(ask: OperationRequest, names: list[str], state: str) -> list[str]:
    hub = ask.hub
    if state == "backlog":
        return [name for name, length in zip(names, _lengths(ask, names), strict=True) if length]
    if state == "dead":
        return [name for name, letters in zip(names, _dead(ask, names), strict=True) if letters]
    if state == "paused":
        return [name for name in names if hub.is_paused(name)]
    # Few, and not in memory twice: those that deliver nothing are listed by the hub.
    stopped = {each.destination for each in hub.stopped() if isinstance(each, Queue)}
    return [name for name in names if name in stopped]


def _rates(step: Step, ask: OperationRequest, names: list[str]) -> list[float]:
    by_name, now = ask.metrics.destinations.by_name, ask.now()
    return [
        0.0 if (activity := by_name.get(name)) is None else activity.rate(now, step)
        for name in names
    ]


def _lengths(ask: OperationRequest, names: list[str]) -> list[float]:
    return [length for length, _ in ask.hub.depths(names)]


def _dead(ask: OperationRequest, names: list[str]) -> list[float]:
    return [length for length, _ in ask.hub.depths(f"{name}/dead" for name in names)]


def _ages(ask: OperationRequest, names: list[str]) -> list[float]:
    """When the oldest message was accepted, negative: an age is another one on the next page."""
    return [-(oldest_us or _NEVER_US) for oldest_us in ask.hub.oldest_times_us(names)]


def _consumers(ask: OperationRequest, names: list[str]) -> list[float]:
    opened = ask.hub.opened_queues()
    return [0 if (queue := opened.get(name)) is None else len(queue.consumers) for name in names]


_SORTS: Final[dict[str, Callable[[OperationRequest, list[str]], Sequence[float]]]] = {
    "length": _lengths,
    "size": lambda ask, names: [size for _, size in ask.hub.depths(names)],
    "age": _ages,
    "in": functools.partial(_rates, Step.ACCEPTED),
    "out": functools.partial(_rates, Step.SETTLED),
    "consumers": _consumers,
    "dead": _dead,
}


def _age_s(ask: OperationRequest, oldest_us: int) -> float:
    return max(ask.hub.wall.at(ask.now()) - oldest_us / MICROSECONDS, 0.0) if oldest_us else 0.0


def _row(ask: OperationRequest, queue: Queue) -> QueueRow:
    return QueueRow(consumers=len(queue.consumers), **_facts(ask, queue))


def _facts(ask: OperationRequest, queue: Queue) -> dict[str, Any]:
    """The fields of `QueueFacts`."""
    oldest_us = queue.oldest_us() if queue.length else 0
    return {
        "name": queue.name,
        "length": queue.length,
        "size_bytes": queue.size_bytes,
        "held": sum(len(each.held) for each in queue.consumers),
        "dead_letters": ask.hub.depth(queue.dead_letters)[0],
        "oldest": at_us(oldest_us) if oldest_us else None,
        "oldest_age_s": round(_age_s(ask, oldest_us), 3),
        "rates": flow_of(ask, queue.destination),
        "paused": queue.paused,
        "stopped": queue.stopped,
    }


async def show_queue(ask: OperationRequest) -> QueueDetail:
    """A queue and some of its messages, which stay in it. Raises Forbidden, UnknownMessage."""
    peek: Peek = ask.query
    destination = f"queue/{ask.path['name']}"
    ask.require_sight(destination)
    if peek.messages:
        ask.require_content(destination)
    queue = _queue(ask)
    consumers: list[Consumer] = []
    holders: dict[int, str] = {}
    messages: list[JsonMessage] = []
    async with ask.work.turn() as turn:
        shown, is_cut = await _browse(queue, peek, turn)
        ids = {each.id for each in shown}
        for consumer in list(queue.consumers):
            if is_own_or_observed(ask, consumer.peer.principal):
                consumers.append(consumer)
                for each in ids & consumer.held.keys():
                    holders[each] = consumer.peer.connection
            await turn.pause()
        for envelope in shown:
            messages.append(show_message(envelope, held_by=holders.get(envelope.id, "")))
            await turn.pause()
    return QueueDetail(
        **_facts(ask, queue),
        consumers=consumer_rows(consumers),
        consumer_count=len(consumers),
        policy=queue.policy,
        messages=messages,
        next=str(shown[-1].id) if shown and is_cut else "",
    )


async def _browse(queue: Queue, peek: Peek, turn: Turn) -> tuple[list[Envelope], bool]:
    """The requested messages, and whether there may be more."""
    shown: list[Envelope] = []
    after, left_bytes, is_cut = peek.after, SHOWN_BYTES, True
    while is_cut and len(shown) < peek.messages and left_bytes > 0:
        count = min(_BROWSED_AT_ONCE, peek.messages - len(shown))
        found, is_cut = queue.browse_page(after, count, left_bytes)
        shown += found
        left_bytes -= sum(len(each.payload) for each in found)
        after = shown[-1].id if shown else after
        await turn.pause()
    return shown, is_cut


async def create_queue(ask: OperationRequest) -> CreatedQueue:
    """Create a queue; answered after the commit. Raises InvalidDestination, DestinationFull."""
    asked: NewQueue = ask.body
    destination = f"queue/{asked.name}"
    is_new = destination not in ask.hub.store.destinations()
    if is_new:
        ask.hub.target(destination, LedgerPeer("http", ask.connection, ask.principal))
        await ask.hub.committed()
    return CreatedQueue(name=asked.name, created=is_new)


async def change_queue(ask: OperationRequest) -> QueueRow:
    """Pause or resume a queue; answered after the commit. Raises UnknownMessage."""
    asked: QueueChange = ask.body
    queue = _queue(ask)
    queue.pause(asked.paused, ask.now())
    await ask.hub.committed()
    return _row(ask, queue)


async def purge_queue(ask: OperationRequest) -> Purged:
    """Delete messages that no consumer holds; answered after the commit. Raises UnknownMessage,
    InvalidFilter."""
    asked: QueuePurge = ask.body
    queue = _queue(ask)
    if asked.selects_nothing or asked.all:
        before = queue.length
        if not asked.dry_run:
            queue.purge(ask.now())
            await ask.hub.committed()
        purged = max(before - queue.length, 0)
        return Purged(purged=purged, matched=before, dry_run=asked.dry_run)
    asked.check()
    matched = purged = 0
    async with ask.work.turn() as turn:
        matches = property_predicate(asked.filter)
        for ids in selected_ids(ask.hub, queue.destination, asked, matches):
            matched += len(ids)
            for start in range(0, 0 if asked.dry_run else len(ids), _PURGED_AT_ONCE):
                some = ids[start : start + _PURGED_AT_ONCE]
                purged += len(queue.remove(some, Step.DROPPED, ask.now(), detail="purged"))
            await turn.pause()
    await ask.hub.committed()
    return Purged(purged=purged, matched=matched, dry_run=asked.dry_run)


async def move_messages(ask: OperationRequest) -> ReplayRow:
    """Start to move messages; answered when it ends, or after a few seconds: then it goes on, and
    is listed with the replays. Raises UnknownMessage, InvalidDestination, InvalidFilter."""
    asked: MoveRequest = ask.body
    queue = _queue(ask)
    target = asked.destination
    if target == queue.destination:
        raise InvalidDestination("the messages are there already")
    if not target.startswith(("queue/", "topic/")):
        raise InvalidDestination(f"{target!r} is neither a queue nor a topic")
    asked.check()
    # Before the destination is created: a request that is refused changes nothing.
    property_predicate(asked.filter)
    ask.hub.target(target, LedgerPeer("http", ask.connection, ask.principal))
    request = ReplayRequest(
        queue=queue.name,
        ids=asked.ids,
        filter=asked.filter,
        all=asked.all,
        dry_run=asked.dry_run,
        rate=asked.rate,
        destination=target,
    )
    return await ask.replays.start(
        ask.hub,
        request,
        ask.now,
        ask.principal,
        source=queue.destination,
        is_allowed=lambda: ask.is_identified and ask.is_administrator,
    )


async def delete_queue(ask: OperationRequest) -> Removed:
    """Delete a queue; answered after the commit. Raises UnknownMessage, and DestinationInUse while
    it is not empty, has a consumer or is configured."""
    return await delete_destination(ask, "queue")


async def delete_destination(ask: OperationRequest, kind: str) -> Removed:
    """Delete a queue or a topic that is not used."""
    name = ask.path["name"]
    # What was settled last may not be written yet.
    await ask.hub.committed()
    ask.hub.remove(f"{kind}/{name}", ask.now())
    await ask.hub.committed()
    return Removed(name)


def _queue(ask: OperationRequest) -> Queue:
    """An existing queue. Raises UnknownMessage: `hub.queue` would create it."""
    destination = f"queue/{ask.path['name']}"
    if destination not in ask.hub.store.destinations():
        raise UnknownMessage(f"there is no queue {ask.path['name']!r}")
    return ask.hub.queue(destination)


QUEUE_OPERATIONS: Final = (
    Operation(
        name="list_queues",
        tag="queues",
        method="GET",
        path="/v1/queues",
        summary="Queues, with their lengths, ages, rates and consumers",
        handler=list_queues,
        query=QueuesQuery,
        answer=QueuePage,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="create_queue",
        tag="queues",
        method="POST",
        path="/v1/queues",
        summary="Create a queue; sending to one does so, too",
        handler=create_queue,
        body=NewQueue,
        answer=CreatedQueue,
    ),
    Operation(
        name="show_queue",
        tag="queues",
        method="GET",
        path="/v1/queues/{name:path}",
        summary="A queue, its consumers and, if requested, some of its messages",
        handler=show_queue,
        query=Peek,
        answer=QueueDetail,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="change_queue",
        tag="queues",
        method="PATCH",
        path="/v1/queues/{name:path}",
        summary="Pause a queue, or resume it",
        handler=change_queue,
        body=QueueChange,
        answer=QueueRow,
    ),
    Operation(
        name="purge_queue",
        tag="queues",
        method="POST",
        path="/v1/queues/{name:path}/purge",
        summary="Delete messages of a queue that no consumer holds: all, or chosen ones",
        handler=purge_queue,
        body=QueuePurge,
        answer=Purged,
    ),
    Operation(
        name="move_messages",
        tag="queues",
        method="POST",
        path="/v1/queues/{name:path}/move",
        summary="Move messages that no consumer holds to another queue or a topic",
        handler=move_messages,
        body=MoveRequest,
        answer=ReplayRow,
    ),
    Operation(
        name="delete_queue",
        tag="queues",
        method="DELETE",
        path="/v1/queues/{name:path}",
        summary="Delete a queue that has no messages, consumers, schedules or configuration",
        handler=delete_queue,
        answer=Removed,
    ),
)
