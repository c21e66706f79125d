"""eMQP's doors to the hub for clients, schedulers, publishers, subscribers and administration.

    REQUEST      → queue/NAME; with `guarantee` its REPLY leaves when it is on disk. One with
                   `reply-requested` for a queue that no worker has named is a call of
                   service/NAME, if somebody provides that
    PUBLISH      → topic/NAME
    SCHEDULE     → a schedule of the hub, or one for a connected scheduler (`scheduler`)
    SUB socket   ← every topic of the hub whose name begins so, as [topic, message]

Unknown headers are properties; `content-type` is one that says what the message is. What a peer may
not do, or what makes no sense, is ignored and counted. The workers' door is in `emqp_workers`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from typing import ClassVar, Final

from crosswire.envelope import Envelope, parse_destination
from crosswire.errors import (
    CallTimeout,
    CrosswireError,
    DestinationFull,
    Forbidden,
    HubError,
    ProviderLost,
    StoreError,
    TooLargeToSend,
)
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.emqp.broker import Broker, without_times
from crosswire.gateways.emqp.messages import (
    HEADERS,
    IDENTITY,
    MSGID,
    QUEUE,
    RequestOptions,
    content_type_of,
    failure,
    failure_of_call,
    read_terms,
)
from crosswire.gateways.gateway import Gateway
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.receipt import Receipt
from crosswire.hub.services import Answer, Provider
from crosswire.hub.subscribers import Subscriber
from crosswire.wire.contract import Connection, Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import (
    AdminRequested,
    CommandIgnored,
    PeerInformed,
    PeerLeaving,
    PeerReady,
    PublishReceived,
    RequestReceived,
    ScheduleReceived,
    ShutdownRequested,
    Subscribed,
    UnscheduleReceived,
    Unsubscribed,
)
from crosswire.wire.emqp.states import State
from crosswire.wire.zmtp.curve import encode_key

__all__ = [
    "AdminGateway",
    "ClientGateway",
    "EmqpGateway",
    "PublisherGateway",
    "SubscriberGateway",
]

_PLANS: Final = 4096
_AGAIN_S: Final = 0.02
_AGAIN_MOST_S: Final = 0.5
_UNREAD_TIMES: Final = 8
_SUBSCRIBER_WINDOW: Final = 16_384


class EmqpGateway(Gateway):
    """What all five doors have in common."""

    protocol: ClassVar[str] = "emqp"

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self.broker = context.shared(Broker)
        self.identity = b""

    @classmethod
    def leftovers(cls, context: GatewayContext) -> Iterable[Leftover]:
        return context.shared(Broker).leftovers()

    @property
    def name(self) -> str:
        """Its identity as a text that can be shown."""
        return self.identity.decode(errors="backslashreplace") or self.id

    def connect(self, now: float) -> Connection:
        self.wire = EmqpConnection(
            "broker",
            now,
            listener=self.listener,
            limits=self.context.config.limits.emqp,
            mechanism=self.broker.mechanism,
            next_id=self.broker.next_id,
            unix_offset_s=self.context.now() - now,
        )
        return self.wire

    def receive(self, events: list[Event]) -> None:
        for event in events:
            self.act(event)

    def act(self, event: Event) -> None:
        """One event; doors with many of a kind take them in batches before."""
        if isinstance(event, PeerReady):
            self.meet(event)
        elif isinstance(event, CommandIgnored):
            self.ignore(event.error)

    def meet(self, event: PeerReady) -> None:
        if event.public_key is not None:
            principal = self.context.access.by_curve_key(encode_key(event.public_key))
            if principal is not None:
                self.identify(principal)
        self.identity = self.broker.join(self, event.identity)
        if self.broker.stopping:
            self.close()

    def ignore(self, error: CrosswireError) -> None:
        """Counted, without effect, never harmful."""
        self.context.count("ignored", self.protocol, type(error).__name__)

    def leave(self) -> None:
        self.broker.part(self)

    def close(self) -> None:
        """Say goodbye and go."""
        self.wire.close()
        self.session.wake()

    def wind_down(self) -> None:
        """Administration stops eMQP: nothing new is taken from this peer."""
        self.wire.paused = True
        self.session.wake()

    def give_result(self, result: bytes, msgid: str) -> None:  # noqa: ARG002
        """Only clients wait for results."""
        self.context.count("unclaimed", self.protocol)

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:  # noqa: ARG002
        raise TypeError(f"nothing is delivered to {self.listener}")

    def request(self, provider: Provider, requests: list[Delivery]) -> None:  # noqa: ARG002
        raise TypeError(f"nobody serves at {self.listener}")


# ---------------------------------------------------------------------------- clients, publishers


class _RequestPlan:
    """What is the same for all requests of a client with one queue and one text of headers."""

    __slots__ = ("destination", "native", "queue", "service", "terms")

    def __init__(self, queue: str, destination: str, terms: RequestOptions) -> None:
        self.queue = queue
        self.destination = destination
        self.service = destination.replace("queue/", "service/", 1)
        self.terms = terms
        self.native: dict[str, bytes] = {}
        if terms.text:
            self.native[HEADERS] = terms.text.encode()
        if destination != f"queue/{queue}":
            self.native[QUEUE] = queue.encode()


_Taken = tuple[Envelope, _RequestPlan | None]
"""A message on its way into the hub, and its plan if it is a request."""


class PublisherGateway(EmqpGateway):
    """Takes PUBLISH; the client's door does too."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self._brought: list[_Taken] = []
        self._again_s = _AGAIN_S
        self._refused: list[_Taken] = []

    def receive(self, events: list[Event]) -> None:
        for event in events:
            try:
                self.act(event)
            except HubError as error:
                self.ignore(error)
        if self._brought:
            self._hand_in()

    def act(self, event: Event) -> None:
        if type(event) is PublishReceived:
            self._publish(event)
        else:
            super().act(event)

    def _publish(self, event: PublishReceived) -> None:
        destination = f"topic/{event.topic}"
        parse_destination(destination)
        self.require("produce", destination)
        terms = read_terms(event.headers)
        native = {MSGID: event.msgid.encode()}
        if terms.text:
            native[HEADERS] = terms.text.encode()
        envelope = Envelope(
            destination=destination,
            kind="publish",
            payload=event.message,
            protocol="emqp",
            connection=self.id,
            principal=self.principal,
            durable=False,  # there is no acknowledgement that could wait for the disk
            properties=terms.properties,
            native=native,
            content_type=content_type_of(event.message, terms.content_type),
            crc=zlib.crc32(event.message),
        )
        self._brought.append((envelope, None))

    def _hand_in(self) -> None:
        """All that one read brought, as one batch."""
        taken, self._brought = self._brought, []
        if self._refused:
            # Nothing overtakes what waits for room.
            self._refused += taken
            return
        receipt = self.produce([each[0] for each in taken])
        waiting = self._accepted(taken, receipt)
        if waiting:
            receipt.add_done_callback(self.owned(lambda done: self._on_disk(waiting, done)))

    def _accepted(self, taken: list[_Taken], receipt: Receipt) -> list[_Taken]:
        """Tell clients what was taken; gives those that must be on disk before."""
        refused = receipt.refused
        if refused:
            self._sort_out(taken, receipt)
            taken = [each for index, each in enumerate(taken) if index not in refused]
            ids = [each for each in receipt.ids if each]
        else:
            ids = receipt.ids
        waiting: list[_Taken] = []
        receipts: list[bytes] = []
        done = receipt.done
        for each, identifier in zip(taken, ids, strict=True):
            envelope, plan = each
            if plan is None:
                continue
            if plan.terms.answers:
                self.broker.watch(identifier, envelope)
            if done or not envelope.durable:
                receipts.append(envelope.native[MSGID])
            else:
                waiting.append(each)
        if receipts:
            self.give_receipts(receipts)
        return waiting

    def _on_disk(self, waiting: list[_Taken], receipt: Receipt) -> None:
        if receipt.error is not None:
            self._try_again(waiting)
        elif not self.left:
            self.give_receipts([envelope.native[MSGID] for envelope, _ in waiting])

    def give_receipts(self, msgids: list[bytes]) -> None:
        """Only requests get any."""

    # A full queue, or a full disk: the REPLY is withheld and the peer not read.

    def _sort_out(self, taken: list[_Taken], receipt: Receipt) -> None:
        full = []
        for index, error in sorted(receipt.refused.items()):
            if isinstance(error, DestinationFull | StoreError):
                full.append(taken[index])
            else:
                self.ignore(error)
        if full:
            self._try_again(full)

    def _try_again(self, taken: list[_Taken]) -> None:
        if self.left:
            return
        if not self._refused:
            self.wire.paused = True
            self.session.wake()
            loop = asyncio.get_running_loop()
            loop.call_later(self._again_s, self.owned(self._retry))
            self._again_s = min(self._again_s * 2, _AGAIN_MOST_S)
        self._refused += taken

    def _retry(self) -> None:
        if self.left:
            return
        self._brought, self._refused = self._refused, []
        self._hand_in()
        if not self._refused:
            self._again_s = _AGAIN_S
            self.wire.paused = self.broker.stopping
            self.session.wake()


