"""From the hub's commits to the lake: nothing missing, nothing twice, whatever goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from crosswire.commitlog.contract import CommitGroup
from crosswire.config import LakeSettings
from crosswire.envelope import Envelope, decode
from crosswire.errors import CrosswireError
from crosswire.hub.commits import CommitStage
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, TopicPolicy
from crosswire.lake.files import FinishedFile
from crosswire.lake.verification import verify
from crosswire.lake.writer import LakeBatch, LakeWriter
from crosswire.server.lake_feed import LakeFeed, note_absence
from crosswire.store.memory import MemoryDisk, MemoryStore
from tests.hub.parties import Caller, Recorder, Server, publish, send
from tests.lake.crash import read_lake

NOW = time.time()
DAY = 86_400.0
PEER = LedgerPeer("test", "p")
QUICK = LakeSettings(seal_s=0.01)
STEPS = {number: str(number) for number in range(1, 20)}


class Site:
    """A hub on a memory disk, and a lake beside it; both can be killed and started again."""

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self.disk = MemoryDisk()
        self.counts: list[tuple[str, ...]] = []
        self.feed: LakeFeed | None = None

    async def start(
        self,
        settings: LakeSettings = QUICK,
        writer: type[LakeWriter] = LakeWriter,
        *,
        on: bool = True,
        now: float = NOW,
    ) -> Hub:
        store = MemoryStore(self.disk)
        topics = {"passing": TopicPolicy(durable=False)}
        config = HubConfig(lake=on, topics=topics)
        self.hub = Hub(store, config, now=now, random=Random(1))
        self.hub.commits.start(asyncio.get_running_loop())
        if on:
            made = writer(self.lake, store.node, STEPS)
            self.feed = LakeFeed(self.hub, settings, self.lake, count=self.count, writer=made)
            await self.feed.start()
        else:
            await note_absence(self.hub)
        return self.hub

    def count(self, *what: str, by: int = 1) -> None:
        self.counts += [what] * by

    async def send(self, *payloads: bytes) -> list[int]:
        return await self.hub.produce([send(each) for each in payloads], NOW)

    async def stop(self) -> None:
        if self.feed is not None:
            await self.feed.stop()
            self.feed = None
        await self.hub.commits.close()

    async def kill(self) -> None:
        """What it was about to do will never be done."""
        assert self.feed is not None and self.feed._task is not None
        self.feed._task.cancel()
        await asyncio.gather(self.feed._task, return_exceptions=True)
        self.feed._thread.shutdown()
        self.hub.commits._is_closed = True

    @property
    def payloads(self) -> list[bytes]:
        return [row["payload"] for row in read_lake(self.lake, "messages", ["seq", "payload"])]

    @property
    def ids(self) -> list[int]:
        return [row["id"] for row in read_lake(self.lake, "messages", ["seq", "id"])]

    @property
    def rows(self) -> list[int]:
        return [row["seq"] for row in read_lake(self.lake, "ledger", ["seq"])]

    def faults(self) -> list[tuple[str, str, int, int]]:
        return [(each.kind, each.table, each.first, each.last) for each in verify(self.lake)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "lake")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_what_is_committed_is_in_the_lake_soon(site: Site) -> None:
    await site.start()
    ids = await site.send(b"a", b"b")
    await until(lambda: site.payloads)
    assert site.ids == ids
    await site.stop()
    assert site.payloads == [b"a", b"b"]
    assert site.faults() == []


async def test_everything_stored_is_there_in_order_of_ids(site: Site) -> None:
    hub = await site.start()
    server, caller = Server(), Caller()
    provider = hub.provide(["service/s"], server, NOW, peer=PEER)
    await hub.produce([send(b"1"), publish(b"2"), publish(b"-", "topic/passing")], NOW)
    ask = Envelope(destination="service/s/m", kind="request", payload=b"3")
    hub.call([ask], NOW, answered=caller, peer=PEER)
    provider.answer(
        server.requests[0].id, Envelope(destination="", kind="response", payload=b"4"), NOW
    )
    nobody = Envelope(destination="service/none", kind="request", payload=b"-")
    hub.call([nobody], NOW, answered=caller, peer=PEER)
    hub.inject(send(b"5"), NOW)
    await site.stop()
    assert site.payloads == [b"1", b"2", b"3", b"4", b"5"]
    assert site.ids == sorted(site.ids)


@pytest.mark.failing_callbacks
async def test_a_group_that_the_lake_missed_is_read_from_the_store(site: Site) -> None:
    await site.start()
    feed = site.feed
    assert feed is not None
    await site.send(b"a")
    await until(lambda: site.payloads == [b"a"] and not feed._is_lagging)

    def raising(_group: CommitGroup) -> None:
        commits.remove_listener(raising)
        commits.add_listener(CommitStage.LAKE, feed.take)
        raise RuntimeError("no")

    commits = site.hub.commits
    commits.remove_listener(feed.take)
    commits.add_listener(CommitStage.LAKE, raising)
    await site.send(b"b")
    await site.send(b"c")
    await site.stop()
    assert site.payloads == [b"a", b"b", b"c"]
    assert site.faults() == []


async def test_what_was_read_again_is_what_was_in_memory(site: Site) -> None:
    """The same messages on both ways, the odd ones included."""
    await site.start(LakeSettings(seal_s=3600))
    hub = site.hub
    groups: list[CommitGroup] = []
    hub.commits.add_listener(CommitStage.LAKE, groups.append)
    server, caller = Server(), Caller()
    provider = hub.provide(["service/s"], server, NOW, peer=PEER)
    await hub.produce([send(b"1"), publish(b"2"), publish(b"-", "topic/passing")], NOW)
    hub.call(
        [Envelope(destination="service/s/m", kind="request", payload=b"3")],
        NOW,
        answered=caller,
        peer=PEER,
    )
    provider.answer(server.requests[0].id, Envelope(destination="", kind="response"), NOW)
    hub.inject(send(b"5"), NOW)
    await hub.committed()
    count = 0
    for group in groups:
        remembered = [each for run in group.stored + group.retained for each in run.envelopes]
        if group.block is None:
            assert not remembered
            continue
        stored = dict(hub.seals.records_of(group.block.data))
        assert [decode(record) for _, record in sorted(stored.items())] == remembered
        count += len(remembered)
    assert count == 5
    await site.stop()


class Stuck(LakeWriter):
    """Prepares, but never publishes."""

    def publish(self, parts: Iterable[FinishedFile]) -> None:  # type: ignore[override]
        raise OSError(5, "stuck")


async def test_killed_between_the_seal_and_its_file_the_file_is_made_again(site: Site) -> None:
    await site.start(writer=Stuck)
    await site.send(b"a", b"b")
    await until(lambda: ("lake", "", "failed") in site.counts)
    seal = site.hub.seals.last()
    await site.kill()
    assert seal is not None and (seal.first_seq, seal.last_seq) == (1, 2)
    assert site.payloads == []
    await site.start()
    await site.send(b"c")
    await site.stop()
    assert site.payloads == [b"a", b"b", b"c"]
    assert site.faults() == []
    assert site.rows == list(range(1, len(site.rows) + 1))


async def test_killed_before_the_seal_nothing_is_there_twice(site: Site) -> None:
    class Slow(LakeWriter):
        def prepare(self, batch: LakeBatch) -> list[FinishedFile]:
            super().prepare(batch)
            raise OSError(5, "killed right after it")

    await site.start(writer=Slow)
    await site.send(b"a")
    await until(lambda: ("lake", "", "failed") in site.counts)
    await site.kill()
    await site.start()
    await site.stop()
    assert site.payloads == [b"a"]
    assert not list((site.lake / ".parts").iterdir())


async def test_killed_after_the_file_it_is_not_made_twice(site: Site) -> None:
    await site.start()
    await site.send(b"a")
    await until(lambda: site.payloads)
    await site.kill()
    (before,) = (site.lake / "messages").rglob("*.parquet")
    made = before.stat().st_mtime_ns
    await site.start()
    await site.stop()
    assert before.stat().st_mtime_ns == made
    assert site.payloads == [b"a"]


async def test_what_was_not_sealed_is_taken_from_the_store_after_a_restart(site: Site) -> None:
    await site.start(LakeSettings(seal_s=3600))
    taker = Recorder(settles=True)
    site.hub.consume("queue/q", taker, NOW, peer=PEER)
    await site.send(b"a", b"b")
    await until(lambda: len(taker.deliveries) == 2)
    await site.hub.committed()
    site.hub.handle_deadline(NOW + 100)
    await site.hub.committed()
    await site.kill()
    await site.start()
    await site.stop()
    assert site.payloads == [b"a", b"b"]
    assert site.faults() == []


async def test_more_than_memory_may_hold_is_read_from_the_store(site: Site) -> None:
    settings = LakeSettings(seal_s=3600, seal_bytes=1 << 20, memory_bytes=3000)
    await site.start(settings)
    sent = [b"%04d" % number + bytes(200) for number in range(100)]
    for each in sent:
        await site.send(each)
    await site.stop()
    assert site.payloads == sent
    assert site.faults() == []


async def test_size_seals_too(site: Site) -> None:
    await site.start(LakeSettings(seal_s=3600, seal_bytes=2000))
    await site.send(*[bytes(300)] * 10)
    await until(lambda: len(site.payloads) == 10)
    await site.stop()
    assert site.payloads == [bytes(300)] * 10
    assert site.faults() == []


class Full(LakeWriter):
    """The disk is full for a while."""

    failures = 3
    batches: ClassVar[list[LakeBatch]] = []

    def prepare(self, batch: LakeBatch) -> list[FinishedFile]:
        type(self).batches.append(batch)
        if len(type(self).batches) <= self.failures:
            raise OSError(28, "No space left on device")
        return super().prepare(batch)


async def test_a_full_disk_stops_nobody_and_nothing_is_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.server.lake_feed._RETRY_S", 0.01)
    monkeypatch.setattr(Full, "batches", [])
    await site.start(writer=Full)
    for number in range(10):
        await site.send(b"%d" % number)
    await until(lambda: site.payloads)
    await site.stop()
    assert site.payloads == [b"%d" % number for number in range(10)]
    assert site.counts.count(("lake", "", "failed")) == 3
    assert site.faults() == []


async def test_what_the_store_can_not_keep_any_longer_becomes_a_gap(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.server.lake_feed._RETRY_S", 0.01)
    monkeypatch.setattr(Full, "batches", [])
    monkeypatch.setattr(Full, "failures", 1 << 30)
    await site.start(LakeSettings(seal_s=0.01, backlog_bytes=3000), writer=Full)
    lost = await site.send(b"lost")
    await until(lambda: Full.batches)
    lost += await site.send(bytes(4000))
    await until(lambda: ("lake", "", "gap") in site.counts)
    released = site.hub.seals.reclaim_limit
    monkeypatch.setattr(Full, "failures", 0)
    await site.send(b"kept")
    await site.stop()
    assert site.payloads == [b"kept"]
    assert released >= lost[-1]
    kinds = site.faults()
    assert ("recorded", "messages", lost[0], lost[-1]) in kinds
    assert {kind for kind, *_ in kinds} == {"recorded"}


async def test_a_seal_that_can_not_be_published_is_given_up_in_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.server.lake_feed._RETRY_S", 0.01)
    await site.start(LakeSettings(seal_s=0.01, backlog_bytes=3000), writer=Stuck)
    await site.send(b"lost")
    await until(lambda: ("lake", "", "failed") in site.counts)
    (last,) = await site.send(bytes(4000))
    await until(lambda: ("lake", "", "gap") in site.counts)
    await site.kill()
    await site.start()
    await site.send(b"kept")
    await site.stop()
    assert site.payloads == [b"kept"]
    assert ("recorded", "messages", 1, last) in site.faults()
    assert {kind for kind, *_ in site.faults()} == {"recorded"}


async def test_a_gap_survives_a_kill(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosswire.server.lake_feed._RETRY_S", 0.01)
    monkeypatch.setattr(Full, "batches", [])
    monkeypatch.setattr(Full, "failures", 1 << 30)
    await site.start(LakeSettings(seal_s=0.01, backlog_bytes=3000), writer=Full)
    await site.send(bytes(4000))
    await until(lambda: ("lake", "", "gap") in site.counts)
    await site.kill()
    await site.start()
    await site.send(b"kept")
    await site.stop()
    assert site.payloads == [b"kept"]
    assert {kind for kind, *_ in site.faults()} == {"recorded"}


async def test_what_can_never_be_written_becomes_a_gap_too(site: Site) -> None:
    class Picky(LakeWriter):
        def prepare(self, batch: LakeBatch) -> list[FinishedFile]:
            if any(each.payload == b"poison" for each in batch.messages):
                raise CrosswireError("not this one")
            return super().prepare(batch)

    await site.start(writer=Picky)
    (poison,) = await site.send(b"poison")
    await until(lambda: ("lake", "", "gap") in site.counts)
    await site.send(b"fine")
    await site.stop()
    assert site.payloads == [b"fine"]
    assert ("recorded", "messages", 1, poison) in site.faults()


async def test_a_lake_that_was_off_begins_with_a_gap(site: Site) -> None:
    await site.start()
    await site.send(b"a")
    await site.stop()
    await site.start(on=False)
    (unseen,) = await site.send(b"unseen")
    await site.stop()
    await site.start()
    await site.send(b"b")
    await site.stop()
    assert site.payloads == [b"a", b"b"]
    faults = site.faults()
    assert [each[:2] for each in faults] == [("recorded", "messages"), ("recorded", "ledger")]
    assert faults[0][2] <= unseen <= faults[0][3]
    assert [row["seq"] for row in read_lake(site.lake, "messages", ["seq"])] == [1, 2]


async def test_a_lake_before_the_first_message_begins_without_a_gap(site: Site) -> None:
    """A hub that ended before its first seal had reserved ids, and used none of them."""
    await site.start(on=False)
    site.hub.store.save("links", b"epoch", b"1")
    await site.hub.commits.committed()
    site.hub.commits._is_closed = True  # killed
    hub = await site.start()
    assert hub.store.newest_id > 0
    await site.send(b"a")
    await site.stop()
    assert site.payloads == [b"a"]
    assert site.faults() == []


async def test_one_table_alone(site: Site) -> None:
    await site.start(LakeSettings(seal_s=0.01, ledger=False))
    await site.send(b"a")
    await site.stop()
    assert (site.payloads, site.rows) == ([b"a"], [])
    await site.start(LakeSettings(seal_s=0.01, messages=False))
    await site.send(b"b")
    await site.stop()
    assert site.payloads == [b"a"]
    assert site.rows
    assert site.faults() == []


async def test_the_store_keeps_what_is_not_in_place(site: Site) -> None:
    await site.start(writer=Stuck)
    taker = Recorder(settles=True)
    site.hub.consume("queue/q", taker, NOW, peer=PEER)
    await site.send(b"a")
    await until(lambda: ("lake", "", "failed") in site.counts)
    site.hub.handle_deadline(NOW + 100)
    await site.hub.committed()
    kept = [key for key in site.disk.keys if key.startswith((b"m", b"l"))]
    await site.kill()
    await site.start()
    await until(lambda: site.payloads)
    await until(lambda: site.hub.seals.reclaim_limit > 0)
    site.hub.queue("queue/q")
    site.hub.handle_deadline(NOW + 200)
    await site.hub.committed()
    left = [key for key in site.disk.keys if key.startswith((b"m", b"l"))]
    await site.stop()
    assert len(left) < len(kept)


class Retained(Site):
    """A lake with one message, and the retention of a month that is looked at when asked."""

    async def begin(self) -> None:
        await self.start()
        await self.send(b"kept")
        await until(lambda: self.payloads)
        self.pass_time(NOW, NOW)
        self.hub.commits.commit_now()

    def pass_time(self, wall: float, now: float) -> None:
        self.hub.follow_wall(wall, now)
        self.hub.handle_deadline(now)

    async def retain(self) -> list[bytes]:
        assert self.feed is not None
        self.feed._expire_at = 0.0
        await self.feed._expire()
        return self.payloads


@pytest.fixture
def retained(tmp_path: Path) -> Retained:
    return Retained(tmp_path / "lake")


async def test_a_clock_that_jumps_does_not_empty_the_lake(retained: Retained) -> None:
    await retained.begin()
    for jump in (40 * DAY, -40 * DAY, 0):
        retained.pass_time(NOW + jump, NOW + 60)
        assert await retained.retain() == [b"kept"]
    retained.pass_time(NOW + 40 * DAY, NOW + 120)
    retained.pass_time(NOW + 41 * DAY - 3600, NOW + DAY - 3600)
    assert await retained.retain() == [b"kept"]
    retained.pass_time(NOW + 41 * DAY + 3600, NOW + DAY + 3600)
    assert await retained.retain() == []
    await retained.stop()


@pytest.mark.parametrize("jump", [40, -40])
async def test_a_clock_that_is_wrong_at_the_start_does_not_either(
    retained: Retained, jump: int
) -> None:
    await retained.begin()
    await retained.stop()
    await retained.start(now=NOW + jump * DAY)
    assert await retained.retain() == [b"kept"]
    retained.pass_time(NOW + jump * DAY, NOW + jump * DAY)
    await retained.hub.committed()
    await retained.stop()
    await retained.start(now=NOW + 600)
    assert await retained.retain() == [b"kept"]
    assert retained.hub.wall.lag_s == pytest.approx(0.0 if jump > 0 else 40 * DAY, abs=700)
    await retained.stop()


async def test_retention_lets_old_dates_go(site: Site) -> None:
    hub = await site.start()
    await hub.produce([send(b"old")], NOW - 3 * 86_400)
    await site.stop()
    await site.start(LakeSettings(seal_s=0.01, retention_days=1))
    # Files that are being removed can't be read: the count is taken when they are gone.
    await until(lambda: ("lake", "", "expired") in site.counts)
    await site.stop()
    assert not site.payloads


async def test_a_mistake_does_not_end_the_lake(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosswire.server.lake_feed._RETRY_S", 0.01)

    class Mistaken(LakeWriter):
        mistakes = 1

        def prepare(self, batch: LakeBatch) -> list[FinishedFile]:
            if Mistaken.mistakes:
                Mistaken.mistakes -= 1
                raise RuntimeError("a mistake")
            return super().prepare(batch)

    await site.start(writer=Mistaken)
    await site.send(b"a")
    await until(lambda: Mistaken.mistakes == 0)
    await site.send(b"b")
    await until(lambda: len(site.payloads) == 2)
    await site.stop()
    assert site.payloads == [b"a", b"b"]


async def test_a_store_that_knows_less_than_its_lake_has_lost_its_end(site: Site) -> None:
    """Nothing of the store shows it: the log is shorter, and the file with its end is gone."""
    await site.start()
    await site.send(b"1", b"2")
    await until(lambda: site.payloads == [b"1", b"2"])
    await site.stop()
    rows, copies = dict(site.disk.rows), dict(site.disk.copies or {})
    await site.start()
    await site.send(b"3", b"4")
    await until(lambda: len(site.payloads) == 4)
    await site.stop()
    ends = max(site.rows)
    site.disk.rows, site.disk.keys, site.disk.mark = rows, sorted(rows), None
    site.disk.copies, site.disk.unsynced = copies, []
    hub = await site.start()
    assert any("which the store has lost" in each.detail for each in hub.store.damages.entries)
    assert hub.store.next_row > ends
    await site.send(b"5")
    await until(lambda: site.payloads[-1:] == [b"5"])
    await site.stop()
    assert len(site.rows) == len(set(site.rows))


async def test_a_store_that_is_whole_is_not_accused_by_its_lake(site: Site) -> None:
    for number in range(3):
        hub = await site.start()
        assert hub.store.damages.entries == []
        await site.send(b"%d" % number)
        await until(lambda number=number: len(site.payloads) == number + 1)
        await (site.kill() if number == 1 else site.stop())
