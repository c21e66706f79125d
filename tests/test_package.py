"""The wheel in an empty environment: hub, command line and client work with what it declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROGRAM = """
import sys
import crosswire
from crosswire.testing import running_hub

assert "site-packages" in crosswire.__file__, crosswire.__file__
with running_hub() as hub, crosswire.connect_sync(hub.url("emp")) as client:
    client.publish("queue/q", {"n": 1})
    print(hub.port("emp"))
    sys.stdout.flush()
    sys.stdin.readline()
    assert client.subscribe("queue/q").receive(10).json() == {"n": 2}
"""


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-2000:]
    return done  # type: ignore[no-any-return]


def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel)
    # Without the sources on the path, and elsewhere than in the repository.
    clean = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin"}}
    hub = subprocess.Popen(
        [python, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **clean
    )
    assert hub.stdin is not None and hub.stdout is not None
    port = hub.stdout.readline().strip()
    crosswire = python.parent / "crosswire"
    got = run(crosswire, "sub", "queue/q", "--port", port, "--count", "1", "--raw", **clean)
    assert got.stdout == '{"n":1}\n'
    run(crosswire, "pub", "queue/q", '{"n": 2}', "--port", port, **clean)
    hub.communicate("\n", timeout=60)
    assert hub.returncode == 0