class ClientGateway(PublisherGateway):
    """Clients, and schedulers, which come to the same door."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self._plans: dict[tuple[str, str], _RequestPlan] = {}
        self._unread_bytes = context.config.connections.congested_bytes

    def connect(self, now: float) -> Connection:
        # Deployed clients never read their receipts, and must be able to go on asking all the
        # same: a ROUTER drops what a peer does not read. So receipts are dropped first, then
        # results, before the session would cease to read this peer.
        transport = self.session.transport
        transport.set_write_buffer_limits(_UNREAD_TIMES * self._unread_bytes)
        return super().connect(now)

    def receive(self, events: list[Event]) -> None:
        taken = self._brought
        expected = queue = headers = ""
        plan: _RequestPlan | None = None
        access = self.context.access
        for event in events:
            if type(event) is not RequestReceived:
                try:
                    self.act(event)
                except HubError as error:
                    self.ignore(error)
                continue
            try:
                if plan is None or event.queue != queue or event.headers != headers:
                    queue, headers = event.queue, event.headers
                    plan = self._plans.get((queue, headers)) or self._plan(event)
                if not access.open:
                    self.require("produce", plan.destination)
                if plan.terms.answers and self._call(event, plan):
                    continue
                if plan.destination != expected:
                    expected = plan.destination
                    self.broker.expect(expected)
            except HubError as error:
                self.ignore(error)
                plan = None
                continue
            taken.append((self._envelope(event, plan), plan))
        if taken:
            self._hand_in()

    def act(self, event: Event) -> None:
        if isinstance(event, ScheduleReceived):
            self._schedule(event)
        elif isinstance(event, UnscheduleReceived):
            self.broker.unschedule(self, event)
        elif isinstance(event, PeerInformed):
            # A scheduler's requests name their queues themselves: there is nothing to allow yet.
            self.wire.send_ack(event.msgid)
            self.broker.enlist_scheduler(self)
        elif isinstance(event, PeerLeaving):
            self.broker.schedulers.pop(self, None)
        else:
            super().act(event)

    def leave(self) -> None:
        self.broker.schedulers.pop(self, None)
        super().leave()

    def wind_down(self) -> None:
        if self.wire.state is State.REGISTERED:
            self.wire.leave()
        super().wind_down()

    # Requests.

    def _plan(self, event: RequestReceived) -> _RequestPlan:
        """Raises InvalidDestination."""
        destination = f"queue/{event.queue}" if event.queue else self.broker.default
        parse_destination(destination)
        plan = _RequestPlan(event.queue, destination, read_terms(event.headers))
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[event.queue, event.headers] = plan
        return plan

    def _envelope(self, event: RequestReceived, plan: _RequestPlan) -> Envelope:
        terms, message = plan.terms, event.message
        native = {MSGID: event.msgid.encode(), **plan.native}
        correlation = ""
        if terms.answers:
            native[IDENTITY] = self.identity
            correlation = event.msgid
        return Envelope(
            destination=plan.destination,
            kind="send",
            payload=message,
            protocol="emqp",
            connection=self.id,
            principal=self.principal,
            correlation=correlation,
            durable=terms.guarantee,
            properties=terms.properties,
            native=native,
            content_type=content_type_of(message, terms.content_type),
            crc=zlib.crc32(message),
        )

    def give_receipts(self, msgids: list[bytes]) -> None:
        if self.wire.closed:
            return
        if self.session.transport.get_write_buffer_size() > self._unread_bytes:
            self.context.count("dropped", self.protocol, "receipt", by=len(msgids))
            return
        self.wire.send_receipts(msgids)
        self.session.wake()

    def give_result(self, result: bytes, msgid: str) -> None:
        most = (_UNREAD_TIMES - 1) * self._unread_bytes
        if self.session.transport.get_write_buffer_size() > most:
            self.context.count("dropped", self.protocol, "result")
            return
        try:
            self.wire.send_result(result, msgid)
        except TooLargeToSend as error:
            self.wire.send_result(failure(f"the result can't be sent: {error}", 1), msgid)
        self.session.wake()

    def _call(self, event: RequestReceived, plan: _RequestPlan) -> bool:
        """Ask a live provider, where no worker has named the queue; False if there is none."""
        name = plan.destination.removeprefix("queue/")
        if self.broker.named[name] or not self.hub.is_served(plan.service):
            return False
        self.require("call", plan.service)
        terms = plan.terms
        envelope = self._envelope(event, plan).replace(
            destination=plan.service, kind="request", durable=False
        )
        attempt = 1

        def answered(answer: Answer) -> None:
            nonlocal attempt
            if isinstance(answer, Envelope):
                self.give_result(answer.payload, event.msgid)
                return
            lost = isinstance(answer, ProviderLost | CallTimeout)
            if lost and attempt <= terms.retry_count:
                attempt += 1
                # Not at once: a provider that is leaving would lose it again, and never get to go.
                asyncio.get_running_loop().call_soon(self.owned(call_again))
                return
            self.give_result(failure_of_call(answer, attempt), event.msgid)

        def call_again() -> None:
            if self.left:
                return
            try:
                self.call(envelope, answered, timeout_s=terms.timeout_s)
            except HubError as error:
                self.give_result(failure_of_call(error, attempt), event.msgid)

        self.call(envelope, answered, timeout_s=terms.timeout_s)
        if terms.guarantee:
            journaled = self._on_journal(event.msgid.encode())
            self.hub.committed().add_done_callback(self.owned(journaled))
        else:
            self.give_receipts([event.msgid.encode()])
        return True

    def _on_journal(self, msgid: bytes) -> Callable[[Receipt], None]:
        def done(receipt: Receipt) -> None:
            if receipt.error is None and not self.left:
                self.give_receipts([msgid])

        return done

    # Schedules.

    def _schedule(self, event: ScheduleReceived) -> None:
        queue = event.queue or self.context.config.emqp.default_queue
        destination = f"queue/{queue}"
        parse_destination(destination)
        self.require("produce", destination)
        terms = read_terms(without_times(event.headers))
        envelope = Envelope(
            destination=destination,
            kind="send",
            payload=event.message,
            protocol="emqp",
            connection=self.id,
            principal=self.principal,
            properties=terms.properties,
            native={HEADERS: terms.text.encode()} if terms.text else {},
            content_type=content_type_of(event.message, terms.content_type),
            crc=zlib.crc32(event.message),
        )
        self.broker.schedule(self, event, envelope)

    def forward(self, event: ScheduleReceived | UnscheduleReceived, headers: str) -> None:
        """Have this scheduler do, or stop, what somebody asked for."""
        if self.wire.state is not State.REGISTERED:
            return
        send = self.wire.send_schedule
        if isinstance(event, UnscheduleReceived):
            send = self.wire.send_unschedule
        send(
            event.queue,
            headers,
            event.message,
            interval_s=event.interval_s,
            cron=event.cron,
            msgid=event.msgid,
        )
        self.session.wake()


# ------------------------------------------------------------------------------------ subscribers


class SubscriberGateway(EmqpGateway):
    """A SUB socket: one subscription of the hub, which knows the prefixes that the peer wants."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self._prefixes: dict[bytes, None] = {}
        self._wanted: tuple[bytes, ...] = ()
        self._subscriber: Subscriber | None = None
        self._unsettled: list[int] = []
        self._unwritten_bytes = 0
        self._most_bytes = context.config.connections.congested_bytes

    def receive(self, events: list[Event]) -> None:
        changed = False
        for event in events:
            if isinstance(event, Subscribed):
                self._prefixes[event.topic] = None
                changed = True
            elif isinstance(event, Unsubscribed):
                self._prefixes.pop(event.topic, None)
                changed = True
            else:
                self.act(event)
        if changed:
            self._wanted = tuple(self._prefixes)
            self._follow()

    def _follow(self) -> None:
        if self._subscriber is not None:
            self._subscriber.renew()
            return
        attachment = self.hub.subscribe(
            "topic/#",
            self,
            self.context.now(),
            peer=self.peer,
            window=_SUBSCRIBER_WINDOW,
            names=self._wants,
        )
        assert isinstance(attachment, Subscriber)
        self._subscriber = attachment
        self.attachments.add(attachment)

    def _wants(self, topic: str) -> bool:
        """Asked once per topic, until somebody's subscription changes."""
        if not topic.encode().startswith(self._wanted):
            return False
        try:
            self.require("consume", f"topic/{topic}")
        except Forbidden:
            return False
        return True

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        if self.wire.closed:
            return
        send = self.wire.send_publication
        size_bytes = 0
        for delivery in deliveries:
            envelope = delivery.envelope
            try:
                send(envelope.destination[6:], envelope.payload)
            except TooLargeToSend:
                self.context.count("dropped", self.protocol, "too large")
            else:
                size_bytes += len(envelope.payload)
        self.session.wake()
        ids = [delivery.envelope.id for delivery in deliveries]
        if self.session.congested:
            self._unsettled += ids
        elif isinstance(attachment, Subscriber) and attachment.is_lagging:
            self._unsettled += ids
            self._pace(size_bytes)
        else:
            attachment.settle(ids, self.context.now())

    def _pace(self, size_bytes: int) -> None:
        """It catches up, and what it missed may be more than fits into memory: only when some of
        it is written it shows whether the peer keeps up."""
        if not self._unwritten_bytes:
            # After the write, which is planned by now.
            asyncio.get_running_loop().call_soon(self.owned(self._on_written))
        self._unwritten_bytes += size_bytes + 1
        if self._unwritten_bytes > self._most_bytes:
            self.hold_back(True)

    def _on_written(self) -> None:
        """What was sent in this turn of the loop went to the socket, or the peer doesn't read."""
        self._unwritten_bytes = 0
        if not self.session.congested and not self.left:
            self.hold_back(False)
            self._settle()

    def handle_drain(self) -> None:
        self._settle()

    def _settle(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        if self._subscriber is not None and unsettled:
            self._subscriber.settle(unsettled, self.context.now())


# --------------------------------------------------------------------------------- administration


class AdminGateway(EmqpGateway):
    def act(self, event: Event) -> None:
        if not isinstance(event, AdminRequested | ShutdownRequested):
            super().act(event)
        elif not self.context.access.may_administer(self.principal):
            self.context.count("forbidden", self.protocol)
        elif isinstance(event, ShutdownRequested):
            self.wire.send_ack(event.msgid)
            self.broker.stop()
        else:
            self._answer_command(event.command)

    def _answer_command(self, command: str) -> None:
        answers = {
            "STATUS": self.broker.status,
            "ROUTER_SHOW_WORKERS": self.broker.workers_status,
            "ROUTER_SHOW_SCHEDULERS": self.broker.schedulers_status,
        }
        answer = answers.get(command)
        if answer is not None:
            self.wire.send_answer(answer())
