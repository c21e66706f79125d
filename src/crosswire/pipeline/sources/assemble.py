"""Segments of many flows, arranged, into batches of bronze.wire: the same rows as `FlowRows`.

The kernel follows flows as long as it can, `Flow` helps it over holes. Names, ends and protocols
are looked up once for each connection; nothing here is done in Python for each segment of an
undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosswire.lake.schemas import BACKWARD, FORWARD, WIRE
from crosswire.pipeline.batches import BATCH_BYTES, BATCH_ROWS
from crosswire.pipeline.sources.classify import PortMap, Spoken, decide
from crosswire.pipeline.sources.follow import (
    DATA,
    FULL,
    KINDS,
    LEAVE,
    NO_FLOW,
    ODD,
    ROWS_OF_A_SEGMENT,
    enter,
    flow_of,
    follow,
    followed_bytes,
    forget_followed,
    from_flow,
    new_state,
    rename,
    to_flow,
)
from crosswire.pipeline.sources.index import Ordered
from crosswire.pipeline.sources.packets import copy_slices
from crosswire.pipeline.sources.reassembly import REORDER_BYTES, Flow, Run, Segment
from crosswire.pipeline.sources.rows import NODE, End, end_of, name_of

__all__ = ["Assembler"]

_FIELDS: Final = 11
_EXTRA: Final = -1
"""The source of what no segment has as it is: cut, or kept from an earlier batch."""

_FLOW, _NUMBER, _OPENER, _FORWARD, _KIND, _OFFSET, _LENGTH, _TIME, _LATE, _SOURCE, _START = range(
    _FIELDS
)
_KIND_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
_KIND_NAMES: Final = pa.array(KINDS)
_DIRECTIONS: Final = pa.array([BACKWARD, FORWARD])
_NODES: Final = pa.array([NODE] * BATCH_ROWS)


class _Connection(NamedTuple):
    """What all rows of a connection have in common; `number` is its place in the flow."""

    flow: bytes
    number: int
    name: str
    opener: bool
    spoken: Spoken
    connector: End
    acceptor: End


class Assembler:
    """Feed it segments with `feed`, then call `finish`; both give batches of WIRE.

    A flow's segments must be together and in order, over all calls; a connection's rows are.
    """

    def __init__(self, ports: PortMap, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._ports = ports
        self._reorder_bytes = reorder_bytes
        self._key = b""
        self._state = new_state()
        # In charge instead of the kernel as long as something waits behind a hole.
        self._flow: Flow | None = None
        self._rows = np.zeros((_FIELDS, BATCH_ROWS), np.int64)
        self._count = 0
        self._extra = bytearray()
        # The last one that was given out, and the number of its next row.
        self._connection: _Connection | None = None
        self._seq = 0

    def feed(self, segments: Ordered) -> Iterator[pa.RecordBatch]:
        if not len(segments.order):
            return
        first, last = segments.flows[segments.order[[0, -1]]].tolist()
        key = segments.keys[first].tobytes()
        if key != self._key:
            yield from self.finish()
        else:
            rename(self._state, first)
            self._rows[_FLOW, : self._count] = first
        at = 0
        while at < len(segments.order):
            why = FULL
            if self._flow is not None:
                at = self._help(segments, at)
            else:
                at, self._count, why = self._follow(segments, at)
            if why == ODD:
                self._flow = self._taken_over()
            elif why == LEAVE:
                self._leave()
            if why == FULL and self._is_full:
                yield from self._flush(segments.keys, segments.data)
        self._key = segments.keys[last].tobytes()
        yield from self._flush(segments.keys, segments.data)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The flow has no more segments."""
        if self._key:
            rename(self._state, 0)
            self._rows[_FLOW, : self._count] = 0
            self._leave()
            key = np.frombuffer(self._key, np.uint8).reshape(1, -1)
            yield from self._flush(key, (), complete=True)
            self._key = b""

    # Flows.

    def _follow(self, segments: Ordered, at: int) -> tuple[int, int, int]:
        return follow(
            self._state,
            segments.order,
            at,
            segments.flows,
            segments.forwards,
            segments.times,
            segments.numbers,
            segments.acknowledgements,
            segments.flags,
            segments.lengths,
            segments.sizes,
            segments.sources,
            segments.starts,
            self._rows,
            self._count,
            BATCH_BYTES,
        )

    def _taken_over(self) -> Flow:
        flow = Flow(reorder_bytes=self._reorder_bytes)
        to_flow(self._state, flow)
        return flow

    def _help(self, segments: Ordered, at: int) -> int:
        """Segment by segment until nothing waits any more; the place of the next one."""
        flow, number = self._flow, flow_of(self._state)
        assert flow is not None
        while at < len(segments.order) and not self._is_full:
            index = int(segments.order[at])
            if segments.flows[index] != number:
                self._leave()
                break
            at += 1
            for run in flow.add(_segment(segments, index)):
                self._put(run)
            if not flow.is_waiting:
                from_flow(flow, self._state)
                self._flow = None
                break
        return at

    def _leave(self) -> None:
        """The flow is over."""
        flow = self._flow or self._taken_over()
        for run in flow.finish():
            self._put(run)
        self._flow = None
        enter(self._state, NO_FLOW)

    @property
    def _is_full(self) -> bool:
        return (
            self._count + ROWS_OF_A_SEGMENT > BATCH_ROWS
            or len(self._extra) + followed_bytes(self._state) >= BATCH_BYTES
        )

    def _put(self, run: Run) -> None:
        if self._count == self._rows.shape[1]:
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)), axis=1)
        self._rows[:, self._count] = (
            flow_of(self._state),
            run.connection,
            -1 if run.opener is None else run.opener,
            run.forward,
            _KIND_NUMBERS[run.kind],
            run.offset,
            run.length,
            run.time_ns,
            run.late,
            _EXTRA,
            len(self._extra),
        )
        self._extra += run.data or b""
        self._count += 1

    # Rows.

    def _flush(
        self,
        keys: npt.NDArray[np.uint8],
        data: Sequence[npt.NDArray[np.uint8]],
        *,
        complete: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """All rows but those of a connection of which it is not known yet what it speaks."""
        rows = self._rows[:, : self._count]
        forget_followed(self._state)
        if not self._count:
            return
        sources = _Sources(data, bytes(self._extra))
        changes = (np.diff(rows[_FLOW]) != 0) | (np.diff(rows[_NUMBER]) != 0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), self._count]
        connections: list[_Connection] = []
        for start, stop in pairwise(bounds):
            key, number = keys[rows[_FLOW, start]].tobytes(), int(rows[_NUMBER, start])
            known = self._connection
            if start or known is None or (known.flow, known.number) != (key, number):
                runs = _runs(rows, start, stop, sources)
                goes_on = stop == self._count and rows[_FLOW, start] == flow_of(self._state)
                is_whole = complete or not goes_on
                known = _connection(key, runs, self._ports, complete=is_whole)
                self._seq = 0 if not start else self._seq
            if known is None:
                break
            connections.append(known)
        given = bounds[len(connections)]
        if given:
            yield self._batch(rows[:, :given], connections, bounds, sources)
        self._hold(given, sources)

    def _batch(
        self,
        rows: npt.NDArray[np.int64],
        connections: list[_Connection],
        bounds: list[int],
        sources: _Sources,
    ) -> pa.RecordBatch:
        count = rows.shape[1]
        starts = np.array(bounds[: len(connections)], np.int64)
        which = np.zeros(count, np.int32)
        which[starts[1:]] = 1
        np.cumsum(which, out=which)
        seq = np.arange(count) - starts[which]
        seq[which == 0] += self._seq
        self._connection, self._seq = connections[-1], int(seq[-1]) + 1
        openers = np.array([each.opener for each in connections])[which]
        choose = pa.array(which)

        def of_connection(values: list[Any], kind: pa.DataType) -> pa.Array:
            return pa.array(values, kind).take(choose)

        text, port = pa.string(), pa.int32()
        columns = {
            "node": _nodes(count),
            "seq": pa.array(seq),
            "connection": of_connection([each.name for each in connections], text),
            "direction": _DIRECTIONS.take(pa.array((rows[_FORWARD] == openers).view(np.int8))),
            "kind": _KIND_NAMES.take(pa.array(rows[_KIND])),
            # Copied, since the rows are written over while somebody has the batch.
            "offset": pa.array(rows[_OFFSET].copy()),
            "length": pa.array(rows[_LENGTH].copy()),
            "time": pa.array(rows[_TIME] // 1000),
            "data": sources.column(rows),
            "late": pa.array(rows[_LATE] != 0),
            "protocol": of_connection([each.spoken.protocol for each in connections], text),
            "listener": of_connection([each.spoken.listener for each in connections], text),
            "connector_address": of_connection([each.connector[0] for each in connections], text),
            "connector_port": of_connection([each.connector[1] for each in connections], port),
            "acceptor_address": of_connection([each.acceptor[0] for each in connections], text),
            "acceptor_port": of_connection([each.acceptor[1] for each in connections], port),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in WIRE.names], schema=WIRE)

    def _hold(self, start: int, sources: _Sources) -> None:
        """Keep the rows from `start` on, and what they point to."""
        rest = self._rows[:, start : self._count].copy()
        self._extra = bytearray()
        for row in range(rest.shape[1]):
            payload = sources.payload(rest, row) or b""
            rest[[_SOURCE, _START], row] = _EXTRA, len(self._extra)
            self._extra += payload
        if self._rows.shape[1] > BATCH_ROWS:
            self._rows = np.zeros((_FIELDS, BATCH_ROWS), np.int64)
        self._count = rest.shape[1]
        self._rows[:, : self._count] = rest


