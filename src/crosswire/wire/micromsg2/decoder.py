"""MicroMsg2's decoder: handshakes, then frames, their sequence and their continuation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from crosswire.errors import FrameError, MalformedFrame
from crosswire.wire.contract import Decoder, Frame, Limits, Placed, one_of
from crosswire.wire.micromsg2.frames import (
    DEFAULTS,
    ExtensionFrame,
    Handshake,
    Message,
    following,
    is_handshake,
    parse,
    parse_handshake,
    scan_messages,
)
from crosswire.wire.micromsg2.layout import (
    CLIENT_HANDSHAKES,
    DESTINATION_LENGTH_OFFSET,
    DESTINATION_OFFSET,
    EXTENSION_NUMBER_OFFSET,
    FIRST_EXTENSION,
    FIRST_SEQUENCE,
    FLAG_CONTINUED,
    FLAG_LARGE,
    FLAGS_OFFSET,
    HEADER_SIZE,
    LARGE_LENGTH_SIZE,
    LAST_EXTENSION,
    MESSAGE_HEADER_SIZE,
    PROPERTIES_LENGTH_SIZE,
    SEQUENCE_OFFSET,
    SERVER_HANDSHAKES,
    SHORT_LENGTH_SIZE,
    TYPE_EXTENSION,
    TYPE_MASK,
    TYPE_MESSAGE,
)

__all__ = ["MicroMsg2Decoder"]


_HANDSHAKES: Final = {"client": CLIENT_HANDSHAKES, "server": SERVER_HANDSHAKES}
_AGREED_CHARACTERS: Final = 64

# What the search for a frame's start takes for plausible.
_SYNC_BYTES: Final = 65536
_SYNC_EXTENSIONS: Final = 64
_SYNC_HEAD_BYTES: Final = 320
"""A frame is checked this far: its destination and the start of its properties."""
_NAMED: Final = re.compile(rb"[A-Za-z0-9_-]*(;[ -~]*)?").fullmatch
_LISTED: Final = re.compile(rb"[A-Za-z0-9_-]*(:[ -~]*)?").fullmatch


class MicroMsg2Decoder(Decoder):
    """One direction of MicroMsg2: the sender's handshakes (a client's two, a server's one), then
    frames.

    With the hint `next_sequence` the bytes begin after the handshake, with the frame of this number
    due. Extension numbers are checked if the client's final handshake is known: from a client's own
    bytes, or from the `peer` decoder that reads them.
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
        self._peer = peer if isinstance(peer, MicroMsg2Decoder) else None
        self._handshakes = _HANDSHAKES[sender]
        self._sequence: int | None = FIRST_SEQUENCE
        self._continued: bool | None = False
        self._agreed: list[str] | None = None
        self.handshake_bytes = self.limits.frame_bytes
        """The limit of a handshake; set by an owner that does not know the peer."""
        if late:
            self._lose_track()
        elif hints and "next_sequence" in hints:
            self._handshakes = 0
            self._sequence = hints["next_sequence"]

    @property
    def handshakes_due(self) -> int:
        """How many handshakes of the sender are still to come."""
        return self._handshakes

    @property
    def next_sequence(self) -> int | None:
        """The number that the next message must have; None if it is not known."""
        return self._sequence

    @property
    def continued(self) -> bool | None:
        """Whether the last message continues in the next frame; None if it is not known."""
        return self._continued

    def resume(self, *, next_sequence: int | None, continued: bool | None) -> None:
        """Go on after messages that a scanner has read; `jump` has set where."""
        self._sequence = next_sequence
        self._continued = continued

    @property
    def agreed(self) -> list[str] | None:
        """The names of the extensions in use, in the order of their numbers; None if unknown."""
        if self.sender == "server" and self._peer is not None:
            return self._peer.agreed
        return self._agreed

    def skip(self, count: int) -> list[Placed]:
        """After a gap, neither the sequence nor the rest of the handshake is known."""
        if not self.lost:
            self._lose_track()
        return super().skip(count)

    def _lose_track(self) -> None:
        """From here on any sequence number, and any continuation, is accepted once."""
        self._handshakes = 0
        self._sequence = None
        self._continued = None

    def _scan(self, buffer: bytes, position: int, placed: list[Placed]) -> tuple[int, int]:
        base, limit = self.offset, self.limits.frame_bytes
        while True:
            if self._handshakes:
                frame, length = self._scan_handshake(buffer, position)
            else:
                if self._sequence is not None and self._continued is False:
                    # The fast path stops at the first frame that is not a plain message.
                    position, self._sequence = scan_messages(
                        buffer, position, base, self._sequence, placed
                    )
                frame, length = parse(buffer, position, base, limit)
                if isinstance(frame, Message):
                    self._follow(frame, base + position, length)
                elif isinstance(frame, ExtensionFrame):
                    self._check_number(frame.id, base + position, length)
            if frame is None:
                return position, length
            placed.append((base + position, length, frame))
            position += length

    def _scan_handshake(self, buffer: bytes, position: int) -> tuple[Frame | None, int]:
        try:
            limit = min(self.limits.frame_bytes, self.handshake_bytes)
            frame, length = parse_handshake(buffer, position, self.offset, limit)
        except FrameError as error:
            # Invalid, but complete: the next one is the next handshake.
            if error.resumable and is_handshake(buffer[position]):
                self._handshakes -= 1
            raise
        if isinstance(frame, Handshake):
            self._handshakes -= 1
            if not self._handshakes and self.sender == "client":
                # Numbers have one byte, and names are only displayed: saved state stays small.
                named = (*frame.required, *frame.optional)[:LAST_EXTENSION]
                self._agreed = [extension.name[:_AGREED_CHARACTERS] for extension in named]
        return frame, length

    def _follow(self, message: Message, offset: int, length: int) -> None:
        """Check sequence and continuation. Raises MalformedFrame.

        After a violation the state is as this frame implies, so that it is reported once.
        """
        # None for both: unknown, after a gap.
        due, continued = self._sequence, self._continued
        sequence = message.sequence
        self._continued = message.continued
        reason = ""
        if not sequence:
            reason = "sequence number 0"
        else:
            self._sequence = following(sequence)
            if due is not None and sequence != due:
                reason = f"sequence number {sequence} where {due} was due"
        if continued and (message.destination or message.raw_properties):
            reason = reason or "a message between the frames of another"
        elif continued is False and not message.destination:
            reason = reason or "a message without a destination"
        if reason:
            raise MalformedFrame(reason, offset=offset, length=length, resumable=True)

    def _check_number(self, number: int, offset: int, length: int) -> None:
        agreed = self.agreed
        if not number or (agreed is not None and number > len(agreed)):
            raise MalformedFrame(
                f"extension number {number} was not agreed",
                offset=offset,
                length=length,
                resumable=True,
            )

    def _measure(self, buffer: bytes, position: int) -> int | None:
        """The first bytes of a frame are too little evidence, so its text is checked too."""
        try:
            frame, length = parse(buffer, position, 0, _SYNC_BYTES)
        except FrameError:
            return None
        head_bytes = _SYNC_HEAD_BYTES if frame is None else min(length, _SYNC_HEAD_BYTES)
        # Whole frames as well, or it would matter how much of one has arrived.
        if not _may_begin(buffer[position : position + head_bytes]):
            return None
        match frame:
            case None:
                return 0 if length <= _SYNC_BYTES else None
            case Message():
                plausible = bool(frame.sequence) and frame.destination.isprintable()
                plausible = plausible and bool(frame.destination) and _has_properties(frame)
            case ExtensionFrame():
                plausible = FIRST_EXTENSION <= frame.id <= _SYNC_EXTENSIONS
            case _:
                plausible = True
        return length if plausible else None

    def _save(self) -> Any:
        return [self._handshakes, self._sequence, self._continued, self._agreed]

    def _restore(self, own: Any) -> None:
        saved = msgspec.convert(own, tuple[int, int | None, bool | None, list[str] | None])
        self._handshakes, self._sequence, self._continued, self._agreed = saved


