"""The room that the store keeps for itself, and hubs that are killed on a full disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosswire.cli.hub import Api
from crosswire.config import check
from crosswire.store.reserve import Reserve, flush_bytes, free_bytes, room_for_others
from tests.cli.conftest import PROGRAM, RunningHub, crosswire

MIB = 1 << 20
DEFAULT_BUFFER = 32 * MIB


# ------------------------------------------------------------------------------------ the reserve


def write_log(store: Path, size_bytes: int) -> None:
    (store / "000004.log").write_bytes(bytes(size_bytes))


def test_it_is_allocated_and_grows_with_the_log(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, 4 * MIB)
    reserve.keep()
    assert reserve.is_held
    first = reserve.size_bytes
    assert first >= reserve.needed_bytes()
    write_log(tmp_path, 12 * MIB)
    reserve.keep()
    assert first < reserve.size_bytes
    assert 12 * MIB < reserve.needed_bytes() <= reserve.size_bytes <= flush_bytes(4 * MIB)
    status = reserve.path.stat()
    assert status.st_blocks * 512 >= status.st_size == reserve.size_bytes
    assert Reserve(tmp_path, 4 * MIB).size_bytes == reserve.size_bytes


def test_it_is_there_before_the_log_is_longer(tmp_path: Path) -> None:
    """Another process may fill the disk right after a write: nothing is left for later."""
    reserve = Reserve(tmp_path, 4 * MIB)
    reserve.keep()
    log = tmp_path / "000004.log"
    size = 0
    for part in (1000, MIB, 3 * MIB, 10, 5 * MIB):
        reserve.before_write(part)
        size += part
        log.write_bytes(bytes(size))
        assert reserve.size_bytes >= reserve.needed_bytes()


def test_it_stays_where_enough_else_is_free(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, MIB)
    reserve.keep()
    reserve.make_room()
    assert reserve.path.exists()


def test_it_comes_back_when_somebody_removed_it(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, MIB)
    reserve.keep()
    reserve.path.unlink()
    reserve.keep()
    assert reserve.is_held
    assert reserve.path.exists()


def test_less_spare_room_than_a_flush_takes_is_a_mistake() -> None:
    needed = flush_bytes(DEFAULT_BUFFER)
    assert check(f"[store]\nspare_bytes = {needed}\n")[1] == []
    ((mistake),) = check(f"\n[store]\nspare_bytes = {24 * MIB}\n")[1]
    message = str(mistake)
    assert message.startswith("line 3: store.spare_bytes: ")
    assert str(24 * MIB) in message
    assert str(needed) in message


def test_on_the_command_line_it_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("[store]\nspare_bytes = 1000\n")
    done = crosswire("serve", "--config", str(file), "--data", str(tmp_path / "data"))
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "1000 is less than" in line


# ------------------------------------------------------------------------------------- full disks


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """Where a small file system is mounted; `fill` and the tests choose its size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def mount_disk(folder: Path, size_bytes: int) -> None:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system can't be mounted: {done.stderr.decode().strip()}")


