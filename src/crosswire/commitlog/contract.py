"""A commit group, and the contracts of the logs that make it durable.

A group is what becomes durable together or not at all. The hub and its parts add to the open group
during one turn of the event loop; then it is sealed, appended to the log and applied to the store,
and its listeners run. `crosswire.hub.commits` drives that sequence and documents it.

There are two contracts. `CommitLog` is what a hub writes groups to. `ReplicatedLog` is a sequence
of records that several replicas read and one of them, the leader, appends to. The local log is a
`CommitLog` and no more. With a replicated log, the leader's `CommitLog` turns each group into
records, appends them, and applies the group when they are durable (`leader.py`).

This package knows neither hub nor store. What the hub attaches to a group is therefore typed by
what is below the hub (envelopes, errors), by the plain containers in this module and, for queues
and subscriptions, by the Protocol `MessageTarget`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from crosswire.commitlog.body import GroupBody
from crosswire.commitlog.records import LogRecord, RecordPosition
from crosswire.envelope import Envelope
from crosswire.errors import HubError, StoreError

__all__ = [
    "AcceptedMessages",
    "Append",
    "CommitGroup",
    "CommitLog",
    "JournalBlock",
    "LogBookmark",
    "LogPage",
    "LogState",
    "MessageTarget",
    "Receipt",
    "RecordReader",
    "ReplicaState",
    "ReplicatedLog",
]


class AcceptedMessages(msgspec.Struct, frozen=True, gc=False):
    """Messages that were accepted together at one destination, in order of ids.

    `number` is the destination's, `records` are what the store has of them, `sizes` the lengths of
    these in bytes.
    """

    number: int
    envelopes: Sequence[Envelope]
    records: Sequence[bytes]
    sizes: Sequence[int]

    def part(self, start: int, end: int) -> AcceptedMessages:
        """Those with an index in [start, end)."""
        return AcceptedMessages(
            self.number,
            self.envelopes[start:end],
            self.records[start:end],
            self.sizes[start:end],
        )


class MessageTarget(Protocol):
    """Where messages become visible when their group is committed: a queue, a subscription."""

    def release(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These are durable: consumers may get them."""

    def withdraw(self, runs: Iterable[AcceptedMessages]) -> None:
        """These could not be written: they were never accepted."""


class JournalBlock(msgspec.Struct, frozen=True, gc=False):
    """A group's block of the ledger: `rows` rows, numbered from `first_row`."""

    first_row: int
    rows: int
    data: bytes


