"""Clients of the simulated hub: they produce and consume, and report what they see."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar

import msgspec

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.errors import ClientError, ConnectFailed, ConnectionLost, RequestFailed, RequestTimeout
from crosswire.testing.simulation.hub import HubMachine
from crosswire.testing.simulation.observations import MessageKey, Observations
from crosswire.testing.simulation.world import Process

__all__ = ["Consumer", "Producer"]


def encode_message(key: MessageKey, filler: int) -> bytes:
    """A payload that says which message it is, and shows if a byte of it is wrong."""
    text = "".join(chr(97 + (key.number * 7 + index) % 26) for index in range(filler))
    body = msgspec.json.encode([*key, text])
    return msgspec.json.encode([*key, text, zlib.crc32(body)])


def decode_message(payload: bytes) -> MessageKey:
    """Which message this is. Raises ValueError if it is not what was sent."""
    destination, producer, number, text, crc = msgspec.json.decode(payload)
    if zlib.crc32(msgspec.json.encode([destination, producer, number, text])) != crc:
        raise ValueError("its check sum is wrong")
    return MessageKey(destination, producer, number)


class Speaker(ABC):
    """A connected client of one protocol."""

    protocol: ClassVar[str]

    def __init__(self, hub: HubMachine) -> None:
        self.hub = hub

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises ClientError."""

    @abstractmethod
    async def publish(self, destination: str, payload: bytes) -> int | None:
        """Send and wait for the acknowledgement; the id if it is known. Raises ClientError."""

    @abstractmethod
    def subscribe(self, destination: str, name: str) -> AsyncIterator[tuple[bytes, object]]:
        """Payloads, and what `settle` takes."""

    @abstractmethod
    def settle(self, delivery: object) -> None:
        """Done with it."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""


class EmpSpeaker(Speaker):
    protocol = "emp"

    async def open(self) -> None:
        self._client = EmpClient(self.hub.host, self.hub.ports["emp"], backoff=Backoff(0.05, 0.5))
        await self._client.__aenter__()

    async def publish(self, destination: str, payload: bytes) -> int | None:
        data = {"destination": destination, "json": msgspec.Raw(payload)}
        answer = await self._client.request("$publish", data)
        return answer["id"]

    def subscribe(self, destination: str, name: str):
        raise NotImplementedError

    def settle(self, delivery: object) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        await self._client.close()


class MicroMsg2Speaker(Speaker):
    protocol = "micromsg2"

    async def open(self) -> None:
        self._client = MicroMsg2Client(
            self.hub.host, self.hub.ports["micromsg2"], backoff=Backoff(0.05, 0.5)
        )
        await self._client.__aenter__()

    async def publish(self, destination: str, payload: bytes) -> int | None:
        await self._client.send(destination, payload)
        return None

    async def subscribe(self, destination: str, name: str):
        async with self._client.subscribe(destination, name=name or None, manual=True) as found:
            async for delivery in found:
                yield delivery.payload, delivery

    def settle(self, delivery) -> None:
        delivery.acknowledge()

    async def close(self) -> None:
        await self._client.close()


SPEAKERS = {"emp": EmpSpeaker, "micromsg2": MicroMsg2Speaker}


class Producer:
    """Sends messages one after the other, and reports what it is told."""

    def __init__(self, name: str, speaker: Speaker, destination: str, seen: Observations) -> None:
        self.name = name
        self.sent = 0
        self.is_finished = False
        self._speaker = speaker
        self._destination = destination
        self._seen = seen

    async def run(self, process: Process, count: int, pause_s: float) -> None:
        """Send so many."""
        random = process.world.random
        while True:
            try:
                await self._speaker.open()
                break
            except ClientError as error:
                self._seen.unknown(error)
                await asyncio.sleep(0.3)
        while self.sent < count:
            await asyncio.sleep(random.expovariate(1 / pause_s))
            self.sent += 1
            key = MessageKey(self._destination, self.name, self.sent)
            self._seen.attempted(key)
            try:
                identifier = await self._speaker.publish(
                    self._destination, encode_message(key, random.randint(0, 200))
                )
            except (ConnectionLost, RequestTimeout, ConnectFailed) as error:
                self._seen.disturbed(self.name)
                self._seen.unknown(error)
            except RequestFailed as error:
                self._seen.refused(key, error)
            else:
                self._seen.acknowledged(key, identifier)
        self.is_finished = True


class Consumer:
    """Consumes a queue, or a topic by a named subscription, and reports what it gets."""

    def __init__(
        self, name: str, speaker: Speaker, destination: str, group: str, seen: Observations
    ) -> None:
        self.name = name
        self._speaker = speaker
        self._destination = destination
        self._group = group
        self._seen = seen

    async def run(self, process: Process) -> None:
        """Consume until the world ends."""
        random = process.world.random
        subscription = self._group if self._group != self._destination else ""
        while True:
            try:
                await self._speaker.open()
                break
            except ClientError as error:
                self._seen.unknown(error)
                await asyncio.sleep(0.3)
        while True:
            try:
                async for payload, delivery in self._speaker.subscribe(
                    self._destination, subscription
                ):
                    key = decode_message(payload)
                    self._seen.delivered(self._group, key, self.name)
                    if random.random() < 0.3:
                        await asyncio.sleep(random.expovariate(100))
                    self._speaker.settle(delivery)
                    self._seen.settled(self._group, key, self.name)
            except ClientError as error:
                self._seen.disturbed(self.name)
                self._seen.unknown(error)
                await asyncio.sleep(0.2)
