"""Epoxy's gateway: `crosswire.Hub` for the hub itself, any other request is a service's, any event
is published.

What one read brought is handed over in three batches: what was published, what was asked of
services, what was settled. Subscribing, unsubscribing and serving wait for what came before them.
Answers leave as they become known, in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable
from typing import ClassVar, Final

from crosswire.bond import marshal
from crosswire.envelope import Envelope, Kind, Property, message_kind
from crosswire.errors import (
    BondError,
    CallCancelled,
    CallError,
    ConnectionRejected,
    CrosswireError,
    HubError,
    InvalidDestination,
    InvalidEnvelope,
    LocalProtocolError,
    NoProvider,
    ProviderFailed,
    ProviderLost,
    TooLargeToSend,
    UnknownMessage,
)
from crosswire.gateways.epoxy.messages import (
    NOTHING,
    PUBLICATION,
    PUBLISHED,
    SERVICES,
    SETTLED,
    SETTLEMENT,
    SUBSCRIBED,
    SUBSCRIPTION,
    code_of,
    encode_delivery,
    failure_of,
    from_values,
    is_error,
)
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.options import LARGEST_WINDOW, parse_start
from crosswire.gateways.payloads import BYTES
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Ended, Notice
from crosswire.hub.receipt import Receipt
from crosswire.hub.services import Answer, Provider
from crosswire.wire.contract import Connection, Event
from crosswire.wire.epoxy.comm import Error, ErrorCode, find_credentials
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.events import (
    EventReceived,
    PeerFinished,
    RequestReceived,
    ResponseReceived,
)

__all__ = ["EpoxyGateway"]

_LAYER_DATA: Final = "epoxy.layer_data"
_OURS: Final = "crosswire."
_SUBSCRIBER: Final = "crosswire.Subscriber"
_UNSTORED_BYTES: Final = 16 * 1024 * 1024
_MESSAGE_BYTES: Final = 512
_DESCRIPTION: Final = 4096


# --------------------------------------------------------------------------------- subscriptions


class _PeerSubscription:
    """A subscription of this peer: its number, and what it was given and has not settled."""

    __slots__ = ("_given", "attachment", "number", "settling")

    def __init__(self, number: int, attachment: Attachment) -> None:
        self.number = number
        self.attachment = attachment
        self.settling: dict[int, None] = {}
        self._given: set[int] = set()

    def give(self, deliveries: list[Delivery]) -> None:
        """An unnamed one settles whatever it is told to: the ids are kept here."""
        if not isinstance(self.attachment, Consumer):
            self._given.update([delivery.envelope.id for delivery in deliveries])

    def take(self, ids: Iterable[int]) -> list[int]:
        """Those of the ids that it holds, each once."""
        held: Container[int] = self._given
        if isinstance(self.attachment, Consumer):
            held = self.attachment.held
        settling = self.settling
        taken = [each for each in dict.fromkeys(ids) if each in held and each not in settling]
        self._given.difference_update(taken)
        return taken


# --------------------------------------------------------------------------------------- gateway


class EpoxyGateway(Gateway):
    protocol: ClassVar[str] = "epoxy"

    def connect(self, now: float) -> Connection:
        self._connection = EpoxyConnection("server", now, limits=self.context.config.limits.epoxy)
        self._credentials: bytes | None = None
        self._token: str | None = None
        self._is_rejected = False
        self._batch: list[Envelope] = []
        self._askers: list[int | None] = []
        self._calls: list[Envelope] = []
        self._unstored_bytes = 0
        self._takers: dict[int, _PeerSubscription] = {}
        self._by_attachment: dict[Attachment, _PeerSubscription] = {}
        self._settling: list[_PeerSubscription] = []
        self._settlers: list[tuple[int, int]] = []
        self._last_number = 0
        self._is_subscribing = False
        self._early: dict[Attachment, list[Delivery]] = {}
        self._served: set[str] = set()
        self._asked: dict[int, tuple[Provider, int]] = {}
        self._conversations: dict[int, int] = {}
        return self._connection

    def receive(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RequestReceived):
                self._on_request(event)
            elif isinstance(event, EventReceived):
                self._on_event(event)
            elif isinstance(event, ResponseReceived):
                self._on_response(event)
            elif isinstance(event, PeerFinished):
                self._let_go()
            if self._is_rejected:
                break
        self._hand_over()

    # Who it is.

    def _without_credentials(self, layer_data: bytes | None) -> bytes | None:
        """Layer data as it may be kept and forwarded. Credentials are looked at here and go no
        further; a peer that has none to show, or others than before, is rejected."""
        if layer_data is None or layer_data == self._credentials:
            return None
        token = find_credentials(layer_data)
        if token is None:
            return layer_data
        access = self.context.access
        if not access.open and token != self._token:
            principal = access.by_token(token)
            if principal is None or self._token is not None:
                self.context.count("unauthenticated", self.protocol)
                again = "one peer can't be two users"
                reason = "nobody has this token" if principal is None else again
                self._is_rejected = True
                self._connection.fail(ConnectionRejected(reason))
                return None
            self.identify(principal)
        self._credentials, self._token = layer_data, token
        return None

    # What the peer publishes.

    def _on_event(self, event: EventReceived) -> None:
        layer_data = self._without_credentials(event.layer_data)
        if self._is_rejected:
            return
        service, method = event.service_name, event.method_name
        destination = f"topic/{service}/{method}" if method else f"topic/{service}"
        try:
            if service.startswith(_OURS):
                raise InvalidDestination(f"{service} takes requests, not events")
            self.require("produce", destination)
            payload, content_type = self.context.schemas.from_bond(
                "publish", destination, event.payload
            )
        except HubError as error:
            self._drop(error)
            return
        self._batch.append(
            self._envelope("publish", destination, payload, content_type, layer_data)
        )
        self._askers.append(None)

    def _drop(self, error: HubError) -> None:
        """An event never gets an answer: it is counted."""
        self.context.count("dropped", self.protocol, type(error).__name__)

    def _publish(self, request: RequestReceived, layer_data: bytes | None) -> None:
        asked = marshal.unmarshal(request.payload, PUBLICATION)
        destination: str = asked.destination
        self.require("produce", destination)
        self._batch.append(
            self._envelope(
                message_kind(destination),
                destination,
                asked.payload,
                asked.content_type or BYTES,
                layer_data,
                properties=from_values(asked.properties),
            )
        )
        self._askers.append(request.conversation_id)

    def _envelope(
        self,
        kind: Kind,
        destination: str,
        payload: bytes,
        content_type: str,
        layer_data: bytes | None,
        *,
        correlation: str = "",
        properties: dict[str, Property] | None = None,
    ) -> Envelope:
        return Envelope(
            destination=destination,
            kind=kind,
            payload=payload,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            correlation=correlation,
            properties=properties or {},
            native={} if layer_data is None else {_LAYER_DATA: layer_data},
            content_type=content_type,
            crc=zlib.crc32(payload),
        )

    def _hand_over(self) -> None:
        """What was published, asked and settled so far."""
        if self._batch:
            self._produce()
        if self._calls:
            calls, self._calls = self._calls, []
            self.call_all(calls, self._answer)
        if self._settling:
            settling, self._settling = self._settling, []
            now = self.context.now()
            for taker in settling:
                ids, taker.settling = taker.settling, {}
                taker.attachment.settle(ids, now)
        if self._settlers:
            self._answer_settled()

    def _produce(self) -> None:
        """Events have no answer to wait for: with too much on its way to the disk, the peer has to
        wait at its socket."""
        batch, self._batch = self._batch, []
        askers, self._askers = self._askers, []
        size_bytes = sum(len(each.payload) + _MESSAGE_BYTES for each in batch)
        self._unstored_bytes += size_bytes
        if self._unstored_bytes > _UNSTORED_BYTES:
            self.session.hold_reading(True)

        def stored(receipt: Receipt) -> None:
            was_held = self._unstored_bytes > _UNSTORED_BYTES
            self._unstored_bytes -= size_bytes
            if not self.left:
                self._answer_published(askers, receipt)
                if was_held and self._unstored_bytes <= _UNSTORED_BYTES:
                    self.session.hold_reading(False)

        self.produce(batch).add_done_callback(self.owned(stored))

    def _answer_published(self, askers: list[int | None], receipt: Receipt) -> None:
        for index, conversation in enumerate(askers):
            error = receipt.error or receipt.refused.get(index)
            if conversation is None:
                if error is not None:
                    self._drop(error)
            elif error is not None:
                self._fail(conversation, error)
            else:
                published = PUBLISHED.python_class(id=receipt.ids[index])
                self._respond(conversation, marshal.marshal(published, PUBLISHED))
        self.session.wake()

    # Requests of the peer.

    def _on_request(self, request: RequestReceived) -> None:
        layer_data = self._without_credentials(request.layer_data)
        if self._is_rejected:
            return
        service, method = request.service_name, request.method_name
        try:
            if service == _HUB and method == "Publish":
                self._publish(request, layer_data)
            elif service == _HUB and method == "Settle":
                self._settle(request)
            elif not service.startswith(_OURS):
                self._call(request, layer_data)
            elif service == _HUB and method in _OPERATIONS:
                self._hand_over()
                _OPERATIONS[method](self, request)
            else:
                raise NoProvider(f"the hub has no method {service}.{method}")
        except HubError as error:
            self._fail(request.conversation_id, error)
        except BondError as error:
            unreadable = InvalidEnvelope(f"the payload can't be read: {error}")
            self._fail(request.conversation_id, unreadable)

    def _respond(
        self, conversation: int, payload: bytes, *, layer_data: bytes | None = None
    ) -> None:
        if not self._connection.is_owed(conversation):
            return
        try:
            self._connection.send_response(conversation, payload, layer_data=layer_data)
        except LocalProtocolError as error:
            self._fail(conversation, InvalidEnvelope(f"the answer can't be sent: {error}"))

    def _fail(self, conversation: int, error: CrosswireError) -> None:
        if not self._connection.is_owed(conversation):
            return
        if isinstance(error, ProviderFailed) and is_error(error.data):
            self._connection.send_error(conversation, error.data)
            return
        code, message, unique_id = code_of(error), str(error), ""
        if code == ErrorCode.INTERNAL_SERVER_ERROR:
            # The log and the ledger know the connection; a call's correlation is its conversation.
            unique_id = f"{self.id}/{conversation}"
        elif isinstance(error, ProviderFailed):
            message = error.description
        failure = Error(code, message[:_DESCRIPTION], unique_id=unique_id)
        self._connection.send_error(conversation, failure)

    def _call(self, request: RequestReceived, layer_data: bytes | None) -> None:
        conversation = request.conversation_id
        service, method = request.service_name, request.method_name
        if not service or "/" in service:
            raise NoProvider(f"{service!r} can't be the name of a service")
        destination = f"service/{service}/{method}" if method else f"service/{service}"
        payload, content_type = self.context.schemas.from_bond(
            "request", destination, request.payload
        )
        self.require("call", destination)
        self._calls.append(
            self._envelope(
                "request",
                destination,
                payload,
                content_type,
                layer_data,
                correlation=str(conversation),
            )
        )

    def _answer(self, request: Envelope, answer: Answer) -> None:
        conversation = int(request.correlation)
        if isinstance(answer, Envelope):
            try:
                payload = self.context.schemas.to_bond(answer)
            except InvalidEnvelope as error:
                self._fail(conversation, error)
            else:
                layer_data = answer.native.get(_LAYER_DATA)
                self._respond(conversation, payload, layer_data=layer_data)
        else:
            self._fail(conversation, answer)
        self.session.wake()

    # The hub's own methods.

    def _subscribe(self, request: RequestReceived) -> None:
        """The number leaves before the first delivery that bears it; a subscription with a name is
        on disk before it does."""
        asked = marshal.unmarshal(request.payload, SUBSCRIPTION)
        if asked.window > LARGEST_WINDOW:
            raise InvalidDestination(f"a window is 0 to {LARGEST_WINDOW}, not {asked.window}")
        self._is_subscribing = True
        try:
            attachment = self.consume(
                asked.destination,
                window=asked.window or None,
                filter=asked.filter,
                name=asked.name,
                start=parse_start(asked.start),
            )
        finally:
            self._is_subscribing = False
        conversation = request.conversation_id
        if not asked.name:
            self._begin_subscription(conversation, attachment)
            return
        self._early.setdefault(attachment, [])

        def stored(receipt: Receipt) -> None:
            if self.left:
                return
            if attachment not in self._early:
                # The peer closed its half meanwhile; the connection waits for this answer.
                self._fail(conversation, CallCancelled("the peer takes no messages any more"))
            elif receipt.error is None:
                self._begin_subscription(conversation, attachment)
            else:
                del self._early[attachment]
                self.detach(attachment)
                self._fail(conversation, receipt.error)
            self.session.wake()

        self.hub.committed().add_done_callback(self.owned(stored))

    def _begin_subscription(self, conversation: int, attachment: Attachment) -> None:
        """Tell the peer the number of its subscription, then give it what has come meanwhile."""
        self._last_number += 1
        taker = _PeerSubscription(self._last_number, attachment)
        self._takers[taker.number] = self._by_attachment[attachment] = taker
        subscribed = SUBSCRIBED.python_class(subscription=taker.number)
        self._respond(conversation, marshal.marshal(subscribed, SUBSCRIBED))
        early = self._early.pop(attachment, [])
        if early:
            self.deliver(attachment, early)

    def _unsubscribe(self, request: RequestReceived) -> None:
        taker = self._taker(marshal.unmarshal(request.payload, SUBSCRIBED).subscription)
        self._forget(taker)
        self.detach(taker.attachment)
        self._respond(request.conversation_id, NOTHING)

    def _settle(self, request: RequestReceived) -> None:
        asked = marshal.unmarshal(request.payload, SETTLEMENT)
        taker = self._taker(asked.subscription)
        ids = taker.take(asked.ids)
        if asked.refused:
            taker.attachment.refuse(ids, self.context.now(), cause=asked.reason)
        elif ids:
            if not taker.settling:
                self._settling.append(taker)
            taker.settling.update(dict.fromkeys(ids))
        self._settlers.append((request.conversation_id, len(ids)))

    def _answer_settled(self) -> None:
        """When it is on disk: what was said to be settled does not come back."""
        settlers, self._settlers = self._settlers, []

        def stored(receipt: Receipt) -> None:
            if self.left:
                return
            for conversation, count in settlers:
                if receipt.error is not None:
                    self._fail(conversation, receipt.error)
                else:
                    settled = SETTLED.python_class(count=count)
                    self._respond(conversation, marshal.marshal(settled, SETTLED))
            self.session.wake()

        self.hub.committed().add_done_callback(self.owned(stored))

    def _serve(self, request: RequestReceived) -> None:
        asked = marshal.unmarshal(request.payload, SERVICES).services
        names = [f"service/{name}" for name in dict.fromkeys(asked)]
        new = [name for name in names if name not in self._served]
        if new:
            self.serve(new)
            self._served.update(new)
        self._respond(request.conversation_id, NOTHING)

    def _taker(self, number: int) -> _PeerSubscription:
        taker = self._takers.get(number)
        if taker is None:
            raise UnknownMessage(f"there is no subscription {number} on this connection")
        return taker

    def _forget(self, taker: _PeerSubscription) -> None:
        del self._takers[taker.number]
        del self._by_attachment[taker.attachment]

    # What the hub has for the peer.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """A peer that is leaving gives back with all it holds what it was never sent."""
        taker = self._by_attachment.get(attachment)
        if taker is None:
            if self._is_subscribing or attachment in self._early:
                self._early.setdefault(attachment, []).extend(deliveries)
            return
        if not self._connection.accepts_conversations:
            return
        taker.give(deliveries)
        send = self._connection.send_event
        for delivery in deliveries:
            native = delivery.envelope.native
            layer_data = native.get(_LAYER_DATA) if native else None
            try:
                self._require_room(delivery.envelope)
                payload = encode_delivery(taker.number, delivery)
                send(_SUBSCRIBER, "Deliver", payload, layer_data=layer_data)
            except (BondError, LocalProtocolError) as error:
                ids = taker.take([delivery.envelope.id])
                attachment.refuse(ids, self.context.now(), cause=f"can't be sent in Epoxy: {error}")
        self.session.wake()

    def _require_room(self, envelope: Envelope) -> None:
        """What is too large even without what goes with it is not encoded in vain."""
        size, limit = len(envelope.payload), self._connection.limits.frame_bytes
        if size > limit:
            raise TooLargeToSend(size, limit)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """There is no word for it in Epoxy: a peer that is sent away sees its connection end."""
        super().notice(attachment, notice)
        taker = self._by_attachment.get(attachment)
        if isinstance(notice, Ended) and taker is not None:
            self._forget(taker)
            self.attachments.discard(attachment)
            ended = f"subscription {taker.number} of {attachment.destination} ended"
            self._connection.fail(ConnectionRejected(f"{ended}: {notice.reason}"))
            self.session.wake()

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        connection = self._connection
        for delivery in requests:
            envelope = delivery.envelope
            name = envelope.destination.removeprefix("service/")
            service, _, method = name.partition("/")
            try:
                if not connection.accepts_conversations:
                    raise ProviderLost("the provider is leaving")
                conversation = connection.send_request(
                    service,
                    method,
                    self.context.schemas.to_bond(envelope),
                    layer_data=envelope.native.get(_LAYER_DATA),
                )
            except (InvalidEnvelope, LocalProtocolError) as error:
                failed = ProviderFailed("invalid_request", str(error))
                provider.fail(envelope.id, failed, self.context.now())
            except CallError as error:
                provider.fail(envelope.id, error, self.context.now())
            else:
                self._asked[conversation] = (provider, envelope.id)
                self._conversations[envelope.id] = conversation
        self.session.wake()

    def cancel(self, provider: Provider, ids: list[int]) -> None:  # noqa: ARG002
        """An answer that still comes is dropped."""
        for identifier in ids:
            conversation = self._conversations.pop(identifier, None)
            if conversation is not None:
                del self._asked[conversation]
                self._connection.forget_request(conversation)

    def _on_response(self, response: ResponseReceived) -> None:
        layer_data = self._without_credentials(response.layer_data)
        asked = self._asked.pop(response.conversation_id, None)
        if self._is_rejected or asked is None:
            return
        provider, identifier = asked
        del self._conversations[identifier]
        call = provider.calls.get(identifier)
        if call is None:
            return
        now = self.context.now()
        if response.payload is None:
            provider.fail(identifier, failure_of(response.error or b""), now)
            return
        destination = call.envelope.destination
        try:
            payload, content_type = self.context.schemas.from_bond(
                "response", destination, response.payload
            )
        except InvalidEnvelope as error:
            provider.fail(identifier, ProviderFailed("internal", str(error)), now)
        else:
            answer = self._envelope("response", destination, payload, content_type, layer_data)
            provider.answer(identifier, answer, now)

    def _let_go(self) -> None:
        """The peer can neither settle nor answer any more: all that it holds goes to others."""
        self._hand_over()
        now = self.context.now()
        self._takers.clear()
        self._by_attachment.clear()
        self._early.clear()
        for attachment in list(self.attachments):
            self.detach(attachment)
        for provider in list(self.providers):
            self.providers.discard(provider)
            provider.close(now)


_HUB: Final = "crosswire.Hub"

_OPERATIONS: Final[dict[str, Callable[[EpoxyGateway, RequestReceived], None]]] = {
    "Serve": EpoxyGateway._serve,
    "Subscribe": EpoxyGateway._subscribe,
    "Unsubscribe": EpoxyGateway._unsubscribe,
}
"""Those that wait for what came before them."""
