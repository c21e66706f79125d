"""Many connections at once: bronze.wire, batch by batch, through the columnar scanners.

Whatever the scanners are sure of becomes rows without an object for any frame; what they are not
goes to the decoders, frame by frame. A connection that is in any way irregular in a batch (bytes
are missing, it was joined late, its two sides spoke before they had agreed how) is read in it row
by row, as `ConnectionRows` does. What is known of a connection is the same either way, and so are
its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from crosswire.pipeline.arrived import NOWHERE, Arrived
from crosswire.pipeline.batches import Batches
from crosswire.pipeline.connection import MOST_OPEN, WANTED, ConnectionRows
from crosswire.pipeline.scanning import Kit, Scan, Talk, kit_of
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
        self._stored: dict[_Key, bytes] = {}

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        arrived = Arrived(batch)
        if not len(arrived):
            return
        talks = self._talks(arrived)
        by_rows: list[int] = []
        by_kit: dict[Kit, list[int]] = {}
        for owner, talk in enumerate(talks):
            if talk.kit is None:
                by_rows.append(owner)
            else:
                by_kit.setdefault(talk.kit, []).append(owner)
        for kit, owners in by_kit.items():
            scan = Scan(kit, arrived, talks, owners)
            for owner in scan.out_of_turn:
                talks[owner] = Talk(self._begin(arrived, owner), None, True)
            by_rows += scan.out_of_turn
            for made in scan.rows(self._payloads):
                yield made
                yield from self._filled()
        if by_rows:
            yield from self._read_by_rows(arrived, by_rows, talks)
        yield from self._part(arrived, talks)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """No more rows will come."""
        for key in (*self._stored, *self._open):
            connection = self._known(key)
            assert connection is not None
            connection.finish()
            yield from self._filled()
        if self._collected.rows:
            yield self._collected.take()

    # Whom the rows belong to.

    def _talks(self, arrived: Arrived) -> list[Talk]:
        talks = []
        first_seqs = arrived.seq[arrived.first_rows].tolist()
        irregular = arrived.irregular.tolist()
        for owner, key in enumerate(arrived.keys):
            connection = self._known(key)
            is_new = connection is None
            if connection is None:
                connection = self._begin(arrived, owner)
            kit = kit_of(connection.protocol)
            if kit is not None and (
                irregular[owner]
                or first_seqs[owner] <= connection.seq
                or not _is_in_turn(arrived, owner, connection, kit, is_new=is_new)
            ):
                kit = None
            talks.append(Talk(connection, kit, is_new))
        return talks

    def _known(self, key: _Key) -> ConnectionRows | None:
        """Taken out of where it is held."""
        connection = self._open.pop(key, None)
        if connection is None:
            state = self._stored.pop(key, None)
            if state is not None:
                return ConnectionRows.load(key, state, self._collected, payloads=self._payloads)
        return connection

    def _begin(self, arrived: Arrived, owner: int) -> ConnectionRows:
        connection, node = arrived.keys[owner]
        first = (node, connection, *_UNKNOWN, *arrived.introductions[owner])
        return ConnectionRows(first, self._collected, payloads=self._payloads)

    def _part(self, arrived: Arrived, talks: list[Talk]) -> Iterator[pa.RecordBatch]:
        """Be done with those that are over, and hold the others."""
        if self._grouped:
            for connection in self._open.values():
                connection.finish()
            self._open = {}
        last = int(arrived.owner[-1])
        for owner, (connection, _, _) in enumerate(talks):
            over = owner != last if self._grouped else connection.is_closed
            if over:
                connection.finish()
                yield from self._filled()
            else:
                self._open[connection.key] = connection
        while len(self._open) > self._most_open:
            key = next(iter(self._open))
            self._stored[key] = self._open.pop(key).dump()
        yield from self._filled()

    # Rows.

    def _read_by_rows(
        self, arrived: Arrived, owners: list[int], talks: list[Talk]
    ) -> Iterator[pa.RecordBatch]:
        connections = {arrived.keys[owner]: talks[owner].connection for owner in owners}
        for row in arrived.rows_of(owners, WANTED):
            connections[row[1], row[0]].add(row)
            yield from self._filled()

    def _filled(self) -> Iterator[pa.RecordBatch]:
        if self._collected.full:
            yield self._collected.take()


def _is_in_turn(
    arrived: Arrived, owner: int, connection: ConnectionRows, kit: Kit, *, is_new: bool
) -> bool:
    """Do its bytes go on where they stopped, and do they mean the same whichever side is read
    first? Of a new connection that must be told when it has been read."""
    ways = connection.directions
    for forward, lanes in zip((True, False), arrived.lanes_of, strict=True):
        lane = lanes[owner]
        if lane == NOWHERE:
            continue
        way = ways.get(forward)
        due = 0 if way is None else way.due
        offset = arrived.data_offset[lane]
        if offset not in (NOWHERE, due) or (way is None and arrived.late[lane]):
            return False
    opener = arrived.lanes_of[0][owner]
    if True not in ways:
        # The acceptor's bytes can be read once it is known that there is somebody to answer.
        other = arrived.lanes_of[1][owner]
        if opener == NOWHERE:
            return False
        if other != NOWHERE and arrived.data_row[other] != NOWHERE:
            return arrived.first_row[opener] < arrived.data_row[other]
    return is_new or not kit.agrees or kit.has_opened(ways.get(True))
