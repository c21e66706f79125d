"""Reads runs of the frequent commands REQUEST, READY and REPLY in one pass, past the decoder.

A live connection's decoder calls a Taker at the start of each message. It takes complete, valid and
short enough messages only; all others are left to the decoder, which reads them part by part. After
the head, which is the same in all messages of a command, the parts are:

    REQUEST   msgid, queue, headers, message
    REPLY     msgid, message, request
    READY     msgid
"""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.wire.contract import Event, Frame
from crosswire.wire.emqp.events import ReplyReceived, RequestReceived, SlotOffered
from crosswire.wire.emqp.frames import Ready, Reply, Request, serialize_head
from crosswire.wire.emqp.layout import (
    COMMAND_READY,
    COMMAND_REPLY,
    COMMAND_REQUEST,
    REQUEST_PARTS,
)
from crosswire.wire.zmtp.frames import Taker, ZmtpLimits
from crosswire.wire.zmtp.layout import (
    FLAG_LONG,
    FLAG_MORE,
    LONG_HEADER_SIZE,
    SHORT_HEADER_SIZE,
    SIZE_OFFSET,
)

__all__ = ["OFFERED", "MessageRun", "taker_at"]

OFFERED: Final = SlotOffered()

_ADDRESSES: Final = 1024
"""How many pairs of queue and headers are cached; peers use few, again and again."""
_SHORT_BYTES: Final = 1024
"""With limits below this size the decoder has to check every message."""


class MessageRun(Frame, frozen=True, gc=False):
    """A run of messages of one `kind`, already as events."""

    frame_name: ClassVar[str] = "run"
    kind: type[Frame]
    events: list[Event]


def taker_at(side: str, limits: ZmtpLimits) -> Taker | None:
    """Reads the runs that the peers of a listener send; None where there are none to expect."""
    if limits.parts < REQUEST_PARTS or limits.frame_bytes < _SHORT_BYTES:
        return None
    if side == "emqp-clients":
        return _requests(limits.frame_bytes)
    return _answers(limits.frame_bytes) if side == "emqp-workers" else None


_REQUEST: Final = serialize_head(COMMAND_REQUEST)
_READY: Final = serialize_head(COMMAND_READY)
_REPLY: Final = serialize_head(COMMAND_REPLY)


def _requests(limit: int) -> Taker:
    addresses: dict[bytes, tuple[str, str]] = {}

    def take(buffer: bytes, position: int) -> tuple[int, Frame | None]:
        events: list[Event] = []
        end = len(buffer)
        # Locals: in this loop the lookups of globals could be measured.
        header, size_at = SHORT_HEADER_SIZE, SIZE_OFFSET
        try:
            while buffer.startswith(_REQUEST, position):
                msgid = position + len(_REQUEST)
                queue = msgid + header + buffer[msgid + size_at]
                headers = queue + header + buffer[queue + size_at]
                message = headers + header + buffer[headers + size_at]
                body = message + header
                stop = body + buffer[message + size_at]
                if buffer[message] == FLAG_LONG:
                    body = message + LONG_HEADER_SIZE
                    stop = body + int.from_bytes(buffer[message + size_at : body])
                elif buffer[message]:
                    break
                # Sizes are read before flags are checked: wrong ones only lead to another index,
                # and one beyond the buffer's end raises IndexError.
                if (
                    stop > end
                    or stop - position > limit
                    or not buffer[msgid] == buffer[queue] == buffer[headers] == FLAG_MORE
                ):
                    break
                address = addresses.get(buffer[queue:message])
                if address is None:
                    address = (
                        buffer[queue + header : headers].decode(),
                        buffer[headers + header : message].decode(),
                    )
                    # A peer with ever new headers must not fill the memory.
                    if len(addresses) >= _ADDRESSES:
                        addresses.clear()
                    addresses[buffer[queue:message]] = address
                name = buffer[msgid + header : queue].decode()
                events.append(RequestReceived(name, *address, buffer[body:stop]))
                position = stop
        except (IndexError, UnicodeDecodeError):
            # Incomplete, or not UTF-8: the decoder reads the message at `position`.
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
            text = msgid + SHORT_HEADER_SIZE
            stop = text + buffer[msgid + SIZE_OFFSET]
            # The msgid is not used; ASCII is the cheap check for UTF-8.
            if buffer[msgid] or stop > end or not buffer[text:stop].isascii():
                break
            count += 1
            position = stop
    except IndexError:
        pass
    return position, MessageRun(Ready, [OFFERED] * count) if count else None


def _take_replies(buffer: bytes, position: int, limit: int) -> tuple[int, Frame | None]:
    events: list[Event] = []
    end = len(buffer)
    header, size_at = SHORT_HEADER_SIZE, SIZE_OFFSET
    try:
        while buffer.startswith(_REPLY, position):
            msgid = position + len(_REPLY)
            message = msgid + header + buffer[msgid + size_at]
            body = message + header
            request = body + buffer[message + size_at]
            if buffer[message] == FLAG_LONG | FLAG_MORE:
                body = message + LONG_HEADER_SIZE
                request = body + int.from_bytes(buffer[message + size_at : body])
            elif buffer[message] != FLAG_MORE:
                break
            stop = request + header + buffer[request + size_at]
            if stop > end or stop - position > limit:
                break
            if buffer[msgid] != FLAG_MORE or buffer[request]:
                break
            events.append(
                ReplyReceived(
                    buffer[msgid + header : message].decode(),
                    buffer[body:request],
                    buffer[request + header : stop].decode(),
                )
            )
            position = stop
    except (IndexError, UnicodeDecodeError):
        pass
    return position, MessageRun(Reply, events) if events else None
