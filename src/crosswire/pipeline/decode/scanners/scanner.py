"""Whole runs of captured bytes to columns: what the protocols' columnar scanners share.

A scanner reads many runs in one call, each the bytes of one direction of a connection, and gives a
row for every frame without making an object for any. It is sure of what it gives: where it is not
(a violation, an encrypted or unfinished frame, text that only a closer look can judge) it stops in
front of it, and the Decoder of that direction goes on from there. So scanner and Decoder together
give exactly what the Decoder would give alone; `read` is that togetherness.

    BulkScanner   a protocol's scanner: `scan`, and the way to its Decoder and back
    Columns       what `scan` gives
    read          runs through the scanner, and what it leaves through decoders

This needs numba and numpy (the extra `spark`); nothing but the pipeline imports it. Kernels are
compiled on import and kept on disk. numba does not notice when a function in *another* file
changes: who edits the compiled functions here removes `__pycache__` below `wire/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from crosswire.wire.contract import Decoder, Limits, Placed

__all__ = [
    "AWAY",
    "END",
    "NONE",
    "ODD",
    "OFFSET",
    "OPENED",
    "OWN",
    "STOP",
    "TAIL",
    "BulkScanner",
    "Bytes",
    "Columns",
    "DecoderOutput",
    "Numbers",
    "big",
    "compiled",
    "has_room",
    "has_run",
    "kernel",
    "little",
    "octet_at",
    "point",
    "put",
    "read",
    "stopped",
    "valid_utf8",
    "valid_utf8_escaped",
]

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

# Why a scan ended. What is not END is for the Decoder.
END: Final = 0
"""The run is used up, and ended with a whole frame."""
TAIL: Final = -1
"""What is left is the beginning of a frame."""
ODD: Final = -2
"""What comes next is for the Decoder, which may give back what follows it."""
AWAY: Final = -3
"""The Decoder has it: the scanner can't go on from where that is."""

# A run's state, a row of int64. A protocol's own follows from OWN on.
OFFSET: Final = 0
"""In the stream: of the run's first byte before a scan, of the first that it left after it."""
STOP: Final = 1
OPENED: Final = 2
"""Where in the stream the handshake ended; NONE while it hasn't."""
OWN: Final = 3

NONE: Final = -1

# The rows of what a kernel fills in; two more follow for each slice: position and length.
_RUN: Final = 0
_OFFSET: Final = 1
_LENGTH: Final = 2
_FRAME: Final = 3
_NUMBER: Final = 4
_DETAIL: Final = 5
_SEQUENCE: Final = 6
SLICES: Final = 7

_F = TypeVar("_F", bound=Callable[..., Any])

_RUN_NOW: Final = 0
_ROWS_NOW: Final = 1


# ---------------------------------------------------------------------------------------- kernels


_UNWRAPPED: Final[dict[str, Any]] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: _F) -> _F:
    """For what only kernels call: without what Python would need to call it, which takes long to
    compile."""
    return cast(_F, njit(**_UNWRAPPED)(function))


def kernel(function: _F) -> _F:
    """For `BulkScanner._kernel`: compiled on import, for one signature."""
    data = types.Array(types.uint8, 1, "C", readonly=True)
    one, two = types.int64[::1], types.int64[:, ::1]
    signature = types.boolean(data, one, one, two, one, two, one)
    return cast(_F, njit([signature], cache=True, nogil=True)(function))


@compiled
def has_run(states: Numbers, progress: Numbers) -> bool:
    """Go to the first run from progress[0] on that can be scanned, if there is one."""
    while progress[_RUN_NOW] < states.shape[0]:
        if states[progress[_RUN_NOW], STOP] != AWAY:
            return True
        progress[_RUN_NOW] += 1
    return False


@compiled
def has_room(rows: Numbers, progress: Numbers) -> bool:
    """For what one step of a kernel gives: two rows at most."""
    return bool(progress[_ROWS_NOW] + 2 <= rows.shape[1])


@compiled
def stopped(
    at: Numbers, ends: Numbers, states: Numbers, progress: Numbers, position: int, verdict: int
) -> bool:
    """The current run was read up to `position`, where the last step gave `verdict`; False if it
    could go on, had it room."""
    run = progress[_RUN_NOW]
    states[run, OFFSET] += position - at[run]
    states[run, STOP] = min(verdict, END)
    at[run] = position
    if verdict >= END and position < ends[run]:
        return False
    progress[_RUN_NOW] += 1
    return True


