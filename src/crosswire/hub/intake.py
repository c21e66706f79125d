"""Accepting messages: batches of envelopes become part of the open commit group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

import msgspec

from crosswire.commitlog.contract import AcceptedMessages, Receipt
from crosswire.envelope import MICROSECONDS, ONLY_FOR, Envelope, encode, encode_run, stamp_run
from crosswire.errors import HubError, InvalidDestination, InvalidEnvelope, StoreError
from crosswire.hub.core import Core
from crosswire.hub.destinations import Destinations
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.queues import Queue
from crosswire.hub.subscribers import Subscriber
from crosswire.hub.subscriptions import Audience, Subscription, Subscriptions
from crosswire.hub.topics import Topic

__all__ = ["Intake"]

_FIRST_LEVEL: Final = slice(6, 7)
"""The first character of NAME in `queue/NAME` and `topic/NAME`."""
_DELIVERIES: Final = 256
_DELIVERY_BYTES: Final = 1 << 19
"""Deliveries to the subscribers of a topic, and their size, before others may have a turn. A
message that is larger is delivered to one subscriber at a time."""


class _DeliveryTally:
    """Deliveries of a batch: `whole` ones, and of `single` messages of it by id."""

    __slots__ = ("single", "whole")

    def __init__(self) -> None:
        self.whole = 0
        self.single: Counter[int] = Counter()


class Intake:
    """Appends messages to queues and topics, and to the open commit group."""

    def __init__(
        self, core: Core, destinations: Destinations, subscriptions: Subscriptions
    ) -> None:
        self._core = core
        self._store = core.store
        self._ledger = core.ledger
        self._commits = core.commits
        self._loop = core.loop
        self._wall = core.wall
        self._destinations = destinations
        self._queues = destinations.queues
        self._subscriptions = subscriptions

    def produce(self, envelopes: Sequence[Envelope], now: float) -> Receipt:
        """Accept a batch of one producer, for queues and topics, in order.

        Each message is accepted or refused on its own; the receipt is done when those that must
        be on disk are. Messages that need not wait for the disk are delivered when this returns; if
        a callback of the hub calls this, after that callback has returned.
        """
        self._loop.now = now
        count = len(envelopes)
        try:
            first = self._store.reserve(count) if count else 0
        except StoreError as error:
            # Rare: ids are reserved with commits, unless these have failed for long.
            refused = Receipt([0] * count, dict.fromkeys(range(count), error))
            refused.finish()
            return refused
        receipt = Receipt(list(range(first, first + count)), {})
        waits = False
        published: list[tuple[Topic, Audience, list[Envelope]]] = []
        destinations = list(map(_destination, envelopes))
        index = 0
        if count > 1 and destinations.count(destinations[0]) < count:
            waits = self._send_spread(envelopes, destinations, receipt, now)
            index = count if waits else 0
        while index < count:
            destination = destinations[index]
            end = _end_of_run(destinations, index)
            run = envelopes[index:end]
            try:
                if destination[_FIRST_LEVEL] == "@":
                    raise InvalidDestination(f"{destination!r} is the hub's own")
                known = self._queues.get(destination)
                target = known or self._open(run[0])
                if isinstance(target, Queue):
                    waits |= self._send(target, run, index, receipt, now)
                else:
                    waits |= self._publish(target, run, index, receipt, now, published)
            except HubError as error:
                for each in range(index, end):
                    _refuse(receipt, each, error)
            index = end
        if waits:
            self._store.group.receipts.append(receipt)
            self._commits.request()
        else:
            self._commits.request(sync=False, urgent=False)
            receipt.finish()
        for topic, audience, accepted in published:
            self._fan_out(topic, audience, accepted, now)
        self._loop.pump(now)
        return receipt

    def _open(self, first: Envelope) -> Queue | Topic:
        """The destination of a message, which counts for its producer if it is new."""
        holder = self._core.holders.of(first.principal, first.connection)
        return self._destinations.target(first.destination, holder)

    def _send(
        self, queue: Queue, run: Sequence[Envelope], index: int, receipt: Receipt, now: float
    ) -> bool:
        """Append to a queue; True if the producer has to wait for the disk."""
        obstacle = self._store.obstacle(now)
        if obstacle is not None:
            raise obstacle
        now_us = int(now * MICROSECONDS)
        run = stamp_run(run, self._store.node, receipt.ids[index], self._wall.stamp_us(now_us))
        if queue.policy.ttl_s:
            self._limit_life(queue, run, now)
        accepted = self._append(queue, run, index, receipt)
        count = len(accepted.sizes)
        if not count:
            return False
        queue.accepted_id = accepted.envelopes[-1].id
        # Messages that need not be durable are visible at once, up to the first that must be: a
        # queue keeps its order. None is, if one before this run still waits.
        cut = first_durable = _first_durable(accepted.envelopes)
        if cut and (queue.waiting or not queue.has_space_for(len(run))):
            cut = 0
        if cut < count:
            later = accepted.part(cut, count) if cut else accepted
            queue.await_commit(later.sizes)
            self._store.group.arrivals.setdefault(queue, []).append(later)
        ids = receipt.ids[index : index + len(run)]
        self._note_accepted(queue.destination, accepted, ids, now_us)
        self._commits.changed(queue, request=False)
        if cut:
            queue.arrive([accepted.part(0, cut)], now)
        return first_durable < count

    def _send_spread(
        self,
        envelopes: Sequence[Envelope],
        destinations: list[str],
        receipt: Receipt,
        now: float,
    ) -> bool:
        """Append a batch for many queues: what is the same for all of it is done once, and the
        messages of each queue together.

        False, and nothing was done, if that is not possible: it needs queues that are open and
        take all of it, and messages that wait for the disk, as nearly all do.
        """
        found = list(map(self._queues.get, destinations))
        queues = [queue for queue in found if queue is not None and queue.is_plain]
        if len(queues) < len(found) or not all(map(_durable, envelopes)):
            return False
        if self._store.obstacle(now) is not None:
            return False
        now_us = int(now * MICROSECONDS)
        first, ids = receipt.ids[0], receipt.ids
        run = stamp_run(envelopes, self._store.node, first, self._wall.stamp_us(now_us))
        records = _encoded(run)
        if records is None:
            return False
        sizes = list(map(len, records))
        numbers = list(map(_number, queues))
        parts: Iterable[tuple[Queue, AcceptedMessages, Sequence[int]]]
        if len(set(queues)) == len(queues):
            # One message for each, the most frequent case: in loops in C.
            messages = map(AcceptedMessages, numbers, zip(run), zip(records), zip(sizes))
            parts = zip(queues, messages, zip(ids), strict=True)
        else:
            parts = _by_queue(queues, run, records, sizes, ids)
        parts = list(parts)
        for queue, part, _ in parts:
            if queue.is_limited and not queue.admits(len(part.sizes), sum(part.sizes)):
                return False
        group = self._store.group
        self._store.append_each(numbers, first, records)
        arrivals = group.arrivals
        for queue, part, own in parts:
            queue.accept(len(part.sizes), sum(part.sizes), own[-1])
            waiting = arrivals.get(queue)
            if waiting is None:
                arrivals[queue] = [part]
            else:
                waiting.append(part)
        group.stored += [part for _, part, _ in parts]
        group.accepted_ids.append(ids)
        self._commits.added(sizes)
        envelope = run[0]
        peer = LedgerPeer(envelope.protocol, envelope.connection, envelope.principal)
        steps = [(queue.destination, own) for queue, _, own in parts]
        self._ledger.note_each(Step.ACCEPTED, now_us, steps, peer=peer)
        self._commits.changed_all([queue for queue, _, _ in parts])
        return True

    def _append(
        self, queue: Queue, run: Sequence[Envelope], index: int, receipt: Receipt
    ) -> AcceptedMessages:
        """Append what can be encoded and is admitted: nearly always all of it, in one step."""
        store, number = self._store, queue.number
        records = _encoded(run)
        if records is not None:
            sizes = list(map(len, records))
            if queue.admit_run(len(sizes), sum(sizes)):
                store.append_run(number, receipt.ids[index], records)
                return AcceptedMessages(number, run, records, sizes)
        accepted, encoded = [], []
        for position, envelope in enumerate(run, index):
            try:
                record = encode(envelope)
                queue.admit(len(record))
            except HubError as error:
                _refuse(receipt, position, error)
            else:
                store.append(number, envelope.id, record)
                accepted.append(envelope)
                encoded.append(record)
        return AcceptedMessages(number, accepted, encoded, list(map(len, encoded)))

    def _publish(
        self,
        topic: Topic,
        run: Sequence[Envelope],
        index: int,
        receipt: Receipt,
        now: float,
        published: list[tuple[Topic, Audience, list[Envelope]]],
    ) -> bool:
        # Looked up here, not in the fan-out, which may be deferred: a subscriber that attaches in
        # between comes too late for these messages.
        audience = self._subscriptions.audience(topic)
        now_us = int(now * MICROSECONDS)
        time_us = self._wall.stamp_us(now_us)
        run = stamp_run(run, self._store.node, receipt.ids[index], time_us)
        if not topic.policy.durable:
            accepted = list(run)
            topic.published += len(accepted)
            published.append((topic, audience, accepted))
            return False
        obstacle = self._store.obstacle(now)
        if obstacle is not None:
            raise obstacle
        messages = self._append_published(topic, run, index, receipt, time_us)
        count = len(messages.sizes)
        if not count:
            return False
        for subscription in audience.subscriptions:
            self._commits.group.arrivals.setdefault(subscription, []).append(messages)
        ids = receipt.ids[index : index + len(run)]
        self._note_accepted(topic.destination, messages, ids, now_us)
        published.append((topic, audience, list(messages.envelopes)))
        return _first_durable(messages.envelopes) < count

    def _append_published(
        self, topic: Topic, run: Sequence[Envelope], index: int, receipt: Receipt, time_us: int
    ) -> AcceptedMessages:
        store, number = self._store, topic.number
        records = _encoded(run)
        if records is not None:
            sizes = list(map(len, records))
            store.append_run(number, receipt.ids[index], records)
            topic.count_run(receipt.ids[index], sizes, time_us)
            return AcceptedMessages(number, run, records, sizes)
        accepted, encoded = [], []
        for position, envelope in enumerate(run, index):
            try:
                record = encode(envelope)
            except InvalidEnvelope as error:
                _refuse(receipt, position, error)
            else:
                store.append(number, envelope.id, record)
                topic.count(envelope.id, len(record), time_us)
                accepted.append(envelope)
                encoded.append(record)
        return AcceptedMessages(number, accepted, encoded, list(map(len, encoded)))

    def _note_accepted(
        self, destination: str, accepted: AcceptedMessages, ids: list[int], now_us: int
    ) -> None:
        """Enter accepted messages into the ledger and the group.

        `ids` are those of the whole run, 0 for refused messages.
        """
        envelope = accepted.envelopes[0]
        if len(ids) > len(accepted.sizes):
            ids = [each for each in ids if each]
        group = self._store.group
        group.accepted_ids.append(ids)
        group.stored.append(accepted)
        self._commits.added(accepted.sizes)
        peer = LedgerPeer(envelope.protocol, envelope.connection, envelope.principal)
        self._ledger.note(Step.ACCEPTED, now_us, destination, ids, peer=peer)

    def _fan_out(
        self, topic: Topic, audience: Audience, accepted: list[Envelope], now: float
    ) -> None:
        """Have messages delivered to unnamed subscribers, who don't wait for the commit.

        Deferred: a subscriber that publishes what it gets would recurse into its delivery. And in
        parts, since one message may have thousands of subscribers.
        """
        subscribers, defer = audience.subscribers, self._loop.defer
        tally = _DeliveryTally()
        size_bytes = sum(len(each.payload) for each in accepted) + 1
        at_once = max(min(_DELIVERIES // len(accepted), _DELIVERY_BYTES // size_bytes), 1)
        for start in range(0, len(subscribers), at_once):
            part = subscribers[start : start + at_once]
            defer("publish", self._deliver_published, topic, part, accepted, tally, now)
        if not topic.policy.durable:
            defer("publish", self._note_published, topic, accepted, tally, now)

    def _deliver_published(
        self,
        topic: Topic,
        subscribers: Sequence[Subscriber],
        accepted: list[Envelope],
        tally: _DeliveryTally,
        now: float,
    ) -> None:
        durable = topic.policy.durable
        now_us = int(now * MICROSECONDS)
        rows = durable or topic.policy.ledger == "rows"
        for subscriber in subscribers:
            delivered = subscriber.publish(topic, accepted, stored=durable)
            if rows:
                # Nobody has what a link without a connection keeps: it notes that itself.
                if not delivered or not subscriber.is_connected:
                    continue
                ids = [each.id for each in delivered]
                self._ledger.note(
                    Step.DELIVERED, now_us, topic.destination, ids, peer=subscriber.peer, attempt=1
                )
            elif delivered is accepted:
                tally.whole += 1
            else:
                tally.single.update(each.id for each in delivered)

    def _note_published(
        self, topic: Topic, accepted: list[Envelope], tally: _DeliveryTally, now: float
    ) -> None:
        """A topic that is not durable: one row with the number of deliveries of each message."""
        first, ids = accepted[0], [each.id for each in accepted]
        counts = [tally.whole] * len(ids)
        if tally.single:
            counts = [tally.whole + tally.single[each] for each in ids]
        self._ledger.note(
            Step.ACCEPTED,
            int(now * MICROSECONDS),
            topic.destination,
            ids,
            peer=LedgerPeer(first.protocol, first.connection, first.principal),
            detail="not durable",
            counts=counts,
        )

    def inject(self, envelope: Envelope, now: float) -> int:
        """Send a message of the hub itself, which must not get lost: schedules, dead letters.

        No limit refuses it, and it goes into the next group if its group can't be written. Returns
        its id.
        """
        target = self._destinations.target(envelope.destination, own=True)
        identifier = self._store.reserve_in_group(1)
        self._keep(target, [envelope], identifier, now)
        self._commits.request()
        return identifier

    def give_back(self, envelope: Envelope, subscription: Subscription, now: float) -> int:
        """Like `inject`, to a topic, but for this named subscription alone."""
        native = {**envelope.native, ONLY_FOR: subscription.record_key}
        target = self._destinations.target(envelope.destination, own=True)
        envelope = envelope.replace(native=native)
        identifier = self._store.reserve_in_group(1)
        self._keep(target, [envelope], identifier, now, only=subscription)
        self._commits.request()
        return identifier

    def take_over(self, envelopes: Sequence[Envelope], now: float) -> None:
        """Accept messages whose acceptance was promised, in order: those of a staged batch.

        Like `inject` they can't be refused or lost; they expire and are dropped by policy.
        """
        first = self._store.reserve_in_group(len(envelopes))
        for destination, group in groupby(envelopes, key=_destination):
            run = list(group)
            target = self._destinations.target(destination)
            if isinstance(target, Queue) and target.policy.ttl_s:
                self._limit_life(target, run, now)
            self._keep(target, run, first, now)
            first += len(run)

    def _limit_life(self, queue: Queue, run: Sequence[Envelope], now: float) -> None:
        """Messages without an expiry get that of the queue's policy, which has one."""
        expires = self._wall.expires_us(now, queue.policy.ttl_s)
        for envelope in run:
            if not envelope.expires:
                msgspec.structs.force_setattr(envelope, "expires", expires)

    def _keep(
        self,
        target: Queue | Topic,
        run: Sequence[Envelope],
        first: int,
        now: float,
        *,
        only: Subscription | None = None,
    ) -> None:
        """Append messages that go into the next group if this one can't be written.

        No limit refuses them; a queue with `drop-oldest` drops others for them. Of a topic's
        subscribers, `only` gets them if it is given.
        """
        now_us = int(now * MICROSECONDS)
        time_us = self._wall.stamp_us(now_us)
        run = stamp_run(run, self._store.node, first, time_us)
        if isinstance(target, Topic) and not target.policy.durable and only is None:
            target.published += len(run)
            self._fan_out(target, self._subscriptions.audience(target), list(run), now)
            return
        number, retain = target.number, self._store.retain
        records = encode_run(run)
        for envelope, record in zip(run, records, strict=True):
            retain(number, envelope.id, record)
        sizes = list(map(len, records))
        accepted = AcceptedMessages(number, run, records, sizes)
        self._commits.group.retained.append(accepted)
        self._commits.added(sizes)
        if isinstance(target, Queue):
            target.accept(len(sizes), sum(sizes), run[-1].id)
            self._commits.group.retained_arrivals.setdefault(target, []).append(accepted)
            self._commits.changed(target, request=False)
        else:
            target.count_run(first, sizes, time_us)
            audience = self._subscriptions.audience(target)
            for subscription in audience.subscriptions if only is None else (only,):
                self._commits.group.retained_arrivals.setdefault(subscription, []).append(accepted)
            if only is None:
                self._fan_out(target, audience, list(run), now)
        envelope = run[0]
        peer = LedgerPeer(envelope.protocol, envelope.connection, envelope.principal)
        ids = range(first, first + len(run))
        self._ledger.note(Step.ACCEPTED, now_us, target.destination, ids, peer=peer)


