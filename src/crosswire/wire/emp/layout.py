"""EMP's layout on the wire: every code, size and offset, stated once.

A message (the specification leaves the length out; numbers are big-endian):

    length        4   counts what follows it
    type          1
    unused        3   sent as zero, ignored
    body          …   by type:

    hello         version 1 · unused 3
    error         code 1 · unused 3 · description length 2 · description (UTF-8)
    request       identifier 8 · JSON
    response      identifier 8 · JSON
    bye, ping, pong have no body; one that is sent is ignored

Offsets count from the first byte of the message. A name with SIZE counts bytes on the wire, one
with LENGTH is a value of the field `length`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

# ---------------------------------------------------------------------------------------- header

LENGTH_OFFSET: Final = 0
LENGTH_SIZE: Final = 4
TYPE_OFFSET: Final = LENGTH_OFFSET + LENGTH_SIZE
UNUSED_OFFSET: Final = TYPE_OFFSET + 1
UNUSED_SIZE: Final = 3
BODY_OFFSET: Final = UNUSED_OFFSET + UNUSED_SIZE

HEADER_SIZE: Final = BODY_OFFSET
MIN_LENGTH: Final = HEADER_SIZE - LENGTH_SIZE
"""A message without a body: `length` counts the type and the unused bytes."""

# ----------------------------------------------------------------------------------------- types

TYPE_HELLO: Final = 0
TYPE_BYE: Final = 1
TYPE_PING: Final = 2
TYPE_PONG: Final = 3
TYPE_ERROR: Final = 4
TYPE_REQUEST: Final = 5
TYPE_RESPONSE: Final = 6

LAST_TYPE: Final = TYPE_RESPONSE

# ----------------------------------------------------------------------------------------- hello

VERSION: Final = 1

HELLO_VERSION_OFFSET: Final = BODY_OFFSET
HELLO_SIZE: Final = HELLO_VERSION_OFFSET + 1 + UNUSED_SIZE
HELLO_LENGTH: Final = HELLO_SIZE - LENGTH_SIZE

# ----------------------------------------------------------------------------------------- error

ERROR_CODE_OFFSET: Final = BODY_OFFSET
ERROR_DESCRIPTION_LENGTH_OFFSET: Final = ERROR_CODE_OFFSET + 1 + UNUSED_SIZE
ERROR_DESCRIPTION_LENGTH_SIZE: Final = 2
ERROR_DESCRIPTION_OFFSET: Final = ERROR_DESCRIPTION_LENGTH_OFFSET + ERROR_DESCRIPTION_LENGTH_SIZE

MIN_ERROR_LENGTH: Final = ERROR_DESCRIPTION_OFFSET - LENGTH_SIZE
MAX_DESCRIPTION_SIZE: Final = 0xFFFF

# -------------------------------------------------------------------------- request and response

ID_OFFSET: Final = BODY_OFFSET
ID_SIZE: Final = 8
JSON_OFFSET: Final = ID_OFFSET + ID_SIZE

MIN_REQUEST_LENGTH: Final = JSON_OFFSET - LENGTH_SIZE
"""A request or response whose JSON is empty."""

# --------------------------------------------------------------------------------------- structs

HEADER_STRUCT: Final = Struct(f">IB{UNUSED_SIZE}x")
"""length, type"""
HELLO_STRUCT: Final = Struct(f">IB{UNUSED_SIZE}xB{UNUSED_SIZE}x")
"""length, type, version"""
ERROR_STRUCT: Final = Struct(f">IB{UNUSED_SIZE}xB{UNUSED_SIZE}xH")
"""length, type, code, length of the description"""
REQUEST_STRUCT: Final = Struct(f">IB{UNUSED_SIZE}xQ")
"""length, type, identifier: of a request or response"""
