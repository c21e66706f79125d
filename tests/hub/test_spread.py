"""Batches for several queues: the same as their messages one by one, in less time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.errors import StoreFailed
from crosswire.hub.policies import HubConfig, QueuePolicy
from tests.hub.parties import Bench, Recorder, send

CONFIG = HubConfig(
    queues={
        "short": QueuePolicy(max_length=3),
        "small": QueuePolicy(max_bytes=400),
        "latest": QueuePolicy(max_length=2, overflow="drop-oldest"),
        "expiring": QueuePolicy(ttl_s=60.0),
    }
)
LATEST = "queue/latest"
QUEUES = ["queue/a", "queue/b", "queue/short", "queue/small", LATEST, "queue/expiring"]


def new_bench(opened: list[str], consumed: list[str]) -> tuple[Bench, dict[str, Recorder]]:
    bench, takers = Bench(CONFIG), {}
    for queue in opened:
        bench.hub.queue(queue)
    for queue in consumed:
        takers[queue] = Recorder()
        bench.consume(queue, takers[queue], window=2)
    return bench, takers


def state(bench: Bench, takers: dict[str, Recorder]) -> object:
    """All that a peer or an operator can see of the queues."""
    hub = bench.hub
    queues = {}
    for name in QUEUES:
        queue = hub.queue(name)
        waiting = [(each.id, each.payload, each.expires) for each in queue.browse(0, 100)]
        rows = sorted(hub.ledger.of_destination(name), key=lambda row: row.id)
        steps = [(row.id, row.step, row.count) for row in rows]
        queues[name] = (queue.length, queue.size_bytes, queue.waiting, waiting, steps)
    return queues, {name: (each.ids, each.payloads) for name, each in takers.items()}


@given(
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from(QUEUES), st.integers(0, 5), st.booleans()), max_size=12),
        max_size=4,
    ),
    opened=st.lists(st.sampled_from(QUEUES), unique=True),
    # Of the queue that drops its oldest, a consumer may get what the next message drops.
    consumed=st.lists(st.sampled_from([each for each in QUEUES if each != LATEST]), unique=True),
    are_all_durable=st.booleans(),
)
def test_a_batch_for_several_queues_does_what_its_messages_do_one_by_one(
    batches: list[list[tuple[str, int, bool]]],
    opened: list[str],
    consumed: list[str],
    are_all_durable: bool,
) -> None:
    together, takers = new_bench(opened, consumed)
    single, single_takers = new_bench(opened, consumed)
    for number, batch in enumerate(batches):
        messages = [
            (b"%d %d" % (number, index) + b"x" * 20 * size, queue, are_all_durable or durable)
            for index, (queue, size, durable) in enumerate(batch)
        ]
        receipt = together.hub.produce(
            [send(payload, queue, durable=durable) for payload, queue, durable in messages],
            together.now,
        )
        receipts = [
            single.hub.produce([send(payload, queue, durable=durable)], single.now)
            for payload, queue, durable in messages
        ]
        together.commit()
        single.commit()
        assert receipt.done and receipt.error is None
        assert receipt.ids == [each.ids[0] for each in receipts]
        refused = {index: each.refused[0] for index, each in enumerate(receipts) if each.refused}
        assert {index: str(each) for index, each in receipt.refused.items()} == {
            index: str(each) for index, each in refused.items()
        }
        assert state(together, takers) == state(single, single_takers)
    for bench in (together, single):
        bench.commit()
        bench.kill(power=True)
    assert state(together, {}) == state(single, {})


def test_a_batch_for_several_queues_that_can_not_be_written_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, _ = new_bench(QUEUES, [])
    plain = QUEUES[:2]
    bench.produce(*[send(b"kept", queue) for queue in plain])

    def fail() -> None:
        raise StoreFailed("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(bench.disk, "sync", fail)
        receipt = bench.hub.produce([send(b"lost", queue) for queue in plain * 2], bench.now)
        bench.commit()
    assert isinstance(receipt.error, StoreFailed)
    for _ in range(2):
        for name in plain:
            queue = bench.hub.queue(name)
            assert (queue.length, queue.waiting) == (1, 0)
            assert [each.payload for each in queue.browse(0, 10)] == [b"kept"]
        assert [bench.hub.trace(each) for each in receipt.ids] == [[]] * 4
        bench.commit()
        bench.kill(power=True)


def test_each_queue_of_a_batch_has_one_run_in_the_ledger() -> None:
    bench, _ = new_bench(QUEUES, [])
    ids = bench.produce(*[send(b"%d" % each, QUEUES[each % 2]) for each in range(6)])
    runs = {run.destination: list(run.ids) for run in bench.hub.ledger.runs()}
    assert runs == {QUEUES[0]: ids[::2], QUEUES[1]: ids[1::2]}


@pytest.mark.parametrize("other", ["queue/@s/dead", "queue/a/+", "service/s", "topic/t"])
def test_a_batch_with_something_else_among_it(other: str) -> None:
    """What peers may not send to is refused alone, and what is no queue is served like one by
    one, although the queues are open and would take all of it."""
    bench, _ = new_bench(QUEUES, [])
    if other.startswith("queue/@"):
        # The hub's own: dead letters of a subscription.
        bench.hub._destinations.target(other, own=True)
    payloads = [b"1", b"2", b"3"]
    queues = ["queue/a", other, "queue/b"]
    receipt = bench.hub.produce(
        [send(payload, queue) for payload, queue in zip(payloads, queues, strict=True)], bench.now
    )
    bench.commit()
    is_accepted = other == "topic/t"
    assert receipt.done and receipt.error is None
    assert list(receipt.refused) == ([] if is_accepted else [1])
    assert [bool(each) for each in receipt.ids] == [True, is_accepted, True]
    assert [bench.hub.queue(name).length for name in ("queue/a", "queue/b")] == [1, 1]
    if other.startswith("queue/@"):
        assert bench.hub._destinations.queues[other].length == 0
