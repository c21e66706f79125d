"""One protocol's connections in one batch: bytes through its scanner, what it finds to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode import describe_of
from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.arrow_batches import BATCH_ROWS
from crosswire.pipeline.decode.connection_index import DIRECTION_NAMES, ConnectionIndex
from crosswire.pipeline.decode.connection_rows import ConnectionRows, Direction, Scanned
from crosswire.pipeline.decode.contract import Describe, DescriptionColumns, FrameRows, Readings
from crosswire.pipeline.decode.readings.contract import Reading
from crosswire.pipeline.decode.scanners.fallback import DecoderOutput, scan_and_decode
from crosswire.pipeline.decode.scanners.scanner import (
    DECODER_ONLY,
    HANDSHAKE_END,
    STOP_REASON,
    BulkScanner,
    Columns,
)
from crosswire.pipeline.decode.wire_batch import NOWHERE
from crosswire.pipeline.tables.decoded import ARROW, FRAMES, OF_MESSAGES
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Decoder, Placed

__all__ = ["Kit", "Scan", "kit_of"]


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

    def state_of(self, direction: Direction) -> Numbers | None:
        """Where a direction is read on; None if that is its first byte."""
        if direction.decoder is not None:
            return self.scanner.state_of(direction.decoder)
        return None if direction.scanned is None else direction.scanned.state

    def has_opened(self, direction: Direction | None) -> bool:
        state = None if direction is None else self.state_of(direction)
        return state is not None and bool(state[HANDSHAKE_END] != NONE)


@cache
def kit_of(name: str | None) -> Kit | None:
    """None for what no scanner reads."""
    if name is None or name not in PROTOCOL_NAMES:
        return None
    module = import_module(f"crosswire.pipeline.decode.scanners.{name}")
    scanner: BulkScanner = module.SCANNER()
    roles = protocol(name).roles
    return Kit(
        name,
        (roles[0], roles[-1]),
        scanner,
        describe_of(name),
        pa.array(scanner.frame_names),
        np.array(scanner.frame_layers, np.int64),
        scanner.reads_peer_handshake,
    )


class _DirectionScan:
    """All directions of one kind, forward or backward, that have bytes in a batch."""

    def __init__(self, kit: Kit, forward: bool, lanes: Numbers, present: ConnectionIndex) -> None:
        pieces = present.arrived.pieces
        self.forward = forward
        self.lanes = lanes
        self.owners = present.arrived.lane_owner[lanes]
        self.starts = pieces.lane_start[lanes]
        self.ends = pieces.lane_stop[lanes]
        self.bases = present.lane_base[lanes]
        # A decoder counts from where the capture begins.
        self.offsets = present.lane_seen[lanes]
        self.states = kit.scanner.new_states(kit.roles[0 if forward else 1], len(lanes))
        self.fresh = np.ones(len(lanes), np.bool_)
        for run in np.flatnonzero(present.lane_known[lanes]).tolist():
            state = kit.state_of(present.direction(int(lanes[run])))
            if state is not None:
                self.states[run] = state
                self.fresh[run] = False
        self.parts: list[Columns | DecoderOutput] = []
        self.opened: dict[int, int] = {}
        """Where the handshake ended, of runs that a decoder was asked for."""
        self.fed_to: dict[int, int] = {}

    def opened_at(self) -> Numbers:
        """Where in its direction each run's handshake ended."""
        opened = self.states[:, HANDSHAKE_END].copy()
        for run, index in self.opened.items():
            opened[run] = index
        return opened


