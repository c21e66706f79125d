"""A run in a process of its own, on the Java of another one: it starts soon, and can be killed.

    python -m tests.pipeline.driver stream OUTPUT INPUT …
    python -m tests.pipeline.driver batch OUTPUT INPUT …        (a few tables)

PYSPARK_GATEWAY_PORT and _SECRET must be set. Says a line when it begins, and one for each batch of
a stream. What it was doing when it is killed goes on in Java for a while.
"""

from __future__ import annotations

import sys

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.stream.run import BatchDone, Stream, run_stream

FEW = frozenset({"frames", "directions", "sessions", "accounting"})


def attach() -> SparkSession:
    """The session of who started us."""
    gateway = launch_gateway()
    spark = gateway.jvm.org.apache.spark
    jsc = spark.api.java.JavaSparkContext.fromSparkContext(spark.SparkContext.getOrCreate())
    SparkContext(gateway=gateway, jsc=jsc, conf=SparkConf(_jconf=jsc.getConf()))
    return SparkSession.builder.getOrCreate()


def tell(done: BatchDone) -> None:
    print(done.batch, flush=True)


if __name__ == "__main__":
    how, output, *paths = sys.argv[1:]
    spark = attach()
    print("attached", flush=True)
    if how == "stream":
        run_stream(spark, Stream(tuple(paths), output, batch_bytes=1), notify=tell)
    else:
        run_batch(spark, BatchJob(find_inputs(paths), output, FEW), quiet=True)