def _segment(segments: Ordered, index: int) -> Segment:
    start, size = int(segments.starts[index]), int(segments.sizes[index])
    return Segment(
        bool(segments.forwards[index]),
        int(segments.times[index]),
        int(segments.numbers[index]),
        int(segments.acknowledgements[index]),
        int(segments.flags[index]),
        int(segments.lengths[index]),
        segments.data[segments.sources[index]][start : start + size].tobytes(),
    )


def _runs(rows: npt.NDArray[np.int64], start: int, stop: int, sources: _Sources) -> Iterator[Run]:
    for row in range(start, stop):
        _, number, opener, forward, kind, offset, length, time_ns, late, *_ = rows[:, row].tolist()
        yield Run(
            number,
            None if opener < 0 else bool(opener),
            bool(forward),
            KINDS[kind],
            offset,
            length,
            time_ns,
            sources.payload(rows, row),
            bool(late),
        )


def _connection(
    key: bytes, runs: Iterator[Run], ports: PortMap, *, complete: bool
) -> _Connection | None:
    """None if it takes more of its runs to know what is spoken."""
    forward, backward = end_of(key[:18]), end_of(key[18:])
    first = next(runs)
    known = decide(chain((first,), runs), forward[1], backward[1], ports, complete=complete)
    if known is None:
        return None
    opener, spoken = known
    connector, acceptor = (forward, backward) if opener else (backward, forward)
    name = name_of(connector, acceptor, first.time_ns)
    return _Connection(key, first.connection, name, opener, spoken, connector, acceptor)


