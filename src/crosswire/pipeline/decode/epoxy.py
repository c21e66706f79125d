"""Epoxy in columns: messages are grouped by service and method, of which there are few."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.contract import DescriptionColumns, FrameRows, Memories, null_column
from crosswire.pipeline.decode.matching import PASS, PUT, TAKE, Matching
from crosswire.pipeline.decode.meanings.contract import ERROR, Described, json_text
from crosswire.pipeline.decode.meanings.epoxy import (
    CONFIG,
    UNASKED,
    EpoxyMemory,
    Method,
    asked,
    content_type_of,
    describe_layer,
    error_name,
    method_of,
)
from crosswire.pipeline.decode.scanners.epoxy import (
    HAS_ERROR,
    LAYER_DATA,
    MESSAGE,
    MESSAGE_TYPE,
    METHOD,
    PAYLOAD,
    PROTOCOL_ERROR,
    SERVICE,
)
from crosswire.pipeline.decode.text import (
    Coded,
    Decimal,
    Fixed,
    Vocabulary,
    by_code,
    distinct,
    slices,
    text,
    words,
)
from crosswire.wire.contract import Frame
from crosswire.wire.epoxy.frames import ProtocolError

__all__ = ["describe"]

_MAGIC_BYTES: Final = 4

_Answer = tuple[str, str]


def describe(rows: FrameRows, memories: Memories[EpoxyMemory]) -> DescriptionColumns:
    """What the tables have of each row."""
    count = len(rows)
    messages, failed = rows.frame == MESSAGE, rows.detail >= HAS_ERROR
    method, methods = _named(rows, messages)
    responses = messages & by_code(method, [each.is_response for each in methods], False)
    more, layer_fields = _layer_fields(rows, failed)

    answers: Vocabulary[_Answer] = Vocabulary()
    answer = by_code(method, answers.codes(each.answer for each in methods), NONE)
    carriers, carried = _carried(rows, method, methods, more, layer_fields)
    answer[carriers] = answers.codes(each for _, each in carried)
    answered = _matched(rows, memories, responses, answer, answers)

    # Codes of kinds and destinations are those of the methods, and after them those of answers.
    kinds = [each.kind or "" for each in methods] + [kind for kind, _ in answers]
    destinations = [each.destination or "" for each in methods] + [code for _, code in answers]
    destination = np.where(
        responses, np.where(answered == NONE, NONE, answered + len(methods)), method
    )
    kind = np.where(responses & (destination == NONE), len(kinds), destination)
    kind[~messages] = len(kinds) + 1
    status, statuses = _statuses(rows, responses, failed)

    starts, lengths = rows.slices[PAYLOAD]
    description = DescriptionColumns(
        fields=text(
            count,
            Fixed(CONFIG.fields, ~messages),
            Fixed('{"conversation_id":', messages),
            Decimal(rows.number, messages),
            Coded(method, [f",{each.fields}" for each in methods]),
            Coded(more, layer_fields),
            Fixed("}", messages),
        ),
        kind=words(kind, [*kinds, UNASKED[0], CONFIG.kind or ""]),
        identifier=text(count, Decimal(rows.number, messages), valid=messages),
        destination=words(destination, destinations),
        status=words(status, statuses),
        sequence=np.full(count, NONE),
        payload_size=np.where(messages, lengths, NONE),
        payload_end=np.zeros(count, np.int64),
        begun_at=np.full(count, NONE),
    )
    if rows.payloads:
        description.payload = slices(rows.octets, starts, np.where(messages, lengths, NONE))
        description.content_type = words(*_content_types(rows, messages))
        description.properties = description.reply_to = null_column(count)
        description.message_id = null_column(count, pa.int64())
    description.patch(carriers, [described for described, _ in carried])
    errors: list[int] = np.flatnonzero(rows.frame == PROTOCOL_ERROR).tolist()
    description.patch(errors, [_protocol_error(rows.decoded[row]) for row in errors])
    return description


def _protocol_error(frame: Frame) -> Described:
    assert isinstance(frame, ProtocolError)
    return Described(json_text(frame.fields()), ERROR, status=frame.error_name)


def _named(rows: FrameRows, messages: Flags) -> tuple[Numbers, list[Method]]:
    """By row the code of message type, service and method, and the description of each code.

    On the wire the method's name follows the service's, with its length between them: one slice is
    compared.
    """
    services, service_bytes = rows.slices[SERVICE]
    methods, method_bytes = rows.slices[METHOD]
    length = np.where(messages, methods + method_bytes - services, NONE)
    tags = rows.detail & MESSAGE_TYPE | service_bytes << 2 | method_bytes << 33
    code, firsts = distinct(rows.octets, services, length, tags)
    return code, [
        method_of(
            int(rows.detail[row]) & MESSAGE_TYPE,
            rows.part(row, SERVICE).decode(),
            rows.part(row, METHOD).decode(),
        )
        for row in firsts.tolist()
    ]


def _layer_fields(rows: FrameRows, failed: Flags) -> tuple[Numbers, list[str]]:
    """Members of `fields` that only some messages have: layer data and errors."""
    layers, layer_bytes = rows.slices[LAYER_DATA]
    layer, firsts = distinct(rows.octets, layers, layer_bytes)
    layer_fields = [describe_layer(rows.part(row, LAYER_DATA)) for row in firsts.tolist()]
    if not failed.any():
        return layer, layer_fields
    more: Vocabulary[str] = Vocabulary()
    code = by_code(layer, more.codes(layer_fields), NONE)
    for row in np.flatnonzero(failed).tolist():
        before = layer_fields[layer[row]] if layer[row] != NONE else ""
        code[row] = more.code(f'{before},"error":"{rows.part(row, PAYLOAD).hex()}"')
    return code, list(more)


def _carried(
    rows: FrameRows, method: Numbers, methods: list[Method], more: Numbers, layer_fields: list[str]
) -> tuple[list[int], list[tuple[Described, _Answer | None]]]:
    """Rows of the hub's methods that carry a message; the description of each, and its answer."""
    carries = by_code(method, [each.carrier is not None for each in methods], False)
    chosen: list[int] = np.flatnonzero(carries).tolist()
    return chosen, [
        asked(
            int(rows.number[row]),
            methods[method[row]],
            layer_fields[more[row]] if more[row] != NONE else "",
            rows.part(row, PAYLOAD),
        )
        for row in chosen
    ]


