"""Epoxy's layout on the wire: every code, size and offset, stated once.

A frame (specification, section "The frame"; numbers are little-endian):

    count         2   of framelets, 1 to the limit
    framelets     …   each:
      type        2   two letters
      size        4   of the content, at least 1
      content     …

The first framelet determines what the frame is, and which may follow:

    config           CG
    message          HR [LY] PD | ED
    protocol error   ER

The letters are in this order on the wire; the specification's table shows them reversed. CG, HR
and ER contain a bare Fast Binary v1 struct, the others a marshalled one. Of a struct that is
written as bond's own writers do it, the headers are:

    field 0       3   type and id · conversation id 8   omitted if it is 0
    field 1       3   type and id · message type 4
    field 2       3   type and id · service: length 1 to 5, UTF-8   omitted if it is empty
    field 3       3   type and id · method: likewise
    stop          1

Offsets count from the first byte of the frame or framelet.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

# ---------------------------------------------------------------------------------------- header

COUNT_OFFSET: Final = 0
COUNT_SIZE: Final = 2
HEADER_SIZE: Final = COUNT_OFFSET + COUNT_SIZE
"""Of a frame: its first framelet begins here."""

TYPE_OFFSET: Final = 0
TYPE_SIZE: Final = 2
SIZE_OFFSET: Final = TYPE_OFFSET + TYPE_SIZE
SIZE_SIZE: Final = 4
CONTENT_OFFSET: Final = SIZE_OFFSET + SIZE_SIZE
FRAMELET_HEADER_SIZE: Final = CONTENT_OFFSET

MIN_CONTENT_SIZE: Final = 1
MAX_FRAMELETS: Final = 3
"""Of the frames that are defined: a message with layer data."""

# ----------------------------------------------------------------------------------------- types

TYPE_CONFIG: Final = int.from_bytes(b"CG", "little")
TYPE_HEADERS: Final = int.from_bytes(b"HR", "little")
TYPE_LAYER_DATA: Final = int.from_bytes(b"LY", "little")
TYPE_PAYLOAD: Final = int.from_bytes(b"PD", "little")
TYPE_ERROR_DATA: Final = int.from_bytes(b"ED", "little")
TYPE_PROTOCOL_ERROR: Final = int.from_bytes(b"ER", "little")

TYPES: Final = frozenset(
    (
        TYPE_CONFIG,
        TYPE_HEADERS,
        TYPE_LAYER_DATA,
        TYPE_PAYLOAD,
        TYPE_ERROR_DATA,
        TYPE_PROTOCOL_ERROR,
    )
)

# --------------------------------------------------------------------------------------- structs
# in Fast Binary v1: type and id of each field, its value, and a stop after the last.

FIELD_ID_SHIFT: Final = 8
FIELD_HEADER_SIZE: Final = 3
STOP: Final = 0
"""Also the whole of a struct whose fields are all omitted: of a config."""
STOP_SIZE: Final = 1

# Bond's codes of types.
BOND_UINT64: Final = 6
BOND_STRING: Final = 9
BOND_INT32: Final = 16

VARINT_BITS: Final = 7
"""Of each byte of a variable-length integer, least significant first."""
VARINT_MASK: Final = 0x7F
VARINT_MORE: Final = 0x80
"""Set in every byte but the last."""
MAX_VARINT32_SIZE: Final = 5

# --------------------------------------------------------------------------------------- headers

CONVERSATION_FIELD: Final = BOND_UINT64 | 0 << FIELD_ID_SHIFT
CONVERSATION_SIZE: Final = 8
CONVERSATION_FIELD_SIZE: Final = FIELD_HEADER_SIZE + CONVERSATION_SIZE
MAX_CONVERSATION: Final = (1 << 64) - 1

MESSAGE_TYPE_FIELD: Final = BOND_INT32 | 1 << FIELD_ID_SHIFT
MESSAGE_TYPE_SIZE: Final = 4
MESSAGE_TYPE_FIELD_SIZE: Final = FIELD_HEADER_SIZE + MESSAGE_TYPE_SIZE

SERVICE_FIELD: Final = BOND_STRING | 2 << FIELD_ID_SHIFT
METHOD_FIELD: Final = BOND_STRING | 3 << FIELD_ID_SHIFT

MESSAGE_REQUEST: Final = 1
MESSAGE_RESPONSE: Final = 2
MESSAGE_EVENT: Final = 3

FIRST_MESSAGE_TYPE: Final = MESSAGE_REQUEST
LAST_MESSAGE_TYPE: Final = MESSAGE_EVENT

# ---------------------------------------------------------------------------------- byte structs

FRAMELET_STRUCT: Final = Struct("<HI")
"""type, size"""
HEADERS_STRUCT: Final = Struct("<II3sQ3si")
"""count and type of a message's first framelet in one number, its size, then type and id of field
0, conversation id, type and id of field 1, message type"""
HEADERS_WITHOUT_CONVERSATION_STRUCT: Final = Struct("<II3si")
"""the same, where the conversation id is 0"""
FIRST_TYPE_SHIFT: Final = 8 * COUNT_SIZE
"""Of the framelet's type in that first number."""
