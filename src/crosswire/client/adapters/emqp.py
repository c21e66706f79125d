"""Through eMQP: REQUEST, PUBLISH, SCHEDULE, a worker of a queue, a subscriber of topics."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from crosswire.client.adapters.contract import (
    Adapter,
    Answerer,
    EncodedMessage,
    Feed,
    FeedOwner,
    HubTarget,
    ScheduleRequest,
    SubscriptionRequest,
    from_typed,
    recognized,
    report_end,
    typed,
)
from crosswire.client.message import DeliveryHandle, Message
from crosswire.client.native.dial import Addresses, Redialler, within
from crosswire.client.native.emqp import EmqpClient, EmqpPeer, EmqpSubscriber, connect_peer
from crosswire.client.refusals import called
from crosswire.errors import (
    BadRequest,
    ClientError,
    CrosswireError,
    HandshakeFailed,
    ProviderFailed,
    RequestFailed,
    RequestTimeout,
    Unsupported,
)
from crosswire.wire.contract import Event
from crosswire.wire.emqp.events import PeerLeaving, PeerReady, Registered, RequestReceived
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import TIMEOUT, failure_of, serialize_value
from crosswire.wire.zmtp.curve import CurveClient, decode_key
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["EmqpAdapter", "mechanism_of"]

_RETRIES: Final = 4
"""A hub's queues give up after 5 attempts by default; eMQP's clients choose the number."""
_CALLS: Final = 16
"""Calls that one provider answers at a time."""
_LAST_WORD_S: Final = 5.0
"""How long closing waits for the hub to have read the last replies."""


class EmqpAdapter(Adapter):
    """eMQP: a worker consumes a queue or serves, a SUB socket gets topics by their beginning."""

    settles_in_order: ClassVar[bool] = False

    def __init__(self, target: HubTarget) -> None:
        super().__init__(target)
        if target.token is not None or target.tls is not None:
            raise Unsupported("eMQP has neither tokens nor TLS: peers are identified by CURVE keys")
        self._client: EmqpClient | None = None
        self._mechanism = mechanism_of(target.curve_server, target.curve_secret)

    async def open(self) -> None:
        """Connect to the listener for clients, unless its port is 0."""
        target = self.target
        first, *others = target.url.of_role("clients")
        if first[1] == 0:
            self.has_connected = False
            return
        self._client = EmqpClient(
            *first,
            others=others,
            mechanism=self._mechanism,
            backoff=target.backoff(),
            connect_timeout_s=target.connect_timeout_s,
        )
        await self._client.__aenter__()

    async def close(self) -> None:
        """Close the connection, once the hub has read all of it."""
        if self._client is None:
            return
        with suppress(ClientError):
            peer = await self._client.peer(0.01)
            await peer.synchronize(_LAST_WORD_S)
        await self._client.close()

    @property
    def _requests(self) -> EmqpClient:
        if self._client is None:
            raise Unsupported("this address has no listener for clients: its port is 0")
        return self._client

    async def publish(
        self, destination: str, messages: Sequence[EncodedMessage], timeout_s: float
    ) -> list[int | None]:
        """REQUESTs with `guarantee`, which have receipts, or PUBLISHes, which have none."""
        kind, _, name = destination.partition("/")
        if kind == "topic":
            for each in messages:
                await self._requests.publish(name, each.payload, properties=typed(each))
            peer = await self._requests.peer(timeout_s)
            await peer.synchronize(timeout_s)
        else:
            await self._requests.request_all(
                [(each.payload, typed(each)) for each in messages],
                queue=name,
                retry_count=_RETRIES,
                wait_s=timeout_s,
            )
        return [None] * len(messages)

    async def call(self, service: str, message: EncodedMessage, timeout_s: float) -> Message:
        """A REQUEST with `reply-requested` to the queue named after the service."""
        answer = await called(self._call(service.removeprefix("service/"), message, timeout_s))
        return Message(service, answer, content_type=recognized(answer))

    async def _call(self, queue: str, message: EncodedMessage, timeout_s: float) -> bytes:
        peer = await self._requests.peer(timeout_s)
        headers = Headers.of(reply_requested=True, timeout_s=timeout_s, properties=typed(message))
        answer = await peer.request(queue, headers, message.payload, timeout_s)
        if failure := failure_of(answer):
            # The hub's text is a code, or begins with one, where it has one.
            code, colon, description = failure[0].partition(": ")
            if " " in code or not (colon or "_" in code or code in ("timeout", "refused")):
                code, description = "failed", failure[0]
            raise RequestFailed(code, description, data=answer)
        return answer

    async def subscribe(self, request: SubscriptionRequest, owner: FeedOwner) -> Feed:
        """As a worker, or as a SUB socket, which has no filters, names and starts."""
        kind, _, name = request.destination.partition("/")
        if request.filter or request.name or request.start:
            raise Unsupported("eMQP has no filters, no named subscriptions and no start")
        if kind == "topic":
            return await self._listen(name, owner, request.window)
        feed = _WorkerFeed(request.window, lambda worker, job: owner.take(_from_job(worker, job)))
        await self._work(feed, name)
        feed.workers.on_lost = owner.reset
        report_end(feed.workers.ended, owner.fail)
        return feed

    async def _listen(self, pattern: str, owner: FeedOwner, window: int) -> Feed:
        levels = pattern.split("/")
        fixed = next((at for at, level in enumerate(levels) if level in ("+", "#")), len(levels))
        # A SUB socket asks for the beginning of names; what it gets too much is dropped here.
        prefix = "/".join(levels[:fixed]) + ("/" if 0 < fixed < len(levels) else "")
        target = self.target
        first, *others = target.url.of_role("subscribers")
        subscriber = EmqpSubscriber(
            *first,
            topics=[prefix],
            window=window,
            others=others,
            mechanism=self._mechanism,
            backoff=target.backoff(),
            connect_timeout_s=target.connect_timeout_s,
        )
        await subscriber.__aenter__()
        peer = await subscriber.peer()
        await peer.synchronize(target.connect_timeout_s)
        return _TopicFeed(subscriber, levels, owner)

    async def serve(
        self, service: str, answer: Answerer, fail: Callable[[CrosswireError], None]
    ) -> Feed:
        """As a worker of the queue named after the service; it has no METHODs."""
        name = service.removeprefix("service/")
        if "/" in name:
            raise Unsupported("an eMQP worker serves all methods of a service, not one")

        async def respond(worker: _QueueWorker, job: RequestReceived) -> None:
            message = _from_job(worker, job, of_call=True)
            try:
                reply = (await answer(message)).payload
            except ProviderFailed as failed:
                reply = msgspec.json.encode({"error": str(failed), "attempts": 1})
            if not worker.ended.done():
                worker.finish_job(job, reply)

        def begin(worker: _QueueWorker, job: RequestReceived) -> None:
            task = asyncio.create_task(respond(worker, job))
            feed.tasks.add(task)
            task.add_done_callback(feed.tasks.discard)

        feed = _WorkerFeed(_CALLS, begin)
        await self._work(feed, name)
        report_end(feed.workers.ended, fail)
        return feed

    async def _work(self, feed: _WorkerFeed, queue: str) -> None:
        target = self.target
        first, *others = target.url.of_role("workers")
        addresses = Addresses(*first, others)

        async def connect(host: str, port: int) -> _QueueWorker:
            worker = _QueueWorker(feed)
            joining = connect_peer(
                worker,
                "worker",
                host,
                port,
                queues=((10, queue),),
                mechanism=self._mechanism,
                timeout_s=target.connect_timeout_s,
            )
            try:
                await within(target.connect_timeout_s, "not registered", joining)
            except RequestTimeout:
                await worker.close()
                # A worker that may not have the queue gets no answer at all.
                raise HandshakeFailed(
                    f"the hub did not accept a worker of queue/{queue}"
                    f" within {target.connect_timeout_s:g} s: it may be forbidden"
                ) from None
            return worker

        feed.workers = Redialler(lambda: addresses.reach(connect), backoff=target.backoff())
        await feed.workers.start()

    async def schedule(self, request: ScheduleRequest, message: EncodedMessage) -> str:
        """SCHEDULE, which has no receipt. A schedule is known by its queue and message."""
        queue = request.destination.removeprefix("queue/")
        await self._requests.schedule(
            message.payload,
            queue=queue,
            interval_s=request.interval_s,
            cron=request.cron,
            nohaste=request.nohaste,
            run_count=request.run_count,
            guarantee=True,
            properties=typed(message),
        )
        peer = await self._requests.peer(self.target.connect_timeout_s)
        await peer.synchronize(self.target.connect_timeout_s)
        return f"{queue}:{base64.urlsafe_b64encode(message.payload).decode()}"

    async def unschedule(self, schedule: str) -> None:
        """UNSCHEDULE, which has no receipt."""
        queue, _, text = schedule.rpartition(":")
        try:
            payload = base64.urlsafe_b64decode(text)
        except ValueError:
            raise BadRequest(f"{schedule!r} is no schedule of this protocol") from None
        await self._requests.unschedule(payload, queue=queue)
        peer = await self._requests.peer(self.target.connect_timeout_s)
        await peer.synchronize(self.target.connect_timeout_s)


class _QueueWorker(EmqpPeer):
    """A worker's broker. It passes messages on as they are, instead of running them as jobs."""

    def __init__(self, feed: _WorkerFeed) -> None:
        super().__init__()
        self._feed = feed

    def handle_event(self, event: Event) -> None:
        match event:
            case PeerReady():
                pass  # the handshake is done, but the worker is not registered
            case Registered():
                for _ in range(self._feed.slots):
                    self.connection.send_ready()
                self.open()
            case RequestReceived():
                self._feed.take(self, event)
            case PeerLeaving():
                self.connection.close()
            case _:
                super().handle_event(event)

    def finish_job(self, job: RequestReceived, reply: bytes) -> None:
        """Send the result where one is awaited, and offer the slot again."""
        if Headers.parse(job.headers).reply_requested:
            self.connection.send_reply(reply, job.msgid)
        self.connection.send_ready()
        self.session.wake()


