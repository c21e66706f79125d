"""eMQP's columnar scanner: ZMTP on layer 0, commands in its messages on layer 1."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.kernels import subroutine
from crosswire.pipeline.decode.scanners.octets import big_endian, octet_at, valid_utf8
from crosswire.pipeline.decode.scanners.scanner import (
    HANDSHAKE_END,
    PROTOCOL_STATE,
    SCRATCH,
    UNSURE,
    BulkScanner,
    FrameColumns,
    add_row,
    scan_kernel,
    set_slice,
)
from crosswire.pipeline.decode.scanners.zmtp import (
    KEPT_PARTS,
    command_at,
    greeting_at,
    message_at,
    socket_type_at,
    word,
    word_at,
)
from crosswire.wire.contract import Decoder, Frame, Limits, one_of
from crosswire.wire.emqp import layout
from crosswire.wire.emqp.decoder import EmqpDecoder
from crosswire.wire.emqp.frames import (
    DEFAULTS,
    Ack,
    Admin,
    DeliveryFrame,
    Disconnect,
    Heartbeat,
    Inform,
    Kbai,
    Malformed,
    Publish,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
)
from crosswire.wire.zmtp import layout as zmtp_layout
from crosswire.wire.zmtp.frames import Command, Greeting, Message, NestedCommand

__all__ = [
    "ABOUT",
    "ACK",
    "ADMIN",
    "DECODER_FRAMES",
    "DELIVERY",
    "DISCONNECT",
    "FRAMES",
    "HEADERS",
    "HEARTBEAT",
    "INFORM",
    "KBAI",
    "LAST",
    "MSGID",
    "NAME",
    "NESTED_COMMAND",
    "PAYLOAD",
    "PUBLISH",
    "READY",
    "REPLY",
    "REQUEST",
    "SCANNER",
    "SCHEDULE",
    "UNSCHEDULE",
    "ZMTP_COMMAND",
    "ZMTP_GREETING",
    "ZMTP_MESSAGE",
    "EmqpScanner",
]

FRAMES: Final[tuple[type[Frame], ...]] = (
    Greeting,
    Command,
    Message,
    DeliveryFrame,
    Request,
    Reply,
    Publish,
    Ack,
    Heartbeat,
    Ready,
    Disconnect,
    Kbai,
    Inform,
    ScheduleFrame,
    UnscheduleFrame,
    Admin,
)
"""In the order of their codes."""
DECODER_FRAMES: Final[tuple[type[Frame], ...]] = (NestedCommand,)
ZMTP_GREETING, ZMTP_COMMAND, ZMTP_MESSAGE = range(3)
DELIVERY, REQUEST, REPLY, PUBLISH, ACK, HEARTBEAT, READY = range(3, 10)
DISCONNECT, KBAI, INFORM, SCHEDULE, UNSCHEDULE, ADMIN = range(10, 16)
NESTED_COMMAND: Final = 16
"""The decoder's."""

PAYLOAD, MSGID, NAME, HEADERS, ABOUT, LAST = range(6)
"""Slices."""

# What is remembered of a direction.
_IS_BROKER: Final = PROTOCOL_STATE
_STAGE: Final = PROTOCOL_STATE + 1
_SOCKET: Final = PROTOCOL_STATE + 2

_GREETING, _HANDSHAKE, _TRAFFIC = range(3)
"""Stages."""
_UNKNOWN, _SILENT, _PUBLISHER, _COMMANDER = range(4)
"""What the messages of a socket hold: not known, nothing of eMQP, publications, commands."""

# The limits.
_FRAME_BYTES, _PARTS, _COMMAND_BYTES = range(3)

# By frame code: the least number of parts, then the slice that each part from the fifth on is.
# PUBLISH and SCHEDULE have a second form, with a row of its own after the last code.
_LAYOUTS: Final = np.full((len(FRAMES) + 2, 1 + KEPT_PARTS - layout.MIN_PARTS), NONE, np.int64)
_SHORT_PUBLISH, _SHORT_SCHEDULE = len(FRAMES), len(FRAMES) + 1
_LEAST: Final = 0


def _set_layout(code: int, least_parts: int, slices: dict[int, int]) -> None:
    _LAYOUTS[code, _LEAST] = least_parts
    for part, index in slices.items():
        _LAYOUTS[code, 1 + part - layout.MIN_PARTS] = index


