"""Where the fields of eMQP's commands are: in the parts of a ZeroMQ message."""

from __future__ import annotations

from typing import Final

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.emqp.frames import (
    Ack,
    Admin,
    DeliveryFrame,
    Heartbeat,
    Inform,
    Publish,
    Reply,
    Request,
    TimedFrame,
)
from crosswire.wire.emqp.layout import (
    ACK_MSGID_PART,
    COMMAND_PART,
    DELIVERY_MESSAGE_PART,
    DELIVERY_TOPIC_PART,
    EMPTY_PART,
    HEARTBEAT_TIME_PART,
    INFORM_PEER_PART,
    INFORM_QUEUES_PART,
    MSGID_PART,
    PUBLISH_HEADERS_PART,
    PUBLISH_MESSAGE_PART,
    PUBLISH_TOPIC_PART,
    REPLY_MESSAGE_PART,
    REPLY_REQUEST_PART,
    REQUEST_HEADERS_PART,
    REQUEST_MESSAGE_PART,
    REQUEST_QUEUE_PART,
    SCHEDULE_CRON_PART,
    SCHEDULE_HEADERS_PART,
    SCHEDULE_INTERVAL_PART,
    SCHEDULE_MESSAGE_PART,
    SCHEDULE_QUEUE_PART,
    SHORT_PUBLISH_MESSAGE_PART,
    SHORT_SCHEDULE_MESSAGE_PART,
    VERSION_PART,
)
from crosswire.wire.field_ranges import RangeList
from crosswire.wire.zmtp.ranges import parts_of
from crosswire.wire.zmtp.ranges import ranges as zmtp_ranges

__all__ = ["ranges"]

_ACK: Final = {"acknowledged": ACK_MSGID_PART}
_REPLY: Final = {"message": REPLY_MESSAGE_PART, "request": REPLY_REQUEST_PART}
_HEARTBEAT: Final = {"timestamp": HEARTBEAT_TIME_PART}
_REQUEST: Final = {
    "queue": REQUEST_QUEUE_PART,
    "headers": REQUEST_HEADERS_PART,
    "message": REQUEST_MESSAGE_PART,
}
_PUBLISH: Final = {
    "topic": PUBLISH_TOPIC_PART,
    "headers": PUBLISH_HEADERS_PART,
    "message": PUBLISH_MESSAGE_PART,
}
_SHORT_PUBLISH: Final = {"topic": PUBLISH_TOPIC_PART, "message": SHORT_PUBLISH_MESSAGE_PART}
_SCHEDULE: Final = {
    "queue": SCHEDULE_QUEUE_PART,
    "headers": SCHEDULE_HEADERS_PART,
    "interval": SCHEDULE_INTERVAL_PART,
    "message": SCHEDULE_MESSAGE_PART,
    "cron": SCHEDULE_CRON_PART,
}
_SHORT_SCHEDULE: Final = {
    "queue": SCHEDULE_QUEUE_PART,
    "headers": SCHEDULE_HEADERS_PART,
    "message": SHORT_SCHEDULE_MESSAGE_PART,
}
_INFORM: Final = {"queues": INFORM_QUEUES_PART, "peer": INFORM_PEER_PART}
_DELIVERY: Final = {"topic": DELIVERY_TOPIC_PART, "message": DELIVERY_MESSAGE_PART}


def ranges(frame: Frame, data: bytes, decoder: Decoder, found: RangeList) -> None:
    """See `crosswire.wire.field_ranges`; of a frame on layer 0 those of ZMTP."""
    if frame.layer == 0 or "zmtp" in type(frame).__module__:
        # A command between the parts of a message is a frame of its own on layer 1.
        zmtp_ranges(frame, data, decoder, found)
        return
    parts = [(body, end) for _, body, end in parts_of(data)]
    if not isinstance(frame, DeliveryFrame):
        found.layout(*parts[EMPTY_PART], "empty")
        found.layout(*parts[VERSION_PART], "version")
        if isinstance(frame, Admin):
            found.field(*parts[COMMAND_PART], "command")
        else:
            found.layout(*parts[COMMAND_PART], "command")
        found.field(*parts[MSGID_PART], "msgid")
    for name, part in _fields(frame).items():
        if part < len(parts):
            found.field(*parts[part], name)


def _fields(frame: Frame) -> dict[str, int]:
    """The parts of a command's own fields."""
    match frame:
        case Ack():
            return _ACK
        case Reply():
            return _REPLY
        case Heartbeat():
            return _HEARTBEAT
        case Request():
            return _REQUEST
        case Publish():
            return _SHORT_PUBLISH if frame.headers is None else _PUBLISH
        case TimedFrame():
            return _SHORT_SCHEDULE if frame.interval is None else _SCHEDULE
        case Inform():
            return _INFORM
        case DeliveryFrame():
            return _DELIVERY
    return {}
