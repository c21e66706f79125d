"""eMQP's gateways for clients and publishers: requests, publications and schedules.

    REQUEST      → queue/NAME; with `guarantee` its REPLY leaves when it is durable. One with
                   `reply-requested` for a queue that no worker has named is a call of
                   service/NAME, if somebody provides that
    PUBLISH      → topic/NAME
    SCHEDULE     → a schedule of the hub, or one for a connected scheduler (`scheduler`)

Unknown headers are properties; `content-type` is the one that gives the message's type.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope, parse_destination
from crosswire.errors import (
    CallTimeout,
    DestinationFull,
    HubError,
    ProviderLost,
    QuotaExceeded,
    StoreError,
    TooLargeToSend,
)
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.emqp.gateway import EmqpGateway
from crosswire.gateways.emqp.messages import (
    HEADERS,
    IDENTITY,
    MSGID,
    QUEUE,
    RequestOptions,
    content_type_of,
    failure,
    failure_of_call,
    read_options,
    without_times,
)
from crosswire.hub.services import Answer
from crosswire.wire.contract import Connection, Event
from crosswire.wire.emqp.events import (
    PeerInformed,
    PeerLeaving,
    PublishReceived,
    RequestReceived,
    ScheduleReceived,
    UnscheduleReceived,
)
from crosswire.wire.emqp.states import State

__all__ = ["ClientGateway", "PublisherGateway"]

_PLANS: Final = 1024
"""Plans of requests that one client may have cached."""
_CACHED_CHARACTERS: Final = 512
"""Plans with longer headers are made anew."""
_PLAN_BYTES: Final = 2048
"""What a plan takes in memory beside its texts, roughly."""
_RETRY_FIRST_S: Final = 0.02
_RETRY_LONGEST_S: Final = 0.5
_UNREAD_TIMES: Final = 8
"""A client may leave this many times `congested_bytes` unread before it is not read from."""


class _RequestPlan:
    """What is the same for all requests of a client with one queue and one text of headers.

    A client sends thousands of requests with the same two: they are parsed and checked once.
    """

    __slots__ = ("destination", "native", "options", "queue", "service")

    def __init__(self, queue: str, destination: str, options: RequestOptions) -> None:
        self.queue = queue
        self.destination = destination
        self.service = destination.replace("queue/", "service/", 1)
        self.options = options
        self.native: dict[str, bytes] = {}
        """What a worker gets unchanged: the headers, and the queue's frame if it differs."""
        if options.text:
            self.native[HEADERS] = options.text.encode()
        if destination != f"queue/{queue}":
            self.native[QUEUE] = queue.encode()


_Produced = tuple[Envelope, _RequestPlan | None]
"""A message on its way into the hub, and its plan if it is a request."""


