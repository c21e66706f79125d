"""Schedules: stored envelopes that are sent when their time has come, once for each time.

Due times are times of the wall clock. One schedule that can't fire, or has no further time, harms
no other: it is reported and tried again later, or removed.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from math import inf
from typing import Final, Literal

import msgspec

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import (
    LARGEST_INTEGER,
    SCHEDULED,
    Envelope,
    parse_destination,
    parse_stored_destination,
)
from crosswire.errors import (
    Forbidden,
    HubError,
    InvalidSchedule,
    RecordDamaged,
    UnknownMessage,
)
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.cron import (
    MOST_TIMES,
    NoFurtherTime,
    check_cron,
    next_of_cron,
    previous_of_cron,
    times_of_cron,
    utc_text,
)
from crosswire.hub.shares import Quota
from crosswire.store.records import reader

__all__ = ["Schedule", "Schedules", "check_id", "check_interval"]

_log = logging.getLogger("crosswire.hub")

_SPACE: Final = "schedule"
_GRACE_S: Final = 1.0
_LEAST_INTERVAL_S: Final = 0.1
_MOST_INTERVAL_S: Final = 10 * 365 * 86_400.0
_AT_ONCE: Final = 100
_TURN: Final = 1000
"""How many messages are sent in one turn of the event loop, if that is not over before; the rest
waits for the next."""
_PAUSE_S: Final = 0.01
_FIRST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60.0
_DRIFT_S: Final = 0.01
_ROUNDING_S: Final = 1e-6
_FAR_S: Final = 366 * 86_400.0
_LAST_DUE_S: Final = 253_402_300_800.0
"""The year 10000, which `datetime` can't represent."""
_DORMANT_S: Final = _LAST_DUE_S - 1.0
"""The due time of a cron expression without a further time while the clock may be wrong."""
_ID_CHARACTERS: Final = 255
_SCHEDULE_BYTES: Final = 1024
"""What one takes in memory beside its message, roughly."""
_CRON_COST: Final = 20
"""Finding the next time of an expression takes as long as sending this many messages."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Every `interval_s`, or at the times of a `cron` expression, which is read in UTC.

    It fires `run_count` times, 0 for ever. Due times that passed while the hub was down are left
    out (`skip`), made up for with one message (`once`), or each of them (`all`, up to the latest
    1,000). An interval fires at once, too, unless `nohaste`; a cron expression never does. Times
    that pass while it is `paused` are left out.
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
    paused: bool = False

    def following(self, due: float) -> float:
        """The due time after this one. Raises InvalidSchedule if there is none."""
        if not self.cron:
            return due + self.interval_s
        return next_of_cron(self.cron, due)

    def preview(self, count: int, wall: float) -> list[float]:
        """The next due times, at most as many as it has left to fire.

        Raises InvalidSchedule if there is none at all.
        """
        left = count if not self.run_count else min(count, self.run_count - self.fired)
        due = self.next_due or self.first_due(wall)
        times: list[float] = []
        if self.is_dormant:
            return times
        while len(times) < left:
            times.append(due)
            try:
                due = self.following(due)
            except InvalidSchedule:
                break
        return times

    def is_equivalent(self, other: Schedule) -> bool:
        """Whether it was added with the same fields, however often it has fired since."""
        return self == msgspec.structs.replace(
            other, next_due=self.next_due, fired=self.fired, paused=self.paused
        )

    def first_due(self, wall: float) -> float:
        """When it fires first, added at this time. Raises InvalidSchedule if it never does."""
        if self.cron:
            return next_of_cron(self.cron, wall)
        return wall + self.interval_s if self.nohaste else wall

    def last_due_before(self, wall: float) -> float:
        """The latest due time that is not in the future; `next_due` is known to be past."""
        if not self.cron:
            count = math.floor((wall - self.next_due) / self.interval_s)
            return self.next_due + count * self.interval_s
        return max(previous_of_cron(self.cron, wall), self.next_due)

    @property
    def is_dormant(self) -> bool:
        """Whether it has no further time, if the clock is right."""
        return bool(self.cron) and self.next_due >= _DORMANT_S


_encode = msgspec.msgpack.Encoder().encode
_read: Callable[[bytes], Schedule] = reader(Schedule, "a schedule")


class _Unsure:
    """Changes of a schedule that are not on disk yet, and the schedule before them."""

    __slots__ = ("before", "changes", "holder")

    def __init__(self, before: Schedule | None, holder: str) -> None:
        self.before = before
        self.holder = holder
        self.changes = 0


class Schedules:
    """A fire and the next due time are written together: neither is there without the other."""

    def __init__(
        self,
        core: Core,
        send: SendEnvelope,
        open_target: Callable[[str, str], object],
        share: Quota,
        bytes_share: Quota,
    ) -> None:
        """`open_target` makes a destination that counts for a holder: `Destinations.target`."""
        self.share = share
        """How many each holder may have."""
        self.bytes_share = bytes_share
        """How many bytes their messages may have: they are kept in memory."""
        self.may_send: Callable[[str, str], bool] = lambda _principal, _destination: True
        """Whether a principal may send to a destination now: asked each time that one fires."""
        self._open_target = open_target
        self._holders: dict[str, str] = {}
        self.failed = 0
        """How many attempts to fire failed."""
        self._core = core
        self._store = core.store
        self._wall_clock = core.wall
        self._send = send
        self._schedules: dict[str, Schedule] = {}
        self._due: list[tuple[float, str]] = []
        self._wakes: dict[str, float] = {}
        """When each is checked next, by the wall clock; other entries of the heap are stale."""
        self._failures: dict[str, int] = {}
        self._catching_up: set[str] = set()
        self._unsure: dict[str, _Unsure] = {}
        """Those of which the latest change is not on disk yet: they don't fire."""
        self._to_check: dict[str, None] = {}
        """Those with a cron expression whose due time is still to be corrected."""
        self._nearer: dict[str, tuple[float | None, float | None]] = {}
        """The next two times of each expression, since the clock was last set back."""
        self._armed_offset = 0.0
        for key, value in core.store.load(_SPACE):
            try:
                schedule = _recovered(_read(value))
                _check_kept(schedule, key)
            except HubError as error:
                core.damage.set_aside_state(_SPACE, key, value, error)
                continue
            self._keep(schedule, schedule.envelope.principal)
            self._arm(schedule.id, 0.0 if schedule.is_dormant else schedule.next_due)
        schedules = list(self._schedules.values())
        self._bring_nearer(schedules, core.loop.now, may_trust_cron=not core.wall.went_back)
        self._wake()

    def add(self, schedule: Schedule, now: float) -> Schedule:
        """Store it, in place of one with the same id, and create its destination. Raises
        InvalidSchedule, InvalidDestination, QuotaExceeded if its user or address has too many, and
        StoreError while nothing can be stored.

        It fires once it is on disk. If it can't be written, the one before it continues.
        """
        check_id(schedule.id)
        if bool(schedule.cron) == bool(schedule.interval_s):
            raise InvalidSchedule("a schedule has an interval or a cron expression, one of them")
        if not schedule.cron:
            check_interval(schedule.interval_s)
        if not 0 <= schedule.run_count <= LARGEST_INTEGER:
            raise InvalidSchedule("a run count is 0 to 2^63 - 1")
        if parse_destination(schedule.envelope.destination).kind == "service":
            raise InvalidSchedule("a schedule sends to a queue or a topic")
        kept: Schedule = msgspec.structs.replace(
            schedule, next_due=schedule.first_due(self._wall_clock.at(now)), fired=0
        )
        holder = self._core.holders.of(kept.envelope.principal, kept.envelope.connection)
        before = self._schedules.get(kept.id)
        if before is None or self._holders[kept.id] != holder:
            self.share.check(holder)
            self.bytes_share.check(holder, _size(kept))
        else:
            self.bytes_share.check(holder, max(_size(kept) - _size(before), 0))
        obstacle = self._store.obstacle(now)
        if obstacle is not None:
            raise obstacle
        # Here, where it can be refused: a message that fires must not be.
        self._open_target(kept.envelope.destination, holder)
        self._change(kept.id, kept, holder)
        return kept

    def remove(self, identifier: str) -> Schedule:
        """Delete it. Raises UnknownMessage, and StoreError while nothing can be written.

        If the removal can't be written, the schedule continues.
        """
        schedule = self._schedules.get(identifier)
        if schedule is None:
            raise UnknownMessage(f"there is no schedule {identifier!r}")
        store = self._store
        obstacle = store.obstacle(self._core.loop.now)
        # On a disk that is merely short of space it is tried: its messages may be what fills it.
        if obstacle is not None and store.last_error is not None:
            raise obstacle
        self._change(identifier, None, "")
        return schedule

    def pause(self, identifier: str, paused: bool, now: float) -> Schedule:
        """Fire no more, or continue with the next due time. Raises UnknownMessage,
        InvalidSchedule if there is none, and StoreError while nothing can be written."""
        schedule = self._known(identifier)
        if schedule.paused == paused:
            return schedule
        next_due, wall = schedule.next_due, self._wall_clock.at(now)
        if not paused and next_due <= wall:
            next_due = schedule.following(wall if schedule.cron else schedule.last_due_before(wall))
        changed: Schedule = msgspec.structs.replace(schedule, paused=paused, next_due=next_due)
        self._change(identifier, changed, self._holders[identifier])
        return changed

    def fire(self, identifier: str, now: float) -> int:
        """Send its message now, beside its due times; returns the message's id. Raises
        UnknownMessage, and StoreError while nothing can be written."""
        schedule = self._known(identifier)
        native = {
            **schedule.envelope.native,
            SCHEDULED: repr(self._wall_clock.at(now)).encode(),
        }
        sent = self._send(schedule.envelope.replace(native=native), now)
        self._core.loop.pump(now)
        return sent

    def _known(self, identifier: str) -> Schedule:
        """Raises UnknownMessage, and StoreError while nothing can be written."""
        schedule = self._schedules.get(identifier)
        if schedule is None:
            raise UnknownMessage(f"there is no schedule {identifier!r}")
        obstacle = self._store.obstacle(self._core.loop.now)
        if obstacle is not None:
            raise obstacle
        return schedule

    def _change(self, identifier: str, schedule: Schedule | None, holder: str) -> None:
        """Replace or delete a schedule, until it turns out that this can't be written."""
        unsure = self._unsure.get(identifier)
        if unsure is None:
            known = self._schedules.get(identifier)
            unsure = _Unsure(known, self._holders.get(identifier, ""))
            self._unsure[identifier] = unsure
        unsure.changes += 1
        self._replace(identifier, schedule, holder)

        def decide(receipt: Receipt) -> None:
            # Groups are written in order: the last change that was written counts.
            unsure.changes -= 1
            if receipt.error is None:
                unsure.before, unsure.holder = schedule, holder
            if unsure.changes:
                return
            del self._unsure[identifier]
            if receipt.error is not None:
                self._replace(identifier, unsure.before, unsure.holder)
            current = self._schedules.get(identifier)
            if current is not None:
                self._arm(identifier, 0.0 if current.is_dormant else current.next_due)
                if receipt.error is not None:
                    # The clock may have been set back meanwhile.
                    self._bring_nearer([current], self._core.loop.now)
                self._on_time(self._core.loop.now)

        self._core.commits.committed().add_done_callback(decide)

    def _keep(self, schedule: Schedule, holder: str) -> None:
        self._schedules[schedule.id] = schedule
        self._holders[schedule.id] = holder
        self.share.add(holder)
        self.bytes_share.add(holder, _size(schedule))

    def _replace(self, identifier: str, schedule: Schedule | None, holder: str = "") -> None:
        self._forget(identifier)
        if schedule is not None:
            self._keep(schedule, holder)
            self._save(schedule)
        else:
            self._store.drop(_SPACE, identifier.encode())
            self._core.commits.request()

    def all(self) -> list[Schedule]:
        """All schedules in order of ids."""
        return sorted(self._schedules.values(), key=lambda each: each.id)

    def destinations(self) -> set[str]:
        """Where they send to."""
        return {each.envelope.destination for each in self._schedules.values()}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._schedules)

    def get(self, identifier: str) -> Schedule | None:
        """The schedule with this id; None if there is none."""
        return self._schedules.get(identifier)

    def follow_clock(self, now: float, *, went_back: bool) -> None:
        """The wall clock was adjusted or set: due times are waited for accordingly."""
        wall = self._wall_clock
        if went_back:
            self._nearer = {}
            self._bring_nearer(list(self._schedules.values()), now)
        # Ordinary adjustments add up, too, while a schedule waits for weeks.
        if went_back or abs(wall.at(0.0) - self._armed_offset) > _DRIFT_S:
            self._wake()

    # Waiting.

    def _save(self, schedule: Schedule) -> None:
        self._store.save(_SPACE, schedule.id.encode(), _encode(schedule))
        self._core.commits.request()

    def _forget(self, identifier: str) -> None:
        schedule = self._schedules.pop(identifier, None)
        if schedule is not None:
            holder = self._holders.pop(identifier)
            self.share.remove(holder)
            self.bytes_share.remove(holder, _size(schedule))
        self._wakes.pop(identifier, None)
        self._failures.pop(identifier, None)
        self._catching_up.discard(identifier)

    def _arm(self, identifier: str, wake: float) -> None:
        schedule = self._schedules.get(identifier)
        if identifier in self._unsure or (schedule is not None and schedule.paused):
            return
        self._wakes[identifier] = wake
        heapq.heappush(self._due, (wake, identifier))
        if len(self._due) > 1024 + 2 * len(self._wakes):
            self._due = [(each, name) for name, each in self._wakes.items()]
            heapq.heapify(self._due)

    def _wake(self) -> None:
        if self._due:
            wall = self._wall_clock
            self._armed_offset = wall.at(0.0)
            self._core.timers.at_least(self, wall.steady(self._due[0][0]), self._on_time)

    def _bring_nearer(
        self, schedules: list[Schedule], now: float, *, may_trust_cron: bool = False
    ) -> None:
        """Correct due times that a wrong clock put far into the future."""
        wall = self._wall_clock.at(now)
        for schedule in schedules:
            if schedule.cron:
                # Evaluating thousands of expressions would delay the start.
                if not may_trust_cron or schedule.next_due >= wall + _FAR_S:
                    self._to_check[schedule.id] = None
            elif schedule.next_due > wall + schedule.interval_s + _GRACE_S:
                # Never less than an interval after the last time, however far back the clock is.
                self._move(schedule, wall + schedule.interval_s)
        self._check_some(now)

    def _check_some(self, now: float) -> None:
        """Correct those with an expression, as many as one turn of the event loop may take.

        One time more than the next is allowed: a clock that is set back by less than that must not
        repeat what was sent already.
        """
        wall, left = self._wall_clock.at(now), _TURN
        while self._to_check and left > 0:
            schedule = self._schedules.get(self._to_check.popitem()[0])
            left -= 1
            if schedule is None or not schedule.cron:
                continue
            found = self._nearer.get(schedule.cron)
            if found is None:
                left -= _CRON_COST
                found = self._nearer[schedule.cron] = _next_two(schedule, wall)
            following, farthest = found
            if following is not None and schedule.next_due > (farthest or following):
                self._move(schedule, following)
        if self._to_check:
            self._core.timers.at_least(self._to_check, now + _PAUSE_S, self._check_some)
        else:
            self._nearer = {}
        self._wake()

    def _move(self, schedule: Schedule, next_due: float) -> None:
        kept: Schedule = msgspec.structs.replace(schedule, next_due=next_due)
        self._schedules[kept.id] = kept
        self._save(kept)
        self._arm(kept.id, next_due)

    # Firing.

    def _wall(self, now: float) -> float:
        """The wall clock, rounded up: a due time that was converted to the hub's time and back must
        not be missed."""
        return self._wall_clock.at(now) + _ROUNDING_S

    def _on_time(self, now: float) -> None:
        wall, left = self._wall(now), _TURN
        is_over = self._core.loop.turns.is_over
        while self._due and self._due[0][0] <= wall:
            if left <= 0 or (left < _TURN and is_over()):
                self._core.timers.at_least(self, now + _PAUSE_S, self._on_time)
                return
            wake, identifier = heapq.heappop(self._due)
            if self._wakes.get(identifier) != wake:
                continue
            left -= _CRON_COST if self._schedules[identifier].cron else 1
            fired = self._schedules[identifier].fired
            error = self._core.loop.callbacks.run(
                "schedule", self._advance, self._schedules[identifier], now
            )
            if error is not None:
                self._postpone(identifier, error, now)
            elif identifier in self._schedules:
                left -= self._schedules[identifier].fired - fired
        self._wake()

    def _advance(self, schedule: Schedule, now: float) -> None:
        """Send what is due, and save in the same group that it was sent."""
        if schedule.is_dormant:
            self._go_on(schedule, 0, _following(schedule, self._wall(now)), now)
            return
        try:
            times, next_due = self._plan(schedule, self._wall(now))
        except InvalidSchedule as error:
            self._postpone(schedule.id, error, now)
            return
        if schedule.run_count:
            times = times[: max(schedule.run_count - schedule.fired, 0)]
        fired, refused = 0, None
        envelope = schedule.envelope
        try:
            if times and not self.may_send(envelope.principal, envelope.destination):
                raise Forbidden(f"{envelope.principal} may no longer send to its destination")
            for due in times:
                native = {**envelope.native, SCHEDULED: repr(due).encode()}
                self._send(envelope.replace(native=native), now)
                fired += 1
        except HubError as error:
            refused = error
        finally:
            # Whatever raised: what was sent is not sent again.
            if fired < len(times):
                next_due = times[fired]
            self._go_on(schedule, fired, next_due, now)
        if refused is not None:
            self._postpone(schedule.id, refused, now)
        else:
            self._failures.pop(schedule.id, None)

    def _go_on(self, schedule: Schedule, fired: int, next_due: float | None, now: float) -> None:
        total = schedule.fired + fired
        if schedule.run_count and total >= schedule.run_count:
            self._replace(schedule.id, None)
            return
        wake = next_due
        if next_due is None:
            held_s = self._wall_clock.held_s(now)
            if not held_s:
                self._replace(schedule.id, None)
                self._report(
                    f"schedule {schedule.id} has no further time ({schedule.cron}): removed"
                )
                return
            # As with retention: a clock that is wrong for a while must not delete anything.
            next_due, wake = _DORMANT_S, self._wall(now) + held_s + 1.0
        kept: Schedule = msgspec.structs.replace(schedule, next_due=next_due, fired=total)
        self._schedules[kept.id] = kept
        if kept != schedule:
            self._save(kept)
        self._arm(kept.id, next_due if wake is None else wake)

    def _postpone(self, identifier: str, error: Exception, now: float) -> None:
        """It could not fire: the same due time is retried, with a growing delay."""
        self.failed += 1
        if identifier not in self._schedules:
            return
        failures = self._failures[identifier] = self._failures.get(identifier, 0) + 1
        delay_s = min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 10), _LONGEST_RETRY_S)
        self._arm(identifier, self._wall_clock.at(now) + delay_s)
        if failures == 1:
            self._report(f"schedule {identifier} could not fire, it is tried again: {error}")

    def _report(self, text: str) -> None:
        _log.warning("%s", text)
        self._core.damage.report(InvalidSchedule(text))

    def _plan(self, schedule: Schedule, wall: float) -> tuple[list[float], float | None]:
        """The times since `next_due` to fire for, and the next one to wait for.

        Raises InvalidSchedule.
        """
        if schedule.next_due > wall:
            return [], schedule.next_due
        if schedule.missed == "all":
            return self._plan_all(schedule, wall)
        last = schedule.last_due_before(wall)
        times = [] if schedule.missed == "skip" and last < wall - _GRACE_S else [last]
        # Not the one after `last`: an expression may name random times.
        return times, _following(schedule, wall if schedule.cron else last)

    def _plan_all(self, schedule: Schedule, wall: float) -> tuple[list[float], float | None]:
        """The next few of all missed times, or of the latest if there are too many."""
        due: float | None = schedule.next_due
        if schedule.id not in self._catching_up:
            due = _catch_up_from(schedule, wall)
            if due > schedule.next_due:
                self._report(
                    f"schedule {schedule.id} missed more than {MOST_TIMES} times: those from"
                    f" {utc_text(schedule.next_due)} until {utc_text(due)} are left out"
                )
        times: list[float] = []
        while due is not None and due <= wall and len(times) < _AT_ONCE:
            times.append(due)
            due = _following(schedule, due)
        if due is not None and due <= wall:
            self._catching_up.add(schedule.id)
        else:
            self._catching_up.discard(schedule.id)
        return times, due


