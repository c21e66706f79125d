"""The dispatch loop: everything that the hub hands to peers passes through one loop.

A settlement frees a window, the next message is delivered, its receiver settles at once, which
frees the window again: done by direct calls, a fast peer would drive the hub into recursion as
deep as its queue is long. So nothing is handed out where it becomes possible. It is put into one of
two lists, which `DispatchLoop.pump` alone empties; however much a peer sends at once, the call
stack contains one `pump`.

- `touch`: this object may have something to hand out, and looks itself when its turn comes.
- `defer`: call this with these arguments.

When the turn of the event loop is used up, `pump` leaves the rest for the next one, see
`crosswire.hub.turns`; so whatever may be long is deferred or handed out in parts.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias

from crosswire.hub.attachment import Attachment, Delivery, Notice
from crosswire.hub.shares import Quota
from crosswire.hub.turns import Turns, TurnShare

__all__ = ["Callbacks", "DispatchLoop", "Dispatcher", "Participant", "WatchedMessage", "Watchers"]

_log = logging.getLogger("crosswire.hub")

P = ParamSpec("P")


class Callbacks:
    """Calls code that others registered, so that an exception harms only who registered it.

    Receipts, deliveries, answers, watchers, timers and commit listeners are called in loops. An
    exception that ended such a loop would leave other peers' receipts open and their messages
    invisible. `failed` counts by kind how many calls raised.
    """

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()

    def run(
        self, kind: str, callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> Exception | None:
        """Call it. Returns the exception that it raised, which is logged and counted, or None."""
        try:
            callback(*args, **kwargs)
        except Exception as error:
            self.note(kind, error)
            return error
        return None

    def note(self, kind: str, error: Exception) -> None:
        """Log and count an exception of a callback that was not called by `run`."""
        self.failed[kind] += 1
        _log.error("callback failed: %s", kind, exc_info=error)


class Dispatcher(Protocol):
    """What may have something to hand out: a queue or subscription, a provider, a subscriber that
    lags, or a window with free capacity for one of them."""

    def dispatch(self, now: float) -> None:
        """Hand out what can be handed out now. Called by `DispatchLoop.pump` alone."""


class _ParticipantReceiver(Protocol):
    def broken(self, error: Exception) -> None: ...


class Participant(Protocol):
    """A consumer, subscriber or provider: something that a gateway attached for its peer."""

    @property
    def receiver(self) -> _ParticipantReceiver:
        """The gateway's side of it."""

    def close(self, now: float) -> None:
        """Detach it; what it holds goes to others."""


