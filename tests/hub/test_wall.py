"""A clock that is set: what lasts a while lasts as long as before, and nothing is thrown away."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.envelope import Envelope
from crosswire.errors import CallTimeout, ClockJumped
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, pack
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry, StagingLimits, TopicPolicy
from crosswire.hub.schedules import Schedule
from tests.hub.parties import Bench, Caller, Recorder, Server, publish, send

START = 1_700_000_000.0  # 22:13:20 UTC
HOUR, DAY = 3600.0, 86_400.0
JUMPS = [40 * DAY, HOUR, 2.0, -2.0, -HOUR, -40 * DAY]

jumps = pytest.mark.parametrize("jump", JUMPS)


def times_of(taker: Recorder) -> list[float]:
    return [float(each.envelope.native["crosswire.schedule"]) for each in taker.deliveries]


def pass_time(bench: Bench, seconds: float) -> None:
    bench.wait(seconds)
    bench.commit()
    bench.commit()


# -------------------------------------------------------------------- what lasts a while, running


@jumps
def test_a_call_ends_at_its_deadline(jump: float) -> None:
    bench, caller = Bench(now=START), Caller()
    bench.hub.provide(["service/s"], Server(), bench.now, peer=LedgerPeer("test", "p"))
    request = Envelope(destination="service/s", kind="request")
    bench.hub.call(
        [request], bench.now, answered=caller, peer=LedgerPeer("test", "c"), timeout_s=30.0
    )
    bench.wait(10)
    bench.set_clock(jump)
    bench.wait(19)
    assert caller.answers == []
    bench.wait(2)
    assert [type(each) for each in caller.answers] == [CallTimeout]


@jumps
def test_a_lease_runs_out_after_its_time(jump: float) -> None:
    bench, taker = Bench(now=START), Recorder()
    bench.consume("queue/q", taker, lease_s=30.0)
    bench.produce(send(b"x"))
    bench.wait(10)
    bench.set_clock(jump)
    bench.wait(19)
    assert len(taker.deliveries) == 1
    bench.wait(3)
    assert len(taker.deliveries) == 2


@jumps
def test_a_refused_message_comes_again_after_its_delay(jump: float) -> None:
    policy = QueuePolicy(retry=Retry(first_delay_s=30.0, jitter=0.0))
    bench, taker = Bench(HubConfig(queue=policy), now=START), Recorder()
    consumer = bench.consume("queue/q", taker)
    bench.produce(send(b"x"))
    consumer.refuse(taker.ids, bench.now)
    bench.wait(10)
    bench.set_clock(jump)
    bench.wait(19)
    assert len(taker.deliveries) == 1
    bench.wait(2)
    assert len(taker.deliveries) == 2


@jumps
@pytest.mark.parametrize("restart", [False, True])
def test_a_message_lives_as_long_as_its_queue_says(jump: float, restart: bool) -> None:
    bench = Bench(HubConfig(queue=QueuePolicy(ttl_s=30.0)), now=START)
    bench.produce(send(b"before"))
    bench.wait(10)
    bench.set_clock(jump)
    bench.produce(send(b"after"))
    if restart:
        bench.kill(power=True)
    bench.wait(19)
    taker = Recorder()
    consumer = bench.consume("queue/q", taker, window=10)
    assert taker.payloads == [b"before", b"after"]
    consumer.close(bench.now)
    bench.wait(2)
    assert bench.hub.queue("queue/q").length == 1
    bench.wait(10)
    assert bench.hub.queue("queue/q").length == 0


def test_a_message_outlives_a_jump_and_its_correction() -> None:
    bench = Bench(HubConfig(queue=QueuePolicy(ttl_s=30.0)), now=START)
    bench.produce(send(b"before"))
    bench.set_clock(40 * DAY)
    bench.produce(send(b"between"))
    bench.set_clock(-40 * DAY)
    bench.produce(send(b"after"))
    bench.wait(29)
    assert bench.hub.queue("queue/q").length == 3
    bench.wait(2)
    assert bench.hub.queue("queue/q").length == 0


def test_many_jumps_are_remembered_in_bounded_space() -> None:
    bench = Bench(HubConfig(queue=QueuePolicy(ttl_s=300.0)), now=START)
    bench.produce(send(b"first"))
    for number in range(200):
        bench.set_clock(DAY if number % 2 else -DAY)
    bench.commit()
    bench.kill()
    assert len(bench.hub.wall._jumps) <= 65
    bench.wait(299)
    assert bench.hub.queue("queue/q").length == 1
    bench.wait(3)
    assert bench.hub.queue("queue/q").length == 0
    assert len(bench.hub.reports) < 10


@jumps
def test_staged_attempts_wait_as_long_as_they_may(jump: float) -> None:
    bench = Bench(HubConfig(staging=StagingLimits(staged_s=HOUR)), now=START)
    owner = ProducerKey("anna", "job")
    bench.hub.staging.stage(owner, 1, "a", 0, pack([send(b"x")]), bench.now)
    bench.commit()
    bench.wait(HOUR / 2)
    bench.set_clock(jump)
    bench.wait(HOUR / 2 - 60)
    assert bench.hub.staging.attempts == 1
    bench.kill()
    bench.set_clock(jump)
    bench.wait(HOUR - 60)
    assert bench.hub.staging.attempts == 1
    bench.wait(120)
    assert bench.hub.staging.attempts == 0


@jumps
def test_a_producer_that_commits_once_is_known_for_an_hour(jump: float) -> None:
    bench, owner = Bench(now=START), ProducerKey("anna", "job")
    bench.hub.staging.stage(owner, 1, "a", 0, pack([send(b"x")]), bench.now)
    bench.commit()
    bench.hub.staging.commit(owner, 1, [NamedAttempt("a", 1, 1)], bench.now, once=True)
    pass_time(bench, 1)
    bench.ahead += jump
    bench.kill()
    bench.wait(HOUR - 60)
    assert owner in bench.hub.staging.producers()
    bench.wait(120)
    assert owner not in bench.hub.staging.producers()


# ------------------------------------------------------------------------------------ timestamps


def time_now(bench: Bench) -> float:
    """The timestamp that a message gets."""
    identifier = bench.produce(send(b"x"))[0]
    assert bench.hub.trace(identifier)[0].time == bench.hub.fetch("queue/q", [identifier])[0].time  # type: ignore[union-attr]
    return bench.hub.fetch("queue/q", [identifier])[0].time / 1e6  # type: ignore[union-attr]


def test_timestamps_follow_a_clock_that_is_set_forward_at_once() -> None:
    bench = Bench(now=START)
    assert time_now(bench) == START
    bench.set_clock(40 * DAY)
    assert time_now(bench) == START + 40 * DAY


def test_timestamps_slow_down_until_a_clock_that_was_set_back_has_caught_up() -> None:
    bench = Bench(now=START)
    bench.wait(10)
    bench.set_clock(-HOUR)
    times = [time_now(bench)]
    for _ in range(70 * 6):
        bench.wait(10)
        times.append(time_now(bench))
    assert times[0] == pytest.approx(START + 10)
    assert all(before < after for before, after in pairwise(times))
    assert times[-1] == pytest.approx(bench.now + bench.ahead, abs=0.001)


def test_timestamps_that_are_days_off_are_corrected_at_once() -> None:
    bench = Bench(now=START)
    bench.set_clock(40 * DAY)
    bench.set_clock(-40 * DAY)
    assert time_now(bench) == pytest.approx(START)


def test_small_adjustments_are_followed_without_a_word() -> None:
    bench = Bench(now=START)
    for _ in range(100):
        bench.wait(1)
        bench.set_clock(0.01)
        bench.set_clock(-0.02)
    bench.wait(20)
    assert bench.hub.reports == []
    assert time_now(bench) == pytest.approx(bench.now + bench.ahead, abs=0.01)


def test_a_clock_that_shows_nonsense_is_ignored() -> None:
    bench = Bench(now=START)
    bench.hub.follow_wall(float("nan"), bench.now)
    bench.hub.follow_wall(float("inf"), bench.now)
    assert time_now(bench) == START


# ------------------------------------------------------------------------------------- schedules


def ticking(**options: object) -> tuple[Bench, Recorder]:
    bench, taker = Bench(now=START), Recorder(settles=True)
    bench.consume("queue/q", taker, window=5000)
    schedule = Schedule(id="s", envelope=send(b"tick"), **options)  # type: ignore[arg-type]
    bench.hub.schedules.add(schedule, bench.now)
    bench.commit()
    return bench, taker


@pytest.mark.parametrize(("missed", "fires"), [("skip", 0), ("once", 1), ("all", 1000)])
def test_a_jump_forward_fires_a_bounded_number(missed: str, fires: int) -> None:
    bench, taker = ticking(interval_s=60.0, missed=missed, nohaste=True)
    pass_time(bench, 30)
    bench.set_clock(40 * DAY)
    pass_time(bench, 1)
    assert len(taker.deliveries) == fires


@pytest.mark.parametrize("options", [{"interval_s": 60.0, "nohaste": True}, {"cron": "* * * * *"}])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("corrected_in", ["running", "restart"])
def test_a_wrong_jump_and_its_correction_silence_nothing(
    options: dict[str, object], restart: bool, corrected_in: str
) -> None:
    bench, taker = ticking(**options)
    pass_time(bench, 30)
    bench.set_clock(40 * DAY)
    pass_time(bench, 300)
    assert 5 <= len(taker.deliveries) <= 6
    if restart:
        bench.kill()
        bench.consume("queue/q", taker, window=5000)
    if corrected_in == "running":
        bench.set_clock(-40 * DAY)
    else:
        bench.ahead -= 40 * DAY
        bench.kill()
        bench.consume("queue/q", taker, window=5000)
    before = len(taker.deliveries)
    pass_time(bench, 600)
    assert 9 <= len(taker.deliveries) - before <= 10
    assert all(START < each < START + 2000 for each in times_of(taker)[before:])


def test_an_hour_back_repeats_no_daily_fire() -> None:
    bench, taker = ticking(cron="30 22 * * *")
    pass_time(bench, 1800)
    assert times_of(taker) == [START + 1000]
    bench.set_clock(-HOUR)
    pass_time(bench, 20 * HOUR)
    assert len(taker.deliveries) == 1
    pass_time(bench, 5 * HOUR)
    assert times_of(taker) == [START + 1000, START + 1000 + DAY]


def test_a_cron_expression_means_the_wall_clock_after_days_of_drift() -> None:
    bench, taker = ticking(cron="0 12 16 * *")
    for _ in range(40):
        bench.wait(HOUR)
        bench.set_clock(-0.9)
        bench.commit()
    assert len(taker.deliveries) == 1
    fired = next(step for step in bench.hub.trace(taker.ids[0]) if step.step == "accepted").time
    assert fired / 1e6 == pytest.approx(times_of(taker)[0], abs=0.5)


@pytest.mark.parametrize("nohaste", [False, True])
@pytest.mark.parametrize("back", [3.0, HOUR, DAY - 60, DAY + 3, 3 * DAY + 3, 4000 * DAY])
@pytest.mark.parametrize("restart", [False, True])
def test_an_interval_is_never_shortened_by_a_clock_that_is_set_back(
    nohaste: bool, back: float, restart: bool
) -> None:
    bench, taker = ticking(interval_s=DAY, nohaste=nohaste)
    pass_time(bench, 1)
    fired = len(taker.deliveries)
    assert fired == (0 if nohaste else 1)
    if restart:
        bench.ahead -= back
        bench.kill()
        bench.consume("queue/q", taker, window=100)
    else:
        bench.set_clock(-back)
    pass_time(bench, DAY - 2)
    assert len(taker.deliveries) == fired
    pass_time(bench, 10)
    assert len(taker.deliveries) == fired + 1


def test_many_expressions_are_brought_nearer_in_turns() -> None:
    bench = Bench(now=START)
    for number in range(200):
        cron = f"{number % 60} {number % 24} * * *"
        schedule = Schedule(id=f"s{number}", envelope=send(b"x"), cron=cron)
        bench.hub.schedules.add(schedule, bench.now)
    bench.set_clock(40 * DAY)
    bench.commit()
    bench.wait(1)

    def far() -> int:
        wall = bench.now + bench.ahead
        return sum(each.next_due > wall + 3 * DAY for each in bench.hub.schedules.all())

    bench.set_clock(-40 * DAY)
    assert 100 < far() < 200, "one turn does not do all"
    bench.wait(5)
    assert far() == 0


YEAR = "30 22 14 11 * 0 2023"
"""Its only time is 1,000 s after the start."""


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("cron", [YEAR, "* * * * * 0 2023"])
def test_a_schedule_with_a_year_outlives_a_clock_that_is_wrong_for_a_while(
    cron: str, restart: bool
) -> None:
    bench, taker = ticking(cron=cron, missed="skip")
    pass_time(bench, 1)
    bench.set_clock(3 * 366 * DAY)
    pass_time(bench, 2 * HOUR if restart else 10)
    (dormant,) = bench.hub.schedules.all()
    assert dormant.preview(3, bench.now + bench.ahead) == []
    if restart:
        bench.kill()
        pass_time(bench, 10)
        bench.kill()
        bench.consume("queue/q", taker, window=100)
        bench.set_clock(-3 * 366 * DAY - 2 * HOUR)
    else:
        bench.set_clock(-3 * 366 * DAY)
    before = len(taker.deliveries)
    pass_time(bench, 1100)
    assert START + 1000.0 in times_of(taker)[before:]


def test_a_schedule_with_a_year_that_is_over_ends_after_a_day() -> None:
    bench, _ = ticking(cron=YEAR, missed="skip")
    bench.set_clock(3 * 366 * DAY)
    pass_time(bench, 23 * HOUR)
    assert bench.hub.schedules.all()
    pass_time(bench, 2 * HOUR)
    assert bench.hub.schedules.all() == []


def test_a_retry_of_a_fire_does_not_wait_for_a_clock_that_was_set_back() -> None:
    bench, taker = ticking(interval_s=600.0)
    inject = bench.hub.inject

    def fail(envelope: Envelope, now: float) -> None:
        raise RuntimeError("not now")

    bench.hub.schedules._send = fail
    pass_time(bench, 1)
    bench.hub.schedules._send = inject
    bench.set_clock(-40 * DAY)
    pass_time(bench, 1200)
    assert taker.deliveries


class Ticks:
    """What must hold of a schedule, however the clock is set and the hub restarted."""

    def __init__(self, schedules: list[Schedule]) -> None:
        self.bench = Bench(now=START)
        self.takers: list[Recorder] = []
        self.gap_s = max(each.interval_s or 60.0 for each in schedules)
        for schedule in schedules:
            self.bench.hub.schedules.add(schedule, self.bench.now)
        self.bench.commit()
        self.count = len(schedules)

    def run(self, seconds: float) -> None:
        """Everyone fires, and nobody too much."""
        taker = Recorder(settles=True)
        consumer = self.bench.consume("queue/q", taker, window=100_000)
        pass_time(self.bench, seconds)
        consumer.close(self.bench.now)
        fired = [each.payload for each in (delivery.envelope for delivery in taker.deliveries)]
        for number in range(self.count):
            times = fired.count(b"%d" % number)
            assert 1 <= times <= 1010 + seconds / 10.0, (number, times)


@given(
    st.lists(
        st.sampled_from(
            [
                {"interval_s": 10.0},
                {"interval_s": 60.0, "nohaste": True},
                {"cron": "* * * * *"},
            ]
        ).flatmap(
            lambda options: st.sampled_from(["once", "all"]).map(
                lambda missed: {**options, "missed": missed}
            )
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 3.0, -3.0, HOUR, -HOUR, DAY, -DAY, 40 * DAY, -40 * DAY]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=4,
    ),
)
@settings(max_examples=12, deadline=None)
def test_every_schedule_goes_on_whatever_the_clock_does(
    options: list[dict[str, object]], events: list[tuple[float, bool, bool]]
) -> None:
    schedules = [
        Schedule(id=f"s{number}", envelope=send(b"%d" % number), **each)  # type: ignore[arg-type]
        for number, each in enumerate(options)
    ]
    ticks = Ticks(schedules)
    for jump, restart, first in events:
        if restart and first:
            ticks.bench.kill()
        ticks.bench.ahead += jump
        if restart and not first:
            ticks.bench.kill()
        ticks.bench.look()
        ticks.run(125)
    assert len(ticks.bench.hub.schedules.all()) == len(schedules)


def test_one_fire_for_each_due_time_where_the_clock_only_goes_forward() -> None:
    bench, taker = ticking(interval_s=60.0, nohaste=True, missed="all")
    for step in range(20):
        pass_time(bench, 45)
        if step % 3 == 0:
            bench.set_clock(200.0)
        if step % 4 == 0:
            bench.kill(power=True)
            bench.consume("queue/q", taker, window=5000)
    pass_time(bench, 60)
    times = times_of(taker)
    assert times == [START + 60.0 * each for each in range(1, len(times) + 1)]


# ------------------------------------------------------------------------------------- retention


def filled(*, retention_s: float = 7 * DAY) -> Bench:
    """Six hours of a topic with a mark an hour."""
    bench = Bench(HubConfig(topic=TopicPolicy(retention_s=retention_s)), now=START)
    for _ in range(6):
        bench.produce(publish(b"x"))
        bench.wait(3700)
    bench.commit()
    return bench


def kept(bench: Bench) -> int:
    pass_time(bench, 60)
    return sum(key.startswith(b"m") for key in bench.disk.keys)


def test_retention_takes_nothing_for_a_day_after_a_jump() -> None:
    bench = filled()
    bench.set_clock(40 * DAY)
    assert kept(bench) == 6
    assert any(isinstance(each, ClockJumped) for each in bench.hub.reports)
    assert "retention by age ignores it for 24 h" in str(bench.hub.reports[-1])
    bench.wait(22 * HOUR)
    assert kept(bench) == 6
    bench.wait(3 * HOUR)
    assert kept(bench) == 0
    assert bench.hub.wall.lag_s == 0


def test_meanwhile_retention_goes_on_as_if_nothing_had_happened() -> None:
    bench = filled(retention_s=10 * HOUR)
    bench.set_clock(40 * DAY)
    assert kept(bench) == 6
    bench.wait(8 * HOUR)
    assert 1 < kept(bench) < 6


def test_a_corrected_jump_took_nothing() -> None:
    bench = filled()
    bench.set_clock(40 * DAY)
    bench.wait(HOUR)
    bench.set_clock(-40 * DAY)
    assert bench.hub.wall.lag_s == 0
    bench.wait(3 * DAY)
    assert kept(bench) == 6
    bench.wait(5 * DAY)
    assert kept(bench) == 0


@pytest.mark.parametrize("jump", [40 * DAY, -40 * DAY])
def test_a_clock_that_is_wrong_at_the_start_takes_nothing_for_a_day(jump: float) -> None:
    bench = filled()
    bench.ahead += jump
    bench.kill()
    assert kept(bench) == 6
    assert any(isinstance(each, ClockJumped) for each in bench.hub.reports)
    bench.ahead -= jump
    bench.kill()
    bench.wait(25 * HOUR)
    assert kept(bench) == 6


def test_downtime_counts_after_a_day() -> None:
    bench = filled()
    bench.now += 40 * DAY
    bench.kill()
    assert kept(bench) == 6
    pass_time(bench, 12 * HOUR)
    bench.kill()
    bench.wait(11 * HOUR)
    assert kept(bench) == 6
    bench.wait(2 * HOUR)
    assert kept(bench) == 0


def test_who_stops_every_night_gets_its_retention_all_the_same() -> None:
    bench = filled(retention_s=2 * DAY)
    for _ in range(5):
        bench.now += 14 * HOUR
        bench.kill()
        pass_time(bench, 10 * HOUR)
    assert kept(bench) == 0


def test_a_short_restart_delays_nothing() -> None:
    bench = filled(retention_s=7 * HOUR)
    bench.now += 600
    bench.kill()
    assert bench.hub.wall.lag_s == 0
    assert bench.hub.reports == []


def test_what_was_stored_under_a_wrong_clock_ages_with_what_followed() -> None:
    bench = Bench(HubConfig(topic=TopicPolicy(retention_s=7 * DAY)), now=START)
    bench.set_clock(400 * DAY)
    bench.produce(publish(b"wrong"))
    bench.wait(HOUR)
    bench.set_clock(-400 * DAY)
    for _ in range(3):
        bench.produce(publish(b"right"))
        bench.wait(2 * HOUR)
    bench.kill()
    bench.wait(8 * DAY)
    assert kept(bench) == 0


def test_size_counts_whatever_the_clock_does() -> None:
    policy = TopicPolicy(retention_bytes=1 << 20)
    bench = Bench(HubConfig(topic=policy), now=START)
    bench.set_clock(40 * DAY)
    for _ in range(4):
        bench.produce(*(publish(bytes(1 << 20)) for _ in range(5)))
    assert kept(bench) <= 10


def test_a_record_of_the_clock_that_can_t_be_read_is_reported() -> None:
    bench = filled()
    for value in (b"nonsense", msgspec.msgpack.encode([float("nan"), 0.0, 0.0, []])):
        bench.store.save("clock", b"wall", value)
        bench.commit()
        bench.kill()
        assert "last known time" in str(bench.hub.reports[0])
        assert kept(bench) == 6


@given(st.floats(-1e6, 1e6), st.floats(0.1, 100.0))
@settings(max_examples=50, deadline=None)
def test_rounding_makes_no_schedule_wait_for_ever(ahead: float, interval_s: float) -> None:
    bench, taker = ticking(interval_s=interval_s, nohaste=True, missed="all")
    bench.ahead = ahead
    bench.look()
    pass_time(bench, 0.1)
    taker.deliveries.clear()
    # A second more: so far back is an adjustment, which schedules wait for.
    pass_time(bench, 3.5 * interval_s + 1.0)
    assert 3 <= len(taker.deliveries) <= 1014


@given(st.floats(-1e9, 1e9), st.floats(0.001, 1e6))
def test_what_expires_has_expired_at_its_expiry(ahead: float, ttl_s: float) -> None:
    bench = Bench(now=START)
    bench.ahead = ahead
    bench.look()
    wall = bench.hub.wall
    envelope = send(b"x", expires=wall.expires_us(bench.now, ttl_s), id=7)
    assert wall.is_expired(envelope, int(wall.expiry(envelope) * 1_000_000))
    bench.set_clock(-ahead)
    assert wall.is_expired(envelope, int(wall.expiry(envelope) * 1_000_000))


def test_the_last_known_time_is_not_what_fills_a_disk() -> None:
    bench = Bench(now=START)
    bench.wait(1)
    bench.commit()
    bench.disk.room_bytes = 0
    bench.wait(300)
    bench.set_clock(HOUR)
    bench.commit()
    assert bench.store.last_error is None
    bench.disk.room_bytes = 1 << 20
    bench.wait(120)
    bench.commit()
    bench.kill()
    assert bench.hub.reports == []
