"""Through Epoxy: the services `crosswire.Hub` and `crosswire.Subscriber`, or any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from crosswire.bond import hub_module, marshal
from crosswire.cli.via.contract import (
    Answerer,
    IncomingMessage,
    SameHandler,
    Via,
    ViaMessage,
    ViaSubscription,
    ViaTarget,
    inside,
    kept,
    runs,
)
from crosswire.client.native.epoxy import EpoxyClient, EpoxyPeer, Handlers, IncomingCall
from crosswire.envelope import Envelope, Property
from crosswire.gateways.payloads import Schemas

__all__ = ["EpoxyVia"]


class EpoxyVia(Via):
    """Bond Epoxy; `--bond` files convert calls between JSON and Bond."""

    def __init__(self, target: ViaTarget) -> None:
        super().__init__(target)
        self._module = hub_module()
        self._hub = self._module.service("crosswire.Hub")
        self._schemas = Schemas(target.bond)

    def _make(self, struct: str, /, **fields: Any) -> Any:
        return self._module.struct(f"crosswire.{struct}").python_class(**fields)

    @asynccontextmanager
    async def _client(self, handlers: Handlers | None = None) -> AsyncIterator[EpoxyClient]:
        target = self.target
        async with EpoxyClient(
            target.host, self.port("epoxy"), tls=target.tls, token=target.token, handlers=handlers
        ) as client:
            yield client

    async def publish(self, destination: str, messages: Sequence[ViaMessage]) -> list[int]:
        """Concurrent calls of `crosswire.Hub.Publish`; the result has all ids."""
        ids: list[int] = []
        async with self._client() as client:
            for run in runs(messages):
                answers = await asyncio.gather(
                    *(
                        client.call(
                            self._hub,
                            "Publish",
                            self._make(
                                "Publication",
                                destination=destination,
                                payload=message.payload,
                                content_type=message.content_type,
                                properties={
                                    name: self._value(value)
                                    for name, value in message.properties.items()
                                },
                            ),
                        )
                        for message in run
                    )
                )
                ids += [answer.id for answer in answers]
        return ids

    def _value(self, value: Property) -> Any:
        if isinstance(value, bool):
            return self._make("Value", truth=value)
        if isinstance(value, int):
            return self._make("Value", integer=value)
        field = "real" if isinstance(value, float) else "text"
        return self._make("Value", **{field: value})

    async def subscribe(self, wanted: ViaSubscription) -> AsyncGenerator[IncomingMessage, None]:
        """`crosswire.Hub.Subscribe` on every connection anew; deliveries are events."""
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        struct = self._module.struct("crosswire.Delivery")

        async def deliver(call: IncomingCall) -> None:
            arrived.put_nowait((call.peer, marshal.unmarshal(call.payload, struct)))

        asked = self._make(
            "Subscription",
            destination=wanted.destination,
            filter=wanted.filter,
            name=wanted.name,
            start=wanted.start,
            window=wanted.window,
        )
        async with self._client({("crosswire.Subscriber", "Deliver"): deliver}) as client:

            async def keep() -> None:
                while True:
                    peer = await client.peer()
                    await peer.call(self._hub, "Subscribe", asked)
                    await asyncio.wait([peer.ended])

            async with kept(keep()) as keeper:
                while True:
                    yield self._got(*await inside(arrived.get(), keeper))

    def _got(self, peer: EpoxyPeer, delivery: Any) -> IncomingMessage:
        async def settle() -> None:
            if not peer.ended.done():
                settlement = self._make(
                    "Settlement", subscription=delivery.subscription, ids=[delivery.id]
                )
                await peer.call(self._hub, "Settle", settlement)

        properties: dict[str, Property] = {}
        for name, value in delivery.properties.items():
            members = (value.text, value.integer, value.real, value.truth)
            properties[name] = next(each for each in members if each is not None)
        return IncomingMessage(
            destination=delivery.destination,
            payload=delivery.payload,
            content_type=delivery.content_type,
            properties=properties,
            id=delivery.id,
            attempt=delivery.attempt,
            settle=settle,
        )

    async def call(self, service: str, message: ViaMessage, timeout_s: float) -> IncomingMessage:
        """The service's method; with a schema, JSON is converted to Bond and back."""
        asked = Envelope(
            destination=service,
            kind="request",
            payload=message.payload,
            content_type=message.content_type,
        )
        name, _, method = service.removeprefix("service/").partition("/")
        async with self._client() as client:
            reply = await client.call_bytes(
                name, method, self._schemas.to_bond(asked), timeout_s=timeout_s
            )
        payload, content_type = self._schemas.from_bond("response", service, reply.payload)
        answer = self._schemas.to_json(
            Envelope(
                destination=service, kind="response", payload=payload, content_type=content_type
            )
        )
        return IncomingMessage(
            destination=service, payload=answer.payload, content_type=answer.content_type
        )

    async def serve(self, service: str, answerer: Answerer, ready: Callable[[], None]) -> None:
        """Requests and responses are marshalled Bond, without conversion."""

        async def answer(call: IncomingCall) -> bytes:
            message = await answerer(IncomingMessage(destination=service, payload=call.payload))
            return message.payload

        name = service.removeprefix("service/")
        async with self._client(SameHandler(answer)) as client:
            while True:
                peer = await client.peer()
                await peer.call(self._hub, "Serve", self._make("Services", services=[name]))
                ready()
                await asyncio.wait([peer.ended])