class _Completion:
    """Something that ends once, with or without an error.

    Not an asyncio.Future: a callback that is added runs in the turn in which this ends, not in the
    next one, and without a loop too.
    """

    __slots__ = ("_callbacks", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: HubError | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    def finish(self, error: HubError | None = None) -> list[Callable[[Any], None]]:
        """End it. Returns the callbacks, which the caller has to call with this object."""
        self.done = True
        self.error = error
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def _wait(self) -> Generator[Any, None, None]:
        if not self.done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake(_ended: object) -> None:
                # The task that awaited this may have been cancelled.
                if not waiter.done():
                    waiter.set_result(None)

            self._callbacks.append(wake)
            yield from waiter
        if self.error is not None:
            raise self.error


class Receipt(_Completion):
    """What a producer holds until its batch is durable.

    `ids` are the messages' own, 0 for those that were refused; `refused` has their errors by index.
    `done` is set when the others are durable, or need not be. If `error` is set then, the group
    could not be written and none of the batch was accepted. Await it, or add a callback: either
    happens once per batch, on the event loop.
    """

    __slots__ = ("ids", "refused")

    def __init__(self, ids: list[int], refused: dict[int, HubError]) -> None:
        super().__init__()
        self.ids = ids
        self.refused = refused

    def add_done_callback(self, callback: Callable[[Receipt], None]) -> None:
        """Call it when the receipt is done; at once, if it is."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, list[int]]:
        """The ids. Raises the error that kept the batch from becoming durable."""
        yield from self._wait()
        return self.ids


class Append(_Completion):
    """A group on its way into the log. Await it, or add a callback; it may be done from the start.

    Once it is done without an error the group is durable, or with the operating system if `sync` is
    not set; nothing else acknowledges a group as that.
    """

    __slots__ = ()

    error: StoreError | None

    def add_done_callback(self, callback: Callable[[Append], None]) -> None:
        """Call it when the append is done; at once, if it is."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, None]:
        """Returns when the group is durable. Raises StoreError where it can't be written."""
        return self._wait()


class CommitGroup:
    """All that becomes durable together, and what has to be done when it is, or can't be.

    The store collects changes in it and completes `body` when the group is sealed. `sync` asks for
    the disk, not only for the operating system; `urgent` means that somebody waits; `is_large` that
    it has a message of a MiB or more, which takes long to write. `size_bytes` is that of producers'
    messages, `pending_bytes` that of the whole, where it waits for its append after it was sealed.
    `sealed_at` and `ended_at` are readings of `perf_counter`, for metrics: its commit began and
    ended then; `waited_s` is for how long the event loop waited for the disk meanwhile.
    `ended_now` is the hub's time when it ended.
    """

    __slots__ = (
        "accepted_ids",
        "appended",
        "appended_count",
        "arrivals",
        "block",
        "body",
        "copies",
        "ended_at",
        "ended_now",
        "is_large",
        "newest_id",
        "number",
        "on_written",
        "pending_bytes",
        "ranges",
        "receipts",
        "reserved_id",
        "retained",
        "retained_arrivals",
        "saves",
        "sealed_at",
        "size_bytes",
        "stored",
        "sync",
        "urgent",
        "waited_s",
        "written",
    )

    def __init__(self, body: GroupBody) -> None:
        self.body = body
        self.number = 0
        self.sync = False
        self.urgent = False
        self.is_large = False
        self.size_bytes = 0
        self.sealed_at = 0.0
        self.ended_at = 0.0
        self.ended_now = 0.0
        self.waited_s = 0.0
        self.pending_bytes = 0

        # What the store collects. Messages are put into the body at once; the rest is coalesced
        # here until the group is sealed. If the group can't be written, the ranges of what was
        # appended are deleted with the next one: the write may have succeeded, and the sync failed.
        self.appended: list[tuple[bytes, bytes]] = []
        self.appended_count = 0
        self.saves: dict[bytes, bytes | None] = {}
        self.ranges: list[tuple[bytes, bytes]] = []
        self.copies: dict[bytes, bytes | None] = {}
        self.reserved_id = 0
        self.block: JournalBlock | None = None

        # What the hub attaches. `arrivals` are lost with a group that can't be written, their
        # producers get the error; `retained_arrivals` go into the next group instead. `stored` and
        # `retained` are the same messages once each, whatever the number of targets, for the lake;
        # `accepted_ids` those whose step "accepted" is void if the group fails.
        self.arrivals: dict[MessageTarget, list[AcceptedMessages]] = {}
        self.retained_arrivals: dict[MessageTarget, list[AcceptedMessages]] = {}
        self.stored: list[AcceptedMessages] = []
        self.retained: list[AcceptedMessages] = []
        self.accepted_ids: list[list[int]] = []
        self.newest_id = 0
        self.receipts: list[Receipt] = []
        self.written: list[Receipt] = []
        self.on_written: Callable[[], None] | None = None
        """Called by a log in which a group is with the operating system before it is durable. What
        waits for no more than that (`written`) is finished then; other logs never call it."""

    @property
    def has_changes(self) -> bool:
        """Is there anything to write, or an earlier write to be synced?"""
        return bool(
            self.appended or self.saves or self.ranges or self.sync or self.block is not None
        )


class CommitLog(ABC):
    """Makes commit groups durable, one at a time.

    The next group is appended after the last one's `Append` is done. Call everything on the event
    loop's thread.
    """

    lazy_s: float = 0.005
    """How long what nobody waits for is gathered before it is appended."""
    is_always_durable: bool = False
    """Is a group durable when its append is done, even if it does not ask for a sync?"""
    group_bytes: int = 0
    """The size at which a group is closed while another one is in flight; 0 for none. A log with
    one has no append that fails."""
    pending_limit_bytes: int = 0
    """How much may wait for this log in memory before nothing more is taken in; 0 for no limit."""
    pending_bytes: int = 0
    """The size of the group that is being appended, where there is such a limit."""

    @abstractmethod
    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on `append` may finish later, on this loop. Without it, it always blocks."""

    @abstractmethod
    def append(self, group: CommitGroup, *, blocking: bool = False) -> Append:
        """Make a sealed group durable, and applied to the store. One step: await it, or add a
        callback.

        It is done at once where waiting costs less than being called later, and with `blocking`.
        If it fails, with StoreError, it has failed for good: nothing of the group is acknowledged,
        and the caller takes it back.
        """

    @abstractmethod
    def stop(self) -> None:
        """Release threads and connections. No group may be on its way."""


class LogBookmark(msgspec.Struct, frozen=True):
    """What a data directory remembers of its log: which one it is, and how far it was applied.

    `system` and `timeline` identify the servers that were used last: another system is another
    log, and a server of an older timeline is one that was replaced.
    """

    log_id: bytes
    position: RecordPosition
    system: str = ""
    timeline: int = 0


class LogState(msgspec.Struct, frozen=True):
    """How a log is now. `unsafe` is why it can't confirm anything, "" if it can.

    `first` is the number of the oldest record that is there; `address` the server that was asked.
    """

    log_id: bytes
    head: RecordPosition
    first: int
    size_bytes: int
    system: str
    timeline: int
    address: str
    unsafe: str = ""


class LogPage(msgspec.Struct, frozen=True):
    """What one look at the log found.

    `records` are proven to be durable: apply them. `tail` are all that stand on them and can be
    seen, each time anew. They may still vanish in a failover of the log's servers. They are for
    those who wait: is there a leader, what is its time, whom does a hand-over name? `newest` is the
    last of all, which a takeover would stand on, and `time_us` its time: also if the reader begins
    after it. It is 0 only while the log has not shown it.
    """

    records: list[LogRecord]
    tail: list[LogRecord]
    newest: RecordPosition
    time_us: int


class ReplicaState(msgspec.Struct, frozen=True):
    """What a replica reports of itself, beside the log.

    `synced` is the last record that is on its disk, `format` the newest that it reads. `writer`
    identifies its process, so that two replicas of one name are found. `age_s` is how long ago it
    reported, by the log's clock; it is set by `replicas`.
    """

    name: str
    address: str
    version: str
    format: int
    synced: int
    writer: bytes
    time_us: int
    role: str = "standby"
    age_s: float = 0.0


class RecordReader(ABC):
    """Follows a log from a position on. It stays usable after LogUnavailable."""

    @abstractmethod
    async def next_page(self) -> LogPage:
        """What is new, or an empty page when the log answered and nothing is.

        It returns at once while there are more records, and otherwise waits a moment before it
        looks. An empty page is the proof that the log answers: silence of a leader counts only from
        one page to the next. Raises LogUnavailable (after a moment, so that callers may simply
        repeat), LogTrimmed, LogDamaged, LogForeign, LogTooNew.
        """


class ReplicatedLog(ABC):
    """A sequence of records that is kept by an engine with copies of its own.

    **The log is the lock.** A record names its predecessor by number and digest, and is appended
    only directly on top of it. A leader that was replaced can append nothing.

    **What is proven.** Reading proves neither that a record is absent (a stale server) nor that it
    is durable (a server shows what its copies don't have yet). A record is proven to be durable by

    - its own confirmed append, or that of a later record, by this object;
    - a later record that is not a takeover. Its writer appended it after its predecessor was
      confirmed. A takeover proves nothing about what it stands on: its writer has only seen that.

    All of it is called on one event loop. `log_id` is empty until it is open.
    """

    log_id: bytes

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Why the current append is not answered yet; "" if there is no reason to worry."""

    @property
    @abstractmethod
    def proven(self) -> RecordPosition:
        """The newest record that is known to be durable."""

    @abstractmethod
    async def create(self, genesis: LogRecord) -> None:
        """Make the log, with this first record. It is durable when this returns; it is not opened.

        Raises LogForeign if there is a log already, LogUnsafe, LogUnavailable, LogRefused.
        """

    @abstractmethod
    async def open(self, known: LogBookmark | None = None) -> LogState:
        """Check the log's identity, format and settings, before anything else is called.

        With `known`, it must be the same log and have that record still, or a later one. Raises
        LogForeign, LogUnsafe, LogTooNew, LogDamaged; LogUnavailable or LogRefused if it can't be
        asked.
        """

    @abstractmethod
    async def append(self, record: LogRecord) -> None:
        """Returns when the record is durable and replicated. The next one is appended after that.

        Raises LogConflict when it never will be at its number, or another writer's record stands on
        it: that writer leads. LogDamaged when the record that it stands on was confirmed and is
        gone; LogForeign when the log was made anew. All of them end leadership at once.

        There is no other answer. While the outcome is not known (no connection, settings that don't
        hold, a confirmation that did not arrive), the same bytes are offered again. Cancelling it
        leaves the outcome open: this object then takes the same record again, or a takeover, and
        nothing else.
        """

    @abstractmethod
    def read(self, after: RecordPosition) -> RecordReader:
        """Follow the log after a record that was applied, `records.ORIGIN` for all of it.

        Several may read. After a LogConflict, continue with the reader that there is: what was in
        its tail and has vanished is no longer in the next page.
        """

    @abstractmethod
    async def report(self, state: ReplicaState) -> None:
        """Replace what this replica reported before. Raises LogNameTaken, LogUnavailable."""

    @abstractmethod
    async def replicas(self) -> list[ReplicaState]:
        """What all replicas reported last, by name. Raises LogUnavailable."""

    @abstractmethod
    async def remove(self, name: str) -> bool:
        """Forget a replica; was there one? Raises LogUnavailable."""

    @abstractmethod
    async def trim(self, upto: int) -> int:
        """Remove records up to this number, never the newest. Returns the first that is left: an
        engine may keep more than it has to. Raises LogUnavailable.

        The caller knows that nobody needs them: see `replicas`.
        """

    @abstractmethod
    async def state(self) -> LogState:
        """For status, metrics and limits. Raises LogUnavailable, LogForeign."""

    @abstractmethod
    def bookmark(self, position: RecordPosition) -> LogBookmark:
        """What a data directory is to remember when it has applied this record."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections. Cancel an append that is under way before."""
