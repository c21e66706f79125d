"""`crosswire serve` as a program: it starts, says so, reloads, drains, and loses nothing."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from crosswire.cli.hub import Api
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
    with pytest.raises(AssertionError, match=r"crosswire serve: .*in use"):
        start_hub()


def test_without_users_it_stays_on_this_machine(tmp_path: Path) -> None:
    done = crosswire("serve", "--data", str(tmp_path), "--listen", "emp=0.0.0.0:0")
    assert done.returncode == 1
    assert b"would let anybody do anything: configure users, or say --insecure" in done.stderr


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
    assert f"{file}: line 2: queues.orders.max_lenght: nothing is called that" in (
        done.stderr.decode()
    )


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
        "drain_s = 1\n[queues.q]\nmax_length = 2\n[store]\nspare_bytes = 1\n"
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
