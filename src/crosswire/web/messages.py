"""Messages over HTTP: their JSON form, producing them, and tracing them through the ledger."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

import msgspec

from crosswire.envelope import Envelope, Property, message_kind
from crosswire.errors import HubError, InvalidEnvelope, RecordDamaged, UnknownMessage
from crosswire.gateways.payloads import JsonPayload, from_body, to_shown_body
from crosswire.hub.hub import Hub
from crosswire.hub.ledger import LedgerRow, parse_block
from crosswire.web.contract import FailureResponse, OperationRequest, failure_of

__all__ = [
    "PREVIEW_BYTES",
    "JsonMessage",
    "Produced",
    "Production",
    "Trace",
    "produce",
    "show_message",
    "trace",
]

PREVIEW_BYTES: Final = 4096
_BLOCKS: Final = 8


class JsonMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message. Its payload is one of `json`, `text` and `base64`; if `truncated`, `text` is the
    beginning of it. Times are in microseconds since 1970. `native` are the names of the fields that
    only its own protocol has."""

    id: int
    time: int
    destination: str
    kind: str
    content_type: str
    size_bytes: int
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    truncated: bool = False
    protocol: str = ""
    connection: str = ""
    principal: str = ""
    key: str = ""
    correlation: str = ""
    reply_to: str = ""
    durable: bool = True
    expires: int = 0
    properties: dict[str, Property] = {}
    native: list[str] = []
    held_by: str = ""


def show_message(
    envelope: Envelope, *, most_bytes: int | None = PREVIEW_BYTES, held_by: str = ""
) -> JsonMessage:
    """The message in JSON; a payload of more than `most_bytes` is truncated."""
    size = len(envelope.payload)
    body = to_shown_body(envelope) if most_bytes is None or size <= most_bytes else None
    return JsonMessage(
        id=envelope.id,
        time=envelope.time,
        destination=envelope.destination,
        kind=envelope.kind,
        content_type=envelope.content_type,
        size_bytes=size,
        json=msgspec.UNSET if body is None else body.json,
        text=_beginning(envelope, most_bytes or 0) if body is None else body.text,
        base64=None if body is None else body.base64,
        truncated=body is None,
        protocol=envelope.protocol,
        connection=envelope.connection,
        principal=envelope.principal,
        key=envelope.key,
        correlation=envelope.correlation,
        reply_to=envelope.reply_to,
        durable=envelope.durable,
        expires=envelope.expires,
        properties=envelope.properties,
        native=sorted(envelope.native),
        held_by=held_by,
    )


def _beginning(envelope: Envelope, most_bytes: int) -> str:
    return bytes(envelope.payload[:most_bytes]).decode(errors="replace")


# --------------------------------------------------------------------------------------- producing


class Production(msgspec.Struct, frozen=True, kw_only=True):
    """A message for a queue or a topic; exactly one of `json`, `text` and `base64` is its payload.

    By default `content_type` is the one that belongs to that field."""

    destination: str
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    content_type: str = ""
    properties: dict[str, Property] = {}
    key: str = ""
    durable: bool = True


class Productions(msgspec.Struct, frozen=True):
    """Messages to be accepted in this order."""

    messages: list[Production]


class Refusal(msgspec.Struct, frozen=True):
    """A message that was not accepted: its index in the request, and why."""

    index: int
    error: str
    description: str


class Produced(msgspec.Struct, frozen=True):
    """Ids by index, 0 for a message that was refused. Durable messages are on disk."""

    ids: list[int]
    refused: list[Refusal]