def _matched(
    rows: FrameRows,
    memories: Memories[EpoxyMemory],
    responses: Flags,
    answer: Numbers,
    answers: Vocabulary[_Answer],
) -> Numbers:
    """By row: the code of the answer that a response is."""
    matching = Matching(rows, memories, lambda memory: memory.asked)
    steps = np.where(responses, TAKE, np.where(answer == NONE, PASS, PUT))
    partner = matching.partners(matching.numbered(rows.number), steps)
    given = np.append(answer, answers.codes(matching.values))
    every = list(answers)
    numbers, forward = rows.number, rows.forward
    matching.remember(lambda row: ((bool(forward[row]), int(numbers[row])), every[answer[row]]))
    return np.where(partner == NONE, NONE, given[partner])


def _statuses(rows: FrameRows, responses: Flags, failed: Flags) -> tuple[Numbers, list[str]]:
    names: Vocabulary[str] = Vocabulary()
    status = np.where(responses, names.code("success"), NONE)
    for row in np.flatnonzero(responses & failed).tolist():
        status[row] = names.code(error_name(rows.part(row, PAYLOAD)))
    return status, list(names)


def _content_types(rows: FrameRows, messages: Flags) -> tuple[Numbers, list[str]]:
    starts, lengths = rows.slices[PAYLOAD]
    length = np.where(messages, np.minimum(lengths, _MAGIC_BYTES), NONE)
    magic, firsts = distinct(rows.octets, starts, length)
    types: Vocabulary[str] = Vocabulary()
    found = types.codes(
        content_type_of(rows.cut(starts[row], starts[row] + length[row])) for row in firsts.tolist()
    )
    return by_code(magic, found, NONE), list(types)
