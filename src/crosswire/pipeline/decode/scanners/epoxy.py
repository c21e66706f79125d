"""Epoxy's columnar scanner: framelets, headers as they are usually written, slices."""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.kernels import subroutine
from crosswire.pipeline.decode.scanners.octets import little_endian, octet_at, valid_utf8
from crosswire.pipeline.decode.scanners.scanner import (
    INCOMPLETE,
    UNSURE,
    BulkScanner,
    FrameColumns,
    add_row,
    scan_kernel,
    set_slice,
)
from crosswire.wire.contract import Frame, Limits, one_of
from crosswire.wire.epoxy import layout
from crosswire.wire.epoxy.frames import DEFAULTS, ConfigFrame, Message, ProtocolError

__all__ = [
    "CONFIG",
    "HAS_ERROR",
    "LAYER_DATA",
    "MESSAGE",
    "MESSAGE_TYPE",
    "METHOD",
    "PAYLOAD",
    "PROTOCOL_ERROR",
    "SCANNER",
    "SERVICE",
    "EpoxyScanner",
]

CONFIG, MESSAGE, PROTOCOL_ERROR = range(3)
"""Codes of frames; the last is the decoder's."""
PAYLOAD, SERVICE, METHOD, LAYER_DATA = range(4)
"""Slices."""

# What `detail` has of a message.
MESSAGE_TYPE: Final = 3
"""The bits of its type."""
HAS_ERROR: Final = 4

# The limits.
_FRAME_BYTES, _FRAMELET_BYTES, _FRAMELETS = range(3)


@subroutine
def _framelet(
    data: Bytes, position: int, at: int, end: int, limits: Numbers
) -> tuple[int, int, int]:
    """The type of the framelet at `at`, and where its content starts and ends; of a frame that
    began at `position`. Instead of the end, INCOMPLETE or UNSURE."""
    start = at + layout.CONTENT_OFFSET
    if start > end:
        return 0, start, INCOMPLETE
    size = little_endian(data, at + layout.SIZE_OFFSET, layout.SIZE_SIZE)
    stop = start + size
    # The size is below 2³², so that the sum can't overflow before it is compared.
    if size < layout.MIN_CONTENT_SIZE or size > limits[_FRAMELET_BYTES]:
        return 0, start, UNSURE
    if stop - position > limits[_FRAME_BYTES]:
        return 0, start, UNSURE
    kind = little_endian(data, at + layout.TYPE_OFFSET, layout.TYPE_SIZE)
    return kind, start, stop if stop <= end else INCOMPLETE


@subroutine
def _name(data: Bytes, at: int, end: int, field: int) -> tuple[int, int]:
    """Start and end of the name in this field, both `at` if the field is not there; UNSURE if it is
    written in an unusual way."""
    if end - at < layout.FIELD_HEADER_SIZE:
        return at, at
    if little_endian(data, at, layout.FIELD_HEADER_SIZE) != field:
        return at, at
    at += layout.FIELD_HEADER_SIZE
    size = 0
    for index in range(layout.MAX_VARINT32_SIZE):
        if at >= end:
            return UNSURE, UNSURE
        octet = octet_at(data, at)
        at += 1
        size |= (octet & layout.VARINT_MASK) << layout.VARINT_BITS * index
        if octet < layout.VARINT_MORE:
            if size > end - at or not valid_utf8(data, at, at + size):
                return UNSURE, UNSURE
            return at, at + size
    return UNSURE, UNSURE


