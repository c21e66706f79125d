"""Whenever there is room in memory, a message and a consumer with a free window, something moves.

The rule is in the docstring of `crosswire.hub.backlog`; `assert_live` holds a hub to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope
from crosswire.errors import UnknownMessage
from crosswire.hub import cursor
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Notice, Window
from crosswire.hub.backlog.backlog import Backlog
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import Step
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry
from crosswire.hub.subscribers import Subscriber
from crosswire.hub.subscriptions import Subscription
from crosswire.store.contract import StoreLimits
from crosswire.store.rocks import RocksStore
from tests.hub.parties import Bench, Recorder, publish, send

MIB = 1 << 20


# ----------------------------------------------------------------------------------------- the rule


def assert_live(hub: Hub, now: float) -> None:
    """Nothing that could move waits; to be asked when the timers that are due have run."""
    assert not any(each.consumers for each in hub._core.loop.touched()), "touched, and nobody pumps"
    for queue in hub._destinations.queues.values():
        _assert_backlog_live(hub, queue, now)
    for subscription in hub.subscriptions.all():
        _assert_backlog_live(hub, subscription, now)
    for subscriber in filter(attrgetter("is_lagging"), hub.subscriptions.subscribers()):
        upto = min(subscriber.missed, hub.committed_id)
        assert subscriber.window.free <= 0 or subscriber.position >= upto, "it could read on"


def _assert_backlog_live(hub: Hub, backlog: Backlog, now: float) -> None:
    memory, retries = backlog.memory, backlog._retries
    items = list(memory.items.values())
    held = sum(item.size for item in items if item.consumer is not None)
    waiting = sum(item.size for item in items if item.consumer is None)
    assert memory.size_bytes == held + waiting
    assert memory.held_bytes == held
    assert held == sum(item.size for each in backlog.consumers for item in each.held.values())

    # Reads end before `Store.read` returns: if one is needed, nothing is under way.
    few = len(memory.ready) < max(memory.window_messages // 2, 1)
    small = 2 * waiting < memory.window_bytes or not waiting
    on_disk = memory.loaded < min(memory.visible, hub.committed_id)
    # Without consumers a queue needs no more in memory than its first message.
    needed = bool(backlog.consumers or not memory.ready)
    assert not (on_disk and few and small and needed), "there is room, and a message on disk"

    now_us = int(now * 1_000_000)
    ready = [item for item in memory.ready if not 0 < item.envelope.expires <= now_us]
    for consumer in backlog.consumers:
        may_hold = not consumer.held or held < memory.window_bytes
        if consumer.is_open and consumer.window.free > 0 and may_hold:
            taken = [item.id for item in ready if consumer.takes(item.envelope)]
            assert not taken, "a consumer has room, and something is ready for it"

    dues = [due for due, _, _ in retries._delayed]
    dues += [item.due for item in items if item.consumer is not None and item.consumer.lease_s]
    if dues:
        assert 0 < retries.wake_at <= min(dues), "no timer"
    # The timer is due a microsecond after the expiry.
    head = memory.ready[0].envelope.expires if memory.ready else 0
    assert not 0 < head < now_us, "expired, and still there"
    if retries.wake_at:
        deadline = hub.next_deadline()
        assert deadline is not None and deadline <= retries.wake_at


# ------------------------------------------------------------------------ the cases that were seen


def policy(**fields: object) -> HubConfig:
    return HubConfig(queue=QueuePolicy(**fields))  # type: ignore[arg-type]


def drained(bench: Bench, taker: Recorder, consumer: Consumer, *, step: int = 1) -> int:
    """Settle what came, `step` at a time, as a peer does: not while it is delivered."""
    done = 0
    while done < len(taker.deliveries):
        ids = taker.ids[done : done + step]
        done += len(ids)
        consumer.settle(ids, bench.now)
        assert_live(bench.hub, bench.now)
    return done


SEEN = [
    pytest.param(40, MIB, 16 * MIB, id="40 of 1 MiB"),
    pytest.param(1500, 20_000, 16 * MIB, id="1,500 of 20 kB"),
    pytest.param(400, 70_000, 16 * MIB, id="400 of 70 kB"),
    pytest.param(3, 17 * MIB, 16 * MIB, id="above 16 MiB"),
    pytest.param(6, 600, 1000, id="six of 600 with 1,000 bytes"),
    pytest.param(6, 0, 1, id="a window of one byte"),
]


@pytest.mark.parametrize(("count", "size", "window_bytes"), SEEN)
@pytest.mark.parametrize("window", [1, 50, 1000])
@pytest.mark.parametrize("before", [True, False], ids=["sent before", "sent while consumed"])
def test_a_queue_beyond_its_window_is_delivered(
    count: int, size: int, window_bytes: int, window: int, before: bool
) -> None:
    bench, taker = Bench(policy(window_bytes=window_bytes)), Recorder()
    payload = bytes(size)
    if not before:
        consumer = bench.consume("queue/q", taker, window=window)
    for start in range(0, count, 100):
        bench.produce(*(send(payload) for _ in range(min(100, count - start))))
    if before:
        consumer = bench.consume("queue/q", taker, window=window)
    assert drained(bench, taker, consumer) == count
    queue = bench.hub.queue("queue/q")
    assert (queue.length, queue.size_bytes, queue.memory.size_bytes) == (0, 0, 0)


@pytest.mark.parametrize(("count", "size"), [(40, MIB), (1500, 20_000), (3, 17 * MIB)])
@pytest.mark.parametrize("window", [1, 50])
def test_a_subscription_beyond_its_window_is_delivered(count: int, size: int, window: int) -> None:
    bench, taker = Bench(), Recorder()
    consumer = bench.subscribe("topic/+", taker, name="n", window=window)
    payload = bytes(size)
    for each in range(count):
        bench.hub.produce([publish(payload, f"topic/{each % 3}")], bench.now)
    bench.commit()
    assert drained(bench, taker, consumer) == count
    assert taker.ids == sorted(taker.ids)


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("window_messages", [1, 2, 3])
def test_a_window_of_one_message_is_enough(count: int, window_messages: int) -> None:
    """Half of it is none, and the tail must be read all the same."""
    bench, taker = Bench(policy(window_messages=window_messages)), Recorder()
    bench.produce(*(send(b"%d" % each) for each in range(count)))
    consumer = bench.consume("queue/q", taker, window=1)
    assert drained(bench, taker, consumer) == count
    assert taker.payloads == [b"%d" % each for each in range(count)]


def test_who_holds_much_does_not_keep_others_from_theirs() -> None:
    """What consumers hold together is bounded; who holds nothing gets one all the same."""
    bench, hoarder, idle = Bench(policy(window_bytes=1000)), Recorder(), Recorder()
    bench.consume("queue/q", hoarder, window=50, weight=90)
    bench.produce(*(send(bytes(600)) for _ in range(20)))
    kept = len(hoarder.deliveries)
    assert 1 <= kept <= 2
    consumer = bench.consume("queue/q", idle, window=50)
    assert drained(bench, idle, consumer) == 20 - kept
    assert len(hoarder.deliveries) == kept
    assert bench.hub.queue("queue/q").length == kept


@pytest.mark.parametrize("how", ["settle", "refuse", "bury", "lease", "leave"])
def test_whatever_ends_a_delivery_lets_the_next_one_go(how: str) -> None:
    """Consumers hold as much as they may; both have free windows, and are listed as having room."""
    retry = Retry(max_attempts=0, first_delay_s=50.0, lease_s=5.0 if how == "lease" else None)
    bench = Bench(policy(window_bytes=1000, retry=retry))
    takers = [Recorder(), Recorder()]
    first, _ = (bench.consume("queue/q", taker, window=50) for taker in takers)
    bench.produce(*(send(bytes(600)) for _ in range(9)))
    before = [len(taker.deliveries) for taker in takers]
    assert sum(before) == 2
    if how == "settle":
        first.settle(takers[0].ids, bench.now)
    elif how == "lease":
        bench.wait(6)
    elif how == "leave":
        first.close(bench.now)
    else:
        first.refuse(takers[0].ids, bench.now, final=how == "bury")
    assert sum(len(taker.deliveries) for taker in takers) > 2
    assert_live(bench.hub, bench.now)


def test_a_filter_gets_what_is_left_of_the_window_when_messages_expire() -> None:
    """Expired messages after one that nobody takes are in nobody's way."""
    bench, red = Bench(policy(window_messages=8)), Recorder()
    bench.consume("queue/q", red, window=5, filter="colour=Tred")
    soon = int((bench.now + 5) * 1_000_000)
    bench.produce(
        send(b"stays", properties={"colour": "blue"}),
        *(send(b"", expires=soon, properties={"colour": "blue"}) for _ in range(20)),
        send(b"red", properties={"colour": "red"}),
    )
    assert not red.deliveries
    bench.wait(6)
    assert red.payloads == [b"red"]
    assert_live(bench.hub, bench.now)
    assert bench.hub.queue("queue/q").length == 2


