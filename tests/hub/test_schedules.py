"""Schedules: one message for each due time, whatever happens in between."""

from __future__ import annotations

import pytest

from crosswire.errors import InvalidDestination, InvalidSchedule, UnknownMessage
from crosswire.hub.schedules import Schedule
from tests.hub.parties import Bench, Recorder, publish, send

START = 1_700_000_000.0  # 22:13:20 UTC


def scheduled(**options: object) -> Schedule:
    return Schedule(id="s", envelope=send(b"tick"), **options)  # type: ignore[arg-type]


def ticking(**options: object) -> tuple[Bench, Recorder]:
    bench, taker = Bench(now=START), Recorder(settles=True)
    bench.consume("queue/q", taker, window=100)
    bench.hub.schedules.add(scheduled(**options), bench.now)
    return bench, taker


def pass_time(bench: Bench, seconds: float) -> None:
    bench.wait(seconds)
    bench.commit()
    bench.commit()


def test_an_interval_fires_at_once_and_then_at_its_times() -> None:
    bench, taker = ticking(interval_s=10.0)
    pass_time(bench, 0)
    assert len(taker.deliveries) == 1
    pass_time(bench, 35)
    assert len(taker.deliveries) == 4
    assert taker.payloads == [b"tick"] * 4


def test_nohaste_waits_for_the_first_interval() -> None:
    bench, taker = ticking(interval_s=10.0, nohaste=True)
    pass_time(bench, 9)
    assert len(taker.deliveries) == 0
    pass_time(bench, 2)
    assert len(taker.deliveries) == 1


def test_cron_never_runs_at_once() -> None:
    bench, taker = ticking(cron="*/15 * * * *")
    pass_time(bench, 0)
    assert len(taker.deliveries) == 0
    pass_time(bench, 3600)
    assert len(taker.deliveries) == 4


def test_a_run_count_ends_it() -> None:
    bench, taker = ticking(interval_s=10.0, run_count=3)
    pass_time(bench, 100)
    assert len(taker.deliveries) == 3
    assert bench.hub.schedules.all() == []
    bench.kill(power=True)
    assert bench.hub.schedules.all() == []


def test_topics_are_scheduled_too() -> None:
    bench, taker = Bench(now=START), Recorder()
    bench.subscribe("topic/t", taker)
    bench.hub.schedules.add(Schedule(id="s", envelope=publish(b"x"), interval_s=5.0), bench.now)
    pass_time(bench, 6)
    assert len(taker.deliveries) == 2


@pytest.mark.parametrize(("missed", "fires"), [("skip", 0), ("once", 1), ("all", 10)])
def test_what_was_missed_while_the_hub_was_down(missed: str, fires: int) -> None:
    bench, taker = ticking(interval_s=10.0, missed=missed)
    pass_time(bench, 5)
    assert len(taker.deliveries) == 1
    bench.now = START + 105
    bench.kill(power=True)
    again = Recorder(settles=True)
    bench.consume("queue/q", again, window=100)
    pass_time(bench, 0)
    assert len(again.deliveries) == fires
    pass_time(bench, 10)
    assert len(again.deliveries) == fires + 1


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_missed_cron_times(missed: str) -> None:
    bench, taker = ticking(cron="0 * * * *", missed=missed)
    bench.commit()
    bench.now = START + 5 * 3600
    bench.kill(power=True)
    bench.consume("queue/q", taker, window=100)
    pass_time(bench, 0)
    assert len(taker.deliveries) == {"skip": 0, "once": 1, "all": 5}[missed]
    pass_time(bench, 3600)
    assert len(taker.deliveries) == {"skip": 1, "once": 2, "all": 6}[missed]


def test_one_fire_for_each_due_time_across_kills() -> None:
    bench, _ = ticking(interval_s=10.0, missed="all", nohaste=True)
    seen: list[bytes] = []
    for step in range(60):
        taker = Recorder(settles=True)
        bench.consume("queue/q", taker, window=100)
        bench.wait(3.5)
        if step % 3:
            bench.commit()
        if step % 7 == 0:
            bench.commit()
            seen += [each.envelope.native["crosswire.schedule"] for each in taker.deliveries]
            bench.commit()
            bench.kill(power=bool(step % 2))
        else:
            bench.commit()
            bench.commit()
            seen += [each.envelope.native["crosswire.schedule"] for each in taker.deliveries]
            for consumer in list(bench.hub.queue("queue/q").consumers):
                consumer.close(bench.now)
    assert [float(each) for each in seen] == [START + 10.0 * each for each in range(1, 22)]


def test_a_kill_before_the_commit_repeats_the_fire_and_only_then() -> None:
    bench, taker = ticking(interval_s=10.0, nohaste=True)
    bench.commit()
    bench.wait(11)
    bench.kill(power=True)
    bench.consume("queue/q", taker, window=100)
    pass_time(bench, 0)
    assert len(taker.deliveries) == 1


def test_a_full_disk_delays_a_fire_but_does_not_lose_it() -> None:
    bench, taker = ticking(interval_s=10.0, nohaste=True)
    bench.commit()
    bench.disk.room_bytes = 1
    pass_time(bench, 11)
    assert len(taker.deliveries) == 0
    bench.disk.room_bytes = 1 << 20
    bench.commit()
    assert len(taker.deliveries) == 1


def test_preview_says_when() -> None:
    bench = Bench(now=START)
    schedule = bench.hub.schedules.add(scheduled(cron="30 * * * *", run_count=2), bench.now)
    assert schedule.preview(5, bench.now) == [START + 1000.0, START + 4600.0]
    schedule = bench.hub.schedules.add(scheduled(interval_s=7.0), bench.now)
    assert schedule.preview(3, bench.now) == [START, START + 7.0, START + 14.0]


def test_the_same_id_replaces_and_removal_ends() -> None:
    bench, taker = ticking(interval_s=10.0, nohaste=True)
    bench.hub.schedules.add(scheduled(interval_s=100.0, nohaste=True), bench.now)
    assert len(bench.hub.schedules.all()) == 1
    pass_time(bench, 50)
    assert len(taker.deliveries) == 0
    bench.hub.schedules.remove("s")
    pass_time(bench, 100)
    assert len(taker.deliveries) == 0
    with pytest.raises(UnknownMessage):
        bench.hub.schedules.remove("s")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interval_s": 5.0, "cron": "* * * * *"},
        {"interval_s": -1.0},
        {"interval_s": float("nan")},
        {"interval_s": float("inf")},
        {"cron": "nonsense"},
        {"cron": "0 0 30 2 *"},
        {"interval_s": 5.0, "run_count": -1},
    ],
)
def test_what_can_not_be_kept_is_refused(options: dict[str, object]) -> None:
    bench = Bench(now=START)
    with pytest.raises(InvalidSchedule):
        bench.hub.schedules.add(scheduled(**options), bench.now)
    assert bench.hub.schedules.all() == []


def test_a_schedule_needs_a_destination() -> None:
    bench = Bench(now=START)
    with pytest.raises(InvalidDestination):
        bench.hub.schedules.add(
            Schedule(id="s", envelope=send(queue="nowhere"), interval_s=1.0), bench.now
        )
    with pytest.raises(InvalidSchedule):
        bench.hub.schedules.add(
            Schedule(id="s", envelope=send(queue="service/s"), interval_s=1.0), bench.now
        )
