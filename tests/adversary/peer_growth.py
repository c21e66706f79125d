"""Attacks with what a protocol lets a peer repeat: extensions, refusals, acknowledgements,
handshakes, heads and subscriptions."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from crosswire.bond import hub_module, marshal
from crosswire.wire.epoxy.events import EventReceived
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived
from crosswire.wire.micromsg2.extensions import Offer
from crosswire.wire.micromsg2.values import Extension
from tests.adversary.growth import AT_ONCE, connect, held, main, request
from tests.adversary.harness import PATIENCE_S
from tests.adversary.measured import (
    ATTACKER_TOKEN,
    REVOKED_TOKEN,
    Attack,
    MeasuredPeer,
    MeasuredTarget,
)

WINDOW = 32_767


def extended(size: int) -> Attack:
    """One message whose lease is extended as often as a request can name it, and not in order."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            consumer, ids = held(target, stack, 1, "queue/extended")
            yield
            for number in range(size):
                lease_s = 300.0 if number % 2 else 200.0
                same = ids * AT_ONCE
                request(consumer, "$extend", subscription=1, ids=same, lease_s=lease_s)
            consumer.send()
            consumer.answers(size)

    return attack


def quick_first(size: int) -> Attack:
    """Long frames that cost nothing, then, in one read, as many short ones that cost much."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            yield
            for _ in range(4):
                for _ in range(15):
                    peer.connection.send_request("$echo", b'{"a":"%b"}' % (b"x" * 250_000))
                    peer.send()
                    peer.answers(1)
                for _ in range(size):
                    request(peer, "$publish", nothing=1)
                peer.send()
                peer.answers(size)

    return attack


def long_reasons(size: int) -> Attack:
    """A consumer that refuses all that it holds, twice, with the longest reason."""
    settlement = hub_module().struct("crosswire.Settlement")
    subscription = hub_module().struct("crosswire.Subscription")
    delivery = hub_module().struct("crosswire.Delivery")

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            producer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(producer, "$publish", destination="queue/reasons", text="x")
            producer.answers(size)
            peer = stack.enter_context(target.epoxy_peer())
            asked = subscription.python_class(destination="queue/reasons", window=65_535)
            data = marshal.marshal(asked, subscription)
            peer.connection.send_request("crosswire.Hub", "Subscribe", data)
            peer.until(lambda: len(peer.events) > size)
            yield
            for _ in range(2):
                given = [each for each in peer.events if isinstance(each, EventReceived)]
                read = [marshal.unmarshal(each.payload, delivery) for each in given]
                peer.events.clear()
                for start in range(0, size, AT_ONCE):
                    done = settlement.python_class(
                        subscription=read[0].subscription,
                        ids=[each.id for each in read[start : start + AT_ONCE]],
                        refused=True,
                        reason="€" * 1000,
                    )
                    data = marshal.marshal(done, settlement)
                    peer.connection.send_request("crosswire.Hub", "Settle", data)
                peer.send()
                # Its answers, and all of them again.
                peer.until(lambda: len(peer.events) >= size + size // AT_ONCE)

    return attack


def micromsg2_peer(target: MeasuredTarget) -> MeasuredPeer:
    wanted = (
        Extension("pub-sub", {}),
        Extension("batch-ack", {"max-count": str(WINDOW)}),
        Extension("x-auth", {"token": ATTACKER_TOKEN}),
    )
    connection = MicroMsg2Connection("client", 0.0, offer=Offer(identity="a", required=wanted))
    return MeasuredPeer(target.port("micromsg2"), connection).ready()


def acknowledged_calls(size: int) -> Attack:
    """MicroMsg2 calls of a provider that answers none, and of services that nobody provides: their
    acknowledgements wait for answers."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            provider = connect(stack, target, 1)[0]
            request(provider, "$serve", services=["silent"])
            provider.answers(1)
            peer = stack.enter_context(micromsg2_peer(target))
            for number in range(size):
                name = "service/silent" if number % 4 == 0 else "service/nobody"
                peer.connection.send_message(name, b"x", {"reply-to": "reply/x"})
            data = peer.bytes_to_send()
            yield
            peer.send(data)
            peer.answers(size - size // 4)

    return attack


def single_acknowledgements(size: int) -> Attack:
    """A MicroMsg2 consumer that acknowledges each of its messages in a frame of its own."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            producer = connect(stack, target, 1)[0]
            for _ in range(size):
                request(producer, "$publish", destination="queue/acks", text="x")
            producer.answers(size)
            peer = stack.enter_context(micromsg2_peer(target))
            peer.connection.send_subscribe("queue/acks", window=WINDOW)
            got: list[Any] = peer.events
            peer.until(lambda: len(got) >= size)
            data = []
            for each in got:
                if isinstance(each, MessageReceived):
                    peer.connection.acknowledge(each.sequence)
                    data.append(peer.bytes_to_send())
            yield
            peer.send(b"".join(data))
            request(producer, "$echo")
            producer.answers(1)

    return attack


def filtered_subscriptions(size: int) -> Attack:
    """Subscriptions with the longest filters, each ended as soon as it is made."""
    filter_text = ";".join(f"p{number}=N{number}" for number in range(100))

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peer = connect(stack, target, 1)[0]
            yield
            for number in range(1, size + 1):
                request(peer, "$subscribe", destination="topic/churn", filter=filter_text)
                request(peer, "$unsubscribe", subscription=number)
            peer.send()
            peer.answers(2 * size)

    return attack


def first_flights(size: int) -> Attack:
    """TLS peers without credentials that send the first bytes of a handshake at the same moment."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with ExitStack() as stack:
            address = ("127.0.0.1", target.port("relink-tls"))
            peers = []
            for _ in range(size):
                peer = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
                outgoing = ssl.MemoryBIO()
                with contextlib.suppress(ssl.SSLWantReadError):
                    context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
                peers.append((peer, outgoing.read()))
            yield
            for peer, data in peers:
                peer.sendall(data)
            for peer, _ in peers:
                # The hub's answer; or nothing, where the oldest were closed for others.
                with contextlib.suppress(ConnectionResetError):
                    peer.recv(1)

    return attack


def second_flights(size: int, *, leave: bool = False) -> Attack:
    """TLS peers with a certificate that send the ends of their handshakes at the same moment, and
    may end what they send with it."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            address = ("127.0.0.1", target.port("relink-tls"))
            peers = []
            for _ in range(size):
                peer = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
                incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                tls = target.tls.wrap_bio(incoming, outgoing, server_hostname="localhost")
                while True:
                    try:
                        tls.do_handshake()
                    except ssl.SSLWantReadError:
                        peer.sendall(outgoing.read())
                        incoming.write(peer.recv(1 << 16))
                    else:
                        break
                peers.append((peer, outgoing.read()))
            yield
            for peer, data in peers:
                peer.sendall(data)
                if leave:
                    peer.shutdown(socket.SHUT_WR)
            for peer, _ in peers:
                # The tickets for another session, which end the handshake.
                with contextlib.suppress(ConnectionResetError):
                    peer.recv(1)

    return attack


def long_heads(size: int) -> Attack:
    """HTTP requests with as many fields as fit into one read, and after another request."""
    field = b"a:b\r\n" * 40_000
    start = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"

    def attack(target: MeasuredTarget) -> Iterator[None]:
        address = ("127.0.0.1", urlsplit(target.url).port)
        yield
        for number in range(size):
            with socket.create_connection(address, timeout=PATIENCE_S) as peer:
                before = start + b"\r\n" if number % 2 else b""
                # It is disconnected while it still sends.
                with contextlib.suppress(ConnectionError):
                    peer.sendall(before + start + field + b"\r\n")
                    while peer.recv(1 << 16):
                        pass

    return attack


def half_closed(size: int) -> Attack:
    """Sockets whose peers close their half at once, and read nothing."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        listeners = ("emp", "epoxy", "micromsg2", "emqp-clients", "relink-tls")
        yield
        with ExitStack() as stack:
            for number in range(size):
                address = ("127.0.0.1", target.port(listeners[number % len(listeners)]))
                peer = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
                peer.shutdown(socket.SHUT_WR)
                # Until the hub is done with it.
                if number % 50 == 0:
                    while peer.recv(1 << 16):
                        pass

    return attack


def revoked(size: int) -> Attack:
    """Peers with a subscription each, all of which lose their user by one reload."""

    def attack(target: MeasuredTarget) -> Iterator[None]:
        with ExitStack() as stack:
            peers = [stack.enter_context(target.peer(REVOKED_TOKEN)) for _ in range(size)]
            for number, peer in enumerate(peers):
                request(peer, "$subscribe", destination=f"queue/revoked{number % 10}")
                peer.send()
            for peer in peers:
                peer.answers(1)
            yield
            target.reload(revoked=True)
            for peer in peers:
                peer.until(lambda: False)
            target.reload(revoked=False)

    return attack


PEER_ATTACKS: dict[str, Attack] = {
    "extended": extended(20),
    "quick-first": quick_first(5_000),
    "long-reasons": long_reasons(10_000),
    "acknowledged-calls": acknowledged_calls(3_000),
    "single-acknowledgements": single_acknowledgements(10_000),
    "filtered-subscriptions": filtered_subscriptions(300),
    "first-flights": first_flights(300),
    "second-flights": second_flights(300),
    "last-flights": second_flights(300, leave=True),
    "long-heads": long_heads(20),
    "half-closed": half_closed(300),
}
"""What the tests run: a second or so each."""

FULL_PEER_ATTACKS: dict[str, Attack] = PEER_ATTACKS | {
    "single-acknowledgements": single_acknowledgements(32_000),
    "filtered-subscriptions": filtered_subscriptions(1_000),
    "first-flights": first_flights(600),
    "second-flights": second_flights(600),
    "last-flights": second_flights(600, leave=True),
    "half-closed": half_closed(600),
    "revoked": revoked(1_500),
}
"""What `python -m tests.adversary.peer_growth` measures. A reload has a turn of its own, whoever it
revokes: that one is no test."""


if __name__ == "__main__":
    main(FULL_PEER_ATTACKS, sys.argv[1:])
