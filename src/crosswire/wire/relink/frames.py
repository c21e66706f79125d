"""Relink's packets, parsed and serialized; the handshake before them is in `handshake.py`.

`layout.py` has the layout. Packets don't repeat the size of channel ids, so that all functions
here take the `PacketLayout` of a direction.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import Any, ClassVar, Final, Literal, TypeAlias

from crosswire.errors import FrameTooLarge, UnknownFrame
from crosswire.wire.contract import Frame, Limits, Placed
from crosswire.wire.relink.layout import (
    ALIGNMENT,
    DATA_SHIFT,
    FIRST_SEQUENCE_FORMAT,
    FLAG_CHANNEL,
    FLAG_LARGE,
    FLAG_LONG,
    FLAG_MULTICAST,
    FLAG_UNUSED,
    FORMAT_MASK,
    FORMAT_MESSAGE,
    FORMAT_SHIFT,
    GENERAL_STRUCT,
    HEADER_SIZE,
    ID_OFFSET,
    LARGE_SIZE_SIZE,
    LAST_FORMAT,
    LAST_SEQUENCE_ACKNOWLEDGEMENT,
    LAST_SEQUENCE_OPERATION,
    LAST_TYPE,
    LONG_PARTS_SIZE,
    MAX_SHORT_PARTS,
    MAX_SMALL_SIZE,
    MIN_PACKET_SIZE,
    MULTICAST_COUNT_OFFSET,
    MULTICAST_ID_OFFSET,
    PARTS_OFFSET,
    SEQUENCE_ALIGNMENT,
    SEQUENCE_SIZE,
    SHORT_SMALL_HEAD,
    SIZES_ALIGNMENT,
    SMALL_SIZE_SIZE,
    TYPE_NOP,
    U32_STRUCT,
    PacketLayout,
    align,
)

__all__ = [
    "DEFAULTS",
    "Acknowledgement",
    "Buffer",
    "ChannelAcknowledgement",
    "ChannelOperation",
    "Channels",
    "Message",
    "Nop",
    "Operation",
    "Ping",
    "Pong",
    "RelinkLimits",
    "Resume",
    "SequenceAcknowledgement",
    "SequenceOperation",
    "Shutdown",
    "Zeros",
    "measure",
    "message_bytes",
    "scan",
    "serialize",
    "serialize_all",
]

Buffer: TypeAlias = bytes | memoryview
Channels: TypeAlias = "tuple[int, ...] | Zeros"
Operation: TypeAlias = Literal["commit", "rollback", "close"]
Acknowledgement: TypeAlias = Literal["received", "consumed", "committed", "uncommitted", "closed"]

_ID_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Sizes of channel ids of which `struct` reads many at once."""
_FEW: Final = 64
"""From more ids of no bytes on they are `Zeros`."""
_TOGETHER_BYTES: Final = 8192
"""Pieces up to this size are joined for one write; larger ones are not copied."""
_VIEW_BYTES: Final = 65536
"""From this size on a part is a view of the received bytes, not a copy of them."""


class RelinkLimits(Limits, frozen=True, kw_only=True):
    """`frame_bytes` counts a whole packet, header and padding included.

    `window` is the limit of unconsumed messages on a channel, `unconsumed_bytes` the size of those
    of all channels of a link at which we stop reading, `channels` the limit of open channels.
    `link_s` is how long a link is kept without a connection.
    """

    parts: int = 65536
    targets: int = 65536
    window: int = 1024
    channels: int = 65536
    unconsumed_bytes: int = 256 * 1024 * 1024
    ping_interval_s: float = 10.0
    ping_timeout_s: float = 10.0
    link_s: float = 60.0


DEFAULTS: Final = RelinkLimits()


# --------------------------------------------------------------------------------------- packets


class Zeros(Sequence[int]):
    """Channel 0, repeated: the channels of a multicast whose ids have no bytes.

    Eight bytes can announce 65,536 of them, which must not become a tuple of that length.
    """

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self._count)[index]
        return Zeros(len(chosen)) if isinstance(chosen, range) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Zeros | tuple):
            return NotImplemented
        return len(self) == len(other) and not (isinstance(other, tuple) and any(other))

    def __hash__(self) -> int:
        return hash((0,) * self._count)

    def __repr__(self) -> str:
        return f"Zeros({self._count})"


