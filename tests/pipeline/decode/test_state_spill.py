"""States that rest: what is put is there once, in memory or in the file."""

from __future__ import annotations

import resource

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from crosswire.pipeline.decode import state_spill as stored
from crosswire.pipeline.decode.state_spill import States

keys = st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("nm"))


class Resting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(stored, "_AT_ONCE", 2)
        self.states = States(in_memory=1)
        self.expected: dict[tuple[str, str], bytes] = {}

    def teardown(self) -> None:
        self.patch.undo()

    @rule(key=keys, state=st.binary(max_size=4))
    def put(self, key: tuple[str, str], state: bytes) -> None:
        if key not in self.expected:
            self.states.put(key, state)
            self.expected[key] = state

    @rule(key=keys)
    def take(self, key: tuple[str, str]) -> None:
        assert self.states.take(key) == self.expected.pop(key, None)

    @rule()
    def take_all(self) -> None:
        found = list(self.states.take_all())
        assert sorted(found) == sorted(self.expected.items())
        self.expected = {}

    @invariant()
    def none_is_lost(self) -> None:
        assert len(self.states) == len(self.expected)


TestResting = Resting.TestCase
TestResting.settings = settings(max_examples=40, stateful_step_count=30)


def test_memory_does_not_grow_with_their_number() -> None:
    states = States(in_memory=1000)
    for number in range(10_000):
        states.put((f"c{number}", "n"), bytes(1000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(10_000, 150_000):
        states.put((f"c{number}", "n"), bytes(1000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
    assert len(states) == 150_000 and states.take(("c5", "n")) == bytes(1000)