class Scan:
    """Reads the bytes at once; `rows` then gives what they say, and `settle` leaves everybody of
    whom there will be more where they are.

    `out_of_turn` are connections, all new, in which the accepting side spoke before its words had a
    meaning. Nothing is known of them then.
    """

    def __init__(self, kit: Kit, present: ConnectionIndex, owners: Numbers) -> None:
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

    def _read(self, forward: bool) -> _DirectionScan:
        kit, present, pieces = self.kit, self.present, self.arrived.pieces
        lanes = self.arrived.lanes_of[0 if forward else 1][self._owners]
        lanes = lanes[lanes != NOWHERE]
        side = _DirectionScan(kit, forward, lanes[pieces.lane_row[lanes] != NOWHERE], present)
        if kit.agrees and not forward and side.fresh.any():
            self._share(side)

        def decoder_of(run: int) -> Decoder:
            side.opened.setdefault(run, int(side.states[run, HANDSHAKE_END]))
            connection = present.entered(int(side.owners[run]))
            if not forward:
                # Its decoder is made with the other one at hand.
                self._leave(int(side.owners[run]), self._forward)
            return connection.decoder(forward, connection.directions[forward])

        bounds = (side.starts, side.ends, side.offsets)
        for part in scan_and_decode(
            kit.scanner, pieces.array, *bounds, side.states, decoder_of, cuts=pieces.ends
        ):
            side.parts.append(part)
            if isinstance(part, DecoderOutput):
                side.fed_to[part.run] = part.stop
        return side

    def _share(self, side: _DirectionScan) -> None:
        """Tell those who answer what the others have brought up."""
        kit, forward = self.kit, self._forward
        runs = np.flatnonzero(side.fresh)
        owners = side.owners[runs]
        peers = kit.scanner.new_states(kit.roles[0], len(runs))
        peer, spoke = _find(forward.owners, owners)
        peers[spoke] = forward.states[peer[spoke]]
        for index in np.flatnonzero(~spoke & ~self.present.is_new[owners]).tolist():
            direction = self.present.object(int(owners[index])).directions.get(True)
            state = None if direction is None else kit.state_of(direction)
            if state is not None:
                peers[index] = state
        states = side.states[runs]
        kit.scanner.share_handshake(states, peers)
        # Who can't be read in columns can't say what was agreed either.
        states[peers[:, STOP_REASON] == DECODER_ONLY, STOP_REASON] = DECODER_ONLY
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
                direction = connection.directions[forward]
                direction.seen += int(sizes[lane])
                direction.frames += int(frames[lane])
                direction.last_time = max(direction.last_time, int(arrived.lane_last_time[lane]))
                if ends[lane] != NOWHERE:
                    direction.end = names[ends[lane]]

    def _frames(self) -> Numbers:
        """How many each lane has in columns."""
        frames = np.zeros(len(self.arrived.lane_owner), np.int64)
        for side in (self._forward, self._backward):
            for part in side.parts:
                if isinstance(part, Columns):
                    frames += np.bincount(side.lanes[part.run], minlength=len(frames))
        return frames

    def _leave(self, owner: int, side: _DirectionScan) -> None:
        """Leave a direction of an object where its run ended."""
        run, spoke = (int(each[0]) for each in _find(side.owners, np.array([owner])))
        if not spoke or (side.forward, run) in self._left:
            return
        self._left.add((side.forward, run))
        scanner, pieces = self.kit.scanner, self.arrived.pieces
        direction = self.present.objects[owner].directions[side.forward]
        start, end, offset = int(side.starts[run]), int(side.ends[run]), int(side.offsets[run])
        if direction.decoder is not None:
            if side.fed_to.get(run) != end:
                whole = pieces.array[start:end]
                scanner.hand_over(direction.decoder, side.states[run], whole, offset)
            return
        known = direction.scanned
        opening = b"" if known is None else known.opening
        if known is None or known.state[HANDSHAKE_END] == NONE:
            opened = int(side.states[run, HANDSHAKE_END])
            stop = end if opened == NONE else start + opened - offset
            opening += pieces.array[start:stop].tobytes()
        direction.scanned = Scanned(scanner, side.states[run].copy(), opening)

    # Rows.

    def rows(self, payloads: bool) -> Iterator[pa.RecordBatch]:
        """What was said, connection by connection in the order in which it was said. What decoders
        gave goes to where the connections collect their rows."""
        found = _ScanResults(self.present, (self._forward, self._backward), self.out_of_turn)
        columns = found.columns(self.kit.scanner)
        for start, stop, decoded in found.rounds():
            for at in range(start, stop, BATCH_ROWS):
                chunk = _Chunk(self, found, columns, slice(at, min(at + BATCH_ROWS, stop)))
                yield chunk.described(payloads)
            for connection, forward, direction, placed, time in decoded:
                connection.emit(forward, direction, placed, time)


