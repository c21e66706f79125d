"""MicroMsg2's connection: frames → state → events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec

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
    Event,
    Frame,
    Limits,
    Placed,
    one_of,
)
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.events import (
    ExtensionReceived,
    MessageReceived,
    MessagesAcknowledged,
    Opened,
    ServeReceived,
    SubscribeReceived,
    UnsubscribeReceived,
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
from crosswire.wire.micromsg2.values import Value, serialize_call, serialize_properties
from crosswire.wire.micromsg2.windows import ReceiveWindow, SendWindow

__all__ = ["DOTNET_TYPE", "TRANSITIONS", "MicroMsg2Connection", "State"]

DOTNET_TYPE: Final = "dotnet-type"
"""The property that a message's .NET type is kept as."""
_COLLECTED: Final = 4096
_LARGEST_WINDOW: Final = 65_535

_DESCRIPTION_CHARACTERS = 1000


class State(Enum):
    PROPOSED = "proposed"
    """A client that waits for the server's handshake."""
    LISTENING = "listening"
    """A server that waits for the client's first handshake."""
    ANSWERED = "answered"
    """A server that waits for the client's final one."""
    OPEN = "open"
    CLOSED = "closed"


TRANSITIONS: Final[dict[tuple[State, type[Frame]], State]] = {
    (State.PROPOSED, Handshake): State.OPEN,
    (State.PROPOSED, Error): State.CLOSED,
    (State.LISTENING, Handshake): State.ANSWERED,
    (State.LISTENING, Error): State.CLOSED,
    (State.ANSWERED, Handshake): State.OPEN,
    (State.ANSWERED, Error): State.CLOSED,
    (State.OPEN, Message): State.OPEN,
    (State.OPEN, Command): State.OPEN,
    (State.OPEN, ExtensionFrame): State.OPEN,
    (State.OPEN, Error): State.CLOSED,
}
"""What may be received when, and what follows. Whatever is not in here is a violation."""

_ALLOWED: Final = {
    state: {kind: after for (before, kind), after in TRANSITIONS.items() if before is state}
    for state in State
}