@pytest.mark.parametrize("expires_us", range(1_700_000_000_123_450, 1_700_000_000_123_460))
def test_an_expiry_that_is_no_exact_number_of_seconds_ends_the_timer(expires_us: int) -> None:
    """Rounding must not set the timer for the same moment again and again."""
    bench = Bench(now=1_700_000_000.0)
    bench.produce(send(b"x", expires=expires_us))
    bench.wait(5)
    assert bench.hub.queue("queue/q").length == 0


@pytest.mark.parametrize("before", [True, False], ids=["settled before", "settled after"])
def test_what_waits_on_disk_for_its_commit_comes_with_it(before: bool) -> None:
    """Not durable, so visible at once; but there is no room, and it is not on disk either yet."""
    bench, taker = Bench(policy(window_bytes=1000)), Recorder()
    consumer = bench.consume("queue/q", taker, window=1)
    bench.hub.produce([send(bytes(600), durable=False) for _ in range(6)], bench.now)
    if before:
        assert drained(bench, taker, consumer) == 2
    bench.commit()
    assert_live(bench.hub, bench.now)
    assert drained(bench, taker, consumer) == 6
    assert bench.hub.queue("queue/q").length == 0


def test_what_waits_for_its_commit_comes_though_everything_before_it_is_held() -> None:
    bench, holder, idle = Bench(policy(window_bytes=1000)), Recorder(), Recorder()
    bench.consume("queue/q", holder, window=50)
    bench.consume("queue/q", idle, window=50, filter="colour=Tred")
    red = send(b"red", durable=False, properties={"colour": "red"})
    bench.hub.produce([*(send(bytes(600), durable=False) for _ in range(2)), red], bench.now)
    assert len(holder.deliveries) == 2 and not idle.deliveries
    bench.commit()
    assert_live(bench.hub, bench.now)
    assert idle.payloads == [b"red"]