def _find(values: Numbers, wanted: Numbers) -> tuple[Numbers, Flags]:
    """Where in ascending values each of the wanted is, and whether it is there at all."""
    index = np.searchsorted(values, wanted)
    if not len(values):
        return index, np.zeros(len(wanted), np.bool_)
    index = np.minimum(index, len(values) - 1)
    return index, values[index] == wanted


class _DecodedFrames(NamedTuple):
    """What a decoder gave."""

    connection: ConnectionRows
    forward: bool
    direction: Direction
    placed: list[Placed]
    time: int


class _ScannedBlock(NamedTuple):
    """What a scanner gave in one go: its matrix, and column by column what it means here."""

    matrix: Numbers
    lane: Numbers
    row: Numbers
    """Of the batch: the one with which the frame was whole."""
    position: Numbers
    offset: Numbers
    key: Numbers
    serial: Numbers


class _ScanResults:
    """What scanner and decoders gave for a batch, in the order in which it was said.

    Connections don't depend on one another, but what a decoder gave must be told between what its
    connection said before and after. So there are rounds: in each, everybody's rows up to the next
    thing that a decoder gave, and then that.
    """

    def __init__(
        self, present: ConnectionIndex, sides: tuple[_DirectionScan, ...], dropped: list[int]
    ) -> None:
        self._present = present
        arrived = present.arrived
        self._dropped = np.zeros(arrived.owners, np.bool_)
        self._dropped[dropped] = True
        blocks: list[_ScannedBlock] = []
        decoded: list[tuple[int, int, _DecodedFrames]] = []
        parts = [(side, part) for side in sides for part in side.parts]
        for serial, (side, part) in enumerate(parts):
            if isinstance(part, Columns):
                blocks.append(self._block(side, part, serial))
            elif part.placed:
                owner = int(side.owners[part.run])
                row = int(arrived.pieces.rows_at(np.array([part.stop - 1]))[0])
                if not self._dropped[owner]:
                    key = owner * len(arrived) + row
                    decoded.append((key, serial, self._decoded_rows(side, part, owner, row)))
        if not blocks:
            empty = np.empty(0, np.int64)
            blocks = [_ScannedBlock(np.empty((0, 0), np.int64), *[empty] * 6)]
        joined = (np.concatenate(each, axis=-1) for each in zip(*blocks, strict=True))
        whole = blocks[0] if len(blocks) == 1 else _ScannedBlock(*joined)
        self.matrix, self.lane, self.row, self.position, self.offset = whole[:5]
        self._arrange(whole.key, whole.serial, decoded)
        owners = arrived.lane_owner[self.lane[self.order]]
        self.last = np.full(arrived.owners, NOWHERE)
        """Where each owner's last row is, in order."""
        self.last[owners] = np.arange(len(owners))

    def columns(self, scanner: BulkScanner) -> Callable[[Numbers], Columns]:
        """Some of the rows."""
        names = scanner.frame_names, scanner.frame_layers, scanner.slice_names
        return lambda index: Columns(np.take(self.matrix, index, axis=1), *names)

    def rounds(self) -> Iterator[tuple[int, int, list[_DecodedFrames]]]:
        """Rows from one place in `order` to another, and what decoders gave behind them."""
        yield from zip(self._starts, self._stops, self._decoded, strict=True)

    def _block(self, side: _DirectionScan, part: Columns, serial: int) -> _ScannedBlock:
        arrived = self._present.arrived
        matrix, owner = part.rows, side.owners[part.run]
        if self._dropped.any():
            kept = ~self._dropped[owner]
            part = Columns(matrix[:, kept], part.frame_names, part.frame_layers, part.slice_names)
            owner = owner[kept]
        run, offset = part.run, part.offset
        position = side.starts[run] + offset - side.offsets[run]
        row = arrived.pieces.rows_at(position + part.length - 1)
        return _ScannedBlock(
            part.rows,
            side.lanes[run],
            row,
            position,
            offset + side.bases[run],
            owner * len(arrived) + row,
            np.full(len(run), serial),
        )

    def _decoded_rows(
        self, side: _DirectionScan, part: DecoderOutput, owner: int, row: int
    ) -> _DecodedFrames:
        connection = self._present.entered(owner)
        direction = connection.directions[side.forward]
        time = int(self._present.arrived.time[row])
        return _DecodedFrames(connection, side.forward, direction, part.placed, time)

    def _arrange(
        self, key: Numbers, serial: Numbers, decoded: list[tuple[int, int, _DecodedFrames]]
    ) -> None:
        if not decoded:
            self.order = np.argsort(key, kind="stable")
            self._starts, self._stops = [0], [len(key)]
            self._decoded: list[list[_DecodedFrames]] = [[]]
            return
        decoded_key, decoded_serial, _ = zip(*decoded, strict=True)
        keys = np.append(key, decoded_key)
        order = np.lexsort((np.append(serial, decoded_serial), keys))
        is_decoded = order >= len(key)
        owner = keys[order] // len(self._present.arrived)
        first = np.append(True, owner[1:] != owner[:-1])
        # What decoders gave in a row belongs to one round, which it ends.
        begins = is_decoded & (first | ~np.append(False, is_decoded[:-1]))
        passed = np.cumsum(begins)
        heads = np.flatnonzero(first)
        before = (passed - begins)[heads][np.cumsum(first) - 1]
        number = passed - before - is_decoded
        in_order = np.argsort(number[~is_decoded], kind="stable")
        self.order = order[~is_decoded][in_order]
        count = int(number.max()) + 1
        self._stops = np.cumsum(np.bincount(number[~is_decoded], minlength=count)).tolist()
        self._starts = [0, *self._stops[:-1]]
        self._decoded = [[] for _ in range(count)]
        for index, which in zip(
            (order[is_decoded] - len(key)).tolist(), number[is_decoded].tolist(), strict=True
        ):
            self._decoded[which].append(decoded[index][2])


