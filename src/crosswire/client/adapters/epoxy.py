"""Through Epoxy: the services `crosswire.Hub` and `crosswire.Subscriber`, or any other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

from crosswire.bond import hub_module, marshal
from crosswire.client.adapters.contract import (
    Adapter,
    Answerer,
    EncodedMessage,
    Feed,
    FeedOwner,
    HubTarget,
    SubscriptionRequest,
    from_typed,
    report_end,
)
from crosswire.client.message import DeliveryHandle, Message
from crosswire.client.native.epoxy import CallReply, EpoxyClient, EpoxyPeer, Handler, IncomingCall
from crosswire.client.refusals import called, performed, refusal_of
from crosswire.envelope import Envelope, Kind, Property
from crosswire.errors import (
    BadRequest,
    CallFailed,
    ClientError,
    CrosswireError,
    DeliveryLost,
    InvalidEnvelope,
    ProviderFailed,
)
from crosswire.gateways.payloads import Schemas
from crosswire.wire.epoxy.comm import ErrorCode

__all__ = ["EpoxyAdapter"]

_log = logging.getLogger("crosswire.client.adapters.epoxy")

_HUB: Final = "crosswire.Hub"
_SETTLED_AT_ONCE: Final = 10_000
"""Ids in one request: the hub's limit."""
_LAST_WORD_S: Final = 5.0
"""How long closing waits for the hub to have unsubscribed us."""
_CODES: Final = {
    "provider_lost": ErrorCode.CONNECTION_SHUT_DOWN,
    "timeout": ErrorCode.TIMEOUT_ERROR,
    "unknown_op": ErrorCode.METHOD_NOT_FOUND,
}
"""Bond's codes for those that the hub has in all protocols."""
_module = hub_module()
_service: Final = _module.service(_HUB)


def _struct(name: str, /, **fields: Any) -> bytes:
    struct = _module.struct(f"crosswire.{name}")
    return marshal.marshal(struct.python_class(**fields), struct)


def _parse(name: str, payload: bytes) -> Any:
    return marshal.unmarshal(payload, _module.struct(f"crosswire.{name}"))


def _value(value: Property) -> Any:
    kind = _module.struct("crosswire.Value").python_class
    if isinstance(value, bool):
        return kind(truth=value)
    if isinstance(value, int):
        return kind(integer=value)
    return kind(real=value) if isinstance(value, float) else kind(text=value)


