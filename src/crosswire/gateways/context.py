"""What all gateways of a running hub share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from crosswire.access import Access
from crosswire.config import Config, ConnectionLimits
from crosswire.errors import RecordDamaged
from crosswire.gateways.clock import Clock
from crosswire.gateways.payloads import Schemas
from crosswire.hub.hub import Hub
from crosswire.session import Tap

if TYPE_CHECKING:
    from crosswire.gateways.gateway import Gateway

__all__ = ["Closable", "ConnectionSlots", "GatewayContext", "Leftover", "Occupant"]

_BOOTS: Final = "boot"
_COUNT: Final = b"count"
_COUNT_BYTES: Final = 4

T = TypeVar("T")


class TapSource(Protocol):
    """Records the bytes of sessions; the server's feed of the tap is one."""

    def open(self, gateway: Gateway) -> Tap | None:
        """What a new connection shows its bytes to; None if it is not recorded."""


class Closable(Protocol):
    def close(self) -> None: ...


class Occupant(Protocol):
    """A connection that counts, of any protocol, HTTP included."""

    protocol: ClassVar[str]

    @property
    def is_gone(self) -> bool:
        """Is its socket closed? Then it should have left."""


class ConnectionSlots:
    """How many connections there are, in all and from each address.

    Each is known by itself: one that leaves twice, or never came in, changes nothing.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._hosts: dict[Occupant, str] = {}
        self._by_host: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, occupant: Occupant) -> bool:
        return occupant in self._hosts

    def enter(self, occupant: Occupant, host: str) -> bool:
        """False if there is no room for one more."""
        limits = self.limits
        if len(self._hosts) >= limits.connections:
            return False
        if self._by_host[host] >= limits.connections_per_address:
            return False
        self.add(occupant, host)
        return True

    def add(self, occupant: Occupant, host: str) -> None:
        """Count it, room or not."""
        if occupant not in self._hosts:
            self._hosts[occupant] = host
            self._by_host[host] += 1

    def leave(self, occupant: Occupant) -> None:
        host = self._hosts.pop(occupant, None)
        if host is None:
            return
        self._by_host[host] -= 1
        if not self._by_host[host]:
            del self._by_host[host]

    def occupants(self) -> list[Occupant]:
        return list(self._hosts)


class Leftover(NamedTuple):
    """Something that the hub holds for a peer that may be gone, and how it is given back.

    `kind` and `protocol` are of ours; `name` tells a reader of the log which one; `what` is the
    thing itself, by which it is known again.
    """

    kind: str
    protocol: str
    name: str
    what: object
    heal: Callable[[], object]


class GatewayContext:
    """The hub and what stands around it: users, settings, schemas, and who is connected."""

    def __init__(
        self,
        hub: Hub,
        config: Config,
        *,
        schemas: Schemas | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.hub = hub
        self.config = config
        self.access = Access(config.users)
        self.schemas = schemas or Schemas()
        self.connection_slots = ConnectionSlots(config.connections)
        self.gateways: dict[str, Gateway] = {}
        self.listeners: dict[str, Closable] = {}
        self.counters: Counter[tuple[str, ...]] = Counter()
        """What happened how often: (what, protocol, …). Bounded: no peer's text is in a key."""
        self.tap: TapSource | None = None
        self.draining = False
        self._clock = clock or Clock().now
        self._connections = 0
        self._shared: dict[Callable[[GatewayContext], Any], Any] = {}
        boots = self._count_boots()
        hub.store.save(_BOOTS, _COUNT, boots.to_bytes(_COUNT_BYTES))
        hub.store.request()
        self._boot = f"{boots:x}"

    def _count_boots(self) -> int:
        """How often this hub was started, this time included: connections are named after it."""
        stored = self.hub.store.get(_BOOTS, _COUNT)
        if stored is None:
            return 1
        boots = int.from_bytes(stored) + 1
        if len(stored) == _COUNT_BYTES and boots < 1 << 8 * _COUNT_BYTES:
            return boots
        error = RecordDamaged("how often the hub was started is unknown")
        self.hub.damage.set_aside_state(_BOOTS, _COUNT, stored, error)
        # The time in seconds is above any count, so that no name comes twice.
        return int(self._clock()) % (1 << 8 * _COUNT_BYTES - 1)

    def shared(self, make: Callable[[GatewayContext], T]) -> T:
        """What the gateways of one protocol share; made when it is first asked for."""
        if make not in self._shared:
            self._shared[make] = make(self)
        found: T = self._shared[make]
        return found

    def now(self) -> float:
        """The hub's steady time in seconds since 1970; `hub.wall` knows what the clocks show."""
        return self._clock()

    def name_connection(self, listener: str) -> str:
        """A name that no other connection of this node ever had."""
        self._connections += 1
        return f"{listener}-{self._boot}-{self._connections:x}"

    def count(self, *what: str, by: int = 1) -> None:
        self.counters[what] += by
