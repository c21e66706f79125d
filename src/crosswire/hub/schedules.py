"""Schedules: stored envelopes that are sent when their time has come, once for each time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from crosswire.envelope import (
    LARGEST_INTEGER,
    SCHEDULED,
    Envelope,
    parse_destination,
    parse_stored_destination,
)
from crosswire.errors import HubError, InvalidSchedule, RecordDamaged, UnknownMessage
from crosswire.store.records import reader

if TYPE_CHECKING:
    from crosswire.hub.hub import Hub

__all__ = ["Schedule", "Schedules", "check_cron", "check_interval"]

_SPACE: Final = "schedule"
_GRACE_S: Final = 1.0
_AT_ONCE: Final = 1000
_LEAST_INTERVAL_S: Final = 0.1
_MOST_INTERVAL_S: Final = 10 * 365 * 86_400.0
_LAST_DUE_S: Final = 253_402_300_800.0
"""The year 10000, which no calendar of ours has."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Every `interval_s`, or at the times of a `cron` expression, which is read in UTC.

    It fires `run_count` times, 0 for ever. Due times that passed while the hub was down are left
    out (`skip`), made up for with one message (`once`), or each of them (`all`). An interval fires
    at once, too, unless `nohaste`; a cron expression never does.
    """

    id: str
    envelope: Envelope
    interval_s: float = 0.0
    cron: str = ""
    run_count: int = 0
    missed: Literal["skip", "once", "all"] = "once"
    nohaste: bool = False
    next_due: float = 0.0
    fired: int = 0

    def following(self, due: float) -> float:
        """The due time after this one."""
        if not self.cron:
            return due + self.interval_s
        return _next_of_cron(self.cron, due)

    def preview(self, count: int, now: float) -> list[float]:
        """The next due times, at most as many as it has left to fire."""
        left = count if not self.run_count else min(count, self.run_count - self.fired)
        due = self.next_due or self.first_due(now)
        times = []
        for _ in range(left):
            times.append(due)
            due = self.following(due)
        return times

    def says_the_same(self, other: Schedule) -> bool:
        """Was it added with the same words, however far it has come since?"""
        return self == msgspec.structs.replace(other, next_due=self.next_due, fired=self.fired)

    def first_due(self, now: float) -> float:
        if self.cron:
            return _next_of_cron(self.cron, now)
        return now + self.interval_s if self.nohaste else now

    def last_due_before(self, now: float) -> float:
        """The latest due time that is not in the future; `next_due` is known to be past."""
        if not self.cron:
            return (
                self.next_due
                + math.floor((now - self.next_due) / self.interval_s) * self.interval_s
            )
        return _previous_of_cron(self.cron, now)


_encode = msgspec.msgpack.Encoder().encode
_read: Callable[[bytes], Schedule] = reader(Schedule, "a schedule")


class Schedules:
    """A fire and the next due time are written together: neither is there without the other."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._schedules: dict[str, Schedule] = {}
        self._due: list[tuple[float, str]] = []
        for key, value in hub.store.load(_SPACE):
            try:
                schedule = _read(value)
                _check_kept(schedule, key)
            except HubError as error:
                hub.set_aside_state(_SPACE, key, value, error)
                continue
            self._schedules[schedule.id] = schedule
            heapq.heappush(self._due, (schedule.next_due, schedule.id))
        self._wake()

    def add(self, schedule: Schedule, now: float) -> Schedule:
        """Keep it, in place of one with the same id. Raises InvalidSchedule."""
        if bool(schedule.cron) == bool(schedule.interval_s):
            raise InvalidSchedule("a schedule has an interval or a cron expression, one of them")
        if not schedule.cron:
            check_interval(schedule.interval_s)
        if not 0 <= schedule.run_count <= LARGEST_INTEGER:
            raise InvalidSchedule("a run count is 0 to 2^63 - 1")
        if parse_destination(schedule.envelope.destination).kind == "service":
            raise InvalidSchedule("a schedule sends to a queue or a topic")
        kept: Schedule = msgspec.structs.replace(
            schedule, next_due=schedule.first_due(now), fired=0
        )
        self._schedules[kept.id] = kept
        self._save(kept)
        heapq.heappush(self._due, (kept.next_due, kept.id))
        self._wake()
        return kept

    def remove(self, identifier: str) -> Schedule:
        """Raises UnknownMessage."""
        schedule = self._schedules.pop(identifier, None)
        if schedule is None:
            raise UnknownMessage(f"there is no schedule {identifier!r}")
        self._hub.store.drop(_SPACE, identifier.encode())
        self._hub.store.request()
        return schedule

    def all(self) -> list[Schedule]:
        return sorted(self._schedules.values(), key=lambda each: each.id)

    def get(self, identifier: str) -> Schedule | None:
        return self._schedules.get(identifier)

    def _save(self, schedule: Schedule) -> None:
        self._hub.store.save(_SPACE, schedule.id.encode(), _encode(schedule))
        self._hub.store.request()

    def _wake(self) -> None:
        if self._due:
            self._hub.call_at_least(self, self._due[0][0], self._on_time)

    def _on_time(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, identifier = heapq.heappop(self._due)
            schedule = self._schedules.get(identifier)
            if schedule is not None and schedule.next_due == due:
                self._advance(schedule, now)
        self._wake()

    def _advance(self, schedule: Schedule, now: float) -> None:
        """Fire what is due, and remember in the same group that it was."""
        times, next_due = _due_times(schedule, now)
        if schedule.run_count:
            times = times[: schedule.run_count - schedule.fired]
        for due in times:
            native = {**schedule.envelope.native, SCHEDULED: repr(due).encode()}
            self._hub.inject(schedule.envelope.replace(native=native), now)
        fired = schedule.fired + len(times)
        if schedule.run_count and fired >= schedule.run_count:
            self.remove(schedule.id)
            return
        schedule = msgspec.structs.replace(schedule, next_due=next_due, fired=fired)
        self._schedules[schedule.id] = schedule
        self._save(schedule)
        heapq.heappush(self._due, (next_due, schedule.id))


def _due_times(schedule: Schedule, now: float) -> tuple[list[float], float]:
    """Which of the times since `next_due` to fire for, and the one to wait for then."""
    if schedule.missed == "all":
        times: list[float] = []
        due = schedule.next_due
        while due <= now and len(times) < _AT_ONCE:
            times.append(due)
            due = schedule.following(due)
        return times, due
    last = schedule.last_due_before(now)
    if schedule.missed == "skip" and last < now - _GRACE_S:
        return [], schedule.following(last)
    return [last], schedule.following(last)


def _check_kept(schedule: Schedule, key: bytes) -> None:
    """Can it go on? Raises RecordDamaged, or what is wrong with it.

    An interval that an earlier version allowed is no damage: it only has to be one.
    """
    if schedule.id.encode() != key:
        raise RecordDamaged(f"the schedule {schedule.id[:80]!r} has the key of another")
    if not 0 <= schedule.next_due <= _LAST_DUE_S:
        raise RecordDamaged(f"the schedule {schedule.id[:80]!r} is due at {schedule.next_due}")
    if bool(schedule.cron) == bool(schedule.interval_s) or not 0 <= schedule.interval_s < inf:
        raise RecordDamaged(f"the schedule {schedule.id[:80]!r} has no interval")
    if min(schedule.run_count, schedule.fired) < 0:
        raise RecordDamaged(f"the schedule {schedule.id[:80]!r} has a negative count")
    if schedule.cron:
        check_cron(schedule.cron)
    if parse_stored_destination(schedule.envelope.destination).kind == "service":
        raise RecordDamaged(f"the schedule {schedule.id[:80]!r} calls a service")


def check_interval(interval_s: float) -> None:
    """Raises InvalidSchedule; one that is not a number is no interval either."""
    if not _LEAST_INTERVAL_S <= interval_s <= _MOST_INTERVAL_S:
        raise InvalidSchedule(f"an interval is 0.1 s to 10 years, not {interval_s} s")


@lru_cache(maxsize=4096)
def check_cron(expression: str) -> None:
    """Raises InvalidSchedule."""
    _next_of_cron(expression, 0.0)


def _next_of_cron(expression: str, after: float) -> float:
    return _step_of_cron(expression, after, forward=True)


def _previous_of_cron(expression: str, at: float) -> float:
    # A due time that is exactly now counts.
    return _step_of_cron(expression, math.floor(at) + 1, forward=False)


def _step_of_cron(expression: str, start: float, *, forward: bool) -> float:
    """Raises InvalidSchedule for what is no cron expression or never comes."""
    # Half of a command's start-up time would go into this import.
    from croniter import CroniterError, croniter

    try:
        times = croniter(expression, start)
        found: float = times.get_next(float) if forward else times.get_prev(float)
    except (CroniterError, ValueError, KeyError) as error:
        raise InvalidSchedule(f"{expression!r} is no cron expression: {error}") from None
    return found
