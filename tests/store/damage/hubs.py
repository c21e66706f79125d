"""A hub in a child process, and the small blocking clients that drive it.

The hub is `crosswire serve` run in a fork of this process, which has imported all of it before: a
start costs a fraction of that of a new interpreter. So this process must have no thread and no
event loop, and must never open a store itself.
"""

from __future__ import annotations

import ctypes
import faulthandler
import http.client
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from crosswire.cli.main import main as crosswire_main
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed
from crosswire.wire.emp.connection import EmpConnection, State
from crosswire.wire.emp.events import RequestReceived, ResponseReceived

__all__ = [
    "Delivered",
    "Emp",
    "Exited",
    "Hub",
    "HubLost",
    "Stuck",
    "end_with_parent",
    "run_command",
    "warm_up",
]

LISTENERS: Final = ("emp", "http", "relink")
OTHERS: Final = (
    "emqp-admin",
    "emqp-clients",
    "emqp-publishers",
    "emqp-subscribers",
    "emqp-workers",
    "epoxy",
    "micromsg2",
)
_DIE_WITH_PARENT: Final = 1
_ANSWER_S: Final = 10.0
_PRCTL: Final = ctypes.CDLL(None, use_errno=True).prctl


class HubLost(Exception):
    """The hub closed the connection, or is gone."""


class Stuck(Exception):
    """The hub neither did what it was asked for nor refused it in time."""


class Exited(msgspec.Struct, frozen=True):
    """How a process ended: its exit code (negative: a signal), output and processor time."""

    code: int
    stdout: str
    stderr: str
    cpu_s: float


def warm_up() -> None:
    """Import what a hub needs, so that its forks have it."""
    # A thread of a numerical library that nobody uses here would be lost in every fork.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in (
        "crosswire.cli.serve",
        "crosswire.cli.store",
        "crosswire.gateways.emp.gateway",
        "crosswire.gateways.relink.gateway",
        "crosswire.web.app",
        "crosswire.lake.writer",
        "pyarrow.parquet",
    ):
        try:
            import_module(name)
        except ModuleNotFoundError:
            continue
    threads = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    # The allocator's thread takes care of forks itself.
    others = [name for name in threads if name != "jemalloc_bg_thd"]
    assert len(others) == 1, f"a process with the threads {others} can't be forked safely"


def has_store_command() -> bool:
    """Does this version have `crosswire store`?"""
    return "crosswire.cli.store" in sys.modules


