"""Relink in columns: by what a connection's hello asked for, and by its channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.contract import (
    DescriptionColumns,
    FrameRows,
    Readings,
    describe_one_by_one,
    null_column,
)
from crosswire.pipeline.decode.kernels import INTS, OUT_INTS, TRUTHS, kernel
from crosswire.pipeline.decode.readings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    Described,
    json_text,
)
from crosswire.pipeline.decode.readings.relink import (
    CONTENT_TYPE,
    MOST_CHANNELS,
    NOTHING,
    AboutChannels,
    RelinkReading,
    RequestedLink,
    about_channels,
    message,
    properties_of,
)
from crosswire.pipeline.decode.scanners.relink import (
    CHANNELS,
    CONNECTOR_HELLO,
    DATA_BITS,
    FIRST_ABOUT_CHANNELS,
    LISTENER_HELLO,
    MESSAGE,
    MULTICAST,
    PAYLOAD,
    PROPERTIES,
    SIZES,
    VERSIONS,
)
from crosswire.pipeline.decode.text import (
    Coded,
    Decimal,
    Fixed,
    TextPart,
    Vocabulary,
    by_code,
    distinct,
    slices,
    text,
    words,
)
from crosswire.wire.contract import Frame, Placed
from crosswire.wire.relink import layout
from crosswire.wire.relink.frames import DEFAULTS, Acknowledgement, Message, Operation, scan
from crosswire.wire.relink.handshake import ConnectorHello, parse_hello, parse_version

__all__ = ["describe"]

_CHANNEL_OPERATION: Final = FIRST_ABOUT_CHANNELS + layout.FORMAT_CHANNEL_OPERATION
_FEW_PARTS: Final = 2
"""With more, a message's parts are listed one by one."""


# ------------------------------------------------------------------------------------------ forms


class _RowTemplate(NamedTuple):
    """What rows of one form share. The pieces of `fields` stand around numbers, in which they
    differ: there is one behind each piece that is followed by another."""

    fields: tuple[str, ...]
    kind: str | None = None
    status: str | None = None


def _form_of_message(*sizes: str) -> _RowTemplate:
    first, *others = sizes
    return _RowTemplate(('{"channels":[', f'],"multicast":false,"part_sizes":[{first}', *others))


_OPERATIONS: Final = [
    (CONTROL, f'{{"operation":"{value}","channels":[', value) for value in get_args(Operation)
]
_ACKNOWLEDGEMENTS: Final = [
    (ACKNOWLEDGEMENT, f'{{"acknowledgement":"{value}","channels":[', value)
    for value in get_args(Acknowledgement)
]
_BY_FRAME: Final = (
    *([_RowTemplate(("{}",), HEARTBEAT)] for _ in ("nop", "ping", "pong")),
    [_RowTemplate(("{}",), CONTROL)],
    [_RowTemplate(("{}",), GOODBYE)],
    *(
        [
            _RowTemplate((begin, '],"multicast":false}'), kind, value)
            for kind, begin, value in values
        ]
        for values in (_OPERATIONS, _ACKNOWLEDGEMENTS)
    ),
    *(
        [
            _RowTemplate((begin, '],"sequence":', ',"multicast":false}'), kind, value)
            for kind, begin, value in values
        ]
        for values in (_OPERATIONS, _ACKNOWLEDGEMENTS)
    ),
    [_form_of_message("]}"), _form_of_message("", "]}"), _form_of_message("", ",", "]}")],
    *([_RowTemplate(('{"version":', "}"), HANDSHAKE)] for _ in VERSIONS),
    [_RowTemplate((), HANDSHAKE)],  # a connector's hello has more to say
    [_RowTemplate(('{"epoch":', ',"link":', "}"), HANDSHAKE)],
)
_FORMS: Final = [form for forms in _BY_FRAME for form in forms]
_FIRST_FORM: Final = np.cumsum([0, *map(len, _BY_FRAME)])
_MOST_PIECES: Final = 4


def _coded(values: Iterable[str | None]) -> tuple[Numbers, list[str]]:
    """Something that forms have, by form, and what it can be."""
    every: Vocabulary[str] = Vocabulary()
    return every.codes(values), list(every)


_KIND, _KINDS = _coded(form.kind for form in _FORMS)
_STATUS, _STATUSES = _coded(form.status for form in _FORMS)
_PIECES: Final = [
    _coded("".join(form.fields[index : index + 1]) or None for form in _FORMS)
    for index in range(_MOST_PIECES)
]
_HAS_NUMBER: Final = [
    np.array([len(form.fields) > index for form in _FORMS]) for index in range(1, _MOST_PIECES)
]


