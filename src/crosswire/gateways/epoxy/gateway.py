"""Epoxy's gateway: requests of `crosswire.Hub` are the hub's, any other request is a call, and any
event is a publication.

    event SERVICE.METHOD         → topic/SERVICE/METHOD, without an answer
    crosswire.Hub.Publish        → queue/NAME or topic/NAME; answered after the commit
    crosswire.Hub.Subscribe      ← events crosswire.Subscriber.Deliver; `Settle` settles or refuses
    any other request            → a call of service/SERVICE/METHOD
    crosswire.Hub.Serve          ← calls, as requests of the hub

The publications, calls and settlements of one read are three batches. Subscribing, unsubscribing
and serving wait for those before them. Answers leave as they become known, in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import ClassVar, Final

from crosswire.bond import marshal
from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope, Kind, Property, message_kind
from crosswire.errors import (
    BondError,
    CallCancelled,
    CallError,
    ConnectionRejected,
    CrosswireError,
    Forbidden,
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
    EXTENDED,
    EXTENSION,
    NOTHING,
    PUBLICATION,
    PUBLISHED,
    REQUEST_LIMITS,
    SERVED_AT_ONCE,
    SERVICES,
    SETTLE_LIMITS,
    SETTLED,
    SETTLEMENT,
    SUBSCRIBED,
    SUBSCRIPTION,
    code_of,
    encode_delivery,
    failure_of,
    from_values,
    is_error,
    text_of,
)
from crosswire.gateways.epoxy.subscriptions import PeerSubscription
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.options import LARGEST_WINDOW, LONGEST_LEASE_S, parse_start
from crosswire.gateways.payloads import BYTES
from crosswire.hub.attachment import LEFT, Attachment, Delivery, Ended, Notice
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
"""Native key: layer data, for consumers of Epoxy."""
_OURS: Final = "crosswire."
_HUB: Final = "crosswire.Hub"
_SUBSCRIBER: Final = "crosswire.Subscriber"
_UNSTORED_BYTES: Final = 16 * 1024 * 1024
"""A peer with more than this published and not durable is not read from."""
_MESSAGE_BYTES: Final = 512
"""What a message takes in memory beside its payload, roughly."""
_DESCRIPTION_CHARACTERS: Final = 4096


class EpoxyGateway(Gateway):
    """A peer that speaks Epoxy."""

    protocol: ClassVar[str] = "epoxy"
    counts_calls: ClassVar[bool] = False
    connection: EpoxyConnection

    # Connecting.

    def connect(self, now: float) -> Connection:
        """Epoxy's connection, as server."""
        self.connection = EpoxyConnection("server", now, limits=self.context.config.limits.epoxy)
        self.connection.on_layer_data = self._recognize
        self._credentials: bytes | None = None
        self._token: str | None = None
        self._is_rejected = False
        self._batch: list[Envelope] = []
        self._publishers: list[int | None] = []
        """The conversation of each message of the batch; None for an event."""
        self._calls: list[Envelope] = []
        self._unstored_bytes = 0
        self._subscriptions: dict[int, PeerSubscription] = {}
        self._by_attachment: dict[Attachment, PeerSubscription] = {}
        self._settling: list[PeerSubscription] = []
        self._settlers: list[tuple[int, int]] = []
        """Conversations of `Settle` requests to answer, and the number of messages of each."""
        self._last_number = 0
        self._is_subscribing = False
        self._early: dict[Attachment, list[Delivery]] = {}
        """Deliveries of subscriptions whose number the peer doesn't know yet."""
        self._served: set[str] = set()
        self._awaited: dict[int, tuple[Provider, int]] = {}
        """Calls that the peer has not answered, by conversation; and the reverse."""
        self._conversations: dict[int, int] = {}
        return self.connection

    def receive(self, events: list[Event]) -> None:
        """Collect the events of one read, then hand them to the hub in batches."""
        for event in events:
            if self._is_rejected:
                # What a rejected peer sent before its credentials is still handed over below.
                break
            if isinstance(event, RequestReceived):
                self._on_request(event)
            elif isinstance(event, EventReceived):
                self._on_event(event)
            elif isinstance(event, ResponseReceived):
                self._on_response(event)
            elif isinstance(event, PeerFinished):
                self._release_all()
        self._hand_over()

    def _without_credentials(self, layer_data: bytes | None) -> bytes | None:
        """Layer data that may be kept and forwarded; None for credentials, which end here.

        A peer whose token nobody has, or which shows another one than before, is rejected: what it
        holds belongs to the first user.
        """
        # Clients send the same credentials with every message: compared before they are parsed.
        if layer_data is None or layer_data == self._credentials:
            return None
        token = find_credentials(layer_data)
        if token is None:
            return layer_data
        access = self.context.access
        if not access.open and token != self._token:
            principal = self.find_user(token)
            if principal is None or self._token is not None or not self.may_become(principal):
                again = "one peer can't be two users"
                reason = "nobody has this token" if principal is None else again
                self._is_rejected = True
                rejected = ConnectionRejected(reason)
                self.refuse_sign_in(lambda: self.connection.fail(rejected))
                return None
            self.identify(principal)
        self._credentials, self._token = layer_data, token
        return None

    def _recognize(self, layer_data: bytes) -> None:
        """Identify the peer by the layer data of a frame that is not whole yet, if it can."""
        if not self.connection.closed and self in self.context.newcomers:
            token = find_credentials(layer_data)
            principal = None if token is None else self.find_user(token)
            if principal is not None:
                self._credentials, self._token = layer_data, token
                self.identify(principal)

    def _release_all(self) -> None:
        """Give back what it holds: with its half closed it can neither settle nor answer.

        The connection stays for the answers that the peer still waits for.
        """
        self._hand_over()
        self._subscriptions.clear()
        self._by_attachment.clear()
        self._early.clear()
        for attachment in list(self.attachments):
            # A peer that was killed closes its half, too: it may have processed what it holds.
            self.detach(attachment, cause=LEFT)
        for provider in list(self.providers):
            self.withdraw(provider)

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
        """Answer a request, unless its connection ended meanwhile."""
        if not self.connection.is_owed(conversation):
            return
        try:
            self.connection.send_response(conversation, payload, layer_data=layer_data)
        except LocalProtocolError as error:
            self._fail(conversation, InvalidEnvelope(f"the answer can't be sent: {error}"))

    def _fail(self, conversation: int, error: CrosswireError) -> None:
        """Answer a request with an error; that of an Epoxy provider is passed on unchanged."""
        if not self.connection.is_owed(conversation):
            return
        if isinstance(error, ProviderFailed) and is_error(error.data):
            self.connection.send_error(conversation, error.data)
            return
        code, message, unique_id = code_of(error), text_of(error), ""
        if code == ErrorCode.INTERNAL_SERVER_ERROR:
            # With it the log and the ledger are searched: they have the connection's id, and a
            # call's correlation is its conversation.
            unique_id = f"{self.id}/{conversation}"
        elif isinstance(error, ProviderFailed):
            message = error.description
        failure = Error(code, message[:_DESCRIPTION_CHARACTERS], unique_id=unique_id)
        self.connection.send_error(conversation, failure)

    # Produce.

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
        self._publishers.append(None)

    def _drop(self, error: HubError) -> None:
        """Count an event that can't be published: it never gets an answer, not even an error."""
        self.context.count("dropped", self.protocol, type(error).__name__)

    def _publish(self, request: RequestReceived, layer_data: bytes | None) -> None:
        self.require_anywhere("produce")
        parsed = marshal.unmarshal(request.payload, PUBLICATION, limits=REQUEST_LIMITS)
        destination: str = parsed.destination
        self.require("produce", destination)
        self._batch.append(
            self._envelope(
                message_kind(destination),
                destination,
                parsed.payload,
                parsed.content_type or BYTES,
                layer_data,
                properties=from_values(parsed.properties),
            )
        )
        self._publishers.append(request.conversation_id)

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
        """Give the hub what was published, called and settled so far, in this order."""
        if self._batch:
            self._produce()
        if self._calls:
            calls, self._calls = self._calls, []
            self.call_all(calls, self._answer)
        if self._settling:
            settling, self._settling = self._settling, []
            now = self.context.now()
            for subscription in settling:
                ids, subscription.settling = subscription.settling, {}
                subscription.attachment.settle(ids, now)
        if self._settlers:
            self._answer_settled()

    def _produce(self) -> None:
        """Produce the batch; stop reading from the peer while too much of it is not durable.

        Events have no answer that a peer could wait for: its socket is the only way to slow it.
        """
        batch, self._batch = self._batch, []
        publishers, self._publishers = self._publishers, []
        size_bytes = sum(len(each.payload) + _MESSAGE_BYTES for each in batch)
        self._unstored_bytes += size_bytes
        if self._unstored_bytes > _UNSTORED_BYTES:
            self.session.hold_reading(True)

        def stored(receipt: Receipt) -> None:
            was_held = self._unstored_bytes > _UNSTORED_BYTES
            self._unstored_bytes -= size_bytes
            # The peer may have gone before the commit; the messages are durable all the same.
            if not self.left:
                self._answer_published(publishers, receipt)
                if was_held and self._unstored_bytes <= _UNSTORED_BYTES:
                    self.session.hold_reading(False)

        self.produce(batch).add_done_callback(self.owned(stored))

    def _answer_published(self, publishers: list[int | None], receipt: Receipt) -> None:
        for index, conversation in enumerate(publishers):
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

    # Consume.

    def _subscribe(self, request: RequestReceived) -> None:
        """Subscribe, and answer with the number before the first delivery that has it.

        A named subscription outlives the connection: it is durable before it is confirmed.
        """
        self.require_anywhere("consume")
        parsed = marshal.unmarshal(request.payload, SUBSCRIPTION, limits=REQUEST_LIMITS)
        if parsed.window > LARGEST_WINDOW:
            raise InvalidDestination(f"a window is 0 to {LARGEST_WINDOW}, not {parsed.window}")
        # The hub may deliver before `consume` returns, when the attachment is not known yet.
        self._is_subscribing = True
        try:
            attachment = self.consume(
                parsed.destination,
                window=parsed.window or None,
                filter=parsed.filter,
                name=parsed.name,
                start=parse_start(parsed.start),
            )
        finally:
            self._is_subscribing = False
        conversation = request.conversation_id
        if not parsed.name:
            self._begin_subscription(conversation, attachment)
            return
        self._early.setdefault(attachment, [])

        def stored(receipt: Receipt) -> None:
            if self.left:
                return
            if attachment not in self._early:
                # The peer closed its half meanwhile; the connection ends after this answer.
                self._fail(conversation, CallCancelled("the peer has closed its side"))
            elif receipt.error is None:
                self._begin_subscription(conversation, attachment)
            else:
                del self._early[attachment]
                self.detach(attachment)
                self._fail(conversation, receipt.error)
            self.session.wake()

        self.hub.committed().add_done_callback(self.owned(stored))

    def _begin_subscription(self, conversation: int, attachment: Attachment) -> None:
        """Answer with the number of the subscription, then deliver what has come meanwhile."""
        self._last_number += 1
        subscription = PeerSubscription(self._last_number, attachment)
        self._subscriptions[subscription.number] = self._by_attachment[attachment] = subscription
        subscribed = SUBSCRIBED.python_class(subscription=subscription.number)
        self._respond(conversation, marshal.marshal(subscribed, SUBSCRIBED))
        early = self._early.pop(attachment, [])
        if early:
            self.deliver(attachment, early)

    def _unsubscribe(self, request: RequestReceived) -> None:
        subscription = self._find(
            marshal.unmarshal(request.payload, SUBSCRIBED, limits=REQUEST_LIMITS).subscription
        )
        self._forget(subscription)
        self.detach(subscription.attachment)
        self._respond(request.conversation_id, NOTHING)

    def _settle(self, request: RequestReceived) -> None:
        self.require_anywhere("consume")
        parsed = marshal.unmarshal(request.payload, SETTLEMENT, limits=SETTLE_LIMITS)
        subscription = self._find(parsed.subscription)
        ids = subscription.take(parsed.ids)
        if parsed.refused:
            subscription.attachment.refuse(ids, self.context.now(), cause=parsed.reason)
        elif ids:
            # Collected for one call of the hub: a peer settles each message by a request.
            if not subscription.settling:
                self._settling.append(subscription)
            subscription.settling.update(dict.fromkeys(ids))
        self._settlers.append((request.conversation_id, len(ids)))

    def _extend(self, request: RequestReceived) -> None:
        self.require_anywhere("consume")
        parsed = marshal.unmarshal(request.payload, EXTENSION, limits=SETTLE_LIMITS)
        if not 0 < parsed.lease_s <= LONGEST_LEASE_S:
            raise InvalidDestination(f"a lease is up to {LONGEST_LEASE_S:g} s long")
        attachment = self._find(parsed.subscription).attachment
        count = attachment.extend(parsed.ids, self.context.now(), parsed.lease_s)
        extended = EXTENDED.python_class(count=count)
        self._respond(request.conversation_id, marshal.marshal(extended, EXTENDED))

    def _answer_settled(self) -> None:
        """Answer `Settle` requests after the commit: what was answered is not delivered again."""
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

    def _find(self, number: int) -> PeerSubscription:
        """Raises UnknownMessage."""
        subscription = self._subscriptions.get(number)
        if subscription is None:
            raise UnknownMessage(f"there is no subscription {number} on this connection")
        return subscription

    def _forget(self, subscription: PeerSubscription) -> None:
        del self._subscriptions[subscription.number]
        del self._by_attachment[subscription.attachment]

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send events; those of a subscription that is not confirmed yet wait.

        Deliveries for a peer that is leaving are dropped here: they go back with all it holds.
        """
        subscription = self._by_attachment.get(attachment)
        if subscription is None:
            if self._is_subscribing or attachment in self._early:
                self._early.setdefault(attachment, []).extend(deliveries)
            return
        if not self.connection.accepts_conversations:
            return
        subscription.give(deliveries)
        send = self.connection.send_event
        for delivery in deliveries:
            native = delivery.envelope.native
            layer_data = native.get(_LAYER_DATA) if native else None
            try:
                self._require_room(delivery.envelope)
                payload = encode_delivery(subscription.number, delivery)
                send(_SUBSCRIBER, "Deliver", payload, layer_data=layer_data)
            except (BondError, LocalProtocolError) as error:
                ids = subscription.take([delivery.envelope.id])
                attachment.refuse(ids, self.context.now(), cause=f"can't be sent in Epoxy: {error}")
        self.session.wake()

    def _require_room(self, envelope: Envelope) -> None:
        """Raises TooLargeToSend for a payload that is too large by itself, before it is encoded."""
        size, limit = len(envelope.payload), self.connection.limits.frame_bytes
        if size > limit:
            raise TooLargeToSend(size, limit)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """End the connection with a subscription that ended: Epoxy can't report it otherwise."""
        super().notice(attachment, notice)
        subscription = self._by_attachment.get(attachment)
        if isinstance(notice, Ended) and subscription is not None:
            self._forget(subscription)
            self.attachments.discard(attachment)
            ended = f"subscription {subscription.number} of {attachment.destination} ended"
            self.connection.fail(ConnectionRejected(f"{ended}: {notice.reason}"))
            self.session.wake()

    # Call.

    def _call(self, request: RequestReceived, layer_data: bytes | None) -> None:
        conversation = request.conversation_id
        service, method = request.service_name, request.method_name
        if not service or "/" in service:
            raise NoProvider(f"{service!r} can't be the name of a service")
        destination = f"service/{service}/{method}" if method else f"service/{service}"
        self.require("call", destination)
        payload, content_type = self.context.schemas.from_bond(
            "request", destination, request.payload
        )
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

    # Serve.

    def _authenticate(self, request: RequestReceived) -> None:
        """Nothing but its layer data counts, which every request may have. Raises Forbidden."""
        if not self.context.access.open and not self.principal:
            raise Forbidden("the layer data has no credentials")
        self._respond(request.conversation_id, NOTHING)

    def _serve(self, request: RequestReceived) -> None:
        self.require_anywhere("serve")
        parsed = marshal.unmarshal(request.payload, SERVICES, limits=REQUEST_LIMITS).services
        if len(parsed) > SERVED_AT_ONCE:
            raise InvalidEnvelope(f"at most {SERVED_AT_ONCE} names at once, not {len(parsed)}")
        names = [f"service/{name}" for name in dict.fromkeys(parsed)]
        new = [name for name in names if name not in self._served]
        if new:
            self.serve(new)
            self._served.update(new)
        self._respond(request.conversation_id, NOTHING)

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Send calls as requests of the hub."""
        connection = self.connection
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
                self._awaited[conversation] = (provider, envelope.id)
                self._conversations[envelope.id] = conversation
        self.session.wake()

    def cancel(self, provider: Provider, ids: list[int]) -> None:  # noqa: ARG002
        """Forget these calls: Epoxy can't cancel a request, and its answer will be dropped."""
        for identifier in ids:
            conversation = self._conversations.pop(identifier, None)
            if conversation is not None:
                del self._awaited[conversation]
                self.connection.forget_request(conversation)

    def _on_response(self, response: ResponseReceived) -> None:
        """Answer a call; one that was cancelled or has timed out meanwhile is dropped."""
        layer_data = self._without_credentials(response.layer_data)
        awaited = self._awaited.pop(response.conversation_id, None)
        if self._is_rejected or awaited is None:
            return
        provider, identifier = awaited
        del self._conversations[identifier]
        call = provider.calls.get(identifier)
        if call is None:
            # Timed out or cancelled since it was sent.
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


_OPERATIONS: Final[dict[str, Callable[[EpoxyGateway, RequestReceived], None]]] = {
    "Authenticate": EpoxyGateway._authenticate,
    "Extend": EpoxyGateway._extend,
    "Serve": EpoxyGateway._serve,
    "Subscribe": EpoxyGateway._subscribe,
    "Unsubscribe": EpoxyGateway._unsubscribe,
}
"""Methods of `crosswire.Hub` that wait for what the peer sent before them."""
