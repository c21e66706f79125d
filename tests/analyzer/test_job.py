"""The process that reads a capture keeps to its limits, and what it wrote can be searched."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from crosswire.analyzer.frame_filter import FrameFilter
from crosswire.analyzer.job import CaptureJob, CaptureOutcome
from crosswire.analyzer.results import ResultReader
from crosswire.errors import InvalidInput
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap


@pytest.fixture
def job(tmp_path: Path) -> CaptureJob:
    file = tmp_path / "all.pcap"
    traffic = SampleTraffic(connections=5, messages=40)
    write_pcap(file, [each for talk in traffic.conversations() for each in packets(talk)])
    return CaptureJob(path=str(file), name="all.pcap", results=str(tmp_path / "frames.db"))


def run(job: CaptureJob) -> tuple[int, CaptureOutcome | None]:
    command = [sys.executable, "-m", "crosswire.analyzer", msgspec.json.encode(job).decode()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        return done.returncode, None
    return 0, msgspec.json.decode(done.stdout, type=CaptureOutcome)


def names(job: CaptureJob) -> dict[str, int]:
    return ResultReader(Path(job.results)).names()[0]


def test_the_number_of_frames_is_limited(job: CaptureJob) -> None:
    limited = msgspec.structs.replace(job, frames=100)
    assert run(limited) == (0, CaptureOutcome(notes=["only the first 100 frames were read"]))
    assert sum(names(job).values()) == 100


def test_the_output_is_limited(job: CaptureJob) -> None:
    code, outcome = run(msgspec.structs.replace(job, output_bytes=50_000))
    assert code == 0 and outcome is not None and "they are too large" in outcome.notes[0]
    assert 10 < sum(names(job).values()) < 200


def test_memory_is_limited(job: CaptureJob) -> None:
    """A frame of 60 MB that never ends."""
    head = bytes.fromhex("00000008000000000100000003a0000005000000")
    Path(job.path).write_bytes(head + bytes(60_000_000))
    limited = msgspec.structs.replace(job, memory_bytes=100 << 20)
    code, outcome = run(limited)
    assert code == 0 and outcome is not None and "bytes of memory" in outcome.error


@pytest.mark.slow
def test_processor_time_is_limited(job: CaptureJob) -> None:
    """What was written before is there."""
    hello, ping = "000000080000000001000000", "0000000402000000"
    Path(job.path).write_bytes(bytes.fromhex(hello + ping * 2_000_000))
    code, _ = run(msgspec.structs.replace(job, cpu_s=5, frames=3_000_000, output_bytes=1 << 30))
    assert code == -signal.SIGXCPU
    assert 0 < sum(names(job).values()) < 2_000_000


def test_a_search_takes_only_so_long(job: CaptureJob) -> None:
    assert run(job) == (0, CaptureOutcome())
    with pytest.raises(InvalidInput, match="give more filters"):
        ResultReader(Path(job.results), within_s=-1.0).frames(FrameFilter(text="zzz"), 0, 10)


def test_results_that_are_no_database(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be read"):
        ResultReader(tmp_path / "none.db").names()
    (tmp_path / "bad.db").write_bytes(b"this is not a database, whatever its name" * 100)
    with pytest.raises(InvalidInput, match="not a database"):
        ResultReader(tmp_path / "bad.db").connections()
