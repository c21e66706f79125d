"""Where the fields of Epoxy's frames are: in which framelet, and in the headers where exactly."""

from __future__ import annotations

from typing import Final

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.epoxy.frames import ConfigFrame, Message, ProtocolError, framelets_of
from crosswire.wire.epoxy.layout import (
    BOND_INT32,
    CONVERSATION_FIELD,
    CONVERSATION_FIELD_SIZE,
    COUNT_OFFSET,
    FIELD_HEADER_SIZE,
    FRAMELET_HEADER_SIZE,
    HEADER_SIZE,
    MESSAGE_TYPE_FIELD,
    MESSAGE_TYPE_FIELD_SIZE,
    METHOD_FIELD,
    SERVICE_FIELD,
    SIZE_SIZE,
    TYPE_CONFIG,
    TYPE_ERROR_DATA,
    TYPE_HEADERS,
    TYPE_LAYER_DATA,
    TYPE_PAYLOAD,
    VARINT_BITS,
    VARINT_MASK,
    VARINT_MORE,
)
from crosswire.wire.field_ranges import RangeList

__all__ = ["ranges"]

_CONTENTS: Final = {
    TYPE_LAYER_DATA: "layer_data",
    TYPE_PAYLOAD: "payload",
    TYPE_ERROR_DATA: "error",
}
_CODE_SIZE: Final = 4
_NAMES: Final = ((SERVICE_FIELD, "service_name"), (METHOD_FIELD, "method_name"))


def ranges(frame: Frame, data: bytes, _decoder: Decoder, found: RangeList) -> None:
    """See `crosswire.wire.field_ranges`."""
    if not isinstance(frame, ConfigFrame | Message | ProtocolError):
        return
    found.layout(COUNT_OFFSET, HEADER_SIZE, "framelet count")
    for kind, start, end in framelets_of(data, 0):
        found.layout(start - FRAMELET_HEADER_SIZE, start - SIZE_SIZE, "framelet type")
        found.layout(start - SIZE_SIZE, start, "framelet size")
        if kind in _CONTENTS:
            found.field(start, end, _CONTENTS[kind])
        elif kind == TYPE_HEADERS:
            _headers(data[start:end], start, found)
        elif kind == TYPE_CONFIG:
            found.layout(start, end, "config")
        else:
            _protocol_error(data[start:end], start, found)


def _headers(content: bytes, start: int, found: RangeList) -> None:
    """Headers as bond's own writers write them; of others only that they are headers."""
    at = 0
    if _field_at(content, at) == CONVERSATION_FIELD:
        at = CONVERSATION_FIELD_SIZE
        found.layout(start, start + FIELD_HEADER_SIZE, "field header")
        found.field(start + FIELD_HEADER_SIZE, start + at, "conversation_id")
    if _field_at(content, at) != MESSAGE_TYPE_FIELD:
        found.layout(start + at, start + len(content), "headers")
        return
    end = at + MESSAGE_TYPE_FIELD_SIZE
    found.layout(start + at, start + at + FIELD_HEADER_SIZE, "field header")
    found.field(start + at + FIELD_HEADER_SIZE, start + end, "message_type")
    at = end
    for field, name in _NAMES:
        if _field_at(content, at) == field:
            size, begin = _varint(content, at + FIELD_HEADER_SIZE)
            found.layout(start + at, start + begin, "field header")
            found.field(start + begin, start + begin + size, name)
            at = begin + size
    found.layout(start + at, start + len(content), "stop")


def _protocol_error(content: bytes, start: int, found: RangeList) -> None:
    """The code is field 0, unless it is the default and omitted; all that follows are details."""
    at = 0
    if _field_at(content, 0) == BOND_INT32:
        at = FIELD_HEADER_SIZE + _CODE_SIZE
        found.layout(start, start + FIELD_HEADER_SIZE, "field header")
        found.field(start + FIELD_HEADER_SIZE, start + at, "error_code")
    if len(content) - at > 1:
        found.field(start + at, start + len(content) - 1, "details")
    found.layout(start + len(content) - 1, start + len(content), "stop")


def _field_at(content: bytes, at: int) -> int:
    """Type and id of the field that begins here."""
    return int.from_bytes(content[at : at + FIELD_HEADER_SIZE], "little")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer that was read before, and where it ends."""
    value = shift = 0
    while at < len(content):
        octet = content[at]
        value |= (octet & VARINT_MASK) << shift
        shift += VARINT_BITS
        at += 1
        if octet < VARINT_MORE:
            break
    return value, at
