"""The Starlette application: guards first, then routes to the operations and all other pages."""

from __future__ import annotations

import asyncio
import functools
import inspect
import ipaddress
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from crosswire.access import ANONYMOUS
from crosswire.envelope import LARGEST_INTEGER
from crosswire.error_texts import public_text
from crosswire.errors import CrosswireError
from crosswire.hub.shares import holder_of_address
from crosswire.logs import log_event
from crosswire.server.server import Server
from crosswire.web.api import OPERATIONS
from crosswire.web.body_slots import LARGE_BYTES, BodySlots
from crosswire.web.console_files import console_routes
from crosswire.web.contract import (
    ARROW,
    BYTES,
    EVENT_STREAM,
    JSON,
    Chunks,
    FailureResponse,
    Operation,
    OperationRequest,
    failure_of,
)
from crosswire.web.held_analyses import HeldAnalyses
from crosswire.web.long_work import LongWork
from crosswire.web.metrics_page import metrics_page
from crosswire.web.numbers import check_numbers
from crosswire.web.openapi import openapi
from crosswire.web.readiness import readiness
from crosswire.web.replays import Replays
from crosswire.web.report_page import report_route
from crosswire.web.report_tickets import ReportTickets
from crosswire.web.running_requests import RunningRequests
from crosswire.web.stream_slots import StreamSlots
from crosswire.web.times import is_time

__all__ = ["App"]

_log = logging.getLogger("crosswire.web")

_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_BODY_S: Final = 10.0
_UPLOAD_S: Final = 120.0
_NO_BODY_BYTES: Final = 1024
_DIGITS: Final = 19
_RETRY_S: Final = 5
_TYPES: Final = {"json": JSON, "arrow": ARROW, "bytes": BYTES}
_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}

_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


class _IdConvertor(IntegerConvertor):
    """An id in a path. One with too many digits becomes an id that is too large to be valid: for
    thousands of digits Python's own conversion raises an error that would become a 500."""

    def convert(self, value: str) -> int:
        return int(value) if len(value) <= _DIGITS else LARGEST_INTEGER + 1


register_url_convertor("id", _IdConvertor())


