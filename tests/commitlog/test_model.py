"""Three replicas on a model log with every fault at once: what was confirmed stays."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from crosswire.commitlog.contract import LogPage
from crosswire.commitlog.model import ModelFault, ModelServers, model_log
from crosswire.commitlog.records import (
    ORIGIN,
    Genesis,
    LogRecord,
    RecordChain,
    RecordKind,
    Takeover,
    decode_record,
)
from crosswire.errors import LogConflict, LogUnavailable

LOG = b"l" * 16
RATES = {
    ModelFault.UNANSWERED: 0.08,
    ModelFault.NOT_LANDED: 0.08,
    ModelFault.LATE: 0.08,
    ModelFault.NOT_COPIED: 0.12,
    ModelFault.UNSAFE: 0.05,
    ModelFault.STALE: 0.15,
}


class Replica:
    """Takes over when it has seen no record for some pages, then appends; notes what it learns."""

    def __init__(self, index: int, servers: ModelServers, seed: int) -> None:
        self.log = model_log(servers)
        self.chain = RecordChain(LOG, bytes([index]) * 16)
        self.random = Random(seed * 31 + index)
        self.confirmed: list[LogRecord] = []
        self.applied: list[LogRecord] = []
        self.takeovers = 0

    async def run(self, stop: asyncio.Event) -> None:
        reader = self.log.read(ORIGIN)
        silent, patience = 0, self.random.randint(3, 12)
        newest = ORIGIN
        while not stop.is_set():
            try:
                page = await reader.next_page()
            except LogUnavailable:
                continue
            self._take(page)
            silent = silent + 1 if page.newest == newest else 0
            newest = page.newest
            if silent > patience:
                silent, patience = 0, self.random.randint(3, 12)
                self.chain.continue_from(newest)
                try:
                    await self._append(self.chain.takeover(Takeover("r"), 1))
                    while not self.applied or self.applied[-1].number < self.chain.term:
                        try:
                            self._take(await reader.next_page())
                        except LogUnavailable:
                            continue
                    await self._lead(stop)
                except LogConflict:
                    continue

    def _take(self, page: LogPage) -> None:
        self.applied += page.records

    async def _append(self, record: LogRecord) -> None:
        await self.log.append(record)
        self.confirmed.append(record)

    async def _lead(self, stop: asyncio.Event) -> None:
        self.takeovers += 1
        for _ in range(self.random.randint(1, 30)):
            if stop.is_set():
                return
            for record in self.chain.group(self.random.randbytes(20), 1):
                await self._append(record)


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_confirmed_is_lost_and_nothing_applied_vanishes(seed: int) -> None:
    servers = ModelServers(seed)
    await model_log(servers).create(RecordChain(LOG, b"g" * 16).genesis(Genesis("n"), 0))
    replicas = [Replica(index, servers, seed) for index in range(3)]
    for each in replicas:
        await each.log.open()
    servers.rates, servers.failover_rate = dict(RATES), 0.01
    stop = asyncio.Event()
    tasks = [asyncio.create_task(each.run(stop)) for each in replicas]
    while servers.operations < 3000:
        await asyncio.sleep(0)
        for task in tasks:
            if task.done():
                task.result()
    stop.set()
    servers.rates, servers.failover_rate = {}, 0.0
    await asyncio.gather(*tasks)

    final = {each.number: each for each in map(decode_record, servers.records)}
    assert sorted(final) == list(range(1, len(final) + 1))
    confirmed = [record for each in replicas for record in each.confirmed]
    assert len({record.number for record in confirmed}) == len(confirmed)
    for record in confirmed:
        assert final[record.number] == record
    for each in replicas:
        assert [record.number for record in each.applied] == list(range(1, len(each.applied) + 1))
        for record in each.applied:
            assert final[record.number] == record
    # It is no proof if nothing happened.
    assert sum(each.takeovers for each in replicas) > 3
    assert len(confirmed) > 100
    assert servers.timeline > 5


async def test_a_run_is_the_same_for_the_same_seed() -> None:
    async def run() -> list[bytes]:
        servers = ModelServers(7)
        chain = RecordChain(LOG, b"w" * 16)
        log = model_log(servers)
        await log.create(chain.genesis(Genesis("n"), 0))
        await log.open()
        servers.rates = dict(RATES)
        await log.append(chain.takeover(Takeover("r"), 1))
        for _ in range(50):
            await log.append(chain.heartbeat(1))
        return [*servers.records, servers.operations.to_bytes(8)]

    assert await run() == await run()


def test_kinds_that_prove_their_predecessor() -> None:
    """The rule of `_EngineReader._page` counts on every kind but one being written by a leader."""
    assert {kind for kind in RecordKind if kind is not RecordKind.TAKEOVER} == {
        RecordKind.GENESIS,
        RecordKind.GROUP,
        RecordKind.HEARTBEAT,
        RecordKind.HAND_OVER,
        RecordKind.TRIM,
    }
