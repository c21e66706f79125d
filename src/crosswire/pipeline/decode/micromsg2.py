"""MicroMsg2 in columns: messages, most of them of one frame, and acknowledgements between them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.contract import DescriptionColumns, FrameRows, Memories, null_column
from crosswire.pipeline.decode.matching import GET, PASS, PUT, Matching
from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    HANDSHAKE,
    RESPONSE,
    Described,
    kind_of_destination,
)
from crosswire.pipeline.decode.meanings.micromsg2 import (
    ACKS,
    BINARY,
    PREFIXES,
    SUCCESS,
    MicroMsg2Memory,
    describe_small,
    extensions_of,
    full_name,
)
from crosswire.pipeline.decode.micromsg2_headers import (
    BARE,
    CONTENT_TYPE,
    ERROR,
    IDENTIFIER,
    NAME,
    REPLY_TO,
    TEXT,
    HeaderColumns,
    key_of,
)
from crosswire.pipeline.decode.micromsg2_messages import Messages, begun_before
from crosswire.pipeline.decode.scanners import micromsg2 as scanner
from crosswire.pipeline.decode.text import (
    Coded,
    Decimal,
    Fixed,
    Hexadecimal,
    Quoted,
    Raw,
    Vocabulary,
    by_code,
    text,
    words,
)
from crosswire.wire.micromsg2 import layout
from crosswire.wire.micromsg2.frames import Command, Error, Handshake, parse_handshake
from crosswire.wire.micromsg2.values import parse_call

__all__ = ["describe"]

# Kinds: those of messages, by the prefix of their destination; then others.
_QUEUE: Final = full_name("")
_KINDS: Final = (
    *map(kind_of_destination, (*PREFIXES, _QUEUE)),
    *(RESPONSE, ACKNOWLEDGEMENT, CONTROL, HANDSHAKE),
)
_RESPONSE, _ACKNOWLEDGEMENT, _CONTROL, _GREETING = range(BARE + 1, len(_KINDS))

_Memories = Memories[MicroMsg2Memory]


def describe(rows: FrameRows, memories: _Memories) -> DescriptionColumns:
    """What the tables have of each row."""
    handshake, handshakes = _handshakes(rows)
    call, calls = _calls(rows)
    begun = begun_before(memories)
    headers = HeaderColumns(rows, [each.message for each in begun])
    messages = Messages(rows, begun, headers.wrong)
    asked, before = _matched(rows, memories, messages, headers)
    use, uses = _in_use(rows, memories, handshake, handshakes)
    acks = by_code(use, [name in ACKS for name in uses], False)
    acks &= rows.slices[scanner.PAYLOAD][1] == layout.ACK_SIZE

    head, whole, responses = messages.head, messages.whole, asked != NONE
    kind = np.where(whole, np.where(responses, _RESPONSE, headers.prefixes[head]), NONE)
    kind[rows.frame == scanner.EXTENSION] = _CONTROL
    kind[acks] = _ACKNOWLEDGEMENT
    kind[handshake != NONE] = _GREETING
    kind = np.where(call == NONE, kind, len(_KINDS) + call)
    description = DescriptionColumns(
        fields=_fields(rows, headers, handshake, handshakes, call, calls),
        kind=words(kind, [*_KINDS, *(each.kind or "" for each in calls)]),
        identifier=headers.column(IDENTIFIER, head, whole),
        destination=_destinations(headers, head, asked, before, call, calls),
        status=_statuses(headers, head, responses, use, uses, call, calls),
        sequence=_sequences(rows, acks),
        payload_size=np.where(rows.frame == scanner.MESSAGE, rows.slices[scanner.PAYLOAD][1], NONE),
        payload_end=np.zeros(len(rows), np.int64),
        begun_at=messages.begun_at(),
        errors=dict(headers.wrong),
    )
    if rows.payloads:
        description.payload = messages.payloads()
        description.content_type = headers.column(CONTENT_TYPE, head, whole, BINARY)
        description.properties = headers.column(TEXT, head, whole)
        description.reply_to = headers.column(REPLY_TO, head, whole)
        description.message_id = null_column(len(rows), pa.int64())
    messages.keep(memories)
    return description


# ------------------------------------------------------------------------- handshakes and commands


class _HandshakeFields(NamedTuple):
    """A handshake: what `fields` has before and after the identity, and the names of the
    extensions. Of a frame that a decoder gave, `before` is all of it."""

    before: str
    after: str
    extensions: tuple[str, ...]


def _handshakes(rows: FrameRows) -> tuple[Numbers, list[_HandshakeFields]]:
    def read(row: int) -> _HandshakeFields:
        frame = rows.decoded.get(row)
        if isinstance(frame, Handshake):
            return _HandshakeFields(describe_small(frame).fields, "", tuple(extensions_of(frame)))
        return _handshake_fields(int(rows.number[row]), rows.part(row, scanner.PAYLOAD))

    chosen = rows.frame == scanner.HANDSHAKE
    return rows.distinct(chosen, rows.slices[scanner.PAYLOAD], rows.number.view(np.int64), read)


def _handshake_fields(version: int, extensions: bytes) -> _HandshakeFields:
    no_identity = bytes(1)
    frame, _ = parse_handshake(version.to_bytes(3) + no_identity + extensions, 0, 0, 0)
    assert isinstance(frame, Handshake)
    before, _, after = describe_small(frame).fields.partition('""')
    return _HandshakeFields(before, after, tuple(extensions_of(frame)))


def _calls(rows: FrameRows) -> tuple[Numbers, list[Described]]:
    """By row the code of a command or error, and the description of each code."""
    kinds: dict[int, Any] = {scanner.COMMAND: Command, scanner.ERROR: Error}

    def read(row: int) -> Described:
        frame = rows.decoded.get(row)
        if frame is None:
            frame = kinds[int(rows.frame[row])](*parse_call(rows.part(row, scanner.PAYLOAD)))
        return describe_small(frame)

    chosen = (rows.frame == scanner.COMMAND) | (rows.frame == scanner.ERROR)
    return rows.distinct(chosen, rows.slices[scanner.PAYLOAD], rows.frame, read)


def _in_use(
    rows: FrameRows, memories: _Memories, handshake: Numbers, handshakes: list[_HandshakeFields]
) -> tuple[Numbers, list[str]]:
    """By row the code of the extension that an extension frame belongs to, and the codes' names:
    the frame has a number, to which the opener's latest handshake gives a name."""
    lists: Vocabulary[tuple[str, ...]] = Vocabulary()
    named = by_code(handshake, lists.codes(each.extensions for each in handshakes), NONE)
    before = np.full(len(memories.stays), NONE)
    for owner, memory in memories.known.items():
        before[owner] = lists.code(tuple(memory.extensions))
    naming = (handshake != NONE) & rows.forward
    latest = np.maximum.accumulate(np.where(naming, np.arange(len(rows)), NONE))
    here = (latest != NONE) & (rows.owner[latest] == rows.owner)
    which = np.where(here, named[latest], before[rows.owner])
    every = list(lists)
    for row in np.flatnonzero(naming & memories.stays[rows.owner]).tolist():
        memories.of(int(rows.owner[row])).extensions = list(every[named[row]])
    sizes = np.array([len(each) for each in every], np.int64)
    number = rows.number.view(np.int64)
    known = (rows.frame == scanner.EXTENSION) & (number > 0) & (number <= by_code(which, sizes, 0))
    use = np.where(known, by_code(which, np.cumsum(sizes) - sizes, 0) + number - 1, NONE)
    return use, [name for each in every for name in each]


