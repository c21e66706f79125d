"""From captured bytes to tables, on Spark. The only package that imports pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register the data sources `crosswire` (a running hub) and `pcap` (captures) with a session.

    Also turns on Spark's filter pushdown for Python sources: without that setting Spark refuses
    every source that offers it, as `crosswire` does.
    """
    # Imported here so that `crosswire.pipeline.report` needs neither Spark nor numba.
    from crosswire.pipeline.connector.source import CrosswireDataSource
    from crosswire.pipeline.sources.pcap import PcapDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(CrosswireDataSource)
    spark.dataSource.register(PcapDataSource)
