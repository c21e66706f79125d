"""What nearly all messages of a busy peer are, read in one pass: REQUEST, READY and REPLY in a row.

A live connection has its decoder ask here first wherever a message begins. What is taken is whole,
short enough and as it should be; everything else is left where it is, for the decoder to read part
by part. What stands behind the head of a message, each part with its flags and its size before it:

    REQUEST   msgid, queue, headers, message
    REPLY     msgid, message, request
    READY     msgid
"""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.wire.contract import Event, Frame
from crosswire.wire.emqp.events import ReplyReceived, RequestReceived, SlotOffered
from crosswire.wire.emqp.frames import VERSION, Ready, Reply, Request
from crosswire.wire.zmtp.frames import LONG, MORE, Taker, ZmtpLimits, serialize_part

__all__ = ["OFFERED", "MessageRun", "taker_at"]

OFFERED: Final = SlotOffered()

_ADDRESSES: Final = 1024
_MOST_PARTS: Final = 7
_SHORT_BYTES: Final = 1024


class MessageRun(Frame, frozen=True, gc=False):
    """Messages of one `kind` in a row, as the events that they become."""

    frame_name: ClassVar[str] = "run"
    kind: type[Frame]
    events: list[Event]


def taker_at(seat: str, limits: ZmtpLimits) -> Taker | None:
    """What reads the runs of this door's peers; None where there are none to expect."""
    if limits.parts < _MOST_PARTS or limits.frame_bytes < _SHORT_BYTES:
        return None
    if seat == "emqp-clients":
        return _requests(limits.frame_bytes)
    return _answers(limits.frame_bytes) if seat == "emqp-workers" else None


def _head(command: bytes) -> bytes:
    return b"".join(serialize_part(part, more=True) for part in (b"", VERSION, command))


_REQUEST: Final = _head(b"REQUEST")
_READY: Final = _head(b"READY")
_REPLY: Final = _head(b"REPLY")


def _requests(limit: int) -> Taker:
    addresses: dict[bytes, tuple[str, str]] = {}

    def take(buffer: bytes, position: int) -> tuple[int, Frame | None]:
        events: list[Event] = []
        end = len(buffer)
        try:
            while buffer.startswith(_REQUEST, position):
                msgid = position + len(_REQUEST)
                queue = msgid + 2 + buffer[msgid + 1]
                headers = queue + 2 + buffer[queue + 1]
                message = headers + 2 + buffer[headers + 1]
                body, stop = message + 2, message + 2 + buffer[message + 1]
                if buffer[message] == LONG:
                    body = message + 9
                    stop = body + int.from_bytes(buffer[message + 1 : body])
                elif buffer[message]:
                    break
                if (
                    stop > end
                    or stop - position > limit
                    or not buffer[msgid] == buffer[queue] == buffer[headers] == MORE
                ):
                    break
                address = addresses.get(buffer[queue:message])
                if address is None:
                    address = (
                        buffer[queue + 2 : headers].decode(),
                        buffer[headers + 2 : message].decode(),
                    )
                    if len(addresses) >= _ADDRESSES:
                        addresses.clear()
                    addresses[buffer[queue:message]] = address
                name = buffer[msgid + 2 : queue].decode()
                events.append(RequestReceived(name, *address, buffer[body:stop]))
                position = stop
        except (IndexError, UnicodeDecodeError):
            # Cut short, or not a text: the message at `position` is not ours to read.
            pass
        return position, MessageRun(Request, events) if events else None

    return take


def _answers(limit: int) -> Taker:
    def take(buffer: bytes, position: int) -> tuple[int, Frame | None]:
        if buffer.startswith(_READY, position):
            return _take_readies(buffer, position)
        if buffer.startswith(_REPLY, position):
            return _take_replies(buffer, position, limit)
        return position, None

    return take


def _take_readies(buffer: bytes, position: int) -> tuple[int, Frame | None]:
    count, end = 0, len(buffer)
    try:
        while buffer.startswith(_READY, position):
            msgid = position + len(_READY)
            stop = msgid + 2 + buffer[msgid + 1]
            if buffer[msgid] or stop > end or not buffer[msgid + 2 : stop].isascii():
                break
            count += 1
            position = stop
    except IndexError:
        pass
    return position, MessageRun(Ready, [OFFERED] * count) if count else None


def _take_replies(buffer: bytes, position: int, limit: int) -> tuple[int, Frame | None]:
    events: list[Event] = []
    end = len(buffer)
    try:
        while buffer.startswith(_REPLY, position):
            msgid = position + len(_REPLY)
            message = msgid + 2 + buffer[msgid + 1]
            body, request = message + 2, message + 2 + buffer[message + 1]
            if buffer[message] == LONG | MORE:
                body = message + 9
                request = body + int.from_bytes(buffer[message + 1 : body])
            elif buffer[message] != MORE:
                break
            stop = request + 2 + buffer[request + 1]
            if stop > end or stop - position > limit or buffer[msgid] != MORE or buffer[request]:
                break
            events.append(
                ReplyReceived(
                    buffer[msgid + 2 : message].decode(),
                    buffer[body:request],
                    buffer[request + 2 : stop].decode(),
                )
            )
            position = stop
    except (IndexError, UnicodeDecodeError):
        pass
    return position, MessageRun(Reply, events) if events else None