# --------------------------------------------------------------------------------------- describe


def describe(rows: FrameRows, readings: Readings[RelinkReading]) -> DescriptionColumns:
    count = len(rows)
    messages = rows.frame == MESSAGE
    about = (rows.frame >= FIRST_ABOUT_CHANNELS) & (rows.frame < MESSAGE)
    closes = (rows.frame == _CHANNEL_OPERATION) & (
        rows.detail & DATA_BITS == layout.OPERATION_CLOSE
    )
    parts = rows.slices[SIZES][1] >> np.where(rows.detail & layout.FLAG_LARGE, 3, 1)
    form = _FIRST_FORM[rows.frame] + np.where(about, rows.detail & DATA_BITS, 0)
    form += np.where(messages, np.minimum(parts, _FEW_PARTS), 0)

    talks = _RowConnections(rows, readings)
    hello, hellos = _hellos(rows)
    wanted, wants = _wanted(talks, hello, hellos)
    counted = _counted(rows, talks, wanted, wants)
    numbers, following, apart = _numbers(rows, talks, messages, closes)
    context = _Context(wanted, wants, counted, numbers, following)
    session, sessions = _sessions(rows)
    has_destination = (about | messages | (rows.frame >= CONNECTOR_HELLO)) & (wanted > 0)
    size = np.where(messages, rows.slices[PAYLOAD][1], NONE)
    description = DescriptionColumns(
        fields=_fields(rows, form, hello, hellos),
        kind=words(
            np.where(messages, len(_KINDS) + 2 * wanted + rows.forward, _KIND[form]),
            _KINDS + [each.kind(forward) for each in wants for forward in (False, True)],
        ),
        identifier=text(
            count,
            Decimal(rows.number, about | messages),
            Fixed(":", messages),
            Decimal(numbers, messages),
            Coded(session, sessions),
            valid=about | messages | (session >= 0),
        ),
        destination=words(
            np.where(has_destination, wanted, NONE), [each.destination or "" for each in wants]
        ),
        status=words(_STATUS[form], _STATUSES),
        sequence=np.where(messages, np.where(counted, numbers, NONE), rows.sequence),
        payload_size=size,
        payload_end=np.where(messages, -size % layout.ALIGNMENT, 0),
        begun_at=np.full(count, NONE),
    )
    if rows.payloads:
        description.payload = slices(rows.octets, rows.slices[PAYLOAD][0], size)
        description.content_type = words(messages.astype(np.int64) - 1, [CONTENT_TYPE])
        description.properties = _properties(rows)
        description.reply_to = null_column(count)
        description.message_id = null_column(count, pa.int64())

    multicast = (about | messages) & (rows.detail >= MULTICAST)
    # Where that counts on many channels at once, a connection is read on its own.
    apart |= talks.with_any(multicast & (messages | closes))
    _remember(talks, ~apart, context)
    one_by_one = apart[talks.whose]
    in_full = (multicast | messages & (parts > _FEW_PARTS)) & ~one_by_one
    chosen: list[int] = np.flatnonzero(one_by_one).tolist()
    description.patch(chosen, describe_one_by_one(rows, chosen, readings, _frame_of))
    chosen = np.flatnonzero(in_full).tolist()
    description.patch(chosen, [_in_full(rows, row, context) for row in chosen])
    return description


class _RowConnections:
    """The connections that rows are of, numbered in order: `whose` has a row's, `first` whether it
    is the first of it. `before` are those of which something is known."""

    def __init__(self, rows: FrameRows, readings: Readings[RelinkReading]) -> None:
        self.readings = readings
        self.first = np.ones(len(rows), np.bool_)
        self.first[1:] = rows.owner[1:] != rows.owner[:-1]
        self.whose: Numbers = np.cumsum(self.first) - 1
        self.owners = rows.owner[self.first]
        known = readings.known
        self.before = [
            (talk, known[owner])
            for talk, owner in enumerate(self.owners.tolist() if known else ())
            if owner in known
        ]

    def with_any(self, chosen: Flags) -> Flags:
        """By connection: does it have any of these rows?"""
        has = np.zeros(len(self.owners), np.bool_)
        has[self.whose[chosen]] = True
        return has

    def latest(self, chosen: Flags, values: NDArray[Any], before: list[Any]) -> NDArray[Any]:
        """By row: the value of the last one chosen of its connection, itself included. If there is
        none yet, that of `before`, or nothing."""
        begin = np.zeros(len(self.owners), values.dtype)
        begin[[talk for talk, _ in self.before]] = before
        values = np.where(chosen, values, begin[self.whose])
        return values[
            np.maximum.accumulate(np.where(chosen | self.first, np.arange(len(values)), 0))
        ]


