"""The hub's state over HTTP: queues, topics, subscriptions and services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from crosswire import __version__
from crosswire.envelope import Envelope
from crosswire.errors import HubError, InvalidEnvelope, RecordDamaged, UnknownMessage
from crosswire.hub.attachment import Consumer
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.policies import QueuePolicy, TopicPolicy
from crosswire.hub.queues import Queue
from crosswire.hub.subscriptions import Subscription
from crosswire.store.contract import Page
from crosswire.web.contract import OperationRequest
from crosswire.web.long_work import Turn
from crosswire.web.messages import JsonMessage, show_message
from crosswire.web.numbers import Id, Many

__all__ = [
    "assign_subscription",
    "list_queues",
    "list_services",
    "list_subscriptions",
    "list_topics",
    "purge_queue",
    "remove_subscription",
    "show_queue",
    "show_state",
    "show_topic",
]

_REPORTS: Final = 20

Few = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class StoreState(msgspec.Struct, frozen=True):
    """The store. `groups` counts commit groups, `ledger_rows` all rows ever written; `error` is the
    reason if the last write failed."""

    groups: int
    newest_id: int
    ledger_rows: int
    has_room: bool
    error: str
    damaged_ranges: int


class HubState(msgspec.Struct, frozen=True):
    """Overview of the hub. `connections` are counted by protocol; `reports` are the latest errors;
    `leftovers` counts by kind what was still held for disconnected peers, and released."""

    version: str
    node: str
    started: float
    uptime_s: float
    draining: bool
    listen: dict[str, str]
    connections: dict[str, int]
    connections_limit: int
    """Of all protocols but HTTP; below the configured one if too few files may be open."""
    memory_bytes: int
    """What peers cause the hub to hold in memory, of at most `memory_limit_bytes`."""
    memory_limit_bytes: int
    queues: int
    topics: int
    subscriptions: int
    services: int
    schedules: int
    messages: int
    dead_letters: int
    store: StoreState
    leftovers: dict[str, int]
    reports: list[str]
    damaged: bool
    """Until it is acknowledged: see `/v1/damage`."""
    damage: list[str]
    stopped: list[str]


async def show_state(ask: OperationRequest) -> HubState:
    """Counts and errors of the whole hub."""
    server, hub = ask.server, ask.hub
    totals = await ask.work.totals(hub)
    store = hub.store
    return HubState(
        version=__version__,
        node=hub.node,
        started=server.started_at,
        uptime_s=max(ask.now() - server.started_at, 0.0),
        draining=server.context.draining,
        listen={name: str(each.address) for name, each in server.listeners.items()},
        connections=dict(Counter(each.protocol for each in server.context.gateways.values())),
        connections_limit=server.context.connection_slots.most,
        memory_bytes=server.context.budget.held_bytes,
        memory_limit_bytes=server.context.budget.limit_bytes,
        queues=totals.queues,
        topics=len(hub.topics_by_name()),
        subscriptions=len(hub.subscriptions.all()),
        services=len(hub.services.providers()),
        schedules=len(hub.schedules.all()),
        messages=totals.messages,
        dead_letters=totals.dead_letters,
        store=StoreState(
            groups=store.groups,
            newest_id=store.newest_id,
            ledger_rows=store.next_row - 1,
            has_room=store.has_room(ask.now()),
            error="" if store.last_error is None else str(store.last_error),
            damaged_ranges=store.unreadable_ranges,
        ),
        leftovers=dict(server.leftovers.healed),
        reports=[_report(error) for error in hub.reports[-_REPORTS:]],
        damaged=bool(store.damages.entries),
        damage=[each.detail for each in store.damages.entries[-_REPORTS:]],
        stopped=[each.title for each in hub.stopped()],
    )


def _report(error: HubError) -> str:
    return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------ queues


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list: names after `after` that contain `contains`."""

    after: str = ""
    contains: str = ""
    limit: Many = 1000


