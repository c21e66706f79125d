"""Reads over the topics of a pattern, in parts.

A subscription to a pattern reads the logs of all topics that it matches, in the order of ids. With
tens of thousands of them, to look at each takes longer than a turn of the event loop has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from crosswire.hub.core import Core
from crosswire.hub.dispatch import Dispatcher
from crosswire.hub.topic_index import FEW, KnownTopics, TopicWalk
from crosswire.hub.topics import Topic
from crosswire.store.contract import Page

__all__ = ["PageReader", "PatternLogs"]

_AT_ONCE: Final = 128
"""Names that are looked at before others have a turn: up to 10 us each, if it is a topic of the
pattern that has something to read."""

PageReader: TypeAlias = Callable[[Page, int], None]
"""Is called with a page, and the highest id that retention has deleted of what it should have; 0 if
nothing of that was deleted."""


class PatternLogs:
    """The logs of the topics of a pattern, which are read like one."""

    __slots__ = ("_core", "_topics", "pattern", "retentions", "since_us")

    def __init__(self, core: Core, topics: KnownTopics, pattern: str, since_us: int = 0) -> None:
        """What was published before `since_us` need not be read."""
        self.pattern = pattern
        self.since_us = since_us
        self.retentions = -1
        """`Floors.raised` when the reader began with what there was: what retention had deleted
        by then it does not miss. -1 if it asked for all of it."""
        self._core = core
        self._topics = topics

    def read(
        self,
        reader: Dispatcher,
        *,
        after: int,
        upto: int,
        count: int,
        size_bytes: int = 1 << 20,
        done: PageReader,
        failed: Callable[[], None],
        ask_again: Callable[[], None],
    ) -> None:
        """Like `Store.read`; but if there are many topics, `done` is called in a later turn, and
        then the reader is touched. If that can't be read, or `done` raises, `failed` is called, and
        what was raised is logged. If too many read already, `ask_again` is called later instead,
        and the reader is touched."""
        few = self._topics.few(self.pattern)
        if few is None and not self._core.reads.take(reader, ask_again):
            return
        if few is not None and len(few) == 1:
            topic = few[0]
            begin = self.begin_after(topic, after)
            reclaimed = topic.reclaimed if self.is_gap(topic, begin) else 0
            self._core.store.read(
                (topic.number,),
                after=begin,
                upto=upto,
                count=count,
                size_bytes=size_bytes,
                done=lambda page: done(page, reclaimed),
            )
            return
        page = _PatternPage(self._core, self, after, upto, count, size_bytes)
        if few is not None:
            page.add(few)
            page.hand_to(done)
            return
        self._core.loop.touch(
            _PartialRead(self._core, reader, self._topics, self.pattern, page, done, failed)
        )

    def read_now(
        self, *, after: int, upto: int, count: int, size_bytes: int = 1 << 20, done: PageReader
    ) -> None:
        """Like `read`, in one turn, however many topics there are."""
        page = _PatternPage(self._core, self, after, upto, count, size_bytes)
        walk = self.walk()
        while not walk.is_done:
            page.add(walk.part(_AT_ONCE))
        page.hand_to(done)

    def fetch(self, identifier: int) -> bytes | None:
        """The record of one message of the pattern's topics; None if there is none."""
        walk = self.walk()
        while not walk.is_done:
            for topic in walk.part(_AT_ONCE):
                if topic.newest_id >= identifier:
                    record = self._core.store.fetch(topic.number, [identifier])[0]
                    if record is not None:
                        return record
        return None

    def walk(self) -> TopicWalk:
        """Goes through the topics."""
        return TopicWalk(self._topics, self.pattern)

    def newest_id(self) -> int:
        """No message of these topics that is committed has a higher id."""
        few = self._topics.few(self.pattern)
        if few is None:
            return self._core.commits.committed_id
        return max((topic.newest_id for topic in few), default=0)

    def begin_after(self, topic: Topic, after: int) -> int:
        """The id after which a topic is read by one who has read all logs up to `after`."""
        return max(after, topic.before(self.since_us)) if self.since_us else after

    def is_gap(self, topic: Topic, after: int) -> bool:
        """Whether retention has deleted messages of a topic that were to be read."""
        return topic.reclaimed > after and topic.retentions > self.retentions


class _PatternPage:
    """A page to which topics are added, and what retention has deleted of it.

    A topic is read when it is added, and what is deleted of it by then is seen at that moment. What
    retention deletes of it later is on this page, or it is missed by the next one.
    """

    __slots__ = ("_after", "_logs", "_merged", "_reclaimed")

    def __init__(
        self, core: Core, logs: PatternLogs, after: int, upto: int, count: int, size_bytes: int
    ) -> None:
        self._logs = logs
        self._after = after
        self._reclaimed = 0
        self._merged = core.store.merged_page(
            after=after, upto=upto, count=count, size_bytes=size_bytes
        )

    def add(self, topics: Iterable[Topic]) -> None:
        """Read these."""
        logs, add, after = self._logs, self._merged.add, self._after
        has_start = logs.since_us > 0
        for topic in topics:
            begin = logs.begin_after(topic, after) if has_start else after
            if topic.reclaimed > self._reclaimed and logs.is_gap(topic, begin):
                self._reclaimed = topic.reclaimed
            if topic.newest_id > begin:
                add(topic.number, begin)

    def hand_to(self, done: PageReader) -> None:
        """All topics are added."""
        done(self._merged.page(), self._reclaimed)


class _PartialRead:
    """Looks at some topics each time it has its turn among all that have something to hand out."""

    def __init__(
        self,
        core: Core,
        reader: Dispatcher,
        topics: KnownTopics,
        pattern: str,
        page: _PatternPage,
        done: PageReader,
        failed: Callable[[], None],
    ) -> None:
        self._core = core
        self._reader = reader
        self._topics = topics
        self._pattern = pattern
        self._version = topics.version
        # Topics come and go meanwhile: those that come have no ids up to `upto`, and those that go
        # have no messages.
        self._walk = TopicWalk(topics, pattern)
        self._found: list[Topic] | None = []
        self._page = page
        self._done = done
        self._failed = failed

    def dispatch(self, now: float) -> None:  # noqa: ARG002
        """Look at the next topics; after the last, hand the page to the reader."""
        try:
            found = self._walk.part(_AT_ONCE)
            self._page.add(found)
            if self._found is not None:
                self._found = self._found + found if len(self._found) < FEW else None
            if not self._walk.is_done:
                self._core.loop.touch(self)
                return
            self._core.reads.release()
        except Exception:
            self._core.reads.release()
            self._failed()
            raise
        if self._found is not None and len(self._found) <= FEW:
            # Few of many names match: the next page need not look for them.
            self._topics.keep_few(self._pattern, self._version, self._found)
        try:
            self._page.hand_to(self._done)
        except Exception:
            self._failed()
            raise
        self._core.loop.touch(self._reader)
