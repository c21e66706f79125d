"""What all eMQP connections of a hub share: identities, workers and their queues, schedules.

A request waits in the queue that it names. While nothing, in any protocol, consumes that queue, the
workers of the default queue stand in for it, unless `unknown_queue = "hold"` is configured.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import count
from typing import Final, Protocol

from crosswire.access import Right
from crosswire.envelope import Envelope, parse_stored_destination
from crosswire.errors import (
    InvalidDestination,
    InvalidSchedule,
    QuotaExceeded,
    RecordDamaged,
    UnknownMessage,
)
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.emqp.messages import DONE, IDENTITY, MSGID, RequestOptions, failure
from crosswire.hub.attachment import Attachment, Consumer
from crosswire.hub.cron import check_cron
from crosswire.hub.ledger import NOBODY, LedgerPeer, Step
from crosswire.hub.queues import Queue
from crosswire.hub.schedules import Schedule, check_interval
from crosswire.hub.services import Provider
from crosswire.logs import log_event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import ScheduleReceived, UnscheduleReceived
from crosswire.wire.emqp.frames import Queue as WeightedQueue
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import schedule_identity
from crosswire.wire.emqp.states import LISTENERS
from crosswire.wire.zmtp.curve import CurveServer, decode_key, encode_key
from crosswire.wire.zmtp.mechanisms import Mechanism
from crosswire.wire.zmtp.routing import Router

__all__ = ["AssignedJob", "Broker", "BrokerPeer", "BrokerScheduler", "BrokerWorker"]

_log = logging.getLogger("crosswire.gateways")

_REQUESTED: Final = "emqp.asked"
"""The store's space for queues that were requested. The name is part of stored data."""
_REMEMBERED: Final = 10_000
_REMEMBERED_BYTES: Final = 64 * 1024 * 1024
_SCAN_S: Final = 1.0
"""The interval at which queues without a consumer are searched for requests."""
_SCANNED: Final = 500
_SCAN_PAUSE_S: Final = 0.01
"""The number that is searched at once, before others have a turn."""
_OFFERED: Final = 64
"""Queues without a consumer that a worker is offered at once."""


class AssignedJob:
    """A request that a worker has and has not answered.

    `source` is where it came from: a queue's attachment, a provider for a call, or None for a
    message that was settled when it was handed over and whose client waits for the result.
    `options` are those of a REQUEST, None for a message of another protocol.
    """

    __slots__ = ("attempt", "envelope", "msgid", "options", "queue", "since", "source")

    def __init__(
        self,
        msgid: str,
        queue: str,
        envelope: Envelope,
        source: Attachment | Provider | None,
        options: RequestOptions | None,
        attempt: int,
        since: float,
    ) -> None:
        self.msgid = msgid
        self.queue = queue
        self.envelope = envelope
        self.source = source
        self.options = options
        self.attempt = attempt
        self.since = since


class BrokerPeer(Hashable, Protocol):
    """A gateway of any of eMQP's listeners, as the broker sees it."""

    id: str
    listener: str
    identity: bytes
    principal: str
    peer: LedgerPeer
    connection: EmqpConnection

    @property
    def name(self) -> str:
        """Its identity as text."""

    @property
    def is_busy(self) -> bool:
        """Whether it has jobs or calls under way."""

    @property
    def is_gone(self) -> bool:
        """Whether its connection has ended."""

    def require(self, right: Right, destination: str) -> None:
        """Raises Forbidden."""

    def give_result(self, result: bytes, msgid: str) -> None:
        """Send the result of a request."""

    def wind_down(self) -> None:
        """Take nothing new."""

    def close(self) -> None:
        """Send the goodbye and disconnect."""


class BrokerWorker(BrokerPeer, Protocol):
    """A worker's gateway."""

    queues: tuple[WeightedQueue, ...]
    queue_names: frozenset[str]
    processed: int
    stand_ins: int
    """How many times it began to stand in for a queue."""

    def jobs(self) -> Iterator[AssignedJob]:
        """Jobs that it has not answered."""

    def stand_in(self, destination: str) -> bool:
        """Take the requests of this queue too, while nobody else does; False if it can't stand in
        for one more."""

    def step_down(self, destination: str) -> None:
        """Take no more of them; a job that it has, it may finish."""

    def surrender(self, msgid: str, identifier: int) -> bool:
        """Settle a job that another worker has done; False if it is not here."""

    def overdue(self, job: AssignedJob, now: float) -> None:
        """Fail a job whose time is over."""


