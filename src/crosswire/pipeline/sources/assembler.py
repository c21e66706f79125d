"""Segments of many flows, sorted, into batches of bronze.wire: the same rows as `FlowRows`.

The kernel (`flow_kernel`) reassembles flows as long as nothing unusual happens; `Flow` takes over
for the rest and hands back. What all rows of a connection have in common is computed once and kept
in dictionary columns. Nothing is done in Python per segment of a connection without disturbance.

A row is 11 integers in a column of `_rows`, with its payload as a slice of a source. Text columns
and payloads are made per batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosswire.capture.classify import PortMap, decide
from crosswire.capture.reassembly import REORDER_BYTES, Flow, ReassembledRun
from crosswire.lake.schemas import BACKWARD, FORWARD, WIRE
from crosswire.pipeline.decode.arrow_batches import BATCH_BYTES, BATCH_ROWS
from crosswire.pipeline.sources.capture_reader import segment_of
from crosswire.pipeline.sources.connection_columns import UNKNOWN, BatchConnections, Ports, coded
from crosswire.pipeline.sources.flow_kernel import (
    DATA,
    DONE,
    FULL,
    KINDS,
    LEAVE,
    NO_FLOW,
    ROW_FIELDS,
    ROW_FLOW,
    ROW_FORWARD,
    ROW_KIND,
    ROW_LATE,
    ROW_LENGTH,
    ROW_NUMBER,
    ROW_OFFSET,
    ROW_OPENER,
    ROW_SOURCE,
    ROW_START,
    ROW_TIME,
    ROWS_OF_A_SEGMENT,
    UNUSUAL,
    enter,
    flow_of,
    follow,
    followed_bytes,
    forget_followed,
    from_flow,
    is_waiting,
    new_state,
    new_waiting,
    rename,
    to_flow,
)
from crosswire.pipeline.sources.flow_rows import NODE
from crosswire.pipeline.sources.flow_shares import OrderedSegments
from crosswire.pipeline.sources.packet_kernels import copy_slices

__all__ = ["Assembler", "plain"]

_EXTRA: Final = -1
"""The source of payloads that are in no segment as they are: cut by `Flow`, or kept from an earlier
batch, whose buffers are gone."""

_KIND_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
_KIND_NAMES: Final = pa.array(KINDS)
_DIRECTIONS: Final = pa.array([BACKWARD, FORWARD])
_NODES: Final = pa.array([NODE])


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with plain columns instead of dictionaries, in the schema WIRE."""
    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIRE)


class _LastConnection(NamedTuple):
    """The connection of the last row of a batch: the next batch may continue it, and must not
    decide its name, opener and protocol again from rows in its middle."""

    flow: bytes
    number: int
    time_ns: int
    opener: bool
    protocol: int


