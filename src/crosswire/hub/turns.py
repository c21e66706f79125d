"""Turns: how the thread of the event loop is shared between peers.

One thread serves everybody, so what it does for one peer all others wait for. A turn is what it
does between two looks at the sockets. Work that may be long is done in parts: when the turn is used
up (`Turns.is_over`) it stops, and continues in a later one (`TurnShare.later`).

Who continues first is decided by fair queueing. A share that waits starts with the time that it had
used when it began to wait, but never with less than the one that was served last; to this is added
what it is likely to take next, at most `QUANTUM_S`, after which it waits again. The least sum is
served first. So a peer that sends a ping now and then is before those that keep the thread busy,
whatever their number, and each of these gets as much as the others. The peers of one user, or of
one address, are served like one peer (`TurnOwner`) and divide its part in the same manner: who
opens more connections gets no more time.

What a peer's messages cause in the hub may take longer than to read them: a publication to
thousands of subscribers is deferred in parts. A share with such parts left (`TurnShare.unfinished`)
is not read from, or the parts would pile up.

What can't be done in parts, a message of many megabytes, begins a turn: the answers of all who were
served before it have been sent by then, since the loop writes between two turns. And it ends that
turn: two of them don't follow each other without a look at the sockets, and those who used less are
before the second.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from time import perf_counter, thread_time
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from crosswire.hub.intake_gate import IntakeGate

__all__ = ["LARGE_BYTES", "QUANTUM_S", "TURN_S", "TurnOwner", "TurnShare", "Turns"]

TURN_S: Final = 0.008
"""How long a turn may be before long work waits for the next one. What begins before that ends
after it, so turns are longer than this, and parts must be much shorter."""
QUANTUM_S: Final = TURN_S / 4
"""How long one peer is served before others that wait."""

_SHORT_S: Final = QUANTUM_S
"""Turns of this length together are measured by one look at the thread's clock, a system call: as
long as several messages that come one by one."""
_RECENT: Final = 0.9
"""How much of what is known of earlier turns counts beside one more."""

LARGE_BYTES: Final = 1 << 20
"""From this size on a message has turns of its own: it takes long, and can't be done in parts."""


class TurnOwner:
    """The part of one user, or one address, in the thread's time: its peers' shares divide it."""

    __slots__ = ("__weakref__", "finish_s", "is_listed", "virtual_s", "waiting")

    def __init__(self) -> None:
        self.finish_s = 0.0
        """How much its peers have used, among all owners."""
        self.virtual_s = 0.0
        """As that of `Turns`, among its peers."""
        self.waiting: list[_WaitingShare] = []
        self.is_listed = False
        """Whether `Turns` knows that its peers wait."""


class TurnShare:
    """One peer's part in the thread's time. `run` is called when its turn has come."""

    __slots__ = (
        "_finish_s",
        "_is_held",
        "_is_parked",
        "_owner",
        "_run",
        "_takes_in",
        "_turns",
        "is_waiting",
        "unfinished",
    )

    def __init__(self, turns: Turns, run: Callable[[], None], *, takes_in: bool = False) -> None:
        """`takes_in`: its work is to read what a peer sends, so that it waits for the gate."""
        self._turns = turns
        self._run = run
        self._takes_in = takes_in
        self._owner: TurnOwner | None = None
        self._finish_s = 0.0
        self._is_held = False
        self._is_parked = False
        self.is_waiting = False
        """Whether `run` is to be called in a later turn."""
        self.unfinished = 0
        """Parts of work that this peer caused and that wait in the dispatch loop."""

    def may_run(self) -> bool:
        """Whether work for this peer may begin now; if not, it calls `later`."""
        turns = self._turns
        return (
            not self.is_waiting
            and not self.unfinished
            and not turns.is_over()
            and (turns.gate is None or not self.is_gated())
        )

    def is_gated(self) -> bool:
        """Whether this work has to wait until more is durable."""
        gate = self._turns.gate
        return gate is not None and self._takes_in and gate.is_closed()

    def used(self, seconds: float) -> None:
        """Work for this peer took this long."""
        turns, owner = self._turns, self._owner
        if owner is None:
            self._finish_s = turns.charge(self._finish_s, seconds)
        else:
            self._finish_s = max(self._finish_s, owner.virtual_s) + seconds
            owner.finish_s = turns.charge(owner.finish_s, seconds)

    def join(self, owner: TurnOwner | None) -> None:
        """From now on it is a part of this owner's time; of None, its own."""
        if owner is not self._owner:
            self._owner = owner
            # What it used so far was another's.
            self._finish_s = 0.0

    def later(self, cost_s: float = QUANTUM_S) -> None:
        """Have `run` called in a later turn; `cost_s` is how long it is likely to take."""
        if not self.is_waiting:
            self.is_waiting = True
            self._wait(cost_s)

    def caused(self) -> None:
        """A part of work was deferred for this peer."""
        self.unfinished += 1

    def finished(self) -> None:
        """Such a part is done."""
        self.unfinished -= 1
        if not self.unfinished and self._is_parked:
            self._is_parked = False
            self._wait(QUANTUM_S)

    def hold(self) -> None:
        """The commit group takes no more of this peer until `Turns.release`."""
        if not self._is_held:
            self._is_held = True
            self.caused()
            self._turns.held.append(self)

    def release(self) -> None:
        """Called by `Turns`: what held it is over."""
        self._is_held = False
        self.finished()

    def _wait_again(self) -> None:
        self._wait(QUANTUM_S)

    def _wait(self, cost_s: float) -> None:
        self._turns.wait(self, self._owner, self._finish_s, cost_s)

    def close(self) -> None:
        """The peer is gone: `run` is not called any more."""
        self._run = _nothing

    def begin(self) -> None:
        """Called by `Turns`: its turn has come."""
        if self.unfinished:
            self._is_parked = True
            return
        gate = self._turns.gate
        if gate is not None and self.is_gated():
            gate.when_open(self._wait_again)
            return
        self.is_waiting = False
        turns = self._turns
        began, before, turns.current = turns.clock(), turns.current, self
        try:
            self._run()
        finally:
            turns.current = before
            self.used(turns.time_since(began))


