"""EMP in columns: by what stands around `data`, which comes again and again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from crosswire.errors import FrameError
from crosswire.pipeline.columns.contract import FrameRows, Readings, Told, nothing
from crosswire.pipeline.columns.emp_data import Data, find
from crosswire.pipeline.columns.json import Base64, Unescaped, surely_base64
from crosswire.pipeline.columns.matching import PASS, PUT, TAKE, Matching
from crosswire.pipeline.columns.text import (
    Coded,
    Decimal,
    Fixed,
    Flags,
    Part,
    Raw,
    Vocabulary,
    among,
    distinct,
    text,
    words,
)
from crosswire.pipeline.protocols.contract import ACKNOWLEDGEMENT, Described
from crosswire.pipeline.protocols.emp import (
    BINARY,
    JSON,
    TEXT,
    UNASKED,
    Body,
    EmpReading,
    Place,
    Said,
    asked,
    carrying,
    properties_told,
    published,
    read_request,
    read_response,
    said_around,
    said_beside,
)
from crosswire.wire.bulk import NONE, Numbers
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import Bye, Error, Hello, Ping, Pong

__all__ = ["describe"]

# What the scanner calls frames, and its slice.
_HELLO, _BYE, _PING, _PONG, _ERROR, _REQUEST, _RESPONSE = range(7)
_EMPTY: Final[dict[int, Frame]] = {_BYE: Bye(), _PING: Ping(), _PONG: Pong()}
_BODY: Final = 0


@dataclass(frozen=True)
class _Spoken:
    """What rows say, as codes of `sayings`, NONE for those that are wrong; and where their data is,
    which is empty if it is not written."""

    code: Numbers
    sayings: list[Said]
    data: Data
    errors: dict[int, FrameError]

    def flags(self, sayings: list[bool]) -> Flags:
        found: Flags = among(self.code, sayings, False)
        return found


def describe(rows: FrameRows, readings: Readings[EmpReading]) -> Told:
    count = len(rows)
    starts, lengths = rows.slices[_BODY]
    talks, responses = rows.frame >= _REQUEST, rows.frame == _RESPONSE
    spoken = _spoken(rows, talks)
    said, sayings, data = spoken.code, spoken.sayings, spoken.data
    carriers, doubtful = _carriers(rows, spoken)
    looked_at = [_asked(rows, spoken, row) for row in doubtful]

    places: Vocabulary[Place] = Vocabulary()
    place = among(said, places.codes(each.place for each in sayings), NONE)
    answer = among(said, places.codes(each.answer for each in sayings), NONE)
    _redirect(rows, data, carriers, places, place, answer)
    answer[doubtful] = places.codes(each for _, each in looked_at)
    _match(rows, readings, responses & (said != NONE), places, place, answer)
    goals = [NONE if goal is None else code for code, (_, goal) in enumerate(places)]
    statuses: Vocabulary[str] = Vocabulary()

    told = Told(
        fields=text(
            count,
            Fixed('{"id":', talks),
            Decimal(rows.number, talks),
            Coded(said, [each.fields for each in sayings]),
        ),
        kind=words(place, [kind for kind, _ in places]),
        identifier=text(count, Decimal(rows.number, talks), valid=talks),
        destination=words(among(place, goals, NONE), [goal or "" for _, goal in places]),
        status=words(
            among(said, statuses.codes(each.status for each in sayings), NONE), list(statuses)
        ),
        sequence=np.full(count, NONE),
        payload_size=np.where(talks, data.closed - data.opened, NONE),
        payload_end=np.where(talks, starts + lengths - data.closed, 0),
        begun_at=np.full(count, NONE),
        errors=spoken.errors,
    )
    if rows.payloads:
        acknowledged = [kind == ACKNOWLEDGEMENT for kind, _ in places]
        _tell_messages(told, rows, spoken, carriers)
        _tell_ids(told, rows, spoken, carriers, responses & among(place, acknowledged, False))
    told.patch(doubtful, [described for described, _ in looked_at])
    return told


# -------------------------------------------------------------------------------------------- said


def _spoken(rows: FrameRows, talks: Flags) -> _Spoken:
    """By what is around the data; where that was not found, by the whole body."""
    data = find(rows.octets, *rows.slices[_BODY], talks)
    code, sayings = _said_around(rows, data)
    errors: dict[int, FrameError] = {}
    left = talks & (code == NONE)
    if left.any():
        data, errors = _read_whole(rows, left, code, sayings, data)
    if not talks.all():
        _read_beside(rows, ~talks, code, sayings)
    return _Spoken(code, sayings, data, errors)


def _said_around(rows: FrameRows, data: Data) -> tuple[Numbers, list[Said]]:
    starts, lengths = rows.slices[_BODY]
    ends, found = starts + lengths, data.opened != NONE
    before, _ = distinct(rows.octets, starts, np.where(found, data.opened - starts, NONE))
    tags = 2 * before + (rows.frame == _REQUEST)
    around, firsts = distinct(
        rows.octets, data.closed, np.where(found, ends - data.closed, NONE), tags
    )
    sayings: list[Said] = []
    codes = []
    for row in firsts.tolist():
        said = said_around(
            rows.cut(starts[row], data.opened[row]),
            rows.cut(data.closed[row], ends[row]),
            bool(rows.frame[row] == _REQUEST),
        )
        codes.append(NONE if said is None else len(sayings))
        if said is not None:
            sayings.append(said)
    return among(around, codes, NONE), sayings


def _read_whole(
    rows: FrameRows, chosen: Flags, code: Numbers, sayings: list[Said], data: Data
) -> tuple[Data, dict[int, FrameError]]:
    """Bodies that are read one by one, and where their data is, of which no more is known; those
    that can't be read are errors."""
    starts, lengths = rows.slices[_BODY]
    body, firsts = distinct(rows.octets, starts, np.where(chosen, lengths, NONE), rows.frame)
    codes, sizes, behind = [], [], []
    for row in firsts.tolist():
        try:
            said, _, size, after = _read(rows, row)
        except FrameError:
            codes.append(NONE)
            size = after = 0
        else:
            codes.append(len(sayings))
            sayings.append(said)
        sizes.append(size)
        behind.append(after)
    np.copyto(code, among(body, codes, NONE), where=chosen)
    closed = np.where(chosen, starts + lengths - among(body, behind, 0), data.closed)
    opened = np.where(chosen, closed - among(body, sizes, 0), data.opened)
    carries, tells_id = data.carries & ~chosen, data.tells_id & ~chosen
    data = replace(data, opened=opened, closed=closed, carries=carries, tells_id=tells_id)
    errors = {}
    for row in np.flatnonzero(chosen & (code == NONE)).tolist():
        try:
            _read(rows, row)
        except FrameError as error:
            error.__traceback__ = None
            errors[row] = error
    return data, errors


