"""Through eMQP: REQUEST, PUBLISH, a worker of a queue, a subscriber of a topic."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from crosswire.cli.via.contract import (
    Answerer,
    Got,
    Letter,
    Place,
    Via,
    Wanted,
    inside,
    kept,
    with_type,
)
from crosswire.clients.emqp import EmqpClient, EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.errors import ClientError
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import Registered, RequestReceived
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.zmtp.curve import CurveClient, decode_key
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["EmqpVia", "mechanism_of"]


class EmqpVia(Via):
    """A queue's messages come to a worker, a topic's to a subscriber: `--port` is theirs then."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if place.token is not None or place.tls is not None:
            raise ClientError("eMQP has neither tokens nor TLS; its peers are known by CURVE keys")
        self._mechanism = mechanism_of(place)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[EmqpClient]:
        async with EmqpClient(
            self.place.host, self.port("emqp-clients"), mechanism=self._mechanism
        ) as client:
            yield client

    async def publish(self, destination: str, letters: Sequence[Letter]) -> list[int]:
        kind, _, name = destination.partition("/")
        async with self._client() as client:
            for letter in letters:
                properties = with_type(letter)
                if kind == "topic":
                    await client.publish(name, letter.payload, properties=properties)
                else:
                    await client.request(
                        letter.payload, queue=name, guarantee=True, properties=properties
                    )
        return [0] * len(letters)

    async def subscribe(self, wanted: Wanted) -> AsyncGenerator[Got, None]:
        kind, _, name = wanted.destination.partition("/")
        if wanted.filter or wanted.name or wanted.start:
            raise ClientError("eMQP has no filters and no named subscriptions")
        if kind == "topic":
            place = self.place
            prefix = name.removesuffix("#")
            async with EmqpSubscriber(
                place.host, self.port("emqp-subscribers"), [prefix], mechanism=self._mechanism
            ) as subscriber:
                async for topic, message in subscriber:
                    yield Got(destination=f"topic/{topic}", payload=message)
            return
        async with self._worker(name, wanted.window) as jobs:
            async for job in jobs:
                yield job

    async def call(self, service: str, letter: Letter, timeout_s: float) -> Got:
        async with self._client() as client:
            answer = await client.request(
                letter.payload,
                queue=service.removeprefix("service/"),
                reply_requested=True,
                properties=with_type(letter),
                wait_s=timeout_s,
            )
        return Got(destination=service, payload=answer or b"")

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        async with self._worker(service.removeprefix("service/"), 16, answerer) as jobs:
            ready()
            async for job in jobs:
                assert job.settle is not None
                await job.settle()

    @asynccontextmanager
    async def _worker(
        self, queue: str, slots: int, answerer: Answerer | None = None
    ) -> AsyncIterator[AsyncIterator[Got]]:
        """Messages as they are, whatever they ask to be called."""
        arrived: asyncio.Queue[Got] = asyncio.Queue()

        class Peer(EmqpPeer):
            def handle_event(self, event: Event) -> None:
                if isinstance(event, Registered):
                    for _ in range(slots):
                        self.connection.send_ready()
                    self.opened.set_result(None)
                elif isinstance(event, RequestReceived):
                    arrived.put_nowait(_job(self, event, answerer))
                elif self.opened.done():
                    super().handle_event(event)

        peer = Peer()
        await connect_peer(
            peer,
            "worker",
            self.place.host,
            self.port("emqp-workers"),
            queues=((10, queue),),
            mechanism=self._mechanism,
        )

        async def ended() -> None:
            await asyncio.wait([peer.ended])
            raise ClientError(peer.why())

        async def jobs(keeper: asyncio.Task[None]) -> AsyncIterator[Got]:
            while True:
                yield await inside(arrived.get(), keeper)

        async with kept(ended()) as keeper:
            try:
                yield jobs(keeper)
            finally:
                await peer.flush()
                await peer.close()


def _job(peer: EmqpPeer, event: RequestReceived, answerer: Answerer | None) -> Got:
    headers = Headers.parse(event.headers)

    async def settle() -> None:
        reply = b'{"value": null}'
        if answerer is not None:
            reply = (await answerer(got)).payload
        if headers.reply_requested:
            peer.connection.send_reply(reply, event.msgid)
        peer.connection.send_ready()
        peer.session.wake()

    properties = headers.properties()
    got = Got(
        destination=f"queue/{event.queue}",
        payload=event.message,
        content_type=str(properties.pop("content-type", "")),
        properties=properties,
        settle=settle,
    )
    return got


def mechanism_of(place: Place) -> Mechanism | None:
    """Keys of our own are made up where none are given: they say nothing about who we are."""
    if place.curve_server is None:
        return None
    try:
        secret = secrets.token_bytes(32)
        if place.curve_secret is not None:
            secret = decode_key(place.curve_secret)
        return CurveClient(decode_key(place.curve_server), secret, secrets.token_bytes)
    except ValueError as error:
        raise ClientError(f"a CURVE key can't be used: {error}") from None
