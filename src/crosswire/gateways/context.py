"""What gateways receive: the hub, users, settings, schemas, time, and the connected peers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Set
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from crosswire.access import Access
from crosswire.budget import MemoryBudget
from crosswire.config import Config
from crosswire.errors import RecordDamaged, ServiceUnavailable
from crosswire.gateways.certificates import PeerCertificate
from crosswire.gateways.payloads import Schemas
from crosswire.gateways.sign_ins import SignIns
from crosswire.gateways.slots import (
    NEWCOMERS_PART,
    ConnectionSlots,
    Newcomers,
    Occupant,
    PassingSockets,
)
from crosswire.hub.attachment import Attachment
from crosswire.hub.hub import Hub
from crosswire.hub.services import Call, Provider
from crosswire.hub.wall import Clock
from crosswire.listeners import is_loopback, network_of
from crosswire.resources import memory_limit_bytes
from crosswire.session import Session, Tap

__all__ = [
    "Clock",
    "Closable",
    "ClosedConnection",
    "ConnectedPeer",
    "GatewayContext",
    "Leftover",
    "TapSource",
]

_BOOTS: Final = "boot"
_COUNT: Final = b"count"
_COUNT_BYTES: Final = 4

_CLOSED: Final = 1_000
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
    client_name: str
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

    def disconnect(self, reason: str = "") -> bool:
        """Disconnect it with the protocol's goodbye; False if it was gone already. The `reason` is
        for operators."""

    def abandon(self) -> None:
        """Give back all that it holds, whatever state its connection is in."""


class ClosedConnection(NamedTuple):
    """A connection that has ended, and why; times are the hub's."""

    id: str
    protocol: str
    listener: str
    address: str
    principal: str
    client: str
    since: float
    ended: float
    reason: str
    received_bytes: int
    sent_bytes: int


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
    """The hub and what gateways need beside it; one for each server.

    A standby has no hub: `begin` is called for each that the server runs.
    """

    hub: Hub

    def __init__(
        self,
        hub: Hub | None,
        config: Config,
        *,
        schemas: Schemas | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
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
        passing = PassingSockets.part_of(config.connections.connections)
        self.handshakes = PassingSockets(passing)
        """Sockets whose TLS handshake is not finished, HTTP included."""
        self.departures = PassingSockets(passing)
        """Sockets of peers that were disconnected, and have not closed their side."""
        self.sign_ins = SignIns()
        self.budget = MemoryBudget(*_memory_limits(config))
        self.gateways: dict[str, ConnectedPeer] = {}
        self.closed: deque[ClosedConnection] = deque(maxlen=_CLOSED)
        """The last ones that ended, the newest at the end."""
        self.listeners: dict[str, Closable] = {}
        self.counters: Counter[tuple[str, ...]] = Counter()
        """Counts of events: (what, protocol, …). Bounded: no text of a peer is in a key."""
        self.tap: TapSource | None = None
        self.draining = False
        self.on_ended: list[Callable[[], None]] = []
        """Called when the hub has ended, once."""
        self.on_reconfigured: list[Callable[[], None]] = []
        """Called when users or settings have changed."""
        self.now = clock or Clock().now
        """The hub's steady time in seconds since 1970; `hub.wall` has the wall clock's."""
        self._connections = 0
        self._shared: dict[Callable[[GatewayContext], Any], Any] = {}
        self._boot = ""
        if hub is not None:
            self.begin(hub)

    def begin(self, hub: Hub) -> None:
        """A hub starts, and the gateways to come are its own."""
        self.end()
        self.hub = hub
        self.gateways.clear()
        self.listeners.clear()
        self._shared.clear()
        self.tap = None
        self.draining = False
        boots = self._count_boots()
        hub.store.save(_BOOTS, _COUNT, boots.to_bytes(_COUNT_BYTES))
        hub.commits.request()
        self._boot = f"{boots:x}"
        hub.schedules.may_send = self._may_send

    def end(self) -> None:
        """The hub has ended, and perhaps another one starts later: what the first one held for
        peers without a connection counts no more, and is not kept in memory by its account."""
        for release in self.on_ended:
            release()
        self.on_ended.clear()

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
        self.limit_connections(limits.connections)
        self.http_slots.most = config.http.connections
        for slots in (self.connection_slots, self.http_slots):
            slots.most_per_address = limits.connections_per_address
        self.budget.configure(*_memory_limits(config))
        for callback in list(self.on_reconfigured):
            callback()

    def limit_connections(self, most: int) -> None:
        """Have room for this many, and a part of it for sockets without a connection."""
        self.connection_slots.most = most
        self.handshakes.most = self.departures.most = PassingSockets.part_of(most)

    def note_departure(self, session: Session) -> None:
        """A peer has left, or was disconnected: its socket stays open until it has read the
        goodbye."""
        if session.opened and not session.gone.done():
            session.gone.add_done_callback(lambda _: self.departures.remove(session))
            if self.departures.add(session, session.abort):
                self.count("turned_away", "", "departed")

    def owner_of(self, principal: str, host: str) -> str | None:
        """Whose share of the memory a peer's bytes count for: its user's; without users its
        address's, or for peers on this machine nobody's.

        All peers that did not identify themselves, though there are users, have one together.
        """
        if not self.access.open:
            return principal
        return None if is_loopback(host) else network_of(host)

    def _may_send(self, principal: str, destination: str) -> bool:
        """Whether a schedule of this user may fire now: the right may be gone since it was made.
        Those of the configuration, and those made without users, have none."""
        access = self.access
        return (
            not principal
            or access.may(principal, "produce", destination)
            or access.may_administer(principal)
        )

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

    def by_token(self, token: str, host: str) -> str | None:
        """The user with this token, which came from this address; None if there is none. Raises
        ServiceUnavailable if that can't be found out now: too many were wrong."""

        def may_compare() -> bool:
            if self.sign_ins.may_compare(host, self.now()):
                return True
            raise ServiceUnavailable("too many sign-ins from this address failed: try again")

        return self.access.by_token(token, may_compare)

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
