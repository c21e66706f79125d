"""The load of a chaos run, and what became of each message: delivered, settled, and in the lake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow.parquet as pq

from crosswire.client.native.dial import Backoff
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.relink import RelinkClient
from crosswire.errors import ClientError
from crosswire.lake.files import find
from tests.e2e.parties import EmqpParty, Party

CONSUMED: Final = ("queue/q0", "queue/q1")
KEPT: Final = ("queue/k0", "queue/k1")
"""Consumed when the faults are over: what is delivered at once is not missed later, whatever became
of it in the log."""
ARRIVE_S: Final = 60.0
_MARK_S: Final = 0.1
_MULTICAST: Final = "multicast"
_TEXT: Final = b'{"content-type": "text/plain"}'
"""A part of a message of Relink: without it payloads are no text."""


class _Delivered(msgspec.Struct):
    payload: str
    is_settled: bool = False


class Traffic:
    """Producers of all protocols; consumers of EMP, which know ids and what is settled for sure."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.attempted = 0
        self.acknowledged: set[str] = set()
        self.payloads: dict[str, set[int]] = {}
        self.ids: dict[int, _Delivered] = {}
        self.returned: list[int] = []
        self.doubled_ids: list[int] = []
        self.running = True
        self._ports = ports
        self._loop = asyncio.get_running_loop()

    async def produce(self, party: Party, number: int) -> None:
        """One message after the other; what was not acknowledged is not sent again."""
        count, queues = 0, (*CONSUMED, *KEPT)
        while self.running:
            payload = f"{party.name} {number} {count}"
            count += 1
            self.attempted += 1
            try:
                await party.produce(queues[count % len(queues)], payload.encode(), "text/plain")
            except ClientError:
                # A client that has ended raises without waiting: others need the loop, too.
                await asyncio.sleep(0.01)
                continue
            # eMQP sends without a receipt: nobody knows what was acknowledged.
            if not isinstance(party, EmqpParty):
                self.acknowledged.add(payload)
            else:
                await asyncio.sleep(0.01)

    async def multicast(self, number: int) -> None:
        """Messages of Relink for two channels, each of which makes a message of its own."""
        count = 0
        while self.running:
            with suppress(ClientError):
                async with RelinkClient(
                    "127.0.0.1", self._ports["relink"], KEPT[1], backoff=Backoff(0.02, 0.3)
                ) as client:
                    while self.running:
                        payload = f"{_MULTICAST} {number} {count}"
                        count += 1
                        self.attempted += 1
                        await client.multicast([0, 1], _TEXT, payload.encode())
                        for channel in (0, 1):
                            await client.sender(channel).consumed(timeout_s=ARRIVE_S)
                        self.acknowledged.add(payload)
            # As above.
            await asyncio.sleep(0.01)

    async def send_to(self, port: int, payload: str) -> None:
        """One message to this port, whoever is there."""
        self.attempted += 1
        with suppress(ClientError, OSError):
            async with EmpClient("127.0.0.1", port) as client:
                await client.request("$publish", {"destination": KEPT[0], "text": payload})
                self.acknowledged.add(payload)

    async def send_large(self, number: int, size: int) -> None:
        """One message that is several records of the log."""
        text = f"large {number} " + "x" * size
        self.attempted += 1
        with suppress(ClientError):
            async with EmpClient("127.0.0.1", self._ports["emp"]) as client:
                await client.request("$publish", {"destination": KEPT[0], "text": text})
                self.acknowledged.add(_shortened(text))

    async def consume(self, queue: str) -> None:
        """Settles what comes, and again and again publishes on the same connection: when that is
        acknowledged, all that was settled before it on this connection is durable."""
        answered: list[tuple[float, int]] = []

        async def take(data: dict[str, Any]) -> None:
            self._take(data)
            answered.append((self._loop.time(), data["id"]))

        async with EmpClient(
            "127.0.0.1",
            self._ports["emp"],
            handlers={"$deliver": take},
            backoff=Backoff(0.02, 0.3),
        ) as client:
            await client.request("$subscribe", {"destination": queue})
            last, since = None, 0.0
            while True:
                await asyncio.sleep(_MARK_S)
                peer = await client.peer()
                now = self._loop.time()
                if peer is not last:
                    last, since = peer, now
                try:
                    await peer.request("$publish", {"destination": "queue/marks", "text": "mark"})
                except ClientError:
                    continue
                # On this connection, and answered a while before: the answer is written when the
                # handler has returned.
                sure = [each for each in answered if since < each[0] < now - _MARK_S / 2]
                for _, identifier in sure:
                    self.ids[identifier].is_settled = True
                answered[:] = [each for each in answered if each[0] >= now - _MARK_S / 2]

    def _take(self, data: dict[str, Any]) -> None:
        identifier, payload = data["id"], _shortened(data["text"])
        known = self.ids.get(identifier)
        if known is not None and known.payload != payload:
            self.doubled_ids.append(identifier)
        elif known is not None and known.is_settled:
            self.returned.append(identifier)
        if known is None:
            self.ids[identifier] = _Delivered(payload)
        self.payloads.setdefault(payload, set()).add(identifier)

    @property
    def lost(self) -> set[str]:
        return missing(self.acknowledged, self.payloads)

    @property
    def doubled(self) -> int:
        return len(self.doubled_ids) + surplus(self.payloads)


def _copies_of(payload: str) -> int:
    """How many messages have this payload."""
    return 2 if payload.startswith(_MULTICAST) else 1


def missing(acknowledged: set[str], found: Mapping[str, Sized]) -> set[str]:
    return {each for each in acknowledged if len(found.get(each, ())) < _copies_of(each)}


def surplus(found: Mapping[str, Sized]) -> int:
    return sum(len(ids) > _copies_of(payload) for payload, ids in found.items())


def _read_lake(lake: Path) -> dict[str, list[int]]:
    """The ids of messages in the queues that are looked at, by their payload."""
    found: dict[str, list[int]] = {}
    for file in find(lake, ("messages",)):
        columns = ["id", "destination", "payload"]
        table = pq.read_table(file.path, columns=columns, partitioning=None)
        rows = zip(*(table[name].to_pylist() for name in columns), strict=True)
        for identifier, destination, payload in rows:
            if destination in (*CONSUMED, *KEPT):
                found.setdefault(_shortened(payload.decode()), []).append(identifier)
    return found


async def await_lake(lake: Path, acknowledged: set[str]) -> dict[str, list[int]]:
    """What the lake has when all is in it that has to be, or after a while."""
    deadline = time.monotonic() + ARRIVE_S
    while True:
        found = await asyncio.to_thread(_read_lake, lake)
        if not missing(acknowledged, found) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _shortened(payload: str) -> str:
    return payload if len(payload) < 1000 else f"{payload[:40]}, {len(payload)} characters"
