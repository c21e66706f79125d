"""Memory that one peer makes the hub hold: it is bounded in bytes, and given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from crosswire.cli.hub import Api
from crosswire.errors import RequestFailed
from crosswire.wire.contract import ConnectionFailed
from crosswire.wire.epoxy.comm import marshal_credentials
from crosswire.wire.micromsg2.frames import serialize_message
from tests.adversary.harness import (
    MEMORY_BYTES,
    PATIENCE_S,
    TOKEN,
    USERS,
    Attacker,
    Target,
    running,
)

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
LIMIT_BYTES = 256 * MIB
EMPTY = b"CB\x01\x00\x00"
"""A struct of Bond without fields, in Compact Binary."""
SETTINGS = f"""
[limits]
memory_bytes = {LIMIT_BYTES}
{USERS}
[[users]]
name = "anna"
token = "the-secret-of-anna"
produce = ["queue/anna"]
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A hub with little memory, in which a user may hold half of it."""
    with running(tmp_path_factory.mktemp("small"), SETTINGS, "the-secret-of-anna") as target:
        yield target


def kept_bytes(target: Target, before: int) -> int:
    """What the hub still has, when the allocator had a moment to give it back."""
    deadline = time.monotonic() + 10.0
    while (kept := target.resident_bytes() - before) > MEMORY_BYTES:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return kept


def test_unfinished_frames_of_peers_without_credentials_are_refused(small: Target) -> None:
    """Twelve peers that each begin a message of 64 MiB: refused by the size in its header."""
    before = small.resident_bytes()
    with ExitStack() as stack:
        peers = [stack.enter_context(small.emp()) for _ in range(12)]

        def attack() -> None:
            for peer in peers:
                peer.send_and_finish((64 * MIB).to_bytes(4) + bytes(MIB))

        cost = small.cost_of(attack)
    assert cost.worst_s < 1.0
    assert kept_bytes(small, before) < MEMORY_BYTES


def epoxy_user(target: Target) -> Attacker:
    """After a call with credentials: this method is open to all users."""
    peer = target.epoxy()
    peer.events.clear()
    credentials = marshal_credentials(TOKEN)
    peer.connection.send_request("crosswire.Hub", "ListServices", EMPTY, layer_data=credentials)
    peer.until(lambda: bool(peer.events))
    return peer


def epoxy_message(size_bytes: int) -> bytes:
    """A request, without the end of its payload."""
    headers = b"\x06\x00\x00" + (99).to_bytes(8, "little") + b"\x10\x01\x00\x01\x00\x00\x00"
    headers += b"\x09\x02\x00\x01s\x09\x03\x00\x01m\x00"
    head = b"\x02\x00HR" + len(headers).to_bytes(4, "little") + headers
    return head + b"PD" + size_bytes.to_bytes(4, "little") + bytes(size_bytes - MIB)


def micromsg2_message(size_bytes: int) -> bytes:
    """Frames that are all continued."""
    part = bytes(1_000_000)
    frames = []
    for number in range(1, size_bytes // len(part)):
        destination = b"queue/mallory/q" if number == 1 else b""
        frame = bytearray(b"".join(serialize_message(number, destination, b"", part)))
        frame[0] |= 16
        frames.append(bytes(frame))
    return b"".join(frames)


HOLDERS: dict[str, tuple[Callable[[Target], Attacker], Callable[[], bytes]]] = {
    "emp": (lambda target: target.emp(TOKEN), lambda: (64 * MIB).to_bytes(4) + bytes(60 * MIB)),
    "epoxy": (epoxy_user, lambda: epoxy_message(31 * MIB)),
    "micromsg2": (lambda target: target.micromsg2(TOKEN), lambda: micromsg2_message(60 * MIB)),
}


@pytest.mark.parametrize("protocol", HOLDERS)
def test_the_largest_holder_is_disconnected_and_the_memory_is_given_back(
    small: Target, protocol: str
) -> None:
    """A user with large unfinished messages on twelve connections: all that it may hold is its
    share; one connection after the other is ended, with the protocol's goodbye, and nobody
    else's."""
    connect, message = HOLDERS[protocol]
    before = small.resident_bytes()
    part = message()
    with ExitStack() as stack, small.neighbour() as neighbour:
        peers = [stack.enter_context(connect(small)) for _ in range(12)]
        for peer in peers:
            peer.socket.setblocking(False)
        unsent = dict.fromkeys(peers, part)
        ended: list[ConnectionFailed] = []
        highest = 0
        deadline = time.monotonic() + PATIENCE_S
        while not ended:
            assert time.monotonic() < deadline, "nobody was disconnected"
            for peer in list(unsent):
                try:
                    unsent[peer] = unsent[peer][peer.socket.send(unsent[peer][: 4 * MIB]) :]
                except BlockingIOError:
                    pass
                except ConnectionError:
                    del unsent[peer]
            for peer in peers:
                try:
                    peer.connection.receive_data(peer.socket.recv(MIB), 0.0)
                except OSError:
                    continue
                ended += [e for e in peer.connection.events() if isinstance(e, ConnectionFailed)]
            highest = max(highest, small.resident_bytes() - before)
            time.sleep(0.01)
    assert "short of memory" in str(ended[0].error)
    assert highest < LIMIT_BYTES
    assert neighbour.worst_s < 2.0
    assert kept_bytes(small, before) < MEMORY_BYTES


