"""A real hub for tests from end to end, in this process or as a program, on the product's loop."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.cli.conftest import start_hub
from tests.gateways.conftest import server, start_server

__all__ = ["server", "start_hub", "start_server"]


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
