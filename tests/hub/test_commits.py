"""The commit path: the order of its listeners, and what one that raises can't do."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

from crosswire.commitlog.contract import CommitGroup, Receipt
from crosswire.errors import StoreError, StoreFailed, StoreFull
from crosswire.hub.commits import CommitStage
from tests.hub.parties import Bench, Recorder, send


class Noting:
    """Notes its stage when it is called; it may raise."""

    def listen(self, bench: Bench) -> None:
        bench.hub.commits.add_listener(self.stage, self.committed, self.failed)

    def __init__(self, stage: CommitStage, seen: list[str], *, raises: bool = False) -> None:
        self.stage = stage
        self.seen = seen
        self.raises = raises

    def committed(self, group: CommitGroup) -> None:
        self._note("committed")

    def failed(self, group: CommitGroup, error: StoreError) -> None:
        self._note("failed")

    def _note(self, outcome: str) -> None:
        self.seen.append(f"{self.stage.name} {outcome}")
        if self.raises:
            raise RuntimeError("no")


ORDER = ["VISIBILITY", "RECEIPTS", "LEDGER", "METRICS", "TELEMETRY", "LAKE"]


def test_the_order_of_listeners_is_that_of_their_stages() -> None:
    for order in itertools.permutations(CommitStage):
        bench, seen = Bench(), list[str]()
        for stage in order:
            Noting(stage, seen).listen(bench)
        bench.produce(send(b"a"))
        assert seen == [f"{name} committed" for name in ORDER]


@pytest.mark.failing_callbacks
@pytest.mark.parametrize("stage", CommitStage)
def test_a_listener_that_raises_harms_no_other(stage: CommitStage) -> None:
    bench, seen, taker = Bench(), list[str](), Recorder()
    for each in CommitStage:
        Noting(each, seen, raises=each is stage).listen(bench)
    bench.consume("queue/q", taker, window=10)
    ids = bench.produce(send(b"a"))
    assert seen[-6:] == [f"{name} committed" for name in ORDER]
    assert taker.ids == ids
    assert [row.step for row in bench.hub.trace(ids[0])] == ["accepted", "delivered"]
    bench.disk.room_bytes = 0
    receipt = bench.hub.produce([send(b"b")], bench.now)
    bench.commit()
    assert seen[-6:] == [f"{name} failed" for name in ORDER]
    assert isinstance(receipt.error, StoreFull)
    bench.disk.room_bytes = 1 << 40
    bench.now += 1.0
    bench.commit()
    assert bench.hub.ledger.of_message(receipt.ids[0]) == []
    assert bench.produce(send(b"c"))


def test_each_stage_finds_done_what_the_stages_before_it_do() -> None:
    bench, taker, found = Bench(), Recorder(), dict[CommitStage, tuple[bool, bool, bool]]()
    bench.consume("queue/q", taker, window=10)

    class Looking(Noting):
        def committed(self, group: CommitGroup) -> None:
            is_remembered = bool(bench.hub.ledger.committed_runs)
            found[self.stage] = (bool(taker.ids), receipt.done, is_remembered)

    for stage in reversed(CommitStage):
        Looking(stage, []).listen(bench)
    receipt = bench.hub.produce([send(b"a")], bench.now)
    bench.commit()
    assert found == {
        CommitStage.VISIBILITY: (True, False, False),
        CommitStage.RECEIPTS: (True, True, False),
        CommitStage.LEDGER: (True, True, True),
        CommitStage.METRICS: (True, True, True),
        CommitStage.TELEMETRY: (True, True, True),
        CommitStage.LAKE: (True, True, True),
    }


def test_a_listener_that_was_removed_is_not_called() -> None:
    bench, seen = Bench(), list[str]()
    listener = Noting(CommitStage.LAKE, seen)
    listener.listen(bench)
    bench.hub.commits.remove_listener(listener.committed)
    bench.hub.commits.remove_listener(listener.committed)
    bench.produce(send(b"a"))
    assert seen == []


def test_a_producer_is_answered_only_when_its_message_is_durable() -> None:
    bench, synced = Bench(), list[bool]()
    receipt = bench.hub.produce([send(b"a")], bench.now)
    receipt.add_done_callback(lambda _receipt: synced.append(not bench.disk.unsynced))
    assert not receipt.done
    bench.commit()
    assert synced == [True]


def test_a_hub_that_nobody_uses_any_more_is_freed() -> None:
    bench = Bench()
    bench.consume("queue/q", Recorder(settles=True), window=10)
    bench.subscribe("topic/#", Recorder(), name="s")
    bench.produce(send(b"a"))
    hub, store = weakref.ref(bench.hub), weakref.ref(bench.store)
    del bench
    gc.collect()
    assert (hub(), store()) == (None, None)


def test_a_start_finds_nothing_of_a_group_that_was_written_and_not_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.produce(send(b"kept"))
    rows = bench.store.next_row

    def fail() -> None:
        raise StoreFailed("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(bench.disk, "sync", fail)
        receipt = bench.hub.produce([send(b"lost")], bench.now)
        bench.commit()
    assert isinstance(receipt.error, StoreFailed)
    bench.commit()
    bench.kill()
    assert bench.store.damage == []
    assert (bench.store.next_row, bench.hub.trace(receipt.ids[0])) == (rows, [])
    assert [each.payload for each in bench.hub.queue("queue/q").browse(0, 10)] == [b"kept"]


def test_listeners_that_come_and_go_with_a_receipt_do_so_from_the_next_group_on() -> None:
    bench = Bench()
    seen: list[str] = []
    gained: list[str] = []
    going, coming = Noting(CommitStage.METRICS, seen), Noting(CommitStage.METRICS, gained)
    going.listen(bench)

    def change(_receipt: Receipt) -> None:
        bench.hub.commits.remove_listener(going.committed)
        coming.listen(bench)

    bench.hub.produce([send(b"", durable=True)], bench.now).add_done_callback(change)
    bench.commit()
    assert (len(seen), len(gained)) == (1, 0)
    bench.produce(send())
    assert (len(seen), len(gained)) == (1, 1)
