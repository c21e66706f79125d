"""Turns: work that may be long is cut by time or by count, and who used least goes on first.

The clock is moved by the work itself, so that what fits into a turn is known exactly.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from crosswire.commitlog.contract import CommitGroup
from crosswire.envelope import Envelope
from crosswire.hub import turns as turns_module
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.dispatch import DispatchLoop
from crosswire.hub.ingest.records import NamedAttempt, ProducerKey, pack
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.turns import Turns, TurnShare
from tests.hub.parties import Bench, Caller, Recorder, Server, publish, send

PROVIDER, CALLER = LedgerPeer("test", "provider"), LedgerPeer("test", "caller")
MS = 0.001
TURN_S = 8 * MS


@pytest.fixture(autouse=True)
def usual_turns(long_turns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of hubs in this process do everything in one turn."""
    monkeypatch.setattr(turns_module, "TURN_S", TURN_S)


class Clock:
    """Moved by who works."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


class Peer:
    """Has `parts` of work that take `part_s` each, one whenever it is served."""

    def __init__(
        self, turns: Turns, clock: Clock, served: list[str], name: str, part_s: float, parts: int
    ) -> None:
        self.share = TurnShare(turns, self.run)
        self.parts = parts
        self._clock, self._served, self._name, self._part_s = clock, served, name, part_s
        self.likely_s = part_s

    def run(self) -> None:
        self._served.append(self._name)
        self._clock.work(self._part_s)
        self.parts -= 1
        if self.parts:
            self.share.later(self.likely_s)


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.turns = Turns(clock=self.clock, thread_clock=self.clock)
        self.served: list[str] = []

    def peer(self, name: str, part_s: float, parts: int = 1) -> Peer:
        """A peer that waits for its first turn."""
        peer = Peer(self.turns, self.clock, self.served, name, part_s, parts)
        peer.share.later(part_s)
        return peer

    async def turn(self) -> list[str]:
        """Who is served in the next turn."""
        self.served.clear()
        await next_turn()
        return list(self.served)


async def next_turn() -> None:
    # What was scheduled before, the end of the turn, runs before this continues.
    await asyncio.sleep(0)


@pytest.fixture
async def world() -> World:
    return World()


# Slicing.


async def test_a_turn_is_over_after_its_time(world: World) -> None:
    world.turns.enter()
    world.clock.work(TURN_S)
    assert not world.turns.is_over()
    world.clock.work(MS)
    assert world.turns.is_over()
    await next_turn()
    world.turns.enter()
    assert not world.turns.is_over()


def test_without_an_event_loop_no_turn_ends() -> None:
    clock = Clock()
    turns = Turns(clock=clock, thread_clock=clock)
    clock.work(3600.0)
    assert not turns.is_over()


async def test_who_waits_is_served_in_a_later_turn(world: World) -> None:
    world.peer("one", MS)
    assert world.served == []
    assert await world.turn() == ["one"]
    assert await world.turn() == []


async def test_a_turn_takes_as_many_as_fit_into_its_time(world: World) -> None:
    for name in "abcde":
        world.peer(name, 3 * MS)
    assert await world.turn() == ["a", "b", "c"]
    assert await world.turn() == ["d", "e"]


async def test_a_turn_that_is_over_at_once_serves_one(world: World) -> None:
    """The processor may be taken away for longer than a turn, again and again."""
    world.peer("a", MS)
    world.peer("b", MS)
    clock = world.clock

    def run_away() -> float:
        clock.work(2 * TURN_S)
        return clock.now_s

    world.turns.clock = world.turns.thread_clock = run_away
    assert await world.turn() == ["a"]
    assert await world.turn() == ["b"]


async def test_a_turn_is_measured_by_the_thread_s_clock(world: World) -> None:
    measured: list[float] = []
    thread = Clock()
    turns = Turns(clock=world.clock, thread_clock=thread)
    turns.on_turn = measured.append
    turns.enter()
    world.clock.work(50 * MS)
    thread.work(2 * MS)
    await next_turn()
    # The thread's clock also ran between two turns, for others.
    thread.work(70 * MS)
    turns.enter()
    world.clock.work(5 * MS)
    thread.work(5 * MS)
    await next_turn()
    assert measured == pytest.approx([2 * MS, 5 * MS])


async def test_a_turn_is_not_over_while_other_programs_have_the_processor(world: World) -> None:
    thread = Clock()
    turns = Turns(clock=world.clock, thread_clock=thread)
    turns.enter()
    world.clock.work(50 * MS)
    thread.work(7 * MS)
    assert not turns.is_over()
    thread.work(2 * MS)
    assert turns.is_over()


# Fairness.


async def test_who_used_little_is_before_all_that_use_much(world: World) -> None:
    for number in range(20):
        world.peer(f"busy{number}", 4 * MS, parts=100)
    for _ in range(10):
        await world.turn()
    world.peer("seldom", MS)
    assert (await world.turn())[0] == "seldom"


async def test_busy_peers_get_equal_time_whatever_the_size_of_their_parts(world: World) -> None:
    parts_ms = {"short": 0.5, "usual": 1.0, "long": 4.0}
    for name, part_ms in parts_ms.items():
        world.peer(name, part_ms * MS, parts=1_000_000)
    served: Counter[str] = Counter()
    for _ in range(300):
        served.update(await world.turn())
    used_ms = [parts_ms[name] * served[name] for name in parts_ms]
    assert sum(used_ms) > 2000
    assert max(used_ms) - min(used_ms) <= 10


async def test_the_peers_of_one_owner_get_one_part_together(world: World) -> None:
    owner = world.turns.owner("many")
    many = [world.peer(f"many{number}", 2 * MS, 10) for number in range(20)]
    for peer in many:
        peer.share.join(owner)
    # They began to wait before they were the owner's: their next turns count.
    for _ in range(5):
        await world.turn()
    world.peer("one", 2 * MS, 20)
    served = [name for _ in range(8) for name in await world.turn()]
    counts = Counter(served)
    assert abs(counts["one"] - (len(served) - counts["one"])) <= 2
    # Among themselves they are served in turn.
    assert max(counts[f"many{number}"] for number in range(20)) <= 1


async def test_a_ping_waits_for_one_turn_of_many_connections_of_another(world: World) -> None:
    owner, polite = world.turns.owner("many"), world.turns.owner("polite")
    for number in range(40):
        world.peer(f"many{number}", 2 * MS, 100).share.join(owner)
    for _ in range(15):
        await world.turn()
    waited = []
    for number in range(10):
        ping = Peer(world.turns, world.clock, world.served, f"ping{number}", 0.1 * MS, 1)
        ping.share.join(polite)
        ping.share.later(0.1 * MS)
        turns = 1
        while f"ping{number}" not in await world.turn():
            turns += 1
        waited.append(turns)
    assert max(waited) <= 2


async def test_time_that_nobody_else_wants_costs_nothing_later(world: World) -> None:
    early = Peer(world.turns, world.clock, world.served, "early", 2 * MS, 1)
    for _ in range(100):
        early.share.used(2 * MS)
    for name in "abc":
        world.peer(name, 2 * MS, 20)
    early.share.later(2 * MS)
    served = [*await world.turn(), *await world.turn()]
    assert "early" in served


async def test_an_owner_whose_peer_fails_is_served_again(world: World) -> None:
    owner = world.turns.owner("one")

    def fail() -> None:
        raise RuntimeError

    failing = TurnShare(world.turns, fail)
    failing.join(owner)
    failing.later()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await world.turn()
    other = Peer(world.turns, world.clock, world.served, "other", MS, 1)
    other.share.join(owner)
    other.share.later()
    assert await world.turn() == ["other"]


async def test_waiting_gives_no_credit(world: World) -> None:
    """One that was silent for long is served first, but not for as long as it was silent."""
    late = world.peer("late", MS)
    await world.turn()
    world.peer("busy", MS, parts=1_000_000)
    for _ in range(100):
        await world.turn()
    late.parts = 1_000_000
    late.share.later(MS)
    served = Counter[str]()
    for _ in range(10):
        served.update(await world.turn())
    assert abs(served["late"] - served["busy"]) <= 3


async def test_a_longer_share_costs_its_peer_and_not_the_others(world: World) -> None:
    """What was likely to be short and was not counts all the same."""
    greedy = world.peer("greedy", 20 * MS, parts=1_000_000)
    greedy.likely_s = 0.1 * MS
    world.peer("modest", MS, parts=1_000_000)
    served: Counter[str] = Counter()
    for _ in range(420):
        served.update(await world.turn())
    assert served["modest"] >= 19 * served["greedy"]


# What can't be cut.


async def test_long_work_begins_a_turn_and_ends_it(world: World) -> None:
    """What was answered before is written when the turn ends: not after the long work."""
    world.peer("small1", MS)
    world.peer("long1", 200 * MS)
    world.peer("long2", 200 * MS)
    assert await world.turn() == ["small1"]
    assert await world.turn() == ["long1"]
    world.peer("small2", MS)
    assert await world.turn() == ["small2"]
    assert await world.turn() == ["long2"]


async def test_long_work_that_was_short_is_still_alone(world: World) -> None:
    for name in ("long1", "long2"):
        peer = Peer(world.turns, world.clock, world.served, name, MS, 1)
        peer.share.later(50 * MS)
    assert await world.turn() == ["long1"]
    assert await world.turn() == ["long2"]


async def test_long_work_is_not_put_off_for_ever(world: World) -> None:
    for number in range(10):
        world.peer(f"busy{number}", MS, parts=1_000_000)
    world.peer("long", 100 * MS)
    seen: list[str] = []
    for _ in range(10):
        seen += await world.turn()
    assert "long" in seen


# Work that a peer causes elsewhere.


async def test_a_peer_with_unfinished_work_is_not_served(world: World) -> None:
    peer = world.peer("cause", MS)
    peer.share.caused()
    peer.share.caused()
    assert await world.turn() == []
    assert not peer.share.may_run()
    peer.share.finished()
    assert await world.turn() == []
    peer.share.finished()
    assert await world.turn() == ["cause"]
    assert peer.share.may_run()


async def test_a_peer_that_waits_may_not_overtake_itself(world: World) -> None:
    peer = world.peer("one", MS)
    assert not peer.share.may_run()
    peer.share.later()
    assert await world.turn() == ["one"]
    assert peer.share.may_run()


async def test_a_closed_peer_is_not_served(world: World) -> None:
    peer = world.peer("gone", MS)
    world.peer("other", MS)
    peer.share.close()
    assert await world.turn() == ["other"]


async def test_an_error_ends_one_turn_and_harms_no_other(world: World) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.append(context["exception"])
    )

    def fail() -> None:
        world.clock.work(3 * MS)
        raise RuntimeError("a part that fails")

    failing = TurnShare(world.turns, fail)
    failing.later(0.5 * MS)
    world.peer("other", MS)
    await world.turn()
    assert [str(error) for error in errors] == ["a part that fails"]
    assert world.turns.current is None
    assert await world.turn() == ["other"]
    # Its time counts, too: it is behind one that has used less.
    failing.later(0.5 * MS)
    world.peer("fresh", MS)
    assert (await world.turn())[0] == "fresh"


# The dispatch loop.


class Dispatched:
    """Something to hand out, which takes a while."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def dispatch(self, now: float) -> None:
        self._work()


