"""An archive of Spark's classes, with which Java starts in half the time.

    python -m crosswire.pipeline.class_archive

Before its first query Spark loads some 15,000 classes: Java unpacks, parses and checks each of them
anew in every process. With class data sharing it maps them from a file instead, as they were at the
end of a process that had used them. That file, of about 200 MB, is made once for an environment;
`start` uses it if it is there, and as it was made. Java itself checks that it fits (its own
version; the names, sizes and times of Spark's files), and goes on without it if not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from crosswire.errors import CrosswireError, PipelineError
from crosswire.lake.files import write
from crosswire.lake.schemas import DATA, FORWARD, LEDGER, MESSAGES, WIRE
from crosswire.pipeline.batch import BatchJob, run_batch
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.spark import (
    CHECKSUM,
    SMALL_INPUT,
    checksum,
    class_archive,
    plain_errors,
    start,
)

__all__ = ["make_archive"]

_TIME: int = 1_700_000_000_000_000
_ROW: dict[str, Any] = {
    "node": "n",
    "seq": 1,
    "id": 1,
    "time": _TIME,
    "protocol": "emp",
    "connection": "c",
}


def make_archive(archive: Path) -> None:
    """Run Spark until it has made all tables, and keep its classes. Raises PipelineError."""
    unfinished = archive.with_suffix(f".{os.getpid()}")
    options = (
        f"{SMALL_INPUT['spark.driver.extraJavaOptions']} -XX:ArchiveClassesAtExit={unfinished}"
    )
    # Classes that Java can't keep are reported one by one, on standard output.
    settings = SMALL_INPUT | {"spark.driver.extraJavaOptions": f"{options} -Xlog:disable"}
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        archive.unlink(missing_ok=True)  # Java can't add to an archive that it uses itself
        # An environment that can't be written to is found out before Spark has run for a minute.
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise PipelineError(f"{archive} can't be written: {error.strerror}") from None
    spark = start("local[2]", settings, name="class archive")
    try:
        with tempfile.TemporaryDirectory() as folder, plain_errors():
            _write_lake(Path(folder) / "lake")
            job = BatchJob(find_inputs([f"{folder}/lake"]), f"{folder}/tables")
            run_batch(spark, job, quiet=True)
    finally:
        gateway: Any = spark.sparkContext._gateway
        spark.stop()
        gateway.shutdown()
        # Java ends, and writes the archive, when nobody can give it anything to do any more.
        gateway.proc.stdin.close()
        gateway.proc.wait()
    if not unfinished.exists():
        raise PipelineError("this Java does not archive classes")
    # Of two processes that do this at once, the checksum of one may be left with the archive of the
    # other: then neither is used.
    proof = unfinished.with_suffix(f"{unfinished.suffix}{CHECKSUM}")
    proof.write_text(checksum(unfinished))
    unfinished.rename(archive)
    proof.rename(archive.with_suffix(CHECKSUM))


def _write_lake(lake: Path) -> None:
    """A lake with a row or two in each of its tables."""
    empty = {"principal": "", "destination": "queue/q", "connection": "c"}
    wire = {
        "direction": FORWARD,
        "kind": DATA,
        "offset": 0,
        "length": 4,
        "data": b"....",
        "late": False,
        "connector_address": "127.0.0.1",
        "connector_port": 1,
        "acceptor_address": "127.0.0.1",
        "acceptor_port": 2,
    }
    message = dict.fromkeys(MESSAGES.names, "") | {
        "kind": "message",
        "durable": True,
        "expires": 0,
        "properties": "{}",
        "native": {},
        "payload": b"x",
        "crc": 0,
    }
    step = {"step": "accepted", "attempt": 0, "detail": "", "count": 1, "subscription": ""}
    for name, schema, row in (
        ("wire", WIRE, wire),
        ("messages", MESSAGES, message | empty),
        ("ledger", LEDGER, step | empty),
    ):
        write(lake, name, pa.Table.from_pylist([row | _ROW], schema=schema))


if __name__ == "__main__":
    try:
        make_archive(class_archive())
    except CrosswireError as error:
        sys.exit(f"No archive of Spark's classes: {error}")
