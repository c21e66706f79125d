"""An Epoxy server for programs and tests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping

from crosswire.client.native.epoxy.peer import EpoxyPeer, Handlers
from crosswire.client.native.listening import PeerServer
from crosswire.errors import ConnectionRejected, ServiceUnavailable
from crosswire.session import use_keep_alive
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.frames import EpoxyLimits

__all__ = ["EpoxyServer"]


class EpoxyServer(PeerServer[EpoxyPeer]):
    """Accepts connections and answers with `handlers`; `peers` are those connected now.

    `refuse` is called with the transport (address, certificate) of every new connection, and gives
    the reason for which it is rejected, or None. So are those above `most_peers`.
    """

    def __init__(
        self,
        handlers: Handlers | Iterable[Handlers],
        *,
        tls: ssl.SSLContext | None = None,
        limits: EpoxyLimits | None = None,
        refuse: Callable[[asyncio.Transport], str | None] | None = None,
        most_peers: int | None = None,
    ) -> None:
        super().__init__(tls=tls)
        several = [handlers] if isinstance(handlers, Mapping) else handlers
        self._handlers = {name: handler for each in several for name, handler in each.items()}
        self._limits = limits
        self._refuse = refuse
        self._most_peers = most_peers

    def _make_peer(self) -> EpoxyPeer:
        return EpoxyPeer(self._handlers)

    def _open(self, peer: EpoxyPeer, now: float) -> EpoxyConnection:
        connection = EpoxyConnection("server", now, limits=self._limits)
        transport = peer.session.transport
        use_keep_alive(transport)
        if self._most_peers is not None and len(self.peers) > self._most_peers:
            connection.fail(ServiceUnavailable("no room for another connection"))
        elif self._refuse is not None and (reason := self._refuse(transport)):
            connection.fail(ConnectionRejected(reason))
        return connection