class Nop(Frame, frozen=True, gc=False):
    """Eight zero bytes: padding between packets (specification 2.2)."""

    frame_name: ClassVar[str] = "nop"


class Ping(Frame, frozen=True, gc=False):
    """Has to be answered with a pong on the same connection (specification 3.4)."""

    frame_name: ClassVar[str] = "ping"


class Pong(Frame, frozen=True, gc=False):
    """The answer to a ping."""

    frame_name: ClassVar[str] = "pong"


class Resume(Frame, frozen=True, gc=False):
    """All channels of an old link have been reported; messages may follow (specification 3.5)."""

    frame_name: ClassVar[str] = "resume"


class Shutdown(Frame, frozen=True, gc=False):
    """The sender opens no more channels (specification 3.6)."""

    frame_name: ClassVar[str] = "shutdown"


class _ChannelPacket(Frame, frozen=True, gc=False):
    def fields(self) -> dict[str, Any]:
        fields = super().fields()
        fields["channels"] = list(fields["channels"])
        return fields


class ChannelOperation(_ChannelPacket, frozen=True, gc=False):
    """From the sender of a channel: about its next undecided message, or the whole channel."""

    frame_name: ClassVar[str] = "channel-operation"
    operation: Operation
    channels: Channels
    multicast: bool = False


class ChannelAcknowledgement(_ChannelPacket, frozen=True, gc=False):
    """From the receiver of a channel: about the message after the last that was acknowledged so."""

    frame_name: ClassVar[str] = "channel-acknowledgement"
    acknowledgement: Acknowledgement
    channels: Channels
    multicast: bool = False


class SequenceOperation(_ChannelPacket, frozen=True, gc=False):
    """About all undecided messages up to and including `sequence`."""

    frame_name: ClassVar[str] = "sequence-operation"
    operation: Operation
    channels: Channels
    sequence: int
    multicast: bool = False


class SequenceAcknowledgement(_ChannelPacket, frozen=True, gc=False):
    """About all messages up to and including `sequence` that were not acknowledged so before."""

    frame_name: ClassVar[str] = "sequence-acknowledgement"
    acknowledgement: Acknowledgement
    channels: Channels
    sequence: int
    multicast: bool = False


class Message(Frame, frozen=True, gc=False):
    """A message for one channel, or for several; a channel named twice gets it twice."""

    frame_name: ClassVar[str] = "message"
    channels: Channels
    multicast: bool
    parts: tuple[Buffer, ...]

    def fields(self) -> dict[str, Any]:
        """As `crosswire decode` prints them; parts in hexadecimal."""
        return {
            "channels": list(self.channels),
            "multicast": self.multicast,
            "parts": [part.hex() for part in self.parts],
        }


# By their codes in `layout.py`.
_GENERAL: Final[tuple[Frame, ...]] = (Nop(), Ping(), Pong(), Resume(), Shutdown())
_GENERAL_KINDS: Final = tuple(type(frame) for frame in _GENERAL)
_OPERATIONS: Final[tuple[Operation, ...]] = ("commit", "rollback", "close")
_ACKNOWLEDGEMENTS: Final[tuple[Acknowledgement, ...]] = (
    "received",
    "consumed",
    "committed",
    "uncommitted",
    "closed",
)
_VALUES: Final[tuple[tuple[str, ...], ...]] = (
    _OPERATIONS,
    _ACKNOWLEDGEMENTS,
    _OPERATIONS[: LAST_SEQUENCE_OPERATION + 1],
    _ACKNOWLEDGEMENTS[: LAST_SEQUENCE_ACKNOWLEDGEMENT + 1],
)
_KINDS: Final[tuple[Any, ...]] = (
    ChannelOperation,
    ChannelAcknowledgement,
    SequenceOperation,
    SequenceAcknowledgement,
)


# Bound once: a method of an imported name is looked up anew with every call.
_pack_u32: Final = U32_STRUCT.pack
_unpack_u32: Final = U32_STRUCT.unpack_from