_destination = attrgetter("destination")
_durable = attrgetter("durable")
_number = attrgetter("number")


def _by_queue(
    queues: Sequence[Queue],
    run: Sequence[Envelope],
    records: Sequence[bytes],
    sizes: Sequence[int],
    ids: Sequence[int],
) -> Iterator[tuple[Queue, AcceptedMessages, Sequence[int]]]:
    """Each queue of a batch once, with its messages and their ids."""
    indexes: dict[Queue, list[int]] = {}
    for index, queue in enumerate(queues):
        indexes.setdefault(queue, []).append(index)
    for queue, own in indexes.items():
        part = AcceptedMessages(
            queue.number,
            [run[each] for each in own],
            [records[each] for each in own],
            [sizes[each] for each in own],
        )
        yield queue, part, [ids[each] for each in own]


def _end_of_run(destinations: list[str], index: int) -> int:
    """The index after the last message in a row with the destination of the one at `index`."""
    destination = destinations[index]
    if index == 0 and destinations.count(destination) == len(destinations):
        return len(destinations)
    end = index + 1
    while end < len(destinations) and destinations[end] == destination:
        end += 1
    return end


def _first_durable(envelopes: Sequence[Envelope]) -> int:
    """The index of the first durable message; the length if there is none."""
    for index, envelope in enumerate(envelopes):
        if envelope.durable:
            return index
    return len(envelopes)


def _encoded(run: Sequence[Envelope]) -> list[bytes] | None:
    """The records; None if one can't be encoded: they have to be tried one by one."""
    try:
        return encode_run(run)
    except InvalidEnvelope:
        return None


def _refuse(receipt: Receipt, index: int, error: HubError) -> None:
    receipt.refused[index] = error
    receipt.ids[index] = 0
