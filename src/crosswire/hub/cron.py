"""Cron expressions: the times that they name, in UTC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from crosswire.errors import InvalidSchedule

__all__ = [
    "MOST_TIMES",
    "NoFurtherTime",
    "check_cron",
    "next_of_cron",
    "previous_of_cron",
    "times_of_cron",
    "utc_text",
]

MOST_TIMES: Final = 1000
"""How many times `times_of_cron` gives at most."""
_YEARS: Final = 100
_YEAR_2000: Final = 946_684_800.0
_CRON_BYTES: Final = 256


class NoFurtherTime(InvalidSchedule):
    """The cron expression has no time after this one."""


def check_cron(expression: str) -> None:
    """Raises InvalidSchedule for what is no cron expression, or never comes in any year."""
    _check_characters(expression)
    _check_times(expression)


def _check_characters(expression: str) -> None:
    """croniter takes seconds for long expressions, and accepts digits of any script."""
    if len(expression) > _CRON_BYTES:
        raise InvalidSchedule(
            f"a cron expression has at most {_CRON_BYTES} bytes, not {len(expression)}"
        )
    if not expression.isascii():
        raise InvalidSchedule(f"{expression!r} is no cron expression: it has other than ASCII")


@lru_cache(maxsize=4096)
def _check_times(expression: str) -> None:
    next(times_of_cron(expression, _YEAR_2000, forward=True))


def next_of_cron(expression: str, after: float) -> float:
    """The first time after this one. Raises InvalidSchedule, NoFurtherTime."""
    return next(times_of_cron(expression, after, forward=True))


def previous_of_cron(expression: str, at: float) -> float:
    """The last time up to this one. Raises InvalidSchedule, NoFurtherTime."""
    # A due time that is exactly now counts.
    return next(times_of_cron(expression, math.floor(at) + 1, forward=False))


def times_of_cron(expression: str, start: float, *, forward: bool) -> Iterator[float]:
    """The times after `start`, or back from it, at most `MOST_TIMES`.

    Raises InvalidSchedule for what is no expression, NoFurtherTime after the last time.
    """
    _check_characters(expression)
    # Half of a command's start-up time would go into this import.
    from croniter import CroniterBadDateError, CroniterError, croniter

    try:
        times = croniter(expression, start, max_years_between_matches=_YEARS)
        for _ in range(MOST_TIMES):
            yield times.get_next(float) if forward else times.get_prev(float)
    except CroniterBadDateError:
        # Its message does not name the expression.
        side = "after" if forward else "before"
        raise NoFurtherTime(f"{expression!r} has no time {side} {utc_text(start)}") from None
    except (CroniterError, ValueError, KeyError, OverflowError, OSError) as error:
        raise InvalidSchedule(f"{expression!r} is no cron expression: {error}") from None


def utc_text(wall: float) -> str:
    """A time for messages; the bare number if no calendar has it."""
    try:
        return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{wall:.0f}"
