"""Queues that let their oldest go: the bounds hold, and the counters tell what is there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.envelope import Envelope
from crosswire.errors import DestinationFull, StoreFull
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry
from tests.hub.parties import Bench, Recorder, send


def dropping(**policy: object) -> Bench:
    queue = QueuePolicy(overflow="drop-oldest", **policy)  # type: ignore[arg-type]
    return Bench(HubConfig(queue=queue))


def numbered(first: int, count: int) -> list[Envelope]:
    return [send(b"%04d" % each) for each in range(first, first + count)]


def check_counters(bench: Bench) -> None:
    """Browsing sees what is held, ready, delayed or on disk."""
    queue = bench.hub.queue("queue/q")
    found = queue.browse(0, 100_000)
    assert queue.length == len(found)
    if queue.memory.loaded >= queue.visible:
        assert queue.size_bytes == queue.memory.size_bytes


actions = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(1, 40)),
        st.tuples(st.just("settle"), st.integers(1, 10)),
        st.tuples(st.just("refuse"), st.integers(1, 10)),
        st.tuples(st.just("write later"), st.integers(1, 40)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=actions,
    max_length=st.integers(1, 30),
    window=st.integers(1, 40),
    consumes=st.integers(0, 12),
    durable=st.booleans(),
)
def test_the_bounds_hold_and_the_counters_are_true(
    actions: list[tuple[str, int]], max_length: int, window: int, consumes: int, durable: bool
) -> None:
    bench = dropping(
        max_length=max_length,
        window_messages=window,
        retry=Retry(max_attempts=0, first_delay_s=5.0),
    )
    taker = Recorder()
    produced = 0

    def attach() -> object:
        taker.deliveries.clear()
        return bench.consume("queue/q", taker, window=consumes) if consumes else None

    consumer = attach()
    for action, count in actions:
        ids = [each.id for each in taker.deliveries[:count]]
        if action in ("produce", "write later"):
            batch = [send(b"%04d" % produced, durable=durable) for _ in range(count)]
            produced += count
            receipt = bench.hub.produce(batch, bench.now)
            assert all(receipt.ids)
            if action == "write later":
                continue
        elif action == "restart":
            bench.commit()
            bench.start()
            consumer = attach()
        elif consumer is not None and ids:
            del taker.deliveries[:count]
            if action == "settle":
                consumer.settle(ids, bench.now)  # type: ignore[attr-defined]
            else:
                consumer.refuse(ids, bench.now)  # type: ignore[attr-defined]
        bench.commit()
        check_counters(bench)
        assert bench.hub.queue("queue/q").length <= max_length
    bench.commit()
    check_counters(bench)
    assert bench.hub.queue("queue/q").length <= max_length


@pytest.mark.parametrize("window", [1, 10, 1000])
@pytest.mark.parametrize("count", [90, 120, 250])
def test_of_a_long_batch_the_newest_stay(window: int, count: int) -> None:
    bench = dropping(max_length=100, window_messages=window)
    for first in range(0, 4 * count, count):
        bench.produce(*numbered(first, count))
        assert bench.hub.queue("queue/q").length == min(first + count, 100)
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=1000)
    assert taker.payloads == [b"%04d" % each for each in range(4 * count - 100, 4 * count)]
    assert bench.hub.queue("queue/q").length == bench.hub.queue("queue/q").size_bytes == 0


def test_what_is_held_counts_and_stays() -> None:
    bench, taker = dropping(max_length=10, window_messages=4), Recorder()
    bench.produce(*numbered(0, 5))
    consumer = bench.consume("queue/q", taker, window=5)
    bench.produce(*numbered(5, 20))
    queue = bench.hub.queue("queue/q")
    assert queue.length == 10
    consumer.settle(taker.ids, bench.now)
    assert taker.payloads == [b"%04d" % each for each in (*range(5), *range(20, 25))]
    assert queue.length == 5


def test_nothing_goes_for_what_can_not_be_written() -> None:
    bench = dropping(max_length=3)
    bench.produce(*numbered(0, 3))
    bench.disk.room_bytes = 500
    receipt = bench.hub.produce([send(bytes(600))], bench.now)
    bench.commit()
    assert isinstance(receipt.error, StoreFull)
    queue = bench.hub.queue("queue/q")
    assert [each.payload for each in queue.browse(0, 10)] == [b"0000", b"0001", b"0002"]
    assert queue.length == 3


def test_bytes_are_bounded_and_one_larger_than_that_is_refused() -> None:
    bench = dropping(max_bytes=1000)
    receipt = bench.hub.produce([send(bytes(300)), send(bytes(2000)), send(bytes(300))], bench.now)
    bench.commit()
    assert [bool(each) for each in receipt.ids] == [True, False, True]
    assert isinstance(receipt.refused[1], DestinationFull)
    bench.produce(*(send(bytes(300)) for _ in range(9)))
    queue = bench.hub.queue("queue/q")
    assert 0 < queue.size_bytes <= 1000
    check_counters(bench)
