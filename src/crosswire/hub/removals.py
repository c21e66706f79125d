"""Removing queues and topics that nobody uses: on request, and after a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final, TypeAlias

from crosswire.envelope import MICROSECONDS
from crosswire.errors import DestinationInUse, UnknownMessage
from crosswire.hub.core import Core
from crosswire.hub.destinations import Destinations
from crosswire.hub.queues import Queue
from crosswire.hub.schedules import Schedules
from crosswire.hub.services import Services
from crosswire.hub.subscriptions import Subscriptions
from crosswire.hub.topics import Topic

__all__ = ["UnusedDestinations"]

_UNUSED: Final = "unused"
"""A space: since when a destination is unused, in µs since 1970, by its number."""
_ROUNDS: Final = 24
"""Destinations are looked at this many times before they expire: that is how exact it is."""
_LEAST_ROUND_S: Final = 1.0
_SERVICE: Final = "service/"

Chore: TypeAlias = tuple[Any, ...]


class UnusedDestinations:
    """Knows since when each queue, topic and name of a service is unused, and removes them.

    Nothing is noted for a message: a round over all destinations, some at a time, compares what
    they count anyway with the round before.
    """

    def __init__(
        self,
        core: Core,
        destinations: Destinations,
        subscriptions: Subscriptions,
        schedules: Schedules,
        services: Services,
        *,
        expire_s: float,
        is_taking_over: Callable[[], bool],
    ) -> None:
        """`expire_s` 0 means never. `is_taking_over`: whether staged batches are on their way to
        destinations that may not have a message of them yet."""
        self.expire_s = expire_s
        self.removed_total = 0
        """How many destinations have been removed since the start."""
        self._core = core
        self._destinations = destinations
        self._subscriptions = subscriptions
        self._schedules = schedules
        self._services = services
        self._is_taking_over = is_taking_over
        self._since: dict[str, float] = {}
        """Since when each is unused, as `WallClock.age` counts; infinity if it was in use."""
        self._next_round = 0.0

    def remove(self, destination: str) -> None:
        """Remove a queue or topic, which is gone when this is committed.

        Raises UnknownMessage, DestinationInUse, and StoreError while nothing can be written.
        """
        if destination not in self._core.store.destinations() or destination.startswith(_SERVICE):
            raise UnknownMessage(f"there is no {destination}")
        store = self._core.store
        obstacle = store.obstacle(self._core.loop.now)
        # On a disk that is merely short of space it is tried: it needs hardly any.
        if obstacle is not None and store.last_error is not None:
            raise obstacle
        scheduled = {each.envelope.destination for each in self._schedules.all()}
        use = self._settings_use(destination, scheduled) or self._last_use(destination)
        if use:
            raise DestinationInUse(f"{destination} {use}")
        self._remove(destination)

    def chores(self, now: float) -> Iterator[Chore]:
        """The calls of a round, if one is due: each looks at one destination."""
        if not self.expire_s or now < self._next_round:
            return
        self._next_round = now + max(self.expire_s / _ROUNDS, _LEAST_ROUND_S)
        scheduled = {each.envelope.destination for each in self._schedules.all()}
        for destination in list(self._core.store.destinations()):
            yield self._look, destination, scheduled, now

    def _look(self, destination: str, scheduled: set[str], now: float) -> None:
        """Remove a destination that was unused for long enough."""
        store = self._core.store
        number = store.destinations().get(destination)
        if number is None:
            return
        target: Queue | Topic | None
        if destination.startswith(_SERVICE):
            target = self._services.journal(destination)
        else:
            target = self._destinations.opened(destination)
        was_used = target is not None and target.was_used()
        # An operator wants it to be there, and to stay paused.
        was_used |= isinstance(target, Queue) and target.paused
        if was_used or self._settings_use(destination, scheduled) or self._use(destination, target):
            self._since[destination] = inf
            return
        wall = self._core.wall.age(now)
        since = self._since.get(destination)
        if since is None:
            # Not looked at since the start: a restart does not begin the time anew.
            since = int.from_bytes(store.get(_UNUSED, number.to_bytes(4)) or b"") / MICROSECONDS
        if not 0 < since <= wall:
            since = wall
            value = int(wall * MICROSECONDS).to_bytes(8)
            store.save(_UNUSED, number.to_bytes(4), value)
            self._core.commits.request(sync=False, urgent=False)
        self._since[destination] = since
        is_due = wall - since >= self.expire_s and store.obstacle(now) is None
        if is_due and not self._last_use(destination):
            self._remove(destination)

    # What keeps a destination.

    def _settings_use(self, destination: str, scheduled: set[str]) -> str:
        """How configuration and schedules use it, which need not have used it yet."""
        if destination.startswith(_SERVICE):
            return ""
        if self._destinations.is_configured(destination):
            return "is in the configuration"
        return "has a schedule" if destination in scheduled else ""

    def _use(self, destination: str, target: Queue | Topic | None) -> str:
        """How it is used, as far as that is known without reading much; "" if it is not."""
        if destination.startswith(_SERVICE) and self._services.is_known(destination):
            return "is served"
        if isinstance(target, Topic):
            if target.has_messages:
                return "has messages"
            return "" if destination.startswith(_SERVICE) else self._subscriptions.use(target)
        if target is None:
            return "has messages" if self._destinations.depth(destination)[0] else ""
        if target.consumers:
            return "has consumers"
        if target.stopped:
            return "is stopped, as its cursor is damaged"
        return "" if target.is_empty else "has messages"

    def _last_use(self, destination: str) -> str:
        """What only shows when it is read: it is opened, and what is left of it must be what may be
        deleted."""
        target = self._open(destination)
        use = self._use(destination, target)
        if use:
            return use
        if self._is_taking_over():
            return "may get messages of a batch that is being committed"
        committed_id = self._core.commits.committed_id
        if isinstance(target, Queue) and target.visible > committed_id:
            return "has messages that are being committed"
        last = self._core.store.last_id(target.number)
        if last and isinstance(target, Topic):
            return "has messages"
        if last > self._core.seals.reclaim_limit:
            return "had messages that the lake does not have yet: try again in some seconds"
        return ""

    def _open(self, destination: str) -> Queue | Topic:
        """A service is the journal of its calls."""
        if destination.startswith(_SERVICE):
            return self._services.journal(destination)
        return self._destinations.target(destination, own=True)

    def _remove(self, destination: str) -> None:
        """Delete all that is stored of it."""
        store, target = self._core.store, self._open(destination)
        key = target.number.to_bytes(4)
        last = store.last_id(target.number)
        if last:
            store.reclaim(target.number, 1, last)
        if destination.startswith(_SERVICE):
            self._services.forget(destination)
        else:
            self._destinations.remove(target)
        self._core.floors.remove(target.number)
        store.drop(_UNUSED, key)
        store.remove(destination)
        self._since.pop(destination, None)
        self.removed_total += 1
        self._core.commits.request()