class PublisherGateway(EmqpGateway):
    """A publisher: PUBLISH produces to a topic. Clients may publish at their listener too."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self._batch: list[_Produced] = []
        self._refused: list[_Produced] = []
        """Messages that had no room, in order, until a retry succeeds."""
        self._retry_s = _RETRY_FIRST_S

    # Produce.

    def receive(self, events: list[Event]) -> None:
        """Produce the messages of one read as one batch."""
        for event in events:
            try:
                self.act(event)
            except HubError as error:
                self.ignore(error)
        if self._batch:
            self._produce_batch()

    def act(self, event: Event) -> None:
        """Add a publication to the batch."""
        if type(event) is PublishReceived:
            self._publish(event)
        else:
            super().act(event)

    def _publish(self, event: PublishReceived) -> None:
        destination = f"topic/{event.topic}"
        parse_destination(destination)
        self.require("produce", destination)
        options = read_options(event.headers)
        native = {MSGID: event.msgid.encode()}
        if options.text:
            native[HEADERS] = options.text.encode()
        envelope = Envelope(
            destination=destination,
            kind="publish",
            payload=event.message,
            protocol="emqp",
            connection=self.id,
            principal=self.principal,
            durable=False,  # there is no acknowledgement that could wait for the commit
            properties=options.properties,
            native=native,
            content_type=content_type_of(event.message, options.content_type),
            crc=zlib.crc32(event.message),
        )
        self._batch.append((envelope, None))

    def _produce_batch(self) -> None:
        taken, self._batch = self._batch, []
        if self._refused:
            # Nothing overtakes the messages that wait for room.
            self._refused += taken
            return
        receipt = self.produce([each[0] for each in taken])
        waiting = self._accepted(taken, receipt)
        if waiting:
            receipt.add_done_callback(self.owned(lambda done: self._on_commit(waiting, done)))

    def _accepted(self, taken: list[_Produced], receipt: Receipt) -> list[_Produced]:
        """Send receipts for requests that the hub has; gives those that wait for the commit."""
        refused = receipt.refused
        if refused:
            self._sort_refused(taken, receipt)
            taken = [each for index, each in enumerate(taken) if index not in refused]
            ids = [each for each in receipt.ids if each]
        else:
            ids = receipt.ids
        waiting: list[_Produced] = []
        receipts: list[bytes] = []
        done = receipt.done
        for each, identifier in zip(taken, ids, strict=True):
            envelope, plan = each
            if plan is None:
                continue
            if plan.options.wants_reply:
                self.broker.watch(identifier, envelope)
            if done or not envelope.durable:
                receipts.append(envelope.native[MSGID])
            else:
                waiting.append(each)
        if receipts:
            self.give_receipts(receipts)
        return waiting

    def _on_commit(self, waiting: list[_Produced], receipt: Receipt) -> None:
        if receipt.error is not None:
            self._try_again(waiting)
        elif not self.left:
            self.give_receipts([envelope.native[MSGID] for envelope, _ in waiting])

    def give_receipts(self, msgids: list[bytes]) -> None:
        """Send REPLYs that the hub has these requests; a publisher sends no requests."""

    # A full queue, or a full disk: REPLYs are withheld and the peer is not read from.

    def _sort_refused(self, taken: list[_Produced], receipt: Receipt) -> None:
        full = []
        for index, error in sorted(receipt.refused.items()):
            is_full = isinstance(error, DestinationFull) and not isinstance(error, QuotaExceeded)
            if is_full or isinstance(error, StoreError):
                full.append(taken[index])
            else:
                self.ignore(error)
        if full:
            self._try_again(full)

    def _try_again(self, taken: list[_Produced]) -> None:
        if self.left:
            return
        if not self._refused:
            self.connection.paused = True
            self.session.wake()
            loop = asyncio.get_running_loop()
            loop.call_later(self._retry_s, self.owned(self._retry))
            self._retry_s = min(self._retry_s * 2, _RETRY_LONGEST_S)
        self._refused += taken

    def _retry(self) -> None:
        if self.left:
            return
        self._batch, self._refused = self._refused, []
        self._produce_batch()
        if not self._refused:
            self._retry_s = _RETRY_FIRST_S
            self.connection.paused = self.broker.stopping
            self.session.wake()


class ClientGateway(PublisherGateway):
    """A client, or an external scheduler, which uses the same listener."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self._plans: dict[tuple[str, str], _RequestPlan] = {}
        self._plan_bytes = 0
        self._unread_bytes = context.config.connections.congested_bytes

    # Connecting.

    def connect(self, now: float) -> Connection:
        """eMQP's connection, with a larger write buffer."""
        # Deployed clients never read their receipts and must be able to send requests all the
        # same: a ROUTER drops what a peer doesn't read. So receipts are dropped first, then
        # results, before the session would stop reading from this peer.
        transport = self.session.transport
        transport.set_write_buffer_limits(_UNREAD_TIMES * self._unread_bytes)
        return super().connect(now)

    def receive(self, events: list[Event]) -> None:
        """Produce the requests of one read as one batch, or call a service for them.

        Consecutive requests mostly have the same queue and headers: the plan of the last one is
        kept at hand, and rights are checked only where there are users.
        """
        taken = self._batch
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
                if plan.options.wants_reply and self._call(event, plan):
                    continue
                if plan.destination != expected:
                    expected = plan.destination
                    self.broker.expect(expected, self.peer)
            except HubError as error:
                self.ignore(error)
                plan = None
                continue
            taken.append((self._envelope(event, plan), plan))
        if taken:
            self._produce_batch()

    def act(self, event: Event) -> None:
        """Act on a schedule, on a scheduler that comes or leaves, or on a publication."""
        if isinstance(event, ScheduleReceived):
            self._schedule(event)
        elif isinstance(event, UnscheduleReceived):
            self.broker.unschedule(self, event)
        elif isinstance(event, PeerInformed):
            # A scheduler's requests name their queues: there is nothing to check rights for yet.
            self.connection.send_ack(event.msgid)
            self.broker.enlist_scheduler(self)
        elif isinstance(event, PeerLeaving):
            self.broker.schedulers.pop(self, None)
        else:
            super().act(event)

    def leave(self) -> None:
        """Free its identity; it is no scheduler any more."""
        self.broker.schedulers.pop(self, None)
        super().leave()

    def wind_down(self) -> None:
        """Take nothing new; a scheduler gets the goodbye."""
        if self.connection.state is State.REGISTERED:
            self.connection.leave()
        super().wind_down()

    # Produce.

    def _plan(self, event: RequestReceived) -> _RequestPlan:
        """Raises InvalidDestination, and Forbidden before the headers are parsed."""
        destination = f"queue/{event.queue}" if event.queue else self.broker.default
        parse_destination(destination)
        self.require("produce", destination)
        plan = _RequestPlan(event.queue, destination, read_options(event.headers))
        if len(event.headers) <= _CACHED_CHARACTERS:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
                self.account.add(-self._plan_bytes)
                self._plan_bytes = 0
            self._plans[event.queue, event.headers] = plan
            # Headers are there twice: as they came, and as options.
            size_bytes = _PLAN_BYTES + len(event.queue) + 2 * len(event.headers)
            self.account.add(size_bytes)
            self._plan_bytes += size_bytes
        return plan

    def _envelope(self, event: RequestReceived, plan: _RequestPlan) -> Envelope:
        options, message = plan.options, event.message
        native = {MSGID: event.msgid.encode(), **plan.native}
        correlation = ""
        if options.wants_reply:
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
            durable=options.guarantee,
            properties=options.properties,
            native=native,
            content_type=content_type_of(message, options.content_type),
            crc=zlib.crc32(message),
        )

    def give_receipts(self, msgids: list[bytes]) -> None:
        """Send receipts; drop them if the client leaves too much unread."""
        if self.connection.closed:
            return
        if self.session.transport.get_write_buffer_size() > self._unread_bytes:
            self.context.count("dropped", self.protocol, "receipt", by=len(msgids))
            return
        self.connection.send_receipts(msgids)
        self.session.wake()

    def give_result(self, result: bytes, msgid: str) -> None:
        """Send a result; drop it if the client leaves far too much unread."""
        most = (_UNREAD_TIMES - 1) * self._unread_bytes
        if self.session.transport.get_write_buffer_size() > most:
            self.context.count("dropped", self.protocol, "result")
            return
        try:
            self.connection.send_result(result, msgid)
        except TooLargeToSend as error:
            self.connection.send_result(failure(f"the result can't be sent: {error}", 1), msgid)
        self.session.wake()

    # Call.

    def _call(self, event: RequestReceived, plan: _RequestPlan) -> bool:
        """Call a live provider, if no worker has named the queue; False if there is none."""
        name = plan.destination.removeprefix("queue/")
        if self.broker.named[name] or not self.hub.is_served(plan.service):
            return False
        self.require("call", plan.service)
        options = plan.options
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
            if lost and attempt <= options.retry_count:
                attempt += 1
                # Not at once: a provider that is just leaving would be chosen, and lost, again.
                asyncio.get_running_loop().call_soon(self.owned(call_again))
                return
            self.give_result(failure_of_call(answer, attempt), event.msgid)

        def call_again() -> None:
            if self.left:
                return
            try:
                self.call(envelope, answered, timeout_s=options.timeout_s)
            except HubError as error:
                self.give_result(failure_of_call(error, attempt), event.msgid)

        def journaled(receipt: Receipt) -> None:
            if receipt.error is None and not self.left:
                self.give_receipts([event.msgid.encode()])

        self.call(envelope, answered, timeout_s=options.timeout_s)
        if options.guarantee:
            self.hub.committed().add_done_callback(self.owned(journaled))
        else:
            self.give_receipts([event.msgid.encode()])
        return True

    # Schedules.

    def _schedule(self, event: ScheduleReceived) -> None:
        queue = event.queue or self.context.config.emqp.default_queue
        destination = f"queue/{queue}"
        parse_destination(destination)
        self.require("produce", destination)
        options = read_options(without_times(event.headers))
        envelope = Envelope(
            destination=destination,
            kind="send",
            payload=event.message,
            protocol="emqp",
            connection=self.id,
            principal=self.principal,
            properties=options.properties,
            native={HEADERS: options.text.encode()} if options.text else {},
            content_type=content_type_of(event.message, options.content_type),
            crc=zlib.crc32(event.message),
        )
        self.broker.schedule(self, event, envelope)

    def forward(self, event: ScheduleReceived | UnscheduleReceived, headers: str) -> None:
        """Have this scheduler run, or end, a schedule that a client asked for."""
        if self.connection.state is not State.REGISTERED:
            return
        send = self.connection.send_schedule
        if isinstance(event, UnscheduleReceived):
            send = self.connection.send_unschedule
        send(
            event.queue,
            headers,
            event.message,
            interval_s=event.interval_s,
            cron=event.cron,
            msgid=event.msgid,
        )
        self.session.wake()
