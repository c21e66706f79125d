"""All protocols to all protocols: docs/bridging.md describes what happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop
from examples.calculator import Calc, Calculator, Operation, Params, Result

from crosswire.bond import hub_module
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.emqp.worker import Worker
from crosswire.client.native.epoxy import EpoxyClient, Handlers, offer
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.client.native.relink import RelinkClient
from crosswire.config import BondFiles
from crosswire.errors import CallFailed, RequestFailed
from crosswire.server.server import Server
from crosswire.wire.emqp.jobs import serialize_job
from tests.e2e.bridging import NOTHING, PAGE, ROOT, YES, Results, filled, measure
from tests.e2e.parties import PARTIES
from tests.gateways.conftest import StartServer, port_of

NAMES = [party.name for party in PARTIES]
PAIRS = [(one, other) for one in NAMES for other in NAMES]
PAYLOADS = ("JSON", "text", "empty", "1 MiB")
PROPERTIES = ("`int`", "`float`", "`bool`", "`str`")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of one hub with many connections, on the product's own event loop."""
    return uvloop.run(measure(tmp_path_factory.mktemp("bridging") / "data"))


class TestPairs:
    @pytest.mark.parametrize("table", ["queues", "topics", "calls"])
    def test_all_are_there(self, results: Results, table: str) -> None:
        assert [(one, other) for one, other, _ in results[table]] == PAIRS

    @pytest.mark.parametrize("kind", ["queues", "topics"])
    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_payloads_are_unchanged(self, results: Results, kind: str, payload: str) -> None:
        for producer, consumer, cells in results[kind]:
            assert cells[payload] == YES, (producer, consumer)

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_properties_keep_their_types_in_queues(self, results: Results, name: str) -> None:
        assert {cells[name] for _, _, cells in results["queues"]} == {YES}

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_only_subscribers_of_emqp_have_none(self, results: Results, name: str) -> None:
        for producer, consumer, cells in results["topics"]:
            assert cells[name] == (NOTHING if consumer == "eMQP" else YES), producer

    @pytest.mark.parametrize("name", ["eMQP", "Relink", "Epoxy"])
    def test_what_a_protocol_has_for_itself_comes_back(self, results: Results, name: str) -> None:
        own = {(one, other) for one, other, cells in results["queues"] if cells["its own"] != "–"}
        assert (name, name) in own


class TestCalls:
    @pytest.mark.parametrize("question", ["JSON object", "a method"])
    def test_json_objects_are_answered_by_all(self, results: Results, question: str) -> None:
        for caller, provider, cells in results["calls"]:
            assert cells[question] == YES, (caller, provider)

    @pytest.mark.parametrize("question", ["text", "bytes", "nothing"])
    def test_other_payloads_come_back_unless_emp_is_there(
        self, results: Results, question: str
    ) -> None:
        for caller, provider, cells in results["calls"]:
            assert "EMP" in (caller, provider) or cells[question] in (YES, "bytes")

    def test_a_failure_keeps_the_providers_text(self, results: Results) -> None:
        for caller, provider, cells in results["calls"]:
            assert "1234: no, thanks" in cells["failure"].replace("`", ""), (caller, provider)


def test_the_page_matches_what_happens(results: Results) -> None:
    """`python -m tests.e2e.bridging --write` writes it anew."""
    assert PAGE.read_text() == filled(PAGE.read_text(), results)


# ------------------------------------------------------------------------ services with a schema

HUB = hub_module().service("crosswire.Hub")
Services = hub_module().struct("crosswire.Services").python_class
CALC = "examples.calc.Calc"


@pytest.fixture
async def hub(start_server: StartServer) -> Server:
    return await start_server(bond=BondFiles(files=(str(ROOT / "examples" / "calc.bond"),)))


def emp(server: Server, **handlers: Any) -> EmpClient:
    return EmpClient("127.0.0.1", port_of(server, "emp"), handlers=handlers)


def epoxy(server: Server, handlers: Handlers | None = None) -> EpoxyClient:
    return EpoxyClient("127.0.0.1", port_of(server, "epoxy"), handlers=handlers)


@asynccontextmanager
async def calculator(server: Server) -> AsyncIterator[None]:
    """The Bond calculator, as a provider."""
    async with epoxy(server, offer(Calc, Calculator())) as provider:
        await provider.call(HUB, "Serve", Services(services=[CALC]))
        yield


