"""ZMTP's layout on the wire: every code, size and offset, stated once.

The greeting, 64 bytes (RFC 37, "Formal Grammar"; numbers are big-endian):

    signature    10   ff, eight bytes of padding, 7f
    version       2   major, minor
    mechanism    20   its name, filled up with zeros
    as-server     1   0 or 1
    filler       31   sent as zero, ignored

All that follows are frames:

    flags         1   MORE 1, LONG 2, COMMAND 4; the other bits are zero
    size        1|8   of the body; eight bytes with LONG
    body          …   a part of a message, or a command: name length 1 · name · data

The data of commands:

    READY, INITIATE   metadata: name length 1 · name · value length 4 · value, repeated
    ERROR             reason length 1 · reason
    PING              time to live 2, in tenths of a second · context, at most 16
    PONG              context of the PING
    SUBSCRIBE         topic, up to the end; CANCEL alike
    HELLO (PLAIN)     name length 1 · name · password length 1 · password

and those of CURVE (RFC 26), where a box is longer than its content by the 16 bytes of its seal:

    HELLO        version 2 · zeros 72 · C' 32 · nonce 8 · box of 64 zeros
    WELCOME      nonce 16 · box of S' 32 and the cookie 96
    INITIATE     cookie 96 · nonce 8 · box of C 32, the vouch 96 and the metadata
    READY        nonce 8 · box of the metadata
    MESSAGE      nonce 8 · box of flags 1 and the body; its frame is not marked as a command

Offsets count from the first byte of the greeting, of the frame or of a command's data.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

# -------------------------------------------------------------------------------------- greeting

SIGNATURE_START: Final = 0xFF
SIGNATURE_END: Final = 0x7F
PADDING_OFFSET: Final = 1
PADDING_SIZE: Final = 8
SIGNATURE_END_OFFSET: Final = PADDING_OFFSET + PADDING_SIZE
MAJOR_OFFSET: Final = SIGNATURE_END_OFFSET + 1
MINOR_OFFSET: Final = MAJOR_OFFSET + 1
MECHANISM_OFFSET: Final = MINOR_OFFSET + 1
MECHANISM_SIZE: Final = 20
AS_SERVER_OFFSET: Final = MECHANISM_OFFSET + MECHANISM_SIZE
FILLER_OFFSET: Final = AS_SERVER_OFFSET + 1
FILLER_SIZE: Final = 31
GREETING_SIZE: Final = FILLER_OFFSET + FILLER_SIZE

MIN_MAJOR: Final = 3
"""Versions 1 and 2 have another greeting, and no security mechanisms."""

MECHANISM_NULL: Final = "NULL"
MECHANISM_PLAIN: Final = "PLAIN"
MECHANISM_CURVE: Final = "CURVE"

# ---------------------------------------------------------------------------------------- header

FLAGS_OFFSET: Final = 0
SIZE_OFFSET: Final = 1
SHORT_SIZE_SIZE: Final = 1
LONG_SIZE_SIZE: Final = 8
SHORT_HEADER_SIZE: Final = SIZE_OFFSET + SHORT_SIZE_SIZE
LONG_HEADER_SIZE: Final = SIZE_OFFSET + LONG_SIZE_SIZE
MAX_SHORT_SIZE: Final = 0xFF

# ----------------------------------------------------------------------------------------- flags

FLAG_MORE: Final = 1
FLAG_LONG: Final = 2
FLAG_COMMAND: Final = 4

LAST_MESSAGE_FLAGS: Final = FLAG_MORE | FLAG_LONG
"""Flags above this are a command's, or are not defined."""
LAST_FLAGS: Final = FLAG_COMMAND | FLAG_LONG

# -------------------------------------------------------------------------------------- commands

NAME_LENGTH_SIZE: Final = 1

COMMAND_READY: Final = "READY"
COMMAND_ERROR: Final = "ERROR"
COMMAND_PING: Final = "PING"
COMMAND_PONG: Final = "PONG"
COMMAND_SUBSCRIBE: Final = "SUBSCRIBE"
COMMAND_CANCEL: Final = "CANCEL"
COMMAND_HELLO: Final = "HELLO"
COMMAND_WELCOME: Final = "WELCOME"
COMMAND_INITIATE: Final = "INITIATE"
COMMAND_MESSAGE: Final = "MESSAGE"

HANDSHAKE_COMMANDS: Final = (COMMAND_READY, COMMAND_HELLO, COMMAND_WELCOME, COMMAND_INITIATE)
METADATA_COMMANDS: Final = (COMMAND_READY, COMMAND_INITIATE)
"""The last handshake command of a direction: its metadata names the type of the socket."""

