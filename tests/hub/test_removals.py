"""Queues and topics that nobody uses: when they can be removed, and when they expire."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from crosswire.envelope import Envelope
from crosswire.errors import DestinationInUse, UnknownMessage
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, QueuePolicy, TopicPolicy
from crosswire.hub.schedules import Schedule
from crosswire.store.contract import StoreLimits
from tests.hub.parties import Bench, Caller, Recorder, Server, publish, send

DAY_S = 86_400.0
PEER = LedgerPeer()


def settle_all(bench: Bench, queue: str) -> None:
    consumer = bench.hub.consume(queue, Recorder(settles=True), bench.now, peer=PEER, window=100)
    consumer.close(bench.now)
    bench.commit()


def names(bench: Bench) -> set[str]:
    return set(bench.store.destinations())


def test_an_empty_queue_can_be_removed_and_made_again() -> None:
    bench = Bench()
    bench.produce(send(b"1", "queue/a"))
    number = bench.hub.queue("queue/a").number
    settle_all(bench, "queue/a")
    bench.hub.remove("queue/a", bench.now)
    bench.commit()
    assert "queue/a" not in names(bench)
    bench.kill(power=True)
    assert "queue/a" not in names(bench)
    bench.produce(send(b"2", "queue/a"))
    assert bench.hub.queue("queue/a").number > number
    got = Recorder()
    bench.hub.consume("queue/a", got, bench.now, peer=PEER)
    assert got.payloads == [b"2"]
    bench.kill()
    assert not bench.hub.reports and not bench.store.damage


def with_message(bench: Bench) -> str:
    bench.produce(send(b"1", "queue/a"))
    return "queue/a"


def with_consumer(bench: Bench) -> str:
    bench.hub.consume("queue/a", Recorder(), bench.now, peer=PEER)
    return "queue/a"


def with_held_message(bench: Bench) -> str:
    bench.produce(send(b"1", "queue/a"))
    bench.hub.consume("queue/a", Recorder(), bench.now, peer=PEER)
    return "queue/a"


def with_published(bench: Bench) -> str:
    bench.produce(publish(b"1", "topic/t"))
    return "topic/t"


def with_subscriber(bench: Bench) -> str:
    bench.hub.topic("topic/t")
    bench.hub.subscribe("topic/t", Recorder(), bench.now, peer=PEER)
    return "topic/t"


def with_named_subscription(bench: Bench) -> str:
    bench.hub.topic("topic/t")
    bench.hub.subscribe("topic/t", Recorder(), bench.now, peer=PEER, name="s").close(bench.now)
    return "topic/t"


def with_schedule(bench: Bench) -> str:
    bench.hub.queue("queue/a")
    schedule = Schedule(id="s", envelope=send(b"1", "queue/a"), interval_s=30 * DAY_S, nohaste=True)
    bench.hub.schedules.add(schedule, bench.now)
    return "queue/a"


def configured(bench: Bench) -> str:
    return bench.hub.queue("queue/configured").destination


CONFIG = HubConfig(
    queues={"configured": QueuePolicy()}, topic=TopicPolicy(retention_s=30 * DAY_S, durable=True)
)


@pytest.mark.parametrize(
    "use",
    [
        with_message,
        with_consumer,
        with_held_message,
        with_published,
        with_subscriber,
        with_named_subscription,
        with_schedule,
        configured,
    ],
)
def test_what_is_in_use_is_neither_removed_nor_expires(use: Callable[[Bench], str]) -> None:
    bench = Bench(CONFIG)
    destination = use(bench)
    bench.commit()
    with pytest.raises(DestinationInUse):
        bench.hub.remove(destination, bench.now)
    bench.wait(3 * DAY_S)
    assert destination in names(bench)


def test_what_is_not_there_can_not_be_removed() -> None:
    with pytest.raises(UnknownMessage):
        Bench().hub.remove("queue/a", 0.0)


def test_unused_destinations_expire_and_used_ones_begin_anew() -> None:
    bench = Bench()
    for queue in ("idle", "used"):
        bench.produce(send(b"1", f"queue/{queue}"))
        settle_all(bench, f"queue/{queue}")
    bench.hub.topic("topic/idle")
    bench.wait(DAY_S / 2)
    bench.produce(send(b"2", "queue/used"))
    settle_all(bench, "queue/used")
    bench.wait(DAY_S * 0.6)
    assert names(bench) == {"queue/used"}
    bench.wait(DAY_S)
    assert not names(bench)


def test_a_restart_does_not_begin_the_time_anew() -> None:
    bench = Bench()
    bench.hub.queue("queue/a")
    bench.commit()
    for _ in range(4):
        bench.wait(DAY_S * 0.3)
        bench.commit()
        bench.kill()
    bench.wait(60.0)
    assert not names(bench)


def test_expiry_can_be_switched_off() -> None:
    bench = Bench(HubConfig(expire_s=0))
    bench.hub.queue("queue/a")
    bench.wait(3 * DAY_S)
    assert names(bench) == {"queue/a"}


def test_a_topic_expires_after_its_messages_and_patterns_find_the_next_one() -> None:
    bench = Bench(HubConfig(topic=TopicPolicy(retention_s=3600, durable=True)))
    got = Recorder(settles=True)
    bench.hub.subscribe("topic/#", got, bench.now, peer=PEER, name="all")
    bench.produce(publish(b"1", "topic/t"))
    number = bench.hub.topic("topic/t").number
    for _ in range(2):
        bench.wait(DAY_S)
        bench.commit()
    assert "topic/t" not in names(bench)
    bench.produce(publish(b"2", "topic/t"))
    assert bench.hub.topic("topic/t").number > number
    assert got.take() == [b"1", b"2"] and not got.notices
    bench.kill()
    assert not bench.hub.reports and not bench.store.damage


def test_a_topic_stays_while_a_pattern_has_not_settled_its_messages() -> None:
    bench = Bench(HubConfig(topic=TopicPolicy(retention_s=3600, durable=True)))
    got = Recorder()
    subscriber = bench.hub.subscribe("topic/#", got, bench.now, peer=PEER, name="all")
    bench.produce(publish(b"1", "topic/t"))
    bench.wait(3 * DAY_S)
    assert "topic/t" in names(bench)
    subscriber.settle(got.ids, bench.now)
    bench.commit()
    bench.wait(2 * DAY_S)
    assert "topic/t" not in names(bench)


def test_what_was_purged_is_not_reported_as_lost_after_a_removal() -> None:
    """The ledger has the messages of the removed queue, and a new one has its name."""
    bench = Bench()
    bench.produce(send(b"1", "queue/a"))
    bench.hub.queue("queue/a").purge(bench.now)
    bench.commit()
    bench.hub.remove("queue/a", bench.now)
    bench.produce(send(b"2", "queue/a"))
    bench.kill()
    assert not bench.store.damage


@pytest.mark.alone
def test_a_round_over_many_queues_takes_short_turns() -> None:
    bench = Bench(HubConfig(expire_s=60), limits=StoreLimits(destinations=60_000))
    for number in range(50_000):
        bench.hub.queue(f"queue/{number}")
    bench.commit()
    until, longest, steps = bench.now + 150, 0.0, 0
    # A collection would look at all that the tests before this one have left, as well.
    gc.freeze()
    try:
        while (due := bench.hub.next_deadline()) is not None and due <= until:
            bench.now = max(due, bench.now)
            begin = time.thread_time()
            bench.hub.handle_deadline(bench.now)
            longest = max(longest, time.thread_time() - begin)
            steps += 1
            if steps % 100 == 0:
                bench.commit()
    finally:
        gc.unfreeze()
    assert not names(bench)
    assert longest < 0.02


def test_the_name_of_a_service_expires_with_its_calls() -> None:
    bench = Bench(HubConfig(expire_s=DAY_S, topic=TopicPolicy(retention_s=3600)))
    provider, caller = Server(), Caller()
    provided = bench.hub.provide(["service/s"], provider, bench.now, peer=PEER, window=1)
    request = Envelope(destination="service/s/m", kind="request", protocol="test")
    bench.hub.call([request], bench.now, answered=caller, peer=PEER)
    bench.commit()
    assert "service/s" in names(bench)
    provided.close(bench.now)
    bench.commit()
    bench.wait(3 * DAY_S)
    # What retention has deleted is gone with the next commit.
    bench.commit()
    bench.wait(2 * DAY_S)
    bench.commit()
    assert "service/s" not in names(bench)
    bench.kill()
    assert "service/s" not in names(bench)
    assert not bench.hub.reports and not bench.store.damage


def test_a_service_that_is_provided_stays() -> None:
    bench = Bench(HubConfig(expire_s=DAY_S, topic=TopicPolicy(retention_s=3600)))
    provider, caller = Server(), Caller()
    bench.hub.provide(["service/s"], provider, bench.now, peer=PEER, window=1)
    request = Envelope(destination="service/s/m", kind="request", protocol="test")
    bench.hub.call([request], bench.now, answered=caller, peer=PEER)
    bench.commit()
    for _ in range(2):
        bench.wait(3 * DAY_S)
        bench.commit()
    assert "service/s" in names(bench)
