"""`crosswire store verify` and `repair`: damage is reported, what is left is restored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from crosswire.cli.main import main
from crosswire.envelope import Envelope
from crosswire.errors import StoreDamaged
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerPeer
from crosswire.lake import files
from crosswire.lake.writer import messages_table
from crosswire.server.store_repair import Repaired, repair, verify
from crosswire.store.contract import StoreLimits
from crosswire.store.keys import message_key
from crosswire.store.memory import MemoryDisk, MemoryStore
from crosswire.store.rocks import COPIES, MARK, RocksStore, table_options
from tests.hub.parties import Recorder
from tests.store.committing import close, commit

LIMITS = StoreLimits(spare_bytes=0)
PEER = LedgerPeer("test", "test-1")
COUNT = 200


def quiet(_text: str) -> None:
    pass


class Data:
    """A data directory with a queue, half of it settled, a named subscription, and a lake."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lake = path / "lake"
        store, hub = self.open()
        envelopes = [
            Envelope(
                destination="queue/a" if each % 2 else "topic/t",
                kind="send" if each % 2 else "publish",
                payload=Random(each).randbytes(400),
            )
            for each in range(2 * COUNT)
        ]
        subscriber, taker = Recorder(), Recorder()
        subscription = hub.subscribe(
            "topic/t", subscriber, 1.0, peer=PEER, name="named", start="earliest", window=2 * COUNT
        )
        consumer = hub.consume("queue/a", taker, 1.0, peer=PEER, window=2 * COUNT)
        hub.produce(envelopes, 2.0)
        hub.commits.commit_now()
        self.sent = {each.envelope.id: each.envelope for each in taker.deliveries}
        self.published = {each.envelope.id: each.envelope for each in subscriber.deliveries}
        assert len(self.sent) == len(self.published) == COUNT
        self.settled = set(list(self.sent)[::2])
        self.taken = set(list(self.published)[::2])
        consumer.settle(sorted(self.settled), 3.0)
        subscription.settle(sorted(self.taken), 3.0)
        hub.commits.commit_now()
        store._db.flush()
        everything = sorted([*self.sent.values(), *self.published.values()], key=lambda e: e.id)
        files.write(self.lake, "messages", messages_table(hub.node, 1, everything))
        asyncio.run(hub.commits.close())

    def open(self) -> tuple[RocksStore, Hub]:
        store = RocksStore(self.path / "store", LIMITS)
        return store, Hub(store, now=10.0, random=Random(1))

    def change(self, work: Callable[[RocksStore], None]) -> None:
        store = RocksStore(self.path / "store", LIMITS)
        work(store)
        store._db.flush()
        asyncio.run(close(store))

    def repair(self) -> Repaired:
        return repair(self.path, self.lake, quiet)

    def drain(self) -> tuple[list[int], list[int]]:
        """What the queue and the subscription deliver, each with the right content."""
        store, hub = self.open()
        taker, subscriber = Recorder(settles=True), Recorder(settles=True)
        hub.consume("queue/a", taker, 11.0, peer=PEER, window=10)
        hub.subscribe("topic/t", subscriber, 11.0, peer=PEER, name="named", window=10)
        for each in (*taker.deliveries, *subscriber.deliveries):
            known = self.sent.get(each.envelope.id) or self.published[each.envelope.id]
            assert each.envelope.payload == known.payload
        hub.commits.commit_now()
        assert not store.damage
        asyncio.run(hub.commits.close())
        return sorted(taker.ids), sorted(subscriber.ids)

    @property
    def unsettled(self) -> tuple[list[int], list[int]]:
        return sorted(self.sent.keys() - self.settled), sorted(self.published.keys() - self.taken)


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def harm_rows(data: Data, prefix: bytes) -> None:
    """Remove rows as a lost table would."""

    def work(store: RocksStore) -> None:
        batch = store._batch()
        for key, _ in list(store._scan(prefix, prefix + b"\xff")):
            batch.delete(key)
        store._write(batch)

    data.change(work)


def test_an_intact_store_is_intact_and_stays_as_it_is(data: Data) -> None:
    result = verify(data.path, data.lake, quiet)
    assert result.is_intact and result.messages == 2 * COUNT
    assert data.repair() == Repaired(findings=[])
    assert data.drain() == data.unsettled


def test_messages_that_are_missing_come_from_the_lake(data: Data) -> None:
    lost = [sorted(data.sent.keys() - data.settled)[3], sorted(data.settled)[3]]
    topic = sorted(data.published)[7]

    def work(store: RocksStore) -> None:
        batch = store._batch()
        for each in lost:
            batch.delete(message_key(store.number("queue/a"), each))
        batch.delete(message_key(store.number("topic/t"), topic))
        store._write(batch)

    data.change(work)
    found = verify(data.path, data.lake, quiet).findings
    assert {each.destination for each in found} == {"queue/a", "topic/t"}
    result = data.repair()
    assert result.restored == {"queue/a": 1, "topic/t": 1}, "what is settled is not missing"
    assert not any(result.lost.values())
    assert data.drain() == data.unsettled


def test_a_record_under_another_id_is_set_aside_and_restored(data: Data) -> None:
    one, other = sorted(data.sent.keys() - data.settled)[:2]

    def work(store: RocksStore) -> None:
        number = store.number("queue/a")
        record = store.fetch(number, [other])[0]
        assert record is not None
        store.retain(number, one, record)
        commit(store)

    data.change(work)
    _, hub = data.open()
    taker = Recorder()
    hub.consume("queue/a", taker, 11.0, peer=PEER, window=2 * COUNT)
    assert taker.ids == data.unsettled[0][1:], "never served under another id"
    hub.commits.commit_now()
    assert [each[:2] for each in hub.damage.messages()] == [("queue/a", one)]
    taker.deliveries.clear()
    asyncio.run(hub.commits.close())
    assert data.repair().restored == {"queue/a": 1}
    assert data.drain() == data.unsettled


