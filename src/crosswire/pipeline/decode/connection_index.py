"""The connections that have rows in a batch, most of which come and go in it.

What is known of those is in arrays, from their first byte to the row that sums them up. Others are
objects: who was there before, who will say more, and who said something that a decoder has to look
at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.arrays import Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import BATCH_ROWS
from crosswire.pipeline.decode.connection_rows import ConnectionRows, Direction
from crosswire.pipeline.decode.text import Coded, Decimal, Fixed, TextPart, json_parts, text, words
from crosswire.pipeline.decode.wire_batch import INTRODUCTION, NOWHERE, WireBatch
from crosswire.pipeline.tables.decoded import ARROW, DIRECTIONS

__all__ = ["DIRECTION_NAMES", "ConnectionIndex"]

DIRECTION_NAMES = pa.array([FORWARD, BACKWARD])


class ConnectionIndex:
    """`known` gives a connection of which something was seen before, or nothing; `begin` makes one,
    by its owner. With `closed`, the connections have no rows in batches to come, but for the last.
    """

    def __init__(
        self,
        arrived: WireBatch,
        known: Callable[[tuple[str, str]], ConnectionRows | None] | None,
        begin: Callable[[int], ConnectionRows],
        *,
        closed: bool,
    ) -> None:
        self.arrived = arrived
        self._begin = begin
        self.objects: dict[int, ConnectionRows] = {}
        if known is not None:
            for owner, key in enumerate(arrived.keys):
                connection = known(key)
                if connection is not None:
                    self.objects[owner] = connection
        self.is_new = np.ones(arrived.owners, np.bool_)
        self.is_new[list(self.objects)] = False
        if closed:
            self.over = np.arange(arrived.owners) != arrived.owner[-1]
        else:
            ended = np.append(arrived.lane_end[0] != NOWHERE, False)
            self.over = ended[arrived.lanes_of[0]] & ended[arrived.lanes_of[1]] & self.is_new
        # Where each lane goes on.
        self.lane_base = arrived.lane_base.copy()
        self.lane_seen = np.zeros(len(self.lane_base), np.int64)
        self.lane_known = np.zeros(len(self.lane_base), np.bool_)
        for owner, connection in self.objects.items():
            for forward, direction in connection.directions.items():
                lane = arrived.lanes_of[0 if forward else 1][owner]
                if lane != NOWHERE:
                    self.lane_base[lane], self.lane_seen[lane] = direction.base, direction.seen
                    self.lane_known[lane] = True

    def object(self, owner: int) -> ConnectionRows:
        """It becomes one now, if it wasn't."""
        connection = self.objects.get(owner)
        if connection is None:
            connection = self.objects[owner] = self._begin(owner)
        return connection

    def direction(self, lane: int) -> Direction:
        """Of an object, which it becomes if it wasn't."""
        owner = int(self.arrived.lane_owner[lane])
        return self.entered(owner).directions[not self.arrived.lane_backward[lane]]

    def entered(self, owner: int) -> ConnectionRows:
        """The object, with the directions that have rows in this batch."""
        connection = self.object(owner)
        for forward, lanes in zip((True, False), self.arrived.lanes_of, strict=True):
            lane = lanes[owner]
            if lane != NOWHERE and forward not in connection.directions:
                connection.directions[forward] = Direction(
                    FORWARD if forward else BACKWARD,
                    int(self.arrived.lane_first_time[lane]),
                    int(self.arrived.lane_base[lane]),
                    False,
                )
        return connection

    def forget(self, owner: int) -> None:
        """As if nothing had been seen of it."""
        self.objects.pop(owner, None)

    # What there is to say of those who are over.

    def summaries(self, owners: Flags) -> Iterator[pa.RecordBatch]:
        """A row for each direction of connections that are over and were no objects."""
        chosen = np.flatnonzero(owners[self.arrived.lane_owner])
        for start in range(0, len(chosen), BATCH_ROWS):
            yield self._summary(chosen[start : start + BATCH_ROWS])

    def _summary(self, lanes: Numbers) -> pa.RecordBatch:
        arrived, count = self.arrived, len(lanes)
        owner, pieces = arrived.lane_owner[lanes], arrived.pieces
        every = np.ones(count, np.bool_)
        ends, end_names = arrived.lane_end
        parts: list[TextPart] = []
        for name in INTRODUCTION[1:]:
            opening = "," if parts else "{"
            parts.append(Fixed(f'{opening}"{name}":', every))
            parts += json_parts(arrived.first(name).take(pa.array(owner)))
        opened = [f',"opened":{flag},"late":false,"first_time":' for flag in ("false", "true")]
        columns = {
            "table": pa.repeat(DIRECTIONS, count),
            "node": arrived.nodes.take(pa.array(owner)),
            "connection": arrived.connections.take(pa.array(owner)),
            "direction": DIRECTION_NAMES.take(
                pa.array(arrived.lane_backward[lanes].astype(np.int8))
            ),
            "layer": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(arrived.lane_base[lanes]),
            "length": pa.array(pieces.lane_stop[lanes] - pieces.lane_start[lanes]),
            "time": pa.array(arrived.lane_last_time[lanes]),
            "protocol": arrived.first("protocol").take(pa.array(owner)),
            "status": words(ends[lanes], end_names),
            "fields": text(
                count,
                *parts,
                Coded(arrived.opened[owner].astype(np.int64), opened),
                Decimal(arrived.lane_first_time[lanes], every),
                Fixed(',"gaps":0,"tail":0,"unread":0}', every),
            ),
        }
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)
