"""EMP's columnar scanner: messages, their identifiers, where their bodies are."""

from __future__ import annotations

from typing import ClassVar, Final

from crosswire.pipeline.decode.arrays import NONE, Bytes, Numbers
from crosswire.pipeline.decode.kernels import subroutine
from crosswire.pipeline.decode.scanners.octets import big_endian, octet_at, valid_utf8
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
from crosswire.wire.emp import layout
from crosswire.wire.emp.frames import DEFAULTS, Bye, Error, Hello, Ping, Pong, Request, Response

__all__ = ["BODY", "SCANNER", "EmpScanner"]

BODY: Final = 0
"""The only slice."""

_FRAME_BYTES: Final = 0
"""Of the limits."""


@subroutine
def _step(
    data: Bytes,
    position: int,
    end: int,
    shift: int,
    state: Numbers,  # noqa: ARG001  EMP's messages don't depend on one another
    limits: Numbers,
    rows: Numbers,
    progress: Numbers,
) -> int:
    """The position after the message, or why there is none."""
    if end - position < layout.LENGTH_SIZE:
        return INCOMPLETE
    length = big_endian(data, position, layout.LENGTH_SIZE)
    if length > limits[_FRAME_BYTES] or length < layout.MIN_LENGTH:
        return UNSURE
    # From here on the whole message is in the run. What is below the least length of its type is
    # refused before a field is read, so that no field is beyond the message.
    stop = position + layout.LENGTH_SIZE + length
    if stop > end:
        return INCOMPLETE
    # The codes of rows are the types of messages on the wire.
    kind = octet_at(data, position + layout.TYPE_OFFSET)
    number, detail = 0, NONE
    body, body_end = position + layout.BODY_OFFSET, position + layout.BODY_OFFSET
    if kind in (layout.TYPE_REQUEST, layout.TYPE_RESPONSE):
        if length < layout.MIN_REQUEST_LENGTH:
            return UNSURE
        number = big_endian(data, position + layout.ID_OFFSET, layout.ID_SIZE)
        body, body_end = position + layout.JSON_OFFSET, stop
    elif kind == layout.TYPE_HELLO:
        if length != layout.HELLO_LENGTH:
            return UNSURE
        detail = octet_at(data, position + layout.HELLO_VERSION_OFFSET)
    elif kind == layout.TYPE_ERROR:
        if length < layout.MIN_ERROR_LENGTH:
            return UNSURE
        description_bytes = big_endian(
            data,
            position + layout.ERROR_DESCRIPTION_LENGTH_OFFSET,
            layout.ERROR_DESCRIPTION_LENGTH_SIZE,
        )
        if description_bytes != length - layout.MIN_ERROR_LENGTH:
            return UNSURE
        detail = octet_at(data, position + layout.ERROR_CODE_OFFSET)
        body, body_end = position + layout.ERROR_DESCRIPTION_OFFSET, stop
        if not valid_utf8(data, body, body_end):
            return UNSURE
    elif kind > layout.LAST_TYPE:
        return UNSURE
    row = add_row(rows, progress, position + shift, stop - position, kind, number, detail, NONE)
    if kind >= layout.TYPE_ERROR:
        set_slice(rows, row, BODY, body, body_end)
    return stop


class EmpScanner(BulkScanner):
    """`number` is the identifier of a request or response; `detail` is a hello's version, an
    error's code. `body` is a request's or response's JSON, which is not checked here, or the
    description of an error."""

    # In the order of the message types on the wire.
    frames: ClassVar[tuple[type[Frame], ...]] = (Hello, Bye, Ping, Pong, Error, Request, Response)
    slice_names: ClassVar[tuple[str, ...]] = ("body",)
    kernel = staticmethod(scan_kernel("emp", _step))

    def columns_of(self, frame: Frame, length: int, below: Frame | None) -> FrameColumns:  # noqa: ARG002
        """Bodies are not checked, here as in the scanner."""
        code = self.codes[type(frame)]
        match frame:
            case Request(number, body) | Response(number, body):
                return FrameColumns(code, number, slices=(body,))
            case Hello(version):
                return FrameColumns(code, detail=version)
            case Error(error_code, description):
                return FrameColumns(code, detail=error_code, slices=(description.encode(),))
        return FrameColumns(code)

    def _limit_values(self, limits: Limits | None) -> list[int]:
        return [one_of(limits, DEFAULTS).frame_bytes]


SCANNER = EmpScanner
