"""ZMTP's connection: frames in, state, events and frames out.

After the greetings the security mechanism exchanges commands, the last of which carry metadata:
then messages flow. With CURVE they are sealed, one by one, by the mechanism's handshake object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final

from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    FrameError,
    FrameTooLarge,
    IncompatiblePeer,
    InvalidRequest,
    LocalProtocolError,
    MalformedFrame,
    PeerError,
    PeerTimeout,
    RemoteProtocolError,
    TooLargeToSend,
    UnexpectedFrame,
)
from crosswire.wire.contract import (
    Connection,
    ConnectionClosed,
    ConnectionFailed,
    Frame,
    Limits,
    Placed,
    Transitions,
    one_of,
)
from crosswire.wire.zmtp.decoder import ZmtpDecoder
from crosswire.wire.zmtp.events import (
    MessageReceived,
    PeerReady,
    PongReceived,
    Subscribed,
    Unsubscribed,
)
from crosswire.wire.zmtp.frames import (
    DEFAULTS,
    Command,
    Greeting,
    Message,
    NestedCommand,
    Sealed,
    message_bytes,
    parse_command,
    serialize,
    serialize_command,
    serialize_message,
    serialize_metadata,
    serialize_sealed,
)
from crosswire.wire.zmtp.layout import (
    COMMAND_CANCEL,
    COMMAND_ERROR,
    COMMAND_PING,
    COMMAND_PONG,
    COMMAND_SUBSCRIBE,
    HANDSHAKE_COMMANDS,
    MAX_IDENTITY_SIZE,
    MAX_PING_CONTEXT_SIZE,
    MAX_PING_TTL_S,
    MAX_REASON_SIZE,
    NAME_LENGTH_SIZE,
    PING_TTL_PER_SECOND,
    PING_TTL_SIZE,
    PROPERTY_IDENTITY,
    PROPERTY_SOCKET_TYPE,
    PUBLISHING_SOCKETS,
    REASON_LENGTH_SIZE,
    SILENT_SOCKETS,
    SUBSCRIPTION_CANCEL,
    SUBSCRIPTION_SUBSCRIBE,
)
from crosswire.wire.zmtp.mechanisms import Mechanism, MechanismHandshake, NullMechanism

__all__ = ["COMPATIBLE", "TRANSITIONS", "State", "ZmtpConnection"]


class State(Enum):
    """`greeting`: the peer's is awaited. `handshake`: the security mechanism's commands."""

    GREETING = "greeting"
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSED = "closed"


TRANSITIONS: Final[Transitions[State]] = {
    (State.GREETING, Greeting): (State.HANDSHAKE,),
    (State.HANDSHAKE, Command): (State.HANDSHAKE, State.OPEN, State.CLOSED),
    (State.OPEN, Command): (State.OPEN, State.CLOSED),
    (State.OPEN, NestedCommand): (State.OPEN, State.CLOSED),
    (State.OPEN, Message): (State.OPEN,),
    (State.OPEN, Sealed): (State.OPEN, State.CLOSED),
}
"""The mechanism's last command opens; the command ERROR closes, sealed or not."""

COMPATIBLE: Final[dict[str, frozenset[str]]] = {
    "ROUTER": frozenset({"REQ", "DEALER", "ROUTER"}),
    "DEALER": frozenset({"REP", "DEALER", "ROUTER"}),
    "PUB": frozenset({"SUB", "XSUB"}),
    "XPUB": frozenset({"SUB", "XSUB"}),
    "SUB": frozenset({"PUB", "XPUB"}),
    "XSUB": frozenset({"PUB", "XPUB"}),
}
"""The socket types that we can be, and those of their peers (RFC 37)."""

_SUBSCRIPTION_COST: Final = 64
"""Bytes of memory that a subscription takes in addition to its topic."""
_HEADERS_BYTES: Final = 1 << 20
"""More than the headers of all parts of a message take, at the default limit of parts."""


