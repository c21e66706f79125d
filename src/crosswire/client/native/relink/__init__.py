"""Relink for asyncio programs: channels that survive the loss of their connection."""

from crosswire.client.native.relink.channels import Received, Receiver, Sender, Transaction
from crosswire.client.native.relink.client import RelinkClient

__all__ = [
    "Received",
    "Receiver",
    "RelinkClient",
    "Sender",
    "Transaction",
]
