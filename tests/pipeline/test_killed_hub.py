"""All protocols through a hub that is killed twice: every finding is zero or explained."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from pyspark.sql import SparkSession

import crosswire
from crosswire.client.message import Message
from crosswire.errors import CallFailed, ClientError, HubError, RequestTimeout
from crosswire.server.server import GATEWAYS
from tests.cli.conftest import RunningHub
from tests.e2e.bridging import until
from tests.e2e.parties import PARTIES, EmqpParty, Party
from tests.e2e.test_kill import ARRIVE_S, TOPIC, Mortal, Traffic
from tests.pipeline.conftest import Made, make

KILLS = 2
BETWEEN_S = 0.3
POISON = "topic/poison"
RETRY = "retry = { max_attempts = 5, first_delay_s = 0.001 }"
CUT_OFF = {
    "of the last second before the recording ends",
    "the recording of its link was cut off before",
}
"""Why it is not known what became of a message when a hub is killed."""
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


async def moved(port: int) -> None:
    """A message of a queue, and one of a named subscription, are refused until they are dead
    letters; these are sent again, and taken."""
    async with (
        crosswire.connect(f"emp://127.0.0.1:{port}") as hub,
        hub.subscribe("queue/poison") as jobs,
        hub.subscribe(POISON, name="p") as news,
    ):
        for destination, messages in (("queue/poison", jobs), (POISON, news)):
            await hub.publish(destination, "poison")
            for _ in range(5):
                await (await messages.receive(timeout_s=ARRIVE_S)).refuse("poison")


async def replay(web: str, port: int) -> None:
    """Send the dead letters again."""
    for queue in ("poison", "@p"):
        asked = json.dumps({"queue": queue, "all": True}).encode()

        def post(body: bytes = asked) -> int:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{web}/v1/dead/replays", body, headers)
            with urllib.request.urlopen(request, timeout=ARRIVE_S) as answer:
                return int(json.load(answer)["replayed"])

        assert await asyncio.to_thread(post) == 1
    async with (
        crosswire.connect(f"emp://127.0.0.1:{port}") as hub,
        hub.subscribe("queue/poison") as jobs,
        hub.subscribe(POISON, name="p") as news,
    ):
        for messages in (jobs, news):
            await (await messages.receive(timeout_s=ARRIVE_S)).settle()


async def with_clients(name: str, url: str) -> None:
    """The client library: it subscribes, publishes, serves and calls; one answer comes too late."""
    waiting, asked = asyncio.Event(), asyncio.Event()

    async def handle(call: crosswire.Message) -> dict[str, bool]:
        late = bool(call.body["late"])
        if late:
            asked.set()
            await waiting.wait()
        return {"late": late}

    queue, service = f"queue/client-{name}", f"service/client-{name}"
    async with crosswire.connect(url) as hub, crosswire.connect(url) as other:
        async with hub.subscribe(queue) as messages:
            await hub.publish(queue, "one")
            await (await messages.receive(timeout_s=ARRIVE_S)).settle()
        async with await other.serve(service, handle):
            for _ in range(20):
                with suppress(CallFailed, RequestTimeout):
                    await hub.call(service, {"late": True}, timeout_s=0.5)
                if asked.is_set():
                    break
            waiting.set()
            await hub.call(service, {"late": False})


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
        await moved(mortal.ports["emp"])
        await replay(f"http://127.0.0.1:{mortal.ports['http']}", mortal.ports["emp"])
        for name in ("emp", "relink", "epoxy", "micromsg2"):
            await with_clients(name, f"{name}://127.0.0.1:{mortal.ports[name]}")
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
    config.write_text(
        f"[lake]\nseal_s = 0.2\n[lake.tap]\nlisteners = [{TAPPED}]\n[queues.poison]\n{RETRY}\n"
    )
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


def life(row: dict[str, Any]) -> int:
    """Which of the hubs had the connection of a row, from 1: the last one was not killed."""
    return int(row["connection"].rsplit("-", 2)[1])


def test_the_wire_and_the_hub_agree(found: Made) -> None:
    rows = found.rows("gold/reconciliation")
    verdicts = Counter(row["verdict"] for row in rows)
    assert verdicts.keys() <= {"equal", "uncertain", "not accepted"}, verdicts
    assert verdicts["equal"] > 0.5 * len(rows)
    assert {row["protocol"] for row in rows} == {party.name.lower() for party in PARTIES}
    assert {life(row) for row in rows} == set(range(1, KILLS + 2))
    for row in rows:
        # Whoever had no reply when the hub was killed does not know; nobody else.
        if row["verdict"] == "uncertain":
            assert row["reason"] in CUT_OFF, row
            assert life(row) <= KILLS or row["protocol"] == "relink", row
        if row["verdict"] == "not accepted":
            assert row["acknowledged"] is not True, row
            # Of the last hub only answers that came too late.
            assert life(row) <= KILLS or (row["way"], row["kind"]) == ("in", "response"), row
        # Calls over Epoxy are typed: its edge converts their payloads.
        if row["same_payload"] is False:
            assert (row["protocol"], row["destination"][:8]) == ("epoxy", "service/"), row


def test_dead_letters_that_were_sent_again_were_on_no_wire(found: Made) -> None:
    rows = found.rows("gold/reconciliation")
    for destination in ("queue/poison", POISON):
        ways = Counter(row["way"] for row in rows if row["destination"] == destination)
        # Published once, refused five times, taken once.
        assert ways == {"in": 1, "out": 6}
    replayed = [row for row in found.rows("gold/deliveries") if row["outcome"] == "replayed"]
    again = {row["origin"] for row in found.rows("gold/deliveries") if row["outcome"] == "settled"}
    assert len(replayed) == 2 and {row["message_id"] for row in replayed} <= again


def test_answers_that_nobody_waits_for_are_no_finding(found: Made) -> None:
    for name in ("emp", "relink", "epoxy", "micromsg2"):
        verdicts = Counter(
            row["verdict"]
            for row in found.rows("gold/reconciliation")
            if (row["protocol"], row["way"], row["kind"]) == (name, "in", "response")
            and row["destination"] == f"service/client-{name}"
        )
        assert verdicts["equal"] and not verdicts.keys() - {"equal", "not accepted"}, name


def test_nothing_is_lost_and_doubles_are_explained(found: Made) -> None:
    rows = found.rows("gold/deliveries") + found.rows("open/deliveries")
    zero = ("lost", "late", "damaged", "damaged answers", "uncertain deliveries")
    assert {name: found.summary.findings[name] for name in zero} == dict.fromkeys(zero, 0)
    assert found.summary.notes == []
    for row in rows:
        # It was held by a consumer when the hub was killed, and handed out again after that.
        assert not row["doubled"] or 1 < row["attempts"] <= KILLS + 1, row
        assert row["outcome"] != "failed" or row["detail"], row


def test_every_byte_is_accounted_for(found: Made) -> None:
    assert all(each["missing"] == each["violations"] == 0 for each in found.summary.accounting)
