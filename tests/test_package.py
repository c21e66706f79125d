"""The wheel in an empty environment: hub, command line and client work with what it declares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = ("spark", "curve", "postgresql")
CLEAN = {"PATH": "/usr/bin:/bin"}

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

IMPORTS = {
    "spark": "import crosswire.pipeline.batch, pyspark_crosswire",
    "curve": "from crosswire.wire.zmtp.curve import CurveServer, public_key_of as p; p(bytes(32))",
    "postgresql": "import crosswire.commitlog.postgres.engine",
}
"""What an installation with an extra can do beyond one without."""


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-2000:]
    return done  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


def installed(folder: Path, what: str | Path) -> Path:
    """The Python of a new environment with nothing else in it."""
    # Our own pip does for both: another one takes longer to install than all the rest.
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", what)
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("bare"), wheel)


def test_hub_clients_and_commands(python: Path, tmp_path: Path) -> None:
    # Without the sources on the path, and elsewhere than in the repository.
    clean = {"cwd": tmp_path, "env": CLEAN}
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


def test_the_demo_without_spark(python: Path, tmp_path: Path) -> None:
    command = (python.parent / "crosswire", "demo", "--no-pipeline", "--seconds", "1", "--json")
    outcome = json.loads(run(*command, cwd=tmp_path, env=CLEAN).stdout)
    assert outcome["lost"] == 0 and outcome["acknowledged"] > 0


@pytest.mark.long
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = installed(tmp_path, f"{wheel}[{extra}]")
    run(python, "-c", IMPORTS[extra], cwd=tmp_path, env=CLEAN)


# What is in it.


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_describes_itself(wheel: Path) -> None:
    described = metadata(wheel)
    assert described["Author"] and described["Keywords"] and described["License-Expression"]
    assert "Typing :: Typed" in (described.get_all("Classifier") or [])
    with zipfile.ZipFile(wheel) as archive:
        assert {"crosswire/py.typed", "pyspark_crosswire/__init__.py"} <= set(archive.namelist())


def test_the_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    description = str(metadata(wheel).get_payload())
    assert "A message hub" in description
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    assert "<!--" not in description


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = util.spec_from_file_location("hatch_build", ROOT / "scripts" / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_absolute_where_the_address_is_known(hook: ModuleType) -> None:
    text = "<!-- hub -->\n![P](docs/p.svg) [a](docs/a.md) [b](https://b.example/) [c](#c)\n"
    assert hook.long_description(text, None) == " a [b](https://b.example/) [c](#c)\n"
    known = hook.long_description(text, "https://x.example/main")
    assert "![P](https://x.example/main/docs/p.svg) [a](https://x.example/main/docs/a.md)" in known


def test_every_extra_of_the_package_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*EXTRAS, "bench", "dev"} == project["optional-dependencies"].keys()
