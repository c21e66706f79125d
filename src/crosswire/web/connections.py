"""Connections over HTTP: list them with what they do, list those that ended, and close one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, Literal

import msgspec

from crosswire.errors import UnknownMessage
from crosswire.gateways.context import ClosedConnection, ConnectedPeer
from crosswire.hub.ledger import Step
from crosswire.server.activity import Activity
from crosswire.web.consumers import SHOWN_WITH_ROW, ConsumerRow, consumer_rows
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import ListQuery, SortKey, page_of
from crosswire.web.times import Moment, at_s
from crosswire.wire.clauses import clause_of

__all__ = ["CONNECTION_OPERATIONS", "find_connection"]


class ConnectionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection and what it does."""

    id: str
    protocol: str
    listener: str
    address: str
    """The peer's address."""
    principal: str
    client: str
    """What the peer calls itself, in MicroMsg2 and eMQP."""
    since: Moment
    """When it connected."""
    consumes: list[ConsumerRow]
    """Up to 20 of its consumers; `/v1/consumers?connection=` lists all."""
    consumer_count: int
    """How many consumers it has."""
    serves: list[str]
    """Up to 20 of the services that it provides; `/v1/services?connection=` lists all."""
    service_count: int
    """How many services it provides."""
    calls: int
    """Calls of its own that are not answered yet."""
    congested: bool
    """Whether it reads more slowly than the hub sends."""
    received_bytes: int
    sent_bytes: int
    accepted: int
    """Messages that it produced."""
    delivered: int
    """Messages that it got."""
    accepted_per_s: float
    delivered_per_s: float
    silent_s: float
    """The time since something was received from it."""


class ConnectionPage(msgspec.Struct, frozen=True):
    """A page of connections of all protocols but HTTP."""

    connections: list[ConnectionRow]
    next: str
    """The cursor of the next page; empty after the last."""


class ConnectionsQuery(ListQuery, frozen=True, kw_only=True):
    """A page of connections. By default in order of ids; by a number the largest comes first."""

    protocol: str = ""
    """Only connections of this protocol."""
    principal: str | None = None
    """Only connections of this user; empty for peers without identity."""
    contains: str = ""
    """Only connections whose id, address or client contain this."""
    state: Literal["", "congested"] = ""
    """Only connections that read more slowly than the hub sends."""
    sort: Literal["id", "age", "received", "sent", "in", "out"] = "id"
    """By what the list is sorted: `received` and `sent` are bytes, `in` and `out` are rates."""


class ClosedConnectionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that has ended, and why."""

    id: str
    protocol: str
    listener: str
    address: str
    principal: str
    client: str
    since: Moment
    """When it connected."""
    ended: Moment
    reason: str
    """Why it ended."""
    clause: str
    """The clause of the specification, or the limit, that its peer broke; empty for none."""
    received_bytes: int
    sent_bytes: int
    accepted: int
    """Messages that it produced."""
    delivered: int
    """Messages that it got."""


class ClosedConnectionPage(msgspec.Struct, frozen=True):
    """A page of the last 1,000 connections that ended."""

    connections: list[ClosedConnectionRow]
    next: str
    """The cursor of the next page; empty after the last."""


class ClosedQuery(ListQuery, frozen=True, kw_only=True):
    """A page of connections that ended, by default the last one first."""

    protocol: str = ""
    """Only connections of this protocol."""
    contains: str = ""
    """Only connections whose id, address, client or reason contain this."""
    sort: Literal["ended", "lasted", "received", "sent"] = "ended"
    """By what the list is sorted, the largest first: `lasted` is a time, `received` and `sent` are
    bytes."""


class Closed(msgspec.Struct, frozen=True):
    """The id of the connection."""

    closed: str


def _may_see(ask: OperationRequest, principal: str) -> bool:
    return ask.is_observer or principal == ask.principal


async def list_connections(ask: OperationRequest) -> ConnectionPage:
    """A page of connections, with what they consume and serve: of all for observers, their own for
    others."""
    query: ConnectionsQuery = ask.query

    def key(gateway: ConnectedPeer) -> SortKey | None:
        texts = (gateway.id, gateway.address, gateway.client_name)
        if (
            query.protocol not in ("", gateway.protocol)
            or (query.principal is not None and query.principal != gateway.principal)
            or not _may_see(ask, gateway.principal)
            or not any(query.contains in text for text in texts)
            or (query.state == "congested" and not gateway.session.congested)
        ):
            return None
        return -_sort_value(ask, gateway, query.sort), gateway.id

    async with ask.work.turn() as turn:
        gateways = list(ask.server.context.gateways.values())
        page, following = await page_of(gateways, key, query, turn)
        rows = []
        for gateway in page:
            rows.append(_connection(ask, gateway))
            await turn.pause()
    return ConnectionPage(rows, following)


def _sort_value(ask: OperationRequest, gateway: ConnectedPeer, sort: str) -> float:
    if sort == "id":
        return 0.0
    if sort == "age":
        return -gateway.since
    if sort == "received":
        return gateway.session.received_bytes
    if sort == "sent":
        return gateway.session.sent_bytes
    activity = ask.server.metrics.connections.get(gateway.id)
    if activity is None:
        return 0.0
    return activity.rate(ask.now(), Step.ACCEPTED if sort == "in" else Step.DELIVERED)


def _connection(ask: OperationRequest, gateway: ConnectedPeer) -> ConnectionRow:
    now = ask.now()
    activity = ask.server.metrics.connections.get(gateway.id) or Activity(now)
    session = gateway.session
    services = (name for each in gateway.providers for name in each.names)
    return ConnectionRow(
        id=gateway.id,
        protocol=gateway.protocol,
        listener=gateway.listener,
        address=gateway.address,
        principal=gateway.principal,
        client=gateway.client_name,
        since=at_s(gateway.hub.wall.at(gateway.since)),
        consumes=consumer_rows(gateway.attachments),
        consumer_count=len(gateway.attachments),
        serves=sorted(islice(services, SHOWN_WITH_ROW)),
        service_count=sum(len(each.names) for each in gateway.providers),
        calls=len(gateway.calls),
        congested=session.congested,
        received_bytes=session.received_bytes,
        sent_bytes=session.sent_bytes,
        accepted=activity.total(Step.ACCEPTED),
        delivered=activity.total(Step.DELIVERED),
        accepted_per_s=round(activity.rate(now, Step.ACCEPTED), 3),
        delivered_per_s=round(activity.rate(now, Step.DELIVERED), 3),
        silent_s=round(session.silent_s(), 3),
    )


def show_connection(ask: OperationRequest) -> ConnectionRow:
    """A connection. Raises UnknownMessage, also for one of another user."""
    return _connection(ask, find_connection(ask, ask.path["id"]))


def find_connection(ask: OperationRequest, identifier: str) -> ConnectedPeer:
    """A connection that the principal may know of. Raises UnknownMessage."""
    gateway = ask.server.context.gateways.get(identifier)
    if gateway is None or not _may_see(ask, gateway.principal):
        raise UnknownMessage(f"there is no connection {identifier!r}")
    return gateway


async def list_closed_connections(ask: OperationRequest) -> ClosedConnectionPage:
    """A page of connections that ended: of all for observers, their own for others."""
    query: ClosedQuery = ask.query

    def key(closed: ClosedConnection) -> SortKey | None:
        texts = (closed.id, closed.address, closed.client, closed.reason)
        if (
            query.protocol not in ("", closed.protocol)
            or not _may_see(ask, closed.principal)
            or not any(query.contains in text for text in texts)
        ):
            return None
        return -_CLOSED_SORTS[query.sort](closed), closed.id

    async with ask.work.turn() as turn:
        page, following = await page_of(list(ask.server.context.closed), key, query, turn)
    return ClosedConnectionPage([_closed(ask, each) for each in page], following)


_CLOSED_SORTS: Final[dict[str, Callable[[ClosedConnection], float]]] = {
    "ended": lambda closed: closed.ended,
    "lasted": lambda closed: closed.ended - closed.since,
    "received": lambda closed: closed.received_bytes,
    "sent": lambda closed: closed.sent_bytes,
}


def _closed(ask: OperationRequest, closed: ClosedConnection) -> ClosedConnectionRow:
    activity = ask.server.metrics.connections.get(closed.id) or Activity(closed.ended)
    wall = ask.hub.wall
    clause = clause_of(closed.protocol, closed.reason)
    return ClosedConnectionRow(
        id=closed.id,
        protocol=closed.protocol,
        listener=closed.listener,
        address=closed.address,
        principal=closed.principal,
        client=closed.client,
        since=at_s(wall.at(closed.since)),
        ended=at_s(wall.at(closed.ended)),
        reason=closed.reason,
        clause="" if clause is None else clause.title,
        received_bytes=closed.received_bytes,
        sent_bytes=closed.sent_bytes,
        accepted=activity.total(Step.ACCEPTED),
        delivered=activity.total(Step.DELIVERED),
    )


def close_connection(ask: OperationRequest) -> Closed:
    """Close a connection with its protocol's goodbye; messages that it holds are redelivered.

    Raises UnknownMessage.
    """
    name: str = ask.path["id"]
    gateway = ask.server.context.gateways.get(name)
    by = f"closed by {ask.principal}" if ask.principal else "closed by an administrator"
    if gateway is None or not gateway.disconnect(by):
        raise UnknownMessage(f"there is no connection {name!r}")
    return Closed(name)


CONNECTION_OPERATIONS: Final = (
    Operation(
        name="list_connections",
        tag="connections",
        method="GET",
        path="/v1/connections",
        summary="Connections, with what they consume and serve, their rates and bytes",
        handler=list_connections,
        query=ConnectionsQuery,
        answer=ConnectionPage,
        needs="principal",
    ),
    Operation(
        name="list_closed_connections",
        tag="connections",
        method="GET",
        path="/v1/connections/closed",
        summary="The last 1,000 connections that ended, and why",
        handler=list_closed_connections,
        query=ClosedQuery,
        answer=ClosedConnectionPage,
        needs="principal",
    ),
    Operation(
        name="show_connection",
        tag="connections",
        method="GET",
        path="/v1/connections/{id}",
        summary="A connection",
        handler=show_connection,
        answer=ConnectionRow,
        needs="principal",
    ),
    Operation(
        name="close_connection",
        tag="connections",
        method="DELETE",
        path="/v1/connections/{id}",
        summary="Close a connection, with its protocol's goodbye",
        handler=close_connection,
        answer=Closed,
    ),
)
