"""From bytes to frames: bronze.wire through the product's own decoders, in one crossing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as Spark's users know it

from crosswire.errors import DecoderStateError, FrameError, InvalidInput
from crosswire.lake.schemas import DATA, FIN, FORWARD, GAP, LOST, OPEN, RESET
from crosswire.pipeline.batches import Batches
from crosswire.pipeline.protocols import reading_of
from crosswire.pipeline.protocols.contract import TLS, Described, Reading
from crosswire.pipeline.tables.decoded import ARROW, COLUMNS, DIRECTIONS, FRAMES, VIOLATIONS
from crosswire.wire import protocol
from crosswire.wire.contract import Decoder, Encrypted, Gap, Placed, Unsynchronized

__all__ = ["WANTED", "ConnectionRows", "decode"]

WANTED: Final = (
    "node",
    "connection",
    "seq",
    "direction",
    "kind",
    "offset",
    "length",
    "time",
    "data",
    "late",
    "protocol",
    "listener",
    "connector_address",
    "connector_port",
    "acceptor_address",
    "acceptor_port",
)
_HANDSHAKE_FRAMES: Final = 8
_OUT_OF_FRAME: Final = (Gap, Unsynchronized, Encrypted)
_NOT_A_MESSAGE: Final = (None,) * 6


def decode(wire: DataFrame, *, payloads: bool = True, arranged: bool = False) -> DataFrame:
    """bronze.wire → rows of frames, violations and directions (see `tables.decoded`).

    A connection's rows go to one task, in order; a task holds one connection at a time. Without
    `payloads` what messages carry stays behind. `arranged`: the rows come straight from the
    reassembly, which has them so already.
    """
    rows = wire.where(F.col("kind") != LOST).select(*WANTED)
    if not arranged:
        rows = rows.repartition("node", "connection").sortWithinPartitions(
            "node", "connection", "seq"
        )

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        collected = Batches(ARROW)
        connection: ConnectionRows | None = None
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in WANTED]
            for row in zip(*columns, strict=True):
                if connection is None or (row[1], row[0]) != connection.key:
                    if connection is not None:
                        connection.finish()
                    connection = ConnectionRows(row, collected, payloads=payloads)
                connection.add(row)
                if collected.full:
                    yield collected.take()
        if connection is not None:
            connection.finish()
        yield collected.take()

    return rows.mapInArrow(run, COLUMNS)


class _Direction:
    """What is known of one direction; `base` is where in it the capture begins."""

    def __init__(self, name: str, first_time: int, base: int, late: bool) -> None:
        self.name = name
        self.first_time = self.last_time = first_time
        self.base = base
        self.late = late
        self.seen = 0
        self.gaps = 0
        self.frames = 0
        self.end: str | None = None
        self.decoder: Decoder | None = None

    @property
    def due(self) -> int:
        return self.base + self.seen


class _DirectionState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of a direction in `ConnectionRows.dump()`."""

    name: str
    first_time: int
    last_time: int
    base: int
    late: bool
    seen: int
    gaps: int
    frames: int
    end: str | None
    decoder: bytes | None


