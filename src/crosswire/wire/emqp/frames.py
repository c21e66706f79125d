"""eMQP's commands, parsed from and serialized to the parts of a ZeroMQ message.

`layout.py` has the parts of each command. What is no command at all becomes a `Malformed`, which is
counted and has no other effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final

import msgspec

from crosswire.errors import FrameError, MalformedFrame, UnknownFrame
from crosswire.wire.contract import Frame
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.layout import (
    ACK_MSGID_PART,
    ACK_PARTS,
    ADMIN_COMMANDS,
    COMMAND_ACK,
    COMMAND_DISCONNECT,
    COMMAND_HEARTBEAT,
    COMMAND_INFORM,
    COMMAND_KBAI,
    COMMAND_KBYE,
    COMMAND_PART,
    COMMAND_PUBLISH,
    COMMAND_READY,
    COMMAND_REPLY,
    COMMAND_REQUEST,
    COMMAND_SCHEDULE,
    COMMAND_UNSCHEDULE,
    DELIVERY_MESSAGE_PART,
    DELIVERY_PARTS,
    DELIVERY_TOPIC_PART,
    EMPTY_PART,
    HEARTBEAT_PARTS,
    HEARTBEAT_TIME_PART,
    INFORM_PARTS,
    INFORM_PEER_PART,
    INFORM_QUEUES_PART,
    MIN_PARTS,
    MSGID_PART,
    PUBLISH_HEADERS_PART,
    PUBLISH_MESSAGE_PART,
    PUBLISH_TOPIC_PART,
    REPLY_MESSAGE_PART,
    REPLY_PARTS,
    REPLY_REQUEST_PART,
    REQUEST_HEADERS_PART,
    REQUEST_MESSAGE_PART,
    REQUEST_PARTS,
    REQUEST_QUEUE_PART,
    SCHEDULE_CRON_PART,
    SCHEDULE_HEADERS_PART,
    SCHEDULE_INTERVAL_PART,
    SCHEDULE_MESSAGE_PART,
    SCHEDULE_PARTS,
    SCHEDULE_QUEUE_PART,
    SHORT_PUBLISH_MESSAGE_PART,
    SHORT_PUBLISH_PARTS,
    SHORT_SCHEDULE_MESSAGE_PART,
    SHORT_SCHEDULE_PARTS,
    VERSION,
    VERSION_PART,
)
from crosswire.wire.zmtp.frames import ZmtpLimits, part_head, serialize_part

__all__ = [
    "DEFAULTS",
    "Ack",
    "Admin",
    "DeliveryFrame",
    "Disconnect",
    "EmqpLimits",
    "Heartbeat",
    "Inform",
    "Kbai",
    "Malformed",
    "Publish",
    "Queue",
    "Ready",
    "Reply",
    "Request",
    "ScheduleFrame",
    "UnscheduleFrame",
    "parse",
    "parse_delivery",
    "parse_queues",
    "serialize",
    "serialize_head",
    "serialize_queues",
    "serialize_receipts",
    "serialize_requests",
]

Queue = tuple[int, str]
"""Weight and name, as a worker announces them."""


class EmqpLimits(ZmtpLimits, frozen=True, kw_only=True):
    """A registered peer that sends nothing for `silence_s` is gone: three heartbeats of 5 s missed.

    `leaving_s` is how long a worker that sent KBAI may take to finish its jobs; a deployed job
    manager allows them 300 s. A command whose headers have more than `header_bytes` or `headers`
    entries, whose queue list has more than `header_bytes`, or whose queue, topic or msgid has more
    than `name_bytes`, is ignored.
    """

    heartbeat_interval_s: float = 3.0
    silence_s: float = 15.0
    leaving_s: float = 330.0
    header_bytes: int = 64 * 1024
    headers: int = 1000
    name_bytes: int = 1024


DEFAULTS: Final = EmqpLimits()


# ---------------------------------------------------------------------------------------- frames


class Ack(Frame, frozen=True, gc=False):
    """`acknowledged` is the msgid of another command."""

    frame_name: ClassVar[str] = "ack"
    layer: ClassVar[int] = 1
    msgid: str
    acknowledged: str


class Reply(Frame, frozen=True, gc=False):
    """The result of `request`.

    Without a request it is the broker's receipt, whose `message` is the request's msgid, or its
    answer to an administrator.
    """

    frame_name: ClassVar[str] = "reply"
    layer: ClassVar[int] = 1
    msgid: str
    message: bytes
    request: str | None = None


class Heartbeat(Frame, frozen=True, gc=False):
    """`timestamp` is in seconds since 1970, with or without a fraction."""

    frame_name: ClassVar[str] = "heartbeat"
    layer: ClassVar[int] = 1
    msgid: str
    timestamp: str


class Disconnect(Frame, frozen=True, gc=False):
    """Close the connection; from an administrator: stop the broker."""

    frame_name: ClassVar[str] = "disconnect"
    layer: ClassVar[int] = 1
    msgid: str


class Kbai(Frame, frozen=True, gc=False):
    """The sender leaves: spelled `KBAI` in the specification, `KBYE` by deployed peers."""

    frame_name: ClassVar[str] = "kbai"
    layer: ClassVar[int] = 1
    msgid: str
    spelling: str = COMMAND_KBYE.decode()

    def fields(self) -> dict[str, Any]:
        """Without the spelling."""
        return {"msgid": self.msgid}


class Ready(Frame, frozen=True, gc=False):
    """A worker can take one more job."""

    frame_name: ClassVar[str] = "ready"
    layer: ClassVar[int] = 1
    msgid: str


class Request(Frame, frozen=True, gc=False):
    """A job for `queue`: from a client to the broker, from the broker to a worker."""

    frame_name: ClassVar[str] = "request"
    layer: ClassVar[int] = 1
    msgid: str
    queue: str
    headers: str
    message: bytes


class Publish(Frame, frozen=True, gc=False):
    """A message for a topic's subscribers; a publisher sends no `headers`."""

    frame_name: ClassVar[str] = "publish"
    layer: ClassVar[int] = 1
    msgid: str
    topic: str
    headers: str | None
    message: bytes


