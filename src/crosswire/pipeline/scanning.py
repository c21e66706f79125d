"""One protocol's connections in one batch: bytes through its scanner, what it finds to rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosswire.errors import FrameError
from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.arrived import NOWHERE, Arrived, Flags, Numbers
from crosswire.pipeline.connection import ConnectionRows, Direction, Scanned
from crosswire.pipeline.protocols.contract import Described, Rows
from crosswire.pipeline.tables.decoded import ARROW, FRAMES, OF_MESSAGES
from crosswire.wire import protocol
from crosswire.wire.bulk import AWAY, NONE, OPENED, STOP, BulkScanner, Columns, Fed, read
from crosswire.wire.contract import Decoder, Placed

__all__ = ["Kit", "Scan", "Talk", "kit_of"]

_SCANNERS: Final = {
    "emp": "EmpScanner",
    "emqp": "EmqpScanner",
    "relink": "RelinkScanner",
    "epoxy": "EpoxyScanner",
    "micromsg2": "MicroMsg2Scanner",
}
_CHUNK_ROWS: Final = 32_768
_WAYS: Final = pa.array([FORWARD, BACKWARD])


@dataclass(frozen=True, eq=False)
class Kit:
    """What it takes to read a protocol in columns. `agrees`: what its opener says at the start
    decides how the other side is read."""

    name: str
    roles: tuple[str, str]
    scanner: BulkScanner
    frames: pa.Array
    layers: Numbers
    agrees: bool

    def state_of(self, way: Direction) -> Numbers | None:
        """Where a direction is read on; None if that is its first byte."""
        if way.decoder is not None:
            return self.scanner.state_of(way.decoder)
        return None if way.scanned is None else way.scanned.state

    def has_opened(self, way: Direction | None) -> bool:
        state = None if way is None else self.state_of(way)
        return state is not None and bool(state[OPENED] != NONE)


@cache
def kit_of(name: str | None) -> Kit | None:
    """None for what no scanner reads."""
    if name is None or name not in _SCANNERS:
        return None
    scanner: BulkScanner = getattr(import_module(f"crosswire.wire.{name}.bulk"), _SCANNERS[name])()
    roles = protocol(name).roles
    return Kit(
        name,
        (roles[0], roles[-1]),
        scanner,
        pa.array(scanner.frame_names),
        np.array(scanner.frame_layers, np.int64),
        type(scanner).share is not BulkScanner.share,
    )


class Talk(NamedTuple):
    """A connection that has rows in a batch; without a kit it is read row by row."""

    connection: ConnectionRows
    kit: Kit | None
    is_new: bool


class _Side:
    """All directions of one kind, forward or backward, that have bytes in a batch."""

    def __init__(self, kit: Kit, forward: bool, lanes: list[int], scan: Scan) -> None:
        pieces = scan.arrived.pieces
        self.forward = forward
        self.lanes = np.array(lanes, np.int64)
        self.starts = pieces.lane_start[self.lanes]
        self.ends = pieces.lane_stop[self.lanes]
        self.ways = [scan.ways[lane] for lane in lanes]
        self.bases = np.array([way.base for way in self.ways], np.int64)
        # A decoder counts from where the capture begins.
        self.offsets = np.array([way.seen for way in self.ways], np.int64)
        self.states = kit.scanner.fresh(kit.roles[0 if forward else 1], len(lanes))
        self.parts: list[Columns | Fed] = []
        self.opened: dict[int, int] = {}
        """Where the handshake ended, of runs that a decoder was asked for."""
        self.fed_to: dict[int, int] = {}

    def opened_at(self) -> Numbers:
        """Where in its direction each run's handshake ended."""
        opened = self.states[:, OPENED].copy()
        for run, place in self.opened.items():
            opened[run] = place
        return opened


