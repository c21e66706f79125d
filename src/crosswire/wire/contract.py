"""What every protocol offers: limits, frames, decoder, events and connection.

    Frame        the bytes between two offsets of one direction, with a name and fields
    Decoder      bytes of one direction in, frames and errors with their offsets out
    Connection   bytes and time in, events and bytes out; owns a Decoder for what it receives

A layout has two readers. Live sockets are read by the decoders. Captures are read in bulk by the
columnar scanners of `crosswire.pipeline.decode`, which leave to a decoder whatever is not an
ordinary frame. Both take codes, sizes and offsets from the protocol's `layout.py`, and property
tests (tests/pipeline/decode) compare what they return. Nothing in here uses a socket, a clock, a
random number or a log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import msgspec

from crosswire.errors import (
    CrosswireError,
    DecoderStateError,
    FrameError,
    RemoteProtocolError,
)

__all__ = [
    "Connection",
    "ConnectionClosed",
    "ConnectionFailed",
    "ConnectionOpened",
    "Decoder",
    "Encrypted",
    "Event",
    "Frame",
    "FrameError",
    "Gap",
    "Limits",
    "Placed",
    "ReceiveBuffer",
    "Row",
    "Transitions",
    "Unsynchronized",
    "following_states",
    "one_of",
]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer may demand of us. A protocol with more limits extends it in its `frames.py`.

    Every size is checked when a header announces it, before the bytes are buffered or allocated.
    """

    frame_bytes: int = 64 * 1024 * 1024
    handshake_s: float = 5.0


L = TypeVar("L", bound=Limits)


def one_of(limits: Limits | None, default: L) -> L:
    """`limits`, or the protocol's `default`. Raises TypeError for limits of another protocol."""
    if limits is None:
        return default
    if not isinstance(limits, type(default)):
        raise TypeError(f"limits must be {type(default).__name__}, not {type(limits).__name__}")
    return limits


# ---------------------------------------------------------------------------------------- frames


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Base of all frames: immutable, comparable, without its offset.

    The command line, the tables and the vectors show `frame_name` and `fields()`. `layer` is 1 for
    a frame that is carried inside another protocol's frames (eMQP on ZMTP): the lengths of layer 0
    add up to the bytes of the stream.
    """

    frame_name: ClassVar[str] = ""
    layer: ClassVar[int] = 0

    def fields(self) -> dict[str, Any]:
        """Names and values, ready for JSON: bytes as hex, absent values omitted.

        Raises FrameError for content that is not parsed before (JSON, properties) and is invalid.
        """
        return {
            name: value.hex() if isinstance(value, (bytes, memoryview)) else value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class Gap(Frame, frozen=True, gc=False):
    """Bytes that are missing in the capture."""

    frame_name: ClassVar[str] = "gap"


class Unsynchronized(Frame, frozen=True, gc=False):
    """Bytes skipped by a decoder that searched for a frame's start: it joined late, or a gap."""

    frame_name: ClassVar[str] = "unsynchronized"
    reason: str


class Encrypted(Frame, frozen=True, gc=False):
    """Bytes that only the two peers can read."""

    frame_name: ClassVar[str] = "encrypted"


Placed: TypeAlias = tuple[int, int, Frame | FrameError]
"""Offset, length, and the frame or error that these bytes are."""


class Row(msgspec.Struct, frozen=True):
    """A frame or error as text and numbers: printed by `crosswire decode`, stored in a table."""

    offset: int
    length: int
    layer: int
    frame: str | None = None
    fields: dict[str, Any] | None = None
    error: str | None = None
    reason: str | None = None

    def public(self) -> dict[str, Any]:
        """What is printed: of a frame its name and fields, of an error its code and reason."""
        if self.error is None:
            names = ("offset", "length", "frame", "fields")
        else:
            names = ("offset", "length", "error", "reason")
        return {name: getattr(self, name) for name in names}


# --------------------------------------------------------------------------------------- decoder

_SMALL_BYTES: Final = 4096
"""A chunk below this size is copied into a shared buffer instead of kept as an object."""
_COLLECTED_BYTES: Final = 65536
"""The size at which such a shared buffer is full: growing it further would copy it again."""


