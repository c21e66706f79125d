"""One connection, row by row: its bytes through the decoders, its frames into rows.

What is known of a connection lives here, whoever reads it: row by row, as `ConnectionRows.add`
does, or many connections at once with the columnar scanners, as `columnar` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from crosswire.errors import DecoderStateError, FrameError, InvalidInput
from crosswire.lake.schemas import DATA, FIN, FORWARD, GAP, OPEN, RESET
from crosswire.pipeline.batches import Batches
from crosswire.pipeline.protocols import reading_of
from crosswire.pipeline.protocols.contract import TLS, Described, Reading, json_text
from crosswire.pipeline.tables.decoded import DIRECTIONS, FRAMES, VIOLATIONS
from crosswire.wire import protocol
from crosswire.wire.contract import Decoder, Encrypted, Gap, Placed, Unsynchronized

if TYPE_CHECKING:
    from crosswire.wire.bulk import BulkScanner, Numbers

__all__ = ["MOST_OPEN", "WANTED", "ConnectionRows", "Direction", "Scanned"]

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
MOST_OPEN: Final = 4096
"""So many connections are held ready to go on; of more, only what it takes to begin again."""
_HANDSHAKE_FRAMES: Final = 8
_OUT_OF_FRAME: Final = (Gap, Unsynchronized, Encrypted)
_NOT_A_MESSAGE: Final = (None,) * 6


class Scanned(NamedTuple):
    """How far a scanner has read a direction from its first byte on: all that a decoder must be
    told to go on from there. `opening` are the bytes of the handshake."""

    scanner: BulkScanner
    state: Numbers
    opening: bytes

    def leave(self, decoder: Decoder) -> None:
        self.scanner.leave(decoder, self.state, np.frombuffer(self.opening, np.uint8), 0)


class Direction:
    """What is known of one direction; `base` is where in it the capture begins.

    Where a scanner reads it, there is no decoder until somebody asks for one.
    """

    __slots__ = (
        "base",
        "decoder",
        "end",
        "first_time",
        "frames",
        "gaps",
        "last_time",
        "late",
        "name",
        "scanned",
        "seen",
    )

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
        self.scanned: Scanned | None = None

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
        self.protocol: str | None = first[10]
        self._collected = collected
        self._payloads = payloads
        self.seq = -1
        self.opened = False
        self.directions: dict[bool, Direction] = {}
        self.reading: Reading | None = None
        if self.protocol is not None and self.protocol != TLS:
            self.reading = reading_of(self.protocol)()

    def add(self, row: tuple[Any, ...]) -> None:
        _, name, seq, direction, kind, offset, length, time, data, late = row[:10]
        if seq <= self.seq:
            raise InvalidInput(f"rows of connection {name} are there twice, or out of order")
        self.seq = seq
        forward = direction == FORWARD
        way = self.directions.get(forward)
        if way is None:
            way = self.directions[forward] = Direction(
                direction, time, offset, bool(late) or offset > 0
            )
        way.last_time = max(way.last_time, time)
        if kind == OPEN:
            self.opened = True
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
        ends = [way.end for way in self.directions.values()]
        return RESET in ends or ends.count(FIN) == 2

    @property
    def is_closed(self) -> bool:
        """Either direction has ended for itself."""
        ways = self.directions.values()
        return len(ways) == 2 and all(way.end is not None for way in ways)

    @property
    def last_time(self) -> int:
        return max(way.last_time for way in self.directions.values())

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
                self._dumped(way),
            )
            for way in self.directions.values()
        ]
        return msgspec.msgpack.encode(
            _ConnectionState(
                _STATE_VERSION,
                self._ends,
                self.protocol,
                self.seq,
                self.opened,
                directions,
                None if self.reading is None else self.reading.dump(),
            )
        )

    def _dumped(self, way: Direction) -> bytes | None:
        if way.decoder is None and way.scanned is None:
            return None
        return self.decoder(way.name == FORWARD, way).dump()

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
        made.seq, made.opened = saved.seq, saved.opened
        for each in saved.directions:
            way = Direction(each.name, each.first_time, each.base, each.late)
            way.last_time, way.seen, way.gaps = each.last_time, each.seen, each.gaps
            way.frames, way.end = each.frames, each.end
            made.directions[each.name == FORWARD] = way
        # The other direction's decoder is made with the opener's at hand.
        for each in sorted(saved.directions, key=lambda each: each.name != FORWARD):
            if each.decoder is not None:
                forward = each.name == FORWARD
                made.decoder(forward, made.directions[forward]).load(each.decoder)
        if made.reading is not None and saved.reading is not None:
            made.reading.load(saved.reading)
        return made

    def finish(self) -> None:
        """The connection has no more rows."""
        for forward, way in self.directions.items():
            if way.decoder is not None:
                self.emit(forward, way, way.decoder.feed(b""), way.last_time)
            self._summarize(way)

    # Bytes.

    def _feed(self, forward: bool, way: Direction, data: bytes, time: int) -> None:
        start = way.due
        way.seen += len(data)
        if self.protocol is None:
            return
        if self.protocol == TLS:
            self._place(forward, way, start, len(data), Encrypted(), time)
            return
        decoder = self.decoder(forward, way)
        self.emit(forward, way, decoder.feed(data), time)
        # At the start the other side may have been waiting for what this one just said.
        other = self.directions.get(not forward)
        if other is not None and other.decoder is not None and other.frames < _HANDSHAKE_FRAMES:
            self.emit(not forward, other, other.decoder.feed(b""), time)

    def _skip(self, forward: bool, way: Direction, count: int, time: int) -> None:
        start = way.due
        way.seen += count
        way.gaps += count
        if self.protocol is None:
            return
        if self.protocol == TLS:
            self._place(forward, way, start, count, Gap(), time)
            return
        self.emit(forward, way, self.decoder(forward, way).skip(count), time)

    def decoder(self, forward: bool, way: Direction) -> Decoder:
        """The accepting side is read with the other decoder at hand: it may need what it said."""
        if way.decoder is None:
            assert self.protocol is not None
            entry = protocol(self.protocol)
            if forward:
                way.decoder = entry.decoder(entry.roles[0], late=way.late)
            else:
                opener = self.directions.get(True)
                if opener is None:
                    opener = Direction(FORWARD, way.first_time, 0, way.late)
                    self.directions[True] = opener
                peer = self.decoder(True, opener)
                way.decoder = entry.decoder(entry.roles[-1], late=way.late, peer=peer)
            if way.scanned is not None:
                way.scanned.leave(way.decoder)
                way.scanned = None
        return way.decoder

    # Rows.

    def emit(self, forward: bool, way: Direction, placed: list[Placed], time: int) -> None:
        base = way.base
        for offset, length, item in placed:
            if isinstance(item, FrameError):
                self._refuse(forward, way, base + offset, length, 0, item, time)
            else:
                way.frames += 1
                self._place(forward, way, base + offset, length, item, time)

    def _place(
        self, forward: bool, way: Direction, offset: int, length: int, frame: Any, time: int
    ) -> None:
        if isinstance(frame, _OUT_OF_FRAME):
            if not length:
                return
            self._row(
                way, offset, length, 0, frame.frame_name, Described(json_text(frame.fields())), time
            )
            if self.reading is not None and not isinstance(frame, Encrypted):
                self.reading.interrupt(forward)
            return
        assert self.reading is not None
        try:
            described = self.reading.describe(forward, frame, offset, length)
        except FrameError as error:
            self._refuse(forward, way, offset, length, frame.layer, error, time)
            return
        self._row(way, offset, length, frame.layer, frame.frame_name, described, time)

    def _row(
        self,
        way: Direction,
        offset: int,
        length: int,
        layer: int,
        name: str,
        described: Described,
        time: int,
    ) -> None:
        size = described.payload_size
        payload = described.payload if self._payloads else None
        of_message: tuple[Any, ...] = _NOT_A_MESSAGE[1:]
        if self._payloads:
            of_message = (
                described.content_type,
                described.properties,
                described.reply_to,
                described.message_id,
                payload,
            )
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
                self.protocol,
                name,
                described.identifier,
                described.kind,
                described.destination,
                described.status,
                described.sequence,
                None if size is None else offset + length - described.payload_end - size,
                size,
                described.fields,
                described.begun_at,
                *of_message,
            ),
            0 if payload is None else len(payload),
        )

    def _refuse(
        self,
        forward: bool,
        way: Direction,
        offset: int,
        length: int,
        layer: int,
        error: FrameError,
        time: int,
    ) -> None:
        if self.reading is not None:
            self.reading.interrupt(forward)
        self.violation(way, (layer, offset, length, time), error)

    def violation(
        self, way: Direction, place: tuple[int, int, int, int], error: FrameError
    ) -> None:
        """`place` is layer, offset, length and time."""
        self._special(VIOLATIONS, way, place, error.code, {"reason": error.reason})

    def _summarize(self, way: Direction) -> None:
        decoder = way.decoder
        listener, *addresses = self._ends
        names = ("connector_address", "connector_port", "acceptor_address", "acceptor_port")
        summary = {
            "listener": listener,
            **dict(zip(names, addresses, strict=True)),
            "opened": self.opened,
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
        way: Direction,
        place: tuple[int, int, int, int],
        status: str | None,
        fields: dict[str, Any],
    ) -> None:
        connection, node = self.key
        head = (table, node, connection, way.name, *place, self.protocol)
        nothing = (None, None, None, None)
        tail = (None, None, None, json_text(fields), *_NOT_A_MESSAGE)
        self._collected.add((*head, *nothing, status, *tail))
