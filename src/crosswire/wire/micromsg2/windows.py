"""Acknowledgement windows: which frames wait for an ack, and which of them one ack covers.

Sequence numbers run from 1 to 65535 and then from 1 again, separately in each direction. An ack has
one number and covers all frames up to it, also across the wrap (specification, "batch-ack"). A
window is at most 32767 frames, so that a number is never ambiguous.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from crosswire.errors import LimitExceeded, LocalProtocolError, MalformedFrame, UnexpectedFrame
from crosswire.wire.micromsg2.frames import following
from crosswire.wire.micromsg2.layout import LAST_SEQUENCE

__all__ = ["UNLIMITED", "ReceiveWindow", "SendWindow"]

UNLIMITED: Final = LAST_SEQUENCE


def _steps(first: int, second: int) -> int:
    """How many times `following` must be applied to get from the first to the second."""
    return (second - first) % LAST_SEQUENCE


class SendWindow:
    """Numbers our frames, and keeps which of them wait for the peer's ack.

    With a `size` of None no acks are exchanged, and nothing waits.
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._next = 1
        self._oldest = 1
        self._waiting = 0
        self._messages: deque[int] = deque()

    @property
    def room(self) -> int:
        """How many frames may be sent now."""
        return UNLIMITED if self._size is None else self._size - self._waiting

    @property
    def waiting(self) -> int:
        """How many frames the peer has not acknowledged."""
        return self._waiting

    def last_of(self, frames: int) -> int:
        """The number of the last of `frames` frames, the first of which is the next to be sent."""
        return (self._next - 1 + frames - 1) % LAST_SEQUENCE + 1

    def take_run(self, count: int) -> list[int]:
        """The numbers of `count` messages of one frame each, which are sent now."""
        first, end = self._next, self._next + count
        # Nearly all runs end before the wrap.
        if end <= LAST_SEQUENCE:
            run = list(range(first, end))
            self._next = end
        else:
            run = [(number - 1) % LAST_SEQUENCE + 1 for number in range(first, end)]
            self._next = following(run[-1])
        if self._size is not None:
            self._waiting += count
            self._messages.extend(run)
        return run

    def take(self, *, last: bool) -> int:
        """The number of a frame that is sent now; `last` if a message ends with it."""
        sequence = self._next
        self._next = following(sequence)
        if self._size is not None:
            self._waiting += 1
            if last:
                self._messages.append(sequence)
        return sequence

    def acknowledge(self, sequence: int) -> list[int]:
        """The messages that the peer's ack settles, by their last frames.

        Raises MalformedFrame for 0, UnexpectedFrame for a number that does not wait.
        """
        if not sequence:
            raise MalformedFrame("an acknowledgement of sequence number 0")
        # Counted from the oldest, so that a number before it seems to cover nearly all 65535.
        covered = _steps(self._oldest, sequence) + 1
        if covered > self._waiting:
            raise UnexpectedFrame(f"an acknowledgement of {sequence}, which is not outstanding")
        messages = self._messages
        if len(messages) == self._waiting:
            # All messages have one frame: then as many messages as frames are covered.
            settled = [messages.popleft() for _ in range(covered)]
        else:
            settled = []
            while messages and _steps(self._oldest, messages[0]) < covered:
                settled.append(messages.popleft())
        self._oldest = following(sequence)
        self._waiting -= covered
        return settled


class ReceiveWindow:
    """The peer's frames: which are safe, and up to which all of them are.

    The decoder has checked their sequence, so the oldest and a count identify all that wait.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._oldest = 1
        self._waiting = 0
        self._unsent = 0
        self._safe: set[int] = set()
        self._due: int | None = None

    @property
    def waiting(self) -> int:
        """How many frames we have not acknowledged."""
        return self._waiting

    @property
    def room(self) -> int:
        """How many frames the peer may send before we acknowledge one."""
        # An acknowledgement that is due but not sent gives it no room: it can't know of it.
        return self._size - self._waiting - self._unsent

    def receive_run(self, first: int, count: int) -> None:
        """`count` messages of one frame each were received, at most as many as there is `room`."""
        if not self._waiting:
            self._oldest = first
        self._waiting += count

    def receive(self, sequence: int, *, last: bool) -> None:
        """A frame was received. One that is continued is safe at once: only the message's last
        frame is acknowledged by the owner.

        Raises LimitExceeded.
        """
        if self.room <= 0:
            raise LimitExceeded(f"more than {self._size} frames without waiting for an ack")
        if not self._waiting:
            self._oldest = sequence
        self._waiting += 1
        if not last:
            self._safe.add(sequence)
            self._advance()

    def acknowledge(self, *sequences: int) -> None:
        """The messages that end with these frames are safe.

        Raises LocalProtocolError for a frame that does not wait.
        """
        # The usual case, acknowledged in order: no set is needed.
        if not self._safe and self._is_head(sequences):
            self._due = sequences[-1]
            self._oldest = following(self._due)
            self._waiting -= len(sequences)
            self._unsent += len(sequences)
            return
        for sequence in sequences:
            if sequence in self._safe or _steps(self._oldest, sequence) >= self._waiting:
                raise LocalProtocolError(f"no message {sequence} waits for its acknowledgement")
            self._safe.add(sequence)
        self._advance()

    def take_due(self) -> int | None:
        """The number to acknowledge now, or None; returned once."""
        due, self._due, self._unsent = self._due, None, 0
        return due

    @property
    def is_due(self) -> bool:
        """Whether there is a number to acknowledge."""
        return self._due is not None

    @property
    def is_half_used(self) -> bool:
        """Whether half of the window waits for an ack: the peer may soon have to stop."""
        return 2 * (self._waiting + self._unsent) >= self._size

    def _is_head(self, sequences: tuple[int, ...]) -> bool:
        """Whether these are the oldest frames that wait, in order and without a wrap."""
        count = len(sequences)
        if not count or count > self._waiting or sequences[0] != self._oldest:
            return False
        end = self._oldest + count
        return end <= LAST_SEQUENCE and sequences == tuple(range(self._oldest, end))

    def _advance(self) -> None:
        """An ack covers all frames before it, so it is due only when they are all safe."""
        safe = self._safe
        while self._waiting and self._oldest in safe:
            self._due = self._oldest
            safe.remove(self._due)
            self._oldest = following(self._due)
            self._waiting -= 1
            self._unsent += 1