class ReceiveBuffer:
    """Collects the chunks of an incomplete frame and joins them once, when enough are there.

    A large frame is therefore copied once on its way in, however many reads bring it, and a peer
    that sends it in tiny pieces costs neither quadratic time nor an object per piece.
    """

    __slots__ = ("_chunks", "_need", "size")

    def __init__(self) -> None:
        self._chunks: list[bytes | bytearray | memoryview] = []
        self._need = 0
        self.size = 0

    def push(self, data: bytes) -> bytes | None:
        """All bytes at hand in one piece, or None while the frame they begin can't be complete."""
        if not self.size:
            # The usual case, a read that ended with a frame: nothing is copied.
            return data
        chunks = self._chunks
        self.size += len(data)
        last = chunks[-1]
        if len(data) >= _SMALL_BYTES:
            chunks.append(data)
        elif isinstance(last, bytearray) and len(last) < _COLLECTED_BYTES:
            last += data
        else:
            chunks.append(bytearray(data))
        if self.size < self._need:
            return None
        whole = b"".join(chunks)
        self.clear()
        return whole

    def keep(self, buffer: bytes, position: int, need: int) -> None:
        """Keep buffer[position:] until `need` bytes are there. Only for an empty buffer."""
        self.size = len(buffer) - position
        self._need = need
        if self.size:
            # A view keeps the whole buffer alive, so a few bytes of it are better copied.
            rest: bytes | memoryview = memoryview(buffer)[position:]
            self._chunks.append(bytes(rest) if self.size < _SMALL_BYTES else rest)

    def is_enough(self, count: int) -> bool:
        """Whether the frame may be complete with `count` bytes more."""
        return self.size + count >= self._need

    @property
    def missing_bytes(self) -> int:
        """How many bytes more the frame needs, as far as that is known; 0 if none has begun."""
        return self._need - self.size if self.size else 0

    def clear(self) -> None:
        """Drop all bytes."""
        self._chunks.clear()
        self._need = 0
        self.size = 0

    def peek(self) -> bytes:
        """A copy of the bytes; they stay."""
        return b"".join(self._chunks)


class _DecoderState(msgspec.Struct, array_like=True, frozen=True):
    """The stored form of `Decoder.dump()`; `own` is what the protocol adds."""

    version: int
    offset: int
    unread: int
    lost: bool
    search_from: int | None
    search_reason: str
    waiting: bytes
    need: int
    own: Any


_STATE = msgspec.msgpack.Decoder(_DecoderState)


