"""Programs that use the simulated hub: they produce, consume, call and serve, and report."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Final, Protocol

import msgspec

from crosswire.client.client import Client, ClientSubscription
from crosswire.client.connect import connect
from crosswire.client.message import Message
from crosswire.client.native.dial import Backoff
from crosswire.client.native.relink import RelinkClient
from crosswire.errors import (
    ClientError,
    CrosswireError,
    HubError,
    NoProvider,
    ProviderLost,
    RequestTimeout,
)
from crosswire.testing.simulation.durable import MessageKey
from crosswire.testing.simulation.observations import Observations, ViolationSink

__all__ = [
    "AVERAGE_BATCH",
    "PROTOCOLS",
    "PROVIDER",
    "ListeningHub",
    "Program",
    "SimulatedCaller",
    "SimulatedConsumer",
    "SimulatedLinkProducer",
    "SimulatedProducer",
    "SimulatedProvider",
    "SimulatedTicker",
]

PROVIDER: Final = "provider"
PROTOCOLS: Final = ("emp", "emqp", "relink", "epoxy", "micromsg2")
_SINGLE: Final = 0.8
"""How many publications have one message; others have up to `_MOST`."""
_MOST: Final = 20
_FEW: Final = 5
AVERAGE_BATCH: Final = _SINGLE + (1 - _SINGLE) * (2 + _MOST) / 2
"""Messages of a publication, on average."""
_REQUEST_S: Final = 10.0
_AGAIN_S: Final = 0.3
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz" * 16


def encode_message(key: MessageKey, filler: int) -> bytes:
    """A payload that names its message, and shows if a byte of it is wrong."""
    start = key.number * 7 % 26
    text = _LETTERS[start : start + filler]
    body = msgspec.json.encode([*key, text])
    return msgspec.json.encode([*key, text, zlib.crc32(body)])


def decode_message(payload: bytes) -> MessageKey:
    """Which message this is. Raises ValueError if it is not what was sent."""
    destination, producer, number, text, crc = msgspec.json.decode(payload)
    if zlib.crc32(msgspec.json.encode([destination, producer, number, text])) != crc:
        raise ValueError("its check sum is wrong")
    return MessageKey(destination, producer, number)


class ProgramWorld(ViolationSink, Protocol):
    """Where programs run: the simulation, or a real machine."""

    random: Random


class ProgramProcess(Protocol):
    """A process with one program."""

    name: str

    @property
    def world(self) -> ProgramWorld:
        """Where it runs."""


class ListeningHub(Protocol):
    """A machine with a hub, and the port of each listener."""

    host: str
    ports: dict[str, int]


class HubAddresses(Protocol):
    """The hub that programs use, on one machine or on several."""

    @property
    def machines(self) -> Sequence[ListeningHub]:
        """All of them."""


def _url(protocol: str, hub: HubAddresses) -> str:
    listener = "emqp-clients" if protocol == "emqp" else protocol
    url = f"{protocol}://" + ",".join(
        f"{each.host}:{each.ports[listener]}" for each in hub.machines
    )
    if protocol != "emqp":
        return url
    ports = hub.machines[0].ports
    names = ("workers", "publishers", "subscribers")
    return f"{url}?" + "&".join(f"{name}={ports[f'emqp-{name}']}" for name in names)


class Program:
    """A program with one client of one protocol."""

    def __init__(
        self, process: ProgramProcess, protocol: str, hub: HubAddresses, seen: Observations
    ) -> None:
        self.name = process.name
        self.clients: list[Client | RelinkClient] = []
        """What it has opened: a world that goes on after it closes them."""
        self.protocol = protocol
        self.random = process.world.random
        self.world = process.world
        self.seen = seen
        self.is_finished = False
        self._hub = hub

    async def open(self) -> Client:
        """A connected client; tries until there is a hub."""
        while True:
            client = connect(
                _url(self.protocol, self._hub),
                timeout_s=_REQUEST_S,
                backoff=lambda: Backoff(0.05, 1.0),
            )
            try:
                await client.__aenter__()
                self.clients.append(client)
                return client
            except ClientError as error:
                self.seen.failed(self.name, error)
                await asyncio.sleep(_AGAIN_S)


class SimulatedProducer(Program):
    """Sends messages one after the other, or some at a time."""

    async def run(self, destination: str, count: int, pause_s: float) -> None:
        """Send `count` messages."""
        client = await self.open()
        number = 0
        while number < count:
            await asyncio.sleep(self.random.expovariate(1 / pause_s))
            keys = []
            for _ in range(1 if self.random.random() < _SINGLE else self.random.randint(2, _MOST)):
                number += 1
                keys.append(MessageKey(destination, self.name, number))
                self.seen.attempted(keys[-1])
            payloads = [encode_message(key, self.random.randint(0, 300)) for key in keys]
            started = self.world.now
            try:
                ids = await client.publish_many(destination, payloads)
            except CrosswireError as error:
                # Of several it is unknown which were taken.
                if isinstance(error, HubError) and len(keys) == 1:
                    self.seen.refused(keys[0])
                self.seen.failed(self.name, error, since=started)
            else:
                # eMQP does not acknowledge what is published to a topic.
                if self.protocol != "emqp" or not destination.startswith("topic/"):
                    for key, identifier in zip(keys, ids, strict=True):
                        self.seen.acknowledged(key, identifier)
        self.is_finished = True


class SimulatedLinkProducer(Program):
    """Sends over a Relink link, without transactions: what is on its way when the connection ends
    is repeated on the next one."""

    async def run(self, destination: str, count: int, pause_s: float) -> None:
        """Send `count` messages."""
        client: RelinkClient | None = None
        number = 0
        while number < count:
            await asyncio.sleep(self.random.expovariate(1 / pause_s))
            started = self.world.now
            try:
                if client is None:
                    client = await self._link(destination).__aenter__()
                    self.clients.append(client)
                sender, keys = client.sender(), []
                for _ in range(1 if self.random.random() < _SINGLE else _FEW):
                    number += 1
                    keys.append(MessageKey(destination, self.name, number))
                    self.seen.attempted(keys[-1])
                    await sender.send(encode_message(keys[-1], self.random.randint(0, 300)))
                await sender.consumed(timeout_s=_REQUEST_S)
            except CrosswireError as error:
                self.seen.failed(self.name, error, since=started)
                if client is not None:
                    # Another link: what this one has sent may arrive, or not.
                    self.seen.disturbed(self.name)
                    with suppress(CrosswireError):
                        await client.close()
                    client = None
            else:
                for key in keys:
                    self.seen.acknowledged(key)
        self.is_finished = True

    def _link(self, endpoint: str) -> RelinkClient:
        (host, port), *others = ((each.host, each.ports["relink"]) for each in self._hub.machines)
        return RelinkClient(
            host, port, endpoint, others=others, backoff=Backoff(0.05, 1.0), close_timeout_s=5.0
        )


def _connection_of(message: Message) -> object:
    """What a message's delivery was received on; a link, over Relink."""
    found: object = message._handle
    for name in ("_answer", "_delivery"):
        found = getattr(found, name, found)
    for name in ("_peer", "peer", "_worker", "_client"):
        found = getattr(found, name, found)
    return found