class TimedFrame(Frame, frozen=True, gc=False):
    """Base of SCHEDULE and UNSCHEDULE: the deployed form has an `interval`, in the specification's
    it is None, and the headers have the times."""

    layer: ClassVar[int] = 1
    msgid: str
    queue: str
    headers: str
    interval: str | None
    message: bytes
    cron: str | None

    def timing(self) -> tuple[float | None, str | None]:
        """The interval in seconds, or else a cron expression; None for both if there is neither.

        If both are there, the interval counts, as deployed.
        """
        if self.interval is None:
            headers = Headers.parse(self.headers)
            interval_s, cron = headers.interval_s, headers.cron
        else:
            # A header's rules hold for the part too: what is no number above 0, as -1, is absent.
            interval_s = Headers((f"interval:{self.interval}",)).interval_s or None
            cron = self.cron or None
        return interval_s, cron if interval_s is None else None


class ScheduleFrame(TimedFrame, frozen=True, gc=False):
    """Send a message to a queue again and again."""

    frame_name: ClassVar[str] = "schedule"


class UnscheduleFrame(TimedFrame, frozen=True, gc=False):
    """End the schedule of a message."""

    frame_name: ClassVar[str] = "unschedule"


class Inform(Frame, frozen=True, gc=False):
    """A `worker` or `scheduler` registers; `parse_queues` reads its `queues`."""

    frame_name: ClassVar[str] = "inform"
    layer: ClassVar[int] = 1
    msgid: str
    queues: str
    peer: str


class Admin(Frame, frozen=True, gc=False):
    """A question of an administrator: `command` is one of ADMIN_COMMANDS."""

    frame_name: ClassVar[str] = "admin"
    layer: ClassVar[int] = 1
    msgid: str
    command: str


class DeliveryFrame(Frame, frozen=True, gc=False):
    """What a subscriber receives: not a command, but a topic and a message."""

    frame_name: ClassVar[str] = "publish"
    layer: ClassVar[int] = 1
    topic: str
    message: bytes


class Malformed(Frame, frozen=True, gc=False):
    """A ZeroMQ message that is no eMQP command."""

    frame_name: ClassVar[str] = "malformed"
    layer: ClassVar[int] = 1
    reason: str
    unknown: bool = False

    def error(self) -> FrameError:
        """Why it is none, as an exception."""
        return UnknownFrame(self.reason) if self.unknown else MalformedFrame(self.reason)

    def fields(self) -> dict[str, Any]:
        """Always raises MalformedFrame or UnknownFrame."""
        raise self.error()