async def produce(ask: OperationRequest) -> Produced:
    """Accept each message, or refuse it alone; answered after the commit.

    Raises the reason if there is one message only and it is refused.
    """
    batch: Productions = ask.body
    envelopes: list[Envelope] = []
    indexes: list[int] = []
    refusals: list[tuple[int, HubError]] = []
    for index, message in enumerate(batch.messages):
        try:
            ask.require("produce", message.destination)
            envelopes.append(_envelope(message, ask.principal))
            indexes.append(index)
        except HubError as error:
            refusals.append((index, error))
    ids = [0] * len(batch.messages)
    if envelopes:
        ask.server.context.count("produced", "http", by=len(envelopes))
        receipt = ask.hub.produce(envelopes, ask.now())
        await receipt
        for index, identifier in zip(indexes, receipt.ids, strict=True):
            ids[index] = identifier
        refusals += [
            (indexes[batch_index], error) for batch_index, error in receipt.refused.items()
        ]
    if len(batch.messages) == 1 and refusals:
        raise refusals[0][1]
    return Produced(
        ids,
        [_refusal(batch_index, error) for batch_index, error in sorted(refusals, key=_index_of)],
    )


def _index_of(refusal: tuple[int, HubError]) -> int:
    return refusal[0]


def _refusal(index: int, error: HubError) -> Refusal:
    failure: FailureResponse = failure_of(error)[1]
    return Refusal(index, failure.error, failure.description)


def _envelope(message: Production, principal: str) -> Envelope:
    payload, content_type = from_body(JsonPayload(message.json, message.text, message.base64))
    if message.destination.startswith("service/"):
        raise InvalidEnvelope("a message can go to a queue or a topic, not to a service")
    return Envelope(
        destination=message.destination,
        kind=message_kind(message.destination),
        payload=payload,
        protocol="http",
        principal=principal,
        key=message.key,
        durable=message.durable,
        properties=message.properties,
        content_type=message.content_type or content_type,
        crc=zlib.crc32(payload),
    )


# ----------------------------------------------------------------------------------------- tracing


class Trace(msgspec.Struct, frozen=True):
    """What happened to a message, in order, and the message itself while it is stored."""

    id: int
    steps: list[LedgerRow]
    message: JsonMessage | None


async def trace(ask: OperationRequest) -> Trace:
    """The steps of a message and, while it is stored, the message.

    Raises UnknownMessage if neither the ledger nor the store has it.
    """
    identifier: int = ask.path["id"]
    if not 0 < identifier <= ask.hub.store.newest_id:
        raise UnknownMessage(f"there is no message {identifier} yet")
    steps = ask.hub.trace(identifier)
    # Memory holds the ledger's newest blocks only. Without "accepted" older steps are on disk.
    if not steps or steps[0].step != "accepted":
        steps = [*await _older(ask.hub, identifier, upto=steps[0].seq if steps else 0), *steps]
    envelope = None
    for destination in dict.fromkeys(row.destination for row in steps):
        envelope = envelope or _stored(ask.hub, destination, identifier)
    if not steps and envelope is None:
        raise UnknownMessage(f"message {identifier} is not in the ledger")
    shown = None if envelope is None else show_message(envelope)
    return Trace(identifier, steps, shown)


async def _older(hub: Hub, identifier: int, *, upto: int) -> list[LedgerRow]:
    """Steps before row `upto` that only the store has.

    A scan of the ledger can be long: the event loop does other work after each page.
    """
    store = hub.store
    recent = next((run.first_row for run in hub.ledger.runs() if run.first_row), 0)
    end = upto or recent or store.next_row
    found: list[LedgerRow] = []
    after = 0
    while blocks := store.blocks(after, _BLOCKS):
        for first, rows, block in blocks:
            if first >= end:
                return found
            try:
                runs = parse_block(first, block)
            except RecordDamaged as error:
                hub.damage.report(error)
                runs = []
            for run in runs:
                if identifier in run.ids:
                    found += [row for row in run.rows() if row.id == identifier and row.seq < end]
            after = first + rows - 1
        await asyncio.sleep(0)
    return found


def _stored(hub: Hub, destination: str, identifier: int) -> Envelope | None:
    """The message if it is stored; calls are stored under the service's name without the method."""
    candidates = [destination]
    if destination.startswith("service/"):
        candidates.append("/".join(destination.split("/")[:2]))
    for candidate in candidates:
        if candidate in hub.store.destinations():
            (envelope,) = hub.fetch(candidate, [identifier])
            if envelope is not None:
                return envelope
    return None
