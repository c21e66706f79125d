"""Through Relink: publish, subscribe, call and serve are endpoints, each with a link of its own."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import quote

import msgspec

from crosswire.client.adapters.contract import (
    Adapter,
    Answerer,
    EncodedMessage,
    Feed,
    FeedOwner,
    HubTarget,
    SubscriptionRequest,
    from_typed,
    recognized,
    retried,
    typed,
)
from crosswire.client.message import DeliveryHandle, Message
from crosswire.client.native.dial import within
from crosswire.client.native.relink import Received, Receiver, RelinkClient
from crosswire.client.refusals import refusal_of
from crosswire.envelope import Property
from crosswire.errors import (
    ConnectionLost,
    CrosswireError,
    HandshakeFailed,
    HubError,
    LinkLost,
    LocalProtocolError,
    ProviderFailed,
    RequestFailed,
    RequestTimeout,
    TlsFailed,
    Unsupported,
    WrongProtocol,
)

__all__ = ["RelinkAdapter"]

_LINKS: Final = 64
"""Links that are kept open for publishing and calling; beyond that the longest unused is closed."""
_AT_ONCE: Final = 512
"""Messages in one transaction: half of a channel's default window."""
_CHANNELS: Final = 65_536
_CLOSE_S: Final = 5.0

T = TypeVar("T")


