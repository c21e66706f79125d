"""What all eMQP connections of a hub share: who is who, who works for which queue, and schedules.

A request waits in the queue that it names. While nothing, in any protocol, consumes that queue, the
workers of the default queue stand in for it, unless the configuration says `hold`.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec

from crosswire.envelope import Envelope, parse_stored_destination
from crosswire.errors import InvalidDestination, InvalidSchedule, RecordDamaged, UnknownMessage
from crosswire.gateways.context import Leftover
from crosswire.gateways.emqp.messages import DONE, IDENTITY, MSGID, failure
from crosswire.hub.attachment import Consumer
from crosswire.hub.ledger import Step
from crosswire.hub.queues import Queue
from crosswire.hub.schedules import Schedule, check_cron, check_interval
from crosswire.logs import log_event
from crosswire.wire.emqp.events import ScheduleReceived, UnscheduleReceived
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import schedule_identity
from crosswire.wire.emqp.states import LISTENERS
from crosswire.wire.zmtp.curve import CurveServer, decode_key, encode_key
from crosswire.wire.zmtp.mechanisms import Mechanism
from crosswire.wire.zmtp.routing import Router

if TYPE_CHECKING:
    from crosswire.gateways.context import GatewayContext
    from crosswire.gateways.emqp.gateway import ClientGateway, EmqpGateway
    from crosswire.gateways.emqp.workers import AssignedJob, WorkerGateway

__all__ = ["Broker", "without_times"]

_log = logging.getLogger("crosswire.gateways")

_ASKED: Final = "emqp.asked"
_REMEMBERED: Final = 10_000
_WATCHED: Final = 100_000
_LOOK_S: Final = 1.0
_ONLY_FOR_SCHEDULES: Final = ("nohaste", "run_count", "interval", "cron")

_encode = msgspec.json.Encoder().encode


class Broker:
    """One for each site: `context.shared(Broker)`."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self.hub = context.hub
        self.settings = context.config.emqp
        self.default = f"queue/{self.settings.default_queue}"
        self.mechanism = self._mechanism()
        self.stopping = False
        self._is_arranging = False
        self.routers: dict[str, Router[EmqpGateway]] = {
            name: Router(lambda: secrets.token_bytes(8)) for name in LISTENERS
        }
        self.workers: dict[WorkerGateway, None] = {}
        self.schedulers: dict[ClientGateway, None] = {}
        self.named: Counter[str] = Counter()
        """Queues that workers have named, and how many of them."""
        self.processed: Counter[str] = Counter()
        self._numbers = count(1)
        self._prefix = f"{secrets.token_hex(6)}-"
        self._spellings: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._asked: set[str] = set()
        for key, value in self.hub.store.load(_ASKED):
            try:
                parse_stored_destination(key.decode())
                self._asked.add(key.decode())
            except (UnicodeDecodeError, InvalidDestination) as error:
                damaged = RecordDamaged(f"a queue that was asked for has no name: {error}")
                self.hub.damage.set_aside_state(_ASKED, key, value, damaged)
        self._for_schedulers: OrderedDict[str, ScheduleReceived] = OrderedDict()
        self._returned: OrderedDict[str, Envelope] = OrderedDict()
        self._due: list[tuple[float, int, WorkerGateway, AssignedJob]] = []
        self.hub.consumers_changed.append(self._on_consumers)

    def next_id(self) -> str:
        """An id that no other message has."""
        return f"{self._prefix}{next(self._numbers):x}"

    def _mechanism(self) -> Mechanism | None:
        key = self.settings.curve_secret_key
        if key is None:
            return None
        return CurveServer(decode_key(key), secrets.token_bytes, self._accepts)

    def _accepts(self, public_key: bytes) -> bool:
        access = self.context.access
        return access.open or access.by_curve_key(encode_key(public_key)) is not None

    # Who is who.

    def join(self, gateway: EmqpGateway, identity: bytes) -> bytes:
        """The identity under which a peer can be reached. One that comes back replaces its old
        self; one that claims the name of somebody else's connection counts as nameless."""
        router = self.routers[gateway.listener]
        holder = router.get(identity) if identity else None
        if holder is not None and holder.principal != gateway.principal:
            self.context.count("forbidden", "emqp")
            identity = b""
        identity, replaced = router.join(gateway, identity)
        if replaced is not None and replaced is not gateway:
            replaced.close()
        gateway.wire.goodbye = self._spellings.get((gateway.listener, identity), "KBYE")
        return identity

    def part(self, gateway: EmqpGateway) -> None:
        """The connection is gone. How its peer spells goodbye is kept for when it is back."""
        self.routers[gateway.listener].leave(gateway)
        key = (gateway.listener, gateway.identity)
        if gateway.wire.goodbye != "KBYE" and gateway.identity[:1] not in (b"", b"\0"):
            self._spellings[key] = gateway.wire.goodbye
            self._spellings.move_to_end(key)
            if len(self._spellings) > _REMEMBERED:
                self._spellings.popitem(last=False)

    # What becomes of requests.

    def answer(self, envelope: Envelope, result: bytes) -> None:
        """Hand a result to the client that asked, if it is there; it may have reconnected."""
        self.hub.watched.pop(envelope.id, None)
        native = envelope.native
        if IDENTITY in native and MSGID in native:
            self._answer(native[IDENTITY], envelope.principal, native[MSGID].decode(), result)

    def _answer(self, identity: bytes, principal: str, msgid: str, result: bytes) -> None:
        gateway = self.routers["emqp-clients"].get(identity)
        if gateway is None or gateway.principal != principal or gateway.wire.closed:
            self.context.count("unclaimed", "emqp")
        else:
            gateway.give_result(result, msgid)

    def watch(self, identifier: int, envelope: Envelope) -> None:
        """Its client wants to know the end, and somebody who gives no results may bring it."""
        watched = self.hub.watched
        if len(watched) < _WATCHED:
            identity, msgid = envelope.native[IDENTITY], envelope.native[MSGID].decode()
            watched[identifier] = partial(self._ended, identity, envelope.principal, msgid)

    def _ended(
        self, identity: bytes, principal: str, msgid: str, _identifier: int, error: str
    ) -> None:
        self._answer(identity, principal, msgid, failure(error, 1) if error else DONE)

    # Workers.

    def enlist(self, worker: WorkerGateway) -> None:
        self.workers[worker] = None
        for name in worker.queue_names:
            self.named[name] += 1
        if self.settings.default_queue in worker.queue_names:
            for schedule in self.hub.schedules.all():
                if schedule.envelope.destination in self._asked:
                    self.expect(schedule.envelope.destination)
            self._look_around(self.context.now())

    def dismiss(self, worker: WorkerGateway) -> None:
        """It gets nothing more; what it has it may finish."""
        if worker not in self.workers:
            return
        del self.workers[worker]
        for name in worker.queue_names:
            self.named[name] -= 1
            if not self.named[name]:
                del self.named[name]
            self._on_consumers(self.hub.queue(f"queue/{name}"))

    def _default_workers(self) -> Iterator[WorkerGateway]:
        name = self.settings.default_queue
        return (worker for worker in self.workers if name in worker.queue_names)

    def expect(self, destination: str) -> None:
        """A request for this queue is about to be accepted: somebody should be there for it."""
        if destination not in self._asked:
            self._asked.add(destination)
            self.hub.store.save(_ASKED, destination.encode(), b"")
        if destination != self.default and not self.is_consumed(destination):
            self._stand_in(destination)

    def is_consumed(self, destination: str) -> bool:
        """By anybody who does not merely stand in, or is about to leave?"""
        for consumer in self.hub.queue(destination).consumers:
            if not _is_makeshift(consumer):
                return True
        return False

    def _is_waiting(self, destination: str) -> bool:
        queue = self.hub.queue(destination)
        return bool(queue.length) and not self.is_consumed(destination)

    def _look_around(self, now: float) -> None:
        """Requests come into queues in other ways too: replayed, or left by who consumed them."""
        if self.stopping or not any(self._default_workers()):
            return
        for destination in list(self._asked):
            if self._is_waiting(destination):
                self._stand_in(destination)
        self.hub.call_at_least(self.default, now + _LOOK_S, self._look_around)

    def _stand_in(self, destination: str) -> None:
        if self.settings.unknown_queue == "hold" or destination == self.default:
            return
        self._is_arranging = True
        try:
            for worker in list(self._default_workers()):
                worker.stand_in(destination)
        finally:
            self._is_arranging = False

    def _on_consumers(self, queue: Queue) -> None:
        """Somebody came or went: those who stand in for nobody are sent home."""
        destination = queue.destination
        if destination not in self._asked or self.stopping or self._is_arranging:
            return
        if not self.is_consumed(destination):
            if queue.length:
                self._stand_in(destination)
                self.hub.touch(queue)
        else:
            for worker in list(self.workers):
                worker.step_down(destination)

    # Results of an earlier conversation.

    def give_back(self, job: AssignedJob) -> None:
        """Its worker is gone, and it waits for another. It may still be done by the first."""
        self._returned[job.msgid] = job.envelope
        if len(self._returned) > _REMEMBERED:
            self._returned.popitem(last=False)

    def claim(self, worker: WorkerGateway, msgid: str) -> Envelope | None:
        """A result for what this worker does not have any more: the message, if it is settled
        now, wherever it was."""
        envelope = self._returned.pop(msgid, None)
        if envelope is None or not self._is_trusted(worker, envelope):
            return None
        # Who did it brings the result; nobody is to be told that there is none.
        watcher = self.hub.watched.pop(envelope.id, None)
        if any(other.surrender(msgid, envelope.id) for other in self.workers):
            return envelope
        queue = self.hub.queue(envelope.destination)
        now = self.context.now()
        if queue.remove([envelope.id], Step.SETTLED, now, detail="done after all"):
            return envelope
        if watcher is not None:
            self.hub.watched[envelope.id] = watcher
        return None

    def _is_trusted(self, worker: WorkerGateway, envelope: Envelope) -> bool:
        return self.context.access.may(worker.principal, "consume", envelope.destination)

    # Jobs that may take no longer than so.

    def limit(self, worker: WorkerGateway, job: AssignedJob, due: float) -> None:
        heapq.heappush(self._due, (due, next(self._numbers), worker, job))
        self.hub.call_at_least(self, self._due[0][0], self._on_time)

    def _on_time(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, worker, job = heapq.heappop(self._due)
            worker.overdue(job, now)
        if self._due:
            self.hub.call_at_least(self, self._due[0][0], self._on_time)

    # Schedules.

    def schedule(self, gateway: ClientGateway, event: ScheduleReceived, envelope: Envelope) -> None:
        """Raises HubError."""
        identity = schedule_identity(event.message)
        known = self.hub.schedules.get(identity)
        if known is not None:
            gateway.require("produce", known.envelope.destination)
        headers = Headers.parse(event.headers)
        if "run_count" in headers and headers.run_count is None:
            raise InvalidSchedule("a run count is a whole number from 0 to 2^63 - 1")
        if event.interval_s is not None:
            check_interval(event.interval_s)
        elif event.cron is not None:
            check_cron(event.cron)
        if self.settings.scheduler == "external" and _is_whole(event.interval_s):
            self._for_schedulers[identity] = event
            if len(self._for_schedulers) > _REMEMBERED:
                self._for_schedulers.popitem(last=False)
                self.context.count("dropped", "emqp", "schedule")
            self._hand_over()
            return
        if headers.run_count == 0:
            self._forget(identity)
            return
        schedule = Schedule(
            id=identity,
            envelope=envelope,
            interval_s=event.interval_s or 0.0,
            cron="" if event.interval_s else event.cron or "",
            run_count=headers.run_count or 0,
            nohaste=headers.nohaste,
        )
        self.hub.schedules.add(schedule, self.context.now())
        self.expect(envelope.destination)

    def unschedule(self, gateway: ClientGateway, event: UnscheduleReceived) -> None:
        """Raises HubError."""
        identity = schedule_identity(event.message)
        known = self.hub.schedules.get(identity)
        if known is not None:
            gateway.require("produce", known.envelope.destination)
            self._forget(identity)
        self._for_schedulers.pop(identity, None)
        if self.settings.scheduler == "external":
            for scheduler in self.schedulers:
                scheduler.forward(event, event.headers)

    def _forget(self, identity: str) -> None:
        try:
            self.hub.schedules.remove(identity)
        except UnknownMessage:
            return

    def enlist_scheduler(self, gateway: ClientGateway) -> None:
        self.schedulers[gateway] = None
        self._hand_over()

    def _hand_over(self) -> None:
        """To the scheduler that came last, as deployed; without one they wait for it."""
        if not self.schedulers:
            return
        scheduler = next(reversed(self.schedulers))
        while self._for_schedulers:
            _, event = self._for_schedulers.popitem(last=False)
            headers = Headers.parse(event.headers).without("interval", "cron")
            scheduler.forward(event, str(headers))

    # Administration.

    def status(self) -> bytes:
        now = self.context.now()
        since: dict[str, list[float]] = {}
        for worker in self.workers:
            for job in worker.jobs():
                since.setdefault(job.queue, []).append(now - job.since)
        waiting = {}
        for destination in self._asked | {f"queue/{name}" for name in self.named}:
            queue = self.hub.queue(destination)
            length = queue.length - sum(len(each.held) for each in queue.consumers)
            if length > 0:
                waiting[queue.name] = length
        return _encode(
            {
                "inflight_messages_by_queue": {name: len(each) for name, each in since.items()},
                "latency_messages_by_queue": {
                    name: int(1000 * sum(each) / len(each)) for name, each in since.items()
                },
                "max_latency_messages_by_queue": {
                    name: int(1000 * max(each)) for name, each in since.items()
                },
                "waiting_messages_by_queue": waiting,
                "processed_messages_by_queue": self.processed,
                "processed_messages_by_worker": {
                    worker.name: worker.processed for worker in self.workers
                },
            }
        )

    def workers_status(self) -> bytes:
        workers: dict[str, Any] = {}
        queues: dict[str, list[tuple[int, str]]] = {}
        for worker in self.workers:
            workers[worker.name] = {
                "queues": worker.queues,
                "hb": worker.wire.last_received_at,
                "available_slots": max(worker.wire.free_slots, 0),
            }
            for weight, queue in worker.queues:
                queues.setdefault(queue, []).append((weight, worker.name))
        for each in queues.values():
            each.sort(key=lambda pair: -pair[0])
        return _encode({"connected_workers": workers, "connected_queues": queues})

    def schedulers_status(self) -> bytes:
        known = {each.name: {"hb": each.wire.last_received_at} for each in self.schedulers}
        return _encode({"connected_schedulers": known})

    # Stopping the eMQP side, and only that.

    def stop(self) -> None:
        """KBAI to schedulers and workers; nothing new; what is under way may finish."""
        if self.stopping:
            return
        self.stopping = True
        log_event(_log, logging.WARNING, "stopping", protocol="emqp")
        for name in LISTENERS:
            if name in self.context.listeners:
                self.context.listeners[name].close()
        for gateway in self.gateways():
            self.hub.callbacks.run("emqp stop", gateway.wind_down)
        self.check_stopped()

    def check_stopped(self) -> None:
        """Once no job is under way, everybody may go."""
        if self.stopping and not any(gateway.is_busy for gateway in self.gateways()):
            for gateway in self.gateways():
                self.hub.callbacks.run("emqp stop", gateway.close)

    def leftovers(self) -> Iterator[Leftover]:
        """Identities, workers and schedulers whose connection is gone."""
        for gateway in self.gateways():
            if gateway.is_gone:
                yield _leftover("identity", gateway, partial(self.part, gateway))
        for worker in list(self.workers):
            if worker.is_gone:
                yield _leftover("worker", worker, partial(self.dismiss, worker))
        for scheduler in list(self.schedulers):
            if scheduler.is_gone:
                remove = partial(self.schedulers.pop, scheduler, None)
                yield _leftover("scheduler", scheduler, remove)

    def gateways(self) -> list[EmqpGateway]:
        return [
            gateway
            for router in self.routers.values()
            for gateway in map(router.get, list(router))
            if gateway is not None
        ]


def _leftover(kind: str, gateway: EmqpGateway, heal: Callable[[], object]) -> Leftover:
    return Leftover(kind, "emqp", gateway.id, gateway, heal)


def _is_makeshift(consumer: Consumer) -> bool:
    """Does it stand in for others, or take nothing more?"""
    return consumer.choice is not None or consumer.window.free < -1


def _is_whole(interval_s: float | None) -> bool:
    """The deployed scheduler would fall over a fraction."""
    return interval_s is None or interval_s == int(interval_s)


def without_times(headers: str) -> str:
    """A schedule's headers without what is about the schedule: those of the requests it makes."""
    parsed = Headers.parse(headers)
    return str(parsed.without(*_ONLY_FOR_SCHEDULES)) if parsed.items else ""
