"""The commit path: what was accepted and settled together reaches the disk as one group.

Nothing is written per message. Whatever happens between two commits is collected in the open group;
the store seals it, writes and syncs it, and calls back here:

    _before_commit   the group is closed: queues and subscriptions write what was settled, the
                     ledger its block; what happens from now on belongs to the next group
    _after_write     the group is with the operating system: it survives the process
    _after_commit    it is on disk, or could not be written
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from crosswire.envelope import Envelope
from crosswire.errors import HubError, StoreError
from crosswire.hub.damage import DamageReports
from crosswire.hub.dispatch import Dispatcher, DispatchLoop
from crosswire.hub.ledger import Ledger
from crosswire.hub.receipt import Receipt
from crosswire.store.contract import Store, refusal

__all__ = ["AcceptedMessages", "CommitPath", "CommitReader", "OpenGroup", "StoredBacklog"]


class AcceptedMessages(msgspec.Struct, frozen=True):
    """Messages that were accepted together at one destination, in order of ids.

    `number` is the destination's, `sizes` are those of their records.
    """

    number: int
    envelopes: Sequence[Envelope]
    sizes: Sequence[int]

    def part(self, start: int, end: int) -> AcceptedMessages:
        """Those from index `start` up to, not including, `end`."""
        return AcceptedMessages(self.number, self.envelopes[start:end], self.sizes[start:end])


class CommitReader(Dispatcher, Protocol):
    """A dispatcher that reads from the store, which returns only what is committed."""

    @property
    def visible(self) -> int:
        """The last id that it is to read."""


class StoredBacklog(CommitReader, Protocol):
    """A queue or named subscription, as far as commits concern it."""

    def write(self) -> None:
        """Save what was settled and refused since the last commit, into the sealed group."""

    def release(self, runs: Iterable[AcceptedMessages], now: float) -> None:
        """These are committed: they may be delivered."""

    def withdraw(self, runs: Iterable[AcceptedMessages]) -> None:
        """These could not be written: they were never accepted."""


class OpenGroup:
    """What the hub has to do when the open group is committed, or can't be."""

    __slots__ = (
        "accepted",
        "accepted_messages",
        "block",
        "kept",
        "newest",
        "receipts",
        "retained",
        "stored",
        "written",
    )

    def __init__(self) -> None:
        self.accepted_messages: dict[StoredBacklog, list[AcceptedMessages]] = {}
        self.kept: dict[StoredBacklog, list[AcceptedMessages]] = {}
        self.receipts: list[Receipt] = []
        self.written: list[Receipt] = []
        self.accepted: list[list[int]] = []
        self.stored: list[AcceptedMessages] = []
        self.retained: list[AcceptedMessages] = []
        self.block: tuple[int, int, bytes] | None = None
        self.newest = 0


