"""Output that can't be shown or written, and a log for people: never a traceback."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from crosswire.cli.hub import Api
from crosswire.server.server import GATEWAYS
from tests.cli.conftest import PROGRAM, RunningHub, crosswire


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in bash, with `$crosswire` for the program."""
    given = {**os.environ, **environment, "crosswire": PROGRAM}
    return subprocess.run(
        ["bash", "-c", command], env=given, capture_output=True, timeout=60, check=False
    )


def on_terminal(*words: str, columns: int = 80, **environment: str) -> bytes:
    """What a command prints on a terminal of this width."""
    ours, its = pty.openpty()
    given = {**os.environ, **environment, "COLUMNS": str(columns)}
    process = subprocess.Popen([PROGRAM, *words], stdin=its, stdout=its, stderr=its, env=given)
    os.close(its)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # the other end of a terminal is closed
    finally:
        os.close(ours)
    process.wait(timeout=30)
    return shown


@pytest.fixture(scope="module")
def names(hub: RunningHub) -> str:
    """A hub with a queue whose name has letters of several scripts."""
    message = {"destination": "queue/Bücher/東京/🚆", "text": "naïve …"}
    Api(hub.url).post("/v1/messages", {"messages": [message]})
    return hub.url


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0"}])
def test_a_terminal_that_is_not_utf8_gets_escapes(names: str, environment: dict[str, str]) -> None:
    given = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", **environment}
    for words in ("queue list", "queue show Bücher/東京/🚆", "help lake"):
        done = shell(
            f"$crosswire {words} --hub {names}"
            if "help" not in words
            else f"$crosswire {words} list",
            **given,
        )
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
        done.stdout.decode("ascii")


@pytest.mark.parametrize("columns", [1, 5, 20])
def test_a_narrow_terminal_gets_cut_lines(names: str, columns: int) -> None:
    for words in (("queue", "list", "--hub", names), ("queue", "list", "--help")):
        assert b"Traceback" not in on_terminal(*words, columns=columns)
    lines = on_terminal("queue", "list", "--hub", names, columns=columns).decode().splitlines()
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    "command",
    [
        "$crosswire help | head -1",
        "$crosswire queue list --hub {hub} >&-",
        "$crosswire queue list --hub {hub} 2>&- >&-",
        "$crosswire queue list --hub {hub} > /dev/full",
        "$crosswire queue show Bücher --hub {hub} 2> /dev/full",
        "$crosswire decode emp /dev/zero --hex 2>&1 >/dev/null | head -1",
    ],
)
def test_output_that_nobody_takes(names: str, command: str) -> None:
    done = shell(command.format(hub=names))
    assert b"Traceback" not in done.stdout + done.stderr
    assert b"Exception ignored" not in done.stderr


def test_an_argument_that_is_not_utf8() -> None:
    for words in ((b"queue", b"show", b"\xff"), (b"pub", b"\xff", b"x"), (b"sub", b"\xff")):
        done = subprocess.run([PROGRAM, *words], capture_output=True, timeout=60, check=False)
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr and done.stderr.startswith(b"crosswire ")


def test_a_payload_may_be_any_bytes(hub: RunningHub) -> None:
    words = [b"pub", b"bytes", b"a\xffb", b"--port", str(hub.port("emp")).encode()]
    subprocess.run([PROGRAM, *words], capture_output=True, timeout=60, check=True)
    port = str(hub.port("emp"))
    done = crosswire("sub", "bytes", "--count", "1", "--raw", "--port", port)
    assert done.stdout == b"a\xffb\n"


def test_a_hub_on_a_terminal_logs_for_people(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    listen = [f"--listen={name}=off" for name in (*GATEWAYS, "http")]
    hub = subprocess.Popen(
        [PROGRAM, "serve", "--data", str(tmp_path / "d"), *listen, "--log", "info"],
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    shown, is_told = b"", False
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
            if b"ready; stop" in shown and not is_told:
                is_told = True
                hub.send_signal(signal.SIGINT)
    except OSError:
        pass  # it has ended
    finally:
        os.close(ours)
    assert hub.wait(timeout=30) == 0
    text = shown.decode()
    assert " info    stopped" in text and '{"time"' not in text


def test_purging_asks_on_a_terminal(hub: RunningHub) -> None:
    api = Api(hub.url)
    api.post("/v1/messages", {"messages": [{"destination": "queue/asked", "text": "x"}]})
    for reply, left in ((b"n\n", 1), (b"\n", 1), (b"y\n", 0)):
        ours, its = pty.openpty()
        purge = subprocess.Popen(
            [PROGRAM, "queue", "purge", "asked", "--hub", hub.url],
            stdin=its,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.close(its)
        os.write(ours, reply)
        _, err = purge.communicate(timeout=30)
        os.close(ours)
        assert b"Delete 1 message of queue asked? [y/N]" in err
        assert purge.returncode == (0 if left == 0 else 1)
        assert api.get("/v1/queues/asked")["length"] == left
