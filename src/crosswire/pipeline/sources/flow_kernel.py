"""A compiled kernel that reassembles flows segment by segment in all usual cases.

It does nearly all that `capture.reassembly.Flow` does: openings, ends, segments in order,
retransmissions, and segments that wait for a hole to be filled, as long as they don't overlap. For
everything else it stops (`UNUSUAL`): `Flow` then takes over its state (`to_flow`) and gives it back
(`from_flow`) once nothing waits any more. Both give the same rows; tests compare them.

The state of the current flow is one array of integers, so that a kernel call costs nothing to set
up and the state survives the end of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.capture.reassembly import LINGER_NS, REORDER_NS, Flow
from crosswire.capture.tcp import ACK, FIN, RST, SYN
from crosswire.pipeline.decode.kernels import inlined, lazy_kernel
from crosswire.pipeline.sources.packet_kernels import Packets
from crosswire.wire import runs

__all__ = [
    "DATA",
    "DONE",
    "FULL",
    "KINDS",
    "LEAVE",
    "NO_FLOW",
    "ROWS_OF_A_SEGMENT",
    "ROW_FIELDS",
    "ROW_FLOW",
    "ROW_FORWARD",
    "ROW_KIND",
    "ROW_LATE",
    "ROW_LENGTH",
    "ROW_NUMBER",
    "ROW_OFFSET",
    "ROW_OPENER",
    "ROW_SOURCE",
    "ROW_START",
    "ROW_TIME",
    "UNUSUAL",
    "enter",
    "flow_of",
    "follow",
    "followed_bytes",
    "forget_followed",
    "from_flow",
    "is_waiting",
    "new_state",
    "new_waiting",
    "rename",
    "to_flow",
]

Int64 = npt.NDArray[np.int64]

KINDS: Final = (runs.OPEN, runs.DATA, runs.GAP, runs.FIN, runs.RESET)
"""A row's kind is an index of these."""
_OPEN, DATA, _GAP, _FIN, _RESET = 0, 1, 2, 3, 4

# Why the kernel stopped.
DONE: Final = 0
"""All segments are read."""
FULL: Final = 1
"""There is no more room for rows."""
UNUSUAL: Final = 2
"""The next segment is unusual: `Flow` has to take it."""
LEAVE: Final = 3
"""The next segment is of another flow, and this one is not complete: `Flow` has to end it."""

NO_FLOW: Final = -1
ROWS_OF_A_SEGMENT: Final = 8
"""The most rows that a segment makes, besides those for segments that waited."""
_MOST_WAITING: Final = 8192
"""Waiting segments of a direction; `Flow` takes over where there are more."""

# A row is a column of these fields. Its payload is `ROW_LENGTH` bytes of the source from
# `ROW_START` on; `ROW_SOURCE` is -1 without one.
ROW_FIELDS: Final = 11
ROW_FLOW, ROW_NUMBER, ROW_OPENER, ROW_FORWARD, ROW_KIND, ROW_OFFSET = 0, 1, 2, 3, 4, 5
ROW_LENGTH, ROW_TIME, ROW_LATE, ROW_SOURCE, ROW_START = 6, 7, 8, 9, 10

# State: all int64, -1 for None. The flow's own fields, then those of the backward direction, then
# those of the forward one. The fields are those of `Flow` and `_Half`.
_FLOW, _NUMBER, _OPENER, _BROKEN, _BEGUN, _BYTES = 0, 1, 2, 3, 4, 5
_HALVES, _HALF_FIELDS = 6, 10
_BASE, _NEXT, _LATE, _FIN_AT, _ENDED, _TIME, _WAITS, _WAITING_BYTES = 0, 1, 2, 3, 4, 5, 6, 7
_REACH, _SYNCHRONIZED = 8, 9

# Waiting segments: for either direction, in the order of their offsets.
_POSITION, _SINCE, _SOURCE, _START, _LENGTH, _WAITING_FIELDS = 0, 1, 2, 3, 4, 5
_THERE, _OVERLAPS = -1, -2

_MASK = (1 << 32) - 1
_MIDDLE = 1 << 31
_FAR = 1 << 30


def new_state() -> Int64:
    """The state before the first flow."""
    state = np.zeros(_HALVES + 2 * _HALF_FIELDS, np.int64)
    enter(state, NO_FLOW)
    return state


def new_waiting() -> Int64:
    """Room for the waiting segments of both directions."""
    return np.zeros((2, _MOST_WAITING, _WAITING_FIELDS), np.int64)


def is_waiting(state: Int64) -> bool:
    """Whether segments wait for a hole to be filled."""
    return bool(_waits(state))


