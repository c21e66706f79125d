"""Commands that look at a running hub and change it, over its HTTP API."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from crosswire.cli.hub import Api, age, path_of, size
from crosswire.cli.trace import repeated_deliveries
from crosswire.errors import ClientError
from tests.cli.conftest import RunningHub, StartHub, answer, crosswire


def produce(hub: RunningHub, destination: str, *texts: str, **more: Any) -> list[int]:
    messages = [{"destination": destination, "text": text, **more} for text in texts]
    ids: list[int] = Api(hub.url).post("/v1/messages", {"messages": messages})["ids"]
    return ids


def printed(hub: RunningHub, *arguments: str, given: bytes = b"") -> list[str]:
    """The lines of a command for people."""
    done = crosswire(*arguments, "--hub", hub.url, given=given)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_queues(hub: RunningHub) -> None:
    (identifier,) = produce(hub, "queue/shop/orders", "tea\x1b[31m", properties={"n": 1})
    listed = printed(hub, "queue", "list", "--contains", "shop")
    assert [line.split()[:2] for line in listed[1:]] == [["shop/orders", "1"]]
    shown = printed(hub, "queue", "show", "queue/shop/orders")
    assert shown[0].startswith("shop/orders: 1 message,")
    assert shown[-1].split()[0] == str(identifier)
    assert shown[-1].endswith("tea\\x1b[31m  [n=1]")
    purge = ("queue", "purge", "shop/orders", "--hub", hub.url)
    assert answer(*purge, "--dry-run") == {"purged": 0, "matched": 1, "dry_run": True}
    done = crosswire(*purge)
    assert (done.returncode, b"use --yes" in done.stderr) == (1, True)
    assert answer(*purge, "--yes")["purged"] == 1
    delete = ("queue", "delete", "queue/shop/orders", "--hub", hub.url, "--json")
    end = time.monotonic() + 30
    while (done := crosswire(*delete)).returncode:
        # The lake takes a queue's last messages within some seconds.
        assert b"try again" in done.stderr and time.monotonic() < end, done.stderr
    assert json.loads(done.stdout) == {"removed": "shop/orders"}


def test_a_trace_tells_of_deliveries_that_a_kill_interrupted() -> None:
    """Each attempt has a number of its own, but for one that the hub did not live to see end."""
    steps = [
        {"step": step, "destination": destination, "attempt": attempt}
        for step, destination, attempt in (
            ("accepted", "queue/q", 0),
            ("delivered", "queue/q", 1),
            ("delivered", "queue/q", 1),
            ("refused", "queue/q", 1),
            ("delivered", "queue/q", 2),
            ("delivered", "topic/t", 1),
            ("delivered", "topic/t", 1),
        )
    ]
    assert repeated_deliveries(steps) == {2}


def test_a_trace_is_a_timeline(hub: RunningHub) -> None:
    (identifier,) = produce(hub, "queue/traced", "x")
    lines = printed(hub, "trace", str(identifier))
    assert lines[0] == "payload  x"
    assert lines[-1].split()[2:] == ["+0.000", "ms", "accepted", "queue/traced", "http"]


def test_connections(hub: RunningHub) -> None:
    done = crosswire("connections", "--hub", hub.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"No connections.\n")
    done = crosswire("connections", "--close", "nobody", "--hub", hub.url)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"there is no connection 'nobody'" in done.stderr


def test_dead_letters(hub: RunningHub) -> None:
    ids = produce(hub, "queue/d/dead", "one", "two", "three", properties={"n": 2})
    assert ["d", "3"] in [line.split() for line in printed(hub, "dead", "list")]
    listed = printed(hub, "dead", "list", "d", "--filter", "n > 1", "--limit", "2")
    assert [line.split()[0] for line in listed[1:]] == [str(each) for each in ids[:2]]
    shown = printed(hub, "dead", "show", "d", str(ids[0]))
    assert shown[-2:] == ["properties  n=2", "payload     one"]
    edited = printed(
        hub, "dead", "edit", "d", str(ids[0]), '{"mended":1}', "--property", "n=text:2"
    )
    assert edited[-2:] == ["properties  n=2", 'payload     {"mended":1}']
    dry = printed(hub, "dead", "replay", "d", "--all", "--to", "queue/back", "--dry-run")
    assert dry == [str(each) for each in ids]
    replay = ("dead", "replay", "d", "--id", str(ids[0]), "--rate", "100", "--to", "queue/back")
    assert answer(*replay, "--hub", hub.url)["replayed"] == 1
    purge = ("dead", "purge", "d", "--filter", "n = 2", "--yes")
    assert answer(*purge, "--hub", hub.url)["done"] == 2
    (back,) = answer("queue", "show", "back", "--hub", hub.url)["messages"]
    assert (back["json"], back["properties"]) == ({"mended": 1}, {"n": "2"})


def test_a_queue_without_dead_letters_is_an_empty_result(hub: RunningHub) -> None:
    produce(hub, "queue/healthy", "x")
    done = crosswire("dead", "list", "healthy", "--hub", hub.url)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"No dead letters of healthy.\n"
    listed = answer("dead", "list", "healthy", "--hub", hub.url)
    assert listed == {"letters": [], "next": "", "is_complete": True}
    done = crosswire("dead", "list", "no-such-queue", "--hub", hub.url)
    assert done.returncode == 1


def test_empty_tables_say_so_in_words(start_hub: StartHub) -> None:
    url = start_hub().url
    for words, told in (
        ("queue list", b"No queues.\n"),
        ("dead list", b"No dead letters.\n"),
        ("schedule list", b"No schedules.\n"),
        ("subscription list", b"No named subscriptions.\n"),
        ("connections", b"No connections.\n"),
    ):
        done = crosswire(*words.split(), "--hub", url)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", told)


def test_a_letter_that_can_not_be_replayed_fails_the_command(hub: RunningHub) -> None:
    produce(hub, "queue/lost/dead", "from nowhere")
    done = crosswire("dead", "replay", "lost", "--all", "--hub", hub.url)
    assert done.returncode == 1
    assert b"1 letter skipped" in done.stderr


def test_schedules(hub: RunningHub) -> None:
    add = ("schedule", "add", "queue/s", "--id", "s/1", "--cron", "0 3 * * *", "--hub", hub.url)
    assert answer(*add, given=b"from stdin")["message"]["text"] == "from stdin"
    (row,) = [line for line in printed(hub, "schedule", "list") if line.startswith("s/1")]
    assert "0 3 * * *" in row
    times = printed(hub, "schedule", "preview", "s/1", "--count", "2")
    assert [line.split()[1] for line in times] == ["03:00:00"] * 2
    assert printed(hub, "schedule", "preview", "--cron", "0 3 * * *", "--count", "2") == times
    assert answer("schedule", "remove", "s/1", "--hub", hub.url) == {"removed": "s/1"}


def test_subscriptions(hub: RunningHub) -> None:
    listed = answer("subscription", "list", "--hub", hub.url)
    assert listed["subscriptions"] == []
    done = crosswire("subscription", "delete", "a/b", "--hub", hub.url)
    assert done.returncode == 1 and b"there is no subscription 'a/b'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("queue",),
        ("queue", "explode"),
        ("dead", "replay", "q"),
        ("dead", "purge", "q", "--all", "--filter", "n=N1"),
        ("schedule", "add", "queue/q", "x"),
        ("trace", "first"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert crosswire(*arguments).returncode == 2


@pytest.mark.parametrize(
    "arguments", [("queue", "list"), ("trace", "1"), ("connections",), ("dead", "list")]
)
def test_no_hub_is_told_without_a_traceback(arguments: tuple[str, ...]) -> None:
    done = crosswire(*arguments, "--hub", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"no response from http://127.0.0.1:1" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_token_opens_what_is_guarded(start_hub: StartHub, tmp_path: Any) -> None:
    file = tmp_path / "crosswire.toml"
    file.write_text('[[users]]\nname = "root"\ntoken = "the-secret-of-root"\nadminister = true\n')
    hub = start_hub("--config", str(file))
    done = crosswire("queue", "list", "--hub", hub.url)
    assert (done.returncode, b"unauthenticated" in done.stderr) == (1, True)
    token = ("--token", "the-secret-of-root")
    assert answer("queue", "list", "--hub", hub.url, *token)["queues"] == []


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ClientError):
        Api(url)


def test_names_keep_their_slashes() -> None:
    assert path_of("v1", "queues", "a/b c?") == "/v1/queues/a/b%20c%3F"


def test_figures_for_people() -> None:
    assert [size(each) for each in (0, 1023, 1024, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
    ]
    assert age("1970-01-01T00:00:00Z").endswith("d")


def test_commands_start_without_what_they_do_not_need() -> None:
    import subprocess
    import sys

    program = (
        "import sys, json; from crosswire.cli.main import main\n"
        "main(['queue', 'list', '--hub', 'http://127.0.0.1:1'])\n"
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"asyncio", "starlette", "uvicorn", "rocksdict", "uvloop", "numpy"}
