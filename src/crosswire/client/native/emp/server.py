"""An EMP server for programs and tests."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from crosswire.client.native.emp.peer import EmpPeer, Handler
from crosswire.client.native.listening import PeerServer
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.frames import EmpLimits

__all__ = ["EmpServer"]


class EmpServer(PeerServer[EmpPeer]):
    """Accepts connections and answers with `handlers`; `peers` are those connected now."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        tls: ssl.SSLContext | None = None,
        limits: EmpLimits | None = None,
    ) -> None:
        super().__init__(tls=tls)
        self._handlers = handlers
        self._limits = limits

    def _make_peer(self) -> EmpPeer:
        return EmpPeer(self._handlers)

    def _open(self, _peer: EmpPeer, now: float) -> EmpConnection:
        return EmpConnection("server", now, limits=self._limits)
