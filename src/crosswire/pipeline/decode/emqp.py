"""eMQP in columns: messages are grouped by queue or topic and headers, of which there are few."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.contract import DescriptionColumns, FrameRows, Memories, null_column
from crosswire.pipeline.decode.kernels import INTS, OCTETS, OUT_TRUTHS, kernel
from crosswire.pipeline.decode.matching import GET, PASS, PUT, TAKE, Matching
from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    GOODBYE,
    HEARTBEAT,
    RESPONSE,
    SUBSCRIPTION,
)
from crosswire.pipeline.decode.meanings.emqp import (
    BINARY,
    MARKS,
    OPENINGS,
    EmqpMemory,
    MessageRoute,
    address_of,
    outcome_of,
)
from crosswire.pipeline.decode.scanners import emqp as scanner
from crosswire.pipeline.decode.scanners.octets import valid_utf8
from crosswire.pipeline.decode.text import (
    Coded,
    Fixed,
    Quoted,
    Raw,
    TextPart,
    Vocabulary,
    by_code,
    distinct,
    octets_of,
    slices,
    text,
    words,
)
from crosswire.pipeline.decode.zmtp import ZmtpDescription, below

__all__ = ["describe"]

# By frame: its kind, if that does not depend on more, and the names of its slices in `fields`.
_KINDS: Final = {
    scanner.REPLY: RESPONSE,
    scanner.ACK: ACKNOWLEDGEMENT,
    scanner.HEARTBEAT: HEARTBEAT,
    scanner.READY: CONTROL,
    scanner.DISCONNECT: GOODBYE,
    scanner.KBAI: GOODBYE,
    scanner.INFORM: SUBSCRIPTION,
    scanner.SCHEDULE: CONTROL,
    scanner.UNSCHEDULE: CONTROL,
    scanner.ADMIN: CONTROL,
}
_ABOUTS: Final = {
    scanner.REPLY: "request",
    scanner.ACK: "acknowledged",
    scanner.HEARTBEAT: "timestamp",
    scanner.INFORM: "queues",
    scanner.SCHEDULE: "interval",
    scanner.UNSCHEDULE: "interval",
    scanner.ADMIN: "command",
}
_LASTS: Final = {scanner.INFORM: "peer", scanner.SCHEDULE: "cron", scanner.UNSCHEDULE: "cron"}
_ABOUT_WORDS: Final = [f',"{_ABOUTS.get(frame, "")}":' for frame in range(len(scanner.FRAMES))]
_LAST_WORDS: Final = [f',"{_LASTS.get(frame, "")}":' for frame in range(len(scanner.FRAMES))]

_OPENINGS: Final = tuple(OPENINGS)
_ERROR, _TIMEOUT, _ESCAPE = (tuple(np.frombuffer(mark[:3], np.uint8)) for mark in MARKS)
_ONE, _TWO = np.uint64(1), np.uint64(2)


class _Texts(NamedTuple):
    """Start and length of a text for each row; a length of NONE if there is none."""

    starts: Numbers
    lengths: Numbers


class _Ids(NamedTuple):
    """The short texts of rows, copied together: they are read several times, and in the capture
    they are far apart.

    `key` is the msgid of the request that a row is, that a result answers, or that the body of a
    receipt may be.
    """

    octets: Bytes
    msgid: _Texts
    about: _Texts
    key: _Texts


def describe(rows: FrameRows, memories: Memories[EmqpMemory]) -> DescriptionColumns:
    """What the tables have of each row."""
    count, frame = len(rows), rows.frame
    bodies, body_bytes = rows.slices[scanner.PAYLOAD]
    below_frames = below(rows)
    address, addresses = _addressed(rows)
    replies, named = frame == scanner.REPLY, rows.slices[scanner.ABOUT][1] != NONE
    results, receipts = replies & named, replies & ~named
    matching = Matching(rows, memories, lambda memory: memory.asked)
    ids = _ids(rows, receipts, matching.keys)
    destination, destinations, found = _matched(rows, matching, ids, receipts, address, addresses)
    acknowledged = receipts & found
    status, statuses = _statuses(rows, results, acknowledged)
    bodied = (body_bytes >= 0) & ~acknowledged
    description = DescriptionColumns(
        fields=_fields(rows, ids, below_frames, address, addresses),
        kind=_kinds(rows, below_frames, address, addresses, receipts, acknowledged),
        identifier=_identifiers(rows, ids, results | (frame == scanner.ACK), acknowledged),
        destination=words(destination, destinations),
        status=words(status, statuses),
        sequence=np.full(count, NONE),
        payload_size=np.where(bodied, body_bytes, NONE),
        payload_end=np.where(bodied, rows.trailing, 0),
        begun_at=np.full(count, NONE),
    )
    if rows.payloads:
        description.payload = slices(rows.octets, bodies, description.payload_size)
        description.content_type = words(bodied.astype(np.int64) - 1, [BINARY])
        timed = (frame == scanner.SCHEDULE) | (frame == scanner.UNSCHEDULE)
        properties = [each.properties for each in addresses]
        description.properties = words(np.where(timed, NONE, address), properties)
        description.reply_to = null_column(count)
        description.message_id = null_column(count, pa.int64())
    return description


def _fields(
    rows: FrameRows,
    ids: _Ids,
    below_frames: ZmtpDescription,
    address: Numbers,
    addresses: list[MessageRoute],
) -> pa.Array:
    lasts, last_bytes = rows.slices[scanner.LAST]
    has_msgid = ids.msgid.lengths >= 0
    last: list[TextPart] = []
    if last_bytes.max(initial=NONE) != NONE:
        last = [
            Coded(np.where(last_bytes == NONE, NONE, rows.frame), _LAST_WORDS),
            Quoted(rows.octets, lasts, last_bytes),
        ]
    return text(
        len(rows),
        *below_frames.fields,
        Fixed('{"msgid":', has_msgid),
        Quoted(ids.octets, *ids.msgid),
        Coded(np.where(address == NONE, NONE, has_msgid), ["{", ","]),
        Coded(address, [each.fields for each in addresses]),
        Coded(np.where(ids.about.lengths == NONE, NONE, rows.frame), _ABOUT_WORDS),
        Quoted(ids.octets, *ids.about),
        *last,
        Fixed("}", below_frames.code == NONE),
    )


def _kinds(
    rows: FrameRows,
    below_frames: ZmtpDescription,
    address: Numbers,
    addresses: list[MessageRoute],
    receipts: Flags,
    acknowledged: Flags,
) -> pa.Array:
    """By the frame; where that is not enough, by ZMTP's description or by the address."""
    kinds: Vocabulary[str] = Vocabulary()
    by_frame = kinds.codes(map(_KINDS.get, range(scanner.NESTED_COMMAND + 1)))
    by_address = by_code(address, kinds.codes(each.kind for each in addresses), NONE)
    by_below = by_code(
        below_frames.code, kinds.codes(each.kind for each in below_frames.described), NONE
    )
    kind = by_frame[rows.frame]
    kind = np.where(kind == NONE, np.maximum(by_address, by_below), kind)
    kind[receipts] = kinds.code(CONTROL)
    kind[acknowledged] = kinds.code(ACKNOWLEDGEMENT)
    return words(kind, list(kinds))


