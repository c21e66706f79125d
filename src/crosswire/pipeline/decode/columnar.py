"""Many connections at once: bronze.wire, batch by batch, through the columnar scanners.

What the scanners are sure of becomes rows without an object for any frame; the rest goes to the
decoders, frame by frame. A connection that is irregular in a batch (bytes are missing, the capture
joined it late, an answer came before the handshake that it depends on) is read row by row in that
batch, by `ConnectionRows`. The state of a connection is the same either way, and so are its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.batch_scan import BatchScan, ColumnarProtocol, columnar_protocol
from crosswire.pipeline.decode.connection_index import ConnectionIndex
from crosswire.pipeline.decode.connection_rows import MOST_OPEN, WIRE_COLUMNS, ConnectionRows
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.decode.state_spill import States
from crosswire.pipeline.decode.text import by_code
from crosswire.pipeline.decode.wire_batch import WireBatch

__all__ = ["ColumnarDecoder"]

_UNKNOWN: Final = (None,) * 8

_Key = tuple[str, str]


class ColumnarDecoder:
    """Takes batches of bronze.wire, each connection's rows in order; gives rows of
    `decode.row_schema` in no particular order: exactly those that `ConnectionRows` gives.

    A connection is over when both its directions have ended; where connections are `grouped`, one
    after the other, when the next one begins. Of those that are not over, the `most_open` latest
    are kept as objects, and of the others a state of a few bytes from which they can be loaded.
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

    def add(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Decode a batch; what it gives must be consumed before the next one is added."""
        batch = WireBatch(rows)
        if not len(batch):
            return
        has_open = bool(self._open or self._stored)
        connections = ConnectionIndex(
            batch,
            self._known if has_open else None,
            partial(self._begin, batch),
            closed=self._grouped,
        )
        by_rows = np.zeros(batch.owners, np.bool_)
        for columnar, owners in _by_protocol(connections):
            if columnar is None:
                by_rows[owners] = True
                continue
            readable = _can_read_in_columns(connections, owners, columnar)
            by_rows[owners[~readable]] = True
            scan = BatchScan(columnar, connections, owners[readable])
            by_rows[scan.out_of_turn] = True
            for made in scan.rows(self._payloads):
                yield made
                yield from self._filled()
            scan.settle()
        if by_rows.any():
            yield from self._read_by_rows(connections, np.flatnonzero(by_rows).tolist())
        gone = connections.over & ~by_rows
        gone[list(connections.objects)] = False
        yield from connections.summaries(gone)
        yield from self._keep_open(connections)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Rows of all connections that are still open: there are no more batches."""
        stored = (self._load(key, state) for key, state in self._stored.take_all())
        for connection in chain(stored, self._open.values()):
            connection.finish()
            yield from self._filled()
        self._open = {}
        if self._collected.rows:
            yield self._collected.take()

    # Connections.

    def _known(self, key: _Key) -> ConnectionRows | None:
        """Take a connection that earlier batches had out of what is kept, None if there is none."""
        connection = self._open.pop(key, None)
        if connection is None:
            state = self._stored.take(key)
            if state is not None:
                return self._load(key, state)
        return connection

    def _load(self, key: _Key, state: bytes) -> ConnectionRows:
        return ConnectionRows.load(key, state, self._collected, payloads=self._payloads)

    def _begin(self, batch: WireBatch, owner: int) -> ConnectionRows:
        connection, node = batch.keys[owner]
        first = (node, connection, *_UNKNOWN, *batch.introductions[owner])
        return ConnectionRows(first, self._collected, payloads=self._payloads)

    def _keep_open(self, connections: ConnectionIndex) -> Iterator[pa.RecordBatch]:
        """Finish the connections that are over, and keep the others."""
        if self._grouped:
            for connection in self._open.values():
                connection.finish()
            self._open = {}
        last = int(connections.batch.owner[-1])
        for owner, connection in connections.objects.items():
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
        self, connections: ConnectionIndex, owners: list[int]
    ) -> Iterator[pa.RecordBatch]:
        batch = connections.batch
        by_key = {batch.keys[owner]: connections.get_or_create(owner) for owner in owners}
        for row in batch.rows_of(owners, WIRE_COLUMNS):
            by_key[row[1], row[0]].add(row)
            yield from self._filled()

    def _filled(self) -> Iterator[pa.RecordBatch]:
        if self._collected.full:
            yield self._collected.take()


def _by_protocol(connections: ConnectionIndex) -> Iterator[tuple[ColumnarProtocol | None, Numbers]]:
    """Owners by protocol; None for those that can only be read row by row."""
    batch = connections.batch
    protocols, names = batch.protocols
    protocols_read = [columnar_protocol(name) for name in names]
    scanned = by_code(protocols, [each is not None for each in protocols_read], False)
    scanned &= ~batch.irregular
    first_seqs = batch.seq[batch.first_rows]
    for owner, connection in connections.objects.items():
        if connection.protocol != names[protocols[owner]] or first_seqs[owner] <= connection.seq:
            scanned[owner] = False
    yield None, np.flatnonzero(~scanned)
    for code in np.unique(protocols[scanned]).tolist():
        yield protocols_read[code], np.flatnonzero(scanned & (protocols == code))


def _can_read_in_columns(
    connections: ConnectionIndex, owners: Numbers, columnar: ColumnarProtocol
) -> Flags:
    """Whether each connection can be read one direction after the other.

    Its bytes must continue where they stopped, and must mean the same whichever direction is read
    first. Of a new connection the second is known only after it has been read, see
    `BatchScan.out_of_turn`.
    """
    batch, pieces = connections.batch, connections.batch.pieces
    due = connections.lane_base * connections.lane_known + connections.lane_seen
    offset = pieces.lane_offset
    off = (offset != NONE) & (offset != due)
    off |= ~connections.lane_known & (batch.lane_late | (batch.lane_first_time < 0))
    opener, other = (lanes[owners] for lanes in batch.lanes_of)
    off = np.append(off, False)
    # The last element, False, is that of lane NONE: of a direction without rows.
    readable: Flags = ~(off[opener] | off[other])
    # Read row by row, a connection whose acceptor's bytes come first gets an opener that began with
    # them. In columns it would begin with its own first row.
    begins = np.append(batch.lane_first, NONE)[opener]
    answers = np.append(pieces.lane_row, NONE)[other]
    opener_first = (opener != NONE) & ((answers == NONE) | (begins < answers))
    for index in np.flatnonzero(~connections.is_new[owners]).tolist():
        directions = connections.objects[int(owners[index])].directions
        opener_first[index] |= True in directions
        if columnar.reads_peer_handshake:
            readable[index] &= columnar.has_handshake_of(directions.get(True))
    readable &= opener_first
    return readable
