"""Relink's layout on the wire: every code, size and offset, stated once.

The handshake, in which the peers take turns (specification 1; numbers are little-endian):

    connector     version 1 · padding 7
    listener      version 1 · padding 7
    connector     name length 1 · name · connector's id size 1 · listener's id size 1 · flags 1
                  · padding to 8, counted from the name's length · epoch 8 · link 8
    listener      epoch 8 · link 8

All that follows are packets (specification 2), each padded to a multiple of 8 bytes, so that a
stream of them stays aligned:

    head          1   channel 1, multicast 2, format in bits 2–4, data in bits 5–7
    parts         1   of a short message, else unused
    channel id    …   of the id size that the handshake agreed on; or, in a multicast:
                      unused 2 · count 4 · that many ids
    by format     …   channel operation, channel acknowledgement:    nothing
                      sequence operation, sequence acknowledgement:  sequence 4, aligned to 4
                      message, aligned to 2:  parts 4, if the flag `long` is set
                                              · size 2 of each part, or 8 each and aligned to 8, if
                                                the flag `large` is set
                                              · data, aligned to 8, each part padded to 8

A packet without the channel bit is a general one, 8 bytes long, whose data bits are its type. In
the other packets they are an operation, an acknowledgement or a message's flags.

Unused bits and padding are sent as zero and ignored; an undefined enumeration value is refused.
Offsets count from the first byte of the packet or of the peer's turn in the handshake.
"""

from __future__ import annotations

from functools import cache
from struct import Struct
from typing import Final

# ------------------------------------------------------------------------------------- handshake

VERSION: Final = 0

VERSION_OFFSET: Final = 0
VERSION_SIZE: Final = 8
"""The version and its padding."""

ENDPOINT_LENGTH_OFFSET: Final = 0
ENDPOINT_OFFSET: Final = 1
CONNECTOR_ID_SIZE_OFFSET: Final = 0
"""This and the next two count from the end of the endpoint's name."""
LISTENER_ID_SIZE_OFFSET: Final = 1
HELLO_FLAGS_OFFSET: Final = 2
HELLO_FIELDS_SIZE: Final = 3
MAX_ID_SIZE: Final = 8

EPOCH_SIZE: Final = 8
LINK_SIZE: Final = 8
LINK_OFFSET: Final = EPOCH_SIZE
"""From the start of the epoch."""
LISTENER_HELLO_SIZE: Final = EPOCH_SIZE + LINK_SIZE
MAX_LINK: Final = (1 << 63) - 1

HELLO_FLAG_CONNECTOR_TRANSACTIONS: Final = 1
HELLO_FLAG_LISTENER_TRANSACTIONS: Final = 2
HELLO_FLAG_REQUIRE_OLD_LINK: Final = 4

# ---------------------------------------------------------------------------------------- header

ALIGNMENT: Final = 8
"""Of packets, of a message's data, of each of its parts, and of the connector's epoch."""
MIN_PACKET_SIZE: Final = ALIGNMENT

HEAD_OFFSET: Final = 0
PARTS_OFFSET: Final = 1
ID_OFFSET: Final = 2
HEADER_SIZE: Final = ID_OFFSET
MULTICAST_COUNT_OFFSET: Final = 4
MULTICAST_COUNT_SIZE: Final = 4
MULTICAST_ID_OFFSET: Final = MULTICAST_COUNT_OFFSET + MULTICAST_COUNT_SIZE

FLAG_CHANNEL: Final = 1
FLAG_MULTICAST: Final = 2
FORMAT_SHIFT: Final = 2
FORMAT_MASK: Final = 7
"""After the shift."""
DATA_SHIFT: Final = 5

# ----------------------------------------------------------------------------- types and formats

TYPE_NOP: Final = 0
TYPE_PING: Final = 1
TYPE_PONG: Final = 2
TYPE_RESUME: Final = 3
TYPE_SHUTDOWN: Final = 4

LAST_TYPE: Final = TYPE_SHUTDOWN

FORMAT_CHANNEL_OPERATION: Final = 0
FORMAT_CHANNEL_ACKNOWLEDGEMENT: Final = 1
FORMAT_SEQUENCE_OPERATION: Final = 2
FORMAT_SEQUENCE_ACKNOWLEDGEMENT: Final = 3
FORMAT_MESSAGE: Final = 4

FIRST_SEQUENCE_FORMAT: Final = FORMAT_SEQUENCE_OPERATION
"""Of the formats below a message's, those from here on have a sequence number."""
LAST_FORMAT: Final = FORMAT_MESSAGE

