"""Memory that peers cause the hub to hold: by connection, by owner, and in all.

Buffers, caches and waiting lists report how their size changes to an account, once for each turn of
the event loop or each batch, not for each message. An owner is a user, all peers without
credentials, or an address; its accounts together have a share of the budget.

When the budget or a share is nearly used, the account that holds most of it is restrained: nothing
more is read from its peer. If that doesn't help within `PATIENCE_S`, the peer is disconnected.
"""

from __future__ import annotations

import ctypes
from typing import Final, Protocol

__all__ = ["MemoryAccount", "MemoryBudget", "MemoryHolder", "trim_memory"]

PATIENCE_S: Final = 5.0
"""How long a restrained peer may take to let the hub free what it holds."""
_NEAR: Final = 7 / 8
_ENOUGH: Final = 3 / 4
"""Below this part of the limit peers are read from again: well below `_NEAR`, or they would be
stopped and continued for every message."""
_STEPS: Final = 64
"""Above `_NEAR` one more account is restrained for each such part of the limit that is added."""
_INNOCENT_BYTES: Final = 64 * 1024
"""An account with less than this is not restrained for growing."""


class MemoryHolder(Protocol):
    """Who holds what an account counts, and can be stopped: a peer's gateway, mostly."""

    def measure_memory(self) -> None:
        """Report what is held now: it may be less than what was reported last."""

    def restrain(self, restrained: bool) -> None:
        """Read nothing more from the peer, or continue."""

    def evict(self) -> None:
        """Disconnect the peer with its protocol's goodbye, and free what it holds."""


class _Owner:
    """The accounts of one user, or of one address; or all of them, as their sum."""

    __slots__ = ("accounts", "alarm_bytes", "held_bytes", "is_tight", "limit_bytes", "name")

    def __init__(self, name: str | None, limit_bytes: int) -> None:
        self.name = name
        self.held_bytes = 0
        self.is_tight = False
        """Whether its peers have to give way: from nearly all of its limit until enough is free."""
        self.accounts: set[MemoryAccount] = set()
        self.limit(limit_bytes)

    def limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.alarm_bytes = _NEAR * limit_bytes

    def judge(self) -> None:
        """Set `is_tight`, and once it is not, the alarm."""
        if self.held_bytes > _NEAR * self.limit_bytes:
            self.is_tight = True
        elif self.held_bytes < _ENOUGH * self.limit_bytes:
            self.is_tight = False
            self.alarm_bytes = _NEAR * self.limit_bytes


class MemoryAccount:
    """What one connection, or one other holder, has in memory."""

    __slots__ = ("_budget", "held_bytes", "holder", "is_open", "owner")

    def __init__(self, budget: MemoryBudget, holder: MemoryHolder, owner: _Owner) -> None:
        self._budget = budget
        self.holder = holder
        self.owner = owner
        self.held_bytes = 0
        self.is_open = True
        owner.accounts.add(self)

    def add(self, change_bytes: int) -> None:
        """It holds this much more, or less. No effect once it is closed."""
        if not self.is_open:
            return
        owner, budget = self.owner, self._budget
        total = budget.total
        self.held_bytes += change_bytes
        owner.held_bytes += change_bytes
        total.held_bytes += change_bytes
        if change_bytes > 0 and (
            total.held_bytes > total.alarm_bytes or owner.held_bytes > owner.alarm_bytes
        ):
            budget.note_growth(self)

    def has_room(self, size_bytes: int) -> bool:
        """Whether this much more is within its owner's share and the budget."""
        return all(
            held.held_bytes + size_bytes <= held.limit_bytes
            for held in (self.owner, self._budget.total)
        )

    def move(self, owner: str | None) -> None:
        """The peer has identified itself: what it holds counts for this owner from now on."""
        held_bytes = self.held_bytes
        self.add(-held_bytes)
        self._budget.leave(self)
        self.owner = self._budget.owner(owner)
        self.owner.accounts.add(self)
        self.add(held_bytes)

    def close(self) -> None:
        """It holds nothing any more. May be repeated."""
        if self.is_open:
            self.add(-self.held_bytes)
            self.is_open = False
            self._budget.leave(self)


