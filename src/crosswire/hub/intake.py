"""The way in: batches of envelopes become rows of the open group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from crosswire.envelope import Envelope, encode, encode_run, stamp_run
from crosswire.errors import HubError, InvalidEnvelope, StoreFull
from crosswire.hub.items import Arrival
from crosswire.hub.ledger import Peer, Step
from crosswire.hub.queues import Queue
from crosswire.hub.receipt import Receipt
from crosswire.hub.topics import Topic

if TYPE_CHECKING:
    from crosswire.hub.backlog import Backlog
    from crosswire.hub.hub import Hub

__all__ = ["Group", "Intake"]

_US: Final = 1_000_000


class Group:
    """What the hub has to do when the open group is committed, or is not."""

    __slots__ = (
        "accepted",
        "arrivals",
        "block",
        "kept",
        "newest",
        "receipts",
        "retained",
        "stored",
    )

    def __init__(self) -> None:
        self.arrivals: dict[Backlog, list[Arrival]] = {}
        self.kept: dict[Backlog, list[Arrival]] = {}
        self.receipts: list[Receipt] = []
        self.accepted: list[list[int]] = []
        self.stored: list[list[Arrival]] = []
        self.retained: list[Arrival] = []
        self.block: tuple[int, int, bytes] | None = None
        self.newest = 0


class Intake:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def produce(self, envelopes: Sequence[Envelope], now: float) -> Receipt:
        """See `Hub.produce`."""
        count = len(envelopes)
        first = self._hub.store.reserve(count) if count else 0
        receipt = Receipt(list(range(first, first + count)), {})
        waits = False
        published: list[tuple[Topic, list[Envelope]]] = []
        place = 0
        while place < count:
            destination = envelopes[place].destination
            end = place + 1
            while end < count and envelopes[end].destination == destination:
                end += 1
            run = envelopes[place:end]
            try:
                target = self._hub.target(destination)
                if isinstance(target, Queue):
                    waits |= self._send(target, run, place, receipt, now)
                else:
                    waits |= self._publish(target, run, place, receipt, now, published)
            except HubError as error:
                for each in range(place, end):
                    _refuse(receipt, each, error)
            place = end
        if waits:
            self._hub.group.receipts.append(receipt)
            self._hub.store.request()
        else:
            self._hub.store.request(sync=False, urgent=False)
            receipt.finish()
        for topic, accepted in published:
            self._fan_out(topic, accepted, now)
        self._hub.pump(now)
        return receipt

    def _send(
        self, queue: Queue, run: Sequence[Envelope], place: int, receipt: Receipt, now: float
    ) -> bool:
        """Append to a queue; True if somebody has to wait for the disk."""
        if not self._hub.store.has_room(now):
            raise StoreFull("there is no room on the disk")
        now_us = int(now * _US)
        run = stamp_run(run, self._hub.node, receipt.ids[place], now_us)
        _limit_life(queue, run, now)
        direct = not queue.waiting and queue.has_space_for(len(run))
        arrivals = self._append(queue, run, place, receipt, now)
        if not arrivals:
            return False
        durables = [arrival[1].durable for arrival in arrivals]
        waits = True in durables
        # What needs no disk is seen at once, unless something before it has to wait.
        cut = (durables.index(True) if waits else len(arrivals)) if direct else 0
        at_once, later = arrivals[:cut], arrivals[cut:]
        if later:
            queue.waiting += len(later)
            self._hub.group.arrivals.setdefault(queue, []).extend(later)
        self._note_accepted(queue.destination, arrivals, now_us)
        self._hub.changed(queue, request=False)
        if at_once:
            queue.arrive(at_once, now)
        return waits

    def _append(
        self, queue: Queue, run: Sequence[Envelope], place: int, receipt: Receipt, now: float
    ) -> list[Arrival]:
        """Those that have a form and a place in the queue: nearly always all of them."""
        store, number = self._hub.store, queue.number
        records = _encoded(run)
        if records is not None:
            sizes = [len(record) for record in records]
            if queue.admit_run(len(sizes), sum(sizes)):
                store.append_run(number, receipt.ids[place], records)
                return [(number, envelope, size) for envelope, size in zip(run, sizes, strict=True)]
        arrivals: list[Arrival] = []
        for place_of, envelope in enumerate(run, place):
            try:
                record = encode(envelope)
                queue.admit(len(record), now)
            except HubError as error:
                _refuse(receipt, place_of, error)
            else:
                store.append(number, envelope.id, record)
                arrivals.append((number, envelope, len(record)))
        return arrivals

    def _publish(
        self,
        topic: Topic,
        run: Sequence[Envelope],
        place: int,
        receipt: Receipt,
        now: float,
        published: list[tuple[Topic, list[Envelope]]],
    ) -> bool:
        self._hub.subscriptions.refresh(topic)
        now_us = int(now * _US)
        run = stamp_run(run, self._hub.node, receipt.ids[place], now_us)
        if not topic.policy.durable:
            accepted = list(run)
            topic.published += len(accepted)
            published.append((topic, accepted))
            return False
        if not self._hub.store.has_room(now):
            raise StoreFull("there is no room on the disk")
        arrivals = self._append_published(topic, run, place, receipt, now_us)
        waits = True in [arrival[1].durable for arrival in arrivals]
        for subscription in topic.subscriptions:
            self._hub.group.arrivals.setdefault(subscription, []).extend(arrivals)
        if arrivals:
            self._note_accepted(topic.destination, arrivals, now_us)
            published.append((topic, [arrival[1] for arrival in arrivals]))
        return waits

    def _append_published(
        self, topic: Topic, run: Sequence[Envelope], place: int, receipt: Receipt, now_us: int
    ) -> list[Arrival]:
        store, number = self._hub.store, topic.number
        records = _encoded(run)
        if records is not None:
            sizes = [len(record) for record in records]
            store.append_run(number, receipt.ids[place], records)
            topic.count_run(receipt.ids[place], sizes, now_us)
            return [(number, envelope, size) for envelope, size in zip(run, sizes, strict=True)]
        arrivals: list[Arrival] = []
        for place_of, envelope in enumerate(run, place):
            try:
                record = encode(envelope)
            except InvalidEnvelope as error:
                _refuse(receipt, place_of, error)
            else:
                store.append(number, envelope.id, record)
                topic.count(envelope.id, len(record), now_us)
                arrivals.append((number, envelope, len(record)))
        return arrivals

    def _note_accepted(self, destination: str, arrivals: list[Arrival], now_us: int) -> None:
        envelope = arrivals[0][1]
        ids = [arrival[1].id for arrival in arrivals]
        self._hub.group.accepted.append(ids)
        self._hub.group.stored.append(arrivals)
        peer = Peer(envelope.protocol, envelope.connection, envelope.principal)
        self._hub.ledger.note(Step.ACCEPTED, now_us, destination, ids, peer=peer)

    def _fan_out(self, topic: Topic, accepted: list[Envelope], now: float) -> None:
        """To those without a name, at once."""
        durable = topic.policy.durable
        now_us = int(now * _US)
        rows = durable or topic.policy.ledger == "rows"
        counts: dict[int, int] = dict.fromkeys((each.id for each in accepted), 0)
        whole = 0
        for subscriber in topic.subscribers:
            delivered = subscriber.publish(topic, accepted, stored=durable)
            if rows and delivered:
                ids = [each.id for each in delivered]
                self._hub.ledger.note(
                    Step.DELIVERED, now_us, topic.destination, ids, peer=subscriber.peer, attempt=1
                )
            elif delivered is accepted:
                whole += 1
            else:
                for each in delivered:
                    counts[each.id] += 1
        if not durable:
            first = accepted[0]
            peer = Peer(first.protocol, first.connection, first.principal)
            self._hub.ledger.note(
                Step.ACCEPTED,
                now_us,
                topic.destination,
                counts,
                peer=peer,
                detail="not durable",
                counts=[whole + each for each in counts.values()],
            )

    def inject(self, envelope: Envelope, now: float) -> None:
        """See `Hub.inject`."""
        target = self._hub.target(envelope.destination)
        self._keep(target, [envelope], self._hub.store.reserve(1), now)
        self._hub.store.request()

    def take_over(self, envelopes: Sequence[Envelope], now: float) -> None:
        """See `Hub.take_over`."""
        first = self._hub.store.reserve(len(envelopes))
        for destination, group in groupby(envelopes, key=_destination):
            run = list(group)
            target = self._hub.target(destination)
            if isinstance(target, Queue):
                _limit_life(target, run, now)
            self._keep(target, run, first, now, drops=True)
            first += len(run)

    def _keep(
        self,
        target: Queue | Topic,
        run: Sequence[Envelope],
        first: int,
        now: float,
        *,
        drops: bool = False,
    ) -> None:
        """Retain what must not get lost, whatever the limits, even if the group can't be written.

        With `drops` a queue that lets its oldest go does so.
        """
        now_us = int(now * _US)
        run = stamp_run(run, self._hub.node, first, now_us)
        if isinstance(target, Topic) and not target.policy.durable:
            self._hub.subscriptions.refresh(target)
            target.published += len(run)
            self._fan_out(target, list(run), now)
            return
        number, retain = target.number, self._hub.store.retain
        arrivals: list[Arrival] = []
        for envelope, record in zip(run, encode_run(run), strict=True):
            retain(number, envelope.id, record)
            arrivals.append((number, envelope, len(record)))
        self._hub.group.retained += arrivals
        sizes = [arrival[2] for arrival in arrivals]
        if isinstance(target, Queue):
            if drops:
                target.make_room(len(sizes), sum(sizes), now)
            target.length += len(sizes)
            target.size_bytes += sum(sizes)
            target.waiting += len(sizes)
            self._hub.group.kept.setdefault(target, []).extend(arrivals)
            self._hub.changed(target, request=False)
        else:
            self._hub.subscriptions.refresh(target)
            target.count_run(first, sizes, now_us)
            for subscription in target.subscriptions:
                self._hub.group.kept.setdefault(subscription, []).extend(arrivals)
            self._fan_out(target, list(run), now)
        envelope = run[0]
        peer = Peer(envelope.protocol, envelope.connection, envelope.principal)
        ids = range(first, first + len(run))
        self._hub.ledger.note(Step.ACCEPTED, now_us, target.destination, ids, peer=peer)


def _destination(envelope: Envelope) -> str:
    return envelope.destination


def _limit_life(queue: Queue, run: Sequence[Envelope], now: float) -> None:
    """What says nothing about it expires when the queue's policy says."""
    if queue.policy.ttl_s:
        expires = int((now + queue.policy.ttl_s) * _US)
        for envelope in run:
            if not envelope.expires:
                msgspec.structs.force_setattr(envelope, "expires", expires)


def _encoded(run: Sequence[Envelope]) -> list[bytes] | None:
    """None if one of them has no form: they have to be looked at one by one."""
    try:
        return encode_run(run)
    except InvalidEnvelope:
        return None


def _refuse(receipt: Receipt, place: int, error: HubError) -> None:
    receipt.refused[place] = error
    receipt.ids[place] = 0