class _Context(NamedTuple):
    """What rows mean by what came before them: what was wanted, whether the link is counted, and
    messages' numbers."""

    wanted: Numbers
    wants: list[RequestedLink]
    counted: Flags
    numbers: Numbers
    following: _NextNumbers


def _fields(
    rows: FrameRows, form: Numbers, hello: Numbers, hellos: list[ConnectorHello]
) -> pa.Array:
    _, payload_bytes = rows.slices[PAYLOAD]
    _, property_bytes = rows.slices[PROPERTIES]
    first, second = rows.number, np.where(property_bytes == NONE, payload_bytes, property_bytes)
    second = np.where(rows.sequence == NONE, second, rows.sequence)
    greeted = np.flatnonzero(rows.frame == LISTENER_HELLO)
    if len(greeted):
        second[greeted] = rows.number[greeted]
        first = first.copy()
        first[greeted] = _epochs(rows, greeted)
    parts: list[TextPart] = [Coded(hello, [json_text(each.fields()) for each in hellos])]
    for code, pieces in _PIECES:
        parts.append(Coded(code[form], pieces))
    for index, values in enumerate((first, second, payload_bytes)):
        parts.insert(2 * index + 2, Decimal(values, _HAS_NUMBER[index][form]))
    return text(len(rows), *parts)


def _epochs(rows: FrameRows, chosen: Numbers) -> NDArray[np.uint64]:
    """Of listeners' hellos."""
    index = rows.slices[PAYLOAD][0][chosen, np.newaxis] + np.arange(layout.EPOCH_SIZE)
    epochs: NDArray[np.uint64] = rows.octets[index].view("<u8")[:, 0].astype(np.uint64)
    return epochs


def _sessions(rows: FrameRows) -> tuple[Numbers, list[str]]:
    """The links that listeners give."""
    session = np.full(len(rows), NONE)
    greeted = np.flatnonzero((rows.frame == LISTENER_HELLO) & (rows.number > 0))
    session[greeted] = np.arange(len(greeted))
    links = zip(_epochs(rows, greeted).tolist(), rows.number[greeted].tolist(), strict=True)
    return session, [f"{epoch:x}/{link:x}" for epoch, link in links]


def _hellos(rows: FrameRows) -> tuple[Numbers, list[ConnectorHello]]:
    """Connectors', which mostly say the same."""
    length = np.where(rows.frame == CONNECTOR_HELLO, rows.length, NONE)
    hello, firsts = distinct(rows.octets, rows.position, length)
    return hello, [cast(ConnectorHello, _frame_of(rows, row)) for row in firsts.tolist()]


def _wanted(
    talks: _RowConnections, hello: Numbers, hellos: list[ConnectorHello]
) -> tuple[Numbers, list[RequestedLink]]:
    """What a row's connector has asked for up to then; NOTHING has code 0."""
    wants: Vocabulary[RequestedLink] = Vocabulary()
    wants.code(NOTHING)
    asked = by_code(hello, wants.codes(map(RequestedLink.of, hellos)), NONE)
    before = [wants.code(reading.wanted) for _, reading in talks.before]
    return talks.latest(hello >= 0, asked, before), list(wants)


def _counted(
    rows: FrameRows, talks: _RowConnections, wanted: Numbers, wants: list[RequestedLink]
) -> Flags:
    """Whether the link that a row came on was new."""
    had = np.array([each.link for each in wants], np.uint64)[wanted]
    is_new = (rows.number != 0) & (rows.number != had)
    before = [reading.counted for _, reading in talks.before]
    return talks.latest(rows.frame == LISTENER_HELLO, is_new, before)


# ---------------------------------------------------------------------------------------- numbers


class _NextNumbers(NamedTuple):
    """Numbers of the messages that come next: of which connection, which direction (1: forward) and
    which channel, in the order in which channels were first used."""

    talk: Numbers
    forward: Numbers
    channel: NDArray[np.uint64]
    number: Numbers


@kernel(INTS, TRUTHS, OUT_INTS, OUT_INTS, OUT_INTS)
def _count(
    channels: Numbers, closes: Flags, numbers: Numbers, following: Numbers, begun: Numbers
) -> None:
    """By channel: what follows, and at which row it began; nothing follows where it has not."""
    for row in range(len(numbers)):
        channel = channels[row]
        if channel < 0:
            continue
        if closes[row]:
            following[channel] = 0
            continue
        if following[channel] == 0:
            begun[channel] = row
        numbers[row] = following[channel]
        following[channel] += 1