MISSPELLED_ERROR: Final = b"^RROR"
"""libzmq 4.3's PLAIN mechanism sends this instead of the name's length and ERROR (observed)."""

PROPERTY_NAME_LENGTH_SIZE: Final = 1
PROPERTY_VALUE_LENGTH_SIZE: Final = 4
PROPERTY_SOCKET_TYPE: Final = "Socket-Type"
PROPERTY_IDENTITY: Final = "Identity"
MAX_IDENTITY_SIZE: Final = 0xFF

REASON_LENGTH_SIZE: Final = 1
MAX_REASON_SIZE: Final = 0xFF

PING_TTL_SIZE: Final = 2
PING_TTL_PER_SECOND: Final = 10
MAX_PING_TTL_S: Final = 0xFFFF / PING_TTL_PER_SECOND
MAX_PING_CONTEXT_SIZE: Final = 16

CREDENTIAL_LENGTH_SIZE: Final = 1
MAX_CREDENTIAL_SIZE: Final = 0xFF
"""Of PLAIN's HELLO: a name and a password."""

# Before ZMTP 3.1 a subscription was a message of one part: this byte and the topic.
SUBSCRIPTION_CANCEL: Final = 0
SUBSCRIPTION_SUBSCRIBE: Final = 1

# ---------------------------------------------------------------------------------------- sockets

SILENT_SOCKETS: Final = ("SUB", "XSUB")
"""Sockets that send subscriptions and no messages of an application."""
PUBLISHING_SOCKETS: Final = ("PUB", "XPUB")

# ----------------------------------------------------------------------------------------- CURVE

KEY_SIZE: Final = 32
SEAL_SIZE: Final = 16
"""What a box has more than its content: Poly1305's authenticator."""
SHORT_NONCE_SIZE: Final = 8
"""A number that only grows, after a purpose of 16 bytes."""
LONG_NONCE_SIZE: Final = 16
"""Random bytes, after a purpose of 8 bytes."""

# A nonce of 24 bytes is a purpose and one of these: no kind of box can pass for another kind.
PURPOSE_HELLO: Final = b"CurveZMQHELLO---"
PURPOSE_WELCOME: Final = b"WELCOME-"
PURPOSE_VOUCH: Final = b"VOUCH---"
PURPOSE_INITIATE: Final = b"CurveZMQINITIATE"
PURPOSE_READY: Final = b"CurveZMQREADY---"
PURPOSE_CLIENT_MESSAGE: Final = b"CurveZMQMESSAGEC"
PURPOSE_SERVER_MESSAGE: Final = b"CurveZMQMESSAGES"

CURVE_VERSION: Final = b"\x01\x00"
HELLO_ZEROS_SIZE: Final = 72
HELLO_PROOF_SIZE: Final = 64
HELLO_KEY_OFFSET: Final = len(CURVE_VERSION) + HELLO_ZEROS_SIZE
HELLO_NONCE_OFFSET: Final = HELLO_KEY_OFFSET + KEY_SIZE
HELLO_BOX_OFFSET: Final = HELLO_NONCE_OFFSET + SHORT_NONCE_SIZE
HELLO_SIZE: Final = HELLO_BOX_OFFSET + SEAL_SIZE + HELLO_PROOF_SIZE

COOKIE_SIZE: Final = 96
WELCOME_BOX_OFFSET: Final = LONG_NONCE_SIZE
WELCOME_SIZE: Final = WELCOME_BOX_OFFSET + SEAL_SIZE + KEY_SIZE + COOKIE_SIZE

VOUCH_SIZE: Final = LONG_NONCE_SIZE + SEAL_SIZE + 2 * KEY_SIZE
INITIATE_NONCE_OFFSET: Final = COOKIE_SIZE
INITIATE_BOX_OFFSET: Final = INITIATE_NONCE_OFFSET + SHORT_NONCE_SIZE

READY_BOX_OFFSET: Final = SHORT_NONCE_SIZE

SEALED_PREFIX: Final = bytes((len(COMMAND_MESSAGE),)) + COMMAND_MESSAGE.encode()
SEALED_FLAGS_SIZE: Final = 1
SEALED_OVERHEAD: Final = len(SEALED_PREFIX) + SHORT_NONCE_SIZE + SEAL_SIZE + SEALED_FLAGS_SIZE
"""What CURVE adds to a part: also the size of the least sealed frame's body."""
SEALED_FLAG_MORE: Final = 1
SEALED_FLAG_COMMAND: Final = 2

# --------------------------------------------------------------------------------------- structs

LONG_HEADER_STRUCT: Final = Struct(">BQ")
"""flags, size: of a frame with LONG"""