def _size(schedule: Schedule) -> int:
    """What it takes in memory, roughly."""
    envelope = schedule.envelope
    fields = sum(len(key) + len(value) for key, value in envelope.native.items())
    for key, value in envelope.properties.items():
        fields += len(key) + (len(value) if isinstance(value, str) else 8)
    return _SCHEDULE_BYTES + len(envelope.payload) + fields


def _recovered(schedule: Schedule) -> Schedule:
    """A stored schedule as it can continue. Raises InvalidSchedule if it can't."""
    if not math.isfinite(schedule.next_due):
        raise InvalidSchedule(f"{schedule.next_due} is no time")
    if schedule.cron:
        return schedule
    if 0 < schedule.interval_s < _LEAST_INTERVAL_S:
        # Stored by an earlier version, which allowed it.
        shortest: Schedule = msgspec.structs.replace(schedule, interval_s=_LEAST_INTERVAL_S)
        return shortest
    check_interval(schedule.interval_s)
    return schedule


def _next_two(schedule: Schedule, wall: float) -> tuple[float | None, float | None]:
    try:
        following = _following(schedule, wall)
        return following, None if following is None else _following(schedule, following)
    except InvalidSchedule:
        return None, None


def _following(schedule: Schedule, due: float) -> float | None:
    """None after the last one."""
    try:
        return schedule.following(due)
    except NoFurtherTime:
        return None


def _catch_up_from(schedule: Schedule, wall: float) -> float:
    """`next_due`, or a later due time if more than `MOST_TIMES` were missed since."""
    if not schedule.cron:
        missed = math.floor((wall - schedule.next_due) / schedule.interval_s) + 1
        return schedule.next_due + max(missed - MOST_TIMES, 0) * schedule.interval_s
    due = schedule.next_due
    try:
        for due in times_of_cron(schedule.cron, math.floor(wall) + 1.0, forward=False):
            if due <= schedule.next_due:
                break
    except NoFurtherTime:
        return schedule.next_due
    return max(due, schedule.next_due)


def _check_kept(schedule: Schedule, key: bytes) -> None:
    """Raises RecordDamaged, or InvalidSchedule, for a stored schedule that can't continue.

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


def check_id(identifier: str) -> None:
    """Raises InvalidSchedule."""
    if not 1 <= len(identifier) <= _ID_CHARACTERS or not identifier.isprintable():
        raise InvalidSchedule(
            f"a schedule's id has 1 to {_ID_CHARACTERS} printable characters, not"
            f" {identifier[:80]!r}"
        )