class BrokerScheduler(BrokerPeer, Protocol):
    """The gateway of an external scheduler."""

    def forward(self, event: ScheduleReceived | UnscheduleReceived, headers: str) -> None:
        """Have it run, or end, a schedule that a client asked for."""


class Broker:
    """One for each hub: `context.shared(Broker)`."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self.hub = context.hub
        self.settings = context.config.emqp
        self.default = f"queue/{self.settings.default_queue}"
        self.mechanism = self._mechanism()
        self.stopping = False
        self._is_arranging = False
        self.routers: dict[str, Router[BrokerPeer]] = {
            name: Router(lambda: secrets.token_bytes(8)) for name in LISTENERS
        }
        self.workers: dict[BrokerWorker, None] = {}
        self.schedulers: dict[BrokerScheduler, None] = {}
        self.named: Counter[str] = Counter()
        """Queues that workers have named, and the number of these workers."""
        self.processed: Counter[str] = Counter()
        """Jobs that were given to workers, by queue."""
        self._numbers = count(1)
        self._prefix = f"{secrets.token_hex(6)}-"
        self._spellings: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        """KBAI or KBYE, as a peer that is gone spelled it, by listener and identity."""
        self._unserved: OrderedDict[str, None] = OrderedDict()
        """Queues that nobody consumes and in which requests may wait, those that were offered to a
        worker last at the end."""
        self._to_scan: list[str] = []
        self._to_expect: list[str] = []
        """Queues of schedules that have no requests yet: workers are to stand in for them, too."""
        self.requested: set[str] = set()
        """Queues that eMQP clients have sent requests to, in this run or an earlier one."""
        # Stored, so that after a restart requests in these queues still reach default workers.
        for key, value in self.hub.store.load(_REQUESTED):
            try:
                parse_stored_destination(key.decode())
                self.requested.add(key.decode())
            except (UnicodeDecodeError, InvalidDestination) as error:
                damaged = RecordDamaged(f"the name of a requested queue can't be read: {error}")
                self.hub.damage.set_aside_state(_REQUESTED, key, value, damaged)
        self._for_schedulers: OrderedDict[str, ScheduleReceived] = OrderedDict()
        self._returned: OrderedDict[str, Envelope] = OrderedDict()
        """Jobs whose worker is gone, by message id: it may still bring the result."""
        self._due: list[tuple[float, int, BrokerWorker, AssignedJob]] = []
        self.hub.consumers_changed.append(self._on_consumers)

    def next_id(self) -> str:
        """A message id that no other message has."""
        return f"{self._prefix}{next(self._numbers):x}"

    def _mechanism(self) -> Mechanism | None:
        key = self.settings.curve_secret_key
        if key is None:
            return None
        return CurveServer(decode_key(key), secrets.token_bytes, self._accepts)

    def _accepts(self, public_key: bytes) -> bool:
        access = self.context.access
        is_known = access.open or access.by_curve_key(encode_key(public_key)) is not None
        if not is_known:
            self.context.count("unauthenticated", "emqp")
        return is_known

    # Identities.

    def join(self, gateway: BrokerPeer, identity: bytes) -> bytes:
        """The identity under which a peer can be reached.

        A peer that reconnects replaces its old connection, as with a ROUTER. One that claims the
        identity of another user's connection counts as one without an identity.
        """
        router = self.routers[gateway.listener]
        holder = router.get(identity) if identity else None
        if holder is not None and holder.principal != gateway.principal:
            self.context.count("forbidden", "emqp")
            identity = b""
        identity, replaced = router.join(gateway, identity)
        if replaced is not None and replaced is not gateway:
            replaced.close()
        gateway.connection.goodbye = self._spellings.get((gateway.listener, identity), "KBYE")
        return identity

    def part(self, gateway: BrokerPeer) -> None:
        """Free the identity of a connection that is gone.

        A peer that has used KBAI gets KBAI, any other KBYE: the spelling is kept for its return.
        """
        self.routers[gateway.listener].leave(gateway)
        key = (gateway.listener, gateway.identity)
        if gateway.connection.goodbye != "KBYE" and gateway.identity[:1] not in (b"", b"\0"):
            self._spellings[key] = gateway.connection.goodbye
            self._spellings.move_to_end(key)
            if len(self._spellings) > _REMEMBERED:
                self._spellings.popitem(last=False)

    # Results of requests.

    def answer(self, envelope: Envelope, result: bytes) -> None:
        """Send a result to the client that requested it, if it is, or is again, connected."""
        self.hub.watched.pop(envelope.id)
        native = envelope.native
        if IDENTITY in native and MSGID in native:
            self._answer(native[IDENTITY], envelope.principal, native[MSGID].decode(), result)

    def _answer(self, identity: bytes, principal: str, msgid: str, result: bytes) -> None:
        gateway = self.routers["emqp-clients"].get(identity)
        if gateway is None or gateway.principal != principal or gateway.connection.closed:
            self.context.count("unclaimed", "emqp")
        else:
            gateway.give_result(result, msgid)

    def watch(self, identifier: int, envelope: Envelope) -> None:
        """Report the end of a request to its client, if a consumer without results settles it."""
        identity, msgid = envelope.native[IDENTITY], envelope.native[MSGID].decode()
        ended = partial(self._ended, identity, envelope.principal, msgid)
        holder = self.hub.holders.of(envelope.principal, envelope.connection)
        try:
            self.hub.watched.add(identifier, ended, holder)
        except QuotaExceeded:
            # Its client gets no DONE; others have room for theirs.
            self.context.count("limited", "emqp", "watched results")

    def _ended(
        self, identity: bytes, principal: str, msgid: str, _identifier: int, error: str
    ) -> None:
        self._answer(identity, principal, msgid, failure(error, 1) if error else DONE)

    # Workers.

    def enlist(self, worker: BrokerWorker) -> None:
        """A worker has registered for its queues."""
        self.workers[worker] = None
        for name in worker.queue_names:
            self.named[name] += 1
        if self.settings.default_queue in worker.queue_names:
            # Schedules send to queues that may have no consumer but this worker.
            self._to_expect = list(self.hub.schedules.destinations() & self.requested)
            self._scan_requested(self.context.now())

    def dismiss(self, worker: BrokerWorker) -> None:
        """Give it nothing more; jobs that it has, it may finish."""
        if worker not in self.workers:
            return
        del self.workers[worker]
        for name in worker.queue_names:
            self.named[name] -= 1
            if not self.named[name]:
                del self.named[name]
            self._on_consumers(self.hub.queue(f"queue/{name}"))

    def _default_workers(self) -> Iterator[BrokerWorker]:
        name = self.settings.default_queue
        return (worker for worker in self.workers if name in worker.queue_names)

    def expect(self, destination: str, peer: LedgerPeer = NOBODY) -> None:
        """A request of this peer for this queue is about to be accepted: have it consumed by
        somebody. Raises QuotaExceeded if the queue is new, and the peer may have no more.

        That it was requested is stored: after a restart its requests still wait for workers.
        """
        self.hub.queue(destination, peer)
        if destination not in self.requested:
            self.requested.add(destination)
            self.hub.store.save(_REQUESTED, destination.encode(), b"")
        if destination != self.default and not self.is_consumed(destination):
            self._stand_in(destination)

    def is_consumed(self, destination: str) -> bool:
        """Whether it has a consumer that neither stands in nor is about to leave."""
        for consumer in self.hub.queue(destination).consumers:
            if not _is_makeshift(consumer):
                return True
        return False

    def _is_waiting(self, destination: str) -> bool:
        if destination not in self.hub.store.destinations():
            # Removed since: looking at it must not create it again.
            self._forget_requested(destination)
            return False
        queue = self.hub.queue(destination)
        return bool(queue.length) and not self.is_consumed(destination)

    def _forget_requested(self, destination: str) -> None:
        if destination in self.requested:
            self.requested.discard(destination)
            self._unserved.pop(destination, None)
            self.hub.store.drop(_REQUESTED, destination.encode())
            self.hub.commits.request(sync=False, urgent=False)

    def _scan_requested(self, now: float) -> None:
        """Have default workers stand in for queues in which requests wait.

        Requests get there without `expect` too: replayed, or given back by a consumer that left.
        """
        if self.stopping or not any(self._default_workers()):
            self._to_expect, self._to_scan = [], []
            return
        if not self._to_scan:
            self._to_scan = list(self.requested)
        for _ in range(_SCANNED):
            if self._to_expect:
                destination = self._to_expect.pop()
                if destination in self.requested:
                    self.expect(destination)
            elif self._to_scan:
                destination = self._to_scan.pop()
                if self._is_waiting(destination):
                    self._stand_in(destination)
            else:
                break
            if self.hub.turns.is_over():
                break
        pause_s = _SCAN_PAUSE_S if self._to_expect or self._to_scan else _SCAN_S
        self.hub.call_at_least(self.default, now + pause_s, self._scan_requested)

    def _stand_in(self, destination: str) -> None:
        if self.settings.unknown_queue == "hold" or destination == self.default:
            return
        self._unserved[destination] = None
        # Attaching calls `_on_consumers` for this queue, which must not undo it at once.
        self._is_arranging = True
        try:
            for worker in list(self._default_workers()):
                worker.stand_in(destination)
        finally:
            self._is_arranging = False

    def offer(self, worker: BrokerWorker) -> bool:
        """A default worker has free slots: have it stand in for queues that wait longest.

        Not for all of them at once: whatever it takes wakes all queues that share its window.
        Returns whether it stands in for another one now.
        """
        if self.stopping or self.settings.default_queue not in worker.queue_names:
            return False
        before = worker.stand_ins
        self._is_arranging = True
        try:
            for _ in range(min(len(self._unserved), _OFFERED)):
                destination = next(iter(self._unserved))
                if not self._is_waiting(destination):
                    self._unserved.pop(destination, None)
                elif worker.stand_in(destination):
                    self._unserved.move_to_end(destination)
                else:
                    break
        finally:
            self._is_arranging = False
        return worker.stand_ins > before

    def _on_consumers(self, queue: Queue) -> None:
        """A consumer of a queue came or left: stand in for it, or stop doing so."""
        destination = queue.destination
        if destination not in self.requested or self.stopping or self._is_arranging:
            return
        if not self.is_consumed(destination):
            if queue.length:
                self._stand_in(destination)
                self.hub.touch(queue)
        else:
            for worker in list(self.workers):
                worker.step_down(destination)

    # Results of workers that were gone meanwhile.

    def give_back(self, job: AssignedJob) -> None:
        """Keep a job whose worker is gone: the worker may return with the result before another
        has done it."""
        # Without its payload, which nobody needs: thousands of these would fill the memory.
        self._returned[job.msgid] = job.envelope.replace(payload=b"")
        if len(self._returned) > _REMEMBERED:
            self._returned.popitem(last=False)

    def claim(self, worker: BrokerWorker, msgid: str) -> Envelope | None:
        """Settle a message whose result this worker brings late.

        Gives the message if it waited, or was with another worker; None if it was done before.
        """
        envelope = self._returned.pop(msgid, None)
        if envelope is None or not self._is_trusted(worker, envelope):
            return None
        # The watcher would answer the client with DONE as soon as the message is settled, but the
        # real result is here.
        watcher = self.hub.watched.pop(envelope.id)
        if any(other.surrender(msgid, envelope.id) for other in self.workers):
            return envelope
        queue = self.hub.queue(envelope.destination)
        now = self.context.now()
        if queue.remove([envelope.id], Step.SETTLED, now, detail="done by its first worker"):
            return envelope
        if watcher is not None:
            self.hub.watched.put_back(envelope.id, watcher)
        return None

    def _is_trusted(self, worker: BrokerWorker, envelope: Envelope) -> bool:
        return self.context.access.may(worker.principal, "consume", envelope.destination)

    # Timeouts of jobs.

    def limit(self, worker: BrokerWorker, job: AssignedJob, due: float) -> None:
        """Fail the job at `due` unless it is answered before."""
        # The number breaks ties: workers and jobs can't be compared.
        heapq.heappush(self._due, (due, next(self._numbers), worker, job))
        self.hub.call_at_least(self, self._due[0][0], self._on_time)

    def _on_time(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, worker, job = heapq.heappop(self._due)
            worker.overdue(job, now)
        if self._due:
            self.hub.call_at_least(self, self._due[0][0], self._on_time)

    # Schedules.

    def schedule(self, gateway: BrokerPeer, event: ScheduleReceived, envelope: Envelope) -> None:
        """Add a schedule, or replace the one of the same call. Raises HubError."""
        identity = self._schedule_id(gateway, event.message)
        headers = Headers.parse(event.headers)
        if "run_count" in headers and headers.run_count is None:
            raise InvalidSchedule("a run count is a whole number from 0 to 2^63 - 1")
        if event.interval_s is not None:
            check_interval(event.interval_s)
        elif event.cron is not None:
            check_cron(event.cron)
        if self.settings.scheduler == "external" and _is_whole(event.interval_s):
            self._await_scheduler(identity, event)
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
        self.expect(envelope.destination, gateway.peer)

    def _schedule_id(self, gateway: BrokerPeer, message: bytes) -> str:
        """The id of the schedule of a call. Each user has its own of the same call: nobody can
        replace or end those of others. One that was made without users becomes the user's who may
        send there."""
        identity = schedule_identity(message)
        if not gateway.principal:
            return identity
        known = self.hub.schedules.get(identity)
        if known is not None:
            owner, destination = known.envelope.principal, known.envelope.destination
            may_adopt = not owner and self.context.access.may(
                gateway.principal, "produce", destination
            )
            if owner == gateway.principal or may_adopt:
                return identity
        return f"{identity}/{gateway.principal}"

    def _await_scheduler(self, identity: str, event: ScheduleReceived) -> None:
        """Keep a schedule until a scheduler connects; the oldest are dropped for it."""
        waiting = self._for_schedulers
        waiting[identity] = event
        waiting.move_to_end(identity)
        size_bytes = sum(len(each.message) for each in waiting.values())
        while len(waiting) > _REMEMBERED or (size_bytes > _REMEMBERED_BYTES and len(waiting) > 1):
            size_bytes -= len(waiting.popitem(last=False)[1].message)
            self.context.count("dropped", "emqp", "schedule")

    def unschedule(self, gateway: BrokerPeer, event: UnscheduleReceived) -> None:
        """Remove the schedule of this call, if there is one. Raises HubError."""
        identity = self._schedule_id(gateway, event.message)
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

    def enlist_scheduler(self, gateway: BrokerScheduler) -> None:
        """An external scheduler has registered; it gets the schedules that waited for one."""
        self.schedulers[gateway] = None
        self._hand_over()

    def _hand_over(self) -> None:
        """Give schedules to the scheduler that connected last, as the deployed broker does."""
        if not self.schedulers:
            return
        scheduler = next(reversed(self.schedulers))
        while self._for_schedulers:
            _, event = self._for_schedulers.popitem(last=False)
            headers = Headers.parse(event.headers).without("interval", "cron")
            scheduler.forward(event, str(headers))

    # Stopping the eMQP side, and only that.

    def stop(self) -> None:
        """Send KBAI to schedulers and workers and take nothing new; running jobs may finish."""
        if self.stopping:
            return
        self.stopping = True
        log_event(_log, logging.WARNING, "stopping", protocol="emqp")
        # The other protocols go on: only eMQP's listeners are closed.
        for name in LISTENERS:
            if name in self.context.listeners:
                self.context.listeners[name].close()
        for gateway in self.gateways():
            self.hub.callbacks.run("emqp stop", gateway.wind_down)
        self.check_stopped()

    def check_stopped(self) -> None:
        """Disconnect everybody as soon as no job is under way."""
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

    def gateways(self) -> list[BrokerPeer]:
        """All connected peers, at every listener."""
        return [
            gateway
            for router in self.routers.values()
            for gateway in map(router.get, list(router))
            if gateway is not None
        ]


def _leftover(kind: str, gateway: BrokerPeer, heal: Callable[[], object]) -> Leftover:
    return Leftover(kind, "emqp", gateway.id, gateway, heal)


def _is_makeshift(consumer: Consumer) -> bool:
    """Whether it only stands in, or takes nothing more: a closed window is far below zero."""
    return consumer.choice is not None or consumer.window.free < -1


def _is_whole(interval_s: float | None) -> bool:
    """Whether it has no fraction, at which the deployed scheduler would fail."""
    return interval_s is None or interval_s == int(interval_s)