class Peek(msgspec.Struct, frozen=True, kw_only=True):
    """How many of its messages to show, from those with ids after `after`."""

    messages: Few = 0
    after: Id = 0


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """A queue; `length` counts messages that are not settled, `held` those that consumers hold."""

    name: str
    length: int
    size_bytes: int
    held: int
    consumers: int
    dead_letters: int
    stopped: str = ""
    """Why nothing is delivered from it, if its cursor is damaged."""


class Queues(msgspec.Struct, frozen=True):
    """Queues in order of their names, without those of dead letters."""

    queues: list[QueueRow]


class ConsumerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer; `held` messages are not settled yet, `free` is the rest of its window."""

    connection: str
    protocol: str
    principal: str
    held: int
    free: int
    weight: int


class QueueDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with its consumers, its policy and the requested messages. Who may not observe sees
    its own consumers only."""

    name: str
    length: int
    size_bytes: int
    held: int
    dead_letters: int
    consumers: list[ConsumerRow]
    policy: QueuePolicy
    messages: list[JsonMessage]


async def list_queues(ask: OperationRequest) -> Queues:
    """A page of queues: of all for observers, of those that they have a right to for others."""
    rows = []
    async with ask.work.turn() as turn:
        stored = ask.hub.store.destinations()
        for destination in await _page(ask, "queue/", stored, turn):
            await turn.pause()
            queue = ask.hub.queue(destination)
            rows.append(
                QueueRow(
                    name=queue.name,
                    length=queue.length,
                    size_bytes=queue.size_bytes,
                    held=sum(len(each.held) for each in queue.consumers),
                    consumers=len(queue.consumers),
                    dead_letters=ask.hub.depth(queue.dead_letters)[0],
                    stopped=queue.stopped,
                )
            )
    return Queues(rows)


async def _page(
    ask: OperationRequest, kind: str, destinations: Iterable[str], turn: Turn
) -> list[str]:
    """The destinations of a kind that the query means, and the principal may know of."""
    names: Names = ask.query
    after = kind + names.after

    def choose(destination: str) -> bool:
        return (
            destination.startswith(kind)
            and destination > after
            and names.contains in destination.removeprefix(kind)
            and not (kind == "queue/" and destination.endswith("/dead"))
            and ask.may_see(destination)
        )

    return await ask.work.first(destinations, names.limit, choose, turn)


def show_queue(ask: OperationRequest) -> QueueDetail:
    """A queue and some of its messages, which stay in it. Raises Forbidden, UnknownMessage."""
    peek: Peek = ask.query
    destination = f"queue/{ask.path['name']}"
    ask.require_sight(destination)
    if peek.messages:
        ask.require_content(destination)
    queue = _queue(ask)
    consumers = [each for each in queue.consumers if _is_visible(ask, each.peer.principal)]
    holders = {each: consumer.peer.connection for consumer in consumers for each in consumer.held}
    found = queue.browse(peek.after, peek.messages) if peek.messages else []
    return QueueDetail(
        name=queue.name,
        length=queue.length,
        size_bytes=queue.size_bytes,
        held=sum(len(each.held) for each in queue.consumers),
        dead_letters=ask.hub.depth(queue.dead_letters)[0],
        consumers=[_consumer(each) for each in consumers],
        policy=queue.policy,
        messages=[show_message(each, held_by=holders.get(each.id, "")) for each in found],
    )


class Purged(msgspec.Struct, frozen=True):
    """How many messages were deleted; those that consumers hold are kept."""

    purged: int


async def purge_queue(ask: OperationRequest) -> Purged:
    """Delete what no consumer holds; answered after the commit. Raises UnknownMessage."""
    queue = _queue(ask)
    before = queue.length
    queue.purge(ask.now())
    await ask.hub.committed()
    return Purged(max(before - queue.length, 0))


async def delete_queue(ask: OperationRequest) -> Removed:
    """Delete a queue; answered after the commit. Raises UnknownMessage, and DestinationInUse while
    it is not empty, has a consumer or is configured."""
    return await _delete(ask, "queue")


async def delete_topic(ask: OperationRequest) -> Removed:
    """Delete a topic; answered after the commit. Raises as `delete_queue` does."""
    return await _delete(ask, "topic")


