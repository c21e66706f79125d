"""The queues and topics that there are, each with the policy of its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

from crosswire.envelope import (
    Destination,
    parse_destination,
    parse_stored_destination,
)
from crosswire.errors import InvalidDestination, RecordDamaged
from crosswire.hub.core import Core, SendEnvelope
from crosswire.hub.policies import HubConfig, QueuePolicy, Retry, TopicPolicy
from crosswire.hub.queues import Queue, stored_depth, stored_pause
from crosswire.hub.shares import DestinationOwners
from crosswire.hub.stored_queues import StoredQueue
from crosswire.hub.subscriptions import Subscriptions
from crosswire.hub.topic_index import KnownTopics
from crosswire.hub.topics import Topic

__all__ = ["Destinations"]


class Destinations:
    """Queues are opened when they are first used; topics, which subscriptions must know, at once.

    `consumers_changed` are called with a queue when somebody starts or stops consuming it.
    """

    def __init__(
        self,
        core: Core,
        config: HubConfig,
        topics: KnownTopics,
        subscriptions: Subscriptions,
        *,
        send: SendEnvelope,
        owners: DestinationOwners,
    ) -> None:
        self.owners = owners
        self.queues: dict[str, Queue] = {}
        self.stored: dict[str, StoredQueue] = {}
        """What is stored of queues that nobody has opened, as far as somebody has read it."""
        self.topics = topics.by_destination
        self._known_topics = topics
        self.consumers_changed: list[Callable[[Queue], None]] = []
        self._core = core
        self._config = config
        self._subscriptions = subscriptions
        self._send = send
        self._to_notify: dict[Queue, None] = {}
        self._removed: WeakSet[Queue] = WeakSet()
        for destination in core.store.destinations():
            if destination.startswith("topic/"):
                policy = self._topic_policy(destination)
                topics.add(Topic(core, destination, policy))

    def target(self, destination: str, holder: str = "", *, own: bool = False) -> Queue | Topic:
        """The queue or topic of that name, opened if need be; a new one counts for the holder.
        Raises InvalidDestination, DestinationFull.

        `own`: the hub chose the name itself, which need not be one that a peer may choose. No limit
        refuses it, and dead letters count for whom their queue counts for.
        """
        target = self.queues.get(destination) or self.topics.get(destination)
        if target is not None:
            return target
        kind = (parse_stored_destination if own else self.parse)(destination).kind
        if kind == "service":
            raise InvalidDestination(f"{destination!r} is called, nothing can be sent to it")
        if own:
            self.owners.create_own(destination, destination.removesuffix("/dead"))
        else:
            self.owners.create(destination, holder)
        return self._open_queue(destination) if kind == "queue" else self._open_topic(destination)

    def queue(self, destination: str, holder: str = "") -> Queue:
        """The queue of that name, opened if need be. Raises InvalidDestination, DestinationFull."""
        queue = self.queues.get(destination)
        if queue is None:
            self.parse(destination)
            self.owners.create(destination, holder)
            queue = self._open_queue(destination)
        return queue

    def topic(self, destination: str) -> Topic:
        """The topic of that name, opened if need be. Raises InvalidDestination."""
        topic = self.topics.get(destination)
        if topic is None:
            self.parse(destination)
            self.owners.create(destination, "")
            topic = self._open_topic(destination)
        return topic

    def _open_queue(self, destination: str) -> Queue:
        queue = Queue(
            self._core,
            destination,
            self.queue_policy(destination),
            send=self._send,
            consumers_changed=self._note_consumers_changed,
        )
        self.queues[destination] = queue
        self.stored.pop(destination, None)
        queue.recover(self._core.loop.now)
        return queue

    def _open_topic(self, destination: str) -> Topic:
        topic = Topic(self._core, destination, self._topic_policy(destination))
        self._known_topics.add(topic)
        return topic

    def opened(self, destination: str) -> Queue | Topic | None:
        """The queue or topic of that name; None if there is none, or a queue that nobody opened."""
        return self.queues.get(destination) or self.topics.get(destination)

    def remove(self, target: Queue | Topic) -> None:
        """Delete its state: nobody uses it, and its messages are deleted. The next one of its name
        is a new one."""
        self.owners.remove(target.number)
        if isinstance(target, Queue):
            del self.queues[target.destination]
            target.delete()
            self._removed.add(target)
        else:
            self._subscriptions.remove_topic(target)
            self._known_topics.remove(target)
            target.delete()

    @property
    def departed(self) -> int:
        """How many queues were removed, and are still in memory."""
        return len(self._removed)

    def is_configured(self, destination: str) -> bool:
        """Whether the configuration has a policy for this name."""
        kind, _, name = destination.partition("/")
        return name in (self._config.queues if kind == "queue" else self._config.topics)

    def depth(self, destination: str) -> tuple[int, int]:
        """Length and size of a queue, which is not opened for it; zeros if there is none."""
        queue = self.queues.get(destination)
        if queue is None:
            stored = self.stored.get(destination)
            if stored is not None:
                return stored.length, stored.size_bytes
            number = self._core.store.destinations().get(destination)
            try:
                return (0, 0) if number is None else stored_depth(self._core.store, number)
            except RecordDamaged:
                # An opened one counts what is stored.
                queue = self.queue(destination)
        return queue.length, queue.size_bytes

    def depths(self, destinations: Iterable[str]) -> list[tuple[int, int]]:
        """`depth` of many, for lists and totals over all queues."""
        opened = self.queues.get
        return [
            self.depth(name)
            if (queue := opened(name)) is None
            else (queue.length, queue.size_bytes)
            for name in destinations
        ]

    def oldest_times_us(self, destinations: Iterable[str]) -> list[int]:
        """When the oldest unsettled message of each queue was accepted, in µs; 0 if it has none, or
        nothing of it is in memory. One that nobody has used is opened only if it has messages, and
        what is stored of it is not known."""
        opened, stored = self.queues.get, self.stored.get
        times = []
        for destination in destinations:
            queue = opened(destination)
            if queue is None:
                known = stored(destination)
                if known is not None:
                    times.append(known.oldest_us)
                    continue
                queue = self.queue(destination) if self.depth(destination)[0] else None
            # As `Backlog.oldest_us`, without a call: there may be a hundred thousand.
            items = queue.memory.items if queue is not None and queue.length else None
            times.append(next(iter(items.values())).envelope.time if items else 0)
        return times

    def is_paused(self, destination: str) -> bool:
        """Whether an operator paused this queue, which is not opened for it."""
        queue = self.queues.get(destination)
        if queue is not None:
            return queue.paused
        number = self._core.store.destinations().get(destination)
        return number is not None and stored_pause(self._core.store, number)

    def all_queues(self) -> list[Queue]:
        """Every queue in order of names, those that nobody used since the start included."""
        return [
            self.queue(destination)
            for destination in sorted(self._core.store.destinations())
            if destination.startswith("queue/")
        ]

    def parse(self, destination: str) -> Destination:
        """Raises InvalidDestination: new names must keep to the rules, existing ones need not."""
        if destination in self._core.store.destinations():
            return parse_stored_destination(destination)
        return parse_destination(destination)

    def reconfigure(self, config: HubConfig) -> None:
        """Other policies from now on; what is accepted already stays."""
        self._config = config
        for queue in self.queues.values():
            queue.adopt(self.queue_policy(queue.destination))
        for topic in self.topics.values():
            topic.policy = self._topic_policy(topic.destination)

    def queue_policy(self, destination: str) -> QueuePolicy:
        """The policy of a queue, whether it exists already or not."""
        if destination.endswith("/dead"):
            # A dead letter that can't be consumed has nowhere else to go.
            return QueuePolicy(retry=Retry(max_attempts=0))
        return self._config.queues.get(destination.removeprefix("queue/"), self._config.queue)

    def _topic_policy(self, destination: str) -> TopicPolicy:
        return self._config.topics.get(destination.removeprefix("topic/"), self._config.topic)

    def _note_consumers_changed(self, queue: Queue) -> None:
        # Deferred, and once for many changes: listeners attach and detach consumers themselves.
        if self.consumers_changed and queue not in self._to_notify:
            self._to_notify[queue] = None
            self._core.loop.defer("consumers", self._notify_consumers_changed, queue)

    def _notify_consumers_changed(self, queue: Queue) -> None:
        del self._to_notify[queue]
        for callback in self.consumers_changed:
            self._core.loop.callbacks.run("consumers", callback, queue)
