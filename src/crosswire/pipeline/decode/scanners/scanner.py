"""Whole runs of captured bytes to columns: the driver of all scanners.

A scanner reads many runs in one call, each of them bytes of one direction of a connection, and
gives a row for each frame without making an object for any. It gives only what it is sure of: in
front of everything else (a violation, an encrypted or incomplete frame, an unusual form) it stops,
and the direction's Decoder goes on from there; `fallback` is how they take turns.

A protocol gives what differs: a `step`, compiled, that reads one frame; the frames and slices that
its rows have; and what it must remember of a direction between two frames.

    scan_kernel   the loop over runs and frames, around a protocol's step
    BulkScanner   a protocol's scanner: `scan`, and the exchange of state with its Decoder
    Columns       what `scan` gives

**State.** Nothing is kept between calls but a row of numbers for each run, which belongs to the
caller. It holds the offset in the stream, why the scan stopped, where the handshake ended, and what
the protocol adds: how far its handshake is, what was agreed in it, which sequence number is next.
Since a scan only ever stops between two frames, that is all there is to carry over from one batch
to the next; an incomplete frame stays with the caller as bytes, or with the Decoder.

**Bounds.** Compiled code does not check indexes. Each step reads a byte only after it has compared
its position with the end of the run, and adds a length to a position only if the field is at most 4
bytes wide or the length has been compared with a limit: so no sum overflows 64 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np

from crosswire.pipeline.decode.arrays import NONE, Bytes, Naturals, Numbers
from crosswire.pipeline.decode.kernels import (
    BOOLEAN,
    OCTETS,
    OUT_INTS,
    OUT_TABLE,
    kernel,
    subroutine,
)
from crosswire.wire.contract import Decoder, Frame, Limits

__all__ = [
    "DECODER_ONLY",
    "END",
    "HANDSHAKE_END",
    "INCOMPLETE",
    "OFFSET",
    "PROTOCOL_STATE",
    "SCRATCH",
    "STOP_REASON",
    "UNSURE",
    "BulkScanner",
    "Columns",
    "FrameColumns",
    "add_row",
    "columns_of_frames",
    "scan_kernel",
    "set_slice",
]

# Why a scan stopped. A step returns one of the negative ones instead of the next position.
END: Final = 0
"""The run is used up, and ended with a whole frame."""
INCOMPLETE: Final = -1
"""The rest of the run is the beginning of a frame."""
UNSURE: Final = -2
"""The next frame is for the Decoder, after which the scanner may go on."""
DECODER_ONLY: Final = -3
"""The Decoder is in a state that the scanner can't go on from."""

# The columns of the states, a row of int64 for each run. A protocol's own are the last.
OFFSET: Final = 0
"""In the stream: before a scan of the run's first byte, after it of the first byte not read."""
STOP_REASON: Final = 1
HANDSHAKE_END: Final = 2
"""Offset in the stream; NONE while the handshake is not complete."""
PROTOCOL_STATE: Final = 3
"""The first of a protocol's own."""

# The rows of the table that a kernel fills in, a column for each frame. Two more rows follow for
# each slice: position and length.
_RUN: Final = 0
_OFFSET: Final = 1
_LENGTH: Final = 2
_FRAME: Final = 3
_NUMBER: Final = 4
_DETAIL: Final = 5
_SEQUENCE: Final = 6
_SLICES: Final = 7

# How far a kernel is when it returns for want of room: the run, and the rows that are filled in.
_CURRENT_RUN: Final = 0
_ROWS_USED: Final = 1
SCRATCH: Final = 2
"""The first of the numbers that a step may use to note something while it reads a frame. They are
here because each array that a step is given makes its call slower."""

_MOST_ROWS_A_STEP: Final = 2
"""eMQP gives two for a message: ZMTP's, and that of the command in it."""


# ----------------------------------------------------------------------------------------- driver


@subroutine
def _find_run(states: Numbers, progress: Numbers) -> bool:
    """Go to the first run, from the current one on, that can be scanned, if there is one."""
    while progress[_CURRENT_RUN] < states.shape[0]:
        if states[progress[_CURRENT_RUN], STOP_REASON] != DECODER_ONLY:
            return True
        progress[_CURRENT_RUN] += 1
    return False