class MicroMsg2Connection(Connection):
    """One end of a MicroMsg2 connection.

    The owner brings an `Offer`. It sends messages while there is `credit`, is told when they are
    acknowledged, and acknowledges what it got when that is safe. A large message is split here, and
    put together here; its later frames leave by themselves as the window allows.
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
        super().__init__(role, MicroMsg2Decoder(sender, limits=self.limits))
        self.offer = offer or Offer()
        self.agreement = Agreement()
        self.reading = True
        """The owner sets it to False while it can take no more: without acks nothing else does."""
        self._deadline: float | None = now + self.limits.handshake_s
        self._numbers: dict[str, int] = {}
        self._vendor: dict[str, VendorExtension] = {}
        self._outbox = SendWindow(None)
        self._later: deque[tuple[memoryview, bool]] = deque()
        self._sent_type = ""
        self._window: ReceiveWindow | None = None
        self._ack_number = 0
        self._type = ""
        self._first: tuple[str, dict[str, Value]] | None = None
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
        """Small messages that may be sent now; a large one may be sent if it isn't 0."""
        if self.state is not State.OPEN or self._later:
            return 0
        return self._outbox.room

    @property
    def unacknowledged(self) -> int:
        """Frames of ours, sent or still to be sent, that the peer has not acknowledged."""
        return self._outbox.waiting + len(self._later)

    def send_message(
        self,
        destination: str,
        payload: bytes,
        properties: Mapping[str, Property] | None = None,
    ) -> int:
        """Gives the number under which it will be acknowledged: that of its last frame.

        The property `dotnet-type` goes as the `dotnet` extension has it, where that was agreed.
        Raises TooLargeToSend.
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
        if JSON in self._numbers and (reason := _not_json(payload)):
            raise LocalProtocolError(f"the payload is not JSON: {reason}")
        if type_name != self._sent_type:
            self._sent_type = type_name
            self._send(ExtensionFrame(self._numbers[DOTNET], type_name.encode()))
        size = min(self.limits.frame_bytes, MAX_PAYLOAD_SIZE)
        if len(payload) <= size:
            sequence = self._outbox.take(last=True)
            self._outgoing += serialize_message(sequence, name, head, payload)
            return sequence
        view = memoryview(payload)
        ends = range(size, len(payload), size)
        last = self._outbox.last_of(len(ends) + 1)
        first = self._outbox.take(last=False)
        self._outgoing += serialize_message(first, name, head, view[:size], continued=True)
        for start in ends:
            self._later.append((view[start : start + size], start + size < len(payload)))
        self._send_later()
        return last

    def send_run(self, messages: Sequence[tuple[bytes, bytes]]) -> list[int]:
        """Many small messages at once, each as `message_prefix` and payload; gives their numbers.

        Neither `json` nor `dotnet` is looked after, so a connection that has one of them can't.
        """
        self._require_open()
        if len(messages) > self.credit:
            raise LocalProtocolError("the window is full: wait for acknowledgements")
        if not self.carries_anything:
            raise LocalProtocolError("payloads and types must be looked after one by one")
        sequences = self._outbox.take_run(len(messages))
        self._outgoing.append(serialize_run(sequences, messages))
        return sequences

    @property
    def carries_anything(self) -> bool:
        """Neither `json` nor `dotnet` was agreed: a message is just its bytes."""
        return not (JSON in self._numbers or DOTNET in self._numbers)

    def acknowledge(self, *sequences: int) -> None:
        """The messages received under these numbers are safe; any order will do.

        The peer is told with the next write, as soon as all before it are safe too. Without an ack
        extension there is nothing to tell.
        """
        if self._window is not None and not self.closed:
            self._window.acknowledge(*sequences)

    def send_subscribe(
        self,
        destination: str,
        *,
        filter: str | None = None,  # noqa: A002  it is what the argument is called
        name: str | None = None,
        start: str | None = None,
        window: int | None = None,
    ) -> None:
        """Ask for what comes to `destination`; `start` is where a named subscription begins."""
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
        self._command("unsubscribe", {"destination": destination, "name": name})

    def send_serve(self, destination: str, *, window: int | None = None) -> None:
        """Offer to answer what is asked of a service."""
        self._command("serve", {"destination": destination, "window": window})

    def send_extension(self, name: str, payload: bytes) -> None:
        """A frame of a vendor's extension that was agreed."""
        if self.closed:
            return
        self._require_open()
        number = self._numbers.get(name)
        if number is None or not name.startswith("x-") or len(payload) > MAX_PAYLOAD_SIZE:
            raise LocalProtocolError(f"can't send {len(payload)} bytes for extension {name}")
        self._send(ExtensionFrame(number, payload))

    def vendor(self, name: str) -> VendorExtension:
        """A vendor's extension that was agreed. Raises KeyError."""
        return self._vendor[name]

    def data_to_send(self) -> list[bytes | memoryview]:
        self._send_ack()
        return super().data_to_send()

    def close(self) -> None:
        """The protocol has no goodbye but the end of the bytes."""
        if not self.closed:
            self._send_ack()
            self._end(ConnectionClosed(clean=True))

    # Receiving.

    @property
    def wants_data(self) -> bool:
        return self.reading

    def next_deadline(self) -> float | None:
        return None if self.closed else self._deadline

    def _receive(self, placed: list[Placed], now: float) -> None:
        handlers = self._handlers
        allowed = _ALLOWED[self.state]
        index = 0
        while (index := self._take_plain(placed, index)) < len(placed):
            offset, length, frame = placed[index]
            index += 1
            if isinstance(frame, FrameError):
                raise frame
            kind = type(frame)
            if kind not in allowed:
                raise UnexpectedFrame(f"{frame.frame_name} in state {self.state.value}")
            try:
                handlers[kind](frame, now)
            except FrameError as error:
                error.offset, error.length = offset, length
                raise
            if self.closed:
                return
            if allowed[kind] is not self.state:
                self.state = allowed[kind]
                allowed = _ALLOWED[self.state]

    def _take_plain(self, placed: list[Placed], start: int) -> int:
        """The run of messages that are just to be told: whole, without properties. They are what
        there is most of. Gives the place behind them; the handlers see to all others."""
        if self.state is not State.OPEN or self._first or self._type or JSON in self._numbers:
            return start
        window = self._window
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
        self._outbox = SendWindow(agreement.window)
        if agreement.window is not None:
            self._window = ReceiveWindow(agreement.window)
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
        if self._window is not None:
            self._window.receive(frame.sequence, last=not frame.continued)
        if self._first is None:
            properties = frame.properties()
            if self._type:
                properties[DOTNET_TYPE] = self._type
            if not frame.continued:
                self._deliver(frame.sequence, frame.destination, properties, frame.payload)
                return
            self._first = frame.destination, properties
        self._collected_bytes += len(frame.payload)
        if self._collected_bytes > self.limits.message_bytes:
            raise FrameTooLarge(f"a message of more than {self.limits.message_bytes} bytes")
        self._collect(frame.payload)
        if not frame.continued:
            (destination, properties), payload = self._first, b"".join(self._collected)
            self._first, self._collected, self._collected_bytes = None, [], 0
            self._deliver(frame.sequence, destination, properties, payload)

    def _collect(self, payload: bytes) -> None:
        """Large payloads are put together once, at the end. Small ones are gathered: frames of a
        byte each, kept one by one, would cost many times what they carry."""
        collected = self._collected
        if len(payload) >= _COLLECTED:
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
        if JSON in self._numbers and (reason := _not_json(payload)):
            raise MalformedFrame(f"a payload that is not JSON: {reason}")
        self._events.append(MessageReceived(sequence, destination, properties, payload))

    def _on_command(self, frame: Command, _now: float) -> None:
        name = frame.name.lower()
        read = _COMMANDS.get(name)
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
            try:
                self._type = frame.payload.decode()
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
        settled = self._outbox.acknowledge(int.from_bytes(payload))
        if settled:
            self._events.append(MessagesAcknowledged(settled))
        self._send_later()

    def _on_error(self, frame: Error, _now: float) -> None:
        arguments = {key.lower(): value for key, value in frame.arguments.items()}
        name = frame.name.lower()
        self.fail(PeerError(arguments.get("description") or name, code=name))

    def _expire(self, _now: float) -> None:
        raise PeerTimeout("no handshake in time")

    # Ending.

    def _send_goodbye(self, error: CrosswireError) -> None:
        match error:
            case PeerError():
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
        self._later.clear()
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
        if len(serialize_call(name, fields)) > MAX_PAYLOAD_SIZE:
            raise LocalProtocolError(f"{name} takes more than a frame")
        self._send_ack()  # behind an unsubscribe it would settle nothing
        self._send(Command(name, fields))

    def _send_later(self) -> None:
        """Frames of a large message, as far as the window allows."""
        while self._later and self._outbox.room:
            payload, continued = self._later.popleft()
            sequence = self._outbox.take(last=not continued)
            self._outgoing += serialize_message(sequence, b"", b"", payload, continued)

    def _send_ack(self) -> None:
        if self._window is not None and (due := self._window.take_due()) is not None:
            self._send(ExtensionFrame(self._ack_number, due.to_bytes(ACK_SIZE)))

    def _send(self, frame: Frame) -> None:
        self._outgoing.append(serialize(frame))


