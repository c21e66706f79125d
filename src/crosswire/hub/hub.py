"""The hub: takes batches of envelopes, keeps them, and hands them to whom they are for.

Pure logic with time as an argument; the store does the disk. Nothing is done per message that can
be done per batch: a batch is appended to the open group, the group is committed as one, and what
became visible with it is handed out in lists.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final, Literal, Protocol

import msgspec

from crosswire.envelope import (
    MICROSECONDS,
    Destination,
    Envelope,
    decode_at,
    parse_destination,
    parse_pattern,
    parse_stored_destination,
)
from crosswire.errors import (
    HubError,
    InvalidDestination,
    RecordDamaged,
    StoreError,
)
from crosswire.hub.attachment import (
    Attachment,
    Choice,
    Consumer,
    Delivery,
    DeliveryReceiver,
    Notice,
    Window,
)
from crosswire.hub.audit import count_messages
from crosswire.hub.backlog import Backlog
from crosswire.hub.callbacks import Callbacks
from crosswire.hub.dead import DeadLetters, bury
from crosswire.hub.feed import Feed
from crosswire.hub.ingest.staging import Staging, StagingLimits
from crosswire.hub.intake import Intake, OpenGroup
from crosswire.hub.items import Item, Retry
from crosswire.hub.ledger import Ledger, LedgerPeer, LedgerRow, Step
from crosswire.hub.queues import Queue, QueuePolicy
from crosswire.hub.receipt import Receipt
from crosswire.hub.schedules import Schedules
from crosswire.hub.services import Answer, Call, Provider, ProviderReceiver, ServicePolicy, Services
from crosswire.hub.subscriptions import Start, Subscriptions, predicate
from crosswire.hub.timers import Timers
from crosswire.hub.topics import Topic, TopicPolicy
from crosswire.hub.wall import WallClock
from crosswire.store.contract import Store, refusal

__all__ = ["Hub", "HubConfig"]

_log = logging.getLogger("crosswire.hub")

_HOUSEKEEPING_S: Final = 10.0
_READ_AGAIN_S: Final = 1.0
_DAMAGED: Final = "damaged"
_STATE: Final = bytes(4)
"""In place of a destination's number, which is never 0: what follows is a space and a key."""
_REPORTS: Final = 1000


class Dispatcher(Protocol):
    """What may have something to hand out: a backlog, a provider, a subscriber that lags, or a
    window in which there is room for them."""

    def dispatch(self, now: float) -> None:
        """Hand out what can be handed out now. Called by `Hub.pump` alone."""


class HubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Policies by destination name, each kind with a default for the rest.

    With `lake` nothing is reclaimed before the lake has sealed it. `ledger_rows` bounds what the
    store keeps of the ledger without a lake, `recent_rows` what is in memory.
    """

    queue: QueuePolicy = QueuePolicy()
    queues: dict[str, QueuePolicy] = {}
    topic: TopicPolicy = TopicPolicy()
    topics: dict[str, TopicPolicy] = {}
    service: ServicePolicy = ServicePolicy()
    retry: Retry = Retry()
    staging: StagingLimits = StagingLimits()
    lake: bool = False
    ledger_rows: int = 5_000_000
    recent_rows: int = 200_000


class Hub:
    """One for each data directory. Call everything on one thread.

    `now` is in seconds since 1970 and steady: the wall clock at the start plus the monotonic clock.
    Between calls the owner asks `next_deadline` and calls `handle_deadline` when it has come, and
    now and then says with `follow_wall` what the wall clock shows.
    """

    def __init__(
        self,
        store: Store,
        config: HubConfig | None = None,
        *,
        now: float,
        random: Random,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.config = config or HubConfig()
        self.node = store.node
        self.now = now
        self.reports: list[HubError] = []
        self.wall = WallClock(self, now)
        self.ledger = Ledger(self.config.recent_rows, self.wall.stamp_us)
        self.committed_id = store.newest_id
        self.watched: dict[int, Callable[[int, str], None]] = {}
        """Whom to tell when a message is settled, or with why it never will be."""
        self.consumers_changed: list[Callable[[Queue], None]] = []
        """Whom to tell that somebody began or ceased to consume a queue."""
        self.callbacks = Callbacks()
        self.chance = random.random
        self._clock = clock or (lambda: self.now)
        self._queues: dict[str, Queue] = {}
        self._topics: dict[str, Topic] = {}
        self._journals: dict[str, Topic] = {}
        self.group = OpenGroup()
        self._flight: OpenGroup | None = None
        self._touched: dict[Dispatcher, None] = {}
        self._deferred: deque[tuple[str, Callable[..., None], tuple[Any, ...]]] = deque()
        self._consumers_differ: dict[Queue, None] = {}
        self._given_up: dict[Attachment | Provider, None] = {}
        self._changed: dict[Backlog, None] = {}
        self._is_pumping = False
        self._timers = Timers(self.callbacks)
        store.before_commit = self._before_commit
        store.after_write = self._after_write
        store.after_commit = self._after_commit
        self._intake = Intake(self)
        self.feed = Feed(self, withheld=self.config.lake)
        self.subscriptions = Subscriptions(self)
        self.services = Services(self, self.config.service)
        self.schedules = Schedules(self)
        self.dead_letters = DeadLetters(self)
        self.staging = Staging(self, self.config.staging)
        self._recover()
        self.call_at(now + _HOUSEKEEPING_S, self._keep_house)

    def _recover(self) -> None:
        """Topics must be known to subscriptions; queues are taken up when they are first used."""
        for destination in self.store.destinations():
            if destination.startswith("topic/"):
                self._topics[destination] = self._make_topic(destination)
        self.subscriptions.recover(self.now)
        self.staging.recover(self.now)
        first = max(self.store.next_row - self.config.recent_rows, 1)
        for row, _, block in self.store.blocks(first - 1, 1000):
            try:
                self.ledger.remember(row, block)
            except StoreError as error:
                self.report(error)
        if self.store.damage or not self.store.was_stopped:
            count_messages(self)

    # Producing.

    def produce(self, envelopes: Sequence[Envelope], now: float) -> Receipt:
        """Accept a batch of one producer, for queues and topics, in order.

        Each message is accepted or refused on its own; the receipt is done when those that must
        be on disk are. Whoever may see them at once has seen them when this returns; if a callback
        of the hub calls this, soon after that callback has returned.
        """
        self.now = now
        return self._intake.produce(envelopes, now)

    def inject(self, envelope: Envelope, now: float) -> None:
        """Send a message of the hub's own, which must not get lost: schedules, dead letters.

        It ignores limits and outlives a group that can't be written.
        """
        self._intake.inject(envelope, now)

    def take_over(self, envelopes: Sequence[Envelope], now: float) -> None:
        """Accept messages that were promised to be accepted, in order: those of a staged batch.

        Like `inject` in what can't happen to them; they live and are dropped as policies say.
        """
        self._intake.take_over(envelopes, now)

    def target(self, destination: str, *, own: bool = False) -> Queue | Topic:
        """The queue or topic of that name. Raises InvalidDestination.

        `own`: the hub chose the name itself, which need not be one that a peer may choose.
        """
        target = self._queues.get(destination) or self._topics.get(destination)
        if target is not None:
            return target
        kind = (parse_stored_destination if own else self.parse)(destination).kind
        if kind == "service":
            raise InvalidDestination(f"{destination!r} is called, nothing can be sent to it")
        return self._open_queue(destination) if kind == "queue" else self._open_topic(destination)

    # Consuming.

    def consume(
        self,
        destination: str,
        receiver: DeliveryReceiver,
        now: float,
        *,
        peer: LedgerPeer,
        window: Window | int = 1,
        weight: int = 10,
        filter: str = "",  # noqa: A002  what the protocols call it
        lease_s: float | None = None,
        holding: Sequence[int] = (),
        choice: Choice | None = None,
    ) -> Consumer:
        """Take messages from a queue, at most `window` at a time.

        `holding` are messages that it was given before the hub was restarted and still has;
        `choice` leaves those to others that it is not true of.
        """
        self.now = now
        if self.parse(destination).kind != "queue":
            raise InvalidDestination(f"{destination!r} is not a queue")
        # Nothing is made before all of it is known to be right: a queue gets a number for good.
        matches = predicate(filter)
        consumer = self.queue(destination).attach(
            receiver,
            now,
            peer=peer,
            window=_window(window),
            weight=weight,
            matches=matches,
            lease_s=lease_s,
            holding=holding,
            choice=choice,
        )
        self.pump(now)
        return consumer

    def subscribe(
        self,
        pattern: str,
        receiver: DeliveryReceiver,
        now: float,
        *,
        peer: LedgerPeer,
        window: Window | int = 1024,
        name: str = "",
        start: Start | None = None,
        filter: str = "",  # noqa: A002
        weight: int = 10,
        lease_s: float | None = None,
        holding: Sequence[int] = (),
        slow: Literal["lag", "disconnect"] | None = None,
        names: Callable[[str], bool] | None = None,
    ) -> Attachment:
        """Take what is published to the topics of a pattern; with a `name` it is durable.

        Without one, `names` may choose among the topics of the pattern.

        `start` counts when the subscription is new: `latest` unless it says otherwise. Raises
        SubscriptionConflict if there is one of the name with another pattern or filter.
        """
        self.now = now
        if parse_pattern(pattern).kind != "topic":
            raise InvalidDestination(f"{pattern!r} is not a topic")
        attachment: Attachment
        if name:
            attachment = self.subscriptions.named(name, pattern, filter, start, now).attach(
                receiver,
                now,
                peer=peer,
                window=_window(window),
                weight=weight,
                matches=None,
                lease_s=lease_s,
                holding=holding,
            )
        else:
            attachment = self.subscriptions.unnamed(
                pattern,
                receiver,
                start,
                peer=peer,
                window=_window(window),
                matches=predicate(filter),
                slow=slow,
                names=names,
            )
        self.subscriptions.report_gaps()
        self.pump(now)
        return attachment

    def provide(
        self,
        destinations: Sequence[str],
        receiver: ProviderReceiver,
        now: float,
        *,
        peer: LedgerPeer,
        window: Window | int = 256,
    ) -> Provider:
        """Answer the calls of `service/NAME` (every method of it) or `service/NAME/METHOD`."""
        self.now = now
        return self.services.provide(destinations, receiver, now, peer=peer, window=_window(window))

    def call(
        self,
        envelopes: Sequence[Envelope],
        now: float,
        *,
        answered: Callable[[Call, Answer], None],
        peer: LedgerPeer,
        timeout_s: float | None = None,
    ) -> list[Call]:
        """Ask services; `answered` is called once for each, perhaps before this returns; if a
        callback of the hub calls this, after that callback has returned."""
        self.now = now
        return self.services.call(envelopes, now, answered=answered, peer=peer, timeout_s=timeout_s)

    def cancel(self, calls: Sequence[Call], now: float) -> None:
        """The caller left: nobody is answered, and the providers may stop."""
        self.now = now
        self.services.cancel(calls, now)

    # What is there.

    def queue(self, destination: str) -> Queue:
        """Raises InvalidDestination."""
        queue = self._queues.get(destination)
        if queue is None:
            self.parse(destination)
            queue = self._open_queue(destination)
        return queue

    def _open_queue(self, destination: str) -> Queue:
        queue = Queue(self, destination, self.queue_policy(destination))
        self._queues[destination] = queue
        queue.recover(self.now)
        return queue

    def topic(self, destination: str) -> Topic:
        """Raises InvalidDestination."""
        topic = self._topics.get(destination)
        if topic is None:
            self.parse(destination)
            topic = self._open_topic(destination)
        return topic

    def _open_topic(self, destination: str) -> Topic:
        topic = self._topics[destination] = self._make_topic(destination)
        self.subscriptions.refresh(topic)
        for subscription in topic.subscriptions:
            subscription.add_topic(topic.number)
        return topic

    def parse(self, destination: str) -> Destination:
        """Raises InvalidDestination: a new one has to keep to the rules that hold today."""
        if destination in self.store.destinations():
            return parse_stored_destination(destination)
        return parse_destination(destination)

    def reconfigure(self, config: HubConfig) -> None:
        """Other policies from now on; what is accepted already stays."""
        self.config = config
        self.services.policy = config.service
        self.staging.limits = config.staging
        for queue in self._queues.values():
            queue.adopt(self.queue_policy(queue.destination))
        for topic in self._topics.values():
            topic.policy = self._topic_policy(topic.destination)
        for journal in self._journals.values():
            journal.policy = config.topic
        self.pump(self.now)

    def queue_policy(self, destination: str) -> QueuePolicy:
        """The policy of a queue, whether it is there already or not."""
        if destination.endswith("/dead"):
            return QueuePolicy(retry=Retry(max_attempts=0))
        return self.config.queues.get(destination.removeprefix("queue/"), self.config.queue)

    def _topic_policy(self, destination: str) -> TopicPolicy:
        return self.config.topics.get(destination.removeprefix("topic/"), self.config.topic)

    def _make_topic(self, destination: str) -> Topic:
        return Topic(self, destination, self._topic_policy(destination))

    def journal_of(self, service: str) -> Topic:
        """Where the requests and responses of a service are kept for a while."""
        journal = self._journals.get(service)
        if journal is None:
            journal = self._journals[service] = Topic(self, service, self.config.topic)
        return journal

    def queues(self) -> list[Queue]:
        """All of them, those included that nobody used since the start."""
        return [
            self.queue(destination)
            for destination in sorted(self.store.destinations())
            if destination.startswith("queue/")
        ]

    def backlogs(self) -> list[Backlog]:
        """Whatever has consumers: queues in use, and named subscriptions."""
        return [*self._queues.values(), *self.subscriptions.all()]

    def topics_by_name(self) -> dict[str, Topic]:
        return self._topics

    def topics(self) -> list[Topic]:
        return [self._topics[destination] for destination in sorted(self._topics)]

    def is_consumed(self, destination: str) -> bool:
        """Does anybody, in any protocol, consume this queue right now?"""
        queue = self._queues.get(destination)
        return queue is not None and bool(queue.consumers)

    def is_served(self, destination: str) -> bool:
        """Is there a provider that would get a call?"""
        return self.services.is_served(destination)

    def fetch(self, destination: str, ids: Sequence[int]) -> list[Envelope | None]:
        """Stored messages by id, None for those that are gone."""
        number = self.store.destinations().get(destination)
        if number is None:
            return [None] * len(ids)
        records = self.store.fetch(number, ids)
        return [self._read(number, *each) for each in zip(ids, records, strict=True)]

    def _read(self, number: int, identifier: int, record: bytes | None) -> Envelope | None:
        if record is None:
            return None
        try:
            return self.decode(number, identifier, record)
        except RecordDamaged as error:
            self.report(error)
            return None

    def decode(self, number: int, identifier: int, record: bytes) -> Envelope:
        """The message that is stored under this id of a destination.

        Raises RecordDamaged for bytes that are no message, or another one's.
        """
        return decode_at(record, self.store.name(number), identifier)

    def trace(self, identifier: int) -> list[LedgerRow]:
        """What happened to a message, as far as the recent ledger goes."""
        return self.ledger.of_message(identifier)

    # Groups.

    def committed(self) -> Receipt:
        """Done when all that was asked for so far, settlements included, is on disk."""
        receipt = Receipt([], {})
        self.group.receipts.append(receipt)
        self.store.request()
        return receipt

    def written(self) -> Receipt:
        """Done when what was saved is with the operating system: it outlives us, though not the
        machine."""
        receipt = Receipt([], {})
        self.group.written.append(receipt)
        self.store.request(sync=False)
        return receipt

    def changed(self, backlog: Backlog, *, request: bool = True) -> None:
        """It has something for the disk; nobody waits for it."""
        self._changed[backlog] = None
        if request:
            self.store.request(urgent=False)

    def forget(self, backlog: Backlog) -> None:
        """It is gone for good."""
        self._changed.pop(backlog, None)
        self._touched.pop(backlog, None)
        for group in (self.group, self._flight):
            if group is not None:
                group.accepted_messages.pop(backlog, None)
                group.kept.pop(backlog, None)

    def _before_commit(self) -> None:
        # Before anything that could fail: whoever waits for this group must be in it.
        self._flight, self.group = self.group, OpenGroup()
        self._flight.newest = self.store.newest_id
        changed, self._changed = self._changed, {}
        for backlog in changed:
            self.callbacks.run("write", backlog.write)
        sealed = self.ledger.seal(self.store.next_row)
        if sealed is not None:
            block, rows = sealed
            self.store.journal(block, rows)
            self._flight.block = (self.store.next_row, rows, block)

    def _after_write(self) -> None:
        assert self._flight is not None
        receipts, self._flight.written = self._flight.written, []
        for receipt in receipts:
            self.finish(receipt)

    def _after_commit(self, error: StoreError | None) -> None:
        """What became visible is released first: it must not depend on who waits for the commit.

        Then receipts, then listeners. One of them that raises keeps nothing from the others.
        """
        group, self._flight = self._flight, None
        assert group is not None
        now = self.now = max(self.now, self._clock())
        if error is not None:
            self._fail_group(group, error)
        else:
            self.ledger.committed()
            self.committed_id = group.newest
            self._release(group, now)
        self.pump(now)
        refused = None if error is None else refusal(error)
        for receipt in (*group.receipts, *group.written):
            self.finish(receipt, refused)
        if error is None:
            self.callbacks.run("commit listener", self.feed.committed, group)
        self.pump(now)

    def finish(self, receipt: Receipt, error: HubError | None = None) -> None:
        """Its batch is on disk, or never will be: call those who wait for it."""
        for callback in receipt.finish(error):
            self.callbacks.run("receipt", callback, receipt)

    def _release(self, group: OpenGroup, now: float) -> None:
        """What was committed can be seen now."""
        for backlog, kept in group.kept.items():
            group.accepted_messages.setdefault(backlog, []).extend(kept)
            group.accepted_messages[backlog].sort(key=lambda run: run.envelopes[0].id)
        for backlog, runs in group.accepted_messages.items():
            if isinstance(backlog, Queue):
                backlog.end_wait(runs)
            self.callbacks.run("release", backlog.arrive, runs, now)
        self.subscriptions.catch_up()

    def _fail_group(self, group: OpenGroup, error: StoreError) -> None:
        """Producers are told; all else goes into the next group."""
        self.report(error)
        self.ledger.failed({each for ids in group.accepted for each in ids})
        for backlog, runs in group.accepted_messages.items():
            if isinstance(backlog, Queue):
                backlog.withdraw(*backlog.end_wait(runs))
                self.changed(backlog, request=False)
        for backlog, kept in group.kept.items():
            self.group.kept[backlog] = kept + self.group.kept.get(backlog, [])
        self.group.retained[:0] = group.retained

    # Handing out.

    # Whatever one peer's doing causes for another, and whatever is known at once, is put into
    # these two, which `pump` alone empties, in a loop: however much a peer sends in one go, the
    # call stack has one pump in it. `touch` is for what looks itself for work, `defer` for calls.

    def touch(self, dispatcher: Dispatcher) -> None:
        """It may have something for somebody. The caller calls `pump` when it is done."""
        self._touched[dispatcher] = None

    def try_again(self, dispatcher: Dispatcher) -> None:
        """The disk could not be read for it: touch it a little later."""

        def touch(now: float) -> None:
            self.touch(dispatcher)
            self.pump(now)

        self.call_at_least(dispatcher, self.now + _READ_AGAIN_S, touch)

    def defer(self, kind: str, callback: Callable[..., None], *args: Any) -> None:
        """Have it called by the next `pump`, in turn, or by the one that is running."""
        self._deferred.append((kind, callback, args))

    def pump(self, now: float) -> None:
        """Hand out until nobody can take more; receivers may call back meanwhile.

        Called by one of those, it returns at once: the running one goes on.
        """
        if self._is_pumping:
            return
        self._is_pumping = True
        run, deferred, touched = self.callbacks.run, self._deferred, self._touched
        try:
            while deferred or touched:
                if deferred:
                    kind, callback, args = deferred.popleft()
                    run(kind, callback, *args)
                else:
                    dispatcher, _ = touched.popitem()
                    run("dispatch", dispatcher.dispatch, now)
        finally:
            self._is_pumping = False

    # Who takes part is called by these. One that raises may have lost what it was given, and its
    # peer would wait for ever: its part in the hub ends, what it held goes to others, and it is
    # left to `broken` to end its connection.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Give these to whom the attachment belongs."""
        receiver = attachment.receiver
        error = self.callbacks.run("delivery", receiver.deliver, attachment, deliveries)
        if error is not None:
            self._break(attachment, error)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """Tell of a gap, or of the end of an attachment."""
        error = self.callbacks.run("notice", attachment.receiver.notice, attachment, notice)
        if error is not None:
            self._break(attachment, error)

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Give these calls to whom the provider belongs."""
        error = self.callbacks.run("request", provider.receiver.request, provider, requests)
        if error is not None:
            self._break(provider, error)

    def withdraw(self, provider: Provider, ids: list[int]) -> None:
        """Nobody waits for the provider's answers to these any more."""
        error = self.callbacks.run("cancel", provider.receiver.cancel, provider, ids)
        if error is not None:
            self._break(provider, error)

    def give_up(self, owner: Attachment, error: Exception) -> None:
        """Its filter, or what else it chooses messages by, raised: it is passed over right now,
        in the middle of handing out, and its part ends when that is done."""
        if owner not in self._given_up:
            self._given_up[owner] = None
            self.callbacks.note("filter", error)
            self.defer("close", self._break, owner, error)

    def _break(self, owner: Attachment | Provider, error: Exception) -> None:
        self._given_up.pop(owner, None)
        self.callbacks.run("close", owner.close, self.now)
        self.callbacks.run("broken", lambda: owner.receiver.broken(error))

    def note_by_attempt(
        self,
        step: Step,
        now_us: int,
        destination: str,
        deliveries: list[Delivery],
        peer: LedgerPeer,
    ) -> None:
        """A run for each attempt: nearly always one."""
        attempts = {each.attempt for each in deliveries}
        for attempt in sorted(attempts):
            ids = [
                each.envelope.id
                for each in deliveries
                if len(attempts) == 1 or each.attempt == attempt
            ]
            self.ledger.note(step, now_us, destination, ids, peer=peer, attempt=attempt)
        self.store.request(sync=False, urgent=False)

    def note_runs(
        self, step: Step, now_us: int, deliveries: list[Delivery], peer: LedgerPeer
    ) -> None:
        """A run for each destination."""
        runs: dict[str, list[int]] = {}
        for each in deliveries:
            runs.setdefault(each.envelope.destination, []).append(each.envelope.id)
        for destination, ids in runs.items():
            self.ledger.note(step, now_us, destination, ids, peer=peer)

    def bury(self, backlog: Backlog, item: Item, cause: str, now: float) -> None:
        """Move a message to the dead letters; the caller settles it where it was."""
        queue = backlog.dead_letters
        self.ledger.note(
            Step.DEAD, int(now * MICROSECONDS), backlog.destination, [item.id], detail=cause
        )
        self.inject(bury(item.envelope, queue, cause, item.attempts), now)
        if self.watched:
            self.notify_watchers([item.id], cause)

    def notify_watchers(self, ids: Sequence[int], error: str = "") -> None:
        for identifier in ids:
            watcher = self.watched.pop(identifier, None)
            if watcher is not None:
                self.callbacks.run("watcher", watcher, identifier, error)

    def notify_consumers_changed(self, queue: Queue) -> None:
        """Once for many changes; who is told may attach and detach others because of it."""
        if self.consumers_changed and queue not in self._consumers_differ:
            self._consumers_differ[queue] = None
            self.defer("consumers", self._notify_consumers_changed, queue)

    def _notify_consumers_changed(self, queue: Queue) -> None:
        del self._consumers_differ[queue]
        for callback in self.consumers_changed:
            self.callbacks.run("consumers", callback, queue)

    # Time.

    def next_deadline(self) -> float | None:
        return self._timers.next_due()

    def on_earlier_deadline(self, action: Callable[[], None]) -> None:
        """Have the owner told when `next_deadline` has come nearer."""
        self._timers.sooner = action

    def handle_deadline(self, now: float) -> None:
        self.now = now
        self._timers.run(now)
        self.pump(now)

    def follow_wall(self, wall: float, now: float) -> None:
        """The wall clock shows `wall` now. Schedules and timestamps follow it, durations don't."""
        jumped = self.wall.observe(wall, now)
        self.schedules.follow_clock(now, went_back=jumped < 0)

    def call_at(self, due: float, action: Callable[[float], None]) -> None:
        self._timers.at(due, action)

    def call_at_least(self, owner: object, due: float, action: Callable[[float], None]) -> None:
        """Like `call_at`, but an owner is called for the earliest of its times only: it asks for
        the next one when it is called."""
        self._timers.at_least(owner, due, action)

    def _keep_house(self, now: float) -> None:
        """Give back room: settled, sealed and past retention."""
        self.call_at(now + _HOUSEKEEPING_S, self._keep_house)
        run = self.callbacks.run
        for queue in list(self._queues.values()):
            run("housekeeping", queue.reclaim)
        for topic in (*self._topics.values(), *self._journals.values()):
            run("housekeeping", topic.retain, now)
        run("housekeeping", self.subscriptions.report_gaps)
        run("housekeeping", self.staging.keep_house, now)
        rows = self.store.next_row - 1 - self.config.ledger_rows
        if self.config.lake:
            rows = self.feed.released_row
        if rows > 0:
            self.store.forget_rows(rows)

    # Damage.

    def report(self, error: HubError) -> None:
        """Keep what went wrong without anybody being there to be told."""
        self.reports.append(error)
        del self.reports[:-_REPORTS]

    def set_aside(self, number: int, identifier: int, record: bytes, error: HubError) -> None:
        """A record that can't be read: out of the way, but not thrown away."""
        destination = self._name_of(number)
        self.report(error)
        self.store.report_damage(
            "record", f"message {identifier} of {destination} is damaged and set aside: {error}"
        )
        self.store.save(_DAMAGED, number.to_bytes(4) + identifier.to_bytes(8), record)
        self.ledger.note(
            Step.DAMAGED, int(self.now * MICROSECONDS), destination, [identifier], detail=str(error)
        )
        self.store.request(urgent=False)

    def set_aside_state(self, space: str, key: bytes, value: bytes, error: HubError) -> None:
        """A record of a state space that can't be used: reported, and kept in `damaged`."""
        self.report(error)
        self.store.report_damage(
            "record", f"a record of {space} can't be used and is set aside ({key!r}): {error}"
        )
        self.store.save(_DAMAGED, _STATE + space.encode() + b"/" + key, value)
        self.store.drop(space, key)
        self.store.request(urgent=False)

    def damaged_state(self) -> Iterator[tuple[str, bytes, bytes]]:
        """What was set aside of state spaces: space, key, bytes as they were found."""
        for key, record in self.store.load(_DAMAGED, _STATE):
            space, _, rest = key[len(_STATE) :].partition(b"/")
            yield space.decode(errors="replace"), rest, record

    def _name_of(self, number: int) -> str:
        """Its destination; a damaged record may have a number that was never given out."""
        try:
            return self.store.name(number)
        except KeyError:
            return f"destination number {number}"

    def report_missing(self, number: int, identifier: int) -> None:
        """A cursor speaks of a message that is not there: retention took it, or it is lost."""
        destination = self._name_of(number)
        topic = self._topics.get(destination)
        if topic is not None and identifier <= topic.reclaimed:
            self.ledger.note(
                Step.EXPIRED,
                int(self.now * MICROSECONDS),
                destination,
                [identifier],
                detail="retention",
            )
            return
        error = RecordDamaged(f"message {identifier} of {destination} is missing")
        self.report(error)
        self.store.report_damage("record", str(error))
        self.ledger.note(
            Step.DAMAGED, int(self.now * MICROSECONDS), destination, [identifier], detail="missing"
        )

    def report_stopped(self, backlog: Backlog) -> None:
        """A queue or subscription stands still, and only that."""
        error = RecordDamaged(
            f"{backlog.title} is stopped until `crosswire store repair`: {backlog.stopped}"
        )
        self.report(error)
        self.store.report_damage("cursor", str(error))

    def stopped(self) -> list[Backlog]:
        """Queues and subscriptions that deliver nothing because their cursor is damaged."""
        return [
            each for each in (*self._queues.values(), *self.subscriptions.all()) if each.stopped
        ]

    def damaged(self) -> Iterator[tuple[str, int, bytes]]:
        """What was set aside: destination, id, bytes as they were found."""
        for key, record in self.store.load(_DAMAGED):
            if not key.startswith(_STATE):
                yield self._name_of(int.from_bytes(key[:4])), int.from_bytes(key[4:]), record


def _window(window: Window | int) -> Window:
    return Window(window) if isinstance(window, int) else window
