"""EMP's connection: frames in, state, events and frames out.

A peer processes requests in order: none before the response to the previous one has been sent
(specification, "Requests and responses"). So responses are in the order of the requests, and a
response that is ready early waits for those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from crosswire.errors import (
    CrosswireError,
    FrameError,
    InvalidIdentifier,
    InvalidRequest,
    LocalProtocolError,
    MalformedFrame,
    PeerError,
    PeerTimeout,
    RemoteProtocolError,
    ServiceUnavailable,
    TooLargeToSend,
    UnexpectedFrame,
    UnsupportedVersion,
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
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.events import RequestReceived, ResponseReceived
from crosswire.wire.emp.frames import (
    DEFAULTS,
    Bye,
    Error,
    ErrorCode,
    Hello,
    Ping,
    Pong,
    Request,
    Response,
    Result,
    serialize,
    serialize_call,
    serialize_large_request,
    serialize_request,
    serialize_response,
    serialize_result,
    serialize_success,
)
from crosswire.wire.emp.layout import JSON_OFFSET, MIN_REQUEST_LENGTH, VERSION

__all__ = ["TRANSITIONS", "EmpConnection", "State"]


class State(Enum):
    """`handshake`: our hello is sent, the peer's is awaited."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSED = "closed"


TRANSITIONS: Final[Transitions[State]] = {
    (State.HANDSHAKE, Hello): (State.OPEN,),
    (State.HANDSHAKE, Bye): (State.CLOSED,),
    (State.HANDSHAKE, Error): (State.CLOSED,),
    (State.OPEN, Bye): (State.CLOSED,),
    (State.OPEN, Error): (State.CLOSED,),
    (State.OPEN, Ping): (State.OPEN,),
    (State.OPEN, Pong): (State.OPEN,),
    (State.OPEN, Request): (State.OPEN,),
    (State.OPEN, Response): (State.OPEN,),
}

_FOLLOWING: Final = following_states(TRANSITIONS)

_LARGE_BYTES: Final = 1 << 16
"""Data of this size is a separate piece of what is sent, so that it is not copied."""
_PENDING_BYTES: Final = 512
"""What a waiting request takes in memory in addition to its body."""


