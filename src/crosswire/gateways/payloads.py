"""Payloads at the edge: what a protocol can't carry is transcoded there, and only there.

A payload crosses unchanged wherever bytes can be carried, and one that is a complete JSON text
wherever JSON can, whatever its content type. EMP carries JSON, else text, else base64.
Epoxy carries Bond: with a schema for the service JSON and Bond are converted field by field,
without one the bytes travel in a `crosswire.Blob`.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Final

import msgspec

from crosswire.bond import hub_module, idl, json, marshal
from crosswire.bond.schema import Module, StructDef
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
"""Marshalled Bond. Its first bytes say which encoding it is in: Fast Binary has this type too."""

_MAGICS: Final = frozenset(
    each.magic for each in (marshal.FAST_V1, marshal.COMPACT_V1, marshal.COMPACT_V2)
)
_BLOB: Final = hub_module().struct("crosswire.Blob")
_MEDIA_TYPE: Final = re.compile(
    r"(application|audio|font|image|message|model|multipart|text|video)/[\w.+-]+( *;.*)?", re.ASCII
)


class JsonPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """A payload in JSON: as what it is, as text, or as base64; exactly one is set."""

    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None


_check_json: Final = msgspec.json.Decoder(msgspec.Raw).decode


def is_json(payload: bytes) -> bool:
    """Is it one complete JSON text? Checked, not read: the decoder leaves UTF-8 to us where it
    keeps the bytes as they are. What is no JSON nearly always shows that at its first bytes."""
    try:
        _check_json(payload)
        if not payload.isascii():
            payload.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


class RawBody(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A `JsonPayload` whose base64 is read and written by the JSON codec itself: bytes here, base64
    in JSON. For a large payload that takes a third of the time."""

    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: bytes | None = None


def to_raw_body(envelope: Envelope, most_bytes: int | None = None) -> RawBody:
    """How a JSON protocol carries this payload: a complete JSON text as it is, whatever it is
    called; what is called text as text where it is; anything else as base64.

    Raises TooLargeToSend for what takes more than `most_bytes`, without having encoded it.
    """
    payload = bytes(envelope.payload)
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
    """As `to_raw_body`, with base64 that is written already."""
    body = to_raw_body(envelope)
    if body.base64 is None:
        return JsonPayload(body.json, body.text)
    return JsonPayload(base64=base64.b64encode(body.base64).decode())


def _require_room(size_bytes: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size_bytes > most_bytes:
        raise TooLargeToSend(size_bytes, most_bytes)


def to_shown_body(envelope: Envelope) -> JsonPayload:
    """The payload for a person to look at, beside its content type: JSON only where that says so,
    so that a text which happens to be JSON too is shown as the text that it is."""
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
        raise InvalidEnvelope("base64 that is none") from None
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
    """Do the first bytes say that this is Bond, in an encoding that we know?"""
    return bytes(payload[:4]) in _MAGICS


def wrap(payload: bytes, content_type: str) -> bytes:
    """Bytes of any kind in a marshalled `crosswire.Blob`."""
    return marshal.marshal(_BLOB.python_class(data=payload, content_type=content_type), _BLOB)


def unwrap(payload: bytes) -> tuple[bytes, str] | None:
    """What a marshalled `crosswire.Blob` holds, and its content type; None for what is none.

    Bond doesn't name its structs, so a Blob is known by its shape: its two fields and no other, the
    second a media type. A struct that merely looks like one loses nothing: wrapped again, it is the
    same.
    """
    if b"/" not in payload:
        return None
    try:
        encoding = marshal.protocol_of(payload)
        blob = marshal.unmarshal(payload, _BLOB)
        if not _MEDIA_TYPE.fullmatch(blob.content_type):
            return None
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
        for service in module.services.values():
            for method in service.methods.values():
                key = f"{service.full_name}/{method.name}"
                self._methods[key] = (method.request, method.response)

    def find(self, kind: Kind, destination: str) -> StructDef | None:
        """What a message of this kind holds there: a method's request or response, or an event, if
        its service is known."""
        path, _, name = destination.partition("/")
        method = self._methods.get(name)
        if method is None or path == "queue":
            return None
        return method[1] if kind == "response" else method[0]

    def to_json(self, envelope: Envelope) -> Envelope:
        """The envelope with JSON for its Bond payload, where a schema says how; else unchanged.

        Raises InvalidEnvelope.
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
        """As `to_json`, but with the bytes as they are where they don't fit the schema."""
        try:
            return self.to_json(envelope)
        except InvalidEnvelope:
            return envelope

    def answer(self, request: Envelope, answer: Envelope) -> Envelope:
        """Who asks in JSON is answered in JSON, where a schema says how."""
        return self.readable(answer) if request.content_type == JSON else answer

    def to_bond(self, envelope: Envelope) -> bytes:
        """The payload as marshalled Bond: as it is, by the schema, or in a `crosswire.Blob`.

        Where there is a schema a Blob would be misread: what is not Bond must be JSON, whatever its
        content type; no payload at all is a struct of defaults. Raises InvalidEnvelope.
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
        """Payload and content type of what came as marshalled Bond; where no schema says what it
        is, a `crosswire.Blob` is what it holds. Raises InvalidEnvelope.
        """
        if not is_marshalled(payload):
            raise InvalidEnvelope("the payload can't be read: it is not marshalled Bond")
        if self.find(kind, destination) is None:
            held = unwrap(payload)
            if held is not None:
                return held
        return payload, BOND
