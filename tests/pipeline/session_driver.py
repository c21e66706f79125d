"""A batch and a stream in a session of a process of its own: over Spark Connect, whose functions
can't be in one process with the others, or with another version of Spark.

    python -m tests.pipeline.session_driver MASTER OUTPUT INPUT SHIP

SHIP is `true` for a Connect server that does not have the package. Prints the version of Spark.
"""

from __future__ import annotations

import sys

from crosswire.pipeline import register
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.spark import SMALL_INPUT, is_connect, start
from crosswire.pipeline.stream.run import Stream, run_stream

if __name__ == "__main__":
    master, output, given, ship = sys.argv[1:]
    is_remote = master.startswith("sc://")
    settings = {"spark.sql.shuffle.partitions": "2"} if is_remote else {**SMALL_INPUT}
    spark = start(master, {**settings, "spark.crosswire.ship": ship})
    assert is_connect(spark) == is_remote
    register(spark)
    run_batch(spark, BatchJob(find_inputs([given]), f"{output}/batch"), quiet=True)
    run_stream(spark, Stream((given,), f"{output}/stream", once=True))
    print(spark.version)
    spark.stop()
