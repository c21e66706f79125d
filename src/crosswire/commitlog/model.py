"""A replicated log in memory, with the faults that real ones have: for tests and the simulator.

`ModelServers` are a primary and its copies; several `model_log`s on one of them are the replicas of
a hub. All that happens is decided by a seed, or by a script of faults. No time passes: waiting is a
number of turns of the event loop, or whatever the simulator gives instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from random import Random
from typing import Final

import msgspec

from crosswire.commitlog.contract import LogState, ReplicaState
from crosswire.commitlog.records import LogRecord, RecordPosition
from crosswire.commitlog.replicated import (
    EngineAnswer,
    EngineLog,
    FetchedRecords,
    RecordEngine,
    WriteOutcome,
)
from crosswire.errors import LogForeign, LogNameTaken, LogUnavailable, LogUnsafe

__all__ = ["ModelEngine", "ModelFault", "ModelServers", "model_log"]

_NAME_TAKEN_S: Final = 10.0
_MOST_LATE: Final = 6
_MOST_TURNS: Final = 6


class ModelFault(Enum):
    """What can happen to one attempt."""

    NONE = auto()
    UNANSWERED = auto()
    """It is done and copied; the answer is lost."""
    NOT_LANDED = auto()
    """It never reaches a server."""
    LATE = auto()
    """It reaches a server after some of the attempts that follow it."""
    NOT_COPIED = auto()
    """It is done on the primary, can be read, and has no copies; the wait for them was ended."""
    UNSAFE = auto()
    """As before, and the server reports success: its settings ask for no copies at the moment."""
    STALE = auto()
    """A reader asks a server that lacks some of the newest records."""


class _StoredRecord(msgspec.Struct):
    number: int
    digest: bytes
    data: bytes


class _ServerHistory(msgspec.Struct):
    """What a server has. `copied` is the number of the last record that its copies have, too."""

    log_id: bytes
    head: RecordPosition
    records: list[_StoredRecord]
    copied: int
    timeline: int

    def copy(self) -> _ServerHistory:
        return _ServerHistory(
            self.log_id, self.head, list(self.records), self.copied, self.timeline
        )


class ModelServers:
    """The servers of a log: a primary, its copies, and the network in front of them.

    `rates` has the probability of each fault; `script` the next ones, before any probability
    counts. The acts of operators and of failovers are methods. `operations` counts attempts.
    """

    def __init__(self, seed: int = 0, rates: Mapping[ModelFault, float] | None = None) -> None:
        self.random = Random(seed)
        self.rates = dict(rates or {})
        self.script: deque[ModelFault] = deque()
        self.failover_rate = 0.0
        self.is_reachable = True
        self.is_safe = True
        self.now_s = 0.0
        self.operations = 0
        self.system = "model-1"
        self.reports: dict[str, tuple[ReplicaState, float]] = {}
        self._primary: _ServerHistory | None = None
        self._replaced: _ServerHistory | None = None
        self._late: list[tuple[int, LogRecord]] = []

    # What happens to servers.

    def failover(self) -> None:
        """A copy becomes primary, on a new timeline: what was not copied is gone."""
        history = self.history
        self._replaced = history.copy()
        # Attempts on their way to the old primary are lost with it.
        self._late.clear()
        if history.copied < history.head.number:
            self._cut(history, history.copied)
        history.timeline += 1

    def restart(self) -> None:
        """The primary restarts: what waited for copies can be read now, and has none."""
        self._late.clear()

    def lose_suffix(self, count: int) -> None:
        """Records that were confirmed are gone: a wrong copy was promoted."""
        history = self.history
        self._cut(history, history.head.number - count)
        history.copied = min(history.copied, history.head.number)
        history.timeline += 1

    def swap_primaries(self) -> None:
        """The primary that was replaced last is the one that answers."""
        assert self._replaced is not None, "there was no failover"
        self._primary, self._replaced = self._replaced, self._primary

    def recreate(self, genesis: LogRecord) -> None:
        """Somebody made the log anew."""
        self._primary = None
        self.make(genesis)

    def damage(self, number: int) -> None:
        """A bit of a stored record changes."""
        for each in self.history.records:
            if each.number == number:
                data = bytearray(each.data)
                data[len(data) // 2] ^= 1
                each.data = bytes(data)

    def drop(self, number: int) -> None:
        """A record in the middle is missing."""
        self.history.records[:] = [each for each in self.history.records if each.number != number]

    @staticmethod
    def _cut(history: _ServerHistory, last: int) -> None:
        history.records[:] = [each for each in history.records if each.number <= last]
        newest = history.records[-1]
        history.head = RecordPosition(newest.number, newest.digest)

    # What there is.

    @property
    def history(self) -> _ServerHistory:
        """What the primary has. Raises LogForeign without a log."""
        if self._primary is None:
            raise LogForeign("there is no log: `crosswire replication init` makes one")
        return self._primary

    @property
    def records(self) -> list[bytes]:
        """All records of the primary."""
        return [each.data for each in self.history.records]

    @property
    def head(self) -> RecordPosition:
        """The newest record of the primary."""
        return self.history.head

    @property
    def timeline(self) -> int:
        """Of the primary."""
        return self.history.timeline

    def make(self, genesis: LogRecord) -> None:
        """Raises LogForeign if there is a log already."""
        if self._primary is not None:
            raise LogForeign(f"there is the log {self._primary.log_id.hex()} already")
        stored = _StoredRecord(genesis.number, genesis.digest, genesis.data)
        self._primary = _ServerHistory(genesis.log_id, genesis.position, [stored], 1, 1)

    # Attempts.

    def next_fault(self, *allowed: ModelFault) -> ModelFault:
        """What happens to this attempt; some attempts of others arrive before it."""
        self.operations += 1
        if self.failover_rate and self.random.random() < self.failover_rate:
            self.failover()
        arrived = [record for due, record in self._late if due <= self.operations]
        self._late = [each for each in self._late if each[0] > self.operations]
        for record in arrived:
            if self.append(record) and self.random.random() < 0.5:
                self.copy_all()
        if self.script and self.script[0] in (ModelFault.NONE, *allowed):
            return self.script.popleft()
        for fault in allowed:
            if self.random.random() < self.rates.get(fault, 0.0):
                return fault
        return ModelFault.NONE

    def delay(self, record: LogRecord) -> None:
        """Have it arrive after some attempts that follow."""
        self._late.append((self.operations + self.random.randint(1, _MOST_LATE), record))

    def deliver_late(self) -> None:
        """Have everything that is still on its way arrive now."""
        late, self._late = self._late, []
        for _, record in late:
            self.append(record)

    def append(self, record: LogRecord) -> bool:
        """Compare and set the head. It has no copies yet."""
        history = self.history
        expected = RecordPosition(record.number - 1, record.predecessor)
        if history.log_id != record.log_id or history.head != expected:
            return False
        history.records.append(_StoredRecord(record.number, record.digest, record.data))
        history.head = record.position
        return True

    def copy_all(self) -> None:
        """Copies have all that the primary has; those of a replaced primary follow another one."""
        if self._replaced is None or self._replaced.timeline < self.history.timeline:
            self.history.copied = self.history.head.number

    @property
    def has_copies(self) -> bool:
        """Does a commit on the primary get confirmed?"""
        return self._replaced is None or self._replaced.timeline < self.history.timeline

    async def pause(self, seconds: float) -> None:
        """A few turns of the event loop."""
        self.now_s += seconds
        for _ in range(self.random.randint(1, _MOST_TURNS)):
            await asyncio.sleep(0)


class ModelEngine(RecordEngine):
    """One replica's access to the servers. `pause` replaces theirs, for a simulator's own time."""

    def __init__(
        self, servers: ModelServers, pause: Callable[[float], Awaitable[None]] | None = None
    ) -> None:
        super().__init__()
        self.servers = servers
        self._pause = pause or servers.pause

    async def pause(self, seconds: float) -> None:
        """Wait, without a clock."""
        await self._pause(seconds)

    async def close(self) -> None:
        """There is nothing to release."""

    def _reach(self) -> _ServerHistory:
        servers = self.servers
        if not servers.is_reachable:
            raise LogUnavailable("no server of the log can be reached")
        history = servers.history
        self.accept_server(servers.system, history.timeline, "model")
        return history

    async def create(self, genesis: LogRecord) -> None:
        """Make the log."""
        if not self.servers.is_reachable:
            raise LogUnavailable("no server of the log can be reached")
        if not self.servers.is_safe:
            raise LogUnsafe("the settings ask for no copies")
        self.servers.make(genesis)

    async def look(self) -> LogState:
        """Log and settings as they are."""
        history, servers = self._reach(), self.servers
        return LogState(
            history.log_id,
            history.head,
            history.records[0].number,
            sum(len(each.data) for each in history.records),
            servers.system,
            history.timeline,
            "model",
            "" if servers.is_safe else "the settings ask for no copies",
        )

    async def offer(self, record: LogRecord) -> EngineAnswer:
        """Try once to append."""
        return await self._attempt(record, is_new=True)

    async def confirm(self, record: LogRecord) -> EngineAnswer:
        """Try once to prove that the head is durable."""
        return await self._attempt(record, is_new=False)

    async def _attempt(self, record: LogRecord, *, is_new: bool) -> EngineAnswer:
        servers = self.servers
        # Others may act between the call and its effect, and between that and the answer.
        await servers.pause(0.0)
        fault = servers.next_fault(
            ModelFault.UNANSWERED,
            ModelFault.NOT_LANDED,
            ModelFault.LATE,
            ModelFault.NOT_COPIED,
            ModelFault.UNSAFE,
        )
        try:
            history = self._reach()
        except (LogUnavailable, LogForeign) as error:
            return EngineAnswer(WriteOutcome.UNKNOWN, reason=error.reason)
        if fault is ModelFault.LATE and is_new:
            servers.delay(record)
        if fault in (ModelFault.NOT_LANDED, ModelFault.LATE):
            return EngineAnswer(WriteOutcome.UNKNOWN, reason="the connection was lost")
        is_done = servers.append(record) if is_new else history.head == record.position
        head, log_id = history.head, history.log_id
        is_copied = (
            is_done
            and servers.has_copies
            and servers.is_safe
            and fault not in (ModelFault.NOT_COPIED, ModelFault.UNSAFE)
        )
        if is_copied:
            servers.copy_all()
        await servers.pause(0.0)
        if fault is ModelFault.UNANSWERED:
            return EngineAnswer(WriteOutcome.UNKNOWN, reason="the connection was lost")
        if not is_done:
            return EngineAnswer(WriteOutcome.REFUSED, log_id, head)
        if not is_copied:
            is_silent = fault is ModelFault.UNSAFE or not servers.is_safe
            reason = "the settings ask for no copies" if is_silent else "the wait was cancelled"
            return EngineAnswer(WriteOutcome.UNKNOWN, reason=reason)
        return EngineAnswer(WriteOutcome.CONFIRMED, log_id, head)

    async def fetch(self, after: int, limit_bytes: int) -> FetchedRecords:
        """Records as the primary has them, or a stale copy."""
        servers = self.servers
        await servers.pause(0.0)
        fault = servers.next_fault(ModelFault.NOT_LANDED, ModelFault.STALE)
        if fault is ModelFault.NOT_LANDED:
            raise LogUnavailable("the connection was lost")
        history = self._reach()
        if fault is ModelFault.STALE and len(history.records) > 1:
            history = history.copy()
            lag = servers.random.randint(1, min(5, len(history.records) - 1))
            servers._cut(history, history.records[-1 - lag].number)
        found: list[bytes] = []
        for each in history.records:
            if each.number > after:
                found.append(each.data)
                limit_bytes -= len(each.data)
                if limit_bytes <= 0:
                    break
        return FetchedRecords(history.log_id, history.head, history.records[0].number, found)

    async def report(self, state: ReplicaState) -> None:
        """Keep what a replica reports."""
        self._reach()
        servers = self.servers
        before, reported_s = servers.reports.get(state.name, (state, 0.0))
        if before.writer != state.writer and servers.now_s - reported_s < _NAME_TAKEN_S:
            raise LogNameTaken(f"a replica at {before.address} reports as {state.name}, too")
        servers.reports[state.name] = (state, servers.now_s)

    async def replicas(self) -> list[ReplicaState]:
        """What was reported, with its age."""
        self._reach()
        servers = self.servers
        return [
            msgspec.structs.replace(state, age_s=servers.now_s - reported_s)
            for _, (state, reported_s) in sorted(servers.reports.items())
        ]

    async def remove(self, name: str) -> bool:
        """Forget a replica."""
        self._reach()
        return self.servers.reports.pop(name, None) is not None

    async def trim(self, upto: int) -> int:
        """Remove records, all of those that are asked for."""
        history = self._reach()
        last = history.head.number
        history.records[:] = [
            each for each in history.records if each.number > upto or each.number == last
        ]
        return history.records[0].number


def model_log(
    servers: ModelServers, pause: Callable[[float], Awaitable[None]] | None = None
) -> EngineLog:
    """A replica's view of the log on these servers."""
    return EngineLog(ModelEngine(servers, pause))