# ----------------------------------------------------------------------------------------- parse


def parse(parts: Sequence[bytes]) -> Frame:
    """The command in these parts, or a Malformed. Never raises."""
    count = len(parts)
    if count < MIN_PARTS:
        return Malformed(f"a command has at least {MIN_PARTS} frames, not {count}")
    command = parts[COMMAND_PART]
    if parts[EMPTY_PART] or parts[VERSION_PART] != VERSION:
        what = f"its version is not {VERSION.decode()}"
        if parts[EMPTY_PART]:
            what = "its first frame is not empty"
        return Malformed(f"not a command: {what}")
    try:
        # Most commands are requests: they are recognized without a lookup.
        if command == COMMAND_REQUEST and count >= REQUEST_PARTS:
            return _request(parts, count)
        known = _PARSERS.get(command)
        if known is None:
            return Malformed(f"command {_show(command)} is not defined", unknown=True)
        least, read = known
        if count < least:
            return Malformed(f"{command.decode()} has at least {least} frames, not {count}")
        return read(parts, count)
    except UnicodeDecodeError as error:
        return Malformed(f"{_show(command)} has a frame that is not UTF-8: {error.reason}")


def parse_delivery(parts: Sequence[bytes]) -> Frame:
    """What a subscriber receives, or a Malformed. Never raises."""
    if len(parts) != DELIVERY_PARTS:
        return Malformed(f"a publication has {DELIVERY_PARTS} frames, not {len(parts)}")
    try:
        return DeliveryFrame(parts[DELIVERY_TOPIC_PART].decode(), parts[DELIVERY_MESSAGE_PART])
    except UnicodeDecodeError as error:
        return Malformed(f"a topic is not UTF-8: {error.reason}")


def _show(command: bytes) -> str:
    """A peer's text, cut and escaped for a message."""
    return ascii(command[:32].decode(errors="replace"))


def _ack(parts: Sequence[bytes], _count: int) -> Frame:
    return Ack(parts[MSGID_PART].decode(), parts[ACK_MSGID_PART].decode())


def _reply(parts: Sequence[bytes], count: int) -> Frame:
    request = parts[REPLY_REQUEST_PART].decode() if count > REPLY_REQUEST_PART else None
    return Reply(parts[MSGID_PART].decode(), parts[REPLY_MESSAGE_PART], request)


def _heartbeat(parts: Sequence[bytes], _count: int) -> Frame:
    return Heartbeat(parts[MSGID_PART].decode(), parts[HEARTBEAT_TIME_PART].decode())


def _disconnect(parts: Sequence[bytes], _count: int) -> Frame:
    return Disconnect(parts[MSGID_PART].decode())


def _kbai(parts: Sequence[bytes], _count: int) -> Frame:
    return Kbai(parts[MSGID_PART].decode(), parts[COMMAND_PART].decode())


def _ready(parts: Sequence[bytes], _count: int) -> Frame:
    return Ready(parts[MSGID_PART].decode())


def _request(parts: Sequence[bytes], _count: int) -> Frame:
    return Request(
        parts[MSGID_PART].decode(),
        parts[REQUEST_QUEUE_PART].decode(),
        parts[REQUEST_HEADERS_PART].decode(),
        parts[REQUEST_MESSAGE_PART],
    )


def _publish(parts: Sequence[bytes], count: int) -> Frame:
    msgid, topic = parts[MSGID_PART].decode(), parts[PUBLISH_TOPIC_PART].decode()
    if count == SHORT_PUBLISH_PARTS:
        return Publish(msgid, topic, None, parts[SHORT_PUBLISH_MESSAGE_PART])
    headers = parts[PUBLISH_HEADERS_PART].decode()
    return Publish(msgid, topic, headers, parts[PUBLISH_MESSAGE_PART])


