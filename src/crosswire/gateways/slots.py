"""Connections that the hub has room for, and those whose peers have not identified themselves.

Every socket that a peer opened is an open file: those that have no slot, before and after a
connection, are limited as well (`PassingSockets`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count, takewhile
from typing import ClassVar, Final, Protocol
from weakref import WeakSet

from crosswire.errors import CrosswireError, PeerTimeout, ServiceUnavailable
from crosswire.listeners import network_of
from crosswire.session import Session

__all__ = [
    "IDENTIFY_S",
    "ConnectionSlots",
    "Newcomer",
    "Newcomers",
    "Occupant",
    "PassingSockets",
]

IDENTIFY_S: Final = 10.0
"""How long a peer may take to identify itself, once there are users."""
_LEAST_STALE: Final = 64
NEWCOMERS_PART: Final = 10
"""One of this many connections may be without identity."""
_LEAST_PASSING: Final = 16


class Occupant(Protocol):
    """A connection that counts against the limits, of any protocol, HTTP included."""

    protocol: ClassVar[str]

    @property
    def is_gone(self) -> bool:
        """Whether its socket is closed; then it should have left its slot."""


class Newcomer(Protocol):
    """A connection whose peer has not identified itself."""

    session: Session

    def turn_away(self, error: CrosswireError) -> None:
        """Disconnect the peer with its protocol's goodbye for this error."""


class ConnectionSlots:
    """Counts connections, in all and from each address, and refuses those above the limits.

    Each occupant is known by identity: one that leaves twice, or never entered, changes nothing.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self.most = most
        self.most_per_address = most_per_address
        self._hosts: dict[Occupant, str] = {}
        self._by_host: Counter[str] = Counter()
        self._users: dict[Occupant, str] = {}
        self._by_user: Counter[str] = Counter()
        self._departed: WeakSet[Occupant] = WeakSet()

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def departed(self) -> int:
        """How many have left their slot, and are still in memory."""
        return len(self._departed)

    def __contains__(self, occupant: Occupant) -> bool:
        return occupant in self._hosts

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another connection, of whatever address."""
        return len(self._hosts) >= self.most

    def enter(self, occupant: Occupant, host: str) -> bool:
        """Take a slot; False if there is no room for one more."""
        if self.is_full or self._by_host[network_of(host)] >= self.most_per_address:
            return False
        self.add(occupant, host)
        return True

    def add(self, occupant: Occupant, host: str) -> None:
        """Count it even above the limits: it is there."""
        if occupant not in self._hosts:
            host = self._hosts[occupant] = network_of(host)
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
        self._forget_user(occupant)
        self._departed.add(occupant)

    def assign(self, occupant: Occupant, user: str, share: float) -> bool:
        """An occupant is this user's, or without users that of an address. False if it has to
        leave: the last part of all slots, `share` of them, is for those with less than their
        share."""
        if occupant not in self._hosts:
            return True
        self._forget_user(occupant)
        is_crowded = len(self._hosts) > self.most * (1 - share)
        if is_crowded and self._by_user[user] >= max(int(self.most * share), 1):
            return False
        self._users[occupant] = user
        self._by_user[user] += 1
        return True

    def _forget_user(self, occupant: Occupant) -> None:
        user = self._users.pop(occupant, None)
        if user is not None:
            self._by_user[user] -= 1
            if not self._by_user[user]:
                del self._by_user[user]

    def occupants(self) -> list[Occupant]:
        """A copy, which may be iterated while occupants leave."""
        return list(self._hosts)


class PassingSockets:
    """Sockets that are open without a connection: during a TLS handshake, or after the goodbye,
    while their peer may read it. Beyond `most` the oldest is closed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._close: dict[object, Callable[[], object]] = {}
        """In order of arrival."""

    def __len__(self) -> int:
        return len(self._close)

    @staticmethod
    def part_of(connections: int) -> int:
        """How many there may be beside this many connections."""
        return max(connections // NEWCOMERS_PART, _LEAST_PASSING)

    def add(self, passing: object, close: Callable[[], object]) -> bool:
        """There is one more; `close` closes its socket. Whether another one was closed for it."""
        self._close[passing] = close
        if len(self._close) <= self.most:
            return False
        self._close.pop(next(iter(self._close)))()
        return True

    def remove(self, passing: object) -> None:
        """It has a connection now, or is closed. May be repeated."""
        self._close.pop(passing, None)


class Newcomers:
    """Connections whose peers have not identified themselves, though there are users.

    Times are the event loop's, as in `Session.read_at`.
    """

    def __init__(self) -> None:
        self._since: dict[Newcomer, float] = {}
        """In order of arrival."""
        self._silent: list[tuple[float, int, Newcomer]] = []
        """A heap by the time of the last read, as of the last look: one that sent something since
        is put back when its turn comes, which costs nothing for each read."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, peer: Newcomer) -> bool:
        return peer in self._since

    def add(self, peer: Newcomer) -> None:
        """It has connected."""
        self._since[peer] = peer.session.read_at
        self._push(peer)

    def remove(self, peer: Newcomer) -> None:
        """It has identified itself, or is gone; no effect on others."""
        self._since.pop(peer, None)
        if len(self._silent) > _LEAST_STALE + 2 * len(self._since):
            self._silent = [entry for entry in self._silent if entry[2] in self._since]
            heapq.heapify(self._silent)

    def make_room(self, most: int) -> int:
        """Turn away the longest silent until there are no more than `most`; gives how many."""
        turned_away = 0
        while len(self._since) > most:
            read_at, _, peer = heapq.heappop(self._silent)
            if peer not in self._since:
                continue
            if peer.session.read_at > read_at:
                self._push(peer)
                continue
            del self._since[peer]
            turned_away += 1
            peer.turn_away(
                ServiceUnavailable("too many connections of peers that have not identified")
            )
        return turned_away

    def _push(self, peer: Newcomer) -> None:
        heapq.heappush(self._silent, (peer.session.read_at, next(self._numbers), peer))

    def check(self, now: float) -> int:
        """Turn away those that had enough time; gives how many."""
        overdue = list(takewhile(lambda peer: now - self._since[peer] >= IDENTIFY_S, self._since))
        for peer in overdue:
            self.remove(peer)
            peer.turn_away(PeerTimeout(f"not identified within {IDENTIFY_S:g} s"))
        return len(overdue)
