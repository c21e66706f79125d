"""The data of EMP's operations, as JSON is read into it and written from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from crosswire.envelope import (
    LARGEST_INTEGER,
    PROPERTIES,
    PROPERTIES_BYTES,
    Envelope,
    Property,
)
from crosswire.errors import InvalidEnvelope
from crosswire.gateways.options import LARGEST_WINDOW, LONGEST_LEASE_S
from crosswire.gateways.payloads import RawBody, Schemas, to_raw_body
from crosswire.hub.attachment import Delivery

__all__ = [
    "OPERATION_BYTES",
    "SERVED_AT_ONCE",
    "TOO_DEEP",
    "AuthenticateData",
    "ExtendData",
    "GetOpData",
    "PublishData",
    "ScheduleData",
    "ServeData",
    "SubscribeData",
    "UnscheduleData",
    "UnsubscribeData",
    "encode",
    "encode_delivery",
    "read_publish",
    "read_schedule",
    "to_object",
]

TOO_DEEP: Final = "the data is nested too deeply"
"""JSON that the connection could read may be too deep for a reader called from further down."""

SERVED_AT_ONCE: Final = 1000
"""How many names one request may offer to serve, in EMP and in Epoxy."""
OPERATION_BYTES: Final = 512 * 1024
"""The size of an operation's data, except of those that carry a message: enough for as many names
as one `$serve` may have."""

_EXTENDED_AT_ONCE: Final = 10_000
_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
_Window = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_WINDOW)]


class PublishData(RawBody, frozen=True, gc=False, kw_only=True):
    """Data of `$publish`: a destination and one of json, text and base64."""

    destination: str
    properties: dict[str, Property] = msgspec.field(default_factory=dict)
    key: str = ""


class SubscribeData(msgspec.Struct, frozen=True, rename={"start": "from"}):
    """Data of `$subscribe`; without a window the configured default holds."""

    destination: str
    filter: str = ""
    name: str = ""
    start: str | _Count = "latest"
    window: _Window | None = None


class ScheduleData(PublishData, frozen=True, kw_only=True):
    """Data of `$schedule`: the message and either an interval or a cron expression."""

    interval_s: float = 0.0
    cron: str = ""
    nohaste: bool = False
    run_count: _Count = 0


class AuthenticateData(msgspec.Struct, frozen=True):
    """Data of `$authenticate`."""

    token: str


class ServeData(msgspec.Struct, frozen=True):
    """Data of `$serve`: names of operations, without `service/`."""

    services: Annotated[list[str], msgspec.Meta(max_length=SERVED_AT_ONCE)]


class UnsubscribeData(msgspec.Struct, frozen=True):
    """Data of `$unsubscribe`: the number that `$subscribe` answered."""

    subscription: int


class ExtendData(msgspec.Struct, frozen=True):
    """Data of `$extend`: messages of a subscription that the peer still works on."""

    subscription: int
    ids: Annotated[list[int], msgspec.Meta(max_length=_EXTENDED_AT_ONCE)]
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_S)]


class UnscheduleData(msgspec.Struct, frozen=True):
    """Data of `$unschedule`: the id that `$schedule` answered."""

    schedule: str


class GetOpData(msgspec.Struct, frozen=True):
    """Data of `$get_op`."""

    op_name: str


class _DeliverData(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Data of `$deliver`. The body's three fields stand here so that one encoder writes all."""

    subscription: int
    id: int
    destination: str
    attempt: int
    properties: dict[str, Property]
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: bytes | None = None


class _LargePublishData(RawBody, frozen=True, gc=False, kw_only=True):
    """`PublishData` whose properties are not parsed: there may be millions of them."""

    destination: str
    properties: msgspec.Raw = msgspec.Raw(b"{}")
    key: str = ""


class _LargeScheduleData(_LargePublishData, frozen=True, kw_only=True):
    """`ScheduleData`, likewise."""

    interval_s: float = 0.0
    cron: str = ""
    nohaste: bool = False
    run_count: _Count = 0


