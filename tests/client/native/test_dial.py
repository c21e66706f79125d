"""How an attempt to connect fails, where the reason comes from TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from crosswire.client.native.emp import EmpClient
from crosswire.errors import TlsFailed
from tests.conftest import TlsPair


@pytest.fixture
def demanding(tls: TlsPair) -> Iterator[int]:
    """The port of a server that wants a client certificate, and sends an alert without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    context.load_verify_locations(tls.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            accepted, _ = listening.accept()
            with context.wrap_socket(
                accepted, server_side=True, do_handshake_on_connect=False
            ) as secure:
                with suppress(ssl.SSLError):
                    secure.do_handshake()
                socket.socket.shutdown(secure, socket.SHUT_WR)
                # Closed with unread input, the socket would be reset, and the alert lost.
                while socket.socket.recv(secure, 4096):
                    pass

        server = threading.Thread(target=accept)
        server.start()
        yield listening.getsockname()[1]
        server.join(10)


async def test_an_alert_of_tls_is_the_reason(demanding: int, tls: TlsPair) -> None:
    context = ssl.create_default_context(cafile=tls.certificate)
    with pytest.raises(TlsFailed, match="certificate required"):
        async with EmpClient("localhost", demanding, tls=context):
            pass
