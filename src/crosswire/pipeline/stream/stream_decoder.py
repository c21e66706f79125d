"""Connections of one task in one batch of a stream: their saved states, new and provisional rows.

The rows come connection by connection, so that all of them but the last one of an Arrow batch are
complete. Those are left together: their states are saved, then what is provisional is decoded, and
what their ends look like is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.capture.reassembly import LINGER_NS
from crosswire.envelope import MICROSECONDS
from crosswire.pipeline.decode.arrays import Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.columnar import ColumnarDecoder, ConnectionKey
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS, DecodedConnection
from crosswire.pipeline.decode.row_schema import ARROW
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.stream.columns import DECODED, STATES
from crosswire.pipeline.stream.watermarks import CompleteUpTo
from crosswire.pipeline.tables.finality import KEPT

__all__ = ["StreamDecoder"]

_LINGER_US: Final = LINGER_NS // 1000 + MICROSECONDS
"""A second longer than the reassembly waits: the state of a connection must not be dropped while
its flow may still give bytes."""


class StreamDecoder:
    """Takes batches of bronze.wire with `kept` and `state`, connection by connection; gives rows of
    `columns.DECODED`.

    Rows are final while a connection may continue; then its state is saved, and what follows is
    provisional. What is written of a connection that is over is final to the end.
    """

    def __init__(self, *, payloads: bool, now: CompleteUpTo) -> None:
        self._now = now
        self._decoder = ColumnarDecoder(payloads=payloads, lingering=NODE)
        self._states = Batches(ARROW)
        self._current: dict[ConnectionKey, bytes | None] = {}
        """Connections that are not complete yet: the state with which they came, None if it has
        changed."""
        self._provisional: list[pa.RecordBatch] = []

    def add(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Decode rows, and leave all connections but the last one."""
        if not len(rows):
            return
        states = rows.column("state")
        is_state = _flags(pc.is_valid(states))
        is_new = _flags(pc.fill_null(rows.column(KEPT), False)) & ~is_state
        starts = _starts(rows)
        # Of a connection with rows in several Arrow batches, its state is in the first.
        for start, has_new in zip(
            starts.tolist(), np.logical_or.reduceat(is_new, starts).tolist(), strict=True
        ):
            key = (rows["connection"][start].as_py(), rows["node"][start].as_py())
            if is_state[start]:
                state = states[start].as_py()
                self._decoder.resume(key, state)
                self._current[key] = None if has_new else state
            elif has_new or key not in self._current:
                self._current[key] = None
        wire = rows.select(WIRE_COLUMNS)
        yield from _flagged(self._decoder.add(wire.filter(pa.array(is_new))), kept=True)
        is_provisional = ~(is_new | is_state)
        if is_provisional.any():
            self._provisional.append(wire.filter(pa.array(is_provisional)))
        yield from self._leave(key)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Leave the last connection: there are no more rows."""
        yield from self._leave(None)

    def _leave(self, last: ConnectionKey | None) -> Iterator[pa.RecordBatch]:
        """Save the states of connections that are not over, then write what their ends look like;
        `last` goes on."""
        provisional = pa.Table.from_batches(self._provisional) if self._provisional else None
        self._provisional = []
        unsettled: set[ConnectionKey] = set()
        if provisional is not None and last is not None:
            is_last = pc.and_(
                pc.equal(provisional["connection"], last[0]), pc.equal(provisional["node"], last[1])
            )
            self._provisional = provisional.filter(is_last).to_batches()
            provisional = provisional.filter(pc.invert(is_last))
        if provisional is not None:
            unsettled |= set(
                zip(
                    provisional["connection"].to_pylist(),
                    provisional["node"].to_pylist(),
                    strict=True,
                )
            )
        over: list[DecodedConnection] = []
        ending: list[DecodedConnection] = []
        for key in [key for key in self._current if key != last]:
            state = self._current.pop(key)
            connection = self._decoder.take(key)
            if connection is None:
                continue  # it was over within the batch, or has provisional rows only
            if key not in unsettled and self._is_over(connection):
                over.append(connection)
                continue
            self._save(connection, state)
            if key in unsettled:
                self._decoder.keep(connection)
            else:
                ending.append(connection)
        yield from _flagged(self._decoder.close(over), kept=True)
        if self._states.rows:
            yield from _flagged([self._states.take()], kept=True)
        for batch in provisional.to_batches() if provisional is not None else ():
            yield from _flagged(self._decoder.add(batch), kept=False)
        taken = (self._decoder.take(key) for key in unsettled)
        ending += [connection for connection in taken if connection is not None]
        yield from _flagged(self._decoder.close(ending), kept=False)

    def _is_over(self, connection: DecodedConnection) -> bool:
        """Nothing of this connection can follow.

        A hub's tap records nothing after both ends of a connection. In a capture, late copies of
        segments may follow, so there the connection is over only when the watermark has passed it.
        """
        captured = connection.key[1] == NODE
        if connection.is_closed and not captured:
            return True
        now_us = self._now.captures_us if captured else self._now.taps_us
        return connection.is_over and connection.last_time < now_us - _LINGER_US

    def _save(self, connection: DecodedConnection, unchanged: bytes | None) -> None:
        """Add a row with the state. Most open connections have no new bytes in a batch: their state
        is passed on as it came, which saves encoding it again."""
        name, node = connection.key
        state = unchanged or connection.dump()
        nothing = (None,) * (len(ARROW) - 9)
        location = (0, 0, 0, connection.last_time)
        self._states.add((STATES, node, name, "", *location, *nothing, state), len(state))


def _flags(column: pa.Array) -> Flags:
    found: Flags = column.to_numpy(zero_copy_only=False)
    return found


def _starts(rows: pa.RecordBatch) -> Numbers:
    """Where the rows of each connection begin."""
    connections, nodes = (
        pc.dictionary_encode(rows.column(name)).indices.to_numpy(zero_copy_only=False)
        for name in ("connection", "node")
    )
    differ = (connections[1:] != connections[:-1]) | (nodes[1:] != nodes[:-1])
    return np.flatnonzero(np.append(True, differ))


def _flagged(batches: Iterable[pa.RecordBatch], *, kept: bool) -> Iterator[pa.RecordBatch]:
    """The batches with the column `kept`."""
    for batch in batches:
        flags = pa.repeat(kept, len(batch))
        yield pa.RecordBatch.from_arrays([*batch.columns, flags], schema=DECODED)
