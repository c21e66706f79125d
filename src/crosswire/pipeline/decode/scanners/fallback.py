"""A scanner, and decoders for what it leaves: together they read everything.

The scanner stops in front of what it is not sure of. The direction's decoder then reads a few KiB
from there, and if it comes out in a state that the scanner can go on from, the scanner does. So
both together give exactly the frames that the decoder alone would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from crosswire.errors import FrameError
from crosswire.pipeline.decode.arrays import NONE, Bytes, Flags, Numbers
from crosswire.pipeline.decode.scanners.scanner import (
    DECODER_ONLY,
    INCOMPLETE,
    OFFSET,
    STOP_REASON,
    BulkScanner,
    Columns,
)
from crosswire.wire.contract import Decoder, Placed

__all__ = ["DecoderOutput", "scan_and_decode"]

_STEP_BYTES: Final = 4096
_MOST_STEP_BYTES: Final = 1 << 20


class DecoderOutput(NamedTuple):
    """What a run's decoder gave when it had been fed up to data[stop]."""

    run: int
    stop: int
    placed: list[Placed]

    @property
    def frames(self) -> int:
        """How many of the items are no errors."""
        return sum(not isinstance(item, FrameError) for _, _, item in self.placed)


def scan_and_decode(
    scanner: BulkScanner,
    data: Bytes,
    starts: Numbers,
    ends: Numbers,
    offsets: Numbers,
    states: Numbers,
    decoder_of: Callable[[int], Decoder],
    *,
    continues: Flags | None = None,
    cuts: Numbers | None = None,
    step_bytes: int = _STEP_BYTES,
) -> Iterator[Columns | DecoderOutput]:
    """Read runs: run i is data[starts[i]:ends[i]], and its first byte has offsets[i] in its stream.

    Each run's frames come in order, as columns from the scanner or as objects from its decoder.
    `decoder_of` is called only for runs in which there is something for a decoder to read. A
    decoder is fed up to the next of the `cuts` (ascending positions in data) at most, so that
    `DecoderOutput.stop` shows with which piece of the capture an item became complete.

    `continues` marks runs of which a later call has more. Their decoders are left at the run's end,
    and `states` with what that call must be given. Without it `states` are left where the scanner
    stopped.
    """
    at = starts.copy()
    steps = np.full(len(at), step_bytes)
    fed_to_end = np.zeros(len(at), np.bool_)
    # A decoder in the middle of a frame has read further than the scanner could go on from: its
    # state is that of the frame's first byte. It has to finish the frame itself.
    states[(states[:, OFFSET] != offsets) & (starts < ends), STOP_REASON] = DECODER_ONLY
    left = np.arange(len(at))
    while len(left):
        # All runs that can be scanned, in one call; then, one by one, those that were not finished.
        some_at, some_states = at[left], states[left]
        columns = scanner.scan(data, some_at, ends[left], some_states)
        at[left], states[left] = some_at, some_states
        if len(columns):
            columns.run[:] = left[columns.run]
            yield columns
        for run in left[some_at < ends[left]].tolist():
            decoder, state = decoder_of(run), states[run]
            if state[STOP_REASON] != DECODER_ONLY:
                whole = data[starts[run] : ends[run]]
                scanner.hand_over(decoder, state, whole, int(offsets[run]))
            # Of an incomplete frame all of the rest belongs to the decoder: nothing to return to.
            unsure_at = NONE if state[STOP_REASON] == INCOMPLETE else int(at[run])
            returned = False
            while at[run] < ends[run] and not returned:
                stop = min(int(at[run] + steps[run]), int(ends[run]))
                if cuts is not None:
                    stop = min(stop, _next_cut(cuts, int(at[run]), stop))
                yield DecoderOutput(run, stop, decoder.feed(data[at[run] : stop].tobytes()))
                at[run] = stop
                # Doubling bounds what is spent on changing hands where a run is full of doubts.
                steps[run] = min(steps[run] * 2, _MOST_STEP_BYTES)
                states[run] = scanner.state_of(decoder)
                # The scanner goes on at the first byte that the decoder has not given as part of a
                # frame. It must be past the doubt, or both would hand it to each other forever.
                position = states[run, OFFSET] - offsets[run] + starts[run]
                can_return = unsure_at != NONE and states[run, STOP_REASON] != DECODER_ONLY
                returned = can_return and position > unsure_at
                if returned:
                    at[run] = position
            fed_to_end[run] = at[run] == ends[run]
        left = left[at[left] < ends[left]]
    if continues is not None:
        for run in np.flatnonzero(continues & ~fed_to_end & (starts < ends)).tolist():
            decoder = decoder_of(run)
            scanner.hand_over(decoder, states[run], data[starts[run] :], int(offsets[run]))
            states[run] = scanner.state_of(decoder)


def _next_cut(cuts: Numbers, position: int, default: int) -> int:
    index = int(np.searchsorted(cuts, position, "right"))
    return int(cuts[index]) if index < len(cuts) else default
