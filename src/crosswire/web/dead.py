"""Dead letters over HTTP: list, edit, delete, or replay at a rate."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated, Final, Literal

import msgspec

from crosswire.access import parse_subscription_dead_letters
from crosswire.envelope import Property
from crosswire.errors import Forbidden, InvalidEnvelope, UnknownMessage
from crosswire.gateways.edits import refit
from crosswire.gateways.payloads import JsonPayload, from_body
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.dead import DeadLetter
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.dead_selection import (
    LISTED_IDS,
    DeadLetterSelection,
    dead_destination,
    dead_letter_pages,
    dead_queue,
    selected_ids,
)
from crosswire.web.messages import PREVIEW_BYTES, JsonMessage, show_message
from crosswire.web.numbers import Id, Many
from crosswire.web.paging import ListQuery, NameQuery, SortKey, page_of, page_of_names
from crosswire.web.property_filter import FilterText, property_predicate
from crosswire.web.replays import Replay, ReplayRequest, ReplayRow, ReplayRows
from crosswire.web.times import Moment, at_us

__all__ = ["DEAD_OPERATIONS"]

_MOST_EXAMINED: Final = 10_000
_MOST_GROUPED: Final = 100_000
_MOST_CAUSES: Final = 1_000


# --------------------------------------------------------------------------------------- listing


class DeadQueue(msgspec.Struct, frozen=True):
    """A queue with dead letters."""

    queue: str
    """The name of the queue, or named subscription, that they come from."""
    length: int
    size_bytes: int


class DeadQueues(msgspec.Struct, frozen=True):
    """A page of queues that have dead letters."""

    queues: list[DeadQueue]
    next: str
    """The cursor of the next page; empty after the last."""


class DeadLettersQuery(ListQuery, frozen=True, kw_only=True):
    """Dead letters of a queue, the oldest first."""

    queue: str
    """The queue, or named subscription, that they come from."""
    filter: FilterText = ""
    """Only letters whose properties pass this filter, such as `price > 10`."""
    cause: str | None = None
    """Only letters with this cause."""
    cursor: Annotated[str, msgspec.Meta(max_length=20)] = ""
    """`next` of the page before, which is the id of its last letter; empty for the first."""
    limit: Many = 100


class CausesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with dead letters."""

    queue: str
    """The queue, or named subscription, that they come from."""


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same cause."""

    cause: str
    letters: int
    first: Moment
    """When the first of them died."""
    last: Moment
    """When the last of them died."""
    example: int
    """The id of the last of them."""


class CauseRows(msgspec.Struct, frozen=True, kw_only=True):
    """The causes of a queue's dead letters, the most frequent first."""

    causes: list[CauseRow]
    examined: int
    """How many letters were looked at."""
    is_complete: bool
    """False if there were more letters, or causes, than are looked at."""


class DeadLetterQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of the letter."""

    queue: str
    """The queue, or named subscription, that it comes from."""


class FailedDeliveryRow(msgspec.Struct, frozen=True):
    """An attempt to deliver the message: when, to which connection, and why it failed."""

    time: Moment
    connection: str
    cause: str


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter."""

    id: int
    queue: str
    origin: str
    """Where it could not be delivered; empty if it was sent to the dead letters directly."""
    origin_id: int
    """The id that it had there."""
    origin_time: Moment
    """When it was accepted there."""
    cause: str
    """Why it died."""
    attempts: list[FailedDeliveryRow]
    message: JsonMessage


class DeadLetterRows(msgspec.Struct, frozen=True):
    """A page of dead letters. One of a filtered list may be short, or empty, although more
    follow."""

    letters: list[DeadLetterRow]
    next: str
    """The cursor of the next page; empty after the last."""


class DeadQueuesQuery(NameQuery, frozen=True, kw_only=True):
    """A page of queues with dead letters, in order of names; by length the longest comes first."""

    sort: Literal["name", "length"] = "name"
    """By what the list is sorted."""