async def _delete(ask: OperationRequest, kind: str) -> Removed:
    name = ask.path["name"]
    # What was settled last may not be written yet.
    await ask.hub.committed()
    ask.hub.remove(f"{kind}/{name}", ask.now())
    await ask.hub.committed()
    return Removed(name)


def _queue(ask: OperationRequest) -> Queue:
    """An existing queue. Raises UnknownMessage: `hub.queue` would create it."""
    destination = f"queue/{ask.path['name']}"
    if destination not in ask.hub.store.destinations():
        raise UnknownMessage(f"there is no queue {ask.path['name']!r}")
    return ask.hub.queue(destination)


def _is_visible(ask: OperationRequest, principal: str) -> bool:
    """Whether the principal may see what this one has: its own, or as an observer."""
    return principal == ask.principal or ask.is_observer


def _consumer(consumer: Consumer) -> ConsumerRow:
    return ConsumerRow(
        connection=consumer.peer.connection,
        protocol=consumer.peer.protocol,
        principal=consumer.peer.principal,
        held=len(consumer.held),
        free=max(consumer.window.free, 0),
        weight=consumer.weight,
    )


# ------------------------------------------------------------------------------------------ topics


class TopicRow(msgspec.Struct, frozen=True, kw_only=True):
    """A topic; `published` counts since the hub was started, `subscriptions` are the named ones."""

    name: str
    durable: bool
    published: int
    subscribers: int
    subscriptions: list[str]


class Topics(msgspec.Struct, frozen=True):
    """Topics in order of their names."""

    topics: list[TopicRow]


class TopicDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A topic with its policy and the requested messages; ids up to `reclaimed` are deleted."""

    name: str
    published: int
    subscribers: int
    subscriptions: list[str]
    reclaimed: int
    policy: TopicPolicy
    messages: list[JsonMessage]


class SubscriptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A named subscription. Ids up to `settled_upto` are settled; `committed` is the hub's newest
    id. `owner` is empty if it was made without users."""

    name: str
    owner: str
    pattern: str
    filter: str
    created: int
    settled_upto: int
    committed: int
    held: int
    consumers: list[ConsumerRow]
    dead_letters: int
    stopped: str = ""


class SubscriptionList(msgspec.Struct, frozen=True):
    """All named subscriptions."""

    subscriptions: list[SubscriptionRow]


class SubscriptionOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose subscription of the name: by default that of the user who asks."""

    owner: str | None = None


class NewOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The user who owns it from now on."""

    owner: str


class Removed(msgspec.Struct, frozen=True):
    """The name or id of what was removed."""

    removed: str


async def list_topics(ask: OperationRequest) -> Topics:
    """A page of topics: of all for observers, of those that they have a right to for others."""
    rows = []
    async with ask.work.turn() as turn:
        topics = ask.hub.topics_by_name()
        for destination in await _page(ask, "topic/", topics, turn):
            await turn.pause()
            topic = topics.get(destination)
            if topic is None:
                # Deleted since the names were sorted.
                continue
            audience = ask.hub.subscriptions.audience(topic)
            rows.append(
                TopicRow(
                    name=topic.name,
                    durable=topic.policy.durable,
                    published=topic.published,
                    subscribers=len(audience.subscribers),
                    subscriptions=_visible_names(ask, audience.subscriptions),
                )
            )
    return Topics(rows)


def _visible_names(ask: OperationRequest, subscriptions: Iterable[Subscription]) -> list[str]:
    return [each.name for each in subscriptions if _is_visible(ask, each.owner)]


