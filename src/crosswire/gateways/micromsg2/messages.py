"""MicroMsg2's messages as envelopes, and envelopes as messages.

Beside those of the application, properties have these names: `content-type`, `correlation-id` and
`reply-to` are fields of the envelope; an answer that is a failure has `error` and `description`; a
call may have `timeout`, in seconds. Text that reads `true` or `false` is a boolean, for which
MicroMsg2 has no type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from zlib import crc32

import msgspec

from crosswire.envelope import Envelope, Property
from crosswire.errors import CrosswireError
from crosswire.gateways.failures import to_failure
from crosswire.gateways.payloads import BYTES, JSON, Schemas, to_raw_body
from crosswire.gateways.properties import CONTENT_TYPE, CORRELATION, REPLY_TO
from crosswire.hub.ledger import LedgerPeer
from crosswire.wire.micromsg2.events import MessageReceived

__all__ = ["REPLY", "MessageFormat", "ReplyAddress", "whole_name"]

REPLY: Final = "reply/"
"""Destinations below this reach the connection that the call came from, without a subscription."""


def whole_name(destination: str) -> str:
    """A destination with its kind: a bare name is a queue."""
    return destination if "/" in destination else f"queue/{destination}"


class MessageFormat:
    """What one peer's messages look like.

    With the extension `json` all payloads are JSON texts in both directions; without it they are
    any bytes. `content_type` is that of a message without the property.
    """

    def __init__(self, schemas: Schemas, *, in_json: bool, message_bytes: int) -> None:
        self.in_json = in_json
        self.content_type = JSON if in_json else BYTES
        self._schemas = schemas
        self._message_bytes = message_bytes

    def to_envelope(
        self, event: MessageReceived, destination: str, kind: str, peer: LedgerPeer
    ) -> Envelope:
        """The message as it enters the hub; `kind` is one of the envelope's."""
        payload = event.payload
        if not event.properties:
            return Envelope(
                destination=destination,
                kind=kind,  # type: ignore[arg-type]
                payload=payload,
                protocol=peer.protocol,
                connection=peer.connection,
                principal=peer.principal,
                content_type=self.content_type,
                crc=crc32(payload),
            )
        correlation = reply_to = ""
        content_type = self.content_type
        properties: dict[str, Property] = {}
        for key, value in event.properties.items():
            if value == "true":
                properties[key] = True
            elif value == "false":
                properties[key] = False
            elif key == CORRELATION and isinstance(value, str):
                correlation = value
            elif key == REPLY_TO and isinstance(value, str):
                reply_to = value
            elif key == CONTENT_TYPE and isinstance(value, str):
                content_type = value or content_type
            else:
                properties[key] = value
        return Envelope(
            destination=destination,
            kind=kind,  # type: ignore[arg-type]
            payload=payload,
            protocol=peer.protocol,
            connection=peer.connection,
            principal=peer.principal,
            correlation=correlation,
            reply_to=reply_to,
            properties=properties,
            content_type=content_type,
            crc=crc32(payload),
        )

    def to_message(self, envelope: Envelope) -> tuple[bytes, Mapping[str, Property]]:
        """Payload and properties for the peer. Raises TooLargeToSend.

        The outbox doesn't call this for bytes whose envelope adds no properties: they stay as they
        are.
        """
        content_type, payload = envelope.content_type, envelope.payload
        if self.in_json:
            payload, content_type = self._as_json(envelope)
        if not envelope.correlation and not envelope.reply_to and content_type == self.content_type:
            return payload, envelope.properties
        # The application's own properties of these names win: they were there first.
        properties = dict(envelope.properties)
        if envelope.correlation:
            properties.setdefault(CORRELATION, envelope.correlation)
        if envelope.reply_to:
            properties.setdefault(REPLY_TO, envelope.reply_to)
        if content_type != self.content_type:
            properties.setdefault(CONTENT_TYPE, content_type)
        return payload, properties

    def _as_json(self, envelope: Envelope) -> tuple[bytes, str]:
        """Payload and content type. A payload that is no JSON text becomes `{"text": …}` or
        `{"base64": …}`, with the content type of what is inside."""
        envelope = self._schemas.readable(envelope)
        body = to_raw_body(envelope, self._message_bytes)
        if body.json is msgspec.UNSET:
            return msgspec.json.encode(body), envelope.content_type
        # A JSON text without a content type is JSON, as everything is for this peer.
        content_type = JSON if envelope.content_type == BYTES else envelope.content_type
        return envelope.payload, content_type


class ReplyAddress:
    """Where the answer to a call goes, and the correlation that it repeats."""

    __slots__ = ("correlation", "destination", "in_json")

    def __init__(self, destination: str, correlation: Property | None, *, in_json: bool) -> None:
        self.destination = destination
        self.correlation = correlation
        self.in_json = in_json

    def failure(self, error: CrosswireError) -> tuple[bytes, dict[str, Property]]:
        """Payload and properties of an answer that is a failure."""
        payload, properties = to_failure(error)
        return payload, self.marked(properties)

    def marked(self, properties: Mapping[str, Property]) -> dict[str, Property]:
        """These properties with the caller's correlation, in the type that it was sent in."""
        if self.correlation is None:
            return dict(properties)
        return {**properties, CORRELATION: self.correlation}
