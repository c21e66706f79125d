"""Topics over HTTP: list, show and delete them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from crosswire.envelope import Envelope
from crosswire.errors import RecordDamaged, UnknownMessage
from crosswire.hub.ledger import Step
from crosswire.hub.policies import TopicPolicy
from crosswire.hub.subscriptions import Subscription
from crosswire.hub.topics import Topic
from crosswire.store.contract import Page
from crosswire.web.consumers import (
    SHOWN_WITH_ROW,
    FlowRates,
    flow_of,
    is_own_or_observed,
)
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.messages import SHOWN_BYTES, JsonMessage, show_message
from crosswire.web.paging import NameQuery, page_of_names
from crosswire.web.queues import Peek, delete_destination
from crosswire.web.state import Removed

__all__ = ["TOPIC_OPERATIONS"]

_KIND: Final = "topic/"


class TopicsQuery(NameQuery, frozen=True, kw_only=True):
    """A page of topics. By default in order of names; by a number the largest comes first."""

    sort: Literal["name", "published", "in", "out", "subscribers"] = "name"
    """By what the list is sorted: `in` and `out` are rates."""


class TopicFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A topic and who subscribed to it."""

    name: str
    durable: bool
    """Whether its messages are stored."""
    published: int
    """Messages since the hub was started."""
    subscribers: int
    """Those without a name: they get messages while they are connected."""
    subscriptions: list[str]
    """Up to 20 names of named subscriptions; `/v1/subscriptions?topic=` lists all. Who may not
    observe sees its own."""
    subscription_count: int
    """How many named subscriptions it has, or how many of one's own."""
    rates: FlowRates


class TopicRow(TopicFacts, frozen=True, kw_only=True):
    """A topic and who subscribed to it."""


class TopicPage(msgspec.Struct, frozen=True):
    """A page of topics."""

    topics: list[TopicRow]
    next: str
    """The cursor of the next page; empty after the last."""


class TopicDetail(TopicFacts, frozen=True, kw_only=True):
    """A topic with its policy and the requested messages."""

    reclaimed: int
    """Messages with ids up to this one were deleted by retention."""
    policy: TopicPolicy
    messages: list[JsonMessage]
    next: str
    """`after` of the request for the next messages; empty after the last."""


async def list_topics(ask: OperationRequest) -> TopicPage:
    """A page of topics: of all for observers, of those that they have a right to for others."""
    query: TopicsQuery = ask.query

    def keep(names: list[str]) -> list[str]:
        if query.contains:
            names = [each for each in names if each.find(query.contains, len(_KIND)) >= 0]
        return names if ask.is_observer else [each for each in names if ask.may_see(each)]

    def values(names: list[str]) -> list[float]:
        topics = ask.hub.topics_by_name()
        return [
            0.0 if (topic := topics.get(name)) is None else _sort_value(ask, topic, query.sort)
            for name in names
        ]

    async with ask.work.turn() as turn:
        names = await ask.work.index.names(ask.hub, "topic", turn)
        page, following = await page_of_names(
            names,
            query,
            turn,
            prefix=_KIND,
            keep=keep,
            values=None if query.sort == "name" else values,
        )
        rows = []
        for name in page:
            topic = ask.hub.topics_by_name().get(name)
            if topic is not None:
                rows.append(_row(ask, topic))
            await turn.pause()
    return TopicPage(rows, following)


def _sort_value(ask: OperationRequest, topic: Topic, sort: str) -> float:
    if sort == "published":
        return topic.published
    if sort == "subscribers":
        audience = ask.hub.subscriptions.audience(topic)
        return len(audience.subscribers) + len(audience.subscriptions)
    activity = ask.metrics.destinations.get(topic.destination)
    if activity is None:
        return 0.0
    return activity.rate(ask.now(), Step.ACCEPTED if sort == "in" else Step.DELIVERED)


def _row(ask: OperationRequest, topic: Topic) -> TopicRow:
    audience = ask.hub.subscriptions.audience(topic)
    names = _visible_names(ask, audience.subscriptions)
    return TopicRow(
        name=topic.name,
        durable=topic.policy.durable,
        published=topic.published,
        subscribers=len(audience.subscribers),
        subscriptions=names[:SHOWN_WITH_ROW],
        subscription_count=len(names),
        rates=flow_of(ask, topic.destination),
    )


def _visible_names(ask: OperationRequest, subscriptions: Iterable[Subscription]) -> list[str]:
    return [each.name for each in subscriptions if is_own_or_observed(ask, each.owner)]


async def show_topic(ask: OperationRequest) -> TopicDetail:
    """A topic and some of its stored messages. Raises Forbidden, UnknownMessage."""
    hub, peek = ask.hub, ask.query
    destination = f"topic/{ask.path['name']}"
    ask.require_sight(destination)
    if peek.messages:
        ask.require_content(destination)
    topic = hub.topics_by_name().get(destination)
    if topic is None:
        raise UnknownMessage(f"there is no topic {ask.path['name']!r}")
    found: list[Envelope] = []
    last = upto = hub.committed_id

    def decode(page: Page) -> None:
        nonlocal last
        last = page.last
        for number, identifier, record in page.records:
            try:
                found.append(hub.damage.decode(number, identifier, record))
            except RecordDamaged as error:
                hub.damage.set_aside(number, identifier, record, error)

    if peek.messages:
        after = max(peek.after, topic.reclaimed)
        hub.store.read(
            [topic.number],
            after=after,
            upto=upto,
            count=peek.messages + 1,
            size_bytes=SHOWN_BYTES,
            done=decode,
        )
    shown = found[: peek.messages]
    messages = []
    async with ask.work.turn() as turn:
        for envelope in shown:
            messages.append(show_message(envelope))
            await turn.pause()
    return TopicDetail(
        **msgspec.structs.asdict(_row(ask, topic)),
        reclaimed=topic.reclaimed,
        policy=topic.policy,
        messages=messages,
        next=str(shown[-1].id) if shown and (len(found) > len(shown) or last < upto) else "",
    )


async def delete_topic(ask: OperationRequest) -> Removed:
    """Delete a topic; answered after the commit. Raises UnknownMessage, and DestinationInUse while
    it has messages or subscriptions, or is configured."""
    return await delete_destination(ask, "topic")


TOPIC_OPERATIONS: Final = (
    Operation(
        name="list_topics",
        tag="topics",
        method="GET",
        path="/v1/topics",
        summary="Topics, with their rates and subscriptions",
        handler=list_topics,
        query=TopicsQuery,
        answer=TopicPage,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="show_topic",
        tag="topics",
        method="GET",
        path="/v1/topics/{name:path}",
        summary="A topic and, if requested, some of its stored messages",
        handler=show_topic,
        query=Peek,
        answer=TopicDetail,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="delete_topic",
        tag="topics",
        method="DELETE",
        path="/v1/topics/{name:path}",
        summary="Delete a topic that has no messages, subscriptions, schedules or configuration",
        handler=delete_topic,
        answer=Removed,
    ),
)
