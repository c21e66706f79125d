"""Consumers over HTTP: those of a queue, of a named subscription or of a connection."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

import msgspec

from crosswire.errors import InvalidEnvelope, UnknownMessage
from crosswire.hub.attachment import Attachment, Consumer
from crosswire.web.connections import find_connection
from crosswire.web.consumers import ConsumerRow, consumer_row, is_own_or_observed
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import ListQuery, SortKey, page_of

__all__ = ["CONSUMER_OPERATIONS"]


class ConsumersQuery(ListQuery, frozen=True, kw_only=True):
    """A page of the consumers of one of these three, in order of connections."""

    queue: str = ""
    """The name of a queue."""
    subscription: str = ""
    """The name of a named subscription."""
    owner: str | None = None
    """The user who owns the subscription; by default the one who asks."""
    connection: str = ""
    """The id of a connection."""
    sort: Literal["connection", "held"] = "connection"
    """By what the list is sorted: `held` shows first who holds most."""


class ConsumerPage(msgspec.Struct, frozen=True):
    """A page of consumers. Who may not observe sees its own."""

    consumers: list[ConsumerRow]
    next: str
    """The cursor of the next page; empty after the last."""


async def list_consumers(ask: OperationRequest) -> ConsumerPage:
    """A page of consumers. Raises InvalidEnvelope, Forbidden and UnknownMessage."""
    query: ConsumersQuery = ask.query

    def key(attachment: Attachment) -> SortKey | None:
        peer = attachment.peer
        if not is_own_or_observed(ask, peer.principal):
            return None
        held = 0
        if query.sort == "held" and isinstance(attachment, Consumer):
            held = len(attachment.held)
        # One connection may consume the same thing twice.
        return -held, f"{peer.connection}\0{attachment.number:020}"

    async with ask.work.turn() as turn:
        page, following = await page_of(list(_chosen(ask)), key, query, turn)
    return ConsumerPage([consumer_row(each) for each in page], following)


def _chosen(ask: OperationRequest) -> Collection[Attachment]:
    query: ConsumersQuery = ask.query
    if sum(map(bool, (query.queue, query.subscription, query.connection))) != 1:
        raise InvalidEnvelope("give one of queue, subscription and connection")
    if query.connection:
        return find_connection(ask, query.connection).attachments
    if query.queue:
        destination = f"queue/{query.queue}"
        ask.require_sight(destination)
        if destination not in ask.hub.store.destinations():
            raise UnknownMessage(f"there is no queue {query.queue!r}")
        return ask.hub.queue(destination).consumers
    owner = ask.principal if query.owner is None else query.owner
    found = None
    if is_own_or_observed(ask, owner):
        found = ask.hub.subscriptions.get(query.subscription, owner)
    if found is None:
        raise UnknownMessage(f"there is no subscription {query.subscription!r}")
    return found.consumers


CONSUMER_OPERATIONS: Final = (
    Operation(
        name="list_consumers",
        tag="connections",
        method="GET",
        path="/v1/consumers",
        summary="The consumers of a queue, of a named subscription or of a connection",
        handler=list_consumers,
        query=ConsumersQuery,
        answer=ConsumerPage,
        needs="principal",
    ),
)
