"""One protocol's connections in one batch: bytes through its scanner, what it finds to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from crosswire.pipeline.arrived import NOWHERE, Flags, Numbers
from crosswire.pipeline.batches import BATCH_ROWS
from crosswire.pipeline.columns import describe_of
from crosswire.pipeline.columns.contract import Describe, FrameRows, Readings, Told
from crosswire.pipeline.connection import ConnectionRows, Direction, Scanned
from crosswire.pipeline.present import WAYS, Present
from crosswire.pipeline.protocols.contract import Reading
from crosswire.pipeline.tables.decoded import ARROW, FRAMES, OF_MESSAGES
from crosswire.wire import protocol
from crosswire.wire.bulk import AWAY, NONE, OPENED, STOP, BulkScanner, Columns, Fed, read
from crosswire.wire.contract import Decoder, Placed

__all__ = ["Kit", "Scan", "kit_of"]

_SCANNERS: Final = {
    "emp": "EmpScanner",
    "emqp": "EmqpScanner",
    "relink": "RelinkScanner",
    "epoxy": "EpoxyScanner",
    "micromsg2": "MicroMsg2Scanner",
}


@dataclass(frozen=True, eq=False)
class Kit:
    """What it takes to read a protocol in columns. `agrees`: what its opener says at the start
    decides how the other side is read."""

    name: str
    roles: tuple[str, str]
    scanner: BulkScanner
    describe: Describe
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
        describe_of(name),
        pa.array(scanner.frame_names),
        np.array(scanner.frame_layers, np.int64),
        type(scanner).share is not BulkScanner.share,
    )


class _Side:
    """All directions of one kind, forward or backward, that have bytes in a batch."""

    def __init__(self, kit: Kit, forward: bool, lanes: Numbers, present: Present) -> None:
        pieces = present.arrived.pieces
        self.forward = forward
        self.lanes = lanes
        self.owners = present.arrived.lane_owner[lanes]
        self.starts = pieces.lane_start[lanes]
        self.ends = pieces.lane_stop[lanes]
        self.bases = present.lane_base[lanes]
        # A decoder counts from where the capture begins.
        self.offsets = present.lane_seen[lanes]
        self.states = kit.scanner.fresh(kit.roles[0 if forward else 1], len(lanes))
        self.fresh = np.ones(len(lanes), np.bool_)
        for run in np.flatnonzero(present.lane_known[lanes]).tolist():
            state = kit.state_of(present.way(int(lanes[run])))
            if state is not None:
                self.states[run] = state
                self.fresh[run] = False
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
    """Reads the bytes at once; `rows` then gives what they say, and `settle` leaves everybody of
    whom there will be more where they are.

    `out_of_turn` are connections, all new, in which the accepting side spoke before its words had a
    meaning. Nothing is known of them then.
    """

    def __init__(self, kit: Kit, present: Present, owners: Numbers) -> None:
        self.kit = kit
        self.present = present
        self.arrived = present.arrived
        self._owners = owners
        self._left: set[tuple[bool, int]] = set()
        for owner in owners[~present.is_new[owners]].tolist():
            present.entered(owner)
        self._forward = self._read(True)
        self._backward = self._read(False)
        self.out_of_turn = self._out_of_turn() if kit.agrees else []
        for owner in self.out_of_turn:
            present.forget(owner)

    # Reading.

    def _read(self, forward: bool) -> _Side:
        kit, present, pieces = self.kit, self.present, self.arrived.pieces
        lanes = self.arrived.lanes_of[0 if forward else 1][self._owners]
        lanes = lanes[lanes != NOWHERE]
        side = _Side(kit, forward, lanes[pieces.lane_row[lanes] != NOWHERE], present)
        if kit.agrees and not forward and side.fresh.any():
            self._share(side)

        def decoder_of(run: int) -> Decoder:
            side.opened.setdefault(run, int(side.states[run, OPENED]))
            connection = present.entered(int(side.owners[run]))
            if not forward:
                # Its decoder is made with the other one at hand.
                self._leave(int(side.owners[run]), self._forward)
            return connection.decoder(forward, connection.directions[forward])

        bounds = (side.starts, side.ends, side.offsets)
        for part in read(
            kit.scanner, pieces.array, *bounds, side.states, decoder_of, cuts=pieces.ends
        ):
            side.parts.append(part)
            if isinstance(part, Fed):
                side.fed_to[part.run] = part.stop
        return side

    def _share(self, side: _Side) -> None:
        """Tell those who answer what the others have brought up."""
        kit, forward = self.kit, self._forward
        runs = np.flatnonzero(side.fresh)
        owners = side.owners[runs]
        peers = kit.scanner.fresh(kit.roles[0], len(runs))
        peer, spoke = _find(forward.owners, owners)
        peers[spoke] = forward.states[peer[spoke]]
        for place in np.flatnonzero(~spoke & ~self.present.is_new[owners]).tolist():
            way = self.present.object(int(owners[place])).directions.get(True)
            state = None if way is None else kit.state_of(way)
            if state is not None:
                peers[place] = state
        states = side.states[runs]
        kit.scanner.share(states, peers)
        # Who can't be read in columns can't say what was agreed either.
        states[peers[:, STOP] == AWAY, STOP] = AWAY
        side.states[runs] = states

    def _out_of_turn(self) -> list[int]:
        """New connections whose acceptor went on before the opener's handshake was whole."""
        forward, backward = self._forward, self._backward
        arrived, pieces = self.arrived, self.arrived.pieces
        never = len(arrived)
        agreed, went_on = np.full((2, arrived.owners), never)
        opened = forward.opened_at()
        runs = np.flatnonzero((forward.offsets == 0) & (opened > 0))
        last = forward.starts[runs] + opened[runs] - 1
        agreed[forward.owners[runs]] = pieces.rows_at(last)
        opened = backward.opened_at()
        next_one = backward.starts + opened
        runs = np.flatnonzero(
            (backward.offsets == 0) & (opened != NONE) & (next_one < backward.ends)
        )
        went_on[backward.owners[runs]] = pieces.rows_at(next_one[runs])
        went_on[backward.owners[opened == NONE]] = NOWHERE
        early = (went_on < agreed) & self.present.is_new
        return self._owners[early[self._owners]].tolist()  # type: ignore[no-any-return]

    # Leaving.

    def settle(self) -> None:
        """Take down what was seen of everybody who is an object, or will have to be one."""
        present, arrived = self.present, self.arrived
        needed = ~present.over
        needed[list(present.objects)] = True
        needed[self.out_of_turn] = False
        frames = self._frames()
        ends, names = arrived.lane_end
        sizes = arrived.pieces.lane_stop - arrived.pieces.lane_start
        for owner in self._owners[needed[self._owners]].tolist():
            connection = present.entered(owner)
            self._leave(owner, self._forward)
            self._leave(owner, self._backward)
            connection.seq = int(arrived.seq[arrived.last_rows[owner]])
            connection.opened |= bool(arrived.opened[owner])
            for forward, lanes in zip((True, False), arrived.lanes_of, strict=True):
                lane = lanes[owner]
                if lane == NOWHERE:
                    continue
                way = connection.directions[forward]
                way.seen += int(sizes[lane])
                way.frames += int(frames[lane])
                way.last_time = max(way.last_time, int(arrived.lane_last_time[lane]))
                if ends[lane] != NOWHERE:
                    way.end = names[ends[lane]]

    def _frames(self) -> Numbers:
        """How many each lane has in columns."""
        frames = np.zeros(len(self.arrived.lane_owner), np.int64)
        for side in (self._forward, self._backward):
            for part in side.parts:
                if isinstance(part, Columns):
                    frames += np.bincount(side.lanes[part.run], minlength=len(frames))
        return frames

    def _leave(self, owner: int, side: _Side) -> None:
        """Leave a direction of an object where its run ended."""
        run, spoke = (int(each[0]) for each in _find(side.owners, np.array([owner])))
        if not spoke or (side.forward, run) in self._left:
            return
        self._left.add((side.forward, run))
        scanner, pieces = self.kit.scanner, self.arrived.pieces
        way = self.present.objects[owner].directions[side.forward]
        start, end, offset = int(side.starts[run]), int(side.ends[run]), int(side.offsets[run])
        if way.decoder is not None:
            if side.fed_to.get(run) != end:
                whole = pieces.array[start:end]
                scanner.leave(way.decoder, side.states[run], whole, offset)
            return
        known = way.scanned
        opening = b"" if known is None else known.opening
        if known is None or known.state[OPENED] == NONE:
            opened = int(side.states[run, OPENED])
            stop = end if opened == NONE else start + opened - offset
            opening += pieces.array[start:stop].tobytes()
        way.scanned = Scanned(scanner, side.states[run].copy(), opening)

    # Rows.

    def rows(self, payloads: bool) -> Iterator[pa.RecordBatch]:
        """What was said, connection by connection in the order in which it was said. What decoders
        gave goes to where the connections collect their rows."""
        found = _Found(self.present, (self._forward, self._backward), self.out_of_turn)
        columns = found.columns(self.kit.scanner)
        for start, stop, said in found.rounds():
            for at in range(start, stop, BATCH_ROWS):
                chunk = _Chunk(self, found, columns, slice(at, min(at + BATCH_ROWS, stop)))
                yield chunk.described(payloads)
            for connection, forward, way, placed, time in said:
                connection.emit(forward, way, placed, time)


