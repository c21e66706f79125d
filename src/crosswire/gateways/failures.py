"""What went wrong, in the words that all protocols have for it.

An answer that is a failure says so in its properties, in protocols that have no other way: `error`
is the code, `description` the words, and the payload is what the provider gave along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from crosswire.envelope import Property
from crosswire.errors import (
    CallError,
    CrosswireError,
    DestinationFull,
    Forbidden,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidSchedule,
    ProviderFailed,
    StoreFull,
    SubscriptionConflict,
    UnknownMessage,
)

__all__ = ["code_of", "read_failure", "to_failure"]

_ERROR: Final = "error"
_DESCRIPTION: Final = "description"
_DESCRIPTION_CHARACTERS: Final = 1000

_INVALID: Final = (
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidSchedule,
    UnknownMessage,
)


def code_of(error: CrosswireError) -> str:
    """The failure code for an error of the hub; a provider's own for a failure of its."""
    if isinstance(error, CallError):
        return error.code or "failed"
    if isinstance(error, DestinationFull | StoreFull):
        return "refused"
    if isinstance(error, Forbidden):
        return "forbidden"
    if isinstance(error, SubscriptionConflict):
        return "conflict"
    return "invalid_request" if isinstance(error, _INVALID) else "internal"


def to_failure(error: CrosswireError) -> tuple[bytes, dict[str, Property]]:
    """Payload and properties of an answer that tells what went wrong."""
    payload, description = b"", str(error)
    if isinstance(error, ProviderFailed):
        payload, description = error.data, error.description
    properties: dict[str, Property] = {
        _ERROR: code_of(error),
        _DESCRIPTION: description[:_DESCRIPTION_CHARACTERS],
    }
    return payload, properties


def read_failure(payload: bytes, properties: Mapping[str, Property]) -> ProviderFailed | None:
    """What a provider says that went wrong, if its answer is a failure."""
    code = properties.get(_ERROR)
    if code is None:
        return None
    return ProviderFailed(str(code), str(properties.get(_DESCRIPTION, "")), data=payload)
