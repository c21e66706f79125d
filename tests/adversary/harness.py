"""A hub in a process of its own, a neighbour that pings it, and attackers on blocking sockets.

The neighbour is an EMP peer that sends one `$echo` after another and records the worst round trip.
Machines that run the tests are loaded, so no time is compared with a constant alone: the same
number of bytes is sent politely in the same run, and an attack may not cost the neighbour much more
than that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from crosswire.wire.contract import Connection
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.frames import Hello, Request, serialize, serialize_call
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.extensions import Offer
from crosswire.wire.micromsg2.values import Extension
from tests.cli.conftest import RunningHub

TOKEN = "the-secret-of-mallory"
USERS = f"""
[[users]]
name = "mallory"
token = "{TOKEN}"
produce = ["queue/mallory/#", "topic/mallory/#"]
consume = ["queue/mallory/#", "topic/mallory/#"]
call = ["service/mallory/#"]
serve = ["service/mallory"]
"""
"""One user with rights to a few destinations; every other peer has none."""

PAUSE_S = 0.002
"""Between two pings."""
PATIENCE_S = 60.0
"""For an attack to end: what fails is reported by its measured time, not by this."""
LEAST_S = 0.1
"""A round trip that is accepted whatever a polite peer costs: the scheduler's share of it alone can
be tens of milliseconds on two loaded cores."""
ATTEMPTS = 3
TIMES = 4
"""How much worse than a polite peer of as many bytes an attack may be for the neighbour."""
MEMORY_BYTES = 64 * 1024 * 1024
"""What the hub may keep after an attack: the allocator returns freed memory late."""


class Neighbour:
    """Pings in a thread while the `with` block runs; `worst_s` is its longest round trip."""

    def __init__(self, port: int, token: str = "") -> None:
        self._port = port
        self._token = token
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")
        self._started = threading.Event()
        self.worst_s = 0.0
        self.pings = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.pings, "the neighbour was not served"

    def _run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S) as peer:
            hello = serialize(Hello(1))
            peer.sendall(hello)
            _read_exactly(peer, len(hello))
            if self._token:
                _ask(peer, 1, "$authenticate", b'{"token":"%b"}' % self._token.encode())
            while True:
                began = time.perf_counter()
                identifier = self.pings + 2
                try:
                    _ask(peer, identifier, "$echo", b'{"n":%d}' % identifier)
                except TimeoutError:
                    self._stop.set()
                self.pings += 1
                self.worst_s = max(self.worst_s, time.perf_counter() - began)
                self._started.set()
                # The ping that ran when the attack ended is finished before: it may be the worst.
                if self._stop.wait(PAUSE_S):
                    return


def _ask(peer: socket.socket, identifier: int, op: str, data: bytes) -> None:
    """Send a request and read its response."""
    peer.sendall(serialize(Request(identifier, serialize_call(op, data))))
    _read_exactly(peer, int.from_bytes(_read_exactly(peer, 4)))


def _read_exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        assert more, "the hub disconnected the neighbour"
        data += more
    return data


class Attacker:
    """One protocol's connection on a blocking socket."""

    def __init__(self, port: int, connection: Connection) -> None:
        self.connection: Any = connection
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.events: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, raw: bytes = b"") -> None:
        """What the connection has to send, then `raw` bytes."""
        data = b"".join(self.connection.data_to_send()) + raw
        if data:
            self.socket.sendall(data)

    def until(self, holds: Callable[[], bool]) -> None:
        """Read until something is so, or the connection has ended."""
        while True:
            self.events += self.connection.events()
            with contextlib.suppress(OSError):
                self.send()
            if holds() or self.connection.closed:
                return
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                return
            self.connection.receive_data(data, 0.0)

    def opened(self) -> Self:
        """After the handshake."""
        self.until(lambda: bool(self.events))
        assert self.events and not self.connection.closed, self.events
        return self

    def send_and_finish(self, raw: bytes) -> bytes:
        # A peer that is refused is disconnected while it still sends.
        with contextlib.suppress(OSError):
            self.send(raw)
        return self.finish()

    def finish(self) -> bytes:
        """Close our half and read to the end: the hub has processed all that was sent then."""
        received = []
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while data := self.socket.recv(1 << 20):
                received.append(data)
        return b"".join(received)