def _numbers(
    rows: FrameRows, talks: _RowConnections, messages: Flags, closes: Flags
) -> tuple[Numbers, _NextNumbers, Flags]:
    """Of each message, on its channel; and by connection: has it so many that the count is lost?"""
    count = len(rows)
    before = [
        (2 * talk + forward, channel, number)
        for talk, reading in talks.before
        for (forward, channel), number in reading.following.items()
    ]
    sides, channels, follows = zip(*before, strict=True) if before else ((), (), ())
    side = np.append(2 * talks.whose + rows.forward, np.array(sides, np.int64))
    channel = np.append(rows.number, np.array(channels, np.uint64))
    width = channel.itemsize
    length = np.append(np.where(messages | closes, width, NONE), np.full(len(before), width))
    code, firsts = distinct(channel.view(np.uint8), np.arange(len(side)) * width, length, side)

    too_many = np.bincount(side[firsts] >> 1, minlength=len(talks.owners)) > MOST_CHANNELS
    following, begun = np.zeros(len(firsts), np.int64), np.zeros(len(firsts), np.int64)
    following[code[count:]] = follows
    begun[code[count:]] = np.arange(-len(before), 0)
    numbers = np.full(count, NONE)
    _count(code, closes, numbers, following, begun)
    left = np.flatnonzero(following)
    left = left[np.argsort(begun[left])]
    side, channel = side[firsts[left]], channel[firsts[left]]
    return numbers, _NextNumbers(side >> 1, side & 1, channel, following[left]), too_many


def _remember(talks: _RowConnections, chosen: Flags, context: _Context) -> None:
    """Write into the readings of those who stay what they must know; only of chosen connections."""
    readings = talks.readings
    chosen = chosen & readings.stays[talks.owners]
    if not chosen.any():
        return
    wanted, wants, counted, _, following = context
    last = np.append(np.flatnonzero(talks.first)[1:], len(wanted)) - 1
    written: dict[int, RelinkReading] = {}
    for talk in np.flatnonzero(chosen).tolist():
        reading = written[talk] = readings.of(int(talks.owners[talk]))
        reading.wanted = wants[wanted[last[talk]]]
        reading.counted = bool(counted[last[talk]])
        reading.following = {}
    stays = chosen[following.talk]
    for talk, forward, channel, number in zip(
        *(each[stays].tolist() for each in following), strict=True
    ):
        written[talk].following[bool(forward), channel] = number


# ------------------------------------------------------------------------------------ closer looks


def _properties(rows: FrameRows) -> pa.Array:
    starts, lengths = rows.slices[PROPERTIES]
    if (lengths == NONE).all():
        return null_column(len(rows))
    part, firsts = distinct(rows.octets, starts, lengths)
    found: Vocabulary[str] = Vocabulary()
    code = found.codes(properties_of(rows.part(row, PROPERTIES)) for row in firsts.tolist())
    return words(by_code(part, code, NONE), list(found))


def _in_full(rows: FrameRows, row: int, context: _Context) -> Described:
    """A message of many parts on one channel, or what is said of many channels."""
    frame, wanted = _frame_of(rows, row), context.wants[context.wanted[row]]
    if isinstance(frame, Message):
        forward, numbers = bool(rows.forward[row]), [int(context.numbers[row])]
        return message(frame, forward, numbers, wanted, bool(context.counted[row]))
    return about_channels(cast(AboutChannels, frame), wanted)


def _frame_of(rows: FrameRows, row: int, reading: RelinkReading | None = None) -> Frame:  # noqa: ARG001
    sender = "connector" if rows.forward[row] else "listener"
    code, whole, offset = int(rows.frame[row]), rows.whole(row), int(rows.offset[row])
    if code > MESSAGE:
        frame, _ = (
            parse_version(sender, whole, 0)
            if code in VERSIONS
            else parse_hello(sender, whole, 0, offset)
        )
        assert frame is not None
        return frame
    id_size = max(int(rows.slices[CHANNELS][1][row]), 0)
    if rows.detail[row] >= MULTICAST:
        count = whole[layout.MULTICAST_COUNT_OFFSET : layout.MULTICAST_ID_OFFSET]
        id_size //= max(int.from_bytes(count, "little"), 1)
    placed: list[Placed] = []
    scan(whole, 0, offset, layout.packet_layout(sender, id_size, id_size), DEFAULTS, placed)
    ((_, _, packet),) = placed
    assert isinstance(packet, Frame)
    return packet