def _timed(kind: type[ScheduleFrame | UnscheduleFrame]) -> Callable[[Sequence[bytes], int], Frame]:
    def read(parts: Sequence[bytes], count: int) -> Frame:
        msgid = parts[MSGID_PART].decode()
        queue = parts[SCHEDULE_QUEUE_PART].decode()
        headers = parts[SCHEDULE_HEADERS_PART].decode()
        if count == SHORT_SCHEDULE_PARTS:
            return kind(msgid, queue, headers, None, parts[SHORT_SCHEDULE_MESSAGE_PART], None)
        if count < SCHEDULE_PARTS:
            return Malformed(
                f"{parts[COMMAND_PART].decode()} has {SHORT_SCHEDULE_PARTS} or {SCHEDULE_PARTS} "
                f"frames, not {count}"
            )
        interval = parts[SCHEDULE_INTERVAL_PART].decode()
        cron = parts[SCHEDULE_CRON_PART].decode()
        return kind(msgid, queue, headers, interval, parts[SCHEDULE_MESSAGE_PART], cron)

    return read


def _inform(parts: Sequence[bytes], _count: int) -> Frame:
    return Inform(
        parts[MSGID_PART].decode(),
        parts[INFORM_QUEUES_PART].decode(),
        parts[INFORM_PEER_PART].decode(),
    )


def _admin(parts: Sequence[bytes], _count: int) -> Frame:
    return Admin(parts[MSGID_PART].decode(), parts[COMMAND_PART].decode())


_PARSERS: Final[dict[bytes, tuple[int, Callable[[Sequence[bytes], int], Frame]]]] = {
    COMMAND_ACK: (ACK_PARTS, _ack),
    COMMAND_REPLY: (REPLY_PARTS, _reply),
    COMMAND_HEARTBEAT: (HEARTBEAT_PARTS, _heartbeat),
    COMMAND_DISCONNECT: (MIN_PARTS, _disconnect),
    COMMAND_KBAI: (MIN_PARTS, _kbai),
    COMMAND_KBYE: (MIN_PARTS, _kbai),
    COMMAND_READY: (MIN_PARTS, _ready),
    COMMAND_REQUEST: (REQUEST_PARTS, _request),
    COMMAND_PUBLISH: (SHORT_PUBLISH_PARTS, _publish),
    COMMAND_SCHEDULE: (SHORT_SCHEDULE_PARTS, _timed(ScheduleFrame)),
    COMMAND_UNSCHEDULE: (SHORT_SCHEDULE_PARTS, _timed(UnscheduleFrame)),
    COMMAND_INFORM: (INFORM_PARTS, _inform),
    **dict.fromkeys(ADMIN_COMMANDS, (MIN_PARTS, _admin)),
}
"""The least number of parts, which the specification's headings miscount, and the parser."""


# ------------------------------------------------------------------------------------- serialize


def serialize(frame: Frame) -> list[bytes]:
    """The parts of a command: those that `parse` reads as an equal frame."""
    if type(frame) is Request:
        return [
            b"",
            VERSION,
            COMMAND_REQUEST,
            frame.msgid.encode(),
            frame.queue.encode(),
            frame.headers.encode(),
            frame.message,
        ]
    match frame:
        case Reply(msgid=msgid, message=message, request=None):
            return _command(COMMAND_REPLY, msgid, message)
        case Reply(msgid=msgid, message=message, request=str(request)):
            return _command(COMMAND_REPLY, msgid, message, request.encode())
        case Ack(msgid=msgid, acknowledged=acknowledged):
            return _command(COMMAND_ACK, msgid, acknowledged.encode())
        case Heartbeat(msgid=msgid, timestamp=timestamp):
            return _command(COMMAND_HEARTBEAT, msgid, timestamp.encode())
        case Ready(msgid=msgid):
            return _command(COMMAND_READY, msgid)
        case Disconnect(msgid=msgid):
            return _command(COMMAND_DISCONNECT, msgid)
        case Kbai(msgid=msgid, spelling=spelling):
            return _command(spelling.encode(), msgid)
        case Publish(msgid=msgid, topic=topic, headers=None, message=message):
            return _command(COMMAND_PUBLISH, msgid, topic.encode(), message)
        case Publish(msgid=msgid, topic=topic, headers=str(headers), message=message):
            return _command(COMMAND_PUBLISH, msgid, topic.encode(), headers.encode(), message)
        case ScheduleFrame():
            return _serialize_timed(COMMAND_SCHEDULE, frame)
        case UnscheduleFrame():
            return _serialize_timed(COMMAND_UNSCHEDULE, frame)
        case Inform(msgid=msgid, queues=queues, peer=peer):
            return _command(COMMAND_INFORM, msgid, queues.encode(), peer.encode())
        case Admin(msgid=msgid, command=command):
            return _command(command.encode(), msgid)
        case DeliveryFrame(topic=topic, message=message):
            return [topic.encode(), message]
    raise TypeError(f"{type(frame).__name__} is not an eMQP command")


