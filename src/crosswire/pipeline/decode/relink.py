"""Relink in columns: by the endpoint of a connection's hello, and by channel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, cast, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.contract import (
    DescriptionColumns,
    FrameRows,
    Memories,
    null_column,
)
from crosswire.pipeline.decode.kernels import INT, INTS, OUT_INTS, OUT_TRUTHS, TRUTHS, kernel
from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    Described,
    json_text,
)
from crosswire.pipeline.decode.meanings.relink import (
    CONTENT_TYPE,
    MOST_CHANNELS,
    NOTHING,
    AboutChannels,
    RelinkMemory,
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
from crosswire.wire.relink.frames import (
    DEFAULTS,
    Acknowledgement,
    Message,
    Operation,
    Zeros,
    scan,
)
from crosswire.wire.relink.handshake import ConnectorHello, parse_hello, parse_version

__all__ = ["describe"]

_CHANNEL_OPERATION: Final = FIRST_ABOUT_CHANNELS + layout.FORMAT_CHANNEL_OPERATION
_FEW_PARTS: Final = 2
"""With more, a message's parts are listed one by one."""


# ------------------------------------------------------------------------------------------ forms


class _RowTemplate(NamedTuple):
    """What rows of one form share. Their `fields` differ in numbers only: there is one between each
    two pieces."""

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
    [_RowTemplate((), HANDSHAKE)],  # its fields are written as a whole
    [_RowTemplate(('{"epoch":', ',"link":', "}"), HANDSHAKE)],
)
_FORMS: Final = [form for forms in _BY_FRAME for form in forms]
_FIRST_FORM: Final = np.cumsum([0, *map(len, _BY_FRAME)])
_MOST_PIECES: Final = 4


def _coded(values: Iterable[str | None]) -> tuple[Numbers, list[str]]:
    """By form a code, and what the codes stand for."""
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


def describe(rows: FrameRows, memories: Memories[RelinkMemory]) -> DescriptionColumns:
    """What the tables have of each row."""
    count = len(rows)
    messages = rows.frame == MESSAGE
    about = (rows.frame >= FIRST_ABOUT_CHANNELS) & (rows.frame < MESSAGE)
    closes = (rows.frame == _CHANNEL_OPERATION) & (
        rows.detail & DATA_BITS == layout.OPERATION_CLOSE
    )
    parts = rows.slices[SIZES][1] >> np.where(rows.detail & layout.FLAG_LARGE, 3, 1)
    form = _FIRST_FORM[rows.frame] + np.where(about, rows.detail & DATA_BITS, 0)
    form += np.where(messages, np.minimum(parts, _FEW_PARTS), 0)

    multicast = (about | messages) & (rows.detail >= MULTICAST)

    connections = _RowConnections(rows, memories)
    hello, hellos = _hellos(rows)
    wanted, wants = _wanted(connections, hello, hellos)
    numbered = _numbers(rows, connections, messages, closes, multicast)
    numbers = numbered.first
    counted = _counted(rows, connections, wanted, wants, numbered.lost)
    context = _Context(wanted, wants, counted, numbered)
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

    _remember(connections, context)
    chosen: list[int] = np.flatnonzero(multicast | messages & (parts > _FEW_PARTS)).tolist()
    description.patch(chosen, [_in_full(rows, row, context) for row in chosen])
    return description


class _RowConnections:
    """The connections of the rows, numbered in order: by row, `whose` is the number and `first`
    whether it is the connection's first row. `before` are those with a memory."""

    def __init__(self, rows: FrameRows, memories: Memories[RelinkMemory]) -> None:
        self.memories = memories
        self.first = np.ones(len(rows), np.bool_)
        self.first[1:] = rows.owner[1:] != rows.owner[:-1]
        self.whose: Numbers = np.cumsum(self.first) - 1
        self.owners = rows.owner[self.first]
        known = memories.known
        self.before = [
            (connection, known[owner])
            for connection, owner in enumerate(self.owners.tolist() if known else ())
            if owner in known
        ]

    def latest(self, chosen: Flags, values: NDArray[Any], before: list[Any]) -> NDArray[Any]:
        """By row: the value of the latest chosen row of its connection, up to itself. If there is
        none yet, that of `before`, or 0."""
        begin = np.zeros(len(self.owners), values.dtype)
        begin[[connection for connection, _ in self.before]] = before
        values = np.where(chosen, values, begin[self.whose])
        # The index of the latest chosen or first row, which holds what is before it.
        return values[
            np.maximum.accumulate(np.where(chosen | self.first, np.arange(len(values)), 0))
        ]


class _Context(NamedTuple):
    """What rows mean by earlier ones: by row, the code in `wants` of what the connector asked for,
    whether messages on the link are counted, and the numbers of messages."""

    wanted: Numbers
    wants: list[RequestedLink]
    counted: Flags
    numbered: _MessageNumbers


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
    """The epochs in listeners' hellos."""
    index = rows.slices[PAYLOAD][0][chosen, np.newaxis] + np.arange(layout.EPOCH_SIZE)
    epochs: NDArray[np.uint64] = rows.octets[index].view("<u8")[:, 0].astype(np.uint64)
    return epochs


