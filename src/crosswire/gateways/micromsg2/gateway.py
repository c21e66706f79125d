"""MicroMsg2's gateway: a SEND produces, calls or answers, by its destination; commands consume.

Beside those of the application, properties have these names: `content-type`, `correlation-id` and
`reply-to` are the envelope's own; an answer that is a failure has `error` and `description`; a call
may have `timeout`, in seconds. Text that reads `true` or `false` is a boolean.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import ClassVar, Final
from zlib import crc32

import msgspec

from crosswire.envelope import NAME_BYTES, Envelope, Kind, Property, message_kind, parse_destination
from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    HubError,
    InvalidDestination,
    InvalidEnvelope,
    LimitExceeded,
    LocalProtocolError,
    MalformedFrame,
    ProviderFailed,
    TooLargeToSend,
)
from crosswire.gateways.failures import read_failure, to_failure
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.micromsg2.intake import ANSWER, MessageIntake
from crosswire.gateways.micromsg2.outbox import DirectMessage, Outbox
from crosswire.gateways.options import check_timeout, parse_start
from crosswire.gateways.payloads import BYTES, JSON, is_json, to_raw_body
from crosswire.hub.attachment import Attachment, Delivery, Ended, Notice
from crosswire.hub.services import Answer, Call, Provider
from crosswire.wire.contract import Connection, Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import (
    MessageReceived,
    MessagesAcknowledged,
    Opened,
    ServeReceived,
    SubscribeReceived,
    UnsubscribeReceived,
)
from crosswire.wire.micromsg2.extensions import JSON as JSON_EXTENSION

__all__ = ["MicroMsg2Gateway"]

_REPLY: Final = "reply/"
_CONTENT_TYPE: Final = "content-type"
_CORRELATION: Final = "correlation-id"
_REPLY_TO: Final = "reply-to"
_TIMEOUT: Final = "timeout"

_OPEN_CALLS: Final = 1024
_PROVIDER_WINDOW: Final = 256


class _ReplyAddress:
    """Where the answer to a call goes, and what it repeats."""

    __slots__ = ("correlation", "destination", "in_json")

    def __init__(self, destination: str, correlation: Property | None, *, in_json: bool) -> None:
        self.destination = destination
        self.correlation = correlation
        self.in_json = in_json

    def failure(self, error: CrosswireError) -> tuple[bytes, dict[str, Property]]:
        """Payload and properties that tell what went wrong."""
        payload, properties = to_failure(error)
        return payload, self.marked(properties)

    def marked(self, properties: Mapping[str, Property]) -> dict[str, Property]:
        if self.correlation is None:
            return dict(properties)
        return {**properties, _CORRELATION: self.correlation}


class MicroMsg2Gateway(Gateway):
    protocol: ClassVar[str] = "micromsg2"

    def connect(self, now: float) -> Connection:
        limits = self.context.config.limits.micromsg2
        self._connection = MicroMsg2Connection("server", now, limits=limits)
        self._furnish()
        self._in_json = False
        self._has_acks = False
        self._content_type = BYTES
        self._given_up = False
        self._subscriptions: dict[tuple[str, str], Attachment] = {}
        self._served: dict[str, Provider] = {}
        self._asked: dict[str, tuple[Provider, int, DirectMessage]] = {}
        self._unsent_answers = 0
        self._answers_elsewhere = 0
        self._late_acks: deque[int] = deque()
        return self._connection

    def _furnish(self) -> None:
        """Both ways as they were agreed; before that nothing goes either way."""
        self._outbox = Outbox(self, self._connection, self._to_wire)
        self._intake = MessageIntake(self, self._connection, self._give_up, self._answers_stored)

    def leave(self) -> None:
        self._intake.stop()
        self._asked.clear()

    def receive(self, events: list[Event]) -> None:
        """A connection that ended with its last messages still has them taken."""
        envelopes: list[Envelope] = []
        sequences: list[int] = []
        last_destination, target, kind = "", "", ""
        try:
            for event in events:
                if self._given_up:
                    return
                if type(event) is MessageReceived:
                    if event.destination != last_destination:
                        last_destination = event.destination
                        target, kind = self._find(last_destination)
                    if kind == "service":
                        self._call(event, target)
                    elif kind == "reply":
                        self._take_answer(event)
                    else:
                        envelopes.append(self._envelope(event, target, kind))
                        sequences.append(event.sequence)
                elif type(event) is MessagesAcknowledged:
                    self._outbox.acknowledged(len(event.sequences))
                else:
                    # What came before it counts before it.
                    self._outbox.settle()
                    self._intake.take(envelopes, sequences)
                    envelopes, sequences = [], []
                    self._obey(event)
        except CrosswireError as error:
            self._give_up(error)
        finally:
            self._outbox.settle()
            self._intake.take(envelopes, sequences)
            self._outbox.flush()

    def handle_drain(self) -> None:
        self._outbox.drained()

    def hold_back(self, held: bool) -> None:
        """The outbox minds the room: a burst may wait there."""

    def _give_up(self, error: CrosswireError) -> None:
        """MicroMsg2 can refuse only by ending the connection."""
        self._given_up = True
        self._connection.fail(error)
        self.session.wake()

    def _obey(self, event: Event) -> None:
        match event:
            case Opened():
                self._on_opened(event)
            case SubscribeReceived():
                self._on_subscribe(event)
            case UnsubscribeReceived():
                self._on_unsubscribe(event)
            case ServeReceived():
                self._on_serve(event)

    def _on_opened(self, opened: Opened) -> None:
        self._furnish()
        names = {extension.name.lower() for extension in opened.extensions}
        self._in_json = JSON_EXTENSION in names
        self._has_acks = opened.window is not None
        self._content_type = JSON if self._in_json else BYTES
        if opened.token is not None:
            principal = self.context.access.by_token(opened.token)
            if principal is None:
                self.context.count("unauthenticated", self.protocol)
                raise ConnectionRejected("nobody has this token")
            self.identify(principal)

    # Produce.

    def _find(self, destination: str) -> tuple[str, Kind | str]:
        """What a SEND's destination means, and that this peer may send there."""
        if "/" not in destination:
            destination = f"queue/{destination}"
        if destination.startswith("service/"):
            return destination, "service"
        if destination.startswith(_REPLY):
            return destination, "reply"
        self.require("produce", destination)
        return destination, message_kind(destination)

    def _envelope(self, event: MessageReceived, destination: str, kind: str) -> Envelope:
        payload = event.payload
        if not event.properties:
            return Envelope(
                destination=destination,
                kind=kind,  # type: ignore[arg-type]
                payload=payload,
                protocol=self.protocol,
                connection=self.id,
                principal=self.principal,
                content_type=self._content_type,
                crc=crc32(payload),
            )
        correlation = reply_to = ""
        content_type = self._content_type
        taken: dict[str, Property] = {}
        for key, value in event.properties.items():
            if value == "true":
                taken[key] = True
            elif value == "false":
                taken[key] = False
            elif key == _CORRELATION and isinstance(value, str):
                correlation = value
            elif key == _REPLY_TO and isinstance(value, str):
                reply_to = value
            elif key == _CONTENT_TYPE and isinstance(value, str):
                content_type = value or content_type
            else:
                taken[key] = value
        return Envelope(
            destination=destination,
            kind=kind,  # type: ignore[arg-type]
            payload=payload,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            correlation=correlation,
            reply_to=reply_to,
            properties=taken,
            content_type=content_type,
            crc=crc32(payload),
        )

    # Consume.

    def _on_subscribe(self, event: SubscribeReceived) -> None:
        destination, name = event.destination, event.name or ""
        if "/" not in destination:
            destination = f"queue/{destination}"
            self._outbox.short.add(destination)
        self._unsubscribe(destination, name)
        try:
            start = parse_start(event.start or "")
        except InvalidDestination as error:
            raise MalformedFrame(str(error)) from None
        self._subscriptions[destination, name] = self.consume(
            destination,
            window=self._outbox.window(destination, name, event.window),
            filter=event.filter or "",
            name=name,
            start=start,
        )

    def _on_unsubscribe(self, event: UnsubscribeReceived) -> None:
        """Without a name all that was asked of the destination ends."""
        destination = event.destination
        if "/" not in destination:
            destination = f"queue/{destination}"
        for known, name in list(self._subscriptions):
            if known == destination and event.name in (None, name):
                self._unsubscribe(destination, name)
        provider = self._served.pop(destination, None)
        if provider is not None:
            self.providers.discard(provider)
            provider.close(self.context.now())

    def _unsubscribe(self, destination: str, name: str) -> None:
        attachment = self._subscriptions.pop((destination, name), None)
        if attachment is not None:
            self.detach(attachment)
            self._outbox.forget(attachment)

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        if not self._connection.closed:
            self._outbox.deliver(attachment, deliveries)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        super().notice(attachment, notice)
        if isinstance(notice, Ended):
            self._give_up(LimitExceeded(f"{attachment.destination}: {notice.reason}"))

    def _to_wire(self, envelope: Envelope) -> tuple[bytes, Mapping[str, Property]]:
        """Payload and properties for this peer; JSON where it was agreed that all is JSON.

        Bytes without properties of ours stay as they are: the outbox does not ask about them.
        Raises TooLargeToSend.
        """
        content_type, payload = envelope.content_type, envelope.payload
        if self._in_json:
            payload, content_type = self._as_json(envelope)
        if (
            not envelope.correlation
            and not envelope.reply_to
            and content_type == self._content_type
        ):
            return payload, envelope.properties
        properties = dict(envelope.properties)
        if envelope.correlation:
            properties.setdefault(_CORRELATION, envelope.correlation)
        if envelope.reply_to:
            properties.setdefault(_REPLY_TO, envelope.reply_to)
        if content_type != self._content_type:
            properties.setdefault(_CONTENT_TYPE, content_type)
        return payload, properties

    def _as_json(self, envelope: Envelope) -> tuple[bytes, str]:
        """Payload and content type. What is no JSON goes as an object that says whether it is text
        or base64."""
        envelope = self.context.schemas.readable(envelope)
        body = to_raw_body(envelope, self._connection.limits.message_bytes)
        if body.json is msgspec.UNSET:
            return msgspec.json.encode(body), envelope.content_type
        # Where nobody said what it is, it is JSON, as everything is for this peer.
        content_type = JSON if envelope.content_type == BYTES else envelope.content_type
        return envelope.payload, content_type

    # Call.

    def _call(self, event: MessageReceived, destination: str) -> None:
        if not self._has_acks and self._open_calls >= _OPEN_CALLS:
            raise LimitExceeded(f"more than {_OPEN_CALLS} calls that wait for an answer")
        envelope = self._envelope(event, destination, "request")
        reply = self._reply_of(event.properties, envelope)
        try:
            timeout_s = check_timeout(event.properties.get(_TIMEOUT))
            if reply is None or reply.destination.startswith(_REPLY):
                self.call(envelope, lambda answer: self._answer(reply, answer), timeout_s=timeout_s)
            else:
                self._call_elsewhere(envelope, reply, timeout_s)
        except HubError as error:
            if reply is None:
                raise
            self._answer(reply, error)
        self._late_acks.append(event.sequence)
        self._acknowledge_calls()

    @property
    def _open_calls(self) -> int:
        """Calls of this peer whose answers have not been sent."""
        return len(self.calls) + self._unsent_answers + self._answers_elsewhere

    def _acknowledge_calls(self) -> None:
        """A call is safe when the hub has it, but a peer may have only so many open."""
        if self._connection.closed:
            return
        while self._late_acks and self._open_calls <= _OPEN_CALLS:
            self._connection.acknowledge(self._late_acks.popleft())

    def _reply_of(
        self, properties: Mapping[str, Property], envelope: Envelope
    ) -> _ReplyAddress | None:
        """Where the answer goes, None if nobody wants it. Raises what is wrong with the place."""
        destination = envelope.reply_to
        if not destination:
            return None
        if "/" not in destination:
            destination = f"queue/{destination}"
        if not destination.startswith(_REPLY):
            if parse_destination(destination).kind == "service":
                raise InvalidDestination(f"{destination!r} can't take an answer")
            self.require("produce", destination)
        elif len(destination.encode()) > NAME_BYTES:
            raise InvalidDestination(f"a destination has at most {NAME_BYTES} bytes")
        in_json = self._in_json or envelope.content_type == JSON
        return _ReplyAddress(destination, properties.get(_CORRELATION), in_json=in_json)

    def _answer(self, reply: _ReplyAddress | None, answer: Answer | HubError) -> None:
        """To the peer that called."""
        if reply is None:
            if not isinstance(answer, Envelope):
                self.context.count("unanswered", self.protocol)
            self._acknowledge_calls()
            return
        if not isinstance(answer, Envelope):
            self._send_failure(reply, answer)
            return
        try:
            payload, properties = self._to_wire(answer)
        except TooLargeToSend as error:
            self._send_failure(reply, InvalidEnvelope(f"the answer can't be sent: {error}"))
        else:
            self._send_answer(reply, payload, reply.marked(properties))

    def _send_failure(self, reply: _ReplyAddress, error: CrosswireError) -> None:
        payload, properties = reply.failure(error)
        if self._in_json and not is_json(payload):
            payload = b"null"
        self._send_answer(reply, payload, properties, is_failure=True)

    def _send_answer(
        self,
        reply: _ReplyAddress,
        payload: bytes,
        properties: Mapping[str, Property],
        *,
        is_failure: bool = False,
    ) -> None:
        def sent(error: LocalProtocolError | None) -> None:
            self._unsent_answers -= 1
            if error is None:
                self._acknowledge_calls()
            elif is_failure:
                self._give_up(error)
            else:
                self._send_failure(reply, InvalidEnvelope(f"the answer can't be sent: {error}"))

        self._unsent_answers += 1
        self._outbox.send(DirectMessage(reply.destination, payload, properties, sent))

    def _call_elsewhere(
        self, envelope: Envelope, reply: _ReplyAddress, timeout_s: float | None
    ) -> None:
        """The answer goes to a queue or topic, also when the caller has left meanwhile."""
        self.require("call", envelope.destination)

        def answered(_call: Call, answer: Answer) -> None:
            self._produce_answer(reply, answer)

        self._answers_elsewhere += 1
        self.hub.call(
            [envelope],
            self.context.now(),
            answered=self.owned(answered),
            peer=self.peer,
            timeout_s=timeout_s,
        )

    def _answers_stored(self, count: int) -> None:
        """A call is open until then: answers that wait for room must not pile up."""
        self._answers_elsewhere -= count
        self._acknowledge_calls()

    def _produce_answer(self, reply: _ReplyAddress, answer: Answer) -> None:
        kind: Kind = message_kind(reply.destination)
        if isinstance(answer, Envelope):
            answer = self.context.schemas.readable(answer) if reply.in_json else answer
            properties = reply.marked(answer.properties)
        else:
            payload, properties = reply.failure(answer)
            answer = Envelope(
                destination="",
                kind=kind,
                payload=payload,
                protocol=self.protocol,
                connection=self.id,
                principal=self.principal,
                crc=crc32(payload),
            )
        correlation = properties.get(_CORRELATION)
        if isinstance(correlation, str):
            del properties[_CORRELATION]
        envelope = answer.replace(
            destination=reply.destination,
            kind=kind,
            properties=properties,
            correlation=correlation if isinstance(correlation, str) else "",
            reply_to="",
        )
        if not self.left:
            self._intake.take([envelope], [ANSWER])
        elif (refused := self.produce([envelope]).refused) and 0 in refused:
            self.context.count("unanswered", self.protocol)
            self.log(logging.WARNING, "answer lost", to=reply.destination, reason=str(refused[0]))

    # Serve.

    def _on_serve(self, event: ServeReceived) -> None:
        if event.destination not in self._served:
            window = min(event.window or _PROVIDER_WINDOW, _OPEN_CALLS)
            self._served[event.destination] = self.serve([event.destination], window=window)

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Each with a `reply-to` of its own, by which its answer is known."""
        if self._connection.closed:
            return
        for delivery in requests:
            envelope = delivery.envelope
            try:
                payload, content_properties = self._to_wire(envelope)
            except TooLargeToSend as error:
                failed = ProviderFailed("invalid_request", f"too large for MicroMsg2: {error}")
                provider.fail(envelope.id, failed, self.context.now())
                continue
            reply_to = f"{_REPLY}{envelope.id}"
            properties = {**content_properties, _REPLY_TO: reply_to}
            properties.setdefault(_CORRELATION, str(envelope.id))
            message = DirectMessage(
                envelope.destination, payload, properties, self._call_sent_callback(reply_to)
            )
            self._asked[reply_to] = (provider, envelope.id, message)
            self._outbox.send(message)

    def _call_sent_callback(self, reply_to: str) -> Callable[[LocalProtocolError | None], None]:
        def sent(error: LocalProtocolError | None) -> None:
            asked = self._asked.get(reply_to) if error is not None else None
            if asked is not None:
                del self._asked[reply_to]
                failed = ProviderFailed("invalid_request", str(error))
                asked[0].fail(asked[1], failed, self.context.now())

        return sent

    def cancel(self, provider: Provider, ids: list[int]) -> None:  # noqa: ARG002  ids are unique
        """A provider has no word for it; a call that it was not sent yet it never sees."""
        for identifier in ids:
            asked = self._asked.pop(f"{_REPLY}{identifier}", None)
            if asked is not None:
                asked[2].is_wanted = False

    def _take_answer(self, event: MessageReceived) -> None:
        asked = self._asked.pop(event.destination, None)
        if asked is None:
            self.context.count("late", self.protocol)
        else:
            provider, identifier, _ = asked
            properties = event.properties
            properties.pop(_CORRELATION, None)
            now = self.context.now()
            failure = read_failure(event.payload, properties)
            if failure is not None:
                provider.fail(identifier, failure, now)
            else:
                provider.answer(identifier, self._envelope(event, "", "response"), now)
        self._connection.acknowledge(event.sequence)