async def list_dead(ask: OperationRequest) -> DeadQueues:
    """A page of queues with dead letters: of all for observers, of those that they may consume for
    others."""
    query: DeadQueuesQuery = ask.query

    def lengths(names: list[str]) -> list[float]:
        return [length for length, _ in ask.hub.depths(names)]

    def keep(names: list[str]) -> list[str]:
        if query.contains:
            names = [each for each in names if query.contains in _origin_name(each)]
        if not ask.is_observer:
            names = [each for each in names if ask.may_read(each)]
        return [name for name, length in zip(names, lengths(names), strict=True) if length]

    async with ask.work.turn() as turn:
        names = await ask.work.index.names(ask.hub, "dead", turn)
        page, following = await page_of_names(
            names,
            query,
            turn,
            prefix="queue/",
            keep=keep,
            values=lengths if query.sort == "length" else None,
        )
    rows = [DeadQueue(_origin_name(each), *ask.hub.depth(each)) for each in page]
    return DeadQueues(rows, following)


def _origin_name(destination: str) -> str:
    return destination.removeprefix("queue/").removesuffix("/dead")


async def list_causes(ask: OperationRequest) -> CauseRows:
    """The causes of a queue's dead letters. Raises UnknownMessage."""
    query: CausesQuery = ask.query
    queue = _dead_queue(ask, query.queue, to_read=True)
    causes: dict[str, list[DeadLetter]] = {}
    counts: Counter[str] = Counter()
    examined = 0
    is_complete = True
    async with ask.work.turn() as turn:
        for page in dead_letter_pages(ask.hub, queue):
            for letter in page:
                if letter.cause not in causes and len(causes) >= _MOST_CAUSES:
                    is_complete = False
                    continue
                counts[letter.cause] += 1
                found = causes.setdefault(letter.cause, [letter, letter])
                found[1] = letter
            examined += len(page)
            if examined >= _MOST_GROUPED:
                is_complete = False
                break
            await turn.pause()
    rows = [
        CauseRow(
            cause=cause,
            letters=number,
            first=at_us(causes[cause][0].envelope.time),
            last=at_us(causes[cause][1].envelope.time),
            example=causes[cause][1].id,
        )
        for cause, number in counts.most_common()
    ]
    return CauseRows(causes=rows, examined=examined, is_complete=is_complete)


async def list_dead_letters(ask: OperationRequest) -> DeadLetterRows:
    """A page of a queue's letters, empty if none of its messages died. Raises UnknownMessage for a
    queue that does not exist, and InvalidFilter."""
    query: DeadLettersQuery = ask.query
    matches = property_predicate(query.filter)
    try:
        queue = _dead_queue(ask, query.queue, to_read=True)
    except UnknownMessage:
        name = dead_destination(query.queue).removesuffix("/dead")
        if name in ask.hub.store.destinations() or name.startswith("queue/@"):
            return DeadLetterRows([], "")
        raise
    found: list[DeadLetter] = []
    after = _read_id(query.cursor)
    examined = 0
    following = ""
    async with ask.work.turn() as turn:
        for page in dead_letter_pages(ask.hub, queue, after=after):
            for dead_letter in page:
                if len(found) == query.limit:
                    break
                after = dead_letter.id
                if query.cause in (None, dead_letter.cause) and (
                    matches is None or matches(dead_letter.envelope.properties)
                ):
                    found.append(dead_letter)
            examined += len(page)
            # A filter that few letters pass must not take long: the client goes on from `next`.
            if len(found) == query.limit or examined >= _MOST_EXAMINED:
                following = str(after) if after < ask.hub.queue(queue).visible else ""
                break
            await turn.pause()
    return DeadLetterRows([_dead_letter_row(query.queue, each) for each in found], following)


def _read_id(cursor: str) -> int:
    """The id in a cursor of dead letters: it is one. Raises InvalidEnvelope."""
    try:
        return msgspec.convert(cursor or "0", Id, strict=False)
    except msgspec.ValidationError:
        raise InvalidEnvelope(f"{cursor[:80]!r} is no cursor of dead letters") from None


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
        origin_time=at_us(dead_letter.time),
        cause=dead_letter.cause,
        attempts=[_try(each) for each in dead_letter.attempts],
        message=message,
    )


