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
    Every,
    Got,
    Letter,
    Via,
    Wanted,
    inside,
    kept,
    runs,
)
from crosswire.clients.emp import EmpClient, EmpPeer, Handler
from crosswire.errors import ClientError

__all__ = ["EmpVia"]


class EmpVia(Via):
    @asynccontextmanager
    async def _client(
        self, handlers: Mapping[str, Handler] | None = None
    ) -> AsyncIterator[EmpClient]:
        place = self.place
        client = EmpClient(place.host, self.port("emp"), tls=place.tls, handlers=handlers)
        async with client:
            await self._authenticate(await client.peer())
            yield client

    async def _authenticate(self, peer: EmpPeer) -> None:
        if self.place.token is not None:
            await peer.request("$authenticate", {"token": self.place.token})

    async def publish(self, destination: str, letters: Sequence[Letter]) -> list[int]:
        ids: list[int] = []
        async with self._client() as client:
            for run in runs(letters):
                answers = await asyncio.gather(
                    *(
                        client.request(
                            "$publish",
                            {
                                "destination": destination,
                                "properties": letter.properties,
                                **as_body(letter.payload, letter.content_type),
                            },
                        )
                        for letter in run
                    )
                )
                ids += [answer["id"] for answer in answers]
        return ids

    async def subscribe(self, wanted: Wanted) -> AsyncGenerator[Got, None]:
        arrived: asyncio.Queue[Got] = asyncio.Queue()

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
                    # What was settled last is answered before this is asked. Without an answer it
                    # may come again, as with any connection that is lost.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    with suppress(ClientError):
                        await client.request("$echo", timeout_s=2.0)

    async def call(self, service: str, letter: Letter, timeout_s: float) -> Got:
        if letter.content_type != JSON or not letter.payload.lstrip().startswith(b"{"):
            raise ClientError("a call over EMP carries a JSON object")
        op = service.removeprefix("service/")
        async with self._client() as client:
            data = await client.request_json(op, letter.payload, timeout_s=timeout_s)
        return Got(destination=service, payload=data, content_type=JSON)

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        async def answer(data: dict[str, Any]) -> dict[str, Any]:
            payload = msgspec.json.encode(data)
            letter = await answerer(Got(destination=service, payload=payload, content_type=JSON))
            reply: dict[str, Any] = msgspec.json.decode(letter.payload)
            return reply

        op = service.removeprefix("service/")
        async with self._client(Every(answer)) as client:
            peer = await client.peer()
            while True:
                await peer.request("$serve", {"services": [op]})
                ready()
                await asyncio.wait([peer.ended])
                peer = await client.peer()
                await self._authenticate(peer)


def _from_emp(data: dict[str, Any], settle: Callable[[], Awaitable[None]]) -> Got:
    if "json" in data:
        payload, content_type = msgspec.json.encode(data["json"]), JSON
    elif "text" in data:
        payload, content_type = data["text"].encode(), "text/plain"
    else:
        payload, content_type = base64.b64decode(data.get("base64", "")), BYTES
    return Got(
        destination=data["destination"],
        payload=payload,
        content_type=content_type,
        properties=data.get("properties", {}),
        id=data["id"],
        attempt=data["attempt"],
        settle=settle,
    )
