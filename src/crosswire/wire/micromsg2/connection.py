"""MicroMsg2's connection: frames in, state, events and frames out.

The handshake has three messages: the client's proposal, the server's reply, and the client's
proposal again with all that will be used (specification, "Handshake"). Then both sides send
messages, as many as the agreed window allows without an acknowledgement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

from crosswire.envelope import Property
from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    DestinationFull,
    Forbidden,
    FrameError,
    FrameTooLarge,
    IncompatiblePeer,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidHandshake,
    LimitExceeded,
    LocalProtocolError,
    MalformedFrame,
    PeerError,
    PeerTimeout,
    RemoteProtocolError,
    ServiceUnavailable,
    StoreFull,
    SubscriptionConflict,
    TooLargeToSend,
    UnexpectedFrame,
    UnsupportedVersion,
)
from crosswire.wire.contract import (
    Connection,
    ConnectionClosed,
    ConnectionFailed,
    Frame,
    Limits,
    Placed,
    Transitions,
    following_states,
    one_of,
)
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.events import (
    COMMANDS,
    ExtensionReceived,
    MessageReceived,
    MessagesAcknowledged,
    Opened,
)
from crosswire.wire.micromsg2.extensions import (
    ACK,
    AUTH,
    BATCH_ACK,
    DOTNET,
    JSON,
    PUB_SUB,
    Agreement,
    Offer,
    VendorExtension,
    agree,
    answer,
    conclude,
    json_fault,
)
from crosswire.wire.micromsg2.frames import (
    DEFAULTS,
    Command,
    Error,
    ErrorName,
    ExtensionFrame,
    Handshake,
    Message,
    serialize,
    serialize_message,
    serialize_run,
)
from crosswire.wire.micromsg2.layout import (
    ACK_SIZE,
    FIRST_EXTENSION,
    MAX_DESTINATION_SIZE,
    MAX_PAYLOAD_SIZE,
    MAX_PROPERTIES_SIZE,
    VERSION,
)
from crosswire.wire.micromsg2.values import (
    MAX_CALL_BYTES,
    Value,
    serialize_call,
    serialize_properties,
)
from crosswire.wire.micromsg2.windows import ReceiveWindow, SendWindow

__all__ = ["DOTNET_TYPE", "TRANSITIONS", "MicroMsg2Connection", "State"]

DOTNET_TYPE: Final = "dotnet-type"
"""The property that a message's .NET type is kept as."""
_SMALL_BYTES: Final = 4096
"""Payloads below this size are gathered in one buffer instead of kept one by one."""
_DESCRIPTION_CHARACTERS: Final = 1000
_ACK_DELAY_S: Final = 0.01
"""How long the acknowledgement of a message that is answered waits for something to go with."""


class State(Enum):
    """A client begins `proposed`, a server `listening`."""

    PROPOSED = "proposed"
    """A client that waits for the server's handshake."""
    LISTENING = "listening"
    """A server that waits for the client's first handshake."""
    ANSWERED = "answered"
    """A server that waits for the client's final handshake."""
    OPEN = "open"
    CLOSED = "closed"


TRANSITIONS: Final[Transitions[State]] = {
    (State.PROPOSED, Handshake): (State.OPEN,),
    (State.PROPOSED, Error): (State.CLOSED,),
    (State.LISTENING, Handshake): (State.ANSWERED,),
    (State.LISTENING, Error): (State.CLOSED,),
    (State.ANSWERED, Handshake): (State.OPEN,),
    (State.ANSWERED, Error): (State.CLOSED,),
    (State.OPEN, Message): (State.OPEN,),
    (State.OPEN, Command): (State.OPEN,),
    (State.OPEN, ExtensionFrame): (State.OPEN,),
    (State.OPEN, Error): (State.CLOSED,),
}

_FOLLOWING: Final = following_states(TRANSITIONS)


