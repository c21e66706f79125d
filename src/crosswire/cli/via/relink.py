"""Through Relink: an endpoint for each of the four."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlencode

import msgspec

from crosswire.cli.body import Property
from crosswire.cli.via.contract import (
    BYTES,
    Answerer,
    Got,
    Letter,
    Via,
    Wanted,
    with_type,
)
from crosswire.clients.dial import within
from crosswire.clients.relink import Received, Receiver, RelinkClient
from crosswire.errors import ClientError, RequestFailed

__all__ = ["RelinkVia"]


class RelinkVia(Via):
    @asynccontextmanager
    async def _client(self, endpoint: str) -> AsyncIterator[RelinkClient]:
        place = self.place
        if place.token is not None:
            raise ClientError("Relink knows peers by their certificates only: use --cert and --key")
        client = RelinkClient(place.host, self.port("relink"), endpoint, tls=place.tls)
        async with client:
            yield client

    async def publish(self, destination: str, letters: Sequence[Letter]) -> list[int]:
        async with self._client(destination) as client:
            sender = client.sender()
            for letter in letters:
                await sender.send(*_parts(letter))
            await sender.consumed(timeout_s=30.0)
        return [0] * len(letters)

    async def subscribe(self, wanted: Wanted) -> AsyncGenerator[Got, None]:
        verb = "consume" if wanted.destination.startswith("queue/") else "subscribe"
        more = {"from": wanted.start, "name": wanted.name, "filter": wanted.filter}
        query = urlencode({key: value for key, value in more.items() if value})
        endpoint = f"{wanted.destination}?{verb}" + (f"&{query}" if query else "")
        async with self._client(endpoint) as client:
            async for message in client.receiver():
                yield _from_parts(wanted.destination, message)

    async def call(self, service: str, letter: Letter, timeout_s: float) -> Got:
        async with self._client(service) as client:
            await client.sender().send(*_parts(letter))
            receiver = client.receiver()
            message = await within(timeout_s, f"no answer from {service}", anext(receiver))
            got = _from_parts(service, message)
            message.consume()
        error = got.properties.get("error")
        if error is not None:
            raise RequestFailed(str(error), str(got.properties.get("description", "")))
        return got

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        async def answer(receiver: Receiver, client: RelinkClient) -> None:
            async for message in receiver:
                letter = await answerer(_from_parts(service, message))
                await client.sender(receiver.channel).send(*_parts(letter))
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


def _parts(letter: Letter) -> list[bytes]:
    """One part where there are no properties, else they come first, as JSON."""
    properties = with_type(letter)
    return [msgspec.json.encode(properties), letter.payload] if properties else [letter.payload]


def _from_parts(destination: str, message: Received) -> Got:
    async def settle() -> None:
        message.consume()

    parts = [bytes(part) for part in message.parts]
    properties: dict[str, Property] = {}
    if len(parts) == 2:
        properties = msgspec.json.decode(parts[0])
    return Got(
        destination=destination,
        payload=b"".join(parts[1:]) if len(parts) == 2 else b"".join(parts),
        content_type=str(properties.pop("content-type", BYTES)),
        properties=properties,
        settle=settle,
    )