class _Sources:
    """Where the payloads of rows are."""

    def __init__(self, data: Sequence[npt.NDArray[np.uint8]], extra: bytes) -> None:
        self._data = data
        self._extra = np.frombuffer(extra, np.uint8)

    def _source(self, number: int) -> npt.NDArray[np.uint8]:
        return self._extra if number == _EXTRA else self._data[number]

    def payload(self, rows: npt.NDArray[np.int64], row: int) -> bytes | None:
        """None for a row that is not about bytes."""
        if rows[_KIND, row] != DATA:
            return None
        start = int(rows[_START, row])
        source = self._source(int(rows[_SOURCE, row]))
        return source[start : start + int(rows[_LENGTH, row])].tobytes()

    def column(self, rows: npt.NDArray[np.int64]) -> pa.Array:
        """The payloads of all rows."""
        count = rows.shape[1]
        has_data = rows[_KIND] == DATA
        sizes = np.where(has_data, rows[_LENGTH], 0)
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        target = np.empty(int(offsets[-1]), np.uint8)
        for number in np.unique(rows[_SOURCE, has_data]).tolist():
            own = np.flatnonzero(has_data & (rows[_SOURCE] == number))
            copy_slices(self._source(number), own, rows[_START], offsets, target)
        valid = np.packbits(has_data, bitorder="little")
        buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(target)]
        return pa.Array.from_buffers(pa.binary(), count, buffers)


def _nodes(count: int) -> pa.Array:
    return _NODES[:count] if count <= len(_NODES) else pa.array([NODE] * count)
