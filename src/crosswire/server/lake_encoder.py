"""The lake's encoder: a process of its own, which turns committed groups into Parquet files.

Making rows of messages takes Python several microseconds each. On a thread of the hub that time is
taken from the event loop, as both need the interpreter's lock; in another process it is not. The
hub writes a group's bytes, which the store has got too, into a file in memory that both share, and
sends an order; the process answers with the files that it has prepared. Sealing and publishing
stay with the hub.

The process holds nothing that counts. If it ends, whatever the reason, the seal that it worked on
is not committed, so the hub reads the same range from the store again and starts another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from struct import Struct as Layout
from typing import IO, Final

import msgspec

from crosswire.errors import CrosswireError
from crosswire.lake.files import FinishedFile
from crosswire.logs import log_event
from crosswire.server.lake_batches import BatchOrder, FeedGroup

__all__ = ["EncoderAnswer", "EncoderOrder", "LakeEncoder", "read_message", "write_message"]

_log = logging.getLogger("crosswire.lake")

_LENGTH: Final = Layout("<I")
_BUFFERS: Final = 512
"""How many pieces are written with one call of the operating system, which takes up to 1024."""
_STOP_S: Final = 10.0
_ANSWER_S: Final = 30.0
"""How long a process may work on an order, some seconds' work. One that takes longer does not work
at all: it was suspended, or its disk does not answer."""
_MOST_ANSWER_BYTES: Final = 1 << 20


class EncoderOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Which files to prepare of the bytes in the shared file: blocks, then records.

    `first_rows` and `block_sizes` are parallel; `record_sizes` are 32 bit each, little-endian.
    """

    lake: str
    node: str
    steps: dict[int, str]
    term: int
    writer: str
    batch: BatchOrder
    first_rows: list[int]
    block_sizes: list[int]
    record_sizes: bytes


class EncoderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were prepared, as pairs of `FinishedFile`; or an error.

    `error_number` is that of the operating system: such an order may be repeated. Without it the
    rows can never be written.
    """

    parts: list[tuple[str, str]] = []
    error: str = ""
    error_number: int = 0


def write_message(stream: IO[bytes], message: EncoderOrder | EncoderAnswer) -> None:
    """Send it with its length. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_message(stream: IO[bytes], most: int | None = None) -> bytes:
    """The next one as bytes, b"" where the other side has ended, or sends one with more than `most`
    bytes. Raises OSError."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack(head)
    if most is not None and length > most:
        return b""
    body = stream.read(length)
    return body if len(body) == length else b""


class LakeEncoder:
    """The hub's side, used on the lake's thread. `prepare` starts the process if there is none."""

    def __init__(
        self, lake: Path, node: str, steps: dict[int, str], *, term: int = 0, writer: str = ""
    ) -> None:
        """`term` and `writer` are those of the leader, where the hub has replicas."""
        self._lake = lake
        self._node = node
        self._steps = steps
        self._term = term
        self._writer = writer
        self._process: subprocess.Popen[bytes] | None = None
        self._file: int = -1
        self._is_unwanted = False

    @property
    def process_id(self) -> int | None:
        """The process that works now."""
        return None if self._process is None else self._process.pid

    def prepare(self, batch: BatchOrder, groups: Sequence[FeedGroup]) -> list[FinishedFile]:
        """Files of these groups, complete and synced, but not published.

        Raises OSError, after which it may be tried again, also where the process has ended; and
        CrosswireError for groups that can never be written.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with_ledger, with_messages = "ledger" in batch.tables, "messages" in batch.tables
        blocks = [each for each in groups if each.block] if with_ledger else []
        records = [each for group in groups for each in group.records] if with_messages else []
        order = EncoderOrder(
            lake=os.fspath(self._lake),
            node=self._node,
            steps=self._steps,
            term=self._term,
            writer=self._writer,
            batch=batch,
            first_rows=[each.first_row for each in blocks],
            block_sizes=[len(each.block) for each in blocks],
            record_sizes=array("I", map(len, records)).tobytes(),
        )
        # Writing to it and reading from it would wait for ever.
        watch = threading.Timer(_ANSWER_S, process.kill)
        watch.start()
        try:
            self._share([*(each.block for each in blocks), *records])
            write_message(process.stdin, order)
            answer = read_message(process.stdout, _MOST_ANSWER_BYTES)
            read = msgspec.msgpack.decode(answer, type=EncoderAnswer) if answer else None
        except (OSError, msgspec.DecodeError) as error:
            # Also after an answer that is none: the rest of it would be taken for the next one.
            raise self._ended(error) from error
        finally:
            watch.cancel()
            watch.join()
            if self._file >= 0:
                os.ftruncate(self._file, 0)
        if read is None:
            raise self._ended(None)
        if read.error_number:
            raise OSError(read.error_number, read.error)
        if read.error:
            raise CrosswireError(read.error)
        return [FinishedFile(Path(unfinished), Path(file)) for unfinished, file in read.parts]

    def stop(self) -> None:
        """End the process: at the end of its input, or killed where it doesn't."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            # An error: what was buffered has no reader, as the process has ended.
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def kill(self) -> None:
        """End the process at once. May be called on another thread: `prepare` raises then."""
        self._is_unwanted = True
        process = self._process
        if process is not None:
            process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._file = _memory_file()
            self._process = subprocess.Popen(
                # -P: modules are not looked for in the folder that the hub was started in.
                [
                    *(sys.executable, "-P", "-m", "crosswire.server.lake_process"),
                    *(str(self._file), str(os.getpid())),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self._file,),
                # An interrupt from the terminal is for the hub, which ends this one in its turn.
                start_new_session=True,
            )
        return self._process

    def _share(self, pieces: Iterable[bytes]) -> None:
        """Write all of them into the shared file. The interpreter's lock is free meanwhile."""
        os.ftruncate(self._file, 0)
        rest, position = iter(pieces), 0
        while some := list(islice(rest, _BUFFERS)):
            size = sum(map(len, some))
            written = os.pwritev(self._file, some, position)
            if written < size:
                # Rare: the system writes less where it is interrupted, or memory is short.
                _write_all(self._file, b"".join(some)[written:], position + written)
            position += size

    def _ended(self, cause: Exception | None) -> OSError:
        """What to raise where the process doesn't answer any more."""
        process = self._process
        code = None
        if process is not None:
            process.kill()
            self.stop()
            code = process.returncode
        if not self._is_unwanted:
            log_event(_log, logging.ERROR, "the lake's encoder has ended", code=code)
        return OSError(f"the lake's encoder has ended with code {code}: {cause or 'no answer'}")


def _memory_file() -> int:
    """A file that has no name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("crosswire-lake")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_all(file: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
