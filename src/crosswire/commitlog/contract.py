"""A commit group, and the contract of the log that makes it durable.

A group is what becomes durable together or not at all. The hub and its parts add to the open group
during one turn of the event loop; then it is sealed, appended to the log and applied to the store,
and its listeners run. `crosswire.hub.commits` drives that sequence and documents it.

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

from crosswire.envelope import Envelope
from crosswire.errors import HubError, StoreError

__all__ = [
    "AcceptedMessages",
    "Append",
    "CommitGroup",
    "CommitLog",
    "GroupBody",
    "JournalBlock",
    "MessageTarget",
    "Receipt",
]


class GroupBody(Protocol):
    """The ordered list of puts, deletes and range deletions that a group consists of.

    It is all that a replica would have to repeat. The store's engine provides it: its own write
    batch, so that nothing is copied or encoded twice. One that records the calls as bytes instead
    can be sent elsewhere, and repeated here.
    """

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, whatever the key had before."""

    def delete(self, key: bytes) -> None:
        """Remove a key; no error where there is none."""

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove all keys in [begin, end)."""


class AcceptedMessages(msgspec.Struct, frozen=True):
    """Messages that were accepted together at one destination, in order of ids.

    `number` is the destination's, `sizes` are those of their records in bytes.
    """

    number: int
    envelopes: Sequence[Envelope]
    sizes: Sequence[int]

    def part(self, start: int, end: int) -> AcceptedMessages:
        """Those with an index in [start, end)."""
        return AcceptedMessages(self.number, self.envelopes[start:end], self.sizes[start:end])


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
    the disk, not only for the operating system; `urgent` means that somebody waits. `sealed_at` and
    `ended_at` are readings of `perf_counter`, for metrics: its commit began and ended then;
    `waited_s` is for how long the event loop waited for the disk meanwhile.
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
        "newest_id",
        "number",
        "on_written",
        "ranges",
        "receipts",
        "reserved_id",
        "retained",
        "retained_arrivals",
        "saves",
        "sealed_at",
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
        self.sealed_at = 0.0
        self.ended_at = 0.0
        self.waited_s = 0.0

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