@subroutine
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
    count = little_endian(data, position + layout.COUNT_OFFSET, layout.COUNT_SIZE)
    if stop >= 0 and count == layout.MAX_FRAMELETS and kind == layout.TYPE_LAYER_DATA:
        layer, layer_end = content, stop
        kind, content, stop = _framelet(data, position, stop, end, limits)
        count -= 1
    if stop < 0:
        return stop
    # Headers and payload are left, whether or not there was layer data between them.
    if count != 2 or kind not in (layout.TYPE_PAYLOAD, layout.TYPE_ERROR_DATA):
        return UNSURE

    # Fast Binary allows fields in more forms than this one, in which all known writers write them:
    # ascending, defaults omitted, no unknown field. Any other form is for the Decoder.
    at, conversation = headers, 0
    if (
        headers_end - at >= layout.CONVERSATION_FIELD_SIZE
        and little_endian(data, at, layout.FIELD_HEADER_SIZE) == layout.CONVERSATION_FIELD
    ):
        conversation = little_endian(data, at + layout.FIELD_HEADER_SIZE, layout.CONVERSATION_SIZE)
        at += layout.CONVERSATION_FIELD_SIZE
    if headers_end - at < layout.MESSAGE_TYPE_FIELD_SIZE:
        return UNSURE
    if little_endian(data, at, layout.FIELD_HEADER_SIZE) != layout.MESSAGE_TYPE_FIELD:
        return UNSURE
    message_type = little_endian(data, at + layout.FIELD_HEADER_SIZE, layout.MESSAGE_TYPE_SIZE)
    if message_type < layout.FIRST_MESSAGE_TYPE or message_type > layout.LAST_MESSAGE_TYPE:
        return UNSURE
    at += layout.MESSAGE_TYPE_FIELD_SIZE
    service, service_end = _name(data, at, headers_end, layout.SERVICE_FIELD)
    if service < 0:
        return UNSURE
    method, method_end = _name(data, service_end, headers_end, layout.METHOD_FIELD)
    if method < 0 or method_end >= headers_end or data[method_end] != layout.STOP:
        return UNSURE
    detail = message_type | (HAS_ERROR if kind == layout.TYPE_ERROR_DATA else 0)
    offset, length = position + shift, stop - position
    row = add_row(rows, progress, offset, length, MESSAGE, conversation, detail, NONE)
    set_slice(rows, row, PAYLOAD, content, stop)
    set_slice(rows, row, SERVICE, service, service_end)
    set_slice(rows, row, METHOD, method, method_end)
    if layer_end:
        set_slice(rows, row, LAYER_DATA, layer, layer_end)
    return stop


@subroutine
def _step(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,  # noqa: ARG001  Epoxy's frames don't depend on one another
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position after the frame, or why there is none."""
    if end - position < layout.HEADER_SIZE:
        return INCOMPLETE
    count = little_endian(data, position + layout.COUNT_OFFSET, layout.COUNT_SIZE)
    if not 1 <= count <= layout.MAX_FRAMELETS or count > limits[_FRAMELETS]:
        return UNSURE
    kind, start, stop = _framelet(data, position, position + layout.HEADER_SIZE, end, limits)
    if stop < 0:
        return stop
    if kind == layout.TYPE_HEADERS:
        return _message(data, position, start, stop, end, shift, limits, rows, progress)
    # There is only one usual config: an empty struct.
    is_empty = stop - start == layout.STOP_SIZE and data[start] == layout.STOP
    if kind != layout.TYPE_CONFIG or count != 1 or not is_empty:
        return UNSURE
    add_row(rows, progress, position + shift, stop - position, CONFIG, 0, NONE, NONE)
    return stop


class EpoxyScanner(BulkScanner):
    """`number` is the conversation id; `detail` the message type, with HAS_ERROR added where the
    message has an error. `payload` is then the error: marshalled Bond in any case, which is not
    checked here, as is `layer_data`. Protocol errors, and headers that are written in another way
    than is usual, are left to the decoder.
    """

    frames: ClassVar[tuple[type[Frame], ...]] = (ConfigFrame, Message)
    decoder_frames: ClassVar[tuple[type[Frame], ...]] = (ProtocolError,)
    slice_names: ClassVar[tuple[str, ...]] = ("payload", "service", "method", "layer_data")
    kernel = staticmethod(scan_kernel("epoxy", _step))

    def columns_of(self, frame: Frame, length: int, below: Frame | None) -> FrameColumns:  # noqa: ARG002
        """Of a message: a protocol error has no columns of its own."""
        code = self.codes[type(frame)]
        if not isinstance(frame, Message):
            return FrameColumns(code)
        detail = int(frame.message_type)
        content = frame.payload
        if frame.error is not None:
            detail, content = detail | HAS_ERROR, frame.error
        names = frame.service_name.encode(), frame.method_name.encode()
        slices = (content, *names, frame.layer_data)
        return FrameColumns(code, frame.conversation_id, detail, slices=slices)

    def _limit_values(self, limits: Limits | None) -> list[int]:
        limits = one_of(limits, DEFAULTS)
        return [limits.frame_bytes, limits.framelet_bytes, limits.framelets]


SCANNER = EpoxyScanner
