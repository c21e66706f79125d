"""One adapter a protocol, all with the same words: produce, consume, call and serve.

They stand on the clients that users have. What a protocol can't carry is None in what was
received, and is not sent.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, ClassVar, Self

import msgspec

from crosswire.bond import hub_module, marshal
from crosswire.client.native.dial import Backoff, Redialler
from crosswire.client.native.emp import EmpClient, EmpPeer
from crosswire.client.native.emqp import EmqpClient, EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.client.native.epoxy import EpoxyClient, EpoxyPeer, Handler, IncomingCall
from crosswire.client.native.micromsg2 import MicroMsg2Client, MicroMsg2Delivery
from crosswire.client.native.relink import Received as RelinkMessage
from crosswire.client.native.relink import Receiver, RelinkClient
from crosswire.envelope import Property
from crosswire.errors import CallFailed, ConnectionLost, RequestFailed
from crosswire.gateways.payloads import BYTES, JSON, TEXT, unwrap, wrap
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import PeerReady, Registered, RequestReceived
from crosswire.wire.emqp.headers import Headers

Properties = Mapping[str, Property]

_HUB = hub_module()


def soon() -> Backoff:
    """When to try again; not so soon that a hub which is just starting would feel it."""
    return Backoff(0.02, 0.3)


class Received(msgspec.Struct, kw_only=True):
    """What came. `mark` is what only its own protocol understands, if it was there."""

    payload: bytes
    content_type: str | None = None
    properties: dict[str, Property] | None = None
    correlation: str | None = None
    mark: str | None = None


Inbox = asyncio.Queue[Received]
Answer = tuple[bytes, str]
Answerer = Callable[[Received], Awaitable[Answer]]
"""Payload and content type. Raise RequestFailed to answer with a failure."""


class Party(ABC):
    """A program that speaks one protocol. What it consumes is settled as it comes.

    `mark` is something that only this protocol understands; a message can be sent with it.
    """

    name: ClassVar[str]
    has_failures: ClassVar[bool] = True
    """Whether a provider can report a failure."""

    def __init__(
        self,
        ports: Mapping[str, int],
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.ports = ports
        self.host = host
        self.tls = tls
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._stack.aclose()

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that goes on beside until the party leaves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
        *,
        correlation: str | None = None,
        marked: bool = False,
    ) -> None:
        """Returns when the hub has it, where the protocol reports it."""

    @abstractmethod
    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        """Goes on when the connection was lost; with a name, where it was."""

    @abstractmethod
    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Received:
        """Raises RequestFailed."""

    @abstractmethod
    async def serve(self, service: str, answerer: Answerer) -> None: ...


def typed(properties: Properties | None, content_type: str) -> dict[str, Property]:
    """Protocols without content types carry them as a property."""
    typed_properties = dict(properties or {})
    if content_type != BYTES:
        typed_properties["content-type"] = content_type
    return typed_properties


# ------------------------------------------------------------------------------------------- EMP


class _Operations(dict[str, Any]):
    """A provider of NAME is asked NAME/METHOD too."""

    def get(self, op: str, default: Any = None) -> Any:
        return super().get(op) or super().get(op.partition("/")[0], default)


class EmpParty(Party):
    name = "EMP"

    async def start(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self._handlers = _Operations({"$deliver": self._deliver})
        self._client = await self._stack.enter_async_context(
            EmpClient(
                self.host, self.ports["emp"], tls=self.tls, handlers=self._handlers, backoff=soon()
            )
        )

    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
        *,
        correlation: str | None = None,
        marked: bool = False,
    ) -> None:
        data: dict[str, Any] = {"destination": destination, "properties": properties or {}}
        if content_type == JSON:
            data["json"] = msgspec.Raw(payload)
        elif content_type.startswith("text/"):
            data["text"] = payload.decode()
        else:
            data["base64"] = base64.b64encode(payload).decode()
        await self._client.request_json("$publish", msgspec.json.encode(data))

    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        asked = {"destination": destination, "name": name}
        peer = await self._client.peer()
        reply = await peer.request("$subscribe", asked)
        inbox = self._inboxes[reply["subscription"]] = asyncio.Queue()
        self.keep(self._stay(peer, asked, inbox))
        return inbox

    async def _stay(self, peer: EmpPeer, asked: dict[str, Any], inbox: Inbox) -> None:
        while True:
            await asyncio.wait([peer.ended])
            peer = await self._client.peer()
            with suppress(ConnectionLost):
                reply = await peer.request("$subscribe", asked)
                self._inboxes[reply["subscription"]] = inbox

    async def _deliver(self, data: dict[str, Any]) -> None:
        payload, content_type = _from_body(data)
        self._inboxes[data["subscription"]].put_nowait(
            Received(
                payload=payload,
                content_type=content_type,
                properties=data.get("properties", {}),
            )
        )

    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Received:
        data = await self._client.request_json(service.removeprefix("service/"), payload)
        return Received(payload=data, content_type=JSON)

    async def serve(self, service: str, answerer: Answerer) -> None:
        async def answer(data: dict[str, Any]) -> dict[str, Any]:
            asked = Received(payload=msgspec.json.encode(data), content_type=JSON)
            payload, _ = await answerer(asked)
            reply: dict[str, Any] = msgspec.json.decode(payload)
            return reply

        op = service.removeprefix("service/")
        self._handlers[op] = answer
        await self._client.request("$serve", {"services": [op]})


def _from_body(data: dict[str, Any]) -> tuple[bytes, str]:
    if "json" in data:
        return msgspec.json.encode(data["json"]), JSON
    if "text" in data:
        return data["text"].encode(), TEXT
    return base64.b64decode(data["base64"]), BYTES


# ------------------------------------------------------------------------------------------ eMQP

_SLOTS = 16


class _Worker(EmqpPeer):
    """Gets messages as they are, whatever they ask to be called."""

    def __init__(self, take: Callable[[_Worker, RequestReceived], None]) -> None:
        super().__init__()
        self._take = take

    def handle_event(self, event: Event) -> None:
        if isinstance(event, Registered):
            for _ in range(_SLOTS):
                self.connection.send_ready()
            self.opened.set_result(None)
        elif isinstance(event, RequestReceived):
            self._take(self, event)
        elif not isinstance(event, PeerReady):
            super().handle_event(event)

    def answer(self, job: RequestReceived, reply: bytes) -> None:
        if Headers.parse(job.headers).reply_requested:
            self.connection.send_reply(reply, job.msgid)
        self.connection.send_ready()
        self.session.wake()


class EmqpParty(Party):
    """The mark is `retry-count`, which is between clients, broker and workers."""

    name = "eMQP"
    has_failures = False

    async def start(self) -> None:
        self._client = await self._stack.enter_async_context(
            EmqpClient(self.host, self.ports["emqp-clients"], backoff=soon())
        )

    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
        *,
        correlation: str | None = None,
        marked: bool = False,
    ) -> None:
        kind, _, name = destination.partition("/")
        typed_properties = typed(properties, content_type)
        if kind == "topic":
            await self._client.publish(name, payload, properties=typed_properties)
        else:
            retries = 3 if marked else 0
            await self._client.request(
                payload,
                queue=name,
                guarantee=True,
                retry_count=retries,
                properties=typed_properties,
            )

    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        assert not name, "eMQP has no named subscriptions"
        kind, _, index = destination.partition("/")
        inbox: Inbox = asyncio.Queue()
        if kind == "topic":
            subscriber = EmqpSubscriber(
                self.host, self.ports["emqp-subscribers"], [index], backoff=soon()
            )
            await self._stack.enter_async_context(subscriber)
            self.keep(self._listen(subscriber, inbox))
        else:

            def take(worker: _Worker, job: RequestReceived) -> None:
                inbox.put_nowait(_from_job(job))
                worker.answer(job, b'{"value": true}')

            await self._work(index, take)
        return inbox

    async def _listen(self, subscriber: EmqpSubscriber, inbox: Inbox) -> None:
        async for _, message in subscriber:
            inbox.put_nowait(Received(payload=message))

    async def _work(self, queue: str, take: Callable[[_Worker, RequestReceived], None]) -> None:
        async def join() -> _Worker:
            worker = _Worker(take)
            port = self.ports["emqp-workers"]
            await connect_peer(worker, "worker", self.host, port, queues=((10, queue),))
            return worker

        workers: Redialler[_Worker] = Redialler(join, backoff=soon())
        await workers.start()
        self._stack.push_async_callback(workers.stop)

    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Received:
        answer = await self._client.request(
            payload,
            queue=service.removeprefix("service/"),
            reply_requested=True,
            properties=typed(None, content_type),
            wait_s=10.0,
        )
        return Received(payload=answer or b"")

    async def serve(self, service: str, answerer: Answerer) -> None:
        async def answer(worker: _Worker, job: RequestReceived) -> None:
            payload, _ = await answerer(_from_job(job))
            worker.answer(job, payload)

        await self._work(
            service.removeprefix("service/"),
            lambda worker, job: self.keep(answer(worker, job)),
        )


def _from_job(job: RequestReceived) -> Received:
    headers = Headers.parse(job.headers)
    properties = headers.properties()
    return Received(
        payload=job.message,
        content_type=str(properties.pop("content-type", BYTES)),
        properties=properties,
        mark="retry-count" if headers.retry_count else None,
    )


# ---------------------------------------------------------------------------------------- Relink


class RelinkParty(Party):
    """The mark is a third part of a message."""

    name = "Relink"

    async def start(self) -> None:
        self._clients: dict[str, RelinkClient] = {}

    async def _client(self, endpoint: str) -> RelinkClient:
        client = self._clients.get(endpoint)
        if client is None:
            client = RelinkClient(
                self.host, self.ports["relink"], endpoint, tls=self.tls, backoff=soon()
            )
            self._clients[endpoint] = await self._stack.enter_async_context(client)
        return client

    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
        *,
        correlation: str | None = None,
        marked: bool = False,
    ) -> None:
        sender = (await self._client(destination)).sender()
        typed_properties = typed(properties, content_type)
        if correlation is not None:
            typed_properties["correlation-id"] = correlation
        parts = _to_parts(payload, typed_properties)
        await sender.send(*([b"", *parts, b""] if marked else parts))
        await sender.consumed(timeout_s=10.0)

    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        verb = "consume" if destination.startswith("queue/") else "subscribe"
        named = f"&name={name}" if name else ""
        client = await self._client(f"{destination}?{verb}{named}")
        inbox: Inbox = asyncio.Queue()
        self.keep(self._listen(client.receiver(), inbox))
        return inbox

    async def _listen(self, receiver: Receiver, inbox: Inbox) -> None:
        async for message in receiver:
            inbox.put_nowait(_from_parts(message))
            message.consume()

    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Received:
        client = await self._client(service)
        receiver = client.receiver()
        await client.sender().send(*_to_parts(payload, typed(None, content_type)))
        message = await anext(receiver)
        answer = _from_parts(message)
        message.consume()
        properties = answer.properties or {}
        if "error" in properties:
            description = str(properties.get("description", ""))
            raise RequestFailed(str(properties["error"]), description, data=answer.payload)
        return answer

    async def serve(self, service: str, answerer: Answerer) -> None:
        client = await self._client(f"{service}?serve")

        async def answer(receiver: Receiver) -> None:
            async for message in receiver:
                try:
                    payload, content_type = await answerer(_from_parts(message))
                    parts = _to_parts(payload, typed(None, content_type))
                except RequestFailed as failure:
                    typed_properties = {"error": failure.code, "description": failure.description}
                    parts = _to_parts(failure.data, typed_properties)
                await client.sender(receiver.channel).send(*parts)
                message.consume()

        async def listen() -> None:
            async for receiver in client.opened():
                self.keep(answer(receiver))

        self.keep(listen())


def _to_parts(payload: bytes, properties: Properties) -> list[bytes]:
    return [msgspec.json.encode(properties), payload] if properties else [payload]


def _from_parts(message: RelinkMessage) -> Received:
    parts = [bytes(part) for part in message.parts]
    properties: dict[str, Property] = {}
    if len(parts) == 2:
        properties = msgspec.json.decode(parts.pop(0))
    correlation = properties.pop("correlation-id", None)
    content_type = properties.pop("content-type", None)
    return Received(
        payload=b"".join(parts),
        content_type=None if content_type is None else str(content_type),
        properties=properties,
        correlation=None if correlation is None else str(correlation),
        mark="parts" if len(parts) > 2 else None,
    )


# ----------------------------------------------------------------------------------------- Epoxy


class _EveryMethod(Mapping[tuple[str, str], Handler]):
    """Handlers by service; a provider of one gets every method."""

    def __init__(self) -> None:
        self.services: dict[str, Handler] = {}

    def __getitem__(self, name: tuple[str, str]) -> Handler:
        return self.services[name[0]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter([(name, "") for name in self.services])

    def __len__(self) -> int:
        return len(self.services)


class EpoxyParty(Party):
    """The mark is layer data."""

    name = "Epoxy"

    _LAYER_DATA = marshal.marshal(
        _HUB.struct("crosswire.Settled").python_class(count=7), _HUB.struct("crosswire.Settled")
    )

    async def start(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self._handlers = _EveryMethod()
        self._handlers.services["crosswire.Subscriber"] = self._deliver
        self._hub = _HUB.service("crosswire.Hub")
        self._client = await self._stack.enter_async_context(
            EpoxyClient(
                self.host,
                self.ports["epoxy"],
                tls=self.tls,
                handlers=self._handlers,
                backoff=soon(),
            )
        )

    def _make(self, struct: str, /, **fields: Any) -> Any:
        return _HUB.struct(f"crosswire.{struct}").python_class(**fields)

    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
        *,
        correlation: str | None = None,
        marked: bool = False,
    ) -> None:
        publication = self._make(
            "Publication",
            destination=destination,
            payload=payload,
            content_type=content_type,
            properties={name: self._value(each) for name, each in (properties or {}).items()},
        )
        layer_data = self._LAYER_DATA if marked else None
        await self._client.call(self._hub, "Publish", publication, layer_data=layer_data)

    def _value(self, value: Property) -> Any:
        fields = {bool: "truth", int: "integer", float: "real", str: "text"}
        return self._make("Value", **{fields[type(value)]: value})

    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        asked = self._make("Subscription", destination=destination, name=name, window=64)
        peer = await self._client.peer()
        subscribed = await peer.call(self._hub, "Subscribe", asked)
        inbox = self._inboxes[subscribed.subscription] = asyncio.Queue()
        self.keep(self._stay(peer, asked, inbox))
        return inbox

    async def _stay(self, peer: EpoxyPeer, asked: Any, inbox: Inbox) -> None:
        while True:
            await asyncio.wait([peer.ended])
            peer = await self._client.peer()
            with suppress(ConnectionLost):
                subscribed = await peer.call(self._hub, "Subscribe", asked)
                self._inboxes[subscribed.subscription] = inbox

    async def _deliver(self, call: IncomingCall) -> None:
        typed_properties = marshal.unmarshal(call.payload, _HUB.struct("crosswire.Delivery"))
        properties: dict[str, Property] = {}
        for name, value in typed_properties.properties.items():
            members = (value.text, value.integer, value.real, value.truth)
            properties[name] = next(each for each in members if each is not None)
        self._inboxes[typed_properties.subscription].put_nowait(
            Received(
                payload=typed_properties.payload,
                content_type=typed_properties.content_type,
                properties=properties,
                mark="layer data" if call.layer_data == self._LAYER_DATA else None,
            )
        )
        settlement = self._make(
            "Settlement", subscription=typed_properties.subscription, ids=[typed_properties.id]
        )
        with suppress(ConnectionLost):
            await call.peer.call(self._hub, "Settle", settlement)

    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Received:
        name, _, method = service.removeprefix("service/").partition("/")
        reply = await self._client.call_bytes(name, method, wrap(payload, content_type))
        return _from_bond(reply.payload)

    async def serve(self, service: str, answerer: Answerer) -> None:
        async def answer(call: IncomingCall) -> bytes:
            try:
                return wrap(*await answerer(_from_bond(call.payload)))
            except CallFailed:
                raise
            except RequestFailed as failure:
                raise CallFailed(int(failure.code), failure.description) from None

        name = service.removeprefix("service/")
        self._handlers.services[name] = answer
        await self._client.call(self._hub, "Serve", self._make("Services", services=[name]))


def _from_bond(payload: bytes) -> Received:
    held = unwrap(payload)
    assert held is not None, "without a schema all comes in a crosswire.Blob"
    return Received(payload=held[0], content_type=held[1])


# ------------------------------------------------------------------------------------- MicroMsg2


class MicroMsg2Party(Party):
    """It has no mark: all that it carries are properties."""

    name = "MicroMsg2"

    async def start(self) -> None:
        self._client = await self._stack.enter_async_context(
            MicroMsg2Client(self.host, self.ports["micromsg2"], tls=self.tls, backoff=soon())
        )

    async def produce(
        self,
        destination: str,
        payload: bytes,
        content_type: str = BYTES,
        properties: Properties | None = None,
        *,
        correlation: str | None = None,
        marked: bool = False,
    ) -> None:
        typed_properties = typed(properties, content_type)
        if correlation is not None:
            typed_properties["correlation-id"] = correlation
        await self._client.send(destination, payload, typed_properties)

    async def consume(self, destination: str, *, name: str = "") -> Inbox:
        subscription = self._client.subscribe(destination, name=name or None)
        await self._stack.enter_async_context(subscription)
        inbox: Inbox = asyncio.Queue()

        async def listen() -> None:
            async for delivery in subscription:
                inbox.put_nowait(_from_delivery(delivery))

        self.keep(listen())
        return inbox

    async def call(self, service: str, payload: bytes, content_type: str = JSON) -> Received:
        return _from_delivery(
            await self._client.call(service, payload, typed(None, content_type), timeout_s=10.0)
        )

    async def serve(self, service: str, answerer: Answerer) -> None:
        async def respond(delivery: MicroMsg2Delivery) -> tuple[bytes, Properties]:
            payload, content_type = await answerer(_from_delivery(delivery))
            return payload, typed(None, content_type)

        await self._client.serve(service, respond)


def _from_delivery(delivery: MicroMsg2Delivery) -> Received:
    properties: dict[str, Property] = {}
    for name, value in delivery.properties.items():
        # The protocol has no booleans: they are these two texts (DESIGN, section 4).
        properties[name] = value == "true" if value in ("true", "false") else value
    properties.pop("reply-to", None)
    correlation = properties.pop("correlation-id", None)
    return Received(
        payload=bytes(delivery.payload),
        content_type=str(properties.pop("content-type", BYTES)),
        properties=properties,
        correlation=None if correlation is None else str(correlation),
    )


PARTIES: tuple[type[Party], ...] = (EmpParty, EmqpParty, RelinkParty, EpoxyParty, MicroMsg2Party)
