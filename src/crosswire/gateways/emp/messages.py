"""The data of EMP's operations, as JSON is read into it and written from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from crosswire.envelope import LARGEST_INTEGER, Envelope, Property
from crosswire.gateways.options import LARGEST_WINDOW
from crosswire.gateways.payloads import RawBody, Schemas, to_raw_body
from crosswire.hub.attachment import Delivery

__all__ = [
    "TOO_DEEP",
    "AuthenticateData",
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
    "to_object",
]

TOO_DEEP: Final = "the data is nested too deeply"
"""JSON that the connection could read may be too deep for a reader called from further down."""

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

    services: list[str]


class UnsubscribeData(msgspec.Struct, frozen=True):
    """Data of `$unsubscribe`: the number that `$subscribe` answered."""

    subscription: int


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


read_publish: Final[Callable[[bytes], PublishData]] = msgspec.json.Decoder(PublishData).decode
"""The data of a `$publish`. Raises MsgspecError, or RecursionError for deep JSON."""

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
