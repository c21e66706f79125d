"""What a hub writes is readable by its own user only."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import rocksdict

from crosswire.client.native.emp import EmpClient
from crosswire.config import LakeSettings, TapSettings
from crosswire.errors import StoreFailed
from crosswire.server.private_files import make_private
from tests.gateways.conftest import StartServer, port_of


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Files would be writable for everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_files(top: Path) -> list[str]:
    return [
        str(each.relative_to(top.parent))
        for each in (top, *top.rglob("*"))
        if not each.is_symlink() and each.lstat().st_mode & 0o077
    ]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def use(start_server: StartServer, lake: LakeSettings) -> None:
    """A run of a hub that writes to store, lake and tap."""
    server = await start_server(lake=lake)
    async with EmpClient("127.0.0.1", port_of(server, "emp")) as client:
        await client.request("$publish", {"destination": "queue/q", "text": "x"})
    server.hurry()
    await server.stop()


async def test_a_new_data_directory_is_private(start_server: StartServer, tmp_path: Path) -> None:
    await use(start_server, LakeSettings(tap=TapSettings(listeners=("emp",))))
    data = tmp_path / "data"
    assert mode(data) == 0o700
    assert open_files(data) == []
    for pattern in ("store/LOCK", "store/RESERVE", "lake/messages/**/*.parquet", "lake/wire/**/*"):
        assert list(data.glob(pattern)), pattern


async def test_an_old_one_is_tightened(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await use(start_server, LakeSettings())
    data = tmp_path / "data"
    for each in (data, *data.rglob("*")):
        each.chmod(0o777 if each.is_dir() else 0o666)
    caplog.clear()
    await use(start_server, LakeSettings())
    assert open_files(data) == []
    assert "files were open to other users" in caplog.text
    caplog.clear()
    await use(start_server, LakeSettings())
    assert "open to other users" not in caplog.text


async def test_a_lake_elsewhere_is_private_and_its_folder_stays(
    start_server: StartServer, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    (lake / "messages").mkdir(parents=True)
    (lake / "notes.txt").write_text("somebody else's")
    await use(start_server, LakeSettings(directory=str(lake)))
    assert mode(lake) == 0o777
    assert mode(lake / "notes.txt") == 0o666
    assert open_files(lake / "messages") == []


def test_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    data, aside = tmp_path / "data", tmp_path / "aside"
    for folder in (data / "store", data / "backup", aside):
        folder.mkdir(parents=True)
        (folder / "file").write_text("")
    (data / "lake").symlink_to(aside)
    (data / "store" / "link").symlink_to(data / "backup" / "file")
    make_private(data)
    assert mode(data) == 0o700
    assert mode(data / "store" / "file") == 0o600
    assert mode(data / "backup" / "file") == 0o666
    assert open_files(aside) == []


def test_a_folder_for_all_users_is_not_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o1777)
    make_private(data)
    assert mode(data) == 0o1777
    assert "its rights can't be changed" in caplog.text


async def test_the_database_of_another_program_keeps_its_rights(
    start_server: StartServer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    database = rocksdict.Rdict(str(data / "store"), rocksdict.Options(raw_mode=True))
    database[b"user"] = b"1"
    database.close()
    before = {each: mode(each) for each in (data, *data.rglob("*"))}
    with pytest.raises(StoreFailed, match="the database of another program"):
        await start_server()
    assert {each: mode(each) for each in (data, *data.rglob("*"))} == before
