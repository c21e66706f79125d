"""The wall clock beside the hub's time: what follows it, and what its jumps must not affect.

The hub's `now` is steady: the wall clock at the start plus the monotonic clock since. Deadlines,
leases, retries and lifetimes are differences of it, so they don't change when the clock is set.
What has to follow the wall clock gets it from here:

    schedules     the wall clock as it is
    timestamps    the wall clock, but up to a day back they slow down instead of going back
    retention     the wall clock minus a lag: a jump of more than an hour counts after a day only

Downtime and a clock that was set while the hub was down look alike, so retention treats them alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

import msgspec

from crosswire.envelope import MICROSECONDS, Envelope
from crosswire.errors import ClockJumped, RecordDamaged
from crosswire.hub.commits import CommitPath
from crosswire.hub.damage import DamageReports
from crosswire.store.contract import Store

__all__ = ["Clock", "Timestamps", "WallClock"]

_log = logging.getLogger("crosswire.hub")

_SPACE: Final = "clock"
_KEY: Final = b"wall"
_JUMP_S: Final = 1.0
"""A smaller change between two observations is an ordinary adjustment of the clock."""
_BACK_S: Final = 5.0
"""A start this much before the last known time means a clock that was set back meanwhile."""
_HELD_FROM_S: Final = 3600.0
_HELD_S: Final = 86_400.0
_HELD_AGAIN_S: Final = 3600.0
_SLOWED_S: Final = 86_400.0
_SLOWEST: Final = 0.1
_APART_S: Final = 0.05
"""Two readings of clocks that are further apart than this don't belong to one moment."""
_SAVE_S: Final = 60.0
_SAVE_AGAIN_S: Final = 1.0
_REPORT_S: Final = 10.0
_JUMPS: Final = 64


class _Jump(msgspec.Struct, frozen=True, array_like=True):
    """Messages up to `id` were stamped before the clock jumped by `seconds`."""

    id: int
    seconds: float


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """What a restart needs: the last known time, and how far retention lags."""

    wall: float
    lag_s: float = 0.0
    held_s: float = 0.0
    jumps: list[_Jump] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class Clock:
    """Seconds since 1970 that pass as on a stopwatch, however the system's clock is set.

    The wall clock is read once, then the monotonic clock is added: a lease, a deadline or a retry
    neither fires early nor hangs because somebody corrected the time. The monotonic clock stops
    while the machine is suspended: nobody could have worked, so nothing is late afterwards. To the
    hub a suspended machine is a wall clock that jumped forward.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._start = wall() - monotonic()

    def now(self) -> float:
        """The steady time in seconds since 1970."""
        return self._start + self._monotonic()

    def not_before(self, time_s: float) -> None:
        """Continue from this time if it is later: what somebody else has stamped stays in the
        past."""
        self._start = max(self._start, time_s - self._monotonic())

    def look(self) -> tuple[float, float] | None:
        """The wall clock and the steady time at one moment.

        None if the process was interrupted between the two: the difference would look like a jump.
        """
        before = self.now()
        wall = self._wall()
        now = self.now()
        return (wall, now) if now - before < _APART_S else None


class Timestamps:
    """The timestamps of messages and ledger rows: the wall clock, except that up to a day back
    they slow down instead of going back."""

    __slots__ = ("_base_now_us", "_base_us", "_rate")

    def __init__(self, now: float) -> None:
        # From `_base_now_us` on they advance at `_rate`, starting at `_base_us`.
        self._base_us = self._base_now_us = int(now * MICROSECONDS)
        self._rate = 1.0

    def stamp_us(self, now_us: int) -> int:
        """The timestamp at this time of the hub, both in µs."""
        since = now_us - self._base_now_us
        return self._base_us + (since if self._rate == 1.0 else int(since * self._rate))

    def follow(self, wall: float, now: float) -> None:
        """The wall clock shows `wall` when the hub's time is `now`."""
        now_us, wall_us = int(now * MICROSECONDS), int(wall * MICROSECONDS)
        ahead_s = (self.stamp_us(now_us) - wall_us) / MICROSECONDS
        # The order of times is worth more than their exactness, unless they are far off.
        is_slowed = 0 < ahead_s <= _SLOWED_S
        self._base_us = wall_us + int(ahead_s * MICROSECONDS) if is_slowed else wall_us
        self._base_now_us = now_us
        self._rate = max(1.0 - ahead_s, _SLOWEST) if is_slowed else 1.0


