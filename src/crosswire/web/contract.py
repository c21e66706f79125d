"""The API's contract: what an operation is, its request, and the response for each error."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, Literal, TypeAlias

import msgspec

from crosswire.access import Right
from crosswire.errors import (
    AttemptLost,
    BatchConflict,
    CrosswireError,
    DestinationFull,
    Forbidden,
    HistoryMissing,
    HubError,
    InvalidDestination,
    InvalidEnvelope,
    InvalidFilter,
    InvalidSchedule,
    LakeError,
    ServiceUnavailable,
    StagingFull,
    StoreError,
    SubscriptionConflict,
    UnknownMessage,
)
from crosswire.hub.hub import Hub
from crosswire.server.server import Server
from crosswire.web.replays import Replays

__all__ = [
    "ARROW",
    "JSON",
    "Chunks",
    "FailureResponse",
    "Handler",
    "Operation",
    "OperationRequest",
    "failure_of",
]

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"


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
    (AttemptLost, 409, "lost"),
    (StagingFull, 503, "refused"),
    (DestinationFull, 503, "refused"),
    (InvalidDestination, 400, "invalid_request"),
    (InvalidEnvelope, 400, "invalid_request"),
    (InvalidFilter, 400, "invalid_request"),
    (InvalidSchedule, 400, "invalid_request"),
    (HistoryMissing, 410, "gone"),
    (StoreError, 503, "unavailable"),
    (ServiceUnavailable, 503, "unavailable"),
    (LakeError, 500, "lake_damaged"),
    (HubError, 500, "internal"),
]


def failure_of(error: CrosswireError) -> tuple[int, FailureResponse]:
    """The HTTP status and the body for an error of the hub."""
    for kind, status, name in _FAILURES:
        if isinstance(error, kind):
            return status, FailureResponse(name, str(error))
    return 500, FailureResponse("internal", str(error))


class OperationRequest:
    """A request as handlers get it: authenticated, decoded into the operation's types."""

    __slots__ = ("_identify", "body", "path", "principal", "query", "replays", "server")

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
    ) -> None:
        """`identify` finds the user of this request anew; without it, that never changes."""
        self.server = server
        self.replays = replays
        self.principal = principal
        self.path = path
        self.query = query
        self.body = body
        self._identify = identify or (lambda: principal)

    @property
    def is_identified(self) -> bool:
        """Whether its credentials still identify the same user; a reload may have taken them away
        since the request came."""
        return self._identify() == self.principal

    @property
    def hub(self) -> Hub:
        """The hub of the server."""
        return self.server.hub

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

    `needs` is the right to administer or to observe, any authenticated user (the handler checks
    rights on destinations), or nothing. `body` is the type of its JSON body; an operation that
    `takes` Arrow gets the bytes of the body. One without an `answer` responds with an Arrow stream.
    """

    name: str
    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    summary: str
    handler: Handler
    answer: type[msgspec.Struct] | None
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    takes: Literal["json", "arrow"] = "json"
    needs: Literal["administer", "observe", "principal", "nothing"] = "administer"
