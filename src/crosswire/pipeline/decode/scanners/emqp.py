"""eMQP's columnar scanner for captures: ZMTP on layer 0, commands in its messages on layer 1."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from crosswire.pipeline.decode.scanners.scanner import (
    NONE,
    ODD,
    OFFSET,
    OPENED,
    OWN,
    BulkScanner,
    Bytes,
    Numbers,
    big,
    compiled,
    has_room,
    has_run,
    kernel,
    octet_at,
    point,
    put,
    stopped,
    valid_utf8,
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
from crosswire.wire.contract import Decoder, Limits, one_of
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
    Publish,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
)
from crosswire.wire.emqp.layout import ADMIN_COMMANDS, VERSION
from crosswire.wire.zmtp.frames import Command, Greeting, Message
from crosswire.wire.zmtp.layout import FLAG_COMMAND, GREETING_SIZE

__all__ = ["EmqpScanner"]

# Slots of the state.
_BROKER: Final = OWN
_STAGE: Final = OWN + 1
_SOCKET: Final = OWN + 2

_GREETING, _HANDSHAKE, _TRAFFIC = range(3)
_UNKNOWN, _SILENT, _PUBLISHER, _COMMANDER = range(4)
"""What a socket's messages hold: nobody knows, nothing of ours, publications, commands."""

