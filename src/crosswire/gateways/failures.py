"""Failure codes that all protocols have in common, and failures as properties of an answer.

Protocols without failures of their own mark an answer as one by properties: `error` is the code,
`description` the text, and the payload is the data that the provider added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from crosswire.envelope import Property
from crosswire.error_texts import public_text
from crosswire.errors import (
    BadRequest,
    CallError,
    CrosswireError,
    DestinationFull,
    Forbidden,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidSchedule,
    ProviderFailed,
    StoreError,
    StoreFull,
    SubscriptionConflict,
    UnknownMessage,
)
from crosswire.gateways.properties import DESCRIPTION, ERROR

__all__ = ["code_of", "for_peers", "read_failure", "to_failure"]

_DESCRIPTION_CHARACTERS: Final = 1000

_INVALID: Final = (
    BadRequest,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidSchedule,
    UnknownMessage,
)


def code_of(error: CrosswireError) -> str:
    """The code of an error of the hub; for a provider's failure the provider's own code."""
    if isinstance(error, CallError):
        return error.code or "failed"
    if isinstance(error, DestinationFull | StoreFull):
        return "refused"
    if isinstance(error, Forbidden):
        return "forbidden"
    if isinstance(error, SubscriptionConflict):
        return "conflict"
    return "invalid_request" if isinstance(error, _INVALID) else "internal"


def for_peers(error: CrosswireError) -> CrosswireError:
    """The error that a peer's connection ends with, without what only operators may see."""
    return type(error)(public_text(error)) if isinstance(error, StoreError) else error


def to_failure(error: CrosswireError) -> tuple[bytes, dict[str, Property]]:
    """Payload and properties of an answer that is this failure."""
    payload, description = b"", public_text(error)
    if isinstance(error, ProviderFailed):
        payload, description = error.data, error.description
    properties: dict[str, Property] = {
        ERROR: code_of(error),
        DESCRIPTION: description[:_DESCRIPTION_CHARACTERS],
    }
    return payload, properties


def read_failure(payload: bytes, properties: Mapping[str, Property]) -> ProviderFailed | None:
    """The failure that a provider answered with; None if its answer is a success."""
    code = properties.get(ERROR)
    if code is None:
        return None
    return ProviderFailed(str(code), str(properties.get(DESCRIPTION, "")), data=payload)
