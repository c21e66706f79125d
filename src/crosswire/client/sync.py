"""The client for programs without asyncio: the same verbs, which wait.

An event loop in a thread of its own does the work, so that the connection is kept while the program
does something else. Any thread may use a client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Self, TypeVar

from crosswire.client.client import Client, ClientSubscription, ProvidedService
from crosswire.client.connect import connect
from crosswire.client.message import Message
from crosswire.envelope import Property
from crosswire.errors import ConnectionLost, RequestTimeout

__all__ = ["SyncClient", "SyncMessage", "SyncService", "SyncSubscription", "connect_sync"]

T = TypeVar("T")


class _LoopThread:
    """An event loop that runs in a thread until it is stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that forgets to close its client must still be able to end.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="crosswire", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. An interrupted wait cancels it."""
        if self._loop.is_closed():
            work.close()
            raise ConnectionLost("the client is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def connect_sync(url: str, **options: Any) -> SyncClient:
    """As `crosswire.connect`, for programs without asyncio; it is connected when this returns.

        with crosswire.connect_sync("emp://127.0.0.1") as hub:
            hub.publish("queue/orders", {"item": "tea"})
            for message in hub.subscribe("queue/orders"):
                message.settle()

    Takes the same options and raises the same errors.
    """
    thread = _LoopThread()
    try:
        return SyncClient(thread, thread.run(_entered(url, options)))
    except BaseException:
        thread.stop()
        raise


async def _entered(url: str, options: dict[str, Any]) -> Client:
    return await connect(url, **options).__aenter__()


class SyncClient:
    """As `crosswire.Client`, with methods that wait; made by `crosswire.connect_sync`."""

    def __init__(self, thread: _LoopThread, client: Client) -> None:
        self._thread = thread
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As `Client.close`."""
        try:
            self._thread.run(self._client.close())
        except ConnectionLost:
            return
        finally:
            self._thread.stop()

    def publish(
        self,
        destination: str,
        body: Any,
        *,
        properties: Mapping[str, Property] | None = None,
        content_type: str = "",
        timeout_s: float | None = None,
    ) -> int | None:
        """As `Client.publish`."""
        return self._thread.run(
            self._client.publish(
                destination,
                body,
                properties=properties,
                content_type=content_type,
                timeout_s=timeout_s,
            )
        )

    def publish_many(
        self,
        destination: str,
        bodies: Iterable[Any],
        *,
        properties: Mapping[str, Property] | None = None,
        timeout_s: float | None = None,
    ) -> list[int | None]:
        """As `Client.publish_many`."""
        return self._thread.run(
            self._client.publish_many(
                destination, bodies, properties=properties, timeout_s=timeout_s
            )
        )

    def call(
        self,
        service: str,
        body: Any = None,
        *,
        properties: Mapping[str, Property] | None = None,
        content_type: str = "",
        timeout_s: float | None = None,
    ) -> Message:
        """As `Client.call`."""
        return self._thread.run(
            self._client.call(
                service,
                body,
                properties=properties,
                content_type=content_type,
                timeout_s=timeout_s,
            )
        )

    def serve(self, service: str, handler: Callable[[Message], Any]) -> SyncService:
        """As `Client.serve`, with a plain function, which runs in a thread of its own."""

        async def handle(call: Message) -> Any:
            return await asyncio.to_thread(handler, call)

        return SyncService(self._thread, self._thread.run(self._client.serve(service, handle)))

    def subscribe(
        self,
        destination: str,
        *,
        name: str = "",
        filter: str = "",  # noqa: A002  what everybody calls it
        start: str | int | datetime = "",
        window: int = 32,
    ) -> SyncSubscription:
        """As `Client.subscribe`; it is subscribed when this returns."""

        async def begin() -> ClientSubscription:
            subscription = self._client.subscribe(
                destination, name=name, filter=filter, start=start, window=window
            )
            return await subscription.__aenter__()

        return SyncSubscription(self._thread, self._thread.run(begin()))

    def schedule(
        self,
        destination: str,
        body: Any,
        *,
        interval_s: float | None = None,
        cron: str | None = None,
        nohaste: bool = False,
        run_count: int | None = None,
        properties: Mapping[str, Property] | None = None,
    ) -> str:
        """As `Client.schedule`."""
        return self._thread.run(
            self._client.schedule(
                destination,
                body,
                interval_s=interval_s,
                cron=cron,
                nohaste=nohaste,
                run_count=run_count,
                properties=properties,
            )
        )

    def unschedule(self, schedule: str) -> None:
        """As `Client.unschedule`."""
        self._thread.run(self._client.unschedule(schedule))


class SyncMessage:
    """As `crosswire.Message`, of which it has all attributes, with methods that wait."""

    def __init__(self, thread: _LoopThread, message: Message) -> None:
        self._thread = thread
        self.message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    def __repr__(self) -> str:
        return repr(self.message)

    def settle(self) -> None:
        """As `Message.settle`."""
        self._thread.run(self.message.settle())

    def refuse(self, reason: str = "") -> None:
        """As `Message.refuse`."""
        self._thread.run(self.message.refuse(reason))

    def extend(self, lease_s: float) -> None:
        """As `Message.extend`."""
        self._thread.run(self.message.extend(lease_s))


class SyncSubscription:
    """As `crosswire.client.ClientSubscription`: an iterator that waits for messages."""

    def __init__(self, thread: _LoopThread, subscription: ClientSubscription) -> None:
        self._thread = thread
        self._subscription = subscription

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[SyncMessage]:
        messages = aiter(self._subscription)
        while True:
            try:
                yield SyncMessage(self._thread, self._thread.run(_next(messages)))
            except StopAsyncIteration:
                return

    def receive(self, timeout_s: float | None = None) -> SyncMessage:
        """As `ClientSubscription.receive`."""
        message = self._thread.run(self._subscription.receive(timeout_s))
        return SyncMessage(self._thread, message)

    def close(self) -> None:
        """As `ClientSubscription.close`."""
        self._thread.run(self._subscription.close())


class SyncService:
    """As `crosswire.client.ProvidedService`."""

    def __init__(self, thread: _LoopThread, service: ProvidedService) -> None:
        self._thread = thread
        self._service = service

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it ends. Raises the hub's refusal to go on, or RequestTimeout."""

        async def wait() -> None:
            try:
                await asyncio.wait_for(asyncio.shield(self._service.ended), timeout_s)
            except TimeoutError:
                raise RequestTimeout(f"{self._service!r} goes on") from None

        self._thread.run(wait())

    def close(self) -> None:
        """As `ProvidedService.close`."""
        self._thread.run(self._service.close())


async def _next(messages: Any) -> Message:
    message: Message = await anext(messages)
    return message
