"""Through MicroMsg2: a SEND, `subscribe`, a call with `reply-to`, `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from crosswire.cli.body import Property
from crosswire.cli.via.contract import (
    BYTES,
    Answerer,
    Got,
    Letter,
    Via,
    Wanted,
    runs,
    with_type,
)
from crosswire.clients.micromsg2 import Delivery, MicroMsg2Client, client_offer

__all__ = ["MicroMsg2Via"]


class MicroMsg2Via(Via):
    @asynccontextmanager
    async def _client(self, window: int = 100) -> AsyncIterator[MicroMsg2Client]:
        place = self.place
        offer = client_offer(window=window, auth=place.token)
        port = self.port("micromsg2")
        async with MicroMsg2Client(place.host, port, offer=offer, tls=place.tls) as client:
            yield client

    async def publish(self, destination: str, letters: Sequence[Letter]) -> list[int]:
        async with self._client() as client:
            for run in runs(letters):
                await asyncio.gather(
                    *(client.send(destination, each.payload, with_type(each)) for each in run)
                )
        return [0] * len(letters)

    async def subscribe(self, wanted: Wanted) -> AsyncGenerator[Got, None]:
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

    async def call(self, service: str, letter: Letter, timeout_s: float) -> Got:
        async with self._client() as client:
            answer = await client.call(
                service, letter.payload, with_type(letter), timeout_s=timeout_s
            )
        return _from_micromsg2(answer)

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        async def respond(delivery: Delivery) -> tuple[bytes, Mapping[str, Property]]:
            letter = await answerer(_from_micromsg2(delivery))
            return letter.payload, with_type(letter)

        async with self._client() as client:
            await client.serve(service, respond)
            ready()
            await asyncio.Event().wait()


def _from_micromsg2(delivery: Delivery) -> Got:
    async def settle() -> None:
        delivery.acknowledge()

    properties = dict(delivery.properties)
    content_type = str(properties.pop("content-type", BYTES))
    for name in ("correlation-id", "reply-to"):
        properties.pop(name, None)
    return Got(
        destination=delivery.destination,
        payload=bytes(delivery.payload),
        content_type=content_type,
        properties=properties,
        settle=settle,
    )