def _try(attempt: FailedDelivery) -> FailedDeliveryRow:
    return FailedDeliveryRow(at_us(attempt.time), attempt.connection, attempt.cause)


# --------------------------------------------------------------------------------------- editing


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that are given replace those of the letter; at most one of `json`, `text` and `base64`
    may be given."""

    queue: str
    """The queue, or named subscription, that it comes from."""
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
    """What was selected and deleted."""

    matched: int
    """How many letters were selected."""
    done: int
    """How many were deleted."""
    ids: list[int]
    """The first that were selected."""
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
    for ids in selected_ids(hub, queue, choice, property_predicate(choice.filter)):
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


async def list_replays(ask: OperationRequest) -> ReplayRows:
    """A page of running replays, and the last ones that ended: of all for administrators, their
    own for others."""
    query: ListQuery = ask.query

    def key(replay: Replay) -> SortKey | None:
        return (-replay.id, "") if _is_visible(ask, replay) else None

    async with ask.work.turn() as turn:
        page, following = await page_of(ask.replays.all(), key, query, turn)
    return ReplayRows([each.row() for each in page], following)


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


DEAD_OPERATIONS: Final = (
    Operation(
        name="list_dead",
        tag="dead letters",
        method="GET",
        path="/v1/dead",
        summary="Queues with dead letters",
        handler=list_dead,
        query=DeadQueuesQuery,
        answer=DeadQueues,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="list_letters",
        on_standby=True,
        tag="dead letters",
        method="GET",
        path="/v1/dead/letters",
        summary="The dead letters of a queue or a named subscription",
        handler=list_dead_letters,
        query=DeadLettersQuery,
        answer=DeadLetterRows,
        needs="principal",
    ),
    Operation(
        name="list_causes",
        tag="dead letters",
        method="GET",
        path="/v1/dead/causes",
        summary="The dead letters of a queue or a named subscription, grouped by cause",
        handler=list_causes,
        query=CausesQuery,
        answer=CauseRows,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="show_letter",
        on_standby=True,
        tag="dead letters",
        method="GET",
        path="/v1/dead/letters/{id:id}",
        summary="A dead letter, whole, with every attempt to deliver it",
        handler=show_dead_letter,
        query=DeadLetterQuery,
        answer=DeadLetterRow,
        needs="principal",
    ),
    Operation(
        name="edit_letter",
        tag="dead letters",
        method="PATCH",
        path="/v1/dead/letters/{id:id}",
        summary="Change a dead letter's payload or properties",
        handler=edit_dead_letter,
        body=Edit,
        answer=DeadLetterRow,
        needs="principal",
        body_bytes=None,
    ),
    Operation(
        name="purge_letters",
        tag="dead letters",
        method="POST",
        path="/v1/dead/purge",
        summary="Delete dead letters",
        handler=purge_dead_letters,
        body=DeadLetterSelection,
        answer=Chosen,
        needs="principal",
    ),
    Operation(
        name="replay_letters",
        tag="dead letters",
        method="POST",
        path="/v1/dead/replays",
        summary="Send dead letters again; answered when done, or after a few seconds",
        handler=replay_dead_letters,
        body=ReplayRequest,
        answer=ReplayRow,
        needs="principal",
    ),
    Operation(
        name="list_replays",
        tag="dead letters",
        method="GET",
        path="/v1/dead/replays",
        summary="Running replays, and the last ones that ended",
        handler=list_replays,
        query=ListQuery,
        answer=ReplayRows,
        needs="principal",
    ),
    Operation(
        name="show_replay",
        tag="dead letters",
        method="GET",
        path="/v1/dead/replays/{id:id}",
        summary="State of a replay",
        handler=show_replay,
        answer=ReplayRow,
        needs="principal",
    ),
    Operation(
        name="cancel_replay",
        tag="dead letters",
        method="DELETE",
        path="/v1/dead/replays/{id:id}",
        summary="Cancel a replay; letters that were not sent again are kept",
        handler=cancel_replay,
        answer=ReplayRow,
        needs="principal",
    ),
)
