"""A Relink connection: buffer → frames → state → events, for one link at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import msgspec

from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    FrameError,
    InvalidHandshake,
    LocalProtocolError,
    PeerTimeout,
    RemoteProtocolError,
    UnexpectedFrame,
    UnsupportedVersion,
)
from crosswire.wire.contract import (
    Connection,
    ConnectionClosed,
    ConnectionFailed,
    Event,
    Frame,
    Limits,
    Placed,
    Transitions,
    following_states,
    one_of,
)
from crosswire.wire.relink.channels import ReceivingChannel
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.events import HandshakeReceived, LinkForgotten, LinkOpened
from crosswire.wire.relink.frames import (
    DEFAULTS,
    Buffer,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Ping,
    Pong,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
    serialize,
    serialize_all,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    LinkTerms,
    ListenerHello,
    ListenerVersion,
    serialize_handshake,
)
from crosswire.wire.relink.layout import MAX_LINK, VERSION, PacketLayout, packet_layout
from crosswire.wire.relink.link import Link, Phase

__all__ = ["TRANSITIONS", "RelinkConnection", "State"]


class State(Enum):
    """What is received next."""

    VERSION = "version"
    HELLO = "hello"
    ANSWER = "answer"
    """Nothing: the listener's owner has been asked for a link."""
    RESUMING = "resuming"
    """An old link: the peer reports what it received, and sends nothing new before its resume."""
    OPEN = "open"
    CLOSED = "closed"


_ALWAYS: Final = (
    Nop,
    Ping,
    Pong,
    ChannelAcknowledgement,
    SequenceAcknowledgement,
    Shutdown,
)

TRANSITIONS: Final[Transitions[State]] = {
    (State.VERSION, ConnectorVersion): (State.HELLO,),
    (State.VERSION, ListenerVersion): (State.HELLO,),
    (State.HELLO, ConnectorHello): (State.ANSWER,),
    (State.HELLO, ListenerHello): (State.RESUMING, State.OPEN, State.CLOSED),
    **{(State.RESUMING, kind): (State.RESUMING,) for kind in _ALWAYS},
    (State.RESUMING, Resume): (State.OPEN,),
    **{(State.OPEN, kind): (State.OPEN,) for kind in _ALWAYS},
    (State.OPEN, ChannelOperation): (State.OPEN,),
    (State.OPEN, SequenceOperation): (State.OPEN,),
    (State.OPEN, Message): (State.OPEN,),
}
"""From ANSWER, in which nothing may be received, the owner's `accept` leads to RESUMING or OPEN."""

_AT_ONCE: Final = 1024
"""Channels of a multicast that are processed before others may have a turn."""

_FOLLOWING: Final = {State.ANSWER: {}, **following_states(TRANSITIONS)}


