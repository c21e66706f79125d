"""The model log in the contract suite."""

from __future__ import annotations

import asyncio
from typing import Final

from crosswire.commitlog.contract import ReplicatedLog
from crosswire.commitlog.model import ModelFault, ModelServers, model_log
from crosswire.commitlog.records import LogRecord, RecordPosition
from tests.commitlog.harness import AppendFault, Harness

_FAULTS: Final = {
    AppendFault.UNANSWERED: ModelFault.UNANSWERED,
    AppendFault.NOT_LANDED: ModelFault.NOT_LANDED,
    AppendFault.LATE: ModelFault.LATE,
}


class ModelHarness(Harness):
    def __init__(self) -> None:
        super().__init__()
        self.servers = ModelServers()

    def make_log(self) -> ReplicatedLog:
        return model_log(self.servers)

    async def make(self, genesis: LogRecord) -> None:
        await self.make_log().create(genesis)

    async def break_next(self, log: ReplicatedLog, fault: AppendFault) -> None:
        self.servers.script.append(_FAULTS[fault])

    async def deliver_late(self) -> None:
        self.servers.deliver_late()

    async def hold_copies(self, is_held: bool) -> None:
        self.servers.rates[ModelFault.NOT_COPIED] = float(is_held)

    async def end_wait(self, position: RecordPosition) -> None:
        while self.servers.head != position:
            await asyncio.sleep(0)

    async def failover(self) -> None:
        self.servers.failover()

    async def lose_suffix(self, count: int) -> None:
        self.servers.lose_suffix(count)

    async def recreate(self, genesis: LogRecord) -> None:
        self.servers.recreate(genesis)

    async def damage(self, number: int) -> None:
        self.servers.damage(number)

    async def drop(self, number: int) -> None:
        self.servers.drop(number)

    async def set_safe(self, is_safe: bool) -> None:
        self.servers.is_safe = is_safe

    async def set_reachable(self, is_reachable: bool) -> None:
        self.servers.is_reachable = is_reachable

    async def stored(self) -> list[bytes]:
        return self.servers.records