_WaitingShare: TypeAlias = tuple[float, int, float, float, TurnShare]
"""Start and cost, a number for those where they are the same, start, cost, and who waits."""
_Waiting: TypeAlias = tuple[float, int, float, float, TurnShare | TurnOwner]


class Turns:
    """The turn that is running, and those who wait for the next one.

    `enter` is called wherever the event loop enters the hub; `on_turn`, if set, is called after
    each turn with the time for which it kept the thread busy.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] | None = None,
        thread_clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` runs on while the thread waits for the disk or for a processor, `thread_clock`
        stands still."""
        self.thread_clock = thread_clock or thread_time
        """What peers, and parts of their work, are charged by. On a busy machine the other clock
        would charge them for other programs, and parts would become so small that the hub does
        little else than begin them."""
        self.current: TurnShare | None = None
        """For whom the thread works right now."""
        self.is_full = False
        """Whether the open commit group takes no large message, until `release`."""
        self.held: list[TurnShare] = []
        self.dispatch_s = 0.0
        """How long the dispatch loop has worked in all: it divides its work itself."""
        self.virtual_s = 0.0
        """What the share that was served last started with."""
        self.on_turn: Callable[[float], None] | None = None
        self.gate: IntakeGate | None = None
        """Work that takes in messages waits while it is closed; None if it never has to."""
        self.clock = clock or perf_counter
        """Beside the thread's own: it is cheap to ask."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began: float | None = None
        self._thread_began = 0.0
        self._thread_s = 0.0
        self._waiting: list[_Waiting] = []
        self._owners: WeakValueDictionary[str, TurnOwner] = WeakValueDictionary()
        self._numbers = count()
        self._pace = 1.0
        self._recent_s = self._recent_thread_s = 0.0
        self._unmeasured_s = 0.0
        self._planned: deque[Callable[[], None]] = deque()

    def enter(self) -> None:
        """The event loop calls us: a turn begins, unless one is running."""
        if self._began is None:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._thread_s = self.thread_clock()
            self._began, self._thread_began = self.clock(), self._thread_s
            self._loop.call_soon(self._end)

    def plan(self, write: Callable[[], None]) -> None:
        """Have this called at the end of the turn, or before that by `run_planned`."""
        if self._began is None:
            self.enter()
        if not self._planned:
            assert self._loop is not None
            self._loop.call_soon(self.run_planned)
        self._planned.append(write)

    def run_planned(self) -> None:
        """Call what was planned. A commit does when all who waited for it have their answers: these
        are written before the hub turns to what nobody waits for."""
        planned = self._planned
        try:
            for _ in range(len(planned)):
                planned.popleft()()
        finally:
            # What these planned in turn, and the others if one of them raised.
            if planned:
                assert self._loop is not None
                self._loop.call_soon(self.run_planned)

    def is_over(self) -> bool:
        """Whether this turn has had its time. Never, where no event loop called `enter`."""
        # The thread's clock costs ten times as much, and never shows more than the other one.
        return (
            self._began is not None
            and self.clock() - self._began > TURN_S
            and self.thread_clock() - self._thread_began > TURN_S
        )

    def time_since(self, began: float) -> float:
        """How long the thread has worked since `clock` showed this, in the turn that is running.

        Other programs' time does not count if it is much; then what the turn did before may.
        """
        # The thread's clock costs about as much as a small message: it is asked where it matters.
        # A small part, a ping, would be charged for a whole one if others had the processor then.
        took_s = self.clock() - began
        if self._began is None:
            return took_s
        if took_s <= QUANTUM_S:
            return took_s * self._pace
        return min(took_s, self.thread_clock() - self._thread_began)

    def owner(self, name: str) -> TurnOwner:
        """The user or address of this name, which lives as long as a share is its."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = TurnOwner()
        return owner

    def charge(self, finish_s: float, seconds: float) -> float:
        """Somebody who had used `finish_s` has used this much more; gives the sum."""
        start_s = max(finish_s, self.virtual_s)
        if not self._waiting:
            # Who uses time that nobody else wants must not pay for it when others come.
            self.virtual_s = start_s
        return start_s + seconds

    def wait(
        self, share: TurnShare, owner: TurnOwner | None, finish_s: float, cost_s: float
    ) -> None:
        """Have a share served in a later turn; one that is longer than a turn, alone."""
        self.enter()
        virtual_s = self.virtual_s if owner is None else owner.virtual_s
        start_s = max(finish_s, virtual_s)
        key_s = start_s + min(cost_s, QUANTUM_S)
        if owner is None:
            heapq.heappush(self._waiting, (key_s, next(self._numbers), start_s, cost_s, share))
            return
        heapq.heappush(owner.waiting, (key_s, next(self._numbers), start_s, cost_s, share))
        self._list(owner)

    def _list(self, owner: TurnOwner) -> None:
        """Some of its peers wait: it waits, with the first of them."""
        if owner.waiting and not owner.is_listed:
            owner.is_listed = True
            cost_s = owner.waiting[0][3]
            start_s = max(owner.finish_s, self.virtual_s)
            key_s = start_s + min(cost_s, QUANTUM_S)
            heapq.heappush(self._waiting, (key_s, next(self._numbers), start_s, cost_s, owner))

    def _serve(self, start_s: float, waiting: TurnShare | TurnOwner) -> None:
        self.virtual_s = max(self.virtual_s, start_s)
        if isinstance(waiting, TurnShare):
            waiting.begin()
            return
        _, _, start_s, _, share = heapq.heappop(waiting.waiting)
        waiting.virtual_s = max(waiting.virtual_s, start_s)
        try:
            share.begin()
        finally:
            # Not before: its time has been charged now.
            waiting.is_listed = False
            self._list(waiting)

    def release(self) -> None:
        """The next commit group takes messages again."""
        self.is_full = False
        if self.held:
            held, self.held = self.held, []
            for share in held:
                share.release()

    def _end(self) -> None:
        """The loop is about to look at the sockets: measure this turn, and begin the next one with
        those who wait."""
        assert self._began is not None
        passed_s = self.clock() - self._began
        self._unmeasured_s += passed_s
        took_s = passed_s * self._pace
        if self._unmeasured_s >= _SHORT_S:
            # By the thread's own clock. It runs since it was looked at last, when the thread may
            # have done other things than ours: turns are not longer than the time that has passed.
            thread_s = self.thread_clock()
            thread_took_s = min(self._unmeasured_s, thread_s - self._thread_s)
            took_s = min(passed_s, thread_took_s)
            self._recent_s = _RECENT * self._recent_s + self._unmeasured_s
            self._recent_thread_s = _RECENT * self._recent_thread_s + thread_took_s
            if self._recent_s > 0:
                self._pace = self._recent_thread_s / self._recent_s
            self._thread_s = thread_s
            self._unmeasured_s = 0.0
        if self.on_turn is not None:
            self.on_turn(took_s)
        self._began = None
        if self._waiting:
            self.enter()
            # One at least: on a machine that is overloaded, a turn may be over when it has begun.
            has_served = False
            while self._waiting and not (has_served and self.is_over()):
                _, _, start_s, cost_s, waiting = self._waiting[0]
                if isinstance(waiting, TurnOwner):
                    # Another of its peers may have come to wait, and be the first.
                    cost_s = waiting.waiting[0][3]
                if cost_s > TURN_S and has_served:
                    break
                heapq.heappop(self._waiting)
                has_served = True
                self._serve(start_s, waiting)


def _nothing() -> None:
    """Instead of `run`, after `close`."""
