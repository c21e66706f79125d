"""The OpenAPI document holds: requests made from it, valid and invalid, get what it describes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from crosswire.config import LISTENERS, Config
from crosswire.server.server import Server
from crosswire.web.listener import WebListener
from crosswire.web.openapi import openapi
from tests.conftest import EXAMPLES

if TYPE_CHECKING:
    from schemathesis import Case

STREAMS = {"watch_events", "tail", "watch_frames"}
OTHERS = {"stage", "read_log", "read_log_files", "create_checkpoint", "create_analysis"}
"""Their bodies or responses are no JSON, they copy the store, or they start a process: tested on
their own."""

OPERATIONS = [
    f"{method.upper()} {path}"
    for path, methods in openapi()["paths"].items()
    for method, described in methods.items()
    if described["operationId"] not in STREAMS | OTHERS
]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A hub with some of everything, in a thread of its own."""
    folder: Path = tmp_path_factory.mktemp("schema")
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        listen = dict.fromkeys(LISTENERS, "off") | {"http": "127.0.0.1:0"}
        config = Config(data=str(folder / "data"), listen=listen, drain_s=0.2)
        server = Server(config, http=WebListener)
        await server.start()
        found["stop"], found["loop"] = asyncio.Event(), asyncio.get_running_loop()
        found["port"] = server.listeners["http"].address.port
        ready.set()
        await found["stop"].wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{found['port']}"
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join()


@pytest.fixture(scope="module")
def tests_by_name(request: pytest.FixtureRequest) -> dict[str, Callable[..., None]]:
    """For each operation, a test with requests of its own.

    Schemathesis' plugin for pytest would make them whenever tests are collected, in each process
    and for each run of any test, which takes seconds.
    """
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation.feedback import FeedbackSources
    from schemathesis.openapi import from_dict
    from schemathesis.pytest._test_builder import build_operation_test
    from schemathesis.python._constants.orchestrator import make_constants_value_source
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

    @settings(
        max_examples=max(1, round(8 * EXAMPLES[request.config.getoption("--examples")])),
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    def check(case: Case, base_url: str) -> None:
        checks = [
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            negative_data_rejection,
        ]
        # `/v1/queues/orders/purge` is a queue's name, too, for other methods.
        if not case.path.startswith(("/v1/queues/{name}/", "/v1/schedules/{id}/")):
            checks.append(unsupported_method)
        case.call_and_validate(base_url=base_url, checks=checks)

    schema = from_dict(openapi())
    feedback = FeedbackSources(constants_value_source=make_constants_value_source(schema))
    operations = (found.ok() for found in schema.get_all_operations())
    return {
        operation.label: build_operation_test(
            config=schema.config,
            operation=operation,
            test_func=check,
            given_kwargs={},
            feedback=feedback,
        )
        for operation in operations
        if operation.label in OPERATIONS
    }


@pytest.mark.hypothesis
@pytest.mark.parametrize("operation", OPERATIONS)
def test_requests_get_what_the_document_describes(
    tests_by_name: dict[str, Callable[..., None]], operation: str, base_url: str
) -> None:
    tests_by_name[operation](base_url=base_url)
