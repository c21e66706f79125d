"""The files in deploy/: their tools accept them, and they agree with the program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosswire.config import Config, check
from crosswire.listeners import LISTENERS

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "crosswire.service"
INSTALLED = "/opt/crosswire/bin/crosswire"
MOST_EXPOSURE = 1.5
"""On systemd's scale from 0 (safe) to 10; its word for this is OK, and for an unhardened service
(9.6) UNSAFE."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)


def compose() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return made


# systemd.


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With the program of this environment: systemd looks whether it is there."""
    text = UNIT.read_text()
    assert INSTALLED in text
    program = Path(sys.executable).parent / "crosswire"
    (tmp_path / UNIT.name).write_text(text.replace(INSTALLED, str(program)))
    return tmp_path / UNIT.name


@needs_systemd
def test_systemd_accepts_the_unit(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_unit_is_hardened(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSURE


def test_systemd_waits_longer_than_the_hub_drains() -> None:
    assert "TimeoutStopSec=1min" in UNIT.read_text() and Config().drain_s < 60


# Containers. Images are not built here: that needs a daemon and a registry.

INSTRUCTIONS = {
    *("CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL"),
    *("USER", "VOLUME"),
}


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions and their arguments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(name, rest) for name, rest in pairs]


def test_the_dockerfile_has_known_instructions() -> None:
    assert {name for name, _ in dockerfile()} <= INSTRUCTIONS
    assert dockerfile()[0][0] == "FROM"


def test_the_dockerfile_exposes_every_listener() -> None:
    (exposed,) = (rest for name, rest in dockerfile() if name == "EXPOSE")
    assert sorted(map(int, exposed.split())) == sorted(LISTENERS.values())


def test_the_dockerfile_starts_the_program_as_a_user() -> None:
    last = dict(dockerfile())
    assert json.loads(last["ENTRYPOINT"]) == ["crosswire"]
    assert json.loads(last["CMD"])[0] == "serve"
    assert last["USER"] == "crosswire"
    code = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])[-1]
    assert f"127.0.0.1:{LISTENERS['http']}/readyz" in code
    compile(code, "HEALTHCHECK", "exec")


@pytest.mark.skipif(
    subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0
    if shutil.which("docker")
    else True,
    reason="docker compose is not installed",
)
def test_compose_accepts_its_file() -> None:
    command = ["docker", "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_mounts_files_that_are_there() -> None:
    mounted = [
        volume.split(":")[0]
        for service in compose()["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert mounted
    assert all((DEPLOY / path).is_file() for path in mounted)


def test_compose_publishes_ports_of_listeners_on_loopback() -> None:
    for port in compose()["services"]["hub"]["ports"]:
        address, outside, inside = port.split(":")
        assert address == "127.0.0.1" and outside == inside
        first, _, last = inside.partition("-")
        assert set(LISTENERS.values()) & set(range(int(first), int(last or first) + 1))


def test_the_containers_configuration_has_no_mistakes(tmp_path: Path) -> None:
    text = (DEPLOY / "crosswire.toml").read_text()
    secrets = re.findall(r"/run/secrets/([\w-]+)", text)
    assert set(secrets) == set(compose()["secrets"])
    assert set(secrets) == set(compose()["services"]["hub"]["secrets"])
    for name in secrets:
        (tmp_path / name).write_text(f"a long secret: {name}\n")
    config, mistakes = check(text.replace("/run/secrets", str(tmp_path)))
    assert mistakes == [] and config is not None
    assert {user.name for user in config.users} == {"operator", "monitoring"}


# Prometheus.


def test_prometheus_scrapes_the_hub_of_the_compose_file() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    ((target,),) = (each["targets"] for each in job["static_configs"])
    host, _, port = target.partition(":")
    assert host in compose()["services"] and int(port) == LISTENERS["http"]
    config, _ = check('[http]\nhosts = ["hub"]\n')
    assert config is not None and host in config.http.hosts
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in compose()["services"]["prometheus"]["secrets"]
