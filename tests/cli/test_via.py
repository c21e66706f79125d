"""`pub`, `sub`, `call` and `echo-service` through every protocol that a hub speaks."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crosswire.cli.body import content_type_of
from crosswire.cli.hub import Api
from crosswire.client.native.emp import EmpClient
from crosswire.errors import RequestFailed
from crosswire.server.server import GATEWAYS
from crosswire.wire.registry import PROTOCOL_NAMES
from crosswire.wire.zmtp.curve import encode_key, public_key_of
from tests.cli.conftest import PROGRAM, RunningHub, StartHub, answer, crosswire

PROTOCOLS = [name for name in PROTOCOL_NAMES if name in GATEWAYS or f"{name}-clients" in GATEWAYS]
LISTENERS = {
    ("emqp", "pub"): "emqp-clients",
    ("emqp", "call"): "emqp-clients",
    ("emqp", "sub"): "emqp-workers",
    ("emqp", "topic"): "emqp-subscribers",
    ("emqp", "echo-service"): "emqp-workers",
}


def way(hub: RunningHub, protocol: str, action: str) -> tuple[str, ...]:
    port = hub.port(LISTENERS.get((protocol, action), protocol))
    return ("--via", protocol, "--port", str(port))


def subscribed(hub: RunningHub, protocol: str, *arguments: str) -> list[dict[str, Any]]:
    action = "topic" if arguments[0].startswith("topic/") else "sub"
    done = crosswire("sub", *arguments, *way(hub, protocol, action), "--json", "--wait", "20")
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def echo_service(hub: RunningHub, protocol: str, name: str) -> Iterator[None]:
    """One that has said that it is there."""
    process = subprocess.Popen(
        [PROGRAM, "echo-service", name, "--json", *way(hub, protocol, "echo-service")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["ready"]
        yield
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_message_goes_in_and_comes_out(hub: RunningHub, protocol: str) -> None:
    queue = f"queue/{protocol}-q"
    pub = ("pub", queue, '{"a":1}', "--property", "n=1", "--property", "s=x", "--count", "2")
    assert answer(*pub, *way(hub, protocol, "pub"))["count"] == 2
    rows = subscribed(hub, protocol, queue, "--count", "2")
    expected = ({"a": 1}, {"n": 1, "s": "x"})
    assert [(row["json"], row["properties"]) for row in rows] == [expected] * 2
    assert answer("queue", "show", queue, "--hub", hub.url)["length"] == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_subscriber_that_is_terminated_gives_back_what_it_has_not_printed(
    hub: RunningHub, protocol: str
) -> None:
    queue = f"queue/{protocol}-given-back"
    sub = subprocess.Popen(
        [PROGRAM, "sub", queue, "--json", *way(hub, protocol, "sub")],
        bufsize=0,  # `communicate` does not see what a buffer holds
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert sub.stdout is not None and sub.stderr is not None
    assert sub.stderr.readline().startswith(f"subscribed to {queue}".encode())
    # Nobody reads the pipe: it fills up, and the window with messages that are not printed.
    lines = [json.dumps({"n": n, "pad": "x" * 40_000}) for n in range(40)]
    pub = ("pub", queue, "--lines", *way(hub, "emp", "pub"))
    ids = answer(*pub, given="\n".join(lines).encode())["ids"]
    assert json.loads(sub.stdout.readline())["json"]["n"] == 0
    sub.terminate()
    out, err = sub.communicate(timeout=20)
    assert (sub.returncode, b"Traceback" in err) == (0, False), err
    printed = 1 + len(out.splitlines())
    assert printed < 40
    api = Api(hub.url)
    details = {
        step.get("detail") for each in ids for step in api.get(f"/v1/messages/{each}")["steps"]
    }
    shown = answer("queue", "show", queue, "--hub", hub.url)
    assert (shown["length"], shown["consumers"]) == (40 - printed, []), shown
    assert "the consumer unsubscribed" in details


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_any_bytes_survive(hub: RunningHub, protocol: str) -> None:
    queue = f"queue/{protocol}-bytes"
    payloads = [b"", b"h\xc3\xa9", bytes(range(256))]
    for payload in payloads:
        pub = crosswire("pub", queue, "--file", "-", *way(hub, protocol, "pub"), given=payload)
        assert pub.returncode == 0, pub.stderr.decode()
    done = crosswire("sub", queue, "--count", "3", "--raw", *way(hub, protocol, "sub"))
    assert done.stdout == b"".join(payload + b"\n" for payload in payloads)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_is_answered(hub: RunningHub, protocol: str) -> None:
    name = f"{protocol}-echo" if protocol == "emqp" else f"{protocol}.Echo/say"
    with echo_service(hub, protocol, name):
        call = ("call", name, '{"x":[1,2]}', *way(hub, protocol, "call"))
        assert answer(*call)["json"] == {"x": [1, 2]}


def test_a_call_crosses_protocols(hub: RunningHub) -> None:
    with echo_service(hub, "emp", "crossing"):
        call = ("call", "crossing/say", '{"hello":"world"}', *way(hub, "epoxy", "call"))
        assert answer(*call)["json"] == {"hello": "world"}


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "emqp"])
def test_a_service_that_nobody_provides(hub: RunningHub, protocol: str) -> None:
    done = crosswire("call", "nobody/here", "{}", *way(hub, protocol, "call"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"crosswire call: " in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "emqp"])
def test_a_named_subscription_starts_where_it_is_told(hub: RunningHub, protocol: str) -> None:
    topic = f"topic/{protocol}-t"
    for text in ("1", "20"):
        pub = ("pub", topic, text, "--property", f"n={text}")
        answer(*pub, *way(hub, protocol, "pub"))
    wanted = (f"{topic}", "--name", f"{protocol}-s", "--from", "earliest", "--filter", "n>N10")
    (row,) = subscribed(hub, protocol, *wanted, "--count", "1")
    assert row["json"] == 20


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_there(protocol: str) -> None:
    done = crosswire("pub", "queue/q", "x", "--via", protocol, "--port", "1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"can't connect to 127.0.0.1:1" in done.stderr
    assert b"Traceback" not in done.stderr


def test_curve_keys_say_who_a_peer_is(start_hub: StartHub, tmp_path: Path) -> None:
    hub_secret, anna_secret = secrets.token_bytes(32), secrets.token_bytes(32)
    file = tmp_path / "crosswire.toml"
    file.write_text(
        f"[emqp]\ncurve_secret_key = '{encode_key(hub_secret)}'\n[[users]]\nname = 'anna'\n"
        f"curve_key = '{encode_key(public_key_of(anna_secret))}'\nproduce = ['queue/#']\n"
    )
    hub = start_hub("--config", str(file))
    keys = ("--curve-server", encode_key(public_key_of(hub_secret)))
    pub = ("pub", "q", "x", *way(hub, "emqp", "pub"), *keys)
    assert answer(*pub, f"--curve-secret={encode_key(anna_secret)}")["count"] == 1
    assert crosswire(*pub).returncode == 1


def test_lines_become_messages(hub: RunningHub) -> None:
    emp = way(hub, "emp", "pub")
    pub = ("pub", "lines", "--lines", *emp)
    assert answer(*pub, given=b"a\nb\n1\n")["count"] == 3
    rows = subscribed(hub, "emp", "lines", "--count", "3")
    assert [row.get("text", row.get("json")) for row in rows] == ["a", "b", 1]


def test_waiting_in_vain_is_a_failure(hub: RunningHub) -> None:
    done = crosswire("sub", "empty", "--count", "1", "--wait", "0.1", *way(hub, "emp", "sub"))
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_wrong_token_is_told(hub: RunningHub) -> None:
    done = crosswire("pub", "q", "x", "--token", "not-a-token-of-anybody", *way(hub, "emp", "pub"))
    assert done.returncode == 1
    assert b"forbidden" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("pub",), ("pub", "q", "x", "--via", "telepathy"), ("pub", "q", "--property", "x"), ("sub",)],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert crosswire(*arguments).returncode == 2


def test_a_payload_is_what_it_looks_like() -> None:
    looks = {b"{}": "application/json", b"x y": "text/plain", b"\xff": "application/octet-stream"}
    assert {payload: content_type_of(payload) for payload in looks} == looks


async def test_a_providers_error_is_shown_without_control_characters(hub: RunningHub) -> None:
    async def fail(_data: Any) -> Any:
        raise RequestFailed("bad\x1b[31m", "\x1b]0;gone\x07\x1b[2J\ndone")

    client = EmpClient("127.0.0.1", hub.port("emp"), handlers={"hostile": fail})
    async with client:
        await client.request("$serve", {"services": ["hostile"]})
        call = ("call", "hostile", "{}", *way(hub, "emp", "call"))
        done = await asyncio.to_thread(crosswire, *call)
    assert done.returncode == 1
    assert b"\\x1b[2J" in done.stderr
    assert all(byte >= 0x20 or byte == 0x0A for byte in done.stderr), done.stderr


def test_a_property_is_shown_without_control_characters(hub: RunningHub) -> None:
    message = {
        "destination": "queue/hostile",
        "text": "\x1b[2J",
        "properties": {"\x1b[31mname": "\x1b[32mvalue"},
    }
    Api(hub.url).post("/v1/messages", {"messages": [message]})
    done = crosswire("queue", "show", "hostile", "--hub", hub.url)
    assert b"\\x1b[31mname=\\x1b[32mvalue" in done.stdout
    assert b"\x1b" not in done.stdout
