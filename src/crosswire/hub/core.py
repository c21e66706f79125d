"""What most parts of the hub work with, in one bundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from crosswire.envelope import Envelope
from crosswire.hub.commits import CommitPath
from crosswire.hub.damage import DamageReports
from crosswire.hub.dispatch import Dispatcher, DispatchLoop, Watchers
from crosswire.hub.floors import Floors
from crosswire.hub.ledger import Ledger
from crosswire.hub.read_slots import ReadSlots
from crosswire.hub.seals import LakeSeals
from crosswire.hub.shares import Holders
from crosswire.hub.timers import Timers
from crosswire.hub.wall import WallClock
from crosswire.store.contract import Store

__all__ = ["Core", "SendEnvelope", "WindowTotal"]

_READ_AGAIN_S: Final = 1.0

SendEnvelope: TypeAlias = Callable[[Envelope, float], int]
"""Sends a message of the hub itself, which must not get lost, and returns its id:
`Intake.inject`."""


class WindowTotal:
    """What all queues and subscriptions together have in memory, and may have.

    Above the limit a backlog keeps new messages on disk only, and reads one at a time: it gets
    slower, not larger.
    """

    __slots__ = ("held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.limit_bytes = limit_bytes

    @property
    def is_full(self) -> bool:
        """Whether no backlog should take more into memory than it needs."""
        return self.held_bytes >= self.limit_bytes


class Core(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Made once, by `Hub`. `chance` gives random numbers in [0, 1)."""

    # With garbage collection: parts refer to the core and the core to parts. A cycle through an
    # object that the collector does not follow would keep every hub, and its store, for ever.

    store: Store
    ledger: Ledger
    loop: DispatchLoop
    commits: CommitPath
    timers: Timers
    wall: WallClock
    damage: DamageReports
    floors: Floors
    seals: LakeSeals
    watchers: Watchers
    windows: WindowTotal
    reads: ReadSlots
    holders: Holders
    chance: Callable[[], float]

    def read_again(self, dispatcher: Dispatcher) -> None:
        """The disk could not be read for it: touch it a second later."""

        def touch(now: float) -> None:
            self.loop.touch(dispatcher)
            self.loop.pump(now)

        self.timers.at_least(dispatcher, self.loop.now + _READ_AGAIN_S, touch)
