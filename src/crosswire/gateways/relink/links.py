"""The links of a hub: found by their id, restored after a restart, forgotten in time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from struct import Struct as Layout
from typing import Final

from crosswire.envelope import MICROSECONDS
from crosswire.errors import (
    CrosswireError,
    Forbidden,
    HubError,
    LinkStateError,
    QuotaExceeded,
    RecordDamaged,
)
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.relink.consumers import ConsumeEnd
from crosswire.gateways.relink.endpoints import Endpoint, parse_endpoint
from crosswire.gateways.relink.link_end import LinkConnection, LinkEnd
from crosswire.gateways.relink.link_records import Head, LinkRecords, heads, wipe
from crosswire.gateways.relink.producers import ProduceEnd, TransactEnd
from crosswire.gateways.relink.services import CallEnd, ServeEnd
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.shares import Quota
from crosswire.logs import log_event
from crosswire.wire.relink.handshake import LinkTerms

__all__ = ["Links"]

_log = logging.getLogger("crosswire.gateways")

_EPOCH: Final = "relink-epoch"
_KEY: Final = b"epoch"
_IDS: Final = 1 << 63
_OVERDUE_S: Final = 60.0
"""How long after its time a link is forgotten as a leftover, if its timer did not do it."""
_EPOCH_ROW: Final = Layout(">QQ")
"""The epoch, and how many power cuts the store had seen when it was drawn."""


class _CutLink:
    """A link without a connection: what it holds counts for its owner's memory until it has one."""

    def __init__(self, links: Links, end: LinkEnd) -> None:
        self.end = end
        self.since = time.monotonic()
        self._links = links
        context = links.context
        owner = end.holder if not context.access.open else end.holder.removeprefix("@") or None
        self.account = context.budget.open(self, owner)
        self.measure_memory()

    def measure_memory(self) -> None:
        """Report what the link holds now."""
        self.account.add(self.end.held_bytes - self.account.held_bytes)

    def restrain(self, restrained: bool) -> None:
        """Nothing is read from it anyway."""

    def evict(self) -> None:
        """Forget the link: memory is short."""
        self._links.context.count("evicted", "relink")
        self._links.forget(self.end)