# -------------------------------------------------------------------------------------- contents


def _not_json(payload: bytes) -> str:
    """Why a payload is not JSON; empty if it is. Nothing is built from it."""
    try:
        if not payload.isascii():
            payload.decode()
        msgspec.json.decode(payload, type=msgspec.Raw)
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason}"
    except msgspec.MsgspecError as error:
        return str(error)
    except RecursionError:
        return "nested too deep"
    return ""


def _destination(arguments: dict[str, str]) -> str:
    if not arguments.get("destination"):
        raise MalformedFrame("a command without a destination")
    return arguments["destination"]


def _frames(arguments: dict[str, str]) -> int | None:
    text = arguments.get("window")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MalformedFrame("a window that is no number")
    if not 1 <= int(text) <= _LARGEST_WINDOW:
        raise MalformedFrame(f"a window is 1 to {_LARGEST_WINDOW}")
    return int(text)


def _read_subscribe(arguments: dict[str, str]) -> Event:
    return SubscribeReceived(
        _destination(arguments),
        arguments.get("filter"),
        arguments.get("name"),
        arguments.get("from"),
        _frames(arguments),
        arguments,
    )


def _read_unsubscribe(arguments: dict[str, str]) -> Event:
    return UnsubscribeReceived(_destination(arguments), arguments.get("name"), arguments)


def _read_serve(arguments: dict[str, str]) -> Event:
    return ServeReceived(_destination(arguments), _frames(arguments), arguments)


_COMMANDS: Final[dict[str, Callable[[dict[str, str]], Event]]] = {
    "subscribe": _read_subscribe,
    "unsubscribe": _read_unsubscribe,
    "serve": _read_serve,
}
