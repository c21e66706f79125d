"""Dead letters over HTTP: list, edit, delete, or replay at a rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec

from crosswire.access import parse_subscription_dead_letters
from crosswire.envelope import Property
from crosswire.errors import Forbidden, HubError, InvalidEnvelope, UnknownMessage
from crosswire.gateways.edits import refit
from crosswire.gateways.payloads import JsonPayload, from_body
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.dead import DeadLetter
from crosswire.hub.filters import Predicate
from crosswire.hub.hub import Hub
from crosswire.hub.subscriptions import predicate
from crosswire.web.contract import Id, OperationRequest
from crosswire.web.messages import PREVIEW_BYTES, JsonMessage, show_message

__all__ = [
    "Replays",
    "cancel_replay",
    "edit_dead_letter",
    "list_dead",
    "list_dead_letters",
    "list_replays",
    "purge_dead_letters",
    "replay_dead_letters",
    "show_dead_letter",
    "show_replay",
]

_PAGE: Final = 256
_LOOK_AT: Final = 10_000
_BATCH: Final = 32
_IDS: Final = 100
_KEPT: Final = 100
_RUNNING: Final = 16
_STEP_S: Final = 0.1
_PATIENCE_S: Final = 5.0


# --------------------------------------------------------------------------------------- looking


class DeadQueue(msgspec.Struct, frozen=True):
    """Where letters wait: the name of the queue, or named subscription, they come from."""

    queue: str
    length: int
    size_bytes: int


class DeadQueues(msgspec.Struct, frozen=True):
    queues: list[DeadQueue]


class DeadLettersQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Letters of a queue with ids after `after` whose properties pass `filter`."""

    queue: str
    filter: str = ""
    after: Id = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class DeadLetterQuery(msgspec.Struct, frozen=True, kw_only=True):
    queue: str


class FailedDeliveryRow(msgspec.Struct, frozen=True):
    """A delivery that did not end well."""

    time: int
    connection: str
    cause: str


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """`id` is its own, `origin_id` the one it died with at `origin`: none if it was sent here."""

    id: int
    queue: str
    origin: str
    origin_id: int
    origin_time: int
    cause: str
    attempts: list[FailedDeliveryRow]
    message: JsonMessage


class DeadLetterRows(msgspec.Struct, frozen=True):
    """Ask again with `after` = `next` for more, even if these are few; 0 when there are none."""

    letters: list[DeadLetterRow]
    next: int


def list_dead(ask: OperationRequest) -> DeadQueues:
    return DeadQueues(
        [
            DeadQueue(queue.name.removesuffix("/dead"), queue.length, queue.size_bytes)
            for queue in ask.hub.queues()
            if queue.is_dead and queue.length and _may_use(ask, queue.destination)
        ]
    )


def list_dead_letters(ask: OperationRequest) -> DeadLetterRows:
    query: DeadLettersQuery = ask.query
    queue = _dead_queue(ask, query.queue)
    matches = predicate(query.filter)
    found: list[DeadLetter] = []
    after = query.after
    looked_at = 0
    for page in _pages(ask.hub, queue, after=after):
        for dead_letter in page:
            if len(found) == query.limit:
                break
            after = dead_letter.id
            if matches is None or matches(dead_letter.envelope.properties):
                found.append(dead_letter)
        looked_at += len(page)
        if len(found) == query.limit or looked_at >= _LOOK_AT:
            return DeadLetterRows([_dead_letter_row(query.queue, each) for each in found], after)
    return DeadLetterRows([_dead_letter_row(query.queue, each) for each in found], 0)


def show_dead_letter(ask: OperationRequest) -> DeadLetterRow:
    query: DeadLetterQuery = ask.query
    dead_letter = ask.hub.dead_letters.get(_dead_queue(ask, query.queue), ask.path["id"])
    return _dead_letter_row(query.queue, dead_letter, whole=True)


def _dead_letter_row(queue: str, dead_letter: DeadLetter, *, whole: bool = False) -> DeadLetterRow:
    message = show_message(dead_letter.envelope, most_bytes=None if whole else PREVIEW_BYTES)
    return DeadLetterRow(
        id=dead_letter.id,
        queue=queue,
        origin=dead_letter.origin,
        origin_id=dead_letter.origin_id,
        origin_time=dead_letter.time,
        cause=dead_letter.cause,
        attempts=[_try(each) for each in dead_letter.attempts],
        message=message,
    )


def _try(attempt: FailedDelivery) -> FailedDeliveryRow:
    return FailedDeliveryRow(attempt.time, attempt.connection, attempt.cause)


def _may_use(ask: OperationRequest, destination: str) -> bool:
    """Administrators use all dead letters, others those of their named subscriptions."""
    if ask.is_administrator:
        return True
    found = parse_subscription_dead_letters(destination)
    return found is not None and found[0] == ask.principal


