"""The parts of a load generator: a blocking socket with a wire connection, and its two ends.

A protocol's module has a `producer` and a `consumer`: each uses its protocol on one connection, in
batches; sockets, windows and timing are in `run`. Sockets block and there is no event loop, so that
the load generator costs as little as possible beside the hub that it measures.
"""

from __future__ import annotations

import socket
import ssl
import time
from abc import ABC, abstractmethod
from importlib import import_module
from typing import ClassVar, TypeVar

import msgspec

from crosswire.errors import ConnectFailed, ConnectionLost
from crosswire.listeners import LISTENERS
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event

__all__ = [
    "BenchConsumer",
    "BenchEnd",
    "BenchProducer",
    "BenchTarget",
    "Line",
    "Work",
    "consumer_of",
    "producer_of",
]

_READ_BYTES = 1 << 18
_TIMEOUT_S = 60.0

E = TypeVar("E", bound=Event)


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's address and our credentials. `port` None is the protocol's default port."""

    host: str = "127.0.0.1"
    port: int | None = None
    tls: ssl.SSLContext | None = None
    token: str | None = None
    curve_server: str | None = None
    curve_secret: str | None = None


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The load. `ports` are those of listeners that are not on their default ports; `durable` is
    what the protocol can request per message; for topics the hub's policy decides."""

    via: str
    destination: str
    target: BenchTarget = BenchTarget()
    ports: dict[str, int] = {}
    size_bytes: int = 128
    window: int = 1000
    consumers: int = 1
    durable: bool = True

    @property
    def name(self) -> str:
        """The destination without its kind."""
        return self.destination.partition("/")[2]

    @property
    def is_topic(self) -> bool:
        """Whether messages are published, so that every consumer gets all of them."""
        return self.destination.startswith("topic/")

    @property
    def payload(self) -> bytes:
        """The same `size_bytes` bytes for every message; they are ASCII."""
        return b"x" * self.size_bytes


class Line:
    """A connection on a blocking socket, after its handshake.

    Raises ConnectFailed and ConnectionLost.
    """

    def __init__(self, work: Work, part: BenchEnd) -> None:
        target = work.target
        listener = part.listener if target.tls is None else f"{part.listener}-tls"
        port = work.ports.get(part.listener) or target.port or LISTENERS[listener]
        try:
            self.socket = socket.create_connection((target.host, port), _TIMEOUT_S)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if target.tls is not None:
                self.socket = target.tls.wrap_socket(self.socket, server_hostname=target.host)
        except OSError as error:
            raise ConnectFailed(f"can't connect to {target.host}:{port}: {error}") from None
        self.connection = part.connect(time.monotonic())
        self._early: list[Event] = []
        self.write()
        part.open(self)

    def write(self) -> None:
        """Send what the connection has to send. Blocks until the kernel has taken it."""
        outgoing = self.connection.data_to_send()
        if outgoing:
            self.socket.sendall(b"".join(outgoing))

    def read(self) -> list[Event]:
        """The events of one read, which may be none. Blocks until there is data.

        Raises ConnectionLost at the end of the connection, or after a timeout.
        """
        if self._early:
            events, self._early = self._early, []
            return events
        try:
            data = self.socket.recv(_READ_BYTES)
        except TimeoutError:
            raise ConnectionLost(f"no data for {_TIMEOUT_S:g} s") from None
        if not data:
            raise ConnectionLost("the hub closed the connection")
        self.connection.receive_data(data, time.monotonic())
        events = self.connection.events()
        if self.connection.closed:
            _raise_end(events)
        return events

    def wait_for(self, kind: type[E]) -> E:
        """The next event of this kind; earlier ones are dropped, later ones are kept for `read`."""
        while True:
            events = self.read()
            self.write()
            for index, event in enumerate(events):
                if isinstance(event, kind):
                    self._early = events[index + 1 :]
                    return event

    @property
    def has_early(self) -> bool:
        """Whether `read` has events left from `wait_for`; no selector reports these."""
        return bool(self._early)

    def close(self) -> None:
        """Close the socket, without a goodbye."""
        self.socket.close()


def _raise_end(events: list[Event]) -> None:
    for event in events:
        if isinstance(event, ConnectionFailed):
            raise ConnectionLost(f"the connection failed: {event.error}") from event.error
        if isinstance(event, ConnectionClosed):
            raise ConnectionLost("the hub ended the connection")


class BenchEnd(ABC):
    """What a protocol does at one end of a connection."""

    listener: ClassVar[str]

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def connect(self, now: float) -> Connection:
        """The sans-IO connection, in its initial state. Raises ClientError for unusable options."""

    @abstractmethod
    def open(self, line: Line) -> None:
        """Complete the handshake and all requests before the first message."""


class BenchProducer(BenchEnd):
    """An end that sends messages."""

    is_answered = True
    """Whether messages are acknowledged; if not, sending completes them."""

    @property
    def window(self) -> int:
        """The maximum number of unacknowledged messages."""
        return self.work.window

    @abstractmethod
    def send(self, count: int) -> None:
        """Queue this many messages; the caller keeps to the window."""

    @abstractmethod
    def answered(self, events: list[Event]) -> int:
        """The number of messages that these events acknowledge. Raises RequestFailed."""


class BenchConsumer(BenchEnd):
    """An end that receives messages and settles them."""

    @abstractmethod
    def take(self, events: list[Event]) -> int:
        """Settle the messages among these events; returns their number."""


def producer_of(work: Work) -> BenchProducer:
    """A producer of the protocol of `work`."""
    made: BenchProducer = import_module(f"crosswire.cli.bench.{work.via}").producer(work)
    return made


def consumer_of(work: Work) -> BenchConsumer:
    """A consumer of the protocol of `work`."""
    made: BenchConsumer = import_module(f"crosswire.cli.bench.{work.via}").consumer(work)
    return made
