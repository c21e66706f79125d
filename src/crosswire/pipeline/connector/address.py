"""The client of a hub's HTTP API for Spark's driver and executors, with retries."""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable, Iterator, Mapping
from struct import Struct as Layout
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import pyarrow as pa

from crosswire.errors import ClientError, ConnectFailed, RequestFailed

__all__ = ["DEFAULT_HUB", "PATIENCE_S", "HubAddress", "path_of"]

DEFAULT_HUB: Final = "http://127.0.0.1:7380"
PATIENCE_S: Final = 60.0
_TIMEOUT_S: Final = 60.0
_FIRST_DELAY_S: Final = 0.1
_LONGEST_DELAY_S: Final = 5.0
_RETRIED_STATUSES: Final = frozenset((429, 502, 503, 504))
_JSON: Final = "application/json"
_FILE_HEADER: Final = Layout("<qqq")
_FILE_BYTES: Final = 1 << 27
"""Above what a hub sends; larger ones are not held in memory."""

T = TypeVar("T")


class _RetryLater(Exception):
    """There was no answer, or one like 503: the request is retried until `patience_s` are over."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(str(error))
        self.error = error


class HubAddress(msgspec.Struct, frozen=True):
    """A hub's URL and token, sent from the driver to executors. Each call opens a connection.

    A request is retried for `patience_s` if the hub can't be reached or is not ready, so that a
    restart of the hub fails no query. Raises ConnectFailed if there is no answer in that time,
    RequestFailed if the hub refuses, ClientError if it is no hub.
    """

    url: str = DEFAULT_HUB
    token: str = ""
    patience_s: float = PATIENCE_S

    # Spark prints options and partitions: the token must not be in its logs.
    def __repr__(self) -> str:
        return f"HubAddress({self.url!r})"

    def check(self) -> None:
        """Raises ClientError if the URL is none."""
        _split(self.url)

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Any:
        """The decoded JSON answer to a GET."""
        return self._retry(lambda: self._send("GET", _with_query(path, query), None, _JSON))

    def post(self, path: str, body: object, *, repeatable: bool = True) -> Any:
        """The decoded JSON answer to a POST of JSON. A request that is not `repeatable` is sent
        once, without retries: a lost answer does not mean that it was not done."""
        return self.post_bytes(path, msgspec.json.encode(body), _JSON, repeatable=repeatable)

    def post_bytes(
        self,
        path: str,
        body: bytes | memoryview | pa.Buffer,
        content_type: str,
        query: Mapping[str, object] | None = None,
        *,
        repeatable: bool = True,
    ) -> Any:
        """The decoded JSON answer to a POST of bytes."""

        def send() -> Any:
            return self._send("POST", _with_query(path, query), memoryview(body), content_type)

        return self._retry(send) if repeatable else self._once(send)

    def batches(
        self, path: str, body: object
    ) -> Iterator[tuple[pa.RecordBatch, Mapping[bytes, bytes]]]:
        """The record batches of the answer to a POST of JSON, each with its metadata.

        A connection that breaks ends the iteration instead of raising: the caller continues with
        another request after the last batch.
        """
        connection, response = self._retry(lambda: self._open_stream(path, body))
        try:
            yield from self._read_stream(response)
        finally:
            connection.close()

    def files(self, path: str, body: object) -> Iterator[tuple[int, int, bytearray]]:
        """The Parquet files of the answer to a POST of JSON, each with its first and last id.

        Like `batches` it ends if the connection breaks: only whole files are given. Raises
        ClientError for one that is larger than a hub sends."""
        connection, response = self._retry(lambda: self._open_stream(path, body))
        try:
            while len(head := _read_exactly(response, _FILE_HEADER.size)) == _FILE_HEADER.size:
                first, last, size = _FILE_HEADER.unpack(head)
                if not 0 < size <= _FILE_BYTES:
                    raise ClientError(f"{self.url} is no hub: it sends a file of {size} bytes")
                file = _read_exactly(response, size)
                if len(file) < size:
                    return
                yield first, last, file
        finally:
            connection.close()

    # One request.

    def _retry(self, send: Callable[[], T]) -> T:
        # Backoff with jitter: all tasks of a stage lose a restarting hub at the same time.
        deadline = time.monotonic() + self.patience_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return send()
            except _RetryLater as later:
                if time.monotonic() + delay_s > deadline:
                    raise later.error from None
            time.sleep(delay_s * random.uniform(0.8, 1.2))
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)

    def _once(self, send: Callable[[], T]) -> T:
        try:
            return send()
        except _RetryLater as later:
            raise later.error from None

    def _send(self, method: str, path: str, body: memoryview | None, content_type: str) -> Any:
        connection, response = self._request(method, path, body, content_type)
        try:
            return self._read_json(response)
        finally:
            connection.close()

    def _open_stream(
        self, path: str, body: object
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        data = memoryview(msgspec.json.encode(body))
        connection, response = self._request("POST", path, data, _JSON)
        if response.status != 200:
            try:
                self._read_json(response)
            finally:
                connection.close()
            raise ClientError(f"{self.url} is no hub: it answers {response.status}")
        return connection, response

    def _request(
        self, method: str, path: str, body: memoryview | None, content_type: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        scheme, host, port, prefix = _split(self.url)
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, port, timeout=_TIMEOUT_S)
        headers = {"accept": "*/*"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        if body is not None:
            headers["content-type"] = content_type
        try:
            connection.request(method, prefix + path, body, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _RetryLater(ConnectFailed(self._no_answer(error))) from None

    def _read_json(self, response: http.client.HTTPResponse) -> Any:
        try:
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _RetryLater(ConnectFailed(self._no_answer(error))) from None
        try:
            value = msgspec.json.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            no_hub = ClientError(f"{self.url} is no hub: its answer is not JSON")
            if response.status in _RETRIED_STATUSES:
                raise _RetryLater(no_hub) from None
            raise no_hub from None
        if response.status < 400:
            return value
        failure = _failure(response.status, value)
        if response.status in _RETRIED_STATUSES:
            raise _RetryLater(failure)
        raise failure

    def _read_stream(
        self, response: http.client.HTTPResponse
    ) -> Iterator[tuple[pa.RecordBatch, Mapping[bytes, bytes]]]:
        try:
            with pa.ipc.open_stream(pa.PythonFile(response, mode="r")) as reader:
                while True:
                    batch, metadata = reader.read_next_batch_with_custom_metadata()
                    yield batch, dict(metadata or {})
        except StopIteration:
            return
        except (OSError, http.client.HTTPException, pa.ArrowInvalid):
            # The connection broke, or the hub ended the answer. `fetch` continues after the last
            # batch, and fails if requests bring nothing new for too long.
            return

    def _no_answer(self, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"no answer from the hub at {self.url}: {reason}"


def _read_exactly(response: http.client.HTTPResponse, size: int) -> bytearray:
    """That many bytes, or fewer if the answer ends or breaks off before."""
    data = bytearray(size)
    view, position = memoryview(data), 0
    try:
        while position < size and (count := response.readinto(view[position:])):
            position += count
    except (OSError, http.client.HTTPException):
        pass  # as if it had ended: the caller continues with another request
    view.release()
    del data[position:]
    return data


def path_of(*parts: object) -> str:
    """An API path of its parts, URL-encoded except for slashes within names."""
    return "/" + "/".join(quote(str(part), safe="/") for part in parts)


def _with_query(path: str, query: Mapping[str, object] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _split(url: str) -> tuple[str, str, int | None, str]:
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ClientError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ClientError(f"{url!r} is not the URL of a hub")
    return parts.scheme, host, port, parts.path.rstrip("/")


def _failure(status: int, value: object) -> RequestFailed:
    if not isinstance(value, dict):
        return RequestFailed(str(status), "")
    return RequestFailed(str(value.get("error", status)), str(value.get("description", "")))
