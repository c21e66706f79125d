"""eMQP's door for workers: they take jobs from queues, and calls of the services of their names.

A worker of queue Q gets messages of `queue/Q` from any protocol, and provides `service/Q`. Every
READY is room for one more, whichever of the two it is. A message that came as a REQUEST leaves as
it came; any other leaves with its bytes as they are, its properties as headers, and with
`reply-requested`: the worker's REPLY settles it. A call is a REQUEST with a timeout, whose queue is
NAME or NAME/METHOD and whose answer is the REPLY, byte for byte.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from typing import Final

from crosswire.envelope import Envelope
from crosswire.errors import CallTimeout, Forbidden, HubError, ProviderFailed, TooLargeToSend
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.emqp.gateway import EmqpGateway
from crosswire.gateways.emqp.messages import (
    HEADERS,
    MSGID,
    QUEUE,
    RequestOptions,
    call_headers,
    content_type_of,
    failure,
    foreign_headers,
    is_timeout,
    read_terms,
)
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Window
from crosswire.hub.services import Provider
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import PeerInformed, PeerLeaving, ReplyReceived, SlotOffered
from crosswire.wire.emqp.frames import Queue
from crosswire.wire.emqp.states import State

__all__ = ["AssignedJob", "WorkerGateway"]

_GRACE_S: Final = 2.0
"""How much longer than the worker we wait for a job's end, so that its answer wins."""

_LEFT: Final = "the worker left before it answered"


class AssignedJob:
    """What a worker was given and has not answered.

    `source` is where it came from: a queue's attachment, a provider, or nothing for a message that
    was settled when it was handed over and whose client waits for the result. `terms` are those of
    a REQUEST, none for what another protocol brought.
    """

    __slots__ = ("attempt", "envelope", "msgid", "queue", "since", "source", "terms")

    def __init__(
        self,
        msgid: str,
        queue: str,
        envelope: Envelope,
        source: Attachment | Provider | None,
        terms: RequestOptions | None,
        attempt: int,
        since: float,
    ) -> None:
        self.msgid = msgid
        self.queue = queue
        self.envelope = envelope
        self.source = source
        self.terms = terms
        self.attempt = attempt
        self.since = since