def _dead_queue(ask: OperationRequest, name: str) -> str:
    """`orders`, `queue/orders` and `queue/orders/dead` all mean the same; those of a named
    subscription are in `@NAME`, or `@OWNER.NAME`. Raises Forbidden, UnknownMessage."""
    destination = f"queue/{name.removeprefix('queue/').removesuffix('/dead')}/dead"
    if not _may_use(ask, destination):
        # Before it is looked up: whether there are any is not shown.
        ask.server.context.count("forbidden", "http")
        raise Forbidden(f"{ask.principal} may not use the dead letters of {name!r}")
    if destination not in ask.hub.store.destinations():
        raise UnknownMessage(f"{name!r} has no dead letters")
    return destination


def _pages(hub: Hub, queue: str, *, after: int = 0) -> Iterator[Sequence[DeadLetter]]:
    while page := hub.dead_letters.list(queue, after=after, count=_PAGE):
        after = page[-1].id
        yield page


# --------------------------------------------------------------------------------------- editing


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """What is given replaces what was; at most one of `json`, `text` and `base64`."""

    queue: str
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    content_type: str | None = None
    properties: dict[str, Property] | None = None


async def edit_dead_letter(ask: OperationRequest) -> DeadLetterRow:
    edit: Edit = ask.body
    payload, content_type = None, edit.content_type
    if (edit.json, edit.text, edit.base64) != (msgspec.UNSET, None, None):
        payload, kind = from_body(JsonPayload(edit.json, edit.text, edit.base64))
        content_type = content_type or kind
    dead_letter = ask.hub.dead_letters.edit(
        _dead_queue(ask, edit.queue),
        ask.path["id"],
        payload=payload,
        properties=edit.properties,
        content_type=content_type,
        refit=refit,
    )
    await ask.hub.committed()
    return _dead_letter_row(edit.queue, dead_letter, whole=True)


# ----------------------------------------------------------------------------- choosing, deleting


class DeadLetterSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which letters: these `ids`, those whose properties pass `filter`, or `all`: one of them.

    A `dry_run` only lists them."""

    queue: str
    ids: list[Id] = []
    filter: str = ""
    all: bool = False
    dry_run: bool = False

    def check(self) -> None:
        if bool(self.ids) + bool(self.filter) + self.all != 1:
            raise InvalidEnvelope("give exactly one of ids, filter and all")


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """`ids` are the first of them."""

    matched: int
    done: int
    ids: list[int]
    dry_run: bool


async def purge_dead_letters(ask: OperationRequest) -> Chosen:
    choice: DeadLetterSelection = ask.body
    choice.check()
    hub = ask.hub
    queue = _dead_queue(ask, choice.queue)
    matched = done = 0
    first: list[int] = []
    if choice.all and not choice.dry_run:
        dead_queue = hub.queue(queue)
        matched = dead_queue.length
        dead_queue.purge(ask.now())
        await hub.committed()
        done = max(matched - dead_queue.length, 0)
        return Chosen(matched=matched, done=done, ids=[], dry_run=False)
    for ids in _chosen(hub, queue, choice, predicate(choice.filter)):
        matched += len(ids)
        first += ids[: _IDS - len(first)]
        if not choice.dry_run:
            done += len(hub.dead_letters.purge(queue, ids, ask.now()))
        await asyncio.sleep(0)
    await hub.committed()
    return Chosen(matched=matched, done=done, ids=first, dry_run=choice.dry_run)


def _chosen(
    hub: Hub, queue: str, choice: DeadLetterSelection, matches: Predicate | None
) -> Iterator[list[int]]:
    """The letters of a choice that are there now, a page at a time."""
    upto = hub.store.newest_id
    if choice.ids:
        wanted = set(choice.ids)
        matches = None
    for page in _pages(hub, queue):
        found = [
            dead_letter.id
            for dead_letter in page
            if dead_letter.id <= upto
            and (not choice.ids or dead_letter.id in wanted)
            and (matches is None or matches(dead_letter.envelope.properties))
        ]
        if found:
            yield found
        if page[-1].id > upto:
            return


# -------------------------------------------------------------------------------------- replaying


class ReplayRequest(DeadLetterSelection, frozen=True, kw_only=True):
    """`rate` is in letters a second, 0 for as fast as it goes; `destination` in place of the one
    that each letter came from."""

    rate: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    destination: str = ""


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """`skipped` were gone or could not be sent again; `error` is the reason of the last."""

    id: int
    queue: str
    state: Literal["running", "done", "cancelled", "failed"]
    matched: int
    replayed: int
    skipped: int
    rate: float
    dry_run: bool
    ids: list[int]
    error: str


class ReplayRows(msgspec.Struct, frozen=True):
    replays: list[ReplayRow]


class _Replay:
    def __init__(self, identifier: int, asked: ReplayRequest, principal: str) -> None:
        self.id = identifier
        self.principal = principal
        self.asked = asked
        self.state: Literal["running", "done", "cancelled", "failed"] = "running"
        self.matched = self.replayed = self.skipped = 0
        self.first: list[int] = []
        self.error = ""
        self.task: asyncio.Task[None] | None = None

    def row(self) -> ReplayRow:
        return ReplayRow(
            id=self.id,
            queue=self.asked.queue,
            state=self.state,
            matched=self.matched,
            replayed=self.replayed,
            skipped=self.skipped,
            rate=self.asked.rate,
            dry_run=self.asked.dry_run,
            ids=self.first,
            error=self.error,
        )

    async def run(self, hub: Hub, queue: str, now: Callable[[], float]) -> None:
        try:
            matches = predicate(self.asked.filter)
            for ids in _chosen(hub, queue, self.asked, matches):
                self.matched += len(ids)
                self.first += ids[: _IDS - len(self.first)]
                if not self.asked.dry_run:
                    await self._send(hub, queue, ids, now)
                await asyncio.sleep(0)
            await hub.committed()
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        except HubError as error:
            self.state, self.error = "failed", str(error)

    async def _send(self, hub: Hub, queue: str, ids: list[int], now: Callable[[], float]) -> None:
        """A tenth of a second's worth at a time, and never enough to make others wait."""
        rate = self.asked.rate
        step = min(max(int(rate * _STEP_S), 1), _BATCH) if rate else _BATCH
        for start in range(0, len(ids), step):
            batch = ids[start : start + step]
            for identifier in batch:
                self._send_one(hub, queue, identifier, now())
            await asyncio.sleep(len(batch) / rate if rate else 0)

    def _send_one(self, hub: Hub, queue: str, identifier: int, now: float) -> None:
        try:
            sent = hub.dead_letters.replay(
                queue, [identifier], now, destination=self.asked.destination, refit=refit
            )
        except HubError as error:
            self.error = str(error)
            sent = ()
        if not sent:
            self.error = self.error or "a consumer has it, or had it"
        self.replayed += len(sent)
        self.skipped += 1 - len(sent)


