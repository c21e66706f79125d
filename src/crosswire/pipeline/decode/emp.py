"""EMP in columns: bodies are grouped by the text around `data`, of which there are few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from crosswire.errors import FrameError
from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.contract import DescriptionColumns, FrameRows, Memories, null_column
from crosswire.pipeline.decode.emp_data import Data, find
from crosswire.pipeline.decode.json import Base64, Unescaped, surely_base64
from crosswire.pipeline.decode.matching import PASS, PUT, TAKE, Matching
from crosswire.pipeline.decode.meanings.contract import ACKNOWLEDGEMENT, Described
from crosswire.pipeline.decode.meanings.emp import (
    BINARY,
    JSON,
    TEXT,
    UNASKED,
    EmpBody,
    EmpMemory,
    OperationText,
    Target,
    asked,
    carrying,
    describe_properties,
    operation_around,
    operation_beside,
    published,
    read_request,
    read_response,
)
from crosswire.pipeline.decode.scanners.emp import BODY
from crosswire.pipeline.decode.text import (
    Coded,
    Decimal,
    Fixed,
    Raw,
    TextPart,
    Vocabulary,
    by_code,
    distinct,
    text,
    words,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emp import layout
from crosswire.wire.emp.frames import Bye, Error, Hello, Ping, Pong

__all__ = ["describe"]

# The scanner's codes of frames are the types of messages on the wire.
_EMPTY: Final[dict[int, Frame]] = {
    layout.TYPE_BYE: Bye(),
    layout.TYPE_PING: Ping(),
    layout.TYPE_PONG: Pong(),
}


@dataclass(frozen=True)
class _RowOperations:
    """The operations of rows, as codes of `operations`, NONE for those that are not valid; and
    where their data is, which is empty if there is none."""

    code: Numbers
    operations: list[OperationText]
    data: Data
    errors: dict[int, FrameError]

    def flags(self, operations: list[bool]) -> Flags:
        """By row: the flag of its operation."""
        found: Flags = by_code(self.code, operations, False)
        return found


def describe(rows: FrameRows, memories: Memories[EmpMemory]) -> DescriptionColumns:
    """What the tables have of each row."""
    count = len(rows)
    starts, lengths = rows.slices[BODY]
    calls, responses = rows.frame >= layout.TYPE_REQUEST, rows.frame == layout.TYPE_RESPONSE
    operations_of_rows = _operations(rows, calls)
    codes, operations, data = (
        operations_of_rows.code,
        operations_of_rows.operations,
        operations_of_rows.data,
    )
    carriers, uncertain = _carriers(rows, operations_of_rows)
    read_alone = [_asked(rows, operations_of_rows, row) for row in uncertain]

    targets: Vocabulary[Target] = Vocabulary()
    target = by_code(codes, targets.codes(each.target for each in operations), NONE)
    answer = by_code(codes, targets.codes(each.answer for each in operations), NONE)
    _set_targets(rows, data, carriers, targets, target, answer)
    answer[uncertain] = targets.codes(each for _, each in read_alone)
    _match(rows, memories, responses & (codes != NONE), targets, target, answer)
    goals = [NONE if goal is None else code for code, (_, goal) in enumerate(targets)]
    statuses: Vocabulary[str] = Vocabulary()

    description = DescriptionColumns(
        fields=text(
            count,
            Fixed('{"id":', calls),
            Decimal(rows.number, calls),
            Coded(codes, [each.fields for each in operations]),
        ),
        kind=words(target, [kind for kind, _ in targets]),
        identifier=text(count, Decimal(rows.number, calls), valid=calls),
        destination=words(by_code(target, goals, NONE), [goal or "" for _, goal in targets]),
        status=words(
            by_code(codes, statuses.codes(each.status for each in operations), NONE), list(statuses)
        ),
        sequence=np.full(count, NONE),
        payload_size=np.where(calls, data.closed - data.opened, NONE),
        payload_end=np.where(calls, starts + lengths - data.closed, 0),
        begun_at=np.full(count, NONE),
        errors=operations_of_rows.errors,
    )
    if rows.payloads:
        acknowledged = [kind == ACKNOWLEDGEMENT for kind, _ in targets]
        _describe_messages(description, rows, operations_of_rows, carriers)
        _describe_ids(
            description,
            rows,
            operations_of_rows,
            carriers,
            responses & by_code(target, acknowledged, False),
        )
    description.patch(uncertain, [described for described, _ in read_alone])
    return description


# -------------------------------------------------------------------------------------- operations


def _operations(rows: FrameRows, calls: Flags) -> _RowOperations:
    """By the text around the data; where that was not found, by the whole body."""
    data = find(rows.octets, *rows.slices[BODY], calls)
    code, operations = _operations_around(rows, data)
    errors: dict[int, FrameError] = {}
    left = calls & (code == NONE)
    if left.any():
        data, errors = _read_whole(rows, left, code, operations, data)
    if not calls.all():
        _read_beside(rows, ~calls, code, operations)
    return _RowOperations(code, operations, data, errors)


def _operations_around(rows: FrameRows, data: Data) -> tuple[Numbers, list[OperationText]]:
    starts, lengths = rows.slices[BODY]
    ends, found = starts + lengths, data.opened != NONE
    before, _ = distinct(rows.octets, starts, np.where(found, data.opened - starts, NONE))
    tags = 2 * before + (rows.frame == layout.TYPE_REQUEST)
    around, firsts = distinct(
        rows.octets, data.closed, np.where(found, ends - data.closed, NONE), tags
    )
    operations: list[OperationText] = []
    codes = []
    for row in firsts.tolist():
        operation = operation_around(
            rows.cut(starts[row], data.opened[row]),
            rows.cut(data.closed[row], ends[row]),
            bool(rows.frame[row] == layout.TYPE_REQUEST),
        )
        codes.append(NONE if operation is None else len(operations))
        if operation is not None:
            operations.append(operation)
    return by_code(around, codes, NONE), operations


def _read_whole(
    rows: FrameRows, chosen: Flags, code: Numbers, operations: list[OperationText], data: Data
) -> tuple[Data, dict[int, FrameError]]:
    """Read whole bodies, and find their data, of which no more is known than where it is. Bodies
    that can't be read are errors."""
    starts, lengths = rows.slices[BODY]
    body, firsts = distinct(rows.octets, starts, np.where(chosen, lengths, NONE), rows.frame)
    codes, sizes, after_sizes = [], [], []
    for row in firsts.tolist():
        try:
            operation, _, size, after = _read(rows, row)
        except FrameError:
            codes.append(NONE)
            size = after = 0
        else:
            codes.append(len(operations))
            operations.append(operation)
        sizes.append(size)
        after_sizes.append(after)
    np.copyto(code, by_code(body, codes, NONE), where=chosen)
    closed = np.where(chosen, starts + lengths - by_code(body, after_sizes, 0), data.closed)
    opened = np.where(chosen, closed - by_code(body, sizes, 0), data.opened)
    carries, has_message_id = data.carries & ~chosen, data.has_message_id & ~chosen
    data = replace(
        data, opened=opened, closed=closed, carries=carries, has_message_id=has_message_id
    )
    errors = {}
    for row in np.flatnonzero(chosen & (code == NONE)).tolist():
        try:
            _read(rows, row)
        except FrameError as error:
            error.__traceback__ = None
            errors[row] = error
    return data, errors


