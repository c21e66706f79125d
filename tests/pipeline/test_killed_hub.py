"""All protocols through a hub that is killed twice: every finding is zero or explained."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress

import pytest
from pyspark.sql import SparkSession

from crosswire.client.message import Message
from crosswire.errors import ClientError, HubError
from crosswire.server.server import GATEWAYS
from tests.cli.conftest import RunningHub
from tests.e2e.bridging import until
from tests.e2e.parties import PARTIES, EmqpParty, Party
from tests.e2e.test_kill import ARRIVE_S, TOPIC, Mortal, Traffic
from tests.pipeline.conftest import Made, make

KILLS = 2
BETWEEN_S = 0.3
TAPPED = ", ".join(f'"{name}"' for name in GATEWAYS)


async def call(party: Party, traffic: Traffic) -> None:
    """Calls of a service, again and again."""
    while traffic.running:
        try:
            await party.call(f"service/of-{party.name}", b'{"q":1}')
        except (HubError, ClientError):
            await asyncio.sleep(0.02)


async def answer(_: Message) -> dict[str, int]:
    return {"ok": 1}


async def live(mortal: Mortal) -> None:
    queues = [f"queue/kept-{party.name}" for party in PARTIES]
    traffic = Traffic(queues)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        consumers: list[asyncio.Task[None]] = []
        producers: list[asyncio.Task[None]] = []
        for kind, queue in zip(PARTIES, queues, strict=True):
            party = await stack.enter_async_context(kind(mortal.ports))
            inbox = await party.consume(queue)
            consumers.append(tasks.create_task(traffic.consume(party, queue, inbox)))
            if kind is not EmqpParty:
                inbox = await party.consume(TOPIC, name=f"kept-{party.name}")
                consumers.append(tasks.create_task(traffic.consume(party, TOPIC, inbox)))
                provider = await stack.enter_async_context(kind(mortal.ports))
                await provider.serve(f"service/of-{party.name}", answer)
        # Only now: a subscription has nothing of what was published before it.
        for number, kind in enumerate(PARTIES):
            if kind is not EmqpParty:
                caller = await stack.enter_async_context(kind(mortal.ports))
                producers.append(tasks.create_task(call(caller, traffic)))
            sender = await stack.enter_async_context(kind(mortal.ports))
            producers.append(tasks.create_task(traffic.produce(sender, number)))
        for _ in range(KILLS):
            await asyncio.sleep(BETWEEN_S)
            await mortal.die_and_rise()
        await asyncio.sleep(BETWEEN_S)
        traffic.running = False
        await asyncio.wait(producers)
        with suppress(TimeoutError):  # what is missing is reported below
            await until(lambda: not any(traffic.missing().values()), within_s=ARRIVE_S)
        for task in consumers:
            task.cancel()
    assert not any(traffic.missing().values()), str(traffic)


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("killed")
    config = folder / "crosswire.toml"
    config.write_text(f"[lake]\nseal_s = 0.2\n[lake.tap]\nlisteners = [{TAPPED}]\n")
    hubs: list[RunningHub] = []

    def start(*options: str) -> RunningHub:
        hubs.append(RunningHub(folder / "data", "--config", str(config), *options))
        return hubs[-1]

    mortal = Mortal(start)
    try:
        asyncio.run(live(mortal))
        assert mortal.hub.end()[0] == 0
    finally:
        for hub in hubs:
            if hub.process.poll() is None:
                hub.end(signal.SIGKILL)
            for stream in (hub.process.stdout, hub.process.stderr):
                if stream is not None:
                    stream.close()
    tables = frozenset({"deliveries", "reconciliation", "accounting"})
    yield make(spark, folder, folder / "data", late_us=600_000_000, tables=tables)


def test_the_wire_and_the_hub_agree(found: Made) -> None:
    rows = found.rows("gold/reconciliation")
    verdicts = Counter(row["verdict"] for row in rows)
    odd = [row for row in rows if row["verdict"].startswith("missing")]
    assert not odd, odd[:3]
    assert verdicts["equal"] > 0.5 * len(rows)
    assert {row["protocol"] for row in rows} == {party.name.lower() for party in PARTIES}
    for row in rows:
        # Whoever had no reply when the hub was killed does not know; everything else has a reason.
        assert row["verdict"] != "uncertain" or row["reason"]
        assert row["verdict"] != "not accepted" or row["acknowledged"] is not True


def test_nothing_is_lost_and_doubles_are_explained(found: Made) -> None:
    rows = found.rows("gold/deliveries") + found.rows("open/deliveries")
    assert found.summary.findings["lost"] == found.summary.findings["damaged"] == 0
    for row in rows:
        # It was held by a consumer when the hub was killed, and handed out again after that.
        assert not row["doubled"] or row["attempts"] > 1, row


def test_every_byte_is_accounted_for(found: Made) -> None:
    assert all(each["missing"] == each["violations"] == 0 for each in found.summary.accounting)
