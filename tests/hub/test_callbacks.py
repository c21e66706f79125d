"""Callbacks: one that raises harms only its owner, and none of them runs deeper than another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random

import pytest

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope
from crosswire.errors import (
    DestinationFull,
    NoProvider,
    ProviderFailed,
    ProviderLost,
    QuotaExceeded,
    StoreError,
)
from crosswire.hub.attachment import Attachment, Delivery, Ended, Notice, Window
from crosswire.hub.commits import CommitStage
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry, TopicPolicy
from crosswire.hub.services import Answer, Call, Provider
from crosswire.server.metrics import Metrics, render
from crosswire.store.contract import StoreLimits
from tests.hub.parties import Bench, Caller, Recorder, Server, publish, send
from tests.store.committing import CommitRecorder

PEER = LedgerPeer("test", "callbacks")


class Breaking(Recorder):
    """Raises whatever it is told."""

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        super().deliver(attachment, deliveries)
        raise RuntimeError("deliver")

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        super().notice(attachment, notice)
        raise RuntimeError("notice")


class BreakingServer(Server):
    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        super().request(provider, requests)
        raise RuntimeError("request")

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        super().cancel(provider, ids)
        raise RuntimeError("cancel")


def raising(*_: object) -> None:
    raise RuntimeError("no")


def request(service: str = "service/s") -> Envelope:
    return Envelope(destination=service, kind="request", payload=b"?")


def call(bench: Bench, answered: Callable[[Call, Answer], None], *envelopes: Envelope) -> None:
    bench.hub.call(envelopes or [request()], bench.now, answered=answered, peer=PEER)


# -------------------------------------------------------------------------------- after a commit


@pytest.mark.failing_callbacks
def test_what_one_receipt_raises_is_kept_from_the_others() -> None:
    bench, taker, feed = Bench(), Recorder(), CommitRecorder()
    bench.hub.commits.add_listener(CommitStage.LAKE, feed.committed)
    bench.consume("queue/q", taker, window=10)
    done: list[Receipt] = []
    for payload in (b"a", b"b", b"c"):
        receipt = bench.hub.produce([send(payload)], bench.now)
        receipt.add_done_callback(raising)
        receipt.add_done_callback(done.append)
    bench.hub.written().add_done_callback(raising)
    written = bench.hub.written()
    bench.commit()
    assert len(done) == 3
    assert taker.payloads == [b"a", b"b", b"c"]
    assert written.done and feed.outcomes == [None]
    assert bench.hub.callbacks.failed == {"receipt": 4}
    bench.kill()
    later = Recorder()
    bench.consume("queue/q", later, window=10)
    assert later.payloads == [b"a", b"b", b"c"]


@pytest.mark.failing_callbacks
def test_a_listener_of_commits_that_raises() -> None:
    bench, taker = Bench(), Recorder()
    bench.hub.commits.add_listener(CommitStage.LAKE, raising)
    bench.consume("queue/q", taker, window=10)
    for _ in range(2):
        bench.produce(send(b"a"))
    assert taker.payloads == [b"a", b"a"]
    assert bench.hub.callbacks.failed == {"commit listener": 2}


def test_what_became_visible_is_released_before_receipts_and_listeners() -> None:
    bench, seen = Bench(), list[tuple[str, list[bytes]]]()
    queue, named, lagging = Recorder(), Recorder(), Recorder()
    bench.consume("queue/q", queue, window=10)
    bench.subscribe("topic/t", named, name="n", window=10)
    bench.subscribe("topic/t", lagging, start="earliest", window=10)

    def look(what: str) -> None:
        seen.append((what, queue.payloads + named.payloads + lagging.payloads))

    bench.hub.commits.add_listener(CommitStage.LAKE, lambda _group: look("listener"))
    receipt = bench.hub.produce([send(b"q"), publish(b"t")], bench.now)
    receipt.add_done_callback(lambda _receipt: look("receipt"))
    bench.commit()
    assert seen == [("receipt", [b"q", b"t", b"t"]), ("listener", [b"q", b"t", b"t"])]


@pytest.mark.failing_callbacks
def test_metrics_that_fail_don_t_keep_a_commit_from_anybody() -> None:
    bench = Bench()
    metrics = Metrics(bench.hub)
    metrics.count = raising  # type: ignore[assignment,method-assign]
    bench.produce(send(b"a"))
    text = render(metrics, bench.hub.callbacks.failed, {})  # type: ignore[arg-type]
    assert bench.hub.callbacks.failed == {"metrics": 1}
    assert 'crosswire_callbacks_failed_total{kind="metrics"} 1' in text


@pytest.mark.failing_callbacks
def test_a_backlog_that_can_t_be_written_or_released() -> None:
    bench, taker = Bench(), Recorder()
    bench.consume("queue/b", taker, window=10)
    bench.hub.queue("queue/a").write = raising  # type: ignore[method-assign]
    bench.hub.queue("queue/a").arrive = raising  # type: ignore[assignment,method-assign]
    bench.produce(send(b"a", "queue/a"), send(b"b", "queue/b"))
    assert taker.payloads == [b"b"]
    assert bench.hub.callbacks.failed == {"write": 1, "release": 1}


# ----------------------------------------------------------------------------------- taking part


@pytest.mark.failing_callbacks
@pytest.mark.parametrize("name", ["", "n"])
def test_a_consumer_that_raises_loses_its_part_and_what_it_held(name: str) -> None:
    bench, breaking, other = Bench(), Breaking(), Recorder()
    if name:
        bench.subscribe("topic/t", breaking, name=name, window=1)
        bench.produce(publish(b"a"), publish(b"b"))
        bench.subscribe("topic/t", other, name=name, window=10)
    else:
        bench.consume("queue/q", breaking, window=1)
        bench.produce(send(b"a"), send(b"b"))
        bench.consume("queue/q", other, window=10)
    assert breaking.payloads == [b"a"]
    assert [str(error) for error in breaking.errors] == ["deliver"]
    assert other.payloads == [b"a", b"b"]
    assert [each.attempt for each in other.deliveries] == [2, 1]
    assert bench.hub.callbacks.failed == {"delivery": 1}


@pytest.mark.failing_callbacks
def test_a_message_that_nobody_can_be_given_is_not_tried_for_ever() -> None:
    retry = Retry(max_attempts=3, first_delay_s=0.0, longest_delay_s=0.0)
    bench = Bench(HubConfig(queue=QueuePolicy(retry=retry)))
    dead = Recorder()
    bench.consume("queue/q/dead", dead, window=10)
    for _ in range(5):
        bench.consume("queue/q", Breaking(), window=10)
    bench.produce(send(b"poison"))
    bench.commit()
    assert dead.payloads == [b"poison"]
    assert len(bench.hub.queue("queue/q").consumers) == 2


@pytest.mark.failing_callbacks
def test_a_subscriber_that_raises_harms_neither_others_nor_the_producer() -> None:
    bench, breaking, before, after = Bench(), Breaking(), Recorder(), Recorder()
    for receiver in (before, breaking, after):
        bench.subscribe("topic/t", receiver, window=10)
    bench.produce(publish(b"a"))
    bench.produce(publish(b"b"))
    assert before.payloads == after.payloads == [b"a", b"b"]
    assert breaking.payloads == [b"a"] and len(breaking.errors) == 1


@pytest.mark.failing_callbacks
def test_a_notice_that_raises() -> None:
    bench, breaking, other = Bench(), Breaking(), Recorder()
    bench.subscribe("topic/t", breaking, window=0, slow="disconnect")
    bench.subscribe("topic/t", other, window=0, slow="disconnect")
    bench.produce(publish(b"a"))
    assert other.notices == breaking.notices == [Ended("too slow")]
    assert [str(error) for error in breaking.errors] == ["notice"]
    assert bench.hub.callbacks.failed == {"notice": 1}


@pytest.mark.failing_callbacks
def test_a_provider_that_raises_is_lost_to_its_callers() -> None:
    bench, breaking, caller = Bench(), BreakingServer(), Caller()
    bench.hub.provide(["service/s"], breaking, bench.now, peer=PEER, window=2)
    call(bench, caller, *[request()] * 5)
    kinds = [type(answer) for answer in caller.answers]
    assert kinds.count(ProviderLost) == 2 and kinds.count(NoProvider) == 3
    assert [str(error) for error in breaking.errors] == ["request"]
    assert not bench.hub.services.providers()
    assert bench.hub.callbacks.failed == {"request": 1}


@pytest.mark.failing_callbacks
def test_a_provider_that_raises_when_a_call_is_given_up() -> None:
    bench, server, other, caller = Bench(), BreakingServer(), Server(), Caller()
    server.request = Server.request.__get__(server)  # type: ignore[method-assign]
    bench.hub.provide(["service/s"], server, bench.now, peer=PEER, window=1)
    bench.hub.provide(["service/s"], other, bench.now, peer=PEER, window=1)
    call(bench, caller, *[request()] * 2)
    bench.wait(31)
    assert len(caller.answers) == 2
    assert len(server.cancelled) == len(other.cancelled) == 1
    assert [str(error) for error in server.errors] == ["cancel"]


@pytest.mark.failing_callbacks
def test_answers_watchers_and_listeners_that_raise() -> None:
    bench, caller, told = Bench(), Caller(), list[object]()
    call(bench, raising, *[request()] * 2)
    call(bench, caller)
    assert len(caller.answers) == 1
    bench.hub.consumers_changed += [raising, told.append]
    consumer = bench.consume("queue/q", Recorder(settles=True), window=10)
    ids = bench.produce(send(b"a"), send(b"b"), send(b"c", "queue/later"))
    assert told == [bench.hub.queue("queue/q")]
    bench.hub.watched.add(bench.produce(send(b"d", "queue/w"))[0], raising)
    watched = bench.produce(send(b"e", "queue/w"))[0]
    bench.hub.watched.add(watched, lambda *args: told.append(args))
    bench.consume("queue/w", Recorder(settles=True), window=10)
    assert (watched, "") in told
    consumer.close(bench.now)
    assert len(ids) == 3
    assert bench.hub.callbacks.failed == {"answer": 2, "consumers": 3, "watcher": 1}


@pytest.mark.failing_callbacks
def test_a_choice_that_raises_is_no_choice_of_others() -> None:
    bench, choosy, other = Bench(), Recorder(), Recorder()
    bench.consume("queue/q", choosy, window=10, weight=20, choice=raising)
    bench.consume("queue/q", other, window=10)
    bench.produce(send(b"a"), send(b"b"))
    assert other.payloads == [b"a", b"b"] and not choosy.payloads
    bench.subscribe("topic/t", choosy, window=10, names=raising)
    bench.subscribe("topic/t", choosy, window=10, filter="a=N1").matches = raising
    bench.subscribe("topic/t", other, window=10)
    bench.produce(publish(b"c"), publish(b"d"))
    assert other.payloads == [b"a", b"b", b"c", b"d"] and not choosy.payloads
    assert len(choosy.errors) == 3
    assert bench.hub.callbacks.failed == {"filter": 3}
    assert len(bench.hub.queue("queue/q").consumers) == 1


@pytest.mark.failing_callbacks
def test_what_was_given_is_delivered_though_the_disk_can_t_be_read() -> None:
    """And the rest as soon as it can be read again."""
    bench, taker, late = (
        Bench(HubConfig(queue=QueuePolicy(window_messages=4))),
        Recorder(),
        Recorder(),
    )
    bench.produce(*[send(b"%d" % number) for number in range(20)])
    bench.produce(*[publish(b"%d" % number) for number in range(20)])
    read = bench.store.read
    bench.store.read = lambda *_, **__: raising()  # type: ignore[assignment,method-assign]
    consumer = bench.consume("queue/q", taker, window=30)
    assert set(consumer.held) == set(taker.ids) and len(taker.ids) == 4
    bench.subscribe("topic/t", late, start="earliest", window=30)
    bench.wait(0.5)
    bench.store.read = read  # type: ignore[method-assign]
    assert len(taker.ids) == 4 and not late.ids
    bench.wait(1)
    assert len(taker.ids) == len(late.ids) == 20


# ------------------------------------------------------------------------------------------ depth


class Deepest:
    """Notes how deep in the stack it is called."""

    def __init__(self) -> None:
        self.most = 0

    def look(self) -> None:
        depth, frame = 0, inspect.currentframe()
        while frame is not None:
            depth += 1
            frame = frame.f_back
        self.most = max(self.most, depth)


class Busybody(Recorder, Server):
    """Does at once whatever can be done with what it is given, and then some more."""

    def __init__(self, bench: Bench, random: Random, deepest: Deepest, number: int) -> None:
        Server.__init__(self)
        Recorder.__init__(self)
        self.bench, self.random, self.deepest, self.left = bench, random, deepest, number

    def act(self) -> None:
        """One more operation, from within whatever is going on."""
        self.deepest.look()
        if not self.left:
            return
        self.left -= 1
        hub, now = self.bench.hub, self.bench.now
        match self.random.randrange(8):
            case 0:
                hub.produce([send(b"x", durable=False), send(b"y")], now)
            case 1:
                hub.produce([publish(b"x", "topic/t"), publish(b"x", "topic/unstored")], now)
            case 2:
                receipt = hub.produce([send(b"x", "nowhere")], now)
                receipt.add_done_callback(lambda _receipt: self.deepest.look())
            case 3:
                hub.committed().add_done_callback(lambda _receipt: self.act())
            case 4:
                self.bench.subscribe("topic/t", self, start="earliest", window=3).close(now)
            case 5:
                self.bench.consume("queue/q", self, window=2).close(now)
            case _:
                service = self.random.choice(("service/s", "service/none", "queue/q"))
                hub.call([request(service)] * 2, now, answered=self.answered, peer=PEER)

    def answered(self, _call: Call, _answer: Answer) -> None:
        self.act()

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        ids, now = [each.id for each in deliveries], self.bench.now
        if self.random.random() < 0.3:
            attachment.refuse(ids, now, delay_s=0.0)
        else:
            attachment.settle(ids, now)
        if attachment.window.granted:
            attachment.window.grant(len(ids), now)
        self.act()

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        self.act()

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        for each in requests:
            if self.random.random() < 0.5:
                provider.fail(each.id, ProviderFailed("busy", "no"), self.bench.now)
            else:
                provider.answer(each.id, Envelope(destination="", kind="response"), self.bench.now)
            if provider.window.granted:
                provider.window.grant(1, self.bench.now)
        self.act()

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        self.act()

    def consumers(self, _queue: object) -> None:
        self.act()


def drive(number: int, seed: int) -> int:
    """So many operations, most of them from within callbacks; gives the depth of the deepest."""
    retry = Retry(max_attempts=2, first_delay_s=0.0, longest_delay_s=0.0)
    config = HubConfig(
        queue=QueuePolicy(retry=retry, window_messages=8),
        topics={"unstored": TopicPolicy(durable=False)},
        retry=retry,
    )
    bench, deepest = Bench(config), Deepest()
    body = Busybody(bench, Random(seed), deepest, number)
    bench.hub.consumers_changed.append(body.consumers)
    for granted in (False, True):
        bench.consume("queue/q", body, window=Window(2, granted=granted))
        bench.subscribe("topic/t", body, window=Window(2, granted=granted))
        bench.subscribe("topic/#", body, window=Window(2, granted=granted), name=f"n{granted}")
        window = Window(1, granted=granted)
        bench.hub.provide(["service/s"], body, bench.now, peer=PEER, window=window)
    while body.left:
        body.act()
        bench.commit()
    for _ in range(3):
        bench.commit()
    assert not bench.hub.callbacks.failed
    return deepest.most


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_callback_runs_deeper_when_there_is_more_to_do(seed: int) -> None:
    few = max(drive(10, seed + 10 * each) for each in range(10))
    assert drive(5000, seed) <= few + 8


def test_calls_that_wait_for_a_provider_who_fails_all_at_once() -> None:
    depths = []
    for number in (10, 3000):
        bench, deepest = Bench(), Deepest()
        body = Busybody(bench, Random(1), deepest, 0)
        bench.hub.provide(["service/s"], body, bench.now, peer=PEER, window=1)
        caller = Caller()
        call(bench, caller, *[request()] * number)
        assert len(caller.answers) == number
        depths.append(deepest.most)
    assert depths[1] <= depths[0] + 2


@pytest.mark.slow
def test_a_subscriber_that_settles_at_once_catches_up_page_by_page() -> None:
    depths = []
    for number in (10, 20_000):
        bench, deepest = Bench(), Deepest()
        for _ in range(number // 10):
            bench.hub.produce([publish(b"x")] * 10, bench.now)
        bench.commit()
        body = Busybody(bench, Random(1), deepest, 0)
        subscriber = bench.subscribe("topic/t", body, start="earliest", window=4)
        assert not subscriber.is_lagging
        depths.append(deepest.most)
    assert depths[1] <= depths[0] + 2


@pytest.mark.slow
def test_leaving_with_much_under_way() -> None:
    """A consumer, a provider and a caller that leave with thousands of messages and calls."""
    depths = []
    for number in (10, 5000):
        bench, deepest = Bench(), Deepest()
        body = Busybody(bench, Random(1), deepest, 0)
        consumer = bench.consume("queue/q", Recorder(), window=number)
        bench.produce(*[send(b"x")] * number)
        bench.consume("queue/q", body, window=1)
        consumer.close(bench.now)
        assert not bench.hub.queue("queue/q").length
        first, second = Server(), Server()
        for server, window in ((first, number // 2), (second, 1)):
            names = ["service/s", "service/t"]
            bench.hub.provide(names, server, bench.now, peer=PEER, window=window)
        caller = Caller()
        call(bench, caller, *[request(), request("service/t")] * number)
        gone = bench.hub.call([request()] * number, bench.now, answered=caller, peer=PEER)
        bench.hub.cancel(gone, bench.now)
        for services in list(bench.hub.services._services.values()):
            for provider in list(services.providers):
                provider.close(bench.now)
        assert len(caller.answers) == 2 * number
        depths.append(deepest.most)
    assert depths[1] <= depths[0] + 2


def test_many_who_step_aside_for_another() -> None:
    """Who is told of a change of consumers may cause the next, for as many as there are."""
    bench, deepest, attached = Bench(), Deepest(), list[Attachment]()

    def step_aside(_queue: object) -> None:
        deepest.look()
        if attached:
            attached.pop().close(bench.now)

    attached += [bench.consume("queue/q", Recorder()) for _ in range(500)]
    bench.hub.consumers_changed.append(step_aside)
    bench.consume("queue/q", Recorder())
    assert not attached
    assert deepest.most < 100


def test_a_failed_group_is_told_to_all_who_wait() -> None:
    bench, errors = Bench(), list[StoreError | None]()
    for _ in range(3):
        receipt = bench.hub.produce([send(b"a")], bench.now)
        receipt.add_done_callback(lambda done: errors.append(done.error))  # type: ignore[arg-type]
    bench.disk.room_bytes = 0
    bench.commit()
    assert len(errors) == 3 and all(errors)


def test_a_service_without_a_number_left_for_its_journal_is_called_all_the_same() -> None:
    bench, server, caller = Bench(), Server(), Caller()
    provider = bench.hub.provide(["service/s"], server, bench.now, peer=PEER)
    bench.store.limits = StoreLimits(destinations=0)
    call(bench, caller, *[request()] * 2)
    for each in server.requests:
        provider.answer(each.id, Envelope(destination="", kind="response"), bench.now)
    assert [type(each) for each in caller.answers] == [Envelope, Envelope]
    assert [type(each) for each in bench.hub.reports] == [DestinationFull]


def test_each_holder_has_a_share_of_the_watchers() -> None:
    bench = Bench()
    watched = bench.hub.watched
    watched.share.configure(8, 0.25)
    called: list[tuple[int, str]] = []

    def note(identifier: int, error: str) -> None:
        called.append((identifier, error))

    for identifier in (1, 2):
        watched.add(identifier, note, "mallory")
    with pytest.raises(QuotaExceeded):
        watched.add(3, note, "mallory")
    watched.add(4, note, "anna")
    # What is done with makes room.
    watched.notify([1, 4])
    watched.add(3, note, "mallory")
    assert watched.pop(5) is None
    taken = watched.pop(2)
    assert taken is not None
    watched.put_back(2, taken)
    assert called == [(1, ""), (4, "")]
    assert watched.share.total == 2