# --------------------------------------------------------------------------------- parse packets


def scan(
    buffer: bytes,
    position: int,
    base: int,
    layout: PacketLayout,
    limits: RelinkLimits,
    placed: list[Placed],
) -> tuple[int, int]:
    """Append the packets from `position` on, as `Decoder._scan` does; `base` is the offset of
    `buffer[0]` in the stream.

    Most packets are short, small messages of one or two parts to one channel. They are read in this
    loop, with one unpacking; all others, and those that are cut, by `_parse`.
    """
    end_of_buffer = len(buffer)
    append = placed.append
    data_of_one, data_of_two = layout.data_of_one, layout.data_of_two
    second_size_at = layout.second_size_at
    quick_end = -1
    # Locals cost what literals do, globals a lookup for each part.
    padding, boundary = ALIGNMENT - 1, -ALIGNMENT
    # The largest of those, two parts of 64 KiB, can't exceed such limits, so that they need not be
    # checked. `data_of_two` bytes contain both sizes.
    if layout.quick is not None and limits.frame_bytes >= 1 << 18 and limits.parts >= 2:
        unpack = layout.quick.unpack_from
        quick_end = end_of_buffer - data_of_two
    while True:
        while position <= quick_end:
            head, count, channel, size = unpack(buffer, position)
            if head != SHORT_SMALL_HEAD:
                break
            if count == 1:
                start = position + data_of_one
                end = start + (size + padding & boundary)
                parts: tuple[bytes, ...] = (buffer[start : start + size],)
            elif count == 2:
                at = position + second_size_at
                second = buffer[at] | buffer[at + 1] << 8
                start = position + data_of_two
                middle = start + (size + padding & boundary)
                end = middle + (second + padding & boundary)
                parts = (buffer[start : start + size], buffer[middle : middle + second])
            else:
                break
            if end > end_of_buffer:
                return position, end - position
            # With ids of no bytes `channel` is b"".
            append((base + position, end - position, Message((channel or 0,), False, parts)))
            position = end
        frame, length = _parse(buffer, position, base + position, layout, limits)
        if frame is None:
            return position, length
        append((base + position, length, frame))
        position += length


def _parse(
    buffer: bytes, position: int, offset: int, layout: PacketLayout, limits: RelinkLimits
) -> tuple[Frame | None, int]:
    """A packet of any kind and its length; or None, and how many bytes are needed to continue."""
    available = len(buffer) - position
    if available < MIN_PACKET_SIZE:
        return None, MIN_PACKET_SIZE
    head = buffer[position]
    data = head >> DATA_SHIFT
    if not head & FLAG_CHANNEL:
        if data > LAST_TYPE:
            raise _unknown(f"general packet type {data} is not defined", offset)
        return _GENERAL[data], MIN_PACKET_SIZE
    kind = head >> FORMAT_SHIFT & FORMAT_MASK
    if kind > LAST_FORMAT:
        raise _unknown(f"packet format {kind} is not defined", offset)
    if kind != FORMAT_MESSAGE and data >= len(_VALUES[kind]):
        raise _unknown(f"{_KINDS[kind].frame_name} type {data} is not defined", offset)

    multicast = bool(head & FLAG_MULTICAST)
    id_size = layout.id_sizes[kind]
    count, ids_at = 1, ID_OFFSET
    if multicast:
        (count,) = _unpack_u32(buffer, position + MULTICAST_COUNT_OFFSET)
        ids_at = MULTICAST_ID_OFFSET
        if count > limits.targets:
            raise FrameTooLarge(
                f"{count} channels, more than the {limits.targets} allowed",
                offset=offset,
                length=MIN_PACKET_SIZE,
            )
    ids_end = ids_at + count * id_size
    if available < ids_end:
        need = align(ids_end, ALIGNMENT)
        _check_length(need, limits, offset, MIN_PACKET_SIZE)
        return None, need

    if kind == FORMAT_MESSAGE:
        sizes, data_at, need = _parse_sizes(buffer, position, ids_end, data, offset, limits)
        if sizes is None or need > available:
            return None, need
        parts = _take_parts(buffer, position + data_at, sizes)
        channels = _parse_ids(buffer, position + ids_at, id_size, count)
        return Message(channels, multicast, parts), need

    sequence_at = align(ids_end, SEQUENCE_ALIGNMENT)
    with_sequence = kind >= FIRST_SEQUENCE_FORMAT
    length = align(sequence_at + SEQUENCE_SIZE if with_sequence else ids_end, ALIGNMENT)
    _check_length(length, limits, offset, MIN_PACKET_SIZE)
    if length > available:
        return None, length
    channels = _parse_ids(buffer, position + ids_at, id_size, count)
    value = _VALUES[kind][data]
    if with_sequence:
        (sequence,) = _unpack_u32(buffer, position + sequence_at)
        return _KINDS[kind](value, channels, sequence, multicast), length
    return _KINDS[kind](value, channels, multicast), length


