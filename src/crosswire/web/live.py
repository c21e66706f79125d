"""Live streams over HTTP: what happens to the hub, and a tail of queues and topics."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from crosswire.commitlog.contract import CommitGroup
from crosswire.envelope import Envelope, parse_pattern
from crosswire.hub.attachment import Attachment, Delivery, Notice
from crosswire.hub.commits import CommitStage
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.turns import QUANTUM_S, TurnShare
from crosswire.logs import fields_of
from crosswire.server.log_selection import LogSelection
from crosswire.server.server import Server
from crosswire.web.contract import EVENT_STREAM, Chunks, Operation, OperationRequest
from crosswire.web.event_stream import EventBuffer, stream_events
from crosswire.web.messages import show_message
from crosswire.web.property_filter import FilterText, property_predicate
from crosswire.web.state import stopped_titles
from crosswire.web.times import at_s

__all__ = ["LIVE_OPERATIONS"]

_LOOK_S: Final = 0.5
_MOST_EACH: Final = 100
_MOST_PER_GROUP: Final = 200
_WAITING_BYTES: Final = 16 << 20
_WAITING_MESSAGES: Final = 16_384
"""Of commits that a tail has not looked at."""
_LOOKED_AT: Final = 32
"""Messages that a tail looks at before it is checked whether others have to be served."""
_WINDOW: Final = 1_000_000


# Events of the hub.


def watch_events(ask: OperationRequest) -> Chunks:
    """Server-sent events: `trouble` for warnings and errors of the hub's log, `connected` and
    `disconnected`, and `state` when the hub's state changes. With `lost` it counts events that the
    client was too slow for, with `end` the stream ends. Raises Forbidden, ServiceUnavailable."""
    buffer = EventBuffer(ask.streams)

    def begin() -> Callable[[], None]:
        watch = _HubWatch(ask.server, buffer)
        return watch.stop

    return stream_events(ask, buffer, ask.require_observer, begin)


class _HubWatch:
    """Compares the hub's state with what it was half a second ago; and follows its log."""

    def __init__(self, server: Server, buffer: EventBuffer) -> None:
        self._server = server
        self._buffer = buffer
        self._connections = set(server.context.gateways)
        self._ended = server.context.closed[-1] if server.context.closed else None
        self._state: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._handler = _LogEvents(self._loop, buffer)
        logging.getLogger("crosswire").addHandler(self._handler)
        self._timer = self._loop.call_soon(self._look)

    def stop(self) -> None:
        logging.getLogger("crosswire").removeHandler(self._handler)
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        if not self._server.is_leading:
            self._note_state({"leading": False})
            return
        self._look_at_connections()
        server, hub = self._server, self._server.hub
        self._note_state(
            {
                "leading": True,
                "draining": server.context.draining,
                "has_room": hub.store.has_room(server.context.now()),
                "damage": len(hub.store.damages.entries),
                "stopped": stopped_titles(hub),
                "waiting_for_restart": server.waiting_for_restart,
                "users": len(server.context.access.users()),
                "dead_letters": server.statistics.totals[3],
                "schedules": hub.schedules.count,
                "subscriptions": hub.subscriptions.count,
                "topics": len(hub.topics_by_name()),
                "destinations": len(hub.store.destinations()),
            }
        )

    def _note_state(self, state: dict[str, Any]) -> None:
        changed = {name: value for name, value in state.items() if self._state.get(name) != value}
        self._state = state
        if changed:
            self._buffer.put("state", {"time": self._time(), **changed})

    def _time(self) -> object:
        server = self._server
        now = server.context.now()
        return at_s(server.hub.wall.at(now) if server.is_leading else now)

    def _look_at_connections(self) -> None:
        context = self._server.context
        current = context.gateways
        new = [each for name, each in current.items() if name not in self._connections]
        self._connections = set(current)
        for gateway in new[:_MOST_EACH]:
            self._buffer.put(
                "connected",
                {
                    "time": at_s(gateway.hub.wall.at(gateway.since)),
                    "connection": gateway.id,
                    "protocol": gateway.protocol,
                    "address": gateway.address,
                },
            )
        ended = []
        for closed in reversed(context.closed):
            if closed is self._ended:
                break
            ended.append(closed)
        if ended:
            self._ended = ended[0]
        for closed in reversed(ended[:_MOST_EACH]):
            self._buffer.put(
                "disconnected",
                {
                    "time": at_s(self._server.hub.wall.at(closed.ended)),
                    "connection": closed.id,
                    "protocol": closed.protocol,
                    "address": closed.address,
                    "principal": closed.principal,
                    "reason": closed.reason,
                },
            )
        more = max(len(new) - _MOST_EACH, 0), max(len(ended) - _MOST_EACH, 0)
        if any(more):
            data = {"time": self._time(), "connected": more[0], "disconnected": more[1]}
            self._buffer.put("more", data)


class _LogEvents(logging.Handler):
    """Passes warnings and errors of the hub's log to a stream; they may come from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, buffer: EventBuffer) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        self._buffer = buffer

    def emit(self, record: logging.LogRecord) -> None:
        data = {
            "time": at_s(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            "fields": fields_of(record),
        }
        try:
            self._loop.call_soon_threadsafe(self._buffer.put, "trouble", data)
        except RuntimeError:
            # The loop is closed: there is nobody to send it to.
            return


# Tail.


class TailQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages to show."""

    destination: str
    """A queue, topic or service, or a pattern of topics."""
    filter: FilterText = ""
    """Only messages whose properties pass this filter, such as `price > 10`."""


