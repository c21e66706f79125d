"""Through MicroMsg2: a SEND, `subscribe`, a call with `reply-to`, `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from crosswire.cli.via.contract import (
    BYTES,
    Answerer,
    IncomingMessage,
    Via,
    ViaMessage,
    ViaSubscription,
    runs,
    with_type,
)
from crosswire.client.native.micromsg2 import MicroMsg2Client, MicroMsg2Delivery, client_offer
from crosswire.envelope import Property

__all__ = ["MicroMsg2Via"]


class MicroMsg2Via(Via):
    """MicroMsg2: messages are acknowledged in batches; ids are not returned."""

    @asynccontextmanager
    async def _client(self, window: int = 100) -> AsyncIterator[MicroMsg2Client]:
        target = self.target
        offer = client_offer(window=window, auth=target.token)
        port = self.port("micromsg2")
        async with MicroMsg2Client(target.host, port, offer=offer, tls=target.tls) as client:
            yield client

    async def publish(self, destination: str, messages: Sequence[ViaMessage]) -> list[int]:
        """Concurrent SENDs, acknowledged when they are durable."""
        async with self._client() as client:
            for run in runs(messages):
                await asyncio.gather(
                    *(client.send(destination, each.payload, with_type(each)) for each in run)
                )
        return [0] * len(messages)

    async def subscribe(self, wanted: ViaSubscription) -> AsyncGenerator[IncomingMessage, None]:
        """The `subscribe` command; settling acknowledges."""
        async with (
            self._client(wanted.window) as client,
            client.subscribe(
                wanted.destination,
                filter=wanted.filter or None,
                name=wanted.name or None,
                start=wanted.start or None,
                manual=True,
            ) as subscription,
        ):
            async for delivery in subscription:
                yield _from_micromsg2(delivery)

    async def call(self, service: str, message: ViaMessage, timeout_s: float) -> IncomingMessage:
        """A SEND with `reply-to` and `correlation-id`."""
        async with self._client() as client:
            answer = await client.call(
                service, message.payload, with_type(message), timeout_s=timeout_s
            )
        return _from_micromsg2(answer)

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """The `serve` command; the answer is a SEND to the request's `reply-to`."""

        async def respond(delivery: MicroMsg2Delivery) -> tuple[bytes, Mapping[str, Property]]:
            message = await answerer(_from_micromsg2(delivery))
            return message.payload, with_type(message)

        async with self._client() as client:
            await client.serve(service, respond)
            ready()
            await asyncio.Event().wait()


def _from_micromsg2(delivery: MicroMsg2Delivery) -> IncomingMessage:
    async def settle() -> None:
        delivery.acknowledge()

    properties = dict(delivery.properties)
    content_type = str(properties.pop("content-type", BYTES))
    for name in ("correlation-id", "reply-to"):
        properties.pop(name, None)
    return IncomingMessage(
        destination=delivery.destination,
        payload=bytes(delivery.payload),
        content_type=content_type,
        properties=properties,
        settle=settle,
    )
