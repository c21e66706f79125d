"""Commands that show how a hub is, and change its queues, topics, subscriptions and schedules."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from crosswire.cli.hub import Api, duration, rate
from tests.cli.conftest import PROGRAM, RunningHub, StartHub, answer, crosswire
from tests.cli.test_hub_commands import printed, produce


def test_status_is_the_hub_at_a_glance(hub: RunningHub) -> None:
    produce(hub, "queue/glance", "x")
    lines = printed(hub, "status")
    rows = {line.split()[0]: line for line in lines}
    assert rows["hub"].split() == ["hub", "ready"]
    assert {"node", "traffic", "backlog", "peers", "names", "memory", "disk", "listen"} <= set(rows)
    shown = answer("status", "--hub", hub.url)
    assert shown["ready"]["status"] == "ready" and shown["state"]["messages"] >= 1


def test_status_fails_without_a_hub_and_without_the_right(
    start_hub: StartHub, tmp_path: Any
) -> None:
    assert crosswire("status", "--hub", "http://127.0.0.1:1").returncode == 1
    file = tmp_path / "crosswire.toml"
    file.write_text('[[users]]\nname = "root"\ntoken = "the-secret-of-root"\nadminister = true\n')
    hub = start_hub("--config", str(file))
    done = crosswire("status", "--hub", hub.url)
    assert (done.returncode, b"unauthenticated" in done.stderr) == (1, True)
    assert crosswire("status", "--hub", hub.url, "--token", "the-secret-of-root").returncode == 0


def test_top_is_one_screen(hub: RunningHub) -> None:
    for number in range(40):
        produce(hub, f"queue/many-{number:02}", "x")
    environment = {"LINES": "20", "COLUMNS": "60"}
    done = subprocess.run(
        [PROGRAM, "top", "--hub", hub.url],
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment},
        check=True,
    )
    lines = done.stdout.decode().splitlines()
    assert len(lines) < 20 and max(map(len, lines)) <= 60
    assert any(line.startswith("queue ") for line in lines)
    shown = answer("top", "--hub", hub.url, "--sort", "length")
    assert {"queues", "topics", "services", "state", "ready"} <= shown.keys()


def test_top_goes_on_until_the_last_screen(hub: RunningHub) -> None:
    words = ("top", "--hub", hub.url, "--count", "2", "--interval", "0.1", "--json")
    done = crosswire(*words)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2


def test_a_queue_is_created_paused_moved_and_deleted(hub: RunningHub) -> None:
    at = ("--hub", hub.url)
    assert answer("queue", "create", "made", *at) == {"name": "made", "created": True}
    assert answer("queue", "create", "queue/made", *at)["created"] is False
    assert answer("queue", "pause", "made", *at)["paused"] is True
    assert "paused" in printed(hub, "queue", "list", "--state", "paused")[1]
    assert answer("queue", "resume", "made", *at)["paused"] is False
    produce(hub, "queue/made", "a", properties={"n": 1})
    produce(hub, "queue/made", "b", "c", properties={"n": 2})
    move = ("queue", "move", "made", "--to", "queue/moved", "--filter", "n > 1")
    dry = printed(hub, *move, "--dry-run")
    assert len(dry) == 2
    assert answer(*move, *at)["replayed"] == 2
    assert answer("queue", "show", "moved", *at)["length"] == 2
    assert answer("queue", "purge", "made", "--yes", *at)["purged"] == 1
    answer("queue", "create", "unused", *at)
    assert answer("queue", "delete", "unused", *at) == {"removed": "unused"}


def test_wildcards_are_no_name_of_a_new_queue(hub: RunningHub) -> None:
    done = crosswire("queue", "create", "a/+", "--hub", hub.url)
    assert done.returncode == 1 and b"levels of topics" in done.stderr


def test_lists_go_on_after_a_page(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        produce(hub, f"queue/paged/{number}", "x")
    monkeypatch.setattr("crosswire.cli.hub._PAGE", 3)
    listed = Api(hub.url).list("/v1/queues", "queues", 6, contains="paged/")
    assert [each["name"] for each in listed["queues"]] == [f"paged/{n}" for n in range(6)]
    assert listed["next"]
    rest = Api(hub.url).list("/v1/queues", "queues", 100, contains="paged/")
    assert (len(rest["queues"]), rest["next"]) == (7, "")


def test_topics_and_subscriptions(hub: RunningHub) -> None:
    at = ("--hub", hub.url)
    port = ("--port", str(hub.port("emp")))
    sub = ("sub", "topic/seen/a", "--name", "watcher", "--from", "earliest", "--wait", "0.1")
    assert crosswire(*sub, *port).returncode == 0
    produce(hub, "topic/seen/a", "one", "two")
    (row,) = [line for line in printed(hub, "topic", "list") if line.startswith("seen/a")]
    assert row.split()[-1] == "watcher"
    shown = printed(hub, "topic", "show", "topic/seen/a", "--messages", "1")
    assert shown[0].startswith("seen/a: durable, 2 published") and shown[-1].endswith("one")
    shown = printed(hub, "subscription", "show", "watcher")
    assert shown[0] == "watcher: topic/seen/a" and shown[1].startswith("2 messages not settled")
    assert answer("subscription", "list", "--sort", "lag", *at)["subscriptions"][0]["name"]
    done = crosswire("subscription", "delete", "watcher", *at)
    assert (done.returncode, b"2 messages not settled" in done.stderr) == (1, True)
    assert answer("subscription", "delete", "watcher", "--yes", *at)["removed"] == "watcher"
    done = crosswire("topic", "delete", "seen/a", *at)
    assert done.returncode == 1  # it has messages


def test_services(hub: RunningHub) -> None:
    process = subprocess.Popen(
        [PROGRAM, "echo-service", "seen-echo", "--json", "--port", str(hub.port("emp"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["ready"]
        (row,) = [line for line in printed(hub, "service", "list") if "seen-echo" in line]
        assert row.split()[1] == "1"
        assert printed(hub, "service", "show", "seen-echo")[-1].split()[1] == "emp"
    finally:
        process.terminate()
        process.communicate(timeout=20)
    done = crosswire("service", "show", "nobodys", "--hub", hub.url)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_schedule_is_paused_resumed_and_fired(hub: RunningHub) -> None:
    at = ("--hub", hub.url)
    add = ("schedule", "add", "queue/fired", "go", "--id", "acts", "--cron", "0 3 * * *")
    answer(*add, *at)
    assert answer("schedule", "pause", "acts", *at)["paused"] is True
    (row,) = [line for line in printed(hub, "schedule", "list") if line.startswith("acts")]
    assert "paused" in row
    assert answer("schedule", "resume", "acts", *at)["paused"] is False
    (identifier,) = printed(hub, "schedule", "fire", "acts")
    (sent,) = answer("queue", "show", "fired", *at)["messages"]
    assert (str(sent["id"]), sent["text"]) == (identifier, "go")
    answer("schedule", "remove", "acts", *at)


def test_messages_are_found_by_what_is_known_of_them(hub: RunningHub) -> None:
    at = ("--hub", hub.url)
    (tea,) = produce(hub, "queue/found", "green tea", properties={"price": 12})
    (coffee,) = produce(hub, "queue/found", "coffee", properties={"price": 3})

    def found(*words: str) -> list[int]:
        answered = answer("find", "--destination", "queue/found", *words, *at)
        return [each["message"]["id"] for each in answered["messages"]]

    assert found() == [coffee, tea]
    assert found("Green TEA") == [tea]
    assert found("--filter", "price < 10") == [coffee]
    assert found("--since", "1h", "--outcome", "waiting") == [coffee, tea]
    assert found("--until", "1h") == []
    assert found("--limit", "1") == [coffee]
    lines = printed(hub, "find", "coffee", "--destination", "queue/found")
    assert lines[1].split()[0] == str(coffee) and lines[1].endswith("coffee  [price=3]")
    done = crosswire("find", "no such text", *at)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"No messages.\n")
    assert crosswire("find", "--since", "yesterday", *at).returncode == 2


def test_figures_for_people() -> None:
    shown = [duration(each) for each in (0, 0.0042, 0.25, 12, 90, 7200, 1e6)]
    assert shown == ["0s", "4.2ms", "250ms", "12s", "1.5m", "2.0h", "11.6d"]
    assert [rate(each) for each in (0, 0.25, 12.3, 4567)] == ["-", "0.2", "12", "4,567"]
