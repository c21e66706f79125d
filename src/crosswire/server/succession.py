"""What a replica decides: when it takes over, when it stops to lead, and what may be trimmed.

    standby ──silence, or a hand-over to it──▶ candidate ──another was first──▶ standby
                                                   │ its takeover is durable
                                                   ▼
                                                leader ──replaced, no answer, damage──▶ standby

Pure: time and events are arguments, and nothing here waits or writes. Clocks affect when somebody
tries. That only one leads is the log's doing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

from crosswire.commitlog.contract import ReplicaState
from crosswire.commitlog.records import HandOver, LogRecord, RecordKind, Takeover

__all__ = ["Role", "Succession", "TrimRule", "are_here", "successor"]

_SILENT_PERIODS: Final = 3
"""A leader without a confirmed append for this many times `takeover_s` stops to lead."""
_RANDOM_PART: Final = 0.2
_LONGEST_GAP_S: Final = 2.0
_REPORTS_S: Final = 10.0
"""A replica that has not reported for this long is away."""
_SAMPLES: Final = 4096


class Role(StrEnum):
    """What a replica does at the moment."""

    STANDBY = "standby"
    CANDIDATE = "candidate"
    LEADER = "leader"
    DAMAGED = "damaged"
    """A standby that must not lead."""
    JOINING = "joining"
    """A standby without data."""


class Succession:
    """Follows what is seen of the log. `leader` is whose takeover was seen last, `term` the number
    of that; `time_us` the latest time of a record."""

    def __init__(self, name: str, takeover_s: float, chance: Callable[[], float]) -> None:
        self.role = Role.STANDBY
        self.leader = Takeover("")
        self.term = 0
        self.takeovers = 0
        """How many times this replica began to lead."""
        self.time_us = 0
        self._name = name
        self._takeover_s = takeover_s
        self._chance = chance
        self._named = ""
        self._seen = 0
        self._silent_s = 0.0
        self._answered_at: float | None = None
        self._patience_s = self._draw()

    def _draw(self) -> float:
        # Replicas that were alone with a dead leader for equally long must not collide each time.
        return self._takeover_s * (1.0 + _RANDOM_PART * self._chance())

    # What is seen of the log.

    def answered(self, now: float, records: Iterable[LogRecord], newest: int) -> None:
        """The log answered: `records` are those of its page, `newest` is the number of the last.

        Silence is counted between two answers only: a log that can't be reached proves nothing
        about its leader. And not longer than a while, if this process stood still in between.
        """
        for record in records:
            self._see(record)
        if newest != self._seen:
            # Something is new, or what was seen has vanished: both are a reason to wait.
            self._seen, self._silent_s = newest, 0.0
        elif self._answered_at is not None:
            self._silent_s += min(now - self._answered_at, _LONGEST_GAP_S)
        self._answered_at = now

    def not_before(self, time_us: int) -> None:
        """The newest record has this time. It need not be new: a replica that was started again
        may have applied all before."""
        self.time_us = max(self.time_us, time_us)

    def unanswered(self) -> None:
        """The log did not answer: what passes until it does is not silence of a leader."""
        self._answered_at = None

    def _see(self, record: LogRecord) -> None:
        self.time_us = max(self.time_us, record.time_us)
        self._named = ""
        if record.kind is RecordKind.TAKEOVER:
            self.leader, self.term = record.read(Takeover), record.number
        elif record.kind is RecordKind.HAND_OVER:
            self._named = record.read(HandOver).replica

    # Its own part.

    def should_try(self, *, has_reported: bool, fault: str) -> bool:
        """Is it time to take over? Only for a replica that the others know, and that nothing is
        wrong with. It has applied what it could: else something would be new."""
        if fault or not has_reported or self.role is not Role.STANDBY:
            return False
        return self._named == self._name or self._silent_s >= self._patience_s

    def tries(self) -> None:
        """A takeover is offered to the log."""
        self.role = Role.CANDIDATE

    def leads(self, takeover: Takeover, term: int) -> None:
        """The takeover is durable, and all before it is applied."""
        self.role = Role.LEADER
        self.leader, self.term = takeover, term
        self.takeovers += 1

    def follows(self) -> None:
        """Another leads, or nobody: wait again, for the whole time."""
        self.role = Role.STANDBY
        self._named = ""
        self._silent_s, self._answered_at = 0.0, None
        self._patience_s = self._draw()

    def is_overdue(self, unconfirmed_s: float) -> bool:
        """Has a leader to stop, whose last append was confirmed this long ago?"""
        return unconfirmed_s > _SILENT_PERIODS * self._takeover_s


class TrimRule:
    """What may be removed from the log: what all replicas have on their disks, or what is old and
    enough of them have. What is nowhere else is never removed."""

    def __init__(self, retain_s: float, copies: int) -> None:
        self._retain_s = retain_s
        self._copies = copies
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def note(self, now: float, newest: int) -> None:
        """The log ends with this record now."""
        # About a thousand samples for the time that matters.
        if not self._samples or now - self._samples[-1][0] >= self._retain_s / 1000:
            self._samples.append((now, newest))

    def upto(self, now: float, replicas: Sequence[ReplicaState], held: int | None = None) -> int:
        """The last record that may go, 0 for none. `held` is needed by somebody who fetches a
        checkpoint, and all after it."""
        synced = sorted((each.synced for each in replicas), reverse=True)
        if not synced:
            return 0
        by_all = synced[-1]
        by_copies = synced[self._copies - 1] if len(synced) >= self._copies else 0
        old = 0
        for sampled_at, number in self._samples:
            if now - sampled_at < self._retain_s:
                break
            old = number
        limit = max(by_all, min(old, by_copies))
        return limit if held is None else min(limit, held)


def are_here(replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
    """Those that have reported a moment ago."""
    return [each for each in replicas if each.age_s < _REPORTS_S]


def successor(replicas: Sequence[ReplicaState], name: str, wanted: str = "") -> str:
    """The standby that a leader of this name hands over to: the one with most on its disk; "" if
    there is none."""
    standbys = [
        each
        for each in are_here(replicas)
        if each.name != name and each.role == Role.STANDBY and wanted in ("", each.name)
    ]
    return max(standbys, key=lambda each: (each.synced, -each.age_s)).name if standbys else ""
