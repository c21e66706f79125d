"""Relink for asyncio programs: channels that survive the loss of their connection."""

from crosswire.client.native.relink.client import (
    Received,
    Receiver,
    RelinkClient,
    Sender,
    Transaction,
)

__all__ = [
    "Received",
    "Receiver",
    "RelinkClient",
    "Sender",
    "Transaction",
]