_read_publish: Final[Callable[[bytes], PublishData]] = msgspec.json.Decoder(PublishData).decode
_read_schedule: Final[Callable[[bytes], ScheduleData]] = msgspec.json.Decoder(ScheduleData).decode
_read_large_publish: Final = msgspec.json.Decoder(_LargePublishData).decode
_read_large_schedule: Final = msgspec.json.Decoder(_LargeScheduleData).decode
_read_properties: Final = msgspec.json.Decoder(dict[str, Property]).decode


def read_publish(data: bytes) -> PublishData:
    """The data of a `$publish`.

    Raises MsgspecError, InvalidEnvelope for too many properties, RecursionError for deep JSON.
    """
    if len(data) <= PROPERTIES_BYTES:
        parsed = _read_publish(data)
        if len(parsed.properties) > PROPERTIES:
            raise _too_many(len(parsed.properties))
        return parsed
    # Once: to parse a large text twice would take twice as long.
    large = _read_large_publish(data)
    return PublishData(
        json=large.json,
        text=large.text,
        base64=large.base64,
        destination=large.destination,
        properties=_parse_properties(large.properties),
        key=large.key,
    )


def read_schedule(data: bytes) -> ScheduleData:
    """The data of a `$schedule`; raises as `read_publish`."""
    if len(data) <= PROPERTIES_BYTES:
        parsed = _read_schedule(data)
        if len(parsed.properties) > PROPERTIES:
            raise _too_many(len(parsed.properties))
        return parsed
    large = _read_large_schedule(data)
    return ScheduleData(
        json=large.json,
        text=large.text,
        base64=large.base64,
        destination=large.destination,
        properties=_parse_properties(large.properties),
        key=large.key,
        interval_s=large.interval_s,
        cron=large.cron,
        nohaste=large.nohaste,
        run_count=large.run_count,
    )


def _parse_properties(raw: msgspec.Raw) -> dict[str, Property]:
    """Measured first: a view of the JSON, not copied."""
    size_bytes = len(memoryview(raw))
    if size_bytes > PROPERTIES_BYTES:
        raise InvalidEnvelope(
            f"a message's properties have at most {PROPERTIES_BYTES} bytes, not {size_bytes}"
        )
    properties = _read_properties(raw)
    if len(properties) > PROPERTIES:
        raise _too_many(len(properties))
    return properties


def _too_many(count: int) -> InvalidEnvelope:
    return InvalidEnvelope(f"a message has at most {PROPERTIES} properties, not {count}")


encode: Final = msgspec.json.Encoder().encode
"""JSON of a reply."""


def encode_delivery(number: int, delivery: Delivery, envelope: Envelope, most_bytes: int) -> bytes:
    """The data of a `$deliver` for the subscription with this number.

    `envelope` is the delivery's, or its translation to JSON. Raises TooLargeToSend for a payload of
    more than `most_bytes`, before it is encoded.
    """
    body = to_raw_body(envelope, most_bytes)
    return encode(
        _DeliverData(
            number,
            envelope.id,
            envelope.destination,
            delivery.attempt,
            envelope.properties,
            body.json,
            body.text,
            body.base64,
        )
    )


def to_object(envelope: Envelope, schemas: Schemas, most_bytes: int) -> bytes:
    """A request's or response's payload as a JSON object, which EMP's data must be.

    A payload that is an object stays as it is, whatever its content type: peers of protocols that
    have none mean an object where they send one. Anything else becomes `{"json": …}`,
    `{"text": …}` or `{"base64": …}`. Raises InvalidEnvelope or TooLargeToSend.
    """
    body = to_raw_body(schemas.to_json(envelope), most_bytes)
    if isinstance(body.json, msgspec.Raw):
        text = bytes(body.json)
        if text.lstrip(b" \t\r\n").startswith(b"{"):
            return text
    return encode(body)
