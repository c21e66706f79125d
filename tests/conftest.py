"""Fixtures that tests of several parts use, and how tests are shared out to processes."""

from __future__ import annotations

import logging
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["crosswire.testing.pytest_plugin"]

settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("suite")

WITH_SPARK: Final = frozenset(
    path.relative_to(Path(__file__).parent.parent).as_posix()
    for path in (Path(__file__).parent / "pipeline").rglob("test_*.py")
    if "SparkSession" in path.read_text()
)
"""Files whose tests share the session of tests/pipeline/conftest.py."""


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Shares the files out to processes; those with Spark all go to one, which starts it once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "Spark" if file in WITH_SPARK else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    # In the order below, not by how many tests a file has.
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first."""
    items.sort(key=lambda item: item.nodeid.split("::")[0] not in WITH_SPARK)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long bytes are named by their argument; made of a time or at random, each process that runs
    tests would give the same test another name.
    """
    return argname if isinstance(val, bytes) and len(val) > 40 else None


GUARDED: Final = frozenset(
    {
        "answer",
        "broken",
        "cancel",
        "close",
        "commit listener",
        "consumers",
        "delivery",
        "dispatch",
        "filter",
        "metrics",
        "notice",
        "publish",
        "receipt",
        "release",
        "request",
        "watcher",
        "write",
    }
)
"""Kinds of callbacks that the hub runs on behalf of others."""


class _Failures(logging.Handler):
    """The kinds of callbacks that raised."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.kinds: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("callback failed") and isinstance(record.args, tuple):
            self.kinds += [str(kind) for kind in record.args if kind in GUARDED]


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """A hub in a test closes new files of the whole process to others, for later tests too."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def long_turns() -> Iterator[None]:
    """A hub in a test does all that it is asked to at once, however slow the machine is; hubs in
    processes of their own take turns as always."""
    turns = sys.modules.get("crosswire.hub.turns")
    if turns is None:
        yield
        return
    before, turns.TURN_S = turns.TURN_S, 60.0
    yield
    turns.TURN_S = before


@pytest.fixture(autouse=True)
def no_callback_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """The hub goes on when a receiver raises, so what a test asserts in one would not be noticed;
    nor would a fault of ours. Tests in which one is to raise have the mark `failing_callbacks`."""
    failures = _Failures()
    logger = logging.getLogger("crosswire.hub")
    logger.addHandler(failures)
    yield
    logger.removeHandler(failures)
    if request.node.get_closest_marker("failing_callbacks") is None:
        assert not failures.kinds, "a callback of the hub raised: see the log"


class TlsPair(NamedTuple):
    """Contexts of a server with a certificate and of a client that trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    key: Path
    certificate: Path


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsPair:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*make.split(), "-keyout", key, "-out", certificate, *names],
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return TlsPair(server, ssl.create_default_context(cafile=certificate), key, certificate)
