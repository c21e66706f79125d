"""Connections that stay open, services, named subscriptions and schedules for the console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import crosswire
from crosswire.cli.hub import Api
from crosswire.errors import ProviderFailed, RequestFailed
from crosswire.testing import RunningHub
from tests.console.traffic import ADMINISTRATOR, HOSTILE, SHOP

# A `#` or a `+` has a meaning in names of topics.
TOPICS: Final = tuple(name for name in HOSTILE if not set(name) & set("#+"))


@contextmanager
def flowing(hub: RunningHub) -> Iterator[Api]:
    """Traffic that goes on while tests run; gives the API, as the administrator."""
    api = Api(hub.url("http"), ADMINISTRATOR)
    with (
        crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR) as server,
        crosswire.connect_sync(hub.url("emp"), token=SHOP) as shop,
        server.serve("service/sums", _add),
        server.serve(f"service/{HOSTILE[0]}", _add),
        server.subscribe("topic/prices", name="live", window=10),
        shop.subscribe("queue/shop/nothing", window=1),
    ):
        with crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR) as client:
            for number in range(4):
                client.call("service/sums", {"a": number, "b": 1})
            with suppress(ProviderFailed):
                client.call("service/sums", {})
            for name in ("audit", "parked", HOSTILE[0]):
                client.subscribe("topic/prices", name=name, window=1).close()
            for number in range(3):
                client.publish("topic/prices", {"eur": number})
        for name in TOPICS:
            api.post("/v1/messages", {"messages": [{"destination": f"topic/{name}", "text": "1"}]})
        for name in ("nightly", HOSTILE[1], HOSTILE[4]):
            schedule = {"id": name, "destination": "queue/reports", "text": "run"}
            api.post("/v1/schedules", {**schedule, "cron": "0 3 * * *"})
        yield api


def _add(message: Any) -> dict[str, int]:
    given = message.json()
    if not given:
        raise RequestFailed("no_numbers", "there is nothing to add")
    return {"sum": sum(given.values())}