def _read(rows: FrameRows, row: int) -> EmpBody:
    read = read_request if rows.frame[row] == layout.TYPE_REQUEST else read_response
    return read(rows.part(row, BODY))


def _read_beside(
    rows: FrameRows, chosen: Flags, code: Numbers, operations: list[OperationText]
) -> None:
    """Frames that are neither request nor response."""
    starts, lengths = rows.slices[BODY]
    tags = rows.frame | rows.detail << 3
    length = np.where(chosen, np.maximum(lengths, 0), NONE)
    other, firsts = distinct(rows.octets, starts, length, tags)
    np.copyto(code, np.where(other == NONE, NONE, other + len(operations)), where=chosen)
    for row in firsts.tolist():
        kind, detail = int(rows.frame[row]), int(rows.detail[row])
        if kind == layout.TYPE_HELLO:
            frame: Frame = Hello(detail)
        elif kind == layout.TYPE_ERROR:
            frame = Error(detail, rows.part(row, BODY).decode())
        else:
            frame = _EMPTY[kind]
        operations.append(operation_beside(frame))


# ----------------------------------------------------------------------------------------- carriers


def _carriers(rows: FrameRows, operations_of_rows: _RowOperations) -> tuple[Flags, list[int]]:
    """Which rows certainly carry a message, as some of the hub's operations do; and the rows of
    such operations that have to be read one by one."""
    data = operations_of_rows.data
    every = operations_of_rows.flags(
        [each.decode is not None for each in operations_of_rows.operations]
    )
    sure = every & data.carries
    sure &= data.has_message_id | ~operations_of_rows.flags(
        [each.has_id for each in operations_of_rows.operations]
    )
    if rows.payloads:
        lengths = np.where(sure & _is_binary(data), data.base64[1], NONE)
        sure &= (lengths == NONE) | surely_base64(rows.octets, data.base64[0], lengths)
    return sure, np.flatnonzero(every & ~sure).tolist()


def _is_binary(data: Data) -> Flags:
    neither: Flags = (data.json[1] == NONE) & (data.text[1] == NONE)
    return neither


def _asked(
    rows: FrameRows, operations_of_rows: _RowOperations, row: int
) -> tuple[Described, Target | None]:
    starts, lengths = rows.slices[BODY]
    opened, closed = (
        int(operations_of_rows.data.opened[row]),
        int(operations_of_rows.data.closed[row]),
    )
    end = int(starts[row] + lengths[row])
    data = rows.cut(opened, closed)
    body = EmpBody(
        operations_of_rows.operations[operations_of_rows.code[row]],
        data,
        closed - opened,
        end - closed,
    )
    described, answer = asked(int(rows.number[row]), body)
    if not rows.payloads:
        described = msgspec.structs.replace(
            described, payload=None, content_type=None, properties=None, message_id=None
        )
    return described, answer