@compiled
def put(
    rows: Numbers,
    progress: Numbers,
    offset: int,
    length: int,
    frame: int,
    number: int,
    detail: int,
    sequence: int,
) -> int:
    """A row of the current run, all its slices absent; gives its index."""
    row = progress[_ROWS_NOW]
    progress[_ROWS_NOW] = row + 1
    rows[_RUN, row] = progress[_RUN_NOW]
    rows[_OFFSET, row] = offset
    rows[_LENGTH, row] = length
    rows[_FRAME, row] = frame
    rows[_NUMBER, row] = number
    rows[_DETAIL, row] = detail
    rows[_SEQUENCE, row] = sequence
    for index in range(SLICES, rows.shape[0], 2):
        rows[index, row] = 0
        rows[index + 1, row] = NONE
    return int(row)


@compiled
def point(rows: Numbers, row: int, index: int, start: int, end: int) -> None:
    """The slice number `index` of a row is data[start:end]."""
    rows[SLICES + 2 * index, row] = start
    rows[SLICES + 2 * index + 1, row] = end - start


@compiled
def octet_at(data: Bytes, at: int) -> int:
    """As a signed number, since numba makes a float of signed and unsigned; by an unsigned index,
    since only that can't count from the end."""
    return int(np.int64(data[np.uint64(at)]))


@compiled
def big(data: Bytes, at: int, size: int) -> int:
    """A big-endian number; of 8 bytes, the same 64 bits."""
    number = 0
    for index in range(at, at + size):
        number = number << 8 | octet_at(data, index)
    return number


@compiled
def little(data: Bytes, at: int, size: int) -> int:
    """The same, little-endian."""
    number = 0
    for index in range(at + size - 1, at - 1, -1):
        number = number << 8 | octet_at(data, index)
    return number


@compiled
def _after(state: int, octet: int) -> int:
    """UTF-8 octet by octet: 0 between characters, -1 for what is not UTF-8, else how many are to
    come, and what the next one may be."""
    if state == 0:
        if octet < 0x80:
            return 0
        if 0xC2 <= octet <= 0xDF:
            return 1 | 0x80 << 8 | 0xBF << 16
        if 0xE0 <= octet <= 0xEF:
            low = 0xA0 if octet == 0xE0 else 0x80
            high = 0x9F if octet == 0xED else 0xBF
            return 2 | low << 8 | high << 16
        if 0xF0 <= octet <= 0xF4:
            low = 0x90 if octet == 0xF0 else 0x80
            high = 0x8F if octet == 0xF4 else 0xBF
            return 3 | low << 8 | high << 16
        return -1
    if octet < (state >> 8 & 0xFF) or octet > state >> 16:
        return -1
    left = (state & 0xFF) - 1
    return left | 0x80 << 8 | 0xBF << 16 if left else 0


@compiled
def valid_utf8(data: Bytes, start: int, end: int) -> bool:
    """What `bytes.decode` takes. Nearly all of it is ASCII, which is found out in large steps: the
    compiler does so where an index can't be negative."""
    together = np.uint8(0)
    for index in range(np.uint64(start), np.uint64(end)):
        together |= data[index]
    if together < 0x80:
        return True
    state = 0
    for index in range(start, end):
        state = _after(state, octet_at(data, index))
        if state < 0:
            return False
    return state == 0


@compiled
def _digit(octet: int) -> int:
    if 48 <= octet <= 57:
        return octet - 48
    octet |= 32
    return octet - 87 if 97 <= octet <= 102 else -1


@compiled
def valid_utf8_escaped(data: Bytes, start: int, end: int) -> bool:
    """Text, known to be UTF-8, whose % escapes are whole and UTF-8 too."""
    state = 0
    index = start
    while index < end:
        octet = octet_at(data, index)
        index += 1
        if octet == 37:
            if index + 2 > end:
                return False
            high, low = _digit(octet_at(data, index)), _digit(octet_at(data, index + 1))
            if high < 0 or low < 0:
                return False
            octet = high << 4 | low
            index += 2
        state = _after(state, octet)
        if state < 0:
            return False
    return state == 0