def dispatch_loop(world: World) -> DispatchLoop:
    return DispatchLoop(0.0, world.turns)


async def test_the_dispatch_loop_stops_when_the_turn_is_over(world: World) -> None:
    loop = dispatch_loop(world)
    done: list[int] = []

    def part(number: int) -> None:
        world.clock.work(3 * MS)
        done.append(number)

    world.turns.enter()
    for number in range(7):
        loop.defer("part", part, number)
    loop.pump(0.0)
    assert done == [0, 1, 2]
    await next_turn()
    assert done == [0, 1, 2, 3, 4, 5]
    await next_turn()
    assert done == list(range(7))


async def test_what_was_deferred_is_before_what_was_touched_across_turns(world: World) -> None:
    loop = dispatch_loop(world)
    done: list[str] = []

    def work(name: str) -> None:
        world.clock.work(5 * MS)
        done.append(name)

    world.turns.enter()
    loop.touch(Dispatched(lambda: work("touched")))
    for name in ("first", "second", "third"):
        loop.defer("part", work, name)
    loop.pump(0.0)
    for _ in range(3):
        await next_turn()
    assert done == ["first", "second", "third", "touched"]


async def test_who_caused_deferred_work_waits_for_it(world: World) -> None:
    loop = dispatch_loop(world)
    order: list[str] = []

    def part() -> None:
        world.clock.work(6 * MS)
        order.append("part")

    def cause() -> None:
        order.append("cause")
        for _ in range(4):
            loop.defer("part", part)
        share.later()
        loop.pump(0.0)

    share = TurnShare(world.turns, cause)
    share.later()
    for _ in range(4):
        await next_turn()
    assert order[:5] == ["cause", "part", "part", "part", "part"]


