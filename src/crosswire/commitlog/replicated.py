"""The rules of a replicated log that hold for every engine: what to make of its answers.

An engine (`RecordEngine`) makes one attempt at a time and reports what it knows about it. Here is
decided when a record is offered again, when one that is found has to be confirmed by another write,
which head means that we were replaced and which that records were lost, and which of the records
that can be read are proven to be durable.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Final

import msgspec

from crosswire.commitlog.contract import (
    LogBookmark,
    LogPage,
    LogState,
    RecordReader,
    ReplicaState,
    ReplicatedLog,
)
from crosswire.commitlog.records import (
    ORIGIN,
    LogRecord,
    RecordKind,
    RecordPosition,
    decode_record,
)
from crosswire.errors import (
    LogConflict,
    LogDamaged,
    LogForeign,
    LogTrimmed,
    LogUnavailable,
    LogUnsafe,
)

__all__ = ["EngineAnswer", "EngineLog", "FetchedRecords", "RecordEngine", "WriteOutcome"]

_log = logging.getLogger("crosswire.commitlog")

_FIRST_RETRY_S: Final = 0.02
_LAST_RETRY_S: Final = 1.0
_POLL_S: Final = 0.05
_PAGE_BYTES: Final = 16 << 20


class WriteOutcome(Enum):
    """What an engine knows after one attempt to write."""

    CONFIRMED = auto()
    """It is durable: written, copied, and the settings held before and after."""
    REFUSED = auto()
    """Nothing was written: the head is another one than the attempt names."""
    UNKNOWN = auto()
    """It may have been written or not, may be copied or not, may still be written later."""


class EngineAnswer(msgspec.Struct, frozen=True):
    """The outcome of one attempt. A refusal has the log's id and head; `reason` is for people."""

    outcome: WriteOutcome
    log_id: bytes = b""
    head: RecordPosition = ORIGIN
    reason: str = ""


class FetchedRecords(msgspec.Struct, frozen=True):
    """Records after a number, in order, and head and first number as they were at that moment."""

    log_id: bytes
    head: RecordPosition
    first: int
    records: list[bytes]


class RecordEngine(ABC):
    """One attempt at a time on the servers of a log. It verifies nothing that is in a record.

    `system` and `timeline` are those of the newest server that was used.
    """

    def __init__(self) -> None:
        self.system = ""
        self.timeline = 0

    def accept_server(self, system: str, timeline: int, address: str) -> None:
        """Use a server, unless it is of another system, or one that was replaced.

        Raises LogForeign, LogUnavailable. Numbers and digests on a server that was replaced are
        true, but its commits are of no use: its copies follow another one now.
        """
        if self.system and system != self.system:
            raise LogForeign(
                f"{address} is a server of the database system {system}, this hub's log is in "
                f"{self.system}"
            )
        if timeline < self.timeline:
            raise LogUnavailable(
                f"{address} accepts writes, but its timeline is {timeline}, and {self.timeline} "
                f"was used before: it was replaced in a failover and must not be used"
            )
        self.system, self.timeline = system, timeline

    @abstractmethod
    async def create(self, genesis: LogRecord) -> None:
        """As ReplicatedLog.create."""

    @abstractmethod
    async def look(self) -> LogState:
        """Log and settings as they are. Raises LogForeign where there is no log, LogUnavailable."""

    @abstractmethod
    async def offer(self, record: LogRecord) -> EngineAnswer:
        """Try once to append a record on top of its predecessor.

        Never raises; cancelling it must not undo or hasten anything on the server.
        """

    @abstractmethod
    async def confirm(self, record: LogRecord) -> EngineAnswer:
        """Try once to prove that the head, if it is this record, is durable: by a write after it,
        on the same server. Never raises, and can be cancelled, like `offer`."""

    @abstractmethod
    async def fetch(self, after: int, limit_bytes: int) -> FetchedRecords:
        """Records after a number as one server has them now: at least one, if it has any, and no
        more when `limit_bytes` are exceeded. Raises LogUnavailable, LogForeign."""

    @abstractmethod
    async def report(self, state: ReplicaState) -> None:
        """As ReplicatedLog.report."""

    @abstractmethod
    async def replicas(self) -> list[ReplicaState]:
        """As ReplicatedLog.replicas."""

    @abstractmethod
    async def remove(self, name: str) -> bool:
        """As ReplicatedLog.remove."""

    @abstractmethod
    async def trim(self, upto: int) -> int:
        """As ReplicatedLog.trim; `upto` is below the head."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait before another attempt."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections."""


