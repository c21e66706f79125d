"""Dead letters over HTTP: queues that have some, their causes, and the letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, Literal

import msgspec

from crosswire.access import parse_subscription_dead_letters
from crosswire.errors import Forbidden, UnknownMessage
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.dead import DeadLetter
from crosswire.store.keys import MAX_ID
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.dead_selection import (
    dead_destination,
    dead_letter_ids_back,
    dead_letter_pages,
    dead_queue,
)
from crosswire.web.messages import PREVIEW_BYTES, JsonMessage, show_message
from crosswire.web.numbers import Id, Many
from crosswire.web.paging import (
    ListQuery,
    NameQuery,
    SortKey,
    cursor_of,
    page_of,
    page_of_names,
    read_cursor,
)
from crosswire.web.property_filter import FilterText, property_predicate
from crosswire.web.times import Moment, at_us
from crosswire.web.turn import Turn

__all__ = [
    "DEAD_LIST_OPERATIONS",
    "DeadLetterRow",
    "dead_letter_row",
    "may_use_letters",
    "usable_dead_queue",
]

_MOST_EXAMINED: Final = 10_000
_MOST_GROUPED: Final = 100_000
_MOST_CAUSES: Final = 1_000


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
    """Dead letters of a queue, by default the oldest first."""

    queue: str
    """The queue, or named subscription, that they come from."""
    sort: Literal["oldest", "newest", "attempts", "cause"] = "oldest"
    """By what the list is sorted: `attempts` begins with the most. These, and causes, are looked up
    in the first 100,000 letters."""
    filter: FilterText = ""
    """Only letters whose properties pass this filter, such as `price > 10`."""
    cause: str | None = None
    """Only letters with this cause."""
    after: Id = 0
    """In order of time, only letters after the one with this id; a cursor has precedence."""
    limit: Many = 100


class CausesQuery(ListQuery, frozen=True, kw_only=True):
    """A queue with dead letters."""

    queue: str
    """The queue, or named subscription, that they come from."""
    sort: Literal["letters", "cause", "last"] = "letters"
    """By what the list is sorted: the most letters, the name, or the latest letter."""


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
    """A page of the causes of a queue's dead letters."""

    causes: list[CauseRow]
    next: str
    """The cursor of the next page; empty after the last."""
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
    is_complete: bool = True
    """False if the order is by something else than time, and there were more letters than are
    looked at."""


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
    queue = usable_dead_queue(ask, query.queue, to_read=True)
    causes: dict[str, list[DeadLetter]] = {}
    counts: Counter[str] = Counter()
    examined = 0
    is_complete = True

    def key(cause: str) -> SortKey:
        if query.sort == "last":
            return -causes[cause][1].envelope.time, cause
        return (-counts[cause] if query.sort == "letters" else 0.0), cause

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
        shown, following = await page_of(causes, key, query, turn)
    rows = [
        CauseRow(
            cause=cause,
            letters=counts[cause],
            first=at_us(causes[cause][0].envelope.time),
            last=at_us(causes[cause][1].envelope.time),
            example=causes[cause][1].id,
        )
        for cause in shown
    ]
    return CauseRows(causes=rows, next=following, examined=examined, is_complete=is_complete)


async def list_dead_letters(ask: OperationRequest) -> DeadLetterRows:
    """A page of a queue's letters, empty if none of its messages died. Raises UnknownMessage for a
    queue that does not exist, and InvalidFilter."""
    query: DeadLettersQuery = ask.query
    matches = property_predicate(query.filter)
    try:
        queue = usable_dead_queue(ask, query.queue, to_read=True)
    except UnknownMessage:
        name = dead_destination(query.queue).removesuffix("/dead")
        if name in ask.hub.store.destinations() or name.startswith("queue/@"):
            return DeadLetterRows([], "")
        raise

    def fits(letter: DeadLetter) -> bool:
        return query.cause in (None, letter.cause) and (
            matches is None or matches(letter.envelope.properties)
        )

    async with ask.work.turn() as turn:
        if query.sort in ("oldest", "newest"):
            found, following = await _letters_by_time(ask, queue, fits, turn)
            is_complete = True
        else:
            found, following, is_complete = await _letters_by_value(ask, queue, fits, turn)
    rows = [dead_letter_row(query.queue, each) for each in found]
    return DeadLetterRows(rows, following, is_complete)