def _sessions(rows: FrameRows) -> tuple[Numbers, list[str]]:
    """The identifiers of sessions: epoch and link that a listener gives."""
    session = np.full(len(rows), NONE)
    greeted = np.flatnonzero((rows.frame == LISTENER_HELLO) & (rows.number > 0))
    session[greeted] = np.arange(len(greeted))
    links = zip(_epochs(rows, greeted).tolist(), rows.number[greeted].tolist(), strict=True)
    return session, [f"{epoch:x}/{link:x}" for epoch, link in links]


def _hellos(rows: FrameRows) -> tuple[Numbers, list[ConnectorHello]]:
    """The connectors' hellos, most of which are equal."""
    chosen = rows.frame == CONNECTOR_HELLO
    location = rows.position, rows.length
    return rows.distinct(
        chosen, location, rows.frame, lambda row: cast(ConnectorHello, _frame_of(rows, row))
    )


def _wanted(
    connections: _RowConnections, hello: Numbers, hellos: list[ConnectorHello]
) -> tuple[Numbers, list[RequestedLink]]:
    """By row: the code of what its connector has asked for so far; NOTHING has code 0."""
    wants: Vocabulary[RequestedLink] = Vocabulary()
    wants.code(NOTHING)
    asked = by_code(hello, wants.codes(map(RequestedLink.of, hellos)), NONE)
    before = [wants.code(memory.wanted) for _, memory in connections.before]
    return connections.latest(hello >= 0, asked, before), list(wants)


def _counted(
    rows: FrameRows,
    connections: _RowConnections,
    wanted: Numbers,
    wants: list[RequestedLink],
    lost: Flags,
) -> Flags:
    """By row: whether its link was new when the connection began, and no message was missed since:
    what was missing, or is no frame, may have been one."""
    had = np.array([each.link for each in wants], np.uint64)[wanted]
    greeted = rows.frame == LISTENER_HELLO
    is_new = greeted & (rows.number != 0) & (rows.number != had)
    before = [memory.counted for _, memory in connections.before]
    return connections.latest(greeted | (rows.cut_before != 0) | lost, is_new, before)


# ---------------------------------------------------------------------------------------- numbers


class _NextNumbers(NamedTuple):
    """The number that the next message of a channel has: by connection, direction (1: forward) and
    channel, in the order in which the channels were first used."""

    connection: Numbers
    forward: Numbers
    channel: NDArray[np.uint64]
    number: Numbers


class _MessageNumbers(NamedTuple):
    """The numbers of messages on their channels: a packet that goes to several has several.

    `targets` has the numbers of all packets, those of a row from `starts` on; `first` is a row's
    first one. `lost` are the rows with which a connection got too many channels to count.
    """

    first: Numbers
    starts: Numbers
    targets: Numbers
    lost: Flags
    following: _NextNumbers

    def of(self, row: int, frame: Message) -> Sequence[int]:
        """By channel of the message, its number."""
        start = int(self.starts[row])
        if isinstance(frame.channels, Zeros):
            first = int(self.targets[start]) if frame.channels else 0
            return range(first, first + len(frame.channels))
        numbers: list[int] = self.targets[start : start + len(frame.channels)].tolist()
        return numbers


class _Targets(NamedTuple):
    """The channels of packets, one after the other: of each, the row, the channel, and how many
    times the packet goes to it."""

    row: Numbers
    channel: NDArray[np.uint64]
    times: Numbers


def _targets(rows: FrameRows, chosen: Flags, multicast: Flags) -> _Targets:
    """The channels of the chosen rows. Ids of no bytes are all 0: a short packet may have 65,536 of
    them, which are one target here."""
    counts = chosen.astype(np.int64)
    several = {
        row: cast(AboutChannels, _frame_of(rows, row)).channels
        for row in np.flatnonzero(chosen & multicast).tolist()
    }
    for row, channels in several.items():
        counts[row] = min(len(channels), 1) if isinstance(channels, Zeros) else len(channels)
    row_of = np.repeat(np.arange(len(rows)), counts)
    channel, times = rows.number[row_of], np.ones(len(row_of), np.int64)
    ends = np.cumsum(counts)
    for row, channels in several.items():
        target = slice(int(ends[row] - counts[row]), int(ends[row]))
        if isinstance(channels, Zeros):
            times[target] = len(channels)
        else:
            channel[target] = channels
    return _Targets(row_of, channel, times)


