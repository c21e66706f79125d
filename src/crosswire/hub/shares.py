"""How much of what there is at most one principal may have.

Without users there is one principal, the empty name, which may have all.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from crosswire.errors import QuotaExceeded
from crosswire.store.contract import Store

__all__ = ["DestinationOwners", "Quota"]

_OWNERS: Final = "creator"
"""A space: who created a destination, by its number."""


class Quota:
    """Counts things of one kind by principal. `most` is the limit of all, `part` of each."""

    def __init__(self, what: str, most: int, part: float) -> None:
        self._what = what
        self._by_principal: Counter[str] = Counter()
        self._total = 0
        self.configure(most, part)

    def configure(self, most: int, part: float) -> None:
        """Other limits from now on; what is there stays."""
        self._most = most
        self._most_each = max(int(most * part), 1)

    def check(self, principal: str, count: int = 1) -> None:
        """Raises QuotaExceeded if this many more were too many, for the principal or in all."""
        if principal and self._by_principal[principal] + count > self._most_each:
            raise QuotaExceeded(f"more than {self._most_each} {self._what} of one user")
        if self._total + count > self._most:
            raise QuotaExceeded(f"more than {self._most} {self._what}")

    def add(self, principal: str) -> None:
        """There is one more."""
        self._by_principal[principal] += 1
        self._total += 1

    def remove(self, principal: str) -> None:
        """There is one less."""
        self._total -= 1
        self._by_principal[principal] -= 1
        if not self._by_principal[principal]:
            # Principals come and go for as long as the hub runs.
            del self._by_principal[principal]


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

    def check(self, principal: str, count: int) -> None:
        """Raises QuotaExceeded if the principal may not create this many more."""
        self._share.check(principal, count)

    def create(self, destination: str, principal: str) -> None:
        """Give a number to a destination that has none, for this principal; the hub's own have the
        empty name. Raises QuotaExceeded."""
        if destination in self._store.destinations():
            return
        self._share.check(principal)
        number = self._store.number(destination)
        self._add(number, principal)
        if principal:
            self._store.save(_OWNERS, number.to_bytes(4), principal.encode())

    def _add(self, number: int, principal: str) -> None:
        if principal:
            self._by_number[number] = principal
        self._share.add(principal)

    def remove(self, number: int) -> None:
        """A destination is removed."""
        principal = self._by_number.pop(number, "")
        self._share.remove(principal)
        if principal:
            self._store.drop(_OWNERS, number.to_bytes(4))
