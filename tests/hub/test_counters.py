"""Lengths and sizes of queues after a restart: few messages are counted by reading them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import encode
from crosswire.errors import StoreFull
from crosswire.hub.policies import HubConfig, QueuePolicy
from crosswire.hub.queues import DEPTHS, Depth, read_depth, stored_depth
from crosswire.hub.stored_queues import read_stored_queues
from tests.hub.parties import Bench, Recorder, send

QUEUES = [f"queue/{each}" for each in "abc"]
FEW = HubConfig(queue=QueuePolicy(window_messages=2))
"""Nearly all is on disk only, so that counters are not corrected by what is in memory."""


def stored(bench: Bench, queue: str = "queue/q") -> Depth | None:
    value = bench.store.get(DEPTHS, bench.store.number(queue).to_bytes(4))
    return None if value is None else read_depth(value)


def check(bench: Bench, unsettled: dict[str, dict[int, int]]) -> None:
    """What a start finds, by each of the ways in which it is asked for."""
    store = bench.store
    expected = {
        name: (len(known), sum(known.values())) for name, known in unsettled.items() if known
    }
    numbers = store.destinations()
    found = {name: stored_depth(store, number) for name, number in numbers.items()}
    assert {name: depth for name, depth in found.items() if depth[0]} == expected
    view = read_stored_queues(store, store.view(), numbers, store.newest_id, lambda _s: None)
    assert {name: (each.length, each.size_bytes) for name, each in view.items()} == expected
    for name in numbers:
        queue = bench.hub.queue(name)
        assert (queue.length, queue.size_bytes) == expected.get(name, (0, 0))


SENDS = st.tuples(st.just("send"), st.lists(st.sampled_from(QUEUES), min_size=1, max_size=24))
SETTLES = st.tuples(st.just("settle"), st.sampled_from(QUEUES), st.integers(1, 9))
FAILS = st.tuples(st.just("fail"), st.lists(st.sampled_from(QUEUES), min_size=1, max_size=5))
KILLS = st.tuples(st.just("kill"), st.booleans())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(SENDS, SENDS, SETTLES, FAILS, KILLS), max_size=25))
def test_counters_are_exact_after_a_restart(steps: list[tuple[Any, ...]]) -> None:
    bench = Bench(FEW)
    unsettled: dict[str, dict[int, int]] = {name: {} for name in QUEUES}
    for step in steps:
        match step:
            case ("send", names):
                ids = bench.produce(*(send(bytes(len(names)), each) for each in names))
                for name, identifier in zip(names, ids, strict=True):
                    [record] = bench.store.fetch(bench.store.number(name), [identifier])
                    assert record is not None
                    unsettled[name][identifier] = len(record)
            case ("settle", name, count):
                taker = Recorder()
                consumer = bench.consume(name, taker, window=count)
                for identifier in taker.ids:
                    del unsettled[name][identifier]
                consumer.settle(taker.ids, bench.now)
                consumer.close(bench.now)
                bench.commit()
            case ("fail", names):
                receipt = bench.hub.produce([send(b"", each) for each in names], bench.now)
                bench.disk.room_bytes = 0
                bench.commit()
                assert receipt.error is not None
                bench.disk.room_bytes = 1 << 40
                bench.commit()
            case ("kill", power):
                bench.kill(power=power)
                check(bench, unsettled)
    bench.kill(power=True)
    check(bench, unsettled)


def test_messages_of_a_group_that_fails_are_not_counted_with_those_that_came_meanwhile() -> None:
    bench = Bench(FEW)
    later: list[Receipt] = []
    bench.produce(send())

    def fail(_operations: object) -> None:
        later.append(bench.hub.produce([send() for _ in range(20)], bench.now))
        raise StoreFull("no room")

    lost = bench.hub.produce([send() for _ in range(16)], bench.now)
    with mock.patch.object(bench.disk, "write", fail):
        bench.commit()
    bench.commit()
    assert lost.error is not None and later[0].done and later[0].error is None
    bench.kill(power=True)
    assert stored_depth(bench.store, bench.store.number("queue/q"))[0] == 21
    assert bench.hub.queue("queue/q").length == 21


def test_few_messages_leave_the_saved_counters_as_they_are() -> None:
    bench = Bench()
    [first] = bench.produce(send())
    before = stored(bench)
    assert before is not None and (before.length, before.upto) == (1, first)
    for _ in range(15):
        bench.produce(send(), send(queue="queue/b"))
        assert stored(bench) == before
    bench.produce(send())
    after = stored(bench)
    assert after is not None and after.length == 17


def test_a_queue_that_is_not_empty_any_more_is_saved_as_such() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.produce(send())
    consumer = bench.consume("queue/q", taker, window=1)
    bench.commit()
    consumer.close(bench.now)
    bench.commit()
    empty = stored(bench)
    assert empty is not None and empty.length == 0
    bench.produce(send())
    saved = stored(bench)
    assert saved is not None and saved.length == 1


@pytest.mark.parametrize("count", [1, 40])
def test_counters_of_a_store_that_saved_them_with_every_group(count: int) -> None:
    bench = Bench(FEW)
    bench.produce(*(send(b"12345") for _ in range(count)))
    saved = stored(bench)
    assert saved is not None and saved.length == count
    key, old = bench.store.number("queue/q").to_bytes(4), [saved.length, saved.size_bytes]
    bench.store.save(DEPTHS, key, msgspec.msgpack.encode(old))
    bench.store.save("other", b"", b"")
    bench.commit()
    bench.kill()
    queue = bench.hub.queue("queue/q")
    assert (queue.length, queue.size_bytes) == (count, saved.size_bytes)
    bench.produce(send(b"12345"))
    bench.kill()
    assert bench.hub.queue("queue/q").length == count + 1


def test_damaged_counters_are_reported_and_counted_anew() -> None:
    bench = Bench(FEW)
    bench.produce(*(send() for _ in range(5)))
    bench.produce(*(send() for _ in range(5)))
    bench.store.save(DEPTHS, bench.store.number("queue/q").to_bytes(4), b"\xc1")
    bench.commit()
    bench.kill()
    assert bench.hub.queue("queue/q").length == 10
    assert any("a record of depth" in each.reason for each in bench.store.damage)
    # Written again with the group that sets the damaged one aside.
    bench.commit()
    saved = stored(bench)
    assert saved is not None and saved.length == 10


@pytest.mark.parametrize("index", [0, 20, 39])
@pytest.mark.parametrize("payload", [b"", bytes(1000)])
def test_a_message_that_is_exchanged_has_its_new_size(index: int, payload: bytes) -> None:
    bench = Bench(FEW)
    for _ in range(40):
        bench.produce(send(bytes(100)))
    queue = bench.hub.queue("queue/q")
    sizes = {each.id: len(encode(each)) for each in queue.browse(0, 40)}
    edited = queue.browse(0, 40)[index].replace(payload=payload)
    sizes[edited.id] = len(encode(edited))
    queue.exchange(edited, encode(edited))
    bench.commit()
    assert queue.size_bytes == sum(sizes.values())
    bench.kill()
    check(bench, {"queue/q": sizes})


# --------------------------------------------------------- messages that nobody takes stay on disk


def test_without_consumers_only_the_first_message_is_in_memory() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    for each in range(40):
        bench.produce(send(b"%d" % each))
    queue = bench.hub.queue("queue/q")
    assert len(queue.memory.items) == 1 and queue.length == 40
    assert queue.oldest_us() == queue.memory.ready[0].envelope.time > 0
    bench.consume("queue/q", taker, window=10)
    assert taker.payloads == [b"%d" % each for each in range(40)]
    assert queue.is_empty


def test_what_stays_on_disk_expires_after_the_first() -> None:
    bench = Bench()
    expires = int((bench.now + 5) * 1_000_000)
    for _ in range(10):
        bench.produce(send(expires=expires))
    bench.produce(send(b"kept"))
    bench.wait(6)
    assert bench.hub.queue("queue/q").length == 1
