"""Epoxy's columnar scanner for captures: framelets, headers as they are usually written, slices."""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.pipeline.decode.scanners.scanner import (
    NONE,
    ODD,
    OFFSET,
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
from crosswire.wire.contract import Limits, one_of
from crosswire.wire.epoxy.frames import DEFAULTS, ConfigFrame, Message

__all__ = ["EpoxyScanner"]

_CONFIG, _MESSAGE = 0, 1
_PAYLOAD, _SERVICE, _METHOD, _LAYER_DATA = range(4)
_HAS_ERROR: Final = 4

# Types of framelets, as a little-endian number.
_CG: Final = int.from_bytes(b"CG", "little")
_HR: Final = int.from_bytes(b"HR", "little")
_LY: Final = int.from_bytes(b"LY", "little")
_PD: Final = int.from_bytes(b"PD", "little")
_ED: Final = int.from_bytes(b"ED", "little")
_FRAMELET_BYTES: Final = 6

# Type and id of the headers' fields, in the order in which they are written.
_ID_FIELD: Final = 6
_TYPE_FIELD: Final = 16 | 1 << 8
_SERVICE_FIELD: Final = 9 | 2 << 8
_METHOD_FIELD: Final = 9 | 3 << 8


@compiled
def _framelet(
    data: Bytes, position: int, at: int, end: int, limits: Numbers
) -> tuple[int, int, int]:
    """Its type, and where its content is; of a frame that began at `position`. Instead of where it
    ends, why that can't be told."""
    start = at + _FRAMELET_BYTES
    if start > end:
        return 0, start, TAIL
    size = little(data, at + 2, 4)
    stop = start + size
    if size == 0 or size > limits[1] or stop - position > limits[0]:
        return 0, start, ODD
    return little(data, at, 2), start, stop if stop <= end else TAIL


@compiled
def _name(data: Bytes, at: int, end: int, field: int) -> tuple[int, int]:
    """Where the name in this field is, nothing if the field isn't there; ODD if it's unusual."""
    if end - at < 3 or little(data, at, 3) != field:
        return at, at
    at += 3
    size = 0
    for index in range(5):
        if at >= end:
            return ODD, ODD
        octet = octet_at(data, at)
        at += 1
        size |= (octet & 0x7F) << 7 * index
        if octet < 0x80:
            if size > end - at or not valid_utf8(data, at, at + size):
                return ODD, ODD
            return at, at + size
    return ODD, ODD


@compiled
def _message(
    data: Bytes,
    position: int,
    headers: int,
    headers_end: int,
    end: int,
    shift: int,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """A frame that opens with these headers."""
    kind, content, stop = _framelet(data, position, headers_end, end, limits)
    layer, layer_end = 0, 0
    count = little(data, position, 2)
    if stop >= 0 and count == 3 and kind == _LY:
        layer, layer_end = content, stop
        kind, content, stop = _framelet(data, position, stop, end, limits)
        count = 2
    if stop < 0:
        return stop
    if count != 2 or kind not in (_PD, _ED):
        return ODD

    at, conversation = headers, 0
    if headers_end - at >= 11 and little(data, at, 3) == _ID_FIELD:
        conversation = little(data, at + 3, 8)
        at += 11
    if headers_end - at < 7 or little(data, at, 3) != _TYPE_FIELD:
        return ODD
    message_type = little(data, at + 3, 4)
    if message_type < 1 or message_type > 3:
        return ODD
    service, service_end = _name(data, at + 7, headers_end, _SERVICE_FIELD)
    if service < 0:
        return ODD
    method, method_end = _name(data, service_end, headers_end, _METHOD_FIELD)
    if method < 0 or method_end >= headers_end or data[method_end] != 0:
        return ODD
    detail = message_type | (_HAS_ERROR if kind == _ED else 0)
    offset, length = position + shift, stop - position
    row = put(rows, progress, offset, length, _MESSAGE, conversation, detail, NONE)
    point(rows, row, _PAYLOAD, content, stop)
    point(rows, row, _SERVICE, service, service_end)
    point(rows, row, _METHOD, method, method_end)
    if layer_end:
        point(rows, row, _LAYER_DATA, layer, layer_end)
    return stop


@compiled
def _frame(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position behind the frame, or why there is none to be had."""
    if end - position < 2:
        return TAIL
    count = little(data, position, 2)
    if not 1 <= count <= 3 or count > limits[2]:
        return ODD
    kind, start, stop = _framelet(data, position, position + 2, end, limits)
    if stop < 0:
        return stop
    if kind == _HR:
        return _message(data, position, start, stop, end, shift, limits, rows, progress)
    # There is only one usual config: an empty struct.
    if kind != _CG or count != 1 or stop - start != 1 or data[start] != 0:
        return ODD
    put(rows, progress, position + shift, stop - position, _CONFIG, 0, NONE, NONE)
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
        position, end = at[run], ends[run]
        shift = states[run, OFFSET] - position
        after = position
        while position < end and has_room(rows, progress):
            after = _frame(data, position, end, shift, limits, rows, progress)
            if after < 0:
                break
            position = after
        if not stopped(at, ends, states, progress, position, after):
            return False
    return True


class EpoxyScanner(BulkScanner):
    """`number` is the conversation id; `detail` the message type, and 4 with it where the message
    has an error. That is then what `payload` is: marshalled Bond in any case, as it stands, as is
    `layer_data`. Protocol errors, and headers written in another way than is usual, are left to the
    decoder.
    """

    frame_names: ClassVar[tuple[str, ...]] = (ConfigFrame.frame_name, Message.frame_name)
    frame_layers: ClassVar[tuple[int, ...]] = (0, 0)
    slice_names: ClassVar[tuple[str, ...]] = ("payload", "service", "method", "layer_data")

    _kernel = staticmethod(_scan)

    def _limited(self, limits: Limits | None) -> list[int]:
        limits = one_of(limits, DEFAULTS)
        return [limits.frame_bytes, limits.framelet_bytes, limits.framelets]