def flow_of(state: Int64) -> int:
    """The index of the current flow."""
    return int(state[_FLOW])


def rename(state: Int64, flow: int) -> None:
    """Give the current flow another index: each batch of segments numbers its flows anew."""
    state[_FLOW] = flow


def followed_bytes(state: Int64) -> int:
    """The number of bytes that the kernel has put into rows since `forget_followed`."""
    return int(state[_BYTES])


def forget_followed(state: Int64) -> None:
    """Set the number of bytes in rows to 0: they were given out."""
    state[_BYTES] = 0


def to_flow(
    state: Int64, waiting: Int64, flow: Flow, payload: Callable[[int, int, int], bytes]
) -> None:
    """Let `flow` continue where the kernel stopped; `payload` copies bytes of a source, given its
    number, a start and a length."""
    own = state.tolist()
    halves: list[Any] = []
    for forward in (1, 0):
        at = _HALVES + forward * _HALF_FIELDS
        base, following, late, fin_at, ended, time, waits, _, reach, synchronized = own[
            at : at + _HALF_FIELDS
        ]
        held = [
            (position, since, payload(source, start, length))
            for position, since, source, start, length in waiting[forward, :waits].tolist()
        ]
        halves.append(
            (
                None if base < 0 else base,
                following,
                bool(late),
                None if fin_at < 0 else fin_at,
                bool(ended),
                time,
                held,
                reach,
                [],
                bool(synchronized),
            )
        )
    opener = None if own[_OPENER] < 0 else bool(own[_OPENER])
    # The kernel gives out a row of every connection that it begins.
    begun = bool(own[_BEGUN])
    flow.restore((own[_NUMBER], opener, halves, bool(own[_BROKEN]), begun, begun))


def from_flow(flow: Flow, state: Int64) -> None:
    """Let the kernel continue where `flow` stopped; nothing may be waiting in it."""
    number, opener, halves, broken, begun, _ = flow.save()
    state[_NUMBER : _BEGUN + 1] = (number, -1 if opener is None else opener, broken, begun)
    for forward, half in zip((1, 0), halves, strict=True):
        base, following, late, fin_at, ended, time, _, reach, _, synchronized = half
        at = _HALVES + forward * _HALF_FIELDS
        state[at : at + _HALF_FIELDS] = (
            -1 if base is None else base,
            following,
            late,
            # Below 0, before a late start, it would read as None; in both cases it is reached.
            -1 if fin_at is None else max(fin_at, 0),
            ended,
            time,
            0,
            0,
            reach,
            synchronized,
        )


@lazy_kernel
def enter(state: Int64, flow: int) -> None:
    """Begin a flow: its first segment will begin its connection 0."""
    state[_FLOW] = flow
    _begin(state, -1)
    state[_NUMBER] = -1
    state[_BEGUN] = 0


@lazy_kernel
def _begin(state: Int64, opener: int) -> None:
    state[_NUMBER] += 1
    state[_OPENER] = opener
    state[_BROKEN] = 0
    state[_BEGUN] = 1
    state[_HALVES:] = 0
    for half in (_HALVES, _HALVES + _HALF_FIELDS):
        state[half + _BASE] = -1
        state[half + _FIN_AT] = -1


@lazy_kernel
def _is_pending(state: Int64, half: int) -> bool:
    """Whether the FIN of a direction was seen and bytes before it are missing."""
    return state[half + _FIN_AT] >= 0 and not state[half + _ENDED]


@lazy_kernel
def _is_cut(state: Int64, half: int) -> bool:
    """Whether the last bytes of a direction were on the wire and not captured."""
    return state[half + _REACH] > state[half + _NEXT] and not state[half + _ENDED]


@inlined
def _waits(state: Int64) -> int:
    """The number of waiting segments in both directions."""
    return state[_HALVES + _WAITS] + state[_HALVES + _HALF_FIELDS + _WAITS]  # type: ignore[no-any-return]


@lazy_kernel
def _is_open(state: Int64) -> bool:
    """Whether bytes are missing before others, before a FIN, or at the end."""
    return (
        _waits(state) > 0
        or _is_pending(state, _HALVES)
        or _is_pending(state, _HALVES + _HALF_FIELDS)
        or _is_cut(state, _HALVES)
        or _is_cut(state, _HALVES + _HALF_FIELDS)
    )


@lazy_kernel
def _position_of(state: Int64, half: int, number: Any) -> int:
    """The offset of a sequence number that is nearest to the expected one: numbers wrap around."""
    distance = (number - state[half + _BASE] - state[half + _NEXT]) & _MASK
    if distance >= _MIDDLE:
        distance -= _MASK + 1
    return state[half + _NEXT] + distance  # type: ignore[no-any-return]


