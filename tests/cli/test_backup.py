"""`crosswire backup` of a hub under load, `crosswire restore`, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import crosswire as library
from crosswire.cli.hub import Api
from crosswire.errors import RequestTimeout
from crosswire.store.rocks import RocksStore
from tests.cli.conftest import PROGRAM, RunningHub, StartHub, answer, crosswire

MESSAGE = "x" * 200


async def publish(hub: RunningHub, acknowledged: dict[str, list[int]], stop: asyncio.Event) -> None:
    """Send without a pause, and note what is acknowledged."""
    async with library.connect(f"emp://127.0.0.1:{hub.port('emp')}") as client:
        while not stop.is_set():
            for name in acknowledged:
                ids = await client.publish_many(name, [MESSAGE] * 100)
                acknowledged[name] += [each for each in ids if each is not None]


async def consume(hub: RunningHub, settled: list[int], stop: asyncio.Event) -> None:
    async with (
        library.connect(f"emp://127.0.0.1:{hub.port('emp')}") as client,
        client.subscribe("queue/half", window=64) as messages,
    ):
        while not stop.is_set():
            try:
                message = await messages.receive(0.5)
            except RequestTimeout:  # it has them all
                continue
            await message.settle()
            settled.append(message.id or 0)


def ids_of(api: Api, queue: str) -> list[int]:
    found: list[int] = []
    while page := api.get(f"/v1/queues/{queue}", messages=1000, after=max(found, default=0)):
        if not page["messages"]:
            return found
        found += [each["id"] for each in page["messages"]]
    return found


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A backup that was made under load, with what was known when it began."""
    folder = tmp_path_factory.mktemp("backup")
    hub = RunningHub(folder / "data")
    made: dict[str, Any] = {"folder": folder / "backup", "work": folder}

    async def load() -> None:
        acknowledged: dict[str, list[int]] = {"queue/kept": [], "queue/half": [], "topic/t": []}
        settled: list[int] = []
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(publish(hub, acknowledged, stop)),
            asyncio.create_task(consume(hub, settled, stop)),
        ]
        while len(acknowledged["queue/kept"]) < 3000 or len(settled) < 200:
            await asyncio.sleep(0.05)
        made["settled"] = list(settled)
        made["acknowledged"] = {name: list(ids) for name, ids in acknowledged.items()}
        words = ["backup", str(made["folder"]), "--hub", hub.url, "--json"]
        process = await asyncio.create_subprocess_exec(
            PROGRAM, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        made["answer"] = json.loads(out)
        stop.set()
        await asyncio.gather(*tasks)
        made["later"] = max(acknowledged["queue/kept"])
        made["settled later"] = list(settled)

    asyncio.run(load())
    assert Api(hub.url).get("/v1/checkpoints") == {"checkpoints": [], "next": ""}
    made["node"] = Api(hub.url).get("/v1/state")["node"]
    code, log = hub.end()
    assert (code, [each for each in log if each["level"] == "error"]) == (0, [])
    for stream in (hub.process.stdout, hub.process.stderr):
        assert stream is not None
        stream.close()
    return made


def test_what_was_acknowledged_before_it_began_is_in_it(
    backup: dict[str, Any], tmp_path: Path
) -> None:
    data = tmp_path / "elsewhere"
    restored = answer("restore", str(backup["folder"]), str(data))
    assert restored["has_lake"]
    hub = RunningHub(data)
    api = Api(hub.url)
    acknowledged = backup["acknowledged"]
    kept = ids_of(api, "kept")
    assert set(acknowledged["queue/kept"]) <= set(kept)
    assert len(kept) == len(set(kept))
    half = set(ids_of(api, "half"))
    # What was settled while the backup was made may be in it or not.
    assert set(acknowledged["queue/half"]) - set(backup["settled later"]) <= half
    # A settlement may be on its way when it begins, but not hundreds of them.
    assert len(half & set(backup["settled"])) <= 64
    stored = api.get("/v1/topics/t", messages=1)
    assert stored["messages"]
    state = api.get("/v1/state")
    assert (state["node"], api.get("/readyz")["status"]) == (backup["node"], "ready")
    # An id that the original gave out after the backup is not given out again.
    body = {"messages": [{"destination": "queue/new", "text": "x"}]}
    (identifier,) = api.post("/v1/messages", body)["ids"]
    assert identifier > backup["later"]
    # The hub seals what the lake lacks: nothing is doubled, and nothing is missing.
    assert hub.end()[0] == 0
    for stream in (hub.process.stdout, hub.process.stderr):
        assert stream is not None
        stream.close()
    done = crosswire("store", "verify", str(data), "--json")
    assert json.loads(done.stdout)["findings"] == []
    assert crosswire("lake", "verify", "--data", str(data)).returncode == 0


def test_a_copy_beside_the_original_has_a_node_of_its_own(
    backup: dict[str, Any], tmp_path: Path
) -> None:
    data = tmp_path / "copy"
    answer("restore", str(backup["folder"]), str(data), "--new-node")
    hub = RunningHub(data)
    api = Api(hub.url)
    assert api.get("/v1/state")["node"] != backup["node"]
    assert set(backup["acknowledged"]["queue/kept"]) <= set(ids_of(api, "kept"))
    assert api.get("/readyz")["status"] == "ready"
    assert hub.end()[0] == 0
    for stream in (hub.process.stdout, hub.process.stderr):
        assert stream is not None
        stream.close()
    nodes = {each["node"] for each in answer("lake", "list", "--data", str(data))["tables"]}
    assert len(nodes) == 2 and backup["node"] in nodes


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda each: each.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip(largest(folder, "store/*.sst")), "its checksum differs"),
        (lambda folder: flip(largest(folder, "store/MANIFEST-*")), "its checksum differs"),
        (lambda folder: flip(largest(folder, "lake/*/*/*.parquet")), "its checksum differs"),
        (lambda folder: largest(folder, "store/*.sst").unlink(), "is missing"),
        (lambda folder: largest(folder, "lake/*/*/*.parquet").unlink(), "is missing"),
        (lambda folder: flip(folder / "backup.json"), "backup.json"),
        (lambda folder: (folder / "backup.json").unlink(), "is no backup, or it was not finished"),
    ],
)
def test_a_damaged_backup_is_refused(
    backup: dict[str, Any], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(backup["folder"], folder)
    damage(folder)
    data = tmp_path / "data"
    done = crosswire("restore", str(folder), str(data))
    assert (done.returncode, message in done.stderr.decode()) == (1, True), done.stderr
    assert b"Traceback" not in done.stderr
    assert not data.exists() or not list(data.iterdir())


def test_folders_that_are_not_empty_are_left_alone(backup: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for words in (
        ("restore", str(backup["folder"]), str(tmp_path)),
        ("backup", str(tmp_path), "--hub", "http://127.0.0.1:1"),
    ):
        done = crosswire(*words)
        assert (done.returncode, b"is not empty" in done.stderr) == (1, True), done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_an_earlier_backup_saves_time_and_room(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub()
    api = Api(hub.url)
    body = {"messages": [{"destination": "queue/q", "text": MESSAGE}] * 100}
    api.post("/v1/messages", body)
    first, second = tmp_path / "first", tmp_path / "second"
    before = answer("backup", str(first), "--hub", hub.url)
    api.post("/v1/messages", body)
    after = answer("backup", str(second), "--hub", hub.url, "--like", str(first))
    assert after["fetched_bytes"] < after["size_bytes"]
    assert before["fetched_bytes"] == before["size_bytes"]
    data = tmp_path / "restored"
    answer("restore", str(second), str(data))
    store = RocksStore(data / "store")
    assert len(list(store._scan(b"m", b"n"))) == 200
    store.close()


def test_without_the_lake(start_hub: StartHub, tmp_path: Path) -> None:
    hub = start_hub()
    Api(hub.url).post("/v1/messages", {"messages": [{"destination": "queue/q", "text": "x"}]})
    made = answer("backup", str(tmp_path / "b"), "--hub", hub.url, "--no-lake")
    assert made["lake_files"] is None
    done = crosswire("restore", str(tmp_path / "b"), str(tmp_path / "r"))
    assert (done.returncode, b"has no lake" in done.stderr) == (0, True), done.stderr


def test_only_an_administrator_may_make_one(start_hub: StartHub, tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text(
        "[[users]]\nname = 'anna'\ntoken = 'the-secret-of-anna'\nconsume = ['queue/#']\n"
        "observe = true\n"
    )
    hub = start_hub("--config", str(file))
    words = ("backup", str(tmp_path / "b"), "--hub", hub.url, "--token", "the-secret-of-anna")
    done = crosswire(*words)
    assert (done.returncode, b"forbidden" in done.stderr) == (1, True)
