"""Decodes the rows of an Arrow stream into envelopes; nothing in the stream is trusted.

    destination    string               queue/NAME or topic/NAME
    value          string or binary     the payload
    key            string or binary     UTF-8
    headers        list of (key, value) properties; values string or binary, UTF-8
    correlation, reply_to, content_type string
    expires        timestamp (µs)

All but the first two may be left out, and may be null.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final

import msgspec
import pyarrow as pa

from crosswire.envelope import Envelope, Property, message_kind
from crosswire.errors import HubError, InvalidDestination, InvalidEnvelope
from crosswire.gateways.payloads import BYTES, TEXT
from crosswire.hub.ingest.records import StagedPart, pack

__all__ = ["COLUMNS", "read_part"]

COLUMNS: Final = (
    "destination",
    "value",
    "key",
    "headers",
    "correlation",
    "reply_to",
    "content_type",
    "expires",
)
_INT64: Final = 1 << 63
_encode = msgspec.json.Encoder().encode
# Fields of the flatbuffers that describe a message, by their index in its tables.
_MESSAGE_HEADER: Final = 2
_BATCH_COMPRESSION: Final = 3


def read_part(body: bytes, *, connection: str, principal: str) -> StagedPart:
    """The rows of a body, ready to be staged. Slow: not for the event loop.

    Raises InvalidEnvelope and InvalidDestination.
    """
    envelopes: list[Envelope] = []
    for batch in _batches(body):
        envelopes += _envelopes(batch, len(envelopes), connection, principal)
    return pack(envelopes)


# ------------------------------------------------------------------------------------- the stream


def _batches(body: bytes) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream, with all offsets and lengths validated."""
    buffer = pa.py_buffer(body)
    try:
        _check_messages(buffer)
        with pa.ipc.open_stream(buffer) as reader:
            _check_schema(reader.schema)
            for batch in reader:
                batch.validate(full=True)
                yield batch
    except UnicodeDecodeError:
        raise InvalidEnvelope("a column's name is not UTF-8") from None
    except (pa.ArrowException, OSError) as error:
        raise InvalidEnvelope(f"the body is no Arrow stream: {error}") from None