class EngineLog(ReplicatedLog):
    """A replicated log on an engine. `log_id` is known once it is open."""

    def __init__(self, engine: RecordEngine) -> None:
        self.engine = engine
        self.log_id = b""
        self._proven = ORIGIN
        self._pending: LogRecord | None = None
        self._is_appending = False
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the current append is not answered yet."""
        return self._trouble

    @property
    def proven(self) -> RecordPosition:
        """The newest record that is known to be durable."""
        return self._proven

    def is_proven(self, position: RecordPosition) -> None:
        """This record is durable, and all before it."""
        if position.number > self._proven.number:
            self._proven = position

    async def create(self, genesis: LogRecord) -> None:
        """Make the log, with this first record."""
        await self.engine.create(genesis)

    async def open(self, known: LogBookmark | None = None) -> LogState:
        """Check identity, settings and that what was applied is still there."""
        if known is not None:
            self.engine.system, self.engine.timeline = known.system, known.timeline
        state = await self.engine.look()
        if known is not None:
            if state.log_id != known.log_id:
                raise LogForeign(
                    f"the log at {state.address} is {state.log_id.hex()}, this data directory "
                    f"belongs to {known.log_id.hex()}"
                )
            head, applied = state.head, known.position
            if head.number < applied.number or (
                head.number == applied.number and head.digest != applied.digest
            ):
                raise LogDamaged(
                    f"the log at {state.address} ends with record {head.number}, and this replica "
                    f"has applied a record {applied.number} that is not there"
                )
            self.is_proven(applied)
        if state.unsafe:
            raise LogUnsafe(f"the log at {state.address} can't confirm anything: {state.unsafe}")
        # The newest format in use is that of the newest record.
        fetched = await self.engine.fetch(state.head.number - 1, 1)
        for data in fetched.records[:1]:
            decode_record(data)
        self.log_id = state.log_id
        return state

    def bookmark(self, position: RecordPosition) -> LogBookmark:
        """What a data directory is to remember when it has applied this record."""
        return LogBookmark(self.log_id, position, self.engine.system, self.engine.timeline)

    # Appending.

    async def append(self, record: LogRecord) -> None:
        """Offer the record until it is known to be durable, or that it never will be."""
        pending = self._pending
        if self._is_appending:
            raise RuntimeError("one record is appended at a time")
        if record.log_id != self.log_id:
            raise RuntimeError("the log is not open, or the record belongs to another one")
        # The old one may still be written. A takeover starts a term of its own, in which nothing is
        # acknowledged that depends on it.
        is_new_term = record.kind is RecordKind.TAKEOVER
        if pending is not None and pending.digest != record.digest and not is_new_term:
            raise RuntimeError(f"what became of record {pending.number} is not known")
        self._pending = record
        self._is_appending = True
        try:
            await self._offer_until_known(record)
        finally:
            self._is_appending = False
            self._trouble = ""

    async def _offer_until_known(self, record: LogRecord) -> None:
        engine, delay_s = self.engine, _FIRST_RETRY_S
        while True:
            answer = await engine.offer(record)
            if answer.outcome is WriteOutcome.REFUSED and self._has_head(record, answer):
                # It was written by an attempt whose outcome was not known. That it can be read does
                # not mean that it has copies: a write after it has to be confirmed.
                answer = await engine.confirm(record)
            if answer.outcome is WriteOutcome.CONFIRMED:
                self._pending = None
                self.is_proven(record.position)
                if self._trouble:
                    _log.warning("record %d of the log is durable now", record.number)
                return
            if answer.outcome is WriteOutcome.REFUSED:
                self._judge(record, answer)
                # Its predecessor is the head after all: something changed between two statements.
                reason = "the head of the log has changed meanwhile"
            else:
                reason = answer.reason
            if reason != self._trouble:
                self._trouble = reason
                _log.warning(
                    "record %d of the log is not confirmed and is offered again: %s",
                    record.number,
                    reason,
                )
            await engine.pause(delay_s)
            delay_s = min(2 * delay_s, _LAST_RETRY_S)

    def _has_head(self, record: LogRecord, answer: EngineAnswer) -> bool:
        return answer.log_id == record.log_id and answer.head == record.position

    def _judge(self, record: LogRecord, answer: EngineAnswer) -> None:
        """Raises what a head means that is neither the record nor its predecessor."""
        head, proven = answer.head, self._proven
        if answer.log_id != record.log_id:
            self._pending = None
            raise LogForeign(
                f"the log was made anew: it is {answer.log_id.hex()}, and was {record.log_id.hex()}"
            )
        before = RecordPosition(record.number - 1, record.predecessor)
        if head == before or head == record.position:
            return
        self._pending = None
        if head.number < proven.number or (
            head.number == proven.number and head.digest != proven.digest
        ):
            raise LogDamaged(
                f"the log ends with record {head.number}, and record {proven.number} was confirmed "
                f"before: its servers have lost what they confirmed"
            )
        if head.number >= record.number:
            raise LogConflict(
                f"another writer's record is at number {record.number} of the log or after it: "
                f"the log ends with {head.number}"
            )
        # Only a takeover can stand on a record that was seen and never confirmed.
        raise LogConflict(
            f"record {before.number} of the log, which was never confirmed, is gone: the log ends "
            f"with {head.number}"
        )

    # Reading.

    def read(self, after: RecordPosition) -> RecordReader:
        """Follow the log after a record that was applied."""
        return _EngineReader(self, after)

    # What is beside the records.

    async def report(self, state: ReplicaState) -> None:
        """Replace what this replica reported before."""
        await self.engine.report(state)

    async def replicas(self) -> list[ReplicaState]:
        """What all replicas reported last."""
        return await self.engine.replicas()

    async def remove(self, name: str) -> bool:
        """Forget a replica."""
        return await self.engine.remove(name)

    async def trim(self, upto: int) -> int:
        """Remove records up to this number, never the newest, nor what is not proven."""
        return await self.engine.trim(min(upto, self._proven.number - 1))

    async def state(self) -> LogState:
        """How the log is now."""
        return await self.engine.look()

    async def close(self) -> None:
        """Release connections."""
        await self.engine.close()


class _EngineReader(RecordReader):
    """`_last` is the newest record that was handed out as durable, `_tail` what stands on it.

    The tail was seen, not proven: when a later look contradicts it, it is dropped and read again.
    """

    def __init__(self, log: EngineLog, after: RecordPosition) -> None:
        self._log = log
        self._last = after
        self._last_record: LogRecord | None = None
        self._tail: list[LogRecord] = []
        self._is_current = False
        self._retry_s = _FIRST_RETRY_S

    async def next_page(self) -> LogPage:
        engine = self._log.engine
        if self._is_current:
            await engine.pause(_POLL_S)
        newest = self._tail[-1].position if self._tail else self._last
        try:
            if self._last_record is None and self._last != ORIGIN:
                self._recognize(await engine.fetch(self._last.number - 1, 1))
            fetched = await engine.fetch(newest.number, _PAGE_BYTES)
        except LogUnavailable:
            await engine.pause(self._retry_s)
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
            raise
        self._retry_s = _FIRST_RETRY_S
        if fetched.log_id != self._log.log_id:
            raise LogForeign(
                f"the log was made anew: it is {fetched.log_id.hex()}, and was "
                f"{self._log.log_id.hex()}"
            )
        is_new = bool(fetched.records)
        if self._contradicts(newest, fetched):
            # What stands on `_last` has vanished, or this server is stale: read it again.
            self._tail.clear()
            self._is_current = not is_new
            return self._page()
        self._extend(newest, fetched)
        self._is_current = not is_new or self._tail[-1].position == fetched.head
        return self._page()

    def _recognize(self, fetched: FetchedRecords) -> None:
        """The record after which it begins, if the log shows it: what follows belongs to its term,
        and a takeover is not earlier."""
        last = self._last
        if fetched.first <= last.number <= fetched.head.number and fetched.records:
            record = decode_record(fetched.records[0], number=last.number)
            if record.position == last:
                self._last_record = record

    def _contradicts(self, newest: RecordPosition, fetched: FetchedRecords) -> bool:
        """Is the newest record of the tail not in the log that was looked at?

        Raises LogTrimmed, LogDamaged where the same is true of a record that is proven.
        """
        head = fetched.head
        if head.number < newest.number:
            # No proof of a loss, even if `_last` is meant: this may be a stale server. Appending
            # is the proof.
            return True
        if head.number == newest.number:
            if head.digest == newest.digest:
                return False
        elif newest.number + 1 < fetched.first:
            if not self._tail:
                raise LogTrimmed(
                    f"the log begins with record {fetched.first}, and this replica has applied "
                    f"those up to {newest.number}"
                )
            return True
        elif fetched.records:
            following = decode_record(fetched.records[0], number=newest.number + 1)
            if following.predecessor == newest.digest:
                return False
        else:
            raise LogDamaged(
                f"the log ends with record {head.number}, and record {newest.number + 1} is missing"
            )
        if not self._tail:
            raise LogDamaged(
                f"record {newest.number} of the log is not the one that this replica has applied"
            )
        return True

    def _extend(self, newest: RecordPosition, fetched: FetchedRecords) -> None:
        """Add what was fetched to the tail, if its chain is unbroken. Raises LogDamaged."""
        before = self._tail[-1] if self._tail else self._last_record
        found: list[LogRecord] = []
        for data in fetched.records:
            record = decode_record(data, number=newest.number + 1)
            if record.log_id != fetched.log_id:
                raise LogDamaged(f"record {record.number} belongs to another log")
            if record.predecessor != newest.digest:
                raise LogDamaged(
                    f"record {record.number} of the log does not stand on record {newest.number}"
                )
            if (
                before is not None
                and record.kind is not RecordKind.TAKEOVER
                and (record.term, record.writer) != (before.term, before.writer)
            ):
                raise LogDamaged(
                    f"record {record.number} of the log is of term {record.term}, which ended "
                    f"before it"
                )
            newest, before = record.position, record
            found.append(record)
        if newest.number == fetched.head.number and newest.digest != fetched.head.digest:
            raise LogDamaged(f"record {newest.number} of the log is not the one its head names")
        self._tail += found

    def _page(self) -> LogPage:
        tail, log, count = self._tail, self._log, 0
        for index, record in enumerate(tail):
            if record.kind is not RecordKind.TAKEOVER:
                count = index
            # Confirmed by this object, or proven to another reader of it.
            if record.position == log.proven:
                count = index + 1
        records, self._tail = tail[:count], tail[count:]
        if records:
            self._last_record = records[-1]
            self._last = records[-1].position
            log.is_proven(self._last)
        newest = self._tail[-1] if self._tail else self._last_record
        if newest is None:
            return LogPage(records, [], self._last, 0)
        return LogPage(records, list(self._tail), newest.position, newest.time_us)