def _set_targets(
    rows: FrameRows,
    data: Data,
    carriers: Flags,
    targets: Vocabulary[Target],
    target: Numbers,
    answer: Numbers,
) -> None:
    """The target of a row that carries a message is the message's destination."""
    if not carriers.any():
        return
    starts, lengths = data.destination
    goal, firsts = distinct(rows.octets, starts, np.where(carriers, lengths, NONE))
    found = [
        carrying(msgspec.json.decode(b'"%b"' % _slice(rows, data.destination, row), type=str))
        for row in firsts.tolist()
    ]
    np.copyto(
        target, by_code(goal, targets.codes(there for there, _ in found), NONE), where=carriers
    )
    np.copyto(answer, by_code(goal, targets.codes(back for _, back in found), NONE), where=carriers)


def _slice(rows: FrameRows, member: tuple[Numbers, Numbers], row: int) -> bytes:
    start = member[0][row]
    return rows.cut(start, start + member[1][row])


def _match(
    rows: FrameRows,
    memories: Memories[EmpMemory],
    responses: Flags,
    targets: Vocabulary[Target],
    target: Numbers,
    answer: Numbers,
) -> None:
    """The target of a response is the `answer` of its request."""
    matching = Matching(rows, memories, lambda memory: memory.asked)
    steps = np.where(responses, TAKE, np.where(answer == NONE, PASS, PUT))
    partner = matching.partners(matching.numbered(rows.number), steps)
    given = np.append(answer, targets.codes(matching.values))
    every, numbers, forward = list(targets), rows.number, rows.forward
    matching.remember(lambda row: ((bool(forward[row]), int(numbers[row])), every[answer[row]]))
    found = np.where(partner == NONE, targets.code(UNASKED), given[partner])
    np.copyto(target, found, where=responses)


# ---------------------------------------------------------------------------------------- messages


def _describe_messages(
    description: DescriptionColumns,
    rows: FrameRows,
    operations_of_rows: _RowOperations,
    carriers: Flags,
) -> None:
    """Set payload, content type and properties."""
    data, count = operations_of_rows.data, len(rows)
    written = data.closed > data.opened
    shown = (
        operations_of_rows.flags([each.shown for each in operations_of_rows.operations])
        & written
        & ~carriers
    )
    as_json = carriers & (data.json[1] != NONE)
    as_text = carriers & (data.text[1] != NONE) & ~as_json
    binary = carriers & _is_binary(data)

    # Most payloads are slices of the body, unchanged.
    starts = np.where(as_json, data.json[0], np.where(as_text, data.text[0], data.opened))
    sizes = np.where(as_json, data.json[1], np.where(as_text, data.text[1], NONE))
    sizes = np.where(shown, data.closed - data.opened, sizes)
    escaped = as_text & data.is_escaped
    parts: list[TextPart] = [Raw(rows.octets, starts, np.where(escaped, NONE, sizes))]
    if escaped.any():
        parts.append(Unescaped(rows.octets, starts, np.where(escaped, sizes, NONE)))
    if binary.any():
        lengths = np.where(binary, data.base64[1], NONE)
        parts.append(Base64(rows.octets, data.base64[0], lengths))
    description.payload = text(count, *parts, valid=shown | carriers).view(pa.binary())

    types: Vocabulary[str] = Vocabulary()
    content_type = by_code(
        operations_of_rows.code,
        types.codes(each.content_type for each in operations_of_rows.operations),
        NONE,
    )
    content_type[~written] = NONE
    for name, chosen in ((JSON, as_json), (TEXT, as_text), (BINARY, binary)):
        content_type[chosen] = types.code(name)
    description.content_type = words(content_type, list(types))
    description.properties = _properties(rows, data, carriers)
    description.reply_to = null_column(count)


def _properties(rows: FrameRows, data: Data, carriers: Flags) -> pa.Array:
    starts, lengths = data.properties
    code, firsts = distinct(rows.octets, starts, np.where(carriers, lengths, NONE))
    found = [describe_properties(_slice(rows, data.properties, row)) for row in firsts.tolist()]
    return words(code, found)


def _describe_ids(
    description: DescriptionColumns,
    rows: FrameRows,
    operations_of_rows: _RowOperations,
    carriers: Flags,
    acknowledgements: Flags,
) -> None:
    """Set the hub's id of messages that it delivers or has accepted."""
    data = operations_of_rows.data
    delivered = carriers & operations_of_rows.flags(
        [each.has_id for each in operations_of_rows.operations]
    )
    has_id = (delivered | acknowledgements & data.has_message_id) & data.has_id
    ids = data.id.copy()
    for row in np.flatnonzero(acknowledgements & ~data.has_message_id).tolist():
        number = published(rows.cut(data.opened[row], data.closed[row]))
        has_id[row] = number is not None
        ids[row] = number or 0
    description.message_id = pa.array(ids, mask=~has_id)
