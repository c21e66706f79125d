"""Envelope and Destination: the message as gateways, hub, store and lake pass it on.

Its binary form is what the store keeps, so that an older version's records must stay readable.
"""

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
    "NAMED_CHARACTERS",
    "NAME_BYTES",
    "ONLY_FOR",
    "PROPERTIES",
    "PROPERTIES_BYTES",
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

PATTERN_LEVELS: Final = 16
"""With `+`: the patterns that match one topic are found in at most 2^17 steps, however many there
are. Deeper ones could be chosen so that each takes a step for each of its levels."""
NAME_BYTES: Final = 255
"""The longest name of a new destination."""
NAMED_CHARACTERS: Final = 1024
"""The longest destination that a peer may ask for: those of the hub's own, like a queue's dead
letters, have longer names than new ones may have."""
PROPERTIES: Final = 1000
"""How many properties a message may have."""
PROPERTIES_BYTES: Final = 64 * 1024
"""The size of a message's properties in all, names and texts; a number counts 8."""
LARGEST_INTEGER: Final = (1 << 63) - 1
"""Ids, counts and integer properties are signed 64-bit integers."""
MICROSECONDS: Final = 1_000_000
"""In a second: times are stored as microseconds since 1970."""
SCHEDULED: Final = "crosswire.schedule"
"""Key in `native` of a message that a schedule sent: the time when it was due."""
ONLY_FOR: Final = "crosswire.only"
"""Key in `native` of a dead letter that was given back to one named subscription: that one's key.
No other subscriber of the topic takes it."""
_VERSION: Final = 1
_HEADER: Final = 5

Kind: TypeAlias = Literal["send", "publish", "request", "response"]
Property: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)] | float | bool | str
)
"""Integers have 64 bits. msgspec checks that when it decodes JSON into this type, and JSON has no
numbers that are not finite; for other sources there is `check_properties`."""

# Envelopes are frozen. Only `stamp_run` writes to one, before the hub passes it on.
_set = msgspec.structs.force_setattr


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """A message, independent of the protocol that it was received by.

    A gateway creates it without `node`, `id` and `time`: the hub sets these when it accepts the
    message. Nothing else changes afterwards. The order of the fields is that of the stored record:
    new ones are appended, with a default.
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
        """A copy with other values; a new payload gets its checksum, unless `crc` is given."""
        if "payload" in changes and "crc" not in changes:
            changes["crc"] = zlib.crc32(changes["payload"])  # type: ignore[arg-type]
        copy: Envelope = msgspec.structs.replace(self, **changes)
        return copy

    def intact(self) -> bool:
        """Whether the payload matches the checksum that was computed when it was received."""
        return zlib.crc32(self.payload) == self.crc


def check_properties(properties: dict[str, Property]) -> dict[str, Property]:
    """The same properties. Raises InvalidEnvelope for a number that is not finite or too large, and
    for more than PROPERTIES or PROPERTIES_BYTES."""
    if len(properties) > PROPERTIES:
        raise InvalidEnvelope(
            f"a message has at most {PROPERTIES} properties, not {len(properties)}"
        )
    size_bytes = 0
    for name, value in properties.items():
        # In characters: four bytes each at most, which is close enough for a limit.
        size_bytes += len(name) + (len(value) if isinstance(value, str) else 8)
        if isinstance(value, float):
            if not isfinite(value):
                raise InvalidEnvelope(f"the property {name!r} is not a finite number")
        elif isinstance(value, int) and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            raise InvalidEnvelope(f"the property {name!r} has more than 64 bits")
    if size_bytes > PROPERTIES_BYTES:
        raise InvalidEnvelope(
            f"a message's properties have at most {PROPERTIES_BYTES} bytes, not {size_bytes}"
        )
    return properties


def stamp(envelope: Envelope, node: str, identifier: int, time_us: int) -> Envelope:
    """Set node, id and time of a message that the hub accepts. For the hub only.

    Returns the envelope or, if it has an id already, a copy: it may still be being delivered.
    """
    return stamp_run((envelope,), node, identifier, time_us)[0]


def stamp_run(
    envelopes: Sequence[Envelope], node: str, first: int, time_us: int
) -> Sequence[Envelope]:
    """`stamp` for many, with consecutive ids from `first` on."""
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
"""Payload size from which on avoiding one copy is worth the extra steps (measured)."""
_ARRAY_BYTES: Final = 3
_EMPTY: Final = b"\xc4\x00"
_PAYLOAD: Final = Layout(">BI").pack
_PAYLOAD_CODE: Final = 0xC6

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode
_crc32 = zlib.crc32
_header = Layout(">BI").pack


def encode(envelope: Envelope) -> bytes:
    """The record that the store keeps. Raises InvalidEnvelope for values that can't be encoded."""
    try:
        if len(envelope.payload) >= _LARGE:
            return _encode_large(envelope)
        body = _encode(envelope)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidEnvelope(f"the envelope can't be stored: {error}") from None
    return _header(_VERSION, _crc32(body)) + body


