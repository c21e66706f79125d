"""Attacks with what one peer may create: work per message must not grow with it.

Each takes a `size`, the number of things that it creates, and is sent to a hub without users, where
nothing but the hub's own structures and limits is between a peer and the others.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pyarrow as pa

from crosswire.bond import hub_module, marshal
from crosswire.pipeline.connector.address import HubAddress
from crosswire.web.contract import ARROW, JSON
from crosswire.wire.emp.events import RequestReceived
from crosswire.wire.emqp.states import State
from crosswire.wire.epoxy.events import EventReceived
from tests.adversary.harness import PATIENCE_S
from tests.adversary.measured import (
    ATTACKER_TOKEN,
    OBSERVER_TOKEN,
    Attack,
    MeasuredPeer,
    MeasuredTarget,
    measured_hub,
)

encode = msgspec.json.encode

WAVES = 5
"""An attack that is over at once is repeated, or the neighbour would ping too few times."""
AT_ONCE = 10_000
"""Messages that one request may settle, refuse or extend."""
PER_CONNECTION = 1000
"""Subscriptions that one connection may have."""


def request(peer: MeasuredPeer, op: str, **data: object) -> None:
    peer.connection.send_request(op, encode(data))


def connect(stack: ExitStack, target: MeasuredTarget, count: int) -> list[MeasuredPeer]:
    return [stack.enter_context(target.peer()) for _ in range(count)]


def subscribe(
    peers: list[MeasuredPeer], size: int, **options: object
) -> Iterator[tuple[MeasuredPeer, dict[str, object]]]:
    """Spread `size` subscriptions over connections; the caller completes each request."""
    for number in range(size):
        yield peers[number // PER_CONNECTION], {"window": 1, **options}


def patterns(size: int, levels: int) -> Attack:
    """Patterns that all match one topic, each another mix of names and `+`, and publications to
    it, each after a change of subscriptions."""
    chance = random.Random(1)
    topic = "/".join(["a"] * levels)
    mixes = {"/".join(chance.choices("a+", k=levels)) for _ in range(size)}

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peers = connect(stack, target, -(-size // PER_CONNECTION) + 1)
            for (peer, options), mix in zip(subscribe(peers, size), sorted(mixes), strict=False):
                request(peer, "$subscribe", destination=f"topic/{mix}", **options)
            for peer in peers[:-1]:
                peer.answers(1)
            yield
            last = peers[-1]
            for number in range(1, 21):
                request(last, "$subscribe", destination=f"topic/other/{number}")
                request(last, "$publish", destination=f"topic/{topic}", text="x")
                last.answers(2)

    return attack


def filtered(size: int) -> Attack:
    """Consumers of one queue with filters of 100 terms, of which only the last doesn't hold."""
    terms = ";".join(f"p{number}=N{number}" for number in range(99))
    properties = {f"p{number}": number for number in range(99)}

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peers = connect(stack, target, 2)
            for number in range(size):
                filter_text = f"{terms};last=N{number}"
                destination = "queue/filtered"
                request(peers[0], "$subscribe", destination=destination, filter=filter_text)
            peers[0].answers(size)
            for _ in range(1000):
                request(
                    peers[1],
                    "$publish",
                    destination="queue/filtered",
                    text="x",
                    properties=properties,
                )
            data = peers[1].bytes_to_send()
            yield
            peers[1].send(data)
            peers[1].answers(1000)

    return attack