class Cost(NamedTuple):
    """What an attack costs: the neighbour's worst round trip, and memory that the hub kept."""

    worst_s: float
    seconds: float
    kept_bytes: int


class Target:
    """The hub under attack."""

    def __init__(self, hub: RunningHub, token: str = "") -> None:
        self.hub = hub
        self.token = token
        """Of a user, for the neighbour and polite peers; empty without users."""

    def port(self, listener: str) -> int:
        return self.hub.port(listener)

    @property
    def url(self) -> str:
        return self.hub.url

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.hub.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def neighbour(self) -> Neighbour:
        """An uninvolved peer."""
        return Neighbour(self.port("emp"), self.token)

    def cost_of(self, attack: Callable[[], object]) -> Cost:
        before = self.resident_bytes()
        began = time.perf_counter()
        with self.neighbour() as neighbour:
            attack()
            seconds = time.perf_counter() - began
        return Cost(neighbour.worst_s, seconds, self.resident_bytes() - before)

    def assert_bearable(self, prepare: Callable[[], tuple[Attacker, bytes]]) -> None:
        """The neighbour is served during the attack about as well as beside a polite peer that
        sends as much, and the hub gives the memory back.

        An attack that works does so each time; a machine that stalls, once. So one of a few
        attempts is enough.
        """
        for _ in range(ATTEMPTS):
            attacker, data = prepare()
            with attacker:
                polite = self.cost_of(partial(self.echo, len(data)))
                cost = self.cost_of(partial(attacker.send_and_finish, data))
            limit_s = max(LEAST_S, TIMES * polite.worst_s)
            kept_bytes = cost.kept_bytes - max(polite.kept_bytes, 0)
            if cost.worst_s <= limit_s and kept_bytes <= MEMORY_BYTES:
                return
        raise AssertionError(f"{cost}; a polite peer: {polite}")

    def echo(self, size_bytes: int) -> None:
        """The polite peer: one request of about this size, which the hub sends back."""
        with self.emp(self.token) as peer:
            peer.connection.send_request("$echo", b'{"a":"%b"}' % (b"x" * size_bytes))
            peer.send()
            peer.finish()

    # Attackers, after their handshakes.

    def emp(self, token: str = "") -> Attacker:
        peer = Attacker(self.port("emp"), EmpConnection("client", 0.0)).opened()
        if token:
            peer.events.clear()
            peer.connection.send_request("$authenticate", b'{"token":"%b"}' % token.encode())
            peer.until(lambda: bool(peer.events))
            assert peer.events[0].succeeded
        return peer

    def emqp(self, role: str = "client") -> Attacker:
        listener = {"client": "emqp-clients", "worker": "emqp-workers"}[role]
        return Attacker(self.port(listener), EmqpConnection(role, 0.0)).opened()

    def epoxy(self) -> Attacker:
        return Attacker(self.port("epoxy"), EpoxyConnection("client", 0.0)).opened()

    def micromsg2(self, token: str = "") -> Attacker:
        wanted = [Extension("pub-sub", {})]
        if token:
            wanted.append(Extension("x-auth", {"token": token}))
        offer = Offer(identity="mallory", required=tuple(wanted))
        return Attacker(
            self.port("micromsg2"), MicroMsg2Connection("client", 0.0, offer=offer)
        ).opened()


@contextlib.contextmanager
def running(data: Path, configuration: str = "", token: str = "") -> Iterator[Target]:
    """A hub with this configuration, as `crosswire serve` runs it."""
    data.mkdir(parents=True, exist_ok=True)
    file = data / "crosswire.toml"
    file.write_text(configuration)
    file.chmod(0o600)
    hub = RunningHub(data / "data", "--config", str(file))
    try:
        yield Target(hub, token)
    finally:
        hub.process.kill()
        hub.process.communicate(timeout=30)
