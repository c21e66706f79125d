"""The index of topics: what a walk finds while topics come and go, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterable
from time import thread_time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.hub import topic_index
from crosswire.hub.topic_index import KnownTopics, TopicWalk
from crosswire.hub.topics import Topic
from tests.hub.test_pattern_index import fits

# `-` and `.` are before `/` in the order of names, `0` is right after it, and `%` after `$`.
LEVELS = st.sampled_from(["a", "b", "a-", "a.b", "a0", "", "0", "$", "$x", "%", "é", "+"])
NAMES = st.lists(LEVELS, min_size=1, max_size=5).map("/".join)
PATTERNS = st.tuples(st.lists(LEVELS, max_size=4), st.booleans()).map(
    lambda drawn: "/".join([*drawn[0], "#"] if drawn[1] or not drawn[0] else drawn[0])
)


class NamedTopic:
    """As much of a topic as the index needs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.destination = f"topic/{name}"


def known(names: Iterable[str]) -> KnownTopics:
    topics = KnownTopics()
    for name in names:
        topics.add(cast(Topic, NamedTopic(name)))
    return topics


def walked(walk: TopicWalk, most: int) -> list[str]:
    found: list[str] = []
    while not walk.is_done:
        part = walk.part(most)
        assert len(part) <= most
        found += [topic.name for topic in part]
    return found


def expected(pattern: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if fits(pattern.split("/"), name.split("/")))


@given(st.sets(NAMES, max_size=40), PATTERNS, st.integers(1, 9))
def test_a_walk_finds_what_trying_each_would(names: set[str], pattern: str, most: int) -> None:
    assert walked(TopicWalk(known(names), pattern), most) == expected(pattern, names)


@given(st.sets(NAMES, max_size=40), PATTERNS)
def test_few_are_those_that_a_walk_finds(names: set[str], pattern: str) -> None:
    topics = known(names)
    for _ in range(2):
        few = topics.few(pattern)
        # A pattern that is a name with a level `+` is a pattern all the same.
        assert few is not None
        assert sorted(topic.name for topic in few) == expected(pattern, names)


@given(
    st.sets(NAMES, min_size=1, max_size=30),
    PATTERNS,
    st.integers(1, 3),
    st.lists(st.tuples(NAMES, st.booleans()), max_size=30),
)
def test_topics_that_stay_are_found_once_while_others_come_and_go(
    names: set[str], pattern: str, most: int, changes: list[tuple[str, bool]]
) -> None:
    topics = known(names)
    walk = TopicWalk(topics, pattern)
    found: list[str] = []
    stayed, ever = set(names), set(names)
    while not walk.is_done:
        found += [topic.name for topic in walk.part(most)]
        if changes:
            name, comes = changes.pop()
            there = topics.by_destination.get(f"topic/{name}")
            if comes and there is None:
                topics.add(cast(Topic, NamedTopic(name)))
                ever.add(name)
            elif not comes and there is not None:
                topics.remove(there)
                stayed.discard(name)
    assert found == sorted(set(found))
    assert set(expected(pattern, stayed)) <= set(found) <= set(expected(pattern, ever))


def test_what_is_kept_of_a_pattern_ends_with_the_next_topic() -> None:
    topics = known(["a/b", "a/c", "b"])
    assert len(topics.few("a/+") or ()) == 2
    topics.add(cast(Topic, NamedTopic("a/d")))
    assert len(topics.few("a/+") or ()) == 3
    topics.remove(topics.by_destination["topic/a/b"])
    assert len(topics.few("a/+") or ()) == 2


def test_no_long_list_is_kept_and_few_patterns_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_index, "_CACHED_PATTERNS", 50)
    topics = known(f"a/{number}" for number in range(topic_index.FEW + 1))
    assert topics.few("#") is None
    for number in range(120):
        topics.few(f"a/{number}/#")
        assert len(topics._few) <= 50
    assert all(len(found or ()) <= topic_index.FEW for _, found in topics._few.values())


def test_a_part_takes_the_same_time_however_many_topics_there_are() -> None:
    """Of what a pattern matches, and of what it does not."""
    topics = known(f"a/{number}/c" for number in range(50_000))
    for pattern in ("#", "a/+/c", "+/+/c", "+/+/d", "a/+/b", "+/7/#", "b/#"):
        walk = TopicWalk(topics, pattern)
        longest = 0.0
        while not walk.is_done:
            began = thread_time()
            walk.part(128)
            longest = max(longest, thread_time() - began)
        assert longest < 0.01
