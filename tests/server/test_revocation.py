"""A reload that takes rights away: what connected peers may no longer have ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from crosswire.access import Access, User
from crosswire.client.native.emp import EmpClient
from crosswire.errors import ConfigError, RequestFailed
from crosswire.server import revocation
from crosswire.server.server import Server
from tests.gateways.conftest import StartServer
from tests.gateways.test_ownership import TOKENS, USERS, Over, over_emp, over_epoxy, over_micromsg2

ANNA, BERT = USERS
EACH = pytest.mark.parametrize("over", [over_emp, over_epoxy, over_micromsg2])


def reload(server: Server, *users: User) -> None:
    server.reload(msgspec.structs.replace(server.config, users=users))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


LOSSES = {
    "the user": (BERT,),
    "the token": (msgspec.structs.replace(ANNA, token="another-secret-of-anna"), BERT),
    "the right": (msgspec.structs.replace(ANNA, consume=("topic/#",)), BERT),
}


@EACH
@pytest.mark.parametrize("loss", LOSSES)
async def test_what_is_taken_away_ends(start_server: StartServer, over: Over, loss: str) -> None:
    server = await start_server(users=USERS)
    protocol = over.__name__.removeprefix("over_")
    async with over(server, "anna") as anna, over(server, "bert") as bert:
        await anna("queue/q")
        await bert("topic/t")
        reload(server, *LOSSES[loss])
        assert server.context.counters["revoked", protocol] == 1
        await until(lambda: not server.hub.is_consumed("queue/q"))
        others = [each.principal for each in server.context.gateways.values()]
        assert "bert" in others


async def test_many_are_disconnected_in_parts_and_confirmed_after_the_last(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next reload comes meanwhile."""
    monkeypatch.setattr(revocation, "_PART_S", 0.0005)
    server = await start_server(users=USERS)
    turns: list[int] = []
    confirmed: list[str] = []

    def connected() -> int:
        return sum(each.principal in ("anna", "bert") for each in server.context.gateways.values())

    async with AsyncExitStack() as stack:
        for user in ["anna"] * 40 + ["bert"]:
            peer = await stack.enter_async_context(over_emp(server, user))
            await peer("queue/q" if user == "anna" else "topic/t")
        assert connected() == 41
        reload(server, BERT)
        server.when_revoked(lambda: confirmed.append("anna"))
        assert 0 < server.context.counters["revoked", "emp"] < 40
        assert not confirmed
        # Those that are still connected have no right to anything.
        assert not server.context.access.may("anna", "produce", "queue/q")
        reload(server, ANNA)
        server.when_revoked(lambda: confirmed.append("bert"))
        while not confirmed:
            turns.append(server.context.counters["revoked", "emp"])
            await asyncio.sleep(0)
        assert confirmed == ["anna", "bert"]
        assert server.context.counters["revoked", "emp"] == 41
        assert connected() == 0
        assert len(set(turns)) > 3
    server.when_revoked(lambda: confirmed.append("at once"))
    assert confirmed[-1] == "at once"


