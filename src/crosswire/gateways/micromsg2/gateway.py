"""MicroMsg2's gateway: a SEND produces, calls or answers, by its destination; commands consume.

    SEND to queue/NAME or topic/NAME     → produced; acknowledged after the commit
    subscribe, unsubscribe               ← MESSAGEs, from the outbox; an acknowledgement settles
    SEND to service/NAME                 → a call; its answer goes to the request's `reply-to`
    serve                                ← calls, as MESSAGEs with a `reply-to` of their own
    SEND to reply/NAME                   → the answer to such a call

MicroMsg2 can refuse only by ending the connection with an ERROR.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import ClassVar, Final
from zlib import crc32

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
from crosswire.gateways.failures import for_peers, read_failure
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.micromsg2.intake import ANSWER, MessageIntake
from crosswire.gateways.micromsg2.messages import (
    REPLY,
    MessageFormat,
    ReplyAddress,
    whole_name,
)
from crosswire.gateways.micromsg2.outbox import DirectMessage, Outbox
from crosswire.gateways.options import check_timeout, parse_start
from crosswire.gateways.payloads import JSON, is_json
from crosswire.gateways.properties import CORRELATION, REPLY_TO, TIMEOUT
from crosswire.hub.attachment import Attachment, Delivery, Ended, Notice
from crosswire.hub.services import Answer, Call, Provider
from crosswire.wire.contract import Connection, Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import (
    ExtensionReceived,
    MessageReceived,
    MessagesAcknowledged,
    Opened,
    ServeReceived,
    SubscribeReceived,
    UnsubscribeReceived,
)
from crosswire.wire.micromsg2.extensions import JSON as JSON_EXTENSION
from crosswire.wire.micromsg2.extensions import KNOWN, REFUSE, Offer, parse_refusal

__all__ = ["MicroMsg2Gateway"]

_OPEN_CALLS: Final = 1024
"""Calls of one peer that may be without an answer: further ones are not acknowledged."""
_PROVIDER_WINDOW: Final = 256
_OFFER: Final = Offer(supported=KNOWN | {REFUSE})


class MicroMsg2Gateway(Gateway):
    """A peer that speaks MicroMsg2."""

    protocol: ClassVar[str] = "micromsg2"
    connection: MicroMsg2Connection

    # Connecting.

    def connect(self, now: float) -> Connection:
        """MicroMsg2's connection, as server."""
        limits = self.context.config.limits.micromsg2
        self.connection = MicroMsg2Connection("server", now, limits=limits, offer=_OFFER)
        self._has_acks = False
        self._given_up = False
        self._subscriptions: dict[tuple[str, str], Attachment] = {}
        self._served: dict[str, Provider] = {}
        self._awaited: dict[str, tuple[Provider, int, DirectMessage]] = {}
        """Calls that the peer was sent and has not answered, by their `reply-to`."""
        self._unsent_answers = 0
        self._answers_elsewhere = 0
        """Answers to queues and topics that are awaited, or not durable yet."""
        self._late_acks: deque[int] = deque()
        self._equip(in_json=False)
        return self.connection

    def _equip(self, *, in_json: bool) -> None:
        """Make what depends on the agreement; before the handshake nothing is sent or received."""
        self._format = MessageFormat(
            self.context.schemas,
            in_json=in_json,
            message_bytes=self.connection.limits.message_bytes,
        )
        self._outbox = Outbox(self, self.connection, self._format)
        self._intake = MessageIntake(self, self.connection, self._give_up, self._answers_stored)

    def leave(self) -> None:
        """Drop messages that wait for room: they were never acknowledged."""
        self._intake.stop()
        self._awaited.clear()

    def receive(self, events: list[Event]) -> None:
        """Produce the messages of one read as one batch, and settle what was acknowledged.

        Messages of a connection that ended in the same read are produced too.
        """
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
                        envelopes.append(self._format.to_envelope(event, target, kind, self.peer))
                        sequences.append(event.sequence)
                elif type(event) is MessagesAcknowledged:
                    self._outbox.acknowledged(event.sequences)
                else:
                    # A command takes effect after the messages and acknowledgements before it.
                    self._outbox.settle()
                    if envelopes:
                        self._intake.take(envelopes, sequences)
                        envelopes, sequences = [], []
                    self._on_command(event)
        except CrosswireError as error:
            self._give_up(error)
        finally:
            # Settling comes first: the hub may deliver more at once, which `flush` then sends.
            self._outbox.settle()
            if envelopes:
                self._intake.take(envelopes, sequences)
            self._outbox.flush()

    def handle_drain(self) -> None:
        """The peer reads again: send what waits."""
        self._outbox.drained()

    def hold_back(self, held: bool) -> None:
        """Nothing here: the outbox limits what waits, and lets a burst wait."""

    def _give_up(self, error: CrosswireError) -> None:
        """End the connection with an ERROR; events after it are dropped."""
        self._given_up = True
        self.connection.fail(for_peers(error))
        self.session.wake()

    def _on_command(self, event: Event) -> None:
        match event:
            case Opened():
                self._on_opened(event)
            case SubscribeReceived():
                self._on_subscribe(event)
            case UnsubscribeReceived():
                self._on_unsubscribe(event)
            case ServeReceived():
                self._on_serve(event)
            case ExtensionReceived(name=name, payload=payload) if name == REFUSE:
                self._outbox.refuse(*parse_refusal(payload))

    def _on_opened(self, opened: Opened) -> None:
        names = {extension.name.lower() for extension in opened.extensions}
        self._equip(in_json=JSON_EXTENSION in names)
        self._has_acks = opened.window is not None
        self.client_name = opened.identity
        if opened.token is not None and self.identify_by_token(opened.token) is None:
            # What the peer sends meanwhile is not read, and what came with this is dropped.
            self._given_up = True
            rejected = ConnectionRejected("nobody has this token")
            self.refuse_sign_in(lambda: self._give_up(rejected))
        elif self in self.context.newcomers:
            raise ConnectionRejected("the handshake has no token, and there are users")

    # Produce.

    def _find(self, destination: str) -> tuple[str, Kind | str]:
        """A SEND's whole destination and what it means. Raises Forbidden if it may not produce."""
        if destination.startswith("queue/"):
            # First: a peer may send every message to another queue.
            self.require("produce", destination)
            return destination, "send"
        destination = whole_name(destination)
        if destination.startswith("service/"):
            return destination, "service"
        if destination.startswith(REPLY):
            return destination, "reply"
        self.require("produce", destination)
        return destination, message_kind(destination)

    # Consume.

    def _on_subscribe(self, event: SubscribeReceived) -> None:
        destination, name = whole_name(event.destination), event.name or ""
        if destination != event.destination:
            self._outbox.use_short_name(destination)
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
            receiver=self._outbox,
        )

    def _on_unsubscribe(self, event: UnsubscribeReceived) -> None:
        """End a subscription; without a name all of the destination, and what is served there."""
        destination = whole_name(event.destination)
        for known, name in list(self._subscriptions):
            if known == destination and event.name in (None, name):
                self._unsubscribe(destination, name)
        provider = self._served.pop(destination, None)
        if provider is not None:
            self.withdraw(provider)

    def _unsubscribe(self, destination: str, name: str) -> None:
        attachment = self._subscriptions.pop((destination, name), None)
        if attachment is not None:
            self.detach(attachment)
            self._outbox.forget(attachment)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """The end of a subscription ends the connection; a gap is logged only."""
        super().notice(attachment, notice)
        if isinstance(notice, Ended):
            self._give_up(LimitExceeded(f"{attachment.destination}: {notice.reason}"))

    # Call.

    def _call(self, event: MessageReceived, destination: str) -> None:
        if not self._has_acks and self._open_calls >= _OPEN_CALLS:
            raise LimitExceeded(f"more than {_OPEN_CALLS} calls without an answer")
        envelope = self._format.to_envelope(event, destination, "request", self.peer)
        reply = self._reply_of(event.properties, envelope)
        try:
            timeout_s = check_timeout(event.properties.get(TIMEOUT))
            if reply is None or reply.destination.startswith(REPLY):
                self.call(envelope, lambda answer: self._answer(reply, answer), timeout_s=timeout_s)
            else:
                self._call_elsewhere(envelope, reply, timeout_s)
        except HubError as error:
            if reply is None:
                raise
            self._answer(reply, error)
        self._late_acks.append(event.sequence)
        self._acknowledge_calls(is_answered=reply is not None)

    @property
    def _open_calls(self) -> int:
        """Calls of this peer whose answers are not sent, or not durable at their `reply-to`."""
        return len(self.calls) + self._unsent_answers + self._answers_elsewhere

    def _acknowledge_calls(self, *, is_answered: bool = False) -> None:
        """Acknowledge calls in order while not too many are open; with the answer, if there is one.

        The hub has a call as soon as it is made; withholding the acknowledgement is the only way
        to slow down a peer that calls faster than it is answered.
        """
        if self.connection.closed:
            return
        acknowledge = (
            self.connection.acknowledge_soon if is_answered else self.connection.acknowledge
        )
        while self._late_acks and self._open_calls <= _OPEN_CALLS:
            acknowledge(self._late_acks.popleft())

    def _reply_of(
        self, properties: Mapping[str, Property], envelope: Envelope
    ) -> ReplyAddress | None:
        """Where the answer goes; None if the caller wants none.

        Raises InvalidDestination or Forbidden: the peer must be allowed to produce there itself.
        """
        if not envelope.reply_to:
            return None
        destination = whole_name(envelope.reply_to)
        if not destination.startswith(REPLY):
            if parse_destination(destination).kind == "service":
                raise InvalidDestination(f"{destination!r} can't take an answer")
            self.require("produce", destination)
        elif len(destination.encode()) > NAME_BYTES:
            raise InvalidDestination(f"a destination has at most {NAME_BYTES} bytes")
        in_json = self._format.in_json or envelope.content_type == JSON
        return ReplyAddress(destination, properties.get(CORRELATION), in_json=in_json)

    def _answer(self, reply: ReplyAddress | None, answer: Answer | HubError) -> None:
        """Send the answer to the peer that called."""
        if reply is None:
            if not isinstance(answer, Envelope):
                self.context.count("unanswered", self.protocol)
            self._acknowledge_calls()
            return
        if not isinstance(answer, Envelope):
            self._send_failure(reply, answer)
            return
        try:
            payload, properties = self._format.to_message(answer)
        except TooLargeToSend as error:
            self._send_failure(reply, InvalidEnvelope(f"the answer can't be sent: {error}"))
        else:
            self._send_answer(reply, payload, reply.marked(properties))

    def _send_failure(self, reply: ReplyAddress, error: CrosswireError) -> None:
        payload, properties = reply.failure(error)
        if self._format.in_json and not is_json(payload):
            payload = b"null"
        self._send_answer(reply, payload, properties, is_failure=True)

    def _send_answer(
        self,
        reply: ReplyAddress,
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
        self, envelope: Envelope, reply: ReplyAddress, timeout_s: float | None
    ) -> None:
        """Call, and produce the answer to a queue or topic, even if the caller has left by then.

        So it is not one of `self.calls`, which are cancelled when the peer leaves.
        """
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
        """These answers are durable at their `reply-to`: their calls are no longer open.

        Until then they count: answers that wait for room in a full queue must not pile up.
        """
        self._answers_elsewhere -= count
        self._acknowledge_calls()

    def _produce_answer(self, reply: ReplyAddress, answer: Answer) -> None:
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
        correlation = properties.get(CORRELATION)
        if isinstance(correlation, str):
            del properties[CORRELATION]
        envelope = answer.replace(
            destination=reply.destination,
            kind=kind,
            properties=properties,
            correlation=correlation if isinstance(correlation, str) else "",
            reply_to="",
        )
        try:
            # Asked again: it was the caller's to send there when it called.
            self.require("produce", reply.destination)
        except HubError:
            self.context.count("unanswered", self.protocol)
            self._answers_stored(1)
            return
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
        """Send calls as MESSAGEs, each with a `reply-to` of its own that its answer is sent to."""
        if self.connection.closed:
            return
        for delivery in requests:
            envelope = delivery.envelope
            try:
                payload, content_properties = self._format.to_message(envelope)
            except TooLargeToSend as error:
                failed = ProviderFailed("invalid_request", f"too large for MicroMsg2: {error}")
                provider.fail(envelope.id, failed, self.context.now())
                continue
            reply_to = f"{REPLY}{envelope.id}"
            properties = {**content_properties, REPLY_TO: reply_to}
            properties.setdefault(CORRELATION, str(envelope.id))
            message = DirectMessage(
                envelope.destination, payload, properties, self._call_sent_callback(reply_to)
            )
            # Before it is sent: if it can't be, `sent` is called at once and removes it again.
            self._awaited[reply_to] = (provider, envelope.id, message)
            self._outbox.send(message)

    def _call_sent_callback(self, reply_to: str) -> Callable[[LocalProtocolError | None], None]:
        def sent(error: LocalProtocolError | None) -> None:
            awaited = self._awaited.get(reply_to) if error is not None else None
            if awaited is not None:
                del self._awaited[reply_to]
                failed = ProviderFailed("invalid_request", str(error))
                awaited[0].fail(awaited[1], failed, self.context.now())

        return sent

    def cancel(self, provider: Provider, ids: list[int]) -> None:  # noqa: ARG002  ids are unique
        """Drop calls that are not sent yet; MicroMsg2 can't cancel one that is."""
        for identifier in ids:
            awaited = self._awaited.pop(f"{REPLY}{identifier}", None)
            if awaited is not None:
                awaited[2].is_wanted = False

    def _take_answer(self, event: MessageReceived) -> None:
        """Answer a call; one that was cancelled or has timed out meanwhile is only counted."""
        awaited = self._awaited.pop(event.destination, None)
        if awaited is None:
            self.context.count("late", self.protocol)
        else:
            provider, identifier, _ = awaited
            properties = event.properties
            properties.pop(CORRELATION, None)
            now = self.context.now()
            failure = read_failure(event.payload, properties)
            if failure is not None:
                provider.fail(identifier, failure, now)
            else:
                answer = self._format.to_envelope(event, "", "response", self.peer)
                provider.answer(identifier, answer, now)
        # The next call is likely to follow.
        self.connection.acknowledge_soon(event.sequence)
