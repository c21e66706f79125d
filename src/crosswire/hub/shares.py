"""How much of what there is at most one holder may have.

A holder is a user, or without users an address: see `Holders`. The empty name may have all.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from crosswire.errors import QuotaExceeded
from crosswire.store.contract import Store

__all__ = ["DestinationOwners", "Holders", "Quota", "holder_of_address"]

_ADDRESS: Final = "@"
_OWNERS: Final = "creator"
"""A space: who created a destination, by its number."""


class Holders:
    """Whose share something counts for: its user's; without users that of the address it came from.

    An address has a share only while `add` names it: there is none for peers on the same machine,
    and none once there are users.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}

    def add(self, connection: str, address: str) -> None:
        """What comes over this connection counts for its address, unless for a user."""
        self._addresses[connection] = holder_of_address(address)

    def remove(self, connection: str) -> None:
        """The connection has ended. May be repeated."""
        self._addresses.pop(connection, None)

    def of(self, principal: str, connection: str) -> str:
        """The holder's name; empty if nobody's share is meant."""
        if principal or not connection:
            return principal
        if connection.startswith(_ADDRESS):
            return connection
        return self._addresses.get(connection, "")


def holder_of_address(address: str) -> str:
    """The holder of what comes from an address. Where there is no connection that lasts, as over
    HTTP, messages have it in place of the connection's name."""
    return f"{_ADDRESS}{address}"


class Quota:
    """Counts things of one kind by holder. `most` is the limit of all, `part` of each."""

    def __init__(self, what: str, most: int, part: float) -> None:
        self._what = what
        self._by_holder: Counter[str] = Counter()
        self._total = 0
        self.configure(most, part)

    @property
    def total(self) -> int:
        """How many there are, of all holders."""
        return self._total

    @property
    def is_full(self) -> bool:
        """Whether nobody may have one more."""
        return self._total >= self._most

    def configure(self, most: int, part: float) -> None:
        """Other limits from now on; what is there stays."""
        self._most = most
        self._most_each = max(int(most * part), 1)

    def check(self, holder: str, count: int = 1) -> None:
        """Raises QuotaExceeded if this many more were too many, for the holder or in all."""
        if self.is_used_by(holder, count):
            raise QuotaExceeded(f"more than {self._most_each} {self._what} of one user or address")
        if self._total + count > self._most:
            raise QuotaExceeded(f"more than {self._most} {self._what}")

    def is_used_by(self, holder: str, count: int = 1) -> bool:
        """Whether this many more were too many for the holder alone."""
        return bool(holder) and self._by_holder[holder] + count > self._most_each

    def add(self, holder: str, count: int = 1) -> None:
        """There are this many more."""
        self._by_holder[holder] += count
        self._total += count

    def remove(self, holder: str, count: int = 1) -> None:
        """There are this many less."""
        self._total -= count
        self._by_holder[holder] -= count
        if not self._by_holder[holder]:
            # Holders come and go for as long as the hub runs.
            del self._by_holder[holder]


class DestinationOwners:
    """Who created which destination, stored with it: a restart gives nobody another share."""

    def __init__(self, store: Store, part: float) -> None:
        self._store = store
        self._share = Quota("destinations", store.limits.destinations, part)
        self._by_number: dict[int, str] = {}
        owners = {int.from_bytes(key): value for key, value in store.load(_OWNERS)}
        for number in store.destinations().values():
            self._add(number, owners.get(number, b"").decode(errors="replace"))

    def configure(self, part: float) -> None:
        """Another share from now on."""
        self._share.configure(self._store.limits.destinations, part)

    def check(self, holder: str, count: int) -> None:
        """Raises QuotaExceeded if the holder may not create this many more."""
        self._share.check(holder, count)

    def create(self, destination: str, holder: str) -> None:
        """Give a number to a destination that has none, for this holder; the hub's own have the
        empty name. Raises QuotaExceeded."""
        if destination in self._store.destinations():
            return
        self._share.check(holder)
        self._create(destination, holder)

    def create_own(self, destination: str, origin: str) -> None:
        """Give a number to a destination that the hub itself needs, whatever the limits are; it
        counts for whom `origin` counts for."""
        known = self._store.destinations()
        if destination not in known:
            holder = self._by_number.get(known.get(origin, 0), "")
            self._create(destination, holder, own=True)

    def _create(self, destination: str, holder: str, *, own: bool = False) -> None:
        number = self._store.number(destination, own=own)
        self._add(number, holder)
        if holder:
            self._store.save(_OWNERS, number.to_bytes(4), holder.encode())

    def _add(self, number: int, holder: str) -> None:
        if holder:
            self._by_number[number] = holder
        self._share.add(holder)

    def remove(self, number: int) -> None:
        """A destination is removed."""
        holder = self._by_number.pop(number, "")
        self._share.remove(holder)
        if holder:
            self._store.drop(_OWNERS, number.to_bytes(4))
