"""A shell in which the commands of a page run one after the other, as a reader would type them.

It has a folder and, where the system allows it, a network of its own: commands use a hub's default
ports, and other tests may do so too.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, Self

from tests.docs.pages import ROOT

__all__ = ["Terminal"]

WAIT_S: Final = 300.0
_END: Final = "--- end of command"
_ISOLATED: Final = ["unshare", "--map-root-user", "--net", "--"]


def _can_isolate() -> bool:
    try:
        return subprocess.run([*_ISOLATED, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Terminal:
    """Enter it with `with`; everything that it started ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": "100",
            "SPARK_CONF_DIR": str(Path(__file__).with_name("spark")),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        isolated = _ISOLATED if _can_isolate() else []
        script = "python -m tests.docs.loopback && exec bash" if isolated else "exec bash"
        self._shell = subprocess.Popen(
            [*isolated, "bash", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._background = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.close()
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        self._shell.stdout.close()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line)

    def run(self, command: str) -> tuple[int, str]:
        """The exit code of a command, and what it printed on both outputs."""
        # In braces, so that assignments and `cd` hold; it reads nothing of what comes next.
        self._type(f"{{ {command}\n}} </dev/null 2>&1\n_code=$?; echo; echo '{_END}' $_code")
        deadline, printed = time.monotonic() + WAIT_S, ""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"it did not end: {command}\n{printed}") from None
            if line.startswith(_END):
                return int(line.split()[-1]), printed.removesuffix("\n")
            printed += line

    def start(self, command: str, until: str) -> None:
        """Leave a command running in the background, once it has printed a text."""
        self._background += 1
        output = self.folder / f".background-{self._background}"
        output.touch()
        self._type(f"{{ {command}\n}} </dev/null >'{output}' 2>&1 &")
        deadline = time.monotonic() + WAIT_S
        while until not in output.read_text():
            assert time.monotonic() < deadline, f"{command}: {output.read_text()}"
            time.sleep(0.02)

    def _type(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(text + "\n")
        self._shell.stdin.flush()
