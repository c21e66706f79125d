"""What a hub has when everything is over: queues, dead letters and the ledger, against what the
clients saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from crosswire.hub.ledger import Step, parse_block
from crosswire.plurals import plural
from crosswire.server.server import Server
from crosswire.testing.simulation.clients import decode_message
from crosswire.testing.simulation.lake_audit import LakeContent, LedgerEntry, read_lake
from crosswire.testing.simulation.observations import DeliveryKey, Observations, ViolationSink

__all__ = ["Audit"]

_ALL_ROWS = 1 << 30
_JOBS = "queue/echo"
_PASSING = "topic/n0"
"""A topic whose messages are not durable."""
_ENDS = (Step.SETTLED, Step.DEAD, Step.EXPIRED, Step.DROPPED)


class Serving(Protocol):
    """A hub that may be up."""

    @property
    def serving(self) -> Server | None:
        """Its server in this process; None if there is none now."""


class Audit:
    """Looks into a hub that is up, between two turns of it."""

    def __init__(
        self,
        world: ViolationSink,
        hub: Serving,
        seen: Observations,
        *,
        max_attempts: int,
        lake: Path | None = None,
    ) -> None:
        self._world = world
        self._hub = hub
        self._seen = seen
        self._max_attempts = max_attempts
        self._lake = lake
        self._dead_then: set[DeliveryKey] = set()
        self.expected: dict[str, int] = {}
        """How many messages these destinations have accepted, no more and no less."""

    def is_all_delivered(self) -> bool:
        """Whether all that was acknowledged is settled or a dead letter, and queues are empty."""
        return not self._seen.missing(self._dead()) and not self._waiting()

    def describe_missing(self) -> str:
        """What is not delivered, for people."""
        late = self._seen.missing(self._dead())
        named = ", ".join(str(each.message) for each in late[:3])
        return f"{plural(len(late), 'message')} not delivered ({named}), waiting: {self._waiting()}"

    def check_end(self) -> None:
        """Dead letters had all their attempts, and the ledger has a beginning and an end of each
        message."""
        if self._hub.serving is None:
            self._world.violate("the hub is not up, though all faults have ended")
            return
        self._check_leftovers()
        self._check_attempts()
        self._check_ledger()
        self._dead_then = self._dead()

    def is_as_before(self) -> bool:
        """Whether a restart has changed nothing."""
        return not self._waiting() and self._dead_then <= self._dead()

    def check_restarted(self) -> None:
        """Nothing came back, and no dead letter is gone."""
        waiting = self._waiting()
        if waiting:
            self._world.violate(f"after the last restart queues are not empty: {waiting}")
        if self._hub.serving is not None:
            self._check_damage()
        for each in sorted(self._dead_then - self._dead()):
            self._world.violate(f"after the last restart the dead letter {each.message} is gone")

    def _waiting(self) -> dict[str, int]:
        """Lengths of queues that are not empty; dead letters wait for an operator."""
        server = self._hub.serving
        if server is None:
            return {"the hub is not up": 0}
        # A call by eMQP is a job: where no worker is there it waits for one.
        waiting = {
            each.destination: each.length
            for each in server.hub.queues()
            if each.length and not each.is_dead and each.destination != _JOBS
        }
        # What was published to a topic and not acknowledged, as by eMQP, is delivered, too.
        for each in server.hub.subscriptions.all():
            if each.memory.items:
                waiting[each.title] = len(each.memory.items)
        return waiting

    def _dead(self) -> set[DeliveryKey]:
        """Messages that the hub keeps as dead letters."""
        found: set[DeliveryKey] = set()
        server = self._hub.serving
        if server is not None:
            for group in self._queues():
                letters = server.hub.dead_letters.list(f"{group}/dead", count=100_000)
                found |= {
                    DeliveryKey(group, decode_message(each.envelope.payload)) for each in letters
                }
        return found

    def _queues(self) -> list[str]:
        return [group for group in self._seen.subscriptions if group.startswith("queue/")]

    def _server(self) -> Server:
        server = self._hub.serving
        assert server is not None
        return server

    def _check_leftovers(self) -> None:
        """A hub heals what connections leave over and survives what callbacks raise: neither may
        ever be needed."""
        server = self._server()
        healed, failed = server.leftovers.healed, server.hub.callbacks.failed
        if healed:
            self._world.violate(f"the hub had left over: {dict(healed)}")
        if failed:
            self._world.violate(f"callbacks of the hub raised: {dict(failed)}")
        self._check_damage()

    def _check_damage(self) -> None:
        """A store reports no damage that was not done to it."""
        damage = self._server().hub.store.damage
        if damage and not self._seen.damages:
            self._world.violate(f"the store reports damage: {damage[0].reason}")

    def _check_attempts(self) -> None:
        for group in self._queues():
            for letter in self._server().hub.dead_letters.list(f"{group}/dead", count=100_000):
                if len(letter.attempts) != self._max_attempts:
                    key = decode_message(letter.envelope.payload)
                    self._world.violate(f"{key} is dead after {len(letter.attempts)} attempts")

    def _check_ledger(self) -> None:
        """Rows are numbered once, and of each message that a queue accepted one row is
        its end, as all queues are empty."""
        accepted: Counter[int] = Counter()
        by_destination: Counter[str] = Counter()
        ended: Counter[int] = Counter()
        damaged: set[int] = set()
        for row in self._ledger():
            if _is_audited(row.destination):
                if row.step is Step.ACCEPTED:
                    accepted[row.id] += 1
                    by_destination[row.destination] += 1
                elif row.step in _ENDS:
                    ended[row.id] += 1
                elif row.step is Step.DAMAGED:
                    damaged.add(row.id)
        for destination, count in self.expected.items():
            if by_destination[destination] != count:
                self._world.violate(
                    f"{destination} has accepted {by_destination[destination]} messages, and"
                    f" {count} were sent"
                )
        for identifier, key in self._seen.ids.items():
            if key.destination.startswith("queue/") and not accepted[identifier]:
                self._world.violate(f"the ledger has not accepted {key}")
                return
        # Not all protocols give a producer the ids of its messages.
        acknowledged = Counter(
            key.destination
            for key, life in self._seen.lives.items()
            if life.acknowledged_at is not None and key.destination.startswith("queue/")
        )
        for destination, count in acknowledged.items():
            if by_destination[destination] < count:
                self._world.violate(
                    f"{destination} has accepted {by_destination[destination]} messages, and"
                    f" acknowledged {count}"
                )
                return
        # Damage that was found just before a crash is known at the next start, and then is not
        # noted in the ledger again.
        unnoted = self._seen.damaged_records
        for identifier in accepted:
            # The record of a message that is settled may be damaged, too.
            ends = ended[identifier] or int(identifier in damaged)
            if not ends and unnoted:
                unnoted -= 1
                ends = 1
            if ends != 1 or accepted[identifier] != 1:
                self._world.violate(
                    f"the ledger has accepted message {identifier} {accepted[identifier]} times,"
                    f" and ended it {ended[identifier]} times"
                )
                return

    def _ledger(self) -> Iterator[LedgerEntry]:
        """All rows: those of the lake, then what only the store has."""
        server, next_row = self._server(), 0
        if self._lake is not None:
            content = read_lake(self._lake)
            self._check_lake(content)
            yield from content.ledger
            next_row = server.sealed()[1] + 1
        for first, rows, block in server.hub.store.blocks(next_row - 1, _ALL_ROWS):
            # After a crash numbers are skipped that may have been given out.
            is_hole = next_row > 0 and first > next_row and not self._seen.has_crashed
            if is_hole or (first < next_row and self._lake is None):
                self._world.violate(f"row {next_row} of the ledger is followed by row {first}")
                return
            for run in parse_block(first, block):
                for seq, identifier in enumerate(run.ids, run.first_row):
                    if seq >= next_row:
                        yield LedgerEntry(seq, identifier, run.step, run.destination)
            next_row = first + rows

    def _check_lake(self, content: LakeContent) -> None:
        """Each row is there once, or a gap names it; and each message that was acknowledged."""
        rows = Counter(row.seq for row in content.ledger)
        twice = [seq for seq, count in rows.items() if count > 1]
        if twice:
            self._world.violate(f"the lake has row {twice[0]} of the ledger more than once")
        ids = [identifier for identifier, count in content.ids.items() if count > 1]
        if ids:
            self._world.violate(f"the lake has message {ids[0]} more than once")
        if content.missing_ids:
            # Nothing was so slow here that it had to be given up.
            self._world.violate(f"the lake has gaps of messages: {content.missing_ids[:3]}")
        last = max(rows, default=0)
        missing = set(range(1, last + 1)) - rows.keys() - content.missing_rows
        if missing:
            self._world.violate(f"the lake has neither row {min(missing)} of the ledger nor a gap")
        for key, life in self._seen.lives.items():
            count = content.messages[key]
            is_due = (
                life.acknowledged_at is not None
                and key not in self._seen.lost
                and key.destination != _PASSING
            )
            if count > 1 or (is_due and not count):
                self._world.violate(f"the lake has {key} {count} times")
                return


def _is_audited(destination: str) -> bool:
    """Whether all of its messages have an end."""
    return (
        destination.startswith("queue/")
        and not destination.endswith("/dead")
        and destination != _JOBS
    )
