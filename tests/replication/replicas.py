"""Replicas in processes of their own on a log in PostgreSQL, and what stands in front of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from crosswire.commitlog.contract import RecordReader
from crosswire.commitlog.postgres.engine import postgres_log
from crosswire.commitlog.records import GroupAssembler, RecordChain, Takeover
from crosswire.config import StoreLimits
from crosswire.listeners import PLAIN_LISTENERS
from crosswire.store.rocks_replica import RocksReplica, content_digest
from tests.postgres.cluster import PASSWORD, ROLE, PostgresCluster

TAKEOVER_S: Final = 2.0
_WAIT_S: Final = 60.0
_LIMITS: Final = StoreLimits(spare_bytes=0)
_numbers: Final = count(1)
_NO_LAKE: Final = "messages = false\n"


def _lake_of(folder: Path) -> str:
    return f'directory = "{folder}"\nseal_s = 0.5\n'


def free_port() -> int:
    """One that is free now and later: none of those that the system gives to connections and to
    listeners without a port of their own."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first // 2, first)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ReplicaProcess:
    """`crosswire serve` as one replica. `listen` has the addresses of the listeners that are open,
    by what it printed last."""

    program: tuple[str, ...] = ("crosswire.cli.main",)
    """The module that is run, and arguments before `serve`."""

    def __init__(
        self, folder: Path, name: str, log: str, settings: str = "", lake: Path | None = None
    ) -> None:
        """Without a shared folder for it there is no lake."""
        self.name = name
        self.http_port = free_port()
        self.data = folder / name
        self.config = folder / f"{name}.toml"
        self.config.write_text(
            f'data = "{self.data}"\ndrain_s = 0.5\n'
            f"[lake]\nledger = false\n{_NO_LAKE if lake is None else _lake_of(lake)}"
            f"[store]\nbuffer_bytes = 1048576\nspare_bytes = 67108864\n"
            f'[replication]\nlog = "{log}"\nname = "{name}"\ntakeover_s = {TAKEOVER_S}\n'
            f'advertise = "http://127.0.0.1:{self.http_port}"\n{settings}'
        )
        self.process: asyncio.subprocess.Process | None = None
        self.listen: dict[str, str] = {}
        self.leads = False
        self.times_led = 0
        self.led_at = 0.0
        self.log = folder / f"{name}.log"
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it has printed its first line. Raises AssertionError with its words."""
        command = [sys.executable, "-m", *self.program, "serve", "--json"]
        command += ["--config", str(self.config)]
        # The address that others fetch checkpoints from has to be known before the start.
        ports = {**dict.fromkeys(PLAIN_LISTENERS, 0), "http": self.http_port}
        command += [f"--listen={name}=127.0.0.1:{port}" for name, port in ports.items()]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, self.words()
        self._take(line)
        self._reading = asyncio.ensure_future(self._read(self.process.stdout))

    def _take(self, line: bytes) -> None:
        printed: dict[str, Any] = json.loads(line)
        self.listen, self.leads = printed["listen"], printed["ready"]
        if self.leads:
            self.times_led += 1
            self.led_at = asyncio.get_running_loop().time()

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            self._take(line)
        self.leads = False

    def words(self) -> str:
        return self.log.read_text()[-4000:]

    def port(self, listener: str) -> int | None:
        address = self.listen.get(listener)
        return int(address.rpartition(":")[2]) if address else None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        assert self.process is not None
        if self.is_running:
            self.send(number)
        code = await asyncio.wait_for(self.process.wait(), _WAIT_S)
        self.leads = False
        if self._reading is not None:
            await self._reading
        return code

    async def ask(self, path: str, method: str = "GET", body: str = "") -> tuple[int, Any]:
        """Status and JSON of a request to its HTTP listener."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port("http"))
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}\r\n{body}".encode())
        answer = await reader.read()
        writer.close()
        status, _, rest = answer.partition(b"\r\n")
        content = rest.partition(b"\r\n\r\n")[2]
        with suppress(json.JSONDecodeError):
            return int(status.split()[1]), json.loads(content)
        return int(status.split()[1]), content.decode()