def _has_properties(message: Message) -> bool:
    try:
        message.properties()
    except FrameError:
        return False
    return True


def _may_begin(begun: bytes) -> bool:
    """Whether a frame may begin with these bytes, which are all or some of it: a wrong yes for some
    of it would wait in vain."""
    if not begun:
        return True
    flags = begun[FLAGS_OFFSET]
    kind = flags & TYPE_MASK
    if kind != TYPE_MESSAGE and flags & FLAG_CONTINUED:
        return False
    if kind == TYPE_EXTENSION:
        if len(begun) <= EXTENSION_NUMBER_OFFSET:
            return True
        return FIRST_EXTENSION <= begun[EXTENSION_NUMBER_OFFSET] <= _SYNC_EXTENSIONS
    if kind == TYPE_MESSAGE:
        if len(begun) < MESSAGE_HEADER_SIZE:
            return True
        name_end = DESTINATION_OFFSET + begun[DESTINATION_LENGTH_OFFSET]
        properties = name_end + PROPERTIES_LENGTH_SIZE
        name = begun[DESTINATION_OFFSET:name_end].decode(errors="ignore")
        size = int.from_bytes(begun[name_end:properties])
        return bool(
            any(begun[SEQUENCE_OFFSET:DESTINATION_LENGTH_OFFSET])
            and begun[DESTINATION_LENGTH_OFFSET]
            and name.isprintable()
            and _LISTED(begun[properties : properties + size])
        )
    length_size = LARGE_LENGTH_SIZE if flags & FLAG_LARGE else SHORT_LENGTH_SIZE
    return bool(_NAMED(begun, HEADER_SIZE + length_size))
