"""The process of the lake's encoder: `python -m crosswire.server.lake_process DESCRIPTOR HUB`.

HUB is the hub's process. It reads orders from its input, and for each the bytes in the file that
it shares with the hub;
answers go to its output. It ends when its input does, so with the hub, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec

from crosswire.errors import CrosswireError
from crosswire.lake.writer import LakeWriter
from crosswire.server.lake_batches import build_batch
from crosswire.server.lake_encoder import EncoderAnswer, EncoderOrder, read_message, write_message

__all__ = ["main", "prepare"]

_NICENESS: Final = 5
"""Where processors are short, messages come before files."""
_PR_SET_PDEATHSIG: Final = 1


def prepare(order: EncoderOrder, shared: int) -> EncoderAnswer:
    """Make the files of one order from the bytes in the shared file."""
    try:
        sizes = array("I", order.record_sizes)
        pieces = _pieces(shared, [*order.block_sizes, *sizes])
        blocks = [(first_row, next(pieces)) for first_row in order.first_rows]
        batch = build_batch(order.batch, blocks, list(pieces))
        writer = LakeWriter(
            Path(order.lake),
            order.node,
            order.steps,
            term=order.term,
            writer=order.writer,
            pause=lambda _seconds: None,
        )
        parts = writer.prepare(batch)
    except OSError as error:
        return EncoderAnswer(error=error.strerror or str(error), error_number=error.errno or 5)
    except CrosswireError as error:
        return EncoderAnswer(error=str(error))
    return EncoderAnswer(parts=[(str(each.unfinished), str(each.file)) for each in parts])


def _pieces(shared: int, sizes: Sequence[int]) -> Iterator[bytes]:
    ends = list(accumulate(sizes))
    if not ends or not ends[-1]:
        yield from [b""] * len(sizes)
        return
    with mmap.mmap(shared, ends[-1], access=mmap.ACCESS_READ) as data:
        for end, size in zip(ends, sizes, strict=True):
            yield data[end - size : end]


def _end_with_hub(hub: int) -> None:
    """A hub that is killed takes this process with it, even if it is suspended and can't see that
    its input has ended. Only Linux can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != hub:
        # It was killed before.
        os._exit(0)


def main() -> int:
    """Work until the input ends."""
    # The hub decides when it ends: by closing the input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    shared, hub = map(int, sys.argv[1:])
    _end_with_hub(hub)
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a library may print goes to the log, not among the answers.
    os.dup2(2, 1)
    while order := read_message(orders):
        answer = prepare(msgspec.msgpack.decode(order, type=EncoderOrder), shared)
        try:
            write_message(answers, answer)
        except BrokenPipeError:
            # The hub was killed. Not an orderly exit, which would try to write the rest.
            os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
