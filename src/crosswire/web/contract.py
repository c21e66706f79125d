"""The API's contract: what an operation is, its request, and the response for each error."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from crosswire.access import Right
from crosswire.error_texts import public_text
from crosswire.errors import (
    AttemptLost,
    BatchConflict,
    CrosswireError,
    DestinationFull,
    DestinationInUse,
    Forbidden,
    HistoryMissing,
    HubError,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidInput,
    InvalidSchedule,
    LakeError,
    NotLeading,
    ServiceUnavailable,
    StagingFull,
    StoreError,
    SubscriptionConflict,
    UnknownMessage,
)
from crosswire.hub.hub import Hub
from crosswire.server.metrics import Metrics
from crosswire.server.server import Server
from crosswire.web.held_analyses import HeldAnalyses
from crosswire.web.long_work import LongWork
from crosswire.web.replays import Replays
from crosswire.web.report_tickets import ReportTickets
from crosswire.web.stream_slots import StreamSlots

__all__ = [
    "ARROW",
    "BYTES",
    "EVENT_STREAM",
    "JSON",
    "Chunks",
    "FailureResponse",
    "Handler",
    "Operation",
    "OperationRequest",
    "failure_of",
    "statuses_of",
]

JSON: Final = "application/json"
SMALL_BODY_BYTES: Final = 1024 * 1024
ARROW: Final = "application/vnd.apache.arrow.stream"
BYTES: Final = "application/octet-stream"
EVENT_STREAM: Final = "text/event-stream"


class FailureResponse(msgspec.Struct, frozen=True):
    """Body of every response with a status of 400 or more."""

    error: str
    description: str


# The first entry that matches holds: subclasses come before their bases.
_FAILURES: Final[list[tuple[type[CrosswireError], int, str]]] = [
    (Forbidden, 403, "forbidden"),
    (UnknownMessage, 404, "not_found"),
    (SubscriptionConflict, 409, "conflict"),
    (BatchConflict, 409, "conflict"),
    (DestinationInUse, 409, "conflict"),
    (AttemptLost, 409, "lost"),
    (StagingFull, 503, "refused"),
    (DestinationFull, 503, "refused"),
    (InvalidDestination, 400, "invalid_request"),
    (InvalidEnvelope, 400, "invalid_request"),
    (InvalidFilter, 400, "invalid_request"),
    (InvalidSchedule, 400, "invalid_request"),
    (InvalidInput, 400, "invalid_request"),
    (HistoryMissing, 410, "gone"),
    (NotLeading, 503, "standby"),
    (StoreError, 503, "unavailable"),
    (ServiceUnavailable, 503, "unavailable"),
    (LakeError, 500, "lake_damaged"),
    (HubError, 500, "internal"),
]


def failure_of(
    error: CrosswireError, *, is_administrator: bool = False
) -> tuple[int, FailureResponse]:
    """The HTTP status and the body for an error of the hub: only an administrator gets what names
    files of the server."""
    text = str(error) if is_administrator else public_text(error)
    for kind, status, name in _FAILURES:
        if isinstance(error, kind):
            return status, FailureResponse(name, text)
    return 500, FailureResponse("internal", text)


class OperationRequest:
    """A request as handlers get it: authenticated, decoded into the operation's types."""

    __slots__ = (
        "_identify",
        "_is_read",
        "analyses",
        "body",
        "connection",
        "hold",
        "path",
        "principal",
        "query",
        "replays",
        "server",
        "streams",
        "tickets",
        "work",
    )

    def __init__(
        self,
        server: Server,
        replays: Replays,
        *,
        principal: str,
        path: dict[str, Any],
        query: Any,
        body: Any,
        identify: Callable[[], str | None] | None = None,
        work: LongWork | None = None,
        streams: StreamSlots | None = None,
        is_read: bool = False,
        analyses: HeldAnalyses | None = None,
        tickets: ReportTickets | None = None,
        connection: str = "",
        hold: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`connection` is what messages have for their connection: see `holder_of_address`; empty
        with users, and for clients on this machine. `identify` finds the user of this request anew;
        without it, that never changes. With `is_read` a standby answers it, too. `hold` is called
        with the bytes of the response that a handler holds, and with as many less when they are
        sent; it raises ServiceUnavailable if the user has no room for more."""
        self._is_read = is_read
        self.server = server
        self.replays = replays
        self.principal = principal
        self.path = path
        self.query = query
        self.body = body
        self.work = work or LongWork()
        self.streams = streams or StreamSlots()
        self.analyses = analyses or HeldAnalyses(server)
        self.tickets = tickets or ReportTickets()
        self.connection = connection
        self.hold = hold
        self._identify = identify or (lambda: principal)

    @property
    def holder(self) -> str:
        """Whose share what it uses counts for: its user's, or its address's; "" for nobody's."""
        return self.principal or self.connection

    @property
    def is_identified(self) -> bool:
        """Whether its credentials still identify the same user; a reload may have taken them away
        since the request came."""
        return self._identify() == self.principal

    @property
    def hub(self) -> Hub:
        """The hub of the server; on a standby, one that only shows what there is, for operations
        that only read. Raises NotLeading, with the leader's address, for others."""
        return self.server.hub_to_read() if self._is_read else self.server.hub

    @property
    def metrics(self) -> Metrics:
        """What the hub has counted; nothing, on a standby."""
        return self.server.metrics_to_read() if self._is_read else self.server.metrics

    @property
    def is_held(self) -> bool:
        """Does `admitted` have to wait?"""
        gate = self.hub.commits.gate
        return gate is not None and gate.is_closed()

    async def admitted(self) -> None:
        """Returns when the hub may take in more: not while too much waits for a replicated log.

        Called before each part of what a producer sends. Raises NotLeading if the hub stops.
        """
        gate = self.hub.commits.gate
        if gate is not None:
            await gate.passed()

    def now(self) -> float:
        """The hub's time in seconds, which runs evenly even if the system's clock is set."""
        return self.server.context.now()

    def require(self, right: Right, destination: str) -> None:
        """Raises Forbidden, and counts it, if the principal does not have the right."""
        context = self.server.context
        if not context.access.may(self.principal, right, destination):
            context.count("forbidden", "http")
            raise Forbidden(
                f"{self.principal or 'an anonymous user'} may not {right} {destination}"
            )

    @property
    def is_administrator(self) -> bool:
        """Whether the principal may administer the hub; without users, everybody."""
        return self.server.context.access.may_administer(self.principal)

    def shown_path(self, path: Path) -> str:
        """A path of the server as this principal may see it: empty for who does not administer."""
        return str(path) if self.is_administrator else ""

    def shown_text(self, text: str) -> str:
        """A text about damage as this principal may see it: for who does not administer, files are
        named as they are in the data directory and in the lake, not on the server."""
        if not self.is_administrator:
            for folder in (Path(self.server.config.data), self.server.lake_path):
                text = text.replace(f"{folder.absolute()}/", "").replace(str(folder.absolute()), "")
                # Not within names: a relative path may be a word that destinations have, too.
                text = re.sub(rf"(?<![^\s'\"(=:])(?:\./)?{re.escape(str(folder))}/", "", text)
        return text

    @property
    def is_replica(self) -> bool:
        """Whether the principal may fetch checkpoints."""
        return self.server.context.access.may_replicate(self.principal)

    @property
    def is_observer(self) -> bool:
        """Whether the principal may see what there is, and how much of it, of all users."""
        return self.server.context.access.may_observe(self.principal)

    def may_see(self, destination: str) -> bool:
        """Whether the principal may know of a destination: it has a right to it, or observes."""
        access = self.server.context.access
        if self.is_observer:
            return True
        if destination.startswith("service/"):
            return access.may_reach(self.principal, "call", destination) or access.may_reach(
                self.principal, "serve", destination
            )
        return access.may_any(self.principal, ("produce", "consume"), destination)

    def may_read(self, destination: str) -> bool:
        """Whether the principal may see the content of its messages."""
        access = self.server.context.access
        return self.is_administrator or access.may(self.principal, "consume", destination)

    def require_sight(self, destination: str) -> None:
        """Raises Forbidden unless the principal may know of it. Called before it is looked up: the
        response is the same whether it exists or not."""
        if not self.may_see(destination):
            self._refuse(f"has no right to {destination}")

    def require_observer(self) -> None:
        """Raises Forbidden unless the principal may observe the hub."""
        if not self.is_observer:
            self._refuse("may not observe this hub")

    def require_administrator(self) -> None:
        """Raises Forbidden unless the principal may administer the hub."""
        if not self.is_administrator:
            self._refuse("may not administer this hub")

    def require_content(self, destination: str) -> None:
        """Raises Forbidden unless the principal may see the content of its messages."""
        if not self.may_read(destination):
            self._refuse(f"may not consume {destination}")

    def _refuse(self, reason: str) -> None:
        self.server.context.count("forbidden", "http")
        raise Forbidden(f"{self.principal or 'an anonymous user'} {reason}")

    def require_ownership(self, owner: str) -> None:
        """Raises Forbidden unless the principal is the owner or an administrator."""
        if owner != self.principal and not self.is_administrator:
            self.server.context.count("forbidden", "http")
            raise Forbidden("only its owner and administrators may do this")


Chunks: TypeAlias = AsyncGenerator[bytes, None]
"""A streamed response body: the next chunk is made when the client has read the last."""
Handler: TypeAlias = Callable[
    [OperationRequest], msgspec.Struct | Awaitable[msgspec.Struct] | Chunks
]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A route of the API and its handler.

    `needs` is the right to administer, to replicate or to observe, any authenticated user (the
    handler checks rights on destinations), or nothing. `body` is the type of its JSON body; an
    operation that `takes` Arrow gets the bytes of the body, and one that takes bytes gets them in
    chunks, as they arrive. One without an `answer` responds with a
    stream of the type that it `streams`. The OpenAPI document has the errors that its handler's
    docstring names.
    """

    name: str
    tag: str
    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    summary: str
    handler: Handler
    answer: type[msgspec.Struct] | None
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    takes: Literal["json", "arrow", "bytes"] = "json"
    streams: str = ARROW
    needs: Literal["administer", "replicate", "observe", "principal", "nothing"] = "administer"
    body_bytes: int | None = SMALL_BODY_BYTES
    """The largest JSON body; None for that of the configuration, where messages are in it."""
    on_standby: bool = False
    """Whether a standby answers it, from its store or without it. Its handler changes nothing that
    is replicated, and needs no part of a running hub. All else is refused there, with the leader's
    address."""
    checks_numbers: bool = False
    """Whether the handler checks the numbers of the body itself: there may be very many."""
    example_event: str = ""
    """Of a stream of events: one of them, with its data."""


def statuses_of(operation: Operation) -> list[int]:
    """The statuses of 400 or more that an operation responds with, apart from errors of the hub."""
    statuses = {400}
    if operation.needs != "nothing":
        statuses |= {401, 403}
    if operation.method in ("POST", "PATCH"):
        statuses |= {415}
        if operation.body is not None or operation.takes != "json":
            statuses |= {408, 413}
    if operation.method != "GET":
        # Whatever it changes has to be written.
        statuses.add(503)
    text = operation.handler.__doc__ or ""
    named = set(re.findall(r"\w+", text[text.find("Raises") :] if "Raises" in text else ""))
    for kind, status, _ in _FAILURES:
        if kind.__name__ in named:
            statuses.add(status)
    return sorted(statuses)
