"""A wire connection on an asyncio socket, for gateways and clients.

A turn of the event loop is one read, one pass over the events and one write: messages that arrive
together are handled, committed and answered together.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, ParamSpec, cast
from typing import Protocol as Shape

from crosswire.budget import MemoryAccount
from crosswire.errors import ConnectionLost, InternalError
from crosswire.hub.dispatch import Callbacks
from crosswire.hub.turns import LARGE_BYTES, QUANTUM_S, Turns, TurnShare
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event

__all__ = ["Session", "SessionOwner", "Tap", "use_keep_alive"]

LINGER_S = 1.0
"""How long a connection that has ended waits for its last bytes to be written; see `_linger`."""
LINGER_ROUNDS = 10
CLOSE_S = 10.0
"""How long a peer may take to answer the protocol's goodbye."""
JOINED_BYTES = 256 * 1024
"""Up to this size chunks are copied into one buffer for a single write."""
_FIRST_BYTES = 512
"""Kept of a peer's first read: enough for the handshake of every protocol."""
POLL_S = 1.0
"""The interval at which the socket of a peer that is not read from is polled."""
FIRST_PART_BYTES = 4 * 1024
"""How much of a read is processed at once, until it is known how long that takes."""
LEAST_PART_BYTES = 256
MOST_PART_BYTES = 32 * 1024
"""A peer whose frames are quick makes its parts grow, and may send another kind of frames in the
next one. What is missing of a larger frame is one part, without the frames after it."""
LARGE_S: Final = 0.01
"""Roughly how long a frame of `LARGE_BYTES` takes, which is processed at once when its last byte is
there: more than a turn."""

_NOTED_BYTES: Final = 1024
"""By how much what is buffered must change before the memory's account is asked: most reads are
small messages, of which some bytes are kept until they are answered."""

_BROKEN: Final = select.POLLERR | select.POLLNVAL
# Only Linux has POLLRDHUP for a half-closed peer; elsewhere POLLHUP covers it.
_FINISHED: Final = select.POLLHUP | getattr(select, "POLLRDHUP", 0)

_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A peer that answers none of six probes, ten seconds apart, after a minute of silence, is gone.
The system's own defaults would take two hours."""

P = ParamSpec("P")


class SessionOwner(Shape):
    """The gateway or client that a session reports to. The session sets its `session`."""

    session: Session

    def handle_events(self, events: list[Event]) -> None:
        """Act on the events of one read, or of one deadline.

        What is sent on the connection during this call is written after it; what is sent later
        needs `Session.wake`.
        """

    def handle_drain(self) -> None:
        """The peer reads again: `Session.congested` has become false."""


class Tap(Shape):
    """Records the bytes of a session as they are read and written."""

    def received(self, data: bytes) -> None:
        """These bytes were read from the socket."""

    def sent(self, chunks: Sequence[bytes | memoryview]) -> None:
        """These bytes were given to the socket."""

    def peer_finished(self) -> None:
        """The peer sends no more."""

    def finished(self) -> None:
        """We send no more."""

    def closed(self, error: Exception | None) -> None:
        """The socket is closed; with an error if the connection broke."""