def show_topic(ask: OperationRequest) -> TopicDetail:
    """A topic and some of its stored messages. Raises Forbidden, UnknownMessage."""
    hub, peek = ask.hub, ask.query
    destination = f"topic/{ask.path['name']}"
    ask.require_sight(destination)
    if peek.messages:
        ask.require_content(destination)
    topic = hub.topics_by_name().get(destination)
    if topic is None:
        raise UnknownMessage(f"there is no topic {ask.path['name']!r}")
    audience = hub.subscriptions.audience(topic)
    found: list[Envelope] = []

    def decode(page: Page) -> None:
        for number, identifier, record in page.records:
            try:
                found.append(hub.damage.decode(number, identifier, record))
            except RecordDamaged as error:
                hub.damage.set_aside(number, identifier, record, error)

    if peek.messages:
        after = max(peek.after, topic.reclaimed)
        hub.store.read([topic.number], after=after, count=peek.messages, done=decode)
    return TopicDetail(
        name=topic.name,
        published=topic.published,
        subscribers=len(audience.subscribers),
        subscriptions=_visible_names(ask, audience.subscriptions),
        reclaimed=topic.reclaimed,
        policy=topic.policy,
        messages=[show_message(each) for each in found],
    )


async def list_subscriptions(ask: OperationRequest) -> SubscriptionList:
    """Named subscriptions with their cursors and consumers: all of them for observers, their own
    for others."""
    rows = []
    async with ask.work.turn() as turn:
        for each in list(ask.hub.subscriptions.all()):
            if _is_visible(ask, each.owner):
                rows.append(_subscription(ask, each))
            await turn.pause()
    return SubscriptionList(rows)


def _subscription(ask: OperationRequest, subscription: Subscription) -> SubscriptionRow:
    definition = subscription.definition
    return SubscriptionRow(
        name=definition.name,
        owner=definition.owner,
        pattern=definition.pattern,
        filter=definition.filter,
        created=definition.created_us,
        settled_upto=subscription.memory.head() - 1,
        committed=ask.hub.committed_id,
        held=sum(len(each.held) for each in subscription.consumers),
        consumers=[_consumer(each) for each in subscription.consumers],
        dead_letters=ask.hub.depth(subscription.dead_letters)[0],
        stopped=subscription.stopped,
    )


async def remove_subscription(ask: OperationRequest) -> Removed:
    """Delete a named subscription; answered after the commit.

    Raises Forbidden, UnknownMessage, and SubscriptionConflict while it has consumers.
    """
    name, owner = ask.path["name"], _owner(ask)
    ask.hub.subscriptions.remove(name, owner)
    await ask.hub.committed()
    return Removed(name)


async def assign_subscription(ask: OperationRequest) -> SubscriptionRow:
    """Give it to another user, or to nobody."""
    given: NewOwner = ask.body
    access = ask.server.context.access
    if given.owner and not access.open and not access.knows(given.owner):
        raise InvalidEnvelope(f"there is no user {given.owner!r}")
    subscription = ask.hub.subscriptions.assign(ask.path["name"], _owner(ask), given.owner)
    await ask.hub.committed()
    return _subscription(ask, subscription)


def _owner(ask: OperationRequest) -> str:
    """Raises Forbidden unless it is the principal, or that is an administrator."""
    query: SubscriptionOwner = ask.query
    owner = ask.principal if query.owner is None else query.owner
    # Before it is looked up: whether others have one of that name is not shown.
    ask.require_ownership(owner)
    return owner


# ---------------------------------------------------------------------------------------- services


class ProviderRow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that serves a service."""

    connection: str
    protocol: str
    principal: str


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A service and the connections that serve it. Who may not observe sees its own only."""

    name: str
    providers: list[ProviderRow]


class ServiceRows(msgspec.Struct, frozen=True):
    """Services that have a provider, in order of their names."""

    services: list[ServiceRow]


async def list_services(ask: OperationRequest) -> ServiceRows:
    """Services that have a provider: all of them for observers, those that they may call or serve
    for others."""
    rows = []
    async with ask.work.turn() as turn:
        for name, peers in sorted(ask.hub.services.providers().items()):
            await turn.pause()
            if ask.may_see(name):
                providers = [_provider(each) for each in peers if _is_visible(ask, each.principal)]
                rows.append(ServiceRow(name=name.removeprefix("service/"), providers=providers))
    return ServiceRows(rows)


def _provider(peer: LedgerPeer) -> ProviderRow:
    return ProviderRow(connection=peer.connection, protocol=peer.protocol, principal=peer.principal)