def encode_run(envelopes: Sequence[Envelope]) -> list[bytes]:
    """`encode` for many. Raises InvalidEnvelope if one of them can't be encoded."""
    if len(envelopes) == 1:
        return [encode(envelopes[0])]
    encode_body, crc32, header, version = _encode, _crc32, _header, _VERSION
    try:
        # Encode, checksum and copy one by one: the body is then still in the processor's cache.
        return [header(version, crc32(body := encode_body(each))) + body for each in envelopes]
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidEnvelope(f"the envelope can't be stored: {error}") from None


def _encode_large(envelope: Envelope) -> bytes:
    """The same record, with the payload copied once: an envelope with an empty payload is encoded,
    and the payload is inserted where the empty one is."""
    around = _encode(msgspec.structs.replace(envelope, payload=b""))
    cut = _ARRAY_BYTES + len(_encode(envelope.destination)) + len(_encode(envelope.kind))
    end = cut + len(_EMPTY)
    if around[cut:end] != _EMPTY:
        raise AssertionError("the payload is not the third field of the record")
    payload = envelope.payload
    before = around[:cut] + _PAYLOAD(_PAYLOAD_CODE, len(payload))
    crc = _crc32(around[end:], _crc32(payload, _crc32(before)))
    return b"".join((_header(_VERSION, crc), before, payload, around[end:]))


def decode(record: bytes) -> Envelope:
    """The envelope of a record. Raises RecordDamaged for bytes that `encode` did not return."""
    if len(record) < _HEADER:
        raise RecordDamaged(f"a record of {len(record)} bytes is no envelope")
    if record[0] != _VERSION:
        raise RecordDamaged(f"a record of version {record[0]}, this is version {_VERSION}")
    # A slice is quicker than a view for small records, a view saves the copy for large ones.
    body: bytes | memoryview = record if len(record) < _LARGE else memoryview(record)
    body = body[_HEADER:]
    if _crc32(body) != int.from_bytes(record[1:_HEADER]):
        raise RecordDamaged("the record's checksum is wrong")
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordDamaged(f"the record can't be read: {error}") from None


def decode_at(record: bytes, destination: str, identifier: int) -> Envelope:
    """The message in the record that is stored for this id of a destination.

    Raises RecordDamaged for bytes that are not a message, or that are another message.
    """
    envelope = decode(record)
    if envelope.id != identifier:
        raise RecordDamaged(f"message {envelope.id} is stored as message {identifier}")
    # Requests and responses are stored under the service's name, without the method.
    if envelope.destination != destination and not destination.startswith("service/"):
        raise RecordDamaged(
            f"message {identifier} of {envelope.destination} is stored in {destination}"
        )
    return envelope


# ----------------------------------------------------------------------------------- destinations


class Destination(msgspec.Struct, frozen=True, gc=False):
    """The parts of a destination: `queue/NAME`, `topic/NAME`, `service/NAME[/METHOD]`.

    A service's name ends at the next slash; names of queues and topics may contain slashes.
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
    """A destination that a peer sends to. Raises InvalidDestination.

    Wildcards are for subscriptions only: see `parse_pattern`. A first level that starts with `@`
    is reserved for the hub.
    """
    destination = _split(text)
    if destination.kind == "topic" and ("+" in text or "#" in text):
        raise InvalidDestination(f"{text!r}: wildcards are for subscriptions only")
    _check_levels(text)
    return destination


@lru_cache(maxsize=8192)
def parse_pattern(text: str) -> Destination:
    """A destination to subscribe to: in topics `+` stands for one level, a final `#` for any.

    Raises InvalidDestination, also for a `+` in a pattern of more than `PATTERN_LEVELS`.
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
        if len(levels) > PATTERN_LEVELS and "+" in levels:
            raise InvalidDestination(f"a pattern with `+` has at most {PATTERN_LEVELS} levels")
    return destination


def parse_stored_destination(text: str) -> Destination:
    """A destination from the store, or one that the hub created. Raises InvalidDestination.

    It need not follow the rules for new names: older versions accepted more, and the queue for a
    queue's dead letters has a longer name than that queue.
    """
    return _split(text, own=True)


def _check_levels(text: str) -> None:
    kind, *levels = text.split("/")
    if "" in levels:
        raise InvalidDestination(f"{text!r} has an empty level")
    if levels[0].startswith("@"):
        raise InvalidDestination(f"{text!r}: names that start with @ are reserved")
    if kind != "topic" and ("+" in levels or "#" in levels):
        raise InvalidDestination(f"{text!r}: `+` and `#` stand for levels of topics only")


def _split(text: str, *, own: bool = False) -> Destination:
    if len(text) > NAME_BYTES and not own:
        # First: the other errors repeat the text.
        raise InvalidDestination(f"a destination has at most {NAME_BYTES} bytes, not {len(text)}")
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
