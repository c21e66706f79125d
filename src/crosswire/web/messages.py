"""Messages over HTTP: their JSON form, producing them, and tracing them through the ledger."""

from __future__ import annotations

import zlib
from operator import itemgetter
from typing import Annotated, Final

import msgspec

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import (
    PROPERTIES_BYTES,
    Envelope,
    Property,
    check_properties,
    message_kind,
)
from crosswire.errors import HubError, InvalidEnvelope
from crosswire.gateways.payloads import JsonPayload, from_body, to_shown_body
from crosswire.web.contract import FailureResponse, Operation, OperationRequest, failure_of
from crosswire.web.times import Moment, at_us

__all__ = [
    "MESSAGE_OPERATIONS",
    "PREVIEW_BYTES",
    "SHOWN_BYTES",
    "JsonMessage",
    "Production",
    "show_message",
    "shown_to",
]

PREVIEW_BYTES: Final = 4096
SHOWN_BYTES: Final = 512 << 10
"""Messages of this size together are read to be shown at once, or one that is larger."""
_MOST_MESSAGES: Final = 50_000
_STEP: Final = 16
"""Messages that are accepted at once: each may be the first of a new queue, which takes longest."""
_read_properties: Final = msgspec.json.Decoder(dict[str, Property]).decode


class JsonMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message. Its payload is one of `json`, `text` and `base64`."""

    id: int = 0
    """Absent in a schedule: each time that it fires, the message gets another one."""
    time: Moment | None = None
    """When the hub accepted it; absent in a schedule."""
    destination: str
    kind: str
    """`send` to a queue, `publish` to a topic, `request` or `response` of a service."""
    content_type: str
    size_bytes: int
    """The size of its payload."""
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    truncated: bool = False
    """Whether `text` is only the beginning of the payload."""
    protocol: str = ""
    connection: str = ""
    principal: str = ""
    key: str = ""
    correlation: str = ""
    reply_to: str = ""
    durable: bool = True
    """Whether it was on disk before it was acknowledged."""
    expires: Moment | None = None
    """When it is no longer delivered."""
    properties: dict[str, Property] = {}
    native: list[str] = []
    """The names of the fields that only its own protocol has."""
    held_by: str = ""
    """The connection that got it and has not settled it."""
    hidden: bool = False
    """Whether its content is left out: seeing it needs the right to consume."""


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
            time=at_us(envelope.time) if envelope.id else None,
            destination=envelope.destination,
            kind=envelope.kind,
            content_type="",
            size_bytes=size,
            protocol=envelope.protocol,
            connection=envelope.connection,
            principal=envelope.principal,
            durable=envelope.durable,
            expires=at_us(envelope.expires) if envelope.expires else None,
            held_by=held_by,
            hidden=True,
        )
    body = to_shown_body(envelope) if most_bytes is None or size <= most_bytes else None
    return JsonMessage(
        id=envelope.id,
        time=at_us(envelope.time) if envelope.id else None,
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
        expires=at_us(envelope.expires) if envelope.expires else None,
        properties=envelope.properties,
        native=sorted(envelope.native),
        held_by=held_by,
    )


def shown_to(
    ask: OperationRequest, envelope: Envelope, most_bytes: int | None = PREVIEW_BYTES
) -> JsonMessage:
    """The message as the principal may see it: who may not read it sees that it is there, and only
    observers see whose it is."""
    shown = show_message(
        envelope, most_bytes=most_bytes, hidden=not ask.may_read(envelope.destination)
    )
    if shown.hidden and not ask.is_observer and shown.principal != ask.principal:
        shown = msgspec.structs.replace(shown, principal="", connection="")
    return shown


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


# Without the garbage collector: a request may have tens of thousands, at all of which it would look
# again and again.
class Production(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    steps: list[_AcceptedStep] = []
    if count <= _STEP:
        await ask.admitted()
        steps.append(_accept(ask, batch.messages, 0))
    else:
        async with ask.work.turn() as turn:
            for start in range(0, count, _STEP):
                # Not within a turn: it would keep all others who do long work from theirs.
                while ask.is_held:
                    turn.end()
                    await ask.admitted()
                    await turn.begin()
                steps.append(_accept(ask, batch.messages[start : start + _STEP], start))
                await turn.pause()
    for step in steps:
        await step.receipt
    if count == 1:
        for _, error in steps[0].refusals():
            raise error
    ids = [0] * count
    refused: list[Refusal] = []
    async with ask.work.turn() as turn:
        for step in steps:
            for index, identifier in zip(step.indexes, step.receipt.ids, strict=True):
                ids[index] = identifier
            refused += [_refusal(index, error) for index, error in step.refusals()]
            await turn.pause()
    return Produced(ids, refused)


class _AcceptedStep(msgspec.Struct, frozen=True):
    """Messages of a request that were given to the hub at once, and those it did not get."""

    indexes: list[int]
    """Of the receipt's messages in the request."""
    receipt: Receipt
    refused: list[tuple[int, HubError]]

    def refusals(self) -> list[tuple[int, HubError]]:
        """Why those were refused, by index in the request."""
        theirs = [(self.indexes[each], error) for each, error in self.receipt.refused.items()]
        return sorted(self.refused + theirs, key=itemgetter(0)) if theirs else self.refused


def _accept(ask: OperationRequest, messages: list[Production], start: int) -> _AcceptedStep:
    """Give some messages to the hub, except those that can't be. `start` is the index of the first
    in the request."""
    envelopes: list[Envelope] = []
    indexes: list[int] = []
    refused: list[tuple[int, HubError]] = []
    for index, message in enumerate(messages, start):
        try:
            ask.require("produce", message.destination)
            envelopes.append(_envelope(message, ask))
            indexes.append(index)
        except HubError as error:
            refused.append((index, error))
    ask.server.context.count("produced", "http", by=len(envelopes))
    return _AcceptedStep(indexes, ask.hub.produce(envelopes, ask.now()), refused)


def _refusal(index: int, error: HubError) -> Refusal:
    failure: FailureResponse = failure_of(error)[1]
    return Refusal(index, failure.error, failure.description)


def _envelope(message: Production, ask: OperationRequest) -> Envelope:
    payload, content_type = from_body(JsonPayload(message.json, message.text, message.base64))
    if message.destination.startswith("service/"):
        raise InvalidEnvelope("a message can go to a queue or a topic, not to a service")
    return Envelope(
        destination=message.destination,
        kind=message_kind(message.destination),
        payload=payload,
        protocol="http",
        connection=ask.connection,
        principal=ask.principal,
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


MESSAGE_OPERATIONS: Final = (
    Operation(
        name="produce",
        tag="messages",
        method="POST",
        path="/v1/messages",
        summary="Send to queues and publish to topics; answered when durable messages are on disk",
        handler=produce,
        body=Productions,
        answer=Produced,
        needs="principal",
        body_bytes=None,
        checks_numbers=True,
    ),
)
