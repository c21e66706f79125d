"""Messages of one MicroMsg2 peer to queues and topics, acknowledged when they are durable.

A full queue withholds acknowledgements: its messages are held, up to a limit, and retried in order
until there is room. Where no acknowledgements were agreed the peer can only be disconnected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from crosswire.commitlog.contract import Receipt
from crosswire.envelope import Envelope
from crosswire.errors import (
    CrosswireError,
    DestinationFull,
    HubError,
    LimitExceeded,
    QuotaExceeded,
    StoreFull,
)
from crosswire.gateways.gateway import Gateway
from crosswire.wire.micromsg2.connection import MicroMsg2Connection

__all__ = ["ANSWER", "MessageIntake"]

ANSWER: Final = -1
"""Instead of a sequence number: an answer to a call, which needs no acknowledgement."""

_RETRY_FIRST_S: Final = 0.01
_RETRY_LONGEST_S: Final = 0.5
_RETRY_MESSAGES: Final = 16
_RETRY_DESTINATIONS: Final = 64
"""One retry tries at most this much, however much is held: others need the loop."""
_OVERHEAD_BYTES: Final = 64
_HELD_OVERHEAD_BYTES: Final = 512
"""What a message takes in memory beside its payload: until its commit, and while it is held."""


class MessageIntake:
    """Hands messages with their sequence numbers, and answers with `ANSWER`, to the hub.

    `give_up` ends the connection; `answers_stored` is called with a number of answers that are
    durable now.
    """

    def __init__(
        self,
        gateway: Gateway,
        connection: MicroMsg2Connection,
        give_up: Callable[[CrosswireError], None],
        answers_stored: Callable[[int], None],
    ) -> None:
        self._gateway = gateway
        self._connection = connection
        self._give_up = give_up
        self._answers_stored = answers_stored
        self._has_acks = connection.agreement.window is not None
        self._most_bytes = gateway.context.config.connections.congested_bytes
        self._uncommitted_bytes = 0
        self._held: dict[str, deque[tuple[Envelope, int]]] = {}
        """Messages without room and their sequence numbers, by destination."""
        self._held_bytes = 0
        self._retry_s = _RETRY_FIRST_S
        self._timer: asyncio.TimerHandle | None = None

    def take(self, envelopes: list[Envelope], sequences: list[int]) -> None:
        """Hand a batch to the hub; stop reading from the peer while too much is not durable."""
        if self._held:
            # Nothing overtakes held messages of the same destination.
            envelopes, sequences = self._after_held(envelopes, sequences)
        if not envelopes:
            return
        size = sum([len(each.payload) for each in envelopes]) + _OVERHEAD_BYTES * len(envelopes)
        receipt = self._gateway.produce(envelopes)
        if receipt.refused:
            self._on_refused(receipt, envelopes, sequences)
        self._await(receipt, envelopes, sequences, size)

    def stop(self) -> None:
        """Retry no more: the peer is gone, and nothing that is held was acknowledged."""
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()

    def _await(
        self, receipt: Receipt, envelopes: list[Envelope], sequences: list[int], size: int
    ) -> None:
        if receipt.done:
            # Nothing in it needs a commit, or all was refused.
            self._finish(receipt, envelopes, sequences)
            return

        def committed(receipt: Receipt) -> None:
            self._uncommitted_bytes -= size
            # The peer may have gone before the commit: nobody to acknowledge to.
            if not self._gateway.left and not self._connection.closed:
                if self._uncommitted_bytes <= self._most_bytes:
                    self._gateway.session.hold_reading(False)
                self._finish(receipt, envelopes, sequences)

        self._uncommitted_bytes += size
        receipt.add_done_callback(self._gateway.owned(committed))
        if self._uncommitted_bytes > self._most_bytes and not self._gateway.left:
            self._gateway.session.hold_reading(True)

    def _finish(self, receipt: Receipt, envelopes: list[Envelope], sequences: list[int]) -> None:
        if receipt.error is not None:
            self._on_lost(receipt, envelopes, sequences, receipt.error)
        else:
            if receipt.refused:
                accepted = zip(receipt.ids, sequences, strict=True)
                sequences = [sequence for id_, sequence in accepted if id_]
            answers = sequences.count(ANSWER)
            if answers:
                sequences = [sequence for sequence in sequences if sequence != ANSWER]
                self._answers_stored(answers)
            if self._has_acks:
                # Only now, after the commit: acknowledged means durable.
                self._connection.acknowledge(*sequences)
        self._gateway.session.wake()

    def _on_refused(
        self, receipt: Receipt, envelopes: list[Envelope], sequences: list[int]
    ) -> None:
        self._gateway.context.count("refused", self._gateway.protocol, by=len(receipt.refused))
        for index, error in receipt.refused.items():
            # Without acknowledgements a full queue can't slow the peer down: ERROR `limit`. An
            # answer of a call may wait, since its peer does not expect an acknowledgement.
            if not _may_wait(error) or (sequences[index] != ANSWER and not self._has_acks):
                self._give_up(error)
                return
            self._hold(envelopes[index], sequences[index])

    def _on_lost(
        self,
        receipt: Receipt,
        envelopes: list[Envelope],
        sequences: list[int],
        error: HubError,
    ) -> None:
        """Hold a batch whose commit failed; those that were refused before are held already."""
        if not _may_wait(error) or not self._has_acks:
            self._give_up(error)
            return
        for index, identifier in enumerate(receipt.ids):
            if identifier:
                self._hold(envelopes[index], sequences[index])

    # Full queues.

    def _after_held(
        self, envelopes: list[Envelope], sequences: list[int]
    ) -> tuple[list[Envelope], list[int]]:
        """The messages whose destination has none held; the others are held too, in order."""
        passed = []
        for envelope, sequence in zip(envelopes, sequences, strict=True):
            if envelope.destination in self._held:
                self._hold(envelope, sequence)
            else:
                passed.append((envelope, sequence))
        return [each[0] for each in passed], [each[1] for each in passed]

    def _hold(self, envelope: Envelope, sequence: int) -> None:
        """Keep a message for a retry.

        The limit is checked before it is added: a single message may be as large as the limit.
        """
        if self._held_bytes >= self._connection.limits.message_bytes:
            self._give_up(LimitExceeded("too much was sent to full queues"))
            return
        self._held.setdefault(envelope.destination, deque()).append((envelope, sequence))
        self._held_bytes += _held_size(envelope)
        if self._timer is None:
            self._plan_retry()

    def _plan_retry(self, *, at_once: bool = False) -> None:
        loop = asyncio.get_running_loop()
        delay_s = 0.0 if at_once else self._retry_s
        self._timer = loop.call_later(delay_s, self._gateway.owned(self._retry))
        if not at_once:
            self._retry_s = min(2 * self._retry_s, _RETRY_LONGEST_S)

    def _retry(self) -> None:
        """Retry some of what is held, destinations in turn."""
        self._timer = None
        has_room = False
        for destination in list(islice(self._held, _RETRY_DESTINATIONS)):
            if self._gateway.left or self._connection.closed:
                return
            held = self._held.pop(destination, None)
            if held is not None:
                # Moved to the end: the next retry starts with those that were not reached.
                self._held[destination] = held
                has_room = self._retry_one(destination, held) or has_room
        if self._held and self._timer is None:
            self._plan_retry(at_once=has_room)

    def _retry_one(self, destination: str, held: deque[tuple[Envelope, int]]) -> bool:
        """Produce the first ones of a destination; gives whether all of them were accepted."""
        tried = list(islice(held, _RETRY_MESSAGES))
        envelopes = [each[0] for each in tried]
        sequences = [each[1] for each in tried]
        receipt = self._gateway.produce(envelopes)
        for error in receipt.refused.values():
            if not _may_wait(error):
                self._give_up(error)
                return False
        if len(receipt.refused) == len(envelopes):
            return False
        # Some were accepted: those that were refused stay first, before the ones not tried.
        self._retry_s = _RETRY_FIRST_S
        refused = [tried[index] for index in sorted(receipt.refused)]
        for _ in tried:
            held.popleft()
        held.extendleft(reversed(refused))
        if not held:
            del self._held[destination]
        size = sum(map(_held_size, envelopes)) - sum(_held_size(each) for each, _ in refused)
        self._held_bytes -= size
        self._await(receipt, envelopes, sequences, size)
        return not refused


def _held_size(envelope: Envelope) -> int:
    """What it takes in memory, roughly: properties may be larger than the payload."""
    size = _HELD_OVERHEAD_BYTES + len(envelope.payload)
    for key, value in envelope.properties.items():
        size += len(key) + (len(value) if isinstance(value, str) else 8)
    return size


def _may_wait(error: CrosswireError) -> bool:
    """Whether the message can be accepted when consumers have caught up, or the disk has room."""
    return isinstance(error, DestinationFull | StoreFull) and not isinstance(error, QuotaExceeded)
