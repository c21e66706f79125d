"""Through Relink: publish, subscribe, call and serve are endpoints of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlencode

import msgspec

from crosswire.cli.via.contract import (
    BYTES,
    Answerer,
    IncomingMessage,
    Via,
    ViaMessage,
    ViaSubscription,
    with_type,
)
from crosswire.client.native.dial import within
from crosswire.client.native.relink import Received, Receiver, RelinkClient
from crosswire.envelope import Property
from crosswire.errors import ClientError, RequestFailed

__all__ = ["RelinkVia"]


class RelinkVia(Via):
    """Relink: `consumed` acknowledges and settles; peers are identified by certificates."""

    @asynccontextmanager
    async def _client(self, endpoint: str) -> AsyncIterator[RelinkClient]:
        target = self.target
        if target.token is not None:
            raise ClientError("Relink identifies peers by certificates only: use --cert and --key")
        client = RelinkClient(target.host, self.port("relink"), endpoint, tls=target.tls)
        async with client:
            yield client

    async def publish(self, destination: str, messages: Sequence[ViaMessage]) -> list[int]:
        """All messages on one channel, then a wait until all are consumed."""
        async with self._client(destination) as client:
            sender = client.sender()
            for message in messages:
                await sender.send(*_parts(message))
            await sender.consumed(timeout_s=30.0)
        return [0] * len(messages)

    async def subscribe(self, wanted: ViaSubscription) -> AsyncGenerator[IncomingMessage, None]:
        """The endpoint `?consume` of a queue or `?subscribe` of a topic."""
        verb = "consume" if wanted.destination.startswith("queue/") else "subscribe"
        more = {"from": wanted.start, "name": wanted.name, "filter": wanted.filter}
        query = urlencode({key: value for key, value in more.items() if value})
        endpoint = f"{wanted.destination}?{verb}" + (f"&{query}" if query else "")
        async with self._client(endpoint) as client:
            async for message in client.receiver():
                yield _from_parts(wanted.destination, message)

    async def call(self, service: str, message: ViaMessage, timeout_s: float) -> IncomingMessage:
        """One message each way. Raises RequestFailed for a response with an `error` property."""
        async with self._client(service) as client:
            await client.sender().send(*_parts(message))
            receiver = client.receiver()
            response = await within(timeout_s, f"no answer from {service}", anext(receiver))
            got = _from_parts(service, response)
            response.consume()
        error = got.properties.get("error")
        if error is not None:
            raise RequestFailed(str(error), str(got.properties.get("description", "")))
        return got

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """The endpoint `?serve`; each call is on a channel that the hub opens."""

        async def answer(receiver: Receiver, client: RelinkClient) -> None:
            async for message in receiver:
                outgoing = await answerer(_from_parts(service, message))
                await client.sender(receiver.channel).send(*_parts(outgoing))
                message.consume()

        answering: set[asyncio.Task[None]] = set()
        async with self._client(f"{service}?serve") as client:
            ready()
            try:
                async for receiver in client.opened():
                    answering.add(asyncio.create_task(answer(receiver, client)))
            finally:
                for task in answering:
                    task.cancel()
                if answering:
                    await asyncio.wait(answering)


def _parts(message: ViaMessage) -> list[bytes]:
    """One part where there are no properties, else they come first, as JSON."""
    properties = with_type(message)
    return [msgspec.json.encode(properties), message.payload] if properties else [message.payload]


def _from_parts(destination: str, message: Received) -> IncomingMessage:
    async def settle() -> None:
        message.consume()

    parts = [bytes(part) for part in message.parts]
    properties: dict[str, Property] = {}
    if len(parts) == 2:
        properties = msgspec.json.decode(parts[0])
    return IncomingMessage(
        destination=destination,
        payload=b"".join(parts[1:]) if len(parts) == 2 else b"".join(parts),
        content_type=str(properties.pop("content-type", BYTES)),
        properties=properties,
        settle=settle,
    )
