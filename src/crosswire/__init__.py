"""Crosswire: a message hub for EMP, eMQP, Relink, Bond Epoxy and MicroMsg2.

    async with crosswire.connect("emp://127.0.0.1") as hub:
        await hub.publish("queue/orders", {"item": "tea"})

`connect` and `connect_sync` are for programs that use a hub; the errors that they raise are here as
well, and all others are in `crosswire.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosswire.client import (
        Client,
        ClientSubscription,
        Message,
        OutgoingMessage,
        ProvidedService,
        SyncClient,
        connect,
        connect_sync,
    )
    from crosswire.errors import (
        BadRequest,
        ClientError,
        ConnectFailed,
        ConnectionLost,
        CrosswireError,
        DeliveryLost,
        DestinationFull,
        Forbidden,
        HandshakeFailed,
        HubError,
        NoProvider,
        ProviderFailed,
        ProviderLost,
        RequestTimeout,
        SubscriptionConflict,
        TlsFailed,
        Unsupported,
        WrongProtocol,
    )

__version__ = "0.1.0"

__all__ = [
    "BadRequest",
    "Client",
    "ClientError",
    "ClientSubscription",
    "ConnectFailed",
    "ConnectionLost",
    "CrosswireError",
    "DeliveryLost",
    "DestinationFull",
    "Forbidden",
    "HandshakeFailed",
    "HubError",
    "Message",
    "NoProvider",
    "OutgoingMessage",
    "ProvidedService",
    "ProviderFailed",
    "ProviderLost",
    "RequestTimeout",
    "SubscriptionConflict",
    "SyncClient",
    "TlsFailed",
    "Unsupported",
    "WrongProtocol",
    "__version__",
    "connect",
    "connect_sync",
]

_OF_THE_CLIENT = frozenset(
    {
        "Client",
        "Message",
        "OutgoingMessage",
        "ProvidedService",
        "ClientSubscription",
        "SyncClient",
        "connect",
        "connect_sync",
    }
)


def __getattr__(name: str) -> Any:
    # On first use: a Spark worker or a hub that imports a part of the package needs no client.
    if name not in __all__:
        raise AttributeError(f"module 'crosswire' has no attribute {name!r}")
    module = "crosswire.client" if name in _OF_THE_CLIENT else "crosswire.errors"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