def _unsettled(subscription: ClientSubscription) -> int:
    """How many messages a client has and has not settled, whether the program has seen them."""
    waiting = sum(not each.lost for each in subscription._waiting)
    return waiting + sum(not each.lost for each in subscription._unsettled)


class SimulatedConsumer(Program):
    """Consumes a queue, or a topic by a named subscription."""

    async def run(
        self,
        destination: str,
        name: str,
        window: int,
        refusing: float,
        work_s: float,
        at_once: int = 1,
        late_s: float = 0.0,
    ) -> None:
        """Consume until the world ends; refuse a share of what arrives, and take `work_s` for some
        of it, on average, while more arrives. Work on `at_once` messages at the same time, and
        begin after `late_s`."""
        await asyncio.sleep(late_s)
        client = await self.open()
        group = f"{destination} {name}" if name else destination
        tasks: set[asyncio.Future[None]] = set()
        while True:
            try:
                subscription = client.subscribe(
                    destination, name=name, window=window, start="earliest" if name else ""
                )
                async with subscription:
                    self.seen.subscribed(group, self.name)
                    async for message in subscription:
                        # A Relink link has the hub's own window.
                        if self.protocol != "relink":
                            self.seen.check_window(self.name, _unsettled(subscription), window)
                        key = self._recognize(group, message)
                        if key is None:
                            continue
                        working = self._work(group, key, message, refusing, work_s)
                        if at_once == 1:
                            await working
                        else:
                            tasks.add(asyncio.ensure_future(working))
                            tasks -= {task for task in tasks if task.done()}
            except CrosswireError as error:
                self.seen.failed(self.name, error)
                await asyncio.sleep(_AGAIN_S)

    def _recognize(self, group: str, message: Message) -> MessageKey | None:
        try:
            key = decode_message(message.payload)
        except (ValueError, msgspec.DecodeError) as error:
            self.world.violate(f"{self.name} got a message that nobody sent: {error}")
            return None
        connection = _connection_of(message)
        self.seen.delivered(group, key, self.name, message.attempt, connection=connection)
        return key

    async def _work(
        self, group: str, key: MessageKey, message: Message, refusing: float, work_s: float
    ) -> None:
        if self.random.random() < 0.3:
            await asyncio.sleep(self.random.expovariate(1 / work_s))
        try:
            if self.random.random() < refusing:
                self.seen.returned(group, key, self.name)
                await message.refuse("the simulation refuses some")
            else:
                self.seen.settled(group, key, self.name)
                await message.settle()
        except CrosswireError as error:
            # Of several that are worked on at once, the connection may end while one is settled.
            self.seen.failed(self.name, error)


