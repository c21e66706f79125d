"""Epoxy for asyncio programs: call Bond services, offer them, send and receive events."""

from crosswire.client.native.epoxy.client import EpoxyClient
from crosswire.client.native.epoxy.peer import CallReply, EpoxyPeer, Handler, Handlers, IncomingCall
from crosswire.client.native.epoxy.server import EpoxyServer
from crosswire.client.native.epoxy.services import offer

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
