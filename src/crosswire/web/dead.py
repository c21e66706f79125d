"""Dead letters over HTTP: list, edit, delete, or replay at a rate."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec

from crosswire.access import parse_subscription_dead_letters
from crosswire.envelope import Property
from crosswire.errors import Forbidden, UnknownMessage
from crosswire.gateways.edits import refit
from crosswire.gateways.payloads import JsonPayload, from_body
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.dead import DeadLetter
from crosswire.hub.subscriptions import predicate
from crosswire.web.contract import OperationRequest
from crosswire.web.dead_selection import (
    LISTED_IDS,
    DeadLetterSelection,
    dead_destination,
    dead_letter_pages,
    dead_queue,
    selected_ids,
)
from crosswire.web.messages import PREVIEW_BYTES, JsonMessage, show_message
from crosswire.web.numbers import Id
from crosswire.web.replays import Replay, ReplayRequest, ReplayRow, ReplayRows

__all__ = [
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

_MOST_EXAMINED: Final = 10_000


# --------------------------------------------------------------------------------------- listing


class DeadQueue(msgspec.Struct, frozen=True):
    """A queue with dead letters; `queue` is the name of the queue, or named subscription, that they
    come from."""

    queue: str
    length: int
    size_bytes: int


class DeadQueues(msgspec.Struct, frozen=True):
    """Queues that have dead letters."""

    queues: list[DeadQueue]


class DeadLettersQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Letters of a queue with ids after `after` whose properties pass `filter`."""

    queue: str
    filter: str = ""
    after: Id = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class DeadLetterQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of the letter."""

    queue: str


class FailedDeliveryRow(msgspec.Struct, frozen=True):
    """An attempt to deliver the message: when, to which connection, and why it failed."""

    time: int
    connection: str
    cause: str


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter; `id` is its own, `origin_id` its former id at `origin`.

    Both are empty for a message that was sent to the queue of dead letters directly."""

    id: int
    queue: str
    origin: str
    origin_id: int
    origin_time: int
    cause: str
    attempts: list[FailedDeliveryRow]
    message: JsonMessage


class DeadLetterRows(msgspec.Struct, frozen=True):
    """A page of letters; request the next with `after` = `next`, until that is 0. A page of a
    filtered list may be short, or empty, although more follow."""

    letters: list[DeadLetterRow]
    next: int


async def list_dead(ask: OperationRequest) -> DeadQueues:
    """Queues with dead letters, and how many they have: all of them for observers, those that they
    may consume for others."""
    rows = []
    async with ask.work.turn() as turn:
        for destination in list(ask.hub.store.destinations()):
            await turn.pause()
            if not destination.startswith("queue/") or not destination.endswith("/dead"):
                continue
            length, size_bytes = ask.hub.depth(destination)
            if length and (ask.is_observer or ask.may_read(destination)):
                name = destination.removeprefix("queue/").removesuffix("/dead")
                rows.append(DeadQueue(name, length, size_bytes))
    return DeadQueues(sorted(rows, key=lambda row: row.queue))


def list_dead_letters(ask: OperationRequest) -> DeadLetterRows:
    """A page of a queue's letters. Raises UnknownMessage and InvalidFilter."""
    query: DeadLettersQuery = ask.query
    queue = _dead_queue(ask, query.queue, to_read=True)
    matches = predicate(query.filter)
    found: list[DeadLetter] = []
    after = query.after
    examined = 0
    for page in dead_letter_pages(ask.hub, queue, after=after):
        for dead_letter in page:
            if len(found) == query.limit:
                break
            after = dead_letter.id
            if matches is None or matches(dead_letter.envelope.properties):
                found.append(dead_letter)
        examined += len(page)
        # A filter that few letters pass must not occupy the event loop for long: the client goes on
        # from `next`.
        if len(found) == query.limit or examined >= _MOST_EXAMINED:
            return DeadLetterRows([_dead_letter_row(query.queue, each) for each in found], after)
    return DeadLetterRows([_dead_letter_row(query.queue, each) for each in found], 0)


def show_dead_letter(ask: OperationRequest) -> DeadLetterRow:
    """A letter with its whole payload. Raises UnknownMessage."""
    query: DeadLetterQuery = ask.query
    dead_letter = ask.hub.dead_letters.get(
        _dead_queue(ask, query.queue, to_read=True), ask.path["id"]
    )
    return _dead_letter_row(query.queue, dead_letter, whole=True)


