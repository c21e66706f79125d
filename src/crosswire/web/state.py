"""Overview of the hub over HTTP."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Final, Literal

import msgspec

from crosswire import __version__
from crosswire.commitlog.records import Takeover
from crosswire.errors import HubError
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import Step
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.times import Moment, at_s

__all__ = ["STATE_OPERATIONS", "HubState", "Removed", "stopped_titles"]

_REPORTS: Final = 20
_STOPPED: Final = 100
_COUNTED: Final = 256
"""Connections that are counted before it is checked whether the turn is over."""


class StoreState(msgspec.Struct, frozen=True):
    """The store."""

    groups: int
    """Commit groups since the start."""
    newest_id: int
    """The newest id of a message."""
    ledger_rows: int
    """All rows of the ledger that were ever written."""
    has_room: bool
    """Whether messages are accepted."""
    error: str
    """The reason if the last write failed."""
    damaged_ranges: int
    """Ranges of the store's files that can't be read."""


class HubState(msgspec.Struct, frozen=True):
    """Overview of the hub. A standby counts what it has applied, and has no connections, services
    or rates."""

    version: str
    node: str
    """The name of the hub's data: ids of messages are unique with it."""
    role: Literal["leader", "standby"]
    """`leader` without replicas."""
    leader: str
    """The name of the replica that leads; empty without replicas."""
    leader_address: str
    applied: int
    """The last record of the log in its store; 0 without replicas."""
    lag: int
    """How many records the newest that is known here is ahead of that."""
    time: Moment
    """The hub's time now."""
    started: Moment
    uptime_s: float
    draining: bool
    """Whether it is about to stop."""
    open: bool
    """Whether no user is configured: everybody who can connect may do everything."""
    listen: dict[str, str]
    """The addresses of its listeners, by their names."""
    connections: dict[str, int]
    """Open connections, by protocol."""
    connections_limit: int
    """Of all protocols but HTTP; below the configured one if too few files may be open."""
    memory_bytes: int
    """What peers cause the hub to hold in memory, of at most `memory_limit_bytes`."""
    memory_limit_bytes: int
    queues: int
    topics: int
    subscriptions: int
    services: int
    schedules: int
    messages: int
    """Messages in queues that are not settled, without dead letters."""
    dead_letters: int
    """Messages in all queues of dead letters."""
    accepted_per_s: float
    """Messages accepted per second, over the last five to ten seconds."""
    delivered_per_s: float
    settled_per_s: float
    store: StoreState
    leftovers: dict[str, int]
    """What was still held for disconnected peers, and released, by kind."""
    reports: list[str]
    """The latest errors."""
    damaged: bool
    """Until it is acknowledged: see `/v1/damage`."""
    damage: list[str]
    """What of the store is damaged, and not acknowledged."""
    stopped: list[str]
    """Up to 100 queues and subscriptions that deliver nothing, as their cursor is damaged."""
    waiting_for_restart: list[str]
    """Settings that were changed and take effect after a restart."""


async def show_state(ask: OperationRequest) -> HubState:
    """Counts and errors of the whole hub. Raises NotLeading on a standby without data."""
    server, hub, replica = ask.server, ask.hub, ask.server.replica
    totals = await ask.work.totals(server)
    leader = Takeover("") if replica is None else replica.succession.leader
    connections: Counter[str] = Counter()
    async with ask.work.turn() as turn:
        for number, each in enumerate(list(server.context.gateways.values())):
            connections[each.protocol] += 1
            if not number % _COUNTED:
                await turn.pause()
    store, now = hub.store, ask.now()
    total, started_at = ask.metrics.total, server.started_at or server.opened_at
    return HubState(
        version=__version__,
        node=hub.node,
        role="leader" if server.is_leading else "standby",
        leader=leader.replica,
        leader_address=leader.address,
        applied=0 if replica is None else replica.store.position.number,
        lag=0 if replica is None else replica.lag,
        time=at_s(hub.wall.at(now)),
        started=at_s(started_at),
        uptime_s=max(now - started_at, 0.0),
        draining=server.context.draining,
        open=server.context.access.open,
        listen={name: str(each.address) for name, each in server.listeners.items()},
        connections=dict(connections),
        connections_limit=server.context.connection_slots.most,
        memory_bytes=server.context.budget.held_bytes,
        memory_limit_bytes=server.context.budget.limit_bytes,
        queues=totals.queues,
        topics=len(hub.topics_by_name()),
        subscriptions=hub.subscriptions.count,
        services=hub.services.count,
        schedules=hub.schedules.count,
        messages=totals.messages,
        dead_letters=totals.dead_letters,
        accepted_per_s=round(total.rate(now, Step.ACCEPTED), 3),
        delivered_per_s=round(total.rate(now, Step.DELIVERED), 3),
        settled_per_s=round(total.rate(now, Step.SETTLED), 3),
        store=StoreState(
            groups=store.groups,
            newest_id=store.newest_id,
            ledger_rows=store.next_row - 1,
            has_room=store.has_room(now),
            error="" if store.last_error is None else ask.shown_text(str(store.last_error)),
            damaged_ranges=store.unreadable_ranges,
        ),
        leftovers=dict(server.leftovers.healed) if server.is_leading else {},
        reports=[ask.shown_text(_report(error)) for error in hub.reports[-_REPORTS:]],
        damaged=bool(store.damages.entries),
        damage=[ask.shown_text(each.detail) for each in store.damages.entries[-_REPORTS:]],
        stopped=stopped_titles(hub),
        waiting_for_restart=server.waiting_for_restart,
    )


def stopped_titles(hub: Hub) -> list[str]:
    """Queues and subscriptions that deliver nothing: `/v1/queues?state=stopped` lists all."""
    return [each.title for each in islice(hub.stopped(), _STOPPED)]


def _report(error: HubError) -> str:
    return f"{type(error).__name__}: {error}"


class Removed(msgspec.Struct, frozen=True):
    """What was removed."""

    removed: str
    """Its name or id."""


STATE_OPERATIONS: Final = (
    Operation(
        name="show_state",
        tag="hub",
        method="GET",
        path="/v1/state",
        summary="Overview of the hub",
        handler=show_state,
        answer=HubState,
        needs="observe",
        on_standby=True,
    ),
)
