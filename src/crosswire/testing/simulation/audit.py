"""What a hub has when everything is over: queues, dead letters and the ledger, against what the
clients saw."""

from __future__ import annotations

from collections import Counter

from crosswire.hub.ledger import Step, parse_block
from crosswire.plurals import plural
from crosswire.server.server import Server
from crosswire.testing.simulation.clients import decode_message
from crosswire.testing.simulation.hub import HubGroup
from crosswire.testing.simulation.observations import DeliveryKey, Observations
from crosswire.testing.simulation.world import World

__all__ = ["Audit"]

_ALL_ROWS = 1 << 30
_ENDS = (Step.SETTLED, Step.DEAD, Step.EXPIRED, Step.DROPPED, Step.DAMAGED)


class Audit:
    """Looks into a hub that is up, between two turns of it."""

    def __init__(
        self, world: World, hub: HubGroup, seen: Observations, *, max_attempts: int
    ) -> None:
        self._world = world
        self._hub = hub
        self._seen = seen
        self._max_attempts = max_attempts
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
        for each in sorted(self._dead_then - self._dead()):
            self._world.violate(f"after the last restart the dead letter {each.message} is gone")

    def _waiting(self) -> dict[str, int]:
        """Lengths of queues that are not empty; dead letters wait for an operator."""
        server = self._hub.serving
        if server is None:
            return {"the hub is not up": 0}
        queues = server.hub.queues()
        return {
            each.destination: each.length for each in queues if each.length and not each.is_dead
        }

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
        next_row = None
        for first, rows, block in self._server().hub.store.blocks(-1, _ALL_ROWS):
            # After a crash numbers are skipped that may have been given out.
            is_hole = next_row is not None and first > next_row and not self._seen.has_crashed
            if is_hole or (next_row is not None and first < next_row):
                self._world.violate(f"row {next_row} of the ledger is followed by row {first}")
                return
            next_row = first + rows
            for run in parse_block(first, block):
                if run.destination.startswith("queue/") and not run.destination.endswith("/dead"):
                    if run.step is Step.ACCEPTED:
                        accepted.update(run.ids)
                        by_destination[run.destination] += len(run.ids)
                    elif run.step in _ENDS:
                        ended.update(run.ids)
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
        for identifier in accepted:
            if ended[identifier] != 1 or accepted[identifier] != 1:
                self._world.violate(
                    f"the ledger has accepted message {identifier} {accepted[identifier]} times,"
                    f" and ended it {ended[identifier]} times"
                )
                return
