"""One connection: how far its directions have been read, and what its frames depend on.

Most of its bytes are read by scanners, with those of many others. `read` gives the rest to the
decoders: rows around a gap, of a connection that was joined late, or of one whose directions can't
be read one after the other. Frames are not described here; violations, gaps and the summaries of
directions are the same in all protocols, and become rows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from crosswire.capture.classify import TLS
from crosswire.errors import DecoderStateError, FrameError, InvalidInput
from crosswire.lake.schemas import DATA, FIN, FORWARD, GAP, OPEN, RESET
from crosswire.pipeline.decode.arrays import Numbers
from crosswire.pipeline.decode.arrow_batches import Batches
from crosswire.pipeline.decode.meanings import memory_of
from crosswire.pipeline.decode.meanings.contract import ProtocolMemory, json_text
from crosswire.pipeline.decode.row_schema import DIRECTIONS, FRAMES, VIOLATIONS
from crosswire.pipeline.decode.scanners.registry import scanner_of
from crosswire.wire import protocol
from crosswire.wire.contract import Decoder, Encrypted, Gap, Placed, Unsynchronized

if TYPE_CHECKING:
    from crosswire.pipeline.decode.scanners.scanner import BulkScanner

__all__ = [
    "MOST_OPEN",
    "WIRE_COLUMNS",
    "DecodedConnection",
    "DecodedItems",
    "Direction",
    "ScannedSoFar",
]

WIRE_COLUMNS: Final = (
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
"""The columns of bronze.wire that decoding needs, in the order of `DecodedConnection.read`."""
MOST_OPEN: Final = 4096
"""By default as many open connections are kept as objects; the state of others is stored."""
_HANDSHAKE_FRAMES: Final = 8
"""Within the first frames of a direction a handshake may let the other direction go on."""
_OUT_OF_FRAME: Final = (Gap, Unsynchronized, Encrypted)
_NOT_A_MESSAGE: Final = (None,) * 6


class DecodedItems(NamedTuple):
    """What the decoder of a direction gave at once; offsets count from where its capture begins."""

    forward: bool
    placed: list[Placed]


class ScannedSoFar(NamedTuple):
    """How far a scanner has read a direction: all that a decoder needs to continue from there.

    `opening` are the bytes of the handshake.
    """

    scanner: BulkScanner
    state: Numbers
    opening: bytes

    def to(self, decoder: Decoder) -> None:
        """Put a new decoder where the scanner stopped."""
        opening = np.frombuffer(self.opening, np.uint8)
        self.scanner.hand_over(decoder, self.state, opening, 0)


class Direction:
    """The state of one direction; `base` is the offset in it at which the capture begins.

    While a scanner reads it, there is no decoder but `scanned`, from which one can be created.
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
        self.scanned: ScannedSoFar | None = None

    def count_items(self, placed: list[Placed]) -> None:
        """Count the frames that the decoder has given."""
        self.frames += sum(not isinstance(item, FrameError) for _, _, item in placed)

    @property
    def due(self) -> int:
        """The offset of the next byte."""
        return self.base + self.seen


class _ScanState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `ScannedSoFar` in `DecodedConnection.dump()`."""

    version: int
    state: list[int]
    opening: bytes


class _DirectionState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of a direction in `DecodedConnection.dump()`; at most one of the last two is there."""

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
    scanned: _ScanState | None


