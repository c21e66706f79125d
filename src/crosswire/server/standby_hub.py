"""The hub that a standby answers questions with: made of what it has applied, it changes nothing.

A standby has a store and no hub in which anything fires, expires or is delivered. To answer what
queues, subscriptions and messages there are, it makes one that is never started: no event loop
commits its groups, no timer runs, no peer is connected. It shows one moment, and is made anew for
requests that come later.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from crosswire.commitlog.contract import Append, CommitGroup, CommitLog
from crosswire.errors import NotLeading
from crosswire.hub.hub import Hub
from crosswire.hub.policies import HubConfig
from crosswire.server.metrics import Metrics
from crosswire.store.replica import ReplicaStore
from crosswire.store.standby_reader import StandbyReader

__all__ = ["StandbyHub"]

_FRESH_S: Final = 1.0


class _NoLog(CommitLog):
    """Commits nothing: what changes something is for the leader."""

    def start(self, loop: object) -> None:  # noqa: ARG002
        raise NotLeading("a standby commits nothing")

    def append(self, group: CommitGroup, *, blocking: bool = False) -> Append:  # noqa: ARG002
        raise NotLeading("a standby commits nothing")

    def stop(self) -> None:
        """Nothing was started."""


class StandbyHub:
    """Makes a hub of a standby's store, at most once a second."""

    def __init__(self, config: Callable[[], HubConfig], clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self.metrics: Metrics
        """Those of the hub that was made last."""
        self._hub: Hub | None = None
        self._source: ReplicaStore | None = None
        self._made_at = float("-inf")

    def hub_of(self, store: ReplicaStore) -> Hub:
        """A hub that reads this store. Raises StoreError."""
        now = self._clock()
        is_fresh = 0 <= now - self._made_at < _FRESH_S
        if self._hub is None or self._source is not store or not is_fresh:
            self._hub = Hub(
                StandbyReader(store),
                self._config(),
                now=now,
                random=Random(0),
                clock=self._clock,
                log=_NoLog(),
            )
            self.metrics = Metrics(self._hub)
            self._source, self._made_at = store, now
        return self._hub

    def forget(self) -> None:
        """The store is about to be closed, or this replica leads."""
        self._hub = self._source = None