class _Chunk:
    """Rows that become one batch."""

    def __init__(
        self, scan: Scan, found: _ScanResults, columns: Callable[[Numbers], Columns], part: slice
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
        description = scan.kit.describe(
            rows, Readings(known, self._stays, lambda owner: _reading(present, owner))
        )
        batch = self._batch(description, payloads)
        if not description.errors:
            return batch
        right = np.ones(len(rows), np.bool_)
        for index, error in description.errors.items():
            right[index] = False
            direction = present.direction(int(self._lane[index]))
            layer = int(scan.kit.layers[columns.frame[index]])
            where = (layer, int(self._offset[index]), int(columns.length[index]))
            connection = present.object(int(self._owner[index]))
            connection.violation(direction, (*where, int(self._time[index])), error)
        return batch.filter(pa.array(right))

    def _batch(self, description: DescriptionColumns, payloads: bool) -> pa.RecordBatch:
        arrived, kit, count = self._scan.arrived, self._scan.kit, len(description)
        owner, length = pa.array(self._owner), self._columns.length
        end = self._offset + length - description.payload_end - description.payload_size
        has_payload = description.payload_size != NONE
        columns: dict[str, Any] = {
            "table": pa.repeat(FRAMES, count),
            "node": arrived.nodes.take(owner),
            "connection": arrived.connections.take(owner),
            "direction": DIRECTION_NAMES.take(
                pa.array(arrived.lane_backward[self._lane].astype(np.int8))
            ),
            "layer": pa.array(kit.layers[self._columns.frame].astype(np.int32)),
            "offset": pa.array(self._offset),
            "length": pa.array(length),
            "time": pa.array(self._time),
            "protocol": pa.repeat(kit.name, count),
            "frame": kit.frames.take(pa.array(self._columns.frame)),
            "payload_offset": pa.array(end, mask=~has_payload),
            "payload_length": pa.array(description.payload_size, mask=~has_payload),
            "sequence": pa.array(description.sequence, mask=description.sequence == NONE),
            "begun_at": pa.array(description.begun_at, mask=description.begun_at == NONE),
        }
        if not payloads:
            for name in OF_MESSAGES:
                columns[name] = pa.nulls(count, ARROW.field(name).type)
        arrays = [
            columns[field.name] if field.name in columns else getattr(description, field.name)
            for field in ARROW
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def _reading(present: ConnectionIndex, owner: int) -> Reading:
    reading = present.entered(owner).reading
    assert reading is not None
    return reading
