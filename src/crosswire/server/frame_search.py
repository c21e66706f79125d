"""The frames that carried a message, where the tap recorded its connections; on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.lake.wire_history import RecordedRun
from crosswire.wire.contract import Row
from crosswire.wire.registry import protocol

__all__ = ["CarryingFrame", "find_frame"]

_SOUGHT_BYTES: Final = 65_536
_NEAR_US: Final = 10_000_000
_END_US: Final = 50_000
"""A recording that ends earlier than this before a step does not have its frame yet."""


class CarryingFrame(NamedTuple):
    """A frame, its offset in the direction, its bytes, and when the last of them passed.

    `has_payload`: it has the message's payload as it is; if not, it is the one that is nearest in
    time.
    """

    direction: str
    offset: int
    time: int
    row: Row
    data: bytes
    has_payload: bool


def find_frame(
    runs: Sequence[RecordedRun],
    is_whole: bool,
    protocol_name: str,
    direction: str,
    time_us: int,
    payload: bytes,
) -> CarryingFrame | None:
    """The frame in a direction that carried a payload at about this time; None if there is none, or
    it is not recorded yet.

    `is_whole`: the runs begin with the connection.
    """
    entry = protocol(protocol_name)
    forward = entry.decoder(entry.roles[0], late=not is_whole)
    backward = entry.decoder(entry.roles[-1], late=not is_whole, peer=forward)
    decoders = {FORWARD: forward, BACKWARD: backward}
    own = [run for run in runs if run.direction == direction]
    if not own:
        return None
    found: list[tuple[int, Row]] = []
    first = own[0].offset
    for run in runs:
        for row in decoders[run.direction].rows(run.data):
            # A row without bytes notes that a decoder began in the middle; it is no frame.
            if run.direction == direction and row.error is None and row.length:
                found.append((run.time, row))
    stream = b"".join(run.data for run in own)
    sought = payload[:_SOUGHT_BYTES]
    best: tuple[bool, int, CarryingFrame] | None = None
    for passed_us, row in found:
        distance_us = abs(passed_us - time_us)
        if distance_us > _NEAR_US:
            continue
        data = stream[row.offset : row.offset + row.length]
        has_payload = bool(sought) and sought in data
        # Decoders count from the first byte that they were given.
        shown = CarryingFrame(direction, first + row.offset, passed_us, row, data, has_payload)
        if best is None or (not has_payload, distance_us) < best[:2]:
            best = (not has_payload, distance_us, shown)
    if best is None or (not best[2].has_payload and own[-1].time < time_us - _END_US):
        # The nearest one would be that of another message.
        return None
    return best[2]