def _unknown(reason: str, offset: int) -> UnknownFrame:
    return UnknownFrame(reason, offset=offset, length=MIN_PACKET_SIZE)


def _parse_ids(buffer: bytes, at: int, size: int, count: int) -> Channels:
    if not size:
        return (0,) * count if count <= _FEW else Zeros(count)
    if count == 1:
        return (int.from_bytes(buffer[at : at + size], "little"),)
    if size in _ID_CODES:
        return struct.unpack_from(f"<{count}{_ID_CODES[size]}", buffer, at)
    from_bytes = int.from_bytes
    return tuple(
        from_bytes(buffer[start : start + size], "little")
        for start in range(at, at + count * size, size)
    )


def _parse_sizes(
    buffer: bytes, position: int, ids_end: int, flags: int, offset: int, limits: RelinkLimits
) -> tuple[tuple[int, ...] | None, int, int]:
    """Sizes of a message's parts, where its data starts, and its length; or None, 0, and how many
    bytes are needed to continue. Limits are checked when a size is read, not when data arrives."""
    available = len(buffer) - position
    at = align(ids_end, SIZES_ALIGNMENT)
    if flags & FLAG_LONG:
        if available < at + LONG_PARTS_SIZE:
            return None, 0, align(at + LONG_PARTS_SIZE, ALIGNMENT)
        (count,) = _unpack_u32(buffer, position + at)
        at += LONG_PARTS_SIZE
    else:
        count = buffer[position + PARTS_OFFSET]
    if count > limits.parts:
        raise FrameTooLarge(
            f"{count} parts, more than the {limits.parts} allowed", offset=offset, length=at
        )
    if flags & FLAG_LARGE:
        at, width, code = align(at, LARGE_SIZE_SIZE), LARGE_SIZE_SIZE, "Q"
    else:
        width, code = SMALL_SIZE_SIZE, "H"
    sizes_end = at + count * width
    data_at = align(sizes_end, ALIGNMENT)
    _check_length(data_at, limits, offset, at)
    if available < data_at:
        return None, 0, data_at
    sizes: tuple[int, ...] = _numbers(count, code).unpack_from(buffer, position + at)
    padding, boundary = ALIGNMENT - 1, -ALIGNMENT
    length = data_at + sum([size + padding & boundary for size in sizes])
    _check_length(length, limits, offset, data_at)
    return sizes, data_at, length


@cache
def _short_numbers(count: int, code: str) -> Struct:
    return Struct(f"<{count}{code}")


def _numbers(count: int, code: str) -> Struct:
    return _short_numbers(count, code) if count < 256 else Struct(f"<{count}{code}")


def _take_parts(buffer: bytes, at: int, sizes: tuple[int, ...]) -> tuple[Buffer, ...]:
    parts: list[Buffer] = []
    padding, boundary = ALIGNMENT - 1, -ALIGNMENT
    for size in sizes:
        if size < _VIEW_BYTES:
            parts.append(buffer[at : at + size])
        else:
            parts.append(memoryview(buffer)[at : at + size])
        at += size + padding & boundary
    return tuple(parts)


def _check_length(length: int, limits: RelinkLimits, offset: int, read: int) -> None:
    if length > limits.frame_bytes:
        raise FrameTooLarge(
            f"a packet of {length} bytes, more than the {limits.frame_bytes} allowed",
            offset=offset,
            length=read,
        )