class Scan:
    """Reads the bytes at once; `rows` then gives what they say.

    `out_of_turn` are connections, all new, in which the accepting side spoke before its words had a
    meaning. Nothing is known of them then.
    """

    def __init__(self, kit: Kit, arrived: Arrived, talks: list[Talk], owners: list[int]) -> None:
        self.arrived = arrived
        self.ways: dict[int, Direction] = {}
        self.kit = kit
        self._talks = talks
        self._enter(owners)
        forward = self._read(True, owners)
        self._settle(forward)
        backward = self._read(False, owners)
        self.out_of_turn = self._out_of_turn(forward, backward, owners) if kit.agrees else []
        self._settle(backward)
        self._sides = (forward, backward)
        self._count(owners)

    # Reading.

    def _enter(self, owners: list[int]) -> None:
        """Make known what directions there are."""
        arrived = self.arrived
        bases, times = arrived.lane_base.tolist(), arrived.lane_first_time.tolist()
        for forward, lanes in zip((True, False), arrived.lanes_of, strict=True):
            name = FORWARD if forward else BACKWARD
            for owner in owners:
                lane = lanes[owner]
                if lane == NOWHERE:
                    continue
                directions = self._talks[owner].connection.directions
                way = directions.get(forward)
                if way is None:
                    way = directions[forward] = Direction(name, times[lane], bases[lane], False)
                self.ways[lane] = way

    def _read(self, forward: bool, owners: list[int]) -> _Side:
        kit, arrived = self.kit, self.arrived
        own = arrived.lanes_of[0 if forward else 1]
        carried = arrived.pieces.lane_row
        lanes = np.array([own[owner] for owner in owners], np.int64)
        lanes = lanes[lanes != NOWHERE]
        lanes = lanes[carried[lanes] != NOWHERE]
        side = _Side(kit, forward, lanes.tolist(), self)
        fresh = []
        for run, way in enumerate(side.ways):
            state = kit.state_of(way)
            if state is None:
                fresh.append(run)
            else:
                side.states[run] = state
        connections = self._connections(side)
        if kit.agrees and not forward and fresh:
            self._share(side, fresh, connections)

        def decoder_of(run: int) -> Decoder:
            side.opened.setdefault(run, int(side.states[run, OPENED]))
            return connections[run].decoder(forward, side.ways[run])

        bounds = (side.starts, side.ends, side.offsets)
        pieces = arrived.pieces
        for part in read(
            kit.scanner, pieces.array, *bounds, side.states, decoder_of, cuts=pieces.ends
        ):
            side.parts.append(part)
            if isinstance(part, Fed):
                side.fed_to[part.run] = part.stop
        return side

    def connection(self, owner: int) -> ConnectionRows:
        return self._talks[owner].connection

    def _connections(self, side: _Side) -> list[ConnectionRows]:
        owners = self.arrived.lane_owner[side.lanes].tolist()
        return [self._talks[owner].connection for owner in owners]

    def _share(self, side: _Side, fresh: list[int], connections: list[ConnectionRows]) -> None:
        kit = self.kit
        peers = kit.scanner.fresh(kit.roles[0], len(fresh))
        for place, run in enumerate(fresh):
            state = kit.state_of(connections[run].directions[True])
            if state is not None:
                peers[place] = state
        states = side.states[fresh]
        kit.scanner.share(states, peers)
        # Who can't be read in columns can't say what was agreed either.
        states[peers[:, STOP] == AWAY, STOP] = AWAY
        side.states[fresh] = states

    def _settle(self, side: _Side) -> None:
        """Leave every direction where its run ended."""
        scanner, pieces = self.kit.scanner, self.arrived.pieces
        bounds = zip(
            side.ways,
            side.starts.tolist(),
            side.ends.tolist(),
            side.offsets.tolist(),
            side.states[:, OPENED].tolist(),
            strict=True,
        )
        for run, (way, start, end, offset, opened) in enumerate(bounds):
            if way.decoder is not None:
                if side.fed_to.get(run) != end:
                    whole = pieces.array[start:end]
                    scanner.leave(way.decoder, side.states[run], whole, offset)
                continue
            known = way.scanned
            opening = b"" if known is None else known.opening
            if known is None or known.state[OPENED] == NONE:
                stop = end if opened == NONE else start + opened - offset
                opening += pieces.data[start:stop]
            way.scanned = Scanned(scanner, side.states[run].copy(), opening)

    def _out_of_turn(self, forward: _Side, backward: _Side, owners: list[int]) -> list[int]:
        """New connections whose acceptor went on before the opener's handshake was whole."""
        arrived, pieces = self.arrived, self.arrived.pieces
        never = len(arrived)
        agreed, went_on = np.full((2, len(arrived.keys)), never)
        opened = forward.opened_at()
        runs = np.flatnonzero((forward.offsets == 0) & (opened > 0))
        last = forward.starts[runs] + opened[runs] - 1
        agreed[arrived.lane_owner[forward.lanes[runs]]] = pieces.rows_at(last)
        opened = backward.opened_at()
        owner = arrived.lane_owner[backward.lanes]
        next_one = backward.starts + opened
        runs = np.flatnonzero(
            (backward.offsets == 0) & (opened != NONE) & (next_one < backward.ends)
        )
        went_on[owner[runs]] = pieces.rows_at(next_one[runs])
        went_on[owner[opened == NONE]] = NOWHERE
        early = (went_on < agreed).tolist()
        return [owner for owner in owners if self._talks[owner].is_new and early[owner]]

    def _count(self, owners: list[int]) -> None:
        """Take down what is seen of each direction and connection."""
        arrived, pieces = self.arrived, self.arrived.pieces
        sizes = (pieces.lane_stop - pieces.lane_start).tolist()
        last_times, ends = arrived.lane_last_time.tolist(), arrived.lane_end
        frames = np.zeros(len(sizes), np.int64)
        for side in self._sides:
            for part in side.parts:
                if isinstance(part, Columns):
                    frames += np.bincount(side.lanes[part.run], minlength=len(frames))
        made = frames.tolist()
        for lane, way in self.ways.items():
            way.seen += sizes[lane]
            way.frames += made[lane]
            way.last_time = max(way.last_time, last_times[lane])
            way.end = ends[lane] or way.end
        seqs = arrived.seq[arrived.last_rows].tolist()
        for owner in owners:
            connection = self._talks[owner].connection
            connection.seq = seqs[owner]
            connection.opened |= arrived.opened[owner]

    # Rows.

    def rows(self, payloads: bool) -> Iterator[pa.RecordBatch]:
        """Everything in the order in which it was said, connection by connection. What decoders
        gave goes to where the connections collect their rows."""
        found = _Found(self, self._sides)
        at = 0
        chunk: _Chunk | None = None
        for stop, said in found.stops():
            while at < stop:
                if chunk is None:
                    chunk = _Chunk(found, at, payloads)
                at = min(stop, chunk.stop)
                chunk.describe(at)
                if at == chunk.stop:
                    yield chunk.batch()
                    chunk = None
            if said is not None:
                said.connection.emit(said.forward, said.way, said.placed, said.time)


