"""Relink's messages as envelopes, and envelopes as messages. The number of parts has a meaning:

    one part     the payload
    two parts    properties, a JSON object, and the payload
    more         the payload is all of them joined; their sizes are kept in `native`, so that a
                 consumer of Relink gets the same parts
    none         an empty payload

A consumer gets one part when there are no properties, else two. The properties `content-type`,
`correlation-id` and `reply-to` also become fields of the envelope. An answer that is a failure has
`error` and `description`; a call may have `timeout`, in seconds.
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
from crosswire.gateways.properties import CONTENT_TYPE, CORRELATION, REPLY_TO, TIMEOUT
from crosswire.wire.relink.events import Acknowledged, CommitReceived, RollbackReceived
from crosswire.wire.relink.frames import Buffer

__all__ = [
    "PARTS",
    "Origin",
    "count_of",
    "failure_of",
    "failure_parts",
    "from_parts",
    "timeout_of",
    "to_parts",
]

PARTS: Final = "relink.parts"
"""Native key: the sizes of the parts, where there are more than two."""

_encode: Final = msgspec.json.Encoder().encode
_read_properties: Final = msgspec.json.Decoder(dict[str, Property]).decode


class Origin(msgspec.Struct, frozen=True, gc=False):
    """What all messages of a link, or all its answers, have in common."""

    destination: str
    kind: Kind
    connection: str
    principal: str


def from_parts(parts: Sequence[Buffer], origin: Origin) -> Envelope:
    """A message as it enters the hub. Raises InvalidEnvelope for properties that can't be read."""
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
        content_type=_text(properties, CONTENT_TYPE) or BYTES,
        correlation=_text(properties, CORRELATION),
        reply_to=_text(properties, REPLY_TO),
        crc=crc32(payload),
    )


def to_parts(envelope: Envelope) -> tuple[bytes, ...]:
    """The parts of a message for a peer."""
    payload = envelope.payload
    if envelope.native and (stored := envelope.native.get(PARTS)) is not None:
        sizes = array("Q", stored)
        # The payload may have been edited since: old sizes would cut off its end unnoticed.
        if sum(sizes) == len(payload):
            return _split(payload, sizes)
    if envelope.properties:
        return _encode(envelope.properties), payload
    return (payload,)


def count_of(event: Acknowledged | CommitReceived | RollbackReceived) -> int:
    """The number of messages that an event names; their sequence numbers wrap at 32 bits."""
    return (event.last - event.first) % (1 << 32) + 1


def timeout_of(envelope: Envelope) -> float | None:
    """The timeout that a call asks for; None for the default. Raises InvalidEnvelope."""
    return check_timeout(envelope.properties.get(TIMEOUT))


def failure_parts(error: CrosswireError) -> tuple[bytes, ...]:
    """The answer to a call that failed."""
    payload, properties = to_failure(error)
    return _encode(properties), payload


def failure_of(envelope: Envelope) -> ProviderFailed | None:
    """The failure that a provider answered with; None if the answer is a success."""
    return read_failure(envelope.payload, envelope.properties)


def _properties(part: Buffer) -> dict[str, Property]:
    if not part:
        return {}
    try:
        properties = _read_properties(part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidEnvelope(f"the first of two parts is not an object: {error}") from None
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