def prefixes(size: int) -> Attack:
    """SUB sockets with prefixes of all lengths, and topics that match none of them."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peers = [stack.enter_context(target.emqp_peer("subscriber")) for _ in range(8)]
            for index, peer in enumerate(peers):
                for number in range(size):
                    peer.connection.send_subscribe(f"{'x' * (number % 60)}{index}{number}")
            wanted = [peer.bytes_to_send() for peer in peers]
            publisher = connect(stack, target, 1)[0]
            yield
            for peer, data in zip(peers, wanted, strict=True):
                peer.send(data)
            for number in range(100):
                peers[0].connection.send_subscribe(f"another{number}")
                peers[0].send()
                request(publisher, "$publish", destination=f"topic/{'x' * 60}{number}", text="x")
                publisher.answers(1)

    return attack


def unknown_queues(size: int) -> Attack:
    """eMQP requests for queues that nobody consumes, and a worker of the default queue."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            client = stack.enter_context(target.emqp_peer("client"))
            for number in range(size):
                client.connection.send_request(f"unknown{number}", "", b"x")
            data = client.bytes_to_send()
            worker = stack.enter_context(target.emqp_peer("worker", queues=((10, "default"),)))
            worker.until(lambda: worker.connection.state is State.REGISTERED)
            yield
            client.send(data)
            for _ in range(size // 10):
                for _ in range(10):
                    worker.connection.send_ready()
                worker.send()
            worker.answers(size)

    return attack


def waiting_calls(size: int) -> Attack:
    """Calls of a service whose provider answers none, by callers that leave."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            providers = connect(stack, target, WAVES)
            for number, provider in enumerate(providers):
                request(provider, "$serve", services=[f"lazy{number}"])
                provider.answers(1)
            callers = [[target.epoxy_peer() for _ in range(9)] for _ in providers]
            calls = []
            for number, wave in enumerate(callers):
                for caller in wave:
                    for _ in range(size // 9):
                        caller.connection.send_request(f"lazy{number}", "m", b"CB\x01\x00\x00")
                calls.append([caller.bytes_to_send() for caller in wave])
            yield
            for provider, wave, each in zip(providers, callers, calls, strict=True):
                for caller, data in zip(wave, each, strict=True):
                    caller.send(data)
                provider.answers(200)
                for caller in wave:
                    caller.socket.close()
                request(provider, "$echo")
                provider.answers(1)

    return attack


def named(size: int) -> Attack:
    """Named subscriptions to one topic, all of which get what is published."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peers = connect(stack, target, -(-size // PER_CONNECTION) + 1)
            for number, (peer, options) in enumerate(
                subscribe(peers, size, destination="topic/named")
            ):
                request(peer, "$subscribe", name=f"named{number}", **options)
            for peer in peers[:-1]:
                peer.answers(min(PER_CONNECTION, size))
            for _ in range(200):
                request(peers[-1], "$publish", destination="topic/named", text="x")
            data = peers[-1].bytes_to_send()
            yield
            peers[-1].send(data)
            peers[-1].answers(200)

    return attack


def schedules(size: int) -> Attack:
    """Schedules with the shortest interval."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            for number in range(size):
                request(
                    peer, "$schedule", destination=f"queue/often{number % 10}", text="x",
                    interval_s=0.1, run_count=10,
                )  # fmt: skip
            yield
            peer.send()
            peer.answers(size)

    return attack


def burst(size: int, op: str, **data: object) -> Attack:
    """Many small requests in one write."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(peer, op, **data)
            burst = peer.bytes_to_send()
            yield
            peer.send(burst)
            peer.answers(size)

    return attack


def backlog(size: int) -> Attack:
    """Consumers with the largest window that take a long queue, and leave with all of it."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            producer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(producer, "$publish", destination="queue/long", text="x")
            producer.answers(size)
            yield
            for _ in range(3):
                with target.peer() as consumer:
                    request(consumer, "$subscribe", destination="queue/long", window=65_535)
                    consumer.answers(size)

    return attack


def multicast(size: int) -> Attack:
    """A Relink message to as many channels as the protocol has."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = stack.enter_context(target.relink_peer("queue/multicast", connector_id_size=2))
            peer.connection.send_multicast(list(range(size)), b"x")
            data = peer.bytes_to_send()
            yield
            peer.send(data)
            # Each channel is acknowledged when its message is stored.
            peer.answers(size)

    return attack


def large(size: int, count: int) -> Attack:
    """Publications of `size` bytes from several connections at once."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peers = connect(stack, target, count)
            for peer in peers:
                request(peer, "$publish", destination="queue/large", text="x" * size)
            data = [peer.bytes_to_send() for peer in peers]
            yield
            # All but the end of each, so that all of them are complete at the same moment.
            for peer, each in zip(peers, data, strict=True):
                peer.send(each[:-1])
            for peer in peers:
                peer.send(b"}")
            for peer in peers:
                peer.answers(1)

    return attack


LARGEST_MIB = {"large-4": 4, "large-16": 16}
"""The size of the frames of attacks with larger ones than a MiB."""


def inform(size: int) -> Attack:
    """Workers that register for queues that don't exist yet, and leave."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        yield
        for number in range(WAVES):
            queues = tuple((10, f"new{number}-{each}") for each in range(size))
            with target.emqp_peer("worker", queues=queues) as worker:
                worker.until(lambda: worker.connection.state is State.REGISTERED)

    return attack


def listing(size: int, count: int = 200) -> Attack:
    """Requests whose answers are long."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            *providers, client = connect(stack, target, size // PER_CONNECTION + 1)
            for index, provider in enumerate(providers):
                names = [f"service{index}-{number}" for number in range(PER_CONNECTION)]
                request(provider, "$serve", services=names)
                provider.answers(1)
            for _ in range(count):
                request(client, "$list_ops")
            data = client.bytes_to_send()
            yield
            client.send(data)
            client.answers(count)

    return attack


def fan_out(size: int, count: int) -> Attack:
    """A publication of `size` bytes to as many subscriptions of one connection."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            publisher, subscriber = connect(stack, target, 2)
            for _ in range(count):
                request(subscriber, "$subscribe", destination="topic/fan", window=1)
            subscriber.answers(count)
            request(publisher, "$publish", destination="topic/fan", text="x" * size)
            data = publisher.bytes_to_send()
            yield
            publisher.send(data)
            publisher.answers(1)
            subscriber.answers(count)

    return attack


def many_queues(size: int) -> Attack:
    """Publications to as many queues, twice: new ones, then those that there are."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            for number in range(size):
                request(peer, "$publish", destination=f"queue/many{number}", text="x")
            first = peer.bytes_to_send()
            for number in range(size):
                request(peer, "$publish", destination=f"queue/many{number}", text="x")
            second = peer.bytes_to_send()
            yield
            for data in (first, second):
                peer.send(data)
                peer.answers(size)

    return attack


def many_topics(size: int, count: int) -> Attack:
    """Patterns over as many topics, each subscribed to from the beginning, an id or a time, with a
    name and without, while topics are added."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            for number in range(size):
                request(peer, "$publish", destination=f"topic/many/{number}/x", text="x")
            peer.answers(size)
            run = token_hex(4)
            yield
            for number in range(count):
                start = ("earliest", 1, "2020-01-01T00:00:00Z")[number // 8 % 3]
                options: dict[str, object] = {"from": start, "window": 1}
                if number % 2:
                    options["name"] = f"{run}-{number}"
                pattern = ("topic/#", f"topic/+/{number}/+", "topic/many/+/y", "topic/+/+/x")
                request(peer, "$subscribe", destination=pattern[number // 2 % 4], **options)
                request(peer, "$publish", destination=f"topic/more/{run}/{number}", text="x")
            peer.send()
            peer.answers(2 * count)

    return attack


def held(target: MeasuredTarget, stack: ExitStack, size: int, queue: str) -> tuple[Any, list[int]]:
    """A consumer that holds `size` messages, and their ids."""
    producer, consumer = connect(stack, target, 2)
    for _ in range(size):
        request(producer, "$publish", destination=queue, text="x")
    producer.answers(size)
    request(consumer, "$subscribe", destination=queue, window=65_535)
    consumer.until(lambda: len(consumer.events) > size)
    deliveries = [each for each in consumer.events if isinstance(each, RequestReceived)]
    consumer.events.clear()
    return consumer, [msgspec.json.decode(each.data)["id"] for each in deliveries]


def leases(size: int) -> Attack:
    """A consumer whose messages are all to be settled by the same moment, and are not."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            consumer, ids = held(target, stack, size, "queue/leases")
            yield
            for start in range(0, size, AT_ONCE):
                part = ids[start : start + AT_ONCE]
                request(consumer, "$extend", subscription=1, ids=part, lease_s=0.2)
            consumer.send()
            # All of them are delivered to it again.
            consumer.answers(size)

    return attack


def settled(size: int, *, refused: bool) -> Attack:
    """A consumer that settles, or refuses, all that it holds by as few requests as possible."""
    queue = "queue/refused" if refused else "queue/settled"
    settlement = hub_module().struct("crosswire.Settlement")
    subscription = hub_module().struct("crosswire.Subscription")

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            producer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(producer, "$publish", destination=queue, text="x")
            producer.answers(size)
            peer = stack.enter_context(target.epoxy_peer())
            asked = subscription.python_class(destination=queue, window=65_535)
            peer.connection.send_request(
                "crosswire.Hub", "Subscribe", marshal.marshal(asked, subscription)
            )
            peer.until(lambda: len(peer.events) > size)
            given = [each for each in peer.events if isinstance(each, EventReceived)]
            peer.events.clear()
            delivery = hub_module().struct("crosswire.Delivery")
            first = marshal.unmarshal(given[0].payload, delivery)
            ids = [marshal.unmarshal(each.payload, delivery).id for each in given]
            for start in range(0, size, AT_ONCE):
                done = settlement.python_class(
                    subscription=first.subscription,
                    ids=ids[start : start + AT_ONCE],
                    refused=refused,
                    reason="no",
                )
                data = marshal.marshal(done, settlement)
                peer.connection.send_request("crosswire.Hub", "Settle", data)
            data = peer.bytes_to_send()
            yield
            peer.send(data)
            peer.answers(size // AT_ONCE)

    return attack


def posted(size: int) -> Attack:
    """One request over HTTP with as many messages, each of which creates a queue until the
    attacker has its share of them."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        # An attack may be measured more than once, and these are to be new each time.
        run = token_hex(4)
        messages = [{"destination": f"queue/{run}-{n}", "text": "x"} for n in range(size)]
        hub = HubAddress(target.url, ATTACKER_TOKEN, patience_s=PATIENCE_S)
        body = encode({"messages": messages})
        yield
        answer = hub.post_bytes("/v1/messages", body, JSON, repeatable=False)
        assert len(answer["ids"]) == size

    return attack


def staged(size: int) -> Attack:
    """A batch over HTTP to as many queues that don't exist."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        # An attack may be measured more than once, and these are to be new each time.
        query = f"attacker-{token_hex(4)}"
        rows = {
            "destination": [f"queue/{query}-{number}" for number in range(size)],
            "value": ["x"] * size,
        }
        batch = pa.record_batch(rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        hub = HubAddress(target.url, ATTACKER_TOKEN, patience_s=PATIENCE_S)
        yield
        for number in range(2):
            path = f"/v1/ingest/{query}/{number}"
            body = bytes(sink.getvalue())
            hub.post_bytes(f"{path}/attempts/a", body, ARROW, {"part": 0, "run": ""})
            named = {"attempt": "a", "parts": 1, "messages": size}
            hub.post(f"{path}/commit", {"attempts": [named], "run": ""})

    return attack


def purged(size: int) -> Attack:
    """A long queue that is removed by one request of an administrator."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            producer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(producer, "$publish", destination="queue/purged", text="x")
            producer.answers(size)
            hub = HubAddress(target.url, OBSERVER_TOKEN, patience_s=PATIENCE_S)
            yield
            hub.post("/v1/queues/purged/purge", {})

    return attack


def late_answers(size: int) -> Attack:
    """Calls that nobody answers, all of which time out at the same moment."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            provider = connect(stack, target, 1)[0]
            request(provider, "$serve", services=["late"])
            provider.answers(1)
            client = stack.enter_context(target.emqp_peer("client"))
            for _ in range(size):
                client.connection.send_request("late", "reply-requested,timeout:1", b"x")
            data = client.bytes_to_send()
            yield
            client.send(data)
            client.answers(size)

    return attack


def polite(seconds: float) -> Attack:
    """No attack: a peer that keeps the hub busy for a while, with nothing but requests that are
    answered at once."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            yield
            ends_at = time.perf_counter() + seconds
            while time.perf_counter() < ends_at:
                for _ in range(5_000):
                    request(peer, "$echo")
                peer.send()
                peer.answers(5_000)

    return attack


SHORT: dict[str, Attack] = {
    "patterns": patterns(2_000, 16),
    "filtered": filtered(49),
    "prefixes": prefixes(5_000),
    "unknown-queues": unknown_queues(1_000),
    "waiting-calls": waiting_calls(9_000),
    "named": named(300),
    "schedules": schedules(500),
    "burst-publish": burst(20_000, "$publish", destination="queue/burst", text="x"),
    "burst-invalid": burst(20_000, "$publish", nothing=1),
    "listing": listing(1_000),
    "listing-many": listing(10_000, 10),
    "fan-out": fan_out(1 << 19, 100),
    "backlog": backlog(5_000),
    "many-queues": many_queues(2_000),
    "many-topics": many_topics(2_000, 40),
    "leases": leases(10_000),
    "settled": settled(10_000, refused=False),
    "refused": settled(10_000, refused=True),
    "posted": posted(2_000),
    "staged": staged(2_000),
    "purged": purged(10_000),
    "late-answers": late_answers(2_000),
    "inform": inform(1_000),
    "multicast": multicast(8_192),
    "large": large(1 << 19, 16),
    "large-4": large(4 << 20, 4),
}
"""What the tests run: a second or so each."""

FULL: dict[str, Attack] = {
    "patterns": patterns(10_000, 16),
    "filtered": filtered(200),
    "prefixes": prefixes(25_000),
    "unknown-queues": unknown_queues(8_000),
    "waiting-calls": waiting_calls(9_000),
    "named": named(1_000),
    "schedules": schedules(3_000),
    "burst-publish": burst(50_000, "$publish", destination="queue/burst", text="x"),
    "burst-invalid": burst(50_000, "$publish", nothing=1),
    "listing": listing(1_000),
    "listing-many": listing(20_000, 20),
    "fan-out": fan_out(1 << 20, 200),
    "backlog": backlog(20_000),
    "many-queues": many_queues(50_000),
    "many-topics": many_topics(20_000, 40),
    "leases": leases(60_000),
    "settled": settled(60_000, refused=False),
    "refused": settled(60_000, refused=True),
    "posted": posted(50_000),
    "staged": staged(10_000),
    "purged": purged(50_000),
    "late-answers": late_answers(9_000),
    "inform": inform(1_000),
    "multicast": multicast(65_536),
    "large-1": large(1 << 20, 16),
    "large-16": large(16 << 20, 4),
}
"""What `python -m tests.adversary.growth` measures."""


def main(attacks: dict[str, Attack], names: list[str]) -> None:
    """Print what each attack costs, each on a hub of its own."""
    for name in names or list(attacks):
        with TemporaryDirectory() as folder, measured_hub(Path(folder)) as measured:
            cost = measured.measure(attacks[name])
            print(f"{name:24}", cost, flush=True)
            print(f"{'  polite':24}", measured.measure(polite(cost.seconds)), flush=True)


if __name__ == "__main__":
    main(FULL, sys.argv[1:])
