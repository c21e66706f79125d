"""The lake feed: a commit listener that writes what was committed to the lake, exactly once.

A seal is a range of the journal's rows, with the messages that were stored along with them. Three
steps make each row appear once, wherever the hub is killed:

    prepare   the files are written under temporary names, on a thread
    seal      the range is committed to the store (`LakeSeals.save`)
    publish   the files are renamed

A kill before the seal leaves temporary files, which the next start removes. A kill after it leaves
a seal without files: the next start makes the same files again from the store, which deletes
nothing that is not published.

Groups are kept in memory until they are sealed. Where that is too much, or a group was missed, the
feed *lags*: it drops what it has and reads from the store, until it has caught up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from crosswire.commitlog.contract import CommitGroup
from crosswire.config import LakeSettings
from crosswire.envelope import MICROSECONDS
from crosswire.errors import CrosswireError, LakeError, RecordDamaged, StoreError
from crosswire.hub.commits import CommitStage
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import Step
from crosswire.hub.seals import LakeGap, Seal
from crosswire.hub.turns import QUANTUM_S
from crosswire.lake.catalog import expire
from crosswire.lake.files import FinishedFile, find
from crosswire.lake.history import History, LakeExtent
from crosswire.lake.writer import LakeBatch, LakeWriter
from crosswire.logs import log_event
from crosswire.server.lake_batches import BatchOrder, FeedGroup, build_batch
from crosswire.server.lake_encoder import LakeEncoder

__all__ = ["STEP_NAMES", "LakeFeed", "note_absence"]

_log = logging.getLogger("crosswire.lake")

_DAY_S: Final = 86_400
_PAGE: Final = 8
_RETRY_S: Final = 1.0
_EXPIRE_S: Final = 60.0
_ENCODER_BYTES: Final = 256 * 1024
"""A smaller seal is made in this process: sooner than another one is sent an order."""
_FAILURES: Final = 2
"""How often the encoder may end over the same range before this process makes the files."""
STEP_NAMES: Final = {int(step): step.name.lower().replace("_", "-") for step in Step}
"""The steps of the ledger as the lake names them."""

T = TypeVar("T")
_Count = Callable[..., None]


async def note_absence(hub: Hub) -> None:
    """Note that the hub runs without a lake: when it has one again, that begins with a gap."""
    seal = hub.seals.last()
    if seal is not None and seal.tables:
        await hub.seals.save(msgspec.structs.replace(seal, tables=()))


class LakeFeed:
    """Takes committed groups, seals and publishes them. Use it on the event loop."""

    def __init__(
        self,
        hub: Hub,
        settings: LakeSettings,
        lake: Path,
        *,
        count: _Count,
        writer: LakeWriter | None = None,
        encoder: LakeEncoder | None = None,
        term: int = 0,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`encoder` makes the files of large seals, `writer` all others. `term` is that of the
        leader, 0 for a hub without replicas."""
        self._hub = hub
        self._term = term
        self._has_room = has_room
        self._settings = settings
        self._lake = lake
        self._count = count
        names = {"messages": settings.messages, "ledger": settings.ledger}
        self._tables = tuple(name for name, is_on in names.items() if is_on)
        self._writer = writer or LakeWriter(lake, hub.node, STEP_NAMES)
        self._encoder = encoder
        self._encoder_failures = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="crosswire-lake")
        self._groups: deque[FeedGroup] = deque()
        self._bytes = 0
        self._since = 0.0
        self._unsealed_bytes = 0
        self._is_lagging = True
        self._read_row = 0
        self._seal: Seal
        self._gaps: list[LakeGap] = []
        self._parts: list[FinishedFile] | None = None
        self._is_published = False
        self._is_failing = False
        self._stopping = False
        self._expire_at = 0.0
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def sealed_row(self) -> int:
        """The last row of the journal that the lake has, or has given up."""
        return self._seal.last_row

    @property
    def kept(self) -> LakeExtent | None:
        """Which messages are in files; None where messages don't go to the lake."""
        if "messages" not in self._tables:
            return None
        seal = self._seal
        gaps = [
            (gap.first, gap.last) for gap in (*seal.gaps, *self._gaps) if gap.table == "messages"
        ]
        if self._is_published:
            return LakeExtent(seal.newest, seal.last_seq, tuple(gaps))
        return LakeExtent(seal.after, seal.first_seq - 1, tuple(gaps))

    # Starting and stopping.

    async def start(self) -> None:
        """Continue after the last seal, and listen to commits. Raises StoreError."""
        ends = await self._in_thread(self._ends)
        is_ahead = self._is_ahead(ends)
        old = self._hub.seals.last()
        if is_ahead:
            # All that the store still has is in the lake: it continues after that.
            old = None
        if old is not None and old.term != self._term:
            # First of all: an earlier leader may be about to publish the files of this seal. With
            # the later term those that this one publishes count, even if the others come later.
            old = msgspec.structs.replace(old, term=self._term)
            await self._hub.seals.save(old)
        if old is not None and old.tables and old.tables != self._tables and not old.skipped:
            # The configured tables changed: what is sealed of the old ones is still published.
            self._seal = old
            try:
                await self._publish()
            except OSError as error:
                self._failed(error)
        self._seal = await self._begin(old, ends)
        self._is_published = False
        self._is_lagging, self._read_row = True, self._seal.last_row
        if self._seal.skipped:
            self._gaps = list(self._seal.gaps)
            self._end_publishing()
        self._hub.commits.add_listener(CommitStage.LAKE, self.take)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)

    def _is_ahead(self, ends: dict[str, int]) -> bool:
        """Has the lake more than the store? What is in the lake was durable in the store before, so
        the store has lost its end, and would give out the same numbers again."""
        store = self._hub.store
        if ends["ledger"] < store.next_row:
            return False
        store.report_damage(
            "log",
            f"the lake has rows {store.next_row} to {ends['ledger']} of the ledger, which the store"
            " has lost: messages that were accepted with them may be missing",
        )
        store.skip_rows(ends["ledger"])
        return True

    async def _begin(self, old: Seal | None, ends: dict[str, int]) -> Seal:
        """The seal to continue from; where there is none, or the lake was off, a new one here."""
        if old is not None and old.tables and set(self._tables) <= set(old.tables):
            return old
        hub, now = self._hub, _now_us()
        if old is None or not old.tables:
            last_row, newest = hub.store.next_row - 1, hub.store.newest_id
        else:
            last_row, newest = old.last_row, old.newest
        gaps: list[LakeGap] = []
        first_gap, last_seq = ends["gaps"] + 1, ends["messages"]
        # Without a row of the ledger nothing was accepted: ids are only reserved then.
        if "messages" in self._tables and last_row:
            last_id = await self._last_id(0 if old is None else old.newest)
            if last_id < newest:
                reason = "the messages did not go to the lake"
                gaps.append(LakeGap("messages", last_id + 1, newest, now, reason))
        if old is not None:
            last_seq = max(last_seq, old.last_seq)
            first_gap = max(first_gap, old.first_gap)
            if ends["gaps"] < old.first_gap + len(old.gaps) - 1:
                gaps = [*old.gaps, *gaps]
        if "ledger" in self._tables and 0 < ends["ledger"] < last_row:
            reason = "the ledger did not go to the lake"
            gaps.append(LakeGap("ledger", ends["ledger"] + 1, last_row, now, reason))
        seal = Seal(
            first_row=last_row + 1,
            last_row=last_row,
            first_seq=last_seq + 1,
            last_seq=last_seq,
            newest=newest,
            after=newest,
            tables=self._tables,
            term=self._term,
            first_gap=first_gap,
            gaps=tuple(gaps),
        )
        await hub.seals.save(seal)
        return seal

    def _ends(self) -> dict[str, int]:
        """The last seq of every table in the lake, by the names of its files."""
        ends = {"messages": 0, "ledger": 0, "gaps": 0}
        for file in find(self._lake, tuple(ends)):
            if file.node == self._hub.node:
                ends[file.table] = max(ends[file.table], file.last)
        return ends

    async def _last_id(self, otherwise: int) -> int:
        """The last message in the lake, 0 without any; `otherwise`, if its files can't be read."""
        history = History(self._lake, self._hub.node)
        try:
            segments = await self._in_thread(history.segments, None)
        except (LakeError, OSError) as error:
            self._failed(error)
            return otherwise
        return segments[-1].last if segments else 0

    async def stop(self) -> None:
        """Seal what is committed, as far as the disk allows; the rest stays in the store."""
        if self._task is None:
            return
        with contextlib.suppress(StoreError):
            await self._hub.commits.flush()
        self._stopping = True
        self._wake.set()
        self._full.set()
        await self._task
        self._task = None
        self._hub.commits.remove_listener(self.take)
        if self._encoder is not None:
            await self._in_thread(self._encoder.stop)
        self._thread.shutdown()

    async def abandon(self) -> None:
        """Stop at once: the hub's commits are answered no more. Files that a thread is writing are
        left to it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._encoder is not None:
            # What it prepares is of no use to anybody: another leader has the range.
            self._encoder.kill()
            self._thread.submit(self._encoder.stop)
        self._thread.shutdown(wait=False)

    # What the hub commits.

    def take(self, group: CommitGroup) -> None:
        """Keep the group until it is sealed: a few operations, whatever its size is."""
        block = group.block
        if block is None:
            return
        last_row = block.first_row + block.rows - 1
        if last_row <= self._read_row:
            return
        runs = group.stored + group.retained
        size = len(block.data) + sum(sum(run.sizes) for run in runs)
        self._unsealed_bytes += size
        self._wake.set()
        if self._is_lagging:
            return
        # If this raised for an earlier group, that one is in the store all the same.
        missed = block.first_row > self._read_row + 1
        if missed or self._bytes + size > self._settings.memory_bytes:
            self._start_lagging()
            return
        if not self._groups:
            self._since = time.monotonic()
        # Not the group itself: its body has every message once more.
        records = [each for run in runs for each in run.records]
        self._groups.append(
            FeedGroup(block.first_row, last_row, block.data, records, group.newest_id, size)
        )
        self._bytes += size
        self._read_row = last_row
        if self._bytes >= self._settings.seal_bytes:
            self._full.set()

    def _start_lagging(self) -> None:
        """Drop what is in memory: what is not sealed is read from the store later."""
        self._is_lagging = True
        self._groups.clear()
        self._bytes = 0
        self._read_row = self._seal.last_row

    def _is_pending(self) -> bool:
        if self._is_lagging:
            return self._hub.store.next_row - 1 > self._read_row
        return bool(self._groups)

    # Sealing.

    async def _run(self) -> None:
        await self._in_thread(self._writer.clear)
        while True:
            try:
                if not self._is_published:
                    await self._publish()
                await self._expire()
                await self._wait()
                if self._is_pending():
                    await self._seal_some()
                elif self._stopping:
                    return
                self._recovered()
            except Exception as error:
                # Any error: if the feed ended, the store could delete nothing any more.
                if not isinstance(error, OSError | StoreError):
                    self._start_lagging()
                    if not self._is_failing:
                        _log.exception("the lake feed failed unexpectedly")
                self._failed(error)
                if self._stopping:
                    return
                await self._give_up_seal(str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        await self._full.wait()

    async def _wait(self) -> None:
        """Wait until there is something to seal, and it is large or old enough."""
        while not self._is_pending() and not self._stopping:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXPIRE_S):
                    await self._wake.wait()
            await self._expire()
        while (
            not self._is_lagging and not self._stopping and self._bytes < self._settings.seal_bytes
        ):
            left = self._since + self._settings.seal_s - time.monotonic()
            if left <= 0:
                break
            self._full.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._full.wait()

    async def _seal_some(self) -> None:
        if self._unsealed_bytes > self._settings.backlog_bytes:
            await self._give_up("the lake could not keep up")
            return
        self._check_room()
        is_stored = self._is_lagging
        groups = await self._from_store() if is_stored else self._from_memory()
        if not groups:
            return
        try:
            parts = await self._in_thread(self._prepare, groups)
        except OSError:
            self._start_lagging()
            raise
        except CrosswireError as error:
            self._failed(error)
            if is_stored:
                await self._give_up(str(error), groups[-1])
            else:
                # The store may have what is damaged here.
                self._start_lagging()
            return
        old, first_gap = self._seal, self._next_gap()
        seal = Seal(
            first_row=old.last_row + 1,
            last_row=groups[-1].last_row,
            first_seq=old.last_seq + 1,
            last_seq=old.last_seq + self._message_count(groups),
            newest=groups[-1].newest,
            after=old.newest,
            tables=self._tables,
            term=self._term,
            first_gap=first_gap,
            gaps=tuple(self._gaps),
        )
        try:
            await self._hub.seals.save(seal)
        except StoreError:
            await self._in_thread(self._writer.discard, parts)
            self._start_lagging()
            raise
        self._seal, self._parts, self._is_published, self._gaps = seal, parts, False, []
        self._unsealed_bytes -= sum(group.size_bytes for group in groups)
        self._unsealed_bytes = max(self._unsealed_bytes, 0)
        self._read_row = max(self._read_row, seal.last_row)
        await self._publish()

    def _from_memory(self) -> list[FeedGroup]:
        taken: list[FeedGroup] = []
        size = 0
        while self._groups and size < self._settings.seal_bytes:
            taken.append(self._groups.popleft())
            size += taken[-1].size_bytes
        self._bytes -= size
        self._since = time.monotonic()
        return taken

    async def _from_store(self, upto: int | None = None) -> list[FeedGroup]:
        """The next groups, read from the store; after the last one the feed lags no more."""
        store, taken, size = self._hub.store, list[FeedGroup](), 0
        newest = self._seal.newest
        while size < self._settings.seal_bytes:
            blocks = store.blocks(self._read_row, _PAGE)
            if not blocks:
                if upto is None and self._read_row < store.next_row - 1:
                    # The store could not read the last rows: nothing follows them.
                    self._miss_rows(store.next_row)
                    self._read_row = store.next_row - 1
                break
            for first_row, rows, block in blocks:
                if upto is not None and first_row > upto:
                    return taken
                self._miss_rows(first_row)
                group = await self._read_group(first_row, rows, block, newest)
                newest = group.newest
                taken.append(group)
                size += group.size_bytes
                self._read_row = first_row + rows - 1
                if size >= self._settings.seal_bytes:
                    break
        if self._read_row >= store.next_row - 1:
            self._is_lagging = False
            self._since = time.monotonic()
        return taken

    async def _read_group(self, first_row: int, rows: int, block: bytes, newest: int) -> FeedGroup:
        """A group of the store. A large one takes long: others are served in between."""
        last_row = first_row + rows - 1
        records: dict[int, bytes] = {}
        turns = self._hub.turns
        await asyncio.sleep(0)
        turns.enter()
        began = turns.clock()
        try:
            for identifier, record in self._hub.seals.records_of(block):
                records[identifier] = record
                if turns.time_since(began) > QUANTUM_S:
                    await asyncio.sleep(0)
                    turns.enter()
                    began = turns.clock()
        except RecordDamaged as error:
            self._hub.damage.report(error)
            self._gaps.append(LakeGap("ledger", first_row, last_row, _now_us(), str(error)))
            block, records = b"", {}
        ids = sorted(records)
        newest = max(newest, ids[-1]) if ids else newest
        size = len(block) + sum(map(len, records.values()))
        return FeedGroup(first_row, last_row, block, [records[each] for each in ids], newest, size)

    def _miss_rows(self, first_row: int) -> None:
        """Note a gap for rows before this one: the store skips blocks that it can't read."""
        due = self._read_row + 1
        if first_row > due and "ledger" in self._tables:
            reason = "the store is damaged here"
            self._gaps.append(LakeGap("ledger", due, first_row - 1, _now_us(), reason))

    def _message_count(self, groups: Sequence[FeedGroup]) -> int:
        if "messages" not in self._tables:
            return 0
        return sum(len(group.records) for group in groups)

    def _prepare(self, groups: Sequence[FeedGroup]) -> list[FinishedFile]:
        """On the lake's thread: the files of a new seal, made here if that is little work."""
        order = BatchOrder(
            tables=self._tables,
            first_seq=self._seal.last_seq + 1,
            first_gap=self._next_gap(),
            gaps=tuple(self._gaps),
        )
        size = sum(group.size_bytes for group in groups)
        if self._encoder is None or size < _ENCODER_BYTES or self._encoder_failures >= _FAILURES:
            self._encoder_failures = 0
            return self._writer.prepare(_batch(order, groups))
        self._encoder_failures += 1
        parts = self._encoder.prepare(order, groups)
        self._encoder_failures = 0
        return parts

    def _next_gap(self) -> int:
        seal = self._seal
        return seal.first_gap if seal.skipped else seal.first_gap + len(seal.gaps)

    # Publishing.

    async def _publish(self) -> None:
        """Publish the files of the last seal, which is committed: retried until it succeeds."""
        if self._parts is None:
            try:
                self._parts = await self._redo()
            except StoreError:
                raise
            except CrosswireError as error:
                self._failed(error)
                first, last = self._seal.first_row, self._seal.last_row
                self._gaps.append(LakeGap("ledger", first, last, _now_us(), str(error)))
                self._parts = []
        if self._parts:
            await self._in_thread(self._writer.publish, self._parts)
        self._parts = None
        self._end_publishing()

    def _end_publishing(self) -> None:
        self._is_published = True
        self._count("lake", "", "sealed")
        self._hub.seals.release(self._seal)

    async def _redo(self) -> list[FinishedFile]:
        """Make the files of a seal that was committed before the start, but for published ones."""
        seal = self._seal
        self._check_room()
        groups: list[FeedGroup] = []
        if seal.last_row >= seal.first_row:
            self._read_row = seal.first_row - 1
            try:
                while self._read_row < seal.last_row:
                    more = await self._from_store(upto=seal.last_row)
                    if not more:
                        break
                    groups += more
            finally:
                self._is_lagging, self._read_row = True, seal.last_row
        if not groups and not seal.gaps:
            return []
        order = BatchOrder(
            tables=seal.tables,
            first_seq=seal.first_seq,
            first_gap=seal.first_gap,
            gaps=seal.gaps,
        )
        return await self._in_thread(
            lambda: self._writer.prepare(self._without_published(_batch(order, groups)))
        )

    def _without_published(self, batch: LakeBatch) -> LakeBatch:
        """On the lake's thread."""
        seal, has = self._seal, self._writer.has
        last_gap = seal.first_gap + len(seal.gaps) - 1
        if batch.messages and has("messages", seal.first_seq, seal.last_seq):
            batch = msgspec.structs.replace(batch, messages=())
        if batch.blocks and has("ledger", seal.first_row, seal.last_row):
            batch = msgspec.structs.replace(batch, blocks=())
        if batch.gaps and has("gaps", seal.first_gap, last_gap):
            batch = msgspec.structs.replace(batch, gaps=())
        return batch

    # Failures.

    def _check_room(self) -> None:
        """The rest of a nearly full disk is the store's. Raises OSError, as writing would; what is
        not sealed stays in the store."""
        if not self._has_room():
            self._start_lagging()
            raise OSError(errno.ENOSPC, "the rest of the disk is left to the store")

    async def _give_up_seal(self, reason: str) -> None:
        """The last seal's files can't be published: give them up when the store has kept
        `backlog_bytes` because of that."""
        seal = self._seal
        if self._is_published or self._unsealed_bytes <= self._settings.backlog_bytes:
            return
        has_messages = await self._in_thread(
            self._writer.has, "messages", seal.first_seq, seal.last_seq
        )
        if self._parts is not None:
            await self._in_thread(self._writer.discard, self._parts)
        self._gaps = [*seal.gaps, *self._gaps]
        self._seal = msgspec.structs.replace(
            seal,
            last_row=seal.first_row - 1,
            last_seq=seal.last_seq if has_messages else seal.first_seq - 1,
            newest=seal.after,
            gaps=(),
        )
        try:
            await self._give_up(reason)
            self._parts, self._is_published = None, True
        except StoreError as error:
            self._seal, self._gaps, self._parts = seal, [], None
            self._failed(error)

    async def _give_up(self, reason: str, upto: FeedGroup | None = None) -> None:
        """Commit a gap in place of these rows, so that the store may delete them."""
        hub, old, now = self._hub, self._seal, _now_us()
        last_row = hub.store.next_row - 1 if upto is None else upto.last_row
        newest = hub.committed_id if upto is None else upto.newest
        gaps = self._gaps
        if "ledger" in self._tables:
            gaps = [*gaps, LakeGap("ledger", old.last_row + 1, last_row, now, reason)]
        if "messages" in self._tables and newest > old.newest:
            gaps = [*gaps, LakeGap("messages", old.newest + 1, newest, now, reason)]
        seal = Seal(
            first_row=old.last_row + 1,
            last_row=last_row,
            first_seq=old.last_seq + 1,
            last_seq=old.last_seq,
            newest=newest,
            after=old.newest,
            tables=self._tables,
            term=self._term,
            skipped=True,
            first_gap=self._next_gap(),
            gaps=tuple(gaps),
        )
        await hub.seals.save(seal)
        self._seal, self._gaps, self._unsealed_bytes = seal, gaps, 0
        hub.seals.release(seal)
        self._count("lake", "", "gap")
        log_event(_log, logging.ERROR, "the lake has a gap", reason=reason, rows=last_row)
        if upto is None:
            self._start_lagging()
        self._read_row = max(self._read_row, last_row)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._hub.commits.remove_listener(self.take)
            _log.error("the lake has stopped", exc_info=task.exception())

    def _failed(self, error: Exception) -> None:
        self._count("lake", "", "failed")
        if not self._is_failing:
            self._is_failing = True
            log_event(_log, logging.ERROR, "the lake can't be written", error=str(error))

    def _recovered(self) -> None:
        if self._is_failing:
            self._is_failing = False
            log_event(_log, logging.WARNING, "the lake is written again")

    # Retention and threads.

    async def _expire(self) -> None:
        """Delete files that are too old or too many, once a minute."""
        if time.monotonic() < self._expire_at:
            return
        self._expire_at = time.monotonic() + _EXPIRE_S
        settings = self._settings
        oldest_us = 0
        if settings.retention_days:
            # Not the wall clock: if that was set wrong, all files would be deleted.
            now = self._hub.wall.age(self._hub.now)
            oldest_us = int((now - settings.retention_days * _DAY_S) * MICROSECONDS)
        gone = await self._in_thread(
            expire, self._lake, self._hub.node, oldest_us, settings.retention_bytes
        )
        if gone:
            self._count("lake", "", "expired", by=gone)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *arguments)


def _batch(order: BatchOrder, groups: Sequence[FeedGroup]) -> LakeBatch:
    blocks = [(group.first_row, group.block) for group in groups]
    return build_batch(order, blocks, [each for group in groups for each in group.records])


def _now_us() -> int:
    return int(time.time() * MICROSECONDS)
