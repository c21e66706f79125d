"""A network of simulated processes: connections with delays, cuts, partitions and slow readers.

It carries bytes as TCP does. They arrive in order or not at all, in pieces of any size; a receiver
that doesn't read makes the sender's buffer grow until `pause_writing`; a process that ends resets
its connections, a machine that loses power doesn't, and its peers notice when they send to it
again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple, Protocol

__all__ = ["Network", "NetworkHost", "SlowReads", "VirtualTransport"]

_SOCKET_BYTES: Final = 64 * 1024
"""What the kernels of both sides hold in one direction."""
_HIGH_BYTES: Final = 64 * 1024
_LOW_BYTES: Final = 16 * 1024
_READ_BYTES: Final = 256 * 1024
_FIRST_PORT: Final = 32_768
_GIVE_UP_S: Final = 120.0
"""How long TCP repeats what is not acknowledged."""


class NetworkHost(Protocol):
    """A process, as the network sees it."""

    name: str
    host: str

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Its event loop."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not crashed."""


class Timeline(Protocol):
    """The world, as far as the network needs it."""

    now: float
    random: Random

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call it at a virtual time."""


class SlowReads(NamedTuple):
    """How many bytes a slow reader takes at most, and how long it waits for each piece."""

    most_bytes: int
    pause_s: float


class VirtualServer:
    """What `create_server` returns."""

    def __init__(self, network: Network, host: str, port: int) -> None:
        self._network = network
        self._address = (host, port)
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        """Host and port."""
        return self._address

    def close(self) -> None:
        """Accept no more connections."""
        self._network.close_port(self._address, self)


class _Listening:
    def __init__(
        self, process: NetworkHost, factory: Callable[[], asyncio.Protocol], server: VirtualServer
    ) -> None:
        self.process = process
        self.factory = factory
        self.server = server


def _finish(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _ignore(_one: str, _other: str) -> None:
    """Nobody is interested."""


class Network:
    """All connections, and the state of the links between hosts."""

    def __init__(self, world: Timeline) -> None:
        self._world = world
        self._listening: dict[tuple[str, int], _Listening] = {}
        self._next_port = _FIRST_PORT
        self._ends: dict[VirtualTransport, None] = {}
        self._cut: set[frozenset[str]] = set()
        self._is_off: set[str] = set()
        self.on_end: Callable[[str, str], None] = _ignore
        """Called with the names of two processes when a connection between them ends."""
        self.delay_s = (0.00005, 0.0005)
        """The least and the greatest delay of a segment."""
        self.slow_readers: dict[str, SlowReads] = {}
        """Hosts whose programs read slowly."""
        self.most_bytes = _READ_BYTES
        """The largest piece that one read returns: small ones find who expects whole frames."""

    # Listening and connecting.

    def listen(
        self, process: NetworkHost, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> VirtualServer:
        """Accept connections. Raises OSError if the port is taken."""
        if port == 0:
            port = self._take_port()
        address = (host, port)
        taken = self._listening.get(address)
        if taken is not None and taken.process.is_running:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        server = VirtualServer(self, host, port)
        self._listening[address] = _Listening(process, factory, server)
        return server

    def close_port(self, address: tuple[str, int], server: VirtualServer) -> None:
        """Accept no more connections there."""
        found = self._listening.get(address)
        if found is not None and found.server is server:
            del self._listening[address]

    async def connect(
        self, process: NetworkHost, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[VirtualTransport, asyncio.Protocol]:
        """Connect to a listener. Raises OSError; waits while the way there is cut."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        self._hold_until_reachable(process, host, arrived)
        await arrived
        found = self._listening.get((host, port))
        if found is None or not found.process.is_running:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        here, there = (process.host, self._take_port()), (host, port)
        near = VirtualTransport(self, process, here, there)
        far = VirtualTransport(self, found.process, there, here)
        near.peer, far.peer = far, near
        self._ends[near] = self._ends[far] = None
        protocol = factory()
        near.attach(protocol)
        server_factory = found.factory
        found.process.loop.call_soon(lambda: far.attach(server_factory()))
        # The protocol is connected in a turn of its own, as asyncio does it.
        connected: asyncio.Future[None] = loop.create_future()
        loop.call_soon(_finish, connected)
        try:
            await connected
        except asyncio.CancelledError:
            near.abort()
            raise
        return near, protocol

    def _hold_until_reachable(
        self, process: NetworkHost, host: str, arrived: asyncio.Future[None]
    ) -> None:
        def try_now() -> None:
            if arrived.done() or not process.is_running:
                return
            if self.can_pass(process.host, host):
                # Cancelled while it waits in the loop: `asyncio.timeout` around the caller.
                process.loop.call_soon(_finish, arrived)
            else:
                self._world.at(self._world.now + 0.2, try_now)

        self._world.at(self._world.now + self.sample_delay(), try_now)

    def _take_port(self) -> int:
        self._next_port += 1
        return self._next_port

    # Faults.

    def partition(self, one: str, other: str) -> None:
        """Nothing passes between two hosts, until `heal`."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """What was sent meanwhile arrives."""
        self._cut.discard(frozenset((one, other)))
        self._resume()

    def power_off(self, host: str) -> None:
        """A machine is off: what is sent to it vanishes."""
        self._is_off.add(host)

    def power_on(self, host: str) -> None:
        """It is on again; connections that it had before are unknown to it."""
        self._is_off.discard(host)
        self._resume()

    def _resume(self) -> None:
        for end in list(self._ends):
            end.resume_link()

    def cut_connections(self, host: str, *, at_most: int = 1 << 30) -> int:
        """Reset connections of a host, as a firewall that forgot them; gives how many."""
        found = [end for end in self._ends if end.here[0] == host and end.is_open]
        self._world.random.shuffle(found)
        for end in found[:at_most]:
            end.reset()
            if end.peer is not None:
                end.peer.reset()
        return len(found[:at_most])

    def lose_process(self, process: NetworkHost, *, quietly: bool) -> None:
        """A process has ended. Its system resets what it had open, unless that is gone too."""
        for address, found in list(self._listening.items()):
            if found.process is process:
                del self._listening[address]
        for end in [each for each in self._ends if each.process is process]:
            end.vanish(quietly=quietly)

    # For transports.

    def can_pass(self, one: str, other: str) -> bool:
        """Whether segments travel between two hosts now."""
        if one in self._is_off or other in self._is_off:
            return False
        return frozenset((one, other)) not in self._cut

    def sample_delay(self) -> float:
        """The delay of a segment."""
        return self._world.random.uniform(*self.delay_s)

    def sample_bytes(self, host: str, available: int) -> int:
        """How much one read returns."""
        most = min(available, self.most_bytes)
        slow = self.slow_readers.get(host)
        if slow is not None:
            most = min(most, slow.most_bytes)
        if most > 1 and self._world.random.random() < 0.1:
            return self._world.random.randint(1, most)
        return most

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call it after a time."""
        self._world.at(self._world.now + delay_s, action)

    @property
    def now(self) -> float:
        """The virtual time."""
        return self._world.now

    def forget(self, end: VirtualTransport) -> None:
        """This end is closed."""
        self._ends.pop(end, None)


