"""The links of a hub: found by their id, taken up after a restart, forgotten in time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from crosswire.envelope import MICROSECONDS
from crosswire.errors import CrosswireError, HubError, LinkStateError, RecordDamaged
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.relink.consumers import ConsumeEnd
from crosswire.gateways.relink.link_end import Endpoint, LinkEnd, parse_endpoint
from crosswire.gateways.relink.link_records import Head, LinkRecords, heads, wipe
from crosswire.gateways.relink.producers import ProduceEnd, TransactEnd
from crosswire.gateways.relink.services import CallEnd, ServeEnd
from crosswire.logs import log_event
from crosswire.wire.relink.handshake import LinkTerms

if TYPE_CHECKING:
    from crosswire.gateways.relink.gateway import RelinkGateway

__all__ = ["Links"]

_log = logging.getLogger("crosswire.gateways")

_EPOCH: Final = "relink-epoch"
_KEY: Final = b"epoch"
_IDS: Final = 1 << 63
_OVERDUE_S: Final = 60.0
"""How much later than it should have been a link is forgotten by who looks for leftovers."""
_EPOCH_BYTES: Final = 8


class Links:
    """One for each hub. `epoch` is drawn once for a data directory, and anew only when what is
    stored of links can't be trusted: damage, or a machine that stopped under us."""

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self._ends: dict[int, LinkEnd] = {}
        self._cut: dict[int, float] = {}
        """Since when links have no connection, by a clock that nobody sets."""
        store = context.hub.store
        stored = self._stored_epoch()
        self.epoch = stored
        try:
            if not stored or store.power_lost:
                raise LinkStateError("links of another epoch")
            self._recover()
        except LinkStateError:
            self._renew(stored)

    def _stored_epoch(self) -> int:
        """0 if there is none."""
        hub = self.context.hub
        stored = hub.store.get(_EPOCH, _KEY)
        if stored is None:
            return 0
        epoch = int.from_bytes(stored)
        if len(stored) != _EPOCH_BYTES or epoch >= _IDS:
            error = RecordDamaged("the epoch of links can't be read")
            hub.damage.set_aside_state(_EPOCH, _KEY, stored, error)
            return 0
        return epoch

    def _recover(self) -> None:
        """Take up every link that can be read.

        A link with a record that can't is forgotten alone, as if it had been cut for too long:
        what it held goes to others, and its peer gets a new one. Raises LinkStateError where the
        store passed over a part of its files: nobody knows then which rows are missing.
        """
        hub = self.context.hub
        passed_over = hub.store.ranges_passed_over
        ends = []
        for identifier, head in heads(hub).items():
            try:
                end = self._make(identifier, head, parse_endpoint(head.terms.endpoint))
                end.load()
            except CrosswireError as error:
                hub.damage.report(RecordDamaged(f"link {identifier:x} is forgotten: {error}"))
                log_event(_log, logging.WARNING, "link forgotten", description=str(error))
                LinkRecords(hub, identifier).drop_all()
            else:
                ends.append(end)
        if hub.store.ranges_passed_over > passed_over:
            raise LinkStateError("rows of links are damaged")
        for end in ends:
            try:
                self._take_up(end)
            except Exception as error:
                # The configuration may have changed: what it held goes to others.
                hub.damage.report(RecordDamaged(f"link {end.id:x} is forgotten: {error}"))
                _log.warning("link forgotten", exc_info=not isinstance(error, HubError))
                self._ends.pop(end.id, None)
                end.forget()

    def _take_up(self, end: LinkEnd) -> None:
        """Nobody else gets what it holds. Raises HubError."""
        if not isinstance(end, ConsumeEnd):
            end.discard()
        end.attach()
        self._ends[end.id] = end
        self._run_clock(end)

    def _renew(self, stored: int) -> None:
        store = self.context.hub.store
        wipe(store)
        self.epoch = max(int(self.context.now() * MICROSECONDS), stored + 1)
        store.save(_EPOCH, _KEY, self.epoch.to_bytes(_EPOCH_BYTES))
        store.request()

    @staticmethod
    def kind_of(endpoint: Endpoint, terms: LinkTerms) -> type[LinkEnd]:
        match endpoint.right:
            case "produce":
                return TransactEnd if terms.connector_transactions else ProduceEnd
            case "consume":
                return ConsumeEnd
            case "call":
                return CallEnd
            case _:
                return ServeEnd

    def _make(self, identifier: int, head: Head, endpoint: Endpoint) -> LinkEnd:
        return self.kind_of(endpoint, head.terms)(self, identifier, head, endpoint)

    # Links of peers.

    def find(self, epoch: int, identifier: int) -> LinkEnd | None:
        return self._ends.get(identifier) if epoch == self.epoch else None

    def open(self, terms: LinkTerms, principal: str, endpoint: Endpoint) -> LinkEnd:
        """A new link; its first connection can be told when it is written. Raises HubError."""
        identifier = 0
        while not identifier or identifier in self._ends:
            identifier = 1 + secrets.randbelow(_IDS - 1)
        end = self._make(identifier, Head(terms, principal), endpoint)
        end.begin()
        try:
            end.attach()
        except Exception:
            # Whatever was wrong: a link that could not be made must not be there after a restart.
            end.forget()
            raise
        if len(self._ends) >= self.context.config.connections.connections and self._cut:
            # Peers that come and go without a shutdown must not fill the memory.
            self.forget(self._ends[next(iter(self._cut))])
        self._ends[identifier] = end
        return end

    def join(self, end: LinkEnd, gateway: RelinkGateway) -> None:
        """A connection takes it up. Raises LinkStateError."""
        end.join(gateway)
        self._cut.pop(end.id, None)

    def part(self, end: LinkEnd) -> None:
        """Its connection is gone: it may come back, for a while."""
        end.part()
        self.context.hub.callbacks.run("relink left", end.left)
        self._run_clock(end)

    def forget(self, end: LinkEnd) -> None:
        if not end.forgotten:
            self._ends.pop(end.id, None)
            self._cut.pop(end.id, None)
            end.forget()

    def leftovers(self) -> Iterator[Leftover]:
        """Links that nobody would ever forget."""
        overdue = time.monotonic() - self.context.config.limits.relink.link_s - _OVERDUE_S
        for end in list(self._ends.values()):
            if end.gateway is not None:
                if not end.gateway.holds(end):
                    yield self._leftover(end, self._release)
            elif end.id not in self._cut:
                # A new one waits for the store before its first connection is told of it.
                if not end.awaits_write:
                    yield self._leftover(end, self._run_clock)
            elif self._cut[end.id] < overdue:
                yield self._leftover(end, self.forget)

    def _leftover(self, end: LinkEnd, heal: Callable[[LinkEnd], None]) -> Leftover:
        return Leftover("link", "relink", end.head.terms.endpoint, end, partial(heal, end))

    def _release(self, end: LinkEnd) -> None:
        """Its connection is gone, and did not say so."""
        if end.link.ended:
            self.forget(end)
        else:
            self.part(end)

    def _run_clock(self, end: LinkEnd) -> None:
        self._cut[end.id] = time.monotonic()
        cuts = end.cuts

        def look(_now: float) -> None:
            if end.gateway is None and end.cuts == cuts and not end.forgotten:
                self.context.count("forgotten", "relink")
                self.forget(end)

        link_s = self.context.config.limits.relink.link_s
        self.context.hub.call_at(self.context.now() + link_s, look)