class Decoder(ABC):
    """Reads one direction of a connection, without taking part in it.

    `sender` is the role that sent the bytes. A decoder that joins `late`, or continues after a gap,
    first searches for an offset from which `sync_frames` plausible frames follow one another, and
    returns the bytes before it as `Unsynchronized`. After an error whose frame has no known end it
    stops (`lost`): the rest is only counted in `unread`. Every byte is in an item of layer 0, in
    `pending`, or in `unread`, so that captures can be checked by adding up lengths.
    """

    state_version: ClassVar[int] = 1
    sync_frames: ClassVar[int] = 2

    def __init__(self, sender: str, limits: Limits, *, late: bool = False) -> None:
        self.sender = sender
        self.limits = limits
        self.offset = 0
        self.unread = 0
        self.lost = False
        self._buffer = ReceiveBuffer()
        self._need = 0
        self._search_from: int | None = 0 if late else None
        self._search_reason = "joined late"

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame, or that are still being searched for a frame's start."""
        if self._search_from is None:
            return self._buffer.size + self._held
        return self._buffer.size + self.offset - self._search_from

    def completed_bytes(self, count: int, before_bytes: int = 0) -> int:
        """The size of the frame that is incomplete now and complete with the next `count` bytes; 0
        if there is none. `before_bytes` are those of earlier frames that belong to it."""
        begun = self.pending + before_bytes
        return begun + count if begun and self._buffer.is_enough(count) else 0

    @property
    def missing_bytes(self) -> int:
        """What is known to be missing of the frame that has begun; 0 if none has."""
        return self._buffer.missing_bytes

    def feed(self, data: bytes) -> list[Placed]:
        """The frames and errors that these bytes complete, in order. Never raises FrameError."""
        if self.lost:
            self.unread += len(data)
            return []
        buffer = self._buffer.push(data)
        if buffer is None:
            return []
        placed: list[Placed] = []
        position = 0 if self._search_from is None else self._search(buffer, placed)
        # The search may just have ended: then the frames that it found are read, too.
        if self._search_from is None:
            position = self._scan_all(buffer, position, placed)
        if not self.lost:
            self._buffer.keep(buffer, position, self._need)
            self.offset += position
        return placed

    def skip(self, count: int) -> list[Placed]:
        """The next `count` bytes of the stream are missing: continue after them, by a search."""
        if self.lost:
            self.unread += count
            return []
        placed: list[Placed] = []
        start = self.offset - self._held if self._search_from is None else self._search_from
        if self.pending:
            placed.append((start, self.pending, Unsynchronized("cut short by a gap")))
        self.offset += self._buffer.size
        self._buffer.clear()
        placed.append((self.offset, count, Gap()))
        self.offset += count
        self._search_from = self.offset
        self._search_reason = "after a gap"
        return placed

    @property
    def unplaced(self) -> int | None:
        """Offset of the first byte that is in no item yet; None while lost or searching."""
        if self.lost or self._search_from is not None:
            return None
        return self.offset - self._held

    def jump(self, offset: int) -> None:
        """Continue at `offset`, because a scanner has read the frames between `unplaced` and there.

        Buffered bytes are dropped. The caller also sets the protocol's state as of that offset.
        """
        self._buffer.clear()
        self._need = 0
        self.offset = offset

    def release(self) -> None:
        """Drop buffered bytes: nothing more is read."""
        self._buffer.clear()
        self.lost = True

    def rows(self, data: bytes) -> list[Row]:
        """Like `feed`, as rows. Reads the fields too, so invalid content is an error here."""
        return [self.describe(*item) for item in self.feed(data)]

    @staticmethod
    def describe(offset: int, length: int, item: Frame | FrameError) -> Row:
        """The row of an item; of a frame whose content is invalid, the row of that error."""
        if not isinstance(item, FrameError):
            try:
                return Row(offset, length, item.layer, item.frame_name, item.fields())
            except FrameError as error:
                item_layer, item = item.layer, error
        else:
            item_layer = 0
        return Row(offset, length, item_layer, error=item.code, reason=item.reason)

    def dump(self) -> bytes:
        """The whole state, for `load` of a decoder with the same arguments: small, versioned."""
        return msgspec.msgpack.encode(
            _DecoderState(
                version=self.state_version,
                offset=self.offset,
                unread=self.unread,
                lost=self.lost,
                search_from=self._search_from,
                search_reason=self._search_reason,
                waiting=self._buffer.peek(),
                need=self._need,
                own=self._save(),
            )
        )

    def load(self, state: bytes) -> None:
        """Continue where `dump` was called. Raises DecoderStateError and then changes nothing."""
        try:
            saved = _STATE.decode(state)
        except msgspec.MsgspecError as error:
            raise DecoderStateError(f"decoder state is damaged: {error}") from None
        if saved.version != self.state_version:
            raise DecoderStateError(
                f"decoder state has version {saved.version}, this is version {self.state_version}"
            )
        try:
            # First what can fail.
            self._restore(saved.own)
        except (TypeError, ValueError, KeyError) as error:
            raise DecoderStateError(f"decoder state is damaged: {error}") from None
        self.offset, self.unread, self.lost = saved.offset, saved.unread, saved.lost
        self._search_from, self._search_reason = saved.search_from, saved.search_reason
        self._need = saved.need
        self._buffer = ReceiveBuffer()
        self._buffer.keep(saved.waiting, 0, saved.need)

    # What a protocol implements.

    @abstractmethod
    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        """Append every complete frame from `position` on. Returns the position of the first that is
        not complete, and how many bytes from there are needed to read on.

        `buffer[0]` is at `self.offset`. Raises FrameError, with its offset, for an invalid frame.
        """

    @abstractmethod
    def _measure(self, buffer: bytes, position: int) -> int | None:
        """Length of what may be a frame here; 0 with too few bytes to decide, None if it is none.

        Used by the search for a frame's start, where most bytes are none: better reject a rare
        frame than accept text. Frames over 64 KiB are rejected, since waiting for one that is none
        would hide all that follow.
        """

    @property
    def _held(self) -> int:
        """Bytes just before `offset` of an incomplete frame, if a protocol takes frames in piece by
        piece; 0 while searching."""
        return 0

    def _save(self) -> Any:
        """State beyond the buffered bytes, of types that msgpack can encode."""
        return None

    def _restore(self, own: Any) -> None:
        """Restore what `_save` returned; raise TypeError, ValueError or KeyError if damaged."""
        if own is not None:
            raise ValueError("unexpected content")

    # Common to all protocols.

    def _scan_all(self, buffer: bytes, position: int, placed: list[Placed]) -> int:
        while True:
            try:
                position, self._need = self._scan(buffer, position, placed)
                return position
            except FrameError as error:
                # The error is kept as a value: its traceback would keep the buffer alive.
                error.__traceback__ = None
                placed.append((error.offset, error.length, error))
                position = error.offset + error.length - self.offset
                if not error.resumable:
                    # Where the next frame starts is unknown. A search would find plausible frames
                    # in what may be a payload, so nothing more is read.
                    self.lost = True
                    self.offset += position
                    self.unread = len(buffer) - position
                    return position

    def _search(self, buffer: bytes, placed: list[Placed]) -> int:
        """Position of the first frame if it was found, else from where to search again."""
        assert self._search_from is not None
        # Every offset is a candidate; of the bytes before the first plausible one nothing is kept.
        for start in range(len(buffer)):
            position = start
            for _ in range(self.sync_frames):
                length = self._measure(buffer, position)
                if length is None:
                    break
                position += length
                if not length or position > len(buffer):
                    # Plausible so far: the search continues here when more bytes are there.
                    self._need = 0
                    return start
            else:
                found = self.offset + start
                reason = self._search_reason
                placed.append(
                    (self._search_from, found - self._search_from, Unsynchronized(reason))
                )
                self._search_from = None
                return start
        return len(buffer)


