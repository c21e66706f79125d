"""The clauses of Relink's specification that violations break, by their reasons."""

from __future__ import annotations

from typing import Final

from crosswire.wire.clauses import ClauseTable, is_a

__all__ = ["CLAUSES"]

_HANDSHAKE: Final = "Relink 1, Handshake"
_MESSAGING: Final = "Relink 3.1, Messaging"
_TRANSACTIONS: Final = "Relink 3.2, Transactional messaging"
_CLOSURE: Final = "Relink 3.3, Channel closure"
_SHUTDOWN: Final = "Relink 3.6, Link shutdown"

CLAUSES: Final[ClauseTable] = (
    (r"general packet type \d+ is not defined", "Relink 2.2, General packet format"),
    (r"packet format \d+ is not defined", "Relink 2.1, Packet header"),
    (
        r"sequence-\w+ type \d+ is not defined",
        "Relink 2.3.2, Sequence operation and acknowledgement",
    ),
    (r"\S+ type \d+ is not defined", "Relink 2.3.1, Channel operation and acknowledgement"),
    (r"\d+ parts, more than", is_a("relink.parts")),
    (r"\d+ channels, more than", is_a("relink.targets")),
    (r"a packet of \d+ bytes, more than", is_a("relink.frame_bytes")),
    (r"channel ids of \d+ and \d+ bytes", _HANDSHAKE),
    (r"link id \d+ is not below|the endpoint's name is not UTF-8", _HANDSHAKE),
    (r"a new link was offered|no link id|version \d+ was answered", _HANDSHAKE),
    (r"unexpected \S+ in state (version|hello|answer)", _HANDSHAKE),
    (r"unexpected \S+ in state", "Relink 3.5, Reconnection"),
    (r"no handshake in time", is_a("relink.handshake_s")),
    (r"no pong in time", "Relink 3.4, Health check"),
    (r"a second shutdown|channel \S+ was opened after the shutdown", _SHUTDOWN),
    (r"closed for a channel|closed before the outcome|a message on a channel that is", _CLOSURE),
    (r"an outcome (for|after)|\S+ without transactions", _TRANSACTIONS),
    (r"\S+ on channel \S+, which (is not open|was never opened)", _MESSAGING),
    (r"\S+ for a message that was never sent|an operation on a message", _MESSAGING),
    (r"sequence number \S+ is exactly 2\^31 away", _MESSAGING),
    (r"more reports of channel", "Relink 3.5, Reconnection"),
    (r"more than \d+ unconsumed messages", is_a("relink.window")),
    (r"more than \d+ channels", is_a("relink.channels")),
    (r"more than \d+ bytes in undecided|a multicast of \d+ bytes", is_a("relink.unconsumed_bytes")),
)
