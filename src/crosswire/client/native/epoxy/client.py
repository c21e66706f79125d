"""Epoxy's client: it stays connected, and restores subscriptions and services.

    calc = idl.load("calc.bond").service("examples.calc.Calc")
    async with EpoxyClient("127.0.0.1", 25188) as client:
        result = await client.call(calc, "Calculate", Params(x=67, y=87, operation=3))

Values are those of `crosswire.bond`; `call_bytes` and `send_event_bytes` carry marshalled Bond
unchanged.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any, Final

from crosswire.bond import hub_module, marshal
from crosswire.bond.schema import ServiceDef
from crosswire.client.native.dial import Addresses, Backoff, StayingClient, dial
from crosswire.client.native.epoxy.peer import HUB, CallReply, EpoxyPeer, Handlers
from crosswire.client.native.resubscribe import KeptSubscription, KeptSubscriptions
from crosswire.errors import (
    BondDecodeError,
    CallFailed,
    ConnectionLost,
    PeerError,
    RequestFailed,
)
from crosswire.wire.contract import ConnectionFailed
from crosswire.wire.epoxy.comm import ErrorCode
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.frames import EpoxyLimits

__all__ = ["EpoxyClient"]

_SUBSCRIPTION: Final = "crosswire.Subscription"
_SUBSCRIBED: Final = "crosswire.Subscribed"
_REMEMBERED: Final = frozenset({"Serve", "Subscribe", "Unsubscribe"})
"""Methods of the hub whose effect ends with the connection."""


class EpoxyClient(StayingClient[EpoxyPeer]):
    """A client that stays connected; `handlers` answer calls of the server.

    A call that is made while there is no connection waits for the next one, within its timeout.
    With a `token`, it identifies itself when it has connected, and every call and event without
    layer data of its own carries the credentials.
    What `crosswire.Hub.Subscribe` and `Serve` have established is restored on every new connection,
    before anything else: deliveries and calls go on, with the same `subscription`. If the hub
    refuses that, the client ends, and `ended` has the reason. `others` are further addresses of the
    same hub, tried in turn. Events of the server above `events_waiting` are dropped.
    """

    def __init__(
        self,
        host: str,
        port: int = 25188,
        *,
        tls: ssl.SSLContext | None = None,
        handlers: Handlers | None = None,
        token: str | None = None,
        others: Sequence[tuple[str, int]] = (),
        events_waiting: int = 1024,
        limits: EpoxyLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            lambda: self._addresses.reach(self._connect),
            backoff=backoff,
            connect_timeout_s=connect_timeout_s,
        )
        self._addresses = Addresses(host, port, others)
        self._events_waiting = events_waiting
        self._tls = tls
        self._handlers = handlers or {}
        self._token = token
        self._limits = limits
        self._subscriptions = KeptSubscriptions()
        self._services: dict[str, None] = {}

    async def call(
        self,
        service: ServiceDef,
        method: str,
        request: Any,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> Any:
        """As `EpoxyPeer.call`."""
        if service.full_name == HUB and method in _REMEMBERED:
            declared = service.method(method)
            payload = marshal.marshal(request, declared.request)
            reply = await self.call_bytes(
                HUB, method, payload, layer_data=layer_data, timeout_s=timeout_s
            )
            assert declared.response is not None  # all methods of the hub have one
            return marshal.unmarshal(reply.payload, declared.response)
        peer = await self._redialler.peer(timeout_s)
        return await peer.call(service, method, request, layer_data=layer_data, timeout_s=timeout_s)

    async def call_bytes(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> CallReply:
        """As `EpoxyPeer.call_bytes`."""
        peer = await self._redialler.peer(timeout_s)
        if service == HUB and method == "Subscribe":
            return await self._subscribe(peer, payload, layer_data, timeout_s)
        reply = await peer.call_bytes(
            service, method, payload, layer_data=layer_data, timeout_s=timeout_s
        )
        if service == HUB and method in _REMEMBERED:
            parsed = marshal.unmarshal(payload, hub_module().service(HUB).method(method).request)
            if method == "Serve":
                self._services |= dict.fromkeys(parsed.services)
            else:
                self._subscriptions.by_number.pop(parsed.subscription, None)
        return reply

    async def send_event(
        self,
        service: ServiceDef,
        method: str,
        event: Any,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> None:
        """As `EpoxyPeer.send_event`; `timeout_s` is for the connection."""
        peer = await self._redialler.peer(timeout_s)
        await peer.send_event(service, method, event, layer_data=layer_data)

    async def send_event_bytes(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        layer_data: bytes | None = None,
        timeout_s: float | None = 30.0,
    ) -> None:
        """As `EpoxyPeer.send_event_bytes`; `timeout_s` is for the connection."""
        peer = await self._redialler.peer(timeout_s)
        await peer.send_event_bytes(service, method, payload, layer_data=layer_data)

    async def _connect(self, host: str, port: int) -> EpoxyPeer:
        peer = EpoxyPeer(self._handlers, token=self._token, events_waiting=self._events_waiting)
        await dial(
            host,
            port,
            lambda now: EpoxyConnection("client", now, limits=self._limits),
            peer,
            tls=self._tls,
            timeout_s=self._connect_timeout_s,
            keep_alive=True,
        )
        return await self._opened(peer, self._authenticated(peer))

    async def _authenticated(self, peer: EpoxyPeer) -> None:
        """Identify before anything else: a hub with users accepts large frames only then, and
        disconnects a peer that does not within 10 s. Raises ClientError."""
        await peer.opened
        if self._token is None:
            return
        module = hub_module()
        nothing = module.struct("crosswire.Nothing").python_class()
        try:
            await peer.call(
                module.service(HUB), "Authenticate", nothing, timeout_s=self._connect_timeout_s
            )
        except CallFailed as failure:
            # Another server than a hub has no such method: it gets the credentials with each call.
            if failure.error_code != ErrorCode.METHOD_NOT_FOUND:
                raise
        except ConnectionLost:
            # A hub that has no room, or is about to stop, rejects with the same code: only one that
            # does not know the token rejects us for good.
            error = peer.end.error if isinstance(peer.end, ConnectionFailed) else None
            if isinstance(error, PeerError) and "nobody has this token" in str(error):
                raise RequestFailed("forbidden", "nobody has this token") from None
            raise

    async def _subscribe(
        self, peer: EpoxyPeer, payload: bytes, layer_data: bytes | None, timeout_s: float | None
    ) -> CallReply:
        """Subscribe and keep the subscription; gives the reply with the program's number."""
        module = hub_module()
        subscribed = module.struct(_SUBSCRIBED)
        kept: list[KeptSubscription] = []

        def keep(reply: bytes) -> None:
            try:
                parsed = marshal.unmarshal(payload, module.struct(_SUBSCRIPTION))
                number = marshal.unmarshal(reply, subscribed).subscription
            except BondDecodeError:
                return  # another server than a hub, where `Subscribe` means something else
            kept.append(
                self._subscriptions.add(
                    number,
                    payload,
                    destination=parsed.destination,
                    name=parsed.name,
                    start=parsed.start,
                )
            )
            peer.numbers.join(number, kept[0])

        reply = await peer.call_bytes(
            HUB, "Subscribe", payload, layer_data=layer_data, timeout_s=timeout_s, on_success=keep
        )
        if not kept:
            return reply
        answer = subscribed.python_class(subscription=kept[0].number)
        return CallReply(marshal.marshal(answer, subscribed), reply.layer_data)

    async def _restore(self, peer: EpoxyPeer) -> None:
        """Serve and subscribe again. Raises ClientError."""
        hub, timeout_s = hub_module().service(HUB), self._connect_timeout_s
        if self._services:
            services = hub.method("Serve").request.python_class(services=list(self._services))
            await peer.call(hub, "Serve", services, timeout_s=timeout_s)
        for kept in list(self._subscriptions.by_number.values()):
            request = hub.method("Subscribe").request
            parsed = marshal.unmarshal(kept.request, request)
            parsed.start = kept.start_again()

            def join(reply: bytes, kept: KeptSubscription = kept) -> None:
                number = marshal.unmarshal(reply, hub_module().struct(_SUBSCRIBED)).subscription
                peer.numbers.join(number, kept)

            await peer.call_bytes(
                HUB,
                "Subscribe",
                marshal.marshal(parsed, request),
                timeout_s=timeout_s,
                on_success=join,
            )
