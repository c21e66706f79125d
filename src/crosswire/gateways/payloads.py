"""Payloads in protocols that can't carry any bytes: JSON, text, base64 and Bond.

A payload crosses unchanged where the receiver carries bytes, and one that is a complete JSON text
where the receiver carries JSON, whatever its content type. Otherwise the receiver's gateway
transcodes it, and only that. EMP carries JSON, else text, else base64. Epoxy carries Bond: with a
schema for the service JSON and Bond are converted field by field, without one the bytes are in a
`crosswire.Blob`.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Final

import msgspec

from crosswire.bond import hub_module, idl, json, marshal
from crosswire.bond.schema import DecodeLimits, Module, StructDef
from crosswire.envelope import Envelope, Kind
from crosswire.errors import BondError, InvalidEnvelope, TooLargeToSend

__all__ = [
    "BOND",
    "BYTES",
    "JSON",
    "TEXT",
    "JsonPayload",
    "RawBody",
    "Schemas",
    "from_body",
    "from_raw_body",
    "is_json",
    "is_marshalled",
    "to_body",
    "to_raw_body",
    "to_shown_body",
    "unwrap",
    "wrap",
]

JSON: Final = "application/json"
TEXT: Final = "text/plain"
BYTES: Final = "application/octet-stream"
BOND: Final = "application/vnd.bond.compact"
"""Marshalled Bond. Its first bytes give the encoding: Fast Binary has this type too."""

_MAGICS: Final = frozenset(
    each.magic for each in (marshal.FAST_V1, marshal.COMPACT_V1, marshal.COMPACT_V2)
)
_BLOB: Final = hub_module().struct("crosswire.Blob")
"""What the hub marshals arbitrary bytes in, for Epoxy peers without a schema."""
_BLOB_LIMITS: Final = DecodeLimits(values=64)
_MEDIA_TYPE: Final = re.compile(
    r"(application|audio|font|image|message|model|multipart|text|video)/[\w.+-]+( *;.*)?", re.ASCII
)


class JsonPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """A payload in JSON: as JSON, as text, or as base64; exactly one is set."""

    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None


_check_json: Final = msgspec.json.Decoder(msgspec.Raw).decode


def is_json(payload: bytes) -> bool:
    """Whether it is one complete JSON text. It is checked without building values; what is no JSON
    nearly always fails at its first bytes."""
    try:
        _check_json(payload)
        if not payload.isascii():
            # The decoder of raw JSON doesn't check the UTF-8 inside of strings.
            payload.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


class RawBody(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A `JsonPayload` whose base64 is read and written by the JSON codec: bytes here, base64 in
    JSON. For a large payload that takes a third of the time."""

    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: bytes | None = None


