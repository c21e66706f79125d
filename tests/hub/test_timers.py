"""Timers: one that raises harms nobody else, and nothing keeps the clock busy for ever."""

from __future__ import annotations

import pytest

from crosswire.hub.dispatch import Callbacks
from crosswire.hub.timers import Timers
from tests.hub.parties import Bench


def fail(_now: float) -> None:
    raise RuntimeError("a timer that fails")


def make() -> tuple[Timers, Callbacks, list[tuple[str, float]]]:
    callbacks = Callbacks()
    return Timers(callbacks), callbacks, []


def test_one_that_raises_does_not_stop_the_others() -> None:
    timers, callbacks, ran = make()
    timers.at(1.0, lambda now: ran.append(("before", now)))
    timers.at(2.0, fail)
    timers.at(3.0, lambda now: ran.append(("after", now)))
    timers.run(5.0)
    assert ran == [("before", 5.0), ("after", 5.0)]
    assert callbacks.failed["timer"] == 1
    assert timers.next_due() is None


def test_an_owner_that_raises_is_called_again_after_a_second() -> None:
    timers, callbacks, ran = make()
    owner = object()

    def fail_twice(now: float) -> None:
        ran.append(("owner", now))
        if len(ran) < 3:
            raise RuntimeError("not yet")

    timers.at_least(owner, 1.0, fail_twice)
    now = 1.0
    while (due := timers.next_due()) is not None:
        now = due
        timers.run(now)
    assert ran == [("owner", 1.0), ("owner", 2.0), ("owner", 3.0)]
    assert callbacks.failed["timer"] == 2
    timers.at_least(owner, 9.0, fail_twice)
    assert timers.next_due() == 9.0


def test_an_owner_that_raises_after_asking_for_its_next_time_keeps_the_earlier_one() -> None:
    timers, _, ran = make()
    owner = object()

    def ask_and_fail(now: float) -> None:
        ran.append(("owner", now))
        timers.at_least(owner, now + 0.25, lambda at: ran.append(("next", at)))
        raise RuntimeError("too late")

    timers.at_least(owner, 1.0, ask_and_fail)
    timers.run(1.0)
    timers.run(1.25)
    assert ran == [("owner", 1.0), ("next", 1.25)]
    assert timers.next_due() is None


def test_the_rest_stays_due_when_the_turn_is_over() -> None:
    ran: list[int] = []
    timers = Timers(Callbacks(), lambda: len(ran) % 2 == 0)
    owner = object()
    for number in range(5):
        timers.at(1.0 + number, lambda _, number=number: ran.append(number))  # type: ignore[misc]
    timers.at_least(owner, 6.0, lambda _: ran.append(5))
    timers.run(10.0)
    assert ran == [0, 1]
    assert timers.next_due() == 3.0
    timers.run(10.0)
    timers.run(10.0)
    assert ran == [0, 1, 2, 3, 4, 5]
    assert timers.next_due() is None


def test_an_owner_is_called_for_the_earliest_of_its_times_only() -> None:
    timers, _, ran = make()
    owner = object()
    for due in (5.0, 3.0, 1.0, 2.0, 4.0):
        timers.at_least(owner, due, lambda now: ran.append(("owner", now)))
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        timers.run(now)
    assert ran == [("owner", 1.0)]
    timers.at_least(owner, 6.0, lambda now: ran.append(("owner", now)))
    timers.run(6.0)
    assert ran == [("owner", 1.0), ("owner", 6.0)]


def test_what_is_always_due_again_waits_for_the_next_turn() -> None:
    timers, _, ran = make()

    def again(now: float) -> None:
        ran.append(("again", now))
        timers.at(now, again)

    timers.at(1.0, again)
    timers.at(1.0, lambda now: ran.append(("other", now)))
    timers.run(1.0)
    assert ran == [("again", 1.0), ("other", 1.0)]
    assert timers.next_due() == 1.0


def test_an_interrupt_loses_no_timer() -> None:
    timers, _, ran = make()

    def interrupt(_now: float) -> None:
        raise KeyboardInterrupt

    timers.at(1.0, interrupt)
    timers.at(2.0, lambda now: ran.append(("after", now)))
    with pytest.raises(KeyboardInterrupt):
        timers.run(5.0)
    timers.run(5.0)
    assert ran == [("after", 5.0)]


def test_housekeeping_goes_on_when_a_part_of_it_raises() -> None:
    bench = Bench()
    kept: list[float] = []

    def retain(now: float) -> None:
        kept.append(now)
        raise RuntimeError("this topic can't")

    bench.hub.topic("topic/broken").retain = retain  # type: ignore[method-assign]
    fine = bench.hub.topic("topic/fine")
    fine.retain = kept.append  # type: ignore[method-assign]
    bench.wait(35)
    assert len(kept) == 6
    assert bench.hub.callbacks.failed["housekeeping"] == 3
