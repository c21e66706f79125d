"""Through EMP: `$publish`, `$subscribe`, operations, `$serve`, `$schedule`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import msgspec

from crosswire.client.adapters.contract import (
    Adapter,
    Answerer,
    EncodedMessage,
    Feed,
    FeedOwner,
    ScheduleRequest,
    SubscriptionRequest,
    from_typed,
    report_end,
    retried,
)
from crosswire.client.message import BYTES, JSON, TEXT, DeliveryHandle, Message
from crosswire.client.native.emp import EmpClient, EmpDelivery, Handler, Json, OwedAnswer
from crosswire.client.refusals import called, performed, refusal_of
from crosswire.errors import (
    ClientError,
    CrosswireError,
    DeliveryLost,
    HubError,
    ProviderFailed,
    RequestFailed,
    Unsupported,
)

__all__ = ["EmpAdapter"]

_LAST_WORD_S: Final = 5.0
"""How long closing waits for the hub to have read the last settlements."""


class EmpAdapter(Adapter):
    """EMP: every request has a response, deliveries and calls are requests of the hub."""

    knows_ids: ClassVar[bool] = True

    async def open(self) -> None:
        """Connect, and authenticate."""
        self._requests = self._client()
        self._callers: list[EmpClient] = []
        await performed(self._requests.__aenter__())

    async def close(self) -> None:
        """Close the connections."""
        callers, self._callers = self._callers, []
        await asyncio.gather(*(each.close() for each in [self._requests, *callers]))

    def _client(self, **more: Any) -> EmpClient:
        target = self.target
        first, *others = target.url.addresses
        return EmpClient(
            *first,
            others=others,
            tls=target.tls,
            token=target.token,
            backoff=target.backoff(),
            connect_timeout_s=target.connect_timeout_s,
            **more,
        )

    async def publish(
        self, destination: str, messages: Sequence[EncodedMessage], timeout_s: float
    ) -> list[int | None]:
        """`$publish` requests in one write; the responses have the ids."""
        data = [
            msgspec.json.encode(
                {"destination": destination, "properties": each.properties, **_body(each)}
            )
            for each in messages
        ]
        peer = await performed(self._requests.peer(timeout_s))
        replies = await peer.request_all("$publish", data, timeout_s=timeout_s)
        for reply in replies:
            if isinstance(reply, RequestFailed):
                raise refusal_of(reply)
        return [msgspec.json.decode(reply)["id"] for reply in replies if isinstance(reply, bytes)]

    async def call(self, service: str, message: EncodedMessage, timeout_s: float) -> Message:
        """The operation named after the service. EMP carries JSON objects only."""
        _require_object(message)
        op = service.removeprefix("service/")
        caller = await self._caller(timeout_s)
        try:
            data = await called(caller.request_json(op, message.payload, timeout_s=timeout_s))
        except HubError:
            self._callers.append(caller)
            raise
        except BaseException:
            # Its answer may still come, and until then the hub answers nothing else on it.
            await caller.close()
            raise
        self._callers.append(caller)
        return Message(service, data, content_type=JSON)

    async def _caller(self, timeout_s: float) -> EmpClient:
        """A connection for one call at a time: EMP finishes a request before the next is begun."""
        while self._callers:
            caller = self._callers.pop()
            if not caller.ended.done():
                return caller

        async def open_once() -> EmpClient:
            return await performed(self._client().__aenter__())

        return await retried(open_once, self.target.backoff(), timeout_s)

    async def subscribe(self, request: SubscriptionRequest, owner: FeedOwner) -> Feed:
        """`$subscribe`, which the client repeats on every connection."""
        feed = _EmpFeed(self, owner)
        asked: Json = {"destination": request.destination, "window": request.window}
        more = {"filter": request.filter, "name": request.name, "from": request.start}
        asked |= {key: value for key, value in more.items() if value}
        client = self._client(deliver=feed.deliver)
        await performed(client.__aenter__())
        try:
            reply = await performed(client.request("$subscribe", asked))
        except BaseException:
            await client.close()
            raise
        feed.begin(client, reply["subscription"])
        return feed

    async def serve(
        self, service: str, answer: Answerer, fail: Callable[[CrosswireError], None]
    ) -> Feed:
        """`$serve`; EMP asks to answer one call before the next is begun."""

        def handler(op: str) -> Handler:
            async def handle(data: Json) -> Json:
                call = Message(f"service/{op}", msgspec.json.encode(data), content_type=JSON)
                try:
                    reply = await answer(call)
                    _require_object(reply)
                except ProviderFailed as failed:
                    data_of = failed.data if failed.data[:1] == b"{" else b"{}"
                    raise RequestFailed(failed.code, failed.description, data=data_of) from None
                except Unsupported as error:
                    raise RequestFailed("internal", str(error)) from None
                decoded: Json = msgspec.json.decode(reply.payload)
                return decoded

            return handle

        feed = _EmpFeed(self, None)
        client = self._client(handlers=_EveryOp(handler))
        await performed(client.__aenter__())
        try:
            await performed(
                client.request("$serve", {"services": [service.removeprefix("service/")]})
            )
        except BaseException:
            await client.close()
            raise
        feed.begin(client, 0, fail)
        return feed

    async def schedule(self, request: ScheduleRequest, message: EncodedMessage) -> str:
        """`$schedule`; gives the hub's id."""
        asked = {
            "destination": request.destination,
            "interval_s": request.interval_s,
            "cron": request.cron,
            "nohaste": request.nohaste,
            "run_count": request.run_count,
            "properties": message.properties,
        }
        data = {key: value for key, value in asked.items() if value is not None} | _body(message)
        reply = await performed(self._requests.request("$schedule", data))
        return str(reply["schedule"])

    async def unschedule(self, schedule: str) -> None:
        """`$unschedule`."""
        await performed(self._requests.request("$unschedule", {"schedule": schedule}))


