"""A way to a hub with gates in it: a request, or its answer, is stopped there until told to go."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

__all__ = ["Gate", "Proxy", "proxy_to"]

WAIT_S = 120.0


class Gate:
    """Stops one request whose path has `part` in it: before the hub sees it, or its answer."""

    def __init__(self, part: str, when: Literal["before", "after"]) -> None:
        self.part = part
        self.when = when
        self._reached = threading.Event()
        self._opened = threading.Event()
        self._goes_on = True

    def wait(self) -> None:
        """Until the request is here."""
        assert self._reached.wait(WAIT_S), f"nobody asked for {self.part}"

    def open(self) -> None:
        self._opened.set()

    def cut(self) -> None:
        """Let go of the connection instead."""
        self._goes_on = False
        self._opened.set()

    def stop(self) -> bool:
        """For the request: may it go on?"""
        self._reached.set()
        self._opened.wait(WAIT_S)
        return self._goes_on


class Proxy:
    def __init__(self, port: int) -> None:
        self.target = port
        self.paths: list[str] = []
        self._gates: list[Gate] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.forward(self)

            do_POST = do_GET  # noqa: N815  what the class wants it to be called

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def gate(self, part: str, when: Literal["before", "after"]) -> Gate:
        gate = Gate(part, when)
        with self._lock:
            self._gates.append(gate)
        return gate

    def _gate_for(self, path: str) -> Gate | None:
        with self._lock:
            found = next((gate for gate in self._gates if gate.part in path), None)
            if found is not None:
                self._gates.remove(found)
        return found

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        self.paths.append(request.path)
        gate = self._gate_for(request.path)
        request.close_connection = True
        if gate is not None and gate.when == "before" and not gate.stop():
            return
        headers = {
            name: value
            for name in ("content-type", "authorization")
            if (value := request.headers.get(name)) is not None
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        try:
            connection.request(request.command, request.path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            return  # the hub is gone: so is this connection
        finally:
            connection.close()
        if gate is not None and gate.when == "after" and not gate.stop():
            return
        try:
            request.send_response(response.status)
            request.send_header("content-type", response.headers.get("content-type", ""))
            request.send_header("content-length", str(len(answer)))
            request.end_headers()
            request.wfile.write(answer)
        except OSError:
            return  # who asked was killed


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()
