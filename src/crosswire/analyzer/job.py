"""Reads a capture in a process of its own: `python -m crosswire.analyzer JSON`.

The first thing it does is to limit its own memory, processor time and files: a capture that was
made to do harm ends this process, and not the one that started it. The last line of its output is
an `CaptureOutcome`.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from crosswire.analyzer.analysis import AnalyzedFrame, CaptureAnalysis
from crosswire.analyzer.results import ResultWriter
from crosswire.capture.headers import is_capture
from crosswire.errors import CrosswireError, InvalidInput

__all__ = ["CaptureJob", "CaptureOutcome", "main"]

_CHUNK_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 16 << 20
"""For indexes, empty space and the log of SQLite."""


class CaptureJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to read, where to write to, and within which limits.

    A file that is no capture has the raw bytes of one direction. Their protocol is recognized if
    none is named; the sender is a role of it. `name` is what people know the file by.
    """

    path: str
    name: str
    results: str
    protocol: str = ""
    sender: str = ""
    is_late: bool = False
    ports: dict[int, str] = {}
    memory_bytes: int = 1 << 30
    cpu_s: int = 30
    output_bytes: int = 256 << 20
    frames: int = 200_000


class CaptureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`error` if nothing could be read; `notes` are what people have to know of the result."""

    error: str = ""
    notes: list[str] = []


def main() -> None:
    """Run the job that the first argument describes."""
    job = msgspec.json.decode(sys.argv[1], type=CaptureJob)
    _limit(job)
    try:
        outcome = _run(job)
    except CrosswireError as error:
        outcome = CaptureOutcome(error=str(error).replace(job.path, job.name))
    except MemoryError:
        outcome = CaptureOutcome(
            error=f"it takes more than {job.memory_bytes} bytes of memory to read"
        )
    print(msgspec.json.encode(outcome).decode())


def _limit(job: CaptureJob) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (job.memory_bytes, job.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_s, job.cpu_s + 1))
    # More than the limit that is checked below, which keeps what was written so far.
    most = 2 * job.output_bytes + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Beyond the limit of a file a write fails, instead of a signal that ends the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _run(job: CaptureJob) -> CaptureOutcome:
    analysis = CaptureAnalysis(job.ports)
    writer = ResultWriter(Path(job.results))
    notes = []
    try:
        for frame in _frames(analysis, job):
            writer.add(frame)
            if frame.number >= job.frames:
                notes.append(f"only the first {job.frames} frames were read")
                break
            if writer.size_bytes > job.output_bytes:
                notes.append(f"only the first {frame.number} frames were read: they are too large")
                break
        writer.put_connections(analysis.connections)
    finally:
        writer.close()
    if analysis.counts.faults and not analysis.connections:
        raise InvalidInput(analysis.counts.faults[0])
    notes += [each.replace(job.path, job.name) for each in _notes(analysis)]
    return CaptureOutcome(notes=notes)


def _frames(analysis: CaptureAnalysis, job: CaptureJob) -> Iterator[AnalyzedFrame]:
    try:
        if not job.protocol and is_capture(Path(job.path)):
            yield from analysis.frames(job.path)
            return
        with Path(job.path).open("rb") as file:
            chunks = iter(lambda: file.read(_CHUNK_BYTES), b"")
            yield from analysis.raw_frames(chunks, job.protocol, job.sender, late=job.is_late)
    except OSError as error:
        raise InvalidInput(f"can't read {job.path}: {error.strerror}") from error


def _notes(analysis: CaptureAnalysis) -> list[str]:
    notes = [str(fault) for fault in analysis.counts.faults]
    if analysis.ignored_connections:
        count = analysis.ignored_connections
        notes.append(f"{count} packets were left out: there are too many connections")
    return notes
