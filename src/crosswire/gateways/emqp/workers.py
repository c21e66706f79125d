"""eMQP's gateway for workers: they get jobs from queues, and calls of the services of that name.

    INFORM, READY   ← messages of queue/Q from any protocol, and calls of service/Q
    REPLY           settles the message, or answers the call

Every READY is room for one more, a message or a call. A message that came as a REQUEST leaves as it
came. Any other leaves with its payload unchanged, its properties as headers, and `reply-requested`:
the worker's REPLY settles it. A call is a REQUEST with a timeout, whose queue is NAME or
NAME/METHOD and whose answer is the REPLY, byte for byte.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

from crosswire.envelope import Envelope
from crosswire.errors import (
    CallTimeout,
    Forbidden,
    HubError,
    ProviderFailed,
    ProviderLost,
    TooLargeToSend,
)
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.emqp.broker import AssignedJob
from crosswire.gateways.emqp.gateway import EmqpGateway
from crosswire.gateways.emqp.messages import (
    HEADERS,
    MSGID,
    QUEUE,
    RequestOptions,
    call_headers,
    content_type_of,
    failure,
    failure_of_call,
    foreign_headers,
    is_timeout,
    read_options,
)
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Window
from crosswire.hub.services import Provider
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import PeerInformed, PeerLeaving, ReplyReceived, SlotOffered
from crosswire.wire.emqp.frames import Queue
from crosswire.wire.emqp.jobs import failure_of
from crosswire.wire.emqp.states import State

__all__ = ["WorkerGateway"]

_GRACE_S: Final = 2.0
"""How long after a job's timeout the hub fails it: the worker's own report comes first."""

_STAND_INS: Final = 64
"""Queues without a consumer that it takes requests of at a time: each of its slots wakes them all.
"""

_REGISTERED: Final = 100
"""Queues of an INFORM that are consumed before others may have a turn."""

_LEFT: Final = "the worker left before it answered"


class _Registration:
    """An INFORM that is being carried out: queues with weights, as far as they are consumed."""

    __slots__ = ("allowed", "asked", "msgid", "slots", "window")

    def __init__(self, msgid: str, asked: int) -> None:
        self.msgid = msgid
        self.asked = asked
        self.window = Window(0, granted=True)
        self.allowed: dict[str, int] = {}
        self.slots = 0
        """Slots that the worker has offered since."""


class WorkerGateway(EmqpGateway):
    """A worker, registered by INFORM for queues with weights."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self.queues: tuple[Queue, ...] = ()
        self.queue_names: frozenset[str] = frozenset()
        self.processed = 0
        self._window = Window(0, granted=True)
        self._is_leaving = False
        self._jobs: dict[str, list[AssignedJob]] = {}
        """By message id. Two clients may use the same: then the oldest is answered first."""
        self._stand_ins: dict[str, Attachment] = {}
        self._registration: _Registration | None = None
        self.stand_ins = 0

    def jobs(self) -> Iterator[AssignedJob]:
        """Jobs and calls that it has not answered."""
        return (job for jobs in self._jobs.values() for job in jobs)

    @property
    def is_busy(self) -> bool:
        """Whether it has jobs or calls that it has not answered."""
        return bool(self._jobs) or super().is_busy

    # Connecting: INFORM, READY, KBAI.

    def receive(self, events: list[Event]) -> None:
        """Settle answered jobs, then offer the free slots, once for all events of a read.

        Slots that were offered before the last INFORM are void: that starts the worker anew.
        """
        slots = 0
        settled: dict[Attachment, list[int]] = {}
        for event in events:
            if type(event) is SlotOffered:
                slots += 1
            elif type(event) is ReplyReceived:
                self._on_reply(event, settled)
            elif isinstance(event, PeerInformed):
                slots = 0
                self._register(event)
            elif isinstance(event, PeerLeaving):
                slots = 0
                self._is_leaving = True
                self._retire()
            else:
                self.act(event)
        now = self.context.now()
        for attachment, ids in settled.items():
            attachment.settle(ids, now)
            self._relieve(attachment)
        # After settling, so that the next jobs are chosen with these done.
        self._offer(slots, now)
        if self.broker.stopping:
            self.broker.check_stopped()

    def _offer(self, slots: int, now: float) -> None:
        """The worker has this many more slots, which count when it is registered."""
        if self._registration is not None:
            self._registration.slots += slots
        elif slots and self.connection.state is State.REGISTERED:
            self._window.grant(slots, now)
            self._take_unserved(now)

    def _register(self, event: PeerInformed) -> None:
        """A second INFORM starts the worker anew: the jobs that it had are given to others.

        In parts: it may name a thousand queues that don't exist yet.
        """
        self._start_anew()
        if self.broker.stopping:
            return
        queues = event.queues or ((10, self.context.config.emqp.default_queue),)
        registration = self._registration = _Registration(event.msgid, len(queues))
        self._window = registration.window
        for start in range(0, len(queues), _REGISTERED):
            part = queues[start : start + _REGISTERED]
            self.hub.defer("emqp inform", self.owned(self._consume_some), registration, part)
        self.hub.defer("emqp inform", self.owned(self._finish_registration), registration)
        self.hub.hand_out()

    def _consume_some(self, registration: _Registration, queues: Sequence[Queue]) -> None:
        allowed = registration.allowed
        if self._registration is not registration or self.left:
            return
        for weight, name in queues:
            if name in allowed:
                continue
            try:
                self.consume(f"queue/{name}", window=registration.window, weight=weight)
                allowed[name] = weight
            except HubError as error:
                self.ignore(error)

    def _finish_registration(self, registration: _Registration) -> None:
        if self._registration is not registration or self.left:
            return
        self._registration = None
        allowed = registration.allowed
        if not allowed:
            self.log(logging.WARNING, "refused", queues=registration.asked)
            return
        self.queues = tuple((weight, name) for name, weight in allowed.items())
        self.queue_names = frozenset(allowed)
        self._provide(registration.window)
        self.connection.send_ack(registration.msgid)
        self.broker.enlist(self)
        self._offer(registration.slots, self.context.now())
        self.session.wake()

    def _provide(self, window: Window) -> None:
        """Serve the services of its queues' names, where the user may: it is a right of its own."""
        may = self.context.access.may
        names = [name for name in self.queue_names if "/" not in name]
        services = [
            f"service/{name}" for name in names if may(self.principal, "serve", f"service/{name}")
        ]
        try:
            if services:
                self.serve(services, window=window)
        except HubError as error:
            self.ignore(error)

    def _start_anew(self) -> None:
        self._lose_jobs()
        self.broker.dismiss(self)
        for attachment in list(self.attachments):
            self.detach(attachment)
        for provider in list(self.providers):
            self.withdraw(provider)
        self._stand_ins.clear()
        self._registration = None

    def _retire(self) -> None:
        """After its KBAI it gets nothing more, but its results are still accepted."""
        self._registration = None
        self._window.close()
        self.broker.dismiss(self)
        self._close_idle_providers()

    def _close_idle_providers(self) -> None:
        for provider in list(self.providers):
            if not provider.calls:
                self.withdraw(provider)

    def wind_down(self) -> None:
        """Send the goodbye; give it nothing more, but accept its results."""
        self._retire()
        self.connection.leave()
        self.session.wake()

    def drain(self) -> None:
        """Give it nothing new: one window serves its queues and its services."""
        self._window.close()

    def leave(self) -> None:
        """Give its jobs to others and free its identity, each step even if another raises."""
        self._run("leave", self._lose_jobs)
        self._run("leave", self.broker.dismiss, self)
        if self._is_leaving:
            for attachment in list(self.attachments):
                self._run("leave", self.detach, attachment)
        super().leave()
        self.broker.check_stopped()

    def _lose_jobs(self) -> None:
        """Fail all its jobs, the newest first: each returns to the front of its queue, so that
        they end up in their old order. One that is tried again anyway is left to `detach`, after a
        goodbye: the worker gave it back."""
        jobs, self._jobs = self._jobs, {}
        now = self.context.now()
        for job in reversed([job for each in jobs.values() for job in each]):
            if not (self._is_leaving and self._is_returned(job)):
                self._fail(job, _LEFT, now, lost=True)

    def _is_returned(self, job: AssignedJob) -> bool:
        """Whether a job comes from a queue, and another worker gets it if this one has left."""
        if not isinstance(job.source, Consumer):
            return False
        return job.options is None or not self._is_final(job, job.options, lost=True)

    # Consume: queues without a consumer.

    def stand_in(self, destination: str) -> bool:
        """Take the requests of this queue too, while nobody else does; False if it can't stand in
        for one more, which is so only while its slots are taken."""
        if destination in self._stand_ins:
            return True
        try:
            self.require("consume", destination)
        except Forbidden:
            return True
        if len(self._stand_ins) >= _STAND_INS and not self._drop_stand_in():
            return False
        broker = self.broker

        # Only requests of eMQP clients: messages of other protocols wait for a real consumer.
        def choice(envelope: Envelope) -> bool:
            return envelope.protocol == self.protocol and not broker.is_consumed(destination)

        weights = {name: weight for weight, name in self.queues}
        attachment = self.hub.consume(
            destination,
            self,
            self.context.now(),
            peer=self.peer,
            window=self._window,
            weight=weights[self.context.config.emqp.default_queue],
            choice=choice,
        )
        self._stand_ins[destination] = attachment
        self.stand_ins += 1
        self.attachments.add(attachment)
        return True

    def _take_unserved(self, now: float) -> None:
        """Stand in for queues that nobody consumes, as long as slots are free."""
        while self._window.free > 0 and not self.left and self.broker.offer(self):
            if self.hub.turns.is_over():
                self.hub.call_at_least(self, now, self._take_unserved)
                return

    def _drop_stand_in(self) -> bool:
        """Stop standing in for a queue in which nothing waits; False if there is none."""
        for destination in self._stand_ins:
            queue = self.hub.queue(destination)
            attachment = self._stand_ins[destination]
            is_idle = queue.memory.loaded >= queue.memory.visible and not queue.memory.ready
            if is_idle and isinstance(attachment, Consumer) and not attachment.held:
                self.step_down(destination)
                return True
        return False

    def step_down(self, destination: str) -> None:
        """Stop standing in: the queue has a consumer. Jobs that it has, it may finish first."""
        attachment = self._stand_ins.get(destination)
        if isinstance(attachment, Consumer) and not attachment.held:
            del self._stand_ins[destination]
            self.detach(attachment)

    def _relieve(self, attachment: Attachment) -> None:
        destination = attachment.destination
        if destination in self._stand_ins and self.broker.is_consumed(destination):
            self.step_down(destination)

    # Consume: jobs.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send jobs as REQUESTs: kept until their REPLY where the outcome matters, else settled."""
        connection = self.connection
        if connection.state is not State.REGISTERED:
            return
        now = self.context.now()
        queue = attachment.destination[6:]
        settled: list[int] = []
        requests: list[tuple[bytes, str, str, bytes]] = []
        unfit: list[tuple[int, str]] = []
        last_text: bytes | None = None
        for delivery in deliveries:
            envelope = delivery.envelope
            native = envelope.native
            if envelope.protocol != "emqp":
                msgid = self._made_up(envelope)
                job = (msgid.encode(), queue, foreign_headers(envelope), envelope.payload)
                if self._fits(job, envelope, unfit):
                    self._keep(msgid, queue, delivery, attachment, None, now)
                    requests.append(job)
                continue
            text = native.get(HEADERS, b"")
            if text != last_text:
                last_text = text
                options = read_options(text.decode())
                headers = options.for_worker
            name = native[QUEUE].decode() if QUEUE in native else queue
            known = native[MSGID] if MSGID in native else self._made_up(envelope).encode()
            job = (known, name, headers, envelope.payload)
            if not self._fits(job, envelope, unfit):
                continue
            # Without guarantee, retry-count or timeout, handing it over settles it.
            if options.awaits_outcome:
                self._keep(known.decode(), queue, delivery, attachment, options, now)
            else:
                settled.append(envelope.id)
                if options.wants_reply:
                    # Settled now, but the worker's result is what its client gets, not DONE.
                    self.hub.watched.pop(envelope.id)
                    self._keep(known.decode(), queue, delivery, None, options, now)
            requests.append(job)
        connection.send_requests(requests)
        self.processed += len(requests)
        self.broker.processed[queue] += len(requests)
        self.session.wake()
        if settled:
            attachment.settle(settled, now)
        for identifier, cause in unfit:
            attachment.refuse([identifier], now, cause=cause)
        if unfit:
            # The window is granted by READY alone: refusing does not free the slots again.
            self._window.grant(len(unfit), now)

    def _fits(
        self,
        job: tuple[bytes, str, str, bytes],
        envelope: Envelope,
        unfit: list[tuple[int, str]],
    ) -> bool:
        """Whether the worker can be sent this job; if not, it goes to `unfit` with the cause."""
        try:
            self.connection.require_room(*job)
        except TooLargeToSend as error:
            unfit.append((envelope.id, f"too large for eMQP: {error}"))
            return False
        return True

    def _made_up(self, envelope: Envelope) -> str:
        """A message id for a message without one; the same in each attempt."""
        return f"{envelope.node}-{envelope.id}"

    def _keep(
        self,
        msgid: str,
        queue: str,
        delivery: Delivery,
        source: Attachment | None,
        options: RequestOptions | None,
        now: float,
    ) -> None:
        job = AssignedJob(msgid, queue, delivery.envelope, source, options, delivery.attempt, now)
        self._jobs.setdefault(msgid, []).append(job)
        if options is not None and options.timeout_s is not None:
            self.broker.limit(self, job, now + options.timeout_s + _GRACE_S)

    def _drop(self, job: AssignedJob) -> bool:
        """Forget a job that is over; False if it was over before."""
        jobs = self._jobs.get(job.msgid, [])
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.msgid]
        return True

    def _on_reply(self, event: ReplyReceived, settled: dict[Attachment, list[int]]) -> None:
        jobs = self._jobs.get(event.request or "")
        if not jobs:
            self._on_late_reply(event)
            return
        job = jobs[0]
        self._drop(job)
        now = self.context.now()
        if is_timeout(event.message):
            self._fail(job, "timeout", now)
        elif isinstance(job.source, Provider) and (failed := failure_of(event.message)):
            # The same text that a client gets from us for a request that failed.
            job.source.fail(job.envelope.id, ProviderFailed("failed", failed[0]), now)
        elif isinstance(job.source, Provider):
            answer = self.response(event.message, content_type_of(event.message))
            job.source.answer(job.envelope.id, answer, now)
        else:
            if job.options is not None and job.options.wants_reply:
                self.broker.answer(job.envelope, event.message)
            if job.source is not None:
                settled.setdefault(job.source, []).append(job.envelope.id)
        if self.connection.state is State.LEAVING:
            self._close_idle_providers()

    def _on_late_reply(self, event: ReplyReceived) -> None:
        """A result for a job that it had before its connection broke, or for no job at all."""
        envelope = None
        if not is_timeout(event.message):
            envelope = self.broker.claim(self, event.request or "")
        if envelope is None:
            self.context.count("unclaimed", self.protocol)
        elif read_options(envelope.native.get(HEADERS, b"").decode()).wants_reply:
            self.broker.answer(envelope, event.message)

    def surrender(self, msgid: str, identifier: int) -> bool:
        """Settle a job that another worker has done; False if it is not here."""
        for job in self._jobs.get(msgid, []):
            if job.envelope.id == identifier and isinstance(job.source, Attachment):
                self._drop(job)
                job.source.settle([identifier], self.context.now())
                return True
        return False

    def overdue(self, job: AssignedJob, now: float) -> None:
        """Fail a job whose timeout passed without a report of the worker."""
        if self._drop(job):
            self._fail(job, "timeout", now)

    def _fail(self, job: AssignedJob, cause: str, now: float, *, lost: bool = False) -> None:
        """Retry a job, or fail it for good: it took too long, or was `lost` with its worker."""
        options, source = job.options, job.source
        if isinstance(source, Provider):
            # With a worker that is gone its provider is closed, and the hub reports ProviderLost.
            if not lost:
                source.fail(job.envelope.id, CallTimeout("the worker took too long"), now)
            return
        if options is None:
            assert source is not None
            source.refuse([job.envelope.id], now, cause=cause, delay_s=0.0 if lost else None)
            return
        final = self._is_final(job, options, lost)
        # The client gets an answer only when no further attempt will be made.
        if final and options.wants_reply:
            result = (
                failure_of_call(ProviderLost(cause), job.attempt)
                if lost
                else failure(cause, job.attempt)
            )
            self.broker.answer(job.envelope, result)
        if source is not None:
            if lost and not final:
                self.broker.give_back(job)
            source.refuse(
                [job.envelope.id], now, cause=cause, delay_s=0.0 if lost else None, final=final
            )
            self._relieve(source)

    def _is_final(self, job: AssignedJob, options: RequestOptions, lost: bool) -> bool:
        """Whether a job that failed is not tried again.

        `retry-count` allows more attempts; a guaranteed job whose worker is gone is given to
        another one up to the queue's `max_attempts`.
        """
        if job.source is None:
            return True
        if job.attempt <= options.retry_count:
            return False
        if not (lost and options.guarantee) or not isinstance(job.source, Consumer):
            return True
        most = job.source.backlog.retry.max_attempts
        return 0 < most <= job.attempt

    # Serve.

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Send calls as REQUESTs with a timeout."""
        if self.connection.state is not State.REGISTERED:
            return
        now = self.context.now()
        unfit = 0
        for delivery in requests:
            envelope = delivery.envelope
            name = envelope.destination.removeprefix("service/")
            msgid = self._made_up(envelope)
            headers = call_headers(envelope, provider.calls[envelope.id].due - now)
            try:
                self.connection.require_room(msgid.encode(), name, headers, envelope.payload)
            except TooLargeToSend as error:
                provider.fail(envelope.id, ProviderFailed("invalid_request", str(error)), now)
                unfit += 1
                continue
            job = AssignedJob(msgid, name, envelope, provider, None, delivery.attempt, now)
            self._jobs.setdefault(msgid, []).append(job)
            self.connection.send_request(name, headers, envelope.payload, msgid=msgid)
        self.session.wake()
        if unfit:
            self._window.grant(unfit, now)

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Forget these calls: eMQP can't cancel a job, and its REPLY will be dropped."""
        gone = set(ids)
        for job in [job for job in self.jobs() if job.source is provider]:
            if job.envelope.id in gone:
                self._drop(job)
