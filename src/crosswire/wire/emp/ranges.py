"""Where the fields of EMP's messages are."""

from __future__ import annotations

from typing import Final

from crosswire.wire.contract import Decoder, Frame
from crosswire.wire.emp.frames import Error, Hello, Request, Response
from crosswire.wire.emp.layout import (
    BODY_OFFSET,
    ERROR_CODE_OFFSET,
    ERROR_DESCRIPTION_LENGTH_OFFSET,
    ERROR_DESCRIPTION_OFFSET,
    HELLO_VERSION_OFFSET,
    ID_OFFSET,
    JSON_OFFSET,
    LENGTH_OFFSET,
    LENGTH_SIZE,
    TYPE_OFFSET,
    UNUSED_OFFSET,
)
from crosswire.wire.field_ranges import RangeList

__all__ = ["ranges"]

_MEMBERS: Final = frozenset({"op", "data", "status", "code", "description"})


def ranges(frame: Frame, data: bytes, _decoder: Decoder, found: RangeList) -> None:
    """See `crosswire.wire.field_ranges`."""
    found.layout(LENGTH_OFFSET, LENGTH_OFFSET + LENGTH_SIZE, "length")
    found.layout(TYPE_OFFSET, UNUSED_OFFSET, "type")
    found.layout(UNUSED_OFFSET, BODY_OFFSET, "unused")
    match frame:
        case Hello():
            found.field(HELLO_VERSION_OFFSET, HELLO_VERSION_OFFSET + 1, "version")
            found.layout(HELLO_VERSION_OFFSET + 1, len(data), "unused")
        case Error():
            found.field(ERROR_CODE_OFFSET, ERROR_CODE_OFFSET + 1, "code")
            found.layout(ERROR_CODE_OFFSET + 1, ERROR_DESCRIPTION_LENGTH_OFFSET, "unused")
            length_at = ERROR_DESCRIPTION_LENGTH_OFFSET
            found.layout(length_at, ERROR_DESCRIPTION_OFFSET, "description length")
            found.field(ERROR_DESCRIPTION_OFFSET, len(data), "description")
        case Request() | Response():
            found.field(ID_OFFSET, JSON_OFFSET, "id")
            found.json(data[JSON_OFFSET:], JSON_OFFSET, _MEMBERS)
        case _:
            found.layout(BODY_OFFSET, len(data), "ignored")
