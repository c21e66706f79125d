"""Connections over HTTP: list them, close one."""

from __future__ import annotations

from typing import Any

import msgspec

from crosswire.errors import UnknownMessage
from crosswire.gateways.context import ConnectedPeer
from crosswire.hub.attachment import Attachment, Consumer
from crosswire.web.contract import OperationRequest
from crosswire.web.numbers import Many

__all__ = ["Closed", "ConnectionList", "ConnectionsQuery", "close_connection", "list_connections"]


class SubscribedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A destination that a connection consumes; `free` is the rest of its window."""

    destination: str
    held: int
    free: int


class ConnectionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection; `since` is in seconds since 1970, `calls` are those without a response yet.

    A `congested` one reads more slowly than the hub sends."""

    id: str
    protocol: str
    listener: str
    address: str
    principal: str
    since: float
    consumes: list[SubscribedRow]
    serves: list[str]
    calls: int
    congested: bool


class ConnectionList(msgspec.Struct, frozen=True):
    """Connections of all protocols but HTTP."""

    connections: list[ConnectionRow]


class ConnectionsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Connections of one `protocol`, or of all."""

    protocol: str = ""
    limit: Many = 1000


class Closed(msgspec.Struct, frozen=True):
    """The id of the connection."""

    closed: str


async def list_connections(ask: OperationRequest) -> ConnectionList:
    """Connections, with what they consume and serve: all of them for observers, their own for
    others."""
    query: ConnectionsQuery = ask.query
    is_observer = ask.is_observer
    gateways = [
        each
        for each in ask.server.context.gateways.values()
        if query.protocol in ("", each.protocol)
        and (is_observer or each.principal == ask.principal)
    ]
    rows = []
    async with ask.work.turn() as turn:
        for gateway in gateways[: query.limit]:
            rows.append(_connection(gateway))
            await turn.pause()
    return ConnectionList(rows)


def _connection(gateway: ConnectedPeer) -> ConnectionRow:
    return ConnectionRow(
        id=gateway.id,
        protocol=gateway.protocol,
        listener=gateway.listener,
        address=gateway.address,
        principal=gateway.principal,
        since=gateway.hub.wall.at(gateway.since),
        consumes=[_taking(each) for each in gateway.attachments],
        serves=sorted(name for each in gateway.providers for name in each.names),
        calls=len(gateway.calls),
        congested=gateway.session.congested,
    )


def _taking(attachment: Attachment) -> SubscribedRow:
    held: Any = attachment.held if isinstance(attachment, Consumer) else ()
    return SubscribedRow(
        destination=attachment.destination, held=len(held), free=max(attachment.window.free, 0)
    )


def close_connection(ask: OperationRequest) -> Closed:
    """Close a connection with its protocol's goodbye; messages that it holds are redelivered.

    Raises UnknownMessage.
    """
    name: str = ask.path["id"]
    gateway = ask.server.context.gateways.get(name)
    if gateway is None or not gateway.disconnect():
        raise UnknownMessage(f"there is no connection {name!r}")
    return Closed(name)