def test_leases_and_refusals_do_not_multiply_timers() -> None:
    """A timer that was replaced by an earlier one must not set timers of its own."""

    class Refuser(Recorder):
        def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
            super().deliver(attachment, deliveries)
            ids = [each.id for each in deliveries if each.envelope.payload == b"no"]
            attachment.refuse(ids, bench.now, delay_s=3.0)

    bench = Bench(policy(retry=Retry(max_attempts=0, lease_s=5.0)))
    bench.consume("queue/q", Refuser(), window=10)
    bench.produce(send(b"no"), send(b"keep"), send(b"no"), send(b"keep"))
    for _ in range(20):
        bench.wait(3)
        assert len(bench.hub._core.timers._heap) < 30


def _take_away(bench: Bench, how: str, ids: list[int]) -> None:
    queue = bench.hub.queue("queue/q")
    if how == "remove":
        queue.remove(ids, Step.DROPPED, bench.now)
    elif how == "edit":
        for each in ids:
            bench.hub.dead_letters.edit("queue/q", each, payload=b"")
    elif how == "reconfigure":
        bench.hub.reconfigure(policy(window_bytes=100_000))
    else:
        bench.wait(10)


@pytest.mark.parametrize("how", ["remove", "edit", "reconfigure", "expire"])
def test_whatever_makes_room_has_it_filled(how: str) -> None:
    """Nobody settles anything: a filter waits for what is on disk."""
    bench, red = Bench(policy(window_bytes=1000)), Recorder()
    bench.consume("queue/q", red, window=5, filter="colour=Tred")
    expires = int((bench.now + 5) * 1_000_000) if how == "expire" else 0
    blue = {"colour": "blue"}
    ids = bench.produce(
        send(bytes(600), properties=blue, expires=expires),
        send(bytes(600), properties=blue, expires=expires),
        send(b"red", properties={"colour": "red"}),
    )
    assert not red.deliveries
    _take_away(bench, how, ids[:2])
    assert red.payloads == [b"red"]
    assert_live(bench.hub, bench.now)