class WorkerGateway(EmqpGateway):
    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self.queues: tuple[Queue, ...] = ()
        self.queue_names: frozenset[str] = frozenset()
        self.processed = 0
        self._window = Window(0, granted=True)
        self._jobs: dict[str, list[AssignedJob]] = {}
        self._stand_ins: dict[str, Attachment] = {}

    def jobs(self) -> Iterator[AssignedJob]:
        return (job for jobs in self._jobs.values() for job in jobs)

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs) or super().is_busy

    def receive(self, events: list[Event]) -> None:
        """What was offered before the last INFORM belongs to an earlier conversation."""
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
                self._retire()
            else:
                self.act(event)
        now = self.context.now()
        for attachment, ids in settled.items():
            attachment.settle(ids, now)
            self._relieve(attachment)
        if slots and self.wire.state is State.REGISTERED:
            self._window.grant(slots, now)
        if self.broker.stopping:
            self.broker.check_stopped()

    # Coming and going.

    def _register(self, event: PeerInformed) -> None:
        """A second INFORM starts anew: what the worker had is given to others."""
        self._start_anew()
        if self.broker.stopping:
            return
        queues = event.queues or ((10, self.context.config.emqp.default_queue),)
        window = self._window = Window(0, granted=True)
        allowed: dict[str, int] = {}
        for weight, name in queues:
            if name in allowed:
                continue
            try:
                self.consume(f"queue/{name}", window=window, weight=weight)
                allowed[name] = weight
            except HubError as error:
                self.ignore(error)
        if not allowed:
            self.log(logging.WARNING, "refused", queues=len(queues))
            return
        self.queues = tuple((weight, name) for name, weight in allowed.items())
        self.queue_names = frozenset(allowed)
        self._provide(window)
        self.wire.send_ack(event.msgid)
        self.broker.enlist(self)

    def _provide(self, window: Window) -> None:
        """Who may work for a queue need not be allowed to answer calls."""
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
        now = self.context.now()
        for attachment in list(self.attachments):
            self.detach(attachment)
        for provider in list(self.providers):
            provider.close(now)
        self.providers.clear()
        self._stand_ins.clear()

    def _retire(self) -> None:
        """It said KBAI: nothing more for it, but its results are still taken."""
        self._window.close()
        self.broker.dismiss(self)
        self._close_idle_providers()

    def _close_idle_providers(self) -> None:
        for provider in list(self.providers):
            if not provider.calls:
                self.providers.discard(provider)
                provider.close(self.context.now())

    def wind_down(self) -> None:
        self._retire()
        self.wire.leave()
        self.session.wake()

    def drain(self) -> None:
        self._window.close()

    def leave(self) -> None:
        self._run("leave", self._lose_jobs)
        self._run("leave", self.broker.dismiss, self)
        super().leave()
        self.broker.check_stopped()

    def _lose_jobs(self) -> None:
        """Given back in their old order: the last one goes to the front first."""
        jobs, self._jobs = self._jobs, {}
        now = self.context.now()
        for job in reversed([job for each in jobs.values() for job in each]):
            self._fail(job, _LEFT, now, lost=True)

    # Standing in for those whom nobody consumes.

    def stand_in(self, destination: str) -> None:
        """Take the requests of this queue too, while nobody else does."""
        if destination in self._stand_ins:
            return
        try:
            self.require("consume", destination)
        except Forbidden:
            return
        broker = self.broker

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
        self.attachments.add(attachment)

    def step_down(self, destination: str) -> None:
        """Somebody consumes it. What this worker has of it, it may finish."""
        attachment = self._stand_ins.get(destination)
        if isinstance(attachment, Consumer) and not attachment.held:
            del self._stand_ins[destination]
            self.detach(attachment)

    def _relieve(self, attachment: Attachment) -> None:
        destination = attachment.destination
        if destination in self._stand_ins and self.broker.is_consumed(destination):
            self.step_down(destination)

    # Jobs.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        wire = self.wire
        if wire.state is not State.REGISTERED:
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
                terms = read_terms(text.decode())
                headers = terms.for_worker
            name = native[QUEUE].decode() if QUEUE in native else queue
            known = native[MSGID] if MSGID in native else self._made_up(envelope).encode()
            job = (known, name, headers, envelope.payload)
            if not self._fits(job, envelope, unfit):
                continue
            if terms.holds:
                self._keep(known.decode(), queue, delivery, attachment, terms, now)
            else:
                settled.append(envelope.id)
                if terms.answers:
                    self.hub.watched.pop(envelope.id, None)
                    self._keep(known.decode(), queue, delivery, None, terms, now)
            requests.append(job)
        wire.send_requests(requests)
        self.processed += len(requests)
        self.broker.processed[queue] += len(requests)
        self.session.wake()
        if settled:
            attachment.settle(settled, now)
        for identifier, cause in unfit:
            attachment.refuse([identifier], now, cause=cause)
        if unfit:
            # The slots that they were meant for are still free.
            self._window.grant(len(unfit), now)

    def _fits(
        self,
        job: tuple[bytes, str, str, bytes],
        envelope: Envelope,
        unfit: list[tuple[int, str]],
    ) -> bool:
        """Can the worker be given this job? If not, it is `unfit`, and why."""
        try:
            self.wire.require_room(*job)
        except TooLargeToSend as error:
            unfit.append((envelope.id, f"too large for eMQP: {error}"))
            return False
        return True

    def _made_up(self, envelope: Envelope) -> str:
        """An id for what came without one; the same each time that it is tried."""
        return f"{envelope.node}-{envelope.id}"

    def _keep(
        self,
        msgid: str,
        queue: str,
        delivery: Delivery,
        source: Attachment | None,
        terms: RequestOptions | None,
        now: float,
    ) -> None:
        job = AssignedJob(msgid, queue, delivery.envelope, source, terms, delivery.attempt, now)
        self._jobs.setdefault(msgid, []).append(job)
        if terms is not None and terms.timeout_s is not None:
            self.broker.limit(self, job, now + terms.timeout_s + _GRACE_S)

    def _drop(self, job: AssignedJob) -> bool:
        """It is over; False if it was before."""
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
        elif isinstance(job.source, Provider):
            job.source.answer(job.envelope.id, self._response(event.message), now)
        else:
            if job.terms is not None and job.terms.answers:
                self.broker.answer(job.envelope, event.message)
            if job.source is not None:
                settled.setdefault(job.source, []).append(job.envelope.id)
        if self.wire.state is State.LEAVING:
            self._close_idle_providers()

    def _on_late_reply(self, event: ReplyReceived) -> None:
        """For what it had before its connection broke; or for nobody."""
        envelope = None
        if not is_timeout(event.message):
            envelope = self.broker.claim(self, event.request or "")
        if envelope is None:
            self.context.count("unclaimed", self.protocol)
        elif read_terms(envelope.native.get(HEADERS, b"").decode()).answers:
            self.broker.answer(envelope, event.message)

    def surrender(self, msgid: str, identifier: int) -> bool:
        """Settle a job that another worker has done; False if it is not here."""
        for job in self._jobs.get(msgid, []):
            if job.envelope.id == identifier and isinstance(job.source, Attachment):
                self._drop(job)
                job.source.settle([identifier], self.context.now())
                return True
        return False

    def _response(self, message: bytes) -> Envelope:
        return Envelope(
            destination="",
            kind="response",
            payload=message,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            content_type=content_type_of(message),
            crc=zlib.crc32(message),
        )

    def overdue(self, job: AssignedJob, now: float) -> None:
        """The worker did not even say that the job took too long."""
        if self._drop(job):
            self._fail(job, "timeout", now)

    def _fail(self, job: AssignedJob, cause: str, now: float, *, lost: bool = False) -> None:
        """Once more, or never again; it took too long, or was `lost` with its worker."""
        terms, source = job.terms, job.source
        if isinstance(source, Provider):
            # A provider that is gone is told from one that was slow by the hub itself.
            if not lost:
                source.fail(job.envelope.id, CallTimeout("the worker took too long"), now)
            return
        if terms is None:
            assert source is not None
            source.refuse([job.envelope.id], now, cause=cause, delay_s=0.0 if lost else None)
            return
        final = self._is_final(job, terms, lost)
        if final and terms.answers:
            self.broker.answer(job.envelope, failure(cause, job.attempt))
        if source is not None:
            if lost and not final:
                self.broker.give_back(job)
            source.refuse(
                [job.envelope.id], now, cause=cause, delay_s=0.0 if lost else None, final=final
            )
            self._relieve(source)

    def _is_final(self, job: AssignedJob, terms: RequestOptions, lost: bool) -> bool:
        """A guaranteed job whose worker dies is given to another, as often as the queue allows."""
        if job.source is None:
            return True
        if job.attempt <= terms.retry_count:
            return False
        if not (lost and terms.guarantee) or not isinstance(job.source, Consumer):
            return True
        most = job.source.backlog.retry.max_attempts
        return 0 < most <= job.attempt

    # Calls from other protocols.

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        if self.wire.state is not State.REGISTERED:
            return
        now = self.context.now()
        unfit = 0
        for delivery in requests:
            envelope = delivery.envelope
            name = envelope.destination.removeprefix("service/")
            msgid = self._made_up(envelope)
            headers = call_headers(envelope, provider.calls[envelope.id].due - now)
            try:
                self.wire.require_room(msgid.encode(), name, headers, envelope.payload)
            except TooLargeToSend as error:
                provider.fail(envelope.id, ProviderFailed("invalid_request", str(error)), now)
                unfit += 1
                continue
            job = AssignedJob(msgid, name, envelope, provider, None, delivery.attempt, now)
            self._jobs.setdefault(msgid, []).append(job)
            self.wire.send_request(name, headers, envelope.payload, msgid=msgid)
        self.session.wake()
        if unfit:
            self._window.grant(unfit, now)

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """The worker does it all the same; its REPLY is for nobody."""
        gone = set(ids)
        for job in [job for job in self.jobs() if job.source is provider]:
            if job.envelope.id in gone:
                self._drop(job)
