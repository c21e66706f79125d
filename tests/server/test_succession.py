"""What a replica decides, without a log and without time."""

from __future__ import annotations

import pytest

from crosswire.commitlog.contract import ReplicaState
from crosswire.commitlog.records import (
    Genesis,
    HandOver,
    LogRecord,
    RecordChain,
    Takeover,
)
from crosswire.server.succession import Role, Succession, TrimRule, are_here, successor


class Watched:
    """A standby "b" with 5 s of patience, and the records of a leader "a"."""

    def __init__(self, chance: float = 0.0) -> None:
        self.succession = Succession("b", 5.0, lambda: chance)
        self.chain = RecordChain(b"l" * 16, b"w" * 16)
        self.chain.genesis(Genesis("n"), 1)
        self.now = 100.0

    def page(self, after_s: float, *records: LogRecord) -> None:
        self.now += after_s
        self.succession.answered(self.now, records, self.chain.position.number)

    @property
    def tries(self) -> bool:
        return self.succession.should_try(has_reported=True, fault="")


def test_silence_of_a_leader_makes_a_standby_try() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a", "http://a"), 2))
    for _ in range(9):
        watched.page(0.5)
        assert not watched.tries
    watched.page(0.5)
    assert watched.tries
    assert watched.succession.leader == Takeover("a", "http://a")


def test_any_record_ends_the_silence() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    for _ in range(20):
        watched.page(1.0)
        watched.page(1.0)
        watched.page(1.0, watched.chain.heartbeat(3))
        assert not watched.tries


def test_time_in_which_the_log_does_not_answer_is_no_silence() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    watched.page(1.0)
    watched.succession.unanswered()
    watched.page(3600.0)
    watched.page(1.0)
    assert not watched.tries


def test_a_process_that_stood_still_does_not_count_all_of_it() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    watched.page(3600.0)
    assert not watched.tries


def test_the_random_part_is_added() -> None:
    watched = Watched(chance=0.999)
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    for _ in range(5):
        watched.page(1.0)
    assert not watched.tries
    watched.page(1.0)
    assert watched.tries


@pytest.mark.parametrize(("name", "tries"), [("b", True), ("c", False)])
def test_a_hand_over_is_for_the_one_that_it_names(name: str, tries: bool) -> None:
    watched = Watched()
    takeover = watched.chain.takeover(Takeover("a"), 2)
    watched.page(0, takeover, watched.chain.hand_over(HandOver(name), 3))
    assert watched.tries == tries


def test_a_hand_over_that_somebody_has_followed_counts_no_more() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    handed = watched.chain.hand_over(HandOver("b"), 3)
    watched.page(0, handed, watched.chain.takeover(Takeover("c"), 4))
    assert not watched.tries


def test_who_is_damaged_or_unknown_never_tries() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    for _ in range(10):
        watched.page(1.0)
    assert not watched.succession.should_try(has_reported=True, fault="a table can't be read")
    assert not watched.succession.should_try(has_reported=False, fault="")


def test_a_candidate_that_was_too_late_waits_again() -> None:
    watched = Watched()
    watched.page(0, watched.chain.takeover(Takeover("a"), 2))
    for _ in range(10):
        watched.page(1.0)
    watched.succession.tries()
    assert not watched.tries
    watched.succession.follows()
    watched.page(0)
    assert not watched.tries and watched.succession.role is Role.STANDBY


def test_a_leader_without_confirmations_is_overdue() -> None:
    succession = Watched().succession
    assert not succession.is_overdue(15.0)
    assert succession.is_overdue(15.1)


def replica(name: str, synced: int, *, age_s: float = 0.0, role: str = "standby") -> ReplicaState:
    return ReplicaState(name, "", "1", 1, synced, b"w" * 16, 0, role, age_s)


def test_what_all_replicas_have_may_go() -> None:
    rule = TrimRule(3600.0, 2)
    assert rule.upto(0.0, []) == 0
    assert rule.upto(0.0, [replica("a", 70), replica("b", 50), replica("c", 60)]) == 50
    assert rule.upto(0.0, [replica("a", 70), replica("b", 50)], held=20) == 20


def test_what_is_old_may_go_when_enough_have_it() -> None:
    rule = TrimRule(3600.0, 2)
    for second in range(0, 7200, 10):
        rule.note(float(second), second)
    replicas = [replica("a", 7000), replica("b", 6900), replica("away", 5, age_s=7000.0)]
    assert rule.upto(7200.0, replicas) == 3600
    assert rule.upto(7200.0, [replica("a", 7000), replica("away", 5)]) == 5


def test_a_leader_hands_over_to_the_standby_with_most() -> None:
    replicas = [
        replica("a", 90, role="leader"),
        replica("b", 70),
        replica("c", 80),
        replica("away", 85, age_s=60.0),
        replica("broken", 85, role="damaged"),
    ]
    assert successor(replicas, "a") == "c"
    assert successor(replicas, "a", "b") == "b"
    assert successor(replicas, "a", "away") == ""
    assert [each.name for each in are_here(replicas)] == ["a", "b", "c", "broken"]
