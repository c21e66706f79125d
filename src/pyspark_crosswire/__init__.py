"""Lets Spark find the source `crosswire` by itself: it looks for modules named `pyspark_…`.

Spark imports this module when it looks up any Python source, also for programs that don't use ours.
"""

from crosswire.pipeline.connector.source import UnregisteredDataSource as DefaultSource

__all__ = ["DefaultSource"]
