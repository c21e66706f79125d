"""Relink's messages as envelopes, and back: how many parts there are says what they are.

    one part     the payload
    two parts    properties, a JSON object, and the payload
    more         all of them together are the payload, and where each ends goes along in `native`:
                 a consumer of Relink gets the parts as they came
    none         an empty payload

A consumer gets one part when there are no properties, else two. Of the properties `content-type`,
`correlation-id` and `reply-to` are the envelope's own as well; they stay among the properties. An
answer that is a failure has `error` and `description`; a call may have `timeout`, in seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final
from zlib import crc32

import msgspec

from crosswire.envelope import Envelope, Kind, Property
from crosswire.errors import CrosswireError, InvalidEnvelope, ProviderFailed
from crosswire.gateways.failures import read_failure, to_failure
from crosswire.gateways.options import check_timeout
from crosswire.gateways.payloads import BYTES
from crosswire.wire.relink.frames import Buffer

__all__ = [
    "PARTS",
    "Origin",
    "failure_of",
    "failure_parts",
    "from_parts",
    "timeout_of",
    "to_parts",
]

PARTS: Final = "relink.parts"
"""Native key: the sizes of the parts, where there are more than two."""
_CONTENT_TYPE: Final = "content-type"
_CORRELATION: Final = "correlation-id"
_REPLY_TO: Final = "reply-to"
_TIMEOUT: Final = "timeout"

_encode: Final = msgspec.json.Encoder().encode
_read_properties: Final = msgspec.json.Decoder(dict[str, Property]).decode


class Origin(msgspec.Struct, frozen=True, gc=False):
    """What all messages that come this way have in common."""

    destination: str
    kind: Kind
    connection: str
    principal: str


def from_parts(parts: Sequence[Buffer], origin: Origin) -> Envelope:
    """Raises InvalidEnvelope for properties that are none."""
    count = len(parts)
    if count == 1:
        payload = bytes(parts[0])
        return Envelope(
            destination=origin.destination,
            kind=origin.kind,
            payload=payload,
            protocol="relink",
            connection=origin.connection,
            principal=origin.principal,
            crc=crc32(payload),
        )
    properties: dict[str, Property] = {}
    native: dict[str, bytes] = {}
    if count == 2:
        properties, payload = _properties(parts[0]), bytes(parts[1])
    else:
        payload = b"".join(parts)
        if count:
            native = {PARTS: array("Q", map(len, parts)).tobytes()}
    return Envelope(
        destination=origin.destination,
        kind=origin.kind,
        payload=payload,
        protocol="relink",
        connection=origin.connection,
        principal=origin.principal,
        properties=properties,
        native=native,
        content_type=_text(properties, _CONTENT_TYPE) or BYTES,
        correlation=_text(properties, _CORRELATION),
        reply_to=_text(properties, _REPLY_TO),
        crc=crc32(payload),
    )


def to_parts(envelope: Envelope) -> tuple[bytes, ...]:
    payload = envelope.payload
    if envelope.native and (stored := envelope.native.get(PARTS)) is not None:
        sizes = array("Q", stored)
        # Sizes of another payload would cut off its end without anybody noticing.
        if sum(sizes) == len(payload):
            return _split(payload, sizes)
    if envelope.properties:
        return _encode(envelope.properties), payload
    return (payload,)


def timeout_of(envelope: Envelope) -> float | None:
    """How long the caller wants to wait, if it says so. Raises InvalidEnvelope."""
    return check_timeout(envelope.properties.get(_TIMEOUT))


def failure_parts(error: CrosswireError) -> tuple[bytes, ...]:
    """The answer to a call that failed."""
    payload, properties = to_failure(error)
    return _encode(properties), payload


def failure_of(envelope: Envelope) -> ProviderFailed | None:
    """What a provider says that went wrong, if this answer is a failure."""
    return read_failure(envelope.payload, envelope.properties)


def _properties(part: Buffer) -> dict[str, Property]:
    if not part:
        return {}
    try:
        properties = _read_properties(part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidEnvelope(f"the first of two parts holds no properties: {error}") from None
    return properties


def _text(properties: dict[str, Property], name: str) -> str:
    value = properties.get(name, "")
    return value if isinstance(value, str) else ""


def _split(payload: bytes, sizes: Sequence[int]) -> tuple[bytes, ...]:
    parts = []
    start = 0
    for size in sizes:
        parts.append(payload[start : start + size])
        start += size
    return tuple(parts)
