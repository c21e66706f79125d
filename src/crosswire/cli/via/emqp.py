"""Through eMQP: REQUEST, PUBLISH, a worker of a queue, a subscriber of a topic."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from crosswire.cli.via.contract import (
    Answerer,
    IncomingMessage,
    Via,
    ViaMessage,
    ViaSubscription,
    ViaTarget,
    inside,
    kept,
    with_type,
)
from crosswire.client.native.emqp import EmqpClient, EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.errors import ClientError
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import Registered, RequestReceived
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.zmtp.curve import CurveClient, decode_key
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["EmqpVia", "mechanism_of"]


class EmqpVia(Via):
    """eMQP: a worker consumes a queue, a subscriber a topic; `--port` is that listener's port."""

    def __init__(self, target: ViaTarget) -> None:
        super().__init__(target)
        if target.token is not None or target.tls is not None:
            raise ClientError(
                "eMQP has neither tokens nor TLS: its peers are identified by CURVE keys"
            )
        self._mechanism = mechanism_of(target)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[EmqpClient]:
        async with EmqpClient(
            self.target.host, self.port("emqp-clients"), mechanism=self._mechanism
        ) as client:
            yield client

    async def publish(self, destination: str, messages: Sequence[ViaMessage]) -> list[int]:
        """REQUESTs with `guarantee`, or PUBLISHes, one after the other; eMQP returns no ids."""
        kind, _, name = destination.partition("/")
        async with self._client() as client:
            for message in messages:
                properties = with_type(message)
                if kind == "topic":
                    await client.publish(name, message.payload, properties=properties)
                else:
                    await client.request(
                        message.payload, queue=name, guarantee=True, properties=properties
                    )
        return [0] * len(messages)

    async def subscribe(self, wanted: ViaSubscription) -> AsyncGenerator[IncomingMessage, None]:
        """As a worker or a subscriber. eMQP has no filters and no named subscriptions."""
        kind, _, name = wanted.destination.partition("/")
        if wanted.filter or wanted.name or wanted.start:
            raise ClientError("eMQP has no filters and no named subscriptions")
        if kind == "topic":
            target = self.target
            prefix = name.removesuffix("#")
            async with EmqpSubscriber(
                target.host, self.port("emqp-subscribers"), [prefix], mechanism=self._mechanism
            ) as subscriber:
                async for topic, message in subscriber:
                    yield IncomingMessage(destination=f"topic/{topic}", payload=message)
            return
        async with self._worker(name, wanted.window) as jobs:
            async for job in jobs:
                yield job

    async def call(self, service: str, message: ViaMessage, timeout_s: float) -> IncomingMessage:
        """A REQUEST with `reply-requested` to the queue named after the service."""
        async with self._client() as client:
            answer = await client.request(
                message.payload,
                queue=service.removeprefix("service/"),
                reply_requested=True,
                properties=with_type(message),
                wait_s=timeout_s,
            )
        return IncomingMessage(destination=service, payload=answer or b"")

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """As a worker of the queue named after the service."""
        async with self._worker(service.removeprefix("service/"), 16, answerer) as jobs:
            ready()
            async for job in jobs:
                assert job.settle is not None
                await job.settle()

    @asynccontextmanager
    async def _worker(
        self, queue: str, slots: int, answerer: Answerer | None = None
    ) -> AsyncIterator[AsyncIterator[IncomingMessage]]:
        """A registered worker; it yields messages as they are instead of running them as jobs."""
        arrived: asyncio.Queue[IncomingMessage] = asyncio.Queue()

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
            self.target.host,
            self.port("emqp-workers"),
            queues=((10, queue),),
            mechanism=self._mechanism,
        )

        async def ended() -> None:
            await asyncio.wait([peer.ended])
            raise ClientError(peer.why())

        async def jobs(keeper: asyncio.Task[None]) -> AsyncIterator[IncomingMessage]:
            while True:
                yield await inside(arrived.get(), keeper)

        async with kept(ended()) as keeper:
            try:
                yield jobs(keeper)
            finally:
                await peer.flush()
                await peer.close()


def _job(peer: EmqpPeer, event: RequestReceived, answerer: Answerer | None) -> IncomingMessage:
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
    got = IncomingMessage(
        destination=f"queue/{event.queue}",
        payload=event.message,
        content_type=str(properties.pop("content-type", "")),
        properties=properties,
        settle=settle,
    )
    return got


def mechanism_of(target: ViaTarget) -> Mechanism | None:
    """CURVE with the hub's key, None without it. Raises ClientError for an invalid key.

    Without a secret key of ours a new one is generated: the connection is encrypted, but the hub
    knows no user with this key.
    """
    if target.curve_server is None:
        return None
    try:
        secret = secrets.token_bytes(32)
        if target.curve_secret is not None:
            secret = decode_key(target.curve_secret)
        return CurveClient(decode_key(target.curve_server), secret, secrets.token_bytes)
    except ValueError as error:
        raise ClientError(f"a CURVE key can't be used: {error}") from None
