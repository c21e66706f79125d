"""Accounts of memory: who is no longer read from, and who is disconnected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crosswire.budget import PATIENCE_S, MemoryAccount, MemoryBudget

MIB = 1024 * 1024


class Peer:
    """Holds what it reports; `true_bytes` is what a measurement finds, if that is less."""

    def __init__(self, budget: MemoryBudget, owner: str | None = None) -> None:
        self.account: MemoryAccount = budget.open(self, owner)
        self.true_bytes: int | None = None
        self.restrained = False
        self.evicted = False

    def measure_memory(self) -> None:
        if self.true_bytes is not None:
            self.account.add(self.true_bytes - self.account.held_bytes)

    def restrain(self, restrained: bool) -> None:
        self.restrained = restrained

    def evict(self) -> None:
        self.evicted = True


def test_the_largest_holder_is_not_read_from_when_the_budget_is_near() -> None:
    budget = MemoryBudget(100 * MIB, 100 * MIB)
    small, large = Peer(budget), Peer(budget)
    large.account.add(60 * MIB)
    small.account.add(27 * MIB)
    assert not large.restrained
    small.account.add(1 * MIB)
    assert large.restrained and not small.restrained


def test_it_is_disconnected_after_a_while_if_that_did_not_help() -> None:
    budget = MemoryBudget(100 * MIB, 100 * MIB)
    small, large = Peer(budget), Peer(budget)
    small.account.add(10 * MIB)
    large.account.add(80 * MIB)
    budget.check(PATIENCE_S - 0.1)
    assert not large.evicted
    budget.check(PATIENCE_S)
    assert large.evicted and not small.evicted
    assert budget.held_bytes == 10 * MIB
    budget.check(2 * PATIENCE_S)
    assert not small.restrained and not small.evicted


def test_it_is_read_from_again_when_enough_is_free() -> None:
    budget = MemoryBudget(100 * MIB, 100 * MIB)
    peer = Peer(budget)
    peer.account.add(90 * MIB)
    peer.account.add(-10 * MIB)
    budget.check(1.0)
    assert peer.restrained
    peer.account.add(-10 * MIB)
    budget.check(2.0)
    assert not peer.restrained
    budget.check(10 * PATIENCE_S)
    assert not peer.evicted


def test_a_user_above_its_share_is_stopped_though_there_is_room_for_others() -> None:
    budget = MemoryBudget(100 * MIB, 25 * MIB)
    anna, bert = Peer(budget, "anna"), Peer(budget, "bert")
    bert.account.add(20 * MIB)
    anna.account.add(23 * MIB)
    budget.check(PATIENCE_S)
    assert anna.restrained and not bert.restrained
    budget.check(2 * PATIENCE_S)
    assert anna.evicted and not bert.restrained


def test_peers_on_this_machine_have_no_share_below_the_limit() -> None:
    budget = MemoryBudget(100 * MIB, 25 * MIB)
    peer = Peer(budget, None)
    peer.account.add(80 * MIB)
    budget.check(0.0)
    assert not peer.restrained


def test_the_peer_of_the_user_that_holds_most_gives_way() -> None:
    """Not the largest connection: many small ones of one user may be to blame."""
    budget = MemoryBudget(100 * MIB, 80 * MIB)
    many = [Peer(budget, "mallory") for _ in range(60)]
    anna = Peer(budget, "anna")
    anna.account.add(28 * MIB)
    for peer in many:
        peer.account.add(1 * MIB)
    assert not anna.restrained
    assert sum(peer.restrained for peer in many) == 1


def test_what_was_freed_since_it_was_reported_is_not_held_against_a_peer() -> None:
    budget = MemoryBudget(100 * MIB, 100 * MIB)
    stale = Peer(budget)
    stale.true_bytes = 0
    stale.account.add(70 * MIB)
    other = Peer(budget)
    other.account.add(20 * MIB)
    assert not stale.restrained and not other.restrained
    assert budget.held_bytes == 20 * MIB


class GrowingPeer(Peer):
    """Every measurement finds more."""

    def measure_memory(self) -> None:
        self.account.add(1)


def test_growth_that_is_found_by_measuring_does_not_lead_to_measuring_again() -> None:
    budget = MemoryBudget(100 * MIB, 100 * MIB)
    peer = GrowingPeer(budget)
    peer.account.add(90 * MIB)
    assert peer.restrained
    assert peer.account.held_bytes == 90 * MIB + 1


def test_above_the_limit_whoever_grows_is_stopped_except_for_a_few_bytes() -> None:
    budget = MemoryBudget(100 * MIB, 100 * MIB)
    peers = [Peer(budget) for _ in range(12)]
    innocent = Peer(budget)
    for _ in range(64):
        for peer in peers:
            if not peer.restrained:
                peer.account.add(1 * MIB)
    innocent.account.add(1000)
    assert all(peer.restrained for peer in peers)
    assert not innocent.restrained
    assert budget.held_bytes < 112 * MIB


def test_a_peer_that_identifies_itself_takes_its_bytes_along() -> None:
    budget = MemoryBudget(100 * MIB, 25 * MIB)
    newcomer, other = Peer(budget, ""), Peer(budget, "")
    newcomer.account.add(15 * MIB)
    newcomer.account.move("anna")
    other.account.add(15 * MIB)
    assert not other.restrained
    assert newcomer.account.owner.held_bytes == 15 * MIB


def test_a_closed_account_counts_nothing() -> None:
    budget = MemoryBudget(100 * MIB, 25 * MIB)
    peer = Peer(budget, "anna")
    peer.account.add(24 * MIB)
    peer.account.close()
    peer.account.close()
    peer.account.add(1)
    assert budget.held_bytes == 0
    assert not peer.restrained


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["add", "free", "close", "move", "check"])),
        max_size=60,
    )
)
def test_sums_are_those_of_open_accounts(steps: list[tuple[int, str]]) -> None:
    budget = MemoryBudget(64 * MIB, 16 * MIB)
    peers = [Peer(budget, "ab"[number % 2]) for number in range(5)]
    now = 0.0
    for number, step in steps:
        peer = peers[number]
        match step:
            case "add":
                peer.account.add(5 * MIB)
            case "free":
                peer.account.add(-peer.account.held_bytes)
            case "close":
                peer.account.close()
                peers[number] = Peer(budget, "ab"[number % 2])
            case "move":
                peer.account.move("c")
            case _:
                now += 2.0
                budget.check(now)
        alive = [each for each in peers if each.account.is_open]
        assert budget.held_bytes == sum(each.account.held_bytes for each in alive)
        assert budget.restrained == sum(each.restrained for each in alive)