_FRAMES: Final = (
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
_DELIVERY, _REQUEST, _REPLY, _PUBLISH, _ACK, _HEARTBEAT, _READY = range(3, 10)
_DISCONNECT, _KBAI, _INFORM, _SCHEDULE, _UNSCHEDULE, _ADMIN = range(10, 16)

_PAYLOAD, _MSGID, _NAME, _HEADERS, _ABOUT, _LAST = range(6)

# By frame code: the least number of parts, and which slice each part from the fourth on is.
_LAYOUTS: Final = np.full((len(_FRAMES) + 2, 6), NONE, np.int64)
_SHORT_PUBLISH, _SHORT_SCHEDULE = len(_FRAMES), len(_FRAMES) + 1
for _code, _parts in {
    _REQUEST: (7, _NAME, _HEADERS, _PAYLOAD),
    _REPLY: (5, _PAYLOAD, _ABOUT),
    _PUBLISH: (6, _NAME, _HEADERS, _PAYLOAD),
    _SHORT_PUBLISH: (6, _NAME, _PAYLOAD),
    _ACK: (5, _ABOUT),
    _HEARTBEAT: (5, _ABOUT),
    _READY: (4,),
    _DISCONNECT: (4,),
    _KBAI: (4,),
    _INFORM: (6, _ABOUT, _LAST),
    _SCHEDULE: (7, _NAME, _HEADERS, _ABOUT, _PAYLOAD, _LAST),
    _UNSCHEDULE: (7, _NAME, _HEADERS, _ABOUT, _PAYLOAD, _LAST),
    _SHORT_SCHEDULE: (7, _NAME, _HEADERS, _PAYLOAD),
    _ADMIN: (4,),
}.items():
    _LAYOUTS[_code, : len(_parts)] = _parts

# The commands' names, the frequent ones first, and the frame code of each.
_COMMANDS: Final = {
    "REQUEST": _REQUEST,
    "REPLY": _REPLY,
    "PUBLISH": _PUBLISH,
    "READY": _READY,
    "HEARTBEAT": _HEARTBEAT,
    "ACK": _ACK,
    "INFORM": _INFORM,
    "SCHEDULE": _SCHEDULE,
    "UNSCHEDULE": _UNSCHEDULE,
    "DISCONNECT": _DISCONNECT,
    "KBAI": _KBAI,
    "KBYE": _KBAI,
    **dict.fromkeys([name.decode() for name in ADMIN_COMMANDS], _ADMIN),
}
_CODES: Final = np.array(list(_COMMANDS.values()))
_LENGTHS: Final = np.array([len(name) for name in _COMMANDS])
_NAMES: Final = np.frombuffer("".join(_COMMANDS).encode(), np.uint8)

_VERSION: Final = word(VERSION.decode())
_TELLING: Final = (word("READY"), word("INITIATE"))
_SILENT_SOCKETS: Final = (word("SUB"), word("XSUB"))
_PUBLISHING_SOCKETS: Final = (word("PUB"), word("XPUB"))


# ------------------------------------------------------------------------------------------- ZMTP


@compiled
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
    version, as_server = big(data, position + 10, 2), min(octet_at(data, position + 32), 1)
    row = put(rows, progress, position + shift, GREETING_SIZE, 0, version, as_server, NONE)
    point(rows, row, _NAME, position + 12, name_end)
    state[_STAGE] = _HANDSHAKE
    return position + GREETING_SIZE


@compiled
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


@compiled
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
    stop, name, name_end = command_at(data, position, end, limits[2])
    if stop < 0:
        return stop
    if data[name + 1] and word_at(data, name + 1, name_end) in _TELLING:
        # After the handshake nobody says this; the decoder knows what to make of it.
        socket, socket_end = socket_type_at(data, name_end, stop)
        if state[_STAGE] == _TRAFFIC or socket < 0:
            return ODD
        state[_SOCKET] = _socket(data, socket, socket_end)
        state[_STAGE] = _TRAFFIC
        state[OPENED] = stop + shift
    row = put(rows, progress, position + shift, stop - position, 1, 0, NONE, NONE)
    point(rows, row, _NAME, name + 1, name_end)
    point(rows, row, _ABOUT, name_end, stop)
    return stop


# --------------------------------------------------------------------------------------- commands


@compiled
def _command(data: Bytes, start: int, end: int) -> int:
    """The frame code of the command of this name, ODD if there is none."""
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
    return ODD


@compiled
def _layout(data: Bytes, code: int, count: int, parts: Numbers) -> int:
    """The row of _LAYOUTS that holds for this command, ODD if none does or a text is not UTF-8."""
    layout = code
    if code == _PUBLISH and count == 6:
        layout = _SHORT_PUBLISH
    elif code in (_SCHEDULE, _UNSCHEDULE):
        if count == 8:
            return ODD
        if count == 7:
            layout = _SHORT_SCHEDULE
    if count < _LAYOUTS[layout, 0] or not valid_utf8(data, parts[6], parts[7]):
        return ODD
    for index in range(4, min(count, KEPT_PARTS)):
        part = _LAYOUTS[layout, index - 3]
        is_text = part not in (NONE, _PAYLOAD)
        if is_text and not valid_utf8(data, parts[2 * index], parts[2 * index + 1]):
            return ODD
    return layout


@compiled
def _holds(data: Bytes, count: int, parts: Numbers, state: Numbers) -> int:
    """What the message holds: a frame code, NONE for nothing of ours, ODD for no command."""
    socket = state[_SOCKET]
    if socket == _UNKNOWN:
        if state[_BROKER] and count == 2:
            socket = _PUBLISHER
        elif count == 1 and parts[1] > parts[0] and data[parts[0]] < 2:
            socket = _SILENT
    if socket == _SILENT:
        return NONE
    if socket == _PUBLISHER:
        return _DELIVERY if count == 2 and valid_utf8(data, parts[0], parts[1]) else ODD
    if count < 4 or parts[0] != parts[1] or word_at(data, parts[2], parts[3]) != _VERSION:
        return ODD
    return _command(data, parts[4], parts[5])


@compiled
def _message(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
    parts: Numbers,
) -> int:
    stop, count = message_at(data, position, end, limits[0], limits[1], parts)
    if stop < 0:
        return stop
    code = _holds(data, count, parts, state)
    if code == ODD:
        return ODD
    layout = code
    if code > _DELIVERY:
        layout = _layout(data, code, count, parts)
        if layout < 0:
            return ODD
    offset, length = position + shift, stop - position
    put(rows, progress, offset, length, 2, count, NONE, NONE)
    if code == NONE:
        return stop
    row = put(rows, progress, offset, length, code, 0, NONE, NONE)
    if code == _DELIVERY:
        point(rows, row, _NAME, parts[0], parts[1])
        point(rows, row, _PAYLOAD, parts[2], parts[3])
        return stop
    point(rows, row, _MSGID, parts[6], parts[7])
    if code == _ADMIN:
        point(rows, row, _ABOUT, parts[4], parts[5])
    for index in range(4, min(count, KEPT_PARTS)):
        part = _LAYOUTS[layout, index - 3]
        if part != NONE:
            point(rows, row, part, parts[2 * index], parts[2 * index + 1])
    return stop


@compiled
def _frame(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
    parts: Numbers,
) -> int:
    """The position behind the greeting, command or message, or why there is none to be had."""
    if state[_STAGE] == _TRAFFIC and data[position] < FLAG_COMMAND:
        return _message(data, position, end, shift, state, limits, rows, progress, parts)
    if state[_STAGE] == _GREETING:
        return _greeting(data, position, end, shift, state, rows, progress)
    return _zmtp_command(data, position, end, shift, state, limits, rows, progress)


@kernel
def _scan(
    data: Bytes,
    at: Numbers,
    ends: Numbers,
    states: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> bool:
    parts = np.empty(2 * KEPT_PARTS, np.int64)
    while has_run(states, progress):
        run = progress[0]
        position, end, state = at[run], ends[run], states[run]
        shift = state[OFFSET] - position
        after = position
        while position < end and has_room(rows, progress):
            after = _frame(data, position, end, shift, state, limits, rows, progress, parts)
            if after < 0:
                break
            position = after
        if not stopped(at, ends, states, progress, position, after):
            return False
    return True


class EmqpScanner(BulkScanner):
    """`number` is how many parts a ZeroMQ message has, of a greeting its version (major · 256 +
    minor), whose `detail` is `as_server`. What a subscriber gets is a `publish` without `msgid`.

    `payload` is the body of a message; `name` the queue or topic, of a ZMTP command its name, of a
    greeting the mechanism; `about` is what an ack acknowledges, the request that a reply answers, a
    heartbeat's time, the queues of an inform, a schedule's interval, an admin's command, and what
    stands behind the name of a ZMTP command; `last` is a schedule's cron, an inform's peer. What is
    in `headers` is a second step's to read.

    CURVE, commands between the parts of a message, and messages that are no command are left to the
    decoder.
    """

    frame_names: ClassVar[tuple[str, ...]] = tuple(frame.frame_name for frame in _FRAMES)
    frame_layers: ClassVar[tuple[int, ...]] = tuple(frame.layer for frame in _FRAMES)
    slice_names: ClassVar[tuple[str, ...]] = (
        "payload",
        "msgid",
        "name",
        "headers",
        "about",
        "last",
    )
    own_slots: ClassVar[int] = 3
    has_handshake: ClassVar[bool] = True

    _kernel = staticmethod(_scan)

    def _limited(self, limits: Limits | None) -> list[int]:
        limits = one_of(limits, DEFAULTS)
        return [limits.frame_bytes, limits.parts, limits.command_bytes]

    def _begin(self, sender: str) -> list[int]:
        return [sender == "broker", _GREETING, _UNKNOWN]

    def _read_state(self, decoder: Decoder) -> tuple[bool, list[int]] | None:
        assert isinstance(decoder, EmqpDecoder)
        stages = {"greeting": _GREETING, "handshake": _HANDSHAKE, "traffic": _TRAFFIC}
        stage = stages.get(decoder._stage.value)
        if stage is None or decoder.mechanism == "CURVE":
            return None
        match decoder.socket_type:
            case None:
                socket = _UNKNOWN
            case "SUB" | "XSUB":
                socket = _SILENT
            case "PUB" | "XPUB":
                socket = _PUBLISHER
            case _:
                socket = _COMMANDER
        return stage == _TRAFFIC, [decoder.sender == "broker", stage, socket]