class Links:
    """All links; one for each hub.

    `epoch` is drawn once for a data directory and stored, so that links survive a restart. A new
    one is drawn only when stored links can't be trusted: after damage, or after a power cut, which
    may have taken rows that were written without fsync. Peers then learn that their link is gone.
    The number of power cuts is stored with the epoch: a start may end before it has drawn one.
    """

    def __init__(self, context: GatewayContext) -> None:
        self.context = context
        self._ends: dict[int, LinkEnd] = {}
        self._cut: dict[int, _CutLink] = {}
        """Links that lost their connection, the oldest first."""
        self._has_ended = False
        context.on_ended.append(self._release_all)
        self._share = Quota("links", 1, 1.0)
        self._configure_share()
        store = context.hub.store
        stored, power_losses = self._stored_epoch()
        self.epoch = stored
        try:
            if not stored or power_losses != store.power_losses:
                raise LinkStateError("links of another epoch")
            self._recover()
        except LinkStateError:
            self._renew(stored)

    def _stored_epoch(self) -> tuple[int, int]:
        """0 if there is none; and the power cuts before it."""
        hub = self.context.hub
        stored = hub.store.get(_EPOCH, _KEY)
        if stored is None:
            return 0, 0
        if len(stored) == _EPOCH_ROW.size:
            epoch, power_losses = _EPOCH_ROW.unpack(stored)
            if epoch < _IDS:
                return epoch, power_losses
        error = RecordDamaged("the epoch of links can't be read")
        hub.damage.set_aside_state(_EPOCH, _KEY, stored, error)
        return 0, 0

    def _recover(self) -> None:
        """Restore every link whose records can be read.

        A link with a record that can't be read is forgotten alone, as if it had been disconnected
        for too long: what it held goes to others, and its peer gets a new one. Raises
        LinkStateError where the store skipped a part of its files: any rows may be missing then.
        """
        hub = self.context.hub
        passed_over = hub.store.unreadable_ranges
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
        if hub.store.unreadable_ranges > passed_over:
            raise LinkStateError("rows of links are damaged")
        for end in ends:
            try:
                self._take_up(end)
            except Exception as error:
                # The configuration or rights may have changed: what it held goes to others.
                hub.damage.report(RecordDamaged(f"link {end.id:x} is forgotten: {error}"))
                _log.warning("link forgotten", exc_info=not isinstance(error, HubError))
                self._drop(end)
                end.forget()

    def _take_up(self, end: LinkEnd) -> None:
        """Attach it to the hub before anybody else gets what it holds. Raises HubError."""
        if not self._is_allowed(end):
            raise Forbidden("its user may no longer have it")
        if not isinstance(end, ConsumeEnd):
            end.discard()
        end.attach()
        self._keep(end)
        self._start_timer(end)

    def _renew(self, stored: int) -> None:
        store = self.context.hub.store
        wipe(store)
        self.epoch = max(int(self.context.now() * MICROSECONDS), stored + 1)
        store.save(_EPOCH, _KEY, _EPOCH_ROW.pack(self.epoch, store.power_losses))
        self.context.hub.commits.request()

    @staticmethod
    def kind_of(endpoint: Endpoint, terms: LinkTerms) -> type[LinkEnd]:
        """The class of the end of a link with this endpoint and these terms."""
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
        """The link that a connector presents; None if it is unknown or of another epoch."""
        return self._ends.get(identifier) if epoch == self.epoch else None

    def open(self, terms: LinkTerms, peer: LedgerPeer, endpoint: Endpoint) -> LinkEnd:
        """A new link; its first connection learns of it when it is written. Raises HubError."""
        holder = self.context.hub.holders.of(peer.principal, peer.connection)
        self._make_room(holder)
        identifier = 0
        while not identifier or identifier in self._ends:
            identifier = 1 + secrets.randbelow(_IDS - 1)
        end = self._make(identifier, Head(terms, peer.principal), endpoint)
        end.peer, end.holder = peer, holder
        end.begin()
        try:
            end.attach()
        except Exception:
            # Its rows are saved already: a link that could not be made must not be restored.
            end.forget()
            raise
        self._keep(end)
        return end

    def _configure_share(self) -> None:
        config = self.context.config
        self._share.configure(config.connections.connections, config.limits.share)

    def _make_room(self, holder: str) -> None:
        """Peers that disconnect without a shutdown must not fill the memory: the link of the same
        holder that was disconnected first is forgotten, never one of others. Raises
        QuotaExceeded."""
        self._configure_share()
        try:
            self._share.check(holder)
        except QuotaExceeded:
            own = (each.end for each in self._cut.values() if each.end.holder == holder)
            oldest = next(own, None)
            if oldest is None:
                raise
            self.forget(oldest)

    def _keep(self, end: LinkEnd) -> None:
        self._ends[end.id] = end
        self._share.add(end.holder)

    def _drop(self, end: LinkEnd) -> None:
        if self._ends.pop(end.id, None) is not None:
            self._share.remove(end.holder)
        self._rejoin(end)

    def _rejoin(self, end: LinkEnd) -> None:
        """It is no link without a connection, or not any more."""
        cut = self._cut.pop(end.id, None)
        if cut is not None:
            cut.account.close()

    def join(self, end: LinkEnd, gateway: LinkConnection) -> None:
        """Connect a link. Raises LinkStateError."""
        end.join(gateway)
        self._rejoin(end)

    def part(self, end: LinkEnd) -> None:
        """Its connection is lost: its peer may resume it for `link_s`."""
        end.part()
        self.context.hub.callbacks.run("relink left", end.left)
        self._start_timer(end)

    def forget(self, end: LinkEnd) -> None:
        """Remove a link for good; what it holds goes to others at once."""
        if not end.forgotten:
            self._drop(end)
            end.forget()

    def _release_all(self) -> None:
        """The hub has ended: its links are in its store, or in that of the next leader."""
        self._has_ended = True
        for cut in self._cut.values():
            cut.account.close()
        self._cut.clear()

    def revocations(self, is_revoked: Callable[[str, str], bool]) -> Iterator[Callable[[], None]]:
        """For each link what forgets it, with its connection, if its user may no longer have it."""
        for end in list(self._ends.values()):
            yield partial(self._revoke, end, is_revoked)

    def _revoke(self, end: LinkEnd, is_revoked: Callable[[str, str], bool]) -> None:
        connection = "" if end.gateway is None else end.gateway.id
        if not is_revoked(end.head.principal, connection) and self._is_allowed(end):
            return
        if end.gateway is not None:
            end.gateway.give_way()
        self.forget(end)

    def _is_allowed(self, end: LinkEnd) -> bool:
        endpoint = end.endpoint
        return self.context.access.may(end.head.principal, endpoint.right, endpoint.destination)

    def leftovers(self) -> Iterator[Leftover]:
        """Links that no event and no timer would ever forget."""
        overdue = time.monotonic() - self.context.config.limits.relink.link_s - _OVERDUE_S
        for end in list(self._ends.values()):
            if end.gateway is not None:
                if not end.gateway.holds(end):
                    yield self._leftover(end, self._release)
            elif end.id not in self._cut:
                # A new one has no connection until the store has written it.
                if not end.awaits_write:
                    yield self._leftover(end, self._start_timer)
            elif self._cut[end.id].since < overdue:
                yield self._leftover(end, self.forget)

    def _leftover(self, end: LinkEnd, heal: Callable[[LinkEnd], None]) -> Leftover:
        return Leftover("link", "relink", end.head.terms.endpoint, end, partial(heal, end))

    def _release(self, end: LinkEnd) -> None:
        """Do what its connection should have done when it was lost."""
        if end.link.ended:
            self.forget(end)
        else:
            self.part(end)

    def _start_timer(self, end: LinkEnd) -> None:
        """Forget the link after `link_s`, unless it is connected by then."""
        self._rejoin(end)
        if self._has_ended:
            # A socket that closes late: the hub's timers, and who closes accounts, are gone.
            return
        self._cut[end.id] = _CutLink(self, end)
        cuts = end.cuts

        def expire(_now: float) -> None:
            # `cuts`: it may have been connected and disconnected again meanwhile.
            if end.gateway is None and end.cuts == cuts and not end.forgotten:
                self.context.count("forgotten", "relink")
                self.forget(end)

        link_s = self.context.config.limits.relink.link_s
        self.context.hub.call_at(self.context.now() + link_s, expire)
