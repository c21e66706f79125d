"""EMP's gateway: `$` operations for the hub itself, any other operation is a service.

Requests are processed in order, as EMP asks. Consecutive `$publish` requests are no exception, but
fast: they join one commit group and are answered in order after it; any other operation waits for
those before it. What an operation stores is on disk before it is answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final

import msgspec

from crosswire.envelope import LARGEST_INTEGER, Envelope, Property, message_kind
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
from crosswire.gateways.failures import code_of
from crosswire.gateways.gateway import LARGEST_WINDOW, Gateway, parse_start
from crosswire.gateways.payloads import JSON, RawBody, from_raw_body, to_raw_body
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.receipt import Receipt
from crosswire.hub.schedules import Schedule
from crosswire.hub.services import Answer, Provider
from crosswire.wire.contract import Connection, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived

__all__ = ["EmpGateway"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
_Window = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_WINDOW)]


class _PublishData(RawBody, frozen=True, gc=False, kw_only=True):
    """Data of `$publish`."""

    destination: str
    properties: dict[str, Property] = msgspec.field(default_factory=dict)
    key: str = ""


class _SubscribeData(msgspec.Struct, frozen=True, rename={"start": "from"}):
    destination: str
    filter: str = ""
    name: str = ""
    start: str | _Count = "latest"
    window: _Window | None = None


class _ScheduleData(_PublishData, frozen=True, kw_only=True):
    interval_s: float = 0.0
    cron: str = ""
    nohaste: bool = False
    run_count: _Count = 0


class _AuthenticateData(msgspec.Struct, frozen=True):
    token: str


class _ServeData(msgspec.Struct, frozen=True):
    services: list[str]


class _UnsubscribeData(msgspec.Struct, frozen=True):
    subscription: int


class _UnscheduleData(msgspec.Struct, frozen=True):
    schedule: str


class _GetOpData(msgspec.Struct, frozen=True):
    op_name: str


class _DeliverData(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Data of `$deliver`."""

    subscription: int
    id: int
    destination: str
    attempt: int
    properties: dict[str, Property]
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: bytes | None = None


class _StoredReply(msgspec.Struct, frozen=True):
    """A reply that leaves when `receipt` is done: what it acknowledges is on disk then.

    `undo` gives back what only this connection holds, if it could not be written.
    """

    reply: bytes
    receipt: Receipt
    undo: Callable[[], None] | None = None


_TOO_DEEP: Final = "the data is nested too deeply"
"""What the connection could read may be too deep for a reader that is called from further down."""

_AT_ONCE: Final = 256
"""Requests that are processed before others have their turn of the loop; publishes are a batch."""

_read_publish: Final = msgspec.json.Decoder(_PublishData).decode
_encode: Final = msgspec.json.Encoder().encode


