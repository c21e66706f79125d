"""A hub started for a benchmark or an example, in a temporary directory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from crosswire.errors import ClientError
from crosswire.listeners import PLAIN_LISTENERS

__all__ = ["StartedHub", "started_hub"]

_LAKE_S: Final = 60.0
_LOOK_S: Final = 0.1


class StartedHub(msgspec.Struct, frozen=True):
    """A running hub process; `ports` are those of its listeners, by name, `data` is its folder."""

    pid: int
    ports: dict[str, int]
    data: str

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, and of the processes that it has started: the lake's
        encoder is one."""
        threads = list(Path(f"/proc/{self.pid}/task").iterdir())
        children = {child for each in threads for child in (each / "children").read_text().split()}
        for child in children:
            threads += Path(f"/proc/{child}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9

    def wait_for_lake(self) -> None:
        """Returns when the lake has every row of the ledger, and its encoder no work left: it seals
        what it has every few seconds. Raises ClientError if that takes too long."""
        # Only here: the lake needs Arrow, and the mark RocksDB.
        from crosswire.lake.files import find_all
        from crosswire.store.rocks import MARK, MarkFile

        mark, lake = MarkFile(Path(self.data, "store", MARK)), Path(self.data, "lake")
        ends = time.monotonic() + _LAKE_S
        before = 0
        while time.monotonic() < ends:
            written = mark.load()
            rows = 0 if written is None else written.next_row - 1
            sealed = max((file.last for file in find_all(lake, ("ledger",))), default=0)
            # Twice the same: what consumers settled last is committed a moment later.
            if rows == sealed == before:
                return
            before = sealed
            time.sleep(_LOOK_S)
        raise ClientError(f"the lake has not all rows of the ledger after {_LAKE_S:g} s")

    def memory_bytes(self) -> int:
        """Its private memory, without pages shared with files. Raises ClientError if unknown."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) * 1024
        raise ClientError("this system does not report how much memory a process uses")


@contextmanager
def started_hub(*listeners: str, config: str = "") -> Iterator[StartedHub]:
    """Start a hub with these listeners on free ports; it ends with the block.

    `config` is the text of its configuration. Raises ClientError if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="crosswire-bench-") as folder:
        file = Path(folder, "crosswire.toml")
        file.write_text(config)
        command = [sys.executable, "-m", "crosswire.cli.main", "serve", "--json"]
        command += ["--config", str(file), "--data", str(Path(folder, "data"))]
        for name in PLAIN_LISTENERS:
            command += ["--listen", f"{name}={'127.0.0.1:0' if name in listeners else 'off'}"]
        with _process(command) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ClientError("the hub did not start")
            listen = msgspec.json.decode(line)["listen"]
            ports = {name: int(at.rpartition(":")[2]) for name, at in listen.items()}
            yield StartedHub(process.pid, ports, str(Path(folder, "data")))


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()
