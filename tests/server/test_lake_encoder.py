"""The lake's encoder: the files are those of the hub's own writer, and its end costs nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from crosswire.envelope import Envelope, encode
from crosswire.errors import CrosswireError
from crosswire.hub.ledger import LedgerPeer, LedgerRun, Step, serialize_block
from crosswire.hub.seals import LakeGap
from crosswire.lake.writer import LakeWriter
from crosswire.server import lake_encoder, lake_feed
from crosswire.server.lake_batches import BatchOrder, FeedGroup, build_batch
from crosswire.server.lake_encoder import EncoderOrder, LakeEncoder, write_message
from crosswire.server.lake_feed import STEP_NAMES
from tests.server.test_lake_feed import Site, until

ORDER = BatchOrder(
    tables=("messages", "ledger"),
    first_seq=7,
    first_gap=3,
    gaps=(LakeGap("ledger", 1, 2, 1_700_000_000_000_000, "for a test"),),
)


def group(first_row: int, first_id: int, count: int) -> FeedGroup:
    """One with messages that differ, and two runs of the ledger, of which one is counted."""
    time = 1_700_000_000_000_000 + first_row
    messages = [
        Envelope(
            destination=f"queue/q{number % 3}",
            kind="send",
            payload=b"x" * number,
            id=number,
            time=time,
            node="n1",
            properties={"n": number, "text": "ä"} if number % 2 else {},
        )
        for number in range(first_id, first_id + count)
    ]
    ids = [each.id for each in messages]
    peer = LedgerPeer("emp", f"emp-{first_row}", "anna")
    runs = [
        LedgerRun(0, time, Step.ACCEPTED, "queue/q1", peer, 0, "", lake_ids(ids)),
        LedgerRun(
            0, time, Step.DELIVERED, "topic/t", peer, 1, "late", lake_ids(ids), lake_ids(ids), "s"
        ),
    ]
    block = serialize_block(runs)
    return FeedGroup(
        first_row, first_row + 2 * count - 1, block, [encode(each) for each in messages], ids[-1], 1
    )


def lake_ids(ids: list[int]) -> array[int]:
    return array("q", ids)


def tables(folder: Path) -> dict[str, list[dict[str, object]]]:
    files = sorted(folder.rglob("*.parquet"))
    return {
        str(each.relative_to(folder)): pq.read_table(each, partitioning=None).to_pylist()
        for each in files
    }


def test_its_files_are_those_of_the_writer(tmp_path: Path) -> None:
    groups = [group(11, 100, 4), group(19, 104, 1), group(21, 105, 300)]
    here = LakeWriter(tmp_path / "a", "n1", STEP_NAMES)
    blocks = [(each.first_row, each.block) for each in groups]
    records = [each for some in groups for each in some.records]
    here.publish(here.prepare(build_batch(ORDER, blocks, records)))
    encoder = LakeEncoder(tmp_path / "b", "n1", STEP_NAMES)
    try:
        here.publish(encoder.prepare(ORDER, groups))
    finally:
        encoder.stop()
    assert tables(tmp_path / "b") == tables(tmp_path / "a")
    assert len(tables(tmp_path / "a")) == 3


def test_only_the_tables_that_the_lake_has(tmp_path: Path) -> None:
    encoder = LakeEncoder(tmp_path, "n1", STEP_NAMES)
    try:
        for table in ("messages", "ledger"):
            order = BatchOrder(tables=(table,), first_seq=1, first_gap=1, gaps=())
            (part,) = encoder.prepare(order, [group(1, 1, 2)])
            assert part.file.parent.parent.name == table
    finally:
        encoder.stop()


def test_what_the_disk_refuses_may_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "lake").write_bytes(b"no folder")
    encoder = LakeEncoder(tmp_path / "lake", "n1", STEP_NAMES)
    try:
        with pytest.raises(NotADirectoryError):
            encoder.prepare(ORDER, [group(1, 1, 2)])
        (tmp_path / "lake").unlink()
        assert len(encoder.prepare(ORDER, [group(1, 1, 2)])) == 3
    finally:
        encoder.stop()


def test_rows_that_can_never_be_written_are_an_error_of_their_own(tmp_path: Path) -> None:
    encoder = LakeEncoder(tmp_path, "n1", STEP_NAMES)
    damaged = FeedGroup(1, 1, b"", [b"no record"], 1, 9)
    try:
        with pytest.raises(CrosswireError, match="version"):
            encoder.prepare(ORDER, [damaged])
    finally:
        encoder.stop()


def test_it_ends_in_silence_with_its_hub(tmp_path: Path) -> None:
    shared = os.memfd_create("shared")
    order = EncoderOrder(
        lake=str(tmp_path),
        node="n1",
        steps=STEP_NAMES,
        term=0,
        writer="",
        batch=ORDER,
        first_rows=[],
        block_sizes=[],
        record_sizes=b"",
    )
    with subprocess.Popen(
        [sys.executable, "-m", "crosswire.server.lake_process", str(shared), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(shared,),
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr
        process.stdout.close()
        write_message(process.stdin, order)
        process.stdin.close()
        assert process.stderr.read() == b""
    os.close(shared)
    assert process.returncode == 0


def test_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    encoder = LakeEncoder(tmp_path, "n1", STEP_NAMES)
    try:
        encoder.prepare(ORDER, [group(1, 1, 2)])
        assert encoder.process_id is not None
        os.kill(encoder.process_id, signal.SIGKILL)
        with pytest.raises(OSError, match="has ended with code -9"):
            encoder.prepare(ORDER, [group(1, 1, 2)])
        assert encoder.process_id is None
        assert len(encoder.prepare(ORDER, [group(1, 1, 2)])) == 3
    finally:
        encoder.stop()


HUB = """
import os, signal, sys
from pathlib import Path
from crosswire.server.lake_encoder import LakeEncoder
from tests.server.test_lake_encoder import ORDER, STEP_NAMES, group
encoder = LakeEncoder(Path(sys.argv[1]), "n1", STEP_NAMES)
encoder.prepare(ORDER, [group(1, 1, 2)])
os.kill(encoder.process_id, signal.SIGSTOP)
print(encoder.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do that")
def test_a_suspended_process_ends_with_a_hub_that_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUB, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10.0
    # Ended, or waiting for its new parent to ask how it did.
    state = Path(f"/proc/{int(done.stdout)}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_is_suspended_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with an order that does not fit into a pipe."""
    encoder = LakeEncoder(tmp_path, "n1", STEP_NAMES)
    many = FeedGroup(1, 1, b"", [b""] * 50_000, 1, 9)
    try:
        for groups in ([group(1, 1, 2)], [many]):
            monkeypatch.setattr(lake_encoder, "_ANSWER_S", 60.0)
            assert len(encoder.prepare(ORDER, [group(1, 1, 2)])) == 3
            assert encoder.process_id is not None
            os.kill(encoder.process_id, signal.SIGSTOP)
            monkeypatch.setattr(lake_encoder, "_ANSWER_S", 0.1)
            with pytest.raises(OSError, match="has ended with code -9"):
                encoder.prepare(ORDER, groups)
    finally:
        encoder.stop()


@pytest.mark.parametrize("answer", ["\\0\\0\\0\\100", "\\3\\0\\0\\0abc", "x"])
def test_an_answer_that_is_none_ends_the_process(tmp_path: Path, answer: str) -> None:
    """One that is announced as 1 GiB, one of another type, and half of a length."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nprintf '{answer}'\nexec 1>&-\ncat >/dev/null\n")
    program.chmod(0o700)
    encoder = LakeEncoder(tmp_path, "n1", STEP_NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        with pytest.raises(OSError, match="the lake's encoder has ended"):
            encoder.prepare(ORDER, [group(1, 1, 2)])
    assert encoder.process_id is None
    encoder.stop()


def test_what_is_printed_is_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os; atexit.register(os.write, 1, b'printed at the end')\n"
    )
    encoder = LakeEncoder(tmp_path / "lake", "n1", STEP_NAMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        try:
            assert len(encoder.prepare(ORDER, [group(1, 1, 2)])) == 3
        finally:
            encoder.stop()
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "printed at the end")


def test_modules_of_the_folder_that_the_hub_was_started_in_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    encoder = LakeEncoder(tmp_path / "lake", "n1", STEP_NAMES)
    try:
        assert len(encoder.prepare(ORDER, [group(1, 1, 2)])) == 3
    finally:
        encoder.stop()


class DamagedMemory(LakeEncoder):
    """Changes a byte of the last record that it gives to its process."""

    damages = 0

    def _share(self, pieces: Iterable[bytes]) -> None:
        whole = [bytes(each) for each in pieces]
        if self.damages:
            self.damages -= 1
            whole[-1] = bytes([whole[-1][0] ^ 1]) + whole[-1][1:]
        super()._share(whole)


EncodingSite = Callable[..., Awaitable[tuple[Site, Any]]]


@pytest.fixture
def encoding_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EncodingSite:
    """Starts a hub whose every seal is encoded by a process; gives it with its encoder."""
    monkeypatch.setattr(lake_feed, "_ENCODER_BYTES", 1)
    monkeypatch.setattr(lake_feed, "_RETRY_S", 0.01)

    async def start(kind: type[LakeEncoder] = LakeEncoder) -> tuple[Site, Any]:
        site = Site(tmp_path / "lake")
        await site.start()
        assert site.feed is not None
        encoder = site.feed._encoder = kind(site.lake, site.hub.node, STEP_NAMES)
        return site, encoder

    return start


async def test_what_memory_has_damaged_is_taken_from_the_store(encoding_site: EncodingSite) -> None:
    site, encoder = await encoding_site(DamagedMemory)
    await site.send(b"a")
    # The first seal comes from the store, later ones from memory.
    await until(lambda: site.payloads == [b"a"])
    encoder.damages = 1
    await site.send(b"b")
    await until(lambda: site.payloads == [b"a", b"b"])
    assert not encoder.damages
    assert ("lake", "", "gap") not in site.counts
    await site.stop()
    assert site.faults() == []


async def test_killed_at_any_moment_nothing_is_missing_or_twice(
    encoding_site: EncodingSite,
) -> None:
    site, encoder = await encoding_site()
    sent, kills = 0, 0
    while kills < 3:
        await site.send(b"%d" % sent)
        sent += 1
        process = encoder.process_id
        if process is not None and sent % 5 == 0:
            os.kill(process, signal.SIGKILL)
            kills += 1
            await until(lambda killed=process: encoder.process_id != killed)
        await asyncio.sleep(0.01)
    await until(lambda: len(site.payloads) == sent)
    await site.stop()
    assert site.payloads == [b"%d" % number for number in range(sent)]
    assert site.faults() == []
    assert encoder.process_id is None


async def test_without_a_process_the_hub_makes_the_files(
    encoding_site: EncodingSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    site, _ = await encoding_site()
    await site.send(b"a")
    await until(lambda: site.payloads == [b"a"])
    assert ("lake", "", "failed") in site.counts
    await site.stop()


async def test_a_feed_that_is_abandoned_leaves_no_process(encoding_site: EncodingSite) -> None:
    site, encoder = await encoding_site()
    await site.send(b"a")
    await until(lambda: site.payloads == [b"a"])
    process = encoder.process_id
    assert process is not None
    assert site.feed is not None
    await site.feed.abandon()
    await until(lambda: not is_running(process))
    await site.hub.commits.close()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