def _identifiers(rows: FrameRows, ids: _Ids, by_about: Flags, by_key: Flags) -> pa.Array:
    starts, lengths = (
        np.where(by_key, key, np.where(by_about, about, msgid))
        for msgid, about, key in zip(ids.msgid, ids.about, ids.key, strict=True)
    )
    return text(len(rows), Raw(ids.octets, starts, lengths), valid=lengths >= 0)


def _addressed(rows: FrameRows) -> tuple[Numbers, list[MessageRoute]]:
    """By row the code of queue or topic with headers, and the description of each code.

    On the wire the headers follow the name, with their length between them: one slice is compared.
    """
    (names, name_bytes), (headers, headers_bytes) = (
        rows.slices[scanner.NAME],
        rows.slices[scanner.HEADERS],
    )
    to_topic = (rows.frame == scanner.PUBLISH) | (rows.frame == scanner.DELIVERY)
    length = np.where(headers_bytes == NONE, name_bytes, headers + headers_bytes - names)
    tags = to_topic | name_bytes << 1 | headers_bytes + 1 << 32
    code, firsts = distinct(
        rows.octets, names, np.where(rows.frame <= scanner.ZMTP_MESSAGE, NONE, length), tags
    )
    return code, [
        address_of(
            not to_topic[row],
            rows.part(row, scanner.NAME).decode(),
            None if headers_bytes[row] == NONE else rows.part(row, scanner.HEADERS).decode(),
        )
        for row in firsts.tolist()
    ]


@kernel(OCTETS, INTS, INTS, OUT_TRUTHS)
def _find_no_texts(octets: Bytes, starts: Numbers, lengths: Numbers, found: Flags) -> None:
    for row in range(len(starts)):
        start, length = starts[row], lengths[row]
        found[row] = length > 0 and not valid_utf8(octets, start, start + length)