@subroutine
def _has_room(rows: Numbers, progress: Numbers) -> bool:
    return bool(progress[_ROWS_USED] + _MOST_ROWS_A_STEP <= rows.shape[1])


@subroutine
def _end_run(
    at: Numbers, ends: Numbers, states: Numbers, progress: Numbers, position: int, after: int
) -> bool:
    """Note how far the current run was read, and what its last step returned.

    False if it could go on, had `rows` more room: then it stays the current one.
    """
    run = progress[_CURRENT_RUN]
    states[run, OFFSET] += position - at[run]
    states[run, STOP_REASON] = min(after, END)
    at[run] = position
    if after >= END and position < ends[run]:
        return False
    progress[_CURRENT_RUN] += 1
    return True


Step = Callable[..., int]
"""A protocol's `step(data, position, end, shift, state, limits, rows, progress)`.

Reads the frame at data[position], in a run that ends at `end`. Adds its rows, with `shift` added to
positions to make offsets of them, and returns the position after it, or INCOMPLETE or UNSURE. It
changes `state` only if it gives the frame.
"""


def scan_kernel(protocol: str, step: Step) -> Callable[..., bool]:
    """The compiled loop over runs and frames around a protocol's step.

    It takes data, at, ends, states, limits, rows and progress, and returns False when `rows` is
    full: the caller then gives it empty ones, and it continues where it was.
    """

    def scan(
        data: Bytes,
        at: Numbers,
        ends: Numbers,
        states: Numbers,
        limits: Numbers,
        rows: Numbers,
        progress: Numbers,
    ) -> bool:
        while _find_run(states, progress):
            run = progress[_CURRENT_RUN]
            position, end, state = at[run], ends[run], states[run]
            shift = state[OFFSET] - position
            after = position
            while position < end and _has_room(rows, progress):
                after = step(data, position, end, shift, state, limits, rows, progress)
                if after < 0:
                    break
                position = after
            if not _end_run(at, ends, states, progress, position, after):
                return False
        return True

    # numba names machine code, and the file in which it is kept, after the function. The loops of
    # five protocols under one name would be taken for one another in a process that loads them all.
    scan.__name__ = scan.__qualname__ = f"scan_{protocol}"
    arrays = (OCTETS, OUT_INTS, OUT_INTS, OUT_TABLE, OUT_INTS, OUT_TABLE, OUT_INTS)
    return kernel(*arrays, returns=BOOLEAN)(scan)


@subroutine
def add_row(
    rows: Numbers,
    progress: Numbers,
    offset: int,
    length: int,
    frame: int,
    number: int,
    detail: int,
    sequence: int,
) -> int:
    """Add a row to the current run, all its slices absent; returns its index."""
    row = progress[_ROWS_USED]
    progress[_ROWS_USED] = row + 1
    rows[_RUN, row] = progress[_CURRENT_RUN]
    rows[_OFFSET, row] = offset
    rows[_LENGTH, row] = length
    rows[_FRAME, row] = frame
    rows[_NUMBER, row] = number
    rows[_DETAIL, row] = detail
    rows[_SEQUENCE, row] = sequence
    for index in range(_SLICES, rows.shape[0], 2):
        rows[index, row] = 0
        rows[index + 1, row] = NONE
    return int(row)


@subroutine
def set_slice(rows: Numbers, row: int, index: int, start: int, end: int) -> None:
    """The slice number `index` of a row is data[start:end]."""
    rows[_SLICES + 2 * index, row] = start
    rows[_SLICES + 2 * index + 1, row] = end - start


