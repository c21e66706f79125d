"""Schedules: one message for each due time, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from crosswire.errors import (
    InvalidDestination,
    InvalidSchedule,
    QuotaExceeded,
    StoreFailed,
    StoreFull,
    UnknownMessage,
)
from crosswire.hub.schedules import Schedule
from crosswire.store.contract import StoreLimits
from tests.hub.parties import Bench, Recorder, publish, send

START = 1_700_000_000.0  # 22:13:20 UTC


def scheduled(**options: object) -> Schedule:
    return Schedule(id="s", envelope=send(b"tick"), **options)  # type: ignore[arg-type]


def ticking(**options: object) -> tuple[Bench, Recorder]:
    bench, taker = Bench(now=START), Recorder(settles=True)
    bench.consume("queue/q", taker, window=100)
    bench.hub.schedules.add(scheduled(**options), bench.now)
    bench.commit()
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
    bench.commit()
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
        {"interval_s": 0.0999},
        {"interval_s": 3651 * 86_400.0},
        {"cron": "0 0 1 1 * 0 2020"},
        {"cron": "nonsense"},
        {"cron": "0 0 30 2 *"},
        {"cron": "* * * * " + "1," * 126},
        {"cron": "1," * 500_000 + "1 * * * *"},
        {"cron": "\u0661 * * * *"},
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


# ---------------------------------------------------------------------- one that can't harms nobody

LAST = "30 22 14 11 * 0 2023"
"""Its only time is 1,000 s after the start."""


def times_of(taker: Recorder) -> list[float]:
    return [float(each.envelope.native["crosswire.schedule"]) for each in taker.deliveries]


def test_a_cron_expression_without_a_further_time_ends() -> None:
    bench, taker = ticking(cron=LAST)
    other = Schedule(id="other", envelope=send(b"x", "queue/o"), interval_s=600.0)
    bench.hub.schedules.add(other, bench.now)
    bench.commit()
    pass_time(bench, 3600)
    assert times_of(taker) == [START + 1000.0]
    assert [each.id for each in bench.hub.schedules.all()] == ["other"]
    assert bench.hub.queue("queue/o").length == 7
    assert "no further time" in str(bench.hub.reports[-1])
    bench.kill(power=True)
    assert [each.id for each in bench.hub.schedules.all()] == ["other"]
    pass_time(bench, 3600)
    assert bench.hub.queue("queue/o").length == 13


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_the_last_time_of_an_expression_may_pass_while_the_hub_is_down(missed: str) -> None:
    bench, _ = ticking(cron=LAST, missed=missed)
    bench.commit()
    bench.now += 5000
    bench.kill(power=True)
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=100)
    pass_time(bench, 1)
    assert len(taker.deliveries) == (0 if missed == "skip" else 1)
    assert bench.hub.schedules.all() == []


def test_a_preview_ends_with_the_last_time() -> None:
    schedule = scheduled(cron=LAST)
    assert schedule.preview(5, START) == [START + 1000.0]
    with pytest.raises(InvalidSchedule, match="no time after"):
        schedule.preview(5, START + 2000)


def test_one_for_a_queue_too_many_is_refused_when_it_is_added() -> None:
    bench = Bench(now=START, limits=StoreLimits(spare_bytes=1, destinations=1))
    schedules = bench.hub.schedules
    schedules.add(scheduled(interval_s=60.0), bench.now)
    new = Schedule(id="new", envelope=send(b"x", "queue/new"), interval_s=600.0)
    with pytest.raises(QuotaExceeded, match="more than 1 destinations"):
        schedules.add(new, bench.now)
    bench.commit()
    assert [each.id for each in schedules.all()] == ["s"]


def test_one_that_may_not_send_is_tried_again_and_the_others_go_on() -> None:
    bench = Bench(now=START)
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=100)
    schedules = bench.hub.schedules
    schedules.add(scheduled(interval_s=60.0), bench.now)
    refused = Schedule(id="new", envelope=send(b"x", "queue/new"), interval_s=600.0)
    schedules.add(refused, bench.now)
    schedules.may_send = lambda _principal, destination: destination == "queue/q"
    bench.commit()
    pass_time(bench, 300)
    assert len(taker.deliveries) == 6
    assert schedules.failed > 3
    reports = [str(each) for each in bench.hub.reports if "schedule new" in str(each)]
    assert len(reports) == 1 and "no longer send" in reports[0]
    bench.kill(power=True)
    assert {each.id for each in bench.hub.schedules.all()} == {"new", "s"}
    pass_time(bench, 60)
    assert bench.hub.queue("queue/new").length == 1


def test_retries_of_a_fire_slow_down() -> None:
    bench = Bench(now=START)
    bench.hub.schedules.may_send = lambda _principal, _destination: False
    bench.hub.schedules.add(scheduled(interval_s=1.0), bench.now)
    bench.commit()
    pass_time(bench, 3600)
    assert 60 <= bench.hub.schedules.failed <= 80


def test_a_fire_that_raises_anything_else_is_tried_again_too() -> None:
    bench, taker = ticking(interval_s=10.0, nohaste=True)
    inject, calls = bench.hub.inject, []

    def fail(envelope: object, now: float) -> None:
        calls.append(now)
        raise RuntimeError("a mistake in the hub")

    bench.hub.schedules._send = fail
    pass_time(bench, 12)
    bench.hub.schedules._send = inject
    pass_time(bench, 25)
    assert len(calls) == 2
    assert bench.hub.callbacks.failed["schedule"] == 2
    assert times_of(taker) == [START + 10.0, START + 20.0, START + 30.0]


@pytest.mark.parametrize(
    "fields",
    [
        {"interval_s": float("nan")},
        {"interval_s": -1.0},
        {"interval_s": 1e300},
        {"next_due": float("nan"), "interval_s": 1.0},
        {"next_due": float("-inf"), "interval_s": 1.0},
        {"next_due": 1e300, "cron": "* * * * *"},
        {"cron": "this is no expression"},
        {"cron": "0 0 1 1 * 0 2020"},
        {"cron": "* * * * " + "1," * 100_000 + "1"},
    ],
)
def test_a_hub_starts_with_whatever_is_stored_as_a_schedule(fields: dict[str, object]) -> None:
    bench, _ = ticking(interval_s=10.0, nohaste=True)
    stored = msgspec.structs.replace(scheduled(), id="odd", **fields)
    bench.store.save("schedule", b"odd", msgspec.msgpack.encode(stored))
    bench.hub.commits.request()
    bench.commit()
    bench.kill(power=True)
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=1000)
    pass_time(bench, 35)
    fired = [each for each in times_of(taker) if each in (START + 10, START + 20, START + 30)]
    assert len(fired) == 3
    odd = bench.hub.schedules.get("odd")
    assert bench.hub.reports or (odd is not None and odd.next_due < START + 120)


def test_an_interval_that_was_allowed_once_is_lengthened() -> None:
    bench = Bench(now=START)
    stored = scheduled(interval_s=0.001, next_due=START)
    bench.store.save("schedule", b"s", msgspec.msgpack.encode(stored))
    bench.commit()
    bench.kill()
    pass_time(bench, 1.05)
    assert bench.hub.queue("queue/q").length == 11


# ------------------------------------------------------------------------------ bounded catching up


@pytest.mark.parametrize("options", [{"interval_s": 1.0}, {"cron": "* * * * *"}])
def test_all_that_was_missed_is_bounded(options: dict[str, object]) -> None:
    bench, taker = ticking(missed="all", nohaste=True, **options)
    step = 1.0 if "interval_s" in options else 60.0
    bench.commit()
    bench.now += 82_800 * step
    bench.kill(power=True)
    taker = Recorder(settles=True)
    bench.consume("queue/q", taker, window=5000)
    bench.hub.handle_deadline(bench.now)
    bench.commit()
    assert 0 < len(taker.deliveries) <= 1100
    start = bench.now
    pass_time(bench, 0.5)
    times = times_of(taker)
    assert len(times) == len(set(times)) == 1000
    assert times == sorted(times)
    assert start - step < times[-1] <= start
    assert any("left out" in str(each) for each in bench.hub.reports)
    pass_time(bench, 5 * step)
    assert len(taker.deliveries) == 1005


@pytest.mark.slow
def test_many_schedules_that_are_due_together_take_several_turns() -> None:
    bench = Bench(now=START)
    for number in range(2500):
        each = Schedule(id=f"s{number}", envelope=send(b"x"), interval_s=60.0)
        bench.hub.schedules.add(each, bench.now)
    bench.hub.handle_deadline(bench.now)
    assert bench.hub.queue("queue/q").length <= 1000
    pass_time(bench, 1)
    assert bench.hub.queue("queue/q").length == 2500


def test_replacing_and_removing_leaves_nothing_to_wait_for() -> None:
    bench = Bench(now=START)
    schedules = bench.hub.schedules
    for _ in range(5000):
        schedules.add(scheduled(interval_s=86_400.0, nohaste=True), bench.now)
    assert len(schedules._due) < 2000


def test_one_that_fired_too_often_ends() -> None:
    bench = Bench(now=START)
    stored = scheduled(interval_s=1.0, next_due=START, run_count=3, fired=5, missed="all")
    bench.store.save("schedule", b"s", msgspec.msgpack.encode(stored))
    bench.commit()
    bench.now += 100
    bench.kill()
    pass_time(bench, 1)
    assert bench.hub.schedules.all() == []
    assert bench.hub.queue("queue/q").length == 0


# --------------------------------------------------------------------- what is refused is not there


def test_nothing_is_scheduled_on_a_full_disk() -> None:
    bench = Bench(now=START)
    bench.disk.room_bytes = 0
    with pytest.raises(StoreFull, match="there is no room on the disk"):
        bench.hub.schedules.add(scheduled(interval_s=1.0), bench.now)
    bench.disk.room_bytes = 1 << 40
    pass_time(bench, 60)
    bench.kill()
    assert bench.hub.schedules.all() == [] and not bench.hub.queue("queue/q").length


def failing(bench: Bench, meanwhile: Callable[[], object] = list) -> None:
    """Let the next commit fail."""
    write = bench.disk.write

    def fail(_operations: object) -> None:
        bench.disk.write = write  # type: ignore[method-assign]
        meanwhile()
        raise StoreFailed("IO error: /data/000123.log: No such device")

    bench.disk.write = fail  # type: ignore[method-assign]


def test_one_whose_commit_fails_never_fires_and_the_one_before_it_goes_on() -> None:
    bench = Bench(now=START)
    schedules = bench.hub.schedules
    schedules.add(scheduled(interval_s=100.0, nohaste=True), bench.now)
    bench.commit()
    failing(bench)
    schedules.add(scheduled(interval_s=1.0), bench.now)
    new = Schedule(id="new", envelope=send(b"x", "queue/n"), interval_s=1.0)
    schedules.add(new, bench.now)
    receipt = bench.hub.committed()
    bench.commit()
    assert str(receipt.error) == "the disk can't be written"
    for _ in range(2):
        (kept,) = bench.hub.schedules.all()
        assert kept.interval_s == 100.0 and kept.next_due == START + 100
        bench.commit()
        bench.kill(power=True)
    pass_time(bench, 150)
    assert bench.hub.queue("queue/q").length == 1
    assert not bench.hub.queue("queue/n").length


def test_a_removal_that_can_t_be_written_is_undone() -> None:
    bench, taker = ticking(interval_s=10.0, nohaste=True)
    failing(bench)
    bench.hub.schedules.remove("s")
    bench.commit()
    with pytest.raises(StoreFailed, match=r"^the disk can't be written$"):
        bench.hub.schedules.remove("s")
    bench.commit()
    pass_time(bench, 15)
    assert len(taker.deliveries) == 1
    bench.hub.schedules.remove("s")
    bench.commit()
    bench.kill(power=True)
    assert bench.hub.schedules.all() == []


def test_a_later_change_that_is_written_counts() -> None:
    bench, _ = ticking(interval_s=10.0, nohaste=True)
    schedules = bench.hub.schedules
    failing(bench, lambda: schedules.add(scheduled(interval_s=30.0), bench.now))
    schedules.add(scheduled(interval_s=20.0), bench.now)
    bench.commit()
    bench.commit()
    bench.kill(power=True)
    (kept,) = bench.hub.schedules.all()
    assert kept.interval_s == 30.0
    schedules = bench.hub.schedules
    schedules.add(scheduled(interval_s=40.0), bench.now)
    failing(bench, lambda: schedules.add(scheduled(interval_s=50.0), bench.now))
    bench.commit()
    failing(bench)
    bench.commit()
    bench.commit()
    (kept,) = schedules.all()
    assert kept.interval_s == 30.0, "neither of the two was written"


def test_none_fires_before_it_is_on_disk() -> None:
    bench = Bench(now=START)
    bench.hub.schedules.add(scheduled(interval_s=1.0), bench.now)
    bench.wait(5)
    assert not bench.hub.queue("queue/q").waiting and not bench.hub.queue("queue/q").length
    pass_time(bench, 0)
    assert bench.hub.queue("queue/q").length == 1


@pytest.mark.parametrize("identifier", ["", "a\nb", "a\0", "x" * 256, "\ud800"])
def test_an_id_is_short_and_printable(identifier: str) -> None:
    bench = Bench(now=START)
    schedule = Schedule(id=identifier, envelope=send(), interval_s=1.0)
    with pytest.raises(InvalidSchedule, match="printable"):
        bench.hub.schedules.add(schedule, bench.now)