def _ids(rows: FrameRows, receipts: Flags, before: list[Any]) -> _Ids:
    """A receipt is a reply without a request: its body, any bytes, may be the id of one. A body
    that is longer than all ids that were asked is none of them, and is not copied; replacing what
    is not UTF-8 in it would not make it shorter."""
    count, asking = len(rows), rows.frame == scanner.REQUEST
    (bodies, body_bytes), (msgids, msgid_bytes) = (
        rows.slices[scanner.PAYLOAD],
        rows.slices[scanner.MSGID],
    )
    abouts, about_bytes = rows.slices[scanner.ABOUT]
    about_bytes = np.where(rows.frame == scanner.ZMTP_COMMAND, NONE, about_bytes)
    asked_bytes = int(np.where(asking, msgid_bytes, NONE).max(initial=NONE))
    most_bytes = max([asked_bytes, *(4 * len(key[1]) for key in before)])
    body_bytes = np.where(receipts & (body_bytes <= most_bytes), body_bytes, NONE)
    octets, starts, _ = octets_of(
        slices(
            rows.octets,
            np.concatenate((msgids, abouts, bodies)),
            np.concatenate((msgid_bytes, about_bytes, body_bytes)),
        )
    )
    msgids, abouts, bodies = starts[:count], starts[count : 2 * count], starts[2 * count :]
    octets, bodies, body_bytes = _as_texts(octets, bodies, body_bytes)
    key_starts = np.where(asking, msgids, np.where(receipts, bodies, abouts))
    answering = np.where(
        receipts, body_bytes, np.where(rows.frame == scanner.REPLY, about_bytes, NONE)
    )
    key_bytes = np.where(asking, msgid_bytes, answering)
    return _Ids(
        octets,
        _Texts(msgids, msgid_bytes),
        _Texts(abouts, about_bytes),
        _Texts(key_starts, key_bytes),
    )


def _as_texts(octets: Bytes, starts: Numbers, lengths: Numbers) -> tuple[Bytes, Numbers, Numbers]:
    """Texts in which U+FFFD replaces what is not UTF-8."""
    found = np.empty(len(starts), np.bool_)
    _find_no_texts(octets, starts, lengths, found)
    if not found.any():
        return octets, starts, lengths
    wrong: list[int] = np.flatnonzero(found).tolist()
    replaced = [
        octets[starts[row] : starts[row] + lengths[row]].tobytes().decode(errors="replace").encode()
        for row in wrong
    ]
    sizes = np.array([len(each) for each in replaced], np.int64)
    starts, lengths = starts.copy(), lengths.copy()
    starts[wrong] = len(octets) + np.cumsum(sizes) - sizes
    lengths[wrong] = sizes
    return np.append(octets, np.frombuffer(b"".join(replaced), np.uint8)), starts, lengths


def _matched(
    rows: FrameRows,
    matching: Matching[EmqpMemory, str],
    ids: _Ids,
    receipts: Flags,
    address: Numbers,
    addresses: list[MessageRoute],
) -> tuple[Numbers, list[str], Flags]:
    """By row the code of the destination, a reply's being that of its request; what the codes
    stand for; and which replies have a request."""
    destinations: Vocabulary[str] = Vocabulary()
    destination = by_code(address, destinations.codes(each.destination for each in addresses), NONE)
    step = np.where(rows.frame == scanner.REQUEST, PUT, np.where(receipts, GET, TAKE))
    steps = np.where(ids.key.lengths == NONE, PASS, step)
    partner = matching.partners(matching.texts(ids.octets, *ids.key), steps)
    given = np.append(destination, destinations.codes(matching.values))
    every = list(destinations)
    forward = rows.forward
    matching.remember(
        lambda row: (
            (bool(forward[row]), rows.part(row, scanner.MSGID).decode()),
            every[destination[row]],
        )
    )
    found = partner != NONE
    return np.where(found, given[partner], destination), every, found


@kernel(OCTETS, INTS, INTS, OUT_TRUTHS)
def _find_marks(octets: Bytes, starts: Numbers, lengths: Numbers, found: Flags) -> None:
    """Find bodies that begin like an object and contain the beginning of a mark. With unsigned
    indexes and without leaving the loop early, the compiler uses vector instructions."""
    for row in range(len(starts)):
        found[row] = False
        if lengths[row] <= 2 or octets[starts[row]] not in _OPENINGS:
            continue
        length = np.uint64(lengths[row])
        start, marked = np.uint64(starts[row]), False
        for index in range(start, start + length - np.uint64(2)):
            one, two, three = octets[index], octets[index + _ONE], octets[index + _TWO]
            marked |= (
                ((one == _ERROR[0]) & (two == _ERROR[1]) & (three == _ERROR[2]))
                | ((one == _TIMEOUT[0]) & (two == _TIMEOUT[1]) & (three == _TIMEOUT[2]))
                | ((one == _ESCAPE[0]) & (two == _ESCAPE[1]) & (three == _ESCAPE[2]))
            )
        found[row] = marked


def _statuses(rows: FrameRows, results: Flags, acknowledged: Flags) -> tuple[Numbers, list[str]]:
    """Nearly all results are a success: only those with marks are read."""
    names: Vocabulary[str] = Vocabulary()
    status = np.where(results | acknowledged, names.code("success"), NONE)
    starts, lengths = rows.slices[scanner.PAYLOAD]
    found = np.empty(len(rows), np.bool_)
    _find_marks(rows.octets, starts, np.where(results, lengths, NONE), found)
    for row in np.flatnonzero(found).tolist():
        status[row] = names.code(outcome_of(rows.part(row, scanner.PAYLOAD)))
    return status, list(names)