class Assembler:
    """Reassembles many flows: call `feed` with segments, then `finish`; both give batches of
    bronze.wire with dictionary columns, which `plain` removes.

    The segments of a flow must follow one another in the order of time, over all calls; so do the
    rows of a connection then.
    """

    def __init__(self, ports: PortMap, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._ports = Ports(ports)
        self._reorder_bytes = reorder_bytes
        self._key = b""
        self._state = new_state()
        self._waiting = new_waiting()
        # The sources that rows and waiting segments refer to.
        self._data: Sequence[npt.NDArray[np.uint8]] = ()
        # Reassembles the current flow instead of the kernel, until nothing waits any more.
        self._flow: Flow | None = None
        self._rows = np.zeros((ROW_FIELDS, BATCH_ROWS), np.int64)
        self._count = 0
        self._extra = bytearray()
        # The last connection that was given out, and the seq of its next row.
        self._last: _LastConnection | None = None
        self._seq = 0

    def feed(self, segments: OrderedSegments) -> Iterator[pa.RecordBatch]:
        """The batches that these segments complete; buffers of `segments` may be reused after."""
        if not len(segments.order):
            return
        first, last = segments.packets["flow"][segments.order[[0, -1]]].tolist()
        key = segments.keys[first].tobytes()
        if key != self._key:
            yield from self.finish()
        else:
            # The flow continues; in each call flows are numbered anew.
            rename(self._state, first)
            self._rows[ROW_FLOW, : self._count] = first
        self._data = segments.data
        at = 0
        while at < len(segments.order):
            if self._flow is not None:
                at = self._reassemble_in_python(segments, at)
                reason = FULL if self._is_full else DONE
            else:
                at, self._count, reason = self._follow(segments, at)
            if reason == UNUSUAL:
                self._flow = self._flow_of_kernel()
            elif reason == LEAVE:
                self._end_flow()
            elif reason == FULL:
                yield from self._flush(segments.keys)
        self._key = segments.keys[last].tobytes()
        yield from self._flush(segments.keys)
        if is_waiting(self._state) and self._flow is None:
            # Waiting segments are slices of buffers that the caller reuses: `Flow` has copies.
            self._flow = self._flow_of_kernel()
        self._data = ()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The remaining batches, when the last flow has no more segments."""
        if self._key:
            rename(self._state, 0)
            self._rows[ROW_FLOW, : self._count] = 0
            self._end_flow()
            key = np.frombuffer(self._key, np.uint8).reshape(1, -1)
            yield from self._flush(key, complete=True)
            self._key = b""

    # Flows.

    def _follow(self, segments: OrderedSegments, at: int) -> tuple[int, int, int]:
        return follow(
            self._state,
            self._waiting,
            segments.order,
            at,
            segments.packets,
            self._rows,
            self._count,
            BATCH_BYTES,
            self._reorder_bytes,
        )

    def _flow_of_kernel(self) -> Flow:
        flow = Flow(reorder_bytes=self._reorder_bytes)
        to_flow(self._state, self._waiting, flow, self._cut)
        return flow

    def _cut(self, source: int, start: int, length: int) -> bytes:
        return self._data[source][start : start + length].tobytes()

    def _reassemble_in_python(self, segments: OrderedSegments, at: int) -> int:
        """Let `Flow` reassemble segment by segment until nothing waits any more; gives the index of
        the next one."""
        flow, number = self._flow, flow_of(self._state)
        assert flow is not None
        while at < len(segments.order) and not self._is_full:
            packet = segments.packets[segments.order[at]]
            if packet["flow"] != number:
                self._end_flow()
                break
            at += 1
            for run in flow.add(segment_of(packet, segments.data[packet["source"]])):
                self._put(run)
            # The kernel has no room for waiting bytes that are no slices of a source.
            if not flow.is_waiting:
                from_flow(flow, self._state)
                self._flow = None
                break
        return at

    def _end_flow(self) -> None:
        """End the current flow: what waits is given out, holes become gaps."""
        flow = self._flow or self._flow_of_kernel()
        for run in flow.finish():
            self._put(run)
        self._flow = None
        enter(self._state, NO_FLOW)

    @property
    def _is_full(self) -> bool:
        return (
            # As in the kernel: a segment that may not fit is not begun.
            self._count + ROWS_OF_A_SEGMENT > BATCH_ROWS
            or len(self._extra) + followed_bytes(self._state) >= BATCH_BYTES
        )

    def _put(self, run: ReassembledRun) -> None:
        # One segment may release many that waited, more than a batch has rows.
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
        *,
        complete: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """A batch of all rows, except those of the last connection if its protocol is undecided and
        more of it may follow (not `complete`)."""
        rows = self._rows[:, : self._count]
        forget_followed(self._state)
        if not self._count:
            return
        sources = _Sources(self._data, bytes(self._extra))
        found, given = self._classified(rows, keys, sources, complete=complete)
        if given:
            yield self._batch(found, rows[:, :given], sources)
        self._hold(given, sources)

    def _classified(
        self,
        rows: npt.NDArray[np.int64],
        keys: npt.NDArray[np.uint8],
        sources: _Sources,
        *,
        complete: bool,
    ) -> tuple[BatchConnections, int]:
        """The connections of these rows up to the first whose protocol is undecided, and the number
        of their rows."""
        changes = (rows[ROW_FLOW, 1:] != rows[ROW_FLOW, :-1]) | (
            rows[ROW_NUMBER, 1:] != rows[ROW_NUMBER, :-1]
        )
        starts = np.append(0, np.flatnonzero(changes) + 1)
        first = rows[:, starts]
        found = BatchConnections.of(
            starts,
            keys[first[ROW_FLOW]],
            first[ROW_NUMBER],
            first[ROW_TIME],
            first[ROW_OPENER],
            self._ports,
        )
        # A late connection has not its first bytes, which would reveal the protocol.
        undecided = (found.protocols == UNKNOWN) & (first[ROW_LATE] == 0)
        last = self._last
        if last is not None and last[:2] == (found.flows[0].tobytes(), int(found.numbers[0])):
            found.times[0], found.openers[0], found.protocols[0] = last[2:]
            undecided[0] = False
        else:
            self._seq = 0
        # Whether the last connection may have more rows in segments that are not read yet.
        goes_on = not complete and rows[ROW_FLOW, -1] == flow_of(self._state)
        stops = np.append(starts[1:], rows.shape[1])
        for index in np.flatnonzero(undecided).tolist():
            runs = _runs(rows, starts[index], stops[index], sources)
            is_whole = index + 1 < len(starts) or not goes_on
            known = decide(runs, *found.ports(index), self._ports.map, complete=is_whole)
            if known is None:
                # Only the last connection can be incomplete.
                return found.first(index), int(starts[index])
            found.openers[index], found.protocols[index] = known[0], self._ports.code(known[1])
        return found, int(stops[-1])

    def _batch(
        self, found: BatchConnections, rows: npt.NDArray[np.int64], sources: _Sources
    ) -> pa.RecordBatch:
        count = rows.shape[1]
        # Each row's connection: 1 at the first row of each but the first, summed up.
        which = np.zeros(count, np.int32)
        which[found.starts[1:]] = 1
        np.cumsum(which, out=which)
        seq = np.arange(count) - found.starts[which]
        # The first connection may have begun in an earlier batch.
        seq[which == 0] += self._seq
        self._seq = int(seq[-1]) + 1
        self._last = _LastConnection(
            found.flows[-1].tobytes(),
            int(found.numbers[-1]),
            int(found.times[-1]),
            bool(found.openers[-1]),
            int(found.protocols[-1]),
        )
        is_forward = rows[ROW_FORWARD] == found.openers[which]
        columns = {
            "node": coded(np.zeros(count, np.int8), _NODES),
            "seq": pa.array(seq),
            "direction": coded(is_forward.view(np.int8), _DIRECTIONS),
            "kind": coded(rows[ROW_KIND].astype(np.int8), _KIND_NAMES),
            # Copied, since `_rows` is overwritten while Spark still has the batch.
            "offset": pa.array(rows[ROW_OFFSET].copy()),
            "length": pa.array(rows[ROW_LENGTH].copy()),
            "time": pa.array(rows[ROW_TIME] // 1000),
            "data": sources.column(rows),
            "late": pa.array(rows[ROW_LATE] != 0),
            **found.columns(which, self._ports.known),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in WIRE.names], WIRE.names)

    def _hold(self, start: int, sources: _Sources) -> None:
        """Keep the rows from `start` on, with copies of their payloads."""
        rest = self._rows[:, start : self._count].copy()
        self._extra = bytearray()
        for row in range(rest.shape[1]):
            payload = sources.payload(rest, row) or b""
            rest[[ROW_SOURCE, ROW_START], row] = _EXTRA, len(self._extra)
            self._extra += payload
        # Grown for many rows at once: not kept at that size.
        if self._rows.shape[1] > BATCH_ROWS:
            self._rows = np.zeros((ROW_FIELDS, BATCH_ROWS), np.int64)
        self._count = rest.shape[1]
        self._rows[:, : self._count] = rest


def _runs(
    rows: npt.NDArray[np.int64], start: int, stop: int, sources: _Sources
) -> Iterator[ReassembledRun]:
    for row in range(start, stop):
        _, number, opener, forward, kind, offset, length, time_ns, late, *_ = rows[:, row].tolist()
        yield ReassembledRun(
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


class _Sources:
    """The buffers that rows refer to, by number."""

    def __init__(self, data: Sequence[npt.NDArray[np.uint8]], extra: bytes) -> None:
        self._data = data
        self._extra = np.frombuffer(extra, np.uint8)

    def _source(self, number: int) -> npt.NDArray[np.uint8]:
        return self._extra if number == _EXTRA else self._data[number]

    def payload(self, rows: npt.NDArray[np.int64], row: int) -> bytes | None:
        """The bytes of a row; None for a row without."""
        if rows[ROW_KIND, row] != DATA:
            return None
        start = int(rows[ROW_START, row])
        source = self._source(int(rows[ROW_SOURCE, row]))
        return source[start : start + int(rows[ROW_LENGTH, row])].tobytes()

    def column(self, rows: npt.NDArray[np.int64]) -> pa.Array:
        """The payloads of all rows as a binary column, copied by the kernel, source by source."""
        count = rows.shape[1]
        has_data = rows[ROW_KIND] == DATA
        sizes = np.where(has_data, rows[ROW_LENGTH], 0)
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        target = np.empty(int(offsets[-1]), np.uint8)
        for number in _distinct(rows[ROW_SOURCE, has_data]):
            own = np.flatnonzero(has_data & (rows[ROW_SOURCE] == number))
            copy_slices(self._source(number), own, rows[ROW_START], offsets, target)
        valid = np.packbits(has_data, bitorder="little")
        buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(target)]
        return pa.Array.from_buffers(pa.binary(), count, buffers)


def _distinct(numbers: npt.NDArray[np.int64]) -> list[int]:
    """The different numbers. Nearly always there is one, which is found without sorting."""
    is_one = not len(numbers) or (numbers == numbers[0]).all()
    return (numbers[:1] if is_one else np.unique(numbers)).tolist()  # type: ignore[no-any-return]