class Session(asyncio.Protocol):
    """Carries bytes between a socket and a `Connection`, and gives the connection the time.

    `connect` makes the connection when the socket is ready; its argument is the loop's time. When
    the connection has ended, its last bytes are written, the sending half is closed, and what the
    peer still sends is read and dropped for a moment: a socket that is closed with unread input is
    reset by the kernel, which would discard our goodbye and what was written before it.

    The event loop doesn't report the end of a peer that is not read from, so the socket is polled
    meanwhile. A connection that broke ends at once. One whose peer has closed its side ends if
    nothing was read from it for `Connection.unread_end_s`: its last messages may be unread, but
    the owner may never have room for them.

    The owner gets the end exactly once, whatever happens before. An exception in the connection or
    in its owner fails the connection, with its protocol's goodbye for an internal error, and is not
    raised further; `callbacks` logs and counts it.

    With `turns`, the loop's thread is shared with other peers: a read is processed in parts that
    take a fraction of a turn, and what is left when the turn is over, or when too much waits to
    become durable, waits for a later one; no more is read meanwhile. (The event loop would call us
    with up to 32 reads of 256 kB in a row.)
    """

    connection: Connection
    transport: asyncio.Transport

    def __init__(
        self,
        connect: Callable[[float], Connection],
        owner: SessionOwner,
        *,
        callbacks: Callbacks | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns
        self._share = TurnShare(turns, self._read_on, takes_in=True) if turns is not None else None
        self._unread = b""
        self._unread_from = 0
        self._part_bytes = FIRST_PART_BYTES
        self._has_own_turn = False
        self._is_decoded = False
        self._is_abandoned = False
        self._ends: list[Callable[[], None]] = []
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
        self._poll_timer: asyncio.TimerHandle | None = None
        self._end_seen_at: float | None = None
        self._leaving = False
        self._peer_finished = False
        self._held = False
        self._restrained = False
        self._held_bytes = 0
        self.opened = False
        """Whether there is, or was, a socket; with TLS only after its handshake."""
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the socket is closed, which may be some time after the connection's end."""
        self.congested = False
        """Whether the write buffer is above its limit: the peer reads slower than we send."""
        self.read_at = self._loop.time()
        """When bytes were last read from the peer, by the loop's clock."""
        self.received_bytes = 0
        self.sent_bytes = 0
        self.on_congestion: Callable[[bool], None] | None = None
        """Called when `congested` becomes true, and before `handle_drain` when it becomes false."""
        self.tap: Tap | None = None
        """Records the bytes of this session, if set."""
        self.first_bytes = b""
        """How the peer began: what it speaks, if it is not what was expected."""
        self.lost: Exception | None = None
        """What ended the socket, if it broke: an alert of TLS, for example."""
        self.other_shares: list[TurnShare] = []
        """Those of its owner, for work that this peer causes."""
        self.account: MemoryAccount | None = None
        """Gets the size of what is buffered, if set; closed with the socket."""

    def wake(self) -> None:
        """Write what the owner sent on the connection at the end of this turn of the loop."""
        if not self._flush_planned and not self._leaving:
            self._flush_planned = True
            if self._turns is None:
                self._loop.call_soon(self._turn)
            else:
                self._turns.plan(self._turn)

    def close(self) -> None:
        """Send the protocol's goodbye, and abort after `CLOSE_S` if the peer doesn't answer it.

        Not to be called from `handle_events`: there `Connection.close` is enough.
        """
        if self._leaving:
            return
        self._run("close", self.connection.close)
        self._turn()
        self._loop.call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        """Close the socket without a goodbye, dropping what is not written. May be repeated."""
        if self.opened and not self.gone.done():
            self.transport.abort()

    def abandon(self) -> None:
        """Close the socket as `abort` does, and process nothing more of what was read."""
        self._forget_unread()
        self._is_decoded = False
        self._is_abandoned = True
        self.abort()

    def hold_reading(self, held: bool) -> None:
        """Stop reading from the peer, or resume: the owner has no room for what it sends."""
        self._held = held
        self._steer_reading()

    def restrain(self, restrained: bool) -> None:
        """Like `hold_reading`, for the part that limits the memory of all sessions."""
        self._restrained = restrained
        self._steer_reading()

    def silent_s(self) -> float:
        """The time since bytes were last read from the peer."""
        return max(self._loop.time() - self.read_at, 0.0)

    def measure_memory(self) -> None:
        """Report what is buffered, to `_NOTED_BYTES`. Every turn does; but the kernel takes bytes
        in between."""
        if self.opened and not self._leaving:
            held_bytes = (
                self.connection.held_bytes
                + len(self._unread)
                + self.transport.get_write_buffer_size()
            )
            change_bytes = held_bytes - self._held_bytes
            if abs(change_bytes) >= _NOTED_BYTES:
                # Before it is reported: when memory is short, the account's budget measures again.
                self._held_bytes = held_bytes
                if self.account is not None:
                    self.account.add(change_bytes)

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the socket, and TLS if there is any, is ready."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.opened = True
        failed = self._callbacks.run("connect", self._open)
        if failed is not None:
            # There is no connection that could fail, and the owner has cleaned up already.
            self._leaving = self._end_reported = True
            self.transport.abort()
            return
        self._turn()

    def _open(self) -> None:
        self.connection = self._connect(self._loop.time())
        self.connection.paced = self._share is not None

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with the bytes of one read."""
        self.received_bytes += len(data)
        tap = self.tap
        if tap is not None:
            self._show(tap.received, data)
        if not self.first_bytes:
            self.first_bytes = bytes(data[:_FIRST_BYTES])
        if self._leaving:
            return
        self.read_at = self._loop.time()
        share, turns = self._share, self._turns
        if share is None or turns is None:
            self._receive(data)
            return
        turns.enter()
        if self._unread or not share.may_run():
            # Only what was read before the loop noticed that reading is paused.
            self._unread = self._unread[self._unread_from :] + data
            self._unread_from = 0
            share.later(QUANTUM_S * len(self._unread) / self._part_bytes)
            self._steer_reading()
            return
        before, turns.current = turns.current, share
        began, dispatch_s = turns.clock(), turns.dispatch_s
        if len(data) <= self._part_bytes and (
            # What is held is known without asking, and nearly always small.
            self._held_bytes + len(data) < LARGE_BYTES
            or self.connection.completed_bytes(len(data)) < LARGE_BYTES
        ):
            self._receive(data)
            took_s = turns.time_since(began)
            # Not what the hub hands out because of it, which it does in parts of its own: batches
            # as small as that would cost each of a hundred subscribers a call for every message.
            if took_s - (turns.dispatch_s - dispatch_s) > QUANTUM_S:
                self._part_bytes = max(len(data) // 2, LEAST_PART_BYTES)
            if self.connection.has_backlog:
                share.later()
        else:
            self._unread = data
            self._read_on()
            took_s = turns.time_since(began)
        turns.current = before
        share.used(took_s)

    def _read_on(self) -> None:
        """Process what was read, part by part, until others have a turn."""
        share, turns = self._share, self._turns
        assert share is not None and turns is not None
        entered = turns.clock()
        has_own_turn, self._has_own_turn = self._has_own_turn, False
        if self._is_decoded:
            if turns.is_full:
                # One large message in a commit group: to write two of them is one long turn.
                share.hold()
                share.later(LARGE_S)
                return
            self._is_decoded = False
            self._turn(is_read=True)
            if self._unread:
                share.later()
                return
        if self.connection.has_backlog and not self._leaving:
            self.connection.catch_up(self.read_at)
            self._turn(is_read=True)
            if self._unread or self.connection.has_backlog:
                share.later()
                return
        while self._unread and not self._leaving:
            began, dispatch_s = turns.clock(), turns.dispatch_s
            start = self._unread_from
            missing_bytes = self.connection.missing_bytes
            end = start + max(self._part_bytes, missing_bytes)
            part = self._unread[start:end]
            if not has_own_turn and self.connection.completed_bytes(len(part)) >= LARGE_BYTES:
                self._has_own_turn = True
                share.later(LARGE_S)
                self._steer_reading()
                return
            self._unread_from = end
            if end >= len(self._unread):
                self._forget_unread()
            if has_own_turn:
                # Two turns: to decode a large frame takes about as long as what it causes.
                self._receive(part, is_decoding=True)
                self._is_decoded = True
                share.later(LARGE_S)
                return
            self._receive(part)
            took_s = turns.time_since(began) - (turns.dispatch_s - dispatch_s)
            if len(part) < missing_bytes:
                pass  # it was only kept, which takes no time
            elif took_s > QUANTUM_S:
                self._part_bytes = max(min(len(part) // 2, MOST_PART_BYTES), LEAST_PART_BYTES)
            elif took_s < QUANTUM_S / 2:
                self._part_bytes = max(self._part_bytes, min(2 * len(part), MOST_PART_BYTES))
            if self.connection.has_backlog or (
                self._unread
                and (
                    turns.time_since(entered) > QUANTUM_S
                    or share.unfinished
                    or turns.is_over()
                    or share.is_gated()
                )
            ):
                share.later()
                self._steer_reading()
                return
        ends, self._ends = self._ends, []
        for end_of in ends:
            end_of()

    def share_time(self, owner: str | None) -> None:
        """Whose part of the thread's time this peer uses; None: one of its own."""
        turns = self._turns
        if turns is not None:
            joined = None if owner is None else turns.owner(owner)
            for share in (self._share, *self.other_shares):
                if share is not None:
                    share.join(joined)

    def _forget_unread(self) -> None:
        self._unread, self._unread_from = b"", 0

    def _after_unread(self, end_of: Callable[[], None]) -> None:
        """The peer sends no more: first what is left of it is processed, in parts if it is long.

        Also who has nothing left waits for a later turn if this one is over: thousands may leave
        in the same moment.
        """
        share, turns = self._share, self._turns
        if share is None or turns is None or self._leaving or self._is_abandoned:
            end_of()
            return
        waits = self._unread or self._is_decoded or (self.opened and self.connection.has_backlog)
        if waits or (turns.is_over() and not share.is_gated()):
            self._ends.append(end_of)
            share.later()
        else:
            end_of()

    def _receive(self, data: bytes, *, is_decoding: bool = False) -> None:
        """Process bytes from the peer; if `is_decoding`, what they cause waits for another turn."""
        try:
            self.connection.receive_data(data, self.read_at)
        except Exception as error:
            # Called directly, not through `_run`: it happens for every read, and only a failure
            # should cost more.
            self._run("receive_data", _raise, error)
        if not is_decoding:
            self._exchange(is_read=True)

    def eof_received(self) -> bool:
        """Called by asyncio when the peer sends no more; gives whether we may still send."""
        self._peer_finished = True
        if self.tap is not None:
            self._show(self.tap.peer_finished)
        self._after_unread(self._end_half)
        return not self._leaving and not self.connection.closed and self.transport.can_write_eof()

    def _end_half(self) -> None:
        if not self._leaving:
            self._run("receive_eof", self.connection.receive_eof)
            self._turn()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio, once, when the socket is closed."""
        self.lost = error
        if self._turns is not None:
            self._turns.enter()
        if self.tap is not None:
            self._show(self.tap.closed, error)
        self._after_unread(self._end_socket)

    def _end_socket(self) -> None:
        if self._share is not None:
            self._share.close()
        self._cancel_timer()
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None
        self.gone.set_result(None)
        self._leaving = True
        if self.account is not None:
            self.account.close()
        if self._end_reported:
            return
        # First the orderly end: a connection whose protocol ends with the socket has not failed.
        self._run("receive_eof", self.connection.receive_eof)
        lost = ConnectionLost("the socket was closed")
        self._run("fail", self.connection.fail, lost)
        self._dispatch_events()
        if not self._end_reported:
            # The connection itself raises: its owner gets the end from us.
            self._hand_over([ConnectionFailed(lost)])

    def pause_writing(self) -> None:
        """Called by asyncio above the limit of the write buffer.

        A peer that doesn't read is not read from either: answers to it would only pile up.
        """
        self.congested = True
        self._steer_reading()
        if self.on_congestion is not None and not self._leaving:
            self._run("on_congestion", self.on_congestion, True)

    def resume_writing(self) -> None:
        """Called by asyncio when the write buffer has drained."""
        if self._turns is not None:
            self._turns.enter()
        self.congested = False
        self._steer_reading()
        if not self._leaving:
            if self.on_congestion is not None:
                self._run("on_congestion", self.on_congestion, False)
            self._run("handle_drain", self._owner.handle_drain)
            self.wake()

    # The turn: events out, bytes out, timers.

    def _turn(self, *, is_read: bool = False) -> None:
        if self._turns is not None:
            self._turns.enter()
        self._exchange(is_read=is_read)

    def _exchange(self, *, is_read: bool = False) -> None:
        """Hand events over, and write what the connection and its owner have to send; `is_read` if
        bytes of the peer were processed before."""
        connection = self.connection
        if self._leaving:
            self._flush_planned = False
            return
        # What the owner sends meanwhile is written below: `wake` must not plan another turn.
        self._flush_planned = True
        self._dispatch_events()
        self._flush_planned = False
        outgoing: list[bytes | memoryview] = []
        try:
            outgoing = connection.data_to_send()
        except Exception as error:
            self._run("data_to_send", _raise, error)
        if outgoing:
            if self.tap is not None:
                self._show(self.tap.sent, outgoing)
            self._write(outgoing)
        if connection.send_closed and not connection.closed:
            if self.transport.can_write_eof():
                self._finish()
            else:
                # TLS can't close one half: the end of our half is the end of both.
                self._run("receive_eof", connection.receive_eof)
                self._dispatch_events()
        if connection.closed:
            self._leave()
            return
        # What is below is asked in every turn, so where nothing has changed it is not even called.
        # Without a read, what is held grows by what the socket doesn't take.
        if self._share is not None and (
            is_read or self._held_bytes or self.transport.get_write_buffer_size()
        ):
            self.measure_memory()
        if connection.wants_data == self._reading_paused or self._unread:
            self._steer_reading()
        deadline = connection.next_deadline()
        if deadline is None:
            if self._timer is not None:
                self._cancel_timer()
        elif self._timer is None or deadline < self._timer_at:
            self._arm_timer(deadline)

    def _write(self, chunks: list[bytes | memoryview]) -> None:
        """One write for all chunks; small ones are joined, which is cheaper than a writev."""
        if self.transport.is_closing():  # `connection_lost` will follow
            return
        size = sum(map(len, chunks))
        self.sent_bytes += size
        if len(chunks) == 1:
            self.transport.write(chunks[0])
        elif size <= JOINED_BYTES:
            self.transport.write(b"".join(chunks))
        else:
            self.transport.writelines(chunks)

    def _dispatch_events(self) -> None:
        """Hand events over until the owner's reaction causes no more of them."""
        while True:
            try:
                events = self.connection.events()
            except Exception as error:
                self._run("events", _raise, error)
                return
            if not events:
                return
            self._hand_over(events)

    def _hand_over(self, events: list[Event]) -> None:
        if isinstance(events[-1], ConnectionClosed | ConnectionFailed):
            # Before the call: if the owner raises on the end, it still had it.
            self._end_reported = True
        try:
            self._owner.handle_events(events)
        except Exception as error:
            self._run("handle_events", _raise, error)

    def _run(self, kind: str, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a step of the connection or of its owner; an exception ends the connection."""
        failed = self._callbacks.run(kind, step, *args, **kwargs)
        if failed is not None:
            self._end_broken()

    def _end_broken(self) -> None:
        """Fail the connection; if even that raises, close the socket without a goodbye."""
        failed = self._callbacks.run("fail", self.connection.fail, InternalError("internal error"))
        if failed is not None:
            self.transport.abort()
        self.wake()

    def _show(self, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the tap. One that raises is removed: a recording with a hole is of no use."""
        if self._callbacks.run("tap", step, *args, **kwargs) is not None:
            self.tap = None

    def _steer_reading(self) -> None:
        """Pause or resume reading, as connection, congestion and owner allow."""
        wanted = self._leaving or (
            self.connection.wants_data
            and not self.congested
            and not self._held
            and not self._restrained
            and not self._unread
        )
        if wanted == self._reading_paused and not self.transport.is_closing():
            self._reading_paused = self.connection.unread = not wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()
                # Reading may pause and resume for every batch: a timer that runs is kept, since
                # cancelling and setting one each time would cost more than a poll in vain.
                self._end_seen_at = None
                if self._poll_timer is None:
                    self._poll_timer = self._loop.call_later(POLL_S, self._poll_peer)

    def _poll_peer(self) -> None:
        """Check that the peer is there, while it is not read from and asyncio doesn't notice."""
        self._poll_timer = None
        if not self._reading_paused or self._leaving or self.transport.is_closing():
            return
        self._poll_timer = self._loop.call_later(POLL_S, self._poll_peer)
        state = _poll(self.transport)
        if state & _BROKEN:
            self._run("fail", self.connection.fail, ConnectionLost("the socket was reset"))
            self._dispatch_events()
            self.transport.abort()
        elif state & _FINISHED:
            now = self._loop.time()
            if self._end_seen_at is None:
                # After a short pause what it sent before it closed can still be read.
                self._end_seen_at = now
            elif now - self._end_seen_at >= self.connection.unread_end_s:
                lost = ConnectionLost("the peer closed its side while it was not read from")
                self._run("fail", self.connection.fail, lost)
                self._turn()

    def _leave(self) -> None:
        """The connection has ended: write what is left, then close the socket."""
        self._leaving = True
        self._forget_unread()
        self._cancel_timer()
        self.connection.release()
        # Whether there is a goodbye or not: a reset would also discard answers that were written
        # before and that the peer hasn't read yet.
        if not self._peer_finished and self.transport.can_write_eof():
            self._finish()
            self._steer_reading()
        else:
            self.transport.close()
        # Closing waits until all is written; a peer that doesn't read would delay it for ever.
        if not self.gone.done():
            self._timer = self._loop.call_later(LINGER_S, self._linger, 1)

    def _finish(self) -> None:
        if self.transport.is_closing():
            return
        if self.tap is not None:
            self._show(self.tap.finished)
        with suppress(OSError):  # reset since the last write: `connection_lost` will follow
            self.transport.write_eof()

    def _linger(self, rounds: int) -> None:
        """Abort when all is written and the peer hasn't closed, or after `LINGER_ROUNDS`."""
        if self.transport.get_write_buffer_size() and rounds < LINGER_ROUNDS:
            self._timer = self._loop.call_later(LINGER_S, self._linger, rounds + 1)
        else:
            self.transport.abort()

    def _arm_timer(self, deadline: float) -> None:
        """Set the timer, for an earlier deadline than it has.

        Every read moves the deadline of a ping: the timer that runs fires, finds nothing due, and
        is set anew, which is cheaper than a cancelled timer for each read.
        """
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


def use_keep_alive(transport: asyncio.Transport) -> None:
    """Have TCP probe a silent peer, for protocols without a ping of their own.

    A machine that loses power sends no goodbye: a peer that only receives would wait for ever.
    Options that the system lacks are left out.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # reset meanwhile: the session notices the end anyway
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _poll(transport: asyncio.Transport) -> int:
    """The state of the socket by poll(2), other than that it can be read and written."""
    sock = transport.get_extra_info("socket")
    number = -1 if sock is None else sock.fileno()
    if number < 0:
        return 0
    poll = select.poll()
    poll.register(number, _FINISHED)
    return next((state for _, state in poll.poll(0)), 0)


def _raise(error: Exception) -> None:
    """Let `_run` log and count an exception of a step that was called directly."""
    raise error