class DispatchLoop:
    """Hands out what is ready until nobody can take more.

    `now` is the hub's time of the latest call from outside, for those who are not given one.
    """

    def __init__(self, now: float, turns: Turns | None = None) -> None:
        self.now = now
        self.callbacks = Callbacks()
        self.turns = turns or Turns()
        self._share = TurnShare(self.turns, lambda: self.pump(self.now))
        # First in, first out: one that is touched again by its own dispatch is after all others.
        self._touched: OrderedDict[Dispatcher, None] = OrderedDict()
        self._deferred: deque[
            tuple[str, Callable[..., None], tuple[Any, ...], TurnShare | None]
        ] = deque()
        self._given_up: dict[Participant, None] = {}
        self._is_pumping = False

    def touch(self, dispatcher: Dispatcher) -> None:
        """It may have something to hand out. The caller calls `pump` when it is done."""
        self._touched[dispatcher] = None

    @property
    def has_deferred(self) -> bool:
        """Whether something is deferred that no `pump` has come to yet."""
        return bool(self._deferred)

    def touched(self) -> list[Dispatcher]:
        """Those that wait for `pump`: none when that has ended, and not for want of time."""
        return list(self._touched)

    def forget(self, dispatcher: Dispatcher) -> None:
        """It is removed for good: it has no turn any more."""
        self._touched.pop(dispatcher, None)

    def defer(self, kind: str, callback: Callable[..., None], *args: Any) -> None:
        """Have it called by the next `pump`, in order, or by the one that is running.

        The peer for which the hub works now is not read from before it is done.
        """
        share = self.turns.current
        if share is not None:
            share.caused()
        self._deferred.append((kind, callback, args, share))

    def pump(self, now: float) -> None:
        """Hand out until nobody can take more, or the turn is over; then the rest follows in the
        next turns. Receivers may call the hub meanwhile.

        Called by one of those, it returns at once: the running one continues with what was added.
        So it does while a rest waits for its turn: it is not done in the time of a peer that had no
        part in it.
        """
        deferred, touched = self._deferred, self._touched
        if not deferred and not touched:
            return
        if self._is_pumping or self._share.is_waiting:
            return
        turns, is_over, note = self.turns, self.turns.is_over, self.callbacks.note
        if is_over():
            self._share.later()
            return
        self._is_pumping = True
        before, began = turns.current, turns.clock()
        try:
            while deferred or touched:
                # Deferred calls first: a dispatcher must see what they change (a consumer that
                # was closed, a listener that attached others), or it hands out to the wrong one.
                # As `Callbacks.run`, without a call for each.
                if deferred:
                    kind, callback, args, share = deferred.popleft()
                    # What it defers in turn has the same cause.
                    turns.current = share
                    try:
                        callback(*args)
                    except Exception as error:
                        note(kind, error)
                    if share is not None:
                        share.finished()
                else:
                    dispatcher, _ = touched.popitem(last=False)
                    turns.current = None
                    try:
                        dispatcher.dispatch(now)
                    except Exception as error:
                        note("dispatch", error)
                if (deferred or touched) and is_over():
                    self._share.later()
                    break
        finally:
            self._is_pumping = False
            turns.current = before
            turns.dispatch_s += turns.time_since(began)

    # Receivers are called by these only. One that raises may have lost what it was given, and its
    # peer would wait for ever: its participant is closed, what it held goes to others, and
    # `broken` has it end the peer's connection.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Give messages to the receiver of an attachment."""
        try:
            attachment.receiver.deliver(attachment, deliveries)
        except Exception as error:
            self.callbacks.note("delivery", error)
            self._break(attachment, error)

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """Report a gap, or the end of an attachment, to its receiver."""
        self.call("notice", attachment, attachment.receiver.notice, attachment, notice)

    def call(
        self, kind: str, owner: Participant, method: Callable[..., None], *args: object
    ) -> None:
        """Call a method of the owner's receiver."""
        error = self.callbacks.run(kind, method, *args)
        if error is not None:
            self._break(owner, error)

    def give_up(self, owner: Participant, error: Exception) -> None:
        """Its filter raised: it is closed after the dispatch that is running.

        Not at once: a dispatch iterates over consumers and messages that closing would change.
        Until then its filter matches nothing.
        """
        if owner not in self._given_up:
            self._given_up[owner] = None
            self.callbacks.note("filter", error)
            self.defer("close", self._break, owner, error)

    def _break(self, owner: Participant, error: Exception) -> None:
        self._given_up.pop(owner, None)
        self.callbacks.run("close", owner.close, self.now)
        self.callbacks.run("broken", lambda: owner.receiver.broken(error))


Watcher: TypeAlias = Callable[[int, str], None]


class WatchedMessage(NamedTuple):
    """Who is called about a message, and whose share of all watchers that is."""

    watcher: Watcher
    holder: str


class Watchers:
    """Callbacks by message id: `(id, "")` when it is settled, `(id, reason)` if it never will be.

    A watcher is called once and removed.
    """

    def __init__(self, callbacks: Callbacks, share: Quota) -> None:
        self.by_id: dict[int, WatchedMessage] = {}
        self.share = share
        self._callbacks = callbacks

    def add(self, identifier: int, watcher: Watcher, holder: str = "") -> None:
        """Have it called about a message. Raises QuotaExceeded."""
        self.share.check(holder)
        self.put_back(identifier, WatchedMessage(watcher, holder))

    def pop(self, identifier: int) -> WatchedMessage | None:
        """Remove the watcher of a message, if it has one."""
        watched = self.by_id.pop(identifier, None)
        if watched is not None:
            self.share.remove(watched.holder)
        return watched

    def put_back(self, identifier: int, watched: WatchedMessage) -> None:
        """Watch it again, whatever the share is."""
        self.by_id[identifier] = watched
        self.share.add(watched.holder)

    def notify(self, ids: Sequence[int], error: str = "") -> None:
        """These are settled, or with `error` will never be."""
        for identifier in ids:
            watched = self.pop(identifier)
            if watched is not None:
                self._callbacks.run("watcher", watched.watcher, identifier, error)
