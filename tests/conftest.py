"""Fixtures that tests of several parts use, and how tests are shared out to processes."""

from __future__ import annotations

import gc
import logging
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.environment import prepare_environment

pytest_plugins = ["crosswire.testing.pytest_plugin"]

# Before pytest, or a test, starts another process.
prepare_environment()

settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("suite")

EXAMPLES: Final = {"few": 0.1, "usual": 0.5, "many": 20.0}
"""How many examples of properties are tried, as a multiple of what each test asks for."""

WITH_SPARK: Final = frozenset(
    path.relative_to(Path(__file__).parent.parent).as_posix()
    for path in (Path(__file__).parent / "pipeline").rglob("test_*.py")
    if re.search(r"\b(spark|from_tap|from_pcap|hub_lake): (SparkSession|Made)\b", path.read_text())
)
"""Files whose tests share the session of tests/pipeline/conftest.py, as the arguments of their
functions show: the process that shares the tests out has not imported them."""

SLOW: Final = (
    "tests/adversary/",
    "tests/cli/",
    "tests/client/test_",
    "tests/commitlog/test_contract.py",
    "tests/commitlog/test_postgres.py",
    "tests/console/",
    "tests/e2e/",
    "tests/gateways/test_relink_crash.py",
    "tests/interop/",
    "tests/lake/test_crash.py",
    "tests/pipeline/",
    "tests/replication/",
    "tests/server/",
    "tests/simulation/",
    "tests/store/test_crash.py",
    "tests/store/test_damage_",
    "tests/store/test_reserve.py",
    "tests/docs/test_site.py",
    "tests/test_declared.py",
    "tests/test_package.py",
    "tests/web/",
)
"""Where tests start programs, servers or Spark, or compile kernels; others are quick unless they
are marked."""


LEFT_OUT: Final = ("alone", "slow", "spark")
"""What is not fast, and so left out with `--fast`."""


def _is_slow(file: str) -> bool:
    """Whether all tests of a file are."""
    return file in WITH_SPARK or file.startswith(SLOW)


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Shares the files out to processes; those with Spark all go to one, which starts it once, and
    so do those with a browser."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith("tests/console/"):
            return "console"
        return "Spark" if file in WITH_SPARK else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    # In the order below, not by how many tests a file has.
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", choices=EXAMPLES, default="usual", help="of each property")
    parser.addoption("--fast", action="store_true", help="leave out tests that are slow")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are collected, all of which stay: Python's garbage collector would search
    them again and again, in vain, now and while they run. That takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """What was frozen is collected at the end: some libraries report everything else as a leak."""
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules without a test that is wanted are not even imported: that takes as long as other
    tests do. Those are modules with slow tests only and, where tests that run alone are asked for,
    the many without the mark."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    if path == ".":
        return None
    is_module = path.endswith(".py")
    if config.getoption("--fast") and _is_slow(path if is_module else f"{path}/"):
        return True
    if is_module and config.getoption("markexpr").startswith("alone"):
        return "mark.alone" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what can be seen, before tests are selected by marks. What takes longest begins first:
    tests on Spark, then slow ones."""
    for item in items:
        file = item.nodeid.split("::")[0]
        if "spark" in getattr(item, "fixturenames", ()) and file not in WITH_SPARK:
            raise pytest.UsageError(f"{item.nodeid} would start a Spark of its own: see WITH_SPARK")
        if _is_slow(file):
            item.add_marker("spark" if file in WITH_SPARK else "slow")
    if config.getoption("--fast"):
        marked = {item for item in items if any(map(item.get_closest_marker, LEFT_OUT))}
        config.hook.pytest_deselected(items=[item for item in items if item in marked])
        items[:] = [item for item in items if item not in marked]
    factor = EXAMPLES[config.getoption("--examples")]
    if factor != 1.0:
        _multiply_examples(items, factor)
    items.sort(key=lambda item: [not item.get_closest_marker(name) for name in ("spark", "slow")])


def _multiply_examples(items: list[pytest.Item], factor: float) -> None:
    """Hypothesis has no setting for it: a number that a test states overrides a profile's."""
    owners = {}
    for item in items:
        test = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)
        owners[id(test)] = (test, "_hypothesis_internal_use_settings")
        machine = getattr(item, "cls", None)
        owners[id(machine)] = (machine, "settings")
    for owner, name in owners.values():
        chosen = getattr(owner, name, None)
        if isinstance(chosen, settings):
            count = max(1, round(chosen.max_examples * factor))
            setattr(owner, name, settings(chosen, max_examples=count))


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