class _Said(NamedTuple):
    """What a decoder gave."""

    connection: ConnectionRows
    forward: bool
    way: Direction
    placed: list[Placed]
    time: int


class _Found:
    """What scanner and decoders gave for a batch, in the order in which it was said."""

    def __init__(self, scan: Scan, sides: tuple[_Side, ...]) -> None:
        self.scan = scan
        self._blocks: list[tuple[Numbers, ...]] = []
        self._said: list[tuple[int, int, _Said]] = []
        dropped = np.zeros(len(scan.arrived.keys), np.bool_)
        dropped[scan.out_of_turn] = True
        parts = [(side, part) for side in sides for part in side.parts]
        for serial, (side, part) in enumerate(parts):
            if isinstance(part, Columns):
                self._add_columns(side, part, serial, dropped)
            else:
                self._add_fed(side, part, serial, dropped)
        scanner = scan.kit.scanner
        matrix, *rest = self._joined()
        self.lane, self.wire_row, self.position, self.offset, key, serials = rest
        self.columns = Columns(
            matrix, scanner.frame_names, scanner.frame_layers, scanner.slice_names
        )
        self._arrange(key, serials)

    def _joined(self) -> tuple[Numbers, ...]:
        if not self._blocks:
            return (np.empty((0, 0), np.int64), *[np.empty(0, np.int64)] * 6)
        if len(self._blocks) == 1:
            return self._blocks[0]
        return tuple(np.concatenate(each, axis=-1) for each in zip(*self._blocks, strict=True))

    def _add_columns(self, side: _Side, part: Columns, serial: int, dropped: Flags) -> None:
        arrived = self.scan.arrived
        owner = arrived.lane_owner[side.lanes[part.run]]
        if dropped.any():
            kept = ~dropped[owner]
            names = part.frame_names, part.frame_layers, part.slice_names
            part, owner = Columns(part.rows[:, kept], *names), owner[kept]
        run, offset = part.run, part.offset
        position = side.starts[run] + offset - side.offsets[run]
        row = arrived.pieces.rows_at(position + part.length - 1)
        self._blocks.append(
            (
                part.rows,
                side.lanes[run],
                row,
                position,
                offset + side.bases[run],
                owner * len(arrived) + row,
                np.full(len(run), serial),
            )
        )

    def _add_fed(self, side: _Side, part: Fed, serial: int, dropped: Flags) -> None:
        arrived = self.scan.arrived
        owner = int(arrived.lane_owner[side.lanes[part.run]])
        if part.placed and not dropped[owner]:
            row = int(arrived.pieces.rows_at(np.array([part.stop - 1]))[0])
            way, time = side.ways[part.run], int(arrived.time[row])
            connection = self.scan.connection(owner)
            said = _Said(connection, side.forward, way, part.placed, time)
            self._said.append((owner * len(arrived) + row, serial, said))

    def _arrange(self, key: Numbers, serials: Numbers) -> None:
        if not self._said:
            self.order = np.argsort(key, kind="stable")
            self._stops: list[int] = []
            return
        fed_key, fed_serial, _ = zip(*self._said, strict=True)
        order = np.lexsort((np.append(serials, fed_serial), np.append(key, fed_key)))
        is_fed = order >= len(key)
        self.order = order[~is_fed]
        self._said = [self._said[place] for place in (order[is_fed] - len(key)).tolist()]
        self._stops = np.cumsum(~is_fed)[is_fed].tolist()

    def stops(self) -> Iterator[tuple[int, _Said | None]]:
        """What decoders gave, and how many of the rows came before it; at last how many came."""
        for stop, (_, _, said) in zip(self._stops, self._said, strict=True):
            yield stop, said
        yield len(self.order), None


