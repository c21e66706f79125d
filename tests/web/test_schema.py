"""The OpenAPI document holds: requests made from it, valid and invalid, get what it describes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from crosswire.config import LISTENERS, Config
from crosswire.server.server import Server
from crosswire.web.listener import WebListener
from crosswire.web.openapi import openapi

STREAMS = {"watch_events", "tail", "watch_frames"}
OTHERS = {"stage", "read_log", "create_checkpoint", "create_analysis"}
"""Their bodies or responses are no JSON, they copy the store, or they start a process: tested on
their own."""


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


schema = schemathesis.openapi.from_dict(openapi()).exclude(
    func=lambda context: context.operation.definition.raw["operationId"] in STREAMS | OTHERS
)


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_requests_get_what_the_document_describes(case: schemathesis.Case, base_url: str) -> None:
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
