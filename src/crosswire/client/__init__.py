"""The client library: `connect` for all five protocols; `native` for what only one of them has."""

from crosswire.client.client import CallHandler, Client, ClientSubscription, ProvidedService
from crosswire.client.connect import connect
from crosswire.client.message import Message, OutgoingMessage
from crosswire.client.native.dial import Backoff
from crosswire.client.sync import SyncClient, SyncMessage, SyncSubscription, connect_sync

__all__ = [
    "Backoff",
    "CallHandler",
    "Client",
    "ClientSubscription",
    "Message",
    "OutgoingMessage",
    "ProvidedService",
    "SyncClient",
    "SyncMessage",
    "SyncSubscription",
    "connect",
    "connect_sync",
]