def measure(buffer: bytes, position: int, layout: PacketLayout, limits: RelinkLimits) -> int | None:
    """Length of what may be a packet here, as `Decoder._measure` has it.

    Stricter than parsing, to distinguish a header from other bytes: unused bits and padding have to
    be zero, as peers send them, and the form has to be the one that we would write. A nop, which is
    nothing but zeros, proves nothing.
    """
    if len(buffer) - position < MIN_PACKET_SIZE:
        return 0
    start = buffer[position : position + MIN_PACKET_SIZE]
    head, parts = start[:HEADER_SIZE]
    data = head >> DATA_SHIFT
    if not head & FLAG_CHANNEL:
        plausible = TYPE_NOP < data <= LAST_TYPE and head == data << DATA_SHIFT
        return MIN_PACKET_SIZE if plausible and not any(start[1:]) else None
    is_message = head >> FORMAT_SHIFT & FORMAT_MASK == FORMAT_MESSAGE
    if is_message and data & FLAG_UNUSED:
        return None
    if parts and not (is_message and not data & FLAG_LONG):
        return None
    if head & FLAG_MULTICAST and any(start[HEADER_SIZE:MULTICAST_COUNT_OFFSET]):
        return None
    try:
        frame, length = _parse(buffer, position, 0, layout, limits)
    except (FrameTooLarge, UnknownFrame):
        return None
    if frame is not None and b"".join(serialize(frame, layout)) != buffer[position:][:length]:
        return None
    return length


# ------------------------------------------------------------------------------------- serialize

_PADDING: Final = tuple(bytes(count) for count in range(ALIGNMENT))


def serialize(packet: Frame, layout: PacketLayout) -> list[Buffer]:
    """The bytes of a packet, in as few pieces as possible without copying a large part.

    Raises ValueError for a channel id that its size can't hold.
    """
    match packet:
        case Message():
            return _serialize_message(packet, layout)
        case SequenceOperation(operation=value) | SequenceAcknowledgement(acknowledgement=value):
            kind = _KINDS.index(type(packet))
            fixed = _serialize_head(packet, kind, _VALUES[kind].index(value), 0, layout)
            fixed += _PADDING[-len(fixed) % SEQUENCE_ALIGNMENT] + _pack_u32(packet.sequence)
        case ChannelOperation(operation=value) | ChannelAcknowledgement(acknowledgement=value):
            kind = _KINDS.index(type(packet))
            fixed = _serialize_head(packet, kind, _VALUES[kind].index(value), 0, layout)
        case _:
            if type(packet) not in _GENERAL_KINDS:
                raise TypeError(f"{type(packet).__name__} is not a Relink packet")
            return [GENERAL_STRUCT.pack(_GENERAL_KINDS.index(type(packet)) << DATA_SHIFT)]
    return [fixed + _PADDING[-len(fixed) % ALIGNMENT]]


def serialize_all(packets: Sequence[Frame], layout: PacketLayout) -> list[Buffer]:
    """The bytes of consecutive packets; small pieces are joined.

    Many consecutive messages have the same size and channel: their head is made once.
    """
    pieces: list[Buffer] = []
    run: list[Buffer] = []
    quick = layout.quick if layout.id_sizes[FORMAT_MESSAGE] else None
    known_size = known_channel = -1
    head = tail = b""
    for packet in packets:
        if type(packet) is Message and quick is not None and not packet.multicast:
            parts = packet.parts
            if len(parts) == 1 and (size := len(parts[0])) <= _TOGETHER_BYTES:
                channel = packet.channels[0]
                if size != known_size or channel != known_channel:
                    known_size, known_channel = size, channel
                    head = quick.pack(SHORT_SMALL_HEAD, 1, channel, size)
                    head += _PADDING[layout.data_of_one - len(head)]
                    tail = _PADDING[-size % ALIGNMENT]
                run += (head, parts[0], tail)
                continue
        for piece in serialize(packet, layout):
            if len(piece) <= _TOGETHER_BYTES:
                run.append(piece)
            else:
                pieces += (b"".join(run), piece)
                run = []
    if run:
        pieces.append(b"".join(run))
    return [piece for piece in pieces if piece]


