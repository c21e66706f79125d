"""The hub: accepts batches of envelopes, stores them, and delivers them.

Pure logic with time as an argument; the store does the disk. Nothing is done per message that can
be done per batch: a batch is appended to the open commit group, the group is committed as a whole,
and what became visible with it is handed out in lists.

`Hub` is what gateways and the server call, and where the parts are put together. No part
receives it: each is given what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Any, Final, Literal, TypeAlias

from crosswire.access import parse_subscription_dead_letters
from crosswire.commitlog.contract import CommitLog, Receipt
from crosswire.envelope import Envelope, parse_pattern
from crosswire.errors import InvalidDestination, RecordDamaged, StoreError, UnknownMessage
from crosswire.hub.attachment import Attachment, Choice, Consumer, DeliveryReceiver, Window
from crosswire.hub.audit import count_messages
from crosswire.hub.backlog.backlog import Backlog
from crosswire.hub.commits import CommitPath
from crosswire.hub.core import Core, SendEnvelope, WindowTotal
from crosswire.hub.damage import DamageReports, Titled
from crosswire.hub.dead import DeadLetters
from crosswire.hub.destinations import Destinations
from crosswire.hub.dispatch import Dispatcher, DispatchLoop, Watchers
from crosswire.hub.floors import Floors
from crosswire.hub.ingest.staging import Staging
from crosswire.hub.intake import Intake
from crosswire.hub.ledger import NOBODY, Ledger, LedgerPeer, LedgerRow
from crosswire.hub.policies import HubConfig
from crosswire.hub.queues import Queue
from crosswire.hub.read_slots import ReadSlots
from crosswire.hub.removals import UnusedDestinations
from crosswire.hub.schedules import Schedules
from crosswire.hub.seals import LakeSeals
from crosswire.hub.services import Answer, Call, Provider, ProviderReceiver, Services
from crosswire.hub.shares import DestinationOwners, Holders, Quota
from crosswire.hub.stored_queues import StoredQueue
from crosswire.hub.subscriptions import Start, Subscription, Subscriptions, predicate
from crosswire.hub.timers import Timers
from crosswire.hub.topic_index import KnownTopics
from crosswire.hub.topics import Topic
from crosswire.hub.wall import Timestamps, WallClock
from crosswire.store.contract import Store

__all__ = ["Hub"]

_HOUSEKEEPING_S: Final = 10.0
_WATCHED: Final = 100_000
"""Messages whose producers wait for their end, of all peers together."""
_CHORES: Final = 50
_PAUSE_S: Final = 0.005

Chore: TypeAlias = tuple[Any, ...]
"""A callback and its arguments."""


class Hub:
    """One for each data directory. Call everything on one thread.

    `now` is in seconds since 1970 and steady: the wall clock at the start plus the monotonic clock.
    Between calls the owner waits for `next_deadline`, then calls `handle_deadline`, and passes the
    wall clock to `follow_wall` every few seconds.
    """

    def __init__(
        self,
        store: Store,
        config: HubConfig | None = None,
        *,
        now: float,
        random: Random,
        clock: Callable[[], float] | None = None,
        log: CommitLog | None = None,
    ) -> None:
        """`log` makes commit groups durable: the local one by default. `clock` gives the hub's time
        when a commit ends, which happens without a call from outside; without it, the time of the
        latest call."""
        self.store = store
        self.config = config = config or HubConfig()
        self.node = store.node
        loop = DispatchLoop(now)
        self.callbacks = loop.callbacks
        self.turns = loop.turns
        """How the event loop's thread is shared between peers."""
        timestamps = Timestamps(now)
        self.ledger = Ledger(config.recent_rows, timestamps.stamp_us)
        self.commits = CommitPath(store, self.ledger, loop, clock, log)
        self.damage = DamageReports(store, self.ledger, loop, self.commits)
        self.reports = self.damage.reports
        self.wall = WallClock(store, self.commits, self.damage, timestamps, now)
        floors = Floors(store, self.damage)
        self.seals = LakeSeals(store, self.commits, self.damage, floors, withheld=config.lake)
        self.windows = WindowTotal(config.windows_bytes)
        self.holders = Holders()
        """Whose shares what connections create counts for."""
        self._core = core = Core(
            store=store,
            ledger=self.ledger,
            loop=loop,
            commits=self.commits,
            timers=Timers(loop.callbacks, loop.turns.is_over),
            wall=self.wall,
            damage=self.damage,
            floors=floors,
            seals=self.seals,
            watchers=Watchers(loop.callbacks, Quota("watched results", _WATCHED, config.share)),
            windows=self.windows,
            reads=ReadSlots(loop),
            holders=self.holders,
            chance=random.random,
        )
        owners = DestinationOwners(store, config.share)
        topics = KnownTopics()
        # Queues send dead letters through the intake, which needs queues: `inject` finds the
        # intake when it is called, and nothing is buried before all parts are there.
        self.subscriptions = Subscriptions(
            core,
            topics,
            send=self.inject,
            retry=config.retry,
            share=Quota("named subscriptions", config.subscriptions, config.share),
        )
        self._destinations = Destinations(
            core, config, topics, self.subscriptions, send=self.inject, owners=owners
        )
        self.consumers_changed = self._destinations.consumers_changed
        """Called with a queue when somebody starts or stops consuming it."""
        self.watched = core.watchers
        """Callbacks by message id: `(id, "")` when it is settled, `(id, reason)` if it never will
        be."""
        self._intake = Intake(core, self._destinations, self.subscriptions)
        self.produce = self._intake.produce
        """Accepts a batch of one producer, for queues and topics: see `Intake.produce`."""
        self.services = Services(
            core,
            config.service,
            config.topic,
            owners,
            share=config.share,
            calls_bytes=config.calls_bytes,
        )
        self.schedules = Schedules(
            core,
            self.inject,
            self._destinations.target,
            Quota("schedules", config.schedules, config.share),
            Quota("bytes of scheduled messages", config.schedules_bytes, config.share),
        )
        self.dead_letters = DeadLetters(
            self._destinations.queue,
            self._destinations.parse,
            self.inject,
            self._way_back,
            loop,
        )
        self.staging = Staging(
            core,
            self._destinations,
            config.staging,
            config.share,
            take_over=self._intake.take_over,
        )
        self._unused = UnusedDestinations(
            core,
            self._destinations,
            self.subscriptions,
            self.schedules,
            self.services,
            expire_s=config.expire_s,
            is_taking_over=self.staging.is_taking_over,
        )
        self._recover()
        self.call_at(now + _HOUSEKEEPING_S, self._keep_house)

    def _recover(self) -> None:
        """Queues are recovered when they are first used; subscriptions get messages at once."""
        now = self.now
        self.subscriptions.recover(now)
        self.staging.recover(now)
        first = max(self.store.next_row - self.config.recent_rows, 1)
        for row, _, block in self.store.blocks(first - 1, 1000):
            try:
                self.ledger.remember(row, block)
            except StoreError as error:
                self.damage.report(error)
        if self.store.damage or not self.store.was_stopped:
            count_messages(self.store, self.ledger, self._core.floors)

    @property
    def now(self) -> float:
        """The hub's time of the latest call."""
        return self._core.loop.now

    # Producing, beside `produce`.

    def inject(self, envelope: Envelope, now: float) -> int:
        """Send a message of the hub itself, which must not get lost: schedules, dead letters.

        No limit refuses it, and it goes into the next group if its group can't be written. Returns
        its id.
        """
        return self._intake.inject(envelope, now)

    def _way_back(self, queue: str) -> SendEnvelope | None:
        """How dead letters of this queue return to their subscription; None if they are a queue's.

        Raises UnknownMessage if that subscription is gone.
        """
        found = parse_subscription_dead_letters(queue)
        if found is None:
            return None
        owner, name = found
        subscription = self.subscriptions.get(name, owner)
        if subscription is None:
            raise UnknownMessage(
                f"the subscription {name!r} of these dead letters is gone: choose a destination"
            )
        return lambda envelope, now: self._intake.give_back(envelope, subscription, now)

    def target(self, destination: str, peer: LedgerPeer = NOBODY) -> Queue | Topic:
        """The queue or topic of that name, opened if need be; a new one counts for the peer. Raises
        InvalidDestination, DestinationFull."""
        return self._destinations.target(destination, self._holder(peer))

    def _holder(self, peer: LedgerPeer) -> str:
        return self.holders.of(peer.principal, peer.connection)

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
        """Consume a queue, at most `window` messages at a time.

        `holding` are messages that it got before the hub was restarted and still has. Messages
        that `filter` or `choice` don't match are left to other consumers. Raises
        InvalidDestination, InvalidFilter.
        """
        self._core.loop.now = now
        if self._destinations.parse(destination).kind != "queue":
            raise InvalidDestination(f"{destination!r} is not a queue")
        # Before the queue is opened: its number in the store is never freed again.
        matches = predicate(filter)
        consumer = self._destinations.queue(destination, self._holder(peer)).attach(
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
        self._core.loop.pump(now)
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
        """Subscribe to the topics of a pattern; with a `name` the subscription is durable, and
        shared by all consumers of the same principal that use the name.

        Without one, `names` may select among the topics of the pattern.

        `start` is where a new subscription starts, `latest` by default. Raises
        SubscriptionConflict if there is one of the name with another pattern or filter.
        """
        self._core.loop.now = now
        if parse_pattern(pattern).kind != "topic":
            raise InvalidDestination(f"{pattern!r} is not a topic")
        attachment: Attachment
        if name:
            subscription = self.subscriptions.named(
                name, pattern, filter, start, now, peer.principal, self._holder(peer)
            )
            attachment = subscription.attach(
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
        self._core.loop.pump(now)
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
        self._core.loop.now = now
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
        """Call services; `answered` is called once for each, perhaps before this returns; if a
        callback of the hub calls this, after that callback has returned."""
        self._core.loop.now = now
        return self.services.call(envelopes, now, answered=answered, peer=peer, timeout_s=timeout_s)

    def cancel(self, calls: Sequence[Call], now: float) -> None:
        """The caller does not wait any longer: nobody is answered, and the providers may stop."""
        self._core.loop.now = now
        self.services.cancel(calls, now)

    # Destinations.

    def queue(self, destination: str, peer: LedgerPeer = NOBODY) -> Queue:
        """The queue of that name, opened if need be; a new one counts for the peer. Raises
        InvalidDestination, DestinationFull."""
        return self._destinations.queue(destination, self._holder(peer))

    def topic(self, destination: str) -> Topic:
        """The topic of that name, opened if need be. Raises InvalidDestination."""
        return self._destinations.topic(destination)

    def remove(self, destination: str, now: float) -> None:
        """Remove a queue or topic without messages, consumers, schedules and configuration; it is
        gone when that is `committed`. Raises UnknownMessage, DestinationInUse, StoreError."""
        self._core.loop.now = now
        self._unused.remove(destination)

    @property
    def removed_total(self) -> int:
        """How many queues and topics were removed since the start."""
        return self._unused.removed_total

    @property
    def departed(self) -> int:
        """How many queues and named subscriptions were removed, and are still in memory: the
        objects of one refer to each other."""
        return self._destinations.departed + self.subscriptions.departed

    def queues(self) -> list[Queue]:
        """Every queue in order of names, those that nobody used since the start included."""
        return self._destinations.all_queues()

    def depth(self, destination: str) -> tuple[int, int]:
        """Length and size in bytes of a queue, which is not opened for it."""
        return self._destinations.depth(destination)

    def depths(self, destinations: Iterable[str]) -> list[tuple[int, int]]:
        """`depth` of many."""
        return self._destinations.depths(destinations)

    def oldest_times_us(self, destinations: Iterable[str]) -> list[int]:
        """When the oldest unsettled message of each queue was accepted, in µs; 0 if it has none, or
        nothing of it is in memory."""
        return self._destinations.oldest_times_us(destinations)

    def adopt_stored(self, queues: dict[str, StoredQueue]) -> None:
        """What `read_stored_queues` has read: `depth` and `oldest_times_us` of queues that nobody
        has opened are known from now on."""
        self._destinations.stored = queues

    def is_paused(self, destination: str) -> bool:
        """Whether an operator paused this queue, which is not opened for it."""
        return self._destinations.is_paused(destination)

    def opened_queues(self) -> Mapping[str, Queue]:
        """By destination, those that somebody has used since the start: only they have consumers,
        and something in memory."""
        return self._destinations.queues

    def topics(self) -> list[Topic]:
        """Every topic in order of names."""
        return [topic for _, topic in sorted(self._destinations.topics.items())]

    def topics_by_name(self) -> dict[str, Topic]:
        """Every topic by destination."""
        return self._destinations.topics

    def backlogs(self) -> list[Backlog]:
        """Everything that has consumers: queues in use, and named subscriptions."""
        return [*self._destinations.queues.values(), *self.subscriptions.all()]

    def stopped(self) -> list[Titled]:
        """Queues and subscriptions that deliver nothing because their cursor is damaged. Consoles
        and monitoring ask for them all the time, so not all queues are looked at."""
        return [each for each in self.damage.stopped if self._is_there(each)]

    def _is_there(self, backlog: Titled) -> bool:
        if isinstance(backlog, Subscription):
            return self.subscriptions.get(backlog.name, backlog.owner) is backlog
        assert isinstance(backlog, Queue)
        return self._destinations.queues.get(backlog.destination) is backlog

    def is_consumed(self, destination: str) -> bool:
        """Whether this queue has a consumer, of any protocol."""
        queue = self._destinations.queues.get(destination)
        return queue is not None and bool(queue.consumers)

    def is_served(self, destination: str) -> bool:
        """Whether there is a provider that would get a call."""
        return self.services.is_served(destination)

    def reconfigure(self, config: HubConfig) -> None:
        """Other policies from now on; what is accepted already stays."""
        self.config = config
        self.windows.limit_bytes = config.windows_bytes
        self.services.reconfigure(
            config.service, config.topic, share=config.share, calls_bytes=config.calls_bytes
        )
        self.subscriptions.retry = config.retry
        self.staging.reconfigure(config.staging, config.share)
        self._unused.expire_s = config.expire_s
        self._destinations.owners.configure(config.share)
        self.watched.share.configure(_WATCHED, config.share)
        self.subscriptions.share.configure(config.subscriptions, config.share)
        self.schedules.share.configure(config.schedules, config.share)
        self.schedules.bytes_share.configure(config.schedules_bytes, config.share)
        self._destinations.reconfigure(config)
        self._core.loop.pump(self.now)

    def fetch(self, destination: str, ids: Sequence[int]) -> list[Envelope | None]:
        """Stored messages by id, None for those that are deleted or damaged."""
        number = self.store.destinations().get(destination)
        if number is None:
            return [None] * len(ids)
        records = self.store.fetch(number, ids)
        return [self._read(number, *each) for each in zip(ids, records, strict=True)]

    def _read(self, number: int, identifier: int, record: bytes | None) -> Envelope | None:
        if record is None:
            return None
        try:
            return self.damage.decode(number, identifier, record)
        except RecordDamaged as error:
            self.damage.report(error)
            return None

    def trace(self, identifier: int) -> list[LedgerRow]:
        """The steps of a message, as far as the recent ledger goes back."""
        return self.ledger.of_message(identifier)

    # Commits.

    @property
    def committed_id(self) -> int:
        """The newest id that was given out when the last committed group was sealed."""
        return self.commits.committed_id

    def committed(self) -> Receipt:
        """Done when all that was requested so far, settlements included, is on disk."""
        loop = self._core.loop
        if not loop.has_deferred:
            return self.commits.committed()
        # A part of it may wait for its turn, and is in a later group then.
        receipt = Receipt([], {})
        loop.defer("commit", self.commits.finish_with_group, receipt)
        loop.pump(self.now)
        return receipt

    def written(self) -> Receipt:
        """Done when what was saved so far is with the operating system: it survives the process,
        though not a power failure."""
        return self.commits.written()

    def touch(self, dispatcher: Dispatcher) -> None:
        """It may have something to hand out, when the hub is called next."""
        self._core.loop.touch(dispatcher)

    def defer(self, kind: str, callback: Callable[..., None], *args: Any) -> None:
        """Have this called before the hub hands out anything else: at the end of the next call, or
        in a later turn of the event loop if that is long."""
        self._core.loop.defer(kind, callback, *args)

    def hand_out(self) -> None:
        """Do what was deferred, and hand out what is ready, as far as this turn allows."""
        self._core.loop.pump(self.now)

    # Time.

    def next_deadline(self) -> float | None:
        """When `handle_deadline` is to be called; None if nothing is scheduled."""
        return self._core.timers.next_due()

    def on_earlier_deadline(self, action: Callable[[], None]) -> None:
        """Have this called whenever `next_deadline` became earlier."""
        self._core.timers.sooner = action

    def handle_deadline(self, now: float) -> None:
        """Do what is due."""
        self._core.loop.now = now
        self._core.timers.run(now)
        self._core.loop.pump(now)

    def follow_wall(self, wall: float, now: float) -> None:
        """The wall clock shows `wall` now. Schedules and timestamps follow it, durations don't."""
        jumped = self.wall.observe(wall, now)
        self.schedules.follow_clock(now, went_back=jumped < 0)

    def call_at(self, due: float, action: Callable[[float], None]) -> None:
        """Have this called once, with the hub's time, when `due` has come."""
        self._core.timers.at(due, action)

    def call_at_least(self, owner: object, due: float, action: Callable[[float], None]) -> None:
        """Like `call_at`, but an owner is called for the earliest of its times only: it requests
        the next one when it is called."""
        self._core.timers.at_least(owner, due, action)

    def _keep_house(self, now: float, chores: Iterator[Chore] | None = None) -> None:
        """Delete what is settled, sealed in the lake and past its retention.

        In steps: with tens of thousands of queues a round takes a second.
        """
        chores = self._chores(now) if chores is None else chores
        done = 0
        for work, *args in islice(chores, _CHORES):
            self.callbacks.run("housekeeping", work, *args)
            done += 1
        if done == _CHORES:
            self.call_at(now + _PAUSE_S, partial(self._keep_house, chores=chores))
        else:
            self.call_at(now + _HOUSEKEEPING_S, self._keep_house)

    def _chores(self, now: float) -> Iterator[Chore]:
        """What a round of housekeeping calls, with its arguments."""
        for queue in list(self._destinations.queues.values()):
            yield (queue.reclaim,)
        for topic in (*self._destinations.topics.values(), *self.services.journals.values()):
            yield topic.retain, now
        yield from self._unused.chores(now)
        yield self.staging.keep_house, now
        yield (self._forget_rows,)

    def _forget_rows(self) -> None:
        rows = self.store.next_row - 1 - self.config.ledger_rows
        if self.config.lake:
            rows = self.seals.released_row
        if rows > 0:
            self.store.forget_rows(rows)


def _window(window: Window | int) -> Window:
    return Window(window) if isinstance(window, int) else window
