"""Relink's columnar scanner for captures: the handshake, then packets, their channels and parts."""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.pipeline.decode.scanners.scanner import (
    NONE,
    ODD,
    OFFSET,
    OPENED,
    OWN,
    TAIL,
    BulkScanner,
    Bytes,
    Numbers,
    compiled,
    has_room,
    has_run,
    kernel,
    little,
    octet_at,
    point,
    put,
    stopped,
    valid_utf8,
)
from crosswire.wire.contract import Decoder, Limits, one_of
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.frames import (
    DEFAULTS,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Ping,
    Pong,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    ListenerHello,
    ListenerVersion,
)

__all__ = ["RelinkScanner"]

# Slots of the state.
_LISTENER: Final = OWN
_STAGE: Final = OWN + 1
"""0 version, 1 hello, 2 packets."""
_CONNECTOR_SIZE: Final = OWN + 2
"""Of the connector's channel ids, and of the listener's; NONE while they are not known."""
_LISTENER_SIZE: Final = OWN + 3

_VERSION, _HELLO, _PACKETS = range(3)

# Frame codes: a general packet's is its type, a channel packet's _OF_CHANNELS + its format.
_OF_CHANNELS: Final = 5
_MESSAGE: Final = _OF_CHANNELS + 4
_VERSIONS: Final = 10
_HELLOS: Final = 12

_PAYLOAD, _PROPERTIES, _CHANNELS, _SIZES, _ENDPOINT = range(5)

_MULTICAST: Final = 2
_LONG, _LARGE = 1, 2


@compiled
def _aligned(position: int, boundary: int) -> int:
    return (position + boundary - 1) & -boundary