class ReplicaCluster:
    """Replicas on a log that `crosswire replication init` has made."""

    def __init__(
        self,
        postgres: PostgresCluster,
        folder: Path,
        *,
        size: int = 3,
        settings: str = "",
        lake: Path | None = None,
    ) -> None:
        self.postgres = postgres
        self.folder = folder
        self.schema = f"replicas_{os.getpid()}_{next(_numbers)}"
        passwords = folder / "passwords"
        passwords.write_text(f"*:*:*:{ROLE}:{PASSWORD}\n")
        passwords.chmod(0o600)
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in postgres.servers)
        self.url = f"postgresql://{ROLE}@{hosts}/postgres?schema={self.schema}&passfile={passwords}"
        self.replicas = [
            ReplicaProcess(folder, f"r{index}", self.url, settings, lake) for index in range(size)
        ]

    async def start(self) -> ReplicaProcess:
        """Make the log and start all; returns the one that leads."""
        await asyncio.to_thread(
            self.command, self.replicas[0], "init", "--as", "postgres", check=True
        )
        for each in self.replicas:
            await each.start()
        return await self.leader()

    def command(
        self, replica: ReplicaProcess, *arguments: str, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """`crosswire replication …` with a replica's configuration."""
        module = "tests.replication.small_partitions"
        program = [sys.executable, "-m", module, "replication", *arguments]
        done = subprocess.run(
            [*program, "--config", str(replica.config)], capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    async def leader(self, *, other_than: ReplicaProcess | None = None) -> ReplicaProcess:
        async with asyncio.timeout(_WAIT_S):
            while True:
                for each in self.replicas:
                    if each.leads and each is not other_than:
                        return each
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for each in self.replicas:
            if each.is_running:
                with suppress(ProcessLookupError):
                    each.send(signal.SIGCONT)
                await each.end(signal.SIGKILL)

    async def digests(self) -> dict[str, str]:
        """What is in each store, when it has all of the log. All processes have ended."""
        log = postgres_log(self.url)
        state = await log.open()
        # A takeover that is confirmed proves all before it: the last leader may have applied a
        # record that nothing stands on yet.
        chain = RecordChain(state.log_id, bytes(16), position=state.head)
        await log.append(chain.takeover(Takeover("comparison"), time.time_ns() // 1000))
        found: dict[str, str] = {}
        for each in self.replicas:
            store = RocksReplica(each.data / "store", _LIMITS)
            await catch_up(store, log.read(store.position), chain.position.number)
            found[each.name] = content_digest(store)
            store.close()
        await log.close()
        return found


async def catch_up(store: RocksReplica, reader: RecordReader, upto: int) -> None:
    """Apply what a replica would, but without anything else that it does."""
    assembler = GroupAssembler()
    while store.position.number < upto:
        for record in (await reader.next_page()).records:
            body = assembler.add(record)
            if body is not None:
                store.apply(body, record.position)
            elif not assembler.is_open:
                store.pass_over(record.position)


class Balancer:
    """Forwards connections to whichever replica leads, as a load balancer does that follows
    `/readyz`. `ports` are its own, by names of listeners."""

    def __init__(self, cluster: ReplicaCluster) -> None:
        self.ports: dict[str, int] = {}
        self._cluster = cluster
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for name in PLAIN_LISTENERS:
            server = await asyncio.start_server(self._accept(name), "127.0.0.1", 0)
            self._servers.append(server)
            self.ports[name] = server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, name: str) -> Any:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._forward(name, reader, writer)
            except (OSError, asyncio.CancelledError):
                pass  # one of both ends is gone: so is the other
            finally:
                self._tasks.discard(task)
                writer.close()

        return forward

    async def _forward(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        leader = next((each for each in self._cluster.replicas if each.leads), None)
        port = None if leader is None else leader.port(name)
        if port is None:
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            copies = {
                asyncio.ensure_future(_copy(reader, inner_writer)),
                asyncio.ensure_future(_copy(inner_reader, writer)),
            }
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in copies:
                    each.cancel()
                await asyncio.wait(copies)
        finally:
            inner_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
