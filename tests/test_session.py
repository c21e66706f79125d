"""Sessions that share the event loop's thread: long reads in parts, ends after them, large frames
in turns of their own. Real sockets, and a clock that the owner moves."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from crosswire.hub import turns as turns_module
from crosswire.hub.turns import Turns
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived
from crosswire.wire.emp.frames import Bye, Hello, Request, serialize, serialize_call

MS = 0.001
MIB = 1 << 20


@pytest.fixture(autouse=True)
def usual_turns(long_turns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "TURN_S", 8 * MS)


class World:
    """The thread's time, and what was done in which turn."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.number = 0
        self.turns = Turns(clock=lambda: self.now_s, thread_clock=lambda: self.now_s)
        self.turns.on_turn = self._on_turn
        self.log: list[tuple[int, str, object]] = []

    def _on_turn(self, _busy_s: float) -> None:
        self.number += 1

    def of(self, name: str) -> list[tuple[int, object]]:
        return [(turn, what) for turn, who, what in self.log if who == name]


class Owner:
    """Every request takes a millisecond, and is not answered."""

    session: Session

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.batches: list[int] = []
        self.is_dispatching = False
        self.end_s = 0.0

    def handle_events(self, events: list[Event]) -> None:
        world = self._world
        self.batches.append(len(events))
        for event in events:
            if isinstance(event, RequestReceived):
                world.now_s += MS
                if self.is_dispatching:
                    world.turns.dispatch_s += MS
                world.log.append((world.number, self._name, event.id))
            elif isinstance(event, ConnectionClosed | ConnectionFailed):
                world.now_s += self.end_s
                world.log.append((world.number, self._name, "end"))

    def handle_drain(self) -> None:
        pass


async def connect(world: World, name: str) -> socket.socket:
    """A peer after the handshake, as a blocking socket that is written to without a reader."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
    await asyncio.get_running_loop().create_connection(
        lambda: Session(
            lambda now: EmpConnection("server", now), Owner(world, name), turns=world.turns
        ),
        sock=ours,
    )
    theirs.sendall(serialize(Hello(1)))
    theirs.setblocking(False)
    return theirs


async def connect_tcp(world: World, name: str) -> socket.socket:
    """A peer before its handshake: only TCP knows resets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    await asyncio.get_running_loop().create_connection(
        lambda: Session(
            lambda now: EmpConnection("server", now), Owner(world, name), turns=world.turns
        ),
        sock=accepted,
    )
    return peer


def requests(count: int, size: int = 0) -> bytes:
    data = b'{"a":"%b"}' % (b"x" * size)
    return b"".join(
        serialize(Request(number, serialize_call("op", data))) for number in range(1, count + 1)
    )


async def until(world: World, name: str, last: object) -> None:
    async with asyncio.timeout(20):
        while not world.of(name) or world.of(name)[-1][1] != last:
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_dispatching", [False, True])
async def test_batches_become_small_for_what_they_cost_themselves(is_dispatching: bool) -> None:
    """What the hub hands out because of them it divides itself."""
    world = World()
    owner = Owner(world, "busy")
    owner.is_dispatching = is_dispatching
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_connection(
            lambda: Session(lambda now: EmpConnection("server", now), owner, turns=world.turns),
            sock=ours,
        )
        theirs.sendall(serialize(Hello(1)) + requests(1000))
        await until(world, "busy", 1000)
    assert (max(owner.batches[-10:]) > 50) is is_dispatching


async def test_a_long_read_is_processed_in_parts_and_others_are_served_between() -> None:
    world = World()
    busy, seldom = await connect(world, "busy"), await connect(world, "seldom")
    await asyncio.sleep(0)
    busy.send(requests(1000))
    await asyncio.sleep(0)
    seldom.send(requests(1))
    await until(world, "busy", 1000)
    # In order and completely; a turn has what fits into it, and the parts before that are small.
    assert [what for _, what in world.of("busy")] == list(range(1, 1001))
    each: dict[int, int] = {}
    for turn, _ in world.of("busy"):
        each[turn] = each.get(turn, 0) + 1
    assert max(list(each.values())[5:]) <= 16
    position = [who for _, who, _ in world.log].index("seldom")
    assert position < 200
    busy.close()
    seldom.close()


