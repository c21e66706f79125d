"""Relink's packets, parsed and serialized; the handshake before them is in `handshake.py`.

All integers are little-endian, and every packet is a multiple of 8 bytes long, so that a stream of
them stays aligned. The first byte says what follows (specification 2):

    bit 0     channel     0 for a general packet: nop, ping, pong, resume, shutdown, by bits 5–7
    bit 1     multicast   several channel ids instead of one
    bits 2–4  format      operation, acknowledgement, the same two with a sequence number, message
    bits 5–7  data        which operation or acknowledgement; or the message flags long and large

    head      1
    length    1                        parts of a short message, else unused
    channel   id size                  or, in a multicast: 2 unused · count 4 · count × id size
    sequence  4, aligned to 4          in the two sequence formats only
    parts     4, aligned to 2          in a long message only
    sizes     2 × parts, aligned to 2  or, in a large message: 8 × parts, aligned to 8
    data      aligned to 8             each part is padded to 8

Packets do not repeat the size of channel ids: `PacketLayout` holds what the handshake agreed on.
Unused bits and padding are written as zero and not looked at; an undefined enumeration value is
refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import Any, ClassVar, Final, Literal, TypeAlias

from crosswire.errors import FrameTooLarge, UnknownFrame
from crosswire.wire.contract import Frame, Limits, Placed

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
    "PacketLayout",
    "Ping",
    "Pong",
    "RelinkLimits",
    "Resume",
    "SequenceAcknowledgement",
    "SequenceOperation",
    "Shutdown",
    "Zeros",
    "layout",
    "measure",
    "message_bytes",
    "scan",
    "serialize",
]

Buffer: TypeAlias = bytes | memoryview
Channels: TypeAlias = "tuple[int, ...] | Zeros"
Operation: TypeAlias = Literal["commit", "rollback", "close"]
Acknowledgement: TypeAlias = Literal["received", "consumed", "committed", "uncommitted", "closed"]

_FEW: Final = 64
_TOGETHER_BYTES: Final = 8192
_VIEW_BYTES: Final = 65536
"""From this size on a part is a view of the bytes that came, not a copy of them."""


class RelinkLimits(Limits, frozen=True, kw_only=True):
    """`frame_bytes` counts a whole packet, header and padding included.

    `window` is how many unconsumed messages a channel may hold, `unconsumed_bytes` how much all
    channels of a link may hold before we stop reading, `channels` how many may be open at once.
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
    """Channel 0, many times: a multicast where ids have no bytes.

    Eight bytes can announce 65,536 of them, and must not become as many objects.
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
    frame_name: ClassVar[str] = "nop"


class Ping(Frame, frozen=True, gc=False):
    frame_name: ClassVar[str] = "ping"


class Pong(Frame, frozen=True, gc=False):
    frame_name: ClassVar[str] = "pong"


class Resume(Frame, frozen=True, gc=False):
    frame_name: ClassVar[str] = "resume"


class Shutdown(Frame, frozen=True, gc=False):
    frame_name: ClassVar[str] = "shutdown"


class _ChannelPacket(Frame, frozen=True, gc=False):
    def fields(self) -> dict[str, Any]:
        fields = super().fields()
        fields["channels"] = list(fields["channels"])
        return fields


class ChannelOperation(_ChannelPacket, frozen=True, gc=False):
    """From the sender of a channel, about its next undecided message, or about the channel."""

    frame_name: ClassVar[str] = "channel-operation"
    operation: Operation
    channels: Channels
    multicast: bool = False


class ChannelAcknowledgement(_ChannelPacket, frozen=True, gc=False):
    """From the receiver of a channel, about the message after the last one named so."""

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
    """About all messages up to and including `sequence` that were not named so before."""

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
        return {
            "channels": list(self.channels),
            "multicast": self.multicast,
            "parts": [part.hex() for part in self.parts],
        }


_GENERAL: Final[tuple[Frame, ...]] = (Nop(), Ping(), Pong(), Resume(), Shutdown())
_GENERAL_KINDS: Final = tuple(type(frame) for frame in _GENERAL)
_CHANNEL_OPERATIONS: Final[tuple[Operation, ...]] = ("commit", "rollback", "close")
_SEQUENCE_OPERATIONS: Final = _CHANNEL_OPERATIONS[:2]
_CHANNEL_ACKNOWLEDGEMENTS: Final[tuple[Acknowledgement, ...]] = (
    "received",
    "consumed",
    "committed",
    "uncommitted",
    "closed",
)
_SEQUENCE_ACKNOWLEDGEMENTS: Final = _CHANNEL_ACKNOWLEDGEMENTS[:4]

# Values of the first byte's fields (specification 2.1; bit 0 is the least significant).
_CHANNEL, _MULTICAST = 1, 2
_FORMAT_SHIFT, _DATA_SHIFT = 2, 5
_CHANNEL_OPERATION, _CHANNEL_ACK, _SEQUENCE_OPERATION, _SEQUENCE_ACK, _MESSAGE = range(5)
_LONG, _LARGE, _UNUSED_FLAG = 1, 2, 4
_SHORT_SMALL = _CHANNEL | _MESSAGE << _FORMAT_SHIFT

_VALUES: Final[tuple[tuple[str, ...], ...]] = (
    _CHANNEL_OPERATIONS,
    _CHANNEL_ACKNOWLEDGEMENTS,
    _SEQUENCE_OPERATIONS,
    _SEQUENCE_ACKNOWLEDGEMENTS,
)
_KINDS: Final[tuple[Any, ...]] = (
    ChannelOperation,
    ChannelAcknowledgement,
    SequenceOperation,
    SequenceAcknowledgement,
)


class PacketLayout:
    """How the packets of one direction are laid out.

    Operations and messages name the sender's channels, acknowledgements the receiver's
    (specification 2.1), and each peer chose a size for the ids of its channels.
    """

    __slots__ = ("data_of_one", "data_of_two", "id_sizes", "quick", "second_size_at")

    def __init__(self, sender_id_size: int, receiver_id_size: int) -> None:
        sizes = (sender_id_size, receiver_id_size)
        self.id_sizes = (*sizes, *sizes, sender_id_size)  # by packet format
        # Head, length, channel and first size of a short, small, unicast message, where `struct`
        # knows integers of the id's size.
        native = {0: "0s", 1: "Bx", 2: "H", 4: "I", 8: "Q"}.get(sender_id_size)
        self.quick = None if native is None else Struct(f"<BB{native}H")
        sizes_at = _align(2 + sender_id_size, 2)
        self.second_size_at = sizes_at + 2
        self.data_of_one = _align(sizes_at + 2, 8)
        self.data_of_two = _align(sizes_at + 4, 8)


@cache
def layout(sender: str, connector_id_size: int, listener_id_size: int) -> PacketLayout:
    """The layout of what `sender` ("connector" or "listener") sends."""
    if sender == "connector":
        return PacketLayout(connector_id_size, listener_id_size)
    return PacketLayout(listener_id_size, connector_id_size)


def _align(position: int, boundary: int) -> int:
    return (position + boundary - 1) & -boundary


_U32: Final = Struct("<I")
_GENERAL_PACKET: Final = Struct("<B7x")


# --------------------------------------------------------------------------------- parse packets


def scan(
    buffer: bytes,
    position: int,
    base: int,
    layout: PacketLayout,
    limits: RelinkLimits,
    placed: list[Placed],
) -> tuple[int, int]:
    """The packets from `position` on, as `Decoder._scan` has it; `buffer[0]` stands at `base`.

    Short messages of one or two parts are what there is most of, so they are read here, with one
    unpacking; they can't pass a limit that is worth its name.
    """
    end_of_buffer = len(buffer)
    append = placed.append
    data_of_one, data_of_two = layout.data_of_one, layout.data_of_two
    second_size_at = layout.second_size_at
    quick_end = -1
    if layout.quick is not None and limits.frame_bytes >= 1 << 18 and limits.parts >= 2:
        unpack = layout.quick.unpack_from
        quick_end = end_of_buffer - data_of_two
    while True:
        while position <= quick_end:
            head, count, channel, size = unpack(buffer, position)
            if head != _SHORT_SMALL:
                break
            if count == 1:
                start = position + data_of_one
                end = start + (size + 7 & -8)
                parts: tuple[bytes, ...] = (buffer[start : start + size],)
            elif count == 2:
                at = position + second_size_at
                second = buffer[at] | buffer[at + 1] << 8
                start = position + data_of_two
                middle = start + (size + 7 & -8)
                end = middle + (second + 7 & -8)
                parts = (buffer[start : start + size], buffer[middle : middle + second])
            else:
                break
            if end > end_of_buffer:
                return position, end - position
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
    """A packet of any kind and its length, or None and how many bytes it takes to know more."""
    available = len(buffer) - position
    if available < 8:
        return None, 8
    head = buffer[position]
    data = head >> _DATA_SHIFT
    if not head & _CHANNEL:
        if data >= len(_GENERAL):
            raise UnknownFrame(
                f"general packet type {data} is not defined", offset=offset, length=8
            )
        return _GENERAL[data], 8
    kind = head >> _FORMAT_SHIFT & 7
    if kind > _MESSAGE:
        raise UnknownFrame(f"packet format {kind} is not defined", offset=offset, length=8)
    if kind < _MESSAGE and data >= len(_VALUES[kind]):
        name = _KINDS[kind].frame_name
        raise UnknownFrame(f"{name} type {data} is not defined", offset=offset, length=8)

    multicast = bool(head & _MULTICAST)
    id_size = layout.id_sizes[kind]
    count, ids_at = 1, 2
    if multicast:
        (count,) = _U32.unpack_from(buffer, position + 4)
        ids_at = 8
        if count > limits.targets:
            raise FrameTooLarge(
                f"{count} channels, more than the {limits.targets} allowed", offset=offset, length=8
            )
    ids_end = ids_at + count * id_size
    if available < ids_end:
        _check_length(_align(ids_end, 8), limits, offset, 8)
        return None, _align(ids_end, 8)

    if kind == _MESSAGE:
        sizes, data_at, need = _parse_sizes(buffer, position, ids_end, data, offset, limits)
        if sizes is None or need > available:
            return None, need
        parts = _take_parts(buffer, position + data_at, sizes)
        channels = _parse_ids(buffer, position + ids_at, id_size, count)
        return Message(channels, multicast, parts), need

    sequence_at = _align(ids_end, 4)
    with_sequence = kind >= _SEQUENCE_OPERATION
    length = _align(sequence_at + 4 if with_sequence else ids_end, 8)
    _check_length(length, limits, offset, 8)
    if length > available:
        return None, length
    channels = _parse_ids(buffer, position + ids_at, id_size, count)
    value = _VALUES[kind][data]
    if with_sequence:
        (sequence,) = _U32.unpack_from(buffer, position + sequence_at)
        return _KINDS[kind](value, channels, sequence, multicast), length
    return _KINDS[kind](value, channels, multicast), length


def _parse_ids(buffer: bytes, at: int, size: int, count: int) -> Channels:
    if not size:
        return (0,) * count if count <= _FEW else Zeros(count)
    if count == 1:
        return (int.from_bytes(buffer[at : at + size], "little"),)
    from_bytes = int.from_bytes
    return tuple(
        from_bytes(buffer[start : start + size], "little")
        for start in range(at, at + count * size, size)
    )


def _parse_sizes(
    buffer: bytes, position: int, ids_end: int, flags: int, offset: int, limits: RelinkLimits
) -> tuple[tuple[int, ...] | None, int, int]:
    """Sizes of a message's parts, where its data starts, and its length; or None, 0, and how many
    bytes it takes to know more. Limits hold for what is announced, before any of it is there."""
    available = len(buffer) - position
    at = _align(ids_end, 2)
    if flags & _LONG:
        if available < at + 4:
            return None, 0, _align(at + 4, 8)
        (count,) = _U32.unpack_from(buffer, position + at)
        at += 4
    else:
        count = buffer[position + 1]
    if count > limits.parts:
        raise FrameTooLarge(
            f"{count} parts, more than the {limits.parts} allowed", offset=offset, length=at
        )
    if flags & _LARGE:
        at, width, code = _align(at, 8), 8, "Q"
    else:
        width, code = 2, "H"
    sizes_end = at + count * width
    data_at = _align(sizes_end, 8)
    _check_length(data_at, limits, offset, at)
    if available < data_at:
        return None, 0, data_at
    sizes: tuple[int, ...] = _numbers(count, code).unpack_from(buffer, position + at)
    length = data_at + sum([size + 7 & -8 for size in sizes])
    _check_length(length, limits, offset, data_at)
    return sizes, data_at, length


@cache
def _short_numbers(count: int, code: str) -> Struct:
    return Struct(f"<{count}{code}")


def _numbers(count: int, code: str) -> Struct:
    return _short_numbers(count, code) if count < 256 else Struct(f"<{count}{code}")


def _take_parts(buffer: bytes, at: int, sizes: tuple[int, ...]) -> tuple[Buffer, ...]:
    parts: list[Buffer] = []
    for size in sizes:
        if size < _VIEW_BYTES:
            parts.append(buffer[at : at + size])
        else:
            parts.append(memoryview(buffer)[at : at + size])
        at += size + 7 & -8
    return tuple(parts)


def _check_length(length: int, limits: RelinkLimits, offset: int, read: int) -> None:
    if length > limits.frame_bytes:
        raise FrameTooLarge(
            f"a packet of {length} bytes, more than the {limits.frame_bytes} allowed",
            offset=offset,
            length=read,
        )


def measure(buffer: bytes, position: int, layout: PacketLayout, limits: RelinkLimits) -> int | None:
    """As `Decoder._measure` has it. Well-behaved peers send zero for what is unused, which tells a
    header from text; a nop is nothing but zeros, as is much else, and proves nothing."""
    if len(buffer) - position < 8:
        return 0
    head, parts, second, third = buffer[position : position + 4]
    data = head >> _DATA_SHIFT
    if not head & _CHANNEL:
        plausible = head & 0x1F == 0 and 0 < data < len(_GENERAL)
        return 8 if plausible and not any(buffer[position + 1 : position + 8]) else None
    is_message = head >> _FORMAT_SHIFT & 7 == _MESSAGE
    if is_message and data & _UNUSED_FLAG:
        return None
    if parts and not (is_message and not data & _LONG):
        return None
    if head & _MULTICAST and (second or third):
        return None
    try:
        frame, length = _parse(buffer, position, 0, layout, limits)
    except (FrameTooLarge, UnknownFrame):
        return None
    if frame is not None and b"".join(serialize(frame, layout)) != buffer[position:][:length]:
        return None
    return length


# ------------------------------------------------------------------------------------- serialize

_PADDING: Final = tuple(bytes(count) for count in range(8))


def serialize(packet: Frame, layout: PacketLayout) -> list[Buffer]:
    """The bytes of a packet, in as few pieces as can be without copying a large part.

    Raises ValueError for a channel id that its size can't hold.
    """
    match packet:
        case Message():
            return _serialize_message(packet, layout)
        case SequenceOperation(operation=value) | SequenceAcknowledgement(acknowledgement=value):
            kind = _SEQUENCE_OPERATION if type(packet) is SequenceOperation else _SEQUENCE_ACK
            fixed = _serialize_head(packet, kind, _VALUES[kind].index(value), 0, layout)
            fixed += _PADDING[-len(fixed) % 4] + _U32.pack(packet.sequence)
        case ChannelOperation(operation=value) | ChannelAcknowledgement(acknowledgement=value):
            kind = _CHANNEL_OPERATION if type(packet) is ChannelOperation else _CHANNEL_ACK
            fixed = _serialize_head(packet, kind, _VALUES[kind].index(value), 0, layout)
        case _:
            if type(packet) not in _GENERAL_KINDS:
                raise TypeError(f"{type(packet).__name__} is not a Relink packet")
            return [_GENERAL_PACKET.pack(_GENERAL_KINDS.index(type(packet)) << _DATA_SHIFT)]
    return [fixed + _PADDING[-len(fixed) % 8]]


def serialize_all(packets: Sequence[Frame], layout: PacketLayout) -> list[Buffer]:
    """The bytes of packets in a row; what is small is put together.

    Messages of one size on one channel are what there is most of: their head is made once.
    """
    pieces: list[Buffer] = []
    run: list[Buffer] = []
    quick = layout.quick if layout.id_sizes[_MESSAGE] else None
    known_size = known_channel = -1
    head = tail = b""
    for packet in packets:
        if type(packet) is Message and quick is not None and not packet.multicast:
            parts = packet.parts
            if len(parts) == 1 and (size := len(parts[0])) <= _TOGETHER_BYTES:
                channel = packet.channels[0]
                if size != known_size or channel != known_channel:
                    known_size, known_channel = size, channel
                    head = quick.pack(_SHORT_SMALL, 1, channel, size)
                    head += _PADDING[layout.data_of_one - len(head)]
                    tail = _PADDING[-size % 8]
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
    head = _CHANNEL | kind << _FORMAT_SHIFT | data << _DATA_SHIFT
    channels = packet.channels
    if not packet.multicast:
        fixed = bytes((head, parts))
        ids = _serialize_id(channels[0], id_size)
    else:
        fixed = bytes((head | _MULTICAST, parts, 0, 0)) + _U32.pack(len(channels))
        ids = b"".join([_serialize_id(channel, id_size) for channel in channels])
    return fixed + ids


def _serialize_id(channel: int, size: int) -> bytes:
    try:
        return channel.to_bytes(size, "little")
    except OverflowError:
        raise ValueError(f"channel {channel} does not fit into ids of {size} bytes") from None


def _serialize_one_part(message: Message, part: Buffer, layout: PacketLayout) -> bytes | None:
    """What there is most of, in one packing; None where that can't do it."""
    size = len(part)
    if layout.quick is None or not layout.id_sizes[0] or size > 0xFFFF or message.multicast:
        return None
    try:
        head = layout.quick.pack(_SHORT_SMALL, 1, message.channels[0], size)
    except struct.error:
        return None
    return b"".join((head, _PADDING[layout.data_of_one - len(head)], part, _PADDING[-size % 8]))


