"""What an operation of the API is: who may ask for it, what it takes, what it gives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec

from crosswire.access import Right
from crosswire.envelope import LARGEST_INTEGER
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

if TYPE_CHECKING:
    from crosswire.web.dead import Replays

__all__ = [
    "ARROW",
    "JSON",
    "Chunks",
    "FailureResponse",
    "Handler",
    "Id",
    "Operation",
    "OperationRequest",
    "check_numbers",
    "failure_of",
]

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"


Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
"""Of a message; 0 is before all of them."""


def check_numbers(value: object) -> None:
    """Raises InvalidEnvelope for a number beyond 64 bits or not finite, however deep it is.

    The payload of a message is no number of ours: it is kept as it came.
    """
    if isinstance(value, int):
        if not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            raise InvalidEnvelope("a number has more than 64 bits")
    elif isinstance(value, float):
        if not isfinite(value):
            raise InvalidEnvelope("a number is not finite")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            check_numbers(getattr(value, name))
    elif isinstance(value, dict):
        for each in value.values():
            check_numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            check_numbers(each)


class FailureResponse(msgspec.Struct, frozen=True):
    """Every answer that is not a success."""

    error: str
    description: str


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
    """The HTTP status for an error of the hub, and its description."""
    for kind, status, name in _FAILURES:
        if isinstance(error, kind):
            return status, FailureResponse(name, str(error))
    return 500, FailureResponse("internal", str(error))


class OperationRequest:
    """One request for an operation: by whom, and with what, in the operation's own types."""

    __slots__ = ("body", "path", "principal", "query", "replays", "server")

    def __init__(
        self,
        server: Server,
        replays: Replays,
        *,
        principal: str,
        path: dict[str, Any],
        query: Any,
        body: Any,
    ) -> None:
        self.server = server
        self.replays = replays
        self.principal = principal
        self.path = path
        self.query = query
        self.body = body

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def now(self) -> float:
        return self.server.context.now()

    def require(self, right: Right, destination: str) -> None:
        """Raises Forbidden."""
        context = self.server.context
        if not context.access.may(self.principal, right, destination):
            context.count("forbidden", "http")
            raise Forbidden(f"{self.principal or 'a stranger'} may not {right} {destination}")

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
"""An answer that is sent as it is made, no faster than it is read."""
Handler: TypeAlias = Callable[
    [OperationRequest], msgspec.Struct | Awaitable[msgspec.Struct] | Chunks
]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`needs`: the right to administer, to be somebody (the handler asks for more), or nothing.

    `body` is what its JSON must be; one that `takes` Arrow gets the bytes as they are. One without
    an `answer` gives a stream of Arrow.
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
    needs: Literal["administer", "principal", "nothing"] = "administer"
