"""One protocol's connections in one batch: their bytes through its scanner, its columns to rows.

A batch is read in two passes, first all forward directions, then all backward ones: in two of the
protocols the opener's handshake decides how the answers are read. Connections that can't be read in
this way are given to the decoders, row by row. After that the frames of all are put in the order in
which their last bytes were captured, and described.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Flags, Numbers
from crosswire.pipeline.decode.connection_index import ConnectionIndex
from crosswire.pipeline.decode.decoded_connection import WIRE_COLUMNS, DecodedItems, ScannedSoFar
from crosswire.pipeline.decode.frame_table import FrameTable
from crosswire.pipeline.decode.protocols import ColumnarProtocol
from crosswire.pipeline.decode.scanners.fallback import DecoderOutput, scan_and_decode
from crosswire.pipeline.decode.scanners.scanner import (
    DECODER_ONLY,
    HANDSHAKE_END,
    STOP_REASON,
    Columns,
)
from crosswire.wire.contract import Decoder

__all__ = ["BatchScan"]


class _DirectionScan:
    """All directions of one kind, forward or backward, that have bytes in a batch: its runs.

    By run: the lane and owner, where its bytes are, where they are in the stream, and the scanner's
    state; `lacks_peer` where that state may not have what the peer's handshake decided.
    """

    def __init__(
        self,
        columnar: ColumnarProtocol,
        forward: bool,
        lanes: Numbers,
        connections: ConnectionIndex,
    ) -> None:
        pieces = connections.batch.pieces
        self.forward = forward
        self.lanes = lanes
        self.owners = connections.batch.lane_owner[lanes]
        self.starts = pieces.lane_start[lanes]
        self.ends = pieces.lane_stop[lanes]
        self.bases = connections.lane_base[lanes]
        # Scanners and decoders count from where the capture of a direction begins, rows from where
        # the direction does: `bases` is the difference.
        self.offsets = connections.lane_seen[lanes]
        self.states = columnar.scanner.new_states(columnar.roles[0 if forward else 1], len(lanes))
        self.lacks_peer = np.ones(len(lanes), np.bool_)
        for run in np.flatnonzero(connections.lane_known[lanes]).tolist():
            direction = connections.direction(int(lanes[run]))
            state = columnar.state_of(direction)
            if state is not None:
                self.states[run] = state
                # A decoder asks its peer's. The state of a scan is from the batch of the last byte:
                # the peer's handshake may have been completed in one without bytes of this side.
                self.lacks_peer[run] = direction.decoder is None
        self.parts: list[Columns | DecoderOutput] = []
        self.handshake_ends: dict[int, int] = {}
        """By run, for runs with a decoder: it does not keep where its handshake ended."""
        self.fed_to: dict[int, int] = {}
        """By run: how far its decoder has been fed."""

    def handshake_end(self) -> Numbers:
        """By run: where in its stream the handshake ended, NONE if it has not."""
        ends = self.states[:, HANDSHAKE_END].copy()
        for run, end in self.handshake_ends.items():
            ends[run] = end
        return ends


class BatchScan:
    """Reads the bytes of some connections of a batch when it is created: those of `owners` with the
    scanner, those of `irregular` with decoders only.

    `rows` then gives what was found, and `settle` carries the state of the connections that have
    more to come over to the next batch.
    """

    def __init__(
        self,
        columnar: ColumnarProtocol,
        connections: ConnectionIndex,
        owners: Numbers,
        irregular: Numbers,
    ) -> None:
        self.columnar = columnar
        self.connections = connections
        self.batch = connections.batch
        self._owners = owners
        self._settled: set[tuple[bool, int]] = set()
        for owner in owners[~connections.is_new[owners]].tolist():
            connections.with_directions(owner)
        self._forward = self._read(True)
        self._backward = self._read(False)
        # In some new connections the acceptor sent more than its handshake before the opener's
        # handshake was complete. Their directions were read one after the other, as if it had been
        # complete from the start: what was found is dropped, and they are read again row by row.
        self._dropped = np.zeros(connections.batch.owners, np.bool_)
        if columnar.reads_peer_handshake:
            self._dropped[self._out_of_turn()] = True
        for owner in np.flatnonzero(self._dropped).tolist():
            connections.forget(owner)
        again = np.flatnonzero(self._dropped)
        self._by_rows = self._read_by_rows(np.append(irregular, again))

    # Reading.

    def _read(self, forward: bool) -> _DirectionScan:
        columnar, connections, pieces = self.columnar, self.connections, self.batch.pieces
        lanes = self.batch.lanes_of[0 if forward else 1][self._owners]
        lanes = lanes[lanes != NONE]
        with_bytes = lanes[pieces.lane_row[lanes] != NONE]
        side = _DirectionScan(columnar, forward, with_bytes, connections)
        if columnar.reads_peer_handshake and not forward and side.lacks_peer.any():
            self._share_handshakes(side)

        def decoder_of(run: int) -> Decoder:
            side.handshake_ends.setdefault(run, int(side.states[run, HANDSHAKE_END]))
            connection = connections.with_directions(int(side.owners[run]))
            if not forward:
                # The acceptor's decoder is created with the opener's, which must have read as far
                # as the scanner has.
                self._settle_direction(int(side.owners[run]), self._forward)
            return connection.decoder(forward, connection.directions[forward])

        bounds = (side.starts, side.ends, side.offsets)
        for part in scan_and_decode(
            columnar.scanner, pieces.array, *bounds, side.states, decoder_of, cuts=pieces.ends
        ):
            side.parts.append(part)
            if isinstance(part, DecoderOutput):
                side.fed_to[part.run] = part.stop
        return side

    def _read_by_rows(self, owners: Numbers) -> list[tuple[int, int, DecodedItems]]:
        """What the decoders of these connections give; of each, the row and the owner."""
        if not len(owners):
            return []
        return [
            (row, owner, items)
            for row, owner, values in self.batch.rows_of(owners, WIRE_COLUMNS)
            for items in self.connections.get_or_create(owner).read(values)
        ]

    def _share_handshakes(self, side: _DirectionScan) -> None:
        """Give the acceptors' states what their openers' handshakes have decided.

        An opener's state is that of this batch, if it has bytes in it, or that of an earlier one. A
        connection that is not new is here only if its opener's handshake was complete before this
        batch, so that it holds for all of the acceptor's bytes.
        """
        scanner, forward = self.columnar.scanner, self._forward
        runs = np.flatnonzero(side.lacks_peer)
        owners = side.owners[runs]
        peers = scanner.new_states(self.columnar.roles[0], len(runs))
        peer, has_bytes = _find(forward.owners, owners)
        peers[has_bytes] = forward.states[peer[has_bytes]]
        for index in np.flatnonzero(~has_bytes & ~self.connections.is_new[owners]).tolist():
            directions = self.connections.get_or_create(int(owners[index])).directions
            direction = directions.get(True)
            state = None if direction is None else self.columnar.state_of(direction)
            if state is not None:
                peers[index] = state
        states = side.states[runs]
        scanner.share_handshake(states, peers)
        # A direction that only its decoder can read leaves no state to copy from.
        states[peers[:, STOP_REASON] == DECODER_ONLY, STOP_REASON] = DECODER_ONLY
        side.states[runs] = states

    def _out_of_turn(self) -> list[int]:
        """New connections whose acceptor went on before the opener's handshake was complete.

        By owner, the row with which the opener's handshake was complete is compared with the row of
        the acceptor's first byte after its own handshake.
        """
        forward, backward = self._forward, self._backward
        batch, pieces = self.batch, self.batch.pieces
        never = len(batch)
        complete, went_on = np.full((2, batch.owners), never)
        ends = forward.handshake_end()
        runs = np.flatnonzero((forward.offsets == 0) & (ends > 0))
        last = forward.starts[runs] + ends[runs] - 1
        complete[forward.owners[runs]] = pieces.rows_at(last)
        ends = backward.handshake_end()
        next_byte = backward.starts + ends
        runs = np.flatnonzero(
            (backward.offsets == 0) & (ends != NONE) & (next_byte < backward.ends)
        )
        went_on[backward.owners[runs]] = pieces.rows_at(next_byte[runs])
        # Without the end of the acceptor's handshake there is nothing to compare: read by rows.
        went_on[backward.owners[ends == NONE]] = NONE
        early = (went_on < complete) & self.connections.is_new
        return self._owners[early[self._owners]].tolist()  # type: ignore[no-any-return]

    # Carrying over.

    def settle(self) -> None:
        """Note what was read in the objects of the connections that have one, or will need one.

        Connections that began and ended within the batch, as most do, never have one.
        """
        connections, batch = self.connections, self.batch
        needed = ~connections.over
        needed[list(connections.objects)] = True
        needed[self._dropped] = False
        frames = self._frames()
        ends, names = batch.lane_end
        sizes = batch.pieces.lane_stop - batch.pieces.lane_start
        last_seqs = batch.seq[batch.last_rows]
        for owner in self._owners[needed[self._owners]].tolist():
            connection = connections.with_directions(owner)
            self._settle_direction(owner, self._forward)
            self._settle_direction(owner, self._backward)
            connection.seq = int(last_seqs[owner])
            connection.opened |= bool(batch.opened[owner])
            for forward, lanes in zip((True, False), batch.lanes_of, strict=True):
                lane = lanes[owner]
                if lane == NONE:
                    continue
                direction = connection.directions[forward]
                direction.seen += int(sizes[lane])
                direction.frames += int(frames[lane])
                direction.last_time = max(direction.last_time, int(batch.lane_last_time[lane]))
                if ends[lane] != NONE:
                    direction.end = names[ends[lane]]

    def _frames(self) -> Numbers:
        """By lane: how many frames were found in it."""
        frames = np.zeros(len(self.batch.lane_owner), np.int64)
        for side in (self._forward, self._backward):
            for part in side.parts:
                if isinstance(part, Columns):
                    frames += np.bincount(side.lanes[part.run], minlength=len(frames))
                else:
                    frames[side.lanes[part.run]] += part.frames
        return frames

    def _settle_direction(self, owner: int, side: _DirectionScan) -> None:
        """Put the decoder of a direction where its run ended, or note the scanner's state.

        Once for each direction, or the bytes of a handshake would be noted twice.
        """
        run, has_bytes = (int(each[0]) for each in _find(side.owners, np.array([owner])))
        if not has_bytes or (side.forward, run) in self._settled:
            return
        self._settled.add((side.forward, run))
        scanner, pieces = self.columnar.scanner, self.batch.pieces
        direction = self.connections.objects[owner].directions[side.forward]
        start, end, offset = int(side.starts[run]), int(side.ends[run]), int(side.offsets[run])
        if direction.decoder is not None:
            if side.fed_to.get(run) != end:
                whole = pieces.array[start:end]
                scanner.hand_over(direction.decoder, side.states[run], whole, offset)
            return
        # Without a decoder it is enough to keep the state and the bytes of the handshake, from
        # which a decoder can be created when one is needed; often none ever is.
        known = direction.scanned
        opening = b"" if known is None else known.opening
        if known is None or known.state[HANDSHAKE_END] == NONE:
            handshake_end = int(side.states[run, HANDSHAKE_END])
            stop = end if handshake_end == NONE else start + handshake_end - offset
            opening += pieces.array[start:stop].tobytes()
        direction.scanned = ScannedSoFar(scanner, side.states[run].copy(), opening)

    # Rows.

    def rows(self, payloads: bool) -> Iterator[pa.RecordBatch]:
        """Rows of frames, each connection's in the order in which its frames were complete.

        Rows of violations, and of bytes in no frame, are added to what the connections' objects
        collect.
        """
        table = FrameTable(self.columnar, self.connections, self.batch.pieces.array)
        serial = 0
        for side in (self._forward, self._backward):
            for part in side.parts:
                self._add(table, side, part, serial)
                serial += 1
        for row, owner, items in self._by_rows:
            self._add_items(table, owner, items, row, serial)
            serial += 1
        yield from table.batches(payloads=payloads)

    def _add(
        self, table: FrameTable, side: _DirectionScan, part: Columns | DecoderOutput, serial: int
    ) -> None:
        batch = self.batch
        if isinstance(part, DecoderOutput):
            owner = int(side.owners[part.run])
            if part.placed and not self._dropped[owner]:
                row = int(batch.pieces.rows_at(np.array([part.stop - 1]))[0])
                items = DecodedItems(side.forward, part.placed)
                self._add_items(table, owner, items, row, serial)
            return
        if self._dropped.any():
            kept = part.rows[:, ~self._dropped[side.owners[part.run]]]
            part = Columns(kept, part.frame_names, part.frame_layers, part.slice_names)
        run = part.run
        owners = side.owners[run]
        position = side.starts[run] + part.offset - side.offsets[run]
        rows = batch.pieces.rows_at(position + part.length - 1)
        table.add_columns(
            part,
            owner=owners,
            forward=side.forward,
            time=batch.time[rows],
            position=position,
            base=side.bases[run],
            key=owners * len(batch) + rows,
            serial=serial,
        )

    def _add_items(
        self, table: FrameTable, owner: int, items: DecodedItems, row: int, serial: int
    ) -> None:
        time, key = int(self.batch.time[row]), owner * len(self.batch) + row
        table.add_items(owner, items, time=time, key=key, serial=serial)


def _find(values: Numbers, wanted: Numbers) -> tuple[Numbers, Flags]:
    """The index of each wanted value in ascending values, and whether it is there at all."""
    index = np.searchsorted(values, wanted)
    if not len(values):
        return index, np.zeros(len(wanted), np.bool_)
    index = np.minimum(index, len(values) - 1)
    return index, values[index] == wanted