# ----------------------------------------------------------------------------------------- answers


_Asked = tuple[tuple[bool, str, str | None], tuple[str, str]]
"""Key and value of a pending request, as a memory has them."""


def _matched(
    rows: FrameRows, memories: _Memories, messages: Messages, headers: HeaderColumns
) -> tuple[Numbers, list[str]]:
    """By row the row of the request that it answers, where a row after the last is a request of an
    earlier batch; and the destinations of those. A message with `reply-to` is a request, unless it
    answers one itself."""
    count, head, whole = len(rows), messages.head, messages.whole
    matching = Matching(rows, memories, lambda memory: memory.asked)
    asks = whole & (headers.lengths[REPLY_TO][head] != NONE)
    if not (asks.any() or matching.keys):
        return np.full(count, NONE), []
    # The keys of requests and possible responses by row, and after the last row, the keys that
    # requests would have as responses.
    asking = np.flatnonzero(asks)
    starts, lengths = headers.keys(NAME, np.append(head, head[asking]))
    lengths[:count][~whole] = NONE
    starts[asking], lengths[asking] = headers.keys(REPLY_TO, head[asking])
    codes = matching.texts(headers.octets, starts, lengths, key_of)
    own, might, before = np.split(codes, [count, count + len(asking)])
    answers = np.full(count, NONE)
    answers[asking] = might
    steps = np.where(whole, np.where(asks, PUT, GET), PASS)
    partner = matching.partners(np.append(own, before), steps, answers)
    staying = asking[memories.stays[rows.owner[asking]]]
    asked = _asked(rows, headers, staying, head[staying]) if len(staying) else {}
    matching.remember(asked.__getitem__)
    return partner, [destination for _, destination in matching.values]


