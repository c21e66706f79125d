"""The Starlette application: guards first, then the operations, metrics, health and readiness."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
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
from crosswire.errors import CrosswireError, StoreFailed
from crosswire.server.metrics import render
from crosswire.server.server import Server
from crosswire.server.watchdog import LATE_S
from crosswire.web.api import OPERATIONS, openapi
from crosswire.web.contract import (
    ARROW,
    JSON,
    Chunks,
    FailureResponse,
    Operation,
    OperationRequest,
    check_numbers,
    failure_of,
)
from crosswire.web.dead import Replays

__all__ = ["App"]

_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_DAMAGE: Final = 20
_BODY_S: Final = 10.0
_DIGITS: Final = 19
_ARROW_BODIES: Final = 4
_ARROW_WAIT_S: Final = 5.0
_LAG_S: Final = 1.0
_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}

_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


class _IdConvertor(IntegerConvertor):
    """A number that is too long to be an id is converted to one that is too large to be one:
    Python refuses to convert thousands of digits, with an error of its own."""

    def convert(self, value: str) -> int:
        return int(value) if len(value) <= _DIGITS else LARGEST_INTEGER + 1


register_url_convertor("id", _IdConvertor())


class App:
    """One for each server. An ASGI application."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.replays = Replays()
        self._arrow_bodies = asyncio.Semaphore(_ARROW_BODIES)
        routes = [_route(self, operation) for operation in _in_order(OPERATIONS)]
        routes += [
            Route("/openapi.json", self._openapi, methods=["GET"]),
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        handlers: dict[type[Exception], Callable[[Request, Exception], Response]] = {
            HTTPException: _http_failure,
            CrosswireError: _hub_failure,
            Exception: _internal_failure,
        }
        self._app = _Guard(
            Starlette(routes=routes, exception_handlers=handlers),
            server,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def perform(self, operation: Operation, request: Request) -> Response:
        principal = self._principal(request, operation.needs)
        if operation.takes == "arrow":
            async with self._arrow_body():
                return await self._perform(operation, request, principal)
        return await self._perform(operation, request, principal)

    @asynccontextmanager
    async def _arrow_body(self) -> AsyncIterator[None]:
        """Large bodies are read and worked on few at a time; the others are not read meanwhile."""
        try:
            async with asyncio.timeout(_ARROW_WAIT_S):
                await self._arrow_bodies.acquire()
        except TimeoutError:
            raise HTTPException(503, "the hub is busy with others: try again soon") from None
        try:
            yield
        finally:
            self._arrow_bodies.release()

    async def _perform(self, operation: Operation, request: Request, principal: str) -> Response:
        query: msgspec.Struct | None = None
        body: msgspec.Struct | bytes | None = None
        try:
            if operation.query is not None:
                given = dict(request.query_params)
                query = msgspec.convert(given, operation.query, strict=False)
            if operation.takes == "arrow":
                body = await self._body(request, ARROW, self.server.config.ingest.part_bytes)
            elif operation.body is not None:
                data = await self._body(request, JSON, self.server.config.http.body_bytes)
                body = msgspec.json.decode(data, type=operation.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _failure(400, FailureResponse("invalid_request", str(error)))
        path = dict(request.path_params)
        for given_in in (path, query, body):
            check_numbers(given_in)
        ask = OperationRequest(
            self.server,
            self.replays,
            principal=principal,
            path=path,
            query=query,
            body=body,
        )
        answer = operation.handler(ask)
        if isinstance(answer, AsyncGenerator):
            return await _stream(answer)
        if inspect.isawaitable(answer):
            answer = await answer
        return _answer(answer)

    # Who asks, and what with.

    def _principal(self, request: Request, needs: str) -> str:
        """Raises HTTPException for who may not."""
        access = self.server.context.access
        if access.open or needs == "nothing":
            return ANONYMOUS
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        principal = access.by_token(token.strip()) if scheme.lower() == "bearer" else None
        if principal is None:
            self.server.context.count("unauthenticated", "http")
            raise HTTPException(
                401, "a bearer token of a user is needed", {"www-authenticate": "Bearer"}
            )
        if needs == "administer" and not access.may_administer(principal):
            self.server.context.count("forbidden", "http")
            raise HTTPException(403, f"{principal} may not administer this hub")
        return principal

    async def _body(self, request: Request, wanted: str, most: int) -> bytes:
        """Raises HTTPException for what is of another type, too much, or too slow."""
        if _content_type(request) != wanted:
            raise HTTPException(415, f"this body is {wanted}")
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > _DIGITS or int(announced) > most):
            raise HTTPException(413, f"a body has at most {most} bytes")
        chunks, size = [], 0
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > most:
                        raise HTTPException(413, f"a body has at most {most} bytes")
                    chunks.append(chunk)
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        except ClientDisconnect:
            raise HTTPException(400, "the body did not come to its end") from None
        return b"".join(chunks)

    # What is not an operation.

    async def _openapi(self, _request: Request) -> Response:
        return _json(200, openapi())

    async def _healthz(self, _request: Request) -> Response:
        """The event loop turns: that is what this answer proves."""
        return _json(200, {"status": "ok"})

    async def _readyz(self, _request: Request) -> Response:
        context, store = self.server.context, self.server.hub.store
        reasons = []
        if context.draining:
            reasons.append("draining")
        obstacle = store.obstacle(context.now())
        if obstacle is not None:
            reason = str(obstacle)
            if isinstance(obstacle, StoreFailed):
                reason = f"{obstacle}: {store.last_error}"
            reasons.append(reason)
        if not self.server.started_at:
            reasons.append("starting")
        reasons += self._late()
        # Damage is no reason to send traffic elsewhere: all that is intact is served.
        damage = [each.detail for each in store.damages.entries[-_DAMAGE:]]
        status = "not ready" if reasons else "damaged" if damage else "ready"
        answer = {"status": status, "reasons": reasons, "notes": self._notes()}
        if damage:
            answer["damage"] = damage
        return _json(503 if reasons else 200, answer)

    def _late(self) -> list[str]:
        """Why schedules, deadlines, leases and retries don't come at their times."""
        silent_s, late_s = self.server.watchdog.silent_s(), self.server.timers_late_s()
        reasons = []
        if silent_s > LATE_S:
            reasons.append(f"the hub's clock has not had a turn for {silent_s:.1f} s")
        if self.server.started_at and late_s > LATE_S:
            reasons.append(f"timers are late by {late_s:.1f} s")
        return reasons

    def _notes(self) -> list[str]:
        """What an operator should know, though the hub takes work."""
        wall, now = self.server.hub.wall, self.server.context.now()
        notes = []
        if wall.last_jump is not None:
            at, seconds = wall.last_jump
            when = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
            notes.append(f"the system's clock jumped by {seconds:+.0f} s at {when}")
        held_s = wall.held_s(now)
        if held_s:
            notes.append(f"retention by age is {wall.lag_s:.0f} s late for another {held_s:.0f} s")
        worst_s = self.server.watchdog.worst_lag_s()
        if worst_s > _LAG_S:
            notes.append(f"the event loop was {worst_s:.1f} s late within the last minute")
        return notes

    async def _metrics(self, request: Request) -> Response:
        self._principal(request, "administer")
        lag = {"crosswire_loop_lag_seconds": ("Lateness of clock turns.", self.server.watchdog.lag)}
        text = render(self.server.metrics, self.server.context.counters, self._gauges(), lag)
        return Response(text, headers={**_HEADERS, "content-type": _METRICS})

    def _gauges(self) -> dict[str, tuple[str, float]]:
        hub, context = self.server.hub, self.server.context
        queues, watchdog = hub.queues(), self.server.watchdog
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "crosswire_connections": ("Peers that are connected.", len(context.gateways)),
            "crosswire_queues": ("Queues, those for dead letters too.", len(queues)),
            "crosswire_queue_messages": (
                "Messages in queues that are not settled.",
                sum(queue.length for queue in queues if not queue.is_dead),
            ),
            "crosswire_queue_bytes": (
                "Their size.",
                sum(queue.size_bytes for queue in queues if not queue.is_dead),
            ),
            "crosswire_dead_letters": (
                "Messages that nobody could take.",
                sum(queue.length for queue in queues if queue.is_dead),
            ),
            "crosswire_topics": ("Topics.", len(hub.topics_by_name())),
            "crosswire_subscriptions": ("Named subscriptions.", len(hub.subscriptions.all())),
            "crosswire_services": ("Services with a provider.", len(hub.services.providers())),
            "crosswire_schedules": ("Schedules.", len(hub.schedules.all())),
            "crosswire_staged_attempts": (
                "Attempts that wait for the commit of their batch.",
                hub.staging.attempts,
            ),
            "crosswire_staged_bytes": ("Their size.", hub.staging.staged_bytes),
            "crosswire_newest_id": ("The last message id handed out.", hub.store.newest_id),
            "crosswire_store_damaged": (
                "What is damaged and not acknowledged.",
                len(hub.store.damages.entries),
            ),
            "crosswire_store_healthy": ("1 unless writing fails.", hub.store.last_error is None),
            "crosswire_draining": ("1 while the hub stops.", context.draining),
            "crosswire_uptime_seconds": (
                "Since the start.",
                context.now() - self.server.started_at,
            ),
            "crosswire_loop_lag_worst_seconds": (
                "The latest turn of the clock within a minute.",
                watchdog.worst_lag_s(),
            ),
            "crosswire_loop_blocked_total": (
                f"Times that the event loop did not turn for {LATE_S:g} s.",
                watchdog.blocked,
            ),
            "crosswire_timers_late_seconds": (
                "How long the next deadline is overdue.",
                self.server.timers_late_s(),
            ),
            "crosswire_timers_failed_total": (
                "Timers that raised.",
                hub.callbacks.failed["timer"],
            ),
            "crosswire_schedules_failed_total": (
                "Times that a schedule could not fire.",
                hub.schedules.failed,
            ),
            "crosswire_clock_jumps_forward_total": ("Of the system's clock.", hub.wall.forward),
            "crosswire_clock_jumps_back_total": ("Of the system's clock.", hub.wall.backward),
            "crosswire_retention_lag_seconds": (
                "How late retention by age is, in seconds of the clock.",
                hub.wall.lag_s,
            ),
            "process_cpu_seconds_total": ("CPU time.", usage.ru_utime + usage.ru_stime),
            "process_resident_memory_max_bytes": ("Most memory so far.", usage.ru_maxrss * 1024),
        }


class _Guard:
    """Nobody but whom the hub means to talk to: a page from elsewhere must not reach it.

    The Host header must name the hub (an address, localhost, or a name from the configuration), so
    that no foreign name can be pointed at it; an Origin header must name the same host.
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
            return _failure(421, FailureResponse("wrong_host", "this hub is not called that"))
        origin = request.headers.get("origin")
        try:
            is_foreign = origin is not None and urlsplit(origin).netloc.lower() != hosts[0].lower()
        except ValueError:  # an open bracket
            return _failure(400, FailureResponse("invalid_request", "the Origin is no address"))
        if is_foreign:
            return _failure(
                403, FailureResponse("wrong_origin", "pages from elsewhere may not ask")
            )
        # Neither of these can be sent by a page from elsewhere without asking first.
        is_safe = _content_type(request) in (JSON, ARROW)
        if request.method in ("POST", "PUT", "PATCH") and not is_safe:
            return _failure(415, FailureResponse("wrong_type", f"bodies are {JSON}, some {ARROW}"))
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


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _route(app: App, operation: Operation) -> Route:
    async def endpoint(request: Request) -> Response:
        return await app.perform(operation, request)

    return Route(operation.path, endpoint, methods=[operation.method], name=operation.name)


def _in_order(operations: tuple[Operation, ...]) -> list[Operation]:
    """A path that takes anything comes after those that don't."""
    return sorted(operations, key=lambda each: ":path" in each.path)


# ----------------------------------------------------------------------------------------- answers


def _answer(answer: msgspec.Struct) -> Response:
    return Response(_encode(answer), headers={**_HEADERS, "content-type": JSON})


async def _stream(chunks: Chunks) -> Response:
    """An error before the first byte of the answer is reported like any other."""
    first = await anext(chunks, b"")

    async def whole() -> AsyncIterator[bytes]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return StreamingResponse(whole(), headers={**_HEADERS, "content-type": ARROW})


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


def _http_failure(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    name = _NAMES.get(error.status_code, "invalid_request")
    response = _failure(error.status_code, FailureResponse(name, error.detail))
    response.headers.update(error.headers or {})
    return response


def _hub_failure(_request: Request, error: Exception) -> Response:
    assert isinstance(error, CrosswireError)
    return _failure(*failure_of(error))


def _internal_failure(_request: Request, _error: Exception) -> Response:
    return _failure(500, FailureResponse("internal", "internal error; see the hub's log"))
