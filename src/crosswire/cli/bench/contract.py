"""What a load program is made of: a blocking socket with a wire connection on it, and two parts.

A protocol's module has a `producer` and a `consumer`: each speaks its protocol on one connection,
in batches, and leaves sockets, windows and time to `run`.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from importlib import import_module
from typing import ClassVar, TypeVar

import msgspec

from crosswire.cli.via.contract import HubTarget
from crosswire.errors import ConnectFailed, ConnectionLost
from crosswire.listeners import LISTENERS
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event

__all__ = [
    "BenchConsumer",
    "BenchEnd",
    "BenchProducer",
    "Line",
    "Work",
    "consumer_of",
    "producer_of",
]

_READ_BYTES = 1 << 18
_TIMEOUT_S = 60.0

E = TypeVar("E", bound=Event)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done. `ports` are those of listeners that are not where they usually are;
    `durable` is what the protocol can ask for; a topic's own policy decides the rest."""

    via: str
    destination: str
    target: HubTarget = HubTarget()
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
        return self.destination.startswith("topic/")

    @property
    def payload(self) -> bytes:
        return b"x" * self.size_bytes


class Line:
    """A connection on a blocking socket."""

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
        """Handle what the connection received."""
        outgoing = self.connection.data_to_send()
        if outgoing:
            self.socket.sendall(b"".join(outgoing))

    def read(self) -> list[Event]:
        """What one read brought, which may be nothing. Raises ConnectionLost."""
        if self._early:
            events, self._early = self._early, []
            return events
        try:
            data = self.socket.recv(_READ_BYTES)
        except TimeoutError:
            raise ConnectionLost(f"nothing came for {_TIMEOUT_S:g} s") from None
        if not data:
            raise ConnectionLost("the hub closed the connection")
        self.connection.receive_data(data, time.monotonic())
        events = self.connection.events()
        if self.connection.closed:
            _raise_end(events)
        return events

    def wait_for(self, kind: type[E]) -> E:
        """The next event of this kind; those after it are read later."""
        while True:
            events = self.read()
            self.write()
            for index, event in enumerate(events):
                if isinstance(event, kind):
                    self._early = events[index + 1 :]
                    return event

    @property
    def has_early(self) -> bool:
        """Is there something to `read` that the socket does not show?"""
        return bool(self._early)

    def close(self) -> None:
        self.socket.close()


def _raise_end(events: list[Event]) -> None:
    for event in events:
        if isinstance(event, ConnectionFailed):
            raise ConnectionLost(f"the connection failed: {event.error}") from event.error
        if isinstance(event, ConnectionClosed):
            raise ConnectionLost("the hub ended the connection")


class BenchEnd(ABC):
    """One end of a connection, in the words of its protocol."""

    listener: ClassVar[str]

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def connect(self, now: float) -> Connection: ...

    @abstractmethod
    def open(self, line: Line) -> None:
        """Get through the handshake, to where messages can go."""


class BenchProducer(BenchEnd):
    is_answered = True
    """Are messages acknowledged? If they are not, they are done when they are sent."""

    @property
    def window(self) -> int:
        """How many may wait for their acknowledgement."""
        return self.work.window

    @abstractmethod
    def send(self, count: int) -> None:
        """Allow this many more messages. There never are more than the window without an answer."""

    @abstractmethod
    def answered(self, events: list[Event]) -> int:
        """How many messages these acknowledge."""


class BenchConsumer(BenchEnd):
    @abstractmethod
    def take(self, events: list[Event]) -> int:
        """How many messages these bring; they are settled."""


def producer_of(work: Work) -> BenchProducer:
    made: BenchProducer = import_module(f"crosswire.cli.bench.{work.via}").producer(work)
    return made


def consumer_of(work: Work) -> BenchConsumer:
    made: BenchConsumer = import_module(f"crosswire.cli.bench.{work.via}").consumer(work)
    return made
