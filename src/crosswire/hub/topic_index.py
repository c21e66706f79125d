"""The index that finds the topics which a pattern matches, some at a time.

There may be a hundred thousand topics, and thousands of patterns that match all of them: no list is
kept for a pattern, and none is made in one turn of the event loop. The names of all topics are in
one sorted list. A walk goes along it, and where no name can match for a while it continues after
those by a binary search. Between two parts a walk remembers one name, so topics may come and go
meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from crosswire.hub.topics import Topic

__all__ = ["FEW", "KnownTopics", "TopicWalk"]

FEW: Final = 128
"""The topics of a pattern are kept if there are no more than these."""
_CACHED_PATTERNS: Final = 4096
_PREFIX: Final = "topic/"
_SHORTEST_HIDDEN: Final = _PREFIX + "$"
_AFTER_HIDDEN: Final = _PREFIX + chr(ord("$") + 1)
_AFTER_SLASH: Final = chr(ord("/") + 1)
"""Names that start with `NAME/` are all before NAME and this."""


class KnownTopics:
    """All topics by destination, and which of them a pattern matches.

    `version` grows when a topic is added or removed.
    """

    def __init__(self) -> None:
        self.by_destination: dict[str, Topic] = {}
        self.sorted: list[str] = []
        """The destinations, in order."""
        self.version = 0
        self._few: dict[str, tuple[int, list[Topic] | None]] = {}

    def add(self, topic: Topic) -> None:
        """There is a new topic."""
        self.by_destination[topic.destination] = topic
        insort(self.sorted, topic.destination)
        self.version += 1

    def remove(self, topic: Topic) -> None:
        """It is no longer there."""
        del self.by_destination[topic.destination]
        del self.sorted[bisect_left(self.sorted, topic.destination)]
        self.version += 1

    def get(self, pattern: str) -> Topic | None:
        """The topic of that name, if this is no pattern."""
        return self.by_destination.get(_PREFIX + pattern)

    def few(self, pattern: str) -> list[Topic] | None:
        """The topics of a pattern; None if there are many, or many have to be looked at."""
        if "+" not in pattern and "#" not in pattern:
            topic = self.get(pattern)
            return [] if topic is None else [topic]
        known = self._few.get(pattern)
        if known is not None and known[0] == self.version:
            return known[1]
        walk = TopicWalk(self, pattern)
        found: list[Topic] | None = walk.part(FEW)
        if not walk.is_done:
            found = None
        self.keep_few(pattern, self.version, found)
        return found

    def keep_few(self, pattern: str, version: int, found: list[Topic] | None) -> None:
        """These were all topics of a pattern at this version; None if they are not few."""
        if len(self._few) >= _CACHED_PATTERNS and pattern not in self._few:
            self._few.clear()
        self._few[pattern] = (version, found)


class TopicWalk:
    """Goes through the topics of a pattern, in order of names.

    Those that are there from the first part to the last are found once; of those that come or go
    in between, some.
    """

    __slots__ = (
        "_count",
        "_hides",
        "_in_rest",
        "_next",
        "_plain",
        "_start",
        "_topics",
        "is_done",
    )

    def __init__(self, topics: KnownTopics, pattern: str) -> None:
        levels = (_PREFIX + pattern).split("/")
        self._topics = topics
        self._hides = levels[1] in ("+", "#")
        """Neither stands for a first level that starts with `$`."""
        self._in_rest = levels[-1] == "#"
        if self._in_rest:
            levels.pop()
        self._count = len(levels)
        self._plain = [(depth, each) for depth, each in enumerate(levels) if each != "+"]
        before = levels.index("+") if "+" in levels else len(levels)
        self._next = "/".join(levels[:before])
        self._start = f"{self._next}/" if self._in_rest and before == len(levels) else ""
        """If it matches all names that start with this."""
        self.is_done = False
        """Whether there are no more."""

    def part(self, most: int) -> list[Topic]:
        """Those of the pattern among the next names, of which it looks at `most`."""
        names, topics = self._topics.sorted, self._topics.by_destination
        end, found = len(names), []
        index = bisect_left(names, self._next)
        if self._start:
            following = names[index : index + most]
            if following and self._match_all(following):
                found = [topics[name] for name in following]
                index += len(following)
                most = 0
        for _ in range(most):
            if index >= end:
                break
            name = names[index]
            skip_to = self._compare(name)
            if skip_to is None:
                found.append(topics[name])
            if skip_to:
                index = bisect_left(names, skip_to, index + 1)
            else:
                index += 1
        if index < end:
            self._next = names[index]
        else:
            self.is_done = True
        return found

    def _match_all(self, names: list[str]) -> bool:
        """Whether the pattern matches these, which are in order, by a look at first and last."""
        first, last = names[0], names[-1]
        if not first.startswith(self._start) or not last.startswith(self._start):
            return False
        return not self._hides or last < _SHORTEST_HIDDEN or first >= _AFTER_HIDDEN

    def _compare(self, name: str) -> str | None:
        """None if the name matches. If not, all names before the one that is returned don't match
        either; "" if nothing is known of the next one."""
        levels = name.split("/")
        length = len(levels)
        for depth, wanted in self._plain:
            if depth >= length:
                return ""
            if levels[depth] != wanted:
                start = "/".join(levels[:depth])
                target = f"{start}/{wanted}"
                if name < target:
                    return target
                # Names that continue the level, as `b-c` does `b`, are before `b/c`.
                deeper = target + "/"
                return deeper if name < deeper else start + _AFTER_SLASH
        if self._hides and name.startswith(_SHORTEST_HIDDEN):
            return _AFTER_HIDDEN
        if length < self._count:
            return ""
        if length == self._count or self._in_rest:
            return None
        return "/".join(levels[: self._count]) + _AFTER_SLASH