async def test_work_that_deferred_work_defers_has_the_same_cause(world: World) -> None:
    """Not who happens to call the hub while it is done."""
    loop = dispatch_loop(world)

    def part(again: int) -> None:
        world.clock.work(6 * MS)
        if again:
            loop.defer("part", part, again - 1)

    cause = TurnShare(world.turns, lambda: (loop.defer("part", part, 20), loop.pump(0.0))[1])
    bystander = TurnShare(world.turns, lambda: loop.pump(0.0))
    cause.later()
    await next_turn()
    for _ in range(3):
        assert cause.unfinished
        assert not bystander.unfinished
        bystander.later(0.1 * MS)
        await next_turn()


async def test_a_rest_is_not_done_in_the_time_of_others(world: World) -> None:
    loop = dispatch_loop(world)
    done: list[int] = []

    def part(number: int) -> None:
        world.clock.work(5 * MS)
        done.append(number)

    world.turns.enter()
    for number in range(6):
        loop.defer("part", part, number)
    loop.pump(0.0)
    assert done == [0, 1]
    seen: list[int] = []

    def call_the_hub() -> None:
        before = len(done)
        loop.pump(0.0)
        seen.append(len(done) - before)

    other = TurnShare(world.turns, call_the_hub)
    for _ in range(2):
        other.later(0.1 * MS)
        await next_turn()
    assert seen == [0, 0]
    while len(done) < 6:
        await next_turn()


