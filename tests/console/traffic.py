"""Users, queues and messages of the hub that the console is tested with."""

from __future__ import annotations

from typing import Any, Final

import crosswire
from crosswire.cli.hub import Api
from crosswire.testing import RunningHub

ADMINISTRATOR: Final = "the-token-of-the-administrator"
OBSERVER: Final = "the-token-of-the-observer"
SHOP: Final = "the-token-of-the-shop-program"

CONFIGURATION: Final = f"""
[[users]]
name = "admin"
token = "{ADMINISTRATOR}"
administer = true
produce = ["queue/#", "topic/#"]
consume = ["queue/#", "topic/#"]
call = ["service/#"]
serve = ["service/#"]

[[users]]
name = "watch"
token = "{OBSERVER}"
observe = true

[[users]]
name = "shop"
token = "{SHOP}"
produce = ["queue/shop/#"]
consume = ["queue/shop/#"]

[lake]
seal_s = 0.2

[lake.tap]
listeners = ["emp", "micromsg2"]

[limits.emp]
# A test that speaks EMP itself answers no ping, however busy the machine is.
ping_interval_s = 600

[queues.orders]
retry = {{ max_attempts = 1 }}

[queues.letters]
retry = {{ max_attempts = 1 }}
"""

HOSTILE: Final = (
    "<img src=x onerror=alert(1)>",
    "x" * 240,
    "\u202eevil\u200fשלום",
    "per%20cent?and#hash&amp;",
    "'\"><script>alert(2)</script>",
    "..",
)
"""Names that a console could stumble over. The hub itself refuses control characters in names."""

HOSTILE_TEXT: Final = "a\u0007bell\u001b[31m <b>bold</b> \u202eright to left"


def make_traffic(hub: RunningHub) -> None:
    """Messages by several protocols, some of which died, and hostile names."""
    api = Api(hub.url("http"), ADMINISTRATOR)
    with crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR) as client:
        for number in range(5):
            client.publish(
                "queue/orders", {"item": "tea", "number": number}, properties={"n": number}
            )
        _take(client, "queue/orders", 5, refused=(1, 3))
        client.publish("queue/shop/orders", {"item": "milk"}, properties={"customer": "anna"})
        client.publish("queue/backlog", "waiting text")
        client.publish("topic/prices", {"eur": 1.08})
        for number in range(3):
            client.publish("queue/letters", {"item": "tea", "price": "twelve", "number": number})
        _take(client, "queue/letters", 3, refused=(0, 1, 2))
    with crosswire.connect_sync(hub.url("micromsg2"), token=ADMINISTRATOR) as client:
        client.publish("queue/bridge", {"from": "micromsg2"})
    with crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR) as client:
        _take(client, "queue/bridge", 1)
    messages: list[dict[str, Any]] = [
        {"destination": f"queue/{name}", "text": HOSTILE_TEXT, "properties": {name: HOSTILE_TEXT}}
        for name in HOSTILE
    ]
    produced = api.post("/v1/messages", {"messages": messages})
    assert produced["refused"] == [], produced


def _take(client: Any, destination: str, number: int, refused: tuple[int, ...] = ()) -> None:
    """Settle so many messages, or refuse those with these indexes."""
    with client.subscribe(destination, window=number) as messages:
        for index in range(number):
            message = messages.receive(timeout_s=20)
            if index in refused:
                message.refuse("no price" if destination == "queue/letters" else "unknown item")
            else:
                message.settle()