# ---------------------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Columns:
    """A row for every frame, in the order of the runs and of the frames in them.

    `frame` is an index into `frame_names` and `frame_layers`. What `number`, `detail` and
    `sequence` are is told by the protocol's scanner; NONE stands for nothing, but for `number`,
    which is any 64 bits.
    """

    rows: Numbers
    frame_names: tuple[str, ...]
    frame_layers: tuple[int, ...]
    slice_names: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    @property
    def run(self) -> Numbers:
        return self._column(_RUN)

    @property
    def offset(self) -> Numbers:
        """In the stream."""
        return self._column(_OFFSET)

    @property
    def length(self) -> Numbers:
        return self._column(_LENGTH)

    @property
    def frame(self) -> Numbers:
        return self._column(_FRAME)

    @property
    def layer(self) -> Numbers:
        return np.take(np.array(self.frame_layers, np.int64), self.frame)

    @property
    def number(self) -> NDArray[np.uint64]:
        return self._column(_NUMBER).view(np.uint64)

    @property
    def detail(self) -> Numbers:
        return self._column(_DETAIL)

    @property
    def sequence(self) -> Numbers:
        return self._column(_SEQUENCE)

    def slice(self, name: str) -> tuple[Numbers, Numbers]:
        """Where it starts in the data that was scanned, and its length; NONE if it is absent."""
        index = SLICES + 2 * self.slice_names.index(name)
        return self._column(index), self._column(index + 1)

    def _column(self, index: int) -> Numbers:
        column: Numbers = self.rows[index]
        return column


# ---------------------------------------------------------------------------------------- scanner


class BulkScanner(ABC):
    """A protocol's scanner. Keeps nothing between calls: a run's state is the caller's.

    States come from `fresh`, for a direction from its first byte on, or from `state_of`, to go on
    where a Decoder is. Where one direction decides how the other is read, `share` tells.
    """

    frame_names: ClassVar[tuple[str, ...]]
    frame_layers: ClassVar[tuple[int, ...]]
    slice_names: ClassVar[tuple[str, ...]] = ()
    own_slots: ClassVar[int] = 0
    has_handshake: ClassVar[bool] = False
    """Whether a direction opens with what is read in another way than the rest."""
    _kernel: ClassVar[staticmethod[..., bool]]
    """Given data, at, ends, states, limits, rows and progress, scans the runs from number
    progress[0] on; False if `rows` has no more room."""
    least_bytes: ClassVar[int] = 64
    """Room is made for a row in so many bytes, and more where that was too little."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = np.array(self._limited(limits), np.int64)

    def scan(self, data: Bytes, at: Numbers, ends: Numbers, states: Numbers) -> Columns:
        """Run i is data[at[i]:ends[i]]. `at` and `states` are left where each run stopped; a run
        whose state is AWAY is passed over."""
        left = int((ends - at).sum())
        progress = np.zeros(2, np.int64)
        blocks = []
        while True:
            height = SLICES + 2 * len(self.slice_names)
            rows = np.empty((height, left // self.least_bytes + 64), np.int64)
            progress[_ROWS_NOW] = 0
            done = self._kernel(data, at, ends, states, self._limits, rows, progress)
            blocks.append(rows[:, : progress[_ROWS_NOW]])
            if done:
                break
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        return Columns(whole, self.frame_names, self.frame_layers, self.slice_names)

    def fresh(self, sender: str, count: int) -> Numbers:
        """States of so many directions of `sender`, none of which has said anything yet."""
        states = np.zeros((count, OWN + self.own_slots), np.int64)
        states[:, OPENED] = NONE if self.has_handshake else 0
        states[:, OWN:] = self._begin(sender)
        return states

    def state_of(self, decoder: Decoder) -> Numbers:
        """The state to go on with from the first byte that the decoder has not placed."""
        state = np.zeros(OWN + self.own_slots, np.int64)
        state[OPENED] = NONE
        position = decoder.unplaced
        own = None if position is None else self._read_state(decoder)
        if position is None or own is None:
            state[STOP] = AWAY
        else:
            opened, state[OWN:] = own
            state[OFFSET] = position
            if opened:
                state[OPENED] = position
        return state

    def leave(self, decoder: Decoder, state: Numbers, run: Bytes, offset: int) -> None:
        """Put the decoder where the scanner stopped. The run's first byte stands at `offset`.

        A decoder that has not seen the handshake reads it from the run: what only it keeps of it
        is then its own to know.
        """
        seen = decoder.unplaced
        stop = int(state[OFFSET])
        opened = stop if state[OPENED] == NONE else int(state[OPENED])
        if seen is None or seen < offset:
            raise ValueError("the decoder is not where the run began")
        decoder.jump(seen)
        if seen < opened:
            decoder.feed(run[seen - offset : opened - offset].tobytes())
        decoder.jump(stop)
        self._write_state(decoder, state)

    def share(self, states: Numbers, peers: Numbers) -> None:
        """Tell the accepting sides what the other directions, row by row, have brought up."""

    # What a protocol fills in.

    @abstractmethod
    def _limited(self, limits: Limits | None) -> list[int]:
        """What its kernel must know of the limits."""

    def _begin(self, sender: str) -> list[int]:  # noqa: ARG002
        """Its own slots at a direction's first byte."""
        return []

    def _read_state(self, decoder: Decoder) -> tuple[bool, list[int]] | None:  # noqa: ARG002
        """Is the handshake over, and its own slots; None where only the decoder can go on."""
        return True, []

    def _write_state(self, decoder: Decoder, state: Numbers) -> None:
        """Tell the decoder what the scanner has counted."""


