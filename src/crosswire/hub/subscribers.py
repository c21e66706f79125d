"""Unnamed subscribers: they get what is published while they are attached, at most once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, Literal

from crosswire.envelope import MICROSECONDS, ONLY_FOR, Envelope
from crosswire.hub.attachment import (
    LEFT,
    Attachment,
    Delivery,
    DeliveryGap,
    DeliveryReceiver,
    Ended,
    Window,
)
from crosswire.hub.core import Core
from crosswire.hub.filters import Predicate
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.pattern_index import PatternIndex
from crosswire.hub.topic_index import KnownTopics
from crosswire.hub.topic_reads import PatternLogs
from crosswire.hub.topics import Topic
from crosswire.store.contract import Page

__all__ = ["Subscriber"]

_PAGE: Final = 256


class Subscriber(Attachment):
    """Gets what is published while it is attached, at once and at most once.

    `settle` only frees its window. One that is too slow is disconnected or, by policy, lags: it
    reads what it missed from disk when its window is free. What was not stored is reported as a
    gap.
    """

    __slots__ = (
        "_core",
        "_gap_first",
        "_gap_last",
        "_gap_reported",
        "_index",
        "_is_reading",
        "_logs",
        "_loop",
        "_topics",
        "is_connected",
        "is_lagging",
        "missed",
        "names",
        "pattern",
        "position",
        "slow",
    )

    def __init__(
        self,
        core: Core,
        topics: KnownTopics,
        index: PatternIndex[Subscriber],
        pattern: str,
        receiver: DeliveryReceiver,
        *,
        peer: LedgerPeer,
        window: Window,
        matches: Predicate | None,
        slow: Literal["lag", "disconnect"] | None,
        names: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(pattern, receiver, peer=peer, window=window, matches=matches)
        self.names = names
        self.pattern = pattern.removeprefix("topic/")
        self.slow = slow
        self.is_connected = True
        """Whether what it is given reaches its peer at once. Not so for a link without a
        connection: its receiver keeps the messages, and calls `note_delivered` when it sends
        them."""
        self.is_lagging = False
        self.position = 0
        self.missed = 0
        self._core = core
        self._loop = core.loop
        self._topics = topics
        self._logs = PatternLogs(core, topics, self.pattern)
        self._index = index
        self._is_reading = False
        self._gap_first = 0
        self._gap_last = 0
        self._gap_reported = 0

    def wants(self, topic: str) -> bool:
        """Whether its choice of names, beyond the pattern, includes this topic."""
        try:
            return self.names is None or self.names(topic)
        except Exception as error:
            self._loop.give_up(self, error)
            return False

    def takes(self, envelope: Envelope) -> bool:
        """Whether its filter matches, and the message is not for a named subscription alone."""
        try:
            return ONLY_FOR not in envelope.native and (
                self.matches is None or self.matches(envelope.properties)
            )
        except Exception as error:
            self._loop.give_up(self, error)
            return False

    def renew(self) -> None:
        """Its choice of names has changed: topics look up their subscribers again."""
        self._index.renew()

    def publish(self, topic: Topic, envelopes: list[Envelope], *, stored: bool) -> list[Envelope]:
        """Deliver these, as many as its window allows. Returns those that matched and were sent.

        `stored`: the rest can be read from disk later.
        """
        if self.matches is not None:
            envelopes = [each for each in envelopes if self.takes(each)]
        if not envelopes or not self.is_open:
            return []
        # While it lags, what is published now has to wait for what it missed.
        room = 0 if self.is_lagging else max(self.window.free, 0)
        if room < len(envelopes):
            self._miss(topic, envelopes[room:], stored=stored)
            envelopes = envelopes[:room]
            if not envelopes or not self.is_open:
                return []
        self.window.free -= len(envelopes)
        self._loop.deliver(self, [Delivery(each, 1) for each in envelopes])
        return envelopes

    def _miss(self, topic: Topic, missed: list[Envelope], *, stored: bool) -> None:
        if (self.slow or topic.policy.slow) == "disconnect":
            self.stop_deliveries()
            self._index.remove(self.pattern, self)
            self._loop.notice(self, Ended("too slow"))
            return
        if not stored:
            self._gap_first = self._gap_first or missed[0].id
            self._gap_last = missed[-1].id
            return
        if not self.is_lagging:
            self.is_lagging = True
            self.position = missed[0].id - 1
        self.missed = max(self.missed, missed[-1].id)
        self._core.commits.await_commit(self)

    def start_after(self, position: int, since_us: int, retentions: int) -> None:
        """Start with what is stored already: it lags from the beginning. See `PatternLogs`."""
        self.is_lagging = True
        self.position = position
        self._logs.since_us = since_us
        self._logs.retentions = retentions
        self.missed = self._core.store.newest_id
        self._core.commits.await_commit(self)

    def _catch_up(self) -> None:
        """Read from disk, as far as its window and the last commit allow."""
        upto = min(self.missed, self._core.commits.committed_id)
        while self.is_lagging and self.is_open and self.window.free > 0 and not self._is_reading:
            if self.position >= upto:
                break
            # Set before anything is delivered: a receiver that settles at once wakes us again.
            self._is_reading = True
            try:
                self._logs.read(
                    self,
                    after=self.position,
                    upto=upto,
                    count=min(self.window.free, _PAGE),
                    done=self._read,
                    failed=self._read_failed,
                    ask_again=self._ask_again,
                )
            except Exception:
                self._read_failed()
                raise
        if self.is_lagging and self.position >= self.missed:
            self.is_lagging = False

    def _ask_again(self) -> None:
        self._is_reading = False

    def _read_failed(self) -> None:
        self._is_reading = False
        self._core.read_again(self)

    def _read(self, page: Page, reclaimed: int) -> None:
        self._is_reading = False
        if self.is_open and reclaimed:
            self._report_gap(reclaimed)
        if not self.is_open:
            return
        room = self.window.free
        if len(page.records) > room:
            # Others that share the window took some of its room since this was asked for.
            if room <= 0:
                return
            page = Page(page.records[:room], page.records[room - 1][1])
        deliveries = []
        for number, identifier, record in page.records:
            envelope = self._core.damage.decode_or_set_aside(number, identifier, record)
            if (
                envelope is not None
                and envelope.time >= self._logs.since_us
                and self.takes(envelope)
                and self.wants(envelope.destination.removeprefix("topic/"))
            ):
                deliveries.append(Delivery(envelope, 1))
        self.position = page.last
        if deliveries:
            self.window.free -= len(deliveries)
            if self.is_connected:
                self.note_delivered([each.envelope for each in deliveries])
            self._loop.deliver(self, deliveries)

    def note_delivered(self, envelopes: Sequence[Envelope]) -> None:
        """Enter deliveries into the ledger; those of `publish` are entered by who publishes, as
        are the counts of topics that have no row for each delivery."""
        now_us = int(self._loop.now * MICROSECONDS)
        for destination, run in groupby(envelopes, key=attrgetter("destination")):
            topic = self._topics.by_destination.get(destination)
            # One that was removed since had no stored messages.
            if topic is None or not (topic.policy.durable or topic.policy.ledger == "rows"):
                continue
            ids = [each.id for each in run]
            self._core.ledger.note(
                Step.DELIVERED, now_us, destination, ids, peer=self.peer, attempt=1
            )
        self._core.commits.request(sync=False, urgent=False)

    def note_returned(self, ids: Sequence[int]) -> None:
        """Its peer is gone for good, and has not confirmed these."""
        now_us = int(self._loop.now * MICROSECONDS)
        self._core.ledger.note(
            Step.RETURNED, now_us, self.destination, ids, peer=self.peer, attempt=1
        )
        self._core.commits.request(sync=False, urgent=False)

    def note_removed(self, topic: Topic) -> None:
        """A topic is removed: what retention deleted of it is known no longer."""
        if self.is_open and self.is_lagging and self._logs.is_gap(topic, self.position):
            self._report_gap(topic.reclaimed)

    def _report_gap(self, reclaimed: int) -> None:
        """Report what retention deleted before it was read, up to this id."""
        seen = max(self.position, self._gap_reported)
        if reclaimed > seen:
            self._gap_reported = reclaimed
            self._loop.notice(self, DeliveryGap(seen + 1, reclaimed, "retention"))

    def settle(self, ids: Collection[int], now: float) -> int:
        """Free its window: there is nothing to settle."""
        if not self.window.granted:
            self.window.grant(len(ids), now)
        return len(ids)

    def refuse(
        self,
        ids: Collection[int],
        now: float,
        *,
        cause: str = "",  # noqa: ARG002
        delay_s: float | None = None,  # noqa: ARG002
        final: bool | None = None,  # noqa: ARG002
    ) -> int:
        """Free its window: nothing is delivered twice."""
        return self.settle(ids, now)

    def extend(self, ids: Collection[int], now: float, lease_s: float) -> int:  # noqa: ARG002
        """There are no leases: returns 0."""
        return 0

    def wake(self, now: float) -> None:
        """Get a turn if it lags, or has a gap to report."""
        if self.is_lagging or self._gap_last:
            self._loop.touch(self)
            self._loop.pump(now)

    @property
    def visible(self) -> int:
        """The last id that it missed and is to read."""
        return self.missed

    def dispatch(self, now: float) -> None:  # noqa: ARG002
        """Report a gap, and read on where it lags."""
        if not self.is_open:
            return
        if self._gap_last and self.window.free > 0:
            gap = DeliveryGap(self._gap_first, self._gap_last, "too slow")
            self._gap_first = self._gap_last = 0
            self._loop.notice(self, gap)
        if self.is_lagging:
            self._catch_up()

    def close(self, now: float, *, cause: str = LEFT) -> None:  # noqa: ARG002
        """Detach it."""
        if self.is_open:
            self.stop_deliveries()
            self._index.remove(self.pattern, self)
