"""Reads over many topics: in parts, in order, and of nobody who has left."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from crosswire.hub import read_slots, subscriptions, topic_index, topic_reads
from crosswire.hub.attachment import Attachment, Delivery, DeliveryGap, Notice
from crosswire.hub.policies import HubConfig, TopicPolicy
from crosswire.hub.subscribers import Subscriber
from crosswire.hub.subscriptions import AtId, AtTime, Start, Subscription
from crosswire.hub.topic_reads import _PartialRead
from tests.hub.parties import Bench, Recorder, publish

TOPICS = 20
ROUNDS = 3
TWO_HOURS = HubConfig(topic=TopicPolicy(retention_s=7200.0, durable=True))
"""Messages are kept for so long."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four topics are many."""
    monkeypatch.setattr(topic_reads, "_AT_ONCE", 4)
    for module in (topic_reads, topic_index):
        monkeypatch.setattr(module, "FEW", 4)


@pytest.fixture
def bench(small: None) -> Bench:
    """With messages in many topics, by turns."""
    bench = Bench()
    for turn in range(ROUNDS):
        for number in range(TOPICS):
            bench.produce(publish(b"%d" % (turn * TOPICS + number), f"topic/t/{number}"))
    bench.commit()
    return bench


def grow_old(bench: Bench) -> list[int]:
    """One message in each topic, which is older than two hours by now, and in no one's memory."""
    ids = bench.produce(*(publish(b"", f"topic/t/{number}") for number in range(TOPICS)))
    bench.now += 4 * 3600
    bench.kill()
    return ids


@pytest.fixture
def retaining(small: None) -> Bench:
    """Keeps messages for two hours, and has one in each topic that is older."""
    bench = Bench(TWO_HOURS)
    grow_old(bench)
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
@pytest.mark.parametrize(
    "failing",
    ["store.contract.MergedPage.add", "hub.damage.DamageReports.decode_or_set_aside"],
    ids=["read", "taken"],
)
def test_what_can_not_be_read_or_taken_is_read_a_second_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failing: str, name: str
) -> None:
    """As with few topics, where who reads gets the exception."""
    taker = Recorder()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError("for a test")

        patch.setattr(f"crosswire.{failing}", fail)
        bench.subscribe("topic/#", taker, name=name, start="earliest", window=1000)
        bench.commit()
        assert taker.payloads == []
    bench.wait(1.1)
    bench.commit()
    assert taker.payloads == EXPECTED


