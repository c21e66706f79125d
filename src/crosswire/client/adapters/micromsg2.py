"""Through MicroMsg2: a SEND, `subscribe`, a call with `reply-to`, `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from crosswire.client.adapters.contract import (
    Adapter,
    Answerer,
    EncodedMessage,
    Feed,
    FeedOwner,
    SubscriptionRequest,
    from_typed,
    report_end,
    typed,
)
from crosswire.client.message import BYTES, DeliveryHandle, Message
from crosswire.client.native.dial import within
from crosswire.client.native.micromsg2 import (
    MicroMsg2Client,
    MicroMsg2Delivery,
    MicroMsg2Peer,
    MicroMsg2Subscription,
    client_offer,
)
from crosswire.client.refusals import called, performed, refusal_of
from crosswire.envelope import Property
from crosswire.errors import (
    BadRequest,
    ConnectionLost,
    CrosswireError,
    LocalProtocolError,
    ProviderFailed,
    RequestFailed,
    Unsupported,
)

__all__ = ["MicroMsg2Adapter"]

_SEND_WINDOW: Final = 1000
"""Messages that may be on their way to the hub without an acknowledgement."""
_LAST_WORD_S: Final = 5.0
"""How long closing waits for the hub to have read the last acknowledgements."""
_NOBODY: Final = "reply/0"
"""The hub numbers its calls from 1: an answer to this one is acknowledged, and means nothing."""


class MicroMsg2Adapter(Adapter):
    """MicroMsg2: acknowledgements confirm and settle, in order; ids are not carried."""

    async def open(self) -> None:
        """Connect, with the token in the handshake."""
        self._requests = self._client(_SEND_WINDOW)
        await self._enter(self._requests)

    async def close(self) -> None:
        """Close the connection."""
        await self._requests.close()

    def _client(self, window: int) -> MicroMsg2Client:
        target = self.target
        first, *others = target.url.addresses
        return MicroMsg2Client(
            *first,
            others=others,
            offer=client_offer(window=window, auth=target.token),
            tls=target.tls,
            backoff=target.backoff(),
            connect_timeout_s=target.connect_timeout_s,
        )

    async def _enter(self, client: MicroMsg2Client) -> None:
        """Connect. A token that nobody has is refused after the handshake, by an ERROR."""
        await performed(client.__aenter__())
        try:
            await self._confirm(client)
        except BaseException:
            await client.close()
            raise

    async def _confirm(self, client: MicroMsg2Client) -> None:
        """Wait until the hub has acted on all commands: it has no answers to them but ERROR."""
        peer = await client.peer(self.target.connect_timeout_s)
        await self._sent(peer, [peer.send(_NOBODY, b"")], self.target.connect_timeout_s)

    async def _sent(
        self, peer: MicroMsg2Peer, futures: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> None:
        """Wait for acknowledgements. Raises what the hub's ERROR stands for."""
        try:
            await within(timeout_s, "no acknowledgement", asyncio.gather(*futures))
        except ConnectionLost as lost:
            for future in futures:
                if future.done():
                    future.exception()  # asyncio warns of those that nobody has fetched
            if peer.error is not None:
                failed = RequestFailed(str(peer.error.code), peer.error.reason)
                raise refusal_of(failed) from lost
            raise
        except LocalProtocolError as error:
            raise BadRequest(str(error)) from None

    async def publish(
        self, destination: str, messages: Sequence[EncodedMessage], timeout_s: float
    ) -> list[int | None]:
        """SENDs, acknowledged when they are durable. A full queue withholds that."""
        peer = await performed(self._requests.peer(timeout_s))
        futures = [peer.send(destination, each.payload, typed(each)) for each in messages]
        await self._sent(peer, futures, timeout_s)
        return [None] * len(messages)

    async def call(self, service: str, message: EncodedMessage, timeout_s: float) -> Message:
        """A SEND with `reply-to` and `correlation-id`."""
        answer = await called(
            self._requests.call(service, message.payload, typed(message), timeout_s=timeout_s)
        )
        return _message(answer)

    async def subscribe(self, request: SubscriptionRequest, owner: FeedOwner) -> Feed:
        """The `subscribe` command, which the client repeats on every connection."""
        client = self._client(min(request.window, 32767))
        await performed(client.__aenter__())
        subscription = client.subscribe(
            request.destination,
            filter=request.filter or None,
            name=request.name or None,
            start=request.start or None,
            manual=True,
        )
        try:
            await subscription.__aenter__()
            await self._confirm(client)
        except BaseException:
            await client.close()
            raise
        client.watch(owner.reset)
        return _MicroMsg2Feed(self, client, subscription, owner)

    async def serve(
        self, service: str, answer: Answerer, fail: Callable[[CrosswireError], None]
    ) -> Feed:
        """The `serve` command; the answer is a SEND to the request's `reply-to`."""

        async def respond(delivery: MicroMsg2Delivery) -> tuple[bytes, Mapping[str, Property]]:
            try:
                reply = await answer(_message(delivery))
            except ProviderFailed as failed:
                raise RequestFailed(failed.code, failed.description, data=failed.data) from None
            return reply.payload, typed(reply)

        client = self._client(_SEND_WINDOW)
        await performed(client.__aenter__())
        try:
            await client.serve(service, respond)
            await self._confirm(client)
        except BaseException:
            await client.close()
            raise
        report_end(client.ended, fail)
        return _MicroMsg2Feed(self, client, None, None)

    async def confirm(self, client: MicroMsg2Client) -> None:
        """Wait until the hub has read all acknowledgements, if it is there."""
        with suppress(CrosswireError):
            peer = await client.peer(0.01)
            await self._sent(peer, [peer.send(_NOBODY, b"")], _LAST_WORD_S)


