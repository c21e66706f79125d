"""Recognizes a protocol by the first bytes of a connection."""

from __future__ import annotations

from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Sniff

__all__ = ["sniff"]


def sniff(data: bytes) -> str | None:
    """Name of the protocol whose first bytes, from either side, these are.

    None if no protocol matches, or while more than one still may.
    """
    hints = {name: protocol(name).sniff(data) for name in PROTOCOL_NAMES}
    sure = [name for name, answer in hints.items() if answer is Sniff.YES]
    undecided = [name for name, answer in hints.items() if answer is Sniff.MORE]
    return sure[0] if len(sure) == 1 and not undecided else None
