"""eMQP: jobs to queues, publications to topics, replies; ZMTP's own frames below them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from crosswire.errors import FrameError
from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    PUBLISH,
    REQUEST,
    RESPONSE,
    SEND,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
    Rows,
    json_text,
)
from crosswire.wire.contract import Frame, Placed
from crosswire.wire.emqp.frames import (
    Ack,
    Delivery,
    Disconnect,
    Heartbeat,
    Inform,
    Kbai,
    Publish,
    Reply,
    Request,
    Schedule,
    Unschedule,
    parse,
)
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.zmtp.frames import (
    Command,
    Greeting,
    Message,
    Partial,
    ZmtpLimits,
    parse_greeting,
    scan_messages,
)

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

__all__ = ["READING"]

_COMMANDS: Final = {
    "READY": HANDSHAKE,
    "HELLO": HANDSHAKE,
    "WELCOME": HANDSHAKE,
    "INITIATE": HANDSHAKE,
    "ERROR": ERROR,
    "PING": HEARTBEAT,
    "PONG": HEARTBEAT,
    "SUBSCRIBE": SUBSCRIPTION,
    "CANCEL": SUBSCRIPTION,
}


_BINARY: Final = "application/octet-stream"

# What the scanner calls frames, and its slices.
_GREETING_ROW, _COMMAND_ROW, _MESSAGE_ROW, _DELIVERY_ROW = range(4)
_REQUEST_ROW, _REPLY_ROW, _PUBLISH_ROW, _READY_ROW = 4, 5, 6, 9
_PAYLOAD, _MSGID, _NAME, _HEADERS, _ABOUT = range(5)

_MESSAGE: Final = Described("{}")
"""What a ZeroMQ message has to say is told by the command in it."""

_BODIED_ROWS: Final = (_REQUEST_ROW, _REPLY_ROW, _PUBLISH_ROW, _DELIVERY_ROW)
_NO_LIMITS: Final = ZmtpLimits(frame_bytes=1 << 62, parts=1 << 62)
"""For what has kept them before."""

_MOST_ADDRESS: Final = 256
"""Bytes of a queue's or topic's name and of headers: what is longer hardly comes again."""


# ------------------------------------------------------------------------------------- what it says


class _Outcome(msgspec.Struct, gc=False):
    value: Any = None
    error: str | None = None


_OUTCOME: Final = msgspec.json.Decoder(_Outcome)
_OPENINGS: Final = frozenset((b"{", b" ", b"\t", b"\n", b"\r"))


def _outcome(message: bytes) -> str:
    """A job manager reports exceptions like results; only these two are told apart."""
    if message[:1] not in _OPENINGS or not (
        b'"error"' in message or b'"TimeoutError"' in message or b"\\" in message
    ):
        return "success"
    try:
        outcome = _OUTCOME.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "success"
    if outcome.error is not None:
        return "failure"
    return "timeout" if outcome.value == "TimeoutError" else "success"


class _Address(NamedTuple):
    """What messages share that go to the same queue or topic with the same headers.

    `fields` is what the JSON has behind the message's id.
    """

    fields: str
    kind: str
    destination: str
    properties: str


@lru_cache(maxsize=1024)
def _to_queue(queue: str, headers: str) -> _Address:
    read = Headers.parse(headers)
    return _Address(
        f'"queue":{json_text(queue)},"headers":{json_text(headers)}}}',
        REQUEST if read.reply_requested else SEND,
        f"queue/{queue}",
        json_text(read.properties()),
    )


@lru_cache(maxsize=1024)
def _to_topic(topic: str, headers: str | None) -> _Address:
    told = "" if headers is None else f',"headers":{json_text(headers)}'
    return _Address(
        f'"topic":{json_text(topic)}{told}}}',
        PUBLISH,
        f"topic/{topic}",
        json_text(Headers.parse(headers or "").properties()),
    )


# On the wire the headers follow the name, with their length between them.


@lru_cache(maxsize=1024)
def _queue_in(address: bytes, name_bytes: int, headers_bytes: int) -> _Address:
    headers = address[len(address) - headers_bytes :]
    return _to_queue.__wrapped__(address[:name_bytes].decode(), headers.decode())


@lru_cache(maxsize=1024)
def _topic_in(address: bytes, name_bytes: int, headers_bytes: int) -> _Address:
    """With -1 for headers that are not there."""
    if headers_bytes < 0:
        return _to_topic.__wrapped__(address.decode(), None)
    headers = address[len(address) - headers_bytes :]
    return _to_topic.__wrapped__(address[:name_bytes].decode(), headers.decode())


# ----------------------------------------------------------------------------------------- reading


class EmqpReading(Reading):
    """A reply has the destination of the request that it answers."""

    def __init__(self) -> None:
        self._asked: Memory[str] = Memory()
        self._parts: tuple[bytes, ...] = ()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message(parts=parts):
                self._parts = parts
                return _MESSAGE
            case Request(msgid, queue, headers, body):
                behind = self._behind(6, length)
                address = _addressed(_to_queue, queue, headers)
                return self._request(forward, msgid, address, body, len(body), behind)
            case Reply(msgid, body, request):
                behind = self._behind(4, length)
                return self._reply(forward, msgid, request, body, behind, True)
            case Publish(msgid, topic, headers, body):
                behind = self._behind(5 if headers is None else 6, length)
                return _publication(
                    msgid, _addressed(_to_topic, topic, headers), body, len(body), behind
                )
            case Delivery(topic, body):
                return _publication(None, _addressed(_to_topic, topic, None), body, len(body), 0)
            case Ack():
                return Described(json_text(frame.fields()), ACKNOWLEDGEMENT, frame.acknowledged)
            case Schedule() | Unschedule():
                return self._schedule(frame, length)
            case Inform():
                return Described(json_text(frame.fields()), SUBSCRIPTION, frame.msgid)
            case Heartbeat():
                return Described(json_text(frame.fields()), HEARTBEAT, frame.msgid)
            case Disconnect() | Kbai():
                return Described(json_text(frame.fields()), GOODBYE, frame.msgid)
            case Greeting():
                return Described(json_text(frame.fields()), HANDSHAKE)
            case Command():
                return _command(frame)
        fields = frame.fields()
        return Described(json_text(fields), CONTROL, fields.get("msgid"))

    def describe_rows(self, rows: Rows, start: int, stop: int) -> Iterator[Described | FrameError]:
        data, payloads = rows.data, rows.payloads
        forwards, frames, positions, lengths = rows.forward, rows.frame, rows.position, rows.length
        bodies, body_lengths = rows.slices[_PAYLOAD]
        ids, id_lengths = rows.slices[_MSGID]
        for row in range(start, stop):
            kind = frames[row]
            if kind == _MESSAGE_ROW:
                yield _MESSAGE
                continue
            if kind not in _BODIED_ROWS:
                yield self._rare(rows, row) if kind != _READY_ROW else _ready(rows, row)
                continue
            at, size = bodies[row], body_lengths[row]
            body = data[at : at + size] if payloads or kind == _REPLY_ROW else None
            behind = positions[row] + lengths[row] - at - size
            if kind == _DELIVERY_ROW:
                yield _publication(None, _address(rows, row, _topic_in), body, size, behind)
                continue
            at = ids[row]
            msgid = data[at : at + id_lengths[row]].decode()
            if kind == _REQUEST_ROW:
                address = _address(rows, row, _queue_in)
                yield self._request(forwards[row], msgid, address, body, size, behind)
            elif kind == _PUBLISH_ROW:
                yield _publication(msgid, _address(rows, row, _topic_in), body, size, behind)
            else:
                request = _text(rows, row, _ABOUT)
                yield self._reply(forwards[row], msgid, request, body or b"", behind, payloads)

    def _save(self) -> Any:
        """The parts at hand are those of a message whose command is read with it."""
        return self._asked.save()

    def _restore(self, own: Any) -> None:
        self._asked.restore(own)

    def _request(
        self,
        forward: bool,
        msgid: str,
        address: _Address,
        body: bytes | None,
        size: int,
        behind: int,
    ) -> Described:
        fields, kind, destination, properties = address
        self._asked.put((forward, msgid), destination)
        fields = f'{{"msgid":{json_text(msgid)},{fields}'
        return _with_body(fields, kind, msgid, destination, None, body, size, behind, properties)

    def _reply(
        self,
        forward: bool,
        msgid: str,
        request: str | None,
        message: bytes,
        behind: int,
        payloads: bool,
    ) -> Described:
        body, size = message if payloads else None, len(message)
        fields = f'{{"msgid":{json_text(msgid)}'
        if request is not None:
            fields = f'{fields},"request":{json_text(request)}}}'
            destination = self._asked.take((not forward, request))
            status = _outcome(message)
            return _with_body(
                fields, RESPONSE, request, destination, status, body, size, behind, None
            )
        # The receipt for a request: its body is the request's id.
        fields += "}"
        identifier = message.decode(errors="replace")
        destination = self._asked.get((not forward, identifier))
        if destination is None:
            return _with_body(fields, CONTROL, msgid, None, None, body, size, behind, None)
        return Described(fields, ACKNOWLEDGEMENT, identifier, destination, "success")

    def _schedule(self, frame: Schedule | Unschedule, length: int) -> Described:
        fields = frame.fields()
        del fields["message"]
        behind = self._behind(6 if frame.interval is None else 7, length)
        return _with_body(
            json_text(fields),
            CONTROL,
            frame.msgid,
            f"queue/{frame.queue}",
            None,
            frame.message,
            len(frame.message),
            behind,
            None,
        )

    def _behind(self, index: int, length: int) -> int:
        """Bytes of the ZeroMQ message of this length behind the part that is the body. Few peers
        write the lengths of short parts in 8 bytes, and they do so always."""
        parts = self._parts[index + 1 :]
        if not parts:
            return 0
        size = sum(map(len, parts))
        if length == sum(map(len, self._parts)) + 9 * len(self._parts):
            return size + 9 * len(parts)
        return size + sum(2 if len(part) < 256 else 9 for part in parts)

    def _rare(self, rows: Rows, row: int) -> Described | FrameError:
        """What there is little of, by way of its frame."""
        start, length = rows.position[row], rows.length[row]
        raw = rows.data[start : start + length]
        forward, kind = rows.forward[row], rows.frame[row]
        try:
            if kind == _GREETING_ROW:
                return _greeting(raw)
            if kind == _COMMAND_ROW:
                at, size = (column[row] for column in rows.slices[_ABOUT])
                frame = Command(_text(rows, row, _NAME) or "", rows.data[at : at + size])
                return _short_command(frame) if size <= _MOST_ADDRESS else _command(frame)
            placed: list[Placed] = []
            scan_messages(raw, 0, 0, _NO_LIMITS, Partial(), placed)
            message = placed[0][2]
            assert isinstance(message, Message)
            self._parts = message.parts
            return self.describe(forward, parse(message.parts), rows.offset[row], length)
        except FrameError as error:
            error.__traceback__ = None
            self.interrupt(forward)
            return error


@lru_cache(maxsize=256)
def _greeting(raw: bytes) -> Described:
    frame = parse_greeting(raw, 0, 0)
    assert frame is not None
    return Described(json_text(frame.fields()), HANDSHAKE)


def _command(frame: Command) -> Described:
    return Described(json_text(frame.fields()), _COMMANDS.get(frame.name, CONTROL))


_short_command = lru_cache(maxsize=256)(_command)
"""Peers of one kind open all their connections with the same words."""


def _ready(rows: Rows, row: int) -> Described:
    msgid = _text(rows, row, _MSGID)
    return Described(f'{{"msgid":{json_text(msgid)}}}', CONTROL, msgid)


def _text(rows: Rows, row: int, index: int) -> str | None:
    starts, lengths = rows.slices[index]
    at, size = starts[row], lengths[row]
    return None if size < 0 else rows.data[at : at + size].decode()


def _addressed(known: _lru_cache_wrapper[_Address], name: str, headers: str | None) -> _Address:
    if len(name) + len(headers or "") > _MOST_ADDRESS:
        return known.__wrapped__(name, headers)
    return known(name, headers)


def _address(rows: Rows, row: int, known: _lru_cache_wrapper[_Address]) -> _Address:
    (names, name_lengths), (headers, headers_lengths) = rows.slices[_NAME], rows.slices[_HEADERS]
    at, size, more = names[row], name_lengths[row], headers_lengths[row]
    end = at + size if more < 0 else headers[row] + more
    if end - at > _MOST_ADDRESS:
        return known.__wrapped__(rows.data[at:end], size, more)
    return known(rows.data[at:end], size, more)


def _publication(
    msgid: str | None, address: _Address, body: bytes | None, size: int, behind: int
) -> Described:
    fields, kind, destination, properties = address
    fields = f"{{{fields}" if msgid is None else f'{{"msgid":{json_text(msgid)},{fields}'
    return _with_body(fields, kind, msgid, destination, None, body, size, behind, properties)


def _with_body(
    fields: str,
    kind: str,
    identifier: str | None,
    destination: str | None,
    status: str | None,
    body: bytes | None,
    size: int,
    behind: int,
    properties: str | None,
) -> Described:
    return Described(
        fields,
        kind,
        identifier,
        destination,
        status,
        None,
        size,
        behind,
        body,
        _BINARY,
        properties,
        None,
        None,
        None,
    )


READING = EmqpReading
