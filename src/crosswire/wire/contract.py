"""What every protocol offers: frames, decoder, events, connection, limits, and its entry.

    Frame        something between two offsets of one direction; knows its name and its fields
    Decoder      bytes of one direction in, placed frames and errors out; can be saved and restored
    Connection   bytes and time in, events and bytes out; holds a Decoder for what it receives
    Protocol     the entry in the registry: names, ports, factories, sniffing

A connection reads with the very decoder that captures are read with, so that what the hub saw and
what the pipeline sees can't differ. Nothing in here knows a socket, a clock, a random number or a
log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeAlias, TypeVar
from typing import Protocol as Shape

import msgspec

from crosswire.errors import (
    CrosswireError,
    DecoderStateError,
    FrameError,
    RemoteProtocolError,
)
from crosswire.wire.inbox import Inbox

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
    "Hint",
    "Limits",
    "Placed",
    "Protocol",
    "Row",
    "Sniff",
    "Unsynchronized",
    "one_of",
]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer may ask of us. A protocol with more to limit extends it; see its `frames.py`."""

    frame_bytes: int = 64 * 1024 * 1024
    handshake_s: float = 5.0


# ---------------------------------------------------------------------------------------- frames


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Base of all frames: complete at birth, comparable, without a place.

    `frame_name` and `fields()` are what the command line, the tables and the vectors call it.
    `layer` is 1 for a frame that stands inside another protocol's frames (eMQP on ZMTP): bytes add
    up on layer 0.
    """

    frame_name: ClassVar[str] = ""
    layer: ClassVar[int] = 0

    def fields(self) -> dict[str, Any]:
        """Names and values, ready for JSON: bytes as hex, what is absent left out.

        Raises FrameError where only a closer look shows that the content is not what it should be.
        """
        return {
            name: value.hex() if isinstance(value, (bytes, memoryview)) else value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class Gap(Frame, frozen=True, gc=False):
    """Bytes that the capture is missing."""

    frame_name: ClassVar[str] = "gap"


class Unsynchronized(Frame, frozen=True, gc=False):
    """Bytes seen before a decoder that joined late, or behind a gap, found a frame's start."""

    frame_name: ClassVar[str] = "unsynchronized"
    reason: str


class Encrypted(Frame, frozen=True, gc=False):
    """Bytes that only the two peers can read."""

    frame_name: ClassVar[str] = "encrypted"


Placed: TypeAlias = tuple[int, int, Frame | FrameError]
"""Offset, length, and what stands there."""


class Row(msgspec.Struct, frozen=True):
    """A placed frame or error in words: what `crosswire decode` prints and a table holds."""

    offset: int
    length: int
    layer: int
    frame: str | None = None
    fields: dict[str, Any] | None = None
    error: str | None = None
    reason: str | None = None

    def public(self) -> dict[str, Any]:
        if self.error is None:
            names = ("offset", "length", "frame", "fields")
        else:
            names = ("offset", "length", "error", "reason")
        return {name: getattr(self, name) for name in names}


# --------------------------------------------------------------------------------------- decoder


