"""The layout of keys: a letter for the kind, then fixed-width big-endian numbers, which sort alike.

m  destination number (4 bytes), id (8)   a message
s  space, "/", key                        a value of a state space
l  number of the first row (8)            a block of the ledger
g  number (8)                             a commit group
d  name                                   a destination's number
!  name                                   one of the store's own values; those under "!local/" are
                                          no other replica's
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct as Layout
from typing import Final

__all__ = [
    "GROUPS",
    "LOCAL",
    "MAX_ID",
    "ROWS",
    "group_key",
    "message_key",
    "prefix_end",
    "row_key",
    "state_key",
]

MAX_ID: Final = (1 << 63) - 1
ROWS: Final = (b"l", b"m")
"""The range of all blocks of the ledger."""
GROUPS: Final = (b"g", b"h")
"""The range of all commit groups."""
LOCAL: Final = (b"!local/", b"!local0")
"""The range of what belongs to one replica alone."""

message_key: Final[Callable[[int, int], bytes]] = partial(Layout(">cIQ").pack, b"m")
"""Of a destination's number and an id."""
row_key: Final[Callable[[int], bytes]] = partial(Layout(">cQ").pack, b"l")
group_key: Final[Callable[[int], bytes]] = partial(Layout(">cQ").pack, b"g")


def state_key(space: str, key: bytes) -> bytes:
    """Where a value of a state space is."""
    return b"s" + space.encode() + b"/" + key


def prefix_end(prefix: bytes) -> bytes:
    """The first key that does not start with `prefix`."""
    return (int.from_bytes(prefix) + 1).to_bytes(len(prefix))