class _WorkerFeed(Feed):
    """A worker with `slots`, registered on every connection anew."""

    workers: Redialler[_QueueWorker]

    def __init__(self, slots: int, take: Callable[[_QueueWorker, RequestReceived], None]) -> None:
        self.slots = slots
        self.take = take
        self.tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=_LAST_WORD_S)
        for task in self.tasks:
            task.cancel()
        with suppress(ClientError):
            peer = await self.workers.peer(0.01)
            await peer.synchronize(_LAST_WORD_S)
        await self.workers.stop()


class _TopicFeed(Feed):
    """A SUB socket; the hub sends what is published whatever the program has read, so that reading
    stops when as many messages as the window wait."""

    def __init__(self, subscriber: EmqpSubscriber, levels: list[str], owner: FeedOwner) -> None:
        self._subscriber = subscriber
        self._levels = levels
        self._pump = asyncio.create_task(self._read(owner))

    async def _read(self, owner: FeedOwner) -> None:
        try:
            async for topic, payload in self._subscriber:
                if _matches(self._levels, topic.split("/")):
                    content_type = recognized(payload)
                    owner.take(Message(f"topic/{topic}", payload, content_type=content_type))
                    await owner.room()
        except CrosswireError as error:
            owner.fail(error)

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.wait([self._pump])
        await self._subscriber.close()


