"""Which protocol do these first bytes speak?"""

from __future__ import annotations

from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Sniff

__all__ = ["sniff"]


def sniff(data: bytes) -> str | None:
    """Name of the protocol whose first bytes, from either side, these are; None if unsure.

    Unsure is also the answer while another protocol could still turn out to be the one.
    """
    hints = {name: protocol(name).sniff(data) for name in PROTOCOL_NAMES}
    sure = [name for name, answer in hints.items() if answer is Sniff.YES]
    undecided = [name for name, answer in hints.items() if answer is Sniff.MORE]
    return sure[0] if len(sure) == 1 and not undecided else None
