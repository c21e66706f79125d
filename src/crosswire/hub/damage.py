"""Damaged records: reported, set aside, and kept for a repair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from crosswire.envelope import MICROSECONDS, Envelope, decode_at
from crosswire.errors import HubError, RecordDamaged
from crosswire.hub.commits import CommitPath, CommitStage
from crosswire.hub.dispatch import DispatchLoop
from crosswire.hub.ledger import Ledger, Step
from crosswire.store.contract import Store

__all__ = ["DamageReports", "Titled"]

_DAMAGED: Final = "damaged"
_STATE: Final = bytes(4)
"""In place of a destination's number, which is never 0: a state space and a key follow."""
_REPORTS: Final = 1000


class Titled(Protocol):
    """A queue or subscription, as reports call it."""

    @property
    def title(self) -> str:
        """What reports call it."""
        ...


class DamageReports:
    """`reports` are the latest errors that no caller could be given. `stopped` are the queues and
    subscriptions that deliver nothing since they were opened, those that were removed included."""

    def __init__(
        self, store: Store, ledger: Ledger, loop: DispatchLoop, commits: CommitPath
    ) -> None:
        self.reports: list[HubError] = []
        self.stopped: list[Titled] = []
        self._store = store
        self._ledger = ledger
        self._loop = loop
        self._commits = commits
        # Producers get an error without details; operators find those here.
        commits.add_listener(
            CommitStage.VISIBILITY, failed=lambda _group, error: self.report(error)
        )

    def report(self, error: HubError) -> None:
        """Keep an error for operators, up to 1,000 of them."""
        self.reports.append(error)
        del self.reports[:-_REPORTS]

    # Messages.

    def decode(self, number: int, identifier: int, record: bytes) -> Envelope:
        """The message that is stored under this id of a destination.

        Raises RecordDamaged for bytes that are no message, or another one's.
        """
        return decode_at(record, self._store.name(number), identifier)

    def decode_or_set_aside(self, number: int, identifier: int, record: bytes) -> Envelope | None:
        """The message that is stored under this id; None if its record is damaged and set aside."""
        try:
            return self.decode(number, identifier, record)
        except RecordDamaged as error:
            self.set_aside(number, identifier, record, error)
            return None

    def set_aside(self, number: int, identifier: int, record: bytes, error: HubError) -> None:
        """Report a message that can't be read, and save its bytes where `messages` lists them."""
        destination = self._name_of(number)
        self.report(error)
        self._store.report_damage(
            "record", f"message {identifier} of {destination} is damaged and set aside: {error}"
        )
        self._store.save(_DAMAGED, number.to_bytes(4) + identifier.to_bytes(8), record)
        self._note(Step.DAMAGED, destination, identifier, str(error))

    def report_missing(self, number: int, identifier: int, reclaimed: int) -> None:
        """A cursor refers to a message that is not stored: retention deleted it, or it is lost.

        `reclaimed` is how far the store has deleted messages of that destination. Of a queue only
        settled ones are deleted, so there a missing message is lost.
        """
        destination = self._name_of(number)
        if destination.startswith("topic/") and identifier <= reclaimed:
            self._note(Step.EXPIRED, destination, identifier, "retention")
            return
        error = RecordDamaged(f"message {identifier} of {destination} is missing")
        self.report(error)
        self._store.report_damage("record", str(error))
        self._note(Step.DAMAGED, destination, identifier, "missing")

    def _note(self, step: Step, destination: str, identifier: int, detail: str) -> None:
        now_us = int(self._loop.now * MICROSECONDS)
        self._ledger.note(step, now_us, destination, [identifier], detail=detail)
        self._commits.request(urgent=False)

    def messages(self) -> Iterator[tuple[str, int, bytes]]:
        """Messages that were set aside: destination, id, bytes as they were found."""
        for key, record in self._store.load(_DAMAGED):
            if not key.startswith(_STATE):
                yield self._name_of(int.from_bytes(key[:4])), int.from_bytes(key[4:]), record

    def _name_of(self, number: int) -> str:
        """Its destination; a damaged record may have a number that was never assigned."""
        try:
            return self._store.name(number)
        except KeyError:
            return f"destination number {number}"

    # State.

    def set_aside_state(self, space: str, key: bytes, value: bytes, error: HubError) -> None:
        """Report a record of a state space that can't be used, and move it to `state`."""
        self.report(error)
        self._store.report_damage(
            "record", f"a record of {space} can't be used and is set aside ({key!r}): {error}"
        )
        self._store.save(_DAMAGED, _STATE + space.encode() + b"/" + key, value)
        self._store.drop(space, key)
        self._commits.request(urgent=False)

    def state(self) -> Iterator[tuple[str, bytes, bytes]]:
        """Records of state spaces that were set aside: space, key, bytes as they were found."""
        for key, record in self._store.load(_DAMAGED, _STATE):
            space, _, rest = key[len(_STATE) :].partition(b"/")
            yield space.decode(errors="replace"), rest, record

    def report_stopped(self, backlog: Titled, reason: str) -> None:
        """A queue or subscription, and only that one, delivers nothing until it is repaired."""
        self.stopped.append(backlog)
        title = backlog.title
        error = RecordDamaged(f"{title} is stopped until `crosswire store repair`: {reason}")
        self.report(error)
        self._store.report_damage("cursor", str(error))