async def test_the_end_of_the_peer_s_half_waits_for_what_was_read_before() -> None:
    world = World()
    peer = await connect(world, "peer")
    peer.send(requests(500))
    peer.shutdown(socket.SHUT_WR)
    await until(world, "peer", "end")
    found = world.of("peer")
    assert [what for _, what in found] == [*range(1, 501), "end"]
    assert found[-1][0] - found[0][0] > 20, "all at once"
    peer.close()


async def test_a_broken_connection_ends_after_what_was_read_before() -> None:
    world = World()
    peer = await connect_tcp(world, "peer")
    peer.sendall(serialize(Hello(1)) + requests(500))
    async with asyncio.timeout(20):
        while not world.of("peer"):
            await asyncio.sleep(0)
    # A reset: the kernel discards what was not read, the hub must not discard what was.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    await until(world, "peer", "end")
    found = world.of("peer")
    assert [what for _, what in found] == [*range(1, 501), "end"]


async def test_a_peer_that_sends_on_after_the_end_is_not_reset() -> None:
    """A reset would discard what it has not read yet."""
    world = World()
    peer = await connect_tcp(world, "peer")
    # EMP answers a bye by closing: there is nothing to write in the turn that ends the connection.
    peer.sendall(serialize(Hello(1)) + serialize(Bye()))
    await until(world, "peer", "end")
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    for _ in range(3):
        await loop.sock_sendall(peer, requests(1))
    received = b""
    async with asyncio.timeout(10):
        while data := await loop.sock_recv(peer, 4096):
            received += data
    assert received == serialize(Hello(1))
    peer.close()


async def test_peers_that_leave_at_once_end_in_several_turns() -> None:
    world = World()
    loop = asyncio.get_running_loop()
    peers = []
    for number in range(40):
        ours, theirs = socket.socketpair()
        owner = Owner(world, f"peer{number}")
        owner.end_s = MS
        await loop.create_connection(
            lambda owner=owner: Session(  # type: ignore[misc]
                lambda now: EmpConnection("server", now), owner, turns=world.turns
            ),
            sock=ours,
        )
        peers.append(theirs)
    for peer in peers:
        peer.close()
    for number in range(40):
        await until(world, f"peer{number}", "end")
    turns = [turn for turn, _, what in world.log if what == "end"]
    # A turn has 8 ms, and one more end that begins within them.
    assert max(turns.count(turn) for turn in turns) <= 10


async def test_large_frames_take_turns_of_their_own() -> None:
    world = World()
    peers = [await connect(world, f"large{number}") for number in range(3)]
    frames = [requests(1, 2 * MIB) for _ in peers]
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        # All but the last byte, so that all are complete at the same moment.
        await asyncio.gather(
            *(loop.sock_sendall(peer, data[:-1]) for peer, data in zip(peers, frames, strict=True))
        )
    small = await connect(world, "small")
    for peer in (*peers, small):
        peer.send(b"}" if peer is not small else requests(1))
    for name in ("large0", "large1", "large2", "small"):
        await until(world, name, 1)
    turns = sorted(turn for turn, who, _ in world.log if who != "small")
    assert len(set(turns)) == 3, "two large messages in one turn"
    # Who needs little is before the second of them.
    assert world.of("small")[0][0] <= turns[1]
    for peer in (*peers, small):
        peer.close()


async def test_what_a_part_of_a_long_frame_holds_is_counted() -> None:
    """The parts after the first come without a read, and to a session that held nothing."""

    class InParts(EmpConnection):
        def receive_data(self, data: bytes, now: float) -> None:
            self._later = data
            self.has_backlog = True

        def catch_up(self, now: float) -> None:
            self.has_backlog = False
            super().receive_data(self._later, now)

    world, (ours, theirs) = World(), socket.socketpair()
    _, session = await asyncio.get_running_loop().create_connection(
        lambda: Session(lambda now: InParts("server", now), Owner(world, "a"), turns=world.turns),
        sock=ours,
    )
    with theirs:
        theirs.sendall(serialize(Hello(1)) + requests(1, 2000))
        await until(world, "a", 1)
        assert session._held_bytes > 2000
        session.abort()
