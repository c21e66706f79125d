"""The log over HTTP: its destinations, plans for reading it, and messages as Arrow streams."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Final

import msgspec

from crosswire.errors import Forbidden, InvalidDestination, ServiceUnavailable
from crosswire.server.log_reader import Log, LogRange, LogUser, ReadPlan, ReadSplit
from crosswire.server.log_selection import MOST_DESTINATIONS
from crosswire.web.contract import BYTES, Chunks, Operation, OperationRequest
from crosswire.web.name_index import NAME_KINDS
from crosswire.web.paging import ListQuery, cursor_of, read_cursor

__all__ = ["LOG_OPERATIONS"]

_NAMES: Final = 250
"""Names that are looked at before it is checked whether the turn is over."""


class NamesQuery(ListQuery, frozen=True, kw_only=True):
    """A page of the names of destinations."""

    names: bool = True
    """Whether they are listed at all."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """How many the response has at most."""


class Logs(msgspec.Struct, frozen=True, kw_only=True):
    """What can be read in bulk."""

    node: str
    """The hub whose ids these are."""
    latest: int
    """The newest id that is on disk."""
    destinations: list[str]
    """Those that you may consume, in order."""
    next: str
    """The cursor of the next page; empty after the last."""


async def list_logs(ask: OperationRequest) -> Logs:
    """Destinations that the principal may consume, and the newest committed id.

    Raises Forbidden for who may consume nothing: ids are given out for all destinations together,
    so that one shows how much others send.
    """
    access = ask.server.context.access
    if not (ask.is_observer or access.may_anywhere(ask.principal, "consume")):
        ask.server.context.count("forbidden", "http")
        raise Forbidden(f"{ask.principal} may not consume anything")
    query: NamesQuery = ask.query
    # Before the names: what is created meanwhile has later messages, and is found the next time.
    latest = ask.hub.committed_id
    found: list[str] = []
    if query.names:
        cursor: tuple[str] | None = read_cursor(query.cursor, tuple[str])
        found = await _names_after(ask, "" if cursor is None else cursor[0], query.limit + 1)
    page = found[: query.limit]
    following = cursor_of(page[-1]) if len(found) > query.limit else ""
    return Logs(node=ask.hub.node, latest=latest, destinations=page, next=following)


async def _names_after(ask: OperationRequest, after: str, most: int) -> list[str]:
    """The first names after this one that the principal may consume."""
    found: list[str] = []
    async with ask.work.turn() as turn:
        for kind in NAME_KINDS:
            names, last, number = await ask.work.index.names(ask.hub, kind, turn), after, 0
            while number < most and (some := names.after(last, _NAMES)):
                last = some[-1]
                allowed = [name for name in some if ask.may_read(name)]
                number += len(allowed)
                found += allowed
                await turn.pause()
    # Four sorted runs, which are merged.
    found.sort()
    return found[:most]


async def plan(ask: OperationRequest) -> LogRange:
    """Ranges of the log to be read. Raises Forbidden, and what `Log.plan` raises."""
    wanted: ReadPlan = ask.body
    _check_number(wanted)
    _require(ask, wanted.destinations)
    return await _log(ask).plan(wanted, _user(ask))


def read(ask: OperationRequest) -> Chunks:
    """The messages of a range, as an Arrow stream. Raises Forbidden."""
    wanted: ReadSplit = ask.body
    _check_number(wanted)
    _require(ask, wanted.destinations)
    return _while_allowed(ask, wanted.destinations, _log(ask).read(wanted, _user(ask)))


def read_files(ask: OperationRequest) -> Chunks:
    """Row groups of a range, as Parquet files. Raises Forbidden."""
    wanted: ReadSplit = ask.body
    _check_number(wanted)
    _require(ask, wanted.destinations)
    return _while_allowed(ask, wanted.destinations, _log(ask).files(wanted, _user(ask)))


async def _while_allowed(ask: OperationRequest, destinations: list[str], chunks: Chunks) -> Chunks:
    """Rights that are taken away end the stream: it is cut off, so that no reader takes what it got
    for all there is."""
    access = ask.server.context.access
    async with aclosing(chunks):
        async for chunk in chunks:
            if ask.server.context.access is not access:
                access = ask.server.context.access
                if not ask.is_identified:
                    raise Forbidden("the credentials of this request are no longer valid")
                _require(ask, destinations)
            yield chunk


def _check_number(wanted: ReadPlan | ReadSplit) -> None:
    """Raises InvalidDestination. Before rights are checked, which takes time for each of them."""
    for number in (len(wanted.destinations), len(wanted.starts) - 1, len(wanted.ends) - 1):
        if number > MOST_DESTINATIONS:
            raise InvalidDestination(
                f"one reads at most {MOST_DESTINATIONS} destinations at once, not {number}"
            )


def _log(ask: OperationRequest) -> Log:
    log = ask.server.log
    if log is None:
        raise ServiceUnavailable("the hub is starting")
    return log


def _require(ask: OperationRequest, destinations: list[str]) -> None:
    """Raises Forbidden. Reading the log needs the right to consume, or to administer the hub."""
    for destination in destinations:
        if not ask.may_read(destination):
            ask.server.context.count("forbidden", "http")
            name = ask.principal or "an anonymous user"
            raise Forbidden(f"{name} may not consume {destination}")


def _user(ask: OperationRequest) -> LogUser:
    return LogUser(ask.holder, ask.may_read, ask.hold)


LOG_OPERATIONS: Final = (
    Operation(
        name="list_logs",
        tag="bulk",
        method="GET",
        path="/v1/log",
        summary="Destinations whose messages can be read in bulk, and the newest id",
        handler=list_logs,
        query=NamesQuery,
        answer=Logs,
        needs="principal",
    ),
    Operation(
        name="plan_log",
        tag="bulk",
        method="POST",
        path="/v1/log/plan",
        summary="Plan a read of the log: ranges with messages, and ranges that are deleted",
        handler=plan,
        body=ReadPlan,
        answer=LogRange,
        needs="principal",
    ),
    Operation(
        name="read_log",
        tag="bulk",
        method="POST",
        path="/v1/log/read",
        summary="The messages of a range as an Arrow stream; `last` in a batch's metadata is its"
        " last id",
        handler=read,
        body=ReadSplit,
        answer=None,
        needs="principal",
    ),
    Operation(
        name="read_log_files",
        tag="bulk",
        method="POST",
        path="/v1/log/files",
        summary="The beginning of a range as Parquet files, as far as they have nothing else;"
        " before each its first and last id in the range and its size, 64 bits each, little-endian",
        handler=read_files,
        body=ReadSplit,
        answer=None,
        streams=BYTES,
        needs="principal",
    ),
)
