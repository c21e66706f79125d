"""Many connections at once: bronze.wire, batch by batch, through the columnar scanners.

What the scanners are sure of becomes rows without an object for any frame. The rest goes to the
decoders, whose frames are put into the same columns; both are described together. A connection that
is irregular in a batch (bytes are missing, the capture joined it late, an answer came before the
handshake that it depends on) is read by its decoders alone in that batch. The state of a connection
is the same either way, and so are its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.batch_scan import BatchScan
from crosswire.pipeline.decode.connection_index import ConnectionIndex
from crosswire.pipeline.decode.decoded_connection import (
    MOST_OPEN,
    WIRE_COLUMNS,
    DecodedConnection,
    DecodedItems,
)
from crosswire.pipeline.decode.frame_table import FrameTable
from crosswire.pipeline.decode.protocols import ColumnarProtocol, columnar_protocol
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.decode.state_spill import States
from crosswire.pipeline.decode.wire_batch import WireBatch

__all__ = ["ColumnarDecoder", "ConnectionKey"]

_UNKNOWN: Final = (None,) * 8

ConnectionKey = tuple[str, str]
"""Connection and node."""


class ColumnarDecoder:
    """Takes batches of bronze.wire, each connection's rows in order; gives rows of
    `decode.row_schema` in no particular order.

    A connection is over when both its directions have ended, but for those of the node `lingering`,
    which `close` ends; where connections are `grouped`, one after the other, it is over when the
    next one begins. Of those that are not over, the `most_open` latest are kept as objects, and of
    the others a state of a few bytes from which they can be loaded.
    """

    def __init__(
        self,
        *,
        payloads: bool,
        grouped: bool = False,
        most_open: int = MOST_OPEN,
        lingering: str | None = None,
    ) -> None:
        self._payloads = payloads
        self._grouped = grouped
        self._most_open = most_open
        self._lingering = lingering
        self._collected = Batches(ARROW)
        self._open: dict[ConnectionKey, DecodedConnection] = {}
        self._stored = States()

    def add(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Decode a batch; what it gives must be consumed before the next one is added."""
        batch = WireBatch(rows)
        if not len(batch):
            return
        has_open = bool(self._open or self._stored)
        connections = ConnectionIndex(
            batch,
            self.take if has_open else None,
            partial(self._begin, batch),
            closed=self._grouped,
            lingering=self._lingering,
        )
        for columnar, owners, regular in _by_protocol(connections):
            if columnar is None:
                self._set_aside(connections, owners)
                continue
            regular[regular] = _can_read_in_columns(connections, owners[regular], columnar)
            scan = BatchScan(columnar, connections, owners[regular], owners[~regular])
            for made in scan.rows(self._payloads):
                yield made
                yield from self._filled()
            scan.settle()
            yield from self._filled()
        gone = connections.over.copy()
        gone[list(connections.objects)] = False
        yield from connections.summaries(gone)
        yield from self._keep_open(connections)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Rows of all connections that are still open: there are no more batches."""
        stored = (self._load(key, state) for key, state in self._stored.take_all())
        opened, self._open = self._open, {}
        yield from self.close(chain(stored, opened.values()))

    # Connections.

    def resume(self, key: ConnectionKey, state: bytes) -> None:
        """Go on with a connection in the state that `DecodedConnection.dump` gave."""
        self._stored.put(key, state)

    def take(self, key: ConnectionKey) -> DecodedConnection | None:
        """Take a connection that is not over out of what is kept; None if there is none."""
        connection = self._open.pop(key, None)
        if connection is None:
            state = self._stored.take(key)
            if state is not None:
                return self._load(key, state)
        return connection

    def keep(self, connection: DecodedConnection) -> None:
        """Put a connection back that `take` gave."""
        self._open[connection.key] = connection

    def close(self, connections: Iterable[DecodedConnection]) -> Iterator[pa.RecordBatch]:
        """The last rows of connections that are not kept any more, and all rows before them."""
        rest: dict[ColumnarProtocol, list[tuple[DecodedConnection, list[DecodedItems]]]] = {}
        for connection in connections:
            items = connection.read_rest()
            if any(each.placed for each in items):
                columnar = columnar_protocol(connection.protocol)
                assert columnar is not None
                rest.setdefault(columnar, []).append((connection, items))
            connection.summarize()
            yield from self._filled()
        for columnar, found in rest.items():
            yield from _rest(columnar, found, self._payloads)
        if self._collected.rows:
            yield self._collected.take()

    def _load(self, key: ConnectionKey, state: bytes) -> DecodedConnection:
        return DecodedConnection.load(key, state, self._collected)

    def _begin(self, batch: WireBatch, owner: int) -> DecodedConnection:
        connection, node = batch.keys[owner]
        first = (node, connection, *_UNKNOWN, *batch.introductions[owner])
        return DecodedConnection(first, self._collected)

    def _keep_open(self, connections: ConnectionIndex) -> Iterator[pa.RecordBatch]:
        """Close the connections that are over, and keep the others."""
        over: list[DecodedConnection] = []
        if self._grouped:
            over, self._open = list(self._open.values()), {}
        last = int(connections.batch.owner[-1])
        for owner, connection in connections.objects.items():
            is_over = connection.is_closed and connection.key[1] != self._lingering
            if owner != last if self._grouped else is_over:
                over.append(connection)
            else:
                self.keep(connection)
        if over:
            yield from self.close(over)
        while len(self._open) > self._most_open:
            key = next(iter(self._open))
            self._stored.put(key, self._open.pop(key).dump())

    # Rows.

    def _set_aside(self, connections: ConnectionIndex, owners: Numbers) -> None:
        """Read connections that have no frames: what is encrypted, or of an unknown protocol."""
        batch = connections.batch
        for row, owner, values in batch.rows_of(owners, WIRE_COLUMNS):
            connection = connections.get_or_create(owner)
            for items in connection.read(values):
                for placed in items.placed:
                    connection.set_aside(items.forward, placed, int(batch.time[row]))

    def _filled(self) -> Iterator[pa.RecordBatch]:
        if self._collected.full:
            yield self._collected.take()


class _ClosedConnections:
    """Connections of which there are no more bytes, as `frame_table.Owners`."""

    def __init__(self, connections: list[DecodedConnection]) -> None:
        self.objects = dict(enumerate(connections))
        self.connections = pa.array([each.key[0] for each in connections])
        self.nodes = pa.array([each.key[1] for each in connections])
        self.stays = np.zeros(len(connections), np.bool_)

    def with_directions(self, owner: int) -> DecodedConnection:
        """The connection."""
        return self.objects[owner]


def _rest(
    columnar: ColumnarProtocol,
    found: list[tuple[DecodedConnection, list[DecodedItems]]],
    payloads: bool,
) -> Iterator[pa.RecordBatch]:
    """Rows of frames that only the end of their connections showed."""
    owners = _ClosedConnections([connection for connection, _ in found])
    table = FrameTable(columnar, owners, np.empty(0, np.uint8))
    for owner, (connection, every) in enumerate(found):
        for serial, items in enumerate(every):
            time = connection.directions[items.forward].last_time
            table.add_items(owner, items, time=time, key=owner, serial=serial)
    yield from table.batches(payloads=payloads)


def _by_protocol(
    connections: ConnectionIndex,
) -> Iterator[tuple[ColumnarProtocol | None, Numbers, Flags]]:
    """Owners by protocol, None for those without a scanner; and whether each is regular."""
    batch = connections.batch
    protocols, names = batch.protocols
    regular = ~batch.irregular
    first_seqs = batch.seq[batch.first_rows]
    numbers = {name: code for code, name in enumerate(names)}
    for owner, connection in connections.objects.items():
        if connection.protocol != names[protocols[owner]]:
            # It was recognized as another when it began, and stays that.
            protocols[owner] = numbers.setdefault(connection.protocol, len(numbers))
            regular[owner] = False
        if first_seqs[owner] <= connection.seq:
            regular[owner] = False
    for name, code in numbers.items():
        owners = np.flatnonzero(protocols == code)
        if len(owners):
            yield columnar_protocol(name), owners, regular[owners]


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