@compiled
def _opening(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """A version or a hello."""
    offset = position + shift
    listener = state[_LISTENER]
    if state[_STAGE] == _VERSION:
        if end - position < 8:
            return TAIL
        put(rows, progress, offset, 8, _VERSIONS + listener, data[position], NONE, NONE)
        state[_STAGE] = _HELLO
        return position + 8
    name_end = sizes_end = position
    if not listener:
        name_end = position + 1 + octet_at(data, position)
        sizes_end = name_end + 2
        if sizes_end >= end:
            return TAIL
        if data[name_end] > 8 or data[name_end + 1] > 8:
            return ODD
        if not valid_utf8(data, position + 1, name_end):
            return ODD
    epoch = position if listener else position + _aligned(sizes_end + 1 - position, 8)
    stop = epoch + 16
    if stop > end:
        return TAIL
    link = little(data, epoch + 8, 8)
    if link < 0:
        return ODD
    detail = NONE if listener else octet_at(data, sizes_end)
    row = put(rows, progress, offset, stop - position, _HELLOS + listener, link, detail, NONE)
    point(rows, row, _PAYLOAD, epoch, epoch + 8)
    if not listener:
        point(rows, row, _ENDPOINT, position + 1, name_end)
        point(rows, row, _SIZES, name_end, sizes_end)
        state[_CONNECTOR_SIZE] = data[name_end]
        state[_LISTENER_SIZE] = data[name_end + 1]
    state[_STAGE] = _PACKETS
    state[OPENED] = stop + shift
    return stop


@compiled
def _parts(
    data: Bytes, position: int, ids_end: int, flags: int, end: int, limits: Numbers
) -> tuple[int, int, int, int, int]:
    """What follows a message's channels, which end `ids_end` bytes behind `position`: where the
    message ends (or why that can't be told), how many parts it has, where their sizes are, where
    the last of them is, and where it ends."""
    at = _aligned(ids_end, 2)
    if flags & _LONG:
        if position + at + 4 > end:
            return TAIL, 0, 0, 0, 0
        count = little(data, position + at, 4)
        at += 4
    else:
        count = octet_at(data, position + 1)
    if count > limits[1]:
        return ODD, 0, 0, 0, 0
    width = 8 if flags & _LARGE else 2
    at = _aligned(at, width)
    start = position + _aligned(at + count * width, 8)
    if start - position > limits[0]:
        return ODD, 0, 0, 0, 0
    if start > end:
        return TAIL, 0, 0, 0, 0
    stop = part = part_end = start
    for index in range(position + at, position + at + count * width, width):
        size = little(data, index, width)
        if size < 0 or size > limits[0]:
            return ODD, 0, 0, 0, 0
        part, part_end = stop, stop + size
        stop += _aligned(size, 8)
        if stop - position > limits[0]:
            return ODD, 0, 0, 0, 0
    return stop if stop <= end else TAIL, count, position + at, part, part_end


@compiled
def _message(
    data: Bytes,
    position: int,
    ids_end: int,
    flags: int,
    end: int,
    shift: int,
    number: int,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> tuple[int, int]:
    """Its end and its row."""
    stop, count, sizes, part, part_end = _parts(data, position, ids_end, flags & 7, end, limits)
    if stop < 0:
        return stop, 0
    row = put(rows, progress, position + shift, stop - position, _MESSAGE, number, flags, NONE)
    width = 8 if flags & _LARGE else 2
    start = position + _aligned(sizes + count * width - position, 8)
    point(rows, row, _SIZES, sizes, sizes + count * width)
    point(rows, row, _PAYLOAD, part if count <= 2 else start, part_end)
    if count == 2:
        point(rows, row, _PROPERTIES, start, start + little(data, sizes, width))
    return stop, row


@compiled
def _packet(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position behind the packet, or why there is none to be had."""
    if state[_STAGE] != _PACKETS:
        return _opening(data, position, end, shift, state, rows, progress)
    if state[_CONNECTOR_SIZE] == NONE:
        return ODD
    if end - position < 8:
        return TAIL
    head = octet_at(data, position)
    bits = head >> 5
    if not head & 1:
        if bits >= _OF_CHANNELS:
            return ODD
        put(rows, progress, position + shift, 8, bits, 0, NONE, NONE)
        return position + 8
    kind = head >> 2 & 7
    values = 8 if kind == 4 else 3 if kind == 0 else 5 if kind == 1 else 2 if kind == 2 else 4
    if kind > 4 or bits >= values:
        return ODD
    # The two acknowledgements are about the other side's channels.
    of_listener = (state[_LISTENER] != 0) != (kind == 1 or kind == 3)
    size = state[_LISTENER_SIZE if of_listener else _CONNECTOR_SIZE]
    count, ids, detail = 1, 2, bits
    if head & _MULTICAST:
        count, ids, detail = little(data, position + 4, 4), 8, bits | 8
        if count > limits[2]:
            return ODD
    ids_end = ids + count * size
    if _aligned(ids_end, 8) > limits[0]:
        return ODD
    if position + ids_end > end:
        return TAIL
    number = little(data, position + ids, size) if count else 0
    if kind == 4:
        stop, row = _message(
            data, position, ids_end, detail, end, shift, number, limits, rows, progress
        )
    else:
        after = _aligned(ids_end, 4) + 4 if kind >= 2 else ids_end
        stop = position + _aligned(after, 8)
        if stop - position > limits[0]:
            return ODD
        if stop > end:
            return TAIL
        sequence = little(data, position + after - 4, 4) if kind >= 2 else NONE
        frame = _OF_CHANNELS + kind
        row = put(
            rows, progress, position + shift, stop - position, frame, number, detail, sequence
        )
    if stop >= 0:
        point(rows, row, _CHANNELS, position + ids, position + ids_end)
    return stop


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
    while has_run(states, progress):
        run = progress[0]
        position, end, state = at[run], ends[run], states[run]
        shift = state[OFFSET] - position
        after = position
        while position < end and has_room(rows, progress):
            after = _packet(data, position, end, shift, state, limits, rows, progress)
            if after < 0:
                break
            position = after
        if not stopped(at, ends, states, progress, position, after):
            return False
    return True


class RelinkScanner(BulkScanner):
    """`number` is the first channel (0 if there is none), of a version its number, of a hello the
    link; `sequence` is that of the two sequence formats. `detail` has the first byte's data bits,
    which are the operation or acknowledgement in their order in `frames.py` or a message's flags
    long and large, and 8 for a multicast; of a connector's hello, its flags.

    `channels` are the ids as they stand, `sizes` the sizes of a message's parts, of 2 bytes or in a
    large message 8. `payload` is the last part where there are one or two, `properties` the first
    of two; of more, `payload` is all from the first part's start to the last one's end. A hello's
    `payload` is its epoch, its `sizes` the two sizes of ids.
    """

    frame_names: ClassVar[tuple[str, ...]] = tuple(
        frame.frame_name
        for frame in (
            Nop,
            Ping,
            Pong,
            Resume,
            Shutdown,
            ChannelOperation,
            ChannelAcknowledgement,
            SequenceOperation,
            SequenceAcknowledgement,
            Message,
            ConnectorVersion,
            ListenerVersion,
            ConnectorHello,
            ListenerHello,
        )
    )
    frame_layers: ClassVar[tuple[int, ...]] = (0,) * len(frame_names)
    slice_names: ClassVar[tuple[str, ...]] = (
        "payload",
        "properties",
        "channels",
        "sizes",
        "endpoint",
    )
    own_slots: ClassVar[int] = 4
    has_handshake: ClassVar[bool] = True

    _kernel = staticmethod(_scan)

    def share(self, states: Numbers, peers: Numbers) -> None:
        """A listener does not say how large ids are: its connector does."""
        sizes = slice(_CONNECTOR_SIZE, _LISTENER_SIZE + 1)
        states[:, sizes] = peers[:, sizes]

    def _limited(self, limits: Limits | None) -> list[int]:
        limits = one_of(limits, DEFAULTS)
        return [limits.frame_bytes, limits.parts, limits.targets]

    def _begin(self, sender: str) -> list[int]:
        return [sender == "listener", _VERSION, NONE, NONE]

    def _read_state(self, decoder: Decoder) -> tuple[bool, list[int]] | None:
        assert isinstance(decoder, RelinkDecoder)
        stage = ("version", "hello", "packets").index(decoder._stage.value)
        sizes = decoder.id_sizes or (NONE, NONE)
        if stage == _PACKETS and decoder.id_sizes is None:
            return None
        return stage == _PACKETS, [decoder.sender == "listener", stage, *sizes]