def _find(values: Numbers, wanted: Numbers) -> tuple[Numbers, Flags]:
    """Where in ascending values each of the wanted is, and whether it is there at all."""
    place = np.searchsorted(values, wanted)
    if not len(values):
        return place, np.zeros(len(wanted), np.bool_)
    place = np.minimum(place, len(values) - 1)
    return place, values[place] == wanted


class _Said(NamedTuple):
    """What a decoder gave."""

    connection: ConnectionRows
    forward: bool
    way: Direction
    placed: list[Placed]
    time: int


class _Block(NamedTuple):
    """What a scanner gave in one go: its matrix, and column by column what it means here."""

    matrix: Numbers
    lane: Numbers
    row: Numbers
    """Of the batch: the one with which the frame was whole."""
    position: Numbers
    offset: Numbers
    key: Numbers
    serial: Numbers


class _Found:
    """What scanner and decoders gave for a batch, in the order in which it was said.

    Connections don't depend on one another, but what a decoder gave must be told between what its
    connection said before and after. So there are rounds: in each, everybody's rows up to the next
    thing that a decoder gave, and then that.
    """

    def __init__(self, present: Present, sides: tuple[_Side, ...], dropped: list[int]) -> None:
        self._present = present
        arrived = present.arrived
        self._dropped = np.zeros(arrived.owners, np.bool_)
        self._dropped[dropped] = True
        blocks: list[_Block] = []
        said: list[tuple[int, int, _Said]] = []
        parts = [(side, part) for side in sides for part in side.parts]
        for serial, (side, part) in enumerate(parts):
            if isinstance(part, Columns):
                blocks.append(self._block(side, part, serial))
            elif part.placed:
                owner = int(side.owners[part.run])
                row = int(arrived.pieces.rows_at(np.array([part.stop - 1]))[0])
                if not self._dropped[owner]:
                    key = owner * len(arrived) + row
                    said.append((key, serial, self._told(side, part, owner, row)))
        if not blocks:
            empty = np.empty(0, np.int64)
            blocks = [_Block(np.empty((0, 0), np.int64), *[empty] * 6)]
        joined = (np.concatenate(each, axis=-1) for each in zip(*blocks, strict=True))
        whole = blocks[0] if len(blocks) == 1 else _Block(*joined)
        self.matrix, self.lane, self.row, self.position, self.offset = whole[:5]
        self._arrange(whole.key, whole.serial, said)
        owners = arrived.lane_owner[self.lane[self.order]]
        self.last = np.full(arrived.owners, NOWHERE)
        """Where each owner's last row is, in order."""
        self.last[owners] = np.arange(len(owners))

    def columns(self, scanner: BulkScanner) -> Callable[[Numbers], Columns]:
        """Some of the rows."""
        names = scanner.frame_names, scanner.frame_layers, scanner.slice_names
        return lambda index: Columns(np.take(self.matrix, index, axis=1), *names)

    def rounds(self) -> Iterator[tuple[int, int, list[_Said]]]:
        """Rows from one place in `order` to another, and what decoders gave behind them."""
        yield from zip(self._starts, self._stops, self._said, strict=True)

    def _block(self, side: _Side, part: Columns, serial: int) -> _Block:
        arrived = self._present.arrived
        matrix, owner = part.rows, side.owners[part.run]
        if self._dropped.any():
            kept = ~self._dropped[owner]
            part = Columns(matrix[:, kept], part.frame_names, part.frame_layers, part.slice_names)
            owner = owner[kept]
        run, offset = part.run, part.offset
        position = side.starts[run] + offset - side.offsets[run]
        row = arrived.pieces.rows_at(position + part.length - 1)
        return _Block(
            part.rows,
            side.lanes[run],
            row,
            position,
            offset + side.bases[run],
            owner * len(arrived) + row,
            np.full(len(run), serial),
        )

    def _told(self, side: _Side, part: Fed, owner: int, row: int) -> _Said:
        connection = self._present.entered(owner)
        way = connection.directions[side.forward]
        time = int(self._present.arrived.time[row])
        return _Said(connection, side.forward, way, part.placed, time)

    def _arrange(self, key: Numbers, serial: Numbers, said: list[tuple[int, int, _Said]]) -> None:
        if not said:
            self.order = np.argsort(key, kind="stable")
            self._starts, self._stops = [0], [len(key)]
            self._said: list[list[_Said]] = [[]]
            return
        said_key, said_serial, _ = zip(*said, strict=True)
        keys = np.append(key, said_key)
        order = np.lexsort((np.append(serial, said_serial), keys))
        is_said = order >= len(key)
        owner = keys[order] // len(self._present.arrived)
        first = np.append(True, owner[1:] != owner[:-1])
        # What decoders gave in a row belongs to one round, which it ends.
        begins = is_said & (first | ~np.append(False, is_said[:-1]))
        passed = np.cumsum(begins)
        heads = np.flatnonzero(first)
        before = (passed - begins)[heads][np.cumsum(first) - 1]
        number = passed - before - is_said
        in_order = np.argsort(number[~is_said], kind="stable")
        self.order = order[~is_said][in_order]
        count = int(number.max()) + 1
        self._stops = np.cumsum(np.bincount(number[~is_said], minlength=count)).tolist()
        self._starts = [0, *self._stops[:-1]]
        self._said = [[] for _ in range(count)]
        for place, which in zip(
            (order[is_said] - len(key)).tolist(), number[is_said].tolist(), strict=True
        ):
            self._said[which].append(said[place][2])


