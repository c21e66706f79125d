"""Where the fields of Epoxy's frames are: in which framelet, and in the headers where exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.epoxy.frames import ConfigFrame, Message, ProtocolError, framelets_of
from crosswire.wire.epoxy.layout import (
    BOND_INT32,
    BOND_STRING,
    BOND_UINT64,
    COUNT_OFFSET,
    FIELD_HEADER_SIZE,
    FRAMELET_HEADER_SIZE,
    HEADER_SIZE,
    SIZE_SIZE,
    STOP,
    STOP_SIZE,
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
_HEADERS: Final = {0: "conversation_id", 1: "message_type", 2: "service_name", 3: "method_name"}
_ERROR: Final = {0: "error_code"}
_SCALAR_SIZES: Final = {3: 1, 4: 2, 5: 4, BOND_UINT64: 8, 14: 1, 15: 2, BOND_INT32: 4, 17: 8}
"""By Bond's code of the type: unsigned and signed integers of 1, 2, 4 and 8 bytes."""


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


def _struct(content: bytes, start: int, names: Mapping[int, str], found: RangeList) -> int:
    """The scalar fields of a struct in Fast Binary, by their ids; returns where the first begins
    that is none. A number may be written smaller than it is declared."""
    at = 0
    while at < len(content):
        kind, field = (
            content[at],
            int.from_bytes(content[at + 1 : at + FIELD_HEADER_SIZE], "little"),
        )
        begin = at + FIELD_HEADER_SIZE
        if kind == BOND_STRING:
            size, begin = _varint(content, begin)
        elif kind in _SCALAR_SIZES:
            size = _SCALAR_SIZES[kind]
        else:
            break
        if field not in names:
            break
        found.layout(start + at, start + begin, "field header")
        found.field(start + begin, start + begin + size, names[field])
        at = begin + size
    return at


def _headers(content: bytes, start: int, found: RangeList) -> None:
    at = _struct(content, start, _HEADERS, found)
    is_end = content[at:] == bytes((STOP,))
    found.layout(start + at, start + len(content), "stop" if is_end else "unknown fields")


def _protocol_error(content: bytes, start: int, found: RangeList) -> None:
    """All that follows the code are details, a struct of its own."""
    at = _struct(content, start, _ERROR, found)
    end = max(len(content) - STOP_SIZE, at)
    if end > at:
        found.field(start + at, start + end, "details")
    found.layout(start + end, start + len(content), "stop")


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
