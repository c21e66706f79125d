"""eMQP's client: requests, publications and schedules.

async with EmqpClient("127.0.0.1") as client:
    total = await client.call("billing.sum_up", [2026, 11], queue="reports")

The broker may be Crosswire or a deployed EventMQ. Jobs are done by workers: see `worker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crosswire.client.native.dial import Addresses, Backoff, StayingClient, within
from crosswire.client.native.emqp.peer import WITH_PINGS, EmqpPeer, connect_peer
from crosswire.client.native.emqp.subscriber import SUBSCRIBERS_PORT, EmqpSubscriber
from crosswire.envelope import Property
from crosswire.errors import ConnectionLost, LocalProtocolError, RequestFailed
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.events import ReplyReceived
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import failure_of, serialize_job, value_of
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["EmqpClient"]

CLIENTS_PORT = 47291


class _ClientPeer(EmqpPeer):
    """A client's broker, and the requests that wait for a receipt or a result."""

    def __init__(self) -> None:
        super().__init__()
        self._receipts: dict[str, asyncio.Future[bytes]] = {}
        self._results: dict[str, asyncio.Future[bytes]] = {}

    async def request(
        self, queue: str, headers: Headers, message: bytes, wait_s: float | None
    ) -> bytes:
        """The result if one is requested, else the receipt."""
        msgid = self.send_request(queue, headers, message)
        waiting = self._results if headers.reply_requested else self._receipts
        future = waiting[msgid] = asyncio.get_running_loop().create_future()
        self.session.wake()
        what = "no result" if headers.reply_requested else "no receipt"
        try:
            return await within(wait_s, f"{what} from queue {queue}", future)
        finally:
            waiting.pop(msgid, None)

    async def request_all(
        self, queue: str, jobs: Sequence[tuple[Headers, bytes]], wait_s: float | None
    ) -> None:
        """Send requests in one write, and wait until the broker has receipts for all."""
        msgids = [self.send_request(queue, headers, message) for headers, message in jobs]
        loop = asyncio.get_running_loop()
        pending = [self._receipts.setdefault(msgid, loop.create_future()) for msgid in msgids]
        self.session.wake()
        try:
            await within(wait_s, f"no receipt from queue {queue}", asyncio.gather(*pending))
        finally:
            for msgid in msgids:
                self._receipts.pop(msgid, None)

    def send_request(self, queue: str, headers: Headers, message: bytes) -> str:
        """Send a request; gives its id. Raises ConnectionLost."""
        try:
            return self.connection.send_request(queue, str(headers), message)
        except LocalProtocolError as error:
            raise ConnectionLost(f"the request was not sent: {self.why(error)}") from None

    def handle_event(self, event: Event) -> None:
        """Resolve a receipt, which repeats the request's id, or a result, which names it."""
        if not isinstance(event, ReplyReceived):
            super().handle_event(event)
            return
        if event.request is None:
            future = self._receipts.get(event.message.decode(errors="replace"))
        else:
            future = self._results.get(event.request)
        if future is not None and not future.done():
            future.set_result(event.message)

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Fail requests without a receipt or a result."""
        super().finish(end)
        lost = self.lost()
        for future in (*self._receipts.values(), *self._results.values()):
            if not future.done():
                future.set_exception(lost)


class EmqpClient(StayingClient[_ClientPeer]):
    """A client that stays connected. Requests wait while there is no connection.

    Every request gets the broker's receipt; with `reply_requested` the result too. A deployed
    EventMQ gives a receipt only if a worker can take the job at once, and never passes results on.
    """

    def __init__(
        self,
        host: str,
        port: int = CLIENTS_PORT,
        *,
        subscribers_port: int = SUBSCRIBERS_PORT,
        mechanism: Mechanism | None = None,
        limits: EmqpLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
        others: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(
            lambda: self._addresses.reach(self._connect),
            backoff=backoff,
            connect_timeout_s=connect_timeout_s,
        )
        self._addresses = Addresses(host, port, others)
        self._host = host
        self._subscribers_port = subscribers_port
        self._mechanism = mechanism
        self._limits = limits or WITH_PINGS

    async def request(
        self,
        message: bytes,
        *,
        queue: str = "default",
        reply_requested: bool = False,
        guarantee: bool = False,
        retry_count: int = 0,
        timeout_s: float = 0,
        properties: Mapping[str, Property] | None = None,
        receipt: bool = True,
        wait_s: float | None = 30.0,
    ) -> bytes | None:
        """Send a request to the workers of `queue`; `timeout_s` is the worker's, 0 for none.

        With `reply_requested` gives the result; without it None when the broker has the request,
        or, without `receipt`, when it is written. Raises RequestFailed when the broker gave up on
        it, RequestTimeout when nothing came within `wait_s`, or ConnectionLost: then nobody knows
        whether it was carried out, and it is not repeated.
        """
        headers = Headers.of(
            reply_requested=reply_requested,
            guarantee=guarantee,
            retry_count=retry_count,
            timeout_s=timeout_s,
            properties=properties,
        )
        peer = await self._redialler.peer(wait_s)
        if not receipt and not reply_requested:
            peer.send_request(queue, headers, message)
            await peer.flush()
            return None
        answer = await peer.request(queue, headers, message, wait_s)
        if not reply_requested:
            return None
        if failure := failure_of(answer):
            raise RequestFailed("failed", f"{failure[0]} (attempts: {failure[1]})", data=answer)
        return answer

    async def call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        class_args: Sequence[Any] = (),
        class_kwargs: Mapping[str, Any] | None = None,
        queue: str = "default",
        guarantee: bool = False,
        retry_count: int = 0,
        timeout_s: float = 0,
        wait_s: float | None = 30.0,
    ) -> Any:
        """Call `module.function` or `module:Class.method` at a worker; gives its result.

        A worker reports an exception like a result, as text, `TimeoutError` included. Raises as
        `request` does, and RequestFailed for a result that can't be read.
        """
        message = serialize_job(
            name, args, kwargs, class_args=class_args, class_kwargs=class_kwargs
        )
        answer = await self.request(
            message,
            queue=queue,
            reply_requested=True,
            guarantee=guarantee,
            retry_count=retry_count,
            timeout_s=timeout_s,
            wait_s=wait_s,
        )
        assert answer is not None
        try:
            return value_of(answer)
        except ValueError as error:
            raise RequestFailed("invalid", str(error), data=answer) from None

    async def request_all(
        self,
        messages: Sequence[tuple[bytes, Mapping[str, Property]]],
        *,
        queue: str = "default",
        guarantee: bool = True,
        retry_count: int = 0,
        wait_s: float | None = 30.0,
    ) -> None:
        """Send many messages with their properties to `queue`; returns when the broker has all.

        Raises RequestTimeout or ConnectionLost: then some may have been taken, and none is
        repeated.
        """
        jobs = [
            (
                Headers.of(guarantee=guarantee, retry_count=retry_count, properties=properties),
                message,
            )
            for message, properties in messages
        ]
        peer = await self._redialler.peer(wait_s)
        await peer.request_all(queue, jobs, wait_s)

    async def publish(
        self, topic: str, message: bytes, *, properties: Mapping[str, Property] | None = None
    ) -> None:
        """Send a message to all subscribers of `topic`. The protocol has no receipt for it."""
        headers = str(Headers.of(properties=properties)) if properties else None
        peer = await self._redialler.peer(self._connect_timeout_s)
        self._sending(peer, lambda: peer.connection.send_publish(topic, message, headers))
        await peer.flush()

    async def schedule(
        self,
        message: bytes,
        *,
        queue: str = "default",
        interval_s: float | None = None,
        cron: str | None = None,
        nohaste: bool = False,
        run_count: int | None = None,
        guarantee: bool = False,
        properties: Mapping[str, Property] | None = None,
    ) -> None:
        """Have `message` sent to `queue` every `interval_s`, or by the expression `cron`.

        An interval starts with a run at once, unless `nohaste`. Scheduling the same call again
        replaces the schedule. There is no receipt.
        """
        if (interval_s is None) == (cron is None):
            raise ValueError("a schedule has either an interval or a cron")
        headers = str(
            Headers.of(
                guarantee=guarantee, nohaste=nohaste, run_count=run_count, properties=properties
            )
        )
        peer = await self._redialler.peer(self._connect_timeout_s)
        self._sending(
            peer,
            lambda: peer.connection.send_schedule(
                queue, headers, message, interval_s=interval_s, cron=cron
            ),
        )
        await peer.flush()

    async def unschedule(self, message: bytes, *, queue: str = "default") -> None:
        """End the schedule of this message."""
        peer = await self._redialler.peer(self._connect_timeout_s)
        self._sending(peer, lambda: peer.connection.send_unschedule(queue, "", message))
        await peer.flush()

    def subscribe(self, *topics: str) -> EmqpSubscriber:
        """What is published to topics that begin with one of these; see EmqpSubscriber."""
        return EmqpSubscriber(
            self._host,
            self._subscribers_port,
            topics,
            mechanism=self._mechanism,
            limits=self._limits,
            connect_timeout_s=self._connect_timeout_s,
        )

    @staticmethod
    def _sending(peer: EmqpPeer, send: Callable[[], object]) -> None:
        try:
            send()
        except LocalProtocolError as error:
            raise ConnectionLost(f"not sent: {peer.why(error)}") from None

    async def _connect(self, host: str, port: int) -> _ClientPeer:
        peer = _ClientPeer()
        await connect_peer(
            peer,
            "client",
            host,
            port,
            mechanism=self._mechanism,
            limits=self._limits,
            timeout_s=self._connect_timeout_s,
        )
        return peer