_set_layout(
    REQUEST,
    layout.REQUEST_PARTS,
    {
        layout.REQUEST_QUEUE_PART: NAME,
        layout.REQUEST_HEADERS_PART: HEADERS,
        layout.REQUEST_MESSAGE_PART: PAYLOAD,
    },
)
_set_layout(
    REPLY,
    layout.REPLY_PARTS,
    {layout.REPLY_MESSAGE_PART: PAYLOAD, layout.REPLY_REQUEST_PART: ABOUT},
)
_set_layout(
    PUBLISH,
    layout.SHORT_PUBLISH_PARTS,
    {
        layout.PUBLISH_TOPIC_PART: NAME,
        layout.PUBLISH_HEADERS_PART: HEADERS,
        layout.PUBLISH_MESSAGE_PART: PAYLOAD,
    },
)
_set_layout(
    _SHORT_PUBLISH,
    layout.SHORT_PUBLISH_PARTS,
    {layout.PUBLISH_TOPIC_PART: NAME, layout.SHORT_PUBLISH_MESSAGE_PART: PAYLOAD},
)
_set_layout(ACK, layout.ACK_PARTS, {layout.ACK_MSGID_PART: ABOUT})
_set_layout(HEARTBEAT, layout.HEARTBEAT_PARTS, {layout.HEARTBEAT_TIME_PART: ABOUT})
_set_layout(
    INFORM, layout.INFORM_PARTS, {layout.INFORM_QUEUES_PART: ABOUT, layout.INFORM_PEER_PART: LAST}
)
for _code in (SCHEDULE, UNSCHEDULE):
    _set_layout(
        _code,
        layout.SHORT_SCHEDULE_PARTS,
        {
            layout.SCHEDULE_QUEUE_PART: NAME,
            layout.SCHEDULE_HEADERS_PART: HEADERS,
            layout.SCHEDULE_INTERVAL_PART: ABOUT,
            layout.SCHEDULE_MESSAGE_PART: PAYLOAD,
            layout.SCHEDULE_CRON_PART: LAST,
        },
    )
_set_layout(
    _SHORT_SCHEDULE,
    layout.SHORT_SCHEDULE_PARTS,
    {
        layout.SCHEDULE_QUEUE_PART: NAME,
        layout.SCHEDULE_HEADERS_PART: HEADERS,
        layout.SHORT_SCHEDULE_MESSAGE_PART: PAYLOAD,
    },
)
for _code in (READY, DISCONNECT, KBAI, ADMIN):
    _set_layout(_code, layout.MIN_PARTS, {})

# The commands' names, the frequent ones first, and the frame code of each.
_COMMANDS: Final = {
    layout.COMMAND_REQUEST: REQUEST,
    layout.COMMAND_REPLY: REPLY,
    layout.COMMAND_PUBLISH: PUBLISH,
    layout.COMMAND_READY: READY,
    layout.COMMAND_HEARTBEAT: HEARTBEAT,
    layout.COMMAND_ACK: ACK,
    layout.COMMAND_INFORM: INFORM,
    layout.COMMAND_SCHEDULE: SCHEDULE,
    layout.COMMAND_UNSCHEDULE: UNSCHEDULE,
    layout.COMMAND_DISCONNECT: DISCONNECT,
    layout.COMMAND_KBAI: KBAI,
    layout.COMMAND_KBYE: KBAI,
    **dict.fromkeys(layout.ADMIN_COMMANDS, ADMIN),
}
_CODES: Final = np.array(list(_COMMANDS.values()))
_LENGTHS: Final = np.array([len(name) for name in _COMMANDS])
_NAMES: Final = np.frombuffer(b"".join(_COMMANDS), np.uint8)

_VERSION: Final = word(layout.VERSION)
_METADATA_COMMANDS: Final = tuple(map(word, zmtp_layout.METADATA_COMMANDS))
_SILENT_SOCKETS: Final = tuple(map(word, zmtp_layout.SILENT_SOCKETS))
_PUBLISHING_SOCKETS: Final = tuple(map(word, zmtp_layout.PUBLISHING_SOCKETS))


# ------------------------------------------------------------------------------------------- ZMTP


