"""Epoxy for asyncio programs: call Bond services, offer them, send and receive events."""

from crosswire.client.native.epoxy.client import (
    CallReply,
    EpoxyClient,
    EpoxyPeer,
    EpoxyServer,
    Handler,
    Handlers,
    IncomingCall,
    offer,
)

__all__ = [
    "CallReply",
    "EpoxyClient",
    "EpoxyPeer",
    "EpoxyServer",
    "Handler",
    "Handlers",
    "IncomingCall",
    "offer",
]
