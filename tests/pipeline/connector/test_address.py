"""Requests to a hub: retried where it is not ready, and not where it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pytest

from crosswire.errors import ClientError, ConnectFailed, RequestFailed
from crosswire.pipeline.connector.address import HubAddress, path_of
from crosswire.server.log_reader import FILE_HEADER

Answer = tuple[int, bytes]


@contextmanager
def peer(*answers: Answer, length: int | None = None) -> Iterator[HubAddress]:
    """Answers one after the other, then the last one; `length` is a body's announced length."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def do_GET(self) -> None:
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("content-length", str(length or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody wants to know."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield HubAddress(f"http://127.0.0.1:{server.server_port}", patience_s=5.0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


BUSY = (503, b'{"error": "unavailable", "description": "starting"}')
DONE = (200, b'{"done": true}')


def table(*batches: list[int]) -> bytes:
    sink = pa.BufferOutputStream()
    schema = pa.schema([("id", pa.int64())])
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            made = pa.record_batch([pa.array(batch, pa.int64())], schema=schema)
            writer.write_batch(made, custom_metadata={"last": str(batch[-1])})
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    "ask",
    [
        lambda hub: hub.get("/x", {"a": 1, "b": None}),
        lambda hub: hub.post("/x", {"a": 1}),
        lambda hub: hub.post_bytes("/x", b"abc", "text/plain"),
    ],
)
def test_a_hub_that_is_not_ready_is_asked_again(ask: Callable[[HubAddress], object]) -> None:
    with peer(BUSY, BUSY, DONE) as hub:
        assert ask(hub) == {"done": True}


def test_what_must_not_be_repeated_is_not() -> None:
    with peer(BUSY, DONE) as hub, pytest.raises(RequestFailed, match="starting"):
        hub.post("/x", {}, repeatable=False)


def test_a_refused_request_is_not_retried() -> None:
    no = (403, b'{"error": "forbidden", "description": "not you"}')
    with peer(no, DONE) as hub, pytest.raises(RequestFailed) as caught:
        hub.get("/x")
    assert (caught.value.code, caught.value.description) == ("forbidden", "not you")


def test_patience_has_an_end() -> None:
    with peer(DONE) as hub:
        gone = HubAddress(hub.url, patience_s=0.2)
    with pytest.raises(ConnectFailed, match="Connection refused"):
        gone.get("/x")


@pytest.mark.parametrize("status", [200, 404])
def test_no_hub_is_reported(status: int) -> None:
    with peer((status, b"<html>")) as hub, pytest.raises(ClientError, match="is no hub"):
        hub.get("/x")


def test_batches_come_with_their_metadata() -> None:
    with peer(BUSY, (200, table([1, 2], [3]))) as hub:
        found = [
            (batch.column(0).to_pylist(), dict(metadata)) for batch, metadata in hub.batches("/", 0)
        ]
    assert found == [([1, 2], {b"last": b"2"}), ([3], {b"last": b"3"})]


def test_a_stream_that_breaks_off_gives_what_came_whole() -> None:
    whole = table([1, 2], [3, 4])
    half = whole[: len(table([1, 2]))]
    with peer((200, half), length=len(whole)) as hub:
        found = [batch.column(0).to_pylist() for batch, _ in hub.batches("/", 0)]
    assert found == [[1, 2]]


def file_of(first: int, last: int, data: bytes) -> bytes:
    return FILE_HEADER.pack(first, last, len(data)) + data


def whole_files(hub: HubAddress) -> list[tuple[int, int, bytes]]:
    return [(first, last, bytes(data)) for first, last, data in hub.files("/", 0)]


def test_files_come_with_their_ids() -> None:
    with peer(BUSY, (200, file_of(1, 2, b"abc") + file_of(3, 9, b"d"))) as hub:
        assert whole_files(hub) == [(1, 2, b"abc"), (3, 9, b"d")]


@pytest.mark.parametrize("left", [1, FILE_HEADER.size, FILE_HEADER.size + 2])
def test_files_that_break_off_are_left_out(left: int) -> None:
    whole = file_of(1, 2, b"abc") + file_of(3, 9, b"def")
    half = file_of(1, 2, b"abc") + file_of(3, 9, b"def")[:left]
    with peer((200, half), length=len(whole)) as hub:
        assert whole_files(hub) == [(1, 2, b"abc")]


@pytest.mark.parametrize("size", [-1, 0, 1 << 40])
def test_files_of_impossible_sizes_are_reported(size: int) -> None:
    answer = (200, FILE_HEADER.pack(1, 2, size))
    with peer(answer) as hub, pytest.raises(ClientError, match="is no hub"):
        list(hub.files("/", 0))


@pytest.mark.parametrize("url", ["http://", "ftp://x", "http://x:y"])
def test_no_url_is_reported(url: str) -> None:
    with pytest.raises(ClientError, match="URL"):
        HubAddress(url).check()


def test_paths_are_quoted() -> None:
    assert path_of("v1", "queues", "a b/c?d") == "/v1/queues/a%20b/c%3Fd"
