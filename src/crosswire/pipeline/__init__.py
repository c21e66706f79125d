"""From captured bytes to tables, on Spark. The only place that knows pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make the data sources `crosswire` (a running hub) and `pcap` (captures) known to a session.

    Spark refuses sources that filters can be pushed down to, unless that is allowed: so it is.
    """
    from crosswire.pipeline.connector.source import CrosswireDataSource
    from crosswire.pipeline.sources.pcap import PcapDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(CrosswireDataSource)
    spark.dataSource.register(PcapDataSource)