class _EmqpHandle(DeliveryHandle):
    def __init__(self, worker: _QueueWorker, job: RequestReceived) -> None:
        self._worker = worker
        self._job = job

    @property
    def lost(self) -> bool:
        return self._worker.ended.done()

    def settle(self) -> None:
        self._worker.finish_job(self._job, serialize_value(None))

    async def refuse(self, reason: str) -> None:  # noqa: ARG002  eMQP can't carry it
        # The only reply that a broker takes for a failure.
        self._worker.finish_job(self._job, serialize_value(TIMEOUT))


def _from_job(worker: _QueueWorker, job: RequestReceived, *, of_call: bool = False) -> Message:
    headers = Headers.parse(job.headers)
    properties, content_type = from_typed(headers.properties(), of_call=of_call)
    return Message(
        f"{'service' if of_call else 'queue'}/{job.queue}",
        job.message,
        content_type=content_type or recognized(job.message),
        properties=properties,
        handle=None if of_call else _EmqpHandle(worker, job),
    )


def _matches(pattern: list[str], levels: list[str]) -> bool:
    for at, part in enumerate(pattern):
        if part == "#":
            return True
        if at == len(levels) or part not in ("+", levels[at]):
            return False
    return len(levels) == len(pattern)


def mechanism_of(curve_server: str | None, curve_secret: str | None) -> Mechanism | None:
    """CURVE with the hub's key, None without it. Raises ValueError for an invalid key.

    Without a secret key of ours a new one is generated: the connection is encrypted, but the hub
    knows no user with this key.
    """
    if curve_server is None:
        return None
    secret = secrets.token_bytes(32)
    try:
        if curve_secret is not None:
            secret = decode_key(curve_secret)
        return CurveClient(decode_key(curve_server), secret, secrets.token_bytes)
    except ValueError as error:
        raise ValueError(f"a CURVE key can't be used: {error}") from None