class EpoxyAdapter(Adapter):
    """Bond Epoxy; with `.bond` files calls are converted between JSON and Bond."""

    settles_in_order: ClassVar[bool] = False
    knows_ids: ClassVar[bool] = True

    def __init__(self, target: HubTarget) -> None:
        super().__init__(target)
        self._schemas = Schemas(target.bond)

    async def open(self) -> None:
        """Connect."""
        self._requests = self._client()
        await performed(self._requests.__aenter__())

    async def close(self) -> None:
        """Close the connection after the answers that are awaited."""
        await self._requests.close()

    def _client(self, **more: Any) -> EpoxyClient:
        target = self.target
        first, *others = target.url.addresses
        return EpoxyClient(
            *first,
            others=others,
            tls=target.tls,
            token=target.token,
            backoff=target.backoff(),
            connect_timeout_s=target.connect_timeout_s,
            **more,
        )

    async def publish(
        self, destination: str, messages: Sequence[EncodedMessage], timeout_s: float
    ) -> list[int | None]:
        """Calls of `crosswire.Hub.Publish` in one write; the answers have the ids."""
        payloads = [
            _struct(
                "Publication",
                destination=destination,
                payload=each.payload,
                content_type=each.content_type,
                properties={name: _value(value) for name, value in each.properties.items()},
            )
            for each in messages
        ]
        peer = await performed(self._requests.peer(timeout_s))
        replies = await peer.call_all(_HUB, "Publish", payloads, timeout_s=timeout_s)
        for reply in replies:
            if isinstance(reply, CallFailed):
                raise refusal_of(reply)
        answers = [reply for reply in replies if isinstance(reply, CallReply)]
        return [_parse("Published", answer.payload).id for answer in answers]

    async def call(self, service: str, message: EncodedMessage, timeout_s: float) -> Message:
        """The service's method; with a schema, JSON is converted to Bond and back."""
        name, _, method = service.removeprefix("service/").partition("/")
        request = self._to_bond("request", service, message)
        reply = await called(self._requests.call_bytes(name, method, request, timeout_s=timeout_s))
        return self._from_bond("response", service, reply.payload)

    def _to_bond(self, kind: Kind, service: str, message: EncodedMessage) -> bytes:
        envelope = Envelope(
            destination=service,
            kind=kind,
            payload=message.payload,
            content_type=message.content_type,
        )
        try:
            return self._schemas.to_bond(envelope)
        except InvalidEnvelope as error:
            raise BadRequest(str(error)) from None

    def _from_bond(self, kind: Kind, service: str, payload: bytes) -> Message:
        payload, content_type = self._schemas.from_bond(kind, service, payload)
        envelope = self._schemas.readable(
            Envelope(destination=service, kind=kind, payload=payload, content_type=content_type)
        )
        return Message(service, envelope.payload, content_type=envelope.content_type)

    async def subscribe(self, request: SubscriptionRequest, owner: FeedOwner) -> Feed:
        """`crosswire.Hub.Subscribe`, which the client repeats on every connection."""
        feed = _EpoxyFeed(owner)
        handlers = {("crosswire.Subscriber", "Deliver"): feed.deliver}
        # A hub keeps to the window; a burst of one read must not lose any of it.
        client = self._client(handlers=handlers, events_waiting=request.window + 1024)
        asked = _struct(
            "Subscription",
            destination=request.destination,
            filter=request.filter,
            name=request.name,
            start=request.start,
            window=request.window,
        )
        await performed(client.__aenter__())
        try:
            reply = await performed(client.call_bytes(_HUB, "Subscribe", asked))
        except BaseException:
            await client.close()
            raise
        feed.number = _parse("Subscribed", reply.payload).subscription
        feed.begin(client, owner.fail)
        client.watch(owner.reset)
        return feed

    async def serve(
        self, service: str, answer: Answerer, fail: Callable[[CrosswireError], None]
    ) -> Feed:
        """`crosswire.Hub.Serve`; with a schema, Bond is converted to JSON and back."""

        async def handle(call: IncomingCall) -> bytes:
            called_as = f"service/{call.service}" + (f"/{call.method}" if call.method else "")
            try:
                reply = await answer(self._from_bond("request", called_as, call.payload))
                return self._to_bond("response", called_as, reply)
            except ProviderFailed as failed:
                raise _failure(failed) from None
            except (BadRequest, InvalidEnvelope) as error:
                raise CallFailed(ErrorCode.INTERNAL_SERVER_ERROR, str(error)) from None

        name, _, _ = service.removeprefix("service/").partition("/")
        client = self._client(handlers=_EveryMethod(name, handle))
        services = _struct("Services", services=[service.removeprefix("service/")])
        await performed(client.__aenter__())
        try:
            await performed(client.call_bytes(_HUB, "Serve", services))
        except BaseException:
            await client.close()
            raise
        feed = _EpoxyFeed(None)
        feed.begin(client, fail)
        return feed


