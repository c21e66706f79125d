"""Where the fields of Relink's handshake and packets are."""

from __future__ import annotations

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.field_ranges import RangeList
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    SequenceAcknowledgement,
    SequenceOperation,
)
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    ListenerHello,
    ListenerVersion,
)
from crosswire.wire.relink.layout import (
    ALIGNMENT,
    CONNECTOR_ID_SIZE_OFFSET,
    DATA_SHIFT,
    ENDPOINT_LENGTH_OFFSET,
    ENDPOINT_OFFSET,
    EPOCH_SIZE,
    FLAG_LARGE,
    FLAG_LONG,
    FLAG_MULTICAST,
    FORMAT_MASK,
    FORMAT_SHIFT,
    HEAD_OFFSET,
    HELLO_FLAGS_OFFSET,
    ID_OFFSET,
    LARGE_SIZE_SIZE,
    LINK_SIZE,
    LISTENER_ID_SIZE_OFFSET,
    LONG_PARTS_SIZE,
    MULTICAST_COUNT_OFFSET,
    MULTICAST_ID_OFFSET,
    PARTS_OFFSET,
    SEQUENCE_ALIGNMENT,
    SEQUENCE_SIZE,
    SIZES_ALIGNMENT,
    SMALL_SIZE_SIZE,
    VERSION_OFFSET,
    align,
    packet_layout,
)

__all__ = ["ranges"]


def ranges(frame: Frame, data: bytes, decoder: Decoder, found: RangeList) -> None:
    """See `crosswire.wire.field_ranges`."""
    match frame:
        case ConnectorVersion() | ListenerVersion():
            found.field(VERSION_OFFSET, VERSION_OFFSET + 1, "version")
            found.layout(VERSION_OFFSET + 1, len(data), "padding")
        case ListenerHello():
            _link(0, found)
        case ConnectorHello():
            _connector_hello(data, found)
        case ChannelOperation() | SequenceOperation():
            found.field(HEAD_OFFSET, PARTS_OFFSET, "operation")
            _packet(frame, data, decoder, found)
        case ChannelAcknowledgement() | SequenceAcknowledgement():
            found.field(HEAD_OFFSET, PARTS_OFFSET, "acknowledgement")
            _packet(frame, data, decoder, found)
        case Message():
            found.layout(HEAD_OFFSET, PARTS_OFFSET, "head")
            _packet(frame, data, decoder, found)
        case _:
            found.layout(HEAD_OFFSET, PARTS_OFFSET, "head")
            found.layout(PARTS_OFFSET, len(data), "padding")


def _link(at: int, found: RangeList) -> None:
    found.field(at, at + EPOCH_SIZE, "epoch")
    found.field(at + EPOCH_SIZE, at + EPOCH_SIZE + LINK_SIZE, "link")


def _connector_hello(data: bytes, found: RangeList) -> None:
    found.layout(ENDPOINT_LENGTH_OFFSET, ENDPOINT_OFFSET, "endpoint length")
    end = ENDPOINT_OFFSET + data[ENDPOINT_LENGTH_OFFSET]
    found.field(ENDPOINT_OFFSET, end, "endpoint")
    connector, listener = end + CONNECTOR_ID_SIZE_OFFSET, end + LISTENER_ID_SIZE_OFFSET
    found.field(connector, connector + 1, "connector_id_size")
    found.field(listener, listener + 1, "listener_id_size")
    flags = end + HELLO_FLAGS_OFFSET
    # Three fields share the byte of the flags.
    for name in ("connector_transactions", "listener_transactions", "require_old_link"):
        found.field(flags, flags + 1, name)
    epoch = align(flags + 1, ALIGNMENT)
    found.layout(flags + 1, epoch, "padding")
    _link(epoch, found)


def _packet(frame: Frame, data: bytes, decoder: Decoder, found: RangeList) -> None:
    """The fields after the first byte of a packet that has channels."""
    assert isinstance(decoder, RelinkDecoder)
    if decoder.id_sizes is None:
        return
    layout = packet_layout(decoder.sender, *decoder.id_sizes)
    head = data[HEAD_OFFSET]
    id_size = layout.id_sizes[head >> FORMAT_SHIFT & FORMAT_MASK]
    found.field(HEAD_OFFSET, PARTS_OFFSET, "multicast")
    found.layout(PARTS_OFFSET, ID_OFFSET, "short length")
    ids_at, count = ID_OFFSET, 1
    if head & FLAG_MULTICAST:
        found.layout(ID_OFFSET, MULTICAST_COUNT_OFFSET, "unused")
        found.layout(MULTICAST_COUNT_OFFSET, MULTICAST_ID_OFFSET, "channel count")
        ids_at = MULTICAST_ID_OFFSET
        count = int.from_bytes(data[MULTICAST_COUNT_OFFSET:MULTICAST_ID_OFFSET], "little")
    ids_end = ids_at + count * id_size
    for number, at in enumerate(range(ids_at, ids_end, id_size) if id_size else ()):
        found.field(at, at + id_size, "channels", number)
    if isinstance(frame, Message):
        _message(data, ids_end, head >> DATA_SHIFT, found)
        return
    end = ids_end
    if isinstance(frame, SequenceOperation | SequenceAcknowledgement):
        at = align(ids_end, SEQUENCE_ALIGNMENT)
        found.layout(ids_end, at, "padding")
        found.field(at, at + SEQUENCE_SIZE, "sequence")
        end = at + SEQUENCE_SIZE
    found.layout(end, len(data), "padding")


def _message(data: bytes, ids_end: int, flags: int, found: RangeList) -> None:
    at = align(ids_end, SIZES_ALIGNMENT)
    found.layout(ids_end, at, "padding")
    count = data[PARTS_OFFSET]
    if flags & FLAG_LONG:
        count = int.from_bytes(data[at : at + LONG_PARTS_SIZE], "little")
        found.layout(at, at + LONG_PARTS_SIZE, "part count")
        at += LONG_PARTS_SIZE
    width = SMALL_SIZE_SIZE
    if flags & FLAG_LARGE:
        width = LARGE_SIZE_SIZE
        found.layout(at, align(at, width), "padding")
        at = align(at, width)
    sizes_end = at + count * width
    found.layout(at, sizes_end, "part sizes")
    start = align(sizes_end, ALIGNMENT)
    found.layout(sizes_end, start, "padding")
    for number in range(count):
        size = int.from_bytes(data[at + number * width : at + (number + 1) * width], "little")
        found.field(start, start + size, "parts", number)
        end = start + align(size, ALIGNMENT)
        found.layout(start + size, end, "padding")
        start = end