class _MicroMsg2Feed(Feed):
    """A subscription, or a service, on a client of its own."""

    def __init__(
        self,
        adapter: MicroMsg2Adapter,
        client: MicroMsg2Client,
        subscription: MicroMsg2Subscription | None,
        owner: FeedOwner | None,
    ) -> None:
        self._adapter = adapter
        self._client = client
        self._subscription = subscription
        self._pump: asyncio.Task[None] | None = None
        if subscription is not None and owner is not None:
            self._pump = asyncio.create_task(self._read(subscription, owner))

    async def _read(self, subscription: MicroMsg2Subscription, owner: FeedOwner) -> None:
        try:
            async for delivery in subscription:
                owner.take(_message(delivery, _MicroMsg2Handle(delivery)))
        except RequestFailed as failed:
            owner.fail(refusal_of(failed))
        except CrosswireError as error:
            owner.fail(error)

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        if self._subscription is not None:
            self._subscription.close()
        if not self._client.ended.done():
            await self._adapter.confirm(self._client)
        await self._client.close()


class _MicroMsg2Handle(DeliveryHandle):
    def __init__(self, delivery: MicroMsg2Delivery) -> None:
        self._delivery = delivery

    @property
    def lost(self) -> bool:
        return self._delivery.peer.ended.done()

    def settle(self) -> None:
        self._delivery.acknowledge()

    async def refuse(self, reason: str) -> None:
        try:
            self._delivery.refuse(reason)
        except LocalProtocolError:
            raise Unsupported("this server does not agree to refusals (x-refuse)") from None


def _message(delivery: MicroMsg2Delivery, handle: DeliveryHandle | None = None) -> Message:
    # The protocol has no booleans: the hub writes them as these two texts.
    values = {
        name: value == "true" if value in ("true", "false") else value
        for name, value in delivery.properties.items()
    }
    properties, content_type = from_typed(values, BYTES, of_call=handle is None)
    return Message(
        delivery.destination,
        bytes(delivery.payload),
        content_type=content_type,
        properties=properties,
        handle=handle,
    )