class TestCalculator:
    async def test_an_emp_peer_calls_it_with_json(self, hub: Server) -> None:
        async with calculator(hub), emp(hub) as caller:
            asked = {"x": 67, "y": 87, "operation": "Mul"}
            assert await caller.request(f"{CALC}/Calculate", asked) == {"z": 5829}

    async def test_enumerations_may_be_numbers(self, hub: Server) -> None:
        async with calculator(hub), emp(hub) as caller:
            asked = {"x": 67, "y": 87, "operation": 2}
            assert await caller.request(f"{CALC}/Calculate", asked) == {"z": -20}

    async def test_json_that_does_not_fit_is_refused(self, hub: Server) -> None:
        async with calculator(hub), emp(hub) as caller:
            with pytest.raises(RequestFailed, match="invalid_request"):
                await caller.request(f"{CALC}/Calculate", {"x": "many"})

    async def test_its_errors_reach_the_caller(self, hub: Server) -> None:
        async with calculator(hub), emp(hub) as caller:
            with pytest.raises(RequestFailed) as failed:
                await caller.request(f"{CALC}/Calculate", {"x": 1, "operation": "Div"})
            assert (failed.value.code, failed.value.description) == ("1", "can't divide by zero")

    async def test_a_micromsg2_client_calls_it_with_json(self, hub: Server) -> None:
        async with (
            calculator(hub),
            MicroMsg2Client("127.0.0.1", port_of(hub, "micromsg2")) as caller,
        ):
            answer = await caller.call(
                f"service/{CALC}/Calculate",
                b'{"x": 2, "y": 3}',
                {"content-type": "application/json"},
            )
            assert msgspec.json.decode(answer.payload) == {"z": 5}

    async def test_a_relink_client_calls_it_with_json(self, hub: Server) -> None:
        port = port_of(hub, "relink")
        endpoint = f"service/{CALC}/Calculate"
        async with calculator(hub), RelinkClient("127.0.0.1", port, endpoint) as caller:
            await caller.sender().send(b'{"content-type":"application/json"}', b'{"x":2,"y":3}')
            answer = await anext(caller.receiver())
            assert msgspec.json.decode(answer.parts[-1]) == {"z": 5}
            answer.consume()


class TestOtherWays:
    async def test_an_epoxy_client_calls_an_emp_provider(self, hub: Server) -> None:
        async def calculate(data: dict[str, Any]) -> dict[str, Any]:
            assert data == {"x": 6, "y": 7, "operation": "Mul"}
            return {"z": 42}

        async with emp(hub, **{f"{CALC}/Calculate": calculate}) as provider, epoxy(hub) as caller:
            await provider.request("$serve", {"services": [CALC]})
            asked = Params(x=6, y=7, operation=Operation.Mul)
            assert await caller.call(Calc, "Calculate", asked) == Result(z=42)

    async def test_an_emp_providers_failure_is_an_error_of_bond(self, hub: Server) -> None:
        async def calculate(data: dict[str, Any]) -> dict[str, Any]:
            raise RequestFailed("77", "not today")

        async with emp(hub, **{f"{CALC}/Calculate": calculate}) as provider, epoxy(hub) as caller:
            await provider.request("$serve", {"services": [CALC]})
            with pytest.raises(CallFailed) as failed:
                await caller.call(Calc, "Calculate", Params(x=6))
            assert (failed.value.error_code, failed.value.description) == (77, "not today")

    async def test_an_epoxy_event_is_json_for_an_emp_subscriber(self, hub: Server) -> None:
        delivered: list[dict[str, Any]] = []

        async def deliver(data: dict[str, Any]) -> None:
            delivered.append(data)

        async with emp(hub, **{"$deliver": deliver}) as subscriber, epoxy(hub) as teller:
            await subscriber.request("$subscribe", {"destination": f"topic/{CALC}/+"})
            await teller.send_event(Calc, "Note", Params(x=1, y=2))
            while not delivered:
                await subscriber.request("$echo", {})
            assert delivered[0]["json"] == {"x": 1, "y": 2, "operation": "Add"}

    async def test_an_eventmq_worker_answers_a_micromsg2_client(self, hub: Server) -> None:
        worker = Worker(
            "127.0.0.1",
            port_of(hub, "emqp-workers"),
            queues=[(10, "sums")],
            jobs={"sums.add": lambda x, y: x + y},
        )
        async with worker, MicroMsg2Client("127.0.0.1", port_of(hub, "micromsg2")) as caller:
            answer = await caller.call("service/sums", serialize_job("sums.add", [19, 23]))
            assert msgspec.json.decode(answer.payload) == {"value": 42}
