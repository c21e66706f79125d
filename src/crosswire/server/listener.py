"""Listeners: sockets that make a gateway for each connection."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from crosswire.config import Address
from crosswire.errors import ConfigError
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.gateway import Gateway
from crosswire.logs import log_event
from crosswire.server.tls_acceptor import TlsAcceptor
from crosswire.session import Session

__all__ = ["Listener", "cannot_listen"]

_log = logging.getLogger("crosswire.gateways")


def cannot_listen(name: str, address: Address, error: OSError) -> ConfigError:
    """An error with listener, address and reason: event loops word the reason differently, so it is
    taken from the error number."""
    code = error.errno or 0
    reason = os.strerror(code) if code > 0 else error.strerror or str(error)
    return ConfigError(f"can't listen on {address} for {name}: {reason}")


class Listener:
    """A listening socket of one protocol."""

    def __init__(
        self,
        name: str,
        gateway: type[Gateway],
        context: GatewayContext,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.gateway = gateway
        self.context = context
        self._tls = tls
        self._server: asyncio.Server | TlsAcceptor | None = None
        self.address = Address("", 0)

    async def open(self, address: Address) -> Address:
        """Listen; returns the address with the port that was taken. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            if self._tls is not None:
                self._server = TlsAcceptor(
                    self._accept, self._tls, self.context.handshakes, self._handshake_failed
                )
                port = await self._server.open(address.host, address.port)
            else:
                self._server = await loop.create_server(
                    self._accept, address.host, address.port, backlog=1024
                )
                port = self._server.sockets[0].getsockname()[1]
        except OSError as error:
            raise cannot_listen(self.name, address, error) from error
        self.address = Address(address.host, port)
        return self.address

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _accept(self) -> Session:
        gateway = self.gateway(self.context, self.name)
        hub = self.context.hub
        return Session(gateway.open, gateway, callbacks=hub.callbacks, turns=hub.turns)

    def _handshake_failed(self) -> None:
        self.context.count("failed", self.gateway.protocol, "TlsHandshake")
        log_event(_log, logging.WARNING, "failed", listener=self.name, error="TlsHandshake")
