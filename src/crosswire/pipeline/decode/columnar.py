"""Many connections at once: bronze.wire, batch by batch, through the columnar scanners.

Whatever the scanners are sure of becomes rows without an object for any frame; what they are not
goes to the decoders, frame by frame. A connection that is in any way irregular in a batch (bytes
are missing, it was joined late, its two sides spoke before they had agreed how) is read in it row
by row, as `ConnectionRows` does. What is known of a connection is the same either way, and so are
its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.connection_index import ConnectionIndex
from crosswire.pipeline.decode.connection_rows import MOST_OPEN, WANTED, ConnectionRows
from crosswire.pipeline.decode.scanning import Kit, Scan, kit_of
from crosswire.pipeline.decode.text import among
from crosswire.pipeline.decode.wire_batch import NOWHERE, WireBatch
from crosswire.pipeline.stream.state_spill import States
from crosswire.pipeline.tables.decoded import ARROW

__all__ = ["ColumnarDecoder"]

_UNKNOWN: Final = (None,) * 8

_Key = tuple[str, str]


class ColumnarDecoder:
    """Takes batches of bronze.wire, each connection's rows in order; gives rows of
    `tables.decoded`, in no certain order: the very ones that `ConnectionRows` gives.

    A connection is over when both its directions have ended; where connections come `grouped`, one
    after the other, when the next one begins. Of those that are not over, the `most_open` latest
    are held as they are, and of the others the state that they can be taken up from.
    """

    def __init__(
        self, *, payloads: bool, grouped: bool = False, most_open: int = MOST_OPEN
    ) -> None:
        self._payloads = payloads
        self._grouped = grouped
        self._most_open = most_open
        self._collected = Batches(ARROW)
        self._open: dict[_Key, ConnectionRows] = {}
        self._stored = States()

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        arrived = WireBatch(batch)
        if not len(arrived):
            return
        holds = bool(self._open or self._stored)
        present = ConnectionIndex(
            arrived,
            self._known if holds else None,
            partial(self._begin, arrived),
            closed=self._grouped,
        )
        by_rows = np.zeros(arrived.owners, np.bool_)
        for kit, owners in _by_kit(present):
            if kit is None:
                by_rows[owners] = True
                continue
            in_turn = _are_in_turn(present, owners, kit)
            by_rows[owners[~in_turn]] = True
            scan = Scan(kit, present, owners[in_turn])
            by_rows[scan.out_of_turn] = True
            for made in scan.rows(self._payloads):
                yield made
                yield from self._filled()
            scan.settle()
        if by_rows.any():
            yield from self._read_by_rows(present, np.flatnonzero(by_rows).tolist())
        gone = present.over & ~by_rows
        gone[list(present.objects)] = False
        yield from present.summaries(gone)
        yield from self._part(present)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """No more rows will come."""
        stored = (self._load(key, state) for key, state in self._stored.take_all())
        for connection in chain(stored, self._open.values()):
            connection.finish()
            yield from self._filled()
        self._open = {}
        if self._collected.rows:
            yield self._collected.take()

    # Whom the rows belong to.

    def _known(self, key: _Key) -> ConnectionRows | None:
        """Taken out of where it is held."""
        connection = self._open.pop(key, None)
        if connection is None:
            state = self._stored.take(key)
            if state is not None:
                return self._load(key, state)
        return connection

    def _load(self, key: _Key, state: bytes) -> ConnectionRows:
        return ConnectionRows.load(key, state, self._collected, payloads=self._payloads)

    def _begin(self, arrived: WireBatch, owner: int) -> ConnectionRows:
        connection, node = arrived.keys[owner]
        first = (node, connection, *_UNKNOWN, *arrived.introductions[owner])
        return ConnectionRows(first, self._collected, payloads=self._payloads)

    def _part(self, present: ConnectionIndex) -> Iterator[pa.RecordBatch]:
        """Be done with those that are over, and hold the others."""
        if self._grouped:
            for connection in self._open.values():
                connection.finish()
            self._open = {}
        last = int(present.arrived.owner[-1])
        for owner, connection in present.objects.items():
            over = owner != last if self._grouped else connection.is_closed
            if over:
                connection.finish()
                yield from self._filled()
            else:
                self._open[connection.key] = connection
        while len(self._open) > self._most_open:
            key = next(iter(self._open))
            self._stored.put(key, self._open.pop(key).dump())
        yield from self._filled()

    # Rows.

    def _read_by_rows(
        self, present: ConnectionIndex, owners: list[int]
    ) -> Iterator[pa.RecordBatch]:
        arrived = present.arrived
        connections = {arrived.keys[owner]: present.object(owner) for owner in owners}
        for row in arrived.rows_of(owners, WANTED):
            connections[row[1], row[0]].add(row)
            yield from self._filled()

    def _filled(self) -> Iterator[pa.RecordBatch]:
        if self._collected.full:
            yield self._collected.take()


def _by_kit(present: ConnectionIndex) -> Iterator[tuple[Kit | None, Numbers]]:
    """Who speaks which protocol; no kit for what can only be read row by row."""
    arrived = present.arrived
    protocols, names = arrived.protocols
    kits = [kit_of(name) for name in names]
    scanned = among(protocols, [kit is not None for kit in kits], False) & ~arrived.irregular
    first_seqs = arrived.seq[arrived.first_rows]
    for owner, connection in present.objects.items():
        if connection.protocol != names[protocols[owner]] or first_seqs[owner] <= connection.seq:
            scanned[owner] = False
    yield None, np.flatnonzero(~scanned)
    for code in np.unique(protocols[scanned]).tolist():
        yield kits[code], np.flatnonzero(scanned & (protocols == code))


def _are_in_turn(present: ConnectionIndex, owners: Numbers, kit: Kit) -> Flags:
    """Do their bytes go on where they stopped, and do they mean the same whichever side is read
    first? Of a new connection that must be told when it has been read."""
    arrived, pieces = present.arrived, present.arrived.pieces
    due = present.lane_base * present.lane_known + present.lane_seen
    offset = pieces.lane_offset
    off = (offset != NOWHERE) & (offset != due)
    off |= ~present.lane_known & (arrived.lane_late | (arrived.lane_first_time < 0))
    opener, other = (lanes[owners] for lanes in arrived.lanes_of)
    off = np.append(off, False)
    in_turn: Flags = ~(off[opener] | off[other])
    # The acceptor's bytes can be read once it is known that there is somebody to answer.
    begins = np.append(arrived.lane_first, NOWHERE)[opener]
    answers = np.append(pieces.lane_row, NOWHERE)[other]
    asked = (opener != NOWHERE) & ((answers == NOWHERE) | (begins < answers))
    for index in np.flatnonzero(~present.is_new[owners]).tolist():
        directions = present.objects[int(owners[index])].directions
        asked[index] |= True in directions
        in_turn[index] &= not kit.agrees or kit.has_opened(directions.get(True))
    in_turn &= asked
    return in_turn