# ---------------------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Columns:
    """A row for every frame, in the order of the runs and of the frames in them.

    `frame` is an index into `frame_names` and `frame_layers`. What `number`, `detail` and
    `sequence` are depends on the protocol, see its scanner. An absent `detail` or `sequence` is
    NONE; of `number` all 64 bits are in use, and an absent one is 0.
    """

    rows: Numbers
    frame_names: tuple[str, ...]
    frame_layers: tuple[int, ...]
    slice_names: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    @property
    def run(self) -> Numbers:
        """The index of the run that the frame is in."""
        return self._column(_RUN)

    @property
    def offset(self) -> Numbers:
        """Of the frame's first byte, in the stream."""
        return self._column(_OFFSET)

    @property
    def length(self) -> Numbers:
        """In bytes, of the whole frame."""
        return self._column(_LENGTH)

    @property
    def frame(self) -> Numbers:
        """The code of the frame's kind."""
        return self._column(_FRAME)

    @property
    def layer(self) -> Numbers:
        """1 for frames inside another protocol's frames, else 0."""
        return np.take(np.array(self.frame_layers, np.int64), self.frame)

    @property
    def number(self) -> Naturals:
        """Mostly the identifier."""
        return self._column(_NUMBER).view(np.uint64)

    @property
    def detail(self) -> Numbers:
        """Flags, a version or a code of the protocol."""
        return self._column(_DETAIL)

    @property
    def sequence(self) -> Numbers:
        """The number in a sequence, where the frame carries one."""
        return self._column(_SEQUENCE)

    def slice(self, name: str) -> tuple[Numbers, Numbers]:
        """Positions in the data that was scanned, and lengths; NONE where it is absent."""
        index = _SLICES + 2 * self.slice_names.index(name)
        return self._column(index), self._column(index + 1)

    def _column(self, index: int) -> Numbers:
        column: Numbers = self.rows[index]
        return column


class FrameColumns(NamedTuple):
    """A frame that a decoder gave, as it is in the columns of the scanner: with the bytes of its
    slices, None for an absent one, instead of where they are.

    `trailing` is how many bytes of the frame follow its first slice.
    """

    frame: int
    number: int = 0
    detail: int = NONE
    sequence: int = NONE
    slices: tuple[bytes | None, ...] = ()
    trailing: int = 0


def columns_of_frames(
    frames: Sequence[FrameColumns], lengths: Sequence[int], slice_count: int, base: int
) -> tuple[Numbers, bytes]:
    """The table of `Columns` for frames that decoders gave, and the bytes of their slices.

    Positions are those in data of which these bytes are the part from `base` on. Runs and offsets
    are not set.
    """
    table = np.zeros((_SLICES + 2 * slice_count, len(frames)), np.int64)
    if frames:
        table[_LENGTH] = lengths
        table[_FRAME] = [each.frame for each in frames]
        table[_NUMBER] = np.array([each.number for each in frames], np.uint64).view(np.int64)
        table[_DETAIL] = [each.detail for each in frames]
        table[_SEQUENCE] = [each.sequence for each in frames]
    # The slices of a frame follow one another: some are compared together with the next one.
    pieces: list[bytes] = []
    for index, each in enumerate(frames):
        for number in range(slice_count):
            piece = each.slices[number] if number < len(each.slices) else None
            row = _SLICES + 2 * number
            table[row, index] = base
            table[row + 1, index] = NONE if piece is None else len(piece)
            if piece:
                pieces.append(piece)
                base += len(piece)
    return table, b"".join(pieces)


# ---------------------------------------------------------------------------------------- scanner


