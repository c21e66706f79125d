"""A large message keeps the loop for a time that grows with its size, and not by much."""

from __future__ import annotations

import asyncio
import asyncio.events
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crosswire.config import PLAIN_LISTENERS, Config
from crosswire.envelope import Envelope, decode, encode, encode_run
from crosswire.gateways.payloads import BYTES, JSON
from crosswire.server.server import GATEWAYS, Server
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import Request
from tests.e2e.parties import PARTIES, Party

MIB = 1 << 20
SIZE_MIB = 8
ALLOWED_S = 0.020
ALLOWED_S_PER_MIB = 0.020
"""What one turn of the loop may take, of the processor's time: several times what it does take,
since a loaded machine is slower at that too."""


class HubThread:
    """A hub on a thread and a loop of its own, which measures the turns of that loop."""

    def __init__(self, data: Path) -> None:
        self.longest_s = 0.0
        self.what = ""
        self._data = data
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _run(self) -> None:
        listen = {name: "127.0.0.1:0" if name in GATEWAYS else "off" for name in PLAIN_LISTENERS}
        server = Server(Config(data=str(self._data), listen=listen, drain_s=0.1))
        await server.start()
        self.ports = {name: each.address.port for name, each in server.listeners.items()}
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stopped.wait()
        await server.stop()

    def note(self, took_s: float, callback: object) -> None:
        if threading.current_thread() is self._thread and took_s > self.longest_s:
            self.longest_s, self.what = took_s, repr(callback)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(20)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubThread]:
    thread = HubThread(tmp_path / "data")
    run: Any = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        callback, start = handle._callback, time.thread_time()
        run(handle)
        thread.note(time.thread_time() - start, callback)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    yield thread
    monkeypatch.undo()
    thread.stop()


@pytest.mark.alone
@pytest.mark.parametrize("kind", PARTIES, ids=lambda kind: kind.name)
async def test_a_turn_of_the_loop_is_short(hub: HubThread, kind: type[Party]) -> None:
    """In and out, as bytes and as JSON."""
    size = SIZE_MIB * MIB
    payloads = ((os.urandom(size), BYTES), (b'"' + b"x" * (size - 2) + b'"', JSON))
    async with kind(hub.ports) as producer, kind(hub.ports) as consumer:
        inbox = await consumer.consume("queue/q")
        for payload, content_type in payloads:
            hub.longest_s = 0.0
            await producer.produce("queue/q", payload, content_type)
            got = await asyncio.wait_for(inbox.get(), 30)
            assert got.payload == payload
            assert hub.longest_s <= ALLOWED_S + ALLOWED_S_PER_MIB * SIZE_MIB, hub.what


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1])
@pytest.mark.parametrize("destination", ["queue/q", "queue/" + "\u00e9" * 100, "topic/" + "x" * 60])
def test_a_large_record_has_the_same_form(size: int, destination: str) -> None:
    """It is put together in another way, so that its payload is copied once."""
    small = Envelope(destination=destination, kind="send", payload=b"x", properties={"a": 1.5})
    large = small.replace(payload=os.urandom(size), native={"k": b"v"}, id=7)
    record = encode(large)
    assert decode(record) == large
    assert encode_run([large, small]) == [record, encode(small)]


def test_a_large_request_has_the_same_form() -> None:
    data = b'{"a":"' + b"x" * (1 << 17) + b'"}'
    connection = EmpConnection("server", 0.0)
    connection.receive_data(bytes.fromhex("000000080000000001000000"), 0.0)
    connection.data_to_send()
    assert connection.send_request("op", data) == 1
    ((_, _, request),) = EmpDecoder("server").feed(b"".join(connection.data_to_send()))
    assert isinstance(request, Request) and (request.id, request.call().op) == (1, "op")
    assert bytes(request.call().data) == data