class _ConnectionState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `ConnectionRows.dump()`."""

    version: int
    ends: tuple[str | None, str | None, int | None, str | None, int | None]
    protocol: str | None
    seq: int
    opened: bool
    directions: list[_DirectionState]
    reading: bytes | None


_STATE: Final = msgspec.msgpack.Decoder(_ConnectionState)
_STATE_VERSION: Final = 1


class ConnectionRows:
    """Turns the rows of one connection, given in order, into rows of `tables.decoded`."""

    def __init__(self, first: tuple[Any, ...], collected: Batches, *, payloads: bool) -> None:
        self.key = (first[1], first[0])
        self._ends = first[11:16]
        self._protocol: str | None = first[10]
        self._collected = collected
        self._payloads = payloads
        self._seq = -1
        self._opened = False
        self._directions: dict[bool, _Direction] = {}
        self._reading: Reading | None = None
        if self._protocol is not None and self._protocol != TLS:
            self._reading = reading_of(self._protocol)()

    def add(self, row: tuple[Any, ...]) -> None:
        _, name, seq, direction, kind, offset, length, time, data, late = row[:10]
        if seq <= self._seq:
            raise InvalidInput(f"rows of connection {name} are there twice, or out of order")
        self._seq = seq
        forward = direction == FORWARD
        way = self._directions.get(forward)
        if way is None:
            way = self._directions[forward] = _Direction(
                direction, time, offset, bool(late) or offset > 0
            )
        way.last_time = max(way.last_time, time)
        if kind == OPEN:
            self._opened = True
        elif kind in (FIN, RESET):
            way.end = kind
        if kind not in (DATA, GAP):
            return
        if offset < way.due:
            raise InvalidInput(f"rows of connection {name} overlap at byte {offset}")
        if offset > way.due:
            self._skip(forward, way, offset - way.due, time)
        if kind == GAP:
            self._skip(forward, way, length, time)
        else:
            self._feed(forward, way, data, time)

    @property
    def is_over(self) -> bool:
        """Both sides ended it, or one broke it off."""
        ends = [way.end for way in self._directions.values()]
        return RESET in ends or ends.count(FIN) == 2

    @property
    def is_closed(self) -> bool:
        """Either direction has ended for itself."""
        ways = self._directions.values()
        return len(ways) == 2 and all(way.end is not None for way in ways)

    @property
    def last_time(self) -> int:
        return max(way.last_time for way in self._directions.values())

    def dump(self) -> bytes:
        """The whole state between two rows, to be given to `load`: small, versioned."""
        directions = [
            _DirectionState(
                way.name,
                way.first_time,
                way.last_time,
                way.base,
                way.late,
                way.seen,
                way.gaps,
                way.frames,
                way.end,
                None if way.decoder is None else way.decoder.dump(),
            )
            for way in self._directions.values()
        ]
        return msgspec.msgpack.encode(
            _ConnectionState(
                _STATE_VERSION,
                self._ends,
                self._protocol,
                self._seq,
                self._opened,
                directions,
                None if self._reading is None else self._reading.dump(),
            )
        )

    @classmethod
    def load(
        cls, key: tuple[str, str], state: bytes, collected: Batches, *, payloads: bool
    ) -> ConnectionRows:
        """Goes on where `dump` was called; `key` is connection and node.

        Raises DecoderStateError.
        """
        try:
            saved = _STATE.decode(state)
        except msgspec.MsgspecError as error:
            raise DecoderStateError(f"state of a connection is damaged: {error}") from None
        if saved.version != _STATE_VERSION:
            raise DecoderStateError(
                f"state of a connection has version {saved.version}, this is {_STATE_VERSION}"
            )
        connection, node = key
        nothing = (None,) * 8
        first = (node, connection, *nothing, saved.protocol, *saved.ends)
        made = cls(first, collected, payloads=payloads)
        made._seq, made._opened = saved.seq, saved.opened
        for each in saved.directions:
            way = _Direction(each.name, each.first_time, each.base, each.late)
            way.last_time, way.seen, way.gaps = each.last_time, each.seen, each.gaps
            way.frames, way.end = each.frames, each.end
            made._directions[each.name == FORWARD] = way
        # The other direction's decoder is made with the opener's at hand.
        for each in sorted(saved.directions, key=lambda each: each.name != FORWARD):
            if each.decoder is not None:
                forward = each.name == FORWARD
                made._decoder(forward, made._directions[forward]).load(each.decoder)
        if made._reading is not None and saved.reading is not None:
            made._reading.load(saved.reading)
        return made

    def finish(self) -> None:
        """The connection has no more rows."""
        for forward, way in self._directions.items():
            if way.decoder is not None:
                self._emit(forward, way, way.decoder.feed(b""), way.last_time)
            self._summarize(way)

    # Bytes.

    def _feed(self, forward: bool, way: _Direction, data: bytes, time: int) -> None:
        start = way.due
        way.seen += len(data)
        if self._protocol is None:
            return
        if self._protocol == TLS:
            self._place(forward, way, start, len(data), Encrypted(), time)
            return
        decoder = self._decoder(forward, way)
        self._emit(forward, way, decoder.feed(data), time)
        # At the start the other side may have been waiting for what this one just said.
        other = self._directions.get(not forward)
        if other is not None and other.decoder is not None and other.frames < _HANDSHAKE_FRAMES:
            self._emit(not forward, other, other.decoder.feed(b""), time)

    def _skip(self, forward: bool, way: _Direction, count: int, time: int) -> None:
        start = way.due
        way.seen += count
        way.gaps += count
        if self._protocol is None:
            return
        if self._protocol == TLS:
            self._place(forward, way, start, count, Gap(), time)
            return
        self._emit(forward, way, self._decoder(forward, way).skip(count), time)

    def _decoder(self, forward: bool, way: _Direction) -> Decoder:
        """The accepting side is read with the other decoder at hand: it may need what it said."""
        if way.decoder is None:
            assert self._protocol is not None
            entry = protocol(self._protocol)
            if forward:
                way.decoder = entry.decoder(entry.roles[0], late=way.late)
            else:
                opener = self._directions.get(True)
                if opener is None:
                    opener = _Direction(FORWARD, way.first_time, 0, way.late)
                    self._directions[True] = opener
                peer = self._decoder(True, opener)
                way.decoder = entry.decoder(entry.roles[-1], late=way.late, peer=peer)
        return way.decoder

    # Rows.

    def _emit(self, forward: bool, way: _Direction, placed: list[Placed], time: int) -> None:
        base = way.base
        for offset, length, item in placed:
            if isinstance(item, FrameError):
                self._refuse(forward, way, base + offset, length, 0, item, time)
            else:
                way.frames += 1
                self._place(forward, way, base + offset, length, item, time)

    def _place(
        self, forward: bool, way: _Direction, offset: int, length: int, frame: Any, time: int
    ) -> None:
        if isinstance(frame, _OUT_OF_FRAME):
            if not length:
                return
            self._row(way, offset, length, 0, frame.frame_name, Described(frame.fields()), time)
            if self._reading is not None and not isinstance(frame, Encrypted):
                self._reading.interrupt(forward)
            return
        assert self._reading is not None
        try:
            described = self._reading.describe(forward, frame, offset, length)
        except FrameError as error:
            self._refuse(forward, way, offset, length, frame.layer, error, time)
            return
        self._row(way, offset, length, frame.layer, frame.frame_name, described, time)

    def _row(
        self,
        way: _Direction,
        offset: int,
        length: int,
        layer: int,
        name: str,
        described: Described,
        time: int,
    ) -> None:
        size = described.payload_size
        payload = described.payload if self._payloads else None
        properties = described.properties
        connection, node = self.key
        self._collected.add(
            (
                FRAMES,
                node,
                connection,
                way.name,
                layer,
                offset,
                length,
                time,
                self._protocol,
                name,
                described.identifier,
                described.kind,
                described.destination,
                described.status,
                described.sequence,
                None if size is None else offset + length - described.payload_end - size,
                size,
                _json(described.fields),
                described.begun_at,
                described.content_type,
                None if properties is None else _json(properties),
                described.reply_to,
                described.message_id,
                payload,
            ),
            0 if payload is None else len(payload),
        )

    def _refuse(
        self,
        forward: bool,
        way: _Direction,
        offset: int,
        length: int,
        layer: int,
        error: FrameError,
        time: int,
    ) -> None:
        if self._reading is not None:
            self._reading.interrupt(forward)
        place = (layer, offset, length, time)
        self._special(VIOLATIONS, way, place, error.code, {"reason": error.reason})

    def _summarize(self, way: _Direction) -> None:
        decoder = way.decoder
        listener, *addresses = self._ends
        names = ("connector_address", "connector_port", "acceptor_address", "acceptor_port")
        summary = {
            "listener": listener,
            **dict(zip(names, addresses, strict=True)),
            "opened": self._opened,
            "late": way.late,
            "first_time": way.first_time,
            "gaps": way.gaps,
            "tail": 0 if decoder is None else decoder.pending,
            "unread": 0 if decoder is None else decoder.unread,
        }
        place = (0, way.base, way.seen, way.last_time)
        self._special(DIRECTIONS, way, place, way.end, summary)

    def _special(
        self,
        table: str,
        way: _Direction,
        place: tuple[int, int, int, int],
        status: str | None,
        fields: dict[str, Any],
    ) -> None:
        connection, node = self.key
        head = (table, node, connection, way.name, *place, self._protocol)
        nothing = (None, None, None, None)
        tail = (None, None, None, _json(fields), *_NOT_A_MESSAGE)
        self._collected.add((*head, *nothing, status, *tail))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
