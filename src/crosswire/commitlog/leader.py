"""A leader's commit log: groups become records of a replicated log, and are applied after that.

    encode      the body that the group recorded
    append      as one record or several, one after the other
    apply       to the leader's own store, unsynced, with number and digest in the same write
    done        the group's listeners run

A group is never reported as failed. Either all its records are durable and it is applied, or the
leader stops leading without an answer, and those who wait lose their connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final, Protocol

from crosswire.commitlog.body import RecordedBody
from crosswire.commitlog.contract import Append, CommitGroup, CommitLog, ReplicatedLog
from crosswire.commitlog.records import LogRecord, RecordChain, RecordPosition
from crosswire.errors import LogError, StoreError

__all__ = ["GroupTarget", "LeaderLog", "boot_time"]

_HEARTBEAT_S: Final = 1.0
_LAZY_S: Final = 0.25


def boot_time() -> float:
    """Seconds that the machine has been up, those in which it was suspended included."""
    return clock_gettime(CLOCK_BOOTTIME)


class GroupTarget(Protocol):
    """What durable groups are applied to: the leader's store."""

    def check_intact(self) -> None:
        """Raises StoreError if what is in this store must not be replicated any more."""

    def apply_group(self, group: CommitGroup, body: bytes, position: RecordPosition) -> None:
        """Write a group's changes, with the position of its last record. Raises StoreError."""

    def pass_over(self, position: RecordPosition) -> None:
        """A record that changes nothing is durable."""


class LeaderLog(CommitLog):
    """Appends groups of one term, and a heartbeat where there is nothing else for a second.

    `chain` stands on the confirmed takeover. The groups' bodies are `RecordedBody`. `ended` is
    called once, with the error, when this leader has been replaced (LogConflict), the log is not
    what it was (LogDamaged, LogForeign), or a durable group can't be applied (StoreError). Nothing
    is answered after that. `time_us` must not run back.
    """

    lazy_s = _LAZY_S
    is_always_durable = True

    def __init__(
        self,
        log: ReplicatedLog,
        chain: RecordChain,
        target: GroupTarget,
        time_us: Callable[[], int],
        ended: Callable[[LogError | StoreError], None],
        *,
        heartbeat_s: float = _HEARTBEAT_S,
        group_bytes: int = 0,
        pending_limit_bytes: int = 0,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self.confirmed_at = clock()
        """When the last append was confirmed, by `clock`: a leader for which that is too long ago
        has to stop."""
        self.appended_bytes = 0
        """The size of all bodies of groups so far."""
        self.group_bytes = group_bytes
        self.pending_limit_bytes = pending_limit_bytes
        self.last_append_s = 0.0
        self._log = log
        self._chain = chain
        self._target = target
        self._time_us = time_us
        self._ended = ended
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._wake = asyncio.Event()
        self._waiting: tuple[CommitGroup, Append] | None = None
        self._requests: list[
            tuple[Callable[[RecordChain, int], LogRecord], asyncio.Future[LogRecord]]
        ] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def term(self) -> int:
        """The number of this leader's takeover."""
        return self._chain.term

    @property
    def position(self) -> RecordPosition:
        """The last record that was made: it may be on its way."""
        return self._chain.position

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the task that appends."""
        self._task = loop.create_task(self._run(), name="crosswire-leader-log")

    def stop(self) -> None:
        """Ends the task. An append that is under way is left to the log's servers."""
        if self._task is not None:
            self._task.cancel()

    def append(self, group: CommitGroup, *, blocking: bool = False) -> Append:
        """Have a sealed group appended and applied.

        Raises RuntimeError with `blocking`, or before `start`: nothing can be appended without the
        event loop.
        """
        if blocking or self._task is None:
            raise RuntimeError("a group is appended to a replicated log by the event loop only")
        assert self._waiting is None, "one group is in flight"
        assert isinstance(group.body, RecordedBody)
        self.pending_bytes = group.body.size_bytes
        append = Append()
        self._waiting = (group, append)
        self._wake.set()
        return append

    async def add(self, make: Callable[[RecordChain, int], LogRecord]) -> LogRecord:
        """Append a record that is no group, between groups: a hand-over, a trim.

        `make` is called with the chain and the time when it is its turn. Where this leader ends
        before the record is durable, this never returns: cancel it with the rest of the leader.
        """
        done: asyncio.Future[LogRecord] = asyncio.get_running_loop().create_future()
        self._requests.append((make, done))
        self._wake.set()
        return await done

    async def _run(self) -> None:
        try:
            while True:
                await self._append_next()
        except (LogError, StoreError) as error:
            self._ended(error)

    async def _append_next(self) -> None:
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._wake.wait()
        except TimeoutError:
            await self._append_between(self._chain.heartbeat(self._time_us()))
            return
        self._wake.clear()
        if self._waiting is not None:
            (group, append), self._waiting = self._waiting, None
            await self._append_group(group)
            for callback in append.finish():
                callback(append)
        requests, self._requests = self._requests, []
        for make, done in requests:
            record = make(self._chain, self._time_us())
            await self._append_between(record)
            if not done.done():
                done.set_result(record)

    async def _append_group(self, group: CommitGroup) -> None:
        recorded = group.body
        assert isinstance(recorded, RecordedBody)
        # Here, and not when damage is found: what it made the hub settle is in this group.
        self._target.check_intact()
        body = recorded.encode()
        for record in self._chain.group(body, self._time_us()):
            await self._append(record)
        self._target.apply_group(group, body, self._chain.position)
        self.appended_bytes += len(body)
        self.pending_bytes = 0

    async def _append_between(self, record: LogRecord) -> None:
        """Append a record that is no part of a group."""
        await self._append(record)
        self._target.pass_over(record.position)

    async def _append(self, record: LogRecord) -> None:
        began = self._clock()
        await self._log.append(record)
        self.confirmed_at = self._clock()
        self.last_append_s = self.confirmed_at - began
