"""An Epoxy connection: buffer → frames → state → events."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from crosswire.errors import (
    ConnectionRejected,
    CrosswireError,
    ErrorInError,
    FrameError,
    FrameTooLarge,
    IdentifiersExhausted,
    InvalidIdentifier,
    LocalProtocolError,
    MalformedFrame,
    PeerError,
    PeerTimeout,
    RemoteProtocolError,
    ServiceUnavailable,
    TooLargeToSend,
    UnexpectedFrame,
    UnsupportedFrame,
)
from crosswire.wire.contract import (
    Connection,
    ConnectionClosed,
    ConnectionFailed,
    ConnectionOpened,
    Frame,
    Limits,
    Placed,
    Transitions,
    following_states,
    one_of,
)
from crosswire.wire.epoxy.comm import Error, ErrorCode, marshal_error
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.events import (
    EventReceived,
    PeerFinished,
    RequestReceived,
    ResponseReceived,
)
from crosswire.wire.epoxy.frames import (
    DEFAULTS,
    ConfigFrame,
    Message,
    MessageType,
    ProtocolError,
    ProtocolErrorCode,
    serialize,
)
from crosswire.wire.epoxy.layout import MAX_CONVERSATION

__all__ = ["TRANSITIONS", "EpoxyConnection", "State"]

_AT_ONCE: Final = float("-inf")
"""A deadline that has passed: see `_start_answering`."""
_PENDING_BYTES: Final = 512
"""What an unanswered request takes in memory in addition to its content."""


class State(Enum):
    """What may be sent and received."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    ANSWERING = "answering"
    """One side is closing: requests of the peer are still answered, no conversation begins."""
    LEAVING = "leaving"
    """Our half is closed; the peer may finish and close its half."""
    CLOSED = "closed"


TRANSITIONS: Final[Transitions[State]] = {
    (State.HANDSHAKE, ConfigFrame): (State.OPEN,),
    (State.HANDSHAKE, ProtocolError): (State.CLOSED,),
    (State.OPEN, Message): (State.OPEN,),
    (State.OPEN, ProtocolError): (State.CLOSED,),
    (State.ANSWERING, Message): (State.ANSWERING,),
    (State.ANSWERING, ProtocolError): (State.CLOSED,),
    (State.LEAVING, Message): (State.LEAVING,),
    (State.LEAVING, ProtocolError): (State.CLOSED,),
}

_FOLLOWING: Final = following_states(TRANSITIONS)


