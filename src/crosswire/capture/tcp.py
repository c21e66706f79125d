"""TCP: flags, sizes and the space of sequence numbers."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ACK",
    "ACKNOWLEDGEMENT_AT",
    "FIN",
    "FLAGS",
    "FLAGS_AT",
    "HEADER_BYTES",
    "RST",
    "SEQUENCE_AT",
    "SEQUENCE_SPACE",
    "SIZE_AT",
    "SYN",
]

FIN: Final = 1
"""The sender has no more bytes."""
SYN: Final = 2
"""Opens a connection: the first byte's sequence number is one more than this segment's."""
RST: Final = 4
"""Aborts the connection."""
ACK: Final = 16
"""The acknowledgement number counts: the sender has everything before it."""
FLAGS: Final = 31
"""The flags above and PSH, which means nothing to a reader; the rest of the byte is left out."""

HEADER_BYTES: Final = 20
"""Without options."""
SEQUENCE_AT: Final = 4
ACKNOWLEDGEMENT_AT: Final = 8
SIZE_AT: Final = 12
"""The upper four bits are the header's size in units of 4 bytes."""
FLAGS_AT: Final = 13
SEQUENCE_SPACE: Final = 1 << 32
"""Sequence numbers are 32 bits and wrap around to 0, in a fast connection every few seconds."""
