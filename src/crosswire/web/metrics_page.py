"""The page that Prometheus reads: counters and histograms of the hub, and gauges."""

from __future__ import annotations

import resource

from crosswire.server.metrics import render
from crosswire.server.server import Server
from crosswire.server.succession import Role, are_here
from crosswire.server.watchdog import LATE_S
from crosswire.web.long_work import LongWork, QueueTotals

__all__ = ["metrics_page"]


async def metrics_page(server: Server, work: LongWork) -> str:
    """All metrics as text. On a standby those of the replica only."""
    if not server.is_leading:
        return render(None, server.context.counters, _replica_gauges(server), {})
    totals = await work.totals(server)
    watchdog, metrics = server.watchdog, server.metrics
    histograms = {
        "crosswire_loop_lag_seconds": ("Delay of timer runs.", watchdog.lag),
        "crosswire_loop_turn_seconds": (
            "For how long turns of the event loop kept its thread busy.",
            watchdog.turns,
        ),
        "crosswire_disk_wait_seconds": (
            "For how long the event loop waited for the disk.",
            metrics.disk_waits,
        ),
    }
    return render(metrics, server.context.counters, _gauges(server, totals), histograms)


def _gauges(server: Server, totals: QueueTotals) -> dict[str, tuple[str, float]]:
    hub, context = server.hub, server.context
    watchdog = server.watchdog
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **_replica_gauges(server),
        "crosswire_connections": (
            "Open connections of all protocols but HTTP.",
            len(context.gateways),
        ),
        "crosswire_connections_limit": (
            "Connections that the hub has room for.",
            context.connection_slots.most,
        ),
        "crosswire_connections_unidentified": (
            "Connections whose peer has not identified itself.",
            len(context.newcomers),
        ),
        "crosswire_connections_http": ("Open HTTP connections.", len(context.http_slots)),
        "crosswire_memory_bytes": (
            "What peers cause the hub to hold in memory.",
            context.budget.held_bytes,
        ),
        "crosswire_memory_limit_bytes": ("The limit of it.", context.budget.limit_bytes),
        "crosswire_memory_restrained": (
            "Peers that are not read from, because memory is short.",
            context.budget.restrained,
        ),
        "crosswire_windows_bytes": (
            "Messages of queues and subscriptions in memory.",
            hub.windows.held_bytes,
        ),
        "crosswire_addresses_refused": (
            "Addresses with failed sign-ins within ten minutes.",
            len(context.sign_ins),
        ),
        "crosswire_queues": ("Queues, including those of dead letters.", totals.queues),
        "crosswire_queue_messages": ("Unsettled messages in queues.", totals.messages),
        "crosswire_queue_bytes": ("Size of unsettled messages in queues.", totals.size_bytes),
        "crosswire_dead_letters": ("Messages in queues of dead letters.", totals.dead_letters),
        "crosswire_topics": ("Topics.", len(hub.topics_by_name())),
        "crosswire_subscriptions": ("Named subscriptions.", hub.subscriptions.count),
        "crosswire_services": ("Services with a provider.", hub.services.count),
        "crosswire_schedules": ("Schedules.", hub.schedules.count),
        "crosswire_staged_attempts": (
            "Staged attempts of batches that are not committed.",
            hub.staging.attempts,
        ),
        "crosswire_staged_bytes": ("Size of staged attempts.", hub.staging.staged_bytes),
        "crosswire_newest_id": ("The newest message id.", hub.store.newest_id),
        "crosswire_store_damaged": (
            "Damage entries that are not acknowledged.",
            len(hub.store.damages.entries),
        ),
        "crosswire_store_healthy": (
            "1 if the last write succeeded.",
            hub.store.last_error is None,
        ),
        "crosswire_draining": ("1 while the hub drains.", context.draining),
        "crosswire_uptime_seconds": (
            "Time since the start.",
            context.now() - server.started_at,
        ),
        "crosswire_loop_lag_worst_seconds": (
            "Largest delay of a timer run within a minute.",
            watchdog.worst_lag_s(),
        ),
        "crosswire_loop_blocked_total": (
            f"Times that the event loop was blocked for {LATE_S:g} s.",
            watchdog.blocked,
        ),
        "crosswire_timers_late_seconds": (
            "How long the next deadline has been overdue.",
            server.timekeeper.late_s(),
        ),
        "crosswire_timers_failed_total": (
            "Timers that raised.",
            hub.callbacks.failed["timer"],
        ),
        "crosswire_schedules_failed_total": (
            "Fires of schedules that failed.",
            hub.schedules.failed,
        ),
        "crosswire_clock_jumps_forward_total": (
            "Forward jumps of the system clock.",
            hub.wall.forward,
        ),
        "crosswire_clock_jumps_back_total": (
            "Backward jumps of the system clock.",
            hub.wall.backward,
        ),
        "crosswire_retention_lag_seconds": (
            "Delay of retention by age.",
            hub.wall.lag_s,
        ),
        "process_cpu_seconds_total": ("CPU time.", usage.ru_utime + usage.ru_stime),
        "process_resident_memory_max_bytes": ("Peak memory.", usage.ru_maxrss * 1024),
    }


def _replica_gauges(server: Server) -> dict[str, tuple[str, float]]:
    replica = server.replica
    if replica is None:
        return {}
    succession, commits, state = replica.succession, replica.commits, replica.log_state
    here = are_here(replica.replicas)
    applied = replica.store.position.number
    newest = max([applied, *(each.synced for each in here)])
    gauges: dict[str, tuple[str, float]] = {
        "crosswire_replica_leading": ("1 on the leader.", succession.role is Role.LEADER),
        "crosswire_replica_term": ("Number of the leader's takeover.", succession.term),
        "crosswire_replica_takeovers_total": (
            "How many times this replica began to lead.",
            succession.takeovers,
        ),
        "crosswire_replica_applied": ("The last record in this store.", applied),
        "crosswire_replica_lag_records": (
            "Records that another replica has on its disk, and this one has not applied.",
            newest - applied,
        ),
        "crosswire_replica_copies": ("Replicas that report.", len(here)),
        "crosswire_replica_fit": ("1 if this replica may lead.", not replica.fault()),
        "crosswire_log_answers": ("1 if the log answers.", not replica.trouble),
    }
    if commits is not None:
        gauges["crosswire_log_append_seconds"] = (
            "How long the last append took.",
            commits.last_append_s,
        )
        gauges["crosswire_log_appended_bytes_total"] = (
            "Bytes of groups that this leader appended.",
            commits.appended_bytes,
        )
        gauges["crosswire_log_pending_bytes"] = (
            "Bytes of groups that wait for the log.",
            server.hub.commits.pending_bytes() if server.is_leading else 0,
        )
        gauges["crosswire_calls_unjournaled_total"] = (
            "Requests and responses that were not recorded, because too much waited.",
            server.hub.services.unjournaled if server.is_leading else 0,
        )
    if state is not None:
        gauges["crosswire_log_bytes"] = ("Size of the log.", state.size_bytes)
        gauges["crosswire_log_safe"] = (
            "1 if the log's settings keep what it confirms.",
            not state.unsafe,
        )
    return gauges
