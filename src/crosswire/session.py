"""A wire connection on an asyncio socket: one read, one pass, one write per turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol as Shape
from typing import cast

from crosswire.errors import ConnectionLost, CrosswireError
from crosswire.wire.contract import Connection, Event

__all__ = ["Owner", "Session", "Tap"]

LINGER_S = 1.0
LINGER_ROUNDS = 10
JOINED_BYTES = 256 * 1024


class Owner(Shape):
    """Who a session works for. The session makes itself known in `session`."""

    session: Session

    def handle_events(self, events: list[Event]) -> None:
        """What one read, or one deadline, brought. Send on the connection right here, or later and
        then call `Session.wake`."""

    def handle_drain(self) -> None:
        """The peer reads again: `Session.congested` has become false."""


class Tap(Shape):
    """Who is shown the bytes of a session, as they are read and written."""

    def received(self, data: bytes) -> None: ...

    def sent(self, chunks: Sequence[bytes | memoryview]) -> None: ...

    def peer_finished(self) -> None:
        """The peer sends no more."""

    def finished(self) -> None:
        """We send no more."""

    def closed(self, error: Exception | None) -> None:
        """The socket is gone; with an error if it was broken off."""


class Session(asyncio.Protocol):
    """Carries bytes between a socket and a `Connection`, and time to it.

    `connect` makes the connection when the socket is there; it is given the loop's time. When the
    connection is over, what it had to say is written, the sending half is closed and the rest of
    what the peer sends is read and dropped for a moment: closing at once could make the kernel
    throw our goodbye away.
    """

    connection: Connection
    transport: asyncio.Transport

    def __init__(self, connect: Callable[[float], Connection], owner: Owner) -> None:
        self._connect = connect
        self._owner = owner
        owner.session = self
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_planned = False
        self._reading_paused = False
        self._leaving = False
        self._peer_finished = False
        self._held = False
        self.opened = False
        """Is, or was, there a socket? With TLS only when the handshake is done."""
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the socket is closed, some time after the connection's own end."""
        self.congested = False
        """The peer doesn't keep up with what we send."""
        self.read_at = self._loop.time()
        """When something came from the peer, by the loop's clock."""
        self.on_congestion: Callable[[bool], None] | None = None
        """Told when `congested` becomes true, and before `handle_drain` when it becomes false."""
        self.tap: Tap | None = None

    def wake(self) -> None:
        """The owner made the connection send: write it at the end of this turn of the loop."""
        if not self._flush_planned and not self._leaving:
            self._flush_planned = True
            self._loop.call_soon(self._turn)

    def hold_reading(self, held: bool) -> None:
        """The owner has no room for what this peer sends, or has some again."""
        self._held = held
        self._steer_reading()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened = True
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.connection = self._connect(self._loop.time())
        self._turn()

    def data_received(self, data: bytes) -> None:
        if self.tap is not None:
            self.tap.received(data)
        if not self._leaving:
            self.read_at = self._loop.time()
            self.connection.receive_data(data, self.read_at)
            self._turn()

    def eof_received(self) -> bool:
        self._peer_finished = True
        if self.tap is not None:
            self.tap.peer_finished()
        if self._leaving:
            return False
        self.connection.receive_eof()
        self._turn()
        return not self.connection.closed and self.transport.can_write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_timer()
        self.gone.set_result(None)
        if self.tap is not None:
            self.tap.closed(error)
        if not self._leaving:
            self._leaving = True
            self.connection.receive_eof()
            self.connection.fail(ConnectionLost("the socket was closed"))
            self._tell()

    def pause_writing(self) -> None:
        """A peer that does not read is not read from either: its answers would only pile up."""
        self.congested = True
        self._steer_reading()
        if self.on_congestion is not None and not self._leaving:
            self.on_congestion(True)

    def resume_writing(self) -> None:
        self.congested = False
        self._steer_reading()
        if not self._leaving:
            if self.on_congestion is not None:
                self.on_congestion(False)
            self._owner.handle_drain()
            self.wake()

    # Our part.

    def _turn(self) -> None:
        if self._leaving:
            self._flush_planned = False
            return
        # Whatever the owner sends meanwhile is written below: it need not wake us for it.
        self._flush_planned = True
        self._tell()
        self._flush_planned = False
        outgoing = self.connection.data_to_send()
        if outgoing:
            if self.tap is not None:
                self.tap.sent(outgoing)
            self._write(outgoing)
        if self.connection.send_closed and not self.connection.closed:
            if self.transport.can_write_eof():
                self._finish()
            else:
                # TLS can't close one half: the end of ours is the end of both.
                self.connection.receive_eof()
                self._tell()
        if self.connection.closed:
            self._leave(said_something=bool(outgoing))
            return
        self._steer_reading()
        self._arm_timer()

    def _write(self, chunks: list[bytes | memoryview]) -> None:
        """Many small chunks are put together: that takes less time than to hand each over."""
        if len(chunks) == 1:
            self.transport.write(chunks[0])
        elif sum(map(len, chunks)) <= JOINED_BYTES:
            self.transport.write(b"".join(chunks))
        else:
            self.transport.writelines(chunks)

    def _tell(self) -> None:
        """Hand events over until the owner's reaction brings no more of them."""
        try:
            while events := self.connection.events():
                self._owner.handle_events(events)
        except Exception:
            self.connection.fail(CrosswireError("internal error"))
            self._flush_planned = False
            self.wake()
            raise

    def _steer_reading(self) -> None:
        wanted = self._leaving or (
            self.connection.wants_data and not self.congested and not self._held
        )
        if wanted == self._reading_paused:
            self._reading_paused = self.connection.unread = not wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _leave(self, *, said_something: bool) -> None:
        self._leaving = True
        self._cancel_timer()
        if said_something and not self._peer_finished and self.transport.can_write_eof():
            self._finish()
            self._steer_reading()
            self._timer = self._loop.call_later(LINGER_S, self._linger, 1)
        else:
            self.transport.close()

    def _finish(self) -> None:
        if self.tap is not None:
            self.tap.finished()
        self.transport.write_eof()

    def _linger(self, rounds: int) -> None:
        """The last words of a connection may be long and the peer slow, but not for ever."""
        if self.transport.get_write_buffer_size() and rounds < LINGER_ROUNDS:
            self._timer = self._loop.call_later(LINGER_S, self._linger, rounds + 1)
        else:
            self.transport.abort()

    def _arm_timer(self) -> None:
        """A deadline that moved away is looked at when the old one comes, not for every read."""
        deadline = self.connection.next_deadline()
        if deadline is None:
            self._cancel_timer()
        elif self._timer is None or deadline < self._timer_at:
            self._cancel_timer()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.connection.handle_deadline(self._loop.time())
        self._turn()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
