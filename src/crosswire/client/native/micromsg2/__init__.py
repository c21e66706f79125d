"""MicroMsg2 for asyncio programs: send, subscribe, call and serve."""

from crosswire.client.native.micromsg2.client import (
    MicroMsg2Client,
    MicroMsg2Delivery,
    MicroMsg2Peer,
    MicroMsg2Subscription,
    Responder,
    client_offer,
)

__all__ = [
    "MicroMsg2Client",
    "MicroMsg2Delivery",
    "MicroMsg2Peer",
    "MicroMsg2Subscription",
    "Responder",
    "client_offer",
]
