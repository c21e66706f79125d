"""A client of a hub's HTTP API for commands, and formats that several commands print."""

from __future__ import annotations

import argparse
import http.client
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from crosswire.cli.known_hubs import DEFAULT_HUB
from crosswire.errors import ClientError, ConfigError, ConnectFailed, RequestFailed

__all__ = [
    "Api",
    "add_credential_options",
    "add_hub_options",
    "add_limit",
    "age",
    "api_of",
    "duration",
    "moment",
    "path_of",
    "print_json",
    "rate",
    "size",
]

_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 20
_PAGE = 1000
"""What a page of a list has at most."""


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for choosing a hub, and `--json`; `fill_in` sets what is not given."""
    group = parser.add_argument_group("hub")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--hub",
        metavar="URL",
        help="the hub's HTTP listener (default: that of the context, $CROSSWIRE_HUB, else "
        f"{DEFAULT_HUB})",
    )
    add_credential_options(group, which)
    parser.add_argument("--json", action="store_true", help="print the API's response as it is")


def add_limit(parser: argparse.ArgumentParser, default: int = 1000) -> None:
    """Add `--limit` to a command that lists something."""
    parser.add_argument(
        "--limit", type=_positive, default=default, help=f"maximum number (default: {default})"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def add_credential_options(
    group: argparse._ArgumentGroup, which: argparse._MutuallyExclusiveGroup
) -> None:
    """Add `--context` to `which`, and token and certificates, as all commands have them."""
    which.add_argument(
        "--context",
        metavar="NAME",
        help="a hub that `crosswire context add` has named (default: $CROSSWIRE_CONTEXT, else the "
        "one that `crosswire context use` has chosen)",
    )
    group.add_argument(
        "--token",
        help="your token (default: that of the context, else $CROSSWIRE_TOKEN; other users of the "
        "machine can see what is on the command line)",
    )
    group.add_argument("--ca", metavar="FILE", help="certificates to trust, PEM")
    group.add_argument("--cert", metavar="FILE", help="your certificate, PEM")
    group.add_argument("--key", metavar="FILE", help="your certificate's key, PEM")


def api_of(options: argparse.Namespace) -> Api:
    """The API at `--hub`. Raises ClientError for what is no URL of a hub, and ConfigError."""
    return Api(options.hub, options.token, ca=options.ca, cert=options.cert, key=options.key)


class Api:
    """One hub's API: methods return the decoded JSON response.

    They raise ConnectFailed without a response, RequestFailed for a status of 400 or more, and
    ClientError if the response is not JSON.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> None:
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
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = _tls_context(ca, cert, key)
            self._connection = http.client.HTTPSConnection(
                host, port, timeout=_TIMEOUT_S, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)

    def get(self, path: str, **query: object) -> Any:
        """GET; parameters that are None or empty are left out."""
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path)

    def list(self, path: str, key: str, most: int, **query: object) -> Any:
        """GET a list, page by page, until `most` rows: a response with the rows of all pages."""
        rows: list[Any] = []
        cursor: object = query.pop("cursor", "")
        while True:
            limit = min(most - len(rows), _PAGE)
            answer = self.get(path, limit=limit, cursor=cursor, **query)
            rows += answer[key]
            cursor = answer["next"]
            if not cursor or len(rows) >= most:
                return {**answer, key: rows}

    def readiness(self) -> Any:
        """What `/readyz` answers, whether the hub is ready or not."""
        return self._ask("GET", "/readyz", is_failure=False)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """POST a JSON body, `{}` by default."""
        return self._ask("POST", path, body or {})

    def patch(self, path: str, body: Mapping[str, object]) -> Any:
        """PATCH with a JSON body."""
        return self._ask("PATCH", path, body)

    def delete(self, path: str) -> Any:
        """DELETE without a body."""
        return self._ask("DELETE", path)

    def read(self, path: str) -> Iterator[bytes]:
        """GET a response that is not JSON, in chunks, over a connection that is kept.

        Raises like the others, and ConnectFailed where the response is cut.
        """
        try:
            self._connection.request("GET", self._prefix + path, headers=self._headers)
            response = self._connection.getresponse()
            if response.status >= 400:
                self._read(response.status, response.read())
            while chunk := response.read(_CHUNK_BYTES):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._no_response(error) from None

    def _no_response(self, error: Exception) -> ConnectFailed:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ConnectFailed(f"no response from {self._url}: {reason}")

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        is_failure: bool = True,
    ) -> Any:
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
            raise self._no_response(error) from None
        finally:
            self._connection.close()
        return self._read(response.status if is_failure else 200, answer)

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


def _tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS can't be used: {error}") from None
    return context


def path_of(*parts: object) -> str:
    """A URL path with the parts percent-encoded; slashes in names stay."""
    return "/" + "/".join(quote(str(part), safe="/") for part in parts)


def print_json(value: object) -> None:
    """One line of JSON on standard output."""
    print(msgspec.json.encode(value).decode())


def moment(text: str) -> str:
    """A time of the API as date and time of day in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(since: str) -> str:
    """The time since a time of the API, as `duration` shows it."""
    return duration((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())


def duration(seconds: float) -> str:
    """Seconds in their largest unit: 12s, 3.5m, 2.0h, 1.2d; below a second 250ms."""
    seconds = max(seconds, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.1f}ms" if seconds < 0.01 else f"{seconds * 1000:.0f}ms"
    return f"{seconds:.0f}s"


def rate(per_second: float) -> str:
    """A rate, with a decimal where it is small."""
    if not per_second:
        return "-"
    return f"{per_second:.1f}" if per_second < 10 else f"{per_second:,.0f}"


def size(size_bytes: float) -> str:
    """Bytes in a unit up to GiB: 512 B, 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
