"""Turns: how the thread of the event loop is shared between peers.

One thread serves everybody, so what it does for one peer all others wait for. A turn is what it
does between two looks at the sockets. Work that may be long is done in parts: when the turn is used
up (`Turns.is_over`) it stops, and continues in a later one (`TurnShare.later`).

Who continues first is decided by fair queueing. A share that waits starts with the time that it had
used when it began to wait, but never with less than the one that was served last; to this is added
what it is likely to take next, at most `QUANTUM_S`, after which it waits again. The least sum is
served first. So a peer that sends a ping now and then is before those that keep the thread busy,
whatever their number, and each of these gets as much as the others.

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
from collections.abc import Callable
from itertools import count
from time import perf_counter, thread_time
from typing import Final

from crosswire.hub.intake_gate import IntakeGate

__all__ = ["LARGE_BYTES", "QUANTUM_S", "TURN_S", "TurnShare", "Turns"]

TURN_S: Final = 0.008
"""How long a turn may be before long work waits for the next one. What begins before that ends
after it, so turns are longer than this, and parts must be much shorter."""
QUANTUM_S: Final = TURN_S / 4
"""How long one peer is served before others that wait."""
_UNREAD_S: Final = TURN_S / 8
"""How long turns may be together before the thread's clock is read at their end, which costs a
microsecond. A turn may seem that much longer than it is."""

LARGE_BYTES: Final = 1 << 20
"""From this size on a message has turns of its own: it takes long, and can't be done in parts."""


class TurnShare:
    """One peer's part in the thread's time. `run` is called when its turn has come."""

    __slots__ = (
        "_finish_s",
        "_is_held",
        "_is_parked",
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
        self._finish_s = max(self._finish_s, self._turns.virtual_s) + seconds

    def later(self, cost_s: float = QUANTUM_S) -> None:
        """Have `run` called in a later turn; `cost_s` is how long it is likely to take."""
        if not self.is_waiting:
            self.is_waiting = True
            self._turns.wait(self, self._finish_s, cost_s)

    def caused(self) -> None:
        """A part of work was deferred for this peer."""
        self.unfinished += 1

    def finished(self) -> None:
        """Such a part is done."""
        self.unfinished -= 1
        if not self.unfinished and self._is_parked:
            self._is_parked = False
            self._turns.wait(self, self._finish_s, QUANTUM_S)

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
        self._turns.wait(self, self._finish_s, QUANTUM_S)

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
        self._unread_s = 0.0
        self._waiting: list[tuple[float, int, float, bool, TurnShare]] = []
        self._numbers = count()

    def enter(self) -> None:
        """The event loop calls us: a turn begins, unless one is running."""
        if self._began is None:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._thread_s = self.thread_clock()
            self._began, self._thread_began = self.clock(), self._thread_s
            self._loop.call_soon(self._end)

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
        took_s = self.clock() - began
        if took_s <= QUANTUM_S or self._began is None:
            return took_s
        return min(took_s, self.thread_clock() - self._thread_began)

    def wait(self, share: TurnShare, finish_s: float, cost_s: float) -> None:
        """Have a share served in a later turn; one that is longer than a turn, alone."""
        self.enter()
        start_s = max(finish_s, self.virtual_s)
        entry = (
            start_s + min(cost_s, QUANTUM_S),
            next(self._numbers),
            start_s,
            cost_s > TURN_S,
            share,
        )
        heapq.heappush(self._waiting, entry)

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
        took_s = self.clock() - self._began
        self._unread_s += took_s
        if self._unread_s > _UNREAD_S:
            # By the thread's own clock. It runs since the end of an earlier turn, when the thread
            # may have done other things than ours: a turn is not longer than the time that has
            # passed.
            thread_s = self.thread_clock()
            took_s = min(took_s, thread_s - self._thread_s)
            self._thread_s, self._unread_s = thread_s, 0.0
        if self.on_turn is not None:
            self.on_turn(took_s)
        self._began = None
        if self._waiting:
            self.enter()
            # One at least: on a machine that is overloaded, a turn may be over when it has begun.
            has_served = False
            while self._waiting and not (has_served and self.is_over()):
                _, _, start_s, is_long, share = self._waiting[0]
                if is_long and has_served:
                    break
                heapq.heappop(self._waiting)
                self.virtual_s = max(self.virtual_s, start_s)
                has_served = True
                share.begin()


def _nothing() -> None:
    """Instead of `run`, after `close`."""
