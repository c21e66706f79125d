"""A compiled kernel that follows flows segment by segment, as long as nothing odd happens.

It knows all of `reassembly.Flow` but holes: openings, ends, late starts, what comes in order and
what came before. What it can't tell it leaves to `Flow`, which takes over its state (`to_flow`) and
gives it back (`from_flow`) once nothing waits any more.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crosswire.lake import schemas
from crosswire.pipeline.compiled import compiled
from crosswire.pipeline.sources.reassembly import Flow
from crosswire.pipeline.sources.tcp import ACK, FIN, RST, SYN

__all__ = [
    "DATA",
    "DONE",
    "FULL",
    "KINDS",
    "LEAVE",
    "NO_FLOW",
    "ODD",
    "ROWS_OF_A_SEGMENT",
    "enter",
    "flow_of",
    "follow",
    "followed_bytes",
    "forget_followed",
    "from_flow",
    "new_state",
    "rename",
    "to_flow",
]

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

KINDS: Final = (schemas.OPEN, schemas.DATA, schemas.GAP, schemas.FIN, schemas.RESET)
"""A row's kind is a place in here."""
_OPEN, DATA, _FIN, _RESET = 0, 1, 3, 4

# Why the kernel stopped.
DONE: Final = 0
"""All segments are read."""
FULL: Final = 1
"""There is no more room for rows."""
ODD: Final = 2
"""The next segment is one for `Flow`."""
LEAVE: Final = 3
"""The next segment is of another flow, and this one does not end as it should."""

NO_FLOW: Final = -1
ROWS_OF_A_SEGMENT: Final = 2
"""At most."""

# State: all int64, -1 for None. Behind the flow's own fields those of either direction.
_FLOW, _NUMBER, _OPENER, _BROKEN, _BEGUN, _BYTES = 0, 1, 2, 3, 4, 5
_HALVES, _HALF_FIELDS = 6, 6
_BASE, _NEXT, _LATE, _FIN_AT, _ENDED, _TIME = 0, 1, 2, 3, 4, 5

_MASK = (1 << 32) - 1
_MIDDLE = 1 << 31
_FAR = 1 << 30


def new_state() -> Int64:
    state = np.zeros(_HALVES + 2 * _HALF_FIELDS, np.int64)
    enter(state, NO_FLOW)
    return state


def flow_of(state: Int64) -> int:
    """The flow that it is about."""
    return int(state[_FLOW])


def rename(state: Int64, flow: int) -> None:
    """Flows have other numbers from here on."""
    state[_FLOW] = flow


def followed_bytes(state: Int64) -> int:
    """How much the kernel has put into rows since `forget_followed`."""
    return int(state[_BYTES])


def forget_followed(state: Int64) -> None:
    state[_BYTES] = 0


def to_flow(state: Int64, flow: Flow) -> None:
    """Let `flow` go on where the kernel stopped."""
    own = state.tolist()
    halves: list[Any] = []
    for forward in (1, 0):
        at = _HALVES + forward * _HALF_FIELDS
        base, following, late, fin_at, ended, time = own[at : at + _HALF_FIELDS]
        halves.append(
            (
                None if base < 0 else base,
                following,
                bool(late),
                None if fin_at < 0 else fin_at,
                bool(ended),
                time,
                [],
            )
        )
    opener = None if own[_OPENER] < 0 else bool(own[_OPENER])
    flow.restore((own[_NUMBER], opener, halves, bool(own[_BROKEN]), bool(own[_BEGUN])))


def from_flow(flow: Flow, state: Int64) -> None:
    """Let the kernel go on where `flow`, in which nothing waits, stopped."""
    number, opener, halves, broken, begun = flow.save()
    state[_NUMBER : _BEGUN + 1] = (number, -1 if opener is None else opener, broken, begun)
    for forward, half in zip((1, 0), halves, strict=True):
        base, following, late, fin_at, ended, time, _ = half
        at = _HALVES + forward * _HALF_FIELDS
        state[at : at + _HALF_FIELDS] = (
            -1 if base is None else base,
            following,
            late,
            -1 if fin_at is None else max(fin_at, 0),
            ended,
            time,
        )


@compiled
def enter(state: Int64, flow: int) -> None:
    state[_FLOW] = flow
    _begin(state, -1)
    state[_NUMBER] = -1
    state[_BEGUN] = 0


@compiled
def _begin(state: Int64, opener: int) -> None:
    state[_NUMBER] += 1
    state[_OPENER] = opener
    state[_BROKEN] = 0
    state[_BEGUN] = 1
    state[_HALVES:] = 0
    for half in (_HALVES, _HALVES + _HALF_FIELDS):
        state[half + _BASE] = -1
        state[half + _FIN_AT] = -1


@compiled
def _is_pending(state: Int64, half: int) -> bool:
    """It said where it ends, and has not come there."""
    return state[half + _FIN_AT] >= 0 and not state[half + _ENDED]


