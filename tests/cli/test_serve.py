"""`crosswire serve` as a program: it starts, says so, reloads, drains, and loses nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rocksdict

from crosswire.cli.hub import Api
from crosswire.server.server import GATEWAYS
from crosswire.store.rocks import RocksStore
from crosswire.wire.emp.frames import Request, serialize, serialize_call
from tests.cli.conftest import StartHub, answer, crosswire


def produce(api: Api, destination: str, text: str) -> int:
    body = {"messages": [{"destination": destination, "text": text}]}
    identifier: int = api.post("/v1/messages", body)["ids"][0]
    return identifier


def test_the_ready_line_names_every_listener(start_hub: StartHub) -> None:
    hub = start_hub()
    assert hub.ready["ready"] is True
    assert {"emp", "http"} <= set(hub.ready["listen"])
    for address in hub.ready["listen"].values():
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(start_hub: StartHub, number: int) -> None:
    assert start_hub().end(number) == (0, [])


def test_a_peer_is_told_goodbye(start_hub: StartHub) -> None:
    hub = start_hub()
    with socket.create_connection(("127.0.0.1", hub.port("emp")), timeout=10) as peer:
        peer.sendall(bytes.fromhex("000000080000000001000000"))
        assert peer.recv(12) == bytes.fromhex("000000080000000001000000")
        hub.process.send_signal(signal.SIGTERM)
        assert peer.recv(100) == bytes.fromhex("0000000401000000")


def test_what_was_acknowledged_survives_a_kill(start_hub: StartHub) -> None:
    hub = start_hub()
    identifier = produce(Api(hub.url), "queue/q", "keep me")
    hub.end(signal.SIGKILL)
    kept = Api(start_hub().url).get("/v1/queues/q", messages=10)["messages"]
    assert [(each["id"], each["text"]) for each in kept] == [(identifier, "keep me")]


def test_connections_are_logged_when_asked_for(start_hub: StartHub) -> None:
    hub = start_hub("--log", "info")
    socket.create_connection(("127.0.0.1", hub.port("emp")), timeout=5).close()
    Api(hub.url).get("/v1/state")
    _, log = hub.end()
    events = [line["event"] for line in log if line.get("protocol") == "emp"]
    assert events[0] == "connected"
    assert events[1] in ("closed", "failed")


def test_two_hubs_do_not_share_a_directory(start_hub: StartHub) -> None:
    start_hub()
    with pytest.raises(
        AssertionError, match=r"crosswire serve: .*in use by process \d+ \(.*serve --json --data"
    ):
        start_hub()


def test_without_users_it_stays_on_this_machine(tmp_path: Path) -> None:
    done = crosswire("serve", "--data", str(tmp_path), "--listen", "emp=0.0.0.0:0")
    assert done.returncode == 1
    assert b"on 0.0.0.0:0 anyone who can connect would have all rights" in done.stderr
    assert b"--insecure" in done.stderr


def test_a_configuration_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text(
        "[[users]]\nname = 'anna'\ntoken = 'a-secret-of-anna'\n"
        "[listen]\nrelink = '0.0.0.0:0'\nemp = 'off'\nepoxy = 'off'\nmicromsg2 = 'off'\n"
    )
    file.chmod(0o640)
    done = crosswire("serve", "--data", str(tmp_path), "--config", str(file))
    assert done.returncode == 1
    assert b"other users of this machine may read it" in done.stderr
    assert b"a-secret-of-anna" not in done.stderr


def test_on_loopback_it_is_a_warning(start_hub: StartHub, tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("[[users]]\nname = 'anna'\ntoken = 'a-secret-of-anna'\n")
    file.chmod(0o644)
    code, log = start_hub("--config", str(file)).end()
    assert code == 0
    assert [line["setting"] for line in log if "setting" in line] == ["", "listen"]


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = crosswire("serve", "--data", str(tmp_path), "--listen", f"emp={address}")
    assert done.returncode == 1
    assert f"can't listen on {address} for emp: " in done.stderr.decode()


def test_data_that_can_not_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    done = crosswire("serve", "--data", str(tmp_path / "file"))
    assert done.returncode == 1
    assert b"can't keep data in" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["nonsense=127.0.0.1:0", "emp=nowhere", "emp"])
def test_wrong_usage(option: str) -> None:
    assert crosswire("serve", "--listen", option).returncode == 2


def test_mistakes_in_the_configuration_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text('[queues.orders]\nmax_lenght = 3\n\n[listen]\nemp = "here"\n')
    done = crosswire("serve", "--config", str(file))
    assert done.returncode == 1
    assert f"{file}: line 2: queues.orders.max_lenght: unknown key" in (done.stderr.decode())


def test_flags_override_the_file(start_hub: StartHub, tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text('data = "/nowhere"\nlog = "debug"\n[queues.q]\nmax_length = 7\n')
    hub = start_hub("--config", str(file), "--log", "error")
    produce(Api(hub.url), "queue/q", "x")
    assert Api(hub.url).get("/v1/queues/q")["policy"]["max_length"] == 7
    assert hub.end() == (0, [])


def test_a_hangup_reloads_what_can_be_reloaded(start_hub: StartHub, tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("[queues.q]\nmax_length = 1\n")
    hub = start_hub("--config", str(file))
    api = Api(hub.url)
    produce(api, "queue/q", "x")
    file.write_text(
        "drain_s = 1\n[queues.q]\nmax_length = 2\n[store]\nspare_bytes = 200000000\n"
        '[[schedules]]\nid = "tick"\ndestination = "queue/t"\ninterval_s = 3600\ntext = "t"\n'
    )
    hub.process.send_signal(signal.SIGHUP)
    assert hub.process.stderr is not None
    told = json.loads(hub.process.stderr.readline())
    assert (told["event"], told["needs_restart"]) == ("reloaded", ["store"])
    assert api.get("/v1/queues/q")["policy"]["max_length"] == 2
    assert [each["id"] for each in api.get("/v1/schedules")["schedules"]] == ["tick"]
    file.write_text("")
    hub.process.send_signal(signal.SIGHUP)
    hub.process.stderr.readline()
    assert api.get("/v1/schedules")["schedules"] == []


def test_a_hangup_with_mistakes_changes_nothing(start_hub: StartHub, tmp_path: Path) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("[queues.q]\nmax_length = 1\n")
    hub = start_hub("--config", str(file))
    file.write_text("[queues.q]\nmax_length = -\n")
    hub.process.send_signal(signal.SIGHUP)
    assert hub.process.stderr is not None
    told = json.loads(hub.process.stderr.readline())
    assert told["event"] == "not reloaded"
    assert "line 2" in told["mistakes"][0]
    assert Api(hub.url).get("/readyz")["status"] == "ready"


def test_a_schedule_that_left_the_file_is_gone_after_a_restart(
    start_hub: StartHub, tmp_path: Path
) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text(
        '[[schedules]]\nid = "tick"\ndestination = "queue/t"\ninterval_s = 3600\ntext = "t"\n'
    )
    hub = start_hub("--config", str(file))
    assert len(answer("schedule", "list", "--hub", hub.url)["schedules"]) == 1
    hub.end()
    hub = start_hub()
    assert answer("schedule", "list", "--hub", hub.url)["schedules"] == []


# --------------------------------------------------------------------- what keeps it from starting


def fails(*arguments: str) -> str:
    """Run `serve`, which must fail: gives the one line that it says about it."""
    done = crosswire("serve", *arguments)
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (1, b"")
    assert line.startswith("crosswire serve: ")
    return line.removeprefix("crosswire serve: ")


OFF = [f"--listen={name}=off" for name in GATEWAYS]


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("listener", ["relink", "http"])
def test_a_taken_port_is_one_line(tmp_path: Path, listener: str, options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen = f"--listen={listener}={address}"
        told = fails("--data", str(tmp_path), *OFF, listen, *options)
    assert told == f"can't listen on {address} for {listener}: Address already in use"


def test_folders_that_are_none_are_one_line(tmp_path: Path) -> None:
    for name in ("data", "other/store"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("not a folder")
        data = file.parent if file.name == "store" else file
        assert fails("--data", str(data), *OFF) == (
            f"can't keep data in {file}: it is not a folder"
        )


def test_links_to_nothing_are_one_line(tmp_path: Path) -> None:
    for name in ("data", "other/store"):
        link = tmp_path / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "gone")
        data = link.parent if link.name == "store" else link
        assert fails("--data", str(data), *OFF) == (
            f"can't keep data in {link}: it is a link to {tmp_path / 'gone'}, which does not exist"
        )
    assert not (tmp_path / "gone").exists()


def test_the_database_of_another_program_is_one_line(tmp_path: Path) -> None:
    database = rocksdict.Rdict(str(tmp_path / "store"), rocksdict.Options(raw_mode=True))
    database[b"user"] = b"1"
    database.close()
    assert "has the database of another program" in fails("--data", str(tmp_path), *OFF)


def test_a_lake_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("not a folder")
    (tmp_path / "lake").chmod(0o600)  # a file that others can read would be another line
    assert fails("--data", str(tmp_path), *OFF) == (
        f"can't keep the lake in {tmp_path / 'lake'}: Not a directory"
    )


def test_the_folder_of_another_program_is_left_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "000001.sst").write_text("a table, but not ours")
    (store / "notes.txt").write_text("not ours either")
    told = fails("--data", str(tmp_path), *OFF, "--json")
    assert "is no store of a hub, but has files of something else (notes.txt)" in told
    assert sorted(each.name for each in store.iterdir()) == ["000001.sst", "notes.txt"]


def test_a_store_that_is_in_use_or_of_another_version_is_one_line(
    start_hub: StartHub, tmp_path: Path
) -> None:
    hub = start_hub()
    assert str(tmp_path / "data" / "store") in fails("--data", str(tmp_path / "data"), *OFF)
    hub.end(signal.SIGKILL)
    store = RocksStore(tmp_path / "data" / "store")
    store._db[b"!format"] = b"999"
    store._db.close()
    assert "has format '999'" in fails("--data", str(tmp_path / "data"), *OFF)


def test_a_file_system_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        (disk / "store").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        told = fails("--data", str(disk), *OFF)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert told == f"can't keep data in {disk / 'store'}: Read-only file system"


# ----------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_while_it_drains_ends_it_at_once(
    start_hub: StartHub, tmp_path: Path, number: int
) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text("drain_s = 60\n")
    hub = start_hub("--config", str(file))
    kept = produce(Api(hub.url), "queue/q", "keep me")
    with socket.create_connection(("127.0.0.1", hub.port("emp")), timeout=10) as peer:
        stream = peer.makefile("rwb")
        stream.write(bytes.fromhex("000000080000000001000000"))
        body = serialize_call("$subscribe", b'{"destination":"queue/q"}')
        stream.write(serialize(Request(1, body)))
        stream.flush()
        # The hello, the answer, and a delivery that is never answered.
        for _ in range(3):
            stream.read(int.from_bytes(stream.read(4)))
        hub.process.send_signal(number)
        wait_until(lambda: Api(hub.url).get("/v1/state")["draining"])
        hub.process.send_signal(number)
        _, errors = hub.process.communicate(timeout=20)
    waiting, second = errors.decode().splitlines()
    assert second == "crosswire serve: second signal: stopping at once"
    told = json.loads(waiting)
    assert told["event"].startswith("waiting for peers before it stops")
    assert [each.partition(": ")[2] for each in told["waits_for"]] == ["1 message to settle"]
    assert hub.process.returncode == 1
    found = Api(start_hub().url).get("/v1/queues/q", messages=10)["messages"]
    assert [each["id"] for each in found] == [kept]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_signals_while_it_starts(tmp_path: Path, signals: int, options: tuple[str, ...]) -> None:
    """They come while the lake is opened."""
    script = (
        "import os, signal, sys\n"
        "from crosswire.cli.main import main\n"
        "from crosswire.server.server import Server\n"
        "opened = Server._open_lake\n"
        "async def slowly(self):\n"
        f"    for _ in range({signals}):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    import asyncio\n"
        "    await asyncio.sleep(0.05)\n"
        "    await opened(self)\n"
        "Server._open_lake = slowly\n"
        "sys.exit(main())\n"
    )
    arguments = ["serve", "--data", str(tmp_path), *OFF, "--listen=http=off", *options]
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    told = ("signal before it was ready: stopping", "second signal: stopping at once")
    assert done.stderr.decode().splitlines() == [f"crosswire serve: {told[signals - 1]}"]
    assert (done.returncode, done.stdout) == (signals - 1, b"")


def test_an_interrupt_before_anything_is_loaded(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "import crosswire.cli.main as program\n"
        "from crosswire.cli import parsers\n"
        "def interrupted(name):\n"
        "    raise KeyboardInterrupt\n"
        "parsers.import_module = interrupted\n"
        "sys.exit(program.main())\n"
    )
    command = [sys.executable, "-c", script, "serve", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    told = done.stderr.decode().splitlines()
    assert told == ["crosswire serve: interrupted before it was ready"]
    assert done.returncode == 130