class EpoxyConnection(Connection):
    """One end of an Epoxy connection. Both ends may send requests, responses and events.

    The peer that begins a conversation chooses its id: a client counts 1, 3, 5…, a server 2, 4, 6…;
    events have an id, too. Responses may be in any order.
    """

    def __init__(self, role: str, now: float, *, limits: Limits | None = None) -> None:
        self.limits = one_of(limits, DEFAULTS)
        sender = "server" if role == "client" else "client"
        self._decoder: EpoxyDecoder
        super().__init__(role, EpoxyDecoder(sender, limits=self.limits))
        self.on_layer_data: Callable[[bytes], None] | None = None
        """Called with layer data while frames are limited, as soon as it has arrived."""
        self.state = State.HANDSHAKE
        self.dropped = 0
        """Messages that were ignored: responses without a request, events with an error."""
        self._deadline: float | None = now + self.limits.handshake_s
        self._next_id = 1 if role == "client" else 2
        self._asked: set[int] = set()
        self._owed: dict[int, int] = {}
        self._owed_count = 0
        self._owed_sizes: dict[int, int] = {}
        self._owed_bytes = 0
        self._peer_closed = False
        if role == "client":
            self._send(ConfigFrame())

    # Sending.

    @property
    def pending(self) -> int:
        """How many of our requests have no response yet."""
        return len(self._asked)

    @property
    def accepts_conversations(self) -> bool:
        """Whether requests and events may be sent."""
        return self.state is State.OPEN

    def is_owed(self, conversation: int) -> bool:
        """Whether a request of the peer is unanswered, and can be answered."""
        return conversation in self._owed and not self.closed and not self.send_closed

    def send_request(
        self, service: str, method: str, payload: bytes, *, layer_data: bytes | None = None
    ) -> int:
        """Send a request; gives the conversation id, which the response will have.

        Raises LocalProtocolError if the connection is not open.
        """
        conversation = self._begin(MessageType.REQUEST, service, method, payload, layer_data)
        self._asked.add(conversation)
        return conversation

    def send_event(
        self, service: str, method: str, payload: bytes, *, layer_data: bytes | None = None
    ) -> int:
        """Send an event, which has no response; gives its conversation id."""
        return self._begin(MessageType.EVENT, service, method, payload, layer_data)

    def forget_request(self, conversation: int) -> None:
        """Ignore the response to this request when it is received."""
        self._asked.discard(conversation)

    def send_response(
        self, conversation: int, payload: bytes, *, layer_data: bytes | None = None
    ) -> None:
        """Answer a request. Raises LocalProtocolError if it is not unanswered."""
        self._answer(conversation, payload, None, layer_data)

    def send_error(
        self, conversation: int, error: Error | bytes, *, layer_data: bytes | None = None
    ) -> None:
        """Answer a request with an error. Raises LocalProtocolError if it is not unanswered."""
        data = error if isinstance(error, bytes) else marshal_error(error)
        self._answer(conversation, None, data, layer_data)

    def close(self) -> None:
        """Begin no conversations; close our half when the peer's requests are answered.

        Then the peer has `goodbye_s` to close its half.
        """
        if self.state is State.HANDSHAKE:
            self._end(ConnectionClosed(clean=True))
        elif self.state is State.OPEN:
            self._start_answering()

    # Receiving.

    @property
    def held_bytes(self) -> int:
        """An incomplete frame, and requests without a response."""
        return self._decoder.pending + self._owed_bytes

    def limit_frames(self, frame_bytes: int | None) -> None:
        """Limit frames; a payload of any size is accepted once `on_layer_data`, called with the
        layer data before it, has lifted the limit."""
        self._decoder.most_bytes = frame_bytes
        self._decoder.on_layer_data = self.on_layer_data

    @property
    def wants_data(self) -> bool:
        """False while the peer has too many unanswered requests."""
        limits = self.limits
        return (
            self._owed_count < limits.pending_requests and self._owed_bytes < limits.pending_bytes
        )

    @property
    def unread_end_s(self) -> float:
        """A peer may close its half and wait for the responses to its requests."""
        return self.limits.drain_s

    def next_deadline(self) -> float | None:
        """Of the handshake, of draining, or of the peer's half."""
        return None if self.closed else self._deadline

    def receive_eof(self) -> None:
        """Requests that were received before are still answered: peers half-close and wait."""
        self._peer_closed = True
        if self.state is State.OPEN and self._owed_count and not self._decoder.pending:
            self._events.append(PeerFinished())
            self._start_answering()
        elif self.state is State.ANSWERING and not self._decoder.pending:
            self._finish_answering()
        elif not self.closed:
            self._end(ConnectionClosed(clean=self._may_end_here))

    @property
    def _may_end_here(self) -> bool:
        """Epoxy has no goodbye: a clean end is between frames, with nothing unanswered."""
        waits = self._decoder.pending or self._asked or self._owed_count
        return self.state is not State.HANDSHAKE and not waits

    def _receive(self, placed: list[Placed], _now: float) -> None:
        state = self.state
        following = _FOLLOWING[state]
        for _, _, frame in placed:
            if isinstance(frame, FrameError):
                raise frame
            after = following.get(type(frame))
            if after is None:
                raise UnexpectedFrame(f"unexpected frame: {frame.frame_name} in {state.value}")
            if isinstance(frame, Message):
                self._on_message(frame)
            elif isinstance(frame, ProtocolError):
                self._on_protocol_error(frame)
            else:
                self._on_config()
            if self.closed:
                return
            if after is not state:
                self.state = after
            if self.state is not state:
                state = self.state
                following = _FOLLOWING[state]

    def _on_config(self) -> None:
        if self.role == "server":
            self._send(ConfigFrame())
        self._deadline = None
        self._events.append(ConnectionOpened())

    def _on_message(self, frame: Message) -> None:
        kind = frame.message_type
        conversation = frame.conversation_id
        if kind is MessageType.RESPONSE:
            if conversation not in self._asked:
                self.dropped += 1
                return
            self._asked.remove(conversation)
            self._events.append(
                ResponseReceived(conversation, frame.payload, frame.error, frame.layer_data)
            )
            return
        if self.limits.strict:
            self._check_id(conversation)
        if kind is MessageType.REQUEST:
            if self.send_closed:  # it can't be answered any more
                self.dropped += 1
                return
            self._owed[conversation] = self._owed.get(conversation, 0) + 1
            self._owed_count += 1
            size = _size(frame)
            self._owed_sizes[conversation] = self._owed_sizes.get(conversation, 0) + size
            self._owed_bytes += size
            event_type: type[RequestReceived | EventReceived] = RequestReceived
            # Error data makes sense in a response only; the specification asks for robustness
            # against it in others (section "Message type").
            if frame.payload is None:
                self.send_error(conversation, _REQUEST_WITH_ERROR)
                return
        else:
            event_type = EventReceived
            if frame.payload is None:
                self.dropped += 1
                return
        self._events.append(
            event_type(
                conversation,
                frame.service_name,
                frame.method_name,
                frame.payload,
                frame.layer_data,
            )
        )

    def _check_id(self, conversation: int) -> None:
        """Specification, section "Conversation ID"."""
        if conversation % 2 != (self.role == "server") or conversation in self._owed:
            raise InvalidIdentifier(f"conversation id {conversation} can't be used")

    def _on_protocol_error(self, frame: ProtocolError) -> None:
        message = frame.details.message if frame.details is not None else ""
        reason = f"{frame.error_name}: {message}" if message else frame.error_name
        self.fail(PeerError(reason, code=frame.error_code))

    def _expire(self, now: float) -> None:
        match self.state:
            case State.HANDSHAKE:
                raise PeerTimeout("no config in time")
            case State.ANSWERING if self._deadline == _AT_ONCE:
                self._deadline = now + self.limits.drain_s
            case State.LEAVING if self._deadline == _AT_ONCE:
                self._deadline = now + self.limits.goodbye_s
            case State.ANSWERING:
                self._close_our_half()
            case _:
                self._end(ConnectionClosed(clean=True))

    # Ending.

    def _send_goodbye(self, error: CrosswireError) -> None:
        match error:
            case PeerError() | ErrorInError():  # an error is not answered with an error
                return
            case FrameTooLarge():
                code = ProtocolErrorCode.LIMIT_EXCEEDED
            case MalformedFrame():
                code = ProtocolErrorCode.MALFORMED_DATA
            case UnsupportedFrame():
                code = ProtocolErrorCode.NOT_SUPPORTED
            case UnexpectedFrame() if self.state is State.HANDSHAKE and self.role == "server":
                code = ProtocolErrorCode.CLIENT_BAD_HANDSHAKE
            case UnexpectedFrame() if self.state is State.HANDSHAKE:
                code = ProtocolErrorCode.SERVER_BAD_HANDSHAKE
            case InvalidIdentifier():
                code = ProtocolErrorCode.BAD_CONVERSATION_ID
            case IdentifiersExhausted():
                code = ProtocolErrorCode.CONVERSATION_IDS_EXHAUSTED
            case PeerTimeout():
                code = ProtocolErrorCode.TIMEOUT
            case ConnectionRejected() | ServiceUnavailable():
                code = ProtocolErrorCode.CONNECTION_REJECTED
            case RemoteProtocolError():
                code = ProtocolErrorCode.PROTOCOL_VIOLATED
            case _:
                code = ProtocolErrorCode.INTERNAL_ERROR
        self._send(ProtocolError(code, Error(ErrorCode.TRANSPORT_ERROR, str(error))))

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self.state = State.CLOSED
        super()._end(event)

    def _start_answering(self) -> None:
        """`close` and `receive_eof` don't get the time. So a deadline is set that has passed, and
        `_expire`, which is then called with the time, sets the real one."""
        self.state = State.ANSWERING
        self._deadline = _AT_ONCE
        if not self._owed_count:
            self._finish_answering()

    def _finish_answering(self) -> None:
        if not self._owed_count:
            self._close_our_half()

    def _close_our_half(self) -> None:
        self.send_closed = True
        if self._peer_closed:
            self._end(ConnectionClosed(clean=self._may_end_here))
        else:
            self.state = State.LEAVING
            self._deadline = _AT_ONCE

    # In common.

    def _begin(
        self, kind: MessageType, service: str, method: str, payload: bytes, layer_data: bytes | None
    ) -> int:
        if not self.accepts_conversations:
            raise LocalProtocolError(f"the connection is not open but in state {self.state.value}")
        conversation = self._next_id
        if conversation > MAX_CONVERSATION:
            exhausted = IdentifiersExhausted("no conversation ids are left on this connection")
            self.fail(exhausted)
            raise exhausted
        self._send_message(Message(conversation, kind, service, method, layer_data, payload))
        self._next_id += 2
        return conversation

    def _answer(
        self,
        conversation: int,
        payload: bytes | None,
        error: bytes | None,
        layer_data: bytes | None,
    ) -> None:
        if self.closed:
            return
        if not self.is_owed(conversation):
            raise LocalProtocolError(f"no request {conversation} waits for an answer")
        self._send_message(
            Message(conversation, MessageType.RESPONSE, "", "", layer_data, payload, error)
        )
        self._owed[conversation] -= 1
        if not self._owed[conversation]:
            del self._owed[conversation]
            self._owed_bytes -= self._owed_sizes.pop(conversation)
        self._owed_count -= 1
        if self.state is State.ANSWERING:
            self._finish_answering()

    def _send_message(self, message: Message) -> None:
        """Raises LocalProtocolError for what the peer would have to refuse."""
        for content in (message.layer_data, message.payload, message.error):
            if content is None:
                continue
            if not content:
                raise LocalProtocolError("0 bytes can't be sent as a framelet")
            if len(content) > self.limits.framelet_bytes:
                raise TooLargeToSend(len(content), self.limits.framelet_bytes)
        try:
            data = serialize(message)
        except UnicodeEncodeError as error:
            raise LocalProtocolError(f"a name can't be sent: {error}") from None
        if len(data) > self.limits.frame_bytes:
            raise TooLargeToSend(len(data), self.limits.frame_bytes)
        self._outgoing.append(data)

    def _send(self, frame: Frame) -> None:
        if not self.send_closed:
            self._outgoing.append(serialize(frame))


def _size(request: Message) -> int:
    """What an unanswered request takes in memory, approximately."""
    size = _PENDING_BYTES + len(request.service_name) + len(request.method_name)
    return size + len(request.payload or b"") + len(request.layer_data or b"")


_REQUEST_WITH_ERROR: Final = Error(
    ErrorCode.INTERNAL_SERVER_ERROR, "the request has an error instead of a payload"
)