class EmpGateway(Gateway):
    protocol: ClassVar[str] = "emp"

    def connect(self, now: float) -> Connection:
        self._connection = EmpConnection("server", now, limits=self.context.config.limits.emp)
        self._todo: deque[RequestReceived] = deque()
        self._published: deque[tuple[list[int | tuple[int, HubError]], Receipt]] = deque()
        self._calling = False
        self._advancing = False
        self._resuming = False
        self._asked: dict[int, tuple[Attachment | Provider, int]] = {}
        self._subscriptions: dict[int, Attachment] = {}
        self._numbers: dict[Attachment, int] = {}
        self._early: dict[Attachment, list[Delivery]] = {}
        self._next_subscription = 1
        return self._connection

    def receive(self, events: list[Event]) -> None:
        settled: dict[Attachment, list[int]] = {}
        now = self.context.now()
        for event in events:
            if type(event) is RequestReceived:
                self._todo.append(event)
            elif type(event) is ResponseReceived:
                target, identifier = self._asked.pop(event.id)
                if event.succeeded and not isinstance(target, Provider):
                    settled.setdefault(target, []).append(identifier)
                else:
                    self._on_response(event, target, identifier, now)
        for attachment, ids in settled.items():
            attachment.settle(ids, now)
        self._advance()

    # Requests of the peer.

    def _advance(self) -> None:
        """Process requests up to the first that must wait.

        What is answered at once gets here again: the loop that is running goes on with the next.
        Thousands may have waited for one: the rest of them waits for the next turn.
        """
        if self._advancing:
            return
        self._advancing = True
        room = _AT_ONCE
        try:
            while self._todo and not self._calling and not self._connection.closed:
                if self._todo[0].op == "$publish":
                    self._publish()
                elif self._published:
                    return
                elif room:
                    room -= 1
                    self._perform(self._todo.popleft())
                else:
                    self._resume_later()
                    return
        finally:
            self._advancing = False

    def _resume_later(self) -> None:
        def resume() -> None:
            self._resuming = False
            if not self.left:
                self._advance()
                self.session.wake()

        if not self._resuming:
            self._resuming = True
            asyncio.get_running_loop().call_soon(self.owned(resume))

    def _publish(self) -> None:
        """All `$publish` requests at the head, as one batch."""
        envelopes: list[Envelope] = []
        answers: list[int | tuple[int, HubError]] = []
        while self._todo and self._todo[0].op == "$publish":
            request = self._todo.popleft()
            try:
                envelopes.append(self._envelope(_read_publish(request.data)))
                answers.append(request.id)
            except HubError as error:
                answers.append((request.id, error))
            except msgspec.MsgspecError as error:
                answers.append((request.id, InvalidEnvelope(str(error))))
            except RecursionError:
                answers.append((request.id, InvalidEnvelope(_TOO_DEEP)))
        receipt = self.produce(envelopes)
        self._published.append((answers, receipt))
        receipt.add_done_callback(self.owned(self._answer_published))

    def _envelope(self, data: _PublishData) -> Envelope:
        self.require("produce", data.destination)
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
        """A batch that needs no disk may be done before one that does: the order is kept."""
        if self.left or self._connection.closed:
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
                    self._connection.send_success(answer, b'{"id":%d}' % receipt.ids[index])
                else:
                    self._fail(answer, error)
                index += 1
        self.session.wake()
        self._advance()

    def _perform(self, request: RequestReceived) -> None:
        operation = _OPERATIONS.get(request.op)
        try:
            if operation is not None:
                reply = operation(self, request.data)
                if isinstance(reply, _StoredReply):
                    self._answer_stored(request.id, reply)
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
            self._fail(request.id, InvalidEnvelope(_TOO_DEEP))

    def _answer_stored(self, identifier: int, answer: _StoredReply) -> None:
        """Requests behind this one wait: responses leave in the order of requests."""

        def stored(receipt: Receipt) -> None:
            self._calling = False
            if self.left or self._connection.closed:
                return
            if receipt.error is None:
                self._connection.send_success(identifier, answer.reply)
                self._begin_subscription()
            else:
                if answer.undo is not None:
                    answer.undo()
                self._fail(identifier, receipt.error)
            self.session.wake()
            self._advance()

        self._calling = True
        answer.receipt.add_done_callback(self.owned(stored))

    def _succeed(self, identifier: int, reply: bytes) -> None:
        """A reply that is too large for a frame is a failure."""
        try:
            self._connection.send_success(identifier, reply)
        except TooLargeToSend as error:
            self._fail(identifier, InvalidEnvelope(f"the answer can't be sent: {error}"))

    def _fail(self, identifier: int, error: CrosswireError) -> None:
        if isinstance(error, ProviderFailed):
            data = error.data if error.data[:1] == b"{" else b"{}"
            try:
                self._connection.send_failure(identifier, error.code, error.description, data)
            except TooLargeToSend:
                self._connection.send_failure(identifier, error.code, error.description)
        else:
            self._connection.send_failure(identifier, code_of(error), str(error))

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
            self._calling = False
            if self._connection.closed:
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

        self._calling = True
        try:
            self.call(envelope, answered)
        except HubError:
            self._calling = False
            raise

    def _as_object(self, envelope: Envelope) -> bytes:
        """EMP's data is an object: anything else is put into one. Peers of protocols without
        content types mean an object where they send one."""
        most_bytes = self._connection.limits.frame_bytes
        body = to_raw_body(self.context.schemas.to_json(envelope), most_bytes)
        if isinstance(body.json, msgspec.Raw):
            text = bytes(body.json)
            if text.lstrip(b" \t\r\n").startswith(b"{"):
                return text
        return _encode(body)

    # The hub's own operations: data in, data out.

    def _echo(self, data: bytes) -> bytes:
        return data

    def _list_ops(self, _data: bytes) -> bytes:
        served = [name.removeprefix("service/") for name in self.hub.services.providers()]
        names = [*sorted(_OPERATIONS), "$publish", *sorted(served)]
        return _encode({"ops": [{"name": name} for name in names]})

    def _get_op(self, data: bytes) -> bytes:
        name = msgspec.json.decode(data, type=_GetOpData).op_name
        known = name in _OPERATIONS or name == "$publish"
        if not known and not (not name.startswith("$") and self.hub.is_served(f"service/{name}")):
            raise NoProvider(f"nobody provides {name}")
        return _encode({"op": {"name": name}})

    def _authenticate(self, data: bytes) -> bytes:
        token = msgspec.json.decode(data, type=_AuthenticateData).token
        principal = self.context.access.by_token(token)
        if principal is None:
            self.context.count("unauthenticated", self.protocol)
            raise Forbidden("nobody has this token")
        self.identify(principal)
        return _encode({"principal": principal})

    def _subscribe(self, data: bytes) -> bytes | _StoredReply:
        asked = msgspec.json.decode(data, type=_SubscribeData)
        number = self._next_subscription
        self._next_subscription += 1
        attachment = self.consume(
            asked.destination,
            window=asked.window,
            filter=asked.filter,
            name=asked.name,
            start=parse_start(str(asked.start)),
        )
        self._subscriptions[number] = attachment
        reply = _encode({"subscription": number})
        if not asked.name:
            return reply

        def undo() -> None:
            self._early.pop(attachment, None)
            if self._subscriptions.pop(number, None) is not None:
                self.detach(attachment)

        return _StoredReply(reply, self.hub.committed(), undo)

    def _begin_subscription(self) -> None:
        """The peer knows the number of its new subscription now."""
        number = self._next_subscription - 1
        attachment = self._subscriptions.get(number)
        if attachment is not None and attachment not in self._numbers:
            self._numbers[attachment] = number
            self.deliver(attachment, self._early.pop(attachment, []))

    def _unsubscribe(self, data: bytes) -> bytes:
        number = msgspec.json.decode(data, type=_UnsubscribeData).subscription
        attachment = self._subscriptions.pop(number, None)
        if attachment is None:
            raise UnknownMessage(f"there is no subscription {number} on this connection")
        self._numbers.pop(attachment, None)
        self.detach(attachment)
        return b"{}"

    def _serve(self, data: bytes) -> bytes:
        services = msgspec.json.decode(data, type=_ServeData).services
        if any(name.startswith("$") for name in services):
            raise Forbidden("names that start with $ are the hub's own")
        served = {name for provider in self.providers for name in provider.names}
        new = {f"service/{name}" for name in services} - served
        if new:
            self.serve(sorted(new))
        return b"{}"

    def _schedule(self, data: bytes) -> _StoredReply:
        asked = msgspec.json.decode(data, type=_ScheduleData)
        now = self.context.now()
        schedule = Schedule(
            id=f"{self.id}/{self.hub.store.reserve(1)}",
            envelope=self._envelope(asked),
            interval_s=asked.interval_s,
            cron=asked.cron,
            run_count=asked.run_count,
            nohaste=asked.nohaste,
        )
        reply = _encode({"schedule": self.hub.schedules.add(schedule, now).id})
        return _StoredReply(reply, self.hub.committed())

    def _unschedule(self, data: bytes) -> _StoredReply:
        identifier = msgspec.json.decode(data, type=_UnscheduleData).schedule
        found = self.hub.schedules.get(identifier)
        if found is not None:
            self.require("produce", found.envelope.destination)
        self.hub.schedules.remove(identifier)
        return _StoredReply(b"{}", self.hub.committed())

    def _list_schedules(self, _data: bytes) -> bytes:
        allowed = self.context.access.may
        listed = [
            {
                "schedule": each.id,
                "destination": each.envelope.destination,
                "interval_s": each.interval_s,
                "cron": each.cron,
                "run_count": each.run_count,
                "fired": each.fired,
                "next_due": each.next_due,
            }
            for each in self.hub.schedules.all()
            if allowed(self.principal, "produce", each.envelope.destination)
        ]
        return _encode({"schedules": listed})

    # Requests of ours, and their answers.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        if self._connection.closed:
            return
        number = self._numbers.get(attachment)
        if number is None:
            # Its `$subscribe` is not answered yet: the peer would not know what this is.
            self._early.setdefault(attachment, []).extend(deliveries)
            return
        send, most_bytes = self._connection.send_request, self._connection.limits.frame_bytes
        unfit: list[tuple[int, str]] = []
        for delivery in deliveries:
            envelope = self.context.schemas.readable(delivery.envelope)
            try:
                body = to_raw_body(envelope, most_bytes)
                data = _encode(self._delivery(number, delivery, envelope, body))
                self._asked[send("$deliver", data)] = (attachment, envelope.id)
            except TooLargeToSend as error:
                unfit.append((envelope.id, f"too large for EMP: {error}"))
        self.session.wake()
        for identifier, cause in unfit:
            attachment.refuse([identifier], self.context.now(), cause=cause)

    def _delivery(
        self, number: int, delivery: Delivery, envelope: Envelope, body: RawBody
    ) -> _DeliverData:
        return _DeliverData(
            number,
            envelope.id,
            envelope.destination,
            delivery.attempt,
            envelope.properties,
            body.json,
            body.text,
            body.base64,
        )

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        if self._connection.closed:
            return
        now = self.context.now()
        for delivery in requests:
            envelope = delivery.envelope
            op = envelope.destination.removeprefix("service/")
            try:
                identifier = self._connection.send_request(op, self._as_object(envelope))
            except HubError as error:
                failure = ProviderFailed(code_of(error), str(error))
                provider.fail(envelope.id, failure, now)
            except TooLargeToSend as error:
                failure = ProviderFailed("invalid_request", f"too large for EMP: {error}")
                provider.fail(envelope.id, failure, now)
            else:
                self._asked[identifier] = (provider, envelope.id)
        self.session.wake()

    def _on_response(
        self, event: ResponseReceived, target: Attachment | Provider, identifier: int, now: float
    ) -> None:
        """An answer to a call, or the refusal of a message."""
        if isinstance(target, Provider):
            if event.succeeded:
                target.answer(identifier, self._response(event.data), now)
            else:
                failed = ProviderFailed(event.code, event.description, data=event.data)
                target.fail(identifier, failed, now)
        else:
            cause = f"{event.code}: {event.description}" if event.code else event.description
            target.refuse([identifier], now, cause=cause)

    def _response(self, data: bytes) -> Envelope:
        return Envelope(
            destination="",
            kind="response",
            payload=data,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            content_type=JSON,
        )


_OPERATIONS: Final[dict[str, Callable[[EmpGateway, bytes], Any]]] = {
    "$authenticate": EmpGateway._authenticate,
    "$echo": EmpGateway._echo,
    "$get_op": EmpGateway._get_op,
    "$list_ops": EmpGateway._list_ops,
    "$list_schedules": EmpGateway._list_schedules,
    "$schedule": EmpGateway._schedule,
    "$serve": EmpGateway._serve,
    "$subscribe": EmpGateway._subscribe,
    "$unschedule": EmpGateway._unschedule,
    "$unsubscribe": EmpGateway._unsubscribe,
}