class WallClock:
    """Follows the wall clock by `observe`; without it, wall clock and `now` are the same."""

    def __init__(
        self,
        store: Store,
        commits: CommitPath,
        damage: DamageReports,
        timestamps: Timestamps,
        now: float,
    ) -> None:
        self.forward = 0
        """How many times the clock jumped forward."""
        self.backward = 0
        self.went_back = False
        """Whether stored times may be in the future: the clock was set back, or none is stored."""
        self.lag_s = 0.0
        """How far retention lags the wall clock."""
        self.last_jump: tuple[float, float] | None = None
        """When, by the wall clock after it, and by how many seconds."""
        self.stamp_us = timestamps.stamp_us
        self._store = store
        self._commits = commits
        self._damage = damage
        self._timestamps = timestamps
        self._offset = 0.0
        self._offset_us = 0
        self._jumps: list[_Jump] = []
        self._held_until = 0.0
        self._save_at = now
        self._report_at = 0.0
        self._restore(now)

    # Reading it.

    def at(self, now: float) -> float:
        """The wall clock at this time of the hub."""
        return now + self._offset

    def steady(self, wall: float) -> float:
        """The hub's time at this time of the wall clock, if it does not jump until then."""
        return wall - self._offset

    def age(self, now: float) -> float:
        """The time by which retention measures ages."""
        return now + self._offset - self.lag_s

    def held_s(self, now: float) -> float:
        """For how long retention will lag the wall clock; 0 if it does not."""
        return max(self._held_until - now, 0.0) if self.lag_s else 0.0

    def expires_us(self, now: float, ttl_s: float) -> int:
        """The expiry of a message that is accepted now, with this lifetime; in µs."""
        return int((now + self._offset + ttl_s) * MICROSECONDS)

    def is_expired(self, envelope: Envelope, now_us: int) -> bool:
        """Whether its lifetime is over. Jumps of the clock since it was accepted don't count."""
        return envelope.expires <= now_us + self._offset_us - self._jumped_us(envelope.id)

    def expiry(self, envelope: Envelope) -> float:
        """The hub's time at which its lifetime is over."""
        # One more: where the division rounds down, `is_expired` would be false at that moment, and
        # a timer for it would be set again and again.
        return (
            envelope.expires + 1 - self._offset_us + self._jumped_us(envelope.id)
        ) / MICROSECONDS

    def _jumped_us(self, identifier: int) -> int:
        if not self._jumps or identifier > self._jumps[-1].id:
            return 0
        return int(
            sum(each.seconds for each in self._jumps if each.id >= identifier) * MICROSECONDS
        )

    # Following it.

    def observe(self, wall: float, now: float) -> float:
        """The wall clock shows `wall` at the hub's time `now`. Returns by how much it jumped."""
        if not math.isfinite(wall):
            return 0.0
        change = wall - now - self._offset
        self._offset = wall - now
        self._offset_us = int(self._offset * MICROSECONDS)
        self._timestamps.follow(wall, now)
        jumped = abs(change) > _JUMP_S
        if jumped:
            self._note_jump(change, now)
        if self.lag_s and now >= self._held_until:
            _log.warning("retention by age follows the clock again, %.0f s further", self.lag_s)
            self.lag_s = 0.0
            self._save_at = now
        if now >= self._save_at:
            self._save(now)
        return change if jumped else 0.0

    def _note_jump(self, seconds: float, now: float) -> None:
        self._remember(seconds)
        self.last_jump = (self.at(now), seconds)
        if seconds > 0:
            self.forward += 1
            if seconds > _HELD_FROM_S:
                self._hold(seconds, _HELD_S, now)
        else:
            self.backward += 1
            self._catch_up(-seconds)
        self._save_at = now
        if now >= self._report_at:
            self._report_at = now + _REPORT_S
            self._report(
                f"the system's clock jumped {'forward' if seconds > 0 else 'back'} by"
                f" {abs(seconds):.0f} s{self._consequence(now)}"
            )

    def _remember(self, seconds: float) -> None:
        self._jumps.append(_Jump(self._store.newest_id, seconds))
        if len(self._jumps) > _JUMPS:
            first, second = self._jumps[:2]
            self._jumps[:2] = [_Jump(second.id, first.seconds + second.seconds)]

    def _hold(self, lag_s: float, held_s: float, now: float) -> None:
        self.lag_s += lag_s
        self._held_until = now + held_s

    def _catch_up(self, seconds: float) -> None:
        """The clock was set back: retention need not lag by that much any more."""
        self.lag_s = max(self.lag_s - seconds, 0.0)
        if self.lag_s <= _JUMP_S:
            self.lag_s = 0.0

    def _consequence(self, now: float) -> str:
        if not self.lag_s:
            return ""
        hours = self.held_s(now) / 3600
        return (
            f"; retention by age ignores it for {hours:.0f} h: if the clock is wrong, correct it"
            " before then"
        )

    def _report(self, text: str) -> None:
        _log.warning("%s", text)
        self._damage.report(ClockJumped(text))

    # Across restarts.

    def _save(self, now: float) -> None:
        if not self._store.has_room(now):
            # On a full disk this must not be the write that fails.
            self._save_at = now + _SAVE_AGAIN_S
            return
        self._save_at = now + _SAVE_S
        record = _Record(self.at(now), self.lag_s, self.held_s(now), self._jumps)
        self._store.save(_SPACE, _KEY, _encode(record))
        self._commits.request(sync=False, urgent=False)

    def _restore(self, now: float) -> None:
        """Compare with the last known time before the restart."""
        stored = self._store.get(_SPACE, _KEY)
        if stored is None:
            self.went_back = True
            return
        try:
            record = _decode(stored)
            if not all(map(math.isfinite, (record.wall, record.lag_s, record.held_s))):
                raise msgspec.ValidationError("a time is not finite")
        except msgspec.MsgspecError as error:
            damage = RecordDamaged(f"the last known time can't be read: {error}")
            self._damage.set_aside_state(_SPACE, _KEY, stored, damage)
            self.went_back = True
            return
        self._jumps = record.jumps
        if record.lag_s > 0:
            self._hold(record.lag_s, record.held_s, now)
        gap = now - record.wall
        if gap < -_BACK_S:
            self.went_back = True
            self.backward += 1
            self.last_jump = (now, gap)
            self._remember(gap)
            self._catch_up(-gap)
            self._report(f"the system's clock is {-gap:.0f} s before the last time that was known")
        elif gap > _HELD_FROM_S:
            # A hub that is stopped every night must get there one day: a night adds an hour only.
            held_s = max(self.held_s(now), _HELD_AGAIN_S) if self.lag_s else _HELD_S
            self._hold(gap, held_s, now)
            self._report(
                f"the last known time is {gap:.0f} s ago: the hub was down, or the system's clock"
                f" is wrong{self._consequence(now)}"
            )