def _check_messages(buffer: pa.Buffer) -> None:
    """Raises InvalidEnvelope for compressed batches and dictionaries.

    Decoded they can be far larger than the body, whose size is limited. Nothing is decoded yet.
    """
    for message in pa.ipc.MessageReader.open_stream(buffer):
        if message.type == "dictionary":
            raise InvalidEnvelope("dictionaries are not accepted: send plain columns")
        if message.type == "record batch" and _is_compressed(message.metadata.to_pybytes()):
            raise InvalidEnvelope("compressed batches are not accepted: send plain columns")


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch has a compression. pyarrow does not expose it before decoding; it has
    verified these offsets when it read the message."""
    message = int.from_bytes(metadata[:4], "little")
    offset = message + _field(metadata, message, _MESSAGE_HEADER)
    batch = offset + int.from_bytes(metadata[offset : offset + 4], "little")
    return _field(metadata, batch, _BATCH_COMPRESSION) != 0


def _field(data: bytes, table: int, number: int) -> int:
    """A field's offset from its table's start, 0 if it is absent."""
    shape = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = int.from_bytes(data[shape : shape + 2], "little")
    offset = 4 + 2 * number
    if offset + 2 > size:
        return 0
    return int.from_bytes(data[shape + offset : shape + offset + 2], "little")


def _check_schema(schema: pa.Schema) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise InvalidEnvelope("two columns have the same name")
    for field in schema:
        if field.name not in COLUMNS:
            raise InvalidEnvelope(f"there is no column {field.name}; known: {', '.join(COLUMNS)}")
        if not _is_allowed(field):
            raise InvalidEnvelope(f"{field.name} can't be of type {field.type}")
    for name in ("destination", "value"):
        if name not in schema.names:
            raise InvalidEnvelope(f"the column {name} is missing")


def _is_allowed(field: pa.Field) -> bool:
    kind = field.type
    if field.name in ("value", "key"):
        return _is_text(kind) or _is_binary(kind)
    if field.name == "expires":
        return bool(pa.types.is_timestamp(kind)) and kind.unit == "us"
    if field.name == "headers":
        return (
            (pa.types.is_list(kind) or pa.types.is_large_list(kind))
            and pa.types.is_struct(kind.value_type)
            and [each.name for each in kind.value_type] == ["key", "value"]
            and _is_text(kind.value_type[0].type)
            and (_is_text(kind.value_type[1].type) or _is_binary(kind.value_type[1].type))
        )
    return _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


# --------------------------------------------------------------------------------------- the rows


def _envelopes(
    batch: pa.RecordBatch, first: int, connection: str, principal: str
) -> list[Envelope]:
    """The envelopes of a batch; `first` is the number of its first row, for error messages."""
    found: list[Envelope] = []
    usual = TEXT if _is_text(batch.schema.field("value").type) else BYTES
    rows = zip(
        _column(batch, "destination"),
        _bytes(batch, "value"),
        _texts(batch, "key"),
        _column(batch, "headers"),
        _column(batch, "correlation"),
        _column(batch, "reply_to"),
        _column(batch, "content_type"),
        _times(batch),
        range(batch.num_rows),
        strict=False,
    )
    for destination, value, key, headers, correlation, reply_to, content_type, expires, row in rows:
        try:
            if not destination:
                raise InvalidDestination("the destination is missing")
            if expires is not None and expires < 0:
                raise InvalidEnvelope("expires is before 1970")
            found.append(
                Envelope(
                    destination=destination,
                    kind=message_kind(destination),
                    payload=value or b"",
                    protocol="http",
                    connection=connection,
                    principal=principal,
                    key=key or "",
                    correlation=correlation or "",
                    reply_to=reply_to or "",
                    content_type=content_type or usual,
                    expires=expires or 0,
                    properties=_properties(headers) if headers else {},
                    crc=zlib.crc32(value or b""),
                )
            )
        except HubError as error:
            raise type(error)(f"row {first + row}: {error}") from None
    return found


# Each returns an iterable of a column's values, endless for a column that is missing.


def _column(batch: pa.RecordBatch, name: str) -> Any:
    if name not in batch.schema.names:
        return repeat(None)
    column = batch.column(name)
    return repeat(None) if column.null_count == len(column) else column.to_pylist()


def _bytes(batch: pa.RecordBatch, name: str) -> Any:
    column = batch.column(name)
    return (column.cast(pa.large_binary()) if _is_text(column.type) else column).to_pylist()


def _texts(batch: pa.RecordBatch, name: str) -> Any:
    if name not in batch.schema.names or _is_text(batch.column(name).type):
        return _column(batch, name)
    try:
        return batch.column(name).cast(pa.large_binary()).cast(pa.large_string()).to_pylist()
    except pa.ArrowInvalid:
        raise InvalidEnvelope(f"{name} is not UTF-8") from None


def _times(batch: pa.RecordBatch) -> Any:
    if "expires" not in batch.schema.names:
        return repeat(None)
    return batch.column("expires").cast(pa.int64()).to_pylist()


def _properties(headers: list[dict[str, Any] | None]) -> dict[str, Property]:
    """Kafka's headers have no types: text that is a JSON number or boolean becomes one.

    Of several with the same key the last holds. Raises InvalidEnvelope.
    """
    properties: dict[str, Property] = {}
    for header in headers:
        if header is None or header["key"] is None:
            raise InvalidEnvelope("a header has no key")
        value = header["value"]
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise InvalidEnvelope(f"the header {header['key']} is not UTF-8") from None
        properties[header["key"]] = _typed(value or "")
    return properties


def _typed(text: str) -> Property:
    if text in ("true", "false"):
        return text == "true"
    if text[-1:].isdigit() and len(text) < 32:
        for kind in (int, float):
            try:
                number = kind(text)
            except ValueError:
                continue
            if -_INT64 <= number < _INT64 and _encode(number) == text.encode():
                return number
    return text