class Replays:
    """Those under way and the last ones that ended. A restart of the hub ends them; what they have
    not sent again stays where it is."""

    def __init__(self) -> None:
        self._replays: dict[int, _Replay] = {}
        self._number = 0

    async def start(self, ask: OperationRequest) -> ReplayRow:
        asked: ReplayRequest = ask.body
        asked.check()
        queue = _dead_queue(ask, asked.queue)
        if asked.destination and not ask.is_administrator:
            ask.require("produce", asked.destination)
        predicate(asked.filter)
        if sum(each.state == "running" for each in self._replays.values()) >= _RUNNING:
            raise InvalidEnvelope(f"{_RUNNING} replays are running already")
        self._number += 1
        replay = self._replays[self._number] = _Replay(self._number, asked, ask.principal)
        self._forget()
        replay.task = asyncio.create_task(replay.run(ask.hub, queue, ask.now))
        await asyncio.wait([replay.task], timeout=_PATIENCE_S)
        return replay.row()

    def _forget(self) -> None:
        over = [number for number, each in self._replays.items() if each.state != "running"]
        for number in over[: max(len(self._replays) - _KEPT, 0)]:
            del self._replays[number]

    def all(self, ask: OperationRequest) -> list[ReplayRow]:
        """All of them for administrators, their own for others."""
        return [each.row() for each in self._replays.values() if _is_for(ask, each)]

    def get(self, ask: OperationRequest) -> _Replay:
        """The one that the path names. Raises UnknownMessage."""
        identifier = ask.path["id"]
        replay = self._replays.get(identifier)
        if replay is None or not _is_for(ask, replay):
            raise UnknownMessage(f"there is no replay {identifier}")
        return replay

    def cancel_all(self) -> None:
        for replay in self._replays.values():
            if replay.task is not None:
                replay.task.cancel()


def _is_for(ask: OperationRequest, replay: _Replay) -> bool:
    return ask.is_administrator or replay.principal == ask.principal


async def replay_dead_letters(ask: OperationRequest) -> ReplayRow:
    return await ask.replays.start(ask)


def list_replays(ask: OperationRequest) -> ReplayRows:
    return ReplayRows(ask.replays.all(ask))


def show_replay(ask: OperationRequest) -> ReplayRow:
    return ask.replays.get(ask).row()


async def cancel_replay(ask: OperationRequest) -> ReplayRow:
    replay = ask.replays.get(ask)
    if replay.task is not None:
        replay.task.cancel()
        await asyncio.wait([replay.task])
    return replay.row()
