"""What gateways receive: the hub, users, settings, schemas, time, and the connected peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from crosswire.access import Access
from crosswire.budget import MemoryBudget
from crosswire.config import Config
from crosswire.errors import RecordDamaged
from crosswire.gateways.certificates import PeerCertificate
from crosswire.gateways.payloads import Schemas
from crosswire.gateways.sign_ins import SignIns
from crosswire.gateways.slots import NEWCOMERS_PART, ConnectionSlots, Newcomers, Occupant
from crosswire.hub.attachment import Attachment
from crosswire.hub.hub import Hub
from crosswire.hub.services import Call, Provider
from crosswire.hub.wall import Clock
from crosswire.listeners import is_loopback
from crosswire.resources import memory_limit_bytes
from crosswire.session import Session, Tap

__all__ = [
    "Clock",
    "Closable",
    "ConnectedPeer",
    "GatewayContext",
    "Leftover",
    "TapSource",
]

_BOOTS: Final = "boot"
_COUNT: Final = b"count"
_COUNT_BYTES: Final = 4

_LEAST_SHARE_BYTES: Final = 128 * 1024 * 1024

T = TypeVar("T")


class Closable(Protocol):
    """A listener, as far as a gateway may act on it."""

    def close(self) -> None:
        """Accept no more connections."""


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
        self.connection_slots = ConnectionSlots(
            config.connections.connections, config.connections.connections_per_address
        )
        self.http_slots = ConnectionSlots(
            config.http.connections, config.connections.connections_per_address
        )
        """Of their own: peers that hold all others keep out neither health checks nor
        administrators."""
        self.newcomers = Newcomers()
        self.sign_ins = SignIns()
        self.budget = MemoryBudget(*_memory_limits(config))
        self.gateways: dict[str, ConnectedPeer] = {}
        self.listeners: dict[str, Closable] = {}
        self.counters: Counter[tuple[str, ...]] = Counter()
        """Counts of events: (what, protocol, …). Bounded: no text of a peer is in a key."""
        self.tap: TapSource | None = None
        self.draining = False
        self.now = clock or Clock().now
        """The hub's steady time in seconds since 1970; `hub.wall` has the wall clock's."""
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
        return int(self.now()) % (1 << 8 * _COUNT_BYTES - 1)

    def reconfigure(self, config: Config, access: Access, schemas: Schemas) -> None:
        """Other settings from now on."""
        self.config, self.access, self.schemas = config, access, schemas
        limits = config.connections
        self.connection_slots.most = limits.connections
        self.http_slots.most = config.http.connections
        for slots in (self.connection_slots, self.http_slots):
            slots.most_per_address = limits.connections_per_address
        self.budget.configure(*_memory_limits(config))

    def owner_of(self, principal: str, host: str) -> str | None:
        """Whose share of the memory a peer's bytes count for: its user's; without users its
        address's, or for peers on this machine nobody's.

        All peers that did not identify themselves, though there are users, have one together.
        """
        if not self.access.open:
            return principal
        return None if is_loopback(host) else host

    def make_room_for_newcomer(self) -> None:
        """At most a part of all connections may be without identity. The longest silent make
        room, so that users who reconnect in thousands get in."""
        most = max(self.connection_slots.most // NEWCOMERS_PART, 1)
        if self.connection_slots.is_full:
            most = min(most, len(self.newcomers) - 1)
        turned_away = self.newcomers.make_room(max(most, 0))
        if turned_away:
            self.count("turned_away", "", "room", by=turned_away)

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

    def name_connection(self, listener: str) -> str:
        """A name that no other connection of this node ever had, restarts included."""
        self._connections += 1
        return f"{listener}-{self._boot}-{self._connections:x}"

    def count(self, *what: str, by: int = 1) -> None:
        """Add to a counter of `/metrics`."""
        self.counters[what] += by


def _memory_limits(config: Config) -> tuple[int, int]:
    """What all peers may hold together, and each owner. An owner's share has room for one message
    of any size that a protocol allows by default, and as much on its way out."""
    limit_bytes = memory_limit_bytes(config.limits.memory_bytes)
    share_bytes = max(int(limit_bytes * config.limits.share), _LEAST_SHARE_BYTES)
    return limit_bytes, min(share_bytes, limit_bytes)
