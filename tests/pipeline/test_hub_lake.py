"""A real hub with its tap and its lake on; then the pipeline over what it left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from crosswire.client.message import Message
from crosswire.client.native.emp import EmpClient
from crosswire.config import PLAIN_LISTENERS, Config, LakeSettings, TapSettings
from crosswire.errors import RequestFailed
from crosswire.hub.policies import QueuePolicy, Retry, TopicPolicy
from crosswire.server.server import GATEWAYS, Server
from tests.e2e.parties import PARTIES, EmqpParty, Party
from tests.pipeline.conftest import Made, make

CONFIG = {
    "drain_s": 0.1,
    "lake": LakeSettings(tap=TapSettings(listeners=tuple(GATEWAYS)), seal_s=0.05),
    "queues": {
        "poison": QueuePolicy(retry=Retry(max_attempts=2, first_delay_s=0.001)),
        "tiny": QueuePolicy(max_length=1),
    },
    "topics": {"passing": TopicPolicy(durable=False)},
}
SPOILED = b'{"to be":"spoiled"}'


class Hub:
    """A server in a folder, and clients of it."""

    def __init__(self, data: Path) -> None:
        listen = {name: "127.0.0.1:0" if name in GATEWAYS else "off" for name in PLAIN_LISTENERS}
        self.server = Server(Config(data=str(data), listen=listen, **CONFIG))  # type: ignore[arg-type]

    async def __aenter__(self) -> Hub:
        await self.server.start()
        self.ports = {name: each.address.port for name, each in self.server.listeners.items()}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()

    def emp(self, **handlers: Any) -> EmpClient:
        named = {f"${name}": handler for name, handler in handlers.items()}
        return EmpClient("127.0.0.1", self.ports["emp"], handlers=named)

    def steps(self, destination: str) -> list[str]:
        return [row.step for row in self.server.hub.ledger.of_destination(destination)]

    def has_subscriber(self, name: str) -> bool:
        """Not all protocols confirm a subscription to the subscriber."""
        topic = self.server.hub.topic(name)
        audience = self.server.hub.subscriptions.audience(topic)
        return any(each.wants(topic.name) for each in audience.subscribers)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)


async def publish(client: EmpClient, destination: str, text: str) -> None:
    await client.request("$publish", {"destination": destination, "text": text})


async def pass_through(hub: Hub, kind: type[Party]) -> None:
    """Two messages over a queue, one over a topic, a call, and one that nobody gets."""
    queue, service, topic = (f"{what}/of-{kind.name}" for what in ("queue", "service", "topic"))

    async def answer(_: Message) -> dict[str, int]:
        return {"ok": 1}

    async with kind(hub.ports) as producer, kind(hub.ports) as consumer:
        jobs = await consumer.consume(queue)
        news = await consumer.consume(topic)
        await hub.until(lambda: hub.has_subscriber(topic))
        for number in range(2):
            await producer.produce(queue, b'{"n":%d}' % number, "application/json")
            await jobs.get()
        await producer.produce(topic, b"from " + kind.name.encode())
        await news.get()
        if kind is not EmqpParty:  # whose calls are jobs in queues
            await consumer.serve(service, answer)
            await hub.until(lambda: hub.server.hub.is_served(service))
            await producer.call(service, b'{"q":1}')
        await producer.produce("topic/passing", b"by")
        await hub.until(lambda: hub.steps(queue).count("settled") == 2)
        await hub.until(lambda: len(hub.steps("topic/passing")) >= PARTIES.index(kind) + 1)


async def a_dead_letter(hub: Hub) -> None:
    async def refuse(_: dict[str, Any]) -> None:
        raise RequestFailed("bad", "poison")

    async with hub.emp(deliver=refuse) as consumer, hub.emp() as producer:
        await consumer.request("$subscribe", {"destination": "queue/poison"})
        await publish(producer, "queue/poison", "never")
        await hub.until(lambda: "dead" in hub.steps("queue/poison"))


async def a_lost_consumer(hub: Hub) -> None:
    """It is given a message and leaves; another one gets it."""
    given = asyncio.Event()

    async def keep(_: dict[str, Any]) -> None:
        given.set()
        await asyncio.Event().wait()

    async def settle(_: dict[str, Any]) -> None:
        return None

    async with hub.emp() as producer:
        async with hub.emp(deliver=keep) as first:
            await first.request("$subscribe", {"destination": "queue/shaky"})
            await publish(producer, "queue/shaky", "twice")
            await given.wait()
        async with hub.emp(deliver=settle) as second:
            await second.request("$subscribe", {"destination": "queue/shaky"})
            await hub.until(lambda: "settled" in hub.steps("queue/shaky"))


async def refusals(hub: Hub) -> None:
    """One waits for ever, the next finds the queue full; and nobody serves what is asked for."""
    async with hub.emp() as producer:
        await publish(producer, "queue/tiny", "waits")
        with pytest.raises(RequestFailed):
            await publish(producer, "queue/tiny", "too much")
        with pytest.raises(RequestFailed):
            await producer.request("nobody", {})
        await producer.request(
            "$publish", {"destination": "queue/spoiled", "json": {"to be": "spoiled"}}
        )


async def a_named_subscription(hub: Hub) -> None:
    """It gets the first message, and is gone when the second comes."""

    async def settle(_: dict[str, Any]) -> None:
        return None

    async with hub.emp() as producer:
        async with hub.emp(deliver=settle) as reader:
            await reader.request("$subscribe", {"destination": "topic/named", "name": "audit"})
            await producer.request(
                "$publish",
                {"destination": "topic/named", "text": "first", "properties": {"tenant": "acme"}},
            )
            await hub.until(lambda: "settled" in hub.steps("topic/named"))
        await publish(producer, "topic/named", "second")


async def live(data: Path) -> None:
    async with Hub(data) as hub:
        for kind in PARTIES:
            await pass_through(hub, kind)
        await a_dead_letter(hub)
        await a_lost_consumer(hub)
        await a_named_subscription(hub)
        await refusals(hub)


def spoil(lake: Path) -> None:
    """One bit of one payload in the lake."""
    for file in (lake / "messages").rglob("*.parquet"):
        table = pq.ParquetFile(file).read()
        payloads = table["payload"].to_pylist()
        if SPOILED in payloads:
            payloads[payloads.index(SPOILED)] = b"\x5b" + SPOILED[1:]
            index = table.schema.get_field_index("payload")
            column = pa.array(payloads, pa.binary())
            pq.write_table(table.set_column(index, table.schema.field(index), column), file)
            return
    raise AssertionError("the message is not in the lake")


def of(rows: list[dict[str, Any]], destination: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["destination"] == destination]


def test_the_wire_and_the_hub_agree(hub_lake: Made) -> None:
    rows = hub_lake.rows("gold/reconciliation")
    odd = [row for row in rows if row["verdict"] != "equal"]
    assert [(row["verdict"], row["destination"], row["way"]) for row in odd] == [
        ("not accepted", "queue/tiny", "in")
    ]
    assert hub_lake.summary.findings["equal"] == len(rows) - 1


@pytest.mark.parametrize("kind", PARTIES)
def test_every_passage_of_every_protocol_is_found(hub_lake: Made, kind: type[Party]) -> None:
    rows = hub_lake.rows("gold/reconciliation")
    own = of(rows, f"queue/of-{kind.name}")
    assert Counter(row["way"] for row in own if row["kind"] != "response") == {"in": 2, "out": 2}
    assert all(row["same_payload"] and row["intact"] for row in own)
    news = of(rows, f"topic/of-{kind.name}")
    assert Counter((row["way"], row["protocol"]) for row in news) == {
        ("in", kind.name.lower()): 1,
        ("out", kind.name.lower()): 1,
    }
    if kind is not EmqpParty:
        called = of(rows, f"service/of-{kind.name}")
        assert Counter(row["way"] for row in called) == {"in": 2, "out": 1, "answer": 1}


def test_what_went_well(hub_lake: Made) -> None:
    rows = hub_lake.rows("gold/deliveries")
    for kind in PARTIES:
        settled = of(rows, f"queue/of-{kind.name}")
        assert [(row["outcome"], row["attempts"], row["on_wire"]) for row in settled] == [
            ("settled", 1, 1)
        ] * 2
        assert all(row["sent"] <= row["settled"] and row["latency_us"] >= 0 for row in settled)
        assert not any(row["late"] or row["lost"] or row["doubled"] for row in settled)
        (news,) = of(rows, f"topic/of-{kind.name}")
        assert (news["outcome"], news["hop"]) == ("delivered", news["connection"])
    assert {row["outcome"] for row in of(rows, "topic/passing")} == {"unclaimed"}
    answered = [row for row in rows if row["destination"].startswith("service/of-")]
    assert [row["outcome"] for row in answered] == ["answered"] * (len(PARTIES) - 1)


@pytest.mark.parametrize("kind", [kind for kind in PARTIES if kind is not EmqpParty])
def test_a_call_is_counted_once_on_each_leg(hub_lake: Made, kind: type[Party]) -> None:
    """From the caller to the hub, and from the hub to the provider; no row mixes the two."""
    service = f"service/of-{kind.name}"
    calls = of(hub_lake.rows("gold/conversations"), service)
    assert sorted((row["leg"], row["direction"]) for row in calls) == [
        ("caller", "forward"),
        ("provider", "backward"),
    ]
    assert len({row["connection"] for row in calls}) == 2
    assert {(row["client"], row["principal"]) for row in calls} == {("127.0.0.1", None)}
    traffic = of(hub_lake.rows("gold/traffic"), service)
    for leg in ("caller", "provider"):
        (latency,) = (row["latency_us"] for row in calls if row["leg"] == leg)
        own = [row for row in traffic if row["leg"] == leg]
        # A request in one direction, an answer in the other.
        assert sum(row["messages"] for row in own) == 2
        assert [row["latency_max_us"] for row in own if row["histogram"]] == [latency]
    assert {row["leg"] for row in of(hub_lake.rows("gold/traffic"), f"queue/of-{kind.name}")} == {
        None
    }


def test_a_dead_letter_was_refused_and_is_kept(hub_lake: Made) -> None:
    (row,) = of(hub_lake.rows("gold/deliveries"), "queue/poison")
    assert (row["outcome"], row["attempts"], row["refusals"]) == ("dead", 2, 2)
    assert (row["on_wire"], row["lost"], row["doubled"]) == (2, False, False)
    (letter,) = of(hub_lake.rows("open/deliveries"), "queue/poison/dead")
    assert (letter["origin"], letter["outcome"]) == (row["message_id"], "waiting")


def test_a_lost_consumer_may_have_done_it_already(hub_lake: Made) -> None:
    (row,) = of(hub_lake.rows("gold/deliveries"), "queue/shaky")
    assert (row["outcome"], row["attempts"], row["returns"]) == ("settled", 2, 1)
    assert (row["on_wire"], row["doubled"], row["lost"]) == (2, True, False)


def test_what_nobody_took_is_open_and_what_nobody_serves_failed(hub_lake: Made) -> None:
    waiting = hub_lake.rows("open/deliveries")
    assert {row["destination"] for row in waiting} == {
        "queue/tiny",
        "queue/spoiled",
        "queue/poison/dead",
    }
    assert {row["outcome"] for row in waiting} == {"waiting"}
    (row,) = of(hub_lake.rows("gold/deliveries"), "service/nobody")
    assert (row["outcome"], row["detail"]) == ("failed", "nobody serves service/nobody")


def test_a_payload_that_was_spoiled_in_the_lake_is_found(hub_lake: Made) -> None:
    rows = hub_lake.rows("gold/deliveries") + hub_lake.rows("open/deliveries")
    damaged = [row["destination"] for row in rows if row["intact"] is False]
    assert damaged == ["queue/spoiled"]
    (row,) = of(hub_lake.rows("gold/reconciliation"), "queue/spoiled")
    assert (row["intact"], row["same_payload"]) == (False, True)


def test_the_summary_counts_what_was_found(hub_lake: Made) -> None:
    found = hub_lake.summary.findings
    wanted = {"late": 0, "lost": 0, "doubled": 1, "damaged": 1, "damaged answers": 0}
    assert {name: found[name] for name in wanted} == wanted
    # Calls over Epoxy are typed: its edge converts their payloads.
    rows = hub_lake.rows("gold/reconciliation")
    others = [row["destination"] for row in rows if row["same_payload"] is False]
    assert set(others) == {"service/of-Epoxy"} and found["other payload"] == len(others)
    assert hub_lake.summary.notes == []


def test_one_task_makes_the_same_tables_as_several(
    hub_lake: Made, spark: SparkSession, tmp_path: Path
) -> None:
    setting = "spark.sql.shuffle.partitions"
    before = str(spark.conf.get(setting))
    spark.conf.set(setting, "1")
    try:
        alone = make(spark, tmp_path, hub_lake.folder.parent / "data", late_us=600_000_000)
    finally:
        spark.conf.set(setting, before)
    assert alone.summary.rows == hub_lake.summary.rows
    assert alone.summary.findings == hub_lake.summary.findings
    for path in alone.summary.rows:
        name = path.replace(".", "/")
        made, expected = (Counter(map(str, each.rows(name))) for each in (alone, hub_lake))
        assert made == expected, path
