"""Two links on a pipe that is cut anywhere: what arrives is what was sent, once, in order.

The machine plays both applications, the pipe and the scissors. Bytes leave a connection for the
pipe at once and arrive in pieces of any size; a cut loses what is in the pipe; a restart saves and
restores a link, and with it goes what its application had not marked as received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from crosswire.wire.contract import ConnectionFailed, Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import (
    Acknowledged,
    ChannelClosed,
    CloseReceived,
    CommitReceived,
    ConnectionClosed,
    HandshakeReceived,
    LinkOpened,
    LinkResumed,
    MessageReceived,
    RollbackReceived,
    ShutdownReceived,
)
from crosswire.wire.relink.frames import RelinkLimits
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.wire.relink.strategies import EPOCH

LIMITS = RelinkLimits(window=5, channels=4)
SIDES = st.integers(0, 1)
CHANNELS = st.integers(0, 1)
PICKS = st.integers(0, 2)
COMMITTED, ROLLED_BACK = "committed", "rolled back"


@dataclass
class Inbound:
    """What an application got on one channel, through all lives of the channel."""

    messages: list[bytes] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    outcomes: dict[int, bool] = field(default_factory=dict)
    life: int = 0
    done: int = 0
    closing: bool = False


@dataclass
class Outbound:
    """What an application sent on one channel, through all lives of the channel."""

    messages: list[bytes] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    outcomes: dict[int, bool] = field(default_factory=dict)
    consumed: int = 0
    life: int = 0
    is_open: bool = False
    closing: bool = False


def picked(pick: int, channels: list[int]) -> list[int]:
    return [sorted(channels)[pick % len(channels)]] if channels else []


class Side:
    """An application with its end of the link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.connection: RelinkConnection | None = None
        self.sent: dict[int, Outbound] = defaultdict(Outbound)
        self.got: dict[int, Inbound] = defaultdict(Inbound)
        self.finished = False

    def handle(self, events: list[Event]) -> None:
        for event in events:
            self.handle_one(event)

    def handle_one(self, event: Event) -> None:
        link = self.link
        match event:
            case HandshakeReceived():
                assert self.connection is not None
                self.connection.accept(link)
            case MessageReceived(channel=channel, sequence=sequence, parts=(part,)):
                got = self.got[channel]
                if sequence == link.start and got.closing:
                    got.closing, got.life = False, len(got.messages)
                assert sequence == (link.start + len(got.messages) - got.life) % 2**32
                got.messages.append(bytes(part))
            case CommitReceived(channel=channel, first=first, last=last):
                self.decided(channel, first, last, COMMITTED)
            case RollbackReceived(channel=channel, first=first, last=last):
                self.decided(channel, first, last, ROLLED_BACK)
                self.skip_rolled_back(self.got[channel])
            case CloseReceived(channel=channel):
                self.got[channel].closing = True
            case Acknowledged(acknowledgement=kind, channel=channel, first=first, last=last):
                self.acknowledged(kind, channel, first, last)
            case ChannelClosed(channel=channel):
                sent = self.sent[channel]
                sent.is_open, sent.closing, sent.life = False, False, len(sent.messages)
                sent.consumed = len(sent.messages)
            case ConnectionClosed():
                self.connection = None
                self.finished = self.finished or link.ended
            case ConnectionFailed(error=error):
                raise error
            case LinkOpened() | LinkResumed() | ShutdownReceived():
                pass
            case _:
                raise AssertionError(event)

    def decided(self, channel: int, first: int, last: int, what: str) -> None:
        got = self.got[channel]
        count = (last - first) % 2**32 + 1
        assert first == (self.link.start + len(got.decisions) - got.life) % 2**32
        got.decisions += [what] * count
        assert len(got.decisions) <= len(got.messages)

    def acknowledged(self, kind: str, channel: int, first: int, last: int) -> None:
        sent = self.sent[channel]
        start = sent.life + (first - self.link.start) % 2**32
        numbers = range(start, start + (last - first) % 2**32 + 1)
        if kind == "consumed":
            assert numbers[0] == sent.consumed or self.link.transactions
            sent.consumed = max(sent.consumed, numbers[-1] + 1)
        elif kind != "received":
            for number in numbers:
                assert number not in sent.outcomes and sent.decisions[number] == COMMITTED
                sent.outcomes[number] = kind == "committed"
            sent.consumed = max(sent.consumed, numbers[-1] + 1)
        assert numbers[-1] < len(sent.messages)

    def skip_rolled_back(self, got: Inbound) -> None:
        while got.done < len(got.decisions) and got.decisions[got.done] == ROLLED_BACK:
            got.done += 1

    def consumable(self, channel: int) -> int:
        got = self.got[channel]
        end = len(got.decisions) if self.link.peer_transactions else len(got.messages)
        return end - got.done

    def consume(self, channel: int, count: int, *, success: bool = True) -> None:
        got = self.got[channel]
        bound = got.done + count
        sequence = (self.link.start + bound - 1 - got.life) % 2**32
        if self.link.peer_transactions:
            for number in range(got.done, bound):
                if got.decisions[number] == COMMITTED:
                    got.outcomes[number] = success
            self.link.settle(channel, sequence, committed=success)
        else:
            self.link.consume(channel, sequence)
        got.done = bound
        self.skip_rolled_back(got)

    def restart(self) -> None:
        """What was not marked as received is gone; the peer will repeat it."""
        self.connection = None
        marks = {
            number: channel.received for number, channel in self.link._receiving.channels.items()
        }
        closed = set(self.link._receiving.closed)
        self.link = Link.restore(self.link.save(), limits=LIMITS)
        for number, got in self.got.items():
            if number in closed or number not in marks:
                continue
            safe = got.life + marks[number] - self.link.start
            if safe < len(got.messages):
                got.closing = False
            del got.messages[safe:]
            del got.decisions[safe:]