class _Chunk:
    """Some rows that follow one another, as many as are described before they become a batch."""

    def __init__(self, found: _Found, start: int, payloads: bool) -> None:
        index = found.order[start : start + _CHUNK_ROWS]
        self.stop = start + len(index)
        self._scan, self._start, self._payloads = found.scan, start, payloads
        arrived = found.scan.arrived
        scanner = found.scan.kit.scanner
        names = scanner.frame_names, scanner.frame_layers, scanner.slice_names
        self._columns = Columns(found.columns.rows[:, index], *names)
        self._lane, self._offset = found.lane[index], found.offset[index]
        self._time = arrived.time[found.wire_row[index]]
        self._owner = arrived.lane_owner[self._lane]
        self._owners = self._owner.tolist()
        self._changes = (np.flatnonzero(np.diff(self._owner)) + 1).tolist()
        self._described: list[Described | FrameError] = []
        columns = self._columns
        self._rows = Rows(
            arrived.pieces.data,
            payloads,
            found.position[index].tolist(),
            (~arrived.lane_backward[self._lane]).tolist(),
            columns.frame.tolist(),
            self._offset.tolist(),
            columns.length.tolist(),
            columns.number.tolist(),
            columns.detail.tolist(),
            columns.sequence.tolist(),
            tuple(
                (starts.tolist(), sizes.tolist())
                for starts, sizes in map(columns.slice, scanner.slice_names)
            ),
        )

    def describe(self, stop: int) -> None:
        """All up to there."""
        at, end = len(self._described), stop - self._start
        change = bisect_right(self._changes, at)
        while at < end:
            next_one = self._changes[change] if change < len(self._changes) else end
            until = min(end, next_one)
            reading = self._scan.connection(self._owners[at]).reading
            assert reading is not None
            self._described.extend(reading.describe_rows(self._rows, at, until))
            at, change = until, change + 1
            if len(self._described) != at:
                raise AssertionError(f"{type(reading).__name__} left out rows")

    def batch(self) -> pa.RecordBatch:
        """Frames. Violations go to where their connections collect their rows."""
        described = self._described
        if set(map(type, described)) == {Described}:
            return self._frames(described, slice(None))
        right = [not isinstance(each, FrameError) for each in described]
        for place, each in enumerate(described):
            if isinstance(each, FrameError):
                self._violation(place, each)
        kept = [each for each in described if not isinstance(each, FrameError)]
        return self._frames(kept, np.array(right, np.bool_))

    def _violation(self, place: int, error: FrameError) -> None:
        connection = self._scan.connection(self._owners[place])
        rows, frame = self._rows, self._rows.frame[place]
        layer = self._columns.frame_layers[frame]
        where = (layer, rows.offset[place], rows.length[place], int(self._time[place]))
        connection.violation(connection.directions[rows.forward[place]], where, error)

    def _frames(self, described: list[Any], chosen: Any) -> pa.RecordBatch:
        arrived, kit, count = self._scan.arrived, self._scan.kit, len(described)
        lane, owner = self._lane[chosen], pa.array(self._owner[chosen])
        frame = self._columns.frame[chosen]
        offset = pa.array(self._offset[chosen])
        length = pa.array(self._columns.length[chosen])
        size = _column(described, "payload_size", pa.int64())
        behind = pc.add(_column(described, "payload_end", pa.int64()), size)
        columns: dict[str, pa.Array] = {
            "table": pa.repeat(FRAMES, count),
            "node": arrived.nodes.take(owner),
            "connection": arrived.connections.take(owner),
            "direction": _WAYS.take(pa.array(arrived.lane_backward[lane].astype(np.int8))),
            "layer": pa.array(kit.layers[frame].astype(np.int32)),
            "offset": offset,
            "length": length,
            "time": pa.array(self._time[chosen]),
            "protocol": pa.repeat(kit.name, count),
            "frame": kit.frames.take(pa.array(frame)),
            "payload_offset": pc.subtract(pc.add(offset, length), behind),
            "payload_length": size,
        }
        if not self._payloads:
            for name in OF_MESSAGES:
                columns[name] = pa.nulls(count, ARROW.field(name).type)
        arrays = [
            columns[field.name]
            if field.name in columns
            else _column(described, field.name, field.type)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def _column(described: list[Any], name: str, kind: pa.DataType) -> pa.Array:
    return pa.array(map(attrgetter(name), described), kind, size=len(described))