class _EmpFeed(Feed):
    """A subscription, or a service, on a client of its own."""

    def __init__(self, adapter: EmpAdapter, owner: FeedOwner | None) -> None:
        self._adapter = adapter
        self._owner = owner
        self.number = 0

    def begin(
        self,
        client: EmpClient,
        number: int,
        fail: Callable[[CrosswireError], None] | None = None,
    ) -> None:
        self.client = client
        self.number = number
        fail = fail or (self._owner.fail if self._owner is not None else None)
        if fail is not None:
            report_end(client.ended, fail)
        if self._owner is not None:
            client.watch(self._owner.reset)

    def deliver(self, delivery: EmpDelivery, answer: OwedAnswer) -> None:
        assert self._owner is not None
        payload, carried_type = _payload_of(delivery)
        properties, content_type = from_typed(delivery.properties, carried_type)
        self._owner.take(
            Message(
                delivery.destination,
                payload,
                content_type=content_type,
                properties=properties,
                id=delivery.id,
                attempt=delivery.attempt,
                handle=_EmpHandle(self, delivery.id, answer),
            )
        )

    async def close(self) -> None:
        # The response shows that the hub has read the answers before it. Closing alone could lose
        # them, and the messages would be delivered again.
        with suppress(ClientError):
            peer = await self.client.peer(0.01)
            if self.number:
                asked = {"subscription": self.number}
                await peer.request("$unsubscribe", asked, timeout_s=_LAST_WORD_S)
            else:
                await peer.request("$echo", timeout_s=_LAST_WORD_S)
        await self.client.close()


class _EmpHandle(DeliveryHandle):
    def __init__(self, feed: _EmpFeed, identifier: int, answer: OwedAnswer) -> None:
        self._feed = feed
        self._id = identifier
        self._answer = answer

    @property
    def lost(self) -> bool:
        return self._answer.lost

    def settle(self) -> None:
        self._answer.succeed()

    async def refuse(self, reason: str) -> None:
        self._answer.fail("refused", reason)

    async def extend(self, lease_s: float) -> None:
        asked = {"subscription": self._feed.number, "ids": [self._id], "lease_s": lease_s}
        reply = await performed(self._feed.client.request("$extend", asked))
        if not reply["extended"]:
            raise DeliveryLost(f"message {self._id} is no longer ours")


class _EveryOp(Mapping[str, Handler]):
    """Handlers of all methods of a service: the operation is `NAME` or `NAME/METHOD`."""

    def __init__(self, make: Callable[[str], Handler]) -> None:
        self._make = make

    def __getitem__(self, op: str) -> Handler:
        return self._make(op)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


def _body(message: EncodedMessage) -> dict[str, Any]:
    """The payload as EMP carries it: one of `json`, `text` and `base64`."""
    if message.content_type == JSON:
        return {"json": msgspec.Raw(message.payload)}
    if message.content_type.startswith("text/"):
        with suppress(UnicodeDecodeError):
            return {"text": message.payload.decode()}
    return {"base64": base64.b64encode(message.payload).decode()}


def _payload_of(delivery: EmpDelivery) -> tuple[bytes, str]:
    if isinstance(delivery.json, msgspec.Raw):
        return bytes(delivery.json), JSON
    if delivery.text is not None:
        return delivery.text.encode(), TEXT
    return delivery.base64, BYTES


def _require_object(message: EncodedMessage) -> None:
    """Raises Unsupported: EMP's data is a JSON object, which can't stand for anything else."""
    if message.content_type != JSON or not message.payload.startswith(b"{"):
        raise Unsupported("calls and answers in EMP are JSON objects")
