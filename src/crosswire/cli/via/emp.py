"""Through EMP: `$publish`, `$subscribe`, an operation, `$serve`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from crosswire.cli.body import as_body
from crosswire.cli.via.contract import (
    BYTES,
    JSON,
    Answerer,
    IncomingMessage,
    SameHandler,
    Via,
    ViaMessage,
    ViaSubscription,
    inside,
    kept,
    runs,
)
from crosswire.client.native.emp import EmpClient, EmpPeer, Handler
from crosswire.errors import ClientError

__all__ = ["EmpVia"]


class EmpVia(Via):
    """EMP: each request has a response, deliveries are requests of the hub."""

    @asynccontextmanager
    async def _client(
        self, handlers: Mapping[str, Handler] | None = None
    ) -> AsyncIterator[EmpClient]:
        target = self.target
        client = EmpClient(target.host, self.port("emp"), tls=target.tls, handlers=handlers)
        async with client:
            await self._authenticate(await client.peer())
            yield client

    async def _authenticate(self, peer: EmpPeer) -> None:
        if self.target.token is not None:
            await peer.request("$authenticate", {"token": self.target.token})

    async def publish(self, destination: str, messages: Sequence[ViaMessage]) -> list[int]:
        """Concurrent `$publish` requests; the result has all ids."""
        ids: list[int] = []
        async with self._client() as client:
            for run in runs(messages):
                answers = await asyncio.gather(
                    *(
                        client.request(
                            "$publish",
                            {
                                "destination": destination,
                                "properties": message.properties,
                                **as_body(message.payload, message.content_type),
                            },
                        )
                        for message in run
                    )
                )
                ids += [answer["id"] for answer in answers]
        return ids

    async def subscribe(self, wanted: ViaSubscription) -> AsyncGenerator[IncomingMessage, None]:
        """`$subscribe` on every connection anew; settling answers the `$deliver` request."""
        arrived: asyncio.Queue[IncomingMessage] = asyncio.Queue()

        async def deliver(data: dict[str, Any]) -> None:
            done = asyncio.Event()

            async def settle() -> None:
                done.set()

            arrived.put_nowait(_from_emp(data, settle))
            await done.wait()

        asked = {"destination": wanted.destination, "window": wanted.window}
        more = {"filter": wanted.filter, "name": wanted.name, "from": wanted.start}
        asked |= {key: value for key, value in more.items() if value}
        async with self._client({"$deliver": deliver}) as client:

            async def keep() -> None:
                # A subscription belongs to its connection: the client reconnects, we subscribe.
                peer = await client.peer()
                while True:
                    await peer.request("$subscribe", asked)
                    await asyncio.wait([peer.ended])
                    peer = await client.peer()
                    await self._authenticate(peer)

            async with kept(keep()) as keeper:
                try:
                    while True:
                        yield await inside(arrived.get(), keeper)
                finally:
                    # Two turns of the loop let the handler of the message settled last write its
                    # answer; the response to `$echo` shows that the hub has read it. Without that
                    # the message could be delivered again, as after any lost connection.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    with suppress(ClientError):
                        await client.request("$echo", timeout_s=2.0)

    async def call(self, service: str, message: ViaMessage, timeout_s: float) -> IncomingMessage:
        """The operation named after the service. EMP carries JSON objects only."""
        if message.content_type != JSON or not message.payload.lstrip().startswith(b"{"):
            raise ClientError("a call over EMP carries a JSON object")
        op = service.removeprefix("service/")
        async with self._client() as client:
            data = await client.request_json(op, message.payload, timeout_s=timeout_s)
        return IncomingMessage(destination=service, payload=data, content_type=JSON)

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """`$serve` on every connection anew."""

        async def answer(data: dict[str, Any]) -> dict[str, Any]:
            payload = msgspec.json.encode(data)
            message = await answerer(
                IncomingMessage(destination=service, payload=payload, content_type=JSON)
            )
            reply: dict[str, Any] = msgspec.json.decode(message.payload)
            return reply

        op = service.removeprefix("service/")
        async with self._client(SameHandler(answer)) as client:
            peer = await client.peer()
            while True:
                await peer.request("$serve", {"services": [op]})
                ready()
                await asyncio.wait([peer.ended])
                peer = await client.peer()
                await self._authenticate(peer)


def _from_emp(data: dict[str, Any], settle: Callable[[], Awaitable[None]]) -> IncomingMessage:
    if "json" in data:
        payload, content_type = msgspec.json.encode(data["json"]), JSON
    elif "text" in data:
        payload, content_type = data["text"].encode(), "text/plain"
    else:
        payload, content_type = base64.b64decode(data.get("base64", "")), BYTES
    return IncomingMessage(
        destination=data["destination"],
        payload=payload,
        content_type=content_type,
        properties=data.get("properties", {}),
        id=data["id"],
        attempt=data["attempt"],
        settle=settle,
    )
