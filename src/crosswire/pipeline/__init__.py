"""From captured bytes to tables, on Spark. The only package that imports pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from crosswire.pipeline.visible_tables import VisibleTables

__all__ = ["open_tables", "register"]


def open_tables(root: str) -> VisibleTables:
    """The tables of an output, a folder or a URL, as its newest manifest shows them.

        open_tables("tables").read("gold.traffic")                        # a table of Arrow
        spark.read.parquet(*open_tables("tables").paths("gold.traffic"))

    Raises InvalidInput if it can't be opened. It needs no Spark.
    """
    from crosswire.pipeline.visible_tables import VisibleTables

    return VisibleTables(root)


def register(spark: SparkSession) -> None:
    """Register the data sources `crosswire` (a running hub) and `pcap` (captures) with a session.

    Also turns on Spark's filter pushdown for Python sources: without that setting Spark refuses
    every source that offers it, as `crosswire` does.
    """
    # Imported here so that `crosswire.pipeline.report` needs neither Spark nor numba.
    from pyspark.errors import AnalysisException

    from crosswire.pipeline.connector.source import CrosswireDataSource
    from crosswire.pipeline.sources.pcap import PcapDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        spark.dataSource.register(CrosswireDataSource)
    except AnalysisException as error:
        # Spark 4.0 lets nobody replace a source that it has found by itself. There it is the same:
        # that version pushes no filters down.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
    spark.dataSource.register(PcapDataSource)
