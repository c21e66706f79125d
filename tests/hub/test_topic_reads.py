"""Reads over many topics: in parts, in order, and of nobody who has left."""

from __future__ import annotations

from typing import cast

import pytest

from crosswire.hub import read_slots, topic_reads
from crosswire.hub.attachment import DeliveryGap
from crosswire.hub.policies import HubConfig, TopicPolicy
from crosswire.hub.subscribers import Subscriber
from crosswire.hub.subscriptions import Subscription
from crosswire.hub.topic_reads import _PartialRead
from tests.hub.parties import Bench, Recorder, publish

TOPICS = 20
ROUNDS = 3


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """With messages in many topics, by turns."""
    monkeypatch.setattr(topic_reads, "_AT_ONCE", 4)
    bench = Bench()
    for turn in range(ROUNDS):
        for number in range(TOPICS):
            bench.produce(publish(b"%d" % (turn * TOPICS + number), f"topic/t/{number}"))
    bench.commit()
    return bench


EXPECTED = [b"%d" % number for number in range(TOPICS * ROUNDS)]


@pytest.mark.parametrize("name", ["", "named"])
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_all_is_delivered_in_order(bench: Bench, name: str, window: int) -> None:
    taker = Recorder()
    attached = bench.subscribe("topic/+/#", taker, name=name, start="earliest", window=window)
    bench.commit()
    while len(taker.deliveries) < len(EXPECTED):
        before = len(taker.deliveries)
        held = [each.id for each in taker.deliveries[-window:]]
        attached.settle(held, bench.now)
        bench.commit()
        assert len(taker.deliveries) > before
    assert taker.payloads == EXPECTED


def test_each_part_is_a_turn_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    dispatch = _PartialRead.dispatch

    def counted(self: _PartialRead, now: float) -> None:
        parts.append(1)
        dispatch(self, now)

    monkeypatch.setattr(_PartialRead, "dispatch", counted)
    taker = Recorder()
    bench.subscribe("topic/#", taker, start="earliest", window=1000)
    bench.commit()
    assert taker.payloads == EXPECTED
    assert len(parts) >= TOPICS // 4


def test_who_has_left_gets_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Recorder()
    dispatch = _PartialRead.dispatch
    parts: list[int] = []

    def leave_first(self: _PartialRead, now: float) -> None:
        parts.append(1)
        cast(Subscriber, self._reader).close(now)
        dispatch(self, now)

    monkeypatch.setattr(_PartialRead, "dispatch", leave_first)
    bench.subscribe("topic/#", taker, start="earliest", window=1000)
    bench.commit()
    assert parts and taker.payloads == []


def test_a_subscription_that_is_deleted_meanwhile_stays_empty(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = _PartialRead.dispatch
    deleted: list[Subscription] = []

    def delete_first(self: _PartialRead, now: float) -> None:
        if not deleted:
            deleted.append(cast(Subscription, self._reader))
            deleted[0].delete()
        dispatch(self, now)

    monkeypatch.setattr(_PartialRead, "dispatch", delete_first)
    bench.subscribe("topic/#", Recorder(), name="named", start="earliest", window=1000)
    bench.commit()
    assert deleted and not deleted[0].memory.items


@pytest.mark.failing_callbacks
@pytest.mark.parametrize("name", ["", "named"])
def test_what_can_not_be_read_is_read_a_second_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    taker = Recorder()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError("for a test")

        patch.setattr("crosswire.store.contract.MergedPage.add", fail)
        bench.subscribe("topic/#", taker, name=name, start="earliest", window=1000)
        bench.commit()
        assert taker.payloads == []
    bench.wait(1.1)
    bench.commit()
    assert taker.payloads == EXPECTED


@pytest.mark.failing_callbacks
@pytest.mark.parametrize("name", ["", "named"])
def test_what_can_not_be_taken_is_read_a_second_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As with few topics, where who reads gets the exception."""
    taker = Recorder()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError("for a test")

        patch.setattr("crosswire.hub.damage.DamageReports.decode_or_set_aside", fail)
        bench.subscribe("topic/#", taker, name=name, start="earliest", window=1000)
        bench.commit()
        assert taker.payloads == []
    bench.wait(1.1)
    bench.commit()
    assert taker.payloads == EXPECTED


@pytest.mark.parametrize("name", ["", "named"])
def test_what_retention_deletes_between_the_parts_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(topic_reads, "_AT_ONCE", 4)
    bench = Bench(HubConfig(topic=TopicPolicy(retention_s=7200.0, durable=True)))
    if name:
        bench.subscribe("topic/#", Recorder(), name=name, start="earliest").close(bench.now)
    ids = bench.produce(*(publish(b"", f"topic/t/{number}") for number in range(TOPICS)))
    bench.now += 4 * 3600
    bench.kill()
    dispatch = _PartialRead.dispatch
    parts: list[int] = []

    def reclaim_after_two(self: _PartialRead, now: float) -> None:
        dispatch(self, now)
        parts.append(1)
        if len(parts) == 2:
            bench.hub.topic(f"topic/t/{TOPICS - 1}").retain(bench.now)
            bench.commit()

    monkeypatch.setattr(_PartialRead, "dispatch", reclaim_after_two)
    taker = Recorder()
    bench.subscribe("topic/#", taker, name=name, start="earliest", window=1000)
    bench.commit()
    assert taker.ids == ids[:-1]
    assert taker.notices == [DeliveryGap(1, ids[-1], "retention")]


@pytest.mark.parametrize("named", [False, True])
def test_few_read_at_a_time_and_all_get_everything(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    reading: set[_PartialRead] = set()
    most = 0
    dispatch = _PartialRead.dispatch

    def counted(self: _PartialRead, now: float) -> None:
        nonlocal most
        reading.add(self)
        most = max(most, len(reading))
        dispatch(self, now)
        if self not in self._core.loop._touched:
            reading.discard(self)

    monkeypatch.setattr(_PartialRead, "dispatch", counted)
    takers = [Recorder() for _ in range(30)]
    # As peers that subscribe within one turn.
    loop = bench.hub._core.loop
    loop._is_pumping = True
    attached = [
        bench.subscribe(
            "topic/#", taker, name=f"n{index}" if named else "", start="earliest", window=1000
        )
        for index, taker in enumerate(takers)
    ]
    for index in (0, 7, 29):
        attached[index].close(bench.now)
    loop._is_pumping = False
    bench.commit()
    assert most <= read_slots._SLOTS
    stayed = [taker for index, taker in enumerate(takers) if index not in (0, 7, 29)]
    assert all(taker.payloads == EXPECTED for taker in stayed)
    slots = bench.hub._core.reads
    assert (slots._taken, slots._waiting) == (0, {})
