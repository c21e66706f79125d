"""What a simulated hub has in memory: within its limits while it runs, and nothing at the end.

Two views are compared. The hub's own accounts (the budget of connections, the windows of backlogs)
must be what their holders really have. And a census counts the elements of all containers that can
be reached from the hub: what grows in one that nobody thought of is found, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from crosswire.hub.attachment import Attachment, Window
from crosswire.hub.backlog.backlog import Backlog
from crosswire.server.server import Server
from crosswire.testing.simulation.world import World

__all__ = ["MemoryAudit", "take_census"]

_CONTAINERS: Final = (dict, list, set, frozenset, deque, tuple)
_ELSEWHERE: Final = ("crosswire.testing", "crosswire.store", "crosswire.config")
"""What is a disk here, the simulation itself, and what an operator has configured."""


class MemoryAudit:
    """Looks into a server between two of its turns."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._largest_bytes = 0
        self._windows: dict[str, int] = {}
        """The largest that each backlog has had: what is in memory when a reload makes it smaller
        stays there, and what a link holds is read after a restart."""

    def check(self, server: Server) -> None:
        """Accounts are true, and no limit is exceeded."""
        self._check_budget(server)
        total = 0
        for backlog in server.hub.backlogs():
            self._check_backlog(backlog)
            total += backlog.memory.accounted_bytes
        held = server.hub.windows.held_bytes
        if held != total:
            self._world.violate(f"windows have {total} bytes, and count {held}")

    def _check_budget(self, server: Server) -> None:
        budget = server.context.budget
        total = 0
        for owner in budget._owners.values():
            accounts = sum(account.held_bytes for account in owner.accounts)
            if accounts != owner.held_bytes or min(accounts, owner.held_bytes) < 0:
                self._world.violate(
                    f"the accounts of {owner.name} have {accounts} bytes, their sum"
                    f" {owner.held_bytes}"
                )
            total += accounts
        if total != budget.held_bytes or total > budget.limit_bytes:
            self._world.violate(
                f"accounts have {total} bytes, their sum {budget.held_bytes}, the limit is"
                f" {budget.limit_bytes}"
            )

    def _check_backlog(self, backlog: Backlog) -> None:
        """At most twice its window, a message for each consumer, and one more."""
        memory = backlog.memory
        size = sum(item.size for item in memory.items.values())
        held = sum(item.size for item in memory.items.values() if item.consumer is not None)
        if (size, held) != (memory.size_bytes, memory.held_bytes):
            self._world.violate(
                f"{backlog.title} has {size} bytes in memory, {held} of them with consumers, and"
                f" counts {memory.size_bytes} and {memory.held_bytes}"
            )
        largest = max((item.size for item in memory.items.values()), default=0)
        self._largest_bytes = max(self._largest_bytes, largest)
        window = max(memory.window_bytes, self._windows.get(backlog.title, 0))
        self._windows[backlog.title] = window
        most = 2 * window + (len(backlog.consumers) + 1) * self._largest_bytes
        if size > most:
            self._world.violate(f"{backlog.title} has {size} bytes in memory, at most {most} fit")

    def check_windows(self, server: Server, windows: Mapping[str, int]) -> None:
        """Everything is settled: consumers have as much room again as they asked for, by host."""
        hosts = {name: gateway.host for name, gateway in server.context.gateways.items()}
        found: dict[str, set[Window]] = defaultdict(set)
        for backlog in server.hub.backlogs():
            for consumer in backlog.consumers:
                found[hosts.get(consumer.peer.connection, "")].add(consumer.window)
        for host, size in windows.items():
            # Of two, one belongs to a connection whose end the hub has not noticed yet.
            if len(found[host]) == 1 and (free := next(iter(found[host])).free) != size:
                self._world.violate(f"the consumer on {host} has a window of {size}, {free} free")

    def check_end(self, server: Server) -> None:
        """All programs are gone for longer than the hub waits for them: nothing of them is left."""
        self.check(server)
        waiting = [each for each in server.hub.backlogs() if not is_left_alone(each.title)]
        left = {
            "connections": len(server.context.gateways),
            "bytes of connections": server.context.budget.held_bytes,
            "calls": len(server.hub.services._calls),
            "messages in memory": sum(len(each.memory.items) for each in waiting),
        }
        found = {name: count for name, count in left.items() if count}
        census = take_census((server.hub, server.context))
        found |= {name: count for name, count in census.items() if count > _MANY.get(name, _SOME)}
        if found:
            self._world.violate(f"nobody is connected, and the hub has {found}")


_SOME: Final = 40
"""How many elements a kind of container may have when nobody is connected: some for each queue and
each setting, and not for each message or connection that there ever was."""
_MANY: Final = {
    "Broker._returned": 200,
    "ConsumerDispatch._eligible": 200,
    "Envelope.native": 400,  # of what `Broker._returned` has
    "GatewayContext.closed": 200,
    "Ledger._recent": 200_000,
}
"""Those that keep more, up to a limit of their own."""


def is_left_alone(title: str) -> bool:
    """Whether messages may wait there for ever: dead letters, and calls over eMQP that became jobs
    without a worker."""
    return title.endswith("/dead") or title == "queue/echo"


def take_census(roots: tuple[object, ...]) -> Counter[str]:
    """How many elements containers have, by class and attribute: those of all its instances.

    What a consumer refers to is its connection's, and what is in queues that are left alone is
    somebody else's.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[object] = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _CONTAINERS):
            waiting += each.values() if isinstance(each, dict) else each
            continue
        if isinstance(each, Attachment) or (
            isinstance(each, Backlog) and is_left_alone(each.title)
        ):
            continue
        kind = type(each)
        if (
            isinstance(each, type)
            or not kind.__module__.startswith("crosswire.")
            or kind.__module__.startswith(_ELSEWHERE)
        ):
            continue
        for name, value in _attributes(each):
            if isinstance(value, _CONTAINERS) and not isinstance(value, tuple):
                found[f"{kind.__name__}.{name}"] += len(value)
            waiting.append(value)
    return found


def _attributes(each: Any) -> Iterator[tuple[str, object]]:
    own: Mapping[str, object] = getattr(each, "__dict__", {})
    yield from own.items()
    names = set(getattr(type(each), "__struct_fields__", ()))
    for kind in type(each).__mro__:
        names.update(kind.__dict__.get("__slots__", ()))
    for name in names - own.keys():
        if hasattr(each, name):
            yield name, getattr(each, name)