class _DecoderState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `Decoder.dump()`; `own` is what the protocol adds."""

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

    `sender` is the role whose bytes these are. A decoder that starts `late`, or behind a gap, first
    looks for a place from which `sync_frames` plausible frames follow one another, and says with
    `Unsynchronized` what it passed over. Behind an error whose frame has no known end it stops: the
    rest is counted in `unread`. Every byte is in a placed item of layer 0, in `pending`, or in
    `unread`.
    """

    state_version: ClassVar[int] = 1
    sync_frames: ClassVar[int] = 2

    def __init__(self, sender: str, limits: Limits, *, late: bool = False) -> None:
        self.sender = sender
        self.limits = limits
        self.offset = 0
        self.unread = 0
        self.lost = False
        self._inbox = Inbox()
        self._need = 0
        self._search_from: int | None = 0 if late else None
        self._search_reason = "joined late"

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet, or that are still being searched."""
        searched = 0 if self._search_from is None else self.offset - self._search_from
        return self._inbox.size + searched + self._held

    def feed(self, data: bytes) -> list[Placed]:
        """Whatever became whole with these bytes, in order."""
        if self.lost:
            self.unread += len(data)
            return []
        buffer = self._inbox.push(data)
        if buffer is None:
            return []
        placed: list[Placed] = []
        position = 0 if self._search_from is None else self._search(buffer, placed)
        if self._search_from is None:
            position = self._scan_all(buffer, position, placed)
        if not self.lost:
            self._inbox.keep(buffer, position, self._need)
            self.offset += position
        return placed

    def skip(self, count: int) -> list[Placed]:
        """The next `count` bytes of the stream are missing; goes on behind them."""
        if self.lost:
            self.unread += count
            return []
        placed: list[Placed] = []
        start = self.offset - self._held if self._search_from is None else self._search_from
        if self.pending:
            placed.append((start, self.pending, Unsynchronized("cut short by a gap")))
        self.offset += self._inbox.size
        self._inbox.clear()
        placed.append((self.offset, count, Gap()))
        self.offset += count
        self._search_from = self.offset
        self._search_reason = "behind a gap"
        return placed

    @property
    def unplaced(self) -> int | None:
        """Offset of the first byte that is in no placed item yet; None while lost or searching."""
        if self.lost or self._search_from is not None:
            return None
        return self.offset - self._held

    def jump(self, offset: int) -> None:
        """Go on at `offset`: from `unplaced` up to there somebody else has read whole frames. The
        bytes that wait are forgotten. For who knows the state in which that leaves a protocol."""
        self._inbox.clear()
        self._need = 0
        self.offset = offset

    def rows(self, data: bytes) -> list[Row]:
        """Like `feed`, in words; errors that only a frame's content shows are found here too."""
        return [self.describe(*item) for item in self.feed(data)]

    @staticmethod
    def describe(offset: int, length: int, item: Frame | FrameError) -> Row:
        if not isinstance(item, FrameError):
            try:
                return Row(offset, length, item.layer, item.frame_name, item.fields())
            except FrameError as error:
                item_layer, item = item.layer, error
        else:
            item_layer = 0
        return Row(offset, length, item_layer, error=item.code, reason=item.reason)

    def dump(self) -> bytes:
        """The whole state, to be given to `load` of a decoder made alike: small, versioned."""
        return msgspec.msgpack.encode(
            _DecoderState(
                version=self.state_version,
                offset=self.offset,
                unread=self.unread,
                lost=self.lost,
                search_from=self._search_from,
                search_reason=self._search_reason,
                waiting=self._inbox.peek(),
                need=self._need,
                own=self._save(),
            )
        )

    def load(self, state: bytes) -> None:
        """Go on where `dump` was called. Raises DecoderStateError and changes nothing if not."""
        try:
            saved = _STATE.decode(state)
        except msgspec.MsgspecError as error:
            raise DecoderStateError(f"decoder state is damaged: {error}") from None
        if saved.version != self.state_version:
            raise DecoderStateError(
                f"decoder state has version {saved.version}, this is version {self.state_version}"
            )
        try:
            self._restore(saved.own)
        except (TypeError, ValueError, KeyError) as error:
            raise DecoderStateError(f"decoder state is damaged: {error}") from None
        self.offset, self.unread, self.lost = saved.offset, saved.unread, saved.lost
        self._search_from, self._search_reason = saved.search_from, saved.search_reason
        self._need = saved.need
        self._inbox = Inbox()
        self._inbox.keep(saved.waiting, 0, saved.need)

    # What a protocol fills in.

    @abstractmethod
    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        """Append every whole frame from `position` on; give the position of the first that isn't
        whole, and how many bytes from there it takes to know more.

        `buffer[0]` stands at `self.offset`. Raises FrameError, placed, for what is no frame.
        """

    @abstractmethod
    def _measure(self, buffer: bytes, position: int) -> int | None:
        """Length of what might be a frame here, 0 if there are too few bytes to tell, None if it
        can't be one. Used to find the feet; be suspicious, and deny frames over 64 KiB."""

    @property
    def _held(self) -> int:
        """Bytes just before `offset` of a frame that is not whole, where a protocol takes a frame
        in piece by piece; 0 while searching."""
        return 0

    def _save(self) -> Any:
        """State beyond the bytes at hand, as msgpack can hold it."""
        return None

    def _restore(self, own: Any) -> None:
        """Take back what `_save` gave; raise TypeError, ValueError or KeyError if it's damaged."""
        if own is not None:
            raise ValueError("unexpected content")

    # The rest is ours.

    def _scan_all(self, buffer: bytes, position: int, placed: list[Placed]) -> int:
        while True:
            try:
                position, self._need = self._scan(buffer, position, placed)
                return position
            except FrameError as error:
                error.__traceback__ = None
                placed.append((error.offset, error.length, error))
                position = error.offset + error.length - self.offset
                if not error.resumable:
                    self.lost = True
                    self.offset += position
                    self.unread = len(buffer) - position
                    return position

    def _search(self, buffer: bytes, placed: list[Placed]) -> int:
        """Position of the first frame, found or still being looked for."""
        assert self._search_from is not None
        for start in range(len(buffer)):
            position = start
            for _ in range(self.sync_frames):
                length = self._measure(buffer, position)
                if length is None:
                    break
                position += length
                if not length or position > len(buffer):
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
    """Base of what a connection tells its owner, in the past tense."""


class ConnectionOpened(Event, frozen=True):
    """The handshake is done. A protocol that agrees on more extends it."""


class ConnectionClosed(Event, frozen=True):
    """Ended without fault; `clean` says that the protocol's own goodbye was heard or said."""

    clean: bool


