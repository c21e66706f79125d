"""What gateways receive: the hub, users, settings, schemas, time, and the connected peers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Set
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from crosswire.access import Access
from crosswire.config import Config, ConnectionLimits
from crosswire.errors import RecordDamaged
from crosswire.gateways.certificates import PeerCertificate
from crosswire.gateways.payloads import Schemas
from crosswire.hub.attachment import Attachment
from crosswire.hub.hub import Hub
from crosswire.hub.services import Call, Provider
from crosswire.session import Session, Tap

__all__ = [
    "Clock",
    "Closable",
    "ConnectedPeer",
    "ConnectionSlots",
    "GatewayContext",
    "Leftover",
    "Occupant",
    "TapSource",
]

_BOOTS: Final = "boot"
_COUNT: Final = b"count"
_COUNT_BYTES: Final = 4

_APART_S: Final = 0.05
"""Two readings of clocks that are further apart than this don't belong to one moment."""

T = TypeVar("T")


class Clock:
    """Seconds since 1970 that pass as on a stopwatch, however the system's clock is set.

    The wall clock is read once, then the monotonic clock is added: a lease, a deadline or a retry
    neither fires early nor hangs because somebody corrected the time. The monotonic clock stops
    while the machine is suspended: nobody could have worked, so nothing is late afterwards. To the
    hub a suspended machine is a wall clock that jumped forward.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._start = wall() - monotonic()

    def now(self) -> float:
        """The steady time in seconds since 1970."""
        return self._start + self._monotonic()

    def look(self) -> tuple[float, float] | None:
        """The wall clock and the steady time at one moment.

        None if the process was interrupted between the two: the difference would look like a jump.
        """
        before = self.now()
        wall = self._wall()
        now = self.now()
        return (wall, now) if now - before < _APART_S else None


class Closable(Protocol):
    """A listener, as far as a gateway may act on it."""

    def close(self) -> None:
        """Accept no more connections."""


class Occupant(Protocol):
    """A connection that counts against the limits, of any protocol, HTTP included."""

    protocol: ClassVar[str]

    @property
    def is_gone(self) -> bool:
        """Whether its socket is closed; then it should have left its slot."""


class ConnectedPeer(Occupant, Protocol):
    """A peer's gateway, as the server, the tap and the console see it."""

    id: str
    listener: str
    host: str
    address: str
    principal: str
    certificate: PeerCertificate | None
    since: float
    hub: Hub
    session: Session

    @property
    def attachments(self) -> Set[Attachment]:
        """What it consumes."""

    @property
    def providers(self) -> Set[Provider]:
        """What it serves."""

    @property
    def calls(self) -> dict[int, Call]:
        """Calls of its own that are not answered yet."""

    @property
    def is_busy(self) -> bool:
        """Whether it has messages or calls that it has not answered yet."""

    def drain(self) -> None:
        """Give it nothing new: the hub is about to stop."""

    def close_idle(self, idle_s: float, loop_time: float) -> None:
        """Disconnect it if it was silent, and waits for nothing, for `idle_s`."""

    def disconnect(self) -> bool:
        """Disconnect it with the protocol's goodbye; False if it was gone already."""

    def abandon(self) -> None:
        """Give back all that it holds, whatever state its connection is in."""


class TapSource(Protocol):
    """Records the bytes of sessions; the server's tap feed is one."""

    def open(self, gateway: ConnectedPeer) -> Tap | None:
        """A tap for a new connection; None if it is not recorded."""


class ConnectionSlots:
    """Counts connections, in all and from each address, and refuses those above the limits.

    Each occupant is known by identity: one that leaves twice, or never entered, changes nothing.
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
        """Take a slot; False if there is no room for one more."""
        limits = self.limits
        if len(self._hosts) >= limits.connections:
            return False
        if self._by_host[host] >= limits.connections_per_address:
            return False
        self.add(occupant, host)
        return True

    def add(self, occupant: Occupant, host: str) -> None:
        """Count it even above the limits: it is there."""
        if occupant not in self._hosts:
            self._hosts[occupant] = host
            self._by_host[host] += 1

    def leave(self, occupant: Occupant) -> None:
        """Free its slot, if it has one."""
        host = self._hosts.pop(occupant, None)
        if host is None:
            return
        self._by_host[host] -= 1
        if not self._by_host[host]:
            # Addresses come and go for as long as the hub runs: only those present are kept.
            del self._by_host[host]

    def occupants(self) -> list[Occupant]:
        """A copy, which may be iterated while occupants leave."""
        return list(self._hosts)


class Leftover(NamedTuple):
    """Something that the hub holds for a peer that may be gone, and how it is given back.

    `kind` and `protocol` are words of ours, `name` identifies it in the log, and `what` is the
    object itself, by which a second look recognizes it.
    """

    kind: str
    protocol: str
    name: str
    what: object
    heal: Callable[[], object]


class GatewayContext:
    """The hub and what gateways need beside it; one for each running hub."""

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
        self.authorities: frozenset[bytes] = frozenset()
        """Fingerprints of those whose client certificates are accepted now."""
        self.schemas = schemas or Schemas()
        self.connection_slots = ConnectionSlots(config.connections)
        self.gateways: dict[str, ConnectedPeer] = {}
        self.listeners: dict[str, Closable] = {}
        self.counters: Counter[tuple[str, ...]] = Counter()
        """Counts of events: (what, protocol, …). Bounded: no text of a peer is in a key."""
        self.tap: TapSource | None = None
        self.draining = False
        self._clock = clock or Clock().now
        self._connections = 0
        self._shared: dict[Callable[[GatewayContext], Any], Any] = {}
        boots = self._count_boots()
        hub.store.save(_BOOTS, _COUNT, boots.to_bytes(_COUNT_BYTES))
        hub.commits.request()
        self._boot = f"{boots:x}"

    def _count_boots(self) -> int:
        """How many times this hub was started, this time included: part of connections' names."""
        stored = self.hub.store.get(_BOOTS, _COUNT)
        if stored is None:
            return 1
        boots = int.from_bytes(stored) + 1
        if len(stored) == _COUNT_BYTES and boots < 1 << 8 * _COUNT_BYTES:
            return boots
        error = RecordDamaged("the number of starts of the hub can't be read")
        self.hub.damage.set_aside_state(_BOOTS, _COUNT, stored, error)
        # The time in seconds is above any count of starts, so no connection's name is used twice.
        return int(self._clock()) % (1 << 8 * _COUNT_BYTES - 1)

    def shared(self, make: Callable[[GatewayContext], T]) -> T:
        """The object that the gateways of one protocol share; made on first use."""
        if make not in self._shared:
            self._shared[make] = make(self)
        found: T = self._shared[make]
        return found

    def by_certificate(self, certificate: PeerCertificate | None) -> str | None:
        """The user whom a certificate identifies now; None if there is none, or if an authority
        that it depends on is no longer accepted."""
        if certificate is None or not certificate.authorities <= self.authorities:
            return None
        return self.access.by_certificate(certificate.names)

    def now(self) -> float:
        """The hub's steady time in seconds since 1970; `hub.wall` has the wall clock's."""
        return self._clock()

    def name_connection(self, listener: str) -> str:
        """A name that no other connection of this node ever had, restarts included."""
        self._connections += 1
        return f"{listener}-{self._boot}-{self._connections:x}"

    def count(self, *what: str, by: int = 1) -> None:
        """Add to a counter of `/metrics`."""
        self.counters[what] += by