class ZmtpConnection(Connection):
    """One end of a ZMTP connection. The role is only who connected.

    `socket_type` is ours. `peer_types` restricts the table of compatible types. The `mechanism` may
    be shared by any number of connections.
    """

    def __init__(
        self,
        role: str,
        now: float,
        *,
        socket_type: str,
        identity: bytes = b"",
        mechanism: Mechanism | None = None,
        peer_types: frozenset[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        if socket_type not in COMPATIBLE:
            raise ValueError(f"there is no socket of type {socket_type!r} here")
        if len(identity) > MAX_IDENTITY_SIZE:
            raise ValueError(f"an identity has at most {MAX_IDENTITY_SIZE} bytes")
        self.limits = one_of(limits, DEFAULTS)
        sender = "binder" if role == "connector" else "connector"
        self.decoder = ZmtpDecoder(sender, limits=self.limits)
        super().__init__(role, self.decoder)
        self.state = State.GREETING
        self.socket_type = socket_type
        self.identity = identity
        self.peer_version = ""
        self.subscriptions: dict[bytes, int] = {}
        """The peer's subscriptions to our PUB or XPUB: how many to each topic."""
        self._subscription_bytes = 0
        self._peer_types = COMPATIBLE[socket_type] & (peer_types or COMPATIBLE[socket_type])
        self._mechanism = mechanism or NullMechanism()
        self._handshake: MechanismHandshake = self._mechanism.begin(self._metadata())
        # Of a sealed message that is incomplete; the decoder collects those in clear text.
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._handshake_by: float | None = now + self.limits.handshake_s
        self._ping_at: float | None = None
        self._pong_by: float | None = None
        self._silent_by: float | None = None
        self._commands: dict[str, Callable[[bytes, float], None]] = {
            COMMAND_PING: self._on_ping,
            COMMAND_PONG: self._on_pong,
            COMMAND_SUBSCRIBE: self._on_subscribe,
            COMMAND_CANCEL: self._on_cancel,
        }
        self._send(
            Greeting(self._mechanism.name, self._mechanism.as_server, padding=len(identity) + 1)
        )

    def _metadata(self) -> bytes:
        """Only types that are addressed by an identity send it, as in libzmq."""
        properties = {PROPERTY_SOCKET_TYPE: self.socket_type.encode()}
        if self.socket_type in ("ROUTER", "DEALER"):
            properties[PROPERTY_IDENTITY] = self.identity
        return serialize_metadata(properties)

    # Sending.

    def send_message(self, parts: Sequence[bytes]) -> None:
        """Send a message of at least one part. Raises LocalProtocolError unless open."""
        if self.closed:
            return
        self._require_open()
        if not parts:
            raise LocalProtocolError("a message has at least one part")
        if self.socket_type == "SUB":
            raise LocalProtocolError("a SUB socket does not send messages")
        self._send_parts(parts)

    @property
    def surely_bytes(self) -> int:
        """A message whose parts have no more bytes than this is never too large: for larger ones
        ask `require_room`."""
        return self.limits.frame_bytes - _HEADERS_BYTES

    def require_room(self, sizes: Iterable[int]) -> None:
        """Raises TooLargeToSend for a message of parts of these sizes."""
        size, limit = message_bytes(sizes, sealed=self.seals), self.limits.frame_bytes
        if size > limit:
            raise TooLargeToSend(size, limit)

    @property
    def seals(self) -> bool:
        """Whether the mechanism encrypts messages, so that each has to pass through it."""
        return self._handshake.sealer is not None

    def send_serialized(self, messages: bytes) -> None:
        """Send complete, serialized messages; only allowed while the connection doesn't seal."""
        if self.closed:
            return
        self._require_open()
        self._outgoing.append(messages)

    def note_received(self) -> None:
        """The owner processes what the peer sent: a sign of life, no timeout counts any more."""
        self._pong_by = self._silent_by = None

    def send_subscribe(self, topic: bytes) -> None:
        """Subscribe to all that begins with `topic`; twice makes two subscriptions."""
        self._send_subscription(COMMAND_SUBSCRIBE, SUBSCRIPTION_SUBSCRIBE, topic)

    def send_cancel(self, topic: bytes) -> None:
        """Cancel one subscription."""
        self._send_subscription(COMMAND_CANCEL, SUBSCRIPTION_CANCEL, topic)

    def send_ping(self, ttl_s: float = 0.0, context: bytes = b"") -> None:
        """Ask for a sign of life. If we send nothing for `ttl_s`, the peer may close the
        connection, unless it is 0. The PONG returns the `context` of up to 16 bytes.

        Raises LocalProtocolError.
        """
        if self.closed:
            return
        self._require_open()
        if len(context) > MAX_PING_CONTEXT_SIZE or not 0 <= ttl_s <= MAX_PING_TTL_S:
            raise LocalProtocolError(
                f"a PING has at most {MAX_PING_CONTEXT_SIZE} bytes of context and "
                f"{MAX_PING_TTL_S} s to live"
            )
        ttl = int(ttl_s * PING_TTL_PER_SECOND).to_bytes(PING_TTL_SIZE)
        self._send_command(COMMAND_PING, ttl + context)

    def close(self) -> None:
        """End; ZMTP has no closing message."""
        if not self.closed:
            self._end(ConnectionClosed(clean=True))

    # Receiving.

    @property
    def held_bytes(self) -> int:
        """An incomplete message, and the peer's subscriptions."""
        return self._decoder.pending + self._parts_bytes + self._subscription_bytes

    def completed_bytes(self, count: int) -> int:
        """With the parts before it of an encrypted message."""
        return self._decoder.completed_bytes(count, self._parts_bytes)

    def release(self) -> None:
        """Also drops the parts of an incomplete message, and the subscriptions."""
        super().release()
        self._parts = []
        self.subscriptions = {}

    def receive_eof(self) -> None:
        """Clean if the connection was open and no message is incomplete."""
        if not self.closed:
            whole = not self._decoder.pending and not self._parts
            self._end(ConnectionClosed(clean=self.state is State.OPEN and whole))

    def next_deadline(self) -> float | None:
        """Of the handshake, then the next of: our PING, its answer, the TTL of the peer's PING."""
        if self.closed:
            return None
        if self.state is not State.OPEN:
            return self._handshake_by
        at = self._ping_at
        if self._pong_by is not None and (at is None or self._pong_by < at):
            at = self._pong_by
        if self._silent_by is not None and (at is None or self._silent_by < at):
            at = self._silent_by
        return at

    def _receive(self, placed: list[Placed], now: float) -> None:
        # Anything that is received is a sign of life, not only a PONG.
        self.note_received()
        add_event = self._events.append
        publishes = self.socket_type in PUBLISHING_SOCKETS
        for _, _, frame in placed:
            if type(frame) is Message and self.state is State.OPEN and not publishes:
                add_event(MessageReceived(frame.parts))
                continue
            if isinstance(frame, FrameError):
                raise frame
            if (self.state, type(frame)) not in TRANSITIONS:
                raise UnexpectedFrame(f"unexpected frame: {frame.frame_name} in {self.state.value}")
            self._on_frame(frame, now)
            if self.closed:
                return

    def _on_frame(self, frame: Frame, now: float) -> None:
        match frame:
            case Message(parts=parts):
                self._on_message(parts)
            case Command() if self.state is State.HANDSHAKE:
                self._on_handshake(frame, now)
            case Command(name=name) if self.seals and name != COMMAND_ERROR:
                raise UnexpectedFrame(f"the command {name} in clear text")
            case Command():
                self._on_command(frame, now)
            case Sealed(body=body):
                self._on_sealed(body, now)
            case Greeting():
                self._on_greeting(frame)

    def _on_greeting(self, frame: Greeting) -> None:
        self.state = State.HANDSHAKE
        ours = self._mechanism
        if frame.mechanism != ours.name:
            raise IncompatiblePeer(f"the mechanism is {ours.name}, not {frame.mechanism}")
        # PLAIN and CURVE have a client and a server, independent of who connects.
        if ours.as_server and frame.as_server:
            # That neither is one proves nothing: libzmq never sets as-server.
            raise IncompatiblePeer("both sides want to be the server")
        self.peer_version = frame.version
        if self._handshake.opening:
            self._outgoing.append(self._handshake.opening)

    def _on_handshake(self, command: Command, now: float) -> None:
        if command.name == COMMAND_ERROR:
            self._on_error(command.body)
            return
        try:
            answer = self._handshake.receive(command)
        except ConnectionRejected as error:
            self.fail(error)
            return
        if self._handshake.properties is not None:
            # The peer's type is checked before the mechanism's answer is sent: a peer of the wrong
            # type gets an ERROR instead.
            ready = self._read_properties(self._handshake.properties)
            self._events.append(ready)
            self.state = State.OPEN
            if self.limits.ping_interval_s and self.knows_pings:
                self._ping_at = now + self.limits.ping_interval_s
        if answer:
            self._outgoing.append(answer)

    def _read_properties(self, properties: dict[str, bytes]) -> PeerReady:
        """Names of properties are not case-sensitive (RFC 37)."""
        known = {name.lower(): value for name, value in properties.items()}
        socket_type = known.get(PROPERTY_SOCKET_TYPE.lower(), b"").decode("ascii", "replace")
        if socket_type not in self._peer_types:
            raise IncompatiblePeer(f"a {self.socket_type} does not go with {socket_type!r}")
        identity = known.get(PROPERTY_IDENTITY.lower(), b"")
        if len(identity) > MAX_IDENTITY_SIZE:
            raise MalformedFrame(f"an identity of more than {MAX_IDENTITY_SIZE} bytes")
        return PeerReady(
            socket_type,
            identity,
            properties,
            self.peer_version,
            self._handshake.user,
            self._handshake.public_key,
        )

    def _on_error(self, body: bytes) -> None:
        reason = body[REASON_LENGTH_SIZE : REASON_LENGTH_SIZE + body[0]] if body else b""
        self.fail(PeerError(reason.decode("utf-8", "replace") or "no reason given"))

    def _on_sealed(self, sealed: bytes, now: float) -> None:
        assert self._handshake.sealer is not None
        body, more, is_command = self._handshake.sealer.unseal(sealed)
        if is_command:
            self._on_command(parse_command(body), now)
            return
        self._parts.append(body)
        self._parts_bytes += len(body)
        # The decoder limits frames; what they add up to is known only after decryption.
        if self._parts_bytes > self.limits.frame_bytes or len(self._parts) > self.limits.parts:
            raise FrameTooLarge("a message with more bytes or parts than allowed")
        if not more:
            parts, self._parts, self._parts_bytes = tuple(self._parts), [], 0
            self._on_message(parts)

    def _on_message(self, parts: tuple[bytes, ...]) -> None:
        """In ZMTP 3.0 a subscription is a message. A PUB drops all other messages."""
        if self.socket_type in PUBLISHING_SOCKETS:
            if len(parts) == 1 and parts[0]:
                kind, topic = parts[0][0], parts[0][1:]
                if kind == SUBSCRIPTION_SUBSCRIBE:
                    self._on_subscribe(topic, 0.0)
                    return
                if kind == SUBSCRIPTION_CANCEL:
                    self._on_cancel(topic, 0.0)
                    return
            if self.socket_type == "PUB":
                return
        self._events.append(MessageReceived(parts))

    def _on_command(self, command: Command, now: float) -> None:
        """Unknown commands are ignored: a later version may define them."""
        if command.name in self._commands:
            self._commands[command.name](command.body, now)
        elif command.name == COMMAND_ERROR:
            self._on_error(command.body)
        elif command.name in HANDSHAKE_COMMANDS:
            raise UnexpectedFrame(f"unexpected command: {command.name} after the handshake")

    def _on_ping(self, body: bytes, now: float) -> None:
        context = body[PING_TTL_SIZE:]
        if len(body) < PING_TTL_SIZE or len(context) > MAX_PING_CONTEXT_SIZE:
            raise MalformedFrame(
                f"PING has a time to live and up to {MAX_PING_CONTEXT_SIZE} bytes of context"
            )
        self._send_command(COMMAND_PONG, context)
        if ttl := int.from_bytes(body[:PING_TTL_SIZE]):
            self._silent_by = now + ttl / PING_TTL_PER_SECOND

    def _on_pong(self, context: bytes, _now: float) -> None:
        if context:
            self._events.append(PongReceived(context))

    def _on_subscribe(self, topic: bytes, _now: float) -> None:
        if self.socket_type not in PUBLISHING_SOCKETS:
            raise UnexpectedFrame(f"a subscription to a {self.socket_type}")
        # Subscriptions are counted, as in libzmq: each needs its own CANCEL.
        count = self.subscriptions.get(topic, 0)
        self.subscriptions[topic] = count + 1
        if count:
            return
        self._subscription_bytes += len(topic) + _SUBSCRIPTION_COST
        if self._subscription_bytes > self.limits.subscription_bytes:
            raise InvalidRequest("more subscriptions than allowed")
        self._events.append(Subscribed(topic))

    def _on_cancel(self, topic: bytes, _now: float) -> None:
        if self.socket_type not in PUBLISHING_SOCKETS:
            raise UnexpectedFrame(f"a subscription to a {self.socket_type}")
        count = self.subscriptions.get(topic, 0)
        if count > 1:
            self.subscriptions[topic] = count - 1
        elif count:
            del self.subscriptions[topic]
            self._subscription_bytes -= len(topic) + _SUBSCRIPTION_COST
            self._events.append(Unsubscribed(topic))

    def _expire(self, now: float) -> None:
        if self.state is not State.OPEN:
            raise PeerTimeout("no handshake in time")
        if self._silent_by is not None and now >= self._silent_by:
            raise PeerTimeout("silent for longer than its own PING allowed")
        if self._pong_by is not None and now >= self._pong_by:
            raise PeerTimeout("no sign of life after a PING")
        self.send_ping(self.limits.ping_ttl_s)
        self._ping_at = now + self.limits.ping_interval_s
        # An unanswered PING keeps its deadline, however many follow it.
        if self._pong_by is None:
            self._pong_by = now + self.limits.ping_timeout_s

    # Ending.

    def _send_goodbye(self, error: CrosswireError) -> None:
        """ERROR is a command of the handshake (RFC 37): nothing is sent before, to a peer that may
        not use ZMTP 3, nor in the traffic. To a peer that is not accepted, libzmq sends and
        understands 400; the reason is for our log only."""
        if self.state is not State.HANDSHAKE or isinstance(error, PeerError):
            return
        reason = "400" if isinstance(error, ConnectionRejected) else str(error)
        if isinstance(error, RemoteProtocolError):
            reason = error.reason
        text = reason.encode()[:MAX_REASON_SIZE].decode(errors="ignore").encode()
        length = len(text).to_bytes(REASON_LENGTH_SIZE)
        self._outgoing.append(serialize_command(COMMAND_ERROR, length + text))

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self.state = State.CLOSED
        super()._end(event)

    # In common.

    @property
    def knows_pings(self) -> bool:
        """SUBSCRIBE, CANCEL, PING and PONG were added in ZMTP 3.1."""
        return self.peer_version != "3.0"

    def _require_open(self) -> None:
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"the connection is not open but in state {self.state.value}")

    def _send_subscription(self, name: str, kind: int, topic: bytes) -> None:
        if self.closed:
            return
        self._require_open()
        if self.socket_type not in SILENT_SOCKETS:
            raise LocalProtocolError(f"a {self.socket_type} does not subscribe")
        if self.knows_pings:
            self._send_command(name, topic)
        else:
            self._send_parts((bytes((kind,)) + topic,))

    def _send_command(self, name: str, body: bytes) -> None:
        sealer = self._handshake.sealer
        if sealer is not None:
            clear = len(name).to_bytes(NAME_LENGTH_SIZE) + name.encode("ascii") + body
            self._outgoing.append(serialize_sealed(sealer.seal(clear, command=True)))
        else:
            self._outgoing.append(serialize_command(name, body))

    def _send_parts(self, parts: Sequence[bytes]) -> None:
        sealer = self._handshake.sealer
        if sealer is None:
            self._outgoing.append(serialize_message(parts))
            return
        last = len(parts) - 1
        for number, part in enumerate(parts):
            self._outgoing.append(serialize_sealed(sealer.seal(part, more=number < last)))

    def _send(self, frame: Frame) -> None:
        self._outgoing.append(serialize(frame))
