"""A batch and a stream over Spark Connect, in a process of its own: in one process the functions of
Spark are those of Connect, or the others.

    python -m tests.pipeline.connect_driver URL OUTPUT INPUT SHIP

SHIP is `true` for a server that does not have the package.
"""

from __future__ import annotations

import sys

from crosswire.pipeline import register
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.spark import is_connect, start
from crosswire.pipeline.stream.run import Stream, run_stream

if __name__ == "__main__":
    url, output, given, ship = sys.argv[1:]
    spark = start(url, {"spark.sql.shuffle.partitions": "2", "spark.crosswire.ship": ship})
    assert is_connect(spark)
    register(spark)
    run_batch(spark, BatchJob(find_inputs([given]), f"{output}/batch"), quiet=True)
    run_stream(spark, Stream((given,), f"{output}/stream", once=True))
    spark.stop()
