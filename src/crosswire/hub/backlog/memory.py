"""The memory window of a backlog: which messages are in memory, and when more are read.

    on disk    ids above `loaded`, up to `visible`: they are read when there is room
    ready      in memory, in order, until a consumer takes them
    held       with a consumer, until they are settled, refused or returned
    delayed    refused, until their delay is over

Memory is limited twice by `window_bytes`: what is ready or delayed, and what consumers hold
together. Each limit lets one message pass that is larger than what is left, or it could never be
delivered: more is read while less than half of the window is used, so always when nothing is ready
or delayed, and a consumer that holds nothing gets a message however much the others hold. So a
backlog needs at most twice `window_bytes`, a message for each consumer, and one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final, Protocol

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.envelope import Envelope
from crosswire.hub.attachment import Consumer, Item
from crosswire.hub.backlog.logs import MessageLog
from crosswire.hub.commits import StoredBacklog
from crosswire.hub.core import Core
from crosswire.hub.cursor import Cursor, UnsettledMessage
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.policies import Retry
from crosswire.store.contract import Page

__all__ = ["PAGE", "BacklogMemory", "BacklogOwner"]

PAGE: Final = 256
"""How many messages are read from the store at once, at most."""
_PAGE_BYTES: Final = 1 << 20
_MESSAGE_BYTES: Final = 800
"""What a message takes in memory beside its record, roughly: of the smallest ones, nearly all."""


class BacklogOwner(StoredBacklog, Protocol):
    """What the parts of a backlog need of the queue or subscription that they belong to."""

    retry: Retry
    stopped: str

    @property
    def dead_letters(self) -> str:
        """The queue of messages that could not be delivered."""

    @property
    def is_filtered(self) -> bool:
        """Whether a consumer has a filter, and may leave messages that others take."""

    def wants(self, envelope: Envelope) -> bool:
        """Whether this message is for the backlog at all."""

    def note_reclaimed(self, identifier: int) -> None:
        """Retention has deleted messages up to this id that should have been read next."""

    def on_all_loaded(self) -> None:
        """Nothing is on disk only, so the counters can be corrected."""

    def discard(self, item: Item) -> None:
        """It is settled, whatever the reason, and leaves memory."""

    def expire(self, item: Item, now_us: int) -> None:
        """It is no longer worth delivering; the caller has removed it from `ready`."""

    def make_room(self, consumer: Consumer, count: int, now: float) -> None:
        """`count` messages are no longer with a consumer."""

    def check(self) -> None:
        """Something changed that may allow a read or a delivery."""

    def note(
        self,
        step: Step,
        now: float,
        ids: Iterable[int],
        *,
        peer: LedgerPeer | None = None,
        attempt: int = 0,
        detail: str = "",
    ) -> None:
        """Enter a step of these messages into the ledger."""


class BacklogMemory:
    """`items` are all messages in memory by id, in order of ids; `ready` those for consumers.

    `size_bytes` is the size of all of them, `held_bytes` of those that consumers hold.
    """

    def __init__(
        self,
        core: Core,
        cursor: Cursor,
        owner: BacklogOwner,
        log: MessageLog,
        *,
        has_filter: bool,
        window_messages: int,
        window_bytes: int,
    ) -> None:
        self._is_forgotten = False
        self.log = log
        self.loaded = cursor.upto
        self.visible = 0
        self.items: dict[int, Item] = {}
        self.ready: deque[Item] = deque()
        self.returns = 0
        """How many times a message became ready again."""
        self.size_bytes = 0
        self.held_bytes = 0
        self.window_messages = window_messages
        self.window_bytes = window_bytes
        self._core = core
        self._windows = core.windows
        self._commits = core.commits
        self._loop = core.loop
        self._cursor = cursor
        self._owner = owner
        self._has_filter = has_filter
        self._is_reading = False

    @property
    def waiting_bytes(self) -> int:
        """The size of what no consumer holds: ready or delayed."""
        return self.size_bytes - self.held_bytes

    @property
    def accounted_bytes(self) -> int:
        """What the hub's windows count for these messages."""
        return self.size_bytes + len(self.items) * _MESSAGE_BYTES

    def takes(self, count: int = 1) -> bool:
        """Whether this many messages could be added now, without passing over any on disk."""
        return (
            self.loaded >= self.visible
            and len(self.ready) + count <= self.window_messages
            and self.size_bytes - self.held_bytes < self.window_bytes
            and (self._windows.held_bytes < self._windows.limit_bytes or not self.ready)
        )

    def add_runs(self, runs: Iterable[AcceptedMessages]) -> None:
        """Add messages, in order of ids, as far as there is room; the rest stays on disk only."""
        windows = self._windows
        for run in runs:
            count, size = len(run.sizes), sum(run.sizes)
            # `takes` for all of it, without a call: a group may be for thousands of queues.
            if (
                self.loaded >= self.visible
                and len(self.ready) + count <= self.window_messages
                and self.size_bytes - self.held_bytes + size <= self.window_bytes
                and (windows.held_bytes < windows.limit_bytes or not self.ready)
            ):
                self._add_run(run, size)
            elif not self.takes():
                self.visible = run.envelopes[-1].id
            else:
                for index, envelope in enumerate(run.envelopes):
                    if self.takes():
                        self._add_run(run.part(index, index + 1), run.sizes[index])
                    else:
                        self.visible = envelope.id

    def _add_run(self, run: AcceptedMessages, size: int) -> None:
        """There is room for all of it, and nothing on disk comes before it."""
        items, ready, number = self.items, self.ready, run.number
        if self._has_filter:
            for envelope, own in zip(run.envelopes, run.sizes, strict=True):
                # Before `wants`, which may write a snapshot up to here.
                self.loaded = self.visible = envelope.id
                if self._owner.wants(envelope):
                    self.add(Item(envelope.id, number, envelope, own))
            return
        for envelope, own in zip(run.envelopes, run.sizes, strict=True):
            identifier = envelope.id
            items[identifier] = item = Item(identifier, number, envelope, own)
            ready.append(item)
        # As `grow`, without a call for each run.
        self.size_bytes += size
        self._windows.held_bytes += size + len(run.sizes) * _MESSAGE_BYTES
        self.loaded = self.visible = run.envelopes[-1].id

    def add(self, item: Item) -> None:
        """Add a message after all others."""
        self.items[item.id] = item
        self.grow(item.size, 1)
        self.ready.append(item)

    def put_back(self, item: Item) -> None:
        """It is ready again, before all others."""
        self.returns += 1
        item.returned = self.returns
        self.ready.appendleft(item)

    def grow(self, size: int, count: int = 0) -> None:
        """It holds this many bytes and messages more, or less."""
        self.size_bytes += size
        self._windows.held_bytes += size + count * _MESSAGE_BYTES

    def forget(self) -> None:
        """Drop everything: the queue or subscription is deleted."""
        self._is_forgotten = True
        self.grow(-self.size_bytes, -len(self.items))
        self.held_bytes = 0
        self.items.clear()
        self.ready.clear()

    def remove_ready(self, ids: Collection[int]) -> None:
        """These are no longer for consumers to take; they stay in `items`."""
        self.ready = deque(item for item in self.ready if item.id not in ids)

    def head(self) -> int:
        """The least id that is not settled: nothing below it is needed any more."""
        # Items are added in order of ids, and a dictionary keeps that order.
        return next(iter(self.items), self.loaded + 1)

    def unsettled(self) -> list[UnsettledMessage]:
        """All messages in memory, as a snapshot of the cursor has them."""
        # Nearly always in order already, which to find out takes a fraction of sorting the items.
        items, ids = self.items, sorted(self.items)
        return [UnsettledMessage(items[each].number, each, items[each].attempts) for each in ids]

    # Reading.

    def check(self) -> None:
        """Touch the backlog if more can be read, and have a commit touch it if more will be."""
        if self.loaded < self.visible:
            if self.visible > self._commits.committed_id:
                self._commits.await_commit(self._owner)
            if self._needs_read():
                self._loop.touch(self._owner)

    def _needs_read(self) -> bool:
        """Whether there is room for messages that are on disk and committed.

        Only below half of the window, so that pages are large. At least one message always has
        room: a window of one has no half, and a message may be larger than the window.
        """
        return (
            self.loaded < self.visible
            and not self._is_reading
            and self.loaded < self._commits.committed_id
            and (not self.ready or len(self.ready) < self.window_messages // 2)
            and (
                (2 * self.waiting_bytes < self.window_bytes and not self._windows.is_full)
                or not self.waiting_bytes
            )
        )

    def fill(self) -> None:
        """Read more while there is room. Raises what the store raises; then it is read later."""
        if self.loaded >= self.visible or self._owner.stopped or self._is_forgotten:
            return
        while self._needs_read():
            self._is_reading = True
            try:
                self.log.read(
                    self._owner,
                    after=self.loaded,
                    upto=min(self.visible, self._commits.committed_id),
                    count=(
                        1
                        if self._windows.is_full
                        else max(min(PAGE, self.window_messages - len(self.ready)), 1)
                    ),
                    size_bytes=max(min(_PAGE_BYTES, self.window_bytes - self.waiting_bytes), 1),
                    done=self._add_page,
                    failed=self._read_failed,
                    ask_again=self._ask_again,
                )
            except Exception:
                self._read_failed()
                raise

    def _ask_again(self) -> None:
        self._is_reading = False

    def _read_failed(self) -> None:
        # Nothing was read, and no other event would start this read again.
        self._is_reading = False
        self._core.read_again(self._owner)

    def read_upto(self, identifier: int) -> None:
        """Read up to this id, beyond the limits of the window if need be."""
        upto = min(self.visible, identifier)
        while self.loaded < upto:
            before = self.loaded
            self.log.read_now(after=before, upto=upto, count=PAGE, done=self._add_page)
            if self.loaded == before:
                break

    def _add_page(self, page: Page, reclaimed: int) -> None:
        self._is_reading = False
        if self._is_forgotten:
            # While the page was being read.
            return
        if reclaimed > self.loaded:
            self._owner.note_reclaimed(reclaimed)
        settled_later = self._cursor.later
        attempts = self._cursor.refused_later
        for number, identifier, record in page.records:
            if identifier in settled_later:
                settled_later.discard(identifier)
                continue
            # A purge while the page was being read has moved `loaded` past it.
            if identifier in self.items or identifier <= self.loaded:
                continue
            envelope = self.decode(number, identifier, record)
            if envelope is not None and self._owner.wants(envelope):
                item = Item(identifier, number, envelope, len(record))
                if attempts:
                    item.attempts = attempts.pop(identifier, [])
                    item.delivered = len(item.attempts)
                self.add(item)
        self.loaded = max(self.loaded, page.last)
        if self.loaded >= self.visible:
            # Of what is settled some is deleted already, and so on no page.
            settled_later.clear()
            self._owner.on_all_loaded()
        self._loop.touch(self._owner)

    def decode(self, number: int, identifier: int, record: bytes) -> Envelope | None:
        """A stored message; None if it is damaged, which settles it: it can't be delivered."""
        envelope = self._core.damage.decode_or_set_aside(number, identifier, record)
        if envelope is None:
            self._cursor.settle(identifier)
        return envelope
