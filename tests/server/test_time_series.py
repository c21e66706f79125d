"""Time series: bounded rings in three steps, and the sampler that fills them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from crosswire.server.statistics import until_next_sample
from crosswire.server.time_series import TIERS, Measure, SeriesGroup

SECOND, TEN, MINUTE = TIERS


def filled(values: Sequence[tuple[int, float]]) -> SeriesGroup:
    group = SeriesGroup((Measure("mean"), Measure("max", "max")))
    for second, value in values:
        group.add(second, (value, value))
    return group


def test_points_of_a_longer_step_are_means_and_maxima() -> None:
    group = filled([(second, float(second % 10)) for second in range(100, 131)])
    points = group.points(TEN, 10, 13)
    assert points == {"mean": [4.5, 4.5, 4.5, None], "max": [9.0, 9.0, 9.0, None]}
    assert group.points(SECOND, 99, 101)["mean"] == [None, 0.0, 1.0]


def test_what_was_not_measured_is_missing() -> None:
    group = filled([(100, 1.0), (103, 2.0)])
    assert group.points(SECOND, 100, 104)["mean"] == [1.0, None, None, 2.0, None]


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(-99, 99)), max_size=80),
    st.integers(0, 2_000_000_000),
)
def test_a_ring_has_the_last_points_and_nothing_else(
    steps: list[tuple[int, int]], start: int
) -> None:
    second, known = start, {}
    group = SeriesGroup((Measure("x"),))
    for wait, value in steps:
        second += wait
        if second not in known:
            known[second] = float(value)
        group.add(second, (float(value),))
    first = second - 1000
    points = group.points(SECOND, first, second + 5)["x"]
    assert len(points) == 1006
    for number, point in enumerate(points, first):
        is_kept = second - SECOND.points < number
        assert point == (known.get(number) if is_kept else None)


@given(st.floats(0, 1e6), st.lists(st.floats(0, 0.49), min_size=1, max_size=200))
def test_every_second_has_a_sample(begin: float, late_s: list[float]) -> None:
    now, seconds = begin, []
    for each in late_s:
        now += until_next_sample(now) + each
        seconds.append(int(now))
    assert seconds == list(range(int(begin) + 1, int(begin) + 1 + len(late_s)))