async def _letters_by_time(
    ask: OperationRequest, queue: str, fits: Callable[[DeadLetter], bool], turn: Turn
) -> tuple[list[DeadLetter], str]:
    """A page of letters that fit, in order of ids, and the cursor of the next."""
    query: DeadLettersQuery = ask.query
    cursor: tuple[Id] | None = read_cursor(query.cursor, tuple[Id])
    if cursor is None and query.after:
        cursor = (query.after,)
    pages: Iterator[Sequence[DeadLetter]]
    if query.sort == "oldest":
        pages = dead_letter_pages(ask.hub, queue, after=0 if cursor is None else cursor[0])
    else:
        before = MAX_ID if cursor is None else cursor[0]
        ids = dead_letter_ids_back(ask.hub, queue, before=min(before, ask.hub.committed_id + 1))
        pages = ([letter] for part in ids for letter in _letters(ask, queue, part))
    found: list[DeadLetter] = []
    examined = last = 0
    for page in pages:
        for letter in page:
            # A filter that few letters pass must not take long: the client goes on from `next`.
            if len(found) == query.limit or examined >= _MOST_EXAMINED:
                return found, cursor_of(last)
            last = letter.id
            examined += 1
            if fits(letter):
                found.append(letter)
        await turn.pause()
    return found, ""


def _letters(ask: OperationRequest, queue: str, ids: Iterable[int]) -> Iterator[DeadLetter]:
    """Those of these letters that are still there."""
    for identifier in ids:
        with suppress(UnknownMessage):
            yield ask.hub.dead_letters.get(queue, identifier)


async def _letters_by_value(
    ask: OperationRequest, queue: str, fits: Callable[[DeadLetter], bool], turn: Turn
) -> tuple[list[DeadLetter], str, bool]:
    """A page of letters that fit, by attempts or cause, the cursor of the next, and whether all
    letters were looked at. Only what they are sorted by is kept of all that are looked at."""
    query: DeadLettersQuery = ask.query
    keys: list[SortKey] = []
    examined, is_complete = 0, True
    for page in dead_letter_pages(ask.hub, queue):
        for letter in filter(fits, page):
            number = f"{letter.id:020}"
            if query.sort == "attempts":
                keys.append((-len(letter.attempts), number))
            else:
                keys.append((0.0, f"{letter.cause}\0{number}"))
        examined += len(page)
        if examined >= _MOST_GROUPED:
            is_complete = False
            break
        await turn.pause()
    shown, following = await page_of(keys, _itself, query, turn)
    ids = [int(name[-20:]) for _, name in shown]
    return list(_letters(ask, queue, ids)), following, is_complete


def _itself(key: SortKey) -> SortKey:
    return key


def show_dead_letter(ask: OperationRequest) -> DeadLetterRow:
    """A letter with its whole payload. Raises UnknownMessage."""
    query: DeadLetterQuery = ask.query
    dead_letter = ask.hub.dead_letters.get(
        usable_dead_queue(ask, query.queue, to_read=True), ask.path["id"]
    )
    return dead_letter_row(query.queue, dead_letter, whole=True)


def may_use_letters(ask: OperationRequest, destination: str) -> bool:
    """Whether the principal may edit, delete and replay them: administrators all, others those of
    their named subscriptions."""
    if ask.is_administrator:
        return True
    found = parse_subscription_dead_letters(destination)
    return found is not None and found[0] == ask.principal


def usable_dead_queue(ask: OperationRequest, name: str, *, to_read: bool = False) -> str:
    """The destination of dead letters that the principal may use, or read: who may consume them
    may see them.

    Raises Forbidden, and UnknownMessage if there never was one.
    """
    destination = dead_destination(name)
    if not (may_use_letters(ask, destination) or (to_read and ask.may_read(destination))):
        # Before it is looked up: whether there are any is not shown.
        ask.server.context.count("forbidden", "http")
        raise Forbidden(f"{ask.principal} may not use the dead letters of {name!r}")
    return dead_queue(ask.hub, name)


def dead_letter_row(queue: str, dead_letter: DeadLetter, *, whole: bool = False) -> DeadLetterRow:
    """A letter in JSON, by default with the beginning of its payload."""
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


DEAD_LIST_OPERATIONS: Final = (
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
)
