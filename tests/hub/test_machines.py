"""Any order of events: nothing acknowledged is lost, nothing settled returns, no two hold one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crosswire.commitlog.contract import Receipt
from crosswire.hub import cursor
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Notice
from crosswire.hub.backlog.backlog import Backlog
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry
from tests.hub.parties import Bench, publish, send

CONFIG = HubConfig(
    queue=QueuePolicy(window_messages=4, retry=Retry(max_attempts=0)), retry=Retry(max_attempts=0)
)


class Taker:
    """Knows what it holds and complains about what it should not get."""

    def __init__(self, machine: Delivering) -> None:
        self.machine = machine
        self.holds: dict[int, bytes] = {}

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        assert deliveries
        for each in deliveries:
            key = each.envelope.payload
            assert key not in self.machine.settled, "settled, and here again"
            assert all(key not in other.holds.values() for other in self.machine.takers.values())
            self.holds[each.id] = key

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        raise AssertionError(notice)

    def broken(self, error: Exception) -> None:
        """The hub goes on when one of the above raises: the machine is to stop."""
        self.machine.complaints.append(error)


class Delivering(RuleBasedStateMachine):
    """`live` must come sooner or later, `perhaps` may; `settled` must not."""

    def __init__(self) -> None:
        super().__init__()
        # So few changes make a snapshot that the machine sees many of them.
        self.usual, cursor.LEAST_CHANGES = cursor.LEAST_CHANGES, 3
        self.bench = Bench(CONFIG)
        self.count = 0
        self.live: set[bytes] = set()
        self.perhaps: set[bytes] = set()
        self.settled: set[bytes] = set()
        self.unwritten: set[bytes] = set()
        self.takers: dict[Consumer, Taker] = {}
        self.complaints: list[Exception] = []
        self.prepare()

    # What a queue and a subscription do differently.

    def prepare(self) -> None:
        raise NotImplementedError

    def envelope(self, key: bytes, index: int, durable: bool):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def attach(self, taker: Taker, window: int) -> Consumer:
        raise NotImplementedError

    def backlog(self) -> Backlog:
        raise NotImplementedError

    # What happens.

    @rule(
        places=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        durable=st.booleans(),
        commit=st.booleans(),
    )
    def produce(self, places: list[int], durable: bool, commit: bool) -> None:
        keys = []
        for _ in places:
            self.count += 1
            keys.append(b"%d" % self.count)
        batch = [self.envelope(k, p, durable) for k, p in zip(keys, places, strict=True)]
        self.perhaps.update(keys)

        def done(receipt: Receipt) -> None:
            accepted = {k for index, k in enumerate(keys) if index not in receipt.refused}
            if receipt.error is not None:
                accepted = set()
            self.perhaps -= set(keys) - accepted
            if durable:
                self.perhaps -= accepted
                self.live |= accepted - self.settled

        self.bench.hub.produce(batch, self.bench.now).add_done_callback(done)
        if commit:
            self.commit()

    @rule()
    def commit(self) -> None:
        before = set(self.unwritten)
        if self.bench.hub.commits.commit_now() is None:
            self.unwritten -= before

    @precondition(lambda self: len(self.takers) < 3)
    @rule(window=st.integers(1, 12))
    def join(self, window: int) -> None:
        taker = Taker(self)
        self.takers[self.attach(taker, window)] = taker

    @precondition(lambda self: self.takers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(list(self.takers)))
        del self.takers[consumer]
        consumer.close(self.bench.now)

    @precondition(lambda self: any(taker.holds for taker in self.takers.values()))
    @rule(
        data=st.data(),
        refuse=st.sampled_from([False, False, True]),
        delay=st.sampled_from([None, 0.0, 5.0]),
        commit=st.booleans(),
    )
    def answer(self, data: st.DataObject, refuse: bool, delay: float | None, commit: bool) -> None:
        holding = [consumer for consumer, taker in self.takers.items() if taker.holds]
        consumer = data.draw(st.sampled_from(holding))
        taker = self.takers[consumer]
        ids = data.draw(st.lists(st.sampled_from(sorted(taker.holds)), min_size=1, unique=True))
        keys = {taker.holds.pop(each) for each in ids}
        if refuse:
            assert consumer.refuse(ids, self.bench.now, cause="no", delay_s=delay) == len(ids)
            return
        self.settled |= keys
        self.unwritten |= keys
        self.live -= keys
        self.perhaps -= keys
        assert consumer.settle(ids, self.bench.now) == len(ids)
        if commit:
            self.commit()

    @precondition(lambda self: any(len(taker.holds) > 4 for taker in self.takers.values()))
    @rule(kept=st.integers(0, 3), kill=st.booleans())
    def settle_most(self, kept: int, kill: bool) -> None:
        """Nearly all of it, and on disk: what makes a snapshot. One left behind must survive it."""
        for consumer, taker in list(self.takers.items()):
            ids = sorted(taker.holds)
            del ids[kept : kept + 1]
            keys = {taker.holds.pop(each) for each in ids}
            self.settled |= keys
            self.unwritten |= keys
            self.live -= keys
            self.perhaps -= keys
            consumer.settle(ids, self.bench.now)
        self.commit()
        if kill:
            self.kill(True)

    @rule(seconds=st.sampled_from([0.05, 1.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @rule(power=st.sampled_from([None, None, None, False, True]))
    def kill(self, power: bool | None) -> None:
        """What was settled but not written may come again; it is not promised."""
        if power is None:
            return
        self.settled -= self.unwritten
        self.perhaps |= self.unwritten
        self.unwritten = set()
        self.takers = {}
        self.bench.kill(power=power)

    @rule(room=st.sampled_from([300, 1 << 30, 1 << 30, 1 << 30]))
    def fill_disk(self, room: int) -> None:
        self.bench.disk.room_bytes = room
        self.bench.now += 0.2

    @invariant()
    def nobody_complained(self) -> None:
        assert not self.complaints

    @invariant()
    def memory_is_bounded(self) -> None:
        windows = sum(len(taker.holds) for taker in self.takers.values())
        backlog = self.backlog()
        assert len(backlog.memory.ready) <= 4 + windows + len(backlog.memory.items)

    def teardown(self) -> None:
        """In the end everything that was promised comes."""
        try:
            self.drain()
        finally:
            cursor.LEAST_CHANGES = self.usual

    def drain(self) -> None:
        self.bench.disk.room_bytes = 1 << 30
        self.bench.now += 1
        self.bench.commit()
        self.bench.commit()
        self.unwritten = set()
        for consumer in list(self.takers):
            del self.takers[consumer]
            consumer.close(self.bench.now)
        got: set[bytes] = set()
        taker = Taker(self)
        consumer = self.attach(taker, 3)
        for _ in range(10_000):
            if not taker.holds:
                break
            ids = list(taker.holds)
            got |= set(taker.holds.values())
            taker.holds.clear()
            consumer.settle(ids, self.bench.now)
        self.bench.wait(100)
        while taker.holds:
            ids = list(taker.holds)
            got |= set(taker.holds.values())
            taker.holds.clear()
            consumer.settle(ids, self.bench.now)
        assert self.live <= got
        assert got <= self.live | self.perhaps
        self.bench.commit()
        self.bench.kill(power=True)
        last = Taker(self)
        self.attach(last, 100)
        assert not last.holds


class Queueing(Delivering):
    def prepare(self) -> None:
        self.bench.hub.queue("queue/q")

    def envelope(self, key: bytes, index: int, durable: bool):  # type: ignore[no-untyped-def]
        return send(key, durable=durable)

    def attach(self, taker: Taker, window: int) -> Consumer:
        return self.bench.consume("queue/q", taker, window=window)  # type: ignore[arg-type,no-any-return]

    def backlog(self) -> Backlog:
        return self.bench.hub.queue("queue/q")

    @invariant()
    def the_count_is_right(self) -> None:
        queue = self.bench.hub.queue("queue/q")
        assert len(self.live) <= queue.length <= len(self.live) + len(self.perhaps)


class Subscribing(Delivering):
    """A named subscription over topics that come and go."""

    def prepare(self) -> None:
        self.attach(Taker(self), 1).close(self.bench.now)
        self.bench.commit()

    def envelope(self, key: bytes, index: int, durable: bool):  # type: ignore[no-untyped-def]
        return publish(key, topic=f"topic/t/{index}", durable=durable)

    def attach(self, taker: Taker, window: int) -> Consumer:
        return self.bench.subscribe("topic/t/+", taker, name="n", window=window)  # type: ignore[arg-type,no-any-return]

    def backlog(self) -> Backlog:
        subscription = self.bench.hub.subscriptions.get("n")
        assert subscription is not None
        return subscription


TestQueueing = Queueing.TestCase
TestSubscribing = Subscribing.TestCase
TestQueueing.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestSubscribing.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