async def test_who_connects_after_a_reload_is_not_revoked_by_it(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the revocations of an earlier reload keep those of this one waiting."""
    monkeypatch.setattr(revocation, "_PART_S", 0.00001)
    server = await start_server(users=USERS)
    less = msgspec.structs.replace(ANNA, consume=("queue/#",))
    async with AsyncExitStack() as stack:
        for _ in range(60):
            anna = await stack.enter_async_context(over_emp(server, "anna"))
            await anna("queue/q")
        monkeypatch.setitem(TOKENS, "bert", "another-secret-of-bert")
        reload(server, less, BERT)
        reload(server, less, msgspec.structs.replace(BERT, token=TOKENS["bert"]))
        ended: list[bool] = []
        server.when_revoked(lambda: ended.append(True))
        bert = await stack.enter_async_context(over_emp(server, "bert"))
        await bert("topic/t")
        assert not ended
        await until(lambda: ended)
        assert server.context.counters["revoked", "emp"] == 0


async def test_what_the_next_reload_gives_back_is_kept(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation, "_PART_S", 0.00001)
    server = await start_server(users=USERS)
    async with AsyncExitStack() as stack:
        for _ in range(20):
            anna = await stack.enter_async_context(over_emp(server, "anna"))
            await anna("queue/q")
        reload(server, msgspec.structs.replace(ANNA, consume=("topic/#",)), BERT)
        before = server.context.counters["revoked", "emp"]
        reload(server, *USERS)
        ended: list[bool] = []
        server.when_revoked(lambda: ended.append(True))
        await until(lambda: ended)
        assert server.context.counters["revoked", "emp"] == before < 20


@pytest.mark.failing_callbacks
async def test_one_that_can_not_be_disconnected_does_not_keep_others(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(users=USERS)
    async with over_emp(server, "anna") as one, over_emp(server, "anna") as two:
        await one("queue/q")
        await two("queue/r")
        first = next(each for each in server.context.gateways.values() if each.attachments)

        def fail(_reason: str) -> bool:
            raise RuntimeError("for a test")

        monkeypatch.setattr(first, "disconnect", fail)
        reload(server, BERT)
        await until(lambda: not server.hub.is_consumed("queue/r"))
        confirmed: list[bool] = []
        server.when_revoked(lambda: confirmed.append(True))
        assert confirmed


async def test_other_changes_disconnect_nobody(start_server: StartServer) -> None:
    server = await start_server(users=USERS)
    async with over_emp(server, "anna") as anna:
        await anna("queue/q")
        more = msgspec.structs.replace(ANNA, certificate="anna", produce=())
        reload(server, more, BERT)
        assert server.hub.is_consumed("queue/q")
        assert server.context.counters["revoked", "emp"] == 0


async def test_peers_of_before_there_were_users_lose_what_they_have(
    start_server: StartServer,
) -> None:
    server = await start_server()
    async with EmpClient("127.0.0.1", server.listeners["emp"].address.port) as client:
        await client.request("$subscribe", {"destination": "queue/q"})
        reload(server, ANNA)
        await until(lambda: not server.hub.is_consumed("queue/q"))


async def test_each_message_is_checked_by_the_rights_of_now(start_server: StartServer) -> None:
    """Also where the last message went to the same destination."""
    less = msgspec.structs.replace(BERT, produce=("topic/#",))
    server = await start_server(users=(ANNA, less))
    message = {"destination": "queue/q", "text": "x"}
    async with EmpClient("127.0.0.1", server.listeners["emp"].address.port) as client:

        async def authenticate(user: str) -> None:
            await client.request("$authenticate", {"token": TOKENS[user]})

        await authenticate("anna")
        await client.request("$publish", message)
        await authenticate("bert")
        with pytest.raises(RequestFailed, match="bert may not produce queue/q"):
            await client.request("$publish", message)
        await authenticate("anna")
        await client.request("$publish", message)
        reload(server, msgspec.structs.replace(ANNA, produce=()), less)
        with pytest.raises(RequestFailed, match="anna may not produce"):
            await client.request("$publish", message)
        reload(server, ANNA, less)
        await client.request("$publish", message)
    assert server.hub.queue("queue/q").length == 3


async def test_services_end_with_the_right_to_serve(start_server: StartServer) -> None:
    anna = msgspec.structs.replace(ANNA, serve=("service/#",))
    server = await start_server(users=(anna,))

    async def answer(_data: Any) -> None:
        return None

    port = server.listeners["emp"].address.port
    async with EmpClient("127.0.0.1", port, handlers={"add": answer}) as client:
        await client.request("$authenticate", {"token": TOKENS["anna"]})
        await client.request("$serve", {"services": ["add"]})
        assert server.hub.is_served("service/add")
        reload(server, ANNA)
        await until(lambda: not server.hub.is_served("service/add"))


async def test_a_schedule_does_not_fire_without_the_right_to_send(
    start_server: StartServer,
) -> None:
    server = await start_server(users=USERS)
    async with EmpClient("127.0.0.1", server.listeners["emp"].address.port) as client:
        await client.request("$authenticate", {"token": TOKENS["anna"]})
        asked = {"destination": "queue/q", "text": "x", "interval_s": 0.1}
        await client.request("$schedule", asked)
        await until(lambda: server.hub.queue("queue/q").length > 1)
    queue, schedules = server.hub.queue("queue/q"), server.hub.schedules
    for users in ((BERT,), (msgspec.structs.replace(ANNA, produce=()),)):
        reload(server, *users)
        length, failed = queue.length, schedules.failed
        await until(lambda failed=failed: schedules.failed > failed)
        assert queue.length == length
        reload(server, ANNA)
        await until(lambda length=length: queue.length > length)


async def test_who_is_unknown_when_there_are_users_has_to_come_again(
    start_server: StartServer,
) -> None:
    """Also one that uses nothing at the moment: it would not have to identify itself at all."""
    server = await start_server()
    async with EmpClient("127.0.0.1", server.listeners["emp"].address.port) as client:
        await client.request("$echo", {})
        before = set(server.context.gateways)
        reload(server, ANNA)
        await until(lambda: not before & set(server.context.gateways))
        assert server.context.counters["revoked", "emp"] == 1


async def test_the_last_user_can_not_be_removed(start_server: StartServer) -> None:
    server = await start_server(users=USERS)
    with pytest.raises(ConfigError, match="every peer would have all rights"):
        reload(server)
    assert not server.context.access.open


async def test_a_peer_with_a_subscription_can_not_become_another_user(
    start_server: StartServer,
) -> None:
    """It would keep what it has when the first user's rights are taken away."""
    server = await start_server(users=USERS)
    async with EmpClient("127.0.0.1", server.listeners["emp"].address.port) as client:
        await client.request("$authenticate", {"token": TOKENS["anna"]})
        await client.request("$authenticate", {"token": TOKENS["bert"]})
        await client.request("$subscribe", {"destination": "queue/q"})
        with pytest.raises(RequestFailed, match="another user's"):
            await client.request("$authenticate", {"token": TOKENS["anna"]})


def test_credentials_that_are_lost() -> None:
    before = Access((User(name="anna", token="a-secret-of-anna", curve_key="k"),))

    def after(**fields: str) -> bool:
        return Access((User(name="anna", **fields),)).has_lost_credentials("anna", before)  # type: ignore[arg-type]

    assert not after(token="a-secret-of-anna", curve_key="k", certificate="new")
    assert after(token="a-secret-of-anna")
    assert after(token="a-secret-of-bert", curve_key="k")
    assert Access().has_lost_credentials("anna", before)
    assert not Access((User(name="bert", token="a-secret-of-bert"),)).has_lost_credentials(
        "bert", before
    )
