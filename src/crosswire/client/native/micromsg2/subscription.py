"""A MicroMsg2 subscription as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from crosswire.client.native.micromsg2.peer import MicroMsg2Delivery
from crosswire.errors import CrosswireError

__all__ = ["MicroMsg2Subscription"]


class SubscribingClient(Protocol):
    """The client that a subscription belongs to."""

    async def start_subscription(self, subscription: MicroMsg2Subscription) -> None:
        """Subscribe, now and on every later connection."""

    def end_subscription(self, subscription: MicroMsg2Subscription) -> None:
        """Unsubscribe."""

    def relieve(self) -> None:
        """Read from the server again, once the subscriptions have caught up."""


class MicroMsg2Subscription:
    """The messages of a destination, as an asynchronous iterator that outlives its connection.

    Unless `manual`, a delivery is acknowledged when the next one is requested, or when the block is
    left without an exception.
    """

    def __init__(
        self,
        client: SubscribingClient,
        destination: str,
        arguments: dict[str, Any],
        *,
        manual: bool,
    ) -> None:
        self.destination = destination
        self.arguments = arguments
        self._client = client
        self._manual = manual
        self._pattern = _whole(destination).split("/")
        self._held: deque[MicroMsg2Delivery] = deque()
        self._handed_out: MicroMsg2Delivery | None = None
        self._error: CrosswireError | None = None
        self._closed = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> MicroMsg2Subscription:
        await self._client.start_subscription(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # With an exception the last message was not processed: it goes to another consumer.
        if kind is None:
            self._acknowledge_last()
        self.close()

    def __aiter__(self) -> MicroMsg2Subscription:
        return self

    async def __anext__(self) -> MicroMsg2Delivery:
        self._acknowledge_last()
        while not self._held:
            # After what is held: that was delivered before the error.
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        delivery = self._held.popleft()
        self._client.relieve()
        if not self._manual:
            self._handed_out = delivery
        return delivery

    def close(self) -> None:
        """Unsubscribe, and end the iteration; what was not acknowledged goes to others."""
        self._client.end_subscription(self)
        # After the unsubscribe these acks settle nothing; they only free the window.
        self._acknowledge_last()
        for delivery in self._held:
            delivery.acknowledge()
        self._held.clear()
        self._client.relieve()
        self._closed = True
        self._changed.set()

    def takes(self, destination: str) -> bool:
        """Whether a destination matches; `+` matches one level, `#` all that follow."""
        levels = _whole(destination).split("/")
        for at, part in enumerate(self._pattern):
            if part == "#":
                return True
            if at == len(levels) or part not in ("+", levels[at]):
                return False
        return len(levels) == len(self._pattern)

    def deliver(self, delivery: MicroMsg2Delivery) -> None:
        """Queue a delivery for the iteration."""
        self._held.append(delivery)
        self._changed.set()

    def fail(self, error: CrosswireError) -> None:
        """End the iteration with an error, after what was delivered before."""
        self._error = error
        self._changed.set()

    @property
    def held(self) -> int:
        """Deliveries that wait for the iteration."""
        return len(self._held)

    def _acknowledge_last(self) -> None:
        last, self._handed_out = self._handed_out, None
        if last is not None:
            last.acknowledge()


def _whole(destination: str) -> str:
    """A bare name is a queue."""
    return destination if "/" in destination else f"queue/{destination}"
