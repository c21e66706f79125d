"""Failed deliveries of a backlog, and everything in it that waits for a time.

    delayed    refused messages, until they are ready again
    leases     messages that a consumer must settle or extend in time, or they are returned
    expiry     the time of the next ready message that expires

One timer serves all three: it is set for the earliest of these times.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Final

from crosswire.envelope import MICROSECONDS
from crosswire.hub.attachment import Consumer, Item
from crosswire.hub.backlog.memory import BacklogMemory, BacklogOwner
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.cursor import Cursor, FailedDelivery
from crosswire.hub.dead import bury
from crosswire.hub.ledger import Step, shortened

__all__ = ["Retries"]

_STEPS: Final = 32
"""Messages that are looked at before it is checked whether the turn is over."""
_CAUSE_CHARACTERS: Final = 256 * 1024
"""Of the reasons that all messages of a backlog keep together, for each attempt."""
_LEAST_CAUSE_CHARACTERS: Final = 32
_WRITTEN: Final = 512
"""Refused messages that are left for the moment at which a group is sealed: to write tens of
thousands of them is a long turn."""


class Retries:
    """Decides what becomes of a message whose delivery failed, and when."""

    def __init__(
        self,
        core: Core,
        cursor: Cursor,
        memory: BacklogMemory,
        owner: BacklogOwner,
        send: SendEnvelope,
    ) -> None:
        self.wake_at = 0.0
        """When the timer is due; 0 if there is none."""
        self._core = core
        self._loop = core.loop
        self._wall = core.wall
        self._cursor = cursor
        self._memory = memory
        self._owner = owner
        self._send = send
        self._delayed: list[tuple[float, int, Item]] = []
        self._leases: list[tuple[float, int, int]] = []

    def fail(
        self,
        items: Sequence[Item],
        consumer: Consumer,
        step: Step,
        cause: str,
        now: float,
        delay_s: float | None,
        *,
        final: bool | None = None,
    ) -> None:
        """A consumer no longer holds these and has not settled them: retry them or bury them.

        `delay_s` None leaves the delay, `final` None the number of attempts to the retry policy.
        """
        cause = shortened(cause)
        time_us = self._wall.stamp_us(int(now * MICROSECONDS))
        failed = FailedDelivery(time_us, consumer.peer.connection, self._remembered(cause))
        # One run of the ledger for all that were delivered as often: a group with a run for each
        # of thousands of messages takes long to seal.
        for attempt, run in groupby(items, key=lambda item: item.delivered):
            part = list(run)
            ids = [item.id for item in part]
            self._owner.note(step, now, ids, peer=consumer.peer, attempt=attempt, detail=cause)
            for item in part:
                self._fail_one(item, failed, cause, now, delay_s, final)
        if self._cursor.refused_count >= _WRITTEN:
            self._owner.write()

    def _remembered(self, cause: str) -> str:
        """A reason as each of the messages keeps it; the ledger has all of it.

        One request may refuse thousands of messages, and each of them has its reasons in every
        snapshot of the cursor: the more messages there are, the shorter they are.
        """
        most = max(_CAUSE_CHARACTERS // (len(self._memory.items) + 1), _LEAST_CAUSE_CHARACTERS)
        return cause if len(cause) <= most else f"{cause[: most - 1]}…"

    def _fail_one(
        self,
        item: Item,
        failed: FailedDelivery,
        cause: str,
        now: float,
        delay_s: float | None,
        final: bool | None,
    ) -> None:
        owner = self._owner
        item.consumer = None
        item.due = 0.0
        self._memory.held_bytes -= item.size
        item.attempts = [*item.attempts, failed]
        if final is None:
            final = 0 < owner.retry.max_attempts <= item.delivered
        if final:
            self._bury(item, cause, now)
            return
        self._cursor.refuse(item.number, item.id, item.attempts)
        if delay_s is None:
            delay_s = owner.retry.delay_s(item.delivered, self._core.chance())
        if delay_s <= 0:
            self._memory.put_back(item)
            self._loop.touch(owner)
            return
        item.due = now + delay_s
        heapq.heappush(self._delayed, (item.due, item.id, item))
        self._wake(item.due)

    def _bury(self, item: Item, cause: str, now: float) -> None:
        """Move it to the dead letters, and settle it here in the same group."""
        owner = self._owner
        owner.note(Step.DEAD, now, [item.id], detail=cause)
        self._send(bury(item.envelope, owner.dead_letters, cause, item.attempts), now)
        if self._core.watchers.by_id:
            self._core.watchers.notify([item.id], cause)
        owner.discard(item)

    # Delayed messages that leave before their time.

    def remove_delayed(self, ids: Collection[int]) -> None:
        """These are settled by other means."""
        self._delayed = [entry for entry in self._delayed if entry[1] not in ids]
        heapq.heapify(self._delayed)

    def pop_oldest_delayed(self) -> Item | None:
        """Take out the delayed message with the least id; None if none is delayed."""
        if not self._delayed:
            return None
        entry = min(self._delayed, key=lambda each: each[1])
        self._delayed.remove(entry)
        heapq.heapify(self._delayed)
        return entry[2]

    # Time.

    def lease(self, item: Item, due: float) -> None:
        """The consumer that holds it must settle or extend it before this time."""
        item.due = due
        heapq.heappush(self._leases, (due, item.id, item.delivered))
        # Most leases end with a settlement long before they are due: without this the heap would
        # grow with every message of a lease's duration.
        if len(self._leases) > 1024 + 2 * len(self._memory.items):
            self._leases = [
                (each.due, each.id, each.delivered)
                for each in self._memory.items.values()
                if each.consumer is not None and each.due
            ]
            heapq.heapify(self._leases)
        self._wake(due)

    def extend(self, item: Item, due: float) -> None:
        """The lease of a message that a consumer holds ends at this time instead."""
        if not item.due or due < item.due:
            self.lease(item, due)
        else:
            # The entry that there is moves when its time comes: a peer may extend often.
            item.due = due

    def schedule_expiry(self, now: float, *, anywhere: bool = False) -> None:
        """Set the timer for the next expiry at the head, which is the oldest message.

        Others expire when they get there: until then they harm nobody. `anywhere` is for a memory
        full of messages that no filter matches, where whatever expires makes room.
        """
        ready = self._memory.ready
        if not ready:
            return
        items = ready if anywhere else (ready[0],)
        expiries = (self._wall.expiry(each.envelope) for each in items if each.envelope.expires)
        due = min(expiries, default=None)
        if due is not None:
            self._wake(max(due, now))

    def is_expired(self, item: Item, now_us: int) -> bool:
        """Whether it is no longer worth delivering."""
        return item.envelope.expires > 0 and self._wall.is_expired(item.envelope, now_us)

    def expire_all(self, now_us: int) -> None:
        """Expire ready messages that are not at the head, too: what no filter matches stays in
        front of them."""
        expired = [item for item in self._memory.ready if self.is_expired(item, now_us)]
        if expired:
            self._memory.remove_ready({item.id for item in expired})
            for item in expired:
                self._owner.expire(item, now_us)

    def _wake(self, due: float) -> None:
        if not self.wake_at or due < self.wake_at:
            self.wake_at = due
            # An action of an owner is called again if it raises: what waits here has no other
            # event that would bring it forward.
            self._core.timers.at_least(self._owner, due, self._on_time)

    def _on_time(self, now: float) -> None:
        owner, memory = self._owner, self._memory
        self.wake_at = 0.0
        is_over = self._loop.turns.is_over
        steps = 0

        def has_time() -> bool:
            """Something at least, even if the turn is over; the timer is due again for the rest."""
            nonlocal steps
            steps += 1
            return steps % _STEPS != 0 or not is_over()

        while self._delayed and self._delayed[0][0] <= now and has_time():
            item = heapq.heappop(self._delayed)[2]
            item.due = 0.0
            memory.put_back(item)
            self._loop.touch(owner)
        while self._leases and self._leases[0][0] <= now and has_time():
            due, identifier, attempt = heapq.heappop(self._leases)
            found = memory.items.get(identifier)
            # Of an earlier delivery, or of a lease that was made shorter: that has another entry.
            if found is None or found.consumer is None or found.delivered != attempt:
                continue
            if found.due > due:
                heapq.heappush(self._leases, (found.due, identifier, attempt))
            elif found.due == due:
                consumer = found.consumer
                if consumer.held.pop(identifier, None) is None:
                    # It was refused, or its consumer left: that is done in parts.
                    continue
                self.fail([found], consumer, Step.RETURNED, "the lease ran out", now, None)
                self._core.commits.changed(owner)
                owner.make_room(consumer, 1, now)
        now_us = int(now * MICROSECONDS)
        while memory.ready and self.is_expired(memory.ready[0], now_us) and has_time():
            owner.expire(memory.ready.popleft(), now_us)
            memory.fill()
        if owner.is_filtered:
            self.expire_all(now_us)
        if self._delayed:
            self._wake(self._delayed[0][0])
        if self._leases:
            self._wake(self._leases[0][0])
        self.schedule_expiry(now)
        owner.check()
        # Also when nothing was due any more: the next expiry among messages that no filter matches
        # is found by the dispatch.
        self._loop.touch(owner)
        self._loop.pump(now)