@lazy_kernel
def _put(
    state: Int64,
    half: int,
    forward: bool,
    kind: int,
    length: Any,
    time_ns: int,
    rows: Int64,
    position: int,
) -> None:
    """A row without bytes. A direction's time never decreases."""
    state[half + _TIME] = max(state[half + _TIME], time_ns)
    # An index without a sign: see packet_kernels.
    row = np.uint64(position)
    rows[ROW_FLOW, row] = state[_FLOW]
    rows[ROW_NUMBER, row] = state[_NUMBER]
    rows[ROW_OPENER, row] = state[_OPENER]
    rows[ROW_FORWARD, row] = forward
    rows[ROW_KIND, row] = kind
    rows[ROW_OFFSET, row] = state[half + _NEXT]
    rows[ROW_LENGTH, row] = length
    rows[ROW_TIME, row] = state[half + _TIME]
    rows[ROW_LATE, row] = state[half + _LATE]
    rows[ROW_SOURCE, row] = -1
    rows[ROW_START, row] = 0


@lazy_kernel
def _put_data(
    state: Int64,
    half: int,
    forward: bool,
    length: Any,
    time_ns: int,
    source: Any,
    start: Any,
    rows: Int64,
    count: int,
) -> int:
    """A row with bytes. Gives the number of rows with it, like the following functions."""
    _put(state, half, forward, DATA, length, time_ns, rows, count)
    rows[ROW_SOURCE, count] = source
    rows[ROW_START, count] = start
    state[half + _NEXT] += length
    state[_BYTES] += length
    return count + 1


@lazy_kernel
def _end(state: Int64, half: int, forward: bool, time_ns: int, rows: Int64, count: int) -> int:
    """A row for the end of a direction whose bytes up to its FIN are complete."""
    if _is_pending(state, half) and state[half + _NEXT] >= state[half + _FIN_AT]:
        state[half + _ENDED] = 1
        _put(state, half, forward, _FIN, 0, time_ns, rows, count)
        count += 1
    return count


@lazy_kernel
def _find_slot(
    state: Int64, half: int, waiting: Int64, side: int, position: Any, length: Any
) -> int:
    """The index for a segment among those that wait, _THERE if all of it waits already, _OVERLAPS
    if a part of it does, or if there is no room: then `Flow` has to take it."""
    waits = state[half + _WAITS]
    at = waits
    # From the end: segments after a hole mostly come in order.
    while at > 0 and waiting[side, at - 1, _POSITION] > position:
        at -= 1
    if at > 0:
        end = waiting[side, at - 1, _POSITION] + waiting[side, at - 1, _LENGTH]
        if position + length <= end:
            return _THERE
        if position < end:
            return _OVERLAPS
    if waits == waiting.shape[1] or (
        at < waits and waiting[side, at, _POSITION] < position + length
    ):
        return _OVERLAPS
    return at  # type: ignore[no-any-return]


@lazy_kernel
def _move(waiting: Int64, side: int, index: int, to: int) -> None:
    """Copy an entry of the waiting segments."""
    for field in range(_WAITING_FIELDS):
        waiting[side, to, field] = waiting[side, index, field]


@lazy_kernel
def _keep(
    state: Int64, half: int, waiting: Int64, side: int, at: int, position: Any, packet: Any
) -> None:
    """Insert a packet's payload, as a slice of its source, into the waiting segments."""
    for index in range(state[half + _WAITS], at, -1):
        _move(waiting, side, index - 1, index)
    waiting[side, at, _POSITION] = position
    waiting[side, at, _SINCE] = packet.time_ns
    waiting[side, at, _SOURCE] = packet.source
    waiting[side, at, _START] = packet.start
    waiting[side, at, _LENGTH] = packet.size
    state[half + _WAITS] += 1
    state[half + _WAITING_BYTES] += packet.size


@lazy_kernel
def _release(
    state: Int64, half: int, forward: bool, waiting: Int64, rows: Int64, count: int
) -> int:
    """Rows for waiting segments that continue at the next expected offset."""
    side = 1 if forward else 0
    waits = state[half + _WAITS]
    released = 0
    while released < waits and waiting[side, released, _POSITION] == state[half + _NEXT]:
        length, since = waiting[side, released, _LENGTH], waiting[side, released, _SINCE]
        source, start = waiting[side, released, _SOURCE], waiting[side, released, _START]
        count = _put_data(state, half, forward, length, since, source, start, rows, count)
        state[half + _WAITING_BYTES] -= length
        released += 1
    if released:
        for index in range(released, waits):
            _move(waiting, side, index, index - released)
        state[half + _WAITS] = waits - released
    return count