def _read(rows: FrameRows, row: int) -> Body:
    read = read_request if rows.frame[row] == _REQUEST else read_response
    return read(rows.part(row, _BODY))


def _read_beside(rows: FrameRows, chosen: Flags, code: Numbers, sayings: list[Said]) -> None:
    """What is neither request nor response."""
    starts, lengths = rows.slices[_BODY]
    tags = rows.frame | rows.detail << 3
    length = np.where(chosen, np.maximum(lengths, 0), NONE)
    other, firsts = distinct(rows.octets, starts, length, tags)
    np.copyto(code, np.where(other == NONE, NONE, other + len(sayings)), where=chosen)
    for row in firsts.tolist():
        kind, detail = int(rows.frame[row]), int(rows.detail[row])
        if kind == _HELLO:
            frame: Frame = Hello(detail)
        elif kind == _ERROR:
            frame = Error(detail, rows.part(row, _BODY).decode())
        else:
            frame = _EMPTY[kind]
        sayings.append(said_beside(frame))


# ----------------------------------------------------------------------------------------- carried


def _carriers(rows: FrameRows, spoken: _Spoken) -> tuple[Flags, list[int]]:
    """The hub's own operations that carry messages, as far as is sure what they do; and the rows
    that must be looked at."""
    data = spoken.data
    every = spoken.flags([each.decode is not None for each in spoken.sayings])
    sure = every & data.carries
    sure &= data.tells_id | ~spoken.flags([each.has_id for each in spoken.sayings])
    if rows.payloads:
        lengths = np.where(sure & _is_binary(data), data.base64[1], NONE)
        sure &= (lengths == NONE) | surely_base64(rows.octets, data.base64[0], lengths)
    return sure, np.flatnonzero(every & ~sure).tolist()


def _is_binary(data: Data) -> Flags:
    neither: Flags = (data.json[1] == NONE) & (data.text[1] == NONE)
    return neither


def _asked(rows: FrameRows, spoken: _Spoken, row: int) -> tuple[Described, Place | None]:
    starts, lengths = rows.slices[_BODY]
    opened, closed = int(spoken.data.opened[row]), int(spoken.data.closed[row])
    end = int(starts[row] + lengths[row])
    data = rows.cut(opened, closed)
    body = Body(spoken.sayings[spoken.code[row]], data, closed - opened, end - closed)
    described, answer = asked(int(rows.number[row]), body)
    if not rows.payloads:
        described = msgspec.structs.replace(
            described, payload=None, content_type=None, properties=None, message_id=None
        )
    return described, answer


