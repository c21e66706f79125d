"""The last report of the pipeline: `report.html` in the hub's data directory.

The hub does not run the pipeline; `crosswire report --output DATA/report.html` puts a page there.
It is served as a document without an origin: whatever is in the file, it has no access to the
console and its token, fetches nothing, and runs no script but the one that its own policy seals.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from crosswire.errors import ServiceUnavailable, UnknownMessage
from crosswire.server.server import Server
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.report_tickets import TICKET_S, ReportTickets
from crosswire.web.times import Moment, at_s

__all__ = ["REPORT_OPERATIONS", "report_route"]

T = TypeVar("T")

_NAME: Final = "report.html"
_MOST_BYTES: Final = 32 * 1024 * 1024
_SEAL: Final = re.compile(rb"script-src '(sha256-[A-Za-z0-9+/]{43}=)'")
_SEAL_WITHIN: Final = 4096
_HEADERS: Final = {
    "cache-control": "no-store",
    "content-type": "text/html; charset=utf-8",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class ReportState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there is a report of the pipeline, and how old it is."""

    path: str
    """Where `crosswire report --output` has to put it; empty for who does not administer."""
    made: Moment | None
    """When it was written; null if there is none."""
    size_bytes: int


class ReportTicket(msgspec.Struct, frozen=True, kw_only=True):
    """An address of the report for a browser."""

    path: str
    """Of this hub. It is valid once, and only for some seconds."""
    valid_s: float
    """How long it is valid, if it is not used."""


async def show_report(ask: OperationRequest) -> ReportState:
    """Whether there is a report, and since when."""
    path = _path(ask.server)
    found = await _in_thread(ask.server, lambda: _stat(path))
    shown = ask.shown_path(path)
    if found is None:
        return ReportState(path=shown, made=None, size_bytes=0)
    made, size_bytes = found
    return ReportState(path=shown, made=at_s(made), size_bytes=size_bytes)


async def open_report(ask: OperationRequest) -> ReportTicket:
    """A ticket for the page, which shows traffic of all users. Raises UnknownMessage."""
    path = _path(ask.server)
    if await _in_thread(ask.server, lambda: _stat(path)) is None:
        raise UnknownMessage("there is no report")
    ticket = ask.tickets.issue(ask.now(), lambda: ask.is_identified and ask.is_administrator)
    return ReportTicket(path=f"/report/{ticket}", valid_s=TICKET_S)


async def _in_thread(server: Server, work: Callable[[], T]) -> T:
    if server.log is None:
        raise ServiceUnavailable("the hub is starting")
    return await server.log.in_thread(work)


def _path(server: Server) -> Path:
    return Path(server.config.data) / _NAME


def _stat(path: Path) -> tuple[float, int] | None:
    """On a thread: when it was changed, and its size. None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _read(path: Path) -> bytes | None:
    """On a thread: the page. None if there is none, or it is far larger than any report."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= _MOST_BYTES else None


def report_route(server: Server, tickets: ReportTickets) -> Route:
    """The page, for who has a ticket."""

    async def serve(request: Request) -> Response:
        if not tickets.redeem(request.path_params["ticket"], server.context.now()):
            raise HTTPException(
                404, "this address of the report was used or is too old: open it from the console"
            )
        path = _path(server)
        data = await _in_thread(server, lambda: _read(path))
        if data is None:
            raise HTTPException(404, f"{path} is no report")
        return Response(data, headers={**_HEADERS, "content-security-policy": _policy(data)})

    return Route("/report/{ticket}", serve, methods=["GET"])


def _policy(data: bytes) -> str:
    """The browser gives the page no origin, and runs only the script whose seal is in the page's
    own policy, near its beginning."""
    seal = _SEAL.search(data, 0, _SEAL_WITHIN)
    script = f"'{seal[1].decode()}'" if seal else "'none'"
    return (
        "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline';"
        f" script-src {script}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


REPORT_OPERATIONS: Final = (
    Operation(
        name="show_report",
        tag="storage",
        method="GET",
        path="/v1/report",
        summary="Whether there is a report of the pipeline, and how old it is",
        handler=show_report,
        answer=ReportState,
        needs="observe",
    ),
    Operation(
        name="open_report",
        tag="storage",
        method="POST",
        path="/v1/report/open",
        summary="An address with which a browser can open the report once",
        handler=open_report,
        answer=ReportTicket,
    ),
)
