"""What the servers for programs and tests have in common: a port, and the connected peers."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from crosswire.client.native.remote import RemotePeer
from crosswire.session import Session
from crosswire.wire.contract import Connection

__all__ = ["PeerServer"]

P = TypeVar("P", bound=RemotePeer)


class PeerServer(ABC, Generic[P]):
    """Accepts connections; `peers` are those connected now."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._server: asyncio.Server | None = None
        self.port = 0
        self.peers: set[P] = set()

    @abstractmethod
    def _make_peer(self) -> P:
        """The owner of a new connection's session."""

    @abstractmethod
    def _open(self, peer: P, now: float) -> Connection:
        """The protocol's connection, when the socket, and TLS if there is any, is ready."""

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Open a port and give its number; 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port, ssl=self._tls)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop listening, and close all connections with the protocol's goodbye."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(peer.close() for peer in list(self.peers)))

    def _accept(self) -> Session:
        peer = self._make_peer()

        def connect(now: float) -> Connection:
            self.peers.add(peer)
            peer.ended.add_done_callback(lambda _: self.peers.discard(peer))
            return self._open(peer, now)

        return Session(connect, peer)