class _Child:
    """A command of `crosswire` in a fork; its output goes to files."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self._stdout, self._stderr = output.with_suffix(".out"), output.with_suffix(".err")
        self._exited: Exited | None = None
        # The output of a process before this one is not its own.
        self._stdout.unlink(missing_ok=True)
        self._stderr.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _run(arguments, self._stdout, self._stderr)

    def poll(self, *, wait: bool = False) -> Exited | None:
        """How it ended, None while it runs."""
        if self._exited is None:
            pid, status, usage = os.wait4(self.pid, 0 if wait else os.WNOHANG)
            if pid:
                self._exited = Exited(
                    os.waitstatus_to_exitcode(status),
                    self.stdout(),
                    self.stderr(),
                    usage.ru_utime + usage.ru_stime,
                )
        return self._exited

    def wait(self, timeout_s: float) -> Exited:
        """Raises Stuck after that time, or when it used most of it as processor time."""
        ends = time.monotonic() + timeout_s
        delay_s = 0.002
        while (exited := self.poll()) is None:
            if time.monotonic() > ends:
                self.kill()
                raise Stuck(f"did not end within {timeout_s:g} s")
            time.sleep(delay_s)
            delay_s = min(delay_s * 1.5, 0.05)
        return exited

    def kill(self, number: int = signal.SIGKILL) -> Exited:
        if self.poll() is None:
            os.kill(self.pid, number)
        exited = self.poll(wait=True)
        assert exited is not None
        return exited

    def cpu_s(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stdout(self) -> str:
        return _text(self._stdout)

    def stderr(self) -> str:
        return _text(self._stderr)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def end_with_parent() -> None:
    """For a fork: SIGKILL when the process that made it ends, however that ends."""
    _PRCTL(_DIE_WITH_PARENT, signal.SIGKILL)


def _run(arguments: Sequence[str], stdout: Path, stderr: Path) -> NoReturn:
    """What the child does: all that an interpreter does with the installed program."""
    code = 1
    try:
        end_with_parent()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(stdout, flags), 1)
        os.dup2(os.open(stderr, flags), 2)
        os.closerange(3, 64)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Where it is stuck, should it be.
        faulthandler.register(signal.SIGUSR2, file=2)
        code = crosswire_main(list(arguments))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_command(arguments: Sequence[str], output: Path, *, timeout_s: float) -> Exited:
    """Run a command of `crosswire` to its end. Raises Stuck."""
    return _Child(arguments, output).wait(timeout_s)


class Hub:
    """`crosswire serve` on a data directory."""

    def __init__(self, data: Path, config: Path, output: Path) -> None:
        listen = [f"--listen={name}=127.0.0.1:0" for name in LISTENERS]
        listen += [f"--listen={name}=off" for name in OTHERS]
        self._child = _Child(
            ["serve", "--json", "--config", str(config), "--data", str(data), *listen], output
        )
        self._ports: dict[str, int] = {}

    def ready(self, wall_s: float, cpu_s: float) -> Exited | None:
        """None when it takes work; how it ended, if it did not start.

        Raises Stuck after `wall_s`, or earlier when it has used `cpu_s` of processor time: other
        work on the machine can make a start slow, but not busy.
        """
        ends = time.monotonic() + wall_s
        delay_s = 0.005
        while not (line := self._child.stdout()).endswith("\n"):
            exited = self._child.poll()
            if exited is not None:
                return exited
            used_s = self._child.cpu_s()
            if used_s > cpu_s or time.monotonic() > ends:
                raise Stuck(f"not ready after {used_s:.1f} s of processor time: {self.stack()}")
            time.sleep(delay_s)
            delay_s = min(delay_s * 1.3, 0.05)
        listen = json.loads(line.splitlines()[0])["listen"]
        self._ports = {name: int(text.rpartition(":")[2]) for name, text in listen.items()}
        return None

    def port(self, listener: str) -> int:
        return self._ports[listener]

    def stack(self) -> str:
        """What all its threads are doing."""
        before = len(self.log())
        if self.exited is not None:
            return self.log()
        os.kill(self._child.pid, signal.SIGUSR2)
        for _ in range(50):
            time.sleep(0.01)
            if len(self.log()) > before:
                break
        return self.log()[before:]

    def stop(self, timeout_s: float) -> Exited:
        """A clean stop. Raises Stuck."""
        os.kill(self._child.pid, signal.SIGTERM)
        return self._child.wait(timeout_s)

    def kill(self) -> Exited:
        return self._child.kill()

    def pause(self) -> None:
        """None of its threads runs until `go_on`: its files stand still."""
        os.kill(self._child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    @property
    def exited(self) -> Exited | None:
        return self._child.poll()

    def log(self) -> str:
        return self._child.stderr()

    def get(self, path: str, timeout_s: float = _ANSWER_S) -> Any:
        """The JSON of an answer, whatever its status. Raises HubLost or Stuck."""
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, body: object, timeout_s: float = _ANSWER_S) -> Any:
        return self._ask("POST", path, json.dumps(body), timeout_s)

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port("http"), timeout=timeout_s)
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, body, headers)
            return json.loads(connection.getresponse().read())
        except TimeoutError:
            raise Stuck(f"no answer to {method} {path} within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise HubLost(f"{method} {path}: {error!r}") from None
        except ValueError as error:
            raise HubLost(f"{method} {path} was not answered with JSON: {error}") from None
        finally:
            connection.close()


class Delivered(msgspec.Struct, frozen=True):
    """A message as a consumer gets it; `target` is the queue, or the name of the subscription."""

    target: str
    id: int
    destination: str
    attempt: int
    text: str


Decide = Callable[[Delivered], bool | None]
"""True settles a delivery, False refuses it, None holds it and all after it."""


class Emp:
    """An EMP client on a blocking socket."""

    def __init__(self, port: int, decide: Decide | None = None) -> None:
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S)
        except OSError as error:
            raise HubLost(f"can't connect: {error}") from None
        self._connection = EmpConnection("client", time.monotonic())
        self._responses: dict[int, ResponseReceived] = {}
        self._targets: dict[int, str] = {}
        self._waiting: deque[RequestReceived] = deque()
        self.decide = decide
        self.delivered: list[Delivered] = []
        self._until(lambda: self._connection.state is State.OPEN, "handshake", _ANSWER_S)

    def close(self) -> None:
        self._socket.close()

    # Asking.

    def request(
        self, op: str, data: dict[str, Any], timeout_s: float = _ANSWER_S
    ) -> ResponseReceived:
        return self.requests(op, [data], timeout_s)[0]

    def requests(
        self, op: str, datas: Sequence[dict[str, Any]], timeout_s: float = _ANSWER_S
    ) -> list[ResponseReceived]:
        """All at once; the responses in order. Raises HubLost or Stuck."""
        numbers = [self._connection.send_request(op, msgspec.json.encode(data)) for data in datas]
        self._until(lambda: numbers[-1] in self._responses, op, timeout_s)
        return [self._responses.pop(number) for number in numbers]

    def send(self, op: str, datas: Sequence[dict[str, Any]]) -> None:
        """Ask without waiting for the responses."""
        for data in datas:
            self._connection.send_request(op, msgspec.json.encode(data))
        self._flush()

    def subscribe(self, targets: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Consume all these targets; gives those that were refused, with the reason."""
        responses = self.requests("$subscribe", list(targets.values()))
        refused = {}
        for target, response in zip(targets, responses, strict=True):
            if response.succeeded:
                number = json.loads(response.data)["subscription"]
                self._targets[number] = target
            else:
                refused[target] = f"{response.code}: {response.description}"
        return refused

    def pump(self, timeout_s: float) -> bool:
        """Send and receive what there is; waits for something to come up to that long."""
        self._decide_all()
        self._flush()
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        if not readable:
            return False
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise HubLost(f"the connection broke: {error}") from None
        if not data:
            raise HubLost("the hub closed the connection")
        self._connection.receive_data(data, time.monotonic())
        for event in self._connection.events():
            match event:
                case ResponseReceived():
                    self._responses[event.id] = event
                case RequestReceived():
                    self._waiting.append(event)
                case ConnectionClosed() | ConnectionFailed():
                    raise HubLost(f"the hub ended the connection: {event}")
        self._decide_all()
        self._flush()
        return True

    def _until(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        self._flush()
        ends = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > ends:
                raise Stuck(f"no answer to {what} within {timeout_s:g} s")
            self.pump(0.2)

    def _flush(self) -> None:
        chunks = self._connection.data_to_send()
        if chunks:
            try:
                self._socket.sendall(b"".join(chunks))
            except TimeoutError:
                raise Stuck("the hub does not read") from None
            except OSError as error:
                raise HubLost(f"the connection broke: {error}") from None

    # Deliveries.

    def _decide_all(self) -> None:
        """EMP wants answers in order: one that is held, or whose subscription is not known yet,
        holds those after it."""
        while self._waiting and self.decide is not None:
            delivered = self._read(self._waiting[0])
            decision = None if delivered is None else self.decide(delivered)
            if delivered is None or decision is None:
                return
            number = self._waiting.popleft().id
            self.delivered.append(delivered)
            if decision:
                self._connection.send_success(number, b"{}")
            else:
                self._connection.send_failure(number, "refused", "not now")

    def _read(self, request: RequestReceived) -> Delivered | None:
        data = json.loads(request.data)
        target = self._targets.get(data["subscription"])
        if target is None:
            return None
        text = data.get("text")
        if text is None:
            text = json.dumps({key: data[key] for key in ("json", "base64") if key in data})
        return Delivered(target, data["id"], data["destination"], data["attempt"], text)
