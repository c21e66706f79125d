"""Topics: patterns, subscribers without a name and with one, the slow and the late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crosswire.errors import (
    InvalidDestination,
    InvalidFilter,
    StoreFull,
    SubscriptionConflict,
    UnknownMessage,
)
from crosswire.hub.attachment import DeliveryGap, Ended
from crosswire.hub.policies import HubConfig, TopicPolicy
from crosswire.hub.subscriptions import AtId, AtTime
from tests.hub.parties import Bench, Recorder, publish

# ----------------------------------------------------------------------------------- without a name


def test_everybody_gets_it_at_once_and_once() -> None:
    bench, one, two = Bench(), Recorder(), Recorder()
    bench.subscribe("topic/t", one)
    bench.subscribe("topic/#", two)
    receipt = bench.hub.produce([publish(b"1"), publish(b"2")], bench.now)
    assert one.payloads == two.payloads == [b"1", b"2"]
    assert one.calls == two.calls == 1
    assert not receipt.done
    bench.commit()
    assert receipt.done and len(one.deliveries) == 2


def test_a_topic_that_is_not_durable_waits_for_nothing() -> None:
    bench, taker = Bench(HubConfig(topic=TopicPolicy(durable=False))), Recorder()
    bench.subscribe("topic/t", taker)
    receipt = bench.hub.produce([publish(b"1")], bench.now)
    assert receipt.done and taker.payloads == [b"1"]
    bench.commit()
    assert not [key for key in bench.disk.keys if key.startswith(b"m")]


def test_wildcards_and_filters() -> None:
    bench, plus, filtered = Bench(), Recorder(), Recorder()
    bench.subscribe("topic/a/+", plus)
    bench.subscribe("topic/a/#", filtered, filter="n>N5")
    bench.produce(
        publish(b"1", topic="topic/a/x", properties={"n": 9}),
        publish(b"2", topic="topic/a/x/y", properties={"n": 9}),
        publish(b"3", topic="topic/a/z", properties={"n": 1}),
        publish(b"4", topic="topic/b", properties={"n": 9}),
    )
    assert plus.payloads == [b"1", b"3"]
    assert filtered.payloads == [b"1", b"2"]


def test_wildcards_are_for_subscriptions() -> None:
    bench = Bench()
    receipt = bench.hub.produce([publish(b"", topic="topic/a/+")], bench.now)
    assert isinstance(receipt.refused[0], InvalidDestination)
    with pytest.raises(InvalidDestination):
        bench.subscribe("topic/a#", Recorder())
    with pytest.raises(InvalidFilter):
        bench.subscribe("topic/a", Recorder(), filter="=")


def test_who_left_gets_nothing() -> None:
    bench, taker = Bench(), Recorder()
    subscriber = bench.subscribe("topic/t", taker)
    subscriber.close(bench.now)
    bench.produce(publish(b"1"))
    assert taker.deliveries == []


def test_the_slow_lag_to_disk_and_do_not_slow_others() -> None:
    bench, slow, quick = Bench(), Recorder(), Recorder(settles=True)
    lagging = bench.subscribe("topic/t", slow, window=3)
    bench.subscribe("topic/t", quick, window=100)
    for each in range(50):
        bench.produce(publish(b"%d" % each))
    assert len(quick.deliveries) == 50
    assert slow.payloads == [b"0", b"1", b"2"]
    while len(slow.deliveries) < 50:
        lagging.settle(slow.ids[-3:], bench.now)
    assert slow.payloads == [b"%d" % each for each in range(50)]
    lagging.settle([1, 2, 3], bench.now)
    bench.hub.produce([publish(b"live")], bench.now)
    assert slow.payloads[-1] == b"live"


def test_who_lags_waits_for_the_commit() -> None:
    bench, slow = Bench(), Recorder()
    lagging = bench.subscribe("topic/t", slow, window=1)
    bench.hub.produce([publish(b"1"), publish(b"2")], bench.now)
    lagging.settle(slow.ids, bench.now)
    assert slow.payloads == [b"1"]
    bench.commit()
    assert slow.payloads == [b"1", b"2"]


def test_the_slow_are_sent_away_where_the_policy_says_so() -> None:
    bench, slow = Bench(HubConfig(topic=TopicPolicy(slow="disconnect"))), Recorder()
    subscriber = bench.subscribe("topic/t", slow, window=2)
    bench.produce(*(publish(b"%d" % each) for each in range(5)))
    assert slow.notices == [Ended("too slow")] and not subscriber.is_open
    bench.produce(publish(b"more"))
    assert b"more" not in slow.payloads


def test_the_slow_are_told_what_they_missed_where_nothing_is_stored() -> None:
    bench, slow = Bench(HubConfig(topic=TopicPolicy(durable=False))), Recorder()
    subscriber = bench.subscribe("topic/t", slow, window=2)
    receipt = bench.hub.produce([publish(b"%d" % each) for each in range(5)], bench.now)
    subscriber.settle(slow.ids, bench.now)
    assert slow.payloads == [b"0", b"1"]
    assert slow.notices == [DeliveryGap(receipt.ids[2], receipt.ids[4], "too slow")]


# -------------------------------------------------------------------------------------- with a name


def test_a_named_subscription_gets_only_what_is_committed() -> None:
    bench, taker = Bench(), Recorder()
    bench.subscribe("topic/t", taker, name="n")
    bench.hub.produce([publish(b"1")], bench.now)
    assert taker.deliveries == []
    bench.commit()
    assert taker.payloads == [b"1"]


def test_it_outlives_its_connection_and_a_restart() -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.subscribe("topic/t", taker, name="n", window=2)
    bench.produce(*(publish(b"%d" % each) for each in range(4)))
    consumer.settle([taker.ids[1]], bench.now)
    consumer.close(bench.now)
    bench.produce(publish(b"4"))
    bench.commit()
    bench.kill(power=True)
    bench.produce(publish(b"5"))
    again = Recorder()
    bench.subscribe("topic/t", again, name="n", window=100)
    assert again.payloads == [b"0", b"2", b"3", b"4", b"5"]


def test_its_consumers_share_it() -> None:
    bench, one, two = Bench(), Recorder(), Recorder()
    bench.subscribe("topic/t", one, name="n")
    bench.subscribe("topic/t", two, name="n")
    bench.produce(*(publish(b"%d" % each) for each in range(10)))
    assert len(one.deliveries) == len(two.deliveries) == 5
    assert not set(one.ids) & set(two.ids)


def test_it_follows_topics_that_come_later_in_order() -> None:
    bench, taker = Bench(), Recorder()
    bench.subscribe("topic/a/+", taker, name="n", window=1000)
    for each in range(30):
        bench.hub.produce([publish(b"%d" % each, topic=f"topic/a/{each % 4}")], bench.now)
    bench.commit()
    assert taker.payloads == [b"%d" % each for each in range(30)]
    bench.kill(power=True)
    again = Recorder(settles=True)
    bench.subscribe("topic/a/+", again, name="n", window=7)
    assert again.payloads == [b"%d" % each for each in range(30)]


def test_its_tail_is_on_disk_only() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    bench.subscribe("topic/#", Recorder(), name="n", window=1).close(bench.now)
    for each in range(40):
        bench.produce(*(publish(b"", topic=f"topic/{each % 3}") for _ in range(100)))
    subscription = bench.hub.subscriptions.get("n")
    assert subscription is not None and len(subscription.memory.items) <= 1024
    bench.subscribe("topic/#", taker, name="n", window=100)
    assert len(taker.ids) == 4000 and taker.ids == sorted(taker.ids)


@pytest.mark.parametrize("name", ["", "n"])
def test_where_to_start(name: str) -> None:
    bench = Bench()
    ids = []
    for each in range(5):
        ids += bench.produce(publish(b"%d" % each))
        bench.now += 10
    starts = {
        "earliest": b"01234",
        "latest": b"",
        AtId(ids[2]): b"234",
        AtTime(bench.now - 20): b"34",
    }
    for index, (start, expected) in enumerate(starts.items()):
        taker = Recorder(settles=True)
        bench.subscribe("topic/t", taker, name=name and f"{name}{index}", start=start)
        assert b"".join(taker.payloads) == expected, start
        bench.produce(publish(b"x"))
        assert taker.payloads[-1] == b"x"
        bench.disk.rows.pop(max(key for key in bench.disk.keys if key.startswith(b"m")))
        bench.disk.keys = sorted(bench.disk.rows)


def test_a_removed_subscription_gives_its_memory_back() -> None:
    """Or who makes and removes them would leave none for all others."""
    bench = Bench()
    bench.subscribe("topic/t", Recorder(), name="n").close(bench.now)
    before = bench.hub.windows.held_bytes
    bench.produce(*(publish(b"x" * 100) for _ in range(50)))
    assert bench.hub.windows.held_bytes - before > 50 * 100
    bench.hub.subscriptions.remove("n")
    assert bench.hub.windows.held_bytes == before


def test_a_name_has_one_pattern_and_filter_until_it_is_removed() -> None:
    bench = Bench()
    consumer = bench.subscribe("topic/secret", Recorder(), name="n", filter="a=N1")
    bench.produce(publish(b"t", topic="topic/secret", properties={"a": 1}))
    with pytest.raises(SubscriptionConflict):
        bench.hub.subscriptions.remove("n")
    consumer.close(bench.now)
    for options in ({"pattern": "topic/u", "filter": "a=N1"}, {"pattern": "topic/secret"}):
        with pytest.raises(SubscriptionConflict) as caught:
            bench.subscribe(receiver=Recorder(), name="n", **options)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value) and "N1" not in str(caught.value)
    taker = Recorder(settles=True)
    consumer = bench.subscribe("topic/secret", taker, name="n", filter="a=N1")
    assert taker.payloads == [b"t"], "what waited for it is still there"
    consumer.close(bench.now)
    bench.hub.subscriptions.remove("n")
    bench.subscribe("topic/u", taker, name="n")
    bench.produce(publish(b"t"), publish(b"u", topic="topic/u"))
    assert taker.payloads == [b"t", b"u"]


def fail_next_commit(bench: Bench, meanwhile: Callable[[], object] = list) -> None:
    write = bench.disk.write

    def fail(_operations: object) -> None:
        bench.disk.write = write  # type: ignore[method-assign]
        meanwhile()
        raise StoreFull("IO error: No space left on device: /data/000123.log")

    bench.disk.write = fail  # type: ignore[method-assign]


def test_a_subscription_that_is_refused_is_not_there() -> None:
    bench = Bench()
    bench.disk.room_bytes = 0
    with pytest.raises(StoreFull, match=r"^there is no room on the disk$"):
        bench.subscribe("topic/t", Recorder(), name="n")
    assert bench.hub.subscriptions.all() == []
    bench.disk.room_bytes = 1 << 40
    bench.now += 1
    fail_next_commit(bench)
    taker = Recorder()
    bench.subscribe("topic/t", taker, name="n")
    receipt = bench.hub.committed()
    bench.commit()
    assert str(receipt.error) == "there is no room on the disk"
    assert [type(each) for each in taker.notices] == [Ended]
    assert bench.hub.subscriptions.all() == []
    bench.commit()
    bench.produce(publish(b"x"))
    bench.kill(power=True)
    assert bench.hub.subscriptions.all() == [] and not taker.payloads


def test_a_subscription_that_another_call_got_onto_the_disk_stays() -> None:
    bench, taker = Bench(), Recorder(settles=True)
    fail_next_commit(bench, lambda: bench.subscribe("topic/t", taker, name="n"))
    consumer = bench.subscribe("topic/t", Recorder(), name="n")
    bench.commit()
    consumer.close(bench.now)
    bench.commit()
    bench.produce(publish(b"x"))
    assert taker.payloads == [b"x"] and not taker.notices
    bench.kill(power=True)
    assert [each.name for each in bench.hub.subscriptions.all()] == ["n"]


def test_an_ended_subscription_leaves_nothing_behind() -> None:
    bench = Bench()
    consumer = bench.subscribe("topic/t", Recorder(settles=True), name="n")
    bench.produce(publish(b"1"))
    consumer.close(bench.now)
    bench.hub.subscriptions.remove("n")
    bench.commit()
    bench.kill(power=True)
    assert bench.hub.subscriptions.all() == []
    assert not [key for key in bench.disk.keys if b"cursor" in key or b"change/" in key]
    with pytest.raises(UnknownMessage):
        bench.hub.subscriptions.remove("n")


def test_a_filter_that_matches_nothing_still_moves_on() -> None:
    bench, taker = Bench(), Recorder()
    bench.subscribe("topic/t", taker, name="n", filter="x=N1")
    for _ in range(30):
        bench.produce(*(publish(b"") for _ in range(1000)))
    bench.commit()
    bench.kill(power=True)
    subscription = bench.hub.subscriptions.get("n")
    assert subscription is not None and taker.deliveries == []
    assert subscription.cursor.upto > 15_000


def test_retention_takes_the_old_and_tells_who_missed_it() -> None:
    bench = Bench(HubConfig(topic=TopicPolicy(retention_s=7200.0)))
    late, unnamed = Recorder(), Recorder()
    bench.subscribe("topic/t", Recorder(), name="n", window=1).close(bench.now)
    lagging = bench.subscribe("topic/t", unnamed, window=1)
    ids = []
    for _ in range(6):
        ids += bench.produce(*(publish(b"x") for _ in range(300)))
        bench.wait(3700)
        bench.commit()
    kept = sum(key.startswith(b"m") for key in bench.disk.keys)
    assert 300 <= kept < 1200
    bench.kill()
    bench.subscribe("topic/t", late, name="n", window=5000)
    assert [type(each) for each in late.notices] == [DeliveryGap]
    lagging.settle(unnamed.ids, bench.now)
    assert bench.hub.topic("topic/t").reclaimed > ids[0]


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_is_on_its_way_to_the_disk_belongs_to_a_subscription_that_begins_before(
    in_flight: bool,
) -> None:
    bench, taker = Bench(), Recorder(settles=True)
    first = bench.produce(publish(b"0"))[0]
    bench.hub.produce([publish(b"1")], bench.now)
    bench.subscribe("topic/t", taker, name="n", start=AtId(first))
    bench.hub.produce([publish(b"2")], bench.now)
    if in_flight:
        bench.subscribe("topic/+", Recorder(), name="m", start="earliest")
    assert taker.payloads == [b"0"]
    bench.commit()
    assert taker.payloads == [b"0", b"1", b"2"]
    bench.produce(publish(b"3"))
    assert taker.payloads[-1] == b"3"
