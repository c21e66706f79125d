"""What the contract suite needs of an implementation: replicas' views of one log, and faults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto

from crosswire.commitlog.contract import LogPage, RecordReader, ReplicatedLog
from crosswire.commitlog.records import (
    Genesis,
    LogRecord,
    RecordChain,
    RecordPosition,
    Takeover,
)
from crosswire.errors import LogUnavailable

WRITER_A, WRITER_B = b"a" * 16, b"b" * 16


class AppendFault(Enum):
    """What happens to the next attempt to append."""

    UNANSWERED = auto()
    NOT_LANDED = auto()
    LATE = auto()


class Harness(ABC):
    """One log on its servers."""

    log_id = b"L" * 16

    def __init__(self) -> None:
        self.opened: list[ReplicatedLog] = []

    @abstractmethod
    def make_log(self) -> ReplicatedLog:
        """Another replica's view, not opened."""

    @abstractmethod
    async def break_next(self, log: ReplicatedLog, fault: AppendFault) -> None:
        """Have the next attempt of this replica to append fail in this way, once."""

    @abstractmethod
    async def deliver_late(self) -> None:
        """What was late arrives now."""

    @abstractmethod
    async def hold_copies(self, is_held: bool) -> None:
        """Have copies stop or continue: while they stop, nothing is confirmed."""

    @abstractmethod
    async def end_wait(self, position: RecordPosition) -> None:
        """Returns when this record can be read on the primary, without having copies."""

    @abstractmethod
    async def failover(self) -> None:
        """A copy takes over from the primary, without what had not been copied."""

    @abstractmethod
    async def lose_suffix(self, count: int) -> None:
        """Confirmed records vanish."""

    @abstractmethod
    async def recreate(self, genesis: LogRecord) -> None:
        """Remove the log, and make another one."""

    @abstractmethod
    async def damage(self, number: int) -> None:
        """Change a bit of a record."""

    @abstractmethod
    async def drop(self, number: int) -> None:
        """Remove a record in the middle."""

    @abstractmethod
    async def set_safe(self, is_safe: bool) -> None:
        """Switch the settings that keep what is confirmed."""

    @abstractmethod
    async def set_reachable(self, is_reachable: bool) -> None:
        """Cut or restore the network."""

    @abstractmethod
    async def stored(self) -> list[bytes]:
        """The records that the primary has."""

    def genesis(self, log_id: bytes | None = None) -> LogRecord:
        chain = RecordChain(log_id or self.log_id, b"g" * 16)
        return chain.genesis(Genesis("node"), 1)

    async def create(self) -> LogRecord:
        """Make the log; its genesis."""
        genesis = self.genesis()
        await self.make(genesis)
        return genesis

    @abstractmethod
    async def make(self, genesis: LogRecord) -> None:
        """Make the log with this record, as who may."""

    async def open(self) -> ReplicatedLog:
        """Another replica's view, opened."""
        log = self.make_log()
        self.opened.append(log)
        await log.open()
        return log

    async def lead(
        self, log: ReplicatedLog, after: LogRecord, writer: bytes = WRITER_A
    ) -> RecordChain:
        """Take over on top of a record."""
        chain = RecordChain(self.log_id, writer, position=after.position)
        await log.append(chain.takeover(Takeover("a"), 2))
        return chain

    async def close(self) -> None:
        for log in self.opened:
            await log.close()


async def next_page(reader: RecordReader) -> LogPage:
    """The next page, however often the log can't be reached before."""
    while True:
        try:
            return await reader.next_page()
        except LogUnavailable:
            continue


async def read_proven(reader: RecordReader, upto: RecordPosition) -> list[LogRecord]:
    """Pages until this record is among those that are proven."""
    found: list[LogRecord] = []
    while not found or found[-1].number < upto.number:
        found += (await next_page(reader)).records
    return found
