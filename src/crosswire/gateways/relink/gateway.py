"""Relink's gateway: the handshake opens or resumes a link, whose end does the rest.

    queue/Q, topic/T                 → produce, on any channel (producers.py)
    queue/Q?consume, topic/T?subscribe
                                     ← consume, on our channel 0 (consumers.py)
    service/S                        → call: the answer to channel N comes on our channel N
    service/S?serve                  ← serve: the other way round (services.py)

A link outlives its connections: what a peer holds belongs to the link's end (link_end.py), which
the registry of links (links.py) keeps and restores after a restart. Relink can refuse only by
disconnecting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import ClassVar

from crosswire.commitlog.contract import Receipt
from crosswire.error_texts import public_text
from crosswire.errors import Forbidden, HubError, InvalidDestination, LinkStateError
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.gateway import HUB_SERVICES, Gateway
from crosswire.gateways.relink.consumers import ConsumeEnd
from crosswire.gateways.relink.endpoints import Endpoint, parse_endpoint
from crosswire.gateways.relink.link_end import LinkEnd
from crosswire.gateways.relink.links import Links
from crosswire.gateways.relink.services import ServeEnd
from crosswire.wire.contract import Connection, Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import HandshakeReceived
from crosswire.wire.relink.handshake import ConnectorHello, LinkTerms

__all__ = ["RelinkGateway"]


class RelinkGateway(Gateway):
    """One connection of a link."""

    protocol: ClassVar[str] = "relink"
    connection: RelinkConnection

    @classmethod
    def prepare(cls, context: GatewayContext) -> None:
        """Restore the stored links."""
        context.shared(Links)

    @classmethod
    def leftovers(cls, context: GatewayContext) -> Iterable[Leftover]:
        """Links without a connection that no timer would forget."""
        return context.shared(Links).leftovers()

    # Connecting.

    def connect(self, now: float) -> Connection:
        """Relink's connection, as listener."""
        self.connection = RelinkConnection(
            "listener", now, limits=self.context.config.limits.relink
        )
        self._links = self.context.shared(Links)
        self._end: LinkEnd | None = None
        return self.connection

    @classmethod
    def revocations(
        cls, context: GatewayContext, is_revoked: Callable[[str, str], bool]
    ) -> Iterable[Callable[[], None]]:
        """Forget links, connected or not, that their users may no longer have."""
        return context.shared(Links).revocations(is_revoked)

    def receive(self, events: list[Event]) -> None:
        """Pass events to the link's end; before there is one, answer the handshake."""
        if self._end is not None:
            self._end.receive(events)
            return
        for event in events:
            if isinstance(event, HandshakeReceived):
                self._on_handshake(event.hello)

    def broken(self, error: Exception) -> None:
        """Disconnect, and forget the link too: what its end had not processed, a resumed link
        would never repeat. What it holds goes to others."""
        if self._end is not None:
            self._links.forget(self._end)
        super().broken(error)

    def leave(self) -> None:
        """Forget a link that has ended; keep one that lost its connection, for a while."""
        end = self._release()
        if end is None or end.forgotten:
            return
        if end.link.ended:
            self._links.forget(end)
        else:
            self._links.part(end)

    def hold_back(self, _held: bool) -> None:
        """Steer the link's own window, which must not be lost with this connection."""
        if self._end is not None:
            self._end.steer()

    def holds(self, end: LinkEnd) -> bool:
        """Whether the link is still connected by this gateway."""
        return self._end is end and not self.is_gone

    @property
    def is_busy(self) -> bool:
        """Whether its link has something under way."""
        return self._end is not None and self._end.is_busy

    # The handshake.

    def _on_handshake(self, hello: ConnectorHello) -> None:
        if self.connection.closed:
            return  # it ended in the same read
        terms = LinkTerms.of(hello)
        try:
            endpoint = self._check_terms(terms)
            known = self._links.find(hello.epoch, hello.link)
            if known is not None and self._take_up(known, terms):
                return
            if hello.require_old_link:
                self.connection.deny_link(self._links.epoch)
                return
            end = self._links.open(terms, self.peer, endpoint)
        except HubError as error:
            self.connection.refuse(public_text(error))
            return
        if endpoint.name:
            # Relink has no answer to a subscription but the handshake's: it leaves after the
            # commit.
            end.awaits_commit = True
            self.hub.committed().add_done_callback(
                self.owned(lambda receipt: self._accept_named(end, receipt))
            )
        else:
            end.once_written(lambda: self._accept_new(end))

    def _check_terms(self, terms: LinkTerms) -> Endpoint:
        """The endpoint that the peer asks for. Raises HubError if it can't, or may not, have it."""
        endpoint = parse_endpoint(terms.endpoint)
        if endpoint.right in ("call", "serve"):
            if terms.connector_id_size != terms.listener_id_size:
                raise InvalidDestination("a service needs channel ids of one size")
            if terms.connector_transactions or terms.listener_transactions:
                raise InvalidDestination("a service has no transactions")
        if endpoint.right == "serve" and endpoint.destination.startswith(HUB_SERVICES):
            raise Forbidden(f"{endpoint.destination} is the hub's own")
        self.require(endpoint.right, endpoint.destination)
        return endpoint

    def _take_up(self, end: LinkEnd, terms: LinkTerms) -> bool:
        """Resume an old link; False if it can't be restored, or has ended.

        Raises Forbidden unless user, endpoint, id sizes and flags are the same: an id alone is no
        proof.
        """
        if end.head.terms != terms or end.head.principal != self.principal:
            raise Forbidden("the link was agreed with another user, endpoint, id sizes or flags")
        older = end.gateway
        if older is not None:
            # The peer reconnected before we noticed that its old connection is dead.
            self.log(logging.INFO, "took over", link=older.id)
            older.give_way()
        try:
            self._links.join(end, self)
        except LinkStateError as error:
            self.log(logging.WARNING, "link lost", description=str(error))
            self._links.forget(end)
            return False
        if end.link.ended:
            self._links.forget(end)
            return False
        self.connection.accept(end.link)
        self._hold(end)
        return True

    def _accept_named(self, end: LinkEnd, receipt: Receipt) -> None:
        end.awaits_commit = False
        if receipt.error is None:
            self._accept_new(end)
            return
        self._links.forget(end)
        if not self.left and not self.connection.closed:
            self.connection.refuse(public_text(receipt.error))
            self.session.wake()

    def _accept_new(self, end: LinkEnd) -> None:
        """Agree on a new link, which is written now."""
        # The peer may have gone while the store was writing.
        if self.left or self.connection.closed:
            self._links.forget(end)
            return
        self._links.join(end, self)
        self.connection.accept(end.link)
        self._hold(end)
        self.session.wake()

    def _hold(self, end: LinkEnd) -> None:
        """This connection is the link's now; what the link consumes and serves is shown as its."""
        self._end = end
        end.joined()
        if isinstance(end, ConsumeEnd) and end.attachment is not None:
            self.attachments.add(end.attachment)
        elif isinstance(end, ServeEnd) and end.provider is not None:
            self.providers.add(end.provider)

    def _release(self) -> LinkEnd | None:
        """Part from the link; what that holds must not be given back with this connection."""
        end, self._end = self._end, None
        self.attachments.clear()
        self.providers.clear()
        return end

    def give_way(self) -> None:
        """Disconnect: the link has a new connection, or its user may no longer have it."""
        self._release()
        self.connection.close()
        self.session.wake()
