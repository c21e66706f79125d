"""Relink's gateway: the endpoint says what a link is for, and the link outlives its connections.

queue/Q, topic/T                 produce, on any channel
queue/Q?consume[&filter=]        consume, on our channel 0
topic/T?subscribe[&from=][&name=][&filter=]
service/S                        call: the answer to channel N comes on our channel N
service/S?serve                  serve: the other way round
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar, Final

from crosswire.commitlog.contract import Receipt
from crosswire.errors import Forbidden, HubError, InvalidDestination, LinkStateError
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.relink.consumers import ConsumeEnd
from crosswire.gateways.relink.link_end import Endpoint, LinkEnd, parse_endpoint
from crosswire.gateways.relink.links import Links
from crosswire.gateways.relink.services import ServeEnd
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.services import Provider
from crosswire.wire.contract import Connection, Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import HandshakeReceived
from crosswire.wire.relink.handshake import ConnectorHello, LinkTerms

__all__ = ["RelinkGateway"]

_OURS: Final = "service/crosswire."


class RelinkGateway(Gateway):
    protocol: ClassVar[str] = "relink"

    connection: RelinkConnection

    @classmethod
    def prepare(cls, context: GatewayContext) -> None:
        context.shared(Links)

    @classmethod
    def leftovers(cls, context: GatewayContext) -> Iterable[Leftover]:
        return context.shared(Links).leftovers()

    def connect(self, now: float) -> Connection:
        self.connection = RelinkConnection(
            "listener", now, limits=self.context.config.limits.relink
        )
        self._links = self.context.shared(Links)
        self._end: LinkEnd | None = None
        return self.connection

    def receive(self, events: list[Event]) -> None:
        if self._end is not None:
            self._end.receive(events)
            return
        for event in events:
            if isinstance(event, HandshakeReceived):
                self._on_handshake(event.hello)

    def broken(self, error: Exception) -> None:
        """What the end of the link had not dealt with yet, a resumed link would never repeat: so
        the link goes too, and what it holds goes to others."""
        if self._end is not None:
            self._links.forget(self._end)
        super().broken(error)

    def leave(self) -> None:
        end = self._release()
        if end is None or end.forgotten:
            return
        if end.link.ended:
            self._links.forget(end)
        else:
            self._links.part(end)

    def deliver(self, _attachment: Attachment, _deliveries: list[Delivery]) -> None:
        raise TypeError("deliveries go to the end of a link")

    def request(self, _provider: Provider, _requests: list[Delivery]) -> None:
        raise TypeError("requests go to the end of a link")

    def hold_back(self, _held: bool) -> None:
        """The link has a window of its own, which must not be lost with this connection."""
        if self._end is not None:
            self._end.steer()

    def holds(self, end: LinkEnd) -> bool:
        """Is it this connection that the link has?"""
        return self._end is end and not self.is_gone

    @property
    def is_busy(self) -> bool:
        return self._end is not None and self._end.is_busy

    # The handshake.

    def _on_handshake(self, hello: ConnectorHello) -> None:
        if self.connection.closed:
            return  # it ended in the same read
        terms = LinkTerms.of(hello)
        try:
            endpoint = self._understand(terms)
            known = self._links.find(hello.epoch, hello.link)
            if known is not None and self._take_up(known, terms):
                return
            if hello.require_old_link:
                self.connection.deny_link(self._links.epoch)
                return
            end = self._links.open(terms, self.principal, endpoint)
        except HubError as error:
            self.connection.refuse(str(error))
            return
        if endpoint.name:
            # The hello is all that the peer gets to know: its subscription is on disk by then.
            end.awaits_commit = True
            self.hub.committed().add_done_callback(
                self.owned(lambda receipt: self._accept_named(end, receipt))
            )
        else:
            end.once_written(lambda: self._accept_new(end))

    def _understand(self, terms: LinkTerms) -> Endpoint:
        """What the peer wants, if there is that, on these terms, and it may have it."""
        endpoint = parse_endpoint(terms.endpoint)
        if endpoint.right in ("call", "serve"):
            if terms.connector_id_size != terms.listener_id_size:
                raise InvalidDestination("a service needs channel ids of one size")
            if terms.connector_transactions or terms.listener_transactions:
                raise InvalidDestination("a service has no transactions")
        if endpoint.right == "serve" and endpoint.destination.startswith(_OURS):
            raise Forbidden(f"{endpoint.destination} is the hub's own")
        self.require(endpoint.right, endpoint.destination)
        return endpoint

    def _take_up(self, end: LinkEnd, terms: LinkTerms) -> bool:
        """Resume an old link; False if it turns out that it is not known after all."""
        if end.head.terms != terms or end.head.principal != self.principal:
            raise Forbidden("the link is another one")
        older = end.gateway
        if older is not None:
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
            self.connection.refuse(str(receipt.error))
            self.session.wake()

    def _accept_new(self, end: LinkEnd) -> None:
        if self.left or self.connection.closed:
            self._links.forget(end)
            return
        self._links.join(end, self)
        self.connection.accept(end.link)
        self._hold(end)
        self.session.wake()

    def _hold(self, end: LinkEnd) -> None:
        self._end = end
        end.joined()
        if isinstance(end, ConsumeEnd) and end.attachment is not None:
            self.attachments.add(end.attachment)
        elif isinstance(end, ServeEnd) and end.provider is not None:
            self.providers.add(end.provider)

    def _release(self) -> LinkEnd | None:
        """What the link holds is not this connection's to give back."""
        end, self._end = self._end, None
        self.attachments.clear()
        self.providers.clear()
        return end

    def give_way(self) -> None:
        """The link has a new connection."""
        self._release()
        self.connection.close()
        self.session.wake()
