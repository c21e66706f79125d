"""Messages over HTTP: their JSON form, producing them, and tracing them through the ledger."""

from __future__ import annotations

import asyncio
import zlib
from typing import Annotated, Final

import msgspec

from crosswire.access import subscription_label
from crosswire.commitlog.contract import Receipt
from crosswire.envelope import (
    PROPERTIES_BYTES,
    Envelope,
    Property,
    check_properties,
    message_kind,
)
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
_MOST_MESSAGES: Final = 50_000
_STEP: Final = 64
"""Messages that are accepted at once: each may be the first of a new queue, which takes longest."""
_read_properties: Final = msgspec.json.Decoder(dict[str, Property]).decode
_BLOCKS: Final = 8


class JsonMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message. Its payload is one of `json`, `text` and `base64`; if `truncated`, `text` is the
    beginning of it; if `hidden`, seeing it needs the right to consume. Times are in microseconds
    since 1970. `native` are the names of the fields that only its own protocol has."""

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
    hidden: bool = False


def show_message(
    envelope: Envelope,
    *,
    most_bytes: int | None = PREVIEW_BYTES,
    held_by: str = "",
    hidden: bool = False,
) -> JsonMessage:
    """The message in JSON; a payload of more than `most_bytes` is truncated. Of a `hidden` one only
    what it is and where it goes is shown, nothing that its producer wrote."""
    size = len(envelope.payload)
    if hidden:
        return JsonMessage(
            id=envelope.id,
            time=envelope.time,
            destination=envelope.destination,
            kind=envelope.kind,
            content_type="",
            size_bytes=size,
            protocol=envelope.protocol,
            connection=envelope.connection,
            principal=envelope.principal,
            durable=envelope.durable,
            expires=envelope.expires,
            held_by=held_by,
            hidden=True,
        )
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


RawProperties = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        description="Integers, numbers, booleans and texts by name.",
        extra_json_schema={"type": "object"},
    ),
]
"""Measured before they are parsed: see `_parse_properties`."""


class Production(msgspec.Struct, frozen=True, kw_only=True):
    """A message for a queue or a topic; exactly one of `json`, `text` and `base64` is its payload.

    By default `content_type` is the one that belongs to that field."""

    destination: str
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    content_type: str = ""
    properties: RawProperties | msgspec.UnsetType = msgspec.UNSET
    key: str = ""
    durable: bool = True


class Productions(msgspec.Struct, frozen=True):
    """Messages to be accepted in this order, 50,000 at most."""

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

    Many are accepted in steps, so that other peers are served meanwhile: messages of others may
    come in between, and if the hub is killed before it has answered, the first of them may be
    stored, and the others not. Raises the reason if there is one message only and it is refused.
    """
    batch: Productions = ask.body
    count = len(batch.messages)
    if count > _MOST_MESSAGES:
        raise InvalidEnvelope(f"a request has at most {_MOST_MESSAGES} messages, not {count}")
    steps: list[tuple[list[int], Receipt]] = []
    refusals: list[tuple[int, HubError]] = []
    if count <= _STEP:
        steps.append(_accept(ask, batch.messages, 0, refusals))
    else:
        async with ask.work.turn() as turn:
            for start in range(0, count, _STEP):
                some = batch.messages[start : start + _STEP]
                steps.append(_accept(ask, some, start, refusals))
                await turn.pause()
    ids = [0] * count
    for indexes, receipt in steps:
        await receipt
        for index, identifier in zip(indexes, receipt.ids, strict=True):
            ids[index] = identifier
        refusals += [(indexes[number], error) for number, error in receipt.refused.items()]
    if count == 1 and refusals:
        raise refusals[0][1]
    return Produced(
        ids,
        [_refusal(batch_index, error) for batch_index, error in sorted(refusals, key=_index_of)],
    )


def _accept(
    ask: OperationRequest,
    messages: list[Production],
    start: int,
    refusals: list[tuple[int, HubError]],
) -> tuple[list[int], Receipt]:
    """Give some messages to the hub, except those that can't be; with the indexes that they have in
    the request. `start` is the index of the first."""
    envelopes: list[Envelope] = []
    indexes: list[int] = []
    for index, message in enumerate(messages, start):
        try:
            ask.require("produce", message.destination)
            envelopes.append(_envelope(message, ask.principal))
            indexes.append(index)
        except HubError as error:
            refusals.append((index, error))
    ask.server.context.count("produced", "http", by=len(envelopes))
    return indexes, ask.hub.produce(envelopes, ask.now())


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
        properties=_parse_properties(message.properties),
        content_type=message.content_type or content_type,
        crc=zlib.crc32(payload),
    )


def _parse_properties(raw: msgspec.Raw | msgspec.UnsetType) -> dict[str, Property]:
    """The properties of a message. Raises InvalidEnvelope; for too many bytes before they are
    parsed, since a request may have millions of them."""
    if raw is msgspec.UNSET:
        return {}
    size_bytes = len(memoryview(raw))
    if size_bytes > PROPERTIES_BYTES:
        raise InvalidEnvelope(
            f"a message's properties have at most {PROPERTIES_BYTES} bytes, not {size_bytes}"
        )
    try:
        return check_properties(_read_properties(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidEnvelope(f"properties: {error}") from None


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
    # Without a trace of what the principal may not know of, as if there was nothing.
    steps = [row for row in steps if _is_visible(ask, row)]
    envelope = None
    for destination in dict.fromkeys(row.destination for row in steps):
        envelope = envelope or _stored(ask.hub, destination, identifier)
    if not steps and envelope is None:
        raise UnknownMessage(f"message {identifier} is not in the ledger")
    shown = None
    if envelope is not None:
        shown = show_message(envelope, hidden=not ask.may_read(envelope.destination))
    return Trace(identifier, steps, shown)


def _is_visible(ask: OperationRequest, row: LedgerRow) -> bool:
    """Observers see every step, others those at destinations that they have a right to, without
    the named subscriptions of other users."""
    if ask.is_observer:
        return True
    is_own = not row.subscription or row.subscription.startswith(
        f"{subscription_label(ask.principal, '')}."
    )
    return is_own and ask.may_see(row.destination)


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
