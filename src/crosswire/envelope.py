"""Envelope and Destination: the one message that all parts speak of."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from math import isfinite
from struct import Struct as Layout
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from crosswire.errors import InvalidDestination, InvalidEnvelope, RecordDamaged

__all__ = [
    "LARGEST_INTEGER",
    "MICROSECONDS",
    "NAME_BYTES",
    "SCHEDULED",
    "Destination",
    "Envelope",
    "Kind",
    "Property",
    "check_properties",
    "decode",
    "decode_at",
    "encode",
    "encode_run",
    "message_kind",
    "parse_destination",
    "parse_pattern",
    "parse_stored_destination",
    "stamp",
    "stamp_run",
]

NAME_BYTES: Final = 255
LARGEST_INTEGER: Final = (1 << 63) - 1
"""Ids, counts and integer properties have 63 bits and a sign."""
MICROSECONDS: Final = 1_000_000
"""In a second: times are stored as microseconds since 1970."""
SCHEDULED: Final = "crosswire.schedule"
"""In `native` of what a schedule sent: when it was due."""
_VERSION: Final = 1
_HEADER: Final = 5

Kind: TypeAlias = Literal["send", "publish", "request", "response"]
Property: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)] | float | bool | str
)
"""Of 64 bits, and finite: what is decoded with this type from JSON is checked by that."""

_set = msgspec.structs.force_setattr


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """A message on its way, whatever protocol brought it.

    A gateway makes it without `node`, `id` and `time`: the hub stamps these when it accepts the
    message. Nothing else of it ever changes, the payload least of all.
    """

    destination: str
    kind: Kind
    payload: bytes = b""
    node: str = ""
    id: int = 0
    time: int = 0
    protocol: str = ""
    connection: str = ""
    principal: str = ""
    key: str = ""
    correlation: str = ""
    reply_to: str = ""
    durable: bool = True
    expires: int = 0
    # Wider than Property: a record that an earlier version accepted must stay readable.
    properties: dict[str, int | float | bool | str] = {}
    native: dict[str, bytes] = {}
    content_type: str = "application/octet-stream"
    crc: int = 0

    def replace(self, **changes: object) -> Envelope:
        """A copy with other values; `crc` follows the payload."""
        if "payload" in changes and "crc" not in changes:
            changes["crc"] = zlib.crc32(changes["payload"])  # type: ignore[arg-type]
        copy: Envelope = msgspec.structs.replace(self, **changes)
        return copy

    def intact(self) -> bool:
        """Is the payload the one that the edge took the checksum of?"""
        return zlib.crc32(self.payload) == self.crc


def check_properties(properties: dict[str, Property]) -> dict[str, Property]:
    """The same properties. Raises InvalidEnvelope for a number that is not finite or too large.

    For properties that were not decoded as `dict[str, Property]` from JSON.
    """
    for name, value in properties.items():
        if isinstance(value, float):
            if not isfinite(value):
                raise InvalidEnvelope(f"the property {name!r} is not a finite number")
        elif isinstance(value, int) and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            raise InvalidEnvelope(f"the property {name!r} has more than 64 bits")
    return properties


def stamp(envelope: Envelope, node: str, identifier: int, time_us: int) -> Envelope:
    """Complete an envelope at its acceptance: the hub's, and only the hub's, to call.

    Gives the envelope or, if it has been a message already, a copy: that one may be on its way.
    """
    return stamp_run((envelope,), node, identifier, time_us)[0]


def stamp_run(
    envelopes: Sequence[Envelope], node: str, first: int, time_us: int
) -> Sequence[Envelope]:
    """`stamp` for many, with ids in a row."""
    identifier = first
    for envelope in envelopes:
        if envelope.id:
            index = identifier - first
            copies = [_unstamped(each) for each in envelopes[index:]]
            return [*envelopes[:index], *stamp_run(copies, node, identifier, time_us)]
        _set(envelope, "node", node)
        _set(envelope, "id", identifier)
        _set(envelope, "time", time_us)
        if not envelope.crc:
            _set(envelope, "crc", _crc32(envelope.payload))
        identifier += 1
    return envelopes


def _unstamped(envelope: Envelope) -> Envelope:
    copy: Envelope = msgspec.structs.replace(envelope, id=0)
    return copy


# ------------------------------------------------------------------------------------ binary form
#
#   1 byte    version of this layout
#   4 bytes   CRC-32 of what follows, big-endian
#   …         MessagePack array of the envelope's fields in the order above

_LARGE: Final = 1 << 20
"""A payload from which on a copy that can be saved takes longer than what saves it."""
_ARRAY_BYTES: Final = 3
_EMPTY: Final = b"\xc4\x00"
_PAYLOAD: Final = Layout(">BI").pack
_PAYLOAD_CODE: Final = 0xC6

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode
_crc32 = zlib.crc32
_header = Layout(">BI").pack


def encode(envelope: Envelope) -> bytes:
    """The form in which the store keeps it. Raises InvalidEnvelope for what has none."""
    try:
        if len(envelope.payload) >= _LARGE:
            return _encode_large(envelope)
        body = _encode(envelope)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidEnvelope(f"the envelope can't be stored: {error}") from None
    return _header(_VERSION, _crc32(body)) + body


def encode_run(envelopes: Sequence[Envelope]) -> list[bytes]:
    """`encode` for many: all of them, or InvalidEnvelope."""
    if len(envelopes) == 1:
        return [encode(envelopes[0])]
    encode_body, crc32, header, version = _encode, _crc32, _header, _VERSION
    try:
        # One after the other: a body that was just made is in the processor's cache.
        return [header(version, crc32(body := encode_body(each))) + body for each in envelopes]
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidEnvelope(f"the envelope can't be stored: {error}") from None


def _encode_large(envelope: Envelope) -> bytes:
    """The same record, with the payload copied once: it is put between what stands around an empty
    one."""
    around = _encode(msgspec.structs.replace(envelope, payload=b""))
    cut = _ARRAY_BYTES + len(_encode(envelope.destination)) + len(_encode(envelope.kind))
    end = cut + len(_EMPTY)
    if around[cut:end] != _EMPTY:
        raise AssertionError("the payload is not where it should be in a record")
    payload = envelope.payload
    before = around[:cut] + _PAYLOAD(_PAYLOAD_CODE, len(payload))
    crc = _crc32(around[end:], _crc32(payload, _crc32(before)))
    return b"".join((_header(_VERSION, crc), before, payload, around[end:]))


def decode(record: bytes) -> Envelope:
    """Raises RecordDamaged for bytes that are not what `encode` gave."""
    if len(record) < _HEADER:
        raise RecordDamaged(f"a record of {len(record)} bytes is no envelope")
    if record[0] != _VERSION:
        raise RecordDamaged(f"a record of version {record[0]}, this is version {_VERSION}")
    body: bytes | memoryview = record[_HEADER:] if len(record) < _LARGE else _behind_header(record)
    if _crc32(body) != int.from_bytes(record[1:_HEADER]):
        raise RecordDamaged("the record's checksum does not fit")
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordDamaged(f"the record can't be read: {error}") from None


def _behind_header(record: bytes) -> memoryview:
    """Without a copy: small records are quicker with one."""
    return memoryview(record)[_HEADER:]


def decode_at(record: bytes, destination: str, identifier: int) -> Envelope:
    """The message that is stored under this id of a destination.

    Raises RecordDamaged for bytes that are no message, or another one's.
    """
    envelope = decode(record)
    if envelope.id != identifier:
        raise RecordDamaged(f"message {envelope.id} is stored as message {identifier}")
    # Calls and their answers are kept under the name that their provider gave.
    if envelope.destination != destination and not destination.startswith("service/"):
        raise RecordDamaged(
            f"message {identifier} of {envelope.destination} is stored in {destination}"
        )
    return envelope


# ----------------------------------------------------------------------------------- destinations


class Destination(msgspec.Struct, frozen=True, gc=False):
    """Where a message goes: `queue/NAME`, `topic/NAME`, `service/NAME[/METHOD]`.

    A service's name ends at the next slash; names of queues and topics may hold more of them.
    """

    kind: Literal["queue", "topic", "service"]
    name: str
    method: str = ""

    def __str__(self) -> str:
        return (
            f"{self.kind}/{self.name}/{self.method}" if self.method else f"{self.kind}/{self.name}"
        )


def message_kind(destination: str) -> Literal["send", "publish"]:
    """The kind of a message that is produced to a queue or a topic."""
    return "publish" if destination.startswith("topic/") else "send"


@lru_cache(maxsize=8192)
def parse_destination(text: str) -> Destination:
    """A destination that a peer names. Raises InvalidDestination.

    Wildcards are for subscriptions only: see `parse_pattern`. A first level that starts with `@`
    is the hub's own.
    """
    destination = _split(text)
    if destination.kind == "topic" and ("+" in text or "#" in text):
        raise InvalidDestination(f"{text!r}: wildcards are for subscriptions only")
    _check_levels(text)
    return destination


@lru_cache(maxsize=8192)
def parse_pattern(text: str) -> Destination:
    """A destination to subscribe to: in topics `+` stands for one level, a final `#` for any.

    Raises InvalidDestination.
    """
    destination = _split(text)
    if destination.kind == "topic":
        _check_levels(text)
        levels = destination.name.split("/")
        for index, level in enumerate(levels):
            if level == "#" and index == len(levels) - 1:
                continue
            if "#" in level or ("+" in level and level != "+"):
                raise InvalidDestination(f"{text!r}: a wildcard fills a level, `#` the last one")
    return destination


def parse_stored_destination(text: str) -> Destination:
    """A destination that the store has, or that the hub names itself. Raises InvalidDestination.

    It need not keep to the rules for new names, which came later than the first stores, and the
    dead letters of a queue have a longer name than the queue.
    """
    return _split(text, own=True)


def _check_levels(text: str) -> None:
    kind, *levels = text.split("/")
    if "" in levels:
        raise InvalidDestination(f"{text!r} has an empty level")
    if levels[0].startswith("@"):
        raise InvalidDestination(f"{text!r}: names that start with @ are the hub's own")
    if kind != "topic" and ("+" in levels or "#" in levels):
        raise InvalidDestination(f"{text!r}: `+` and `#` stand for levels of topics only")


def _split(text: str, *, own: bool = False) -> Destination:
    kind, _, name = text.partition("/")
    if kind not in ("queue", "topic", "service"):
        raise InvalidDestination(f"{text!r} does not start with queue/, topic/ or service/")
    if not name:
        raise InvalidDestination(f"{text!r} has no name")
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidDestination(f"{text!r} is not Unicode text") from None
    if size_bytes > NAME_BYTES and not own:
        raise InvalidDestination(f"a destination has at most {NAME_BYTES} bytes, not {size_bytes}")
    if any(character < " " or "\x7f" <= character <= "\x9f" for character in text):
        raise InvalidDestination(f"{text!r} holds control characters")
    if kind == "service":
        service, _, method = name.partition("/")
        if not service:
            raise InvalidDestination(f"{text!r} has no name")
        return Destination("service", service, method)
    return Destination("queue" if kind == "queue" else "topic", name)
