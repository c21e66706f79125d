"""One user creates all that it can: it is refused at its share, and others are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import crosswire
from crosswire.cli.hub import Api
from crosswire.errors import DestinationFull, RequestFailed
from tests.adversary.harness import TOKEN, USERS, Target, running

pytestmark = pytest.mark.alone

OTHER = "the-secret-of-anna"
SETTINGS = f"""
[store]
destinations = 800
[limits]
subscriptions = 40
schedules = 40
{USERS}
[[users]]
name = "anna"
token = "{OTHER}"
produce = ["queue/anna/#", "topic/anna/#"]
consume = ["queue/anna/#", "topic/anna/#"]
"""
EACH = 200
FEW = 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("shared"), SETTINGS, TOKEN) as target:
        yield target


def test_destinations(shared: Target) -> None:
    """In each of these protocols the next one is refused, and another user creates one."""

    def create_all() -> None:
        with crosswire.connect_sync(f"emp://127.0.0.1:{shared.port('emp')}", token=TOKEN) as peer:
            for number in range(EACH):
                peer.publish(f"queue/mallory/{number}", "x")

    cost = shared.cost_of(create_all)
    assert cost.worst_s < 1.0
    for protocol in ("emp", "epoxy", "micromsg2"):
        url = f"{protocol}://127.0.0.1:{shared.port(protocol)}"
        with crosswire.connect_sync(url, token=TOKEN) as peer:
            peer.publish("queue/mallory/0", "still")
            with pytest.raises(DestinationFull):
                peer.publish("queue/mallory/more", "x")
        with crosswire.connect_sync(url, token=OTHER) as peer:
            peer.publish(f"queue/anna/{protocol}", "x")
    message = {"destination": "queue/mallory/more", "text": "x"}
    with pytest.raises(RequestFailed, match="of one user"):
        Api(shared.url, TOKEN).post("/v1/messages", {"messages": [message]})


def create(peer: crosswire.SyncClient, kind: str, user: str, number: int) -> None:
    if kind == "schedule":
        peer.schedule(f"queue/{user}/0", "x", interval_s=1000.0, nohaste=True)
    else:
        peer.subscribe(f"topic/{user}/t", name=f"{user}-{number}").close()


@pytest.mark.parametrize("kind", ["schedule", "subscription"])
def test_schedules_and_named_subscriptions(shared: Target, kind: str) -> None:
    url = f"emp://127.0.0.1:{shared.port('emp')}"
    with crosswire.connect_sync(url, token=TOKEN) as peer:
        for number in range(FEW):
            create(peer, kind, "mallory", number)
        with pytest.raises(DestinationFull):
            create(peer, kind, "mallory", FEW)
    with crosswire.connect_sync(url, token=OTHER) as peer:
        create(peer, kind, "anna", 0)
