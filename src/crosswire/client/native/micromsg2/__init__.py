"""MicroMsg2 for asyncio programs: send, subscribe, call and serve."""

from crosswire.client.native.micromsg2.client import MicroMsg2Client, Responder, client_offer
from crosswire.client.native.micromsg2.peer import MicroMsg2Delivery, MicroMsg2Peer
from crosswire.client.native.micromsg2.subscription import MicroMsg2Subscription

__all__ = [
    "MicroMsg2Client",
    "MicroMsg2Delivery",
    "MicroMsg2Peer",
    "MicroMsg2Subscription",
    "Responder",
    "client_offer",
]