def fill(folder: Path) -> Path:
    """Not a byte is left when this returns."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        while free := free_bytes(folder):
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
            except OSError:
                continue
    assert free_bytes(folder) == 0
    return filler


def start(folder: Path, settings: str) -> RunningHub:
    config = folder.parent / "crosswire.toml"
    config.write_text(settings)
    return RunningHub(folder / "data", "--config", str(config))


def stop(hub: RunningHub, number: int) -> list[str]:
    hub.process.send_signal(number)
    _, log = hub.process.communicate(timeout=30)
    return log.decode().splitlines()


@pytest.mark.parametrize(
    ("buffer_bytes", "spare_bytes", "payload_bytes", "count"),
    [
        (MIB, flush_bytes(MIB), 20_000, 150),
        (3 * MIB, 24 * MIB, 100_000, 100),
        (DEFAULT_BUFFER, flush_bytes(DEFAULT_BUFFER), 1_000_000, 80),
    ],
)
def test_a_hub_killed_on_a_full_disk_starts_again(
    mount: Path, buffer_bytes: int, spare_bytes: int, payload_bytes: int, count: int
) -> None:
    """Nothing acknowledged is lost, and when there is room again all goes on."""
    mount_disk(mount, 4 * flush_bytes(buffer_bytes) + 3 * count * payload_bytes)
    settings = f"[store]\nbuffer_bytes = {buffer_bytes}\nspare_bytes = {spare_bytes}\n"
    hub = start(mount, settings)
    acknowledged: list[int] = []
    # What can't be compressed takes as much room in a table as in the log.
    text = os.urandom(payload_bytes // 2).hex()
    at_once = min(5_000_000 // payload_bytes, count // 2)
    for _ in range(count // at_once):
        messages = [{"destination": "queue/q", "text": text}] * at_once
        acknowledged += Api(hub.url).post("/v1/messages", {"messages": messages})["ids"]
    filler = fill(mount)
    stop(hub, signal.SIGKILL)
    hub = start(mount, settings)
    api = Api(hub.url)
    assert api.get("/v1/queues/q")["length"] == len(acknowledged) == count
    assert free_bytes(mount) < spare_bytes
    refused = subprocess.run(
        [PROGRAM, "pub", "queue/q", "--text", "x", "--hub", hub.url],
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert refused.returncode
    filler.unlink()
    found = drained(api)
    assert found == acknowledged
    again = {"messages": [{"destination": "queue/q", "text": "again"}]}
    assert api.post("/v1/messages", again)["ids"][0] > acknowledged[-1]
    stop(hub, signal.SIGTERM)
    assert hub.process.returncode == 0


_OPEN_AND_DIE = """
import os, sys
from pathlib import Path
from crosswire.errors import CrosswireError
from crosswire.store.contract import StoreLimits
from crosswire.store.rocks import RocksStore
try:
    RocksStore(Path(sys.argv[1]), StoreLimits(buffer_bytes=1 << 20))
except CrosswireError as error:
    sys.exit(f"not opened: {error}")
os._exit(0)
"""


def open_and_die(store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _OPEN_AND_DIE, str(store)], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_however_often_it_is_killed_on_a_full_disk_it_opens(mount: Path) -> None:
    """Others take each byte that is free, after each start: the reserve must not dwindle."""
    mount_disk(mount, 32 * MIB)
    store = mount / "store"
    open_and_die(store)
    reserve = store / "RESERVE"
    assert reserve.stat().st_size >= 4 * MIB
    # What is left after some dozens of starts: no more than opening takes at least.
    os.truncate(reserve, 2 * MIB + 128 * 1024)
    for _ in range(9):
        fill(mount)
        open_and_die(store)
    assert reserve.stat().st_size >= 2 * MIB - 512 * 1024


def test_it_takes_what_is_left_while_others_write(
    mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the free space and the allocation a page of it was taken: an engine that
    merges tables does that right after opening."""
    mount_disk(mount, 32 * MIB)
    filler = fill(mount)
    os.truncate(filler, filler.stat().st_size - 2 * MIB)
    taken = iter([4096] * 5)

    def looked_up(path: Path) -> int:
        """What was free just before the next page was taken."""
        free = free_bytes(path)
        with (mount / "other").open("ab") as other:
            other.write(bytes(next(taken, 0)))
        return free

    monkeypatch.setattr("crosswire.store.reserve.free_bytes", looked_up)
    reserve = Reserve(mount, MIB)
    reserve.keep()
    assert reserve.size_bytes >= 2 * MIB - 512 * 1024


def test_small_writes_use_the_reserve_of_a_full_disk(mount: Path) -> None:
    mount_disk(mount, 32 * MIB)
    reserve = Reserve(mount, MIB)
    reserve.keep()
    fill(mount)
    before = reserve.size_bytes
    reserve.before_write(100)
    assert 0 < free_bytes(mount) < MIB
    fill(mount)
    reserve.before_write(10 * MIB)
    assert free_bytes(mount) == 0, "large writes are those of producers"
    while True:
        fill(mount)
        reserve.before_write(50_000)
        if not free_bytes(mount):
            break
    assert 2 * MIB <= reserve.size_bytes < before


def test_before_opening_only_what_is_lacking_is_given_up(mount: Path) -> None:
    mount_disk(mount, 32 * MIB)
    reserve = Reserve(mount, MIB)
    reserve.keep()
    filler = fill(mount)
    os.truncate(filler, filler.stat().st_size - MIB)
    before = reserve.size_bytes
    reserve.make_room()
    assert free_bytes(mount) >= reserve.needed_bytes()
    assert reserve.size_bytes >= before - reserve.needed_bytes() + MIB - 4096
    reserve.keep()
    assert reserve.size_bytes >= reserve.needed_bytes() - 128 * 1024