class _ConnectionState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `DecodedConnection.dump()`."""

    version: int
    ends: tuple[str | None, str | None, int | None, str | None, int | None]
    protocol: str | None
    seq: int
    opened: bool
    directions: list[_DirectionState]
    memory: bytes | None


_STATE: Final = msgspec.msgpack.Decoder(_ConnectionState)
_STATE_VERSION: Final = 2


class DecodedConnection:
    """The state of a connection; adds rows of `decode.row_schema` to `collected`."""

    def __init__(self, first: tuple[Any, ...], collected: Batches) -> None:
        self.key = (first[1], first[0])
        self._ends = first[11:16]
        self.protocol: str | None = first[10]
        self._collected = collected
        self.seq = -1
        self.opened = False
        self.directions: dict[bool, Direction] = {}
        self.memory: ProtocolMemory | None = None
        if self.protocol is not None and self.protocol != TLS:
            self.memory = memory_of(self.protocol)()

    # Bytes that no scanner reads.

    def read(self, row: tuple[Any, ...]) -> list[DecodedItems]:
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
            return []
        if offset < known_direction.due:
            raise InvalidInput(f"rows of connection {name} overlap at byte {offset}")
        found: list[DecodedItems] = []
        if offset > known_direction.due:
            found.append(self._skip(forward, known_direction, offset - known_direction.due))
        if kind == GAP:
            found.append(self._skip(forward, known_direction, length))
        else:
            found += self._feed(forward, known_direction, data)
        return found

    def _feed(self, forward: bool, direction: Direction, data: bytes) -> list[DecodedItems]:
        start = direction.seen
        direction.seen += len(data)
        if self.protocol is None:
            return []
        if self.protocol == TLS:
            return [DecodedItems(forward, [(start, len(data), Encrypted())])]
        found = [DecodedItems(forward, self.decoder(forward, direction).feed(data))]
        direction.count_items(found[0].placed)
        # During handshakes the other decoder may hold bytes that it can read only with what this
        # one has just read.
        other = self.directions.get(not forward)
        if other is not None and other.decoder is not None and other.frames < _HANDSHAKE_FRAMES:
            found.append(DecodedItems(not forward, other.decoder.feed(b"")))
            other.count_items(found[1].placed)
        return found

    def _skip(self, forward: bool, direction: Direction, count: int) -> DecodedItems:
        start = direction.seen
        direction.seen += count
        direction.gaps += count
        placed: list[Placed] = []
        if self.protocol == TLS:
            placed = [(start, count, Gap())]
        elif self.protocol is not None:
            placed = self.decoder(forward, direction).skip(count)
            direction.count_items(placed)
        return DecodedItems(forward, placed)

    def read_rest(self) -> list[DecodedItems]:
        """What only the end of the connection shows."""
        return [
            DecodedItems(forward, direction.decoder.feed(b""))
            for forward, direction in self.directions.items()
            if direction.decoder is not None
        ]

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
            if direction.scanned is not None:
                direction.scanned.to(direction.decoder)
                direction.scanned = None
        return direction.decoder

    # How it ended.

    @property
    def is_over(self) -> bool:
        """Whether both sides have closed it, or one has reset it."""
        ends = [direction.end for direction in self.directions.values()]
        return RESET in ends or ends.count(FIN) == 2

    @property
    def is_closed(self) -> bool:
        """Whether each direction has ended, closed or reset."""
        directions = self.directions.values()
        return len(directions) == 2 and all(direction.end is not None for direction in directions)

    @property
    def last_time(self) -> int:
        """The time of the latest row."""
        return max(direction.last_time for direction in self.directions.values())

    # State.

    def dump(self) -> bytes:
        """The whole state between two rows, to be given to `load`: small, versioned."""
        directions = [
            _DirectionState(
                direction.name,
                direction.first_time,
                direction.last_time,
                direction.base,
                direction.late,
                direction.seen,
                direction.gaps,
                direction.frames,
                direction.end,
                None if direction.decoder is None else direction.decoder.dump(),
                _scan_state(direction.scanned),
            )
            for direction in self.directions.values()
        ]
        return msgspec.msgpack.encode(
            _ConnectionState(
                _STATE_VERSION,
                self._ends,
                self.protocol,
                self.seq,
                self.opened,
                directions,
                None if self.memory is None else self.memory.dump(),
            )
        )

    @classmethod
    def load(cls, key: tuple[str, str], state: bytes, collected: Batches) -> DecodedConnection:
        """A connection in the state of `dump`; `key` is connection and node.

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
        made = cls((node, connection, *nothing, saved.protocol, *saved.ends), collected)
        made.seq, made.opened = saved.seq, saved.opened
        for each in saved.directions:
            direction = Direction(each.name, each.first_time, each.base, each.late)
            direction.last_time, direction.seen, direction.gaps = (
                each.last_time,
                each.seen,
                each.gaps,
            )
            direction.frames, direction.end = each.frames, each.end
            if each.scanned is not None:
                direction.scanned = _scanned(saved.protocol, each.scanned)
            made.directions[each.name == FORWARD] = direction
        # The acceptor's decoder is created with the opener's: that must be complete before.
        for each in sorted(saved.directions, key=lambda each: each.name != FORWARD):
            if each.decoder is not None:
                forward = each.name == FORWARD
                made.decoder(forward, made.directions[forward]).load(each.decoder)
        if made.memory is not None and saved.memory is not None:
            made.memory.load(saved.memory)
        return made

    # Rows.

    def set_aside(self, forward: bool, placed: Placed, time: int) -> bool | None:
        """Add a row for an item of a decoder that is no frame: a violation, or bytes outside of
        frames. Returns whether frames may be missing there, None for a frame, which has no row yet.
        """
        offset, length, item = placed
        direction = self.directions[forward]
        location = (0, direction.base + offset, length, time)
        if isinstance(item, FrameError):
            self.violation(direction, location, item)
            return True
        if not isinstance(item, _OUT_OF_FRAME):
            return None
        if length:
            connection, node = self.key
            head = (FRAMES, node, connection, direction.name, *location, self.protocol)
            nothing = (None,) * 7
            fields = json_text(item.fields())
            self._collected.add((*head, item.frame_name, *nothing, fields, *_NOT_A_MESSAGE))
        return bool(length) and not isinstance(item, Encrypted)

    def violation(
        self, direction: Direction, location: tuple[int, int, int, int], error: FrameError
    ) -> None:
        """Add a row for a violation; `location` is layer, offset, length and time."""
        self._special(VIOLATIONS, direction, location, error.code, {"reason": error.reason})

    def summarize(self) -> None:
        """Add a row for each direction."""
        listener, *addresses = self._ends
        names = ("connector_address", "connector_port", "acceptor_address", "acceptor_port")
        for direction in self.directions.values():
            decoder = direction.decoder
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


def _scan_state(scanned: ScannedSoFar | None) -> _ScanState | None:
    if scanned is None:
        return None
    version = scanned.scanner.state_version
    return _ScanState(version, scanned.state.tolist(), scanned.opening)


def _scanned(name: str | None, saved: _ScanState) -> ScannedSoFar:
    """Raises DecoderStateError."""
    scanner = scanner_of(name or "")
    if saved.version != scanner.state_version:
        raise DecoderStateError(
            f"state of a scanner has version {saved.version}, this is {scanner.state_version}"
        )
    if len(saved.state) != scanner.state_size:
        raise DecoderStateError("state of a scanner is damaged: numbers are missing")
    return ScannedSoFar(scanner, np.array(saved.state, np.int64), saved.opening)