class App:
    """The ASGI application of one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.replays = Replays()
        self._work = LongWork(server.enter_turn, server.is_turn_over)
        self._streams = StreamSlots()
        self._tickets = ReportTickets()
        self._large_bodies = BodySlots()
        self._uploads = BodySlots()
        self.analyses = HeldAnalyses(server)
        routes = [_route(self, *each) for each in _in_order(OPERATIONS)]
        routes += [
            *(
                Route(path, _without_parameters(handler), methods=["GET"])
                for path, handler in (
                    ("/openapi.json", self._openapi),
                    ("/healthz", self._healthz),
                    ("/readyz", self._readyz),
                    ("/metrics", self._metrics),
                )
            ),
            *console_routes(),
            report_route(server, self._tickets),
        ]
        handlers: dict[type[Exception], Callable[[Request, Exception], Response]] = {
            HTTPException: _http_failure,
            CrosswireError: self._hub_failure,
            Exception: _internal_failure,
        }
        application = _Guard(
            Starlette(routes=routes, exception_handlers=handlers),
            server,
        )
        self.requests = RunningRequests(application, _refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry."""
        await self.requests(scope, receive, send)

    async def perform(self, operation: Operation, request: Request) -> Response:
        """Authenticate and decode a request, run the operation, and encode its result.

        Raises HTTPException and CrosswireError, which Starlette's handlers turn into responses.
        """
        # Before the body is read: the hub buffers nothing for unauthenticated clients.
        principal = await self._authenticate(request, operation.needs)
        request.state.identified(principal)
        request.state.principal = principal
        if _is_large(operation, request):
            # What is written to a file as it arrives takes long, but little memory.
            slots = self._uploads if operation.takes == "bytes" else self._large_bodies
            async with slots.slot(principal or self._connection(request)):
                return await self._perform(operation, request, principal)
        return await self._perform(operation, request, principal)

    def _hub_failure(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, CrosswireError)
        if public_text(error) != str(error):
            log_event(
                _log, logging.ERROR, "request failed", path=request.url.path, reason=str(error)
            )
        principal = getattr(request.state, "principal", ANONYMOUS)
        is_administrator = self.server.context.access.may_administer(principal)
        return _failure(*failure_of(error, is_administrator=is_administrator))

    async def _perform(self, operation: Operation, request: Request, principal: str) -> Response:
        if not operation.on_standby:
            self.server.require_hub()
        query: msgspec.Struct | None = None
        body: msgspec.Struct | bytes | AsyncIterator[bytes] | None = None
        if operation.method in ("POST", "PATCH"):
            _check_type(request, _TYPES[operation.takes])
        try:
            given = _parameters(request, operation.query)
            if operation.query is not None:
                query = msgspec.convert(given, operation.query, strict=False)
            if operation.takes == "arrow":
                body = await self._body(request, self.server.config.ingest.part_bytes)
            elif operation.takes == "bytes":
                body = self._chunks(request, self.server.config.http.capture_bytes)
            elif operation.body is not None:
                most = self.server.config.http.body_bytes
                data = await self._body(request, min(operation.body_bytes or most, most))
                body = await self._decode(data, operation.body)
            elif operation.method in ("POST", "PATCH"):
                data = await self._body(request, _NO_BODY_BYTES)
                if data and msgspec.json.decode(data) != {}:
                    raise HTTPException(400, "this operation takes no body, or an empty object")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _failure(400, FailureResponse("invalid_request", str(error)))
        path = {name: _whole(value) for name, value in request.path_params.items()}
        for given_in in (path, query, None if operation.checks_numbers else body):
            check_numbers(given_in)
        ask = OperationRequest(
            self.server,
            self.replays,
            principal=principal,
            path=path,
            query=query,
            body=body,
            identify=functools.partial(self._identify, request),
            work=self._work,
            streams=self._streams,
            is_read=operation.on_standby,
            analyses=self.analyses,
            tickets=self._tickets,
            connection=self._connection(request),
            hold=request.state.hold,
        )
        self.server.enter_turn()
        answer = operation.handler(ask)
        if isinstance(answer, AsyncGenerator):
            response = await _stream(answer, operation.streams)
            if operation.streams == EVENT_STREAM:
                # It takes as long as the client wants.
                request.state.streaming()
            return response
        if inspect.isawaitable(answer):
            answer = await answer
        response = _answer(answer)
        if len(response.body) > LARGE_BYTES:
            request.state.check_room(len(response.body))
        return response

    # Principal and body of a request.

    async def _authenticate(self, request: Request, needs: str) -> str:
        """Like `_principal`; a failure takes the longer, the more of them its address has had."""
        try:
            return self._principal(request, needs)
        except HTTPException as failure:
            if failure.status_code == 401 and "authorization" in request.headers:
                context = self.server.context
                host = request.client.host if request.client is not None else ""
                delay_s = context.sign_ins.fail(host, context.now())
                if delay_s:
                    context.count("delayed", "http", "sign-in")
                    request.state.refused()
                    await asyncio.sleep(delay_s)
            raise

    def _principal(self, request: Request, needs: str) -> str:
        """The authenticated user. Raises HTTPException: 401 for none, 403 without the right."""
        access = self.server.context.access
        if access.open or needs == "nothing":
            return ANONYMOUS
        principal = self._identify(request)
        if principal is None:
            self.server.context.count("unauthenticated", "http")
            raise HTTPException(
                401,
                "a bearer token or a client certificate of a user is needed",
                {"www-authenticate": "Bearer"},
            )
        rights = {
            "administer": access.may_administer,
            "replicate": access.may_replicate,
            "observe": access.may_observe,
        }
        may = rights.get(needs)
        if may is not None and not may(principal):
            self.server.context.count("forbidden", "http")
            raise HTTPException(403, f"{principal} may not {needs} this hub")
        return principal

    def _connection(self, request: Request) -> str:
        """What the request's messages have for their connection: see `OperationRequest`."""
        context = self.server.context
        host = request.client.host if request.client is not None else ""
        owner = context.owner_of(ANONYMOUS, host) if context.access.open and host else None
        return holder_of_address(owner) if owner else ""

    def _identify(self, request: Request) -> str | None:
        """The user whom the request's token, or else its connection's certificate, identifies now;
        None if there is none. Asked again while a response is streamed."""
        context = self.server.context
        if context.access.open:
            return ANONYMOUS
        given = request.headers.get("authorization")
        if given is None:
            return context.by_certificate(request.state.certificate)
        scheme, _, token = given.partition(" ")
        if scheme.lower() != "bearer":
            return None
        host = request.client.host if request.client is not None else ""
        return context.by_token(token.strip(), host)

    async def _body(self, request: Request, most: int) -> bytes:
        """The body. Raises HTTPException if it is too large, or too slow."""
        _check_announced(request, most)
        chunks = []
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in _counted(request, most):
                    chunks.append(chunk)
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time") from None
        return b"".join(chunks)

    async def _decode(self, data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
        """The body as this. One that is large begins and ends a turn of the event loop: it can't be
        decoded in parts."""
        if len(data) <= LARGE_BYTES:
            return msgspec.json.decode(data, type=kind)
        await asyncio.sleep(0)
        self.server.enter_turn()
        body = msgspec.json.decode(data, type=kind)
        await asyncio.sleep(0)
        return body

    async def _chunks(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """The body as it arrives, for a handler that writes it to a file. Raises HTTPException as
        `_body` does."""
        _check_announced(request, most)
        try:
            async with asyncio.timeout(_UPLOAD_S):
                async for chunk in _counted(request, most):
                    yield chunk
                    request.state.stored(len(chunk))
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time") from None

    # Routes that are not in the table of operations.

    async def _openapi(self, _request: Request) -> Response:
        # Generated once, which takes a while.
        return _json(200, await asyncio.to_thread(openapi))

    async def _healthz(self, _request: Request) -> Response:
        """Liveness: the response shows that the event loop runs. Nothing else is checked, so that a
        full disk does not make a supervisor restart the hub."""
        return _json(200, {"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        """Readiness. Anybody may ask whether the hub is ready, only observers why it is not: errors
        and damage name files, destinations and users."""
        status, answer = readiness(self.server)
        principal = self._identify(request)
        if principal is None or not self.server.context.access.may_observe(principal):
            answer = {key: answer[key] for key in ("status", "leader") if key in answer}
        return _json(status, answer)

    async def _metrics(self, request: Request) -> Response:
        await self._authenticate(request, "observe")
        text = await metrics_page(self.server, self._work)
        return Response(text, headers={**_HEADERS, "content-type": _METRICS})


class _Guard:
    """Protects browsers: a page of another site must not reach the hub through them.

    The Host header must name the hub (an IP address, localhost, or a name from the configuration):
    a foreign name that resolves to the hub's address (DNS rebinding) is refused. An Origin header
    must name the same host.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            problem = self._problem(Request(scope))
            if problem is not None:
                self._server.context.count("rejected", "http")
                await problem(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        try:
            is_ours = len(hosts) == 1 and self._is_ours(hosts[0])
        except ValueError:  # an open bracket
            return _failure(400, FailureResponse("invalid_request", "the Host is no address"))
        if not is_ours:
            return _failure(
                421, FailureResponse("wrong_host", "the Host header does not name this hub")
            )
        origin = request.headers.get("origin")
        try:
            is_foreign = origin is not None and urlsplit(origin).netloc.lower() != hosts[0].lower()
        except ValueError:  # an open bracket
            return _failure(400, FailureResponse("invalid_request", "the Origin is no address"))
        if is_foreign:
            return _failure(
                403,
                FailureResponse("wrong_origin", "requests from pages of other origins are refused"),
            )
        return None

    def _is_ours(self, host: str) -> bool:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name in self._server.config.http.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _check_type(request: Request, wanted: str) -> None:
    """Raises HTTPException for another content type.

    Also without a body: a page of another origin can't send these types without a preflight
    request, which has no route here; forms and plain text it can send, and some browsers omit
    Origin then.
    """
    if _content_type(request) != wanted:
        raise HTTPException(415, f"the content type must be {wanted}")


def _check_announced(request: Request, most: int) -> None:
    """An announced size is refused before reading. A chunked body announces none: it is counted as
    it arrives."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and (len(announced) > _DIGITS or int(announced) > most):
        raise HTTPException(413, f"a body has at most {most} bytes")


async def _counted(request: Request, most: int) -> AsyncIterator[bytes]:
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise HTTPException(413, f"a body has at most {most} bytes")
            yield chunk
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None


def _parameters(request: Request, kind: type[msgspec.Struct] | None) -> dict[str, str]:
    """The parameters of the query. Raises HTTPException for one that is unknown or given twice: it
    would be ignored, and the response be another than the client expects."""
    known = () if kind is None else kind.__struct_fields__
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            hint = f"it has {', '.join(known)}" if known else "it has none"
            raise HTTPException(400, f"this operation has no parameter {name[:80]!r}: {hint}")
        if name in given:
            raise HTTPException(400, f"the parameter {name} is given twice")
        if name in _time_parameters(kind) and not is_time(value):
            raise HTTPException(400, f"{name} must be a time such as 2026-11-16T12:00:00Z")
        given[name] = value
    return given


def _whole(value: object) -> object:
    """A parameter of a path. The names `.` and `..` have a slash after them, which no name ends
    with: browsers and other clients would take them for steps in the path, however encoded."""
    return str(value)[:-1] if value in ("./", "../") else value


def _without_parameters(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        _parameters(request, None)
        return await handler(request)

    return endpoint


@functools.cache
def _time_parameters(kind: type[msgspec.Struct] | None) -> frozenset[str]:
    """Parameters that are times: msgspec would take numbers for them, too."""
    if kind is None:
        return frozenset()
    fields = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return frozenset(name for name, field in fields.items() if "date-time" in str(field))


def _is_large(operation: Operation, request: Request) -> bool:
    """Whether it may have a large body, by what it announces: a chunked one may have any size."""
    if operation.takes == "json" and (operation.body is None or operation.body_bytes is not None):
        return False
    announced = request.headers.get("content-length", "")
    return not announced.isdecimal() or len(announced) > _DIGITS or int(announced) > LARGE_BYTES


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _route(app: App, path: str, operations: dict[str, Operation]) -> Route:
    async def endpoint(request: Request) -> Response:
        # Starlette answers GET routes for HEAD, too.
        method = "GET" if request.method == "HEAD" else request.method
        return await app.perform(operations[method], request)

    return Route(path, endpoint, methods=list(operations))


def _in_order(operations: tuple[Operation, ...]) -> list[tuple[str, dict[str, Operation]]]:
    """Operations by path and method. Starlette takes the first path that matches: those with
    `:path`, which match anything, are last, and of these the ones that end with a word first."""
    paths: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation
    return sorted(
        paths.items(),
        key=lambda each: (":path" in each[0], each[0].endswith(":path}"), "{" in each[0]),
    )


# ----------------------------------------------------------------------------------------- answers


def _answer(answer: msgspec.Struct) -> Response:
    return Response(_encode(answer), headers={**_HEADERS, "content-type": JSON})


async def _stream(chunks: Chunks, content_type: str) -> Response:
    """A streamed response. The first chunk is made before the status is sent, so that an error in
    it gets a status of its own."""
    first = await anext(chunks, b"")

    async def whole() -> AsyncIterator[bytes]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return StreamingResponse(whole(), headers={**_HEADERS, "content-type": content_type})


def _json(status: int, value: object) -> Response:
    return Response(_encode(value), status, headers={**_HEADERS, "content-type": JSON})


def _failure(status: int, failure: FailureResponse) -> Response:
    return _json(status, failure)


_NAMES: Final = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "wrong_type",
    503: "busy",
}


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Of requests that the end of the hub does not wait for."""
    failure = FailureResponse("busy", "the hub is stopping: retry when it runs again")
    response = _failure(503, failure)
    response.headers["retry-after"] = str(_RETRY_S)
    await response(scope, receive, send)


def _http_failure(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    name = _NAMES.get(error.status_code, "invalid_request")
    response = _failure(error.status_code, FailureResponse(name, error.detail))
    response.headers.update(error.headers or {})
    return response


def _internal_failure(_request: Request, _error: Exception) -> Response:
    return _failure(500, FailureResponse("internal", "internal error; see the hub's log"))