class _EpoxyFeed(Feed):
    """A subscription, or a service, on a client of its own."""

    def __init__(self, owner: FeedOwner | None) -> None:
        self._owner = owner
        self.number = 0
        """The subscription's; 0 for a service."""
        self._settling: dict[tuple[EpoxyPeer, int], list[int]] = {}
        self._settler: asyncio.Task[None] | None = None

    def begin(self, client: EpoxyClient, fail: Callable[[CrosswireError], None]) -> None:
        self.client = client
        report_end(client.ended, fail)

    async def deliver(self, call: IncomingCall) -> None:
        assert self._owner is not None
        delivery = _parse("Delivery", call.payload)
        properties: dict[str, Property] = {}
        for name, value in delivery.properties.items():
            members = (value.text, value.integer, value.real, value.truth)
            properties[name] = next(each for each in members if each is not None)
        properties, content_type = from_typed(properties, delivery.content_type)
        self._owner.take(
            Message(
                delivery.destination,
                delivery.payload,
                content_type=content_type,
                properties=properties,
                id=delivery.id,
                attempt=delivery.attempt,
                handle=_EpoxyHandle(self, call.peer, delivery.subscription, delivery.id),
            )
        )

    def settle(self, peer: EpoxyPeer, number: int, identifier: int) -> None:
        """Settle, with all others that are settled until the next call can be made.

        The answer comes after the hub's commit: a program that waited for each would do one message
        at a time.
        """
        self._settling.setdefault((peer, number), []).append(identifier)
        if self._settler is None:
            self._settler = asyncio.create_task(self._settle_all())

    async def _settle_all(self) -> None:
        try:
            while self._settling:
                settling, self._settling = self._settling, {}
                for (peer, number), ids in settling.items():
                    for start in range(0, len(ids), _SETTLED_AT_ONCE):
                        part = ids[start : start + _SETTLED_AT_ONCE]
                        settlement = _struct("Settlement", subscription=number, ids=part)
                        try:
                            await peer.call_bytes(_HUB, "Settle", settlement)
                        except CrosswireError as error:
                            _log.warning("%d messages were not settled: %s", len(part), error)
        finally:
            self._settler = None

    async def close(self) -> None:
        if self._settler is not None:
            await asyncio.wait([self._settler])
        if self.number:
            with suppress(ClientError):
                peer = await self.client.peer(0.01)
                asked = _struct("Subscribed", subscription=self.number)
                await peer.call_bytes(_HUB, "Unsubscribe", asked, timeout_s=_LAST_WORD_S)
        await self.client.close()


class _EpoxyHandle(DeliveryHandle):
    def __init__(self, feed: _EpoxyFeed, peer: EpoxyPeer, number: int, identifier: int) -> None:
        self._feed = feed
        self._peer = peer
        self._number = number
        self._id = identifier

    @property
    def lost(self) -> bool:
        return self._peer.ended.done()

    def settle(self) -> None:
        self._feed.settle(self._peer, self._number, self._id)

    async def refuse(self, reason: str) -> None:
        settlement = _struct(
            "Settlement", subscription=self._number, ids=[self._id], refused=True, reason=reason
        )
        await performed(self._peer.call_bytes(_HUB, "Settle", settlement))

    async def extend(self, lease_s: float) -> None:
        asked = _struct("Extension", subscription=self._number, ids=[self._id], lease_s=lease_s)
        reply = await performed(self._peer.call_bytes(_HUB, "Extend", asked))
        if not _parse("Extended", reply.payload).count:
            raise DeliveryLost(f"message {self._id} is no longer ours")


class _EveryMethod(Mapping[tuple[str, str], Handler]):
    """Handlers of all methods of one service."""

    def __init__(self, service: str, handler: Handler) -> None:
        self._service = service
        self._handler = handler

    def __getitem__(self, name: tuple[str, str]) -> Handler:
        if name[0] != self._service:
            raise KeyError(name)
        return self._handler

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter([(self._service, "")])

    def __len__(self) -> int:
        return 1


def _failure(failed: ProviderFailed) -> CallFailed:
    """Bond's codes are numbers: a code that isn't one begins the text."""
    if failed.code in _CODES:
        return CallFailed(_CODES[failed.code], failed.description)
    if failed.code.lstrip("-").isdecimal() and -(2**31) <= int(failed.code) < 2**31:
        return CallFailed(int(failed.code), failed.description)
    return CallFailed(ErrorCode.INTERNAL_SERVER_ERROR, str(failed))
