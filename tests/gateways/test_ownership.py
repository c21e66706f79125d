"""Named subscriptions of two users, in every protocol that has names and tokens.

Relink identifies by certificate: see tests/e2e/test_guards.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.errors import CrosswireError, RequestFailed
from crosswire.server.server import Server
from tests.gateways.conftest import StartServer, port_of
from tests.gateways.test_epoxy import HUB, epoxy, make
from tests.gateways.test_micromsg2 import micro

TOKENS = {"anna": "a-secret-of-anna", "bert": "a-secret-of-bert"}
USERS = tuple(
    User(name=name, token=token, consume=("topic/#", "queue/#"), produce=("topic/#", "queue/#"))
    for name, token in TOKENS.items()
)

Subscribe = Callable[[str], Awaitable[object]]
"""Subscribes to a topic with the name `n`, or consumes a queue."""


@asynccontextmanager
async def over_emp(server: Server, user: str) -> AsyncIterator[Subscribe]:
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$authenticate", {"token": TOKENS[user]})

        def subscribe(destination: str) -> Awaitable[object]:
            return client.request("$subscribe", {"destination": destination, "name": "n"})

        yield subscribe


@asynccontextmanager
async def over_epoxy(server: Server, user: str) -> AsyncIterator[Subscribe]:
    async with epoxy(server, token=TOKENS[user]) as client:

        def subscribe(destination: str) -> Awaitable[object]:
            return client.call(
                HUB, "Subscribe", make("Subscription", destination=destination, name="n")
            )

        yield subscribe


@asynccontextmanager
async def over_micromsg2(server: Server, user: str) -> AsyncIterator[Subscribe]:
    async with micro(server, auth=TOKENS[user]) as client, AsyncExitStack() as subscriptions:

        async def subscribe(destination: str) -> None:
            """A subscription is not answered, but what follows it on the connection is."""
            await subscriptions.enter_async_context(client.subscribe(destination, name="n"))
            await client.send("queue/after", b"")

        yield subscribe


Over = Callable[[Server, str], AbstractAsyncContextManager[Subscribe]]
EACH = pytest.mark.parametrize("over", [over_emp, over_epoxy, over_micromsg2])


@EACH
async def test_users_have_names_of_their_own(start_server: StartServer, over: Over) -> None:
    server = await start_server(users=USERS)
    async with over(server, "anna") as anna, over(server, "bert") as bert:
        await anna("topic/secret")
        await bert("topic/other")
    assert [(each.owner, each.definition.pattern) for each in server.hub.subscriptions.all()] == [
        ("anna", "secret"),
        ("bert", "other"),
    ]


@EACH
async def test_one_of_before_there_were_users_is_left_alone(
    start_server: StartServer, over: Over
) -> None:
    server = await start_server(users=USERS)
    server.hub.subscriptions.named("n", "topic/secret", "", None, server.context.now())
    async with over(server, "anna") as anna:
        await anna("topic/other")
    assert [each.owner for each in server.hub.subscriptions.all()] == ["", "anna"]


@EACH
async def test_another_pattern_is_a_conflict_with_ones_own(
    start_server: StartServer, over: Over
) -> None:
    server = await start_server(users=USERS)
    async with over(server, "anna") as anna:
        await anna("topic/secret")
    async with over(server, "anna") as anna:
        with pytest.raises(CrosswireError) as caught:
            await anna("topic/other")
    assert "secret" not in str(caught.value)
    if isinstance(caught.value, RequestFailed):
        # Epoxy has no code of its own for it. MicroMsg2 ends the connection with `forbidden`.
        assert caught.value.code in ("conflict", "invalid-invocation")
    assert [each.definition.pattern for each in server.hub.subscriptions.all()] == ["secret"]


@EACH
async def test_dead_letters_are_the_owners_whatever_the_patterns(
    start_server: StartServer, over: Over
) -> None:
    server = await start_server(users=USERS)
    hub, now = server.hub, server.context.now()
    dead = hub.subscriptions.named("n", "topic/t", "", None, now, "anna").dead_letters
    hub.store.number(dead)
    async with over(server, "bert") as bert:
        with pytest.raises(CrosswireError):
            await bert(dead)
    assert not hub.is_consumed(dead)
    assert server.context.counters["forbidden", over.__name__.removeprefix("over_")] == 1
    async with over(server, "anna") as anna:
        await anna(dead)