def _asked(
    rows: FrameRows, headers: HeaderColumns, chosen: Numbers, head: Numbers
) -> dict[int, _Asked]:
    """By row: key and value of requests, to be remembered."""
    every = np.ones(len(chosen), np.bool_)
    names, replies, identifiers = (
        headers.column(which, head, every).to_pylist() for which in (NAME, REPLY_TO, IDENTIFIER)
    )
    destinations = [full_name(name) for name in names]
    keys = zip(rows.forward[chosen].tolist(), replies, identifiers, strict=True)
    values = ((kind_of_destination(each), each) for each in destinations)
    return dict(zip(chosen.tolist(), zip(keys, values, strict=True), strict=True))


# ----------------------------------------------------------------------------------------- columns


def _fields(
    rows: FrameRows,
    headers: HeaderColumns,
    handshake: Numbers,
    handshakes: list[_HandshakeFields],
    call: Numbers,
    calls: list[Described],
) -> pa.Array:
    count, messages, extensions = (
        len(rows),
        rows.frame == scanner.MESSAGE,
        rows.frame == scanner.EXTENSION,
    )
    kind = np.where(messages, 0, np.where(extensions, 1, NONE))
    opening = np.where(handshake == NONE, kind, 2 + handshake)
    opening[call != NONE] = 2 + len(handshakes) + call[call != NONE]
    closing = np.where(messages, rows.detail, np.where(extensions, 2, NONE))
    payloads, sizes = rows.slices[scanner.PAYLOAD]
    return text(
        count,
        Coded(
            opening,
            ['{"sequence":', '{"id":']
            + [each.before for each in handshakes]
            + [each.fields for each in calls],
        ),
        Decimal(np.where(messages, rows.sequence, rows.number.view(np.int64)), kind != NONE),
        Coded(kind, [',"destination":', ',"payload":"']),
        Quoted(headers.octets, headers.starts[NAME][:count], headers.lengths[NAME][:count]),
        Fixed(',"properties":', messages),
        Raw(headers.octets, headers.starts[TEXT][:count], headers.lengths[TEXT][:count]),
        Hexadecimal(rows.octets, payloads, np.where(extensions, sizes, NONE)),
        Coded(
            np.where(handshake == NONE, closing, 3 + handshake),
            [',"continued":false}', ',"continued":true}', '"}']
            + [each.after for each in handshakes],
        ),
    )


def _destinations(
    headers: HeaderColumns,
    head: Numbers,
    asked: Numbers,
    before: list[str],
    call: Numbers,
    calls: list[Described],
) -> pa.Array:
    """A response has the destination of its request."""
    count = len(head)
    from_before = asked >= count
    named = np.where(asked == NONE, head, head[np.where(from_before, NONE, asked)])
    named[from_before] = NONE
    description = np.where(from_before, asked - count, NONE)
    has = by_code(call, [each.destination is not None for each in calls], False)
    description[has] = len(before) + call[has]
    return text(
        count,
        Fixed(_QUEUE, (named != NONE) & (headers.prefixes[named] == BARE)),
        headers.part(NAME, named, named != NONE),
        Coded(description, [*before, *(each.destination or "" for each in calls)]),
        valid=(named != NONE) | (description != NONE),
    )


def _statuses(
    headers: HeaderColumns,
    head: Numbers,
    responses: Flags,
    use: Numbers,
    uses: list[str],
    call: Numbers,
    calls: list[Described],
) -> pa.Array:
    """The outcome of a response, or the extension of a frame."""
    failed = responses & (headers.lengths[ERROR][head] != NONE)
    code = np.where(use == NONE, NONE, 1 + use)
    code[responses & ~failed] = 0
    has = by_code(call, [each.status is not None for each in calls], False)
    code[has] = 1 + len(uses) + call[has]
    return text(
        len(head),
        Coded(code, [SUCCESS, *uses, *(each.status or "" for each in calls)]),
        headers.part(ERROR, head, failed),
        valid=(code != NONE) | failed,
    )


def _sequences(rows: FrameRows, acks: Flags) -> Numbers:
    """The sequence number of a message, or of the one that a frame acknowledges."""
    sequence = np.where(rows.frame == scanner.MESSAGE, rows.sequence, NONE)
    chosen = np.flatnonzero(acks)
    at = rows.slices[scanner.PAYLOAD][0][chosen]
    sequence[chosen] = rows.octets[at].astype(np.int64) << 8 | rows.octets[at + 1]
    return sequence