class EmpConnection(Connection):
    """One end of an EMP connection. Both ends are equal; the role is only who connected.

    Both send requests. Each direction has its own identifiers and its own order of responses.
    """

    def __init__(self, role: str, now: float, *, limits: Limits | None = None) -> None:
        self.limits = one_of(limits, DEFAULTS)
        sender = "server" if role == "client" else "client"
        super().__init__(role, EmpDecoder(sender, limits=self.limits))
        self.state = State.HANDSHAKE
        self._deadline: float = now + self.limits.handshake_s
        self._awaiting_pong = False
        self._was_unread = False
        self._last_id = 0
        # Our requests without a response; the peer's, in their order, with their sizes.
        self._asked: deque[int] = deque()
        self._owed: deque[int] = deque()
        self._owed_sizes: dict[int, int] = {}
        self._owed_bytes = 0
        # Responses to unreadable requests, which wait for their turn.
        self._refused: dict[int, bytes] = {}
        self._handlers: dict[type[Frame], Callable[..., None]] = {
            Hello: self._on_hello,
            Bye: self._on_bye,
            Ping: self._on_ping,
            Pong: self._on_pong,
            Error: self._on_error,
            Request: self._on_request,
            Response: self._on_response,
        }
        self._send(Hello(VERSION))

    # Sending.

    @property
    def pending(self) -> int:
        """How many of our requests have no response yet."""
        return len(self._asked)

    def send_request(self, op: str, data: bytes = b"{}") -> int:
        """Send a request; `data` is a JSON object. Returns the identifier of its response.

        Raises LocalProtocolError unless open, and TooLargeToSend.
        """
        self._require_open()
        identifier = self._last_id + 1
        if len(data) >= _LARGE_BYTES:
            pieces = serialize_large_request(identifier, op, data)
            self._require_room(sum(map(len, pieces)) - JSON_OFFSET)
        else:
            body = serialize_call(op, data)
            self._require_room(len(body))
            pieces = [serialize_request(identifier, body)]
        self._last_id = identifier
        self._asked.append(identifier)
        self._outgoing += pieces
        return identifier

    def send_success(self, identifier: int, data: bytes = b"{}") -> None:
        """Answer the peer's oldest request without a response, which must be `identifier`.

        Raises LocalProtocolError for another one, and TooLargeToSend.
        """
        self._answer(identifier, serialize_success(data))

    def send_failure(
        self, identifier: int, code: str, description: str, data: bytes = b"{}"
    ) -> None:
        """Like `send_success`, with the reason why the request failed."""
        failure = Result("failure", code=code, description=description, data=msgspec.Raw(data))
        self._answer(identifier, serialize_result(failure))

    def close(self) -> None:
        """Send a bye and end. No effect when closed."""
        if not self.closed:
            self._send(Bye())
            self._end(ConnectionClosed(clean=True))

    # Receiving.

    @property
    def held_bytes(self) -> int:
        """An incomplete frame, and requests without a response."""
        return self._decoder.pending + self._owed_bytes

    @property
    def wants_data(self) -> bool:
        """False at `pending_requests` or `pending_bytes` of requests without a response."""
        limits = self.limits
        return len(self._owed) < limits.pending_requests and self._owed_bytes < limits.pending_bytes

    def next_deadline(self) -> float | None:
        """Of the handshake, then of the next ping or its pong."""
        return None if self.closed else self._deadline

    def _receive(self, placed: list[Placed], now: float) -> None:
        handlers = self._handlers
        following = _FOLLOWING[self.state]
        for _, _, frame in placed:
            if isinstance(frame, FrameError):
                raise frame
            kind = type(frame)
            if kind not in following:
                raise UnexpectedFrame(
                    f"unexpected message: {frame.frame_name} in {self.state.value}"
                )
            handlers[kind](frame, now)
            if self.closed:
                return
            if following[kind] is not self.state:
                self.state = following[kind]
                following = _FOLLOWING[self.state]

    def _on_hello(self, frame: Hello, now: float) -> None:
        if frame.version != VERSION:
            raise UnsupportedVersion("unsupported version")
        self._deadline = now + self.limits.ping_interval_s
        self._events.append(ConnectionOpened())

    def _on_bye(self, _frame: Bye, _now: float) -> None:
        self._end(ConnectionClosed(clean=True))

    def _on_error(self, frame: Error, _now: float) -> None:
        self.fail(PeerError(frame.description, code=frame.code))

    def _on_ping(self, _frame: Ping, _now: float) -> None:
        self._send(Pong())

    def _on_pong(self, _frame: Pong, now: float) -> None:
        if self._awaiting_pong:
            self._awaiting_pong = False
            self._deadline = now + self.limits.ping_interval_s

    def _on_request(self, frame: Request, _now: float) -> None:
        identifier = frame.id
        # The specification forbids zero and any repetition; of that we can notice the pending ones.
        if not identifier or identifier in self._owed_sizes:
            raise InvalidRequest(f"invalid request: identifier {identifier} can't be used")
        self._owed.append(identifier)
        size = self._owed_sizes[identifier] = _PENDING_BYTES + len(frame.body)
        self._owed_bytes += size
        try:
            call = frame.call()
        except MalformedFrame as error:
            # Unreadable JSON is this request's failure, not the connection's; its response has to
            # wait until those before it are answered.
            refusal = Result("failure", code="invalid_request", description=error.reason)
            self._refused[identifier] = serialize_result(refusal)
            self._answer_refused()
            return
        self._events.append(RequestReceived(identifier, call.op, bytes(call.data)))

    def _on_response(self, frame: Response, _now: float) -> None:
        # Responses are in the order of the requests: any but the oldest's is a violation.
        if not self._asked or self._asked[0] != frame.id:
            raise InvalidIdentifier(f"invalid request id {frame.id}")
        result = frame.result()
        self._asked.popleft()
        self._events.append(
            ResponseReceived(
                frame.id,
                result.status == "success",
                result.code or "",
                result.description or "",
                bytes(result.data),
            )
        )

    def _expire(self, now: float) -> None:
        if self.state is State.HANDSHAKE:
            raise PeerTimeout("no hello in time")
        if self.unread or self._was_unread:
            # The pong may be among the bytes that we don't read. When we read again, the peer gets
            # one more `ping_timeout_s`.
            self._was_unread = self.unread
            self._deadline = now + self.limits.ping_timeout_s
            return
        if self._awaiting_pong:
            raise PeerTimeout("ping timeout")
        self._send(Ping())
        self._awaiting_pong = True
        self._deadline = now + self.limits.ping_timeout_s

    # Ending.

    def _send_goodbye(self, error: CrosswireError) -> None:
        match error:
            case PeerError():
                # Its error has closed the connection: it reads no more.
                return
            case InvalidIdentifier():
                code = ErrorCode.INVALID_IDENTIFIER
            case InvalidRequest():
                code = ErrorCode.INVALID_REQUEST
            case RemoteProtocolError():
                code = ErrorCode.PROTOCOL
            case ServiceUnavailable():
                code = ErrorCode.UNAVAILABLE
            case _:
                code = ErrorCode.INTERNAL
        self._send(Error(code, str(error)))

    def _end(self, event: ConnectionClosed | ConnectionFailed) -> None:
        self.state = State.CLOSED
        super()._end(event)

    # In common.

    def _require_open(self) -> None:
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"the connection is not open but in state {self.state.value}")

    def _answer(self, identifier: int, body: bytes) -> None:
        if self.closed:
            return
        self._require_open()
        if not self._owed or self._owed[0] != identifier:
            raise LocalProtocolError(f"request {identifier} is not the one to be answered now")
        self._require_room(len(body))
        self._respond(body)
        if self._refused:
            self._answer_refused()

    def _require_room(self, body_bytes: int) -> None:
        size, limit = MIN_REQUEST_LENGTH + body_bytes, self.limits.frame_bytes
        if size > limit:
            raise TooLargeToSend(size, limit)

    def _answer_refused(self) -> None:
        """Answer the unreadable requests whose turn it is now."""
        while self._owed and (body := self._refused.pop(self._owed[0], None)):
            self._respond(body)

    def _respond(self, body: bytes) -> None:
        identifier = self._owed.popleft()
        self._owed_bytes -= self._owed_sizes.pop(identifier)
        self._outgoing.append(serialize_response(identifier, body))

    def _send(self, frame: Frame) -> None:
        self._outgoing.append(serialize(frame))