class SimulatedTicker(Program):
    """Consumes what a schedule sends; the ledger shows how many there were."""

    async def run(self, destination: str) -> None:
        """Consume until the world ends."""
        client = await self.open()
        while True:
            try:
                async with client.subscribe(destination, window=8) as subscription:
                    async for message in subscription:
                        if message.payload != b"tick":
                            self.world.violate(f"{self.name} got {message.payload!r}")
                        await message.settle()
            except CrosswireError as error:
                self.seen.failed(self.name, error)
                await asyncio.sleep(_AGAIN_S)


class SimulatedProvider(Program):
    """Serves a service that answers with what it was asked."""

    async def run(self, service: str) -> None:
        """Serve until the world ends."""
        client = await self.open()
        while True:
            try:
                served = await client.serve(service, self._answer)
                # Who asked before this had no answer; over eMQP such a call waits as a job.
                self.seen.disturbed(self.name)
                await asyncio.shield(served.ended)
            except CrosswireError as error:
                self.seen.failed(self.name, error)
                await asyncio.sleep(_AGAIN_S)

    async def _answer(self, message: Message) -> object:
        if self.random.random() < 0.3:
            await asyncio.sleep(self.random.expovariate(50))
        return message.json()


class SimulatedCaller(Program):
    """Calls a service, and checks the answers."""

    async def run(self, service: str, count: int, pause_s: float) -> None:
        """Call `count` times."""
        client = await self.open()
        for number in range(1, count + 1):
            await asyncio.sleep(self.random.expovariate(1 / pause_s))
            key = MessageKey(service, self.name, number)
            started = self.world.now
            try:
                answer = await client.call(service, {"call": encode_message(key, 20).decode()})
            except (NoProvider, ProviderLost, ClientError, HubError) as error:
                # Callers learn at once that their provider is gone. Over eMQP a call is a job, and
                # waits for the next one.
                is_late = isinstance(error, RequestTimeout) and self.protocol != "emqp"
                others = () if is_late else (PROVIDER,)
                self.seen.failed(self.name, error, *others, since=started)
                if self.world.now - started > 3 * _REQUEST_S:
                    self.world.violate(f"{self.name}: a call took {self.world.now - started:.1f} s")
            else:
                got = decode_message(answer.json()["call"].encode())
                if got != key:
                    self.world.violate(f"{self.name} called with {key} and was answered {got}")
        self.is_finished = True