def test_edited_so_that_a_filter_takes_it() -> None:
    bench, red = Bench(), Recorder()
    bench.consume("queue/q", red, filter="colour=Tred")
    [identifier] = bench.produce(send(b"x"))
    bench.hub.dead_letters.edit("queue/q", identifier, properties={"colour": "red"})
    assert red.payloads == [b"x"]


def test_an_edited_message_is_counted_with_its_new_size() -> None:
    bench, taker = Bench(policy(window_bytes=1000)), Recorder(settles=True)
    ids = bench.produce(*(send(bytes(600)) for _ in range(4)))
    for each in ids[0], ids[3]:
        bench.hub.dead_letters.edit("queue/q", each, payload=b"")
        bench.commit()
    queue = bench.hub.queue("queue/q")
    assert queue.size_bytes < 4 * 600
    bench.hub.dead_letters.edit("queue/q", ids[1], payload=bytes(5000))
    bench.commit()
    assert 5600 < queue.size_bytes < 6600
    bench.consume("queue/q", taker, window=2)
    assert len(taker.deliveries) == 4
    assert (queue.length, queue.size_bytes) == (0, 0)


def test_purged_while_messages_wait_for_their_commit_the_count_is_right() -> None:
    bench, taker = Bench(policy(window_messages=2)), Recorder()
    bench.produce(*(send(bytes(100)) for _ in range(9)))
    queue = bench.hub.queue("queue/q")
    bench.hub.produce([send(b"later")], bench.now)
    queue.purge(bench.now)
    bench.commit()
    assert queue.length == 1 and queue.size_bytes == queue.memory.size_bytes
    consumer = bench.consume("queue/q", taker, window=1)
    consumer.settle(taker.ids, bench.now)
    assert taker.payloads == [b"later"] and (queue.length, queue.size_bytes) == (0, 0)


def test_a_purge_and_a_group_that_fails_leave_the_count_right() -> None:
    bench = Bench(policy(window_messages=2))
    bench.produce(*(send(bytes(100)) for _ in range(9)))
    queue = bench.hub.queue("queue/q")
    bench.hub.produce([send(b"never")], bench.now)
    queue.purge(bench.now)
    bench.disk.room_bytes = 10
    bench.commit()
    assert (queue.length, queue.size_bytes) == (0, 0)


def test_what_expired_while_the_hub_was_stopped_leaves_a_queue_that_drops_its_oldest() -> None:
    """It is read only after a drop at the start has made room in memory for it."""
    config = policy(window_messages=1, max_length=2, overflow="drop-oldest")
    bench = Bench(config)
    mortal = int((bench.now + 2) * 1_000_000)
    bench.hub.produce([send(b"dropped"), send(b"expired", expires=mortal)], bench.now)
    bench.commit()
    # Killed between the batch and the drop that makes room for it.
    bench.hub.produce([send(b"kept")], bench.now)
    assert bench.hub.commits.commit_now() is None
    bench.now += 3
    bench.kill()
    queue = bench.hub.queue("queue/q")
    bench.wait(0)
    assert_live(bench.hub, bench.now)
    taker = Recorder()
    bench.consume("queue/q", taker, window=5)
    assert taker.payloads == [b"kept"]
    assert queue.length == 1