class CommitPath:
    """The open group, the group on its way to the disk, and who is called when it is there.

    `committed_id` is the newest id that is on disk; `listeners` are called with every committed
    group, after its messages are visible and its receipts done.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        loop: DispatchLoop,
        damage: DamageReports,
        clock: Callable[[], float] | None,
    ) -> None:
        self.group = OpenGroup()
        self.committed_id = store.newest_id
        self.listeners: list[Callable[[OpenGroup], None]] = []
        self._store = store
        self._ledger = ledger
        self._loop = loop
        self._damage = damage
        self._clock = clock
        self._flight: OpenGroup | None = None
        self._changed: dict[StoredBacklog, None] = {}
        self._readers: dict[CommitReader, None] = {}
        store.before_commit = self._before_commit
        store.after_write = self._after_write
        store.after_commit = self._after_commit

    def connect(self) -> None:
        """Have the store call this commit path, after another hub had used the same store."""
        self._store.before_commit = self._before_commit
        self._store.after_write = self._after_write
        self._store.after_commit = self._after_commit

    def committed(self) -> Receipt:
        """Done when all that was requested so far, settlements included, is on disk."""
        receipt = Receipt([], {})
        self.group.receipts.append(receipt)
        self._store.request()
        return receipt

    def written(self) -> Receipt:
        """Done when what was saved so far is with the operating system: it survives the process,
        though not a power failure."""
        receipt = Receipt([], {})
        self.group.written.append(receipt)
        self._store.request(sync=False)
        return receipt

    def finish(self, receipt: Receipt, error: HubError | None = None) -> None:
        """Its batch is on disk, or with `error` never will be: call those who wait for it."""
        for callback in receipt.finish(error):
            self._loop.callbacks.run("receipt", callback, receipt)

    def changed(self, backlog: StoredBacklog, *, request: bool = True) -> None:
        """It has something to write; nobody waits for it."""
        self._changed[backlog] = None
        if request:
            self._store.request(urgent=False)

    def await_commit(self, reader: CommitReader) -> None:
        """Some of what it is to read is not committed yet: commits touch it until all is."""
        self._readers[reader] = None

    def forget(self, backlog: StoredBacklog) -> None:
        """It is removed for good: nothing of it is written or released any more."""
        self._changed.pop(backlog, None)
        self._readers.pop(backlog, None)
        self._loop.forget(backlog)
        for group in (self.group, self._flight):
            if group is not None:
                group.accepted_messages.pop(backlog, None)
                group.kept.pop(backlog, None)

    def _before_commit(self) -> None:
        # Before anything that could fail: whoever waits for this group must be in it.
        self._flight, self.group = self.group, OpenGroup()
        self._flight.newest = self._store.newest_id
        changed, self._changed = self._changed, {}
        for backlog in changed:
            self._loop.callbacks.run("write", backlog.write)
        sealed = self._ledger.seal(self._store.next_row)
        if sealed is not None:
            block, rows = sealed
            self._store.journal(block, rows)
            self._flight.block = (self._store.next_row, rows, block)

    def _after_write(self) -> None:
        assert self._flight is not None
        receipts, self._flight.written = self._flight.written, []
        for receipt in receipts:
            self.finish(receipt)

    def _after_commit(self, error: StoreError | None) -> None:
        """What became visible is released first: it must not depend on who waits for the commit.

        Then receipts, then listeners. One of them that raises keeps nothing from the others.
        """
        group, self._flight = self._flight, None
        assert group is not None
        loop = self._loop
        if self._clock is not None:
            loop.now = max(loop.now, self._clock())
        now = loop.now
        if error is not None:
            self._fail_group(group, error)
        else:
            self._ledger.committed()
            self.committed_id = group.newest
            self._release(group, now)
        loop.pump(now)
        refused = None if error is None else refusal(error)
        for receipt in (*group.receipts, *group.written):
            self.finish(receipt, refused)
        if error is None:
            for listener in self.listeners:
                loop.callbacks.run("commit listener", listener, group)
        loop.pump(now)

    def _release(self, group: OpenGroup, now: float) -> None:
        """What was committed can be seen now."""
        for backlog, kept in group.kept.items():
            group.accepted_messages.setdefault(backlog, []).extend(kept)
            group.accepted_messages[backlog].sort(key=lambda run: run.envelopes[0].id)
        for backlog, runs in group.accepted_messages.items():
            self._loop.callbacks.run("release", backlog.release, runs, now)
        for reader in list(self._readers):
            self._loop.touch(reader)
            if reader.visible <= self.committed_id:
                del self._readers[reader]

    def _fail_group(self, group: OpenGroup, error: StoreError) -> None:
        """Producers get the error; all else goes into the next group."""
        self._damage.report(error)
        self._ledger.failed({each for ids in group.accepted for each in ids})
        for backlog, runs in group.accepted_messages.items():
            backlog.withdraw(runs)
        for backlog, kept in group.kept.items():
            self.group.kept[backlog] = kept + self.group.kept.get(backlog, [])
        self.group.retained[:0] = group.retained