def _redirect(
    rows: FrameRows,
    data: Data,
    carriers: Flags,
    places: Vocabulary[Place],
    place: Numbers,
    answer: Numbers,
) -> None:
    """What carries a message goes where that does."""
    if not carriers.any():
        return
    starts, lengths = data.destination
    goal, firsts = distinct(rows.octets, starts, np.where(carriers, lengths, NONE))
    found = [
        carrying(msgspec.json.decode(b'"%b"' % _slice(rows, data.destination, row), type=str))
        for row in firsts.tolist()
    ]
    np.copyto(place, among(goal, places.codes(there for there, _ in found), NONE), where=carriers)
    np.copyto(answer, among(goal, places.codes(back for _, back in found), NONE), where=carriers)


def _slice(rows: FrameRows, member: tuple[Numbers, Numbers], row: int) -> bytes:
    start = member[0][row]
    return rows.cut(start, start + member[1][row])


def _match(
    rows: FrameRows,
    readings: Readings[EmpReading],
    responses: Flags,
    places: Vocabulary[Place],
    place: Numbers,
    answer: Numbers,
) -> None:
    """A response has the place that its request has for its answer."""
    matching = Matching(rows, readings, lambda reading: reading.asked)
    steps = np.where(responses, TAKE, np.where(answer == NONE, PASS, PUT))
    partner = matching.partners(matching.numbered(rows.number), steps)
    given = np.append(answer, places.codes(matching.values))
    every, numbers, forward = list(places), rows.number, rows.forward
    matching.remember(lambda row: ((bool(forward[row]), int(numbers[row])), every[answer[row]]))
    found = np.where(partner == NONE, places.code(UNASKED), given[partner])
    np.copyto(place, found, where=responses)


# ---------------------------------------------------------------------------------------- messages


def _tell_messages(told: Told, rows: FrameRows, spoken: _Spoken, carriers: Flags) -> None:
    """What is the payload, and what is said about it."""
    data, count = spoken.data, len(rows)
    written = data.closed > data.opened
    shown = spoken.flags([each.shown for each in spoken.sayings]) & written & ~carriers
    as_json = carriers & (data.json[1] != NONE)
    as_text = carriers & (data.text[1] != NONE) & ~as_json
    binary = carriers & _is_binary(data)

    # Most of it is taken as it stands.
    starts = np.where(as_json, data.json[0], np.where(as_text, data.text[0], data.opened))
    sizes = np.where(as_json, data.json[1], np.where(as_text, data.text[1], NONE))
    sizes = np.where(shown, data.closed - data.opened, sizes)
    escaped = as_text & data.is_escaped
    parts: list[Part] = [Raw(rows.octets, starts, np.where(escaped, NONE, sizes))]
    if escaped.any():
        parts.append(Unescaped(rows.octets, starts, np.where(escaped, sizes, NONE)))
    if binary.any():
        lengths = np.where(binary, data.base64[1], NONE)
        parts.append(Base64(rows.octets, data.base64[0], lengths))
    told.payload = text(count, *parts, valid=shown | carriers).view(pa.binary())

    types: Vocabulary[str] = Vocabulary()
    content_type = among(
        spoken.code, types.codes(each.content_type for each in spoken.sayings), NONE
    )
    content_type[~written] = NONE
    for name, chosen in ((JSON, as_json), (TEXT, as_text), (BINARY, binary)):
        content_type[chosen] = types.code(name)
    told.content_type = words(content_type, list(types))
    told.properties = _properties(rows, data, carriers)
    told.reply_to = nothing(count)


def _properties(rows: FrameRows, data: Data, carriers: Flags) -> pa.Array:
    starts, lengths = data.properties
    code, firsts = distinct(rows.octets, starts, np.where(carriers, lengths, NONE))
    found = [properties_told(_slice(rows, data.properties, row)) for row in firsts.tolist()]
    return words(code, found)


def _tell_ids(
    told: Told, rows: FrameRows, spoken: _Spoken, carriers: Flags, acknowledgements: Flags
) -> None:
    """The hub's, of what it delivers and of what it takes."""
    data = spoken.data
    delivered = carriers & spoken.flags([each.has_id for each in spoken.sayings])
    has_id = (delivered | acknowledgements & data.tells_id) & data.has_id
    ids = data.id.copy()
    for row in np.flatnonzero(acknowledgements & ~data.tells_id).tolist():
        number = published(rows.cut(data.opened[row], data.closed[row]))
        has_id[row] = number is not None
        ids[row] = number or 0
    told.message_id = pa.array(ids, mask=~has_id)