@compiled
def _place(state: Int64, half: int, number: Any) -> int:
    distance = (number - state[half + _BASE] - state[half + _NEXT]) & _MASK
    if distance >= _MIDDLE:
        distance -= _MASK + 1
    return state[half + _NEXT] + distance  # type: ignore[no-any-return]


@compiled
def _put(
    state: Int64,
    half: int,
    forward: bool,
    kind: int,
    length: Any,
    time_ns: int,
    rows: Int64,
    row: int,
) -> None:
    """A row: flow · connection · opener · forward · kind · offset · length · time · late · source ·
    start. A direction's time never runs backwards."""
    state[half + _TIME] = max(state[half + _TIME], time_ns)
    rows[0, row] = state[_FLOW]
    rows[1, row] = state[_NUMBER]
    rows[2, row] = state[_OPENER]
    rows[3, row] = forward
    rows[4, row] = kind
    rows[5, row] = state[half + _NEXT]
    rows[6, row] = length
    rows[7, row] = state[half + _TIME]
    rows[8, row] = state[half + _LATE]
    rows[9, row] = -1
    rows[10, row] = 0


@compiled
def follow(
    state: Int64,
    order: npt.NDArray[np.int32],
    at: int,
    flows: npt.NDArray[np.int32],
    forwards: Bool,
    times: Int64,
    numbers: npt.NDArray[np.uint32],
    acknowledgements: npt.NDArray[np.uint32],
    flags: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int32],
    sources: npt.NDArray[np.int32],
    starts: Int64,
    rows: Int64,
    count: int,
    most_bytes: int,
) -> tuple[int, int, int]:
    """Read segments from `order[at]` on and write rows behind the first `count` ones: the place of
    the next segment, how many rows there are, and why it stopped."""
    while at < len(order):
        if count + ROWS_OF_A_SEGMENT > rows.shape[1] or state[_BYTES] >= most_bytes:
            return at, count, FULL
        index = order[at]
        if flows[index] != state[_FLOW]:
            if _is_pending(state, _HALVES) or _is_pending(state, _HALVES + _HALF_FIELDS):
                return at, count, LEAVE
            enter(state, flows[index])
        forward = forwards[index]
        half = _HALVES + _HALF_FIELDS if forward else _HALVES
        other = _HALVES if forward else _HALVES + _HALF_FIELDS
        number = np.int64(numbers[index])
        bits = np.int64(flags[index])
        size = np.int64(sizes[index])
        over = state[_BROKEN] or (state[half + _ENDED] and state[other + _ENDED])
        if bits & SYN:
            if size or bits & (FIN | RST) or _is_pending(state, half) or _is_pending(state, other):
                return at, count, ODD
            first = (number + 1) & _MASK
            answers = bits & ACK != 0
            acknowledged = np.int64(acknowledgements[index])
            repeated = state[half + _BASE] == first and not state[half + _LATE]
            if over or not repeated:
                if over or not state[_BEGUN]:
                    opener = forward != answers
                    _begin(state, opener)
                    if answers:
                        state[other + _BASE] = acknowledged
                    side = _HALVES + _HALF_FIELDS if opener else _HALVES
                    _put(state, side, opener, _OPEN, 0, times[index], rows, count)
                    count += 1
                elif state[half + _BASE] >= 0 or (
                    answers and state[other + _BASE] >= 0 and state[other + _BASE] != acknowledged
                ):
                    return at, count, ODD
                state[half + _BASE] = first
            at += 1
            continue
        if over:
            return at, count, ODD
        if not state[_BEGUN]:
            _begin(state, -1)
        if state[half + _BASE] < 0:
            state[half + _BASE] = number
            state[half + _LATE] = 1
        place = _place(state, half, number)
        if size:
            behind = place - state[half + _NEXT]
            if behind > 0 or behind + size > 0 > behind or behind < -_FAR:
                return at, count, ODD
        if bits & RST and (
            size or bits & FIN or _is_pending(state, half) or _is_pending(state, other)
        ):
            return at, count, ODD
        if size and place == state[half + _NEXT]:
            _put(state, half, forward, DATA, size, times[index], rows, count)
            rows[9, count] = sources[index]
            rows[10, count] = starts[index]
            state[half + _NEXT] += size
            state[_BYTES] += size
            count += 1
        if bits & FIN and state[half + _FIN_AT] < 0:
            state[half + _FIN_AT] = max(place + lengths[index], 0)
        if _is_pending(state, half) and state[half + _NEXT] >= state[half + _FIN_AT]:
            state[half + _ENDED] = 1
            _put(state, half, forward, _FIN, 0, times[index], rows, count)
            count += 1
        if bits & RST:
            state[_BROKEN] = 1
            _put(state, half, forward, _RESET, 0, times[index], rows, count)
            count += 1
        at += 1
    return at, count, DONE
