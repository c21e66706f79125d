"""MicroMsg2's layout on the wire: every code, size and offset, stated once.

A frame (specification, "Frame prefix" and below; numbers are big-endian):

    flags         1   command 1, extension 2, error 4, large payload 8, continued 16
    by type       …   MESSAGE, SEND:  sequence 2 · destination length 1 · destination
                                      · properties length 2 · properties
                      EXTENSION:      number 1
                      COMMAND, ERROR: nothing
    length        1   of the payload; 4 bytes with flag 8
    payload       …   COMMAND and ERROR: name;key=value,…

A handshake, before all frames; an ERROR (first octet 4 or 12) may be sent instead:

    major         1
    minor         1
    flags         1   reserved, ignored
    identity      …   length 1, ASCII
    required      …   length 2, extensions: name:key=value,…;name
    optional      …   length 2, extensions

Offsets count from the first byte of the frame or handshake.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

# ------------------------------------------------------------------------------------- handshake

VERSION: Final = (1, 0)

MAJOR_OFFSET: Final = 0
MINOR_OFFSET: Final = 1
HANDSHAKE_FLAGS_OFFSET: Final = 2
IDENTITY_LENGTH_OFFSET: Final = 3
IDENTITY_LENGTH_SIZE: Final = 1
IDENTITY_OFFSET: Final = IDENTITY_LENGTH_OFFSET + IDENTITY_LENGTH_SIZE
EXTENSIONS_LENGTH_SIZE: Final = 2

HANDSHAKE_HEADER_SIZE: Final = IDENTITY_OFFSET
MAX_IDENTITY_SIZE: Final = 0xFF
MAX_EXTENSIONS_SIZE: Final = 0xFFFF

CLIENT_HANDSHAKES: Final = 2
"""A client proposes, and after the server's answer concludes."""
SERVER_HANDSHAKES: Final = 1

# ---------------------------------------------------------------------------------------- header

FLAGS_OFFSET: Final = 0
SEQUENCE_OFFSET: Final = 1
SEQUENCE_SIZE: Final = 2
DESTINATION_LENGTH_OFFSET: Final = SEQUENCE_OFFSET + SEQUENCE_SIZE
DESTINATION_LENGTH_SIZE: Final = 1
DESTINATION_OFFSET: Final = DESTINATION_LENGTH_OFFSET + DESTINATION_LENGTH_SIZE
PROPERTIES_LENGTH_SIZE: Final = 2
EXTENSION_NUMBER_OFFSET: Final = 1

MESSAGE_HEADER_SIZE: Final = DESTINATION_OFFSET
"""Of a message, up to its destination."""
EXTENSION_HEADER_SIZE: Final = EXTENSION_NUMBER_OFFSET + 1
HEADER_SIZE: Final = 1
"""Of a command or error, up to the payload's length."""
SHORT_LENGTH_SIZE: Final = 1
LARGE_LENGTH_SIZE: Final = 4
MIN_MESSAGE_SIZE: Final = DESTINATION_OFFSET + 1 + PROPERTIES_LENGTH_SIZE + SHORT_LENGTH_SIZE
"""With a destination of one byte, without properties and payload."""

MAX_SHORT_SIZE: Final = 0xFF
"""The largest payload without the flag for large ones."""
MAX_PAYLOAD_SIZE: Final = 1024 * 1024
"""Of one frame (specification, "MESSAGE frame"): larger messages are split."""
MAX_DESTINATION_SIZE: Final = 0xFF
MAX_PROPERTIES_SIZE: Final = 0xFFFF

# ------------------------------------------------------------------------------- types and flags

TYPE_MESSAGE: Final = 0
TYPE_COMMAND: Final = 1
TYPE_EXTENSION: Final = 2
TYPE_ERROR: Final = 4
TYPE_MASK: Final = TYPE_COMMAND | TYPE_EXTENSION | TYPE_ERROR
FLAG_LARGE: Final = 8
FLAG_CONTINUED: Final = 16

LAST_FLAGS: Final = TYPE_MASK | FLAG_LARGE | FLAG_CONTINUED

# -------------------------------------------------------------------------------------- sequence

FIRST_SEQUENCE: Final = 1
LAST_SEQUENCE: Final = 0xFFFF
"""It is followed by 1: 0 is never used."""
ACK_SIZE: Final = 2
"""The payload of an acknowledgement: a sequence number."""
MAX_WINDOW: Final = 0x7FFF
"""Frames that may wait for an acknowledgement: half of the numbers, so that one is never
ambiguous."""
FIRST_EXTENSION: Final = 1
LAST_EXTENSION: Final = 0xFF

# ------------------------------------------------------------------------------------------ text

ITEM_SEPARATOR: Final = ord(";")
"""Between properties, extensions, and after the name of a command or error."""
VALUE_SEPARATOR: Final = ord(":")
"""Between a property and its value, an extension and its properties."""
ARGUMENT_SEPARATOR: Final = ord(",")
ARGUMENT_VALUE_SEPARATOR: Final = ord("=")
ESCAPE: Final = ord("%")
VALUE_NUMBER: Final = ord("N")
VALUE_DATE: Final = ord("D")
VALUE_TEXT: Final = ord("T")

# --------------------------------------------------------------------------------------- structs

MESSAGE_STRUCT: Final = Struct(">BHB")
"""flags, sequence, length of the destination"""
SEQUENCE_STRUCT: Final = Struct(">BH")
"""flags, sequence"""
LENGTH_STRUCT: Final = Struct(">H")
"""length of properties, of a handshake's extensions"""
