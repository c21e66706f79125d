"""Requests and responses of many connections at once: as each one's memory would match them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.pipeline.decode import matching as module
from crosswire.pipeline.decode.arrays import NONE
from crosswire.pipeline.decode.contract import FrameRows, Memories
from crosswire.pipeline.decode.matching import GET, PASS, PUT, TAKE, Matching
from crosswire.pipeline.decode.meanings import contract
from crosswire.pipeline.decode.meanings.epoxy import EpoxyMemory

steps = st.sampled_from([PASS, PUT, PUT, TAKE, GET])
turns = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3), steps), max_size=40)

Turn = tuple[int, bool, int, int]
"""Owner, direction, number, what it does."""

Keys = Callable[[Matching[Any, Any], list[Turn]], np.ndarray]


def rows_of(turns: list[Turn]) -> FrameRows:
    numbers = np.array([number for _, _, number, _ in turns], np.int64)
    owner = np.array([owner for owner, *_ in turns], np.int64)
    forward = np.array([forward for _, forward, *_ in turns], np.bool_)
    octets = np.empty(0, np.uint8)
    rest = (numbers, numbers, numbers, numbers.astype(np.uint64), *[numbers] * 4, ())
    return FrameRows(octets, False, owner, numbers, forward, *rest)


def one_by_one(turns: list[Turn], memories: dict[int, EpoxyMemory]) -> list[Any]:
    found: list[Any] = []
    for index, (owner, forward, number, step) in enumerate(turns):
        asked = memories.setdefault(owner, EpoxyMemory()).asked
        if step == PUT:
            asked.put((forward, number), ("put", str(index)))
        answer = {TAKE: asked.take, GET: asked.get}.get(step, lambda _: None)
        found.append(answer((not forward, number)))
    return found


def numbered(matching: Matching[Any, Any], turns: list[Turn]) -> np.ndarray:
    return matching.numbered(np.array([number for _, _, number, _ in turns], np.uint64))


def as_texts(matching: Matching[Any, Any], turns: list[Turn]) -> np.ndarray:
    """Of different lengths; what passes needs none."""
    texts = ["ü" * number for _, _, number, _ in turns]
    lengths = np.array([len(each.encode()) for each in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    passes = np.array([step == PASS for *_, step in turns], np.bool_)
    octets = np.frombuffer("".join(texts).encode(), np.uint8)
    return matching.texts(
        octets, starts, np.where(passes, NONE, lengths), lambda key: ("ü" * int(key[1])).encode()
    )


def at_once(
    turns: list[Turn], memories: dict[int, EpoxyMemory], stays: np.ndarray, keys: Keys
) -> list[Any]:
    rows = rows_of(turns)
    known = {owner: memories[owner] for owner, *_ in turns if owner in memories}

    def begin(owner: int) -> EpoxyMemory:
        assert stays[owner]
        return memories.setdefault(owner, EpoxyMemory())

    matching = Matching(rows, Memories(known, stays, begin), lambda memory: memory.asked)
    does = np.array([step for *_, step in turns], np.int64)
    partners = matching.partners(keys(matching, turns), does).tolist()
    values = [("put", str(index)) for index in range(len(turns))] + list(matching.values)
    matching.remember(lambda row: ((turns[row][1], turns[row][2]), values[row]))
    return [None if partner < 0 else values[partner] for partner in partners]


@pytest.mark.parametrize("keys", [numbered, as_texts])
@settings(max_examples=300)
@given(
    batches=st.lists(turns, min_size=1, max_size=3),
    most=st.sampled_from([1, 2, 100]),
    stays=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_as_memory_would(
    keys: Keys, batches: list[list[Turn]], most: int, stays: list[bool]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "MOST_ASKED", most)
        patch.setattr(module, "MOST_ASKED", most)
        expected: dict[int, EpoxyMemory] = {}
        found: dict[int, EpoxyMemory] = {}
        for batch in batches:
            turns = sorted(batch, key=lambda turn: turn[0])
            assert at_once(turns, found, np.array(stays), keys) == one_by_one(turns, expected)
            for owner in list(expected):
                if not stays[owner]:
                    del expected[owner]
        pending = {owner: list(memory.asked.items()) for owner, memory in expected.items()}
        assert {owner: list(found[owner].asked.items()) for owner in found} == {
            owner: asked for owner, asked in pending.items() if asked or owner in found
        }