@lazy_kernel
def _give_up(
    state: Int64, half: int, forward: bool, waiting: Int64, rows: Int64, count: int
) -> int:
    """Report the first hole as a gap, then what waited for it."""
    side = 1 if forward else 0
    since = waiting[side, 0, _SINCE]
    missing = waiting[side, 0, _POSITION] - state[half + _NEXT]
    _put(state, half, forward, _GAP, missing, since, rows, count)
    state[half + _NEXT] += missing
    count = _release(state, half, forward, waiting, rows, count + 1)
    return _end(state, half, forward, since, rows, count)


@lazy_kernel
def _open(state: Int64, packet: Any, rows: Int64, count: int) -> int:
    """A SYN, which opens a connection; a repeated one changes nothing. Gives the number of rows, -1
    if `Flow` has to take it."""
    # With bytes (TCP Fast Open), with contradicting flags, or while the last connection has holes,
    # which first have to become gaps.
    if packet.length or packet.flags & (FIN | RST) or _is_open(state):
        return -1
    forward = packet.forward
    half = _HALVES + _HALF_FIELDS if forward else _HALVES
    other = _HALVES if forward else _HALVES + _HALF_FIELDS
    first = (np.int64(packet.number) + 1) & _MASK
    answers = packet.flags & ACK != 0
    acknowledged = np.int64(packet.acknowledgement)
    over = _is_over(state)
    last_time = max(state[half + _TIME], state[other + _TIME])
    passed = packet.time_ns - last_time
    is_missing = not state[half + _SYNCHRONIZED] and passed <= LINGER_NS
    repeats = state[half + _BASE] == first and (not over or passed <= REORDER_NS or is_missing)
    belongs = (
        state[half + _LATE]
        and answers
        and state[other + _SYNCHRONIZED]
        and state[other + _BASE] == acknowledged
        and (not over or passed <= LINGER_NS)
    )
    if repeats or belongs:
        state[half + _SYNCHRONIZED] = 1
        return count
    # SYN with ACK answers the other end, which so is the opener although its SYN is missing.
    if over or not state[_BEGUN]:
        opener = forward != answers
        _begin(state, opener)
        if answers:
            state[other + _BASE] = acknowledged
        side = _HALVES + _HALF_FIELDS if opener else _HALVES
        _put(state, side, opener, _OPEN, 0, packet.time_ns, rows, count)
        count += 1
    elif state[half + _BASE] >= 0 or (
        answers and state[other + _BASE] >= 0 and state[other + _BASE] != acknowledged
    ):
        # Another connection begins although this one is not over.
        return -1
    state[half + _BASE] = first
    state[half + _SYNCHRONIZED] = 1
    return count


@lazy_kernel
def _is_over(state: Int64) -> bool:
    """Whether the connection was reset or ended in both directions."""
    ended = state[_HALVES + _ENDED] and state[_HALVES + _HALF_FIELDS + _ENDED]
    return state[_BROKEN] != 0 or ended != 0  # type: ignore[no-any-return]


@inlined
def _is_expected(state: Int64, packet: Any) -> bool:
    """Whether a packet has the next bytes of a connection in which nothing is missing: nearly all
    have."""
    half = _HALVES + _HALF_FIELDS if packet.forward else _HALVES
    # Without a base it means nothing; that is tested below, after what is false more often.
    due = (state[half + _BASE] + state[half + _NEXT]) & _MASK
    return (
        np.int64(packet.number) == due
        and packet.size > 0
        and packet.size == packet.length
        and packet.flags & (SYN | FIN | RST) == 0
        and state[half + _BASE] >= 0
        and state[half + _FIN_AT] < 0
        and state[_BROKEN] == 0
        and _waits(state) == 0
    )


@inlined
def _put_payload(state: Int64, packet: Any, rows: Int64, count: int) -> None:
    """A row for an expected packet."""
    forward, size, start = packet.forward, packet.size, packet.start
    half = _HALVES + _HALF_FIELDS if forward else _HALVES
    _put_data(state, half, forward, size, packet.time_ns, packet.source, start, rows, count)