def test_consumers_go_on_and_it_stops_well_on_a_full_disk(mount: Path) -> None:
    mount_disk(mount, 64 * MIB)
    settings = f"[store]\nbuffer_bytes = {MIB}\nspare_bytes = {flush_bytes(MIB)}\n"
    hub = start(mount, settings)
    messages = [{"destination": "queue/q", "text": "x"}] * 100
    Api(hub.url).post("/v1/messages", {"messages": messages})
    fill(mount)
    taken = crosswire("sub", "queue/q", "--count", "60", "--port", str(hub.port("emp")))
    assert taken.returncode == 0, taken.stderr
    log = stop(hub, signal.SIGTERM)
    assert hub.process.returncode == 0, log
    hub = start(mount, settings)
    assert Api(hub.url).get("/v1/queues/q")["length"] == 40
    stop(hub, signal.SIGKILL)


def drained(api: Api) -> list[int]:
    found: list[int] = []
    while True:
        after = found[-1] if found else 0
        page = api.get("/v1/queues/q", messages=1000, after=after)["messages"]
        if not page:
            return found
        found += [each["id"] for each in page]


def test_a_second_hub_leaves_the_reserve_of_the_first(mount: Path) -> None:
    mount_disk(mount, 64 * MIB)
    settings = f"[store]\nbuffer_bytes = {MIB}\nspare_bytes = {flush_bytes(MIB)}\n"
    hub = start(mount, settings)
    fill(mount)
    reserve = mount / "data" / "store" / "RESERVE"
    before = reserve.stat().st_ino
    config = mount.parent / "crosswire.toml"
    done = crosswire("serve", "--config", str(config), "--data", str(mount / "data"))
    assert done.returncode == 1
    assert reserve.stat().st_ino == before
    stop(hub, signal.SIGKILL)


def test_without_room_to_open_it_fails_with_one_line(mount: Path) -> None:
    mount_disk(mount, 64 * MIB)
    settings = f"[store]\nbuffer_bytes = {MIB}\nspare_bytes = {flush_bytes(MIB)}\n"
    stop(start(mount, settings), signal.SIGKILL)
    (mount / "data" / "store" / "RESERVE").unlink()
    fill(mount)
    config = mount.parent / "crosswire.toml"
    done = crosswire("serve", "--config", str(config), "--data", str(mount / "data"))
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "no room on the disk" in line


def test_the_lake_leaves_the_rest_of_the_disk_to_the_store(mount: Path) -> None:
    mount_disk(mount, 32 * MIB)
    store, lake = mount / "store", mount / "lake"
    store.mkdir()
    has_room = room_for_others(lake, store, 8 * MIB)
    assert has_room()
    filler = fill(mount)
    assert not has_room()
    filler.unlink()
    assert has_room()
    elsewhere = room_for_others(mount.parent / "lake", store, 1 << 60)
    assert elsewhere()


def test_the_backlog_of_the_lake_waits_in_the_store(mount: Path) -> None:
    """The lake reports that it stops, and continues when there is room."""
    mount_disk(mount, 160 * MIB)
    settings = (
        f"log = 'warning'\n[store]\nbuffer_bytes = {MIB}\nspare_bytes = {flush_bytes(MIB)}\n"
        # Few connections: no warning about the limit of open files comes first.
        "[lake]\nseal_s = 0.05\n[connections]\nconnections = 100\n"
    )
    hub = start(mount, settings)
    api = Api(hub.url)
    filler = mount / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(mount) - flush_bytes(MIB) + 2 * MIB)
    os.truncate(filler, filler.stat().st_size - 3 * MIB)
    api.post("/v1/messages", {"messages": [{"destination": "queue/q", "text": "x" * 4_000_000}]})
    assert hub.process.stderr is not None
    assert json.loads(hub.process.stderr.readline())["event"] == "the lake can't be written"
    filler.unlink()
    assert json.loads(hub.process.stderr.readline())["event"] == "the lake is written again"
    assert list((mount / "data" / "lake" / "messages").rglob("*.parquet"))
    stop(hub, signal.SIGTERM)
    assert hub.process.returncode == 0