class _Chunk:
    """Rows that become one batch."""

    def __init__(
        self, scan: Scan, found: _Found, columns: Callable[[Numbers], Columns], part: slice
    ) -> None:
        index = found.order[part]
        arrived = scan.arrived
        self._scan = scan
        self._columns = columns(index)
        self._lane, self._offset = found.lane[index], found.offset[index]
        self._position = found.position[index]
        self._time = arrived.time[found.row[index]]
        self._owner = arrived.lane_owner[self._lane]
        self._stays = ~scan.present.over
        self._stays[list(scan.present.objects)] = True
        self._stays[self._owner] |= found.last[self._owner] >= part.stop

    def described(self, payloads: bool) -> pa.RecordBatch:
        """Frames. Violations go to where their connections collect their rows."""
        scan, columns = self._scan, self._columns
        present, pieces = scan.present, scan.arrived.pieces
        rows = FrameRows(
            pieces.array,
            payloads,
            self._owner,
            self._position,
            ~scan.arrived.lane_backward[self._lane],
            columns.frame,
            self._offset,
            columns.length,
            columns.number,
            columns.detail,
            columns.sequence,
            tuple(map(columns.slice, scan.kit.scanner.slice_names)),
        )
        here = np.zeros(scan.arrived.owners, np.bool_)
        here[self._owner] = True
        known = {owner: _reading(present, owner) for owner in present.objects if here[owner]}
        told = scan.kit.describe(
            rows, Readings(known, self._stays, lambda owner: _reading(present, owner))
        )
        batch = self._batch(told, payloads)
        if not told.errors:
            return batch
        right = np.ones(len(rows), np.bool_)
        for place, error in told.errors.items():
            right[place] = False
            way = present.way(int(self._lane[place]))
            layer = int(scan.kit.layers[columns.frame[place]])
            where = (layer, int(self._offset[place]), int(columns.length[place]))
            connection = present.object(int(self._owner[place]))
            connection.violation(way, (*where, int(self._time[place])), error)
        return batch.filter(pa.array(right))

    def _batch(self, told: Told, payloads: bool) -> pa.RecordBatch:
        arrived, kit, count = self._scan.arrived, self._scan.kit, len(told)
        owner, length = pa.array(self._owner), self._columns.length
        behind = self._offset + length - told.payload_end - told.payload_size
        has_payload = told.payload_size != NONE
        columns: dict[str, Any] = {
            "table": pa.repeat(FRAMES, count),
            "node": arrived.nodes.take(owner),
            "connection": arrived.connections.take(owner),
            "direction": WAYS.take(pa.array(arrived.lane_backward[self._lane].astype(np.int8))),
            "layer": pa.array(kit.layers[self._columns.frame].astype(np.int32)),
            "offset": pa.array(self._offset),
            "length": pa.array(length),
            "time": pa.array(self._time),
            "protocol": pa.repeat(kit.name, count),
            "frame": kit.frames.take(pa.array(self._columns.frame)),
            "payload_offset": pa.array(behind, mask=~has_payload),
            "payload_length": pa.array(told.payload_size, mask=~has_payload),
            "sequence": pa.array(told.sequence, mask=told.sequence == NONE),
            "begun_at": pa.array(told.begun_at, mask=told.begun_at == NONE),
        }
        if not payloads:
            for name in OF_MESSAGES:
                columns[name] = pa.nulls(count, ARROW.field(name).type)
        arrays = [
            columns[field.name] if field.name in columns else getattr(told, field.name)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def _reading(present: Present, owner: int) -> Reading:
    reading = present.entered(owner).reading
    assert reading is not None
    return reading