@lazy_kernel
def follow(
    state: Int64,
    waiting: Int64,
    order: npt.NDArray[np.int32],
    at: int,
    packets: Packets,
    rows: Int64,
    count: int,
    most_bytes: int,
    reorder_bytes: int,
) -> tuple[int, int, int]:
    """Read packets from `order[at]` on and write rows after the first `count` ones. Gives the index
    of the next packet, the number of rows, and why it stopped.

    It stops before a packet that may not fit, so that no packet is ever half done.
    """
    while at < len(order):
        # One packet may release all that wait.
        room = rows.shape[1] - count - _waits(state)
        if room < ROWS_OF_A_SEGMENT or state[_BYTES] >= most_bytes:
            return at, count, FULL
        packet = packets[order[at]]
        if packet.flow != state[_FLOW]:
            # Holes become gaps at the end of a flow: that is left to `Flow`, it is rare.
            if _is_open(state):
                return at, count, LEAVE
            enter(state, packet.flow)
        if _is_expected(state, packet):
            _put_payload(state, packet, rows, count)
            count += 1
            at += 1
            continue
        made = (
            _open(state, packet, rows, count)
            if packet.flags & SYN
            else _take(state, waiting, packet, rows, count, reorder_bytes)
        )
        if made < 0:
            return at, count, UNUSUAL
        count = made
        at += 1
    return at, count, DONE


@lazy_kernel
def _take(
    state: Int64, waiting: Int64, packet: Any, rows: Int64, count: int, reorder_bytes: int
) -> int:
    """A segment without SYN. Gives the number of rows, -1 if `Flow` has to take it; then nothing
    was changed that `Flow` would not change alike."""
    forward, time_ns, bits = packet.forward, packet.time_ns, packet.flags
    half = _HALVES + _HALF_FIELDS if forward else _HALVES
    other = _HALVES if forward else _HALVES + _HALF_FIELDS
    # So long after its end it belongs to another connection, which `Flow` begins.
    if _is_over(state) and time_ns - max(state[half + _TIME], state[other + _TIME]) > LINGER_NS:
        return -1
    # A reset first gives out all that waits.
    if bits & RST and (packet.length or bits & FIN or _is_open(state)):
        return -1
    # Without its SYN: `Flow` waits for it.
    if not state[_BEGUN] or state[half + _BASE] < 0:
        return -1
    position = _position_of(state, half, np.int64(packet.number))
    # Of bytes that were captured twice the first count.
    cut = max(state[half + _NEXT] - position, 0)
    length = np.int64(packet.size) - cut
    # Of another connection, whose SYN was not captured.
    if packet.length and abs(position - state[half + _NEXT]) > _FAR:
        return -1
    if packet.length:
        state[half + _REACH] = max(state[half + _REACH], position + packet.length)
    if length > 0:
        side = 1 if forward else 0
        if position > state[half + _NEXT]:
            index = _find_slot(state, half, waiting, side, position, length)
            if index == _OVERLAPS:
                return -1
            if index != _THERE:
                _keep(state, half, waiting, side, index, position, packet)
        elif state[half + _WAITS] and position + cut + length > waiting[side, 0, _POSITION]:
            # It reaches into bytes that wait. They were captured first and count: `Flow` cuts it.
            return -1
        else:
            start = packet.start + cut
            count = _put_data(
                state, half, forward, length, time_ns, packet.source, start, rows, count
            )
            if state[half + _WAITS]:
                count = _release(state, half, forward, waiting, rows, count)
    if bits & FIN and state[half + _FIN_AT] < 0:
        # By the length on the wire; not below 0, which would read as None.
        state[half + _FIN_AT] = max(position + packet.length, 0)
    count = _end(state, half, forward, time_ns, rows, count)
    if _waits(state):
        count = _give_up_holes(state, waiting, packet, rows, count, reorder_bytes)
    if bits & RST and not state[_BROKEN]:
        state[_BROKEN] = 1
        _put(state, half, forward, _RESET, 0, time_ns, rows, count)
        count += 1
    return count


@lazy_kernel
def _give_up_holes(
    state: Int64, waiting: Int64, packet: Any, rows: Int64, count: int, reorder_bytes: int
) -> int:
    """Turn holes into gaps if too many bytes wait, or if the peer acknowledged bytes after a hole
    of its direction and REORDER_NS have passed: as in `Flow`."""
    forward = packet.forward
    half = _HALVES + _HALF_FIELDS if forward else _HALVES
    other = _HALVES if forward else _HALVES + _HALF_FIELDS
    if state[half + _WAITS] and state[half + _WAITING_BYTES] > reorder_bytes:
        count = _give_up(state, half, forward, waiting, rows, count)
    if state[other + _WAITS] and packet.flags & ACK and state[other + _BASE] >= 0:
        side = 0 if forward else 1
        acknowledged = _position_of(state, other, np.int64(packet.acknowledgement))
        is_due = packet.time_ns - waiting[side, 0, _SINCE] > REORDER_NS
        if acknowledged > waiting[side, 0, _POSITION] and is_due:
            count = _give_up(state, other, not forward, waiting, rows, count)
    return count
