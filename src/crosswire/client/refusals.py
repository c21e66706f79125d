"""Failures that a hub answers with, as the exceptions that they are in the hub."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from crosswire.errors import (
    BadRequest,
    CallFailed,
    ConnectionLost,
    CrosswireError,
    DestinationFull,
    Forbidden,
    HubError,
    NoProvider,
    ProviderFailed,
    ProviderLost,
    RequestFailed,
    RequestTimeout,
    SubscriptionConflict,
)

__all__ = ["called", "performed", "refusal_of"]

T = TypeVar("T")

_ERRORS: Final[dict[str, type[CrosswireError]]] = {
    "conflict": SubscriptionConflict,
    "extension": BadRequest,
    "forbidden": Forbidden,
    "invalid_request": BadRequest,
    "limit": DestinationFull,
    "malformed": BadRequest,
    "provider_lost": ProviderLost,
    "refused": DestinationFull,
    "timeout": RequestTimeout,
    "uncommitted": DestinationFull,
    "unknown-destination": BadRequest,
    "unknown_op": NoProvider,
    # Bond's names.
    "connection-shut-down": ProviderLost,
    "method-not-found": NoProvider,
    "timeout-error": RequestTimeout,
    "transport-error": DestinationFull,
}
"""By the code of a failure, in whichever protocol."""


def refusal_of(failed: RequestFailed, *, of_call: bool = False) -> CrosswireError:
    """The hub's error that a failure stands for; any other of a call is the provider's own."""
    code, description = failed.code, failed.description
    if isinstance(failed, CallFailed) and code == "invalid-invocation":
        # Bond has one code for these: the hub's text begins with its own.
        code, _, rest = description.partition(": ")
        description = rest if code in _ERRORS else description
    kind = _ERRORS.get(code)
    if kind is not None:
        return kind(description or code)
    if of_call:
        return ProviderFailed(failed.code, failed.description, data=failed.data)
    return HubError(str(failed))


async def performed(work: Awaitable[T]) -> T:
    """The result of an operation of the hub. Raises its errors, and ClientError."""
    try:
        return await work
    except RequestFailed as failed:
        raise refusal_of(failed) from None
    except ConnectionLost as lost:
        # A client that reconnects no more was refused: that is the reason, not the connection.
        if isinstance(lost.__cause__, RequestFailed):
            raise refusal_of(lost.__cause__) from None
        raise


async def called(work: Awaitable[T]) -> T:
    """The result of a call. Raises NoProvider, ProviderLost, ProviderFailed and the like."""
    try:
        return await work
    except RequestFailed as failed:
        raise refusal_of(failed, of_call=True) from None
