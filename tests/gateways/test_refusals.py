"""Refusals reveal nothing about others: they are the same whether what was asked for exists."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from crosswire.access import User
from crosswire.client.native.emp import EmpClient
from crosswire.errors import RequestFailed
from crosswire.hub.ledger import LedgerPeer
from crosswire.server.server import Server
from tests.gateways.conftest import StartServer

ANNA = User(
    name="anna",
    token="the-secret-of-anna",
    produce=("queue/anna/#",),
    consume=("topic/anna/#",),
    call=("service/sums/add",),
)
BERT = User(name="bert", token="the-secret-of-bert", serve=("service/#",))
EXISTING, MISSING = "existing", "missing1"


class Silent:
    """A provider that is never called."""

    def request(self, provider: object, requests: object) -> None:
        raise AssertionError(requests)

    def cancel(self, provider: object, ids: object) -> None:
        raise AssertionError(ids)

    def broken(self, error: Exception) -> None:
        raise error


async def start(start_server: StartServer) -> Server:
    server = await start_server(users=(ANNA, BERT))
    now = server.context.now()
    server.hub.queue(f"queue/{EXISTING}")
    server.hub.topic(f"topic/{EXISTING}")
    peer = LedgerPeer("test", "c", "bert")
    server.hub.provide([f"service/{EXISTING}", "service/sums"], Silent(), now, peer=peer)
    return server


def client(server: Server) -> EmpClient:
    return EmpClient("127.0.0.1", server.listeners["emp"].address.port)


Ask = Callable[[EmpClient, str], Awaitable[object]]
ASKED: dict[str, Ask] = {
    "produce": lambda emp, name: emp.request(
        "$publish", {"destination": f"queue/{name}", "text": ""}
    ),
    "consume a queue": lambda emp, name: emp.request(
        "$subscribe", {"destination": f"queue/{name}"}
    ),
    "consume a topic": lambda emp, name: emp.request(
        "$subscribe", {"destination": f"topic/{name}"}
    ),
    "call": lambda emp, name: emp.request(name, {}),
    "serve": lambda emp, name: emp.request("$serve", {"services": [name]}),
    "get_op": lambda emp, name: emp.request("$get_op", {"op_name": name}),
}


@pytest.mark.parametrize("token", [ANNA.token, None])
@pytest.mark.parametrize("kind", ASKED)
async def test_emp(start_server: StartServer, kind: str, token: str | None) -> None:
    server = await start(start_server)
    texts = set()
    async with client(server) as emp:
        if token is not None:
            await emp.request("$authenticate", {"token": token})
        for name in (EXISTING, MISSING):
            with pytest.raises(RequestFailed) as refused:
                await ASKED[kind](emp, name)
            texts.add(str(refused.value).replace(name, "NAME"))
    (text,) = texts
    assert "bert" not in text


async def test_operations_that_a_peer_may_call(start_server: StartServer) -> None:
    server = await start(start_server)
    async with client(server) as emp:
        assert {"sums", EXISTING}.isdisjoint(await names(emp))
        await emp.request("$authenticate", {"token": ANNA.token})
        found = await names(emp)
        assert "sums" in found and EXISTING not in found
        assert await emp.request("$get_op", {"op_name": "sums"}) == {"op": {"name": "sums"}}


async def names(emp: EmpClient) -> set[str]:
    return {each["name"] for each in (await emp.request("$list_ops"))["ops"]}


async def test_wrong_tokens_get_one_text(start_server: StartServer) -> None:
    server = await start(start_server)
    async with client(server) as emp:
        with pytest.raises(RequestFailed, match="nobody has this token") as refused:
            await emp.request("$authenticate", {"token": "the-secret-of-berta"})
    assert "secret" not in str(refused.value)
