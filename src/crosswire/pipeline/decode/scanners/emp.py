"""EMP's columnar scanner for captures: messages, their identifiers, where their bodies are."""

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
    big,
    compiled,
    has_room,
    has_run,
    kernel,
    octet_at,
    point,
    put,
    stopped,
    valid_utf8,
)
from crosswire.wire.contract import Limits, one_of
from crosswire.wire.emp.frames import DEFAULTS, Bye, Error, Hello, Ping, Pong, Request, Response

__all__ = ["EmpScanner"]

_HELLO, _ERROR, _REQUEST, _RESPONSE = 0, 4, 5, 6
_BODY: Final = 0


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
    """The position behind the message, or why there is none to be had."""
    if end - position < 4:
        return TAIL
    length = big(data, position, 4)
    if length > limits[0] or length < 4:
        return ODD
    stop = position + 4 + length
    if stop > end:
        return TAIL
    kind = octet_at(data, position + 4)
    number, detail = 0, NONE
    body, body_end = position + 8, position + 8
    if kind in (_REQUEST, _RESPONSE):
        if length < 12:
            return ODD
        number = big(data, position + 8, 8)
        body, body_end = position + 16, stop
    elif kind == _HELLO:
        if length != 8:
            return ODD
        detail = octet_at(data, position + 8)
    elif kind == _ERROR:
        if length < 10 or big(data, position + 12, 2) != length - 10:
            return ODD
        detail = octet_at(data, position + 8)
        body, body_end = position + 14, stop
        if not valid_utf8(data, body, body_end):
            return ODD
    elif kind > _RESPONSE:
        return ODD
    row = put(rows, progress, position + shift, stop - position, kind, number, detail, NONE)
    if kind >= _ERROR:
        point(rows, row, _BODY, body, body_end)
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


class EmpScanner(BulkScanner):
    """`number` is the identifier of a request or response; `detail` is a hello's version, an
    error's code. `body` is JSON as it stands, or the description of an error: what is in it is a
    second step's to check."""

    # In the order of the message types on the wire.
    frame_names: ClassVar[tuple[str, ...]] = tuple(
        frame.frame_name for frame in (Hello, Bye, Ping, Pong, Error, Request, Response)
    )
    frame_layers: ClassVar[tuple[int, ...]] = (0,) * len(frame_names)
    slice_names: ClassVar[tuple[str, ...]] = ("body",)

    _kernel = staticmethod(_scan)

    def _limited(self, limits: Limits | None) -> list[int]:
        return [one_of(limits, DEFAULTS).frame_bytes]
