"""The archive of Spark's classes, and Java with one that is of no use."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from crosswire.errors import PipelineError
from crosswire.pipeline.class_archive import make_archive
from crosswire.pipeline.spark import CHECKSUM, archive_options, is_whole, java_home


def java(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [java_home() / "bin" / "java", *options, "-version"], capture_output=True, text=True
    )


@pytest.mark.parametrize("content", [None, b"", b"no archive" * 1000])
def test_an_archive_that_does_not_fit_is_ignored(tmp_path: Path, content: bytes | None) -> None:
    archive = tmp_path / "a folder" / "spark.jsa"
    archive.parent.mkdir()
    if content is not None:
        archive.write_bytes(content)
    done = java(*shlex.split(archive_options(archive)))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == java().stderr.replace(", sharing", "")


@pytest.mark.parametrize(
    ("content", "checksum", "expected"),
    [
        (b"classes", "02ed7ec5", True),
        (b"class", "02ed7ec5", False),
        (b"Classes", "02ed7ec5", False),
        (b"classes", None, False),
        (None, "02ed7ec5", False),
    ],
)
def test_only_a_whole_archive_is_used(
    tmp_path: Path, content: bytes | None, checksum: str | None, expected: bool
) -> None:
    """Java does not notice that one is damaged, and crashes."""
    archive = tmp_path / "spark.jsa"
    if content is not None:
        archive.write_bytes(content)
    if checksum is not None:
        archive.with_suffix(CHECKSUM).write_text(checksum)
    assert is_whole(archive) is expected


def test_an_environment_that_can_not_be_written_to_is_reported(tmp_path: Path) -> None:
    (tmp_path / "share").write_bytes(b"no folder")
    with pytest.raises(PipelineError, match=r"spark\.jsa can't be written: "):
        make_archive(tmp_path / "share" / "spark.jsa")


MAKE = """
import sys
from pathlib import Path
from crosswire.pipeline.class_archive import make_archive
make_archive(Path(sys.argv[1]))
"""

START = """
import sys
from pathlib import Path
from crosswire.pipeline import spark
log = "-Xlog:class+load:file=" + sys.argv[2]
spark.class_archive = lambda: Path(sys.argv[1])
spark.start("local[1]", {"spark.driver.extraJavaOptions": log}).range(3).collect()
"""


@pytest.mark.long  # a minute
def test_most_classes_are_taken_from_an_archive(tmp_path: Path) -> None:
    archive, log = tmp_path / "share" / "spark.jsa", tmp_path / "classes"
    for script in (MAKE, START):
        done = subprocess.run(
            [sys.executable, "-c", script, archive, log], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    names = sorted(each.name for each in archive.parent.iterdir())
    assert names == ["spark.crc32", "spark.jsa"]
    # Not those with a slash: lambdas, which Java makes while it runs.
    of_spark = re.findall(r"org\.apache\.spark\.[^\s/]+ source: (.+)", log.read_text())
    shared = sum("shared objects file" in each for each in of_spark)
    assert shared > 0.8 * len(of_spark) > 100