class MicroMsg2Connection(Connection):
    """One end of a MicroMsg2 connection.

    The owner passes an `Offer`. It sends messages while there is `credit`, gets an event when they
    are acknowledged, and acknowledges the messages it received when they are safe. Large messages
    are split and joined here; the later frames of one are sent as the window allows.
    """

    def __init__(
        self,
        role: str,
        now: float,
        *,
        limits: Limits | None = None,
        offer: Offer | None = None,
    ) -> None:
        self.limits = one_of(limits, DEFAULTS)
        sender = "server" if role == "client" else "client"
        self._decoder: MicroMsg2Decoder
        super().__init__(role, MicroMsg2Decoder(sender, limits=self.limits))
        self.offer = offer or Offer()
        self.agreement = Agreement()
        self.reading = True
        """Set to False by an owner that can take no more. Without an ack extension this is the only
        flow control there is."""
        self._deadline: float | None = now + self.limits.handshake_s
        self._numbers: dict[str, int] = {}
        self._vendor: dict[str, VendorExtension] = {}
        self._send_window = SendWindow(None)
        self._unsent: deque[tuple[memoryview, bool]] = deque()
        self._sent_type = ""
        # None without an ack extension: then nothing is acknowledged.
        self._receive_window: ReceiveWindow | None = None
        self._ack_number = 0
        # When what is due is acknowledged; None for with the next write.
        self._ack_at: float | None = None
        self._received_at = now
        self._received_type = ""
        # Of a message whose frames are not complete: destination and properties, payloads so far.
        self._first_frame: tuple[str, dict[str, Value]] | None = None
        self._collected: list[bytes | bytearray] = []
        self._collected_bytes = 0
        self._handlers: dict[type[Frame], Callable[..., None]] = {
            Handshake: self._on_handshake,
            Message: self._on_message,
            Command: self._on_command,
            ExtensionFrame: self._on_extension,
            Error: self._on_error,
        }
        self.state = State.PROPOSED if role == "client" else State.LISTENING
        if role == "client":
            self._send(self.offer.proposal())

    # Sending.

    @property
    def credit(self) -> int:
        """How many small messages may be sent now. If it is not 0, a large one may be sent too."""
        if self.state is not State.OPEN or self._unsent:
            return 0
        return self._send_window.room

    @property
    def unacknowledged(self) -> int:
        """How many of our frames, sent or unsent, the peer has not acknowledged."""
        return self._send_window.waiting + len(self._unsent)

    def send_message(
        self,
        destination: str,
        payload: bytes,
        properties: Mapping[str, Property] | None = None,
    ) -> int:
        """Returns the sequence number of the last frame, which MessagesAcknowledged will have.

        If the extension `dotnet` was agreed, the property `dotnet-type` is sent in its frames.
        Raises LocalProtocolError without credit, and TooLargeToSend.
        """
        self._require_open()
        if not self.credit:
            raise LocalProtocolError("the window is full: wait for acknowledgements")
        if len(payload) > self.limits.message_bytes:
            raise TooLargeToSend(len(payload), self.limits.message_bytes)
        properties = dict(properties or {})
        type_name = str(properties.pop(DOTNET_TYPE, "")) if DOTNET in self._numbers else ""
        name, head = destination.encode(), serialize_properties(properties)
        if not 1 <= len(name) <= MAX_DESTINATION_SIZE:
            raise LocalProtocolError(f"a destination has 1 to {MAX_DESTINATION_SIZE} bytes")
        if max(len(head), len(type_name)) > MAX_PROPERTIES_SIZE:
            raise LocalProtocolError(
                f"properties, or a type name, of more than {MAX_PROPERTIES_SIZE} bytes"
            )
        if JSON in self._numbers and (reason := json_fault(payload)):
            raise LocalProtocolError(f"the payload is not JSON: {reason}")
        # A type holds for all following messages until another is sent (specification, "DOTNET").
        if type_name != self._sent_type:
            self._sent_type = type_name
            self._send(ExtensionFrame(self._numbers[DOTNET], type_name.encode()))
        size = min(self.limits.frame_bytes, MAX_PAYLOAD_SIZE)
        if len(payload) <= size:
            sequence = self._send_window.take(last=True)
            self._outgoing += serialize_message(sequence, name, head, payload)
            return sequence
        view = memoryview(payload)
        ends = range(size, len(payload), size)
        # The window may be too small for all frames; their numbers are known nevertheless, since no
        # other message is sent before the last of them (see `credit`).
        last = self._send_window.last_of(len(ends) + 1)
        first = self._send_window.take(last=False)
        self._outgoing += serialize_message(first, name, head, view[:size], continued=True)
        for start in ends:
            self._unsent.append((view[start : start + size], start + size < len(payload)))
        self._send_unsent()
        return last

    def send_run(self, messages: Sequence[tuple[bytes, bytes]]) -> list[int]:
        """Send many small messages, each a `message_prefix` and a payload. Returns their numbers.

        Raises LocalProtocolError without that much credit, and unless `carries_anything`: payloads
        and types are not checked here.
        """
        self._require_open()
        if len(messages) > self.credit:
            raise LocalProtocolError("the window is full: wait for acknowledgements")
        if not self.carries_anything:
            raise LocalProtocolError("the extensions json and dotnet need messages one by one")
        sequences = self._send_window.take_run(len(messages))
        self._outgoing.append(serialize_run(sequences, messages))
        return sequences

    @property
    def carries_anything(self) -> bool:
        """Whether any bytes may be sent: neither `json` nor `dotnet` was agreed."""
        return not (JSON in self._numbers or DOTNET in self._numbers)

    def acknowledge(self, *sequences: int) -> None:
        """The messages with these sequence numbers are safe; they may be in any order.

        The next write acknowledges them, as far as all messages before them are safe too. No effect
        without an ack extension.
        """
        if self._receive_window is not None and not self.closed:
            self._receive_window.acknowledge(*sequences)
            self._ack_at = None

    def acknowledge_soon(self, sequence: int) -> None:
        """Like `acknowledge`, for a message that something else follows: its answer, or the next
        request. So it goes with the next bytes that are written anyway, or after a moment, and at
        once where the peer may be waiting for its window."""
        window = self._receive_window
        if window is None or self.closed:
            return
        is_urgent = window.is_due and self._ack_at is None
        window.acknowledge(sequence)
        if is_urgent or window.is_half_used:
            self._ack_at = None
        elif self._ack_at is None:
            self._ack_at = self._received_at + _ACK_DELAY_S

    def send_subscribe(
        self,
        destination: str,
        *,
        filter: str | None = None,  # noqa: A002  it is what the argument is called
        name: str | None = None,
        start: str | None = None,
        window: int | None = None,
    ) -> None:
        """Subscribe to `destination`; a named subscription begins at `start`."""
        self._command(
            "subscribe",
            {
                "destination": destination,
                "filter": filter,
                "name": name,
                "from": start,
                "window": window,
            },
        )

    def send_unsubscribe(self, destination: str, *, name: str | None = None) -> None:
        """End the subscription to `destination`, or its named one."""
        self._command("unsubscribe", {"destination": destination, "name": name})

    def send_serve(self, destination: str, *, window: int | None = None) -> None:
        """Offer to answer the requests to a service."""
        self._command("serve", {"destination": destination, "window": window})

    def send_extension(self, name: str, payload: bytes) -> None:
        """Send a frame of a vendor's extension. Raises LocalProtocolError if it was not agreed."""
        if self.closed:
            return
        self._require_open()
        number = self._numbers.get(name)
        if number is None or not name.startswith("x-") or len(payload) > MAX_PAYLOAD_SIZE:
            raise LocalProtocolError(f"can't send {len(payload)} bytes for extension {name}")
        self._send(ExtensionFrame(number, payload))

    def vendor(self, name: str) -> VendorExtension:
        """The instance of a vendor's extension. Raises KeyError if it was not agreed."""
        return self._vendor[name]

    def data_to_send(self) -> list[bytes | memoryview]:
        """With the acknowledgement that is due: one for all messages since the last write."""
        if self._ack_at is None or self._outgoing:
            self._send_ack()
        return super().data_to_send()

    def close(self) -> None:
        """End; the protocol has no closing message. What is safe is acknowledged before."""
        if not self.closed:
            self._send_ack()
            self._end(ConnectionClosed(clean=True))

    # Receiving.

    @property
    def held_bytes(self) -> int:
        """An incomplete frame, and the frames before it of a continued message."""
        return self._decoder.pending + self._collected_bytes

    def completed_bytes(self, count: int) -> int:
        """With the frames before it of a continued message."""
        return self._decoder.completed_bytes(count, self._collected_bytes)

    def limit_frames(self, frame_bytes: int | None) -> None:
        """Limit the handshake alone: it identifies the peer, and messages may follow it in the same
        read."""
        self._decoder.handshake_bytes = frame_bytes or self.limits.frame_bytes

    def release(self) -> None:
        """Also drops the collected frames of a continued message."""
        super().release()
        self._collected = []

    @property
    def wants_data(self) -> bool:
        """As the owner set `reading`; with acks the window limits the peer."""
        return self.reading

    def next_deadline(self) -> float | None:
        """Of the handshake, or, when the connection is open, of an acknowledgement."""
        if self.closed:
            return None
        return self._deadline if self._ack_at is None else self._ack_at

    def _receive(self, placed: list[Placed], now: float) -> None:
        self._received_at = now
        handlers = self._handlers
        following = _FOLLOWING[self.state]
        index = 0
        while (index := self._take_plain(placed, index)) < len(placed):
            offset, length, frame = placed[index]
            index += 1
            if isinstance(frame, FrameError):
                raise frame
            kind = type(frame)
            if kind not in following:
                raise UnexpectedFrame(f"{frame.frame_name} in state {self.state.value}")
            try:
                handlers[kind](frame, now)
            except FrameError as error:
                # Errors in a frame's content are raised without an offset.
                error.offset, error.length = offset, length
                raise
            if self.closed:
                return
            if following[kind] is not self.state:
                self.state = following[kind]
                following = _FOLLOWING[self.state]

    def _take_plain(self, placed: list[Placed], start: int) -> int:
        """Report the run of complete messages without properties from `start` on, which are the
        most frequent ones. Returns the index after them; the handlers process all others."""
        if (
            self.state is not State.OPEN
            or self._first_frame
            or self._received_type
            or JSON in self._numbers
        ):
            return start
        window = self._receive_window
        # A message beyond the window is a violation, which its handler reports.
        end = len(placed) if window is None else min(len(placed), start + window.room)
        append = self._events.append
        index = start
        while index < end:
            frame = placed[index][2]
            if type(frame) is not Message or frame.raw_properties or frame.continued:
                break
            append(MessageReceived(frame.sequence, frame.destination, {}, frame.payload))
            index += 1
        if window is not None and index > start:
            first = placed[start][2]
            assert isinstance(first, Message)
            window.receive_run(first.sequence, index - start)
        return index

    def _on_handshake(self, frame: Handshake, _now: float) -> None:
        # A later version is accepted: both sides go by the lower of the two.
        if not frame.major:
            raise UnsupportedVersion(f"version {frame.major}.{frame.minor} is not supported")
        if not frame.identity.isascii():
            raise InvalidHandshake("an identity that is not ASCII")
        if self.state is State.LISTENING:
            self._send(answer(self.offer, frame))
            return
        final = frame
        if self.state is State.PROPOSED:
            final = conclude(self.offer, frame)
            self._send(final)
        self._open(agree(self.offer, final), frame)

    def _open(self, agreement: Agreement, peer: Handshake) -> None:
        self.agreement = agreement
        self._deadline = None
        self._numbers = numbers = agreement.numbers()
        self._send_window = SendWindow(agreement.window)
        if agreement.window is not None:
            self._receive_window = ReceiveWindow(agreement.window)
            # Where both were agreed, batch-ack is used.
            self._ack_number = numbers.get(BATCH_ACK) or numbers[ACK]
        kinds = {kind.name: kind for kind in self.offer.vendor}
        for extension in agreement.extensions:
            name = extension.name.lower()
            if name in kinds and name not in self._vendor:
                self._vendor[name] = kinds[name](extension.properties, self._sender_of(name))
        version = min(VERSION, (peer.major, peer.minor))
        self._events.append(Opened(version, peer.identity, agreement.extensions, agreement.window))

    def _sender_of(self, name: str) -> Callable[[bytes], None]:
        return lambda payload: self.send_extension(name, payload)

    def _on_message(self, frame: Message, _now: float) -> None:
        if self._receive_window is not None:
            self._receive_window.receive(frame.sequence, last=not frame.continued)
        if self._first_frame is None:
            # Of a client only: the hub may send one some more, its own.
            if self.role == "server" and frame.raw_properties.count(b";") > self.limits.properties:
                raise FrameTooLarge(f"more than {self.limits.properties} properties")
            properties = frame.properties()
            if self._received_type:
                properties[DOTNET_TYPE] = self._received_type
            if not frame.continued:
                self._deliver(frame.sequence, frame.destination, properties, frame.payload)
                return
            self._first_frame = frame.destination, properties
        # Frames are limited by the decoder; the message is limited here, before it is joined.
        self._collected_bytes += len(frame.payload)
        if self._collected_bytes > self.limits.message_bytes:
            raise FrameTooLarge(f"a message of more than {self.limits.message_bytes} bytes")
        self._collect(frame.payload)
        if not frame.continued:
            (destination, properties), payload = self._first_frame, b"".join(self._collected)
            self._first_frame, self._collected, self._collected_bytes = None, [], 0
            self._deliver(frame.sequence, destination, properties, payload)

    def _collect(self, payload: bytes) -> None:
        """Large payloads are joined once, at the end. Small ones are gathered in a buffer: frames
        of one byte each, kept as objects, would take many times their size."""
        collected = self._collected
        if len(payload) >= _SMALL_BYTES:
            collected.append(payload)
            return
        if not collected or not isinstance(collected[-1], bytearray):
            collected.append(bytearray())
        gathered = collected[-1]
        assert isinstance(gathered, bytearray)
        gathered += payload

    def _deliver(
        self, sequence: int, destination: str, properties: dict[str, Value], payload: bytes
    ) -> None:
        if JSON in self._numbers and (reason := json_fault(payload)):
            raise MalformedFrame(f"a payload that is not JSON: {reason}")
        self._events.append(MessageReceived(sequence, destination, properties, payload))

    def _on_command(self, frame: Command, _now: float) -> None:
        name = frame.name.lower()
        read = COMMANDS.get(name)
        if read is None:
            raise MalformedFrame(f"command {name} is not defined")
        if self.role == "client":
            raise UnexpectedFrame(f"command {name} from a server")
        if PUB_SUB not in self._numbers:
            raise IncompatiblePeer(f"{name} needs the extension {PUB_SUB}")
        self._events.append(read({key.lower(): value for key, value in frame.arguments.items()}))

    def _on_extension(self, frame: ExtensionFrame, _now: float) -> None:
        extensions = self.agreement.extensions
        if not FIRST_EXTENSION <= frame.id <= len(extensions):
            raise MalformedFrame(f"extension number {frame.id} was not agreed")
        name = extensions[frame.id - FIRST_EXTENSION].name.lower()
        if name in (BATCH_ACK, ACK):
            self._on_ack(frame.payload)
        elif name == DOTNET:
            # For this and all following messages, until another type is received.
            if len(frame.payload) > self.limits.type_bytes:
                raise FrameTooLarge(f"a type's name of {len(frame.payload)} bytes")
            try:
                self._received_type = frame.payload.decode()
            except UnicodeDecodeError as error:
                raise MalformedFrame(f"a type name is not UTF-8: {error.reason}") from None
        elif name in (JSON, PUB_SUB, AUTH):
            raise MalformedFrame(f"extension {name} has no frames")
        elif name in self._vendor:
            self._events += self._vendor[name].receive(frame.payload)
        else:
            self._events.append(ExtensionReceived(name, frame.payload))

    def _on_ack(self, payload: bytes) -> None:
        if len(payload) != ACK_SIZE:
            raise MalformedFrame(f"an acknowledgement of {len(payload)} bytes, not {ACK_SIZE}")
        settled = self._send_window.acknowledge(int.from_bytes(payload))
        if settled:
            # Empty when the ack covers only the first frames of a message.
            self._events.append(MessagesAcknowledged(settled))
        self._send_unsent()

    def _on_error(self, frame: Error, _now: float) -> None:
        arguments = {key.lower(): value for key, value in frame.arguments.items()}
        name = frame.name.lower()
        self.fail(PeerError(arguments.get("description") or name, code=name))

    def _expire(self, _now: float) -> None:
        if self._ack_at is None:
            raise PeerTimeout("no handshake in time")
        self._ack_at = None

    # Ending.

    def _send_goodbye(self, error: CrosswireError) -> None:
        match error:
            case PeerError():
                # Its error has closed the connection: it reads no more.
                return
            case UnsupportedVersion():
                name = ErrorName.VERSION
            case IncompatiblePeer():
                name = ErrorName.EXTENSION
            case InvalidHandshake() | PeerTimeout():
                name = ErrorName.HANDSHAKE
            case FrameTooLarge() | LimitExceeded() | DestinationFull() | StoreFull():
                name = ErrorName.LIMIT
            case ServiceUnavailable():
                name = ErrorName.LIMIT
            case RemoteProtocolError() | InvalidFilter() | InvalidEnvelope():
                name = ErrorName.MALFORMED
            case InvalidDestination():
                name = ErrorName.UNKNOWN_DESTINATION
            case ConnectionRejected() | Forbidden() | SubscriptionConflict():
                name = ErrorName.FORBIDDEN
            case _:
                name = ErrorName.INTERNAL
        self._send_ack()
        self._send(Error(name.value, {"description": str(error)[:_DESCRIPTION_CHARACTERS]}))

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self.state = State.CLOSED
        self._unsent.clear()
        self._collected, self._collected_bytes = [], 0
        super()._end(event)

    # In common.

    def _require_open(self) -> None:
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"the connection is not open but in state {self.state.value}")

    def _command(self, name: str, arguments: Mapping[str, str | int | None]) -> None:
        if self.closed:
            return
        self._require_open()
        if self.role != "client":
            raise LocalProtocolError(f"a server does not send {name}")
        if PUB_SUB not in self._numbers:
            raise LocalProtocolError(f"{name} needs the extension {PUB_SUB}")
        fields = {key: str(value) for key, value in arguments.items() if value is not None}
        if (size := len(serialize_call(name, fields))) > MAX_CALL_BYTES:
            raise LocalProtocolError(f"{name} of {size} bytes, more than {MAX_CALL_BYTES}")
        # Before the command: after an unsubscribe an ack would settle nothing.
        self._send_ack()
        self._send(Command(name, fields))

    def _send_unsent(self) -> None:
        """Send frames of a large message, as far as the window allows."""
        while self._unsent and self._send_window.room:
            payload, continued = self._unsent.popleft()
            sequence = self._send_window.take(last=not continued)
            self._outgoing += serialize_message(sequence, b"", b"", payload, continued)

    def _send_ack(self) -> None:
        self._ack_at = None
        if (
            self._receive_window is not None
            and (due := self._receive_window.take_due()) is not None
        ):
            self._send(ExtensionFrame(self._ack_number, due.to_bytes(ACK_SIZE)))

    def _send(self, frame: Frame) -> None:
        self._outgoing.append(serialize(frame))