# -------------------------------------------------------------- operations and acknowledgements

OPERATION_COMMIT: Final = 0
OPERATION_ROLLBACK: Final = 1
OPERATION_CLOSE: Final = 2

LAST_CHANNEL_OPERATION: Final = OPERATION_CLOSE
LAST_SEQUENCE_OPERATION: Final = OPERATION_ROLLBACK
"""A channel is closed as a whole: there is no number to it."""

ACKNOWLEDGEMENT_RECEIVED: Final = 0
ACKNOWLEDGEMENT_CONSUMED: Final = 1
ACKNOWLEDGEMENT_COMMITTED: Final = 2
ACKNOWLEDGEMENT_UNCOMMITTED: Final = 3
ACKNOWLEDGEMENT_CLOSED: Final = 4

LAST_CHANNEL_ACKNOWLEDGEMENT: Final = ACKNOWLEDGEMENT_CLOSED
LAST_SEQUENCE_ACKNOWLEDGEMENT: Final = ACKNOWLEDGEMENT_UNCOMMITTED

SEQUENCE_SIZE: Final = 4
SEQUENCE_ALIGNMENT: Final = 4
SEQUENCES: Final = 1 << 32
"""How many there are: the last one is followed by 0 (specification 3.1)."""

# -------------------------------------------------------------------------------------- messages

FLAG_LONG: Final = 1
FLAG_LARGE: Final = 2
FLAG_UNUSED: Final = 4

SIZES_ALIGNMENT: Final = 2
LONG_PARTS_SIZE: Final = 4
SMALL_SIZE_SIZE: Final = 2
LARGE_SIZE_SIZE: Final = 8
"""Sizes of this kind are aligned to it, too."""

MAX_SHORT_PARTS: Final = 0xFF
"""The most parts of a message without the flag `long`."""
MAX_SMALL_SIZE: Final = 0xFFFF
"""The largest part of a message without the flag `large`."""

SHORT_SMALL_HEAD: Final = FLAG_CHANNEL | FORMAT_MESSAGE << FORMAT_SHIFT
"""The first byte of a message to one channel with neither flag: of nearly every packet."""

# --------------------------------------------------------------------------------------- structs

VERSION_STRUCT: Final = Struct("<B7x")
"""version"""
LINK_STRUCT: Final = Struct("<QQ")
"""epoch, link"""
GENERAL_STRUCT: Final = Struct("<B7x")
"""head: the whole of a general packet"""
U32_STRUCT: Final = Struct("<I")
"""count of a multicast's ids, sequence number, parts of a long message"""


# ------------------------------------------------------------------ what the handshake decides


def align(position: int, boundary: int) -> int:
    """`position`, or the first multiple of `boundary` after it."""
    return (position + boundary - 1) & -boundary


class PacketLayout:
    """Where the fields of one direction's packets are, given the sizes of channel ids.

    Operations and messages name the sender's channels, acknowledgements the receiver's
    (specification 2.1), and each peer chose a size for the ids of its channels. Packets don't
    repeat it.
    """

    __slots__ = ("data_of_one", "data_of_two", "id_sizes", "quick", "second_size_at")

    def __init__(self, sender_id_size: int, receiver_id_size: int) -> None:
        sizes = (sender_id_size, receiver_id_size)
        self.id_sizes = (*sizes, *sizes, sender_id_size)  # by packet format
        # Head, parts, channel and first size of a short, small, unicast message, where `struct`
        # knows integers of the id's size.
        native = {0: "0s", 1: "Bx", 2: "H", 4: "I", 8: "Q"}.get(sender_id_size)
        self.quick = None if native is None else Struct(f"<BB{native}H")
        sizes_at = align(ID_OFFSET + sender_id_size, SIZES_ALIGNMENT)
        self.second_size_at = sizes_at + SMALL_SIZE_SIZE
        self.data_of_one = align(sizes_at + SMALL_SIZE_SIZE, ALIGNMENT)
        self.data_of_two = align(sizes_at + 2 * SMALL_SIZE_SIZE, ALIGNMENT)


@cache
def packet_layout(sender: str, connector_id_size: int, listener_id_size: int) -> PacketLayout:
    """The layout of what `sender` ("connector" or "listener") sends."""
    if sender == "connector":
        return PacketLayout(connector_id_size, listener_id_size)
    return PacketLayout(listener_id_size, connector_id_size)