class MemoryBudget:
    """The accounts of a hub, and who has to give way when memory is short.

    An owner may hold `share_bytes`; the owner None has no share below the limit.
    """

    def __init__(self, limit_bytes: int, share_bytes: int) -> None:
        self.total = _Owner(None, limit_bytes)
        self.share_bytes = share_bytes
        self.restrained_total = 0
        """How many times a peer was no longer read from."""
        self.evicted_total = 0
        """How many peers were disconnected."""
        self._now = 0.0
        self._is_noting = False
        self._owners: dict[str | None, _Owner] = {}
        self._restrained: dict[MemoryAccount, float] = {}

    @property
    def held_bytes(self) -> int:
        """What all accounts hold together."""
        return self.total.held_bytes

    @property
    def limit_bytes(self) -> int:
        """What they may hold."""
        return self.total.limit_bytes

    @property
    def restrained(self) -> int:
        """How many peers are not read from at the moment."""
        return len(self._restrained)

    def configure(self, limit_bytes: int, share_bytes: int) -> None:
        """Other limits from now on."""
        self.total.limit(limit_bytes)
        self.share_bytes = share_bytes
        for owner in self._owners.values():
            owner.limit(limit_bytes if owner.name is None else self.share_bytes)

    def open(self, holder: MemoryHolder, owner: str | None) -> MemoryAccount:
        """A new account, which holds nothing."""
        return MemoryAccount(self, holder, self.owner(owner))

    def owner(self, name: str | None) -> _Owner:
        """The owner of this name, new if need be."""
        owner = self._owners.get(name)
        if owner is None:
            limit_bytes = self.limit_bytes if name is None else self.share_bytes
            owner = self._owners[name] = _Owner(name, limit_bytes)
        return owner

    def leave(self, account: MemoryAccount) -> None:
        """An account without bytes is closed, or changes its owner."""
        owner = account.owner
        owner.accounts.discard(account)
        if not owner.accounts:
            self._owners.pop(owner.name, None)
        if self._restrained.pop(account, None) is not None:
            account.holder.restrain(False)

    # Short of memory.

    def note_growth(self, account: MemoryAccount) -> None:
        """An account has grown, and the budget or its owner's share is nearly used."""
        # Those who are looked at are measured, which may find that they have grown, too.
        if self._is_noting:
            return
        self._is_noting = True
        try:
            self._stop_growth(account)
        finally:
            self._is_noting = False

    def _stop_growth(self, account: MemoryAccount) -> None:
        for held in (account.owner, self.total):
            held.judge()
        for held in (account.owner, self.total):
            if held.held_bytes > held.limit_bytes and account.held_bytes > _INNOCENT_BYTES:
                # No time to find the largest: who still grows is stopped.
                self._restrain(account)
                break
            if held.held_bytes > held.alarm_bytes:
                self._restrain_largest(held)
                break
        # Raised, so that the next alarm is for further growth: this runs in a peer's turn.
        for held in (account.owner, self.total):
            if held.held_bytes > held.alarm_bytes:
                held.alarm_bytes = held.held_bytes + held.limit_bytes / _STEPS

    def check(self, now: float) -> None:
        """Restrain, release and disconnect as things stand; to be called about every 0.1 s."""
        self._now = now
        for held in (self.total, *self._owners.values()):
            held.judge()
            if held.is_tight and not self._has_restrained(held):
                self._restrain_largest(held)
        if not self._restrained:
            return
        for account in list(self._restrained):
            if not self.total.is_tight and not account.owner.is_tight:
                del self._restrained[account]
                account.holder.restrain(False)
        overdue = [each for each, since in self._restrained.items() if now - since >= PATIENCE_S]
        if overdue:
            # One at a time: when its bytes are free, the others may go on.
            self._evict(max(overdue, key=_held_bytes))

    def _has_restrained(self, held: _Owner) -> bool:
        return any(held is self.total or each.owner is held for each in self._restrained)

    def _restrain_largest(self, held: _Owner) -> None:
        """Stop the peer that holds most, of the owner that holds most, after measuring it anew."""
        while held.is_tight:
            owner = held
            if held is self.total:
                owner = max(self._owners.values(), key=_held_bytes)
            candidates = [each for each in owner.accounts if each not in self._restrained]
            largest = max(candidates, key=_held_bytes, default=None)
            if largest is None or not largest.held_bytes:
                return
            before = largest.held_bytes
            largest.holder.measure_memory()
            if largest.held_bytes >= before:
                self._restrain(largest)
                return
            held.judge()

    def _restrain(self, account: MemoryAccount) -> None:
        if account not in self._restrained:
            self._restrained[account] = self._now
            self.restrained_total += 1
            account.holder.restrain(True)

    def _evict(self, account: MemoryAccount) -> None:
        account.holder.measure_memory()
        self.total.judge()
        account.owner.judge()
        if self.total.is_tight or account.owner.is_tight:
            del self._restrained[account]
            self.evicted_total += 1
            account.holder.evict()
            # It frees its memory soon: until then nobody else has to give way for it.
            account.close()


def _held_bytes(each: MemoryAccount | _Owner) -> int:
    return each.held_bytes


def trim_memory() -> None:
    """Have the allocator return free pages to the system; nothing where it can't. It keeps what
    lies between pieces that are still used, so that a peak would stay for ever. Takes a few
    milliseconds: call it on a thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
