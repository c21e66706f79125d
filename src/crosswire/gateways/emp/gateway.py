"""EMP's gateway: `$` operations are the hub's, any other operation is a call of a service.

    $publish                     → queue/NAME or topic/NAME; answered after the commit
    $subscribe, $unsubscribe     ← `$deliver` requests of the hub; success settles, failure refuses
    any other operation OP       → a call of service/OP
    $extend                      a subscriber still works on these: their leases start anew
    $serve                       ← calls, as requests of the hub for OP
    $schedule, $unschedule, $list_schedules, $authenticate, $echo, $list_ops, $get_op

Requests are processed in order, as EMP asks. Consecutive `$publish` requests are no exception, but
fast: they join one commit group and are answered in order after it. Any other operation waits for
those before it. What an operation stores is durable before it is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from crosswire.access import Right
from crosswire.commitlog.contract import Receipt
from crosswire.envelope import NAMED_CHARACTERS, Envelope, message_kind
from crosswire.error_texts import public_text
from crosswire.errors import (
    CrosswireError,
    Forbidden,
    HubError,
    InvalidEnvelope,
    NoProvider,
    ProviderFailed,
    TooLargeToSend,
    UnknownMessage,
)
from crosswire.gateways.emp.messages import (
    OPERATION_BYTES,
    TOO_DEEP,
    AuthenticateData,
    ExtendData,
    GetOpData,
    PublishData,
    ServeData,
    SubscribeData,
    UnscheduleData,
    UnsubscribeData,
    encode,
    encode_delivery,
    read_publish,
    read_schedule,
    to_object,
)
from crosswire.gateways.failures import code_of
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.options import parse_start
from crosswire.gateways.payloads import JSON, from_raw_body
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.schedules import Schedule
from crosswire.hub.services import Answer, Provider
from crosswire.hub.turns import TurnShare
from crosswire.wire.contract import Connection, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived

__all__ = ["EmpGateway"]


_EARLY: Final = 256
_EARLY_BYTES: Final = 1 << 19
"""Messages, and their size, that are sent before others may have a turn."""
_LISTED: Final = 256
"""Entries of a list that are made before others may have a turn."""
_SORTED: Final = 4096
"""Names of more services are listed in the order in which they were first provided: to sort all of
them would take long."""

_LongReply: TypeAlias = Generator[None, None, bytes]
"""Makes a reply, and yields where it may wait for another turn of the event loop."""


class _StoredReply(msgspec.Struct, frozen=True):
    """A reply that leaves when `receipt` is done: what it acknowledges is durable then.

    `undo` gives back what only this connection holds, if the commit failed.
    """

    reply: bytes
    receipt: Receipt
    undo: Callable[[], None] | None = None


class EmpGateway(Gateway):
    """A peer that speaks EMP."""

    protocol: ClassVar[str] = "emp"
    counts_calls: ClassVar[bool] = False
    connection: EmpConnection

    # Connecting.

    def connect(self, now: float) -> Connection:
        """EMP's connection, as server."""
        self.connection = EmpConnection("server", now, limits=self.context.config.limits.emp)
        self._requests: deque[RequestReceived] = deque()
        """Requests of the peer that are not processed yet."""
        self._published: deque[tuple[list[int | tuple[int, HubError]], Receipt]] = deque()
        """Batches that wait for their commit: request ids, or an id and why it was refused."""
        self._is_waiting = False
        """Whether the last operation is not answered: the ones after it wait."""
        self._is_advancing = False
        self._resume = TurnShare(self.hub.turns, self.owned(self._go_on))
        self.session.other_shares.append(self._resume)
        self._reply: tuple[int, _LongReply] | None = None
        """The request whose reply is being made, in parts."""
        self._awaited: dict[int, tuple[Attachment | Provider, int]] = {}
        """Requests of ours that the peer has not answered, and the messages that they carried."""
        self._subscriptions: dict[int, Attachment] = {}
        self._numbers: dict[Attachment, int] = {}
        """Numbers of subscriptions whose `$subscribe` is answered."""
        self._early: dict[Attachment, list[Delivery]] = {}
        self._next_subscription = 1
        return self.connection

    def receive(self, events: list[Event]) -> None:
        """Settle what the peer has answered, then process its requests."""
        settled: dict[Attachment, list[int]] = {}
        now = self.context.now()
        for event in events:
            if type(event) is RequestReceived:
                self._requests.append(event)
            elif type(event) is ResponseReceived:
                target, identifier = self._awaited.pop(event.id)
                if event.succeeded and not isinstance(target, Provider):
                    settled.setdefault(target, []).append(identifier)
                else:
                    self._on_response(event, target, identifier, now)
        # Settlements of one read are one call for each subscription, before new requests.
        for attachment, ids in settled.items():
            attachment.settle(ids, now)
        self._advance()

    # Requests of the peer, in order.

    def _advance(self) -> None:
        """Process requests up to the first that must wait.

        An operation that is answered at once calls this again: the loop that runs takes the next,
        so that a peer with thousands of requests can't deepen the stack. What is left when the turn
        of the event loop is over waits for another one.
        """
        if self._is_advancing:
            return
        self._is_advancing = True
        is_over = self.hub.turns.is_over
        try:
            while self._requests and not self._is_waiting and not self.connection.closed:
                if self._requests[0].op == "$publish":
                    self._publish()
                elif self._published:
                    # Responses leave in the order of requests: those of publishes come first.
                    return
                elif self.session.congested:
                    # Requests of a few bytes may have long replies: `handle_drain` goes on.
                    return
                else:
                    self._perform(self._requests.popleft())
                    if is_over() and self._requests:
                        self._resume.later()
                        return
        finally:
            self._is_advancing = False

    def _go_on(self) -> None:
        """Process the requests that waited for another turn."""
        if not self.left:
            if self._reply is not None:
                self._continue_reply()
            self._advance()
            self.session.wake()

    def handle_drain(self) -> None:
        """The peer reads again: process the requests that waited for that."""
        self._advance()

    def _continue_reply(self) -> None:
        """Make a part of a long reply, or the rest of it."""
        assert self._reply is not None
        identifier, parts = self._reply
        is_over = self.hub.turns.is_over
        try:
            # A part at least, even if the turn is over.
            next(parts)
            while not is_over():
                next(parts)
        except StopIteration as made:
            self._reply, self._is_waiting = None, False
            self._succeed(identifier, made.value)
        else:
            self._is_waiting = True
            self._resume.later()

    def _perform(self, request: RequestReceived) -> None:
        operation = _OPERATIONS.get(request.op)
        try:
            if operation is not None:
                self._check_operation(request)
                reply = operation(self, request.data)
                if isinstance(reply, _StoredReply):
                    self._answer_stored(request.id, reply)
                elif isinstance(reply, Generator):
                    self._reply = (request.id, reply)
                    self._continue_reply()
                elif isinstance(reply, HubError):
                    self._refuse_later(request.id, reply)
                else:
                    self._succeed(request.id, reply)
                    self._begin_subscription()
            elif request.op.startswith("$"):
                raise NoProvider(f"the hub has no operation {request.op}")
            else:
                self._call(request)
        except HubError as error:
            self._fail(request.id, error)
        except msgspec.MsgspecError as error:
            self._fail(request.id, InvalidEnvelope(str(error)))
        except RecursionError:
            self._fail(request.id, InvalidEnvelope(TOO_DEEP))

    def _check_operation(self, request: RequestReceived) -> None:
        """What can be judged before the data is parsed: rights by the name of the operation, and
        the size. Raises Forbidden or InvalidEnvelope."""
        right = _RIGHTS.get(request.op)
        if right is not None:
            self.require_anywhere(right)
        if len(request.data) > OPERATION_BYTES and request.op not in _CARRY_MESSAGES:
            raise InvalidEnvelope(
                f"the data of {request.op} has at most {OPERATION_BYTES} bytes,"
                f" not {len(request.data)}"
            )

    def _answer_stored(self, identifier: int, answer: _StoredReply) -> None:
        """Answer after the commit; requests after this one wait for it."""

        def stored(receipt: Receipt) -> None:
            self._is_waiting = False
            if self.left or self.connection.closed:
                return
            if receipt.error is None:
                self.connection.send_success(identifier, answer.reply)
                self._begin_subscription()
            else:
                if answer.undo is not None:
                    answer.undo()
                self._fail(identifier, receipt.error)
            self.session.wake()
            self._advance()

        self._is_waiting = True
        answer.receipt.add_done_callback(self.owned(stored))

    def _refuse_later(self, identifier: int, error: HubError) -> None:
        """Answer a failed sign-in, perhaps with a delay; requests after it wait."""

        def refuse() -> None:
            self._is_waiting = False
            self._fail(identifier, error)
            self._advance()

        self._is_waiting = True
        self.refuse_sign_in(refuse)

    def _succeed(self, identifier: int, reply: bytes) -> None:
        """Answer with success; with a failure if the reply is too large for a frame."""
        try:
            self.connection.send_success(identifier, reply)
        except TooLargeToSend as error:
            self._fail(identifier, InvalidEnvelope(f"the answer can't be sent: {error}"))

    def _fail(self, identifier: int, error: CrosswireError) -> None:
        """Answer with a failure; a provider's own code, description and data are kept."""
        if isinstance(error, ProviderFailed):
            data = error.data if error.data[:1] == b"{" else b"{}"
            try:
                self.connection.send_failure(identifier, error.code, error.description, data)
            except TooLargeToSend:
                self.connection.send_failure(identifier, error.code, error.description)
        else:
            self.connection.send_failure(identifier, code_of(error), public_text(error))

    # Produce.

    def _publish(self) -> None:
        """Produce all `$publish` requests at the head of the queue as one batch."""
        envelopes: list[Envelope] = []
        answers: list[int | tuple[int, HubError]] = []
        has_users = not self.context.access.open
        while self._requests and self._requests[0].op == "$publish":
            request = self._requests.popleft()
            try:
                if has_users:
                    self.require_anywhere("produce")
                envelopes.append(self._envelope(read_publish(request.data)))
                answers.append(request.id)
            except HubError as error:
                answers.append((request.id, error))
            except msgspec.MsgspecError as error:
                answers.append((request.id, InvalidEnvelope(str(error))))
            except RecursionError:
                answers.append((request.id, InvalidEnvelope(TOO_DEEP)))
        receipt = self.produce(envelopes)
        self._published.append((answers, receipt))
        receipt.add_done_callback(self.owned(self._answer_published))

    def _envelope(self, data: PublishData) -> Envelope:
        self.require("produce", data.destination)
        if isinstance(data.json, msgspec.Raw) and data.text is None and data.base64 is None:
            payload, content_type = bytes(data.json), JSON  # nearly always: without a call
        else:
            payload, content_type = from_raw_body(data)
        return Envelope(
            destination=data.destination,
            kind=message_kind(data.destination),
            payload=payload,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            key=data.key,
            properties=data.properties,
            content_type=content_type,
        )

    def _answer_published(self, _receipt: Receipt) -> None:
        """Answer the oldest batches that are durable.

        A batch that needs no commit may be done before one that does: it waits for its turn.
        """
        if self.left or self.connection.closed:
            return
        while self._published and self._published[0][1].done:
            answers, receipt = self._published.popleft()
            index = 0
            for answer in answers:
                if not isinstance(answer, int):
                    self._fail(*answer)
                    continue
                error = receipt.error or receipt.refused.get(index)
                if error is None:
                    self.connection.send_success(answer, b'{"id":%d}' % receipt.ids[index])
                else:
                    self._fail(answer, error)
                index += 1
        self.session.wake()
        self._advance()

    # Consume.

    def _subscribe(self, data: bytes) -> bytes | _StoredReply:
        parsed = msgspec.json.decode(data, type=SubscribeData)
        number = self._next_subscription
        self._next_subscription += 1
        attachment = self.consume(
            parsed.destination,
            window=parsed.window,
            filter=parsed.filter,
            name=parsed.name,
            start=parse_start(str(parsed.start)),
        )
        self._subscriptions[number] = attachment
        reply = encode({"subscription": number})
        if not parsed.name:
            return reply

        def undo() -> None:
            self._early.pop(attachment, None)
            if self._subscriptions.pop(number, None) is not None:
                self.detach(attachment)

        # A named subscription outlives the connection: it is durable before it is confirmed.
        return _StoredReply(reply, self.hub.committed(), undo)

    def _begin_subscription(self) -> None:
        """Deliver to a subscription whose number the peer knows now, if the last answer had one."""
        number = self._next_subscription - 1
        attachment = self._subscriptions.get(number)
        if attachment is not None and attachment not in self._numbers:
            self._numbers[attachment] = number
            part: list[Delivery] = []
            size_bytes = 0
            for delivery in self._early.pop(attachment, []):
                # Before all that the hub hands out later, and in parts, as the hub does.
                part.append(delivery)
                size_bytes += len(delivery.envelope.payload)
                if len(part) >= _EARLY or size_bytes >= _EARLY_BYTES:
                    self.hub.defer("emp delivery", self.owned(self.deliver), attachment, part)
                    part, size_bytes = [], 0
            if part:
                self.hub.defer("emp delivery", self.owned(self.deliver), attachment, part)
            self.hub.hand_out()

    def _unsubscribe(self, data: bytes) -> bytes:
        number = msgspec.json.decode(data, type=UnsubscribeData).subscription
        attachment = self._subscriptions.pop(number, None)
        if attachment is None:
            raise UnknownMessage(f"there is no subscription {number} on this connection")
        self._numbers.pop(attachment, None)
        self.detach(attachment)
        return b"{}"

    def _extend(self, data: bytes) -> bytes:
        parsed = msgspec.json.decode(data, type=ExtendData)
        attachment = self._subscriptions.get(parsed.subscription)
        if attachment is None:
            raise UnknownMessage(f"there is no subscription {parsed.subscription} here")
        count = attachment.extend(parsed.ids, self.context.now(), parsed.lease_s)
        return encode({"extended": count})

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send `$deliver` requests; the peer's responses settle or refuse the messages."""
        if self.connection.closed:
            return
        number = self._numbers.get(attachment)
        if number is None:
            # Its `$subscribe` is not answered: the peer couldn't relate the number to anything.
            self._early.setdefault(attachment, []).extend(deliveries)
            return
        send, most_bytes = self.connection.send_request, self.connection.limits.frame_bytes
        unfit: list[tuple[int, str]] = []
        for delivery in deliveries:
            envelope = self.context.schemas.readable(delivery.envelope)
            try:
                data = encode_delivery(number, delivery, envelope, most_bytes)
                self._awaited[send("$deliver", data)] = (attachment, envelope.id)
            except TooLargeToSend as error:
                unfit.append((envelope.id, f"too large for EMP: {error}"))
        self.session.wake()
        # After the loop: refusing frees room, and the hub may deliver more in the same call.
        for identifier, cause in unfit:
            attachment.refuse([identifier], self.context.now(), cause=cause)

    def _on_response(
        self, event: ResponseReceived, target: Attachment | Provider, identifier: int, now: float
    ) -> None:
        """The answer to a call, or the refusal of a message."""
        if isinstance(target, Provider):
            if event.succeeded:
                target.answer(identifier, self.response(event.data, JSON), now)
            else:
                failed = ProviderFailed(event.code, event.description, data=event.data)
                target.fail(identifier, failed, now)
        else:
            cause = f"{event.code}: {event.description}" if event.code else event.description
            target.refuse([identifier], now, cause=cause)

    # Call.

    def _call(self, request: RequestReceived) -> None:
        envelope = Envelope(
            destination=f"service/{request.op}",
            kind="request",
            payload=request.data,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            correlation=str(request.id),
            content_type=JSON,
        )

        def answered(answer: Answer) -> None:
            self._is_waiting = False
            if self.connection.closed:
                return
            try:
                if isinstance(answer, CrosswireError):
                    raise answer
                self._succeed(request.id, self._as_object(answer))
            except HubError as error:
                self._fail(request.id, error)
            except TooLargeToSend as error:
                self._fail(request.id, InvalidEnvelope(f"the answer can't be sent: {error}"))
            self.session.wake()
            self._advance()

        # Before the call: without a provider it is answered before `call` returns.
        self._is_waiting = True
        try:
            self.call(envelope, answered)
        except HubError:
            self._is_waiting = False
            raise

    def _as_object(self, envelope: Envelope) -> bytes:
        return to_object(envelope, self.context.schemas, self.connection.limits.frame_bytes)

    # Serve.

    def _serve(self, data: bytes) -> bytes:
        services = msgspec.json.decode(data, type=ServeData).services
        if any(name.startswith("$") for name in services):
            raise Forbidden("names that start with $ are the hub's own")
        served = {name for provider in self.providers for name in provider.names}
        new = {f"service/{name}" for name in services} - served
        if new:
            self.serve(sorted(new))
        return b"{}"

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Send calls as requests of the hub; the operation is the service, with its method."""
        if self.connection.closed:
            return
        now = self.context.now()
        for delivery in requests:
            envelope = delivery.envelope
            op = envelope.destination.removeprefix("service/")
            try:
                identifier = self.connection.send_request(op, self._as_object(envelope))
            except HubError as error:
                failure = ProviderFailed(code_of(error), public_text(error))
                provider.fail(envelope.id, failure, now)
            except TooLargeToSend as error:
                failure = ProviderFailed("invalid_request", f"too large for EMP: {error}")
                provider.fail(envelope.id, failure, now)
            else:
                self._awaited[identifier] = (provider, envelope.id)
        self.session.wake()

    # Schedules and other operations of the hub: data in, data out.

    def _schedule(self, data: bytes) -> _StoredReply:
        parsed = read_schedule(data)
        now = self.context.now()
        schedule = Schedule(
            id=f"{self.id}/{self.hub.store.reserve_in_group(1)}",
            envelope=self._envelope(parsed),
            interval_s=parsed.interval_s,
            cron=parsed.cron,
            run_count=parsed.run_count,
            nohaste=parsed.nohaste,
        )
        reply = encode({"schedule": self.hub.schedules.add(schedule, now).id})
        return _StoredReply(reply, self.hub.committed())

    def _unschedule(self, data: bytes) -> _StoredReply:
        identifier = msgspec.json.decode(data, type=UnscheduleData).schedule
        found = self.hub.schedules.get(identifier)
        if found is None or not self._may_manage(found):
            # The same for one of another user: that there is one, and where it sends to, is not
            # shown.
            raise UnknownMessage(f"there is no schedule {identifier[:NAMED_CHARACTERS]!r}")
        self.hub.schedules.remove(identifier)
        return _StoredReply(b"{}", self.hub.committed())

    def _may_manage(self, schedule: Schedule) -> bool:
        return self.context.access.may_manage(self.principal, schedule.envelope.principal)

    def _list_schedules(self, _data: bytes) -> _LongReply:
        """The peer's own; all of them for administrators, and without users."""
        listed: list[dict[str, object]] = []
        for number, each in enumerate(self.hub.schedules.all(), 1):
            if not number % _LISTED:
                yield
            if self._may_manage(each):
                listed.append(
                    {
                        "schedule": each.id,
                        "destination": each.envelope.destination,
                        "interval_s": each.interval_s,
                        "cron": each.cron,
                        "run_count": each.run_count,
                        "fired": each.fired,
                        "next_due": each.next_due,
                    }
                )
        return encode({"schedules": listed})

    def _authenticate(self, data: bytes) -> bytes | Forbidden:
        token = msgspec.json.decode(data, type=AuthenticateData).token
        principal = self.identify_by_token(token)
        if principal is None:
            return Forbidden("nobody has this token, or this connection is another user's")
        return encode({"principal": principal})

    def _echo(self, data: bytes) -> bytes:
        """The data byte for byte: its integers may be larger than any decoder here can hold."""
        return data

    def _list_ops(self, _data: bytes) -> _LongReply:
        may_reach = self.context.access.may_reach
        served = []
        for number, name in enumerate(self.hub.services.names(), 1):
            if not number % _LISTED:
                yield
            if may_reach(self.principal, "call", name):
                served.append(name.removeprefix("service/"))
        if len(served) <= _SORTED:
            served.sort()
        names = [*sorted(_OPERATIONS), "$publish", *served]
        return encode({"ops": [{"name": name} for name in names]})

    def _get_op(self, data: bytes) -> bytes:
        name = msgspec.json.decode(data, type=GetOpData).op_name
        known = name in _OPERATIONS or name == "$publish"
        # One that the peer may not call is unknown to it, whether there is one or not.
        if not known and (
            name.startswith("$")
            or not self.context.access.may_reach(self.principal, "call", f"service/{name}")
            or not self.hub.is_served(f"service/{name}")
        ):
            raise NoProvider(f"nobody provides {name}")
        return encode({"op": {"name": name}})


_OPERATIONS: Final[dict[str, Callable[[EmpGateway, bytes], Any]]] = {
    "$authenticate": EmpGateway._authenticate,
    "$echo": EmpGateway._echo,
    "$extend": EmpGateway._extend,
    "$get_op": EmpGateway._get_op,
    "$list_ops": EmpGateway._list_ops,
    "$list_schedules": EmpGateway._list_schedules,
    "$schedule": EmpGateway._schedule,
    "$serve": EmpGateway._serve,
    "$subscribe": EmpGateway._subscribe,
    "$unschedule": EmpGateway._unschedule,
    "$unsubscribe": EmpGateway._unsubscribe,
}
"""All operations of the hub but `$publish`, which is processed in batches."""

_RIGHTS: Final[dict[str, Right]] = {
    "$schedule": "produce",
    "$serve": "serve",
    "$subscribe": "consume",
    "$unschedule": "produce",
}
"""Rights that an operation needs, to whatever destination its data names."""

_CARRY_MESSAGES: Final = frozenset({"$echo", "$schedule"})
"""Operations whose data may be as large as a frame; `$publish` is another."""