@kernel(
    *(INTS, INTS, INTS, TRUTHS, INT),
    *(OUT_INTS, OUT_INTS, OUT_INTS, OUT_INTS, OUT_INTS, OUT_INTS, OUT_TRUTHS),
)
def _count(
    channels: Numbers,
    connections: Numbers,
    times: Numbers,
    closes: Flags,
    most: int,
    held: Numbers,
    resets: Numbers,
    numbers: Numbers,
    following: Numbers,
    begun: Numbers,
    valid: Numbers,
    lost: Flags,
) -> None:
    """Number the messages of each channel. `following` is the next number of a channel, 0 if it has
    had no message since it was closed; `begun` the index of its first message.

    By connection, `held` is how many channels have a number. A connection that would get more than
    `most` starts again with none: `resets` counts that, and a channel's number is valid only if
    it is from after the last reset.
    """
    for index in range(len(channels)):
        channel, connection = channels[index], connections[index]
        is_held = following[channel] != 0 and valid[channel] == resets[connection]
        if closes[index]:
            following[channel] = 0
            held[connection] -= is_held
            continue
        if not is_held:
            if held[connection] >= most:
                resets[connection] += 1
                held[connection] = 0
                lost[index] = True
            held[connection] += 1
            following[channel], valid[channel], begun[channel] = 0, resets[connection], index
        numbers[index] = following[channel]
        following[channel] += times[index]


def _numbers(
    rows: FrameRows,
    connections: _RowConnections,
    messages: Flags,
    closes: Flags,
    multicast: Flags,
) -> _MessageNumbers:
    """The numbers of messages on their channels, and the next ones."""
    targets = _targets(rows, messages | closes, multicast)
    count, total = len(targets.row), len(connections.owners)
    before = [
        (2 * connection + forward, channel, number)
        for connection, memory in connections.before
        for (forward, channel), number in memory.following.items()
    ]
    sides, channels, follows = zip(*before, strict=True) if before else ((), (), ())
    side = (2 * connections.whose + rows.forward)[targets.row]
    side = np.append(side, np.array(sides, np.int64))
    channel = np.append(targets.channel, np.array(channels, np.uint64))
    width = channel.itemsize
    length = np.full(len(side), width)
    code, firsts = distinct(channel.view(np.uint8), np.arange(len(side)) * width, length, side)

    following, begun, valid = np.zeros((3, len(firsts)), np.int64)
    following[code[count:]] = follows
    begun[code[count:]] = np.arange(-len(before), 0)
    held = np.bincount(side[count:] >> 1, minlength=total).astype(np.int64)
    resets, numbers = np.zeros(total, np.int64), np.full(count, NONE)
    lost = np.zeros(count, np.bool_)
    given = (code[:count], side[:count] >> 1, targets.times, closes[targets.row], MOST_CHANNELS)
    _count(*given, held, resets, numbers, following, begun, valid, lost)
    left = np.flatnonzero((following != 0) & (valid == resets[side[firsts] >> 1]))
    left = left[np.argsort(begun[left])]
    side, channel = side[firsts[left]], channel[firsts[left]]

    counts = np.bincount(targets.row, minlength=len(rows))
    starts = np.cumsum(counts) - counts
    first = np.full(len(rows), NONE)
    has = counts > 0
    first[has] = numbers[starts[has]]
    lost_rows = np.zeros(len(rows), np.bool_)
    lost_rows[targets.row[lost]] = True
    next_numbers = _NextNumbers(side >> 1, side & 1, channel, following[left])
    return _MessageNumbers(first, starts, numbers, lost_rows, next_numbers)


def _remember(connections: _RowConnections, context: _Context) -> None:
    """Write into the memories of connections that stay what later rows depend on."""
    memories = connections.memories
    chosen = memories.stays[connections.owners]
    if not chosen.any():
        return
    wanted, wants, counted, numbered = context
    last = np.append(np.flatnonzero(connections.first)[1:], len(wanted)) - 1
    written: dict[int, RelinkMemory] = {}
    for connection in np.flatnonzero(chosen).tolist():
        memory = written[connection] = memories.of(int(connections.owners[connection]))
        memory.wanted = wants[wanted[last[connection]]]
        memory.counted = bool(counted[last[connection]])
        memory.following = {}
    following = numbered.following
    stays = chosen[following.connection]
    for connection, forward, channel, number in zip(
        *(each[stays].tolist() for each in following), strict=True
    ):
        written[connection].following[bool(forward), channel] = number


# --------------------------------------------------------------------------------------- details


def _properties(rows: FrameRows) -> pa.Array:
    starts, lengths = rows.slices[PROPERTIES]
    if (lengths == NONE).all():
        return null_column(len(rows))
    part, firsts = distinct(rows.octets, starts, lengths)
    found: Vocabulary[str] = Vocabulary()
    code = found.codes(properties_of(rows.part(row, PROPERTIES)) for row in firsts.tolist())
    return words(by_code(part, code, NONE), list(found))


def _in_full(rows: FrameRows, row: int, context: _Context) -> Described:
    """Describe a message of many parts on one channel, or a packet about many channels."""
    frame, wanted = _frame_of(rows, row), context.wants[context.wanted[row]]
    if isinstance(frame, Message):
        forward, numbers = bool(rows.forward[row]), context.numbered.of(row, frame)
        return message(frame, forward, numbers, wanted, bool(context.counted[row]))
    return about_channels(cast(AboutChannels, frame), wanted)


def _frame_of(rows: FrameRows, row: int) -> Frame:
    if row in rows.decoded:
        return rows.decoded[row]
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
