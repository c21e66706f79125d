"""Which consumer gets which message of a backlog.

Consumers with free capacity wait in a heap: the highest weight first, among equals the one that got
a message least recently. A consumer is in the heap at most once (`is_listed`). It is taken out for
its turn and put back if it has capacity left, or if it was passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from crosswire.envelope import MICROSECONDS
from crosswire.hub.attachment import Consumer, Delivery, Item
from crosswire.hub.backlog.memory import BacklogMemory, BacklogOwner
from crosswire.hub.backlog.retries import Retries
from crosswire.hub.core import Core
from crosswire.hub.ledger import Step

__all__ = ["ConsumerDispatch"]

_PART: Final = 256
_PART_BYTES: Final = 1 << 19
"""Messages, and their size, that are handed out before others may have a turn."""
_TESTED: Final = 64
"""Messages that a filter is asked about before it is checked whether the turn is over."""


class ConsumerDispatch:
    """Hands ready messages to consumers.

    `is_held_up`: the last dispatch left messages ready because consumers together hold as much as
    memory allows; a settlement is then a reason for the next one.
    """

    def __init__(
        self, core: Core, memory: BacklogMemory, retries: Retries, owner: BacklogOwner
    ) -> None:
        self.consumers: list[Consumer] = []
        self.filtering = 0
        """How many consumers have a filter."""
        self.is_held_up = False
        self._core = core
        self._loop = core.loop
        self._wall = core.wall
        self._memory = memory
        self._retries = retries
        self._owner = owner
        self._eligible: list[tuple[int, int, int, Consumer]] = []
        self._turns = 0

    def add(self, consumer: Consumer, holding: Sequence[int], now: float) -> None:
        """A consumer attached; it has the messages `holding` from before a restart."""
        self.consumers.append(consumer)
        self.filtering += consumer.has_filter
        if holding:
            self._give_back(consumer, set(holding), now)

    def _give_back(self, consumer: Consumer, ids: set[int], now: float) -> None:
        """Nobody else may get what it still has; it may be anywhere in the backlog."""
        memory = self._memory
        memory.read_upto(max(ids))
        memory.remove_ready(ids)
        for identifier in sorted(ids):
            item = memory.items.get(identifier)
            if item is not None and item.consumer is None:
                self._give(item, consumer, now)
                consumer.window.free -= 1

    def remove(self, consumer: Consumer) -> dict[int, Item]:
        """A consumer detached. Returns what it held, which is still counted as held."""
        self.consumers.remove(consumer)
        self.filtering -= consumer.has_filter
        held, consumer.held = consumer.held, {}
        if len(self._eligible) > 2 * len(self.consumers) + 16:
            # Entries of detached consumers are dropped when their turn comes, which on an idle
            # queue never happens: one that polls by attaching would fill the heap.
            self._eligible = [entry for entry in self._eligible if entry[3].is_open]
            heapq.heapify(self._eligible)
        return held

    def offer(self, consumer: Consumer) -> bool:
        """Its window has free capacity, perhaps. Returns True if that makes a dispatch worthwhile.

        Not for one that is listed: it has been offered all that is ready, or will be soon.
        """
        if consumer.is_open and not consumer.is_listed and consumer.window.free > 0:
            self._list(consumer)
            return True
        return False

    def _list(self, consumer: Consumer) -> None:
        consumer.is_listed = True
        heapq.heappush(
            self._eligible, (-consumer.weight, consumer.last_used, consumer.number, consumer)
        )

    def dispatch(self, now: float) -> None:
        """Hand out what is ready, or a part of it; each consumer gets all of its messages of the
        part in one call."""
        memory, is_over = self._memory, self._loop.turns.is_over
        memory.fill()
        self.is_held_up = False
        given: dict[Consumer, list[Delivery]] = {}
        passed: list[Consumer] = []
        now_us = int(now * MICROSECONDS)
        left, most_bytes = _PART, memory.held_bytes + _PART_BYTES
        try:
            # `memory.ready` is another object after messages expired: never keep a reference.
            while memory.ready and self._eligible:
                if (
                    left <= 0
                    or memory.held_bytes >= most_bytes
                    or (self.filtering and given and is_over())
                ):
                    self._loop.touch(self._owner)
                    break
                consumer = heapq.heappop(self._eligible)[3]
                consumer.is_listed = False
                if not consumer.is_open or consumer.window.free <= 0:
                    continue
                if consumer.held and memory.held_bytes >= memory.window_bytes:
                    self.is_held_up = True
                    passed.append(consumer)
                    continue
                before = consumer.window.free
                if self.filtering:
                    self._give_matching(consumer, given, now, now_us)
                    if is_over() and consumer.window.free == before:
                        # Perhaps it was not asked about all of them.
                        passed.append(consumer)
                        self._loop.touch(self._owner)
                        break
                else:
                    # One message a turn, so that consumers of equal weight share; alone, it gets
                    # as many as it can take without passing through the heap for each.
                    count = 1 if self._eligible else min(before, left)
                    self._give_some(consumer, count, given, now, now_us)
                left -= before - consumer.window.free
                if consumer.window.free == before and self.filtering:
                    passed.append(consumer)
                elif consumer.window.free > 0:
                    self._list(consumer)
                if memory.loaded < memory.visible:
                    memory.fill()
        finally:
            # Also when the disk can't be read: what was assigned counts as held, so it must be
            # delivered. Those passed over stay listed: whatever becomes ready later touches the
            # backlog, and so does what `fill` has read after their turn.
            for consumer in passed:
                self._list(consumer)
            if memory.ready:
                is_full_of_others = bool(
                    self.filtering and passed and memory.loaded < memory.visible
                )
                self._retries.schedule_expiry(now, anywhere=is_full_of_others)
            for consumer, deliveries in given.items():
                if deliveries:
                    self._hand_over(consumer, deliveries, now)

    def _give_some(
        self,
        consumer: Consumer,
        count: int,
        given: dict[Consumer, list[Delivery]],
        now: float,
        now_us: int,
    ) -> None:
        # The hot loop of a delivery: local variables, and `_give` written out.
        memory, ready = self._memory, self._memory.ready
        deliveries = given.setdefault(consumer, [])
        self._turns += 1
        consumer.last_used = self._turns
        held, free, lease_s = consumer.held, consumer.window.free, consumer.lease_s
        held_bytes = memory.held_bytes
        most_bytes = min(memory.window_bytes, held_bytes + _PART_BYTES)
        while ready and count and (held_bytes < most_bytes or not held):
            item = ready.popleft()
            envelope = item.envelope
            if envelope.expires and self._wall.is_expired(envelope, now_us):
                self._owner.expire(item, now_us)
                continue
            item.delivered += 1
            item.consumer = consumer
            held[item.id] = item
            held_bytes += item.size
            if lease_s is not None:
                self._retries.lease(item, now + lease_s)
            deliveries.append(Delivery(envelope, item.delivered))
            count -= 1
            free -= 1
        consumer.window.free = free
        memory.held_bytes = held_bytes

    def _give_matching(
        self, consumer: Consumer, given: dict[Consumer, list[Delivery]], now: float, now_us: int
    ) -> None:
        """Give it the first message that its filter matches; the others stay for others.

        Its filter is asked about each message once. If the turn is over before it was asked about
        all, it goes on from there.
        """
        memory, has_expired = self._memory, False
        is_over = self._loop.turns.is_over
        for tested, (index, item) in enumerate(self._unseen(consumer), 1):
            if self._retries.is_expired(item, now_us):
                has_expired = True
            elif consumer.takes(item.envelope):
                del memory.ready[index]
                self._turns += 1
                consumer.last_used = self._turns
                self._give(item, consumer, now)
                given.setdefault(consumer, []).append(Delivery(item.envelope, item.delivered))
                consumer.window.free -= 1
                if not item.returned:
                    consumer.seen_id, consumer.seen_returns = item.id, memory.returns
                break
            elif not item.returned and not tested % _TESTED and is_over():
                consumer.seen_id, consumer.seen_returns = item.id, memory.returns
                break
        else:
            consumer.seen_id, consumer.seen_returns = memory.loaded, memory.returns
        if has_expired:
            self._retries.expire_all(now_us)

    def _unseen(self, consumer: Consumer) -> Iterator[tuple[int, Item]]:
        """Ready messages that its filter was not asked about, and their indexes.

        Those that returned are in front of all others, the last one first; the others are in order
        of ids. So what is new is at both ends.
        """
        ready, seen_id = self._memory.ready, consumer.seen_id
        first = ready[0]
        if consumer.choice is not None or (first.id > seen_id and not first.returned):
            # A choice may change at any time: nothing is seen for good.
            yield from enumerate(ready)
            return
        for index, item in enumerate(ready):
            if item.returned <= consumer.seen_returns:
                break
            yield index, item
        new = 0
        for item in reversed(ready):
            if item.returned or item.id <= seen_id:
                break
            new += 1
        for index in range(len(ready) - new, len(ready)):
            yield index, ready[index]

    def look_again(self) -> None:
        """A message has changed: filters are asked about all of them again."""
        for consumer in self.consumers:
            consumer.seen_id = consumer.seen_returns = 0

    def _give(self, item: Item, consumer: Consumer, now: float) -> None:
        item.delivered += 1
        item.consumer = consumer
        consumer.held[item.id] = item
        self._memory.held_bytes += item.size
        if consumer.lease_s is not None:
            self._retries.lease(item, now + consumer.lease_s)

    def _hand_over(self, consumer: Consumer, deliveries: list[Delivery], now: float) -> None:
        """Enter deliveries into the ledger, then deliver: the receiver may settle at once, and
        the ledger has the steps in their order."""
        attempts = {each.attempt for each in deliveries}
        if len(attempts) == 1:
            ids = [each.envelope.id for each in deliveries]
            self._owner.note(Step.DELIVERED, now, ids, peer=consumer.peer, attempt=attempts.pop())
        else:
            # A run of the ledger for each attempt.
            for attempt in sorted(attempts):
                ids = [each.envelope.id for each in deliveries if each.attempt == attempt]
                self._owner.note(Step.DELIVERED, now, ids, peer=consumer.peer, attempt=attempt)
        self._core.commits.request(sync=False, urgent=False)
        self._loop.deliver(consumer, deliveries)
