"""Finds what the hub still holds for disconnected peers, and releases it.

Disconnecting cleans up after every peer, also after errors, so nothing should ever be found. If a
defect leaves something all the same, a connection slot, a consumer or a link would be lost until
the next restart: it is logged, counted and released instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

from crosswire.gateways.context import ConnectedPeer, GatewayContext, Leftover
from crosswire.gateways.gateway import Gateway
from crosswire.hub.attachment import Attachment
from crosswire.hub.services import Provider
from crosswire.logs import log_event

__all__ = ["LeftoverCheck"]

_INTERVAL_S: Final = 10.0
_PAUSE_S: Final = 0.005
_SLICE: Final = 500
"""How many objects are checked before the event loop does other work."""

_log = logging.getLogger("crosswire.gateways")

Source: TypeAlias = Callable[[GatewayContext], Iterable[Leftover]]


class LeftoverCheck:
    """Checks all peers every 10 s, in small steps.

    An object that two successive rounds find is left over: in one round it may just be about to be
    released. `healed` counts by kind what was released. `sources` find objects that only a protocol
    has.
    """

    def __init__(self, context: GatewayContext, sources: Sequence[Source] = ()) -> None:
        self.healed: Counter[str] = Counter()
        self._context = context
        self._sources = sources
        # With a reference to the object, so that no new object can get its `id` meanwhile.
        self._suspects: dict[tuple[str, int], object] = {}
        self._round: Iterator[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check from now on, in the running event loop."""
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._step)

    def stop(self) -> None:
        """Check no more; a round in progress is not finished."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Run a whole round at once."""
        for _ in self._examine():
            pass

    def _step(self) -> None:
        """Check some objects; the rest follows after a short pause, the next round later."""
        loop, callbacks = asyncio.get_running_loop(), self._context.hub.callbacks
        if callbacks.run("leftovers", self._check_some) is not None:
            self._round = None
        wait_s = _INTERVAL_S if self._round is None else _PAUSE_S
        self._timer = loop.call_later(wait_s, self._step)

    def _check_some(self) -> None:
        if self._round is None:
            self._round = self._examine()
        for _ in range(_SLICE):
            if next(self._round, StopIteration) is StopIteration:
                self._round = None
                return

    def _examine(self) -> Iterator[None]:
        """A round; it can be interrupted at each yield."""
        suspects: dict[tuple[str, int], object] = {}
        for found in self._find():
            if found is not None:
                key = (found.kind, id(found.what))
                if key in self._suspects:
                    self._heal(found)
                else:
                    suspects[key] = found.what
            yield
        self._suspects = suspects

    def _heal(self, found: Leftover) -> None:
        self.healed[found.kind] += 1
        self._context.count("left over", found.protocol, found.kind)
        log_event(
            _log,
            logging.ERROR,
            "left over",
            kind=found.kind,
            protocol=found.protocol,
            holder=found.name,
        )
        self._context.hub.callbacks.run("heal", found.heal)

    # Connections come and go between two steps: every list is a copy, and every object is checked
    # for being in it still.

    def _find(self) -> Iterator[Leftover | None]:
        yield from self._find_slots()
        yield from self._find_connections()
        yield from self._find_attachments()
        for source in self._sources:
            yield from source(self._context)

    def _find_slots(self) -> Iterator[Leftover | None]:
        context = self._context
        for slots in (context.connection_slots, context.http_slots):
            for occupant in slots.occupants():
                if occupant not in slots:
                    continue
                if occupant.is_gone:
                    protocol = occupant.protocol
                    leave = partial(slots.leave, occupant)
                    yield Leftover("slot", protocol, repr(occupant), occupant, leave)
                elif isinstance(occupant, Gateway) and occupant.id not in context.gateways:
                    yield _of("unlisted", occupant, partial(_list, context, occupant))
                yield None

    def _find_connections(self) -> Iterator[Leftover | None]:
        context = self._context
        for gateway in list(context.gateways.values()):
            if context.gateways.get(gateway.id) is not gateway:
                continue
            if gateway.is_gone:
                yield _of("connection", gateway, gateway.abandon)
            elif gateway.session.connection.closed:
                yield _of("unfinished", gateway, gateway.abandon)
            elif gateway not in context.connection_slots:
                yield _of(
                    "uncounted",
                    gateway,
                    partial(context.connection_slots.add, gateway, gateway.host),
                )
            yield None

    def _find_attachments(self) -> Iterator[Leftover | None]:
        hub, now = self._context.hub, self._context.now
        for backlog in hub.backlogs():
            for consumer in list(backlog.consumers):
                if not consumer.is_open:
                    yield _held("consumer", consumer, partial(backlog.detach, consumer, now()))
                elif _is_gone(consumer):
                    yield _held("consumer", consumer, partial(consumer.close, now()))
            yield None
        for subscriber in hub.subscriptions.subscribers():
            if not subscriber.is_open:
                leave = partial(hub.subscriptions.leave, subscriber)
                yield _held("subscriber", subscriber, leave)
            elif _is_gone(subscriber):
                yield _held("subscriber", subscriber, partial(subscriber.close, now()))
            yield None
        for provider in hub.services.all():
            if _is_gone(provider):
                yield _held("provider", provider, partial(provider.close, now()))
            yield None


def _is_gone(held: Attachment | Provider) -> bool:
    """Whether its peer is disconnected; receivers that can't be are not checked."""
    return bool(getattr(held.receiver, "is_gone", False))


def _of(kind: str, gateway: ConnectedPeer, heal: Callable[[], object]) -> Leftover:
    return Leftover(kind, gateway.protocol, gateway.id, gateway, heal)


def _held(kind: str, held: Attachment | Provider, heal: Callable[[], object]) -> Leftover:
    name = held.destination if isinstance(held, Attachment) else ", ".join(held.names)
    return Leftover(kind, held.peer.protocol, f"{held.peer.connection}: {name}", held, heal)


def _list(context: GatewayContext, gateway: ConnectedPeer) -> None:
    context.gateways[gateway.id] = gateway