@pytest.mark.parametrize("name", ["", "named"])
def test_what_retention_deletes_between_the_parts_is_reported(
    small: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bench = Bench(TWO_HOURS)
    if name:
        bench.subscribe("topic/#", Recorder(), name=name, start="earliest").close(bench.now)
    ids = grow_old(bench)
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


class EventRecorder(Recorder):
    """Also remembers in which order notices and messages came."""

    def __init__(self, *, settles: bool = False) -> None:
        super().__init__(settles=settles)
        self.events: list[object] = []

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        self.events += [each.envelope.id for each in deliveries]
        super().deliver(attachment, deliveries)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        self.events.append(notice)
        super().notice(attachment, notice)


@pytest.mark.parametrize("number", [1, TOPICS // 2, TOPICS - 1])
def test_a_gap_is_reported_before_what_follows_it(retaining: Bench, number: int) -> None:
    bench = retaining
    taker = EventRecorder()
    attached = bench.subscribe("topic/#", taker, start="earliest", window=1)
    bench.commit()
    bench.hub.topic(f"topic/t/{number}").retain(bench.now)
    bench.commit()
    for _ in range(TOPICS):
        attached.settle(taker.ids[-1:], bench.now)
        bench.commit()
    gone = number + 1
    left = [each for each in range(2, TOPICS + 1) if each != gone]
    assert taker.events == [1, DeliveryGap(2, gone, "retention"), *left]


@pytest.mark.parametrize("number", [0, TOPICS // 2, TOPICS - 1])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_named_subscription_reports_a_gap_before_what_follows_it(
    retaining: Bench, number: int, restarted: bool
) -> None:
    bench = retaining
    loop, taker = bench.hub._core.loop, EventRecorder()
    # Nothing is read before retention deletes.
    loop._is_pumping = True
    bench.subscribe("topic/#", taker, name="named", start="earliest", window=1000)
    bench.commit()
    bench.hub.topic(f"topic/t/{number}").retain(bench.now)
    bench.commit()
    loop._is_pumping = False
    if restarted:
        bench.kill()
        bench.subscribe("topic/#", taker, name="named", window=1000)
    bench.commit()
    gone = number + 1
    left = [each for each in range(1, TOPICS + 1) if each != gone]
    assert taker.events == [DeliveryGap(1, gone, "retention"), *left]


@pytest.mark.parametrize("name", ["", "named"])
def test_what_was_deleted_before_the_earliest_is_no_gap(retaining: Bench, name: str) -> None:
    bench = retaining
    for number in range(0, TOPICS, 2):
        bench.hub.topic(f"topic/t/{number}").retain(bench.now)
    bench.commit()
    earliest, by_id, latest = Recorder(), Recorder(), Recorder()
    bench.subscribe("topic/#", earliest, name=name, start="earliest", window=1000)
    bench.subscribe("topic/#", by_id, name=name and "other", start=AtId(1), window=1000)
    bench.subscribe("topic/#", latest, name=name and "third", start="latest", window=1000)
    bench.commit()
    assert earliest.ids == by_id.ids == list(range(2, TOPICS + 1, 2))
    assert earliest.notices == latest.notices == []
    assert by_id.notices == [DeliveryGap(1, TOPICS - 1, "retention")]


@pytest.mark.parametrize("start", ["earliest", AtId(1), AtTime(1.0)])
def test_a_named_subscription_starts_where_it_was_promised_after_a_restart(
    bench: Bench, start: Start
) -> None:
    """It was acknowledged before anything was read."""
    loop = bench.hub._core.loop
    loop._is_pumping = True
    bench.subscribe("topic/#", Recorder(), name="named", start=start, window=1000)
    bench.commit()
    bench.kill(power=True)
    taker = Recorder()
    bench.subscribe("topic/#", taker, name="named", window=1000)
    bench.commit()
    assert taker.payloads == EXPECTED and not taker.notices


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("name", ["", "named"])
def test_one_that_starts_at_a_time_reads_what_is_later_of_each_topic(
    small: None, name: str, restarted: bool
) -> None:
    bench = Bench()
    later: list[int] = []
    for hour in range(6):
        first = bench.now
        for number in range(TOPICS):
            if number % 3 != hour % 3:
                ids = bench.produce(publish(b"%d" % hour, f"topic/t/{number}"))
                later += ids if hour >= 3 else []
        if hour == 3:
            since = first
        bench.wait(3600)
    if name and restarted:
        bench.hub._core.loop._is_pumping = True
        bench.subscribe("topic/#", Recorder(), name=name, start=AtTime(since))
        bench.commit()
    if restarted:
        bench.kill(power=True)
    taker = Recorder()
    bench.subscribe("topic/#", taker, name=name, start=AtTime(since), window=1000)
    bench.commit()
    assert taker.ids == later and not taker.notices


@pytest.mark.parametrize("back_s", [0, 30, 3500, 10_000])
def test_a_start_at_a_time_passes_over_nothing_that_is_later(back_s: int) -> None:
    """Also where the clock was set back, with a mark for it or without."""
    topic, start_s = Bench().hub.topic("topic/t"), 1_000_000
    times_s = [*range(start_s, start_s + 7000, 10)]
    times_s += [*range(times_s[-1] - back_s, times_s[-1] + 15_000, 10)]
    for identifier, time_s in enumerate(times_s, 1):
        topic.count(identifier, 64 << 10, time_s * 1_000_000)
    assert len(topic._marks) > 20
    for since_s in range(start_s - 100, max(times_s) + 100, 97):
        first = next((n for n, each in enumerate(times_s, 1) if each >= since_s), len(times_s) + 1)
        before = topic.before(since_s * 1_000_000)
        assert before < first
        if not back_s:
            assert first - before < 64 + 60


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("sent", [1, 5])
@pytest.mark.parametrize("back_s", [10, 50, 70, 1800, 2990, 3020, 3100, 10_000])
def test_a_clock_set_back_while_the_hub_was_stopped(back_s: int, sent: int, restarts: int) -> None:
    """Also to a time about or after that of the last mark, which does not show it."""
    bench = Bench()
    began = bench.now
    ids = {bench.produce(publish())[0]: bench.now}
    bench.wait(3000)
    ids[bench.produce(publish())[0]] = bench.now
    bench.now -= back_s
    bench.kill()
    for _ in range(8 // sent):
        # Enough for marks by size.
        found = bench.produce(*(publish(bytes(1 << 20)) for _ in range(sent)))
        ids |= dict.fromkeys(found, bench.now)
        bench.wait(1)
    for _ in range(restarts):
        bench.kill()
    for since in range(int(began) - back_s - 100, int(began) + 3500, 97):
        taker = Recorder()
        bench.subscribe("topic/t", taker, start=AtTime(since), window=100).close(bench.now)
        assert taker.ids == [each for each, at in ids.items() if at >= since], since
    assert bench.store.damage == []


@pytest.mark.parametrize("name", ["", "named"])
def test_topics_come_and_go_while_they_are_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for number in range(0, 10, 3):
        bench.hub.topic(f"topic/t/1{number}/empty")
    bench.commit()
    dispatch = _PartialRead.dispatch
    parts: list[int] = []
    published: list[bytes] = []

    def change(self: _PartialRead, now: float) -> None:
        dispatch(self, now)
        parts.append(1)
        if len(parts) <= 4:
            bench.hub.remove(f"topic/t/1{3 * len(parts) - 3}/empty", now)
            payload = b"new%d" % len(parts)
            published.append(payload)
            bench.hub.produce([publish(payload, f"topic/t/0{len(parts)}")], now)
            bench.commit()

    monkeypatch.setattr(_PartialRead, "dispatch", change)
    taker = Recorder()
    bench.subscribe("topic/#", taker, name=name, start="earliest", window=1000)
    bench.commit()
    assert len(parts) > 4
    assert taker.payloads == EXPECTED + published
    assert taker.ids == sorted(set(taker.ids)) and not taker.notices


def test_a_gap_of_a_topic_that_is_removed_is_reported(retaining: Bench) -> None:
    bench = retaining
    taker = EventRecorder()
    attached = bench.subscribe("topic/#", taker, start="earliest", window=1)
    bench.commit()
    assert taker.ids == [1]
    bench.hub.topic("topic/t/5").retain(bench.now)
    bench.commit()
    bench.hub.remove("topic/t/5", bench.now)
    bench.commit()
    assert taker.notices == [DeliveryGap(2, 6, "retention")]
    for _ in range(TOPICS):
        attached.settle(taker.ids[-1:], bench.now)
        bench.commit()
    assert taker.ids == [1, 2, 3, 4, 5, *range(7, TOPICS + 1)]
    assert len(taker.notices) == 1


def test_few_topics_among_many_names_are_looked_for_once(bench: Bench) -> None:
    for number in range(30):
        bench.produce(publish(b"%d" % number, "topic/t/7/rare"))
    taker = Recorder()
    attached = bench.subscribe("topic/+/+/rare", taker, start="earliest", window=1)
    topics = bench.hub._destinations._known_topics
    assert [each.name for each in topics.few("+/+/rare") or ()] == ["t/7/rare"]
    for _ in range(30):
        attached.settle(taker.ids[-1:], bench.now)
        bench.commit()
    assert taker.payloads == [b"%d" % number for number in range(30)]


def test_audiences_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "_AUDIENCE_ENTRIES", 100)
    bench = Bench()
    takers = [Recorder(settles=True) for _ in range(30)]
    for index, taker in enumerate(takers):
        bench.subscribe("topic/#", taker, name=f"n{index}" if index % 2 else "")
    bench.commit()
    known = bench.hub.subscriptions
    for turn in range(2):
        for number in range(TOPICS):
            bench.produce(publish(b"%d" % (turn * TOPICS + number), f"topic/t/{number}"))
            assert known._audience_entries <= 100
    assert known._audience_entries == sum(each.entries for each in known._audiences.values())
    assert all(taker.payloads == EXPECTED[: 2 * TOPICS] for taker in takers)


@pytest.mark.parametrize("pattern", ["topic/t/1", "topic/#"])
def test_a_gap_is_reported_though_nothing_is_left_after_a_restart(
    small: None, pattern: str
) -> None:
    bench = Bench(TWO_HOURS)
    bench.subscribe(pattern, Recorder(), name="named", start="earliest").close(bench.now)
    ids = grow_old(bench)
    for number in range(TOPICS):
        bench.hub.topic(f"topic/t/{number}").retain(bench.now)
    bench.commit()
    bench.kill()
    taker = Recorder()
    bench.subscribe(pattern, taker, name="named", window=1000)
    bench.commit()
    last = ids[1] if pattern == "topic/t/1" else ids[-1]
    assert not taker.ids
    assert [(each.last, each.reason) for each in taker.notices] == [(last, "retention")]  # type: ignore[union-attr]


def named_with_old_messages(*, settled: int) -> Bench:
    """A named subscription got these messages and five more, all of which are too old by now; what
    was settled is saved in such a way that the five were in memory."""
    bench = Bench(TWO_HOURS)
    taker = Recorder()
    attached = bench.subscribe("topic/#", taker, name="named", window=settled + 1)
    bench.produce(*(publish() for _ in range(settled + 5)))
    attached.settle(taker.ids[:settled], bench.now)
    attached.close(bench.now)
    bench.commit()
    bench.now += 4 * 3600
    bench.kill()
    bench.hub.topic("topic/t").retain(bench.now)
    bench.commit()
    return bench


@pytest.mark.parametrize("settled", [0, 1, 20])
def test_what_retention_deletes_of_what_was_in_memory_is_a_gap(settled: int) -> None:
    bench = named_with_old_messages(settled=settled)
    bench.kill()
    [new] = bench.produce(publish())
    taker = EventRecorder()
    bench.subscribe("topic/#", taker, name="named")
    bench.commit()
    assert taker.events == [DeliveryGap(settled + 1, settled + 5, "retention"), new]


@pytest.mark.parametrize("settled", [0, 1, 20])
def test_a_gap_that_nobody_was_there_for_is_reported_after_a_restart(settled: int) -> None:
    """The position of the subscription is after it: a message has expired since."""
    bench = named_with_old_messages(settled=settled)
    bench.kill()
    bench.produce(publish(expires=int((bench.now + 5) * 1_000_000)))
    bench.wait(6)
    bench.commit()
    gap = DeliveryGap(settled + 1, settled + 5, "retention")
    for _ in range(2):
        bench.kill(power=True)
        bench.wait(1)
        bench.commit()
    [new] = bench.produce(publish())
    taker = EventRecorder()
    attached = bench.subscribe("topic/#", taker, name="named")
    bench.commit()
    assert taker.events == [gap, new]
    # Once it was reported, and that is saved, no more.
    attached.settle(taker.ids, bench.now)
    bench.commit()
    bench.kill()
    later = Recorder()
    bench.subscribe("topic/#", later, name="named")
    bench.commit()
    assert not later.notices and not later.ids


def test_a_saved_gap_that_is_damaged_is_set_aside() -> None:
    bench = named_with_old_messages(settled=1)
    bench.store.save("gap", b"named", b"\xc1")
    bench.commit()
    bench.kill()
    assert any("a record of gap" in each.reason for each in bench.store.damage)
    taker = Recorder()
    bench.subscribe("topic/#", taker, name="named")
    assert taker.notices == [DeliveryGap(2, 6, "retention")]


def test_the_gap_of_a_subscription_is_deleted_with_it() -> None:
    bench = named_with_old_messages(settled=1)
    bench.store.save("gap", b"named", msgspec.msgpack.encode((2, 6)))
    bench.commit()
    bench.kill()
    bench.hub.subscriptions.remove("named")
    bench.commit()
    assert not list(bench.store.load("gap"))
