"""Whether the hub is ready, for load balancers, and what operators should know."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from crosswire.errors import StoreFailed
from crosswire.server.server import Server
from crosswire.server.watchdog import LATE_S

__all__ = ["readiness"]

_DAMAGE: Final = 20
_LAG_S: Final = 1.0


def readiness(server: Server) -> tuple[int, dict[str, object]]:
    """The status of `/readyz` and its body: why the hub is not ready, notes and damage."""
    if not server.is_leading:
        return 503, _standby(server)
    context, store = server.context, server.hub.store
    reasons = []
    if context.draining:
        reasons.append("draining")
    obstacle = store.obstacle(context.now())
    if obstacle is not None:
        reason = str(obstacle)
        if isinstance(obstacle, StoreFailed):
            reason = f"{obstacle}: {store.last_error}"
        reasons.append(reason)
    if not server.started_at:
        reasons.append("starting")
    reasons += _late(server)
    # Damage does not make the hub unready: everything that is intact is served.
    damage = [each.detail for each in store.damages.entries[-_DAMAGE:]]
    status = "not ready" if reasons else "damaged" if damage else "ready"
    answer: dict[str, object] = {
        "status": status,
        "reasons": reasons,
        "notes": _notes(server),
    }
    if damage:
        answer["damage"] = damage
    return 503 if reasons else 200, answer


def _standby(server: Server) -> dict[str, object]:
    """Not ready, so that load balancers use the leader."""
    if server.replica is None:
        return {"status": "not ready", "reasons": ["starting"], "notes": []}
    replica = server.replica
    reasons = []
    if server.context.draining:
        reasons.append("draining")
    if replica.trouble:
        reasons.append(f"the log does not answer: {replica.trouble}")
    if replica.fault():
        reasons.append(f"it must not lead: {replica.fault()}")
    leader = replica.succession.leader
    return {
        "status": f"standby of {replica.store.node or 'a hub'}",
        "reasons": reasons,
        "notes": replica.alarms(),
        "leader": {"name": leader.replica, "address": leader.address},
    }


def _late(server: Server) -> list[str]:
    """Reasons why schedules, deadlines, leases and retries are late."""
    silent_s, late_s = server.watchdog.silent_s(), server.timekeeper.late_s()
    reasons = []
    if silent_s > LATE_S:
        reasons.append(f"timers have not run for {silent_s:.1f} s")
    if server.started_at and late_s > LATE_S:
        reasons.append(f"timers are late by {late_s:.1f} s")
    return reasons


def _notes(server: Server) -> list[str]:
    """Notes for operators, which don't make the hub unready."""
    wall, now = server.hub.wall, server.context.now()
    notes = [] if server.replica is None else server.replica.alarms()
    if wall.last_jump is not None:
        at, seconds = wall.last_jump
        when = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        notes.append(f"the system's clock jumped by {seconds:+.0f} s at {when}")
    held_s = wall.held_s(now)
    if held_s:
        notes.append(f"retention by age is {wall.lag_s:.0f} s late for another {held_s:.0f} s")
    worst_s = server.watchdog.worst_lag_s()
    if worst_s > _LAG_S:
        notes.append(f"the event loop was {worst_s:.1f} s late within the last minute")
    return notes
