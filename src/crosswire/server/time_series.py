"""Time series in memory: a second for five minutes, ten seconds for two hours, a minute for a day.

Values are 32-bit floats in rings of fixed size, so that what a series takes does not grow.
"""

from __future__ import annotations

from array import array
from math import isnan, nan
from typing import Final, Literal, NamedTuple

__all__ = ["TIERS", "Measure", "SeriesGroup", "Tier"]


class Tier(NamedTuple):
    """Points that are `step_s` apart, and how many of them are kept."""

    step_s: int
    points: int


TIERS: Final = (Tier(1, 300), Tier(10, 720), Tier(60, 1440))


class Measure(NamedTuple):
    """A name, and how points of a longer step are made: of rates the mean, of latencies and ages
    the largest."""

    name: str
    combined: Literal["mean", "max"] = "mean"


class _Ring:
    """The points of one tier; `last` is the number of the newest."""

    __slots__ = ("first", "last", "values")

    def __init__(self, points: int) -> None:
        self.values = array("f", [nan]) * points
        self.first = 0
        self.last = -1

    def put(self, number: int, value: float) -> None:
        size = len(self.values)
        if self.last < 0:
            self.first = number
        elif number <= self.last:
            return
        else:
            # Points that were missed, since the loop was busy or the machine suspended.
            for each in range(max(self.last + 1, number - size), number):
                self.values[each % size] = nan
        self.values[number % size] = value
        self.last = number

    def get(self, number: int) -> float | None:
        if not max(self.first, self.last - len(self.values) + 1) <= number <= self.last:
            return None
        value = self.values[number % len(self.values)]
        return None if isnan(value) else value


class _Series:
    """One measure in all tiers."""

    __slots__ = ("_is_mean", "_sums", "rings")

    def __init__(self, measure: Measure) -> None:
        self.rings = [_Ring(tier.points) for tier in TIERS]
        self._is_mean = measure.combined == "mean"
        # Of each longer tier: the number of the point that is being made, its sum or maximum, and
        # how many values are in it.
        self._sums = [[-1, 0.0, 0] for _ in TIERS[1:]]

    def add(self, second: int, value: float) -> None:
        self.rings[0].put(second, value)
        for index, tier in enumerate(TIERS[1:]):
            number, total, count = self._sums[index]
            current = second // tier.step_s
            if number != current:
                if count:
                    self.rings[index + 1].put(
                        int(number), total / count if self._is_mean else total
                    )
                total, count = 0.0, 0
            total = total + value if self._is_mean else max(total, value)
            self._sums[index] = [current, total, count + 1]


class SeriesGroup:
    """The series of one name: a value for each measure every second."""

    __slots__ = ("_series", "measures")

    def __init__(self, measures: tuple[Measure, ...]) -> None:
        self.measures = measures
        self._series = [_Series(measure) for measure in measures]

    def add(self, second: int, values: tuple[float, ...]) -> None:
        """The values of this second, in the order of the measures."""
        for series, value in zip(self._series, values, strict=True):
            series.add(second, value)

    def points(self, tier: Tier, first: int, last: int) -> dict[str, list[float | None]]:
        """By measure, the points with these numbers; None where there is none."""
        index = TIERS.index(tier)
        return {
            measure.name: [series.rings[index].get(number) for number in range(first, last + 1)]
            for measure, series in zip(self.measures, self._series, strict=True)
        }
