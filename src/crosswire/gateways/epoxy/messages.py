"""The structs of `crosswire.Hub` and `crosswire.Subscriber`, properties and errors, in Bond."""

from __future__ import annotations

import re
from typing import Any, Final

from crosswire.bond import hub_module, marshal
from crosswire.bond.schema import DecodeLimits, StructDef
from crosswire.envelope import PROPERTIES, Property, check_properties
from crosswire.error_texts import public_text
from crosswire.errors import BondError, CrosswireError, InvalidEnvelope, ProviderFailed
from crosswire.gateways import failures
from crosswire.hub.attachment import Delivery
from crosswire.wire.epoxy.comm import ErrorCode, unmarshal_error

__all__ = [
    "EXTENDED",
    "EXTENSION",
    "NOTHING",
    "PUBLICATION",
    "PUBLISHED",
    "REQUEST_LIMITS",
    "SERVED_AT_ONCE",
    "SERVICES",
    "SETTLED",
    "SETTLEMENT",
    "SETTLE_LIMITS",
    "SUBSCRIBED",
    "SUBSCRIPTION",
    "code_of",
    "encode_delivery",
    "failure_of",
    "from_values",
    "is_error",
    "text_of",
]


def _struct(name: str) -> StructDef:
    return hub_module().struct(f"crosswire.{name}")


PUBLICATION: Final = _struct("Publication")
PUBLISHED: Final = _struct("Published")
SUBSCRIPTION: Final = _struct("Subscription")
SUBSCRIBED: Final = _struct("Subscribed")
_DELIVERY: Final = _struct("Delivery")
SETTLEMENT: Final = _struct("Settlement")
SETTLED: Final = _struct("Settled")
SERVICES: Final = _struct("Services")
EXTENSION: Final = _struct("Extension")
EXTENDED: Final = _struct("Extended")

REQUEST_LIMITS: Final = DecodeLimits(values=32 * PROPERTIES)
"""For the requests of `crosswire.Hub`: enough for as many properties as a message may have."""
_SETTLED_AT_ONCE: Final = 10_000
SETTLE_LIMITS: Final = DecodeLimits(values=_SETTLED_AT_ONCE + 64)
"""For `Settle` and `Extend`: as many ids as can be read and settled in one turn."""
SERVED_AT_ONCE: Final = 1000
"""How many names one `Serve` may have."""

_Delivery: Final = _DELIVERY.python_class
_Value: Final = _struct("Value").python_class
NOTHING: Final = marshal.marshal(_struct("Nothing").python_class(), _struct("Nothing"))


# ------------------------------------------------------------------------------------ properties


def from_values(values: dict[str, Any]) -> dict[str, Property]:
    """The properties of a message. Raises InvalidEnvelope for one without exactly one value."""
    properties: dict[str, Property] = {}
    for name, value in values.items():
        members = (value.text, value.integer, value.real, value.truth)
        given = [member for member in members if member is not None]
        if len(given) != 1:
            raise InvalidEnvelope(f"property {name!r} needs exactly 1 value, not {len(given)}")
        properties[name] = given[0]
    return check_properties(properties)


def _to_values(properties: dict[str, Property]) -> dict[str, Any]:
    return {name: _to_value(value) for name, value in properties.items()}


def _to_value(value: Property) -> Any:
    if isinstance(value, bool):
        return _Value(truth=value)
    if isinstance(value, int):
        # An integer that int64 can't hold is written as text: its digits matter more than its type.
        fits = -(2**63) <= value < 2**63
        return _Value(integer=value) if fits else _Value(text=str(value))
    return _Value(real=value) if isinstance(value, float) else _Value(text=value)


def encode_delivery(number: int, delivery: Delivery) -> bytes:
    """A delivery for the subscription with this number, marshalled. Raises BondError."""
    envelope = delivery.envelope
    properties = envelope.properties
    return marshal.marshal(
        _Delivery(
            subscription=number,
            id=envelope.id,
            destination=envelope.destination,
            payload=envelope.payload,
            content_type=envelope.content_type,
            properties=_to_values(properties) if properties else {},
            attempt=delivery.attempt,
        ),
        _DELIVERY,
    )


# ---------------------------------------------------------------------------------------- errors

_CODES: Final = {
    "unknown_op": ErrorCode.METHOD_NOT_FOUND,
    "timeout": ErrorCode.TIMEOUT_ERROR,
    "provider_lost": ErrorCode.CONNECTION_SHUT_DOWN,
    "refused": ErrorCode.TRANSPORT_ERROR,
    "forbidden": ErrorCode.INVALID_INVOCATION,
    "conflict": ErrorCode.INVALID_INVOCATION,
    "invalid_request": ErrorCode.INVALID_INVOCATION,
}
"""Bond's code for each failure of the hub; any other is an internal error."""

_NAMES: Final = {
    ErrorCode.METHOD_NOT_FOUND: "unknown_op",
    ErrorCode.TIMEOUT_ERROR: "timeout",
    ErrorCode.CONNECTION_SHUT_DOWN: "provider_lost",
    ErrorCode.INTERNAL_SERVER_ERROR: "internal",
}
"""The names that other protocols have for providers' errors; any other is its number as text."""

_NUMBERS: Final = {name: code for code, name in _NAMES.items()}


def text_of(error: CrosswireError) -> str:
    """The `message` of an answer that reports this error.

    Bond has one code for several refusals of the hub, so their text begins with the hub's own.
    """
    name, text = failures.code_of(error), public_text(error)
    return f"{name}: {text}" if _CODES.get(name) is ErrorCode.INVALID_INVOCATION else text


def code_of(error: CrosswireError) -> int:
    """The `error_code` of an answer that reports this error."""
    if isinstance(error, ProviderFailed):
        return _NUMBERS.get(error.code) or _number(error.code)
    if isinstance(error, InvalidEnvelope):
        # A payload that can't be read is an InternalServerError in Bond.
        return ErrorCode.INTERNAL_SERVER_ERROR
    return _CODES.get(failures.code_of(error), ErrorCode.INTERNAL_SERVER_ERROR)


def _number(code: str) -> int:
    """The code of an application, if it is a number of 32 bits."""
    if re.fullmatch(r"-?[0-9]{1,10}", code) and -(2**31) <= int(code) < 2**31:
        return int(code)
    return ErrorCode.INTERNAL_SERVER_ERROR


def failure_of(data: bytes) -> ProviderFailed:
    """A provider's error: named for all protocols, and unchanged in `data` for Epoxy callers."""
    try:
        error = unmarshal_error(data)
    except BondError as unreadable:
        return ProviderFailed("internal", f"the provider's error can't be read: {unreadable}")
    code = str(error.error_code)
    if error.error_code in _NAMES:
        code = _NAMES[ErrorCode(error.error_code)]
    return ProviderFailed(code, error.message, data=data)


def is_error(data: bytes) -> bool:
    """Whether this is a marshalled `bond.comm.Error`."""
    try:
        unmarshal_error(data)
    except BondError:
        return False
    return True