def test_refused_destinations_are_not_remembered(small: Target) -> None:
    """300 calls of services with names of 1 MiB, each another."""
    before = small.resident_bytes()

    def attack() -> None:
        with small.emp(TOKEN) as peer:
            for number in range(300):
                peer.connection.send_request(f"{number}" + "x" * MIB, b"{}")
                peer.send()
            peer.finish()

    small.cost_of(attack)
    assert kept_bytes(small, before) < MEMORY_BYTES


def test_a_peer_that_does_not_read_its_answers_is_bounded(small: Target) -> None:
    before = small.resident_bytes()
    with small.emp(TOKEN) as peer:
        peer.socket.settimeout(1.0)
        data = b'{"a":"%b"}' % (b"x" * MIB)
        # The hub reads no more, or has disconnected.
        with pytest.raises(OSError, match=r"timed out|Broken pipe|reset"):
            for _ in range(400):
                peer.connection.send_request("$echo", data)
                peer.send()
        assert small.resident_bytes() - before < LIMIT_BYTES
    assert kept_bytes(small, before) < MEMORY_BYTES


def test_a_message_that_fits_is_not_harmed_by_the_budget(small: Target) -> None:
    """One polite user, and the largest message that EMP allows."""
    with small.emp(TOKEN) as peer:
        peer.events.clear()
        peer.connection.send_request("$echo", b'{"a":"%b"}' % (b"x" * (60 * MIB)))
        peer.until(lambda: bool(peer.events))
        assert peer.events[0].succeeded


def test_calls_that_outlive_their_connections_are_bounded(small: Target) -> None:
    """Calls whose answers go to a queue, of a service that answers none; the caller leaves, and
    comes again."""
    with small.emp(TOKEN) as provider:
        provider.events.clear()
        provider.connection.send_request("$serve", b'{"services":["mallory"]}')
        provider.until(lambda: bool(provider.events))
        reply = b"reply-to:Tqueue/mallory/answers;"

        def call_and_leave() -> None:
            with small.micromsg2(TOKEN) as caller, suppress(OSError):
                for number in range(1, 60):
                    frame = serialize_message(number, b"service/mallory", reply, bytes(MIB - 100))
                    caller.send(b"".join(frame))
                caller.finish()

        for _ in range(4):
            call_and_leave()
        # A user may have 128 MiB of calls, so more than that has been refused by now.
        before = small.resident_bytes()
        for _ in range(4):
            call_and_leave()
        assert small.resident_bytes() - before < 120 * MIB, "236 MiB were sent"


def test_large_bodies_of_one_user_are_read_one_after_the_other(small: Target) -> None:
    """What the hub makes of a body takes about ten times its size."""
    messages = [{"destination": "queue/mallory/q", "text": "x"}] * 40_000

    def post() -> bool:
        with suppress(RequestFailed):
            Api(small.url, TOKEN).post("/v1/messages", {"messages": messages})
            return True
        return False

    post()
    before = highest = small.resident_bytes()
    with ThreadPoolExecutor(12) as threads:
        posts = [threads.submit(post) for _ in range(12)]
        while not all(each.done() for each in posts):
            highest = max(highest, small.resident_bytes())
            time.sleep(0.02)
    assert any(each.result() for each in posts)
    assert highest - before < 200 * MIB