def message_bytes(parts: Sequence[Buffer], layout: PacketLayout) -> int:
    """How many bytes the packet of a message to one channel takes."""
    sizes = [len(part) for part in parts]
    count = len(parts)
    large = max(sizes, default=0) > 0xFFFF
    size = 2 + layout.id_sizes[_MESSAGE]
    size += size % 2
    if count > 0xFF:
        size += 4
    if large:
        size += -size % 8
    size += count * (8 if large else 2)
    return size + -size % 8 + sum([each + -each % 8 for each in sizes])


def _serialize_message(message: Message, layout: PacketLayout) -> list[Buffer]:
    parts = message.parts
    count = len(parts)
    if count == 1 and (quick := _serialize_one_part(message, parts[0], layout)):
        return [quick]
    sizes = [len(part) for part in parts]
    large = max(sizes, default=0) > 0xFFFF
    long = count > 0xFF
    flags = long * _LONG | large * _LARGE
    fixed = _serialize_head(message, _MESSAGE, flags, 0 if long else count, layout)
    fixed += _PADDING[-len(fixed) % 2]
    if long:
        fixed += _U32.pack(count)
    if large:
        fixed += _PADDING[-len(fixed) % 8]
    fixed += _numbers(count, "Q" if large else "H").pack(*sizes)
    run: list[Buffer] = [fixed, _PADDING[-len(fixed) % 8]]
    if not large:
        for part in parts:
            run += (part, _PADDING[-len(part) % 8])
        return [b"".join(run)]

    pieces: list[Buffer] = []
    for part in parts:
        if len(part) >= _VIEW_BYTES:
            pieces += (b"".join(run), part)
            run = [_PADDING[-len(part) % 8]]
        else:
            run += (part, _PADDING[-len(part) % 8])
    tail = b"".join(run)
    return [*pieces, tail] if tail else pieces
