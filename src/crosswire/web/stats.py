"""Time series over HTTP, and what is busiest now."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from crosswire.access import parse_subscription_label, subscription_label
from crosswire.errors import InvalidEnvelope, UnknownMessage
from crosswire.server.activity import Activity
from crosswire.server.time_series import TIERS, Tier
from crosswire.web.consumers import FlowRates, is_own_or_observed, rates_of
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import ListQuery, SortKey, page_of
from crosswire.web.times import Moment, at_s, to_us

__all__ = ["STATS_OPERATIONS"]

_DEFAULT_S: Final = 300

StepSeconds = Literal[1, 10, 60]


class StatsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Of what, from when, and how far apart the points are. Without a destination or subscription:
    of the hub as a whole."""

    destination: str = ""
    """A queue, topic or service."""
    subscription: str = ""
    """The name of a named subscription."""
    owner: str | None = None
    """The owner of the subscription; by default the one who asks."""
    since: Moment | None = None
    """The time of the first point; by default five minutes ago."""
    until: Moment | None = None
    """The time of the last point; by default now."""
    step_s: StepSeconds | None = None
    """Seconds between two points: 1 for the last five minutes, 10 for two hours, 60 for a day. By
    default the smallest with which `since` is kept."""


class StatsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Points at equal distances. Those of a longer step are means; of latencies and ages the
    largest."""

    name: str
    """The destination, or the subscription; empty for the hub."""
    step_s: int
    """Seconds between two points."""
    first: Moment
    """The time of the first point."""
    series: dict[str, list[float | None]]
    """Points by measure; null where nothing was measured. Series of single destinations are kept
    for the busiest, and begin with the first request for others."""


class BusiestQuery(ListQuery, frozen=True, kw_only=True):
    """What to list."""

    kind: Literal["", "queue", "topic", "service", "subscription"] = ""
    """Only these."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    """How many rows the response has at most."""


class BusyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A destination or named subscription, and its rates."""

    kind: str
    """`queue`, `topic`, `service` or `subscription`."""
    name: str
    owner: str
    """Of a named subscription."""
    rates: FlowRates


class BusiestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What is busiest, the first most. Rates are those of the last five to ten seconds."""

    time: Moment
    rows: list[BusyRow]
    """Destinations and named subscriptions."""
    next: str
    """The cursor of the next page; empty after the last."""


def show_stats(ask: OperationRequest) -> StatsAnswer:
    """Points of the hub, for observers, or of one destination or subscription. Raises Forbidden,
    UnknownMessage, InvalidEnvelope."""
    query: StatsQuery = ask.query
    statistics = ask.server.statistics
    now, wall = ask.now(), ask.hub.wall
    if query.destination and query.subscription:
        raise InvalidEnvelope("give a destination or a subscription, not both")
    name = query.destination
    if query.subscription:
        owner = ask.principal if query.owner is None else query.owner
        if not is_own_or_observed(ask, owner):
            raise UnknownMessage(f"there is no subscription {query.subscription!r}")
        group = statistics.group(subscription_label(owner, query.subscription))
        name = query.subscription
    elif query.destination:
        ask.require_sight(query.destination)
        if "/" not in query.destination:
            raise UnknownMessage(f"there is no {query.destination!r}")
        group = statistics.group(query.destination)
    else:
        ask.require_observer()
        group = statistics.hub
    if group is None:
        raise UnknownMessage(f"there is no {name!r}")
    last = now if query.until is None else min(wall.steady(to_us(query.until) / 1e6), now)
    first = now - _DEFAULT_S
    if query.since is not None:
        first = wall.steady(to_us(query.since) / 1e6)
    tier = _tier(query.step_s, now - first)
    # What is asked for may be any time: what is kept is limited.
    first = max(first, now - tier.step_s * tier.points)
    begin, end = int(first // tier.step_s), int(max(last, first) // tier.step_s)
    return StatsAnswer(
        name=name,
        step_s=tier.step_s,
        first=at_s(wall.at(begin * tier.step_s)),
        series=group.points(tier, begin, end),
    )


def _tier(step_s: int | None, age_s: float) -> Tier:
    for tier in TIERS:
        if step_s == tier.step_s:
            return tier
        if step_s is None and age_s <= tier.step_s * tier.points:
            return tier
    return TIERS[-1]


async def list_busiest(ask: OperationRequest) -> BusiestAnswer:
    """What is busiest of what the principal may know of."""
    query: BusiestQuery = ask.query
    now = ask.now()

    def key(entry: tuple[str, Activity]) -> SortKey | None:
        label, activity = entry
        kind = _kind(label)
        if query.kind not in ("", kind):
            return None
        if kind == "subscription":
            is_visible = is_own_or_observed(ask, parse_subscription_label(label)[0])
        else:
            is_visible = ask.may_see(label)
        return (-activity.recent(), label) if is_visible else None

    active = list(ask.server.metrics.destinations.active(now))
    async with ask.work.turn() as turn:
        page, following = await page_of(active, key, query, turn)
    rows = []
    for label, activity in page:
        kind, owner, name = _kind(label), "", label.partition("/")[2]
        if kind == "subscription":
            owner, name = parse_subscription_label(label)
        rows.append(BusyRow(kind=kind, name=name, owner=owner, rates=rates_of(activity, now)))
    return BusiestAnswer(time=at_s(ask.hub.wall.at(now)), rows=rows, next=following)


def _kind(label: str) -> str:
    kind, slash, _ = label.partition("/")
    return kind if slash else "subscription"


STATS_OPERATIONS: Final = (
    Operation(
        name="show_stats",
        tag="statistics",
        method="GET",
        path="/v1/stats",
        summary="Time series of the hub, or of a queue, topic, service or named subscription",
        handler=show_stats,
        query=StatsQuery,
        answer=StatsAnswer,
        needs="principal",
    ),
    Operation(
        name="list_busiest",
        tag="statistics",
        method="GET",
        path="/v1/stats/busiest",
        summary="The busiest queues, topics, services and named subscriptions",
        handler=list_busiest,
        query=BusiestQuery,
        answer=BusiestAnswer,
        needs="principal",
    ),
)
