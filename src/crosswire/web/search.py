"""Search of messages over HTTP: in store and lake, off the event loop, in order of time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from crosswire.envelope import Envelope, parse_pattern
from crosswire.errors import ServiceUnavailable
from crosswire.hub.ledger import LedgerRow
from crosswire.server.ledger_search import FoundSteps, LedgerSearch, LedgerSources
from crosswire.server.log_reader import Log
from crosswire.server.log_selection import LogSelection
from crosswire.server.message_search import FoundMessages, MessageCriteria, MessageSearch
from crosswire.store.keys import MAX_ID
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.messages import JsonMessage, shown_to
from crosswire.web.numbers import Id
from crosswire.web.paging import ListQuery, cursor_of, read_cursor
from crosswire.web.property_filter import FilterText, property_predicate
from crosswire.web.times import Moment, to_us

__all__ = ["SEARCH_OPERATIONS", "find_steps", "log_of"]

_SEARCH_S: Final = 2.0
_STEPS_S: Final = 1.0
_MOST_BYTES: Final = 16 << 20

Outcome = Literal[
    "waiting",
    "held",
    "settled",
    "dead",
    "expired",
    "dropped",
    "replayed",
    "published",
    "answered",
    "failed",
    "unknown",
]
_ENDS: Final = ("settled", "dead", "expired", "dropped", "replayed", "answered", "failed")


class SearchQuery(ListQuery, frozen=True, kw_only=True):
    """What the messages must have. All that is given must hold."""

    sort: Literal["newest", "oldest"] = "newest"
    """Which come first."""
    destination: str = ""
    """A destination, or a pattern of topics; by default all that the user may know of."""
    since: Moment | None = None
    """Only messages that were accepted at this time or later."""
    until: Moment | None = None
    """Only messages that were accepted before this time."""
    property: FilterText = ""
    """A filter on properties, such as `price > 10` or `name = acme`."""
    correlation: str = ""
    """The correlation of a request and its response."""
    outcome: Outcome | Literal[""] = ""
    """What became of them."""
    text: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """A text in the payload, the key or a property, in any case."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    """How many messages the response has at most."""


class FoundMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message and what became of it."""

    message: JsonMessage
    outcome: Outcome
    """`waiting` for a consumer, `held` by one, how it ended, `published` to subscribers, or
    `unknown` if that takes too long to find out."""


