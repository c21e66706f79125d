"""A client of a hub's HTTP API for commands, and formats that several commands print."""

from __future__ import annotations

import argparse
import http.client
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from crosswire.errors import ClientError, ConnectFailed, RequestFailed

__all__ = ["Api", "add_hub_options", "age", "api_of", "moment", "path_of", "print_json", "size"]

_DEFAULT = "http://127.0.0.1:7380"
_TIMEOUT_S = 60.0


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    """Add `--hub`, `--token` and `--json`."""
    parser.add_argument(
        "--hub",
        metavar="URL",
        default=os.environ.get("CROSSWIRE_HUB", _DEFAULT),
        help=f"the hub's HTTP listener (default: $CROSSWIRE_HUB, else {_DEFAULT})",
    )
    parser.add_argument(
        "--token",
        default=os.environ.get("CROSSWIRE_TOKEN"),
        help="your token (default: $CROSSWIRE_TOKEN, which other users of the machine can't see)",
    )
    parser.add_argument("--json", action="store_true", help="print the API's response as it is")


def api_of(options: argparse.Namespace) -> Api:
    """The API at `--hub`. Raises ClientError for what is no URL of a hub."""
    return Api(options.hub, options.token)


class Api:
    """One hub's API: methods return the decoded JSON response.

    They raise ConnectFailed without a response, RequestFailed for a status of 400 or more, and
    ClientError if the response is not JSON.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ClientError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ClientError(f"{url!r} is not the URL of a hub")
        self._url = url
        self._prefix = parts.path.rstrip("/")
        self._headers = {"accept": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(host, port, timeout=_TIMEOUT_S)

    def get(self, path: str, **query: object) -> Any:
        """GET; parameters that are None or empty are left out."""
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """POST a JSON body, `{}` by default."""
        return self._ask("POST", path, body or {})

    def patch(self, path: str, body: Mapping[str, object]) -> Any:
        """PATCH with a JSON body."""
        return self._ask("PATCH", path, body)

    def delete(self, path: str) -> Any:
        """DELETE without a body."""
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        headers = dict(self._headers)
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["content-type"] = "application/json"
        try:
            self._connection.request(method, self._prefix + path, data, headers)
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConnectFailed(f"no response from {self._url}: {reason}") from None
        finally:
            self._connection.close()
        return self._read(response.status, answer)

    def _read(self, status: int, answer: bytes) -> Any:
        try:
            value = msgspec.json.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ClientError(f"{self._url} is no hub: its response is not JSON") from None
        if status >= 400:
            known = isinstance(value, dict)
            code = str(value.get("error", status)) if known else str(status)
            raise RequestFailed(code, str(value.get("description", "")) if known else "")
        return value


def path_of(*parts: object) -> str:
    """A URL path with the parts percent-encoded; slashes in names stay."""
    return "/" + "/".join(quote(str(part), safe="/") for part in parts)


def print_json(value: object) -> None:
    """One line of JSON on standard output."""
    print(msgspec.json.encode(value).decode())


def moment(time_s: float) -> str:
    """Seconds since 1970 as date and time of day in UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(since_s: float) -> str:
    """The time since `since_s` in its largest unit: 12s, 3.5m, 2.0h, 1.2d."""
    seconds = max(time.time() - since_s, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}"
    return f"{seconds:.0f}s"


def size(size_bytes: float) -> str:
    """Bytes in a unit up to GiB: 512 B, 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