class RelinkAdapter(Adapter):
    """Relink: transactions confirm and settle; peers are identified by certificates."""

    settles_in_order: ClassVar[bool] = True

    def __init__(self, target: HubTarget) -> None:
        super().__init__(target)
        if target.token is not None:
            raise Unsupported("Relink identifies peers by certificates only: use certificate, key")
        self._links: OrderedDict[str, _SharedLink] = OrderedDict()
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Check that a hub is there; links are opened when they are used.

        Relink has no connection without an endpoint, so a service's is opened: nothing is called.
        """
        probe = self.client("service/crosswire")
        try:
            await probe.__aenter__()
        except (TlsFailed, WrongProtocol):
            raise
        except HandshakeFailed:
            return  # a hub that does not allow us this one
        await _closed(probe)

    async def close(self) -> None:
        """Shut all links down."""
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(_closed(each.client) for each in links))

    def client(self, endpoint: str, **more: Any) -> RelinkClient:
        """A link to an endpoint, not connected yet."""
        target = self.target
        first, *others = target.url.addresses
        return RelinkClient(
            *first,
            endpoint,
            others=others,
            connector_id_size=2,
            listener_id_size=2,
            tls=target.tls,
            backoff=target.backoff(),
            connect_timeout_s=target.connect_timeout_s,
            close_timeout_s=_CLOSE_S,
            **more,
        )

    async def _link(self, endpoint: str, timeout_s: float, **more: Any) -> _SharedLink:
        """The link to an endpoint, opened if there is none; waits for a hub that is away."""
        async with self._opening:
            link = self._links.get(endpoint)
            if link is not None and link.alive:
                self._links.move_to_end(endpoint)
                return link
            opened = await self.opened(lambda: self.client(endpoint, **more), timeout_s)
            link = self._links[endpoint] = _SharedLink(opened)
            idle = next((name for name, each in self._links.items() if not each.busy), None)
            if len(self._links) > _LINKS and idle is not None and idle != endpoint:
                await _closed(self._links.pop(idle).client)
            return link

    async def opened(self, make: Callable[[], RelinkClient], timeout_s: float) -> RelinkClient:
        """A connected link; retries while no hub is reached. Raises HubError if it refuses."""

        async def open_once() -> RelinkClient:
            client = make()
            try:
                return await client.__aenter__()
            except (TlsFailed, WrongProtocol):
                raise
            except HandshakeFailed as error:
                raise HubError(_REFUSED.format(client.link.terms.endpoint)) from error

        return await retried(open_once, self.target.backoff(), timeout_s)

    async def publish(
        self, destination: str, messages: Sequence[EncodedMessage], timeout_s: float
    ) -> list[int | None]:
        """Transactions on the endpoint of the destination. A full queue refuses them."""
        link = await self._link(destination, timeout_s, connector_transactions=True)
        with link.channel() as channel:
            await within(timeout_s, "not committed", self._commit(link, channel, messages))
            channel.is_free = True
        return [None] * len(messages)

    async def _commit(
        self, link: _SharedLink, channel: _Channel, messages: Sequence[EncodedMessage]
    ) -> None:
        sender = link.client.sender(channel.number)
        try:
            for start in range(0, len(messages), _AT_ONCE):
                async with sender.transaction() as transaction:
                    for each in messages[start : start + _AT_ONCE]:
                        await transaction.send(*_parts(each.payload, typed(each)))
        except RequestFailed as failed:
            raise refusal_of(failed) from None
        except LocalProtocolError as error:
            raise HubError(f"the message can't be sent in Relink: {error}") from None

    async def call(self, service: str, message: EncodedMessage, timeout_s: float) -> Message:
        """One message each way, on a channel that no other call uses meanwhile."""
        link = await self._link(service, timeout_s)
        with link.channel() as channel:
            receiver = link.client.receiver(channel.number)
            sender = link.client.sender(channel.number)

            async def ask() -> Received:
                await sender.send(*_parts(message.payload, typed(message)))
                return await anext(receiver)

            response = await within(timeout_s, f"no answer from {service}", ask())
            response.consume()
            # A channel whose answer did not come is not used again: it may still come.
            channel.is_free = True
        answer = _message(service, response)
        code = answer.properties.get("error")
        if code is not None:
            description = str(answer.properties.get("description", ""))
            failed = RequestFailed(str(code), description, data=answer.payload)
            raise refusal_of(failed, of_call=True)
        return answer

    async def subscribe(self, request: SubscriptionRequest, owner: FeedOwner) -> Feed:
        """The endpoint `?consume` of a queue or `?subscribe` of a topic, with transactions."""
        verb = "consume" if request.destination.startswith("queue/") else "subscribe"
        more = {"from": request.start, "name": request.name, "filter": request.filter}
        query = "".join(f"&{key}={quote(value)}" for key, value in more.items() if value)
        feed = _RelinkFeed(self, f"{request.destination}?{verb}{query}", request.destination, owner)
        await feed.begin()
        return feed

    async def serve(
        self, service: str, answer: Answerer, fail: Callable[[CrosswireError], None]
    ) -> Feed:
        """The endpoint `?serve`; each call is on a channel that the hub opens."""
        feed = _ServiceFeed(self, service, answer, fail)
        await feed.begin()
        return feed


_REFUSED: Final = (
    "the hub refuses the endpoint {}: it may be forbidden, invalid, or its name in use with another"
    " filter, or it requires a client certificate; Relink does not carry the reason"
)


class _Channel:
    """A channel that is in use; it may be used again if `is_free` is set."""

    def __init__(self, link: _SharedLink, number: int) -> None:
        self._link = link
        self.number = number
        self.is_free = False

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.release(self)


class _SharedLink:
    """A link for publishing or calling, whose channels are used one caller at a time."""

    def __init__(self, client: RelinkClient) -> None:
        self.client = client
        self._free: list[int] = []
        self._used = 0
        self._busy = 0

    @property
    def alive(self) -> bool:
        return not self.client.link.ended and self._used < _CHANNELS

    @property
    def busy(self) -> bool:
        return self._busy > 0

    def channel(self) -> _Channel:
        self._busy += 1
        if self._free:
            return _Channel(self, self._free.pop())
        self._used += 1
        return _Channel(self, self._used - 1)

    def release(self, channel: _Channel) -> None:
        self._busy -= 1
        if channel.is_free:
            self._free.append(channel.number)


class _KeptLink(Feed):
    """A link that is opened anew when the hub has forgotten it."""

    def __init__(
        self,
        adapter: RelinkAdapter,
        endpoint: str,
        fail: Callable[[CrosswireError], None],
        **more: Any,
    ) -> None:
        self._adapter = adapter
        self._endpoint = endpoint
        self._fail = fail
        self._more = more
        self._closing = False
        self.client: RelinkClient

    async def begin(self) -> None:
        await self._open()
        self._task = asyncio.create_task(self._run())

    async def _open(self, timeout_s: float | None = None) -> None:
        adapter = self._adapter
        patience_s = adapter.target.connect_timeout_s if timeout_s is None else timeout_s
        self.client = await adapter.opened(
            lambda: adapter.client(self._endpoint, **self._more), patience_s
        )

    async def _run(self) -> None:
        while True:
            try:
                await self._read(self.client)
            except ConnectionLost:
                pass
            except CrosswireError as error:
                self._fail(error)
                return
            if self._closing:
                return
            # The link is gone, and what it held with it: the hub gives that to others, or to us.
            self._lost()
            with suppress(CrosswireError):
                await _closed(self.client)
            try:
                await self._open_again()
            except CrosswireError as error:
                self._fail(error)
                return

    async def _open_again(self) -> None:
        """Open a link that the hub accepted before. Raises CrosswireError.

        Relink carries no reason: a hub that is about to stop, or whose disk is full, refuses as
        one that forbids it. So a refusal counts only if it is repeated for a while.
        """
        backoff = self._adapter.target.backoff()
        clock = asyncio.get_running_loop().time
        refused_at: float | None = None
        while True:
            try:
                return await self._open(_FOR_EVER_S)
            except HubError:
                refused_at = clock() if refused_at is None else refused_at
                if clock() - refused_at > _REFUSED_S:
                    raise
            await asyncio.sleep(backoff.next_s())

    @abstractmethod
    async def _read(self, client: RelinkClient) -> None:
        """Take what arrives, until the link ends. Raises ConnectionLost then."""

    def _lost(self) -> None:
        """What the link held is lost."""

    async def close(self) -> None:
        self._closing = True
        self._task.cancel()
        await asyncio.wait([self._task])
        await _closed(self.client)


_REFUSED_S: Final = 30.0
"""For how long a hub may refuse an endpoint that it accepted before."""
_FOR_EVER_S: Final = 10 * 365 * 86_400.0


class _RelinkFeed(_KeptLink):
    """The messages of an endpoint, on channel 0."""

    def __init__(
        self, adapter: RelinkAdapter, endpoint: str, destination: str, owner: FeedOwner
    ) -> None:
        super().__init__(adapter, endpoint, owner.fail, listener_transactions=True)
        self._destination = destination
        self._owner = owner

    def _lost(self) -> None:
        self._owner.reset()

    async def _read(self, client: RelinkClient) -> None:
        async for received in client.receiver():
            handle = _RelinkHandle(client, received)
            self._owner.take(_message(self._destination, received, handle))
            # The hub sends as much as its own window allows: what is too much waits in the link.
            if not self._owner.has_room:
                await client.unless_ended(self._owner.room())
            if client.link.ended:
                return


class _ServiceFeed(_KeptLink):
    """Calls of a service, each on a channel that the hub opens."""

    def __init__(
        self,
        adapter: RelinkAdapter,
        service: str,
        answer: Answerer,
        fail: Callable[[CrosswireError], None],
    ) -> None:
        super().__init__(adapter, f"{service}?serve", fail)
        self._service = service
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    async def _read(self, client: RelinkClient) -> None:
        async for receiver in client.opened():
            task = asyncio.create_task(self._respond(client, receiver))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _respond(self, client: RelinkClient, receiver: Receiver) -> None:
        with suppress(ConnectionLost):
            async for received in receiver:
                try:
                    reply = await self._answer(_message(self._service, received))
                    parts = _parts(reply.payload, typed(reply))
                except ProviderFailed as failed:
                    error: dict[str, Property] = {
                        "error": failed.code,
                        "description": failed.description,
                    }
                    parts = _parts(failed.data, error)
                await client.sender(receiver.channel).send(*parts)
                received.consume()

    async def close(self) -> None:
        await super().close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class _RelinkHandle(DeliveryHandle):
    def __init__(self, client: RelinkClient, received: Received) -> None:
        self._client = client
        self._received = received

    @property
    def lost(self) -> bool:
        # A link survives its connection: only its end loses what was not settled.
        return self._client.link.ended

    def settle(self) -> None:
        self._received.consume()

    async def refuse(self, reason: str) -> None:  # noqa: ARG002  Relink can't carry it
        self._received.refuse()


async def _closed(client: RelinkClient) -> None:
    """Shut a link down; one that the hub doesn't answer is dropped."""
    with suppress(RequestTimeout, LinkLost, ConnectionLost):
        await client.close()


def _parts(payload: bytes, properties: dict[str, Property]) -> list[bytes]:
    """One part where there are no properties, else they come first, as JSON."""
    return [msgspec.json.encode(properties), payload] if properties else [payload]


def _message(destination: str, received: Received, handle: DeliveryHandle | None = None) -> Message:
    """A delivery; without its handle, a call or an answer."""
    parts = [bytes(part) for part in received.parts]
    properties: dict[str, Property] = {}
    if len(parts) == 2:
        properties = msgspec.json.decode(parts.pop(0))
    own, content_type = from_typed(properties, of_call=handle is None)
    payload = b"".join(parts)
    return Message(
        destination,
        payload,
        content_type=content_type or recognized(payload),
        properties=own,
        handle=handle,
    )