class LossyPipe(RuleBasedStateMachine):
    @initialize(
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 8)),
        transactions=st.tuples(st.booleans(), st.booleans()),
        start=st.sampled_from([0, 2**32 - 3, 2**31 - 2]),
        patience=st.sampled_from([5, 15, 1000]),
    )
    def begin(
        self, sizes: tuple[int, int], transactions: tuple[bool, bool], start: int, patience: int
    ) -> None:
        self.patience = patience
        terms = LinkTerms(
            endpoint="model",
            connector_id_size=sizes[0],
            listener_id_size=sizes[1],
            connector_transactions=transactions[0],
            listener_transactions=transactions[1],
        )
        self.sides = (
            Side(Link("connector", terms, limits=LIMITS, start=start)),
            Side(Link("listener", terms, epoch=EPOCH, id=7, limits=LIMITS, start=start)),
        )
        self.pipes = (bytearray(), bytearray())
        self.counter = 0
        self.reconnect()

    # The pipe.

    def turn(self) -> None:
        """Let both ends react until neither has anything to send."""
        for side, pipe in zip(self.sides, self.pipes, strict=True):
            connection = side.connection
            if connection is None:
                continue
            while events := connection.events():
                side.handle(events)
            for piece in connection.data_to_send():
                pipe.extend(piece)

    def arrive(self, sender: int, count: int) -> None:
        pipe, receiver = self.pipes[sender], self.sides[1 - sender]
        data = bytes(pipe[:count])
        del pipe[:count]
        if data and receiver.connection is not None:
            receiver.connection.receive_data(data, 0.0)
        self.turn()
        if not pipe and self.sides[sender].connection is None and receiver.connection is not None:
            receiver.connection.receive_eof()
            self.turn()

    @property
    def can_connect(self) -> bool:
        apart = all(side.connection is None for side in self.sides)
        return apart and not any(side.finished for side in self.sides)

    @precondition(lambda self: self.can_connect)
    @rule()
    def connect(self) -> None:
        connector, listener = self.sides
        connector.connection = RelinkConnection(
            "connector", 0.0, link=connector.link, limits=LIMITS
        )
        listener.connection = RelinkConnection("listener", 0.0, limits=LIMITS)
        self.turn()

    @precondition(lambda self: self.can_connect)
    @rule()
    def reconnect(self) -> None:
        """With the handshake done, and what is reported before the resume."""
        self.connect()
        self.deliver_everything()

    @rule(sender=SIDES, count=st.integers(1, 60) | st.just(10_000))
    def deliver(self, sender: int, count: int) -> None:
        self.arrive(sender, count)

    @rule()
    def deliver_everything(self) -> None:
        while any(self.pipes):
            self.arrive(0, 10_000)
            self.arrive(1, 10_000)

    @rule()
    def cut(self) -> None:
        for side, pipe in zip(self.sides, self.pipes, strict=True):
            pipe.clear()
            if side.connection is not None:
                side.connection.receive_eof()
                side.handle(side.connection.events())
                side.connection = None

    @rule(which=SIDES)
    def restart(self, which: int) -> None:
        self.cut()
        self.sides[which].restart()

    # The applications. `pick` chooses among those channels of which something can be asked now.

    @rule(which=SIDES, to=st.lists(CHANNELS, min_size=1, max_size=3))
    def send(self, which: int, to: list[int]) -> None:
        self.send_to(which, to[:1], multicast=False)

    @rule(which=SIDES, to=st.lists(CHANNELS, max_size=3))
    def multicast(self, which: int, to: list[int]) -> None:
        self.send_to(which, to, multicast=True)

    def send_to(self, which: int, targets: list[int], *, multicast: bool) -> None:
        side = self.sides[which]
        link = side.link
        if any(link.room(channel) < targets.count(channel) for channel in targets):
            return
        if link.ended or link.shut_down:
            return
        self.counter += 1
        part = b"%d" % self.counter
        if multicast:
            link.send_multicast(targets, [part])
        else:
            link.send(targets[0], [part])
        for channel in targets:
            side.sent[channel].messages.append(part)
            side.sent[channel].is_open = True
        self.turn()

    @rule(which=SIDES, pick=PICKS, keep=st.integers(0, 1), commit=st.booleans())
    def decide(self, which: int, pick: int, keep: int, commit: bool) -> None:
        side = self.sides[which]
        if not side.link.transactions or side.link.ended:
            return
        undecided = {
            channel: len(sent.messages) - len(sent.decisions) - keep
            for channel, sent in side.sent.items()
        }
        for channel in picked(pick, [channel for channel in undecided if undecided[channel] > 0]):
            sent, count = side.sent[channel], undecided[channel]
            sequence = (side.link.start + len(sent.decisions) + count - 1 - sent.life) % 2**32
            (side.link.commit if commit else side.link.rollback)(channel, sequence)
            sent.decisions += [COMMITTED if commit else ROLLED_BACK] * count
            self.turn()

    @rule(which=SIDES, pick=PICKS)
    def close(self, which: int, pick: int) -> None:
        side = self.sides[which]
        if side.link.ended:
            return
        can_close = [n for n, sent in side.sent.items() if sent.is_open and not sent.closing]
        for channel in picked(pick, can_close):
            side.link.close(channel)
            side.sent[channel].closing = True
            self.turn()

    @rule(which=SIDES, pick=PICKS, count=st.integers(1, 5), success=st.booleans())
    def consume(self, which: int, pick: int, count: int, success: bool) -> None:
        side = self.sides[which]
        if side.link.ended:
            return
        for channel in picked(pick, [n for n in side.got if side.consumable(n) > 0]):
            side.consume(channel, min(count, side.consumable(channel)), success=success)
            self.turn()

    @rule(which=SIDES, pick=PICKS)
    def mark_received(self, which: int, pick: int) -> None:
        side = self.sides[which]
        if side.link.ended:
            return
        unmarked = [n for n, got in side.got.items() if len(got.messages) > got.done]
        for channel in picked(pick, unmarked):
            got = side.got[channel]
            sequence = (side.link.start + len(got.messages) - 1 - got.life) % 2**32
            side.link.mark_received(channel, sequence)
            self.turn()

    @precondition(lambda self: self.counter > self.patience)
    @rule(which=SIDES)
    def shutdown(self, which: int) -> None:
        side = self.sides[which]
        undecided = any(len(sent.decisions) < len(sent.messages) for sent in side.sent.values())
        if side.link.ended or (side.link.transactions and undecided):
            return
        side.link.shutdown()
        self.turn()

    # In the end.

    def settle_everything(self) -> None:
        for _ in range(8):
            if self.can_connect:
                self.connect()
            self.deliver_everything()
            for which, side in enumerate(self.sides):
                for _ in range(len(side.sent)):
                    self.decide(which, 0, 0, True)
                for _ in range(len(side.got)):
                    self.consume(which, 0, 5, True)
            self.deliver_everything()

    def compare(self, sender: Side, receiver: Side, *, whole: bool) -> None:
        for channel, sent in sender.sent.items():
            got = receiver.got[channel]
            assert got.messages == sent.messages[: len(got.messages)]
            assert len(got.messages) >= sent.consumed
            assert got.decisions == sent.decisions[: len(got.decisions)]
            assert sent.outcomes.items() <= got.outcomes.items()
            if whole:
                assert len(got.messages) == len(sent.messages)
                assert got.decisions == sent.decisions
                assert sent.consumed == len(sent.messages) or sender.link.transactions
                assert sent.outcomes == got.outcomes

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        self.settle_everything()
        ended = any(side.finished for side in self.sides)
        a, b = self.sides
        self.compare(a, b, whole=not ended)
        self.compare(b, a, whole=not ended)
        assert ended or a.link.unconsumed == b.link.unconsumed == 0
        if ended:
            return
        first, second = self.sides if self.counter % 2 else self.sides[::-1]
        for side in (first, second):
            side.link.shutdown()
            self.turn()
            self.deliver_everything()
        assert a.finished and b.finished and a.connection is b.connection is None