def _serialize_timed(command: bytes, frame: ScheduleFrame | UnscheduleFrame) -> list[bytes]:
    parts = _command(command, frame.msgid, frame.queue.encode(), frame.headers.encode())
    if frame.interval is None:
        return [*parts, frame.message]
    return [*parts, frame.interval.encode(), frame.message, (frame.cron or "").encode()]


def _command(name: bytes, msgid: str, *parts: bytes) -> list[bytes]:
    return [b"", VERSION, name, msgid.encode(), *parts]


@lru_cache(maxsize=4096)
def _addressed(queue: str, headers: str) -> bytes:
    """The ZeroMQ frames of queue and headers, which many requests have in common."""
    return b"".join(serialize_part(part.encode(), more=True) for part in (queue, headers))


def serialize_head(command: bytes) -> bytes:
    """The ZeroMQ frames that every command of this name begins with, up to its msgid."""
    return b"".join(serialize_part(part, more=True) for part in (b"", VERSION, command))


_REQUEST_HEAD: Final = serialize_head(COMMAND_REQUEST)
_REPLY_HEAD: Final = serialize_head(COMMAND_REPLY)


def serialize_requests(requests: Iterable[tuple[bytes, str, str, bytes]]) -> bytes:
    """The ZeroMQ messages of many requests: msgid, queue, headers and message of each."""
    chunks: list[bytes] = []
    size = -1
    for msgid, queue, headers, message in requests:
        # The msgids of a batch usually have one size, so that all heads are the same.
        if len(msgid) != size:
            size = len(msgid)
            before = _REQUEST_HEAD + part_head(size, more=True)
        last = part_head(len(message), more=False)
        chunks += (before, msgid, _addressed(queue, headers), last, message)
    return b"".join(chunks)


def serialize_receipts(msgids: Sequence[bytes], requests: Sequence[bytes]) -> bytes:
    """The ZeroMQ messages of many receipts: their own msgids, and those of the requests."""
    chunks: list[bytes] = []
    sizes = (-1, -1)
    for msgid, request in zip(msgids, requests, strict=True):
        if (len(msgid), len(request)) != sizes:
            sizes = len(msgid), len(request)
            before = _REPLY_HEAD + part_head(sizes[0], more=True)
            between = part_head(sizes[1], more=False)
        chunks += (before, msgid, between, request)
    return b"".join(chunks)


# ---------------------------------------------------------------------------------------- queues

_Weight = Annotated[int, msgspec.Meta(gt=-1_000_000_000, lt=1_000_000_000)]
_QUEUES: Final = msgspec.json.Decoder(list[tuple[_Weight, str]])
_PAIR: Final = r"\[\s*(-?[0-9]{1,9})\s*,\s*(?:'([^']*)'|\"([^\"]*)\")\s*\]"
_ONE_PAIR: Final = re.compile(_PAIR)
_PAIRS: Final = re.compile(rf"\s*{_PAIR}\s*(?:,\s*{_PAIR}\s*)*")


def parse_queues(text: str) -> tuple[Queue, ...]:
    """The queues of an INFORM, none if the broker's default is meant.

    A JSON array of pairs, as deployed, or pairs without the outer brackets and with quotes of
    either kind, as in the specification. Raises MalformedFrame.
    """
    if not text.strip():
        return ()
    try:
        queues = tuple(_QUEUES.decode(text))
    except (msgspec.MsgspecError, RecursionError):
        if not _PAIRS.fullmatch(text):
            raise MalformedFrame("queues are not pairs of a weight and a name") from None
        queues = tuple(
            (int(weight), single or double) for weight, single, double in _ONE_PAIR.findall(text)
        )
    if not all(name for _, name in queues):
        raise MalformedFrame("a queue without a name")
    return queues


def serialize_queues(queues: Sequence[Queue]) -> str:
    """As deployed. None is an empty text, since the deployed broker fails on `[]`."""
    return msgspec.json.encode(list(queues)).decode() if queues else ""
