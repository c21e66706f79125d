"""The slowest methods of a day: a batch job over a hub's lake.

    python examples/slowest_methods.py                     calls an example service first
    python examples/slowest_methods.py LAKE [DATE]         the lake of a hub: DATA/lake

A hub records the steps of every call in its ledger: accepted, delivered, answered. This job selects
the calls of one day (default: today, in UTC) that Epoxy services answered, and prints the methods
with the longest times from acceptance to answer:

    service/examples.shop.Shop/Pay      10 calls, 0 failed, median 80.6 ms, worst 82.0 ms
    service/examples.shop.Shop/Stock    20 calls, …
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.bond import hub_module, idl
from crosswire.cli.bench.hub import started_hub
from crosswire.client.native.epoxy import EpoxyClient, offer
from crosswire.pipeline.spark import SMALL_INPUT, start
from crosswire.plurals import plural

HOST = "127.0.0.1"


# The job.


def calls(ledger: DataFrame) -> DataFrame:
    """A row per finished call of an Epoxy service: method, outcome, duration."""

    def time_of(*steps: str) -> Any:
        return F.max(F.when(F.col("step").isin(*steps), F.col("time")))

    served = F.col("step").isin("delivered") & (F.col("protocol") == "epoxy")
    took_us = time_of("answered", "failed") - time_of("accepted")
    return (
        ledger.where(F.col("destination").startswith("service/"))
        .groupBy("node", "id", F.col("destination").alias("method"))
        .agg(
            F.max(served).alias("served"),
            F.max(F.col("step") == "failed").alias("failed"),
            (took_us / 1000).alias("took_ms"),
        )
        .where("served and took_ms is not null")
    )


def slowest(calls: DataFrame, count: int = 10) -> DataFrame:
    return (
        calls.groupBy("method")
        .agg(
            F.count("*").alias("calls"),
            F.sum(F.col("failed").cast("int")).alias("failed"),
            F.percentile_approx("took_ms", 0.5).alias("median_ms"),
            F.max("took_ms").alias("worst_ms"),
        )
        .orderBy(F.desc("median_ms"))
        .limit(count)
    )


def report(spark: SparkSession, lake: str, date: str) -> None:
    ledger = spark.read.parquet(f"{lake}/ledger").where(F.col("date") == date)
    found = slowest(calls(ledger)).collect()
    print(f"the slowest methods of {date}:" if found else f"no method was called on {date}")
    for row in found:
        print(
            f"  {row.method:35} {plural(row.calls, 'call')}, {row.failed} failed,"
            f" median {row.median_ms:.1f} ms, worst {row.worst_ms:.1f} ms"
        )


# Example traffic, if no lake is given.


class Shop:
    """A service whose method `Pay` is slow."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def price(self, _asked: Any) -> Any:
        return self._answer(cents=250)

    async def stock(self, _asked: Any) -> Any:
        await asyncio.sleep(0.02)
        return self._answer(cents=0)

    async def pay(self, _asked: Any) -> Any:
        await asyncio.sleep(0.08)
        return self._answer(cents=250)


async def call_shop(port: int) -> None:
    """Register the service with the hub, and call it."""
    module = idl.load(Path(__file__).with_name("shop.bond"))
    service = module.service("examples.shop.Shop")
    asked = module.struct("examples.shop.Asked").python_class
    handlers = offer(service, Shop(module.struct("examples.shop.Answer").python_class))
    hub = hub_module()
    services = hub.struct("crosswire.Services").python_class(services=["examples.shop.Shop"])
    async with (
        EpoxyClient(HOST, port, handlers=handlers) as shop,
        EpoxyClient(HOST, port) as caller,
    ):
        await shop.call(hub.service("crosswire.Hub"), "Serve", services)
        for method, count in (("Price", 40), ("Stock", 20), ("Pay", 10)):
            tea = asked(item="tea")
            await asyncio.gather(*(caller.call(service, method, tea) for _ in range(count)))


def main() -> None:
    lake, date = [*sys.argv[1:], "", ""][:2]
    with tempfile.TemporaryDirectory() as folder:
        if not lake:
            lake = f"{folder}/lake"
            with started_hub("epoxy", config=f'[lake]\ndirectory = "{lake}"\n') as hub:
                asyncio.run(call_shop(hub.ports["epoxy"]))
        spark = start("local[2]", SMALL_INPUT, name="slowest-methods")
        try:
            report(spark, lake, date or f"{datetime.now(UTC):%Y-%m-%d}")
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
