"""The index of patterns: what it finds, and how long that takes."""

from __future__ import annotations

import random
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.hub import pattern_index
from crosswire.hub.pattern_index import PatternIndex, pattern_test

LEVELS = st.sampled_from(["a", "b", "", "$x"])
PATTERN_LEVELS = st.sampled_from(["a", "b", "", "$x", "+"])


def fits(pattern: list[str], name: list[str]) -> bool:
    """The rule in its plainest form, to hold the index against."""
    if name[0].startswith("$") and pattern[0] in ("+", "#"):
        return False
    if pattern[-1] == "#":
        pattern = pattern[:-1]
        if len(name) < len(pattern):
            return False
        name = name[: len(pattern)]
    return len(pattern) == len(name) and all(
        want in ("+", have) for want, have in zip(pattern, name, strict=True)
    )


@given(
    st.lists(
        st.tuples(st.lists(PATTERN_LEVELS, min_size=1, max_size=4), st.booleans()), max_size=8
    ),
    st.lists(LEVELS, min_size=1, max_size=4),
    st.data(),
)
def test_the_index_finds_what_trying_each_would(
    patterns: list[tuple[list[str], bool]], name: list[str], data: st.DataObject
) -> None:
    index: PatternIndex[int] = PatternIndex()
    split = [[*levels, "#"] if rest else levels for levels, rest in patterns]
    for number, levels in enumerate(split):
        index.add("/".join(levels), number)
    gone = data.draw(st.sets(st.sampled_from(range(len(split))))) if split else set()
    for number in gone:
        index.remove("/".join(split[number]), number)
    expected = [n for n, levels in enumerate(split) if n not in gone and fits(levels, name)]
    assert sorted(index.match("/".join(name))) == expected
    for number in set(range(len(split))) - gone:
        index.remove("/".join(split[number]), number)
    assert not index._names and not index._rests and not index._numbers and not index._blocks


@given(
    st.lists(
        st.tuples(st.lists(PATTERN_LEVELS, min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.lists(LEVELS, min_size=1, max_size=4),
    st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=100),
)
def test_what_was_found_is_brought_up_to_date(
    patterns: list[tuple[list[str], bool]], name: list[str], changes: list[int | None]
) -> None:
    """As if all were matched again; None stands for a look, a number for adding or removing."""
    index: PatternIndex[int] = PatternIndex()
    split = ["/".join([*levels, "#"] if rest else levels) for levels, rest in patterns]
    there: set[int] = set()
    text = "/".join(name)

    def wants(number: int) -> bool:
        return number % 3 != 0

    found, version = list[int](), index.version
    for change in [*changes, None]:
        if change is None:
            expected = sorted(filter(wants, index.match(text)))
            updated = index.update(found, version, text, wants)
            if updated is None:
                assert index.version - version > 64
                updated = expected
            assert sorted(updated) == expected
            found, version = updated, index.version
        elif (number := change % len(split)) in there:
            there.discard(number)
            index.remove(split[number], number)
        else:
            there.add(number)
            index.add(split[number], number)
    index.renew()
    assert index.update(found, version, text, wants) is None


@given(
    st.lists(PATTERN_LEVELS, min_size=1, max_size=4),
    st.booleans(),
    st.lists(LEVELS, min_size=1, max_size=4),
)
def test_one_pattern_is_tried_alike(levels: list[str], rest: bool, name: list[str]) -> None:
    pattern = [*levels, "#"] if rest else levels
    assert pattern_test("/".join(pattern))("/".join(name)) == fits(pattern, name)
    assert pattern_test("#")("/".join(name)) == fits(["#"], name)


def test_patterns_of_several_blocks_are_found_and_their_numbers_used_again() -> None:
    index: PatternIndex[int] = PatternIndex()
    patterns = [f"+/{number}/+" for number in range(3 * pattern_index._BLOCK_PATTERNS)]
    for number, pattern in enumerate(patterns):
        index.add(pattern, number)
        index.add("+/#", -number)
    assert sorted(index) == sorted([*range(len(patterns)), *(-n for n in range(len(patterns)))])
    assert index.match("a/2000/b")[-1] == 2000
    blocks = len(index._blocks)
    assert blocks == 4
    for number in range(0, len(patterns), 2):
        index.remove(patterns[number], number)
    for number in range(0, len(patterns), 2):
        index.add(f"{number}/+", number)
    assert len(index._blocks) == blocks
    assert 2000 in index.match("2000/x") and 2000 not in index.match("a/2000/b")


@pytest.mark.alone
def test_thousands_of_patterns_that_match_take_a_few_milliseconds() -> None:
    """A tree of levels takes 12 ms for these, most of a turn of the event loop."""
    chance = random.Random(1)
    index: PatternIndex[int] = PatternIndex()
    for number, mix in enumerate({"/".join(chance.choices("a+", k=16)) for _ in range(10_000)}):
        index.add(mix, number)
    name = "/".join(["a"] * 16)
    took: list[float] = []
    for _ in range(5):
        began = thread_time()
        found = index.match(name)
        took.append(thread_time() - began)
    assert len(found) > 9_000
    assert min(took) < 0.004
