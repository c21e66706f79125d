"""One connection, row by row: its bytes through the decoders, its frames into rows one by one."""

from __future__ import annotations

from typing import Any, Final

from crosswire.capture.classify import TLS
from crosswire.errors import FrameError, InvalidInput
from crosswire.lake.schemas import DATA, FIN, FORWARD, GAP, OPEN, RESET
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.meanings.contract import Described, json_text
from crosswire.pipeline.decode.row_schema import DIRECTIONS, FRAMES, VIOLATIONS
from crosswire.wire import protocol
from crosswire.wire.contract import Decoder, Encrypted, Gap, Placed, Unsynchronized
from tests.pipeline.decode.oracle import Reading, reading_of

_HANDSHAKE_FRAMES: Final = 8
"""Within the first frames of a direction a handshake may let the other direction go on."""
_OUT_OF_FRAME: Final = (Gap, Unsynchronized, Encrypted)
_NOT_A_MESSAGE: Final = (None,) * 6


class Direction:
    """The state of one direction; `base` is the offset in it at which the capture begins."""

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

    @property
    def due(self) -> int:
        """The offset of the next byte."""
        return self.base + self.seen


class ConnectionRows:
    """Turns the rows of one connection, given in order, into rows of `decode.row_schema`."""

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
        """Read the next row, a tuple of WIRE_COLUMNS. Raises InvalidInput if it is out of order."""
        _, name, seq, direction, kind, offset, length, time, data, late = row[:10]
        if seq <= self.seq:
            raise InvalidInput(f"rows of connection {name} are there twice, or out of order")
        self.seq = seq
        forward = direction == FORWARD
        known_direction = self.directions.get(forward)
        if known_direction is None:
            known_direction = self.directions[forward] = Direction(
                direction, time, offset, bool(late) or offset > 0
            )
        known_direction.last_time = max(known_direction.last_time, time)
        if kind == OPEN:
            self.opened = True
        elif kind in (FIN, RESET):
            known_direction.end = kind
        if kind not in (DATA, GAP):
            return
        if offset < known_direction.due:
            raise InvalidInput(f"rows of connection {name} overlap at byte {offset}")
        if offset > known_direction.due:
            self._skip(forward, known_direction, offset - known_direction.due, time)
        if kind == GAP:
            self._skip(forward, known_direction, length, time)
        else:
            self._feed(forward, known_direction, data, time)

    def finish(self) -> None:
        """Add what only the end of the connection shows, and a row for each direction."""
        for forward, direction in self.directions.items():
            if direction.decoder is not None:
                self.emit(forward, direction, direction.decoder.feed(b""), direction.last_time)
            self._summarize(direction)

    # Bytes.

    def _feed(self, forward: bool, direction: Direction, data: bytes, time: int) -> None:
        start = direction.due
        direction.seen += len(data)
        if self.protocol is None:
            return
        if self.protocol == TLS:
            self._item(forward, direction, start, len(data), Encrypted(), time)
            return
        decoder = self.decoder(forward, direction)
        self.emit(forward, direction, decoder.feed(data), time)
        # During handshakes the other decoder may hold bytes that it can read only with what this
        # one has just read.
        other = self.directions.get(not forward)
        if other is not None and other.decoder is not None and other.frames < _HANDSHAKE_FRAMES:
            self.emit(not forward, other, other.decoder.feed(b""), time)

    def _skip(self, forward: bool, direction: Direction, count: int, time: int) -> None:
        start = direction.due
        direction.seen += count
        direction.gaps += count
        if self.protocol is None:
            return
        if self.protocol == TLS:
            self._item(forward, direction, start, count, Gap(), time)
            return
        self.emit(forward, direction, self.decoder(forward, direction).skip(count), time)

    def decoder(self, forward: bool, direction: Direction) -> Decoder:
        """The direction's decoder, created if there is none yet.

        The acceptor's is given the opener's decoder: how its bytes are read may depend on the
        opener's handshake.
        """
        if direction.decoder is None:
            assert self.protocol is not None
            entry = protocol(self.protocol)
            if forward:
                direction.decoder = entry.decoder(entry.roles[0], late=direction.late)
            else:
                opener = self.directions.get(True)
                if opener is None:
                    opener = Direction(FORWARD, direction.first_time, 0, direction.late)
                    self.directions[True] = opener
                peer = self.decoder(True, opener)
                direction.decoder = entry.decoder(entry.roles[-1], late=direction.late, peer=peer)
        return direction.decoder

    # Rows.

    def emit(self, forward: bool, direction: Direction, placed: list[Placed], time: int) -> None:
        """Add rows for what a decoder gave: frames, violations, and bytes outside of frames."""
        base = direction.base
        for offset, length, item in placed:
            if isinstance(item, FrameError):
                self._refuse(forward, direction, base + offset, length, 0, item, time)
            else:
                direction.frames += 1
                self._item(forward, direction, base + offset, length, item, time)

    def _item(
        self, forward: bool, direction: Direction, offset: int, length: int, frame: Any, time: int
    ) -> None:
        if isinstance(frame, _OUT_OF_FRAME):
            if not length:
                return
            self._row(
                direction,
                offset,
                length,
                0,
                frame.frame_name,
                Described(json_text(frame.fields())),
                time,
            )
            if self.reading is not None and not isinstance(frame, Encrypted):
                self.reading.interrupt(forward)
            return
        assert self.reading is not None
        try:
            described = self.reading.describe(forward, frame, offset, length)
        except FrameError as error:
            self._refuse(forward, direction, offset, length, frame.layer, error, time)
            return
        self._row(direction, offset, length, frame.layer, frame.frame_name, described, time)

    def _row(
        self,
        direction: Direction,
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
                direction.name,
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
        direction: Direction,
        offset: int,
        length: int,
        layer: int,
        error: FrameError,
        time: int,
    ) -> None:
        if self.reading is not None:
            self.reading.interrupt(forward)
        self.violation(direction, (layer, offset, length, time), error)

    def violation(
        self, direction: Direction, location: tuple[int, int, int, int], error: FrameError
    ) -> None:
        """Add a row for a violation; `location` is layer, offset, length and time."""
        self._special(VIOLATIONS, direction, location, error.code, {"reason": error.reason})

    def _summarize(self, direction: Direction) -> None:
        decoder = direction.decoder
        listener, *addresses = self._ends
        names = ("connector_address", "connector_port", "acceptor_address", "acceptor_port")
        summary = {
            "listener": listener,
            **dict(zip(names, addresses, strict=True)),
            "opened": self.opened,
            "late": direction.late,
            "first_time": direction.first_time,
            "gaps": direction.gaps,
            "tail": 0 if decoder is None else decoder.pending,
            "unread": 0 if decoder is None else decoder.unread,
        }
        location = (0, direction.base, direction.seen, direction.last_time)
        self._special(DIRECTIONS, direction, location, direction.end, summary)

    def _special(
        self,
        table: str,
        direction: Direction,
        location: tuple[int, int, int, int],
        status: str | None,
        fields: dict[str, Any],
    ) -> None:
        connection, node = self.key
        head = (table, node, connection, direction.name, *location, self.protocol)
        nothing = (None, None, None, None)
        tail = (None, None, None, json_text(fields), *_NOT_A_MESSAGE)
        self._collected.add((*head, *nothing, status, *tail))
