"""Relink's decoder: one direction, live or captured, from bytes to frames."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from crosswire.wire.contract import Decoder, Limits, Placed, Unsynchronized, one_of
from crosswire.wire.relink.frames import DEFAULTS, RelinkLimits, measure, scan
from crosswire.wire.relink.handshake import ConnectorHello, parse_hello, parse_version
from crosswire.wire.relink.layout import (
    ALIGNMENT,
    FLAG_CHANNEL,
    MAX_ID_SIZE,
    MIN_PACKET_SIZE,
    PacketLayout,
    packet_layout,
)

__all__ = ["IdSizes", "RelinkDecoder"]

_SYNC_LIMITS: Final = RelinkLimits(frame_bytes=65536)

IdSizes = tuple[int, int]
"""Of the connector's channels, of the listener's."""


class _Stage(Enum):
    """What a direction sends next."""

    VERSION = "version"
    HELLO = "hello"
    PACKETS = "packets"


class RelinkDecoder(Decoder):
    """One direction of Relink.

    Packets can't be read without the sizes of channel ids. The connector's hello has them; for the
    listener's direction, or if the hello was missed, they are those of `peer`, the decoder of the
    connector's direction, or the hints `connector_id_size` and `listener_id_size`. Without them a
    packet that has a channel can't be read, and the decoder reports `Unsynchronized` instead of
    guessing.
    """

    sync_frames = 3

    def __init__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,
        hints: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(sender, one_of(limits, DEFAULTS), late=late)
        self._stage = _Stage.PACKETS if late else _Stage.VERSION
        self._peer = peer
        self._sizes: IdSizes | None = _hinted(hints) if hints else None
        self._layout: PacketLayout | None = None
        # Packets are aligned to 8 bytes from the first one on: after a gap, they can start at every
        # eighth byte only. A decoder that starts late has to find out at which.
        self._origin: int | None = None if late else 0

    @property
    def stage(self) -> str:
        """What comes next: "version", "hello" or "packets"."""
        return self._stage.value

    @property
    def id_sizes(self) -> IdSizes | None:
        """Of the connector's channel ids and of the listener's, if they are known."""
        if self._sizes is None and isinstance(self._peer, RelinkDecoder):
            self._sizes = self._peer._sizes
        return self._sizes

    def skip(self, count: int) -> list[Placed]:
        """A gap; what follows it are packets, even if the gap hid the handshake."""
        self._stage = _Stage.PACKETS
        return super().skip(count)

    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        if self._stage is not _Stage.PACKETS:
            position, need = self._scan_handshake(buffer, position, placed)
            if need:
                return position, need
        layout = self._known_layout()
        if layout is not None:
            self._origin = (self.offset + position) % ALIGNMENT
            return scan(buffer, position, self.offset, layout, self._limits, placed)
        return self._scan_without_sizes(buffer, position, placed)

    def _scan_handshake(
        self, buffer: bytes, position: int, placed: list[Placed]
    ) -> tuple[int, int]:
        while self._stage is not _Stage.PACKETS:
            offset = self.offset + position
            if self._stage is _Stage.VERSION:
                frame, length = parse_version(self.sender, buffer, position)
                after = _Stage.HELLO
            else:
                frame, length = parse_hello(self.sender, buffer, position, offset)
                after = _Stage.PACKETS
            if frame is None:
                return position, length
            if isinstance(frame, ConnectorHello):
                self._sizes = (frame.connector_id_size, frame.listener_id_size)
            placed.append((offset, length, frame))
            position += length
            self._stage = after
        return position, 0

    def _scan_without_sizes(
        self, buffer: bytes, position: int, placed: list[Placed]
    ) -> tuple[int, int]:
        """General packets are 8 bytes for all sizes; after another one the decoder is lost."""
        any_layout = packet_layout(self.sender, 0, 0)
        while len(buffer) - position >= MIN_PACKET_SIZE:
            if buffer[position] & FLAG_CHANNEL:
                return self._give_up(buffer, position, placed)
            end = position + MIN_PACKET_SIZE
            scan(buffer[:end], position, self.offset, any_layout, self._limits, placed)
            position = end
        return position, MIN_PACKET_SIZE

    def _give_up(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        """Stop at a whole first 8 bytes, so that the result does not depend on how input is cut."""
        reason = "the sizes of channel ids are not known"
        end = position + MIN_PACKET_SIZE
        placed.append((self.offset + position, MIN_PACKET_SIZE, Unsynchronized(reason)))
        self.lost = True
        self.offset += end
        self.unread = len(buffer) - end
        return end, 0

    def _search(self, buffer: bytes, placed: list[Placed]) -> int:
        if self._known_layout() is not None:
            return super()._search(buffer, placed)
        if len(buffer) < MIN_PACKET_SIZE:
            self._need = MIN_PACKET_SIZE
            return 0
        self._search_from = None
        return self._give_up(buffer, 0, placed)[0]

    def _scan_all(self, buffer: bytes, position: int, placed: list[Placed]) -> int:
        return position if self.lost else super()._scan_all(buffer, position, placed)

    def _measure(self, buffer: bytes, position: int) -> int | None:
        if self._origin is not None and (self.offset + position) % ALIGNMENT != self._origin:
            return None
        layout = self._known_layout()
        assert layout is not None
        return measure(buffer, position, layout, _SYNC_LIMITS)

    @property
    def _limits(self) -> RelinkLimits:
        assert isinstance(self.limits, RelinkLimits)
        return self.limits

    def _known_layout(self) -> PacketLayout | None:
        if self._layout is None and (sizes := self.id_sizes) is not None:
            self._layout = packet_layout(self.sender, *sizes)
        return self._layout

    def _save(self) -> Any:
        return [self._stage.value, self.id_sizes, self._origin]

    def _restore(self, own: Any) -> None:
        stage, sizes, origin = own
        stage = _Stage(stage)
        if sizes is not None:
            sizes = _checked_sizes(*sizes)
        if origin is not None and origin not in range(ALIGNMENT):
            raise ValueError(f"packets can't start at byte {origin} of {ALIGNMENT}")
        self._stage, self._sizes, self._origin = stage, sizes, origin
        self._layout = None


def _hinted(hints: Mapping[str, int]) -> IdSizes | None:
    names = ("connector_id_size", "listener_id_size")
    if not any(name in hints for name in names):
        return None
    if missing := [name for name in names if name not in hints]:
        raise ValueError(f"{missing[0]} must be given too")
    return _checked_sizes(*(hints[name] for name in names))


def _checked_sizes(connector: int, listener: int) -> IdSizes:
    for size in (connector, listener):
        if size not in range(MAX_ID_SIZE + 1):
            raise ValueError(f"channel ids have 0 to {MAX_ID_SIZE} bytes, not {size}")
    return connector, listener