class SearchPage(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in order of time."""

    messages: list[FoundMessage]
    next: str
    """The cursor of the next page; empty after the last. A page may be short, or empty, although
    more follow: a request takes a few seconds at most."""


async def search_messages(ask: OperationRequest) -> SearchPage:
    """Messages that have all that is asked for. Observers see that there are messages; with a
    property, correlation or text only messages are found that the user may read. Raises Forbidden,
    InvalidDestination, InvalidFilter, LakeError, ServiceUnavailable."""
    query: SearchQuery = ask.query
    if query.destination:
        if not query.destination.partition("/")[2].startswith("@"):
            parse_pattern(query.destination)
        ask.require_sight(query.destination)
    matches = property_predicate(query.property)
    cursor: tuple[Id] | None = read_cursor(query.cursor, tuple[Id])
    log, hub = log_of(ask), ask.hub
    is_forward = query.sort == "oldest"
    first, last = 1, hub.committed_id
    if cursor is not None:
        first, last = (cursor[0] + 1, last) if is_forward else (1, min(last, cursor[0] - 1))
    ends_at = time.monotonic() + _SEARCH_S
    criteria = MessageCriteria(
        _wants(ask, query),
        0 if query.since is None else to_us(query.since),
        MAX_ID if query.until is None else to_us(query.until),
        query.correlation,
        matches,
        query.text.lower(),
    )
    found: list[FoundMessage] = []
    async with log.slots.search(ask.holder):
        while True:
            most = query.limit - len(found)
            part = await _find(ask, log, query, criteria, first, last, most, ends_at)
            steps = await find_steps(ask, {each.id for each in part.messages}, _STEPS_S)
            for envelope in part.messages:
                outcome = _outcome(ask, envelope, steps)
                if query.outcome in ("", outcome):
                    found.append(FoundMessage(message=shown_to(ask, envelope), outcome=outcome))
            first, last = (part.examined + 1, last) if is_forward else (1, part.examined - 1)
            is_over = last < first or not part.messages
            if is_over or len(found) >= query.limit or time.monotonic() >= ends_at:
                break
    if last < first:
        return SearchPage(messages=found, next="")
    return SearchPage(messages=found, next=cursor_of(first - 1 if is_forward else last + 1))


def _wants(ask: OperationRequest, query: SearchQuery) -> Callable[[str], bool]:
    """Whether messages of a destination may be shown. Asked on a thread, once for each name."""
    needs_content = bool(query.property or query.correlation or query.text)
    may = ask.may_read if needs_content else ask.may_see
    wants = LogSelection([query.destination], may=may).wants if query.destination else may
    return functools.cache(wants)


async def _find(
    ask: OperationRequest,
    log: Log,
    query: SearchQuery,
    criteria: MessageCriteria,
    first: int,
    last: int,
    most: int,
    ends_at: float,
) -> FoundMessages:
    hub, moment = ask.hub, log.moment()
    destinations = dict(hub.store.destinations())
    next_row = hub.store.next_row

    def find() -> FoundMessages:
        choice = LogSelection([query.destination] if query.destination else [], may=ask.may_see)
        logs = destinations
        if query.destination:
            logs = choice.logs(destinations, lambda: log.pause(0.0))
        search = MessageSearch(
            log.snapshot(moment, choice, logs),
            log.history,
            criteria,
            names={number: name for name, number in logs.items()},
            next_row=next_row,
            pause=log.pause,
            oldest_first=query.sort == "oldest",
        )
        return search.find(first, last, most=most, most_bytes=_MOST_BYTES, ends_at=ends_at)

    return await log.with_files(find)


async def find_steps(ask: OperationRequest, ids: set[int], within_s: float) -> FoundSteps:
    """The steps of some messages, searched on a thread. Raises LakeError."""
    if not ids:
        return FoundSteps({}, {}, True)
    log, hub = log_of(ask), ask.hub
    sources = LedgerSources(list(hub.ledger.runs()), hub.store.view(), hub.store.next_row)

    def find() -> FoundSteps:
        search = LedgerSearch(
            sources, log.ledger, pause=log.pause, report=log.report, within_s=within_s
        )
        return search.find(ids)

    return await log.in_thread(find)


def _outcome(ask: OperationRequest, envelope: Envelope, steps: FoundSteps) -> Outcome:
    destination = envelope.destination
    if destination.startswith("queue/") and destination in ask.hub.store.destinations():
        state = ask.hub.queue(destination).state_of(envelope.id)
        if state is not None:
            return state
    if envelope.kind == "publish":
        return "published"
    rows: list[LedgerRow] = steps.rows.get(envelope.id, [])
    for row in reversed(rows):
        if row.step in _ENDS:
            ended: Outcome = row.step  # type: ignore[assignment]
            return ended
    return "answered" if envelope.kind == "response" else "unknown"


def log_of(ask: OperationRequest) -> Log:
    """What reads store and lake on threads. Raises ServiceUnavailable."""
    if ask.server.log is None:
        raise ServiceUnavailable("the hub is starting")
    return ask.server.log


SEARCH_OPERATIONS: Final = (
    Operation(
        name="search_messages",
        tag="messages",
        method="GET",
        path="/v1/messages",
        summary="Search messages in order of time: in memory, on disk and in the lake",
        handler=search_messages,
        query=SearchQuery,
        answer=SearchPage,
        needs="principal",
    ),
)
