"""Users and their rights over HTTP: who may do what, and which rule decides it."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import msgspec

from crosswire.access import User
from crosswire.envelope import parse_pattern
from crosswire.errors import InvalidDestination
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import NameQuery, SortKey, page_of

__all__ = ["USER_OPERATIONS"]

_COUNTED: Final = 256
"""Connections that are counted before it is checked whether the turn is over."""

HubRight = Literal["produce", "consume", "call", "serve", "observe", "replicate", "administer"]


class UsersQuery(NameQuery, frozen=True, kw_only=True):
    """A page of users. By default in order of names; by a number the largest comes first."""

    sort: Literal["name", "connections"] = "name"
    """By what the list is sorted."""


class UserRow(msgspec.Struct, frozen=True, kw_only=True):
    """A user of the configuration, without secrets."""

    name: str
    credentials: list[str]
    """How the user can identify itself: `token`, `certificate`, `curve`."""
    produce: list[str]
    """Patterns of destinations that it may send to."""
    consume: list[str]
    """Patterns of destinations that it may get messages from."""
    call: list[str]
    """Patterns of services that it may call."""
    serve: list[str]
    """Patterns of services that it may serve."""
    observe: bool
    """Whether it may see state, names, counts and metadata of everything."""
    replicate: bool
    """Whether it may fetch checkpoints, as replicas do."""
    administer: bool
    """Whether it may do everything that the API offers."""
    connections: int
    """Its connections of all protocols but HTTP."""


class UserPage(msgspec.Struct, frozen=True):
    """A page of users."""

    users: list[UserRow]
    next: str
    """The cursor of the next page; empty after the last."""
    open: bool
    """Whether no user is configured: everybody who can connect may do everything."""


class AccessQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A right of a user."""

    right: HubRight
    """The right to a destination; `observe`, `replicate` and `administer` need none."""
    destination: str = ""
    """A destination, or a pattern of them."""
    user: str | None = None
    """The user's name, empty for peers without identity; by default the one who asks."""


class AccessDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a user has a right, and why."""

    user: str
    right: str
    destination: str
    allowed: bool
    rule: str
    """The rule of the configuration that decides."""


async def list_users(ask: OperationRequest) -> UserPage:
    """A page of users: of all for administrators, oneself for others."""
    query: UsersQuery = ask.query
    access = ask.server.context.access
    connected: Counter[str] = Counter()

    def key(user: User) -> SortKey | None:
        is_visible = ask.is_administrator or user.name == ask.principal
        if not is_visible or query.contains not in user.name:
            return None
        return -connected[user.name] if query.sort == "connections" else 0.0, user.name

    async with ask.work.turn() as turn:
        for number, each in enumerate(list(ask.server.context.gateways.values())):
            connected[each.principal] += 1
            if not number % _COUNTED:
                await turn.pause()
        page, following = await page_of(access.users(), key, query, turn)
    return UserPage([_row(each, connected[each.name]) for each in page], following, access.open)


def _row(user: User, connections: int) -> UserRow:
    credentials = {
        "token": user.has_token,
        "certificate": user.certificate is not None,
        "curve": user.curve_key is not None,
    }
    return UserRow(
        name=user.name,
        credentials=[name for name, is_given in credentials.items() if is_given],
        produce=list(user.produce),
        consume=list(user.consume),
        call=list(user.call),
        serve=list(user.serve),
        observe=user.observe,
        replicate=user.replicate,
        administer=user.administer,
        connections=connections,
    )


def explain_access(ask: OperationRequest) -> AccessDecision:
    """Whether a user has a right, with the rule that decides. Administrators ask for everybody,
    others for themselves. Raises Forbidden, InvalidDestination."""
    query: AccessQuery = ask.query
    user = ask.principal if query.user is None else query.user
    ask.require_ownership(user)
    if query.right in ("observe", "replicate", "administer"):
        if query.destination:
            raise InvalidDestination(f"{query.right} is a right to the hub: give no destination")
    elif not query.destination:
        raise InvalidDestination(f"{query.right} needs a destination")
    elif not query.destination.partition("/")[2].startswith("@"):
        parse_pattern(query.destination)
    allowed, rule = ask.server.context.access.explain(user, query.right, query.destination)
    return AccessDecision(
        user=user,
        right=query.right,
        destination=query.destination,
        allowed=allowed,
        rule=rule,
    )


USER_OPERATIONS: Final = (
    Operation(
        name="list_users",
        tag="users",
        method="GET",
        path="/v1/users",
        summary="Users and their rights, without secrets: oneself, administrators see all",
        handler=list_users,
        query=UsersQuery,
        answer=UserPage,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="explain_access",
        tag="users",
        method="GET",
        path="/v1/access",
        summary="Whether a user has a right to a destination, and the rule that decides it",
        handler=explain_access,
        query=AccessQuery,
        answer=AccessDecision,
        needs="principal",
        on_standby=True,
    ),
)
