"""The connections that have rows in a batch, most of which begin and end in it.

The state of those is in arrays only, from their first byte to the row that sums them up. The others
have an object: connections from earlier batches, those that continue in later ones, and those that
a decoder has to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import BATCH_ROWS
from crosswire.pipeline.decode.decoded_connection import DecodedConnection, Direction
from crosswire.pipeline.decode.frame_table import DIRECTION_NAMES
from crosswire.pipeline.decode.row_schema import ARROW, DIRECTIONS
from crosswire.pipeline.decode.text import Coded, Decimal, Fixed, TextPart, json_parts, text, words
from crosswire.pipeline.decode.wire_batch import INTRODUCTION, WireBatch

__all__ = ["ConnectionIndex"]


class ConnectionIndex:
    """Connections by owner; `objects` are those that have one.

    `known` gives the connection of a key that earlier batches had, None for a new one; `begin`
    creates the object of an owner. With `closed`, only the last connection has rows in later
    batches; without, any that has not ended, or is of the node `lingering`.
    """

    def __init__(
        self,
        batch: WireBatch,
        known: Callable[[tuple[str, str]], DecodedConnection | None] | None,
        begin: Callable[[int], DecodedConnection],
        *,
        closed: bool,
        lingering: str | None,
    ) -> None:
        self.batch = batch
        self._begin = begin
        self.objects: dict[int, DecodedConnection] = {}
        if known is not None:
            for owner, key in enumerate(batch.keys):
                connection = known(key)
                if connection is not None:
                    self.objects[owner] = connection
        self.is_new = np.ones(batch.owners, np.bool_)
        self.is_new[list(self.objects)] = False
        if closed:
            self.over = np.arange(batch.owners) != batch.owner[-1]
        else:
            ended = np.append(batch.lane_end[0] != NONE, False)
            self.over = ended[batch.lanes_of[0]] & ended[batch.lanes_of[1]] & self.is_new
            if lingering is not None:
                self.over &= pc.not_equal(batch.nodes, lingering).to_numpy(zero_copy_only=False)
        # Where the bytes of each lane continue: its base, and how many bytes were seen since.
        self.lane_base = batch.lane_base.copy()
        self.lane_seen = np.zeros(len(self.lane_base), np.int64)
        self.lane_known = np.zeros(len(self.lane_base), np.bool_)
        for owner, connection in self.objects.items():
            for forward, direction in connection.directions.items():
                lane = batch.lanes_of[0 if forward else 1][owner]
                if lane != NONE:
                    self.lane_base[lane], self.lane_seen[lane] = direction.base, direction.seen
                    self.lane_known[lane] = True

    @property
    def nodes(self) -> pa.Array:
        """By owner: the node whose tap captured it."""
        return self.batch.nodes

    @property
    def connections(self) -> pa.Array:
        """By owner: its name."""
        return self.batch.connections

    @property
    def stays(self) -> Flags:
        """By owner: whether it is not over, or has an object."""
        stays: Flags = ~self.over
        stays[list(self.objects)] = True
        return stays

    def get_or_create(self, owner: int) -> DecodedConnection:
        """The object of a connection."""
        connection = self.objects.get(owner)
        if connection is None:
            connection = self.objects[owner] = self._begin(owner)
        return connection

    def direction(self, lane: int) -> Direction:
        """The direction that a lane is, of the connection's object."""
        owner = int(self.batch.lane_owner[lane])
        return self.with_directions(owner).directions[not self.batch.lane_backward[lane]]

    def with_directions(self, owner: int) -> DecodedConnection:
        """The object, with the directions that have rows in this batch."""
        connection = self.get_or_create(owner)
        for forward, lanes in zip((True, False), self.batch.lanes_of, strict=True):
            lane = lanes[owner]
            if lane != NONE and forward not in connection.directions:
                connection.directions[forward] = Direction(
                    FORWARD if forward else BACKWARD,
                    int(self.batch.lane_first_time[lane]),
                    int(self.batch.lane_base[lane]),
                    False,
                )
        return connection

    def forget(self, owner: int) -> None:
        """Drop the object of a new connection: it will be read again from its first row."""
        self.objects.pop(owner, None)

    # Summaries.

    def summaries(self, owners: Flags) -> Iterator[pa.RecordBatch]:
        """A row for each direction of connections that are over and have no object."""
        chosen = np.flatnonzero(owners[self.batch.lane_owner])
        for start in range(0, len(chosen), BATCH_ROWS):
            yield self._summary(chosen[start : start + BATCH_ROWS])

    def _summary(self, lanes: Numbers) -> pa.RecordBatch:
        batch, count = self.batch, len(lanes)
        owner, pieces = batch.lane_owner[lanes], batch.pieces
        every = np.ones(count, np.bool_)
        ends, end_names = batch.lane_end
        parts: list[TextPart] = []
        for name in INTRODUCTION[1:]:
            opening = "," if parts else "{"
            parts.append(Fixed(f'{opening}"{name}":', every))
            parts += json_parts(batch.first(name).take(pa.array(owner)))
        opened = [f',"opened":{flag},"late":false,"first_time":' for flag in ("false", "true")]
        columns = {
            "table": pa.repeat(DIRECTIONS, count),
            "node": batch.nodes.take(pa.array(owner)),
            "connection": batch.connections.take(pa.array(owner)),
            "direction": DIRECTION_NAMES.take(pa.array(batch.lane_backward[lanes].astype(np.int8))),
            "layer": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(batch.lane_base[lanes]),
            "length": pa.array(pieces.lane_stop[lanes] - pieces.lane_start[lanes]),
            "time": pa.array(batch.lane_last_time[lanes]),
            "protocol": batch.first("protocol").take(pa.array(owner)),
            "status": words(ends[lanes], end_names),
            "fields": text(
                count,
                *parts,
                Coded(batch.opened[owner].astype(np.int64), opened),
                Decimal(batch.lane_first_time[lanes], every),
                Fixed(',"gaps":0,"tail":0,"unread":0}', every),
            ),
        }
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(count, field.type)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)