def to_raw_body(envelope: Envelope, most_bytes: int | None = None) -> RawBody:
    """How a JSON protocol carries this payload: a complete JSON text as it is, whatever its content
    type; one of a text type as text if it is UTF-8; anything else as base64.

    Raises TooLargeToSend for more than `most_bytes`, before it is encoded.
    """
    payload = bytes(envelope.payload)
    # Twice: before the check of the JSON, which reads all of it, and below for base64's growth.
    _require_room(len(payload), most_bytes)
    if is_json(payload):
        return RawBody(json=msgspec.Raw(payload))
    if envelope.content_type.startswith("text/"):
        try:
            return RawBody(text=payload.decode())
        except UnicodeDecodeError:
            pass
    _require_room((len(payload) + 2) // 3 * 4, most_bytes)
    return RawBody(base64=payload)


def to_body(envelope: Envelope) -> JsonPayload:
    """As `to_raw_body`, with the base64 as text."""
    body = to_raw_body(envelope)
    if body.base64 is None:
        return JsonPayload(body.json, body.text)
    return JsonPayload(base64=base64.b64encode(body.base64).decode())


def _require_room(size_bytes: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size_bytes > most_bytes:
        raise TooLargeToSend(size_bytes, most_bytes)


def to_shown_body(envelope: Envelope) -> JsonPayload:
    """The payload for people, beside its content type: JSON only with that content type, so that a
    text which happens to be JSON too is shown as text."""
    payload = bytes(envelope.payload)
    if envelope.content_type == JSON and is_json(payload):
        return JsonPayload(json=msgspec.Raw(msgspec.json.format(payload, indent=-1)))
    return _to_text(payload, envelope.content_type)


def _to_text(payload: bytes, content_type: str) -> JsonPayload:
    if content_type.startswith("text/"):
        try:
            return JsonPayload(text=payload.decode())
        except UnicodeDecodeError:
            pass
    return JsonPayload(base64=base64.b64encode(payload).decode())


def from_body(body: JsonPayload) -> tuple[bytes, str]:
    """Payload and content type. Raises InvalidEnvelope."""
    try:
        decoded = None if body.base64 is None else base64.b64decode(body.base64, validate=True)
    except ValueError:
        raise InvalidEnvelope("the base64 can't be decoded") from None
    return from_raw_body(RawBody(body.json, body.text, decoded))


def from_raw_body(body: RawBody) -> tuple[bytes, str]:
    """Payload and content type. Raises InvalidEnvelope."""
    if body.text is not None and body.base64 is None and body.json is msgspec.UNSET:
        return body.text.encode(), TEXT
    given = [body.json is not msgspec.UNSET, body.text is not None, body.base64 is not None]
    if sum(given) != 1:
        raise InvalidEnvelope("exactly one of json, text and base64 is needed")
    if isinstance(body.json, msgspec.Raw):
        return bytes(body.json), JSON
    return body.base64 or b"", BYTES


def is_marshalled(payload: bytes) -> bool:
    """Whether the first bytes are those of marshalled Bond, in an encoding that we know."""
    return bytes(payload[:4]) in _MAGICS


def wrap(payload: bytes, content_type: str) -> bytes:
    """Any bytes in a marshalled `crosswire.Blob`."""
    return marshal.marshal(_BLOB.python_class(data=payload, content_type=content_type), _BLOB)


def unwrap(payload: bytes) -> tuple[bytes, str] | None:
    """The bytes in a marshalled `crosswire.Blob` and their content type; None if it is no Blob.

    Bond doesn't name its structs, so a Blob is recognized by its two fields, the second a media
    type, and no other. Another struct that looks the same loses nothing: wrapped again, its bytes
    are the same.
    """
    # A media type has a slash: this spares most payloads the decoding.
    if b"/" not in payload:
        return None
    try:
        encoding = marshal.protocol_of(payload)
        # A Blob has no unknown fields, so a few are enough to see that this is none.
        blob = marshal.unmarshal(payload, _BLOB, limits=_BLOB_LIMITS)
        if not _MEDIA_TYPE.fullmatch(blob.content_type):
            return None
        # Unknown fields are skipped on reading: only what is written the same has no others.
        if marshal.marshal(blob, _BLOB, protocol=encoding) != payload:
            return None
    except BondError:
        return None
    return blob.data, blob.content_type


class Schemas:
    """The services in the `.bond` files of the configuration, by method."""

    def __init__(self, files: tuple[str, ...] = ()) -> None:
        self._methods: dict[str, tuple[StructDef, StructDef | None]] = {}
        for file in files:
            self.add(idl.load(Path(file)))

    def add(self, module: Module) -> None:
        """Add the services of a Bond module."""
        for service in module.services.values():
            for method in service.methods.values():
                key = f"{service.full_name}/{method.name}"
                self._methods[key] = (method.request, method.response)

    def find(self, kind: Kind, destination: str) -> StructDef | None:
        """The struct of a message of this kind to this destination: a method's request or response,
        or an event. None if the service is unknown."""
        path, _, name = destination.partition("/")
        method = self._methods.get(name)
        if method is None or path == "queue":
            return None
        return method[1] if kind == "response" else method[0]

    def to_json(self, envelope: Envelope) -> Envelope:
        """The envelope with its Bond payload as JSON, if there is a schema; else unchanged.

        Raises InvalidEnvelope for a payload that doesn't fit the schema.
        """
        if envelope.content_type != BOND:
            return envelope
        struct = self.find(envelope.kind, envelope.destination)
        if struct is None:
            return envelope
        try:
            value = marshal.unmarshal(envelope.payload, struct)
            payload = json.encode(value, struct)
        except BondError as error:
            raise InvalidEnvelope(f"the payload is not a {struct.full_name}: {error}") from None
        return envelope.replace(payload=payload, content_type=JSON)

    def readable(self, envelope: Envelope) -> Envelope:
        """As `to_json`, but a payload that doesn't fit the schema stays unchanged."""
        try:
            return self.to_json(envelope)
        except InvalidEnvelope:
            return envelope

    def answer(self, request: Envelope, answer: Envelope) -> Envelope:
        """The answer as JSON if the request was JSON and there is a schema; else unchanged."""
        return self.readable(answer) if request.content_type == JSON else answer

    def to_bond(self, envelope: Envelope) -> bytes:
        """The payload as marshalled Bond: unchanged, by the schema, or in a `crosswire.Blob`.

        With a schema the peer would misread a Blob: a payload that is not Bond must be JSON,
        whatever its content type; an empty one is a struct of defaults. Raises InvalidEnvelope.
        """
        payload = envelope.payload
        struct = self.find(envelope.kind, envelope.destination)
        if struct is None:
            if envelope.content_type == BOND and is_marshalled(payload):
                return payload
            return wrap(payload, envelope.content_type)
        if is_marshalled(payload):
            return payload
        try:
            return marshal.marshal(json.decode(payload or b"{}", struct), struct)
        except BondError as error:
            raise InvalidEnvelope(f"the payload is not a {struct.full_name}: {error}") from None

    def from_bond(self, kind: Kind, destination: str, payload: bytes) -> tuple[bytes, str]:
        """Payload and content type of marshalled Bond. Without a schema a `crosswire.Blob` is
        unwrapped. Raises InvalidEnvelope.
        """
        if not is_marshalled(payload):
            raise InvalidEnvelope("the payload can't be read: it is not marshalled Bond")
        if self.find(kind, destination) is None:
            held = unwrap(payload)
            if held is not None:
                return held
        return payload, BOND
