"""`pub`, `sub`, `call` and `echo-service` through every protocol that a hub speaks."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import subprocess
import sys
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
    done = crosswire(*pub, "--json", given="\n".join(lines).encode())
    ids = [each for line in done.stdout.splitlines() for each in json.loads(line)["ids"]]
    assert len(ids) == 40
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
    wanted = (f"{topic}", "--name", f"{protocol}-s", "--from", "earliest", "--filter", "n > 10")
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_subscriber_and_leaves_no_consumer(
    hub: RunningHub, protocol: str, number: int
) -> None:
    queue = f"queue/{protocol}-{signal.Signals(number).name}"
    sub = subprocess.Popen(
        [PROGRAM, "sub", queue, *way(hub, protocol, "sub")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert sub.stderr is not None
    carries_ids = protocol in ("emp", "epoxy")
    told = sub.stderr.readline()
    assert told.startswith(f"subscribed to {queue}".encode())
    assert (b"carries no ids" in told) == (not carries_ids)
    assert len(answer("queue", "show", queue, "--hub", hub.url)["consumers"]) == 1
    sub.send_signal(number)
    _, err = sub.communicate(timeout=20)
    assert (sub.returncode, err) == (0, f"0 messages from {queue}\n".encode())
    assert answer("queue", "show", queue, "--hub", hub.url)["consumers"] == []


def test_a_signal_ends_a_subscriber_that_has_not_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        sub = subprocess.Popen([PROGRAM, "sub", "q", "--port", port], stderr=subprocess.PIPE)
        peer, _ = silent.accept()
        with peer:
            peer.recv(1)
            sub.send_signal(signal.SIGINT)
            _, err = sub.communicate(timeout=5)
    assert (sub.returncode, err) == (0, b"0 messages from queue/q\n")


def test_lines_are_sent_as_they_arrive(hub: RunningHub) -> None:
    pub = subprocess.Popen(
        [PROGRAM, "pub", "arriving", "--lines", *way(hub, "emp", "pub")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert pub.stdin is not None and pub.stdout is not None
    for text in (b"first\n", b"second\r\n"):
        pub.stdin.write(text)
        # Acknowledged, with the input still open.
        int(pub.stdout.readline())
    pub.stdin.write(b"last")
    assert pub.communicate(timeout=20)[0].count(b"\n") == 1
    assert pub.returncode == 0
    rows = subscribed(hub, "emp", "arriving", "--count", "3")
    assert [row["text"] for row in rows] == ["first", "second", "last"]


def test_a_long_stream_of_lines_takes_little_memory(hub: RunningHub) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from crosswire.cli.main import main\n"
        "code = main()\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(status.partition('VmHWM:')[2].split()[0], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    words = ["pub", "topic/long-stream", "--lines", "--json", *way(hub, "emp", "pub")]

    def peak_kib(lines: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            input=(b"x" * 16383 + b"\n") * lines,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert sum(json.loads(each)["count"] for each in done.stdout.splitlines()) == lines
        return int(done.stderr.splitlines()[-1])

    # 48 MiB: a part of that is in memory at a time.
    assert peak_kib(3072) - peak_kib(16) < 16 << 10


def test_what_was_acknowledged_before_a_failure_is_counted(hub: RunningHub) -> None:
    given = b"a\nb\n" + b"x" * (65 << 20)
    done = crosswire("pub", "counted", "--lines", *way(hub, "emp", "pub"), given=given)
    assert done.returncode == 1
    assert b"2 messages to queue/counted" in done.stderr
    assert b"line 3 has more than 64 MiB" in done.stderr


def test_a_response_is_json_for_the_next_program(hub: RunningHub) -> None:
    with echo_service(hub, "emp", "as-json"):
        call = ("call", "as-json", '{"x": 1}', "--property", "n=1", *way(hub, "emp", "call"))
        done = crosswire(*call)
    assert json.loads(done.stdout) == {"x": 1}
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["queue/a/+", "topic/a/#", "topic/a+b"])
def test_wildcards_are_refused_where_a_destination_is_created(hub: RunningHub, name: str) -> None:
    for words in (
        ("pub", name, "x", *way(hub, "emp", "pub")),
        ("schedule", "add", name, "x", "--every", "9", "--hub", hub.url),
    ):
        done = crosswire(*words)
        assert (done.returncode, done.stdout) == (1, b""), words
        assert b"wildcards" in done.stderr or b"levels of topics" in done.stderr, done.stderr


@pytest.mark.parametrize("words", [("sub", "topic/t"), ("dead", "list", "q")])
def test_an_unknown_operator_is_refused(hub: RunningHub, words: tuple[str, ...]) -> None:
    where = ("--hub", hub.url) if words[0] == "dead" else way(hub, "emp", "sub")
    done = crosswire(*words, "--filter", "price == 10", *where)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"unknown operator '=='" in done.stderr


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
