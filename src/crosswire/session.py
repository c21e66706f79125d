"""A wire connection on an asyncio socket: one read, one pass, one write per turn of the loop."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, ParamSpec, cast
from typing import Protocol as Shape

from crosswire.errors import ConnectionLost, InternalError
from crosswire.hub.dispatch import Callbacks
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event

__all__ = ["Session", "SessionOwner", "Tap"]

LINGER_S = 1.0
LINGER_ROUNDS = 10
CLOSE_S = 10.0
JOINED_BYTES = 256 * 1024
LOOK_S = 1.0
"""How often the socket of a peer that is not read from is looked at."""

_BROKEN: Final = select.POLLERR | select.POLLNVAL
_FINISHED: Final = select.POLLHUP | getattr(select, "POLLRDHUP", 0)  # elsewhere POLLHUP says both

P = ParamSpec("P")


class SessionOwner(Shape):
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

    The event loop does not tell of the end of a peer that is not read from, so the socket is looked
    at meanwhile: a connection that broke ends at once. One whose peer has closed its side ends if
    nothing was read from it for a while (`Connection.unread_end_s`): what it sent last may be
    unread, but its owner may have no room for it for ever.

    The owner is told of the end exactly once, whatever happens before: an exception in the
    connection or in its owner fails the connection, with its protocol's goodbye for an internal
    error, and goes no further. `callbacks` logs and counts it.
    """

    connection: Connection
    transport: asyncio.Transport

    def __init__(
        self,
        connect: Callable[[float], Connection],
        owner: SessionOwner,
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._connect = connect
        self._owner = owner
        self._callbacks = callbacks or Callbacks()
        self._end_reported = False
        owner.session = self
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._flush_planned = False
        self._reading_paused = False
        self._look_timer: asyncio.TimerHandle | None = None
        self._end_seen_at: float | None = None
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

    def close(self) -> None:
        """Say the protocol's goodbye now, and end in time even if the peer does not answer it.

        Not to be called from `handle_events`: there `Connection.close` is enough.
        """
        if self._leaving:
            return
        self._run("close", self.connection.close)
        self._turn()
        self._loop.call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        """Without a goodbye, and without what was not written yet. Harmless when it is gone."""
        if self.opened and not self.gone.done():
            self.transport.abort()

    def hold_reading(self, held: bool) -> None:
        """The owner has no room for what this peer sends, or has some again."""
        self._held = held
        self._steer_reading()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.opened = True
        failed = self._callbacks.run("connect", self._open)
        if failed is not None:
            # There is no connection that could fail: the owner has cleaned up already.
            self._leaving = self._end_reported = True
            self.transport.abort()
            return
        self._turn()

    def _open(self) -> None:
        self.connection = self._connect(self._loop.time())

    def data_received(self, data: bytes) -> None:
        tap = self.tap
        if tap is not None:
            self._show(tap.received, data)
        if not self._leaving:
            self.read_at = self._loop.time()
            try:
                self.connection.receive_data(data, self.read_at)
            except Exception as error:
                self._run("receive_data", _raise, error)
            self._turn()

    def eof_received(self) -> bool:
        self._peer_finished = True
        if self.tap is not None:
            self._show(self.tap.peer_finished)
        if self._leaving:
            return False
        self._run("receive_eof", self.connection.receive_eof)
        self._turn()
        return not self.connection.closed and self.transport.can_write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_timer()
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        self.gone.set_result(None)
        if self.tap is not None:
            self._show(self.tap.closed, error)
        self._leaving = True
        if self._end_reported:
            return
        self._run("receive_eof", self.connection.receive_eof)
        lost = ConnectionLost("the socket was closed")
        self._run("fail", self.connection.fail, lost)
        self._dispatch_events()
        if not self._end_reported:
            # The connection itself is broken, and can't even end.
            self._hand_over([ConnectionFailed(lost)])

    def pause_writing(self) -> None:
        """A peer that does not read is not read from either: its answers would only pile up."""
        self.congested = True
        self._steer_reading()
        if self.on_congestion is not None and not self._leaving:
            self._run("on_congestion", self.on_congestion, True)

    def resume_writing(self) -> None:
        self.congested = False
        self._steer_reading()
        if not self._leaving:
            if self.on_congestion is not None:
                self._run("on_congestion", self.on_congestion, False)
            self._run("handle_drain", self._owner.handle_drain)
            self.wake()

    # Our part.

    def _turn(self) -> None:
        if self._leaving:
            self._flush_planned = False
            return
        # Whatever the owner sends meanwhile is written below: it need not wake us for it.
        self._flush_planned = True
        self._dispatch_events()
        self._flush_planned = False
        outgoing: list[bytes | memoryview] = []
        try:
            outgoing = self.connection.data_to_send()
        except Exception as error:
            self._run("data_to_send", _raise, error)
        if outgoing:
            if self.tap is not None:
                self._show(self.tap.sent, outgoing)
            self._write(outgoing)
        if self.connection.send_closed and not self.connection.closed:
            if self.transport.can_write_eof():
                self._finish()
            else:
                # TLS can't close one half: the end of ours is the end of both.
                self._run("receive_eof", self.connection.receive_eof)
                self._dispatch_events()
        if self.connection.closed:
            self._leave(has_output=bool(outgoing))
            return
        self._steer_reading()
        self._arm_timer()

    def _write(self, chunks: list[bytes | memoryview]) -> None:
        """Many small chunks are put together: that takes less time than to hand each over."""
        if self.transport.is_closing():  # `connection_lost` is on its way
            return
        if len(chunks) == 1:
            self.transport.write(chunks[0])
        elif sum(map(len, chunks)) <= JOINED_BYTES:
            self.transport.write(b"".join(chunks))
        else:
            self.transport.writelines(chunks)

    def _dispatch_events(self) -> None:
        """Hand events over until the owner's reaction brings no more of them."""
        while events := self._take_events():
            self._hand_over(events)

    def _take_events(self) -> list[Event]:
        try:
            return self.connection.events()
        except Exception as error:
            self._run("events", _raise, error)
            return []

    def _hand_over(self, events: list[Event]) -> None:
        if isinstance(events[-1], ConnectionClosed | ConnectionFailed):
            self._end_reported = True
        try:
            self._owner.handle_events(events)
        except Exception as error:
            self._run("handle_events", _raise, error)

    def _run(self, kind: str, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """A step of the connection or of its owner: what it raises ends the connection."""
        failed = self._callbacks.run(kind, step, *args, **kwargs)
        if failed is not None:
            self._end_broken()

    def _end_broken(self) -> None:
        """Its goodbye may be what is broken: then the socket is all there is to end."""
        failed = self._callbacks.run("fail", self.connection.fail, InternalError("internal error"))
        if failed is not None:
            self.transport.abort()
        self.wake()

    def _show(self, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """To the tap. One that fails has no use for the rest of the connection's bytes."""
        if self._callbacks.run("tap", step, *args, **kwargs) is not None:
            self.tap = None

    def _steer_reading(self) -> None:
        wanted = self._leaving or (
            self.connection.wants_data and not self.congested and not self._held
        )
        if wanted == self._reading_paused and not self.transport.is_closing():
            self._reading_paused = self.connection.unread = not wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()
                # Reading may stop and go on for every batch, so a look that is planned stays so.
                self._end_seen_at = None
                if self._look_timer is None:
                    self._look_timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Is the peer still there? Only while it is not read from: else the event loop tells."""
        self._look_timer = None
        if not self._reading_paused or self._leaving or self.transport.is_closing():
            return
        self._look_timer = self._loop.call_later(LOOK_S, self._look)
        state = _poll(self.transport)
        if state & _BROKEN:
            self._run("fail", self.connection.fail, ConnectionLost("the socket was reset"))
            self._dispatch_events()
            self.transport.abort()
        elif state & _FINISHED:
            now = self._loop.time()
            if self._end_seen_at is None:
                # A pause that is short is no reason to lose what it sent before it closed.
                self._end_seen_at = now
            elif now - self._end_seen_at >= self.connection.unread_end_s:
                lost = ConnectionLost("the peer closed its side while it was not read from")
                self._run("fail", self.connection.fail, lost)
                self._turn()

    def _leave(self, *, has_output: bool) -> None:
        self._leaving = True
        self._cancel_timer()
        if has_output and not self._peer_finished and self.transport.can_write_eof():
            self._finish()
            self._steer_reading()
        else:
            self.transport.close()
        # Closing waits until all is written, which a peer that does not read could prevent for
        # ever.
        if not self.gone.done():
            self._timer = self._loop.call_later(LINGER_S, self._linger, 1)

    def _finish(self) -> None:
        if self.transport.is_closing():
            return
        if self.tap is not None:
            self._show(self.tap.finished)
        with suppress(OSError):  # reset since the last write: reading tells, or time does
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
        self._run("handle_deadline", self.connection.handle_deadline, self._loop.time())
        self._turn()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _poll(transport: asyncio.Transport) -> int:
    """What poll(2) tells about the socket, other than that it can be read and written."""
    sock = transport.get_extra_info("socket")
    number = -1 if sock is None else sock.fileno()
    if number < 0:
        return 0
    poll = select.poll()
    poll.register(number, _FINISHED)
    return next((state for _, state in poll.poll(0)), 0)


def _raise(error: Exception) -> None:
    """For steps that every read takes: they are called directly, and only a failure costs more."""
    raise error