def tail(ask: OperationRequest) -> Chunks:
    """Server-sent events: `message` for each message that is accepted from now on, without
    consuming it. Many at a time are sampled: `lost` counts those that are left out, and those that
    there was no time to look at. Raises Forbidden, InvalidDestination, InvalidFilter,
    ServiceUnavailable."""
    query: TailQuery = ask.query
    is_own_name = query.destination.partition("/")[2].startswith("@")
    if not is_own_name:
        parse_pattern(query.destination)
    matches = property_predicate(query.filter)
    buffer = EventBuffer(ask.streams)

    def begin() -> Callable[[], None]:
        return _Tail(ask, query.destination, matches, buffer).stop

    return stream_events(ask, buffer, lambda: ask.require_content(query.destination), begin)


class _TailedGroup(NamedTuple):
    """The messages of a commit that a tail has still to look at."""

    envelopes: Iterator[Envelope]
    messages: int
    size_bytes: int


class _Tail:
    """A listener of commits; for topics that are not durable, a subscriber.

    Commits wait for turns of their own: a filter may take as long for a message as all else.
    """

    def __init__(
        self, ask: OperationRequest, destination: str, matches: Any, buffer: EventBuffer
    ) -> None:
        self._hub = ask.hub
        self._choice = LogSelection([destination], may=ask.may_read)
        self._matches = matches
        self._buffer = buffer
        self._waiting: deque[_TailedGroup] = deque()
        self._waiting_messages = self._waiting_bytes = 0
        self._left = _MOST_PER_GROUP
        self._share = TurnShare(ask.hub.turns, self._work)
        self._now = ask.now
        self._attachment: Attachment | None = None
        self._hub.commits.add_listener(CommitStage.TELEMETRY, self._committed)
        if destination.startswith("topic/"):
            peer = LedgerPeer("http", "", ask.principal)
            self._attachment = self._hub.subscribe(
                destination, self, ask.now(), peer=peer, window=_WINDOW, names=self._is_light
            )

    def stop(self) -> None:
        self._hub.commits.remove_listener(self._committed)
        self._share.close()
        self._waiting.clear()
        if self._attachment is not None:
            self._attachment.close(self._now())

    def _is_light(self, name: str) -> bool:
        """Whether a topic is not durable: its messages are in no commit."""
        topic = self._hub.topics_by_name().get(f"topic/{name}")
        return topic is not None and not topic.policy.durable

    def _committed(self, group: CommitGroup) -> None:
        runs = (*group.stored, *group.retained)
        count = sum(len(run.sizes) for run in runs)
        if not count:
            return
        if (
            self._waiting_messages + count > _WAITING_MESSAGES
            or self._waiting_bytes + group.size_bytes > _WAITING_BYTES
        ) and self._waiting:
            self._buffer.lose(count)
            return
        wanted = (
            envelope
            for run in runs
            if run.envelopes and self._choice.wants(run.envelopes[0].destination)
            for envelope in run.envelopes
        )
        self._waiting.append(_TailedGroup(wanted, count, group.size_bytes))
        self._waiting_messages += count
        self._waiting_bytes += group.size_bytes
        self._share.later()

    def _work(self) -> None:
        error = self._hub.callbacks.run("tail", self._look)
        if error is not None:
            self._waiting.clear()
            self.broken(error)

    def _look(self) -> None:
        """Look at some of what was committed, in a turn."""
        clock = self._hub.turns.thread_clock
        ends_at = clock() + QUANTUM_S
        while self._waiting and clock() < ends_at:
            group = self._waiting[0]
            for number, envelope in enumerate(group.envelopes, 1):
                self._left = self._show(envelope, self._left)
                if number == _LOOKED_AT:
                    break
            else:
                self._waiting.popleft()
                self._waiting_messages -= group.messages
                self._waiting_bytes -= group.size_bytes
                self._left = _MOST_PER_GROUP
        if self._waiting:
            self._share.later()

    def _show(self, envelope: Envelope, left: int) -> int:
        """A group may have a hundred thousand: encoding each would delay all."""
        if self._matches is not None and not self._matches(envelope.properties):
            return left
        if left > 0:
            self._buffer.put("message", show_message(envelope))
        else:
            self._buffer.lose()
        return left - 1

    # As a receiver of deliveries.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        left = _MOST_PER_GROUP
        for delivery in deliveries:
            left = self._show(delivery.envelope, left)
        attachment.settle([each.id for each in deliveries], self._now())

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        self._buffer.put("notice", {"text": str(notice), "destination": attachment.destination})

    def broken(self, error: Exception) -> None:
        self._buffer.end("end", {"reason": f"internal error: {type(error).__name__}"})


LIVE_OPERATIONS: Final = (
    Operation(
        name="watch_events",
        tag="live",
        method="GET",
        path="/v1/events",
        summary="Troubles and state changes of the hub, as they happen",
        handler=watch_events,
        answer=None,
        streams=EVENT_STREAM,
        example_event=(
            "id: 1\nevent: disconnected\n"
            'data: {"time":"2026-11-16T12:00:00Z","connection":"emp-1-2f","protocol":"emp",'
            '"address":"192.0.2.7:51770","principal":"anna","reason":"ping timeout"}\n\n'
        ),
        needs="observe",
    ),
    Operation(
        name="tail",
        tag="live",
        method="GET",
        path="/v1/tail",
        summary="Messages of a queue, topic or service as they are accepted; none is consumed",
        handler=tail,
        query=TailQuery,
        answer=None,
        streams=EVENT_STREAM,
        example_event=(
            "id: 1\nevent: message\n"
            'data: {"id":4711,"time":"2026-11-16T12:00:00Z","destination":"queue/orders",'
            '"kind":"send","content_type":"application/json","size_bytes":14,'
            '"json":{"item":"tea"},"protocol":"emp"}\n\n'
        ),
        needs="principal",
    ),
)