@subroutine
def _greeting(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    name_end = greeting_at(data, position, end)
    if name_end < 0:
        return name_end
    version = big_endian(data, position + zmtp_layout.MAJOR_OFFSET, 2)
    as_server = min(octet_at(data, position + zmtp_layout.AS_SERVER_OFFSET), 1)
    size = zmtp_layout.GREETING_SIZE
    row = add_row(rows, progress, position + shift, size, ZMTP_GREETING, version, as_server, NONE)
    set_slice(rows, row, NAME, position + zmtp_layout.MECHANISM_OFFSET, name_end)
    state[_STAGE] = _HANDSHAKE
    return position + size


@subroutine
def _socket(data: Bytes, start: int, end: int) -> int:
    """What the messages of a socket of this type hold."""
    if start == end:
        return _UNKNOWN
    name = word_at(data, start, end)
    if data[start] == 0:
        return _COMMANDER
    if name in _SILENT_SOCKETS:
        return _SILENT
    return _PUBLISHER if name in _PUBLISHING_SOCKETS else _COMMANDER


@subroutine
def _zmtp_command(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    stop, name, name_end = command_at(data, position, end, limits[_COMMAND_BYTES])
    if stop < 0:
        return stop
    name += zmtp_layout.NAME_LENGTH_SIZE
    if data[name] and word_at(data, name, name_end) in _METADATA_COMMANDS:
        # The last command of the handshake. After it, and without metadata, it is for the Decoder.
        socket, socket_end = socket_type_at(data, name_end, stop)
        if state[_STAGE] == _TRAFFIC or socket < 0:
            return UNSURE
        state[_SOCKET] = _socket(data, socket, socket_end)
        state[_STAGE] = _TRAFFIC
        state[HANDSHAKE_END] = stop + shift
    row = add_row(rows, progress, position + shift, stop - position, ZMTP_COMMAND, 0, NONE, NONE)
    set_slice(rows, row, NAME, name, name_end)
    set_slice(rows, row, ABOUT, name_end, stop)
    return stop


# --------------------------------------------------------------------------------------- commands


@subroutine
def _part(progress: Numbers, index: int) -> tuple[int, int]:
    """Start and end of a part, as `message_at` has noted them."""
    return progress[SCRATCH + 2 * index], progress[SCRATCH + 2 * index + 1]


@subroutine
def _command(data: Bytes, start: int, end: int) -> int:
    """The frame code of the command with this name, UNSURE if there is none."""
    at = 0
    for index in range(len(_CODES)):
        length = _LENGTHS[index]
        if length == end - start:
            same = 0
            while same < length and data[start + same] == _NAMES[at + same]:
                same += 1
            if same == length:
                return int(_CODES[index])
        at += length
    return UNSURE


@subroutine
def _layout(data: Bytes, code: int, count: int, progress: Numbers) -> int:
    """The row of _LAYOUTS for this command; UNSURE if there is none, or a text is not UTF-8."""
    form = code
    if code == PUBLISH and count == layout.SHORT_PUBLISH_PARTS:
        form = _SHORT_PUBLISH
    elif code in (SCHEDULE, UNSCHEDULE):
        if count == layout.SHORT_SCHEDULE_PARTS:
            form = _SHORT_SCHEDULE
        elif count < layout.SCHEDULE_PARTS:
            return UNSURE
    start, end = _part(progress, layout.MSGID_PART)
    if count < _LAYOUTS[form, _LEAST] or not valid_utf8(data, start, end):
        return UNSURE
    for index in range(layout.MIN_PARTS, min(count, KEPT_PARTS)):
        part = _LAYOUTS[form, 1 + index - layout.MIN_PARTS]
        start, end = _part(progress, index)
        # A payload is any bytes, and so are parts that have no meaning.
        if part not in (NONE, PAYLOAD) and not valid_utf8(data, start, end):
            return UNSURE
    return form


@subroutine
def _content(data: Bytes, count: int, progress: Numbers, state: Numbers) -> int:
    """What the message holds: a frame code, NONE for nothing of eMQP, UNSURE for no command."""
    socket = state[_SOCKET]
    first, first_end = _part(progress, layout.EMPTY_PART)
    if socket == _UNKNOWN:
        # The handshake had no socket type: by the number of parts, as the Decoder does it.
        if state[_IS_BROKER] and count == layout.DELIVERY_PARTS:
            socket = _PUBLISHER
        elif count == 1 and first_end > first and data[first] <= zmtp_layout.SUBSCRIPTION_SUBSCRIBE:
            socket = _SILENT
    if socket == _SILENT:
        return NONE
    if socket == _PUBLISHER:
        is_delivery = count == layout.DELIVERY_PARTS and valid_utf8(data, first, first_end)
        return DELIVERY if is_delivery else UNSURE
    if count < layout.MIN_PARTS or first != first_end:
        return UNSURE
    version, version_end = _part(progress, layout.VERSION_PART)
    if word_at(data, version, version_end) != _VERSION:
        return UNSURE
    name, name_end = _part(progress, layout.COMMAND_PART)
    return _command(data, name, name_end)


@subroutine
def _message(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """A message of ZMTP, and the command or publication in it: two rows of the same bytes."""
    stop, count = message_at(data, position, end, limits[_FRAME_BYTES], limits[_PARTS], progress)
    if stop < 0:
        return stop
    code = _content(data, count, progress, state)
    if code == UNSURE:
        return UNSURE
    form = code
    if code > DELIVERY:
        form = _layout(data, code, count, progress)
        if form < 0:
            return UNSURE
    offset, length = position + shift, stop - position
    add_row(rows, progress, offset, length, ZMTP_MESSAGE, count, NONE, NONE)
    if code == NONE:
        return stop
    row = add_row(rows, progress, offset, length, code, 0, NONE, NONE)
    if code == DELIVERY:
        topic, topic_end = _part(progress, layout.DELIVERY_TOPIC_PART)
        body, body_end = _part(progress, layout.DELIVERY_MESSAGE_PART)
        set_slice(rows, row, NAME, topic, topic_end)
        set_slice(rows, row, PAYLOAD, body, body_end)
        return stop
    msgid, msgid_end = _part(progress, layout.MSGID_PART)
    set_slice(rows, row, MSGID, msgid, msgid_end)
    if code == ADMIN:
        name, name_end = _part(progress, layout.COMMAND_PART)
        set_slice(rows, row, ABOUT, name, name_end)
    for index in range(layout.MIN_PARTS, min(count, KEPT_PARTS)):
        part = _LAYOUTS[form, 1 + index - layout.MIN_PARTS]
        if part != NONE:
            start, stop_of_part = _part(progress, index)
            set_slice(rows, row, part, start, stop_of_part)
    return stop


@subroutine
def _step(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position after the greeting, command or message, or why there is none."""
    if state[_STAGE] == _TRAFFIC and data[position] < zmtp_layout.FLAG_COMMAND:
        return _message(data, position, end, shift, state, limits, rows, progress)
    if state[_STAGE] == _GREETING:
        return _greeting(data, position, end, shift, state, rows, progress)
    return _zmtp_command(data, position, end, shift, state, limits, rows, progress)


_TIMED: Final = {
    "msgid": MSGID,
    "queue": NAME,
    "headers": HEADERS,
    "interval": ABOUT,
    "cron": LAST,
}
_TEXTS: Final[dict[type[Frame], dict[str, int]]] = {
    DeliveryFrame: {"topic": NAME},
    Request: {"msgid": MSGID, "queue": NAME, "headers": HEADERS},
    Reply: {"msgid": MSGID, "request": ABOUT},
    Publish: {"msgid": MSGID, "topic": NAME, "headers": HEADERS},
    Ack: {"msgid": MSGID, "acknowledged": ABOUT},
    Heartbeat: {"msgid": MSGID, "timestamp": ABOUT},
    Inform: {"msgid": MSGID, "queues": ABOUT, "peer": LAST},
    Admin: {"msgid": MSGID, "command": ABOUT},
    Ready: {"msgid": MSGID},
    Disconnect: {"msgid": MSGID},
    Kbai: {"msgid": MSGID},
    ScheduleFrame: _TIMED,
    UnscheduleFrame: _TIMED,
}
"""By frame: its texts, and the slices that they are."""


def _message_part(frame: Frame) -> int:
    """Which part of the ZeroMQ message is the body of a frame that has one."""
    match frame:
        case Request():
            return layout.REQUEST_MESSAGE_PART
        case Reply():
            return layout.REPLY_MESSAGE_PART
        case Publish(headers=None):
            return layout.SHORT_PUBLISH_MESSAGE_PART
        case Publish():
            return layout.PUBLISH_MESSAGE_PART
        case ScheduleFrame(interval=None) | UnscheduleFrame(interval=None):
            return layout.SHORT_SCHEDULE_MESSAGE_PART
        case ScheduleFrame() | UnscheduleFrame():
            return layout.SCHEDULE_MESSAGE_PART
    return layout.DELIVERY_MESSAGE_PART


def _trailing(message: Message, part: int, length: int) -> int:
    """How many bytes of a ZeroMQ message of this length follow a part. Few peers write the lengths
    of short parts in 8 bytes, and those always do."""
    parts = message.parts[part + 1 :]
    size = sum(map(len, parts))
    short, long = zmtp_layout.SHORT_HEADER_SIZE, zmtp_layout.LONG_HEADER_SIZE
    if length == sum(map(len, message.parts)) + long * len(message.parts):
        return size + long * len(parts)
    most = zmtp_layout.MAX_SHORT_SIZE
    return size + sum(short if len(each) <= most else long for each in parts)


class EmqpScanner(BulkScanner):
    """`number` is how many parts a ZeroMQ message has, of a greeting its version (major · 256 +
    minor), whose `detail` is `as_server`. What a subscriber gets is a `publish` without `msgid`.

    `payload` is the body of a message; `name` the queue or topic, of a ZMTP command its name, of a
    greeting the mechanism; `about` is what an ack acknowledges, the request that a reply answers, a
    heartbeat's time, the queues of an inform, a schedule's interval, an admin's command, and what
    follows the name in a ZMTP command; `last` is a schedule's cron, an inform's peer. What is in
    `headers` is not checked here.

    CURVE, commands between the parts of a message, and messages that are no command are left to the
    decoder.
    """

    frames: ClassVar[tuple[type[Frame], ...]] = FRAMES
    decoder_frames: ClassVar[tuple[type[Frame], ...]] = DECODER_FRAMES
    slice_names: ClassVar[tuple[str, ...]] = (
        "payload",
        "msgid",
        "name",
        "headers",
        "about",
        "last",
    )
    state_slots: ClassVar[int] = 3
    has_handshake: ClassVar[bool] = True
    scratch_slots: ClassVar[int] = 2 * KEPT_PARTS
    kernel = staticmethod(scan_kernel("emqp", _step))

    def columns_of(self, frame: Frame, length: int, below: Frame | None) -> FrameColumns:
        """Greetings and commands of ZMTP are read from the frame itself."""
        if isinstance(frame, Malformed):
            raise frame.error()
        code = self.codes[type(frame)]
        if isinstance(frame, Command):
            frame.fields()  # its metadata may be invalid
        if isinstance(frame, Message):
            return FrameColumns(code, len(frame.parts))
        if frame.layer == 0 or code == NESTED_COMMAND:
            return FrameColumns(code)
        slices: list[bytes | None] = [None] * len(self.slice_names)
        for name, index in _TEXTS[type(frame)].items():
            text: str | None = getattr(frame, name)
            slices[index] = None if text is None else text.encode()
        slices[PAYLOAD] = getattr(frame, "message", None)
        trailing = 0
        if slices[PAYLOAD] is not None and isinstance(below, Message):
            trailing = _trailing(below, _message_part(frame), length)
        return FrameColumns(code, slices=tuple(slices), trailing=trailing)

    def _limit_values(self, limits: Limits | None) -> list[int]:
        limits = one_of(limits, DEFAULTS)
        return [limits.frame_bytes, limits.parts, limits.command_bytes]

    def _initial_state(self, sender: str) -> list[int]:
        return [sender == "broker", _GREETING, _UNKNOWN]

    def _state_from(self, decoder: Decoder) -> tuple[bool, list[int]] | None:
        assert isinstance(decoder, EmqpDecoder)
        stages = {"greeting": _GREETING, "handshake": _HANDSHAKE, "traffic": _TRAFFIC}
        stage = stages.get(decoder.stage)
        if stage is None or decoder.mechanism == zmtp_layout.MECHANISM_CURVE:
            return None
        socket_type = decoder.socket_type
        if socket_type is None:
            socket = _UNKNOWN
        elif socket_type in zmtp_layout.SILENT_SOCKETS:
            socket = _SILENT
        elif socket_type in zmtp_layout.PUBLISHING_SOCKETS:
            socket = _PUBLISHER
        else:
            socket = _COMMANDER
        return stage == _TRAFFIC, [decoder.sender == "broker", stage, socket]


SCANNER = EmqpScanner
