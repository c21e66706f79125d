"""Replicas over HTTP: which one leads, how far the others are, and a planned hand-over."""

from __future__ import annotations

from typing import Final

import msgspec

from crosswire.errors import ConfigError, InvalidEnvelope, UnknownMessage
from crosswire.server.replica import Replica
from crosswire.web.contract import Operation, OperationRequest

__all__ = ["REPLICATION_OPERATIONS"]


class ReplicaRow(msgspec.Struct, frozen=True):
    """A replica as it reported last."""

    name: str
    address: str
    """Where it serves HTTP."""
    role: str
    version: str
    format: int
    """The format of its records."""
    synced: int
    """The last record on its disk."""
    lag: int
    """How many the newest record known here is ahead of that."""
    age_s: float
    """How long ago it reported."""


class ReplicationState(msgspec.Struct, frozen=True):
    """The part of this replica, and all that report."""

    name: str
    role: str
    node: str
    term: int
    """The number of the leader's takeover."""
    leader: str
    """The name of the leader."""
    leader_address: str
    log: str
    """The id of the log."""
    applied: int
    """The last record in its store."""
    takeovers: int
    """How often this replica began to lead."""
    trouble: str
    """Why the log does not answer."""
    fault: str
    """Why this replica must not lead."""
    alarms: list[str]
    """What operators should know."""
    replicas: list[ReplicaRow]


class HandOverRequest(msgspec.Struct, frozen=True):
    """Who takes over."""

    to: str = ""
    """The name of a standby; by default the one with most on its disk."""


class HandedOver(msgspec.Struct, frozen=True):
    """The leader has begun to drain; a standby takes over when it is done."""

    name: str


def _replica(ask: OperationRequest) -> Replica:
    if ask.server.replica is None:
        raise UnknownMessage("this hub has no replicas: its log is local")
    return ask.server.replica


def show_replication(ask: OperationRequest) -> ReplicationState:
    """Roles and positions, on a leader and on a standby alike. Raises UnknownMessage."""
    replica = _replica(ask)
    succession, store = replica.succession, replica.store
    newest = replica.newest
    return ReplicationState(
        name=replica.name,
        role=succession.role,
        node=store.node,
        term=succession.term,
        leader=succession.leader.replica,
        leader_address=succession.leader.address,
        log=store.log_id.hex(),
        applied=store.position.number,
        takeovers=succession.takeovers,
        trouble=replica.trouble,
        fault=replica.fault(),
        alarms=replica.alarms(),
        replicas=[
            ReplicaRow(
                each.name,
                each.address,
                each.role,
                each.version,
                each.format,
                each.synced,
                max(newest - each.synced, 0),
                each.age_s,
            )
            for each in replica.replicas
        ],
    )


def hand_over(ask: OperationRequest) -> HandedOver:
    """Have the leader end its term in order. Raises UnknownMessage, InvalidEnvelope."""
    replica, body = _replica(ask), ask.body
    assert isinstance(body, HandOverRequest)
    try:
        replica.hand_over(body.to)
    except ConfigError as error:
        raise InvalidEnvelope(str(error)) from error
    return HandedOver(replica.name)


REPLICATION_OPERATIONS: Final = (
    Operation(
        name="show_replication",
        tag="hub",
        method="GET",
        path="/v1/replication",
        summary="Role of this replica, its leader, and how far all replicas are",
        handler=show_replication,
        answer=ReplicationState,
        needs="observe",
        on_standby=True,
    ),
    Operation(
        name="hand_over",
        tag="hub",
        method="POST",
        path="/v1/replication/hand-over",
        summary="Have the leader drain and hand over to a standby",
        handler=hand_over,
        body=HandOverRequest,
        answer=HandedOver,
    ),
)