def _serialize_head(packet: Any, kind: int, data: int, parts: int, layout: PacketLayout) -> bytes:
    """The header and the channels; `parts` is the short message length."""
    id_size = layout.id_sizes[kind]
    head = FLAG_CHANNEL | kind << FORMAT_SHIFT | data << DATA_SHIFT
    channels = packet.channels
    if not packet.multicast:
        fixed = bytes((head, parts))
        ids = _serialize_id(channels[0], id_size)
    else:
        unused = bytes(MULTICAST_COUNT_OFFSET - HEADER_SIZE)
        fixed = bytes((head | FLAG_MULTICAST, parts)) + unused + _pack_u32(len(channels))
        if isinstance(channels, Zeros):
            ids = bytes(id_size * len(channels))
        else:
            ids = b"".join([_serialize_id(channel, id_size) for channel in channels])
    return fixed + ids


def _serialize_id(channel: int, size: int) -> bytes:
    try:
        return channel.to_bytes(size, "little")
    except OverflowError:
        raise ValueError(f"channel {channel} does not fit into ids of {size} bytes") from None


def _serialize_one_part(message: Message, part: Buffer, layout: PacketLayout) -> bytes | None:
    """A small message of one part to one channel, in one packing; None where that can't do it."""
    size = len(part)
    # For ids of 0 bytes `struct` would want bytes, not a number.
    if layout.quick is None or not layout.id_sizes[FORMAT_MESSAGE]:
        return None
    if size > MAX_SMALL_SIZE or message.multicast:
        return None
    try:
        head = layout.quick.pack(SHORT_SMALL_HEAD, 1, message.channels[0], size)
    except struct.error:
        return None
    before, after = _PADDING[layout.data_of_one - len(head)], _PADDING[-size % ALIGNMENT]
    return b"".join((head, before, part, after))


def message_bytes(parts: Sequence[Buffer], layout: PacketLayout) -> int:
    """How many bytes the packet of a message to one channel has."""
    sizes = [len(part) for part in parts]
    count = len(parts)
    size = align(ID_OFFSET + layout.id_sizes[FORMAT_MESSAGE], SIZES_ALIGNMENT)
    if count > MAX_SHORT_PARTS:
        size += LONG_PARTS_SIZE
    if max(sizes, default=0) > MAX_SMALL_SIZE:
        size = align(size, LARGE_SIZE_SIZE) + count * LARGE_SIZE_SIZE
    else:
        size += count * SMALL_SIZE_SIZE
    padding, boundary = ALIGNMENT - 1, -ALIGNMENT
    return align(size, ALIGNMENT) + sum([each + padding & boundary for each in sizes])


def _serialize_message(message: Message, layout: PacketLayout) -> list[Buffer]:
    parts = message.parts
    count = len(parts)
    if count == 1 and (quick := _serialize_one_part(message, parts[0], layout)):
        return [quick]
    sizes = [len(part) for part in parts]
    large = max(sizes, default=0) > MAX_SMALL_SIZE
    long = count > MAX_SHORT_PARTS
    flags = long * FLAG_LONG | large * FLAG_LARGE
    fixed = _serialize_head(message, FORMAT_MESSAGE, flags, 0 if long else count, layout)
    fixed += _PADDING[-len(fixed) % SIZES_ALIGNMENT]
    if long:
        fixed += _pack_u32(count)
    if large:
        fixed += _PADDING[-len(fixed) % LARGE_SIZE_SIZE]
    fixed += _numbers(count, "Q" if large else "H").pack(*sizes)
    run: list[Buffer] = [fixed, _PADDING[-len(fixed) % ALIGNMENT]]
    if not large:
        for part in parts:
            run += (part, _PADDING[-len(part) % ALIGNMENT])
        return [b"".join(run)]

    pieces: list[Buffer] = []
    for part in parts:
        if len(part) >= _VIEW_BYTES:
            pieces += (b"".join(run), part)
            run = [_PADDING[-len(part) % ALIGNMENT]]
        else:
            run += (part, _PADDING[-len(part) % ALIGNMENT])
    tail = b"".join(run)
    return [*pieces, tail] if tail else pieces
