"""A disk that keeps, delays, fails and forgets, and the thread that syncs it.

It has the behaviour that the store's engine is trusted with: groups are written in order, a sync
makes all that was written durable, and after a power cut the disk holds a prefix of what was
written that includes everything synced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final

from crosswire.commitlog.local import Syncer
from crosswire.errors import StoreError, StoreFailed, StoreFull
from crosswire.store.damage import DamageList
from crosswire.store.memory import MemoryDisk, MemoryStore, Operation
from crosswire.testing.simulation.durable import DurableMessages, MessageKey

__all__ = ["SimulatedDisk", "SimulatedStore", "VirtualSyncer"]

_MESSAGES: Final = b"m"
"""How the keys of messages begin."""
_DESTINATION: Final = 5
"""How many bytes of such a key name the destination."""
_FAILS_S: Final = (0.05, 0.5)
_COPIES_LOST: Final = 0.7
_MARK_LOST: Final = 0.9


class SimulatedDisk(MemoryDisk):
    """A `MemoryDisk` whose faults come from the world."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.is_full = False
        self.failing_writes = 0
        """How many of the next writes fail."""
        self.failing_syncs = 0
        self.sync_s = (0.0005, 0.003)
        """The least and the greatest time of a sync."""
        self.durable = DurableMessages()
        self.changes = 0
        """How many times what it has was changed."""
        self._doubled: list[tuple[MessageKey, bytes, bytes]] = []
        self.is_slow_to_fail = False
        """Whether a sync that fails takes as long as disks may try."""
        self._stored: dict[tuple[bytes, MessageKey], bytes] = {}
        """Under which key each message was synced last, by destination."""

    @property
    def is_well(self) -> bool:
        """Whether it would take what is written."""
        return not (self.is_full or self.failing_writes or self.failing_syncs)

    def write(self, operations: list[Operation]) -> None:
        """Apply a group, unsynced. Raises StoreError."""
        if self.is_full:
            raise StoreFull("no space left on the simulated disk")
        if self.failing_writes:
            self.failing_writes -= 1
            raise StoreFailed("the simulated disk failed to write")
        self.changes += 1
        super().write(operations)

    def sync(self) -> None:
        """Make all that was written survive a power cut. Raises StoreError."""
        if self.failing_syncs:
            self.failing_syncs -= 1
            raise StoreFailed("the simulated disk failed to sync")
        super().sync()

    def apply_synced(self, operations: list[Operation]) -> None:
        """Make this group survive a power cut."""
        super().apply_synced(operations)
        for key, value, _ in operations:
            if value is not None:
                found = self.durable.note(value)
                if key.startswith(_MESSAGES):
                    self._note_stored(key, found)

    def _note_stored(self, key: bytes, found: list[MessageKey]) -> None:
        for message in found:
            where = key[:_DESTINATION], message
            before = self._stored.get(where, key)
            if before != key:
                self._doubled.append((message, before, key))
            self._stored[where] = key

    def doubled_messages(self) -> list[MessageKey]:
        """Those that it has twice at their destination, with two ids; each is looked at once."""
        doubled, self._doubled = self._doubled, []
        rows = self.rows
        # One of a group that failed is deleted by the group that stores it again.
        return [message for message, one, other in doubled if one in rows and other in rows]

    def stores(self, message: MessageKey) -> bool:
        """Whether it has this message at its destination."""
        return any(
            key in self.rows for (_, stored), key in self._stored.items() if stored == message
        )

    def damage(self, count: int, *, strength: float) -> list[bytes]:
        """Some stored messages can't be read any more, and files beside the store are lost; gives
        the records of those messages."""
        stored = [key for key in self.keys if key.startswith(_MESSAGES)]
        chosen = self._random.sample(stored, min(count, len(stored)))
        self.unreadable.update(chosen)
        if strength > _COPIES_LOST:
            self.copies = None
        if strength > _MARK_LOST:
            self.mark = None
        return [self.rows[key] for key in chosen]

    def replace(self, rows: dict[bytes, bytes]) -> None:
        """Have these rows instead of all others, synced."""
        self.changes += 1
        self.unsynced.clear()
        self.unreadable.clear()
        self.damages = DamageList()
        self.rows, self._synced = dict(rows), dict(rows)
        self.keys = sorted(rows)

    def cut_power(self) -> None:
        """Keep what was synced, and by chance some of what was written after it, in order."""
        self.changes += 1
        kept = self.unsynced[: self._random.randint(0, len(self.unsynced))]
        for each in kept:
            self.apply_synced(each)
        super().cut_power()


class SimulatedStore(MemoryStore):
    """A `MemoryStore` whose ids run out while a disk fails, as those of a busy hub do."""

    _id_block = 32


class VirtualSyncer(Syncer):
    """Syncs after a while instead of on a thread."""

    def __init__(
        self, sync: Callable[[], StoreError | None], disk: SimulatedDisk, random: Random
    ) -> None:
        super().__init__(sync, 0.0)
        self._run_sync = sync
        self._disk = disk
        self._random = random
        self._loop: asyncio.AbstractEventLoop | None = None
        self._order: asyncio.TimerHandle | None = None
        self._done: Callable[[StoreError | None], None] | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, done: Callable[[StoreError | None], None]
    ) -> None:
        """Nothing to start: orders are timers of the loop."""
        self._loop, self._done = loop, done

    def stop(self) -> None:
        """Do the order that is under way, as a thread would before it ends."""
        if self._order is not None:
            self._order.cancel()
            self._sync_ordered()

    def order(self) -> None:
        """Sync later."""
        assert self._loop is not None
        disk = self._disk
        is_slow = disk.failing_syncs and disk.is_slow_to_fail
        sync_s = self._random.uniform(*(_FAILS_S if is_slow else disk.sync_s))
        self._order = self._loop.call_later(sync_s, self._sync_ordered)

    def _sync_ordered(self) -> None:
        self._order = None
        error = self._run_sync()
        assert self._done is not None
        self._done(error)
