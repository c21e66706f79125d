"""The base of eMQP's five gateways: identity at the broker, and what is ignored and counted.

    clients.py          ClientGateway: clients and schedulers; PublisherGateway: publishers
    subscribers.py      SubscriberGateway: SUB sockets
    workers.py          WorkerGateway: workers
    administration.py   AdminGateway: status and shutdown

They share a `Broker`. What a peer may not do, or what makes no sense, is ignored and counted: eMQP
has no refusals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from crosswire.errors import ConnectionRejected, CrosswireError
from crosswire.gateways.context import GatewayContext, Leftover
from crosswire.gateways.emqp.broker import Broker
from crosswire.gateways.gateway import Gateway
from crosswire.wire.contract import Connection, Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import CommandIgnored, PeerReady
from crosswire.wire.zmtp.curve import encode_key

__all__ = ["EmqpGateway"]


class EmqpGateway(Gateway):
    """A peer at one of eMQP's five listeners."""

    protocol: ClassVar[str] = "emqp"
    connection: EmqpConnection

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self.broker = context.shared(Broker)
        self.identity = b""

    @classmethod
    def leftovers(cls, context: GatewayContext) -> Iterable[Leftover]:
        """Identities, workers and schedulers whose connection is gone."""
        return context.shared(Broker).leftovers()

    @property
    def name(self) -> str:
        """Its identity as text for status reports."""
        return self.identity.decode(errors="backslashreplace") or self.id

    # Connecting.

    def connect(self, now: float) -> Connection:
        """eMQP's connection, as broker, on the socket type of its listener."""
        self.connection = EmqpConnection(
            "broker",
            now,
            listener=self.listener,
            limits=self.context.config.limits.emqp,
            mechanism=self.broker.mechanism,
            next_id=self.broker.next_id,
            unix_offset_s=self.context.now() - now,
        )
        return self.connection

    def receive(self, events: list[Event]) -> None:
        """Act on each event; gateways with many of a kind override this to take them in batches."""
        for event in events:
            self.act(event)

    def act(self, event: Event) -> None:
        """Act on one event. Overridden for the commands of a listener."""
        if isinstance(event, PeerReady):
            self._on_ready(event)
        elif isinstance(event, CommandIgnored):
            self.ignore(event.error)

    def _on_ready(self, event: PeerReady) -> None:
        if event.public_key is not None:
            principal = self.context.access.by_curve_key(encode_key(event.public_key))
            if principal is not None:
                self.identify(principal)
        if self in self.context.newcomers:
            # Nothing of what follows the handshake could identify it.
            rejected = ConnectionRejected("the handshake does not identify a user")
            self.connection.fail(rejected)
            return
        # After the principal is known: an identity can be taken over by the same user only.
        self.identity = self.broker.join(self, event.identity)
        self.client_name = event.identity.decode(errors="backslashreplace")
        if self.broker.stopping:
            self.close()

    def ignore(self, error: CrosswireError) -> None:
        """Count what has no effect: eMQP can't refuse, and must not fail."""
        self.context.count("ignored", self.protocol, type(error).__name__)

    def leave(self) -> None:
        """Free its identity."""
        self.broker.part(self)

    def close(self) -> None:
        """Send the goodbye and disconnect."""
        self.connection.close()
        self.session.wake()

    def wind_down(self) -> None:
        """Take nothing new from this peer: administration stops eMQP."""
        self.connection.paused = True
        self.session.wake()

    def give_result(self, result: bytes, msgid: str) -> None:  # noqa: ARG002
        """Count a result for a peer that sends no requests."""
        self.context.count("unclaimed", self.protocol)
