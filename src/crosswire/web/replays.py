"""Replays of dead letters: tasks that send them again, at a rate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from crosswire.error_texts import public_text
from crosswire.errors import Forbidden, HubError, InvalidEnvelope, UnknownMessage
from crosswire.gateways.edits import refit
from crosswire.hub.hub import Hub
from crosswire.hub.turns import TURN_S
from crosswire.logs import log_event
from crosswire.web.dead_selection import LISTED_IDS, DeadLetterSelection, dead_queue, selected_ids
from crosswire.web.property_filter import property_predicate
from crosswire.web.times import Moment, at_s

__all__ = ["Replay", "ReplayRequest", "ReplayRow", "ReplayRows", "Replays"]

_log = logging.getLogger("crosswire.web")

_BATCH: Final = 32
_KEPT: Final = 100
_RUNNING: Final = 16
_RUNNING_EACH: Final = 4
"""Of one user, once there are users."""
_STEP_S: Final = 0.1
_WAIT_S: Final = 5.0


class ReplayRequest(DeadLetterSelection, frozen=True, kw_only=True):
    """The dead letters to send again, where to, and how fast."""

    rate: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    """Letters per second; 0 for no limit."""
    destination: str = ""
    """Replaces the one that each letter came from."""


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """A replay of dead letters, or a move of messages from one queue to another destination."""

    id: int
    queue: str
    source: str
    """The queue that the messages are taken from."""
    destination: str
    """Where they go; empty if each goes back to where it came from."""
    principal: str
    started: Moment
    ended: Moment | None
    state: Literal["running", "done", "cancelled", "failed"]
    matched: int
    """How many were selected so far."""
    replayed: int
    """How many were sent."""
    skipped: int
    """How many were removed meanwhile, or could not be sent."""
    rate: float
    dry_run: bool
    ids: list[int]
    """The first that were selected."""
    error: str
    """The reason for the last one that was skipped, or for the end."""


class ReplayRows(msgspec.Struct, frozen=True):
    """A page of running replays, and of the last ones that ended."""

    replays: list[ReplayRow]
    next: str
    """The cursor of the next page; empty after the last."""


class Replay:
    """A replay with its task and its counts."""

    def __init__(
        self,
        identifier: int,
        asked: ReplayRequest,
        principal: str,
        is_allowed: Callable[[], bool],
        *,
        source: str,
        wall: Callable[[], float],
    ) -> None:
        self.principal = principal
        self._source = source
        self._wall = wall
        self._started = wall()
        self._ended: float | None = None
        self._is_allowed = is_allowed
        self.id = identifier
        self.asked = asked
        self.state: Literal["running", "done", "cancelled", "failed"] = "running"
        self.matched = self.replayed = self.skipped = 0
        self.first: list[int] = []
        self.error = ""
        self.task: asyncio.Task[None] | None = None

    def row(self) -> ReplayRow:
        """Its current state and counts."""
        return ReplayRow(
            id=self.id,
            queue=self.asked.queue,
            source=self._source,
            destination=self.asked.destination,
            principal=self.principal,
            started=at_s(self._started),
            ended=None if self._ended is None else at_s(self._ended),
            state=self.state,
            matched=self.matched,
            replayed=self.replayed,
            skipped=self.skipped,
            rate=self.asked.rate,
            dry_run=self.asked.dry_run,
            ids=self.first,
            error=self.error,
        )

    async def run(self, hub: Hub, queue: str, now: Callable[[], float]) -> None:
        """Send the selected letters; a HubError ends it with the state `failed`."""
        try:
            matches = property_predicate(self.asked.filter)
            for ids in selected_ids(hub, queue, self.asked, matches):
                self.matched += len(ids)
                self.first += ids[: LISTED_IDS - len(self.first)]
                if not self.asked.dry_run:
                    await self._send(hub, queue, ids, now)
                await asyncio.sleep(0)
            await hub.committed()
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        except HubError as error:
            self.state, self.error = "failed", self._shown(error)
        finally:
            self._ended = self._wall()

    async def _send(self, hub: Hub, queue: str, ids: list[int], now: Callable[[], float]) -> None:
        """Send in batches: of a tenth of a second's rate, so that the rate is even, and of at most
        32 letters, so that the event loop is not blocked; of fewer, if they are large."""
        rate, clock = self.asked.rate, hub.turns.thread_clock
        step = min(max(int(rate * _STEP_S), 1), _BATCH) if rate else _BATCH
        for start in range(0, len(ids), step):
            batch = ids[start : start + step]
            if not self._is_allowed():
                raise Forbidden("the right to replay these was taken away")
            began = clock()
            for identifier in batch:
                hub.turns.enter()
                self._send_one(hub, queue, identifier, now())
                if clock() - began > TURN_S:
                    # They are in memory until they are on disk: not faster than that.
                    await hub.committed()
                    began = clock()
            await asyncio.sleep(len(batch) / rate if rate else 0)

    def _send_one(self, hub: Hub, queue: str, identifier: int, now: float) -> None:
        try:
            sent = hub.dead_letters.replay(
                queue, [identifier], now, destination=self.asked.destination, refit=refit
            )
        except HubError as error:
            self.error = self._shown(error)
            sent = ()
        if not sent:
            self.error = self.error or "a consumer holds it, or it is settled"
        self.replayed += len(sent)
        self.skipped += 1 - len(sent)

    def _shown(self, error: HubError) -> str:
        """Who started it need not administer the hub."""
        text = public_text(error)
        if text != str(error):
            log_event(_log, logging.ERROR, "replay failed", id=self.id, reason=str(error))
        return text


class Replays:
    """Running replays and the last ones that ended.

    They are in memory only: a restart of the hub ends them, and letters that were not sent again
    remain dead letters.
    """

    def __init__(self) -> None:
        self._replays: dict[int, Replay] = {}
        self._number = 0

    async def start(
        self,
        hub: Hub,
        asked: ReplayRequest,
        now: Callable[[], float],
        principal: str,
        *,
        is_allowed: Callable[[], bool],
        source: str = "",
    ) -> ReplayRow:
        """Start a replay for a user; returns when it has ended, after a few seconds at the latest.
        It ends as failed when `is_allowed` is no longer so. `source` is the queue to take messages
        from, by default that of the dead letters.

        Raises InvalidEnvelope and InvalidFilter for a selection that is not valid, and
        UnknownMessage for a queue without dead letters.
        """
        asked.check()
        queue = source or dead_queue(hub, asked.queue)
        property_predicate(asked.filter)
        running = [each for each in self._replays.values() if each.state == "running"]
        own = sum(each.principal == principal for each in running)
        if len(running) >= _RUNNING or (principal and own >= _RUNNING_EACH):
            raise InvalidEnvelope(f"{min(len(running), _RUNNING)} replays are running already")
        self._number += 1
        replay = self._replays[self._number] = Replay(
            self._number,
            asked,
            principal,
            is_allowed,
            source=queue,
            wall=lambda: hub.wall.at(now()),
        )
        self._forget()
        replay.task = asyncio.create_task(replay.run(hub, queue, now))
        await asyncio.wait([replay.task], timeout=_WAIT_S)
        return replay.row()

    def _forget(self) -> None:
        over = [number for number, each in self._replays.items() if each.state != "running"]
        for number in over[: max(len(self._replays) - _KEPT, 0)]:
            del self._replays[number]

    def all(self) -> list[Replay]:
        """All replays that are known, the oldest first."""
        return list(self._replays.values())

    def get(self, identifier: int) -> Replay:
        """Raises UnknownMessage."""
        replay = self._replays.get(identifier)
        if replay is None:
            raise UnknownMessage(f"there is no replay {identifier}")
        return replay

    def cancel_all(self) -> None:
        """Cancel those that run, without waiting for their ends."""
        for replay in self._replays.values():
            if replay.task is not None:
                replay.task.cancel()

    async def finish(self) -> None:
        """Wait for the ends of those that were cancelled."""
        cancelled = [each.task for each in self._replays.values() if each.task is not None]
        cancelled = [task for task in cancelled if task.cancelling()]
        await asyncio.gather(*cancelled, return_exceptions=True)