TestNothingIsLostAndNothingComesTwice = LossyPipe.TestCase
TestNothingIsLostAndNothingComesTwice.settings = settings(max_examples=100, stateful_step_count=50)


def walk(seed: int, steps: int) -> None:
    """A long life at random, with the weights of one that is worth living."""
    chance = Random(seed)
    pipe = LossyPipe()
    sizes = (chance.randint(1, 3), chance.randint(1, 8))
    transactions = (chance.random() < 0.5, chance.random() < 0.5)
    pipe.begin(sizes, transactions, chance.choice([0, 2**32 - 20]), steps)

    def side() -> int:
        return chance.randrange(2)

    def channels() -> list[int]:
        return [chance.randrange(2) for _ in range(chance.randint(1, 3))]

    doings: list[tuple[int, Callable[[], None]]] = [
        (30, lambda: pipe.send(side(), channels())),
        (5, lambda: pipe.multicast(side(), channels())),
        (20, lambda: pipe.decide(side(), side(), side(), chance.random() < 0.6)),
        (10, lambda: pipe.close(side(), side())),
        (40, lambda: pipe.consume(side(), side(), chance.randint(1, 5), chance.random() < 0.6)),
        (10, lambda: pipe.mark_received(side(), side())),
        (40, lambda: pipe.deliver(side(), chance.choice([7, 16, 50, 10_000]))),
        (8, pipe.deliver_everything),
        (5, pipe.cut),
        (3, lambda: pipe.restart(side())),
        (10, lambda: pipe.connect() if pipe.can_connect else None),
        (40, lambda: pipe.reconnect() if pipe.can_connect else None),
    ]
    weights = [weight for weight, _ in doings]
    for _, doing in chance.choices(doings, weights, k=steps):
        doing()
    pipe.teardown()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_long_life_at_random(seed: int) -> None:
    walk(seed, steps=600)
