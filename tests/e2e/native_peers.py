"""What only native clients show: the codes of failures, and what a protocol has for itself.

`crosswire.connect` has neither on purpose: its errors are the same in all protocols, and so are its
messages.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import msgspec

from crosswire.bond import hub_module, marshal
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.emqp import EmqpClient, EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.client.native.epoxy import EpoxyClient, Handler, IncomingCall
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.client.native.relink import Receiver, RelinkClient
from crosswire.envelope import Property
from crosswire.errors import ConnectionLost, RequestFailed
from crosswire.gateways.payloads import BYTES, JSON, wrap
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import PeerReady, Registered, RequestReceived
from crosswire.wire.emqp.headers import Headers

HOST = "127.0.0.1"
ASKED = b"{}"
MARK = b"marked"

Marks = asyncio.Queue[str]
"""Of each message that came: the name of its mark, empty without one."""


class NativePeer(ABC):
    """A program on a native client. A mark is something that only its protocol understands."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self.ports = ports
        self.stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.stack.aclose()

    def keep(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    @abstractmethod
    async def call(self, service: str) -> None:
        """Raises RequestFailed with the protocol's own code."""


class MarkingPeer(NativePeer):
    """One whose protocol has a mark."""

    @abstractmethod
    async def send_marked(
        self,
        destination: str,
        payload: bytes = MARK,
        content_type: str = BYTES,
        properties: Mapping[str, Property] | None = None,
    ) -> None:
        """Returns when the hub has it."""

    @abstractmethod
    async def marks(self, destination: str) -> Marks:
        """Consume a queue, or subscribe to a topic."""


class NativeEmp(NativePeer):
    async def call(self, service: str) -> None:
        async with EmpClient(HOST, self.ports["emp"]) as client:
            await client.request_json(service.removeprefix("service/"), ASKED)


class NativeMicroMsg2(NativePeer):
    async def call(self, service: str) -> None:
        async with MicroMsg2Client(HOST, self.ports["micromsg2"]) as client:
            await client.call(service, ASKED, {"content-type": JSON})


# ------------------------------------------------------------------------------------------ eMQP


class _Worker(EmqpPeer):
    """Gets messages with their headers, whatever they ask to be called."""

    def __init__(self, take: Callable[[RequestReceived], None]) -> None:
        super().__init__()
        self._take = take

    def handle_event(self, event: Event) -> None:
        if isinstance(event, Registered):
            self.connection.send_ready()
            self.opened.set_result(None)
        elif isinstance(event, RequestReceived):
            self._take(event)
            if Headers.parse(event.headers).reply_requested:
                self.connection.send_reply(b'{"value": true}', event.msgid)
            self.connection.send_ready()
            self.session.wake()
        elif not isinstance(event, PeerReady):
            super().handle_event(event)


class NativeEmqp(MarkingPeer):
    """Its mark is `retry-count`, which is between clients, broker and workers."""

    def _client(self) -> EmqpClient:
        return EmqpClient(HOST, self.ports["emqp-clients"])

    async def call(self, service: str) -> None:
        async with self._client() as client:
            queue = service.removeprefix("service/")
            await client.request(ASKED, queue=queue, reply_requested=True)

    async def send_marked(
        self,
        destination: str,
        payload: bytes = MARK,
        content_type: str = BYTES,
        properties: Mapping[str, Property] | None = None,
    ) -> None:
        kind, _, name = destination.partition("/")
        named = {**(properties or {}), "content-type": content_type}
        async with self._client() as client:
            if kind == "topic":
                await client.publish(name, payload, properties=named)
            else:
                await client.request(
                    payload, queue=name, guarantee=True, retry_count=3, properties=named
                )

    async def marks(self, destination: str) -> Marks:
        kind, _, name = destination.partition("/")
        marks: Marks = asyncio.Queue()
        if kind == "topic":
            port = self.ports["emqp-subscribers"]
            self.keep(
                _listen(
                    await self.stack.enter_async_context(EmqpSubscriber(HOST, port, [name])), marks
                )
            )
            return marks

        def take(job: RequestReceived) -> None:
            marks.put_nowait("retry-count" if Headers.parse(job.headers).retry_count == 3 else "")

        worker = _Worker(take)
        port = self.ports["emqp-workers"]
        await connect_peer(worker, "worker", HOST, port, queues=((10, name),))
        self.stack.push_async_callback(worker.close)
        return marks


async def _listen(subscriber: EmqpSubscriber, marks: Marks) -> None:
    async for _topic, _message in subscriber:
        marks.put_nowait("")  # a topic and a message are all that there is


# ---------------------------------------------------------------------------------------- Relink


class NativeRelink(MarkingPeer):
    """Its mark are parts: more than properties and a payload."""

    def _client(self, endpoint: str) -> RelinkClient:
        return RelinkClient(HOST, self.ports["relink"], endpoint)

    async def call(self, service: str) -> None:
        async with self._client(service) as client:
            receiver = client.receiver()
            await client.sender().send(msgspec.json.encode({"content-type": JSON}), ASKED)
            answer = await anext(receiver)
            answer.consume()
            properties = msgspec.json.decode(answer.parts[0]) if len(answer.parts) == 2 else {}
            if "error" in properties:
                raise RequestFailed(properties["error"], properties["description"])

    async def send_marked(
        self,
        destination: str,
        payload: bytes = MARK,
        content_type: str = BYTES,
        properties: Mapping[str, Property] | None = None,
    ) -> None:
        """Parts leave no room for a content type and properties."""
        async with self._client(destination) as client:
            await client.sender().send(b"", payload, b"")
            await client.sender().consumed(timeout_s=10.0)

    async def marks(self, destination: str) -> Marks:
        verb = "consume" if destination.startswith("queue/") else "subscribe"
        client = await self.stack.enter_async_context(self._client(f"{destination}?{verb}"))
        marks: Marks = asyncio.Queue()
        self.keep(self._receive(client.receiver(), marks))
        return marks

    async def _receive(self, receiver: Receiver, marks: Marks) -> None:
        async for message in receiver:
            parts = [bytes(part) for part in message.parts]
            marks.put_nowait("parts" if parts == [b"", MARK, b""] else "")
            message.consume()


# ----------------------------------------------------------------------------------------- Epoxy

_HUB = hub_module()
_SETTLED = _HUB.struct("crosswire.Settled")
_LAYER_DATA = marshal.marshal(_SETTLED.python_class(count=7), _SETTLED)


class NativeEpoxy(MarkingPeer):
    """Its mark is layer data."""

    def _client(self, handlers: Mapping[tuple[str, str], Handler] | None = None) -> EpoxyClient:
        return EpoxyClient(HOST, self.ports["epoxy"], handlers=handlers)

    async def call(self, service: str) -> None:
        name, _, method = service.removeprefix("service/").partition("/")
        async with self._client() as client:
            await client.call_bytes(name, method, wrap(ASKED, JSON))

    async def send_marked(
        self,
        destination: str,
        payload: bytes = MARK,
        content_type: str = BYTES,
        properties: Mapping[str, Property] | None = None,
    ) -> None:
        """Integers are enough for the properties of a marked message."""
        value = _HUB.struct("crosswire.Value").python_class
        publication = _HUB.struct("crosswire.Publication").python_class(
            destination=destination,
            payload=payload,
            content_type=content_type,
            properties={name: value(integer=each) for name, each in (properties or {}).items()},
        )
        service = _HUB.service("crosswire.Hub")
        async with self._client() as client:
            await client.call(service, "Publish", publication, layer_data=_LAYER_DATA)

    async def marks(self, destination: str) -> Marks:
        marks: Marks = asyncio.Queue()
        service = _HUB.service("crosswire.Hub")

        async def deliver(call: IncomingCall) -> None:
            delivery = marshal.unmarshal(call.payload, _HUB.struct("crosswire.Delivery"))
            marks.put_nowait("layer data" if call.layer_data == _LAYER_DATA else "")
            settlement = _HUB.struct("crosswire.Settlement").python_class(
                subscription=delivery.subscription, ids=[delivery.id]
            )
            with suppress(ConnectionLost):
                await call.peer.call(service, "Settle", settlement)

        handlers = {("crosswire.Subscriber", "Deliver"): deliver}
        client = await self.stack.enter_async_context(self._client(handlers))
        asked = _HUB.struct("crosswire.Subscription").python_class(
            destination=destination, window=64
        )
        await client.call(service, "Subscribe", asked)
        return marks


NATIVE: dict[str, type[NativePeer]] = {
    "EMP": NativeEmp,
    "eMQP": NativeEmqp,
    "Relink": NativeRelink,
    "Epoxy": NativeEpoxy,
    "MicroMsg2": NativeMicroMsg2,
}
"""In the order of PARTIES, by their names."""

MARKING: dict[str, type[MarkingPeer]] = {
    "eMQP": NativeEmqp,
    "Relink": NativeRelink,
    "Epoxy": NativeEpoxy,
}