# ------------------------------------------------------------------------------------ connection


class Event(msgspec.Struct, frozen=True):
    """Base of what a connection reports to its owner, named in the past tense."""


class ConnectionOpened(Event, frozen=True):
    """The handshake is complete. A protocol that negotiates more extends it."""


class ConnectionClosed(Event, frozen=True):
    """Ended without an error; `clean` if the protocol's own closing message was sent or received,
    or it has none."""

    clean: bool


class ConnectionFailed(Event, frozen=True):
    """Ended by a violation, a timeout or the peer's error; the closing message is ready to send."""

    error: CrosswireError


S = TypeVar("S", bound=Enum)

Transitions: TypeAlias = dict[tuple[S, type[Frame]], tuple[S, ...]]
"""The frames that may be received in each state, and the states that may follow. Where there are
several, the frame's content decides. A frame that is not in the table is a violation."""


def following_states(transitions: Transitions[S]) -> dict[S, dict[type[Frame], S]]:
    """By state and frame, the state that follows; of several the first."""
    following: dict[S, dict[type[Frame], S]] = {}
    for (state, kind), after in transitions.items():
        following.setdefault(state, {})[kind] = after[0]
    return following


class Connection(ABC):
    """One end of a connection: bytes and time in, events and bytes out.

    The owner reads the socket into `receive_data`, then takes `events()`, then writes
    `data_to_send()`; it calls `handle_deadline` at `next_deadline()`; it ends the sending half when
    `send_closed` and the socket when `closed`, both after writing. It stops reading while
    `wants_data` is false. Receiving never raises on what a peer sent: a violation queues the
    protocol's closing message and ends with ConnectionFailed. The last event is always
    ConnectionClosed or ConnectionFailed, once.

    Sending after the end: an owner answers an event, and the end may have been in the same read as
    the request. So a send without a return value (an answer, an acknowledgement, a subscription) is
    ignored once the connection is closed. One that returns an identifier raises LocalProtocolError,
    since its caller would wait for an answer to it; check `closed` before.
    """

    def __init__(self, role: str, decoder: Decoder) -> None:
        self.role = role
        self.closed = False
        self.send_closed = False
        self.unread = False
        """Set by an owner that currently does not read from the socket: no timeout may count then,
        since the peer's sign of life may be among the unread bytes."""
        self.paced = False
        """Set by an owner that calls `catch_up` while `has_backlog`: then a frame that causes much
        work is processed in parts, and others can be served in between."""
        self.has_backlog = False
        """Whether something that was received is not processed yet."""
        self._decoder = decoder
        self._own_limits: Limits | None = None
        self._events: list[Event] = []
        self._outgoing: list[bytes | memoryview] = []

    @property
    def wants_data(self) -> bool:
        """False while too many requests of the peer wait for an answer: reading would add more."""
        return True

    @property
    def held_bytes(self) -> int:
        """The size of what was received and is kept: an incomplete frame, and, where the connection
        counts them, requests without an answer."""
        return self._decoder.pending

    def completed_bytes(self, count: int) -> int:
        """How much of what is kept would be processed at once with the next `count` bytes."""
        return self._decoder.completed_bytes(count)

    @property
    def missing_bytes(self) -> int:
        """What is known to be missing of the frame that has begun; 0 if none has."""
        return self._decoder.missing_bytes

    def limit_frames(self, frame_bytes: int | None) -> None:
        """Accept frames up to this size only, until this is called with None: then those that the
        protocol's limits allow."""
        own = self._own_limits = self._own_limits or self._decoder.limits
        most = own.frame_bytes if frame_bytes is None else min(frame_bytes, own.frame_bytes)
        self._decoder.limits = msgspec.structs.replace(own, frame_bytes=most)

    def release(self) -> None:
        """Drop what is kept of a connection that has ended, and written its last bytes: the object
        may live on for a while, as part of a cycle."""
        self._decoder.release()

    @property
    def unread_end_s(self) -> float:
        """How long bytes that a peer sent before it closed its side may stay unread until the
        connection ends. 0 where the end of the stream ends the connection anyway: what was not read
        was not acknowledged either."""
        return 0.0

    def receive_data(self, data: bytes, now: float) -> None:
        """Process bytes from the peer; `events()` and `data_to_send()` have the results."""
        if self.closed:
            return
        try:
            self._receive(self._decoder.feed(data), now)
        except RemoteProtocolError as error:
            self.fail(error)

    def catch_up(self, now: float) -> None:
        """Process the next part of what was received, while `has_backlog`."""
        if not self.closed:
            try:
                self._receive([], now)
            except RemoteProtocolError as error:
                self.fail(error)

    def receive_eof(self) -> None:
        """The peer will send no more."""
        if not self.closed:
            self._end(ConnectionClosed(clean=False))

    def handle_deadline(self, now: float) -> None:
        """Call at or after `next_deadline()`; at any other time it has no effect."""
        # Timers fire early or late, and the deadline may have moved since this one was set.
        deadline = self.next_deadline()
        if self.closed or deadline is None or now < deadline:
            return
        try:
            self._expire(now)
        except RemoteProtocolError as error:
            self.fail(error)

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When to call `handle_deadline`; None if nothing is waited for."""

    def events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> list[bytes | memoryview]:
        """The bytes to write, in order, that were queued since the last call."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    @abstractmethod
    def close(self) -> None:
        """Queue the protocol's closing message, if it has one, and end. No effect when closed."""

    def fail(self, error: CrosswireError) -> None:
        """Queue the protocol's message for this error, and end."""
        if not self.closed:
            error.__traceback__ = None
            self._send_goodbye(error)
            self._end(ConnectionFailed(error))

    # What a protocol implements.

    @abstractmethod
    def _receive(self, placed: list[Placed], now: float) -> None:
        """Process frames; raise RemoteProtocolError for a violation."""

    @abstractmethod
    def _expire(self, now: float) -> None:
        """A deadline has passed: act, or raise PeerTimeout."""

    @abstractmethod
    def _send_goodbye(self, error: CrosswireError) -> None:
        """Queue the protocol's message for this error. Only this method maps errors to messages."""

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self.closed = True
        self.has_backlog = False
        self._events.append(event)
