"""Relink's columnar scanner: the handshake, then packets, their channels and parts."""

from __future__ import annotations

from typing import ClassVar, Final, get_args

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.kernels import subroutine
from crosswire.pipeline.decode.scanners.octets import little_endian, octet_at, valid_utf8
from crosswire.pipeline.decode.scanners.scanner import (
    HANDSHAKE_END,
    INCOMPLETE,
    PROTOCOL_STATE,
    UNSURE,
    BulkScanner,
    FrameColumns,
    add_row,
    scan_kernel,
    set_slice,
)
from crosswire.wire.contract import Decoder, Frame, Limits, one_of
from crosswire.wire.relink import layout
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.frames import (
    DEFAULTS,
    Acknowledgement,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Operation,
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

__all__ = [
    "CHANNELS",
    "CONNECTOR_HELLO",
    "DATA_BITS",
    "ENDPOINT",
    "FIRST_ABOUT_CHANNELS",
    "LISTENER_HELLO",
    "MESSAGE",
    "MULTICAST",
    "PAYLOAD",
    "PROPERTIES",
    "SCANNER",
    "SIZES",
    "VERSIONS",
    "RelinkScanner",
]

# Codes of frames: a general packet's is its type, a channel packet's follows by its format.
FIRST_ABOUT_CHANNELS: Final = layout.LAST_TYPE + 1
"""Operations and acknowledgements, four formats, and then messages."""
MESSAGE: Final = FIRST_ABOUT_CHANNELS + layout.FORMAT_MESSAGE
VERSIONS: Final = (MESSAGE + 1, MESSAGE + 2)
"""The connector's and the listener's."""
CONNECTOR_HELLO, LISTENER_HELLO = MESSAGE + 3, MESSAGE + 4

PAYLOAD, PROPERTIES, CHANNELS, SIZES, ENDPOINT = range(5)
"""Slices."""

# What `detail` has of a packet about channels or a message.
DATA_BITS: Final = 7
"""The data bits of the first byte."""
MULTICAST: Final = 8

# What is remembered of a direction. The sizes of ids are NONE while they are not known.
_IS_LISTENER: Final = PROTOCOL_STATE
_STAGE: Final = PROTOCOL_STATE + 1
_CONNECTOR_ID_SIZE: Final = PROTOCOL_STATE + 2
_LISTENER_ID_SIZE: Final = PROTOCOL_STATE + 3

_STAGES: Final = ("version", "hello", "packets")
_VERSION, _HELLO, _PACKETS = range(3)

# The limits.
_FRAME_BYTES, _PARTS, _TARGETS = range(3)

_CONNECTOR_VERSION: Final = VERSIONS[0]
_OPERATIONS: Final = get_args(Operation)
_ACKNOWLEDGEMENTS: Final = get_args(Acknowledgement)


_align = subroutine(layout.align)


@subroutine
def _last_data(kind: int) -> int:
    """The last value of the data bits that is defined for a format."""
    # Branches, the most frequent format first: an array of constants would be read from memory.
    if kind == layout.FORMAT_MESSAGE:
        return DATA_BITS
    if kind == layout.FORMAT_CHANNEL_OPERATION:
        return layout.LAST_CHANNEL_OPERATION
    if kind == layout.FORMAT_CHANNEL_ACKNOWLEDGEMENT:
        return layout.LAST_CHANNEL_ACKNOWLEDGEMENT
    if kind == layout.FORMAT_SEQUENCE_OPERATION:
        return layout.LAST_SEQUENCE_OPERATION
    return layout.LAST_SEQUENCE_ACKNOWLEDGEMENT


@subroutine
def _version(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    if end - position < layout.VERSION_SIZE:
        return INCOMPLETE
    version = octet_at(data, position + layout.VERSION_OFFSET)
    code = _CONNECTOR_VERSION + state[_IS_LISTENER]
    add_row(rows, progress, position + shift, layout.VERSION_SIZE, code, version, NONE, NONE)
    state[_STAGE] = _HELLO
    return position + layout.VERSION_SIZE


@subroutine
def _hello(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    is_listener = state[_IS_LISTENER]
    epoch, name, name_end, detail = position, position, position, NONE
    if not is_listener:
        # The driver calls a step only where there is a byte: the name's length can be read.
        name = position + layout.ENDPOINT_OFFSET
        name_end = name + octet_at(data, position + layout.ENDPOINT_LENGTH_OFFSET)
        if name_end + layout.HELLO_FIELDS_SIZE > end:
            return INCOMPLETE
        if (
            data[name_end + layout.CONNECTOR_ID_SIZE_OFFSET] > layout.MAX_ID_SIZE
            or data[name_end + layout.LISTENER_ID_SIZE_OFFSET] > layout.MAX_ID_SIZE
        ):
            return UNSURE
        if not valid_utf8(data, name, name_end):
            return UNSURE
        detail = octet_at(data, name_end + layout.HELLO_FLAGS_OFFSET)
        fields_end = name_end + layout.HELLO_FIELDS_SIZE
        epoch = position + _align(fields_end - position, layout.ALIGNMENT)
    stop = epoch + layout.EPOCH_SIZE + layout.LINK_SIZE
    if stop > end:
        return INCOMPLETE
    link = little_endian(data, epoch + layout.LINK_OFFSET, layout.LINK_SIZE)
    # Negative from 2⁶³ on, which no link is.
    if link < 0:
        return UNSURE
    code = LISTENER_HELLO if is_listener else CONNECTOR_HELLO
    row = add_row(rows, progress, position + shift, stop - position, code, link, detail, NONE)
    set_slice(rows, row, PAYLOAD, epoch, epoch + layout.EPOCH_SIZE)
    if not is_listener:
        set_slice(rows, row, ENDPOINT, name, name_end)
        set_slice(rows, row, SIZES, name_end, name_end + layout.HELLO_FLAGS_OFFSET)
        state[_CONNECTOR_ID_SIZE] = data[name_end + layout.CONNECTOR_ID_SIZE_OFFSET]
        state[_LISTENER_ID_SIZE] = data[name_end + layout.LISTENER_ID_SIZE_OFFSET]
    state[_STAGE] = _PACKETS
    state[HANDSHAKE_END] = stop + shift
    return stop


@subroutine
def _size_width(flags: int) -> int:
    """In how many bytes a message has the size of a part."""
    return layout.LARGE_SIZE_SIZE if flags & layout.FLAG_LARGE else layout.SMALL_SIZE_SIZE


@subroutine
def _parts(
    data: Bytes, position: int, ids_end: int, flags: int, end: int, limits: Numbers
) -> tuple[int, int, int, int, int]:
    """What follows a message's channels, which end `ids_end` bytes after `position`.

    The end of the message, or INCOMPLETE or UNSURE; the number of its parts, where their sizes are,
    and start and end of the last part.
    """
    at = _align(ids_end, layout.SIZES_ALIGNMENT)
    if flags & layout.FLAG_LONG:
        if position + at + layout.LONG_PARTS_SIZE > end:
            return INCOMPLETE, 0, 0, 0, 0
        count = little_endian(data, position + at, layout.LONG_PARTS_SIZE)
        at += layout.LONG_PARTS_SIZE
    else:
        count = octet_at(data, position + layout.PARTS_OFFSET)
    if count > limits[_PARTS]:
        return UNSURE, 0, 0, 0, 0
    width = _size_width(flags)
    at = _align(at, width)
    start = position + _align(at + count * width, layout.ALIGNMENT)
    if start - position > limits[_FRAME_BYTES]:
        return UNSURE, 0, 0, 0, 0
    if start > end:
        return INCOMPLETE, 0, 0, 0, 0
    stop = part = part_end = start
    for index in range(position + at, position + at + count * width, width):
        size = little_endian(data, index, width)
        # Each size is below the limit, and the sum is compared after each: it can't overflow.
        if size < 0 or size > limits[_FRAME_BYTES]:
            return UNSURE, 0, 0, 0, 0
        part, part_end = stop, stop + size
        stop += _align(size, layout.ALIGNMENT)
        if stop - position > limits[_FRAME_BYTES]:
            return UNSURE, 0, 0, 0, 0
    return stop if stop <= end else INCOMPLETE, count, position + at, part, part_end


@subroutine
def _message(
    data: Bytes,
    position: int,
    ids_end: int,
    detail: int,
    end: int,
    shift: int,
    number: int,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> tuple[int, int]:
    """The end of the message and its row."""
    flags = detail & DATA_BITS
    stop, count, sizes, part, part_end = _parts(data, position, ids_end, flags, end, limits)
    if stop < 0:
        return stop, 0
    row = add_row(rows, progress, position + shift, stop - position, MESSAGE, number, detail, NONE)
    width = _size_width(flags)
    start = position + _align(sizes + count * width - position, layout.ALIGNMENT)
    set_slice(rows, row, SIZES, sizes, sizes + count * width)
    set_slice(rows, row, PAYLOAD, part if count <= 2 else start, part_end)
    if count == 2:
        set_slice(rows, row, PROPERTIES, start, start + little_endian(data, sizes, width))
    return stop, row


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
    """The position after the packet, or why there is none."""
    if state[_STAGE] == _VERSION:
        return _version(data, position, end, shift, state, rows, progress)
    if state[_STAGE] == _HELLO:
        return _hello(data, position, end, shift, state, rows, progress)
    # Only the connector's hello has the sizes of ids, without which no packet can be measured.
    if state[_CONNECTOR_ID_SIZE] == NONE:
        return UNSURE
    if end - position < layout.MIN_PACKET_SIZE:
        return INCOMPLETE
    head = octet_at(data, position + layout.HEAD_OFFSET)
    bits = head >> layout.DATA_SHIFT
    if not head & layout.FLAG_CHANNEL:
        if bits > layout.LAST_TYPE:
            return UNSURE
        add_row(rows, progress, position + shift, layout.MIN_PACKET_SIZE, bits, 0, NONE, NONE)
        return position + layout.MIN_PACKET_SIZE
    kind = head >> layout.FORMAT_SHIFT & layout.FORMAT_MASK
    if kind > layout.LAST_FORMAT or bits > _last_data(kind):
        return UNSURE
    # The two acknowledgements are about the other side's channels.
    is_acknowledgement = (
        kind == layout.FORMAT_CHANNEL_ACKNOWLEDGEMENT
        or kind == layout.FORMAT_SEQUENCE_ACKNOWLEDGEMENT
    )
    of_listener = (state[_IS_LISTENER] != 0) != is_acknowledgement
    size = state[_LISTENER_ID_SIZE if of_listener else _CONNECTOR_ID_SIZE]
    # A packet has 8 bytes at least: the count of a multicast is among them.
    count, ids, detail = 1, layout.ID_OFFSET, bits
    if head & layout.FLAG_MULTICAST:
        at = position + layout.MULTICAST_COUNT_OFFSET
        count = little_endian(data, at, layout.MULTICAST_COUNT_SIZE)
        ids, detail = layout.MULTICAST_ID_OFFSET, bits | MULTICAST
        if count > limits[_TARGETS]:
            return UNSURE
    ids_end = ids + count * size
    if _align(ids_end, layout.ALIGNMENT) > limits[_FRAME_BYTES]:
        return UNSURE
    if position + ids_end > end:
        return INCOMPLETE
    number = little_endian(data, position + ids, size) if count else 0
    if kind == layout.FORMAT_MESSAGE:
        stop, row = _message(
            data, position, ids_end, detail, end, shift, number, limits, rows, progress
        )
    else:
        after, sequence = ids_end, NONE
        if kind >= layout.FIRST_SEQUENCE_FORMAT:
            after = _align(ids_end, layout.SEQUENCE_ALIGNMENT) + layout.SEQUENCE_SIZE
        stop = position + _align(after, layout.ALIGNMENT)
        if stop - position > limits[_FRAME_BYTES]:
            return UNSURE
        if stop > end:
            return INCOMPLETE
        if kind >= layout.FIRST_SEQUENCE_FORMAT:
            at = position + after - layout.SEQUENCE_SIZE
            sequence = little_endian(data, at, layout.SEQUENCE_SIZE)
        code = FIRST_ABOUT_CHANNELS + kind
        row = add_row(
            rows, progress, position + shift, stop - position, code, number, detail, sequence
        )
    if stop >= 0:
        set_slice(rows, row, CHANNELS, position + ids, position + ids_end)
    return stop


def _slices_of(frame: Message) -> tuple[bytes | None, ...]:
    """A message's payload, properties, channels and sizes, as the scanner has them."""
    parts = [bytes(part) for part in frame.parts]
    sizes = bytes(len(parts) * layout.LARGE_SIZE_SIZE)
    if len(parts) > 2:
        padded = (part + bytes(-len(part) % layout.ALIGNMENT) for part in parts[:-1])
        return b"".join((*padded, parts[-1])), None, None, sizes
    return parts[-1] if parts else b"", parts[0] if len(parts) == 2 else None, None, sizes


class RelinkScanner(BulkScanner):
    """`number` is the first channel (0 if there is none), of a version its number, of a hello the
    link; `sequence` is that of the two sequence formats. `detail` has the first byte's data bits,
    which are an operation, an acknowledgement or a message's flags, and MULTICAST; of a connector's
    hello, its flags.

    `channels` are the ids as they are on the wire, `sizes` the sizes of a message's parts, of 2
    bytes or in a large message 8. `payload` is the last part where there are one or two,
    `properties` the first of two; of more, `payload` is all from the first part's start to the last
    one's end. A hello's `payload` is its epoch, its `sizes` the two sizes of ids.
    """

    frames: ClassVar[tuple[type[Frame], ...]] = (
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
    slice_names: ClassVar[tuple[str, ...]] = (
        "payload",
        "properties",
        "channels",
        "sizes",
        "endpoint",
    )
    state_slots: ClassVar[int] = 4
    has_handshake: ClassVar[bool] = True
    reads_peer_handshake: ClassVar[bool] = True
    kernel = staticmethod(scan_kernel("relink", _step))

    def share_handshake(self, states: Numbers, peers: Numbers) -> None:
        """Only the connector sends how large ids are, the listener's too."""
        sizes = slice(_CONNECTOR_ID_SIZE, _LISTENER_ID_SIZE + 1)
        states[:, sizes] = peers[:, sizes]

    def columns_of(self, frame: Frame, length: int, below: Frame | None) -> FrameColumns:  # noqa: ARG002
        """`channels`, `endpoint` and of a message with more than two parts the `sizes` are read
        from the frame itself: there is only their length."""
        code = self.codes[type(frame)]
        match frame:
            case ConnectorVersion(version) | ListenerVersion(version):
                return FrameColumns(code, version)
            case ConnectorHello() | ListenerHello():
                epoch = frame.epoch.to_bytes(layout.EPOCH_SIZE, "little")
                return FrameColumns(code, frame.link, slices=(epoch,))
            case ChannelOperation() | SequenceOperation():
                value = _OPERATIONS.index(frame.operation)
            case ChannelAcknowledgement() | SequenceAcknowledgement():
                value = _ACKNOWLEDGEMENTS.index(frame.acknowledgement)
            case Message():
                value = layout.FLAG_LARGE
            case _:
                return FrameColumns(code)
        channel = frame.channels[0] if frame.channels else 0
        detail = value | (MULTICAST if frame.multicast else 0)
        if isinstance(frame, Message):
            return FrameColumns(code, channel, detail, slices=_slices_of(frame))
        return FrameColumns(code, channel, detail, getattr(frame, "sequence", NONE))

    def _limit_values(self, limits: Limits | None) -> list[int]:
        limits = one_of(limits, DEFAULTS)
        return [limits.frame_bytes, limits.parts, limits.targets]

    def _initial_state(self, sender: str) -> list[int]:
        return [sender == "listener", _VERSION, NONE, NONE]

    def _state_from(self, decoder: Decoder) -> tuple[bool, list[int]] | None:
        assert isinstance(decoder, RelinkDecoder)
        stage = _STAGES.index(decoder.stage)
        if stage == _PACKETS and decoder.id_sizes is None:
            return None
        sizes = decoder.id_sizes or (NONE, NONE)
        return stage == _PACKETS, [decoder.sender == "listener", stage, *sizes]


SCANNER = RelinkScanner