@pytest.mark.failing_callbacks
async def test_a_deferred_call_that_fails_is_finished_for_its_cause(world: World) -> None:
    loop = dispatch_loop(world)

    def fail() -> None:
        raise RuntimeError("a part that fails")

    share = TurnShare(world.turns, lambda: loop.defer("part", fail))
    share.later()
    await next_turn()
    loop.pump(0.0)
    assert loop.callbacks.failed["part"] == 1
    assert not share.unfinished


# Slicing by count: how much the parts of the hub do before they look at the clock.


class Slow(Recorder):
    """Every delivery takes so long that a part is a turn, whatever its size."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        self._clock.work(TURN_S)
        super().deliver(attachment, deliveries)


class HubWorld(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.hub.turns.clock = self.hub.turns.thread_clock = self.clock
        self.hub.turns.enter()


async def counts(of: Callable[[], int], turns: int) -> list[int]:
    """How much is done after each of the next turns."""
    found = []
    for _ in range(turns):
        await next_turn()
        found.append(of())
    return found


async def test_a_publication_is_delivered_in_parts_of_256() -> None:
    bench = HubWorld()
    receiver = Slow(bench.clock)
    for _ in range(600):
        bench.subscribe("topic/t", receiver)
    bench.hub.produce([publish(b"x")], bench.now)
    found = [len(receiver.deliveries), *await counts(lambda: len(receiver.deliveries), 2)]
    assert found == [256, 512, 600]


async def test_a_long_queue_is_handed_out_in_parts() -> None:
    bench = HubWorld()
    for _ in range(1000):
        bench.hub.produce([send(b"x")], bench.now)
    bench.commit()
    await next_turn()
    receiver = Slow(bench.clock)
    bench.hub.turns.enter()
    bench.consume("queue/q", receiver, window=1000)
    found = [len(receiver.deliveries), *await counts(lambda: len(receiver.deliveries), 20)]
    parts = [after - before for before, after in zip([0, *found], found, strict=False)]
    assert sum(parts) == 1000
    assert max(parts) <= 512


async def test_a_staged_batch_is_taken_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HubWorld()
    owner = ProducerKey("", "job")
    part = pack([send(b"x", f"queue/{number}") for number in range(1000)])
    bench.hub.staging.stage(owner, 0, "a", 0, part, bench.now)
    bench.commit()
    named = NamedAttempt(attempt="a", parts=1, messages=1000)
    staging = bench.hub.staging
    take_over = staging._take_over

    def slowly(envelopes: Sequence[Envelope], now: float) -> None:
        bench.clock.work(TURN_S)
        take_over(envelopes, now)

    monkeypatch.setattr(staging, "_take_over", slowly)
    bench.hub.turns.enter()
    bench.clock.work(TURN_S * 2)
    staging.commit(owner, 0, [named], bench.now)
    # The turn is over already.
    found = [len(bench.hub.backlogs())]
    while found[-1] < 1000:
        await next_turn()
        bench.commit()
        found.append(len(bench.hub.backlogs()))
    assert found[0] == 0
    assert max(after - before for before, after in pairwise(found)) <= 128


async def test_calls_of_a_caller_that_left_are_ended_in_parts_of_256() -> None:
    bench = HubWorld()
    provider, caller = Server(), Caller()
    bench.hub.provide(["service/s"], provider, bench.now, peer=PROVIDER, window=600)
    request = Envelope(destination="service/s/m", kind="request", protocol="test")
    requests = [request.replace() for _ in range(600)]
    calls = bench.hub.call(requests, bench.now, answered=caller, peer=CALLER)
    while len(provider.requests) < 600:
        await next_turn()
    ended = 0
    finish = bench.hub.services._finish

    def slow_finish(*args: object, **kwargs: object) -> None:
        nonlocal ended
        ended += 1
        bench.clock.work(MS)
        finish(*args, **kwargs)  # type: ignore[arg-type]

    bench.hub.services._finish = slow_finish  # type: ignore[method-assign]
    bench.hub.turns.enter()
    bench.hub.cancel(calls, bench.now)
    found = [ended, *await counts(lambda: ended, 3)]
    assert found == [256, 512, 600, 600]
    assert provider.cancelled == [call.id for call in calls]
    assert caller.answers == []


async def test_a_large_message_is_written_in_a_turn_of_its_own() -> None:
    bench = HubWorld()
    turns = bench.hub.turns
    written: list[float] = []
    bench.hub.commits.start(asyncio.get_running_loop())
    write = bench.store.write_group

    def note(group: CommitGroup) -> None:
        written.append(bench.clock.now_s)
        write(group)

    bench.store.write_group = note  # type: ignore[method-assign]
    order: list[str] = []

    def other() -> None:
        order.append(f"other, {len(written)} written")
        bench.clock.work(TURN_S * 2)

    share = TurnShare(turns, other)
    bench.hub.produce([send(b"x" * (1 << 20))], bench.now)
    share.later(0.1 * MS)
    await next_turn()
    # The other one's turn, which was over after it: the large group is not written in it as well.
    assert order == ["other, 0 written"] and not written
    await next_turn()
    assert len(written) == 1
    await bench.hub.commits.flush()


async def test_what_is_refused_at_once_is_retried_in_parts() -> None:
    bench = HubWorld()
    for _ in range(1000):
        bench.hub.produce([send(b"x")], bench.now)
    bench.commit()
    got = Recorder()
    consumer = bench.consume("queue/q", got, window=1000)
    while len(got.deliveries) < 1000:
        await next_turn()
    bench.hub.turns.enter()
    bench.clock.work(2 * TURN_S)
    # Each id counts once, and nobody else has it until it is ready again.
    assert consumer.refuse([*got.ids, *got.ids], bench.now, delay_s=60.0) == 1000
    assert consumer.refuse(got.ids, bench.now) == consumer.settle(got.ids, bench.now) == 0
    assert not refused_rows(bench)
    while refused_rows(bench) < 1000:
        await next_turn()
    assert refused_rows(bench) == 1000
    bench.commit()


def refused_rows(bench: HubWorld) -> int:
    return sum(len(run.ids) for run in bench.hub.ledger.runs() if run.step is Step.REFUSED)


async def test_leases_that_run_out_together_are_returned_in_parts() -> None:
    bench = HubWorld()
    for _ in range(1000):
        bench.hub.produce([send(b"x")], bench.now)
    bench.commit()
    got = Recorder()
    consumer = bench.consume("queue/q", got, window=1000)
    while len(got.deliveries) < 1000:
        await next_turn()
    consumer.extend(got.ids, bench.now, 5.0)
    bench.hub.turns.enter()
    bench.clock.work(2 * TURN_S)
    bench.now += 10.0
    bench.hub.handle_deadline(bench.now)
    # The turn was over before: the rest is due at once.
    assert 0 < 1000 - len(consumer.held) <= 64
    due = bench.hub.next_deadline()
    assert due is not None and due <= bench.now
    turns = 0
    while consumer.held:
        await next_turn()
        bench.hub.handle_deadline(bench.now)
        turns += 1
        assert turns < 1000


@pytest.mark.slow
def test_queues_that_change_are_written_while_the_group_collects() -> None:
    bench = Bench()
    for number in range(1000):
        bench.produce(send(b"x", f"queue/{number}"))
    commits = bench.hub.commits
    for _ in range(2):
        for number in range(1000):
            bench.hub.produce([send(b"y", f"queue/{number}")], bench.now)
    assert len(commits._changed) <= 128
    bench.commit()
    # All that was accepted is counted, and nothing twice.
    bench.kill()
    lengths = {bench.hub.queue(f"queue/{number}").length for number in range(1000)}
    assert lengths == {3}


async def test_a_full_group_holds_its_producers_until_it_is_sealed() -> None:
    bench = HubWorld()
    turns, commits = bench.hub.turns, bench.hub.commits
    commits.start(asyncio.get_running_loop())
    served: list[str] = []
    producer = TurnShare(turns, lambda: served.append("producer"))
    other = TurnShare(turns, lambda: served.append("other"))
    turns.current = producer
    bench.hub.produce([send(b"x" * (1 << 20))], bench.now)
    turns.current = None
    assert turns.is_full
    assert producer.unfinished == 1
    producer.later()
    other.later()
    # The group has a large message: it is written in a turn of its own.
    async with asyncio.timeout(10):
        while turns.is_full:
            assert "producer" not in served
            await asyncio.sleep(0)
        while len(served) < 2:
            await asyncio.sleep(0)
    assert served == ["other", "producer"]
    await commits.close()
