"""Who a request comes from, and which hub answers it: what a console shows first."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from crosswire import __version__
from crosswire.web.contract import Operation, OperationRequest

__all__ = ["SESSION_OPERATIONS"]


class WebSession(msgspec.Struct, frozen=True, kw_only=True):
    """The user of the request, and the part of the hub that answers it."""

    user: str
    """The name of the user; empty without users."""
    open: bool
    """Whether no user is configured: everybody who can connect may do everything."""
    observe: bool
    """Whether the user may see state, names, counts and metadata of everything."""
    administer: bool
    """Whether the user may do everything that the API offers."""
    role: Literal["leader", "standby"]
    """A standby answers what only reads, from what it has applied."""
    node: str
    """The name of the hub's data; empty on a standby that has none yet."""
    leader: str
    """The name of the replica that leads; empty without replicas."""
    leader_address: str
    """Where the leader serves HTTP."""
    version: str


def show_session(ask: OperationRequest) -> WebSession:
    """The user that the token or certificate of the request identifies; on a standby, too."""
    server = ask.server
    node = leader = address = ""
    if server.replica is not None:
        known = server.replica.succession.leader
        leader, address, node = known.replica, known.address, server.replica.store.node
    if server.is_leading:
        node = server.hub.node
    return WebSession(
        user=ask.principal,
        open=server.context.access.open,
        observe=ask.is_observer,
        administer=ask.is_administrator,
        role="leader" if server.is_leading else "standby",
        node=node,
        leader=leader,
        leader_address=address,
        version=__version__,
    )


SESSION_OPERATIONS: Final = (
    Operation(
        name="show_session",
        tag="users",
        method="GET",
        path="/v1/session",
        summary="The user of the request, its rights to the hub, and whether this hub leads",
        handler=show_session,
        answer=WebSession,
        needs="principal",
        on_standby=True,
    ),
)