class RelinkConnection(Connection):
    """One connection of a link.

    A connector is given the `link` that it opens or resumes. A listener reports what the connector
    wants with HandshakeReceived, and its owner, which knows endpoints and links, answers with
    `accept(link)`, `deny_link` or `refuse`. From then on `link` may be used directly, connected or
    not: the connection takes its packets when data is to be sent. When the connection has ended,
    the link can be resumed unless `link.ended`.
    """

    def __init__(
        self,
        role: str,
        now: float,
        *,
        limits: Limits | None = None,
        link: Link | None = None,
        require_old_link: bool = False,
    ) -> None:
        self.limits = one_of(limits, DEFAULTS)
        self.state = State.VERSION
        self.hello: ConnectorHello | None = None
        self._link = link
        self._handshake_deadline = now + self.limits.handshake_s
        self._last_received_at = now
        self._pong_deadline: float | None = None
        self._closures_before_ping: dict[int, ReceivingChannel] = {}
        self._paused = False
        self._held = False
        self._attached = False
        self._postponed: list[Placed] = []
        self._layout: PacketLayout | None = None
        if role == "connector":
            self._link = link = link or Link(role, LinkTerms(endpoint=""), limits=self.limits)
            terms = link.terms
            sizes = terms.connector_id_size, terms.listener_id_size
            hints = dict(zip(("connector_id_size", "listener_id_size"), sizes, strict=True))
            super().__init__(role, RelinkDecoder("listener", limits=self.limits, hints=hints))
            self.hello = ConnectorHello(
                **{name: getattr(terms, name) for name in terms.__struct_fields__},
                require_old_link=require_old_link,
                epoch=link.epoch,
                link=link.id,
            )
            self._send_handshake(ConnectorVersion(VERSION))
        else:
            super().__init__(role, RelinkDecoder("connector", limits=self.limits))
        self._handlers: dict[type[Frame], Callable[..., None]] = {
            ConnectorVersion: self._on_connector_version,
            ListenerVersion: self._on_listener_version,
            ConnectorHello: self._on_connector_hello,
            ListenerHello: self._on_listener_hello,
            Nop: self._on_nop,
            Ping: self._on_ping,
            Pong: self._on_pong,
            Resume: self._on_resume,
        }

    @property
    def link(self) -> Link:
        """The link of this connection. Raises LocalProtocolError before a listener has one."""
        if self._link is None:
            raise LocalProtocolError("the handshake has not agreed on a link yet")
        return self._link

    # Answering a handshake.

    def accept(self, link: Link) -> None:
        """Agree on a link: the one that the hello names, which is resumed, or a new one.

        Raises LocalProtocolError for a link on other terms. Like the other two answers it is
        ignored if the connection has ended meanwhile.
        """
        if self.closed:
            return
        hello = self._require_asked()
        if link.terms != LinkTerms.of(hello):
            raise LocalProtocolError("the link has another endpoint, other id sizes or other flags")
        if not 1 <= link.id <= MAX_LINK:
            raise LocalProtocolError(f"{link.id} is not a link id")
        resumed = (link.epoch, link.id) == (hello.epoch, hello.link)
        if hello.require_old_link and not resumed:
            raise LocalProtocolError("the connector wants its old link or none")
        self._link = link
        self._open(resumed=resumed)
        # Before the link's packets: those are taken when data is to be sent.
        self._send_handshake(ListenerHello(link.epoch, link.id))

    def deny_link(self, epoch: int) -> None:
        """The old link, which the connector requires, is not known."""
        if self.closed:
            return
        self._require_asked()
        self._send_handshake(ListenerHello(epoch, 0))
        self._end(ConnectionClosed(clean=True))

    def refuse(self, reason: str) -> None:
        """No such endpoint, or not on these terms, or not for this peer: Relink disconnects."""
        if self.closed:
            return
        self._require_asked()
        self.fail(ConnectionRejected(reason))

    # Sending. It is the link that sends, now or after the next reconnection.

    def send_message(self, channel: int, *parts: Buffer) -> int:
        """Gives the message's sequence number. Raises LocalProtocolError if the window is full."""
        return self.link.send(channel, parts)

    def send_multicast(self, channels: Sequence[int], *parts: Buffer) -> list[int]:
        """Gives the message's sequence number on each of the channels."""
        return self.link.send_multicast(channels, parts)

    def send_commit(self, channel: int, sequence: int | None = None) -> None:
        """Have the messages up to `sequence`, or all, processed."""
        self.link.commit(channel, sequence)

    def send_rollback(self, channel: int, sequence: int | None = None) -> None:
        """Have the messages up to `sequence`, or all, ignored."""
        self.link.rollback(channel, sequence)

    def send_close(self, channel: int) -> None:
        """Close a channel; ChannelClosed follows when the peer has consumed all of it."""
        self.link.close(channel)

    def send_received(self, channel: int, sequence: int) -> None:
        """The messages up to `sequence` are stored: the peer need not keep them."""
        self.link.mark_received(channel, sequence)

    def send_consumed(self, channel: int, sequence: int) -> None:
        """The messages up to `sequence` have been processed."""
        self.link.consume(channel, sequence)

    def send_committed(self, channel: int, sequence: int) -> None:
        """The committed messages up to `sequence` have been processed successfully."""
        self.link.settle(channel, sequence, committed=True)

    def send_uncommitted(self, channel: int, sequence: int) -> None:
        """The committed messages up to `sequence` could not be processed."""
        self.link.settle(channel, sequence, committed=False)

    def send_shutdown(self) -> None:
        """Send no more messages; the link ends when the peer has shut down, too."""
        self.link.shutdown()

    def close(self) -> None:
        """End the connection, not the link: that takes a shutdown by both peers."""
        if not self.closed:
            self._flush()
            self._end(ConnectionClosed(clean=self._both_shut_down))

    def data_to_send(self) -> list[bytes | memoryview]:
        """What is to be written, the link's packets included."""
        self._flush()
        return super().data_to_send()

    # Receiving.

    def hold(self, held: bool) -> None:
        """Stop reading from this peer, since the owner has no room, or continue."""
        self._held = held
        self._paused = self._paused or held

    @property
    def held_bytes(self) -> int:
        """An incomplete packet, and what the link's owner has not consumed."""
        link = self._link
        held_bytes = link.held_bytes if link is not None and self._attached else 0
        return self._decoder.pending + held_bytes

    @property
    def wants_data(self) -> bool:
        """False while the owner has no room, or has too many bytes to consume.

        Undecided messages don't count: their decision has to be read.
        """
        if self._held:
            return False
        link = self._link
        if link is None or not self._attached:
            return True
        return link.unconsumed_bytes < self.limits.unconsumed_bytes

    def receive_data(self, data: bytes, now: float) -> None:
        """As in `Connection`; any data shows that the peer is alive."""
        self._last_received_at = now
        was_paused = self._paused
        super().receive_data(data, now)
        self._paused = not self.wants_data
        if self._pong_deadline is not None and (self._decoder.pending or was_paused):
            # Its pong may follow a large packet that is still arriving, or data that we did not
            # read while paused.
            self._pong_deadline = now + self.limits.ping_timeout_s

    def receive_eof(self) -> None:
        """The connection ends, cleanly only after both shutdowns; the link can be resumed."""
        if not self.closed:
            self._end(ConnectionClosed(clean=self._both_shut_down))

    def events(self) -> list[Event]:
        """What happened since the last call. Ends the connection of a link that has finished."""
        if self._attached and self.link.finished:
            self._flush()
            self._end(ConnectionClosed(clean=True))
        return super().events()

    def next_deadline(self) -> float | None:
        """Of the handshake, of a pong, or of the next ping."""
        if self.closed:
            return None
        if not self._attached:
            return self._handshake_deadline
        if not self.wants_data:  # while we don't read, silence means nothing
            return None
        if self._pong_deadline is not None:
            return self._pong_deadline
        return self._last_received_at + self.limits.ping_interval_s

    def _receive(self, placed: list[Placed], _now: float) -> None:
        if self._postponed:
            placed, self._postponed = self._postponed + placed, []
            self.has_backlog = False
        handlers = self._handlers
        following = _FOLLOWING[self.state]
        events = self._events
        index, count = 0, len(placed)
        # What mypy is not to check here: `following` has only frames of this state, and in those
        # with frames for a link there is one. To check that again would cost each frame a call.
        while index < count:
            frame = placed[index][2]
            kind = type(frame)
            index += 1
            if kind not in following:
                raise self._refused(frame)
            if self.paced and len(getattr(frame, "channels", ())) > _AT_ONCE:
                first = self._postpone(frame, placed, index)  # type: ignore[arg-type]  # see above
                self._link.receive(first, events)  # type: ignore[union-attr]  # see above
                return
            if kind is Message:
                # Consecutive messages at once: see `ReceivingHalf.receive_run`.
                start = index - 1
                while index < count:
                    following_frame = placed[index][2]
                    if type(following_frame) is not Message or (
                        self.paced and len(following_frame.channels) > _AT_ONCE
                    ):
                        break
                    index += 1
                run = [each[2] for each in placed[start:index]]
                self._link.receive_run(run, events)  # type: ignore[union-attr, arg-type]  # as above
                continue
            if kind not in handlers:
                self._link.receive(frame, events)  # type: ignore[union-attr, arg-type]  # as above
                continue
            handlers[kind](frame)
            if self.closed:
                return
            following = _FOLLOWING[self.state]

    def _postpone(self, frame: Frame, placed: list[Placed], index: int) -> Frame:
        """The frame for its first channels. For the others, and all frames from `index` on, there
        is `catch_up`."""
        if isinstance(frame, Message):
            # Of all its channels: to the parts it would not apply.
            self.link.check_multicast(frame)
        channels = frame.channels  # type: ignore[attr-defined]  # all that are postponed have some
        rest: Frame = msgspec.structs.replace(frame, channels=channels[_AT_ONCE:])
        offset, length, _ = placed[index - 1]
        self._postponed = [(offset, length, rest), *placed[index:]]
        self.has_backlog = True
        first: Frame = msgspec.structs.replace(frame, channels=channels[:_AT_ONCE])
        return first

    def _refused(self, item: Frame | FrameError) -> RemoteProtocolError:
        if isinstance(item, FrameError):
            return item
        return UnexpectedFrame(f"unexpected {item.frame_name} in state {self.state.value}")

    def _on_connector_version(self, frame: ConnectorVersion) -> None:
        self._send_handshake(ListenerVersion(min(frame.version, VERSION)))
        self.state = State.HELLO

    def _on_listener_version(self, frame: ListenerVersion) -> None:
        if frame.version > VERSION:
            raise UnsupportedVersion(f"version {frame.version} was answered to version {VERSION}")
        assert self.hello is not None
        self._send_handshake(self.hello)
        self.state = State.HELLO

    def _on_connector_hello(self, frame: ConnectorHello) -> None:
        self.hello = frame
        self.state = State.ANSWER
        self._events.append(HandshakeReceived(frame))

    def _on_listener_hello(self, frame: ListenerHello) -> None:
        link, hello = self.link, self.hello
        assert hello is not None
        resumed = bool(frame.link) and (frame.epoch, frame.link) == (link.epoch, link.id)
        if not resumed and hello.require_old_link and frame.link:
            raise InvalidHandshake("a new link was offered where the old one was required")
        if not frame.link and not hello.require_old_link:
            raise InvalidHandshake("no link id")
        if not resumed and link.id:
            self._events.append(LinkForgotten(link.epoch, link.id))
            link.detach(ended=True)
            self._link = Link(link.role, link.terms, limits=link.limits, start=link.start)
        if not frame.link:
            self._end(ConnectionClosed(clean=True))
            return
        self.link.epoch, self.link.id = frame.epoch, frame.link
        self._open(resumed=resumed)

    def _on_nop(self, _frame: Nop) -> None:
        pass

    def _on_ping(self, _frame: Ping) -> None:
        self._send(Pong())

    def _on_pong(self, _frame: Pong) -> None:
        """The answer to our ping: the peer has received all that we sent before the ping."""
        if self._pong_deadline is not None:
            self._pong_deadline = None
            self.link.confirm(self._closures_before_ping)

    def _on_resume(self, frame: Resume) -> None:
        self.link.receive(frame, self._events)
        self.state = State.OPEN

    def _expire(self, now: float) -> None:
        if not self._attached:
            raise PeerTimeout("no handshake in time")
        if self._paused or self.unread:
            # We have not been reading: the peer gets a whole interval from now on.
            self._paused = self.unread
            self._last_received_at = now
            if self._pong_deadline is not None:
                self._pong_deadline = now + self.limits.ping_timeout_s
            return
        if self._pong_deadline is not None:
            raise PeerTimeout("no pong in time")
        # After what is queued, so that the pong confirms the `closed` among it.
        self._flush()
        self._send(Ping())
        self._closures_before_ping = self.link.closures
        self._pong_deadline = now + self.limits.ping_timeout_s

    # Ending.

    def _send_goodbye(self, error: CrosswireError) -> None:
        """Relink has no error packet: the connection just ends."""

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        """After a timeout or a disconnect the link can be resumed; a violation ends the link, too:
        what the peer believes to have sent can't be trusted any more."""
        self.state = State.CLOSED
        if self._attached:
            self._attached = False
            violated = isinstance(event, ConnectionFailed) and (
                isinstance(event.error, RemoteProtocolError)
                and not isinstance(event.error, PeerTimeout)
            )
            self.link.detach(ended=violated or self._both_shut_down)
        super()._end(event)

    # In common.

    @property
    def _both_shut_down(self) -> bool:
        return self._link is not None and self._link.shut_down and self._link.peer_shut_down

    def _open(self, *, resumed: bool) -> None:
        link = self.link
        link.attach(resumed=resumed)
        self._attached = True
        terms = link.terms
        self._layout = packet_layout(self.role, terms.connector_id_size, terms.listener_id_size)
        self.state = State.RESUMING if link.phase is Phase.RESUMING else State.OPEN
        self._events.append(LinkOpened(link.epoch, link.id, resumed))

    def _require_asked(self) -> ConnectorHello:
        if self.state is not State.ANSWER or self.hello is None:
            raise LocalProtocolError("there is no handshake to be answered")
        return self.hello

    def _flush(self) -> None:
        if self._attached:
            assert self._layout is not None
            self._outgoing += serialize_all(self.link.packets(), self._layout)

    def _send(self, packet: Frame) -> None:
        assert self._layout is not None
        self._outgoing += serialize(packet, self._layout)

    def _send_handshake(self, frame: Frame) -> None:
        self._outgoing.append(serialize_handshake(frame))