def test_consumers_that_come_and_go_leave_nothing() -> None:
    bench = Bench()
    for _ in range(200):
        bench.consume("queue/q", Recorder(), window=5).close(bench.now)
    assert len(bench.hub.queue("queue/q")._dispatch._eligible) < 50


def test_an_unnamed_subscriber_catches_up_with_large_messages() -> None:
    bench, taker = Bench(), Recorder()
    subscriber = bench.subscribe("topic/t", taker, window=3, slow="lag")
    for _ in range(40):
        bench.hub.produce([publish(bytes(MIB // 2))], bench.now)
    bench.commit()
    done = 0
    while done < len(taker.deliveries):
        ids = taker.ids[done:]
        done += len(ids)
        subscriber.settle(ids, bench.now)
        assert_live(bench.hub, bench.now)
    assert done == 40


# ---------------------------------------------------------------------------- any order of events


class RocksBench(Bench):
    """The same on RocksDB, without power cuts and full disks."""

    def __init__(self, path: Path, config: HubConfig) -> None:
        self.path = path
        super().__init__(config)

    def start(self) -> None:
        if hasattr(self, "rocks"):
            self.rocks._release()
        limits = StoreLimits(spare_bytes=1)
        self.store = self.rocks = RocksStore(self.path, limits)  # type: ignore[assignment]
        self.hub = Hub(self.store, self.config, now=self.now, random=self.random)


class Taker:
    """Holds what it gets, or settles or refuses it at once."""

    def __init__(self, machine: Living, manner: str) -> None:
        self.machine = machine
        self.manner = manner
        self.holds: dict[int, int] = {}

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        now = self.machine.bench.now
        for each in deliveries:
            self.holds[each.id] = self.machine.delivered(each.envelope)
        ids = [each.id for each in deliveries]
        if self.manner == "settles":
            self.machine.settle(attachment, self, ids)
        elif self.manner == "refuses":
            for each in ids:
                del self.holds[each]
            attachment.refuse(ids, now, cause="no", delay_s=3.0)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        pass


QUEUES = ["queue/a", "queue/b", "queue/short"]
TOPICS = ["topic/t/1", "topic/t/2", "topic/u"]
NAMED = {"all": ("topic/#", ""), "red": ("topic/t/+", "colour=Tred")}

sizes = st.sampled_from([0, 0, 10, 200, 600, 1500, 6000])
colours = st.sampled_from(["red", "blue"])
lives = st.sampled_from([0, 0, 0, 2, 20])
"""Seconds until a message expires, 0 for never."""
windows = st.tuples(st.sampled_from([1, 2, 4, 8, 1024]), st.sampled_from([1, 300, 1000, 5000]))


class Living(RuleBasedStateMachine):
    """`live` must come in the end, whatever happened: accepted, and neither settled nor expired,
    dropped, purged or buried (what is buried comes as a dead letter)."""

    rocks: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.usual, cursor.LEAST_CHANGES = cursor.LEAST_CHANGES, 3
        self.defaults = dict(Subscription.__init__.__kwdefaults__ or {})
        self.folder = tempfile.TemporaryDirectory() if self.rocks else None
        self.count = 0
        self.destinations: dict[int, str] = {}
        self.live: set[int] = set()
        self.at_risk: set[int] = set()
        self.unsynced: set[int] = set()
        self.settled: set[int] = set()
        self.unwritten: set[int] = set()
        self.got: set[int] = set()
        self.replayed: set[int] = set()
        """Sent on to queue/a; after a power cut perhaps where they were before."""
        self.takers: dict[Attachment, Taker] = {}
        self.granted: list[Window] = []
        self.shared: Window | None = None

    @initialize(
        window=windows, attempts=st.sampled_from([0, 0, 2]), lease=st.sampled_from([None, 4.0])
    )
    def begin(self, window: tuple[int, int], attempts: int, lease: float | None) -> None:
        self.retry = Retry(max_attempts=attempts, lease_s=lease)
        config = self.config(window)
        if self.folder is not None:
            self.bench: Bench = RocksBench(Path(self.folder.name), config)
        else:
            self.bench = Bench(config)
        for name in NAMED:
            self.attach(name, Taker(self, "holds"), window=1).close(self.bench.now)
        self.bench.commit()

    def config(self, window: tuple[int, int]) -> HubConfig:
        messages, size = window
        Subscription.__init__.__kwdefaults__.update(window_messages=messages, window_bytes=size)
        queue = QueuePolicy(window_messages=messages, window_bytes=size, retry=self.retry)
        short = QueuePolicy(
            window_messages=messages,
            window_bytes=size,
            retry=self.retry,
            max_length=4,
            overflow="drop-oldest",
        )
        return HubConfig(queue=queue, queues={"short": short}, retry=self.retry)

    # What is known of messages.

    def delivered(self, envelope: Envelope) -> int:
        key = envelope.properties["key"]
        assert isinstance(key, int)
        assert key not in self.settled, "settled, and here again"
        self.got.add(key)
        return key

    def settle(self, attachment: Attachment, taker: Taker, ids: Iterable[int]) -> None:
        keys = {taker.holds.pop(each) for each in ids}
        # A publish has a life in each subscription: it is live until the end.
        keys = {each for each in keys if self.destinations[each] not in TOPICS}
        self.settled |= keys
        self.unwritten |= keys
        self.live -= keys
        self.at_risk -= keys
        attachment.settle(list(ids), self.bench.now)

    def attach(self, target: str, taker: Taker, **options: object) -> Attachment:
        if target in NAMED:
            pattern, text = NAMED[target]
            found = self.bench.subscribe(
                pattern,
                taker,  # type: ignore[arg-type]
                name=target,
                filter=text,
                start="earliest",
                **options,
            )
        elif target.startswith("topic/"):
            found = self.bench.subscribe(target, taker, slow="lag", **options)  # type: ignore[arg-type]
        else:
            found = self.bench.consume(target, taker, **options)  # type: ignore[arg-type]
        assert isinstance(found, Attachment)
        return found

    # What happens.

    @rule(
        places=st.lists(st.sampled_from(QUEUES + TOPICS), min_size=1, max_size=3),
        many=st.lists(st.tuples(sizes, colours, lives), min_size=1, max_size=8),
        times=st.sampled_from([1, 1, 4]),
        durable=st.booleans(),
        commit=st.sampled_from([True, True, False]),
    )
    def produce(
        self,
        places: list[str],
        many: list[tuple[int, str, int]],
        times: int,
        durable: bool,
        commit: bool,
    ) -> None:
        batch, keys, mortal = [], [], set()
        for index, (size, colour, life) in enumerate(many * times):
            self.count += 1
            keys.append(self.count)
            destination = places[index % len(places)]
            self.destinations[self.count] = destination
            if life or destination == "queue/short":
                mortal.add(self.count)
            make = publish if destination in TOPICS else send
            fields = {
                "properties": {"key": self.count, "colour": colour},
                "expires": int((self.bench.now + life) * 1_000_000) if life else 0,
                "durable": durable,
            }
            batch.append(make(bytes(size), destination, **fields))

        def done(receipt: Receipt) -> None:
            if receipt.error is None:
                accepted = {k for i, k in enumerate(keys) if i not in receipt.refused} - mortal
                (self.live if durable else self.at_risk).update(accepted - self.settled)

        self.bench.hub.produce(batch, self.bench.now).add_done_callback(done)
        if commit:
            self.commit()

    @rule()
    def commit(self) -> None:
        # What need not be durable is safe with the next group, if that can be written.
        at_risk, self.at_risk = self.at_risk, set()
        unwritten = set(self.unwritten)
        if self.bench.hub.commits.commit_now() is None:
            self.live |= at_risk - self.settled
            self.unsynced |= at_risk
            self.unwritten -= unwritten
        for backlog in self.backlogs():
            if self.bench.store.last_error is None:
                assert backlog.visible <= self.bench.hub.committed_id

    @precondition(lambda self: len(self.takers) < 6)
    @rule(
        source=st.sampled_from([*QUEUES, *NAMED, "topic/t/+"]),
        manner=st.sampled_from(["holds", "holds", "settles", "refuses"]),
        window=st.sampled_from([1, 3, 50, "granted", "shared"]),
        weight=st.sampled_from([1, 10]),
        text=st.sampled_from(["", "", "colour=Tred"]),
        chooses=st.sampled_from([False, False, True]),
        lease=st.sampled_from([None, 1.0]),
    )
    def join(
        self,
        source: str,
        manner: str,
        window: int | str,
        weight: int,
        text: str,
        chooses: bool,
        lease: float | None,
    ) -> None:
        if window == "shared":
            self.shared = self.shared or Window(2)
            room: Window | int = self.shared
        elif window == "granted":
            room = Window(1, granted=True)
            self.granted.append(room)
        else:
            assert isinstance(window, int)
            room = window
        options: dict[str, object] = {"window": room}
        if source != "topic/t/+":
            options |= {"weight": weight, "lease_s": lease}
            if source not in NAMED:
                options["filter"] = text
                if chooses:
                    options["choice"] = lambda envelope: len(envelope.payload) < 300
        taker = Taker(self, manner)
        self.takers[self.attach(source, taker, **options)] = taker

    @precondition(lambda self: self.takers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        attachment = data.draw(st.sampled_from(list(self.takers)))
        del self.takers[attachment]
        attachment.close(self.bench.now)

    @precondition(lambda self: any(taker.holds for taker in self.takers.values()))
    @rule(
        data=st.data(),
        refuse=st.sampled_from([False, False, True]),
        delay=st.sampled_from([None, 0.0, 5.0]),
    )
    def answer(self, data: st.DataObject, refuse: bool, delay: float | None) -> None:
        holding = [each for each, taker in self.takers.items() if taker.holds]
        attachment = data.draw(st.sampled_from(holding))
        taker = self.takers[attachment]
        known = attachment.held if isinstance(attachment, Consumer) else taker.holds
        for gone in set(taker.holds) - set(known):
            del taker.holds[gone]
        if not taker.holds:
            return
        ids = sorted(taker.holds)
        ids = data.draw(st.sampled_from([ids, ids[:1], ids[-1:], ids[::2]]))
        if refuse:
            for each in ids:
                del taker.holds[each]
            attachment.refuse(ids, self.bench.now, cause="no", delay_s=delay)
        else:
            self.settle(attachment, taker, ids)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grant(self, data: st.DataObject, count: int) -> None:
        data.draw(st.sampled_from(self.granted)).grant(count, self.bench.now)

    @rule(seconds=st.sampled_from([0.05, 1.0, 3.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @rule(
        what=st.sampled_from(["purge", "reconfigure", "restart", "cut", "full", "free", "free"]),
        queue=st.sampled_from(QUEUES),
        window=windows,
    )
    def upset(self, what: str, queue: str, window: tuple[int, int]) -> None:
        """One rule for what is rare, so that most steps send and answer."""
        if what == "purge":
            self.purge(queue)
        elif what == "reconfigure":
            self.reconfigure(window)
        elif what in ("restart", "cut"):
            self.restart(power=what == "cut")
        else:
            self.fill_disk(300 if what == "full" else 1 << 30)

    def purge(self, queue: str) -> None:
        self.bench.hub.queue(queue).purge(self.bench.now)
        purged = {each for each, home in self.destinations.items() if home == queue}
        if queue == "queue/a":
            purged |= self.replayed
        self.live -= purged
        self.at_risk -= purged

    @rule(
        queue=st.sampled_from(QUEUES),
        what=st.sampled_from(["edit", "colour", "remove", "replay"]),
        index=st.integers(0, 5),
        size=sizes,
    )
    def manage(self, queue: str, what: str, index: int, size: int) -> None:
        hub, now = self.bench.hub, self.bench.now
        found = hub.queue(queue).browse(0, 6)
        if index >= len(found):
            return
        envelope = found[index]
        key = envelope.properties["key"]
        assert isinstance(key, int)
        try:
            if what == "edit":
                hub.dead_letters.edit(queue, envelope.id, payload=bytes(size))
            elif what == "colour":
                properties = {**envelope.properties, "colour": "red"}
                hub.dead_letters.edit(queue, envelope.id, properties=properties)
            elif what == "replay":
                hub.dead_letters.replay(queue, [envelope.id], now, destination="queue/a")
                self.replayed.add(key)
            elif hub.dead_letters.purge(queue, [envelope.id], now):
                self.live.discard(key)
                self.at_risk.discard(key)
        except UnknownMessage:
            pass

    def reconfigure(self, window: tuple[int, int]) -> None:
        self.bench.config = self.config(window)
        self.bench.hub.reconfigure(self.bench.config)

    def restart(self, *, power: bool) -> None:
        self.settled -= self.unwritten
        self.unwritten = set()
        self.at_risk = set()
        if power:
            self.live -= self.unsynced
        self.takers, self.granted, self.shared = {}, [], None
        self.bench.kill(power=power and not self.rocks)
        for queue in QUEUES:
            self.bench.hub.queue(queue)

    def fill_disk(self, room: int) -> None:
        self.bench.disk.room_bytes = room
        self.bench.wait(0.2)

    # What must be true.

    def backlogs(self) -> list[Backlog]:
        hub = self.bench.hub
        return [*hub._destinations.queues.values(), *hub.subscriptions.all()]

    @invariant()
    def it_is_live(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.wait(0)
        assert_live(self.bench.hub, self.bench.now)

    def teardown(self) -> None:
        try:
            if hasattr(self, "bench"):
                self.drain()
        finally:
            cursor.LEAST_CHANGES = self.usual
            Subscription.__init__.__kwdefaults__.update(self.defaults)
            if self.folder is not None:
                if hasattr(self, "bench"):
                    self.bench.store._release()
                self.folder.cleanup()

    def drain(self) -> None:
        """A plain consumer for each: all comes, and nothing is left."""
        bench = self.bench
        bench.disk.room_bytes = 1 << 30
        bench.wait(1)
        self.commit()
        self.commit()
        for attachment in list(self.takers):
            taker = self.takers.pop(attachment)
            if isinstance(attachment, Subscriber):
                taker.manner = "settles"
                if not attachment.window.granted:
                    self.settle(attachment, taker, list(taker.holds))
                    assert not attachment.is_lagging
            attachment.close(bench.now)
        self.live -= self.settled
        self.got = {each for each in self.got if self.destinations[each] in TOPICS}
        for _ in range(3):
            targets = [queue.destination for queue in bench.hub.queues()]
            for target in [*targets, *NAMED]:
                taker = Taker(self, "settles")
                consumer = self.attach(target, taker, window=2)
                bench.commit()
                bench.wait(100)
                consumer.close(bench.now)
        assert self.live <= self.got
        for backlog in self.backlogs():
            assert not backlog.memory.items and backlog.memory.loaded >= backlog.visible
            left = (backlog.length, backlog.size_bytes, backlog.memory.size_bytes)
            assert left == (0, 0, 0), f"{backlog.destination} counts {left}"


class LivingOnRocks(Living):
    rocks = True


TestAnyOrderOfEvents = Living.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
TestAnyOrderOnRocks = pytest.mark.slow(LivingOnRocks.TestCase)
TestAnyOrderOnRocks.settings = settings(max_examples=6, stateful_step_count=30, deadline=None)
