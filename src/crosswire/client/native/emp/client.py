"""EMP's client: it stays connected, and restores subscriptions and services.

async with EmpClient("127.0.0.1", 5040) as client:
    reply = await client.request("$echo", {"hello": "world"})
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence

import msgspec

from crosswire.client.native.dial import Addresses, Backoff, StayingClient, dial
from crosswire.client.native.emp.peer import EmpPeer, Handler, Json, Receiver, decode
from crosswire.client.native.resubscribe import KeptSubscription, KeptSubscriptions
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.frames import EmpLimits

__all__ = ["EmpClient"]


class _SubscribeRequest(msgspec.Struct, frozen=True):
    """The members of a `$subscribe` that decide how it is restored."""

    destination: str = ""
    name: str = ""
    start: str | int = msgspec.field(default="", name="from")


class _SubscribeResult(msgspec.Struct, frozen=True):
    subscription: int


class _ServiceNames(msgspec.Struct, frozen=True):
    services: list[str]


class EmpClient(StayingClient[EmpPeer]):
    """A client that stays connected; operations in `handlers` answer requests of the server.

    `deliver` gets the deliveries of subscriptions at once and answers them later, in any order;
    without it they go to the handler of `$deliver`, one after the other. `token` identifies the
    program on every connection. `others` are further addresses of the same hub, tried in turn.

    A request that is made while there is no connection waits for the next one, within its timeout.
    What `$authenticate`, `$subscribe` and `$serve` have established is restored on every new
    connection, before anything else: deliveries and calls go on, with the same `subscription`. If
    the hub refuses that, the client ends, and `ended` has the reason.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        handlers: Mapping[str, Handler] | None = None,
        deliver: Receiver | None = None,
        token: str | None = None,
        others: Sequence[tuple[str, int]] = (),
        limits: EmpLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            lambda: self._addresses.reach(self._connect),
            backoff=backoff,
            connect_timeout_s=connect_timeout_s,
        )
        self._addresses = Addresses(host, port, others)
        self._tls = tls
        self._handlers = handlers or {}
        self._limits = limits
        self._deliver = deliver
        self._credentials = None if token is None else msgspec.json.encode({"token": token})
        self._subscriptions = KeptSubscriptions()
        self._services: dict[str, None] = {}

    async def request(
        self, op: str, data: Json | None = None, *, timeout_s: float | None = 30.0
    ) -> Json:
        """As `EmpPeer.request`."""
        reply = await self.request_json(op, msgspec.json.encode(data or {}), timeout_s=timeout_s)
        return decode(reply)

    async def request_json(self, op: str, data: bytes, *, timeout_s: float | None = 30.0) -> bytes:
        """As `EmpPeer.request_json`."""
        peer = await self._redialler.peer(timeout_s)
        if op == "$subscribe":
            return await self._subscribe(peer, data, timeout_s)
        reply = await peer.request_json(op, data, timeout_s=timeout_s)
        if op == "$authenticate":
            self._credentials = data
        elif op == "$serve":
            names = msgspec.json.decode(data, type=_ServiceNames).services
            self._services |= dict.fromkeys(names)
        elif op == "$unsubscribe":
            number = msgspec.json.decode(data, type=_SubscribeResult).subscription
            self._subscriptions.by_number.pop(number, None)
        return reply

    async def _subscribe(self, peer: EmpPeer, data: bytes, timeout_s: float | None) -> bytes:
        """Subscribe and keep the subscription; gives the reply with the program's number."""
        kept: list[KeptSubscription] = []

        def keep(reply: bytes) -> None:
            try:
                number = msgspec.json.decode(reply, type=_SubscribeResult).subscription
                parsed = msgspec.json.decode(data, type=_SubscribeRequest)
            except msgspec.MsgspecError:
                return  # another server than a hub, where `$subscribe` means something else
            kept.append(
                self._subscriptions.add(
                    number,
                    data,
                    destination=parsed.destination,
                    name=parsed.name,
                    start=str(parsed.start),
                )
            )
            peer.numbers.join(number, kept[0])

        reply = await peer.request_json("$subscribe", data, timeout_s=timeout_s, on_success=keep)
        if not kept:
            return reply
        return msgspec.json.encode(msgspec.json.decode(reply) | {"subscription": kept[0].number})

    async def _connect(self, host: str, port: int) -> EmpPeer:
        peer = EmpPeer(self._handlers, deliver=self._deliver)
        await dial(
            host,
            port,
            lambda now: EmpConnection("client", now, limits=self._limits),
            peer,
            tls=self._tls,
            timeout_s=self._connect_timeout_s,
        )
        return await self._opened(peer, peer.opened)

    async def _restore(self, peer: EmpPeer) -> None:
        """Authenticate first, then serve and subscribe again. Raises ClientError."""
        timeout_s = self._connect_timeout_s
        if self._credentials is not None:
            await peer.request_json("$authenticate", self._credentials, timeout_s=timeout_s)
        if self._services:
            await peer.request("$serve", {"services": list(self._services)}, timeout_s=timeout_s)
        for kept in list(self._subscriptions.by_number.values()):
            parsed = msgspec.json.decode(kept.request)
            start = kept.start_again()
            if start != kept.start:
                parsed["from"] = start

            def join(reply: bytes, kept: KeptSubscription = kept) -> None:
                peer.numbers.join(
                    msgspec.json.decode(reply, type=_SubscribeResult).subscription, kept
                )

            await peer.request_json(
                "$subscribe", msgspec.json.encode(parsed), timeout_s=timeout_s, on_success=join
            )
