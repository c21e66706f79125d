"""eMQP's gateway for administration: status reports, and stopping the eMQP side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from crosswire.gateways.emqp.broker import Broker
from crosswire.gateways.emqp.gateway import EmqpGateway
from crosswire.gateways.emqp.messages import encode
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import AdminRequested, ShutdownRequested

__all__ = ["AdminGateway"]


class AdminGateway(EmqpGateway):
    """An administrator; once users are configured, one with the right to administer."""

    def act(self, event: Event) -> None:
        """Answer a command, or stop the eMQP side."""
        if not isinstance(event, AdminRequested | ShutdownRequested):
            super().act(event)
        elif not self.context.access.may_administer(self.principal):
            self.context.count("forbidden", self.protocol)
        elif isinstance(event, ShutdownRequested):
            self.connection.send_ack(event.msgid)
            self.broker.stop()
        else:
            self._answer_command(event.command)

    def _answer_command(self, command: str) -> None:
        report = _REPORTS.get(command)
        if report is not None:
            self.connection.send_answer(report(self.broker))


def _status(broker: Broker) -> bytes:
    """Jobs under way, waiting and processed, by queue and by worker."""
    now = broker.context.now()
    since: dict[str, list[float]] = {}
    for worker in broker.workers:
        for job in worker.jobs():
            since.setdefault(job.queue, []).append(now - job.since)
    waiting = {}
    known = broker.hub.store.destinations()
    for destination in broker.requested | {f"queue/{name}" for name in broker.named}:
        if destination not in known:
            continue
        queue = broker.hub.queue(destination)
        length = queue.length - sum(len(each.held) for each in queue.consumers)
        if length > 0:
            waiting[queue.name] = length
    return encode(
        {
            "inflight_messages_by_queue": {name: len(each) for name, each in since.items()},
            "latency_messages_by_queue": {
                name: int(1000 * sum(each) / len(each)) for name, each in since.items()
            },
            "max_latency_messages_by_queue": {
                name: int(1000 * max(each)) for name, each in since.items()
            },
            "waiting_messages_by_queue": waiting,
            "processed_messages_by_queue": broker.processed,
            "processed_messages_by_worker": {
                worker.name: worker.processed for worker in broker.workers
            },
        }
    )


def _workers_status(broker: Broker) -> bytes:
    """Workers with their queues, and queues with their workers, heaviest first."""
    workers: dict[str, Any] = {}
    queues: dict[str, list[tuple[int, str]]] = {}
    for worker in broker.workers:
        workers[worker.name] = {
            "queues": worker.queues,
            "hb": worker.connection.last_received_at,
            "available_slots": max(worker.connection.free_slots, 0),
        }
        for weight, queue in worker.queues:
            queues.setdefault(queue, []).append((weight, worker.name))
    for each in queues.values():
        each.sort(key=lambda pair: -pair[0])
    return encode({"connected_workers": workers, "connected_queues": queues})


def _schedulers_status(broker: Broker) -> bytes:
    """External schedulers."""
    known = {each.name: {"hb": each.connection.last_received_at} for each in broker.schedulers}
    return encode({"connected_schedulers": known})


_REPORTS: Final[dict[str, Callable[[Broker], bytes]]] = {
    "STATUS": _status,
    "ROUTER_SHOW_WORKERS": _workers_status,
    "ROUTER_SHOW_SCHEDULERS": _schedulers_status,
}
"""Reports by command; any other command is not answered."""