# ------------------------------------------------------------------------------- with the Decoder


class DecoderOutput(NamedTuple):
    """What a run's decoder gave when it had been fed up to data[stop]."""

    run: int
    stop: int
    placed: list[Placed]


STEP_BYTES: Final = 4096
_MOST_STEP_BYTES: Final = 1 << 20


def read(
    scanner: BulkScanner,
    data: Bytes,
    starts: Numbers,
    ends: Numbers,
    offsets: Numbers,
    states: Numbers,
    decoder_of: Callable[[int], Decoder],
    *,
    goes_on: NDArray[np.bool_] | None = None,
    cuts: Numbers | None = None,
    step_bytes: int = STEP_BYTES,
) -> Iterator[Columns | DecoderOutput]:
    """Run i is data[starts[i]:ends[i]], and its first byte stands at offsets[i] of its stream.

    Each run's rows come in order, now as columns, now from its decoder, which is asked for only
    when there is something for it to do. It is fed up to one of the `cuts` (positions in data, in
    order) at most, so that `DecoderOutput.stop` can tell when an item became known. Where
    `goes_on`, a later call has more of that direction: its decoder is left at the run's end, and
    `states` with the state to begin that call with.
    """
    at = starts.copy()
    steps = np.full(len(at), step_bytes)
    settled = np.zeros(len(at), np.bool_)
    states[(states[:, OFFSET] != offsets) & (starts < ends), STOP] = AWAY
    left = np.arange(len(at))
    while len(left):
        some_at, some_states = at[left], states[left]
        columns = scanner.scan(data, some_at, ends[left], some_states)
        at[left], states[left] = some_at, some_states
        if len(columns):
            columns.run[:] = left[columns.run]
            yield columns
        for run in left[some_at < ends[left]].tolist():
            decoder, state = decoder_of(run), states[run]
            if state[STOP] != AWAY:
                whole = data[starts[run] : ends[run]]
                scanner.leave(decoder, state, whole, int(offsets[run]))
            odd_at = NONE if state[STOP] == TAIL else int(at[run])
            back = False
            while at[run] < ends[run] and not back:
                stop = min(int(at[run] + steps[run]), int(ends[run]))
                if cuts is not None:
                    stop = min(stop, _next(cuts, int(at[run]), stop))
                yield DecoderOutput(run, stop, decoder.feed(data[at[run] : stop].tobytes()))
                at[run] = stop
                steps[run] = min(steps[run] * 2, _MOST_STEP_BYTES)
                states[run] = scanner.state_of(decoder)
                position = states[run, OFFSET] - offsets[run] + starts[run]
                back = odd_at != NONE and states[run, STOP] != AWAY and position > odd_at
                if back:
                    at[run] = position
            settled[run] = at[run] == ends[run]
        left = left[at[left] < ends[left]]
    if goes_on is not None:
        for run in np.flatnonzero(goes_on & ~settled & (starts < ends)).tolist():
            decoder = decoder_of(run)
            scanner.leave(decoder, states[run], data[starts[run] :], int(offsets[run]))
            states[run] = scanner.state_of(decoder)


def _next(cuts: Numbers, position: int, otherwise: int) -> int:
    index = int(np.searchsorted(cuts, position, "right"))
    return int(cuts[index]) if index < len(cuts) else otherwise
