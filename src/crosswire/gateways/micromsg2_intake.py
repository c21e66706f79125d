"""What one MicroMsg2 peer sends to queues and topics: acknowledged when it is on disk.

A full queue withholds acknowledgements: what came is kept, up to a limit, and tried again in its
order until there is room. Without acknowledgements the peer can only be sent away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from crosswire.envelope import Envelope
from crosswire.errors import CrosswireError, DestinationFull, HubError, LimitExceeded, StoreFull
from crosswire.hub.receipt import Receipt
from crosswire.wire.micromsg2.connection import MicroMsg2Connection

if TYPE_CHECKING:
    from crosswire.gateways.gateway import Gateway

__all__ = ["Intake"]

_RETRY_FIRST_S: Final = 0.01
_RETRY_LONGEST_S: Final = 0.5
_FULL: Final = (DestinationFull, StoreFull)


class Intake:
    """Messages come with their sequence numbers; 0 is one that nobody waits for."""

    def __init__(
        self,
        gateway: Gateway,
        connection: MicroMsg2Connection,
        give_up: Callable[[CrosswireError], None],
    ) -> None:
        self._gateway = gateway
        self._connection = connection
        self._give_up = give_up
        self._has_acks = connection.agreement.window is not None
        self._most_bytes = gateway.site.config.connections.congested_bytes
        self._uncommitted_bytes = 0
        self._held: dict[str, deque[tuple[Envelope, int]]] = {}
        self._held_bytes = 0
        self._retry_s = _RETRY_FIRST_S
        self._timer: asyncio.TimerHandle | None = None

    def take(self, envelopes: list[Envelope], sequences: list[int]) -> None:
        """Hand a batch to the hub. While too much of it is not on disk the peer is not read."""
        if self._held:
            envelopes, sequences = self._behind_held(envelopes, sequences)
        if not envelopes:
            return
        size = sum([len(each.payload) for each in envelopes])
        receipt = self._gateway.produce(envelopes)
        if receipt.refused:
            self._on_refused(receipt, envelopes, sequences)
        self._await(receipt, envelopes, sequences, size)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()

    def _await(
        self, receipt: Receipt, envelopes: list[Envelope], sequences: list[int], size: int
    ) -> None:
        if receipt.done:
            self._finish(receipt, envelopes, sequences)
            return

        def committed(receipt: Receipt) -> None:
            self._uncommitted_bytes -= size
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
        elif self._has_acks:
            if receipt.refused or not all(sequences):
                accepted = zip(receipt.ids, sequences, strict=True)
                sequences = [sequence for id_, sequence in accepted if id_ and sequence]
            self._connection.acknowledge(*sequences)
        self._gateway.session.wake()

    def _on_refused(
        self, receipt: Receipt, envelopes: list[Envelope], sequences: list[int]
    ) -> None:
        self._gateway.site.count("refused", self._gateway.protocol, by=len(receipt.refused))
        for place, error in receipt.refused.items():
            if not isinstance(error, _FULL) or (sequences[place] and not self._has_acks):
                self._give_up(error)
                return
            self._hold(envelopes[place], sequences[place])

    def _on_lost(
        self,
        receipt: Receipt,
        envelopes: list[Envelope],
        sequences: list[int],
        error: HubError,
    ) -> None:
        """The disk did not take the batch; what was refused before is held already."""
        if not isinstance(error, _FULL) or not self._has_acks:
            self._give_up(error)
            return
        for place, identifier in enumerate(receipt.ids):
            if identifier:
                self._hold(envelopes[place], sequences[place])

    # Full queues.

    def _behind_held(
        self, envelopes: list[Envelope], sequences: list[int]
    ) -> tuple[list[Envelope], list[int]]:
        """Without those for a queue that others of this peer wait for already."""
        passed = []
        for envelope, sequence in zip(envelopes, sequences, strict=True):
            if envelope.destination in self._held:
                self._hold(envelope, sequence)
            else:
                passed.append((envelope, sequence))
        return [each[0] for each in passed], [each[1] for each in passed]

    def _hold(self, envelope: Envelope, sequence: int) -> None:
        self._held.setdefault(envelope.destination, deque()).append((envelope, sequence))
        self._held_bytes += len(envelope.payload)
        if self._held_bytes > self._connection.limits.message_bytes:
            self._give_up(LimitExceeded("too much was sent to queues that are full"))
        elif self._timer is None:
            self._plan_retry()

    def _plan_retry(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._retry_s, self._gateway.owned(self._retry))
        self._retry_s = min(2 * self._retry_s, _RETRY_LONGEST_S)

    def _retry(self) -> None:
        self._timer = None
        for destination, held in list(self._held.items()):
            if self._gateway.left or self._connection.closed:
                return
            self._retry_one(destination, held)
        if self._held and self._timer is None:
            self._plan_retry()

    def _retry_one(self, destination: str, held: deque[tuple[Envelope, int]]) -> None:
        envelopes = [each[0] for each in held]
        sequences = [each[1] for each in held]
        receipt = self._gateway.produce(envelopes)
        for error in receipt.refused.values():
            if not isinstance(error, _FULL):
                self._give_up(error)
                return
        if len(receipt.refused) == len(envelopes):
            return
        self._retry_s = _RETRY_FIRST_S
        refused = [(envelopes[place], sequences[place]) for place in sorted(receipt.refused)]
        for _ in envelopes:
            held.popleft()
        held.extendleft(reversed(refused))
        if not held:
            del self._held[destination]
        size = sum(len(each.payload) for each in envelopes)
        size -= sum(len(each.payload) for each, _ in refused)
        self._held_bytes -= size
        self._await(receipt, envelopes, sequences, size)