@pytest.mark.parametrize("space", [b"scursor/", b"schange/"])
def test_cursors_are_rebuilt_from_the_ledger(data: Data, space: bytes) -> None:
    harm_rows(data, space)
    result = data.repair()
    assert "queue/a" in result.rebuilt and "subscription 'named'" in result.rebuilt
    assert data.drain() == data.unsettled


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*", COPIES, MARK])
def test_a_store_without_a_file_is_repaired(data: Data, pattern: str) -> None:
    store = data.path / "store"
    node, ids = _own(store)
    for file in store.glob(pattern):
        file.unlink()
    if pattern in ("CURRENT", "MANIFEST-*"):
        with pytest.raises(StoreDamaged):
            data.open()
        assert main(["store", "verify", str(data.path), "--json"]) == 1
    result = data.repair()
    if pattern != MARK:
        assert result.findings and Path(result.aside, "store").is_dir()
        report = json.loads(Path(result.aside, "repair.json").read_text())
        assert report["aside"] == result.aside
    again, later = _own(store)
    assert again == node and later >= ids, "no id is given out twice"
    assert data.drain() == data.unsettled


def _own(path: Path) -> tuple[str, int]:
    store = RocksStore(path, LIMITS)
    first = store.reserve(1)
    node = store.node
    asyncio.run(close(store))
    return node, first


def test_a_damaged_block_is_restored_from_the_lake(data: Data) -> None:
    table = max((data.path / "store").glob("*.sst"), key=lambda each: each.stat().st_size)
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 0xFF
    table.write_bytes(content)
    # The hub skips what it can't read, and reports it.
    store, hub = data.open()
    taker = Recorder(settles=True)
    hub.consume("queue/a", taker, 11.0, peer=PEER, window=10)
    subscriber = Recorder(settles=True)
    hub.subscribe("topic/t", subscriber, 11.0, peer=PEER, name="named", window=10)
    hub.commits.commit_now()
    assert store.damages.entries
    asyncio.run(hub.commits.close())
    delivered = sorted(taker.ids), sorted(subscriber.ids)
    assert delivered != data.unsettled
    result = data.repair()
    assert not any(result.lost.values())
    rest = data.drain()
    for before, after, all_of_them in zip(delivered, rest, data.unsettled, strict=True):
        assert sorted([*before, *after]) == all_of_them


def test_what_a_damaged_table_only_hides_is_restored_without_a_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with few rows over a wide range is damaged; rows of others between them are not."""

    def apart(buffer_bytes: int) -> Any:
        options = table_options(buffer_bytes)
        options.set_level_zero_file_num_compaction_trigger(1000)
        return options

    monkeypatch.setattr("crosswire.store.rocks.table_options", apart)
    data = Data(tmp_path)
    ids = sorted(data.sent)

    def work(store: RocksStore) -> None:
        number = store.number("queue/a")
        for each in (ids[0], ids[-1]):
            record = store.fetch(number, [each])[0]
            assert record is not None
            store.retain(number, each, record)
        commit(store)

    data.change(work)
    tables = (data.path / "store").glob("*.sst")
    table = sorted(tables, key=lambda each: each.stat().st_size)[-2]
    content = bytearray(table.read_bytes())
    content[10] ^= 0xFF
    table.write_bytes(content)
    result = repair(data.path, data.path / "no lake", quiet)
    assert result.restored["queue/a"] > COUNT // 2 - 3
    delivered, _ = data.drain()
    assert delivered == data.unsettled[0]


def test_a_store_that_is_gone_is_made_of_what_the_lake_has(data: Data) -> None:
    (data.path / "store").rename(data.path / "elsewhere")
    result = data.repair()
    assert result.restored["topic/t"] == COUNT
    store, hub = data.open()
    assert store.reserve(1) > max(*data.sent, *data.published)
    assert len(hub.fetch("topic/t", sorted(data.published))) == COUNT
    asyncio.run(hub.commits.close())


def test_the_command_prints_what_it_did(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(data.path)]) == 0
    harm_rows(data, b"m")
    assert main(["store", "verify", str(data.path)]) == 1
    assert "queue/a" in capsys.readouterr().out
    assert main(["store", "repair", str(data.path)]) == 0
    assert "messages restored" in capsys.readouterr().err
    assert main(["store", "verify", str(data.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_a_start_after_a_kill_counts_messages_against_the_ledger() -> None:
    disk = MemoryDisk()
    store = MemoryStore(disk, LIMITS)
    hub = Hub(store, now=1.0, random=Random(1))
    taker = Recorder()
    consumer = hub.consume("queue/a", taker, 1.0, peer=PEER, window=5)
    sent = [Envelope(destination="queue/a", kind="send", payload=b"x") for _ in range(10)]
    ids = hub.produce(sent, 1.0).ids
    hub.commits.commit_now()
    consumer.settle(ids[:2], 1.0)
    hub.commits.commit_now()
    assert not Hub(MemoryStore(disk, LIMITS), now=2.0, random=Random(1)).store.damage
    for lost in (ids[0], ids[7]):
        del disk.rows[message_key(store.number("queue/a"), lost)]
    disk.keys = sorted(disk.rows)
    again = Hub(MemoryStore(disk, LIMITS), now=3.0, random=Random(1)).store
    (entry,) = again.damages.entries
    assert entry.detail == f"accepted messages of queue/a are missing, 1 in all: ids {ids[7]}"