class BulkScanner(ABC):
    """A protocol's scanner. Keeps nothing between calls: a run's state is the caller's.

    States come from `new_states`, for directions from their first byte on, or from `state_of`, to
    continue where a Decoder is.
    """

    frames: ClassVar[tuple[type[Frame], ...]]
    """In the order of their codes."""
    decoder_frames: ClassVar[tuple[type[Frame], ...]] = ()
    """Frames that only decoders give; their codes follow."""
    slice_names: ClassVar[tuple[str, ...]] = ()
    state_version: ClassVar[int] = 1
    """Of the numbers of a state, which a stream saves."""
    state_slots: ClassVar[int] = 0
    """How many numbers a protocol adds to a state."""
    scratch_slots: ClassVar[int] = 0
    """How many numbers its step uses to note something while it reads a frame."""
    has_handshake: ClassVar[bool] = False
    """Whether a direction opens with what is read in another way than the rest."""
    reads_peer_handshake: ClassVar[bool] = False
    """Whether the opener's handshake decides how the other direction is read."""
    kernel: ClassVar[staticmethod[..., bool]]
    """What `scan_kernel` gives for the protocol."""

    _BYTES_A_ROW: Final = 64
    """Room is made for a row in as many bytes, and again for as many where that is not enough."""

    def __init__(self, limits: Limits | None = None) -> None:
        every = (*self.frames, *self.decoder_frames)
        self.frame_names = tuple(frame.frame_name for frame in every)
        self.frame_layers = tuple(frame.layer for frame in every)
        self.codes: dict[type[Frame], int] = {frame: code for code, frame in enumerate(every)}
        self.state_size = PROTOCOL_STATE + self.state_slots
        self._limits = np.array(self._limit_values(limits), np.int64)

    def scan(self, data: Bytes, at: Numbers, ends: Numbers, states: Numbers) -> Columns:
        """Read runs, of which run i is data[at[i]:ends[i]].

        Leaves `at` and `states` where each run stopped. A run whose state is DECODER_ONLY is passed
        over.
        """
        left = int((ends - at).sum())
        progress = np.zeros(SCRATCH + self.scratch_slots, np.int64)
        blocks = []
        while True:
            height = _SLICES + 2 * len(self.slice_names)
            rows = np.empty((height, left // self._BYTES_A_ROW + 64), np.int64)
            progress[_ROWS_USED] = 0
            done = self.kernel(data, at, ends, states, self._limits, rows, progress)
            blocks.append(rows[:, : progress[_ROWS_USED]])
            if done:
                break
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        return Columns(whole, self.frame_names, self.frame_layers, self.slice_names)

    def new_states(self, sender: str, count: int) -> Numbers:
        """States of directions of `sender` at their first byte."""
        states = np.zeros((count, self.state_size), np.int64)
        states[:, HANDSHAKE_END] = NONE if self.has_handshake else 0
        states[:, PROTOCOL_STATE:] = self._initial_state(sender)
        return states

    def state_of(self, decoder: Decoder) -> Numbers:
        """The state to continue with from the first byte that is in no frame of the decoder yet."""
        state = np.zeros(self.state_size, np.int64)
        state[HANDSHAKE_END] = NONE
        position = decoder.unplaced
        own = None if position is None else self._state_from(decoder)
        if position is None or own is None:
            state[STOP_REASON] = DECODER_ONLY
        else:
            is_open, state[PROTOCOL_STATE:] = own
            state[OFFSET] = position
            if is_open:
                state[HANDSHAKE_END] = position
        return state

    def hand_over(self, decoder: Decoder, state: Numbers, run: Bytes, offset: int) -> None:
        """Put the decoder where the scanner stopped. The run's first byte has `offset`.

        A decoder that has not read the handshake is fed with it from the run: what a decoder keeps
        of a handshake (names of extensions, a socket's type) is more than the state holds. Raises
        ValueError if the decoder needs bytes from before the run.
        """
        seen = decoder.unplaced
        stop = int(state[OFFSET])
        opened = stop if state[HANDSHAKE_END] == NONE else int(state[HANDSHAKE_END])
        if seen is None or seen < offset:
            raise ValueError("the decoder is not where the run began")
        decoder.jump(seen)
        if seen < opened:
            decoder.feed(run[seen - offset : opened - offset].tobytes())
        decoder.jump(stop)
        self._restore(decoder, state)

    def share_handshake(self, states: Numbers, peers: Numbers) -> None:
        """Copy what the openers' handshakes decide into the states of the other directions.

        `peers` are the openers' states, row by row. Only where `reads_peer_handshake`.
        """

    # What a protocol fills in.

    @abstractmethod
    def columns_of(self, frame: Frame, length: int, below: Frame | None) -> FrameColumns:
        """What the columns have of a frame that a decoder gave; `below` is the latest on layer 0.

        Raises FrameError if its content is not valid, and that would not show in the columns.
        """

    @abstractmethod
    def _limit_values(self, limits: Limits | None) -> list[int]:
        """Those of the limits that its step compares with, in the order that it expects."""

    def _initial_state(self, sender: str) -> list[int]:  # noqa: ARG002
        """Its own numbers at a direction's first byte."""
        return []

    def _state_from(self, decoder: Decoder) -> tuple[bool, list[int]] | None:  # noqa: ARG002
        """Whether the handshake is complete, and its own numbers; None where only the decoder can
        continue."""
        return True, []

    def _restore(self, decoder: Decoder, state: Numbers) -> None:
        """Set in the decoder what changes with each frame; the rest it has from the handshake."""
