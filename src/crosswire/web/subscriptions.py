"""Named subscriptions over HTTP: list them with their lag, assign and delete them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from crosswire.envelope import MICROSECONDS, decode_at
from crosswire.errors import InvalidEnvelope, RecordDamaged, UnknownMessage
from crosswire.hub.ledger import Step
from crosswire.hub.subscriptions import Subscription
from crosswire.store.contract import View
from crosswire.web.consumers import (
    ConsumerRow,
    FlowRates,
    consumer_rows,
    flow_of,
    is_own_or_observed,
)
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import NameQuery, SortKey, page_of
from crosswire.web.times import Moment, at_us

__all__ = ["SUBSCRIPTION_OPERATIONS"]

_COUNT_S: Final = 0.2
_NEVER_US: Final = 1 << 53
"""After every time that a message was accepted; as a number of JSON it is exact."""
_COUNTED: Final = 500
_TOPICS_AT_ONCE: Final = 128
_MOST_TOPICS: Final = 1_000
"""Of a pattern: of one with more topics, what is on disk only is not looked at for its age."""


class SubscriptionsQuery(NameQuery, frozen=True, kw_only=True):
    """A page of named subscriptions, in order of names; by a number the largest comes first."""

    sort: Literal["name", "lag", "out", "consumers", "dead"] = "name"
    """By what the list is sorted: `lag` is that in seconds, `out` a rate, `dead` the number of dead
    letters."""
    topic: str = ""
    """Only subscriptions that get the messages of this topic."""


class SubscriptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A named subscription: a position in the log of its topics."""

    name: str
    owner: str
    """The user who may use and delete it; empty if it was made without users."""
    pattern: str
    """The topics that it gets messages of."""
    filter: str
    created: Moment
    settled_upto: int
    """Messages with ids up to this one are settled."""
    committed: int
    """The newest id of the hub."""
    lag_messages: int
    """Messages that are not settled. Those on disk only are counted before the filter."""
    lag_is_exact: bool
    """False if there were too many to count: then it is an estimate."""
    lag_s: float
    """The age of the oldest message that is not settled."""
    held: int
    """Messages that consumers have and did not settle yet."""
    consumers: list[ConsumerRow]
    """Up to 20 of them; `/v1/consumers?subscription=` lists all."""
    consumer_count: int
    """How many there are."""
    dead_letters: int
    dead_letter_queue: str
    """The name of the queue that the operations on dead letters take."""
    rates: FlowRates
    """What it delivers; `accepted` is always 0."""
    stopped: str = ""
    """Why it delivers nothing, if its cursor is damaged."""


class SubscriptionPage(msgspec.Struct, frozen=True):
    """A page of named subscriptions."""

    subscriptions: list[SubscriptionRow]
    next: str
    """The cursor of the next page; empty after the last."""


class SubscriptionOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose subscription of the name."""

    owner: str | None = None
    """The user who owns it; by default the one who asks."""


class NewOwner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user who owns it from now on."""

    owner: str
    """A user's name; empty for nobody."""


class RemovedSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted with a named subscription."""

    removed: str
    """Its name."""
    lag_messages: int
    """Messages that it had not settled."""
    lag_is_exact: bool
    dead_letters: int
    """Dead letters, which stay in their queue."""


class _Lag(NamedTuple):
    messages: int
    is_exact: bool
    oldest_us: int


async def list_subscriptions(ask: OperationRequest) -> SubscriptionPage:
    """A page of named subscriptions: of all for observers, their own for others."""
    query: SubscriptionsQuery = ask.query
    chosen = _subscribed(ask, query.topic)

    def key(subscription: Subscription) -> SortKey | None:
        if query.contains not in subscription.name or (
            chosen is not None and subscription not in chosen
        ):
            return None
        if not is_own_or_observed(ask, subscription.owner):
            return None
        value = _SORTS[query.sort](ask, subscription)
        return -value, f"{subscription.name}\0{subscription.owner}"

    async with ask.work.turn() as turn:
        known = ask.hub.subscriptions.all()
        page, following = await page_of(known, key, query, turn)
    lags = await _lags(ask, page)
    rows = []
    async with ask.work.turn() as turn:
        for subscription, lag in zip(page, lags, strict=True):
            rows.append(_row(ask, subscription, lag))
            await turn.pause()
    return SubscriptionPage(rows, following)


def _delivery_rate(ask: OperationRequest, subscription: Subscription) -> float:
    activity = ask.metrics.destinations.get(subscription.subscription)
    return 0.0 if activity is None else activity.rate(ask.now(), Step.DELIVERED)


_SORTS: Final[dict[str, Callable[[OperationRequest, Subscription], float]]] = {
    "name": lambda _ask, _each: 0.0,
    # By the time of its oldest message: an age is another one on the next page.
    "lag": lambda _ask, each: -(each.oldest_us() or _NEVER_US),
    "out": _delivery_rate,
    "consumers": lambda _ask, each: len(each.consumers),
    "dead": lambda ask, each: ask.hub.depth(each.dead_letters)[0],
}


async def show_subscription(ask: OperationRequest) -> SubscriptionRow:
    """A named subscription. Raises UnknownMessage, also for one of another user."""
    query: SubscriptionOwner = ask.query
    name = ask.path["name"]
    owner = ask.principal if query.owner is None else query.owner
    subscription = None
    if is_own_or_observed(ask, owner):
        subscription = ask.hub.subscriptions.get(name, owner)
    if subscription is None:
        raise UnknownMessage(f"there is no subscription {name!r}")
    (lag,) = await _lags(ask, [subscription])
    return _row(ask, subscription, lag)


def _subscribed(ask: OperationRequest, topic: str) -> set[Subscription] | None:
    if not topic:
        return None
    found = ask.hub.topics_by_name().get(f"topic/{topic.removeprefix('topic/')}")
    return set() if found is None else set(ask.hub.subscriptions.audience(found).subscriptions)


def _age_s(ask: OperationRequest, time_us: int) -> float:
    if not time_us:
        return 0.0
    return max(ask.hub.wall.at(ask.now()) - time_us / MICROSECONDS, 0.0)


def _row(ask: OperationRequest, subscription: Subscription, lag: _Lag) -> SubscriptionRow:
    definition = subscription.definition
    return SubscriptionRow(
        name=definition.name,
        owner=definition.owner,
        pattern=definition.pattern,
        filter=definition.filter,
        created=at_us(definition.created_us),
        settled_upto=subscription.memory.head() - 1,
        committed=ask.hub.committed_id,
        lag_messages=lag.messages,
        lag_is_exact=lag.is_exact,
        lag_s=round(_age_s(ask, lag.oldest_us), 3),
        held=sum(len(each.held) for each in subscription.consumers),
        consumers=consumer_rows(subscription.consumers),
        consumer_count=len(subscription.consumers),
        dead_letters=ask.hub.depth(subscription.dead_letters)[0],
        dead_letter_queue=subscription.dead_letters.removeprefix("queue/").removesuffix("/dead"),
        rates=flow_of(ask, subscription.subscription),
        stopped=subscription.stopped,
    )


# Lag: what is in memory is known, what is on disk only is counted on a thread, for a short time.


async def _lags(ask: OperationRequest, subscriptions: Sequence[Subscription]) -> list[_Lag]:
    log = ask.server.log
    left_s = _COUNT_S
    lags = []
    for each in subscriptions:
        found = _Lag(0, True, 0)
        if each.memory.loaded < each.memory.visible and log is not None:
            # One after the other: each may have tens of thousands of topics.
            ranges = await _unread(ask, each)
            upto, view, pause = each.memory.visible, log.moment().view, log.pause
            began = time.monotonic()
            found = await log.in_thread(_count, view, ranges, upto, began + left_s, pause)
            left_s -= time.monotonic() - began
        oldest_us = each.oldest_us() or found.oldest_us
        lags.append(_Lag(len(each.memory.items) + found.messages, found.is_exact, oldest_us))
    return lags


class _UnreadRange(NamedTuple):
    """What a subscription has not read of a topic: all that is after an id."""

    destination: str
    number: int
    after: int


async def _unread(ask: OperationRequest, subscription: Subscription) -> list[_UnreadRange]:
    """Of the topics that have something which is on disk only."""
    logs, ranges = subscription.logs, []
    walk = logs.walk()
    async with ask.work.turn() as turn:
        while not walk.is_done:
            for topic in walk.part(_TOPICS_AT_ONCE):
                after = logs.begin_after(topic, subscription.memory.loaded)
                if topic.newest_id > after:
                    ranges.append(_UnreadRange(topic.destination, topic.number, after))
            await turn.pause()
    return ranges


def _count(
    view: View,
    ranges: Sequence[_UnreadRange],
    upto: int,
    ends_at: float,
    pause: Callable[[float], None],
) -> _Lag:
    """On a thread: how many messages the store has in these, up to an id, and the time of the
    first."""
    oldest_us = counted = seen = 0
    if ranges and len(ranges) <= _MOST_TOPICS:
        names = {each.number: each.destination for each in ranges}
        after = min(each.after for each in ranges)
        for number, identifier, record in view.page(
            list(names), after=after, upto=upto, count=1
        ).records:
            try:
                oldest_us = decode_at(record, names[number], identifier).time
            except RecordDamaged:
                oldest_us = 0
    for index, (_, number, after) in enumerate(ranges):
        for identifier in view.ids(number, after=after, upto=upto):
            counted += 1
            if counted % _COUNTED == 0:
                pause(0.0)
                if time.monotonic() >= ends_at:
                    seen = identifier
                    break
        if seen:
            # This topic as far as it was counted, and the others as if they were like it.
            part = (seen - after) / (upto - after) * (index + 1) / len(ranges)
            return _Lag(max(int(counted / part), counted), False, oldest_us)
    return _Lag(counted, True, oldest_us)


# Changing them.


async def remove_subscription(ask: OperationRequest) -> RemovedSubscription:
    """Delete a named subscription; answered after the commit.

    Raises Forbidden, UnknownMessage, and SubscriptionConflict while it has consumers.
    """
    name, owner = ask.path["name"], _owner(ask)
    subscription = ask.hub.subscriptions.get(name, owner)
    if subscription is None:
        raise UnknownMessage(f"there is no subscription {name!r}")
    (lag,) = await _lags(ask, [subscription])
    dead_letters = ask.hub.depth(subscription.dead_letters)[0]
    ask.hub.subscriptions.remove(name, owner)
    await ask.hub.committed()
    return RemovedSubscription(
        removed=name,
        lag_messages=lag.messages,
        lag_is_exact=lag.is_exact,
        dead_letters=dead_letters,
    )


async def assign_subscription(ask: OperationRequest) -> SubscriptionRow:
    """Give it to another user, or to nobody."""
    given: NewOwner = ask.body
    access = ask.server.context.access
    if given.owner and not access.open and not access.knows(given.owner):
        raise InvalidEnvelope(f"there is no user {given.owner!r}")
    subscription = ask.hub.subscriptions.assign(ask.path["name"], _owner(ask), given.owner)
    await ask.hub.committed()
    (lag,) = await _lags(ask, [subscription])
    return _row(ask, subscription, lag)


def _owner(ask: OperationRequest) -> str:
    """Raises Forbidden unless it is the principal, or that is an administrator."""
    query: SubscriptionOwner = ask.query
    owner = ask.principal if query.owner is None else query.owner
    # Before it is looked up: whether others have one of that name is not shown.
    ask.require_ownership(owner)
    return owner


SUBSCRIPTION_OPERATIONS: Final = (
    Operation(
        name="list_subscriptions",
        tag="topics",
        method="GET",
        path="/v1/subscriptions",
        summary="Named subscriptions with their lag and consumers: one's own, observers see all",
        handler=list_subscriptions,
        query=SubscriptionsQuery,
        answer=SubscriptionPage,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="show_subscription",
        tag="topics",
        method="GET",
        path="/v1/subscriptions/{name:path}",
        summary="A named subscription with its lag and consumers",
        handler=show_subscription,
        query=SubscriptionOwner,
        answer=SubscriptionRow,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="assign_subscription",
        tag="topics",
        method="PATCH",
        path="/v1/subscriptions/{name:path}",
        summary="Give a named subscription that nobody uses to another user",
        handler=assign_subscription,
        query=SubscriptionOwner,
        body=NewOwner,
        answer=SubscriptionRow,
    ),
    Operation(
        name="remove_subscription",
        tag="topics",
        method="DELETE",
        path="/v1/subscriptions/{name:path}",
        summary="Delete a named subscription that has no consumers, and what it had not settled",
        handler=remove_subscription,
        query=SubscriptionOwner,
        answer=RemovedSubscription,
        needs="principal",
    ),
)