class ConnectionFailed(Event, frozen=True):
    """Ended by a violation, a timeout, or the peer's own error; the goodbye is ready to send."""

    error: CrosswireError


class Connection(ABC):
    """One end of a connection: bytes and time in, events and bytes out.

    The owner reads the socket into `receive_data`, then takes `events()`, then writes
    `data_to_send()`; it calls `handle_deadline` at `next_deadline()`; it ends the sending half when
    `send_closed` and the socket when `closed`, both after writing. It stops reading while
    `wants_data` is false. Receiving never raises on what a peer sent: a violation queues the
    protocol's goodbye and ends with ConnectionFailed. The last event is always ConnectionClosed or
    ConnectionFailed, once.

    Sending after the end: an owner answers what it was told, and the end may have come in the same
    read as the question. So a send that gives nothing back (an answer, an acknowledgement, a
    subscription) is ignored once the connection is closed. One that gives an identifier raises
    LocalProtocolError, since somebody would wait for what becomes of it; `closed` tells before.
    """

    def __init__(self, role: str, decoder: Decoder) -> None:
        self.role = role
        self.closed = False
        self.send_closed = False
        self.unread = False
        """Set by an owner that does not read from the peer: whose silence then means nothing."""
        self._decoder = decoder
        self._events: list[Event] = []
        self._outgoing: list[bytes | memoryview] = []

    @property
    def wants_data(self) -> bool:
        """False while the peer is owed so much that reading on would only pile it up."""
        return True

    @property
    def unread_end_s(self) -> float:
        """How long what a peer sent before it closed its side may stay unread until that ends the
        connection. No time where the end of the stream is the end of the connection anyway: nothing
        that was not read has been acknowledged."""
        return 0.0

    def receive_data(self, data: bytes, now: float) -> None:
        if self.closed:
            return
        try:
            self._receive(self._decoder.feed(data), now)
        except RemoteProtocolError as error:
            self.fail(error)

    def receive_eof(self) -> None:
        """The peer will send no more."""
        if not self.closed:
            self._end(ConnectionClosed(clean=False))

    def handle_deadline(self, now: float) -> None:
        """To be called at or after `next_deadline()`; harmless at any other time."""
        deadline = self.next_deadline()
        if self.closed or deadline is None or now < deadline:
            return
        try:
            self._expire(now)
        except RemoteProtocolError as error:
            self.fail(error)

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `handle_deadline` wants to be called; None if nothing is waited for."""

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> list[bytes | memoryview]:
        """What is to be written since the last call, in order."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    @abstractmethod
    def close(self) -> None:
        """Say the protocol's own goodbye. Harmless when closed."""

    def fail(self, error: CrosswireError) -> None:
        """End the connection for this reason: the protocol's goodbye for it, then the end."""
        if not self.closed:
            error.__traceback__ = None
            self._send_goodbye(error)
            self._end(ConnectionFailed(error))

    # What a protocol fills in.

    @abstractmethod
    def _receive(self, placed: list[Placed], now: float) -> None:
        """Carry out what was received; raise RemoteProtocolError for a violation."""

    @abstractmethod
    def _expire(self, now: float) -> None:
        """A deadline has passed: act, or raise PeerTimeout."""

    @abstractmethod
    def _send_goodbye(self, error: CrosswireError) -> None:
        """Queue what the protocol sends for this error: the one place that maps them."""

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self.closed = True
        self._events.append(event)


# -------------------------------------------------------------------------------------- protocol


class Sniff(Enum):
    """Do these first bytes speak a protocol?"""

    NO = "no"
    MORE = "more"
    YES = "yes"


class Hint(msgspec.Struct, frozen=True):
    """Something a decoder can be told that a capture of one direction does not hold."""

    name: str
    help: str


class DecoderFactory(Shape):
    def __call__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,
        hints: Mapping[str, int] | None = None,
    ) -> Decoder: ...


class ConnectionFactory(Shape):
    def __call__(self, role: str, now: float, *, limits: Limits | None = None) -> Connection: ...


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """A protocol's entry in the registry.

    `roles` has who connects first, who accepts last; a decoder's `sender` is one of them. `ports`
    maps a listener's name to its default port. A `decoder` may be given the `peer` decoder of the
    other direction where what one side agreed decides how the other is read, or `hints` instead.
    """

    name: str
    title: str
    roles: tuple[str, ...]
    ports: dict[str, int]
    limits: Limits
    connection: ConnectionFactory
    decoder: DecoderFactory
    sniff: Callable[[bytes], Sniff]
    hints: tuple[Hint, ...] = ()


L = TypeVar("L", bound=Limits)


def one_of(limits: Limits | None, default: L) -> L:
    """The limits given, which must be of the protocol's own kind, or its defaults."""
    if limits is None:
        return default
    if not isinstance(limits, type(default)):
        raise TypeError(f"limits must be {type(default).__name__}, not {type(limits).__name__}")
    return limits
