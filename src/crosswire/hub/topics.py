"""Topics: logs with retention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Final

import msgspec

from crosswire.envelope import MICROSECONDS
from crosswire.errors import RecordDamaged
from crosswire.hub.core import Core
from crosswire.hub.policies import TopicPolicy
from crosswire.store.records import Count, reader

__all__ = ["Topic"]

_MARKS: Final = "mark"
_MARK_BYTES: Final = 4 << 20
_MARK_S: Final = 3600
_BACK_S: Final = 60


class _RetentionMark(msgspec.Struct, array_like=True, frozen=True):
    """A message at which retention can cut: its id and time, and how many bytes came before it."""

    id: Count
    time: Count
    bytes_before: Count


_time_of = attrgetter("time")
_encode = msgspec.msgpack.Encoder().encode
_read_mark: Callable[[bytes], _RetentionMark] = reader(_RetentionMark, "a mark of a topic")


class Topic:
    """The log of a topic, or of the calls of a service, and how far retention has deleted it."""

    def __init__(self, core: Core, destination: str, policy: TopicPolicy) -> None:
        self.destination = destination
        self.name = destination.removeprefix("topic/")
        self.policy = policy
        self.number = core.store.number(destination)
        self.reclaimed = core.floors.of(self.number)
        self.retentions = 0
        """`Floors.raised` when retention last deleted something; 0 if that was before the start."""
        self.published = 0
        self._published_before = 0
        self._newest_id = 0
        self._is_newest_known = False
        self._core = core
        self._key = self.number.to_bytes(4)
        self._marks = self._load_marks()
        last = self._marks[-1] if self._marks else _RetentionMark(0, 0, 0)
        self._bytes = last.bytes_before
        pairs = zip(self._marks, self._marks[1:], strict=False)
        self._went_back = any(before.time > after.time for before, after in pairs)
        self._may_be_early = bool(self._marks) and core.wall.went_back
        """Whether the next message may have an earlier time than those after the last mark."""

    def _load_marks(self) -> list[_RetentionMark]:
        """The marks in order; one that contradicts the others is set aside."""
        marks: list[_RetentionMark] = []
        for key, value in self._core.store.load(_MARKS, self._key):
            try:
                mark = _read_mark(value)
                before = marks[-1] if marks else _RetentionMark(0, 0, 0)
                if (
                    mark.id != int.from_bytes(key[len(self._key) :])
                    # Times may go back: the clock may have been set.
                    or mark.bytes_before < before.bytes_before
                ):
                    raise RecordDamaged(f"a mark of {self.destination} does not fit")
            except RecordDamaged as error:
                self._core.damage.set_aside_state(_MARKS, key, value, error)
            else:
                marks.append(mark)
        return marks

    def count(self, identifier: int, size: int, now_us: int) -> None:
        """A message was stored; every 4 MiB or hour a mark is saved at which retention can cut."""
        self.published += 1
        self._newest_id = max(self._newest_id, identifier)
        if self._may_be_early:
            self._mark_last(identifier, now_us)
        marks = self._marks
        if not marks or self._is_mark_due(self._bytes, now_us):
            self._went_back |= bool(marks) and now_us < marks[-1].time
            self._add_mark(identifier, now_us)
        self._bytes += size

    def _add_mark(self, identifier: int, time_us: int) -> None:
        mark = _RetentionMark(identifier, time_us, self._bytes)
        self._marks.append(mark)
        self._core.store.save(_MARKS, self._key + identifier.to_bytes(8), _encode(mark))

    def _mark_last(self, identifier: int, now_us: int) -> None:
        """Mark the last message before this one, if the clock was set back since and that does not
        show by the last mark: with the latest time that it may have."""
        self._may_be_early = False
        marks = self._marks
        last = self._core.store.last_id(self.number, identifier - 1)
        if not marks or last <= marks[-1].id:
            return
        latest_us = marks[-1].time + _MARK_S * MICROSECONDS
        if now_us < latest_us:
            self._add_mark(last, latest_us)
            self._went_back = True

    def _is_mark_due(self, size_bytes: int, now_us: int) -> bool:
        """Whether enough bytes or time passed since the last mark, or the clock was set back."""
        last = self._marks[-1]
        since_us = now_us - last.time
        return (
            size_bytes - last.bytes_before >= _MARK_BYTES
            or since_us >= _MARK_S * MICROSECONDS
            or since_us < -_BACK_S * MICROSECONDS
        )

    def count_run(self, first: int, sizes: Sequence[int], now_us: int) -> None:
        """`count` for messages with consecutive ids."""
        if self._may_be_early:
            self._mark_last(first, now_us)
        total, marks = sum(sizes), self._marks
        if marks and not self._is_mark_due(self._bytes + total, now_us):
            self.published += len(sizes)
            self._newest_id = max(self._newest_id, first + len(sizes) - 1)
            self._bytes += total
        else:
            for identifier, size in enumerate(sizes, first):
                self.count(identifier, size, now_us)

    def retain(self, now: float) -> None:
        """Delete what exceeds the retention, if the lake has it: everything before a mark."""
        oldest = int((self._core.wall.age(now) - self.policy.retention_s) * MICROSECONDS)
        marks, times = self._marks, self._mark_times()
        cut = 0
        while cut + 1 < len(marks) and marks[cut + 1].id - 1 <= self._core.seals.reclaim_limit:
            too_much = self._bytes - marks[cut].bytes_before > self.policy.retention_bytes
            if times[cut + 1] > oldest and not too_much:
                break
            cut += 1
        upto = marks[cut].id - 1 if cut else 0
        if marks and cut + 1 == len(marks) and times[cut] + _MARK_S * MICROSECONDS < oldest:
            # Whatever came an hour or more after the last mark would have one of its own: all of
            # it is too old.
            last = self._core.store.last_id(self.number)
            if last <= self._core.seals.reclaim_limit:
                cut, upto = cut + 1, max(last, upto)
        if cut:
            for mark in marks[:cut]:
                self._core.store.drop(_MARKS, self._key + mark.id.to_bytes(8))
            del marks[:cut]
            self._core.store.reclaim(self.number, self.reclaimed + 1, upto)
            self.reclaimed = upto
            self._core.floors.save(self.number, self.reclaimed)
            self.retentions = self._core.floors.raised
            self._core.commits.request(sync=False, urgent=False)

    @property
    def has_messages(self) -> bool:
        """Whether there may be messages: what is stored has marks."""
        return bool(self._marks)

    def was_used(self) -> bool:
        """Whether something was published since the last call."""
        before, self._published_before = self._published_before, self.published
        return before != self.published

    def delete(self) -> None:
        """Delete its marks, of which there are none without damage."""
        for mark in self._marks:
            self._core.store.drop(_MARKS, self._key + mark.id.to_bytes(8))
        self._marks = []

    def _mark_times(self) -> Sequence[int]:
        """The time of each mark, at most that of any later one.

        After the clock was set back, a mark may have a later time than its followers: retention
        would stop at it although everything after it is old.
        """
        times = [mark.time for mark in self._marks]
        if self._went_back:
            times = list(accumulate(reversed(times), min))[::-1]
        return times

    @property
    def newest_id(self) -> int:
        """No message of it, stored or deleted, has a higher id; 0 if there never was one."""
        if not self._is_newest_known:
            stored = self._core.store.last_id(self.number)
            self._newest_id = max(self._newest_id, stored, self.reclaimed)
            self._is_newest_known = True
        return self._newest_id

    def before(self, time_us: int) -> int:
        """An id after which everything is that was published at `time_us` or later."""
        marks, early_us = self._marks, time_us - _BACK_S * MICROSECONDS
        if not marks or marks[0].time >= early_us:
            return 0
        if not self._went_back:
            # What is before a mark has at most its time, or that of a clock set back by so little
            # that there was no mark for it.
            return marks[bisect_left(marks, early_us, key=_time_of) - 1].id - 1
        found = 0
        for earlier, mark in pairwise(marks):
            latest_us = mark.time
            if latest_us < earlier.time:
                latest_us = earlier.time + _MARK_S * MICROSECONDS
            if latest_us >= early_us:
                break
            found = mark.id - 1
        return found
