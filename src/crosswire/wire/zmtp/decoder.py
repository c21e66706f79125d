"""ZMTP's decoder: one direction, from bytes to frames."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from crosswire.wire.contract import Decoder, Limits, Placed, Unsynchronized, one_of
from crosswire.wire.zmtp.frames import (
    DEFAULTS,
    Command,
    Partial,
    Taker,
    ZmtpLimits,
    is_sealed,
    parse_greeting,
    read_header,
    scan_command,
    scan_messages,
    scan_sealed,
)
from crosswire.wire.zmtp.layout import (
    FLAG_COMMAND,
    FLAG_LONG,
    FLAG_MORE,
    FLAGS_OFFSET,
    GREETING_SIZE,
    LAST_FLAGS,
    LONG_HEADER_SIZE,
    MAX_SHORT_SIZE,
    MECHANISM_CURVE,
    METADATA_COMMANDS,
    SHORT_HEADER_SIZE,
    SIZE_OFFSET,
)

__all__ = ["ZmtpDecoder"]

_SYNC_BYTES: Final = 65536


class _Stage(Enum):
    """What a direction's next bytes are; `rest`: possibly the rest of a message, after a gap."""

    GREETING = "greeting"
    HANDSHAKE = "handshake"
    REST = "rest"
    TRAFFIC = "traffic"


class ZmtpDecoder(Decoder):
    """One direction of ZMTP. Both are read alike.

    The frames of CURVE's traffic are `Sealed`, a kind of `Encrypted`. A decoder that joins late
    skips what may be the rest of a message, and takes the mechanism from the `peer` decoder or, if
    that has not seen a greeting either, from the form of the first frame.
    """

    sync_frames = 4

    def __init__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,
        hints: Mapping[str, int] | None = None,  # noqa: ARG002  the greeting has all
    ) -> None:
        self.limits: ZmtpLimits
        super().__init__(sender, one_of(limits, DEFAULTS), late=late)
        self.mechanism: str | None = None
        """The greeting's; None before the greeting, or if it was not captured."""
        self._peer = peer if isinstance(peer, ZmtpDecoder) else None
        self.take: Taker | None = None
        """Set by an owner that knows what the messages are: reads many of them at once."""
        self._stage = _Stage.REST if late else _Stage.GREETING
        self._partial = Partial()

    @property
    def stage(self) -> str:
        """How far the direction is: "greeting", "handshake" and "traffic", or "rest" while a
        decoder that missed the beginning looks for the start of a message."""
        return self._stage.value

    def skip(self, count: int) -> list[Placed]:
        """After a gap the next frames may be the rest of a message."""
        placed = super().skip(count)
        if not self.lost:
            self._partial.take()
            self._stage = _Stage.REST
        return placed

    def jump(self, offset: int) -> None:
        """Also drops the parts of an incomplete message."""
        self._partial.take()
        super().jump(offset)

    @property
    def _held(self) -> int:
        return self.offset - self._partial.start if self._partial.parts else 0

    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        if self._stage is not _Stage.TRAFFIC:
            position, need = self._scan_opening(buffer, position, placed)
            if need:
                return position, need
        if self.mechanism == MECHANISM_CURVE:
            return scan_sealed(buffer, position, self.offset, self.limits, placed)
        return scan_messages(
            buffer, position, self.offset, self.limits, self._partial, placed, self.take
        )

    def _scan_opening(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        """What precedes the traffic. Returns a need of 0 when the traffic begins."""
        base = self.offset
        if self._stage is _Stage.REST:
            return self._scan_rest(buffer, position, placed)
        if self._stage is _Stage.GREETING:
            greeting = parse_greeting(buffer, position, base)
            if greeting is None:
                return position, len(buffer) - position + 1
            placed.append((base + position, GREETING_SIZE, greeting))
            self.mechanism = greeting.mechanism
            self._stage = _Stage.HANDSHAKE
            position += GREETING_SIZE
        sealed = self.mechanism == MECHANISM_CURVE
        while True:
            position, need = scan_command(
                buffer, position, base, self.limits, placed, sealed=sealed
            )
            if need:
                return position, need
            command = placed[-1][2]
            if isinstance(command, Command) and command.name in METADATA_COMMANDS:
                self._stage = _Stage.TRAFFIC
                return position, 0

    def _scan_rest(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        """Find the start of a message: it is after the first frame without the flag MORE."""
        base, limits = self.offset, self.limits
        # Both greetings must have the same mechanism, so the other direction's is as good.
        if self.mechanism is None and self._peer is not None:
            self.mechanism = self._peer.mechanism
        while True:
            flags, body, stop = read_header(buffer, position, base, limits.frame_bytes, "message")
            if not body or stop > len(buffer):
                return position, stop - position
            if self.mechanism is None and is_sealed(buffer, body, stop):
                self.mechanism = MECHANISM_CURVE
            if self.mechanism == MECHANISM_CURVE or flags & FLAG_COMMAND:
                # Sealed frames don't show what they belong to; commands are complete by themselves.
                break
            frame = Unsynchronized("maybe the rest of a message")
            placed.append((base + position, stop - position, frame))
            position = stop
            if not flags & FLAG_MORE:
                break
        self._stage = _Stage.TRAFFIC
        return position, 0

    def _measure(self, buffer: bytes, position: int) -> int | None:
        """A long size must be one that needs it, and a run of zeros is not a run of frames."""
        head = buffer[position : position + LONG_HEADER_SIZE]
        if len(head) < SHORT_HEADER_SIZE:
            return 0
        flags, size = head[FLAGS_OFFSET], head[SIZE_OFFSET]
        if flags > LAST_FLAGS or flags == FLAG_COMMAND | FLAG_MORE:
            return None
        if flags & FLAG_LONG:
            if len(head) < LONG_HEADER_SIZE:
                return 0
            size = int.from_bytes(head[SIZE_OFFSET:])
            return LONG_HEADER_SIZE + size if MAX_SHORT_SIZE < size <= _SYNC_BYTES else None
        return SHORT_HEADER_SIZE + size if size or flags == FLAG_MORE else None

    def _save(self) -> Any:
        partial = self._partial
        return [self.mechanism, self._stage.value, partial.parts, partial.start, partial.used]

    def _restore(self, own: Any) -> None:
        saved = msgspec.convert(own, _Saved)
        self._stage = _Stage(saved.stage)
        self.mechanism = saved.mechanism
        self._partial = Partial(saved.parts, saved.start, saved.used)


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    """The stored form of what a ZMTP decoder adds to its state."""

    mechanism: str | None
    stage: str
    parts: list[bytes]
    start: int
    used: int