def _may_use(ask: OperationRequest, destination: str) -> bool:
    """Administrators use all dead letters, others those of their named subscriptions."""
    if ask.is_administrator:
        return True
    found = parse_subscription_dead_letters(destination)
    return found is not None and found[0] == ask.principal


def _dead_queue(ask: OperationRequest, name: str, *, to_read: bool = False) -> str:
    """The destination of dead letters that the principal may use, or read: who may consume them
    may see them.

    Raises Forbidden, and UnknownMessage if there never was one.
    """
    destination = dead_destination(name)
    if not (_may_use(ask, destination) or (to_read and ask.may_read(destination))):
        # Before it is looked up: whether there are any is not shown.
        ask.server.context.count("forbidden", "http")
        raise Forbidden(f"{ask.principal} may not use the dead letters of {name!r}")
    return dead_queue(ask.hub, name)


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


# --------------------------------------------------------------------------------------- editing


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are given replace those of the letter; at most one of `json`, `text` and `base64`
    may be given."""

    queue: str
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    content_type: str | None = None
    properties: dict[str, Property] | None = None


async def edit_dead_letter(ask: OperationRequest) -> DeadLetterRow:
    """Change a letter; answered after the commit. Raises UnknownMessage and InvalidEnvelope."""
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


# -------------------------------------------------------------------------------------- deleting


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """How many letters were selected and how many deleted; `ids` are the first selected."""

    matched: int
    done: int
    ids: list[int]
    dry_run: bool


async def purge_dead_letters(ask: OperationRequest) -> Chosen:
    """Delete letters; answered after the commit. Raises InvalidEnvelope and UnknownMessage."""
    choice: DeadLetterSelection = ask.body
    choice.check()
    hub = ask.hub
    queue = _dead_queue(ask, choice.queue)
    matched = done = 0
    first: list[int] = []
    if choice.all and not choice.dry_run:
        # Moves the cursor, without reading the letters.
        letters = hub.queue(queue)
        matched = letters.length
        letters.purge(ask.now())
        await hub.committed()
        done = max(matched - letters.length, 0)
        return Chosen(matched=matched, done=done, ids=[], dry_run=False)
    for ids in selected_ids(hub, queue, choice, predicate(choice.filter)):
        matched += len(ids)
        first += ids[: LISTED_IDS - len(first)]
        if not choice.dry_run:
            done += len(hub.dead_letters.purge(queue, ids, ask.now()))
        await asyncio.sleep(0)
    await hub.committed()
    return Chosen(matched=matched, done=done, ids=first, dry_run=choice.dry_run)


# -------------------------------------------------------------------------------------- replaying


async def replay_dead_letters(ask: OperationRequest) -> ReplayRow:
    """Start a replay; answered when it ends, or after a few seconds."""
    asked: ReplayRequest = ask.body
    _dead_queue(ask, asked.queue)
    if asked.destination and not ask.is_administrator:
        ask.require("produce", asked.destination)

    def is_allowed() -> bool:
        # A reload may take away what it was started with.
        if not ask.is_identified or not _may_use(ask, dead_destination(asked.queue)):
            return False
        access = ask.server.context.access
        return (
            not asked.destination
            or ask.is_administrator
            or access.may(ask.principal, "produce", asked.destination)
        )

    return await ask.replays.start(ask.hub, asked, ask.now, ask.principal, is_allowed=is_allowed)


def list_replays(ask: OperationRequest) -> ReplayRows:
    """Running replays, and the last ones that ended: all for administrators, their own for
    others."""
    return ReplayRows([each.row() for each in ask.replays.all() if _is_visible(ask, each)])


def _is_visible(ask: OperationRequest, replay: Replay) -> bool:
    return ask.is_administrator or replay.principal == ask.principal


def _replay(ask: OperationRequest) -> Replay:
    """The replay that the path names. Raises UnknownMessage, also for one of another user."""
    replay = ask.replays.get(ask.path["id"])
    if not _is_visible(ask, replay):
        raise UnknownMessage(f"there is no replay {replay.id}")
    return replay


def show_replay(ask: OperationRequest) -> ReplayRow:
    """The state of a replay. Raises UnknownMessage."""
    return _replay(ask).row()


async def cancel_replay(ask: OperationRequest) -> ReplayRow:
    """Cancel a replay, and wait for its end. Raises UnknownMessage."""
    replay = _replay(ask)
    if replay.task is not None:
        replay.task.cancel()
        await asyncio.wait([replay.task])
    return replay.row()
