"""eMQP's gateway for subscribers: a SUB socket gets every topic whose name begins as it asked.

    SUB socket   ← [topic, message] of every topic of the hub that matches

Topics of all protocols are delivered. There is no acknowledgement: being written settles.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from crosswire.errors import Forbidden, TooLargeToSend
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.emqp.gateway import EmqpGateway
from crosswire.hub.attachment import Attachment, Delivery
from crosswire.hub.subscribers import Subscriber
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import Subscribed, Unsubscribed

__all__ = ["SubscriberGateway"]

_SUBSCRIBER_WINDOW: Final = 16_384


class SubscriberGateway(EmqpGateway):
    """A SUB socket: one subscription to all topics of the hub, filtered by the peer's prefixes."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        super().__init__(context, listener)
        self._prefixes: set[bytes] = set()
        self._lengths: Counter[int] = Counter()
        """How many prefixes there are of each length."""
        self._subscriber: Subscriber | None = None
        self._unsettled: list[int] = []
        self._unwritten_bytes = 0
        self._most_bytes = context.config.connections.congested_bytes

    # Consume.

    def receive(self, events: list[Event]) -> None:
        """Follow the peer's subscriptions; a SUB socket sends many at once when it connects."""
        changed = False
        for event in events:
            if isinstance(event, Subscribed):
                changed |= self._add(event.topic)
            elif isinstance(event, Unsubscribed):
                changed |= self._remove(event.topic)
            else:
                self.act(event)
        if changed:
            self._follow()

    def _add(self, prefix: bytes) -> bool:
        if prefix in self._prefixes:
            return False
        self._prefixes.add(prefix)
        self._lengths[len(prefix)] += 1
        return True

    def _remove(self, prefix: bytes) -> bool:
        if prefix not in self._prefixes:
            return False
        self._prefixes.remove(prefix)
        self._lengths[len(prefix)] -= 1
        if not self._lengths[len(prefix)]:
            del self._lengths[len(prefix)]
        return True

    def _follow(self) -> None:
        if self._subscriber is not None:
            self._subscriber.renew()
            return
        attachment = self.hub.subscribe(
            "topic/#",
            self,
            self.context.now(),
            peer=self.peer,
            window=_SUBSCRIBER_WINDOW,
            names=self._wants,
        )
        assert isinstance(attachment, Subscriber)
        self._subscriber = attachment
        self.attachments.add(attachment)

    def _wants(self, topic: str) -> bool:
        """Whether the peer gets a topic; the hub keeps the answer until subscriptions change.

        A look for each length that a prefix of this name may have, not for each prefix: there may
        be tens of thousands.
        """
        name = topic.encode()
        if not any(name[:size] in self._prefixes for size in self._lengths if size <= len(name)):
            return False
        try:
            self.require("consume", f"topic/{topic}")
        except Forbidden:
            return False
        return True

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send publications; they settle when they are written and the peer reads."""
        if self.connection.closed:
            return
        send = self.connection.send_publication
        size_bytes = 0
        for delivery in deliveries:
            envelope = delivery.envelope
            try:
                send(envelope.destination[6:], envelope.payload)
            except TooLargeToSend:
                self.context.count("dropped", self.protocol, "too large")
            else:
                size_bytes += len(envelope.payload)
        self.session.wake()
        ids = [delivery.envelope.id for delivery in deliveries]
        if self.session.congested:
            self._unsettled += ids
        elif isinstance(attachment, Subscriber) and attachment.is_lagging:
            self._unsettled += ids
            self._pace(size_bytes)
        else:
            attachment.settle(ids, self.context.now())

    def _pace(self, size_bytes: int) -> None:
        """Limit what a subscriber that catches up is sent in one turn of the loop.

        What it missed may be more than fits into memory, and only after a write it is known
        whether the peer keeps up.
        """
        if not self._unwritten_bytes:
            # `wake` has planned the write for this turn already, so this runs after it.
            asyncio.get_running_loop().call_soon(self.owned(self._on_written))
        self._unwritten_bytes += size_bytes + 1
        if self._unwritten_bytes > self._most_bytes:
            self.hold_back(True)

    def _on_written(self) -> None:
        """The write of this turn is done: give more, unless the peer doesn't keep up."""
        self._unwritten_bytes = 0
        if not self.session.congested and not self.left:
            self.hold_back(False)
            self._settle()

    def handle_drain(self) -> None:
        """Settle what was sent while the peer did not read."""
        self._settle()

    def _settle(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        if self._subscriber is not None and unsettled:
            self._subscriber.settle(unsettled, self.context.now())