class _VirtualSocket:
    """The options of a socket, as far as programs set them."""

    family = socket.AF_INET

    def __init__(self, transport: VirtualTransport) -> None:
        self._transport = transport
        self.idle_s, self.interval_s, self.probes = 7200.0, 75.0, 9

    def fileno(self) -> int:
        """There is no descriptor to poll."""
        return -1

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Keep-alive is simulated, everything else is ignored."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE) and value:
            self._transport.keep_alive()
        elif level == socket.IPPROTO_TCP:
            if option == socket.TCP_KEEPIDLE:
                self.idle_s = value
            elif option == socket.TCP_KEEPINTVL:
                self.interval_s = value
            elif option == socket.TCP_KEEPCNT:
                self.probes = value


class VirtualTransport(asyncio.Transport):
    """One end of a connection.

    Written bytes go from `_buffer` (the program's side) into the way (`_in_flight`, in order, held
    while the link is cut), and arrive at the peer's `_unread`, where they stay until it reads.
    """

    peer: VirtualTransport | None

    def __init__(
        self, network: Network, process: NetworkHost, here: tuple[str, int], there: tuple[str, int]
    ) -> None:
        self._socket = _VirtualSocket(self)
        super().__init__({"peername": there, "sockname": here, "socket": self._socket})
        self._network = network
        self.process = process
        self.here = here
        self.there = there
        self.peer = None
        self._protocol: asyncio.Protocol | None = None
        self._buffer = bytearray()
        self._in_flight: deque[bytes | None] = deque()
        self._is_travelling = False
        self._unread = bytearray()
        self._has_arrived_eof = False
        self._has_read_eof = False
        self._has_sent_eof = False
        self._wants_eof = False
        self._is_closing = False
        self._is_lost = False
        self._is_paused = False
        self._is_write_paused = False
        self._is_reading_planned = False
        self._is_gone = False
        self._is_made = False
        self._stuck_since: float | None = None
        self._received_at = network.now
        self._high_bytes, self._low_bytes = _HIGH_BYTES, _LOW_BYTES

    @property
    def is_open(self) -> bool:
        """Whether this end has not been closed, reset or lost with its process."""
        return not self._is_lost and not self._is_gone

    def attach(self, protocol: asyncio.Protocol) -> None:
        """Connect the protocol, in its process's own turn."""
        self._protocol = protocol

        def made() -> None:
            if self.is_open:
                self._is_made = True
                protocol.connection_made(self)
                self._plan_read()

        self.process.loop.call_soon(made)

    # What asyncio's protocols call.

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._is_closing or self._is_lost

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The protocol that it is connected to."""
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def is_reading(self) -> bool:
        """Whether the protocol gets what arrives."""
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        """Keep what arrives until `resume_reading`."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Go on reading."""
        self._is_paused = False
        self._plan_read()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """When `pause_writing` and `resume_writing` are called."""
        self._high_bytes = _HIGH_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        """What the program wrote and the system has not taken."""
        return len(self._buffer)

    def write(self, data: Any) -> None:
        """Send bytes."""
        if self._is_lost or self._is_closing or self._wants_eof or not data:
            return
        self._buffer += data
        self._send()
        if len(self._buffer) > self._high_bytes and not self._is_write_paused:
            self._is_write_paused = True
            self.get_protocol().pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        """Send all of them."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """TCP can close one half."""
        return True

    def write_eof(self) -> None:
        """Close the sending half when all is sent."""
        self._wants_eof = True
        self._send()

    def close(self) -> None:
        """Close when all is sent."""
        if self._is_closing or self._is_lost:
            return
        self._is_closing = True
        self._wants_eof = True
        self._send()
        if not self._buffer:
            self._lose_soon(None)

    def abort(self) -> None:
        """Close at once; the peer gets a reset."""
        if self._is_lost:
            return
        self._is_closing = True
        self._buffer.clear()
        self._reset_peer()
        self._lose_soon(None)

    # The way.

    def _send(self) -> None:
        """Give the network what it has room for."""
        room = _SOCKET_BYTES - sum(map(len, filter(None, self._in_flight)))
        if self.peer is not None:
            room -= len(self.peer._unread)
        if room > 0 and self._buffer:
            self._in_flight.append(bytes(self._buffer[:room]))
            del self._buffer[:room]
        if not self._buffer and self._wants_eof and not self._has_sent_eof:
            self._has_sent_eof = True
            self._in_flight.append(None)
        self._travel()
        if self._is_write_paused and len(self._buffer) <= self._low_bytes:
            self._is_write_paused = False
            self.process.loop.call_soon(self._resume_writing)
        if self._is_closing and not self._buffer and not self._is_lost:
            self._lose_soon(None)

    def _resume_writing(self) -> None:
        if not self._is_lost and not self._is_write_paused:
            self.get_protocol().resume_writing()

    def _travel(self) -> None:
        if self._in_flight and not self._is_travelling:
            self._is_travelling = True
            self._network.later(self._network.sample_delay(), self._arrive)

    def _arrive(self) -> None:
        """The first segment reaches the peer, or waits for the link."""
        self._is_travelling = False
        peer = self.peer
        if not self._in_flight or peer is None:
            return
        if not self._network.can_pass(self.here[0], self.there[0]):
            if self._stuck_since is None:
                self._stuck_since = self._network.now
                self._network.later(_GIVE_UP_S, self._give_up)
            return
        self._stuck_since = None
        segment = self._in_flight.popleft()
        if peer._is_gone or (peer._is_lost and segment is not None):
            # Nobody there knows this connection.
            self._in_flight.clear()
            self.reset()
            return
        if segment is None:
            peer._has_arrived_eof = True
        else:
            peer._unread += segment
        peer._received_at = self._network.now
        peer._plan_read()
        self._travel()

    def resume_link(self) -> None:
        """The link may be whole again."""
        self._travel()

    def _give_up(self) -> None:
        stuck = self._stuck_since
        if stuck is not None and self._network.now - stuck >= _GIVE_UP_S and not self._is_lost:
            self._lose_soon(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def keep_alive(self) -> None:
        """Probe a silent peer from now on."""
        self._network.later(0.0, self._wait_for_silence)

    def _wait_for_silence(self) -> None:
        # After the program has set the times, which follow the switch.
        due = self._received_at + self._socket.idle_s
        if self._network.now >= due:
            self._probe(1)
        elif self.is_open:
            self._network.later(due - self._network.now, self._wait_for_silence)

    def _probe(self, number: int) -> None:
        if not self.is_open or self.peer is None:
            return
        if self._network.can_pass(self.here[0], self.there[0]):
            if self.peer._is_gone or self.peer._is_lost:
                self.reset()
            else:
                self._received_at = self._network.now
                self._wait_for_silence()
        elif number >= self._socket.probes:
            self._lose_soon(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        else:
            self._network.later(self._socket.interval_s, lambda: self._probe(number + 1))

    def _plan_read(self) -> None:
        has_something = self._unread or (self._has_arrived_eof and not self._has_read_eof)
        if (
            has_something
            and not self._is_paused
            and not self._is_lost
            and not self._is_reading_planned
            and self._protocol is not None
            and self.process.is_running
        ):
            self._is_reading_planned = True
            slow = self._network.slow_readers.get(self.here[0])
            if slow is None:
                self.process.loop.call_soon(self._read)
            else:
                self.process.loop.call_later(slow.pause_s, self._read)

    def _read(self) -> None:
        self._is_reading_planned = False
        if self._is_lost or self._is_paused:
            return
        protocol = self._protocol
        assert protocol is not None
        if self._unread:
            size = self._network.sample_bytes(self.here[0], len(self._unread))
            data = bytes(self._unread[:size])
            del self._unread[:size]
            if not self._is_closing:
                protocol.data_received(data)
            if self.peer is not None and not self.peer._is_lost:
                self._network.later(self._network.sample_delay(), self.peer._acknowledged)
            self._plan_read()
        elif self._has_arrived_eof and not self._has_read_eof:
            self._has_read_eof = True
            if not self._is_closing and not protocol.eof_received():
                self.close()

    def _acknowledged(self) -> None:
        if not self._is_lost and not self._is_gone:
            self._send()

    # Ends.

    def reset(self) -> None:
        """The peer, or something on the way, has reset the connection."""
        if not self._is_lost:
            self._lose_soon(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def vanish(self, *, quietly: bool) -> None:
        """The process of this end is gone."""
        if self._is_gone:
            return
        self._is_gone = True
        self._network.forget(self)
        if not quietly:
            self._reset_peer()

    def _reset_peer(self) -> None:
        peer = self.peer
        if peer is not None and not peer._is_lost:
            self._network.later(self._network.sample_delay(), peer.reset)

    def _lose_soon(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._is_closing = True
        self._network.forget(self)
        if self.peer is not None:
            self._network.on_end(self.process.name, self.peer.process.name)
        if self.process.is_running:
            self.process.loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        # One that was reset before the process had accepted it is never shown to it.
        if self._protocol is not None and self._is_made:
            self._protocol.connection_lost(error)
