"""Programs that use a hub, one of each protocol: the client library, and inboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import ClassVar, Self

import crosswire
from crosswire.client.client import CallHandler, ClientSubscription
from crosswire.client.message import BYTES, JSON, Message
from crosswire.client.native.dial import Backoff
from crosswire.envelope import Property
from crosswire.errors import ClientError, DeliveryLost, HubError

Properties = Mapping[str, Property]
Inbox = asyncio.Queue[Message]

_EMQP_ROLES = ("workers", "subscribers", "publishers", "admin")


def soon() -> Backoff:
    """When to try again; not so soon that a hub which is just starting would feel it."""
    return Backoff(0.02, 0.3)


class Refused(ClientError):
    """The hub refused a message, for the reason in `__cause__`.

    A ClientError like a lost connection: for a producer that goes on, neither is an
    acknowledgement.
    """


class Party:
    """A program that speaks one protocol. What it consumes is settled as it comes."""

    protocol: ClassVar[str]
    name: ClassVar[str]
    """As the docs spell the protocol."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self.ports = ports
        self.client = crosswire.connect(self.url(ports), backoff=soon)
        self._stack = AsyncExitStack()
        self._inboxes: list[asyncio.Task[None]] = []

    @classmethod
    def url(cls, ports: Mapping[str, int]) -> str:
        """What `connect` takes for a hub whose listeners have these ports."""
        return f"{cls.protocol}://127.0.0.1:{ports[cls.protocol]}"

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        # They end with the client, and have the error of a subscription that the hub has ended.
        await asyncio.gather(*self._inboxes)

    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
    ) -> None:
        """Returns when the hub has it. Raises Refused, and other errors of ClientError."""
        try:
            await self.client.publish(
                destination, payload, content_type=content_type, properties=properties
            )
        except HubError as error:
            raise Refused(str(error)) from error

    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        """Goes on when the connection was lost; with a name, where it was."""
        subscription = self.client.subscribe(destination, name=name)
        await self._stack.enter_async_context(subscription)
        inbox: Inbox = asyncio.Queue()
        self._inboxes.append(asyncio.create_task(_fill(inbox, subscription)))
        return inbox

    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Message:
        return await self.client.call(service, payload, content_type=content_type)

    async def serve(self, service: str, handler: CallHandler) -> None:
        await self.client.serve(service, handler)


async def _fill(inbox: Inbox, subscription: ClientSubscription) -> None:
    async for message in subscription:
        inbox.put_nowait(message)
        with suppress(DeliveryLost):  # it comes again
            await message.settle()


class EmpParty(Party):
    protocol = "emp"
    name = "EMP"


class EmqpParty(Party):
    protocol = "emqp"
    name = "eMQP"

    @classmethod
    def url(cls, ports: Mapping[str, int]) -> str:
        listeners = {role: ports.get(f"emqp-{role}") for role in _EMQP_ROLES}
        roles = "&".join(f"{role}={port}" for role, port in listeners.items() if port is not None)
        return f"emqp://127.0.0.1:{ports['emqp-clients']}?{roles}"


class RelinkParty(Party):
    protocol = "relink"
    name = "Relink"


class EpoxyParty(Party):
    protocol = "epoxy"
    name = "Epoxy"


class MicroMsg2Party(Party):
    protocol = "micromsg2"
    name = "MicroMsg2"


PARTIES: tuple[type[Party], ...] = (EmpParty, EmqpParty, RelinkParty, EpoxyParty, MicroMsg2Party)
