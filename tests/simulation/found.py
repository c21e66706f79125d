"""Bugs that seeds have found: their fixes as wrong edits, taken back, and the shortest plans.

A seed means something else when the simulation changes. So each of these is run twice: it keeps all
invariants, and with the bug it does not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from crosswire.client.adapters.relink import _RelinkFeed
from crosswire.gateways.context import GatewayContext
from crosswire.hub.cursor import Cursor
from crosswire.hub.intake import Intake
from crosswire.server.lake_feed import LakeFeed
from crosswire.server.replica import Replica
from crosswire.server.server import Server
from crosswire.testing.simulation.faults import Fault
from tests.simulation.bugs import PlantedBug

__all__ = ["FOUND", "FoundBug"]


class FoundBug(NamedTuple):
    """A bug that is fixed, and a seed with a plan of faults that shows it."""

    bug: PlantedBug
    seed: int
    plan: list[Fault]


FOUND: Final = [
    FoundBug(
        PlantedBug(
            "a consumer over Relink waits for room while its link has ended",
            "What is too much waits in the link.",
            _RelinkFeed,
            "_read",
            "await client.unless_ended(self._owner.room())",
            "await self._owner.room()",
        ),
        19,
        [Fault("power cut", 3.0, 0.4, 0.35)],
    ),
    FoundBug(
        PlantedBug(
            "a lake begins with a gap of ids that nobody had",
            "Ids up to here are missing.",
            LakeFeed,
            "_begin",
            'if "messages" in self._tables and last_row:',
            'if "messages" in self._tables:',
        ),
        5,
        [Fault("kill", 0.0015, 0.5, 0.1)],
    ),
    FoundBug(
        PlantedBug(
            "a replica fetches a checkpoint from itself",
            "The leader has all.",
            Replica,
            "_fetch",
            " and each.name != self.name",
            "",
        ),
        42,
        [
            Fault("damage at rest", 4.0, 1.1, 0.95),
            Fault("damage at rest", 9.0, 1.1, 0.95),
            Fault("hand-over", 12.0, 0.5, 0.9),
        ],
    ),
    FoundBug(
        PlantedBug(
            "a term that is over waits for its last commit",
            "What is collected is committed before the hub ends.",
            Server,
            "_stop_hub",
            "elif not is_over:",
            "else:",
        ),
        6,
        [Fault("log cut off", 3.0, 4.0, 0.2168), Fault("hand-over", 3.5, 0.35, 0.94)],
    ),
    FoundBug(
        PlantedBug(
            "attempts of settled messages are kept after a restart",
            "They are read with the message.",
            Cursor,
            "_apply",
            "                self.refused_later.pop(identifier, None)\n",
            "",
        ),
        55,
        [Fault("kill", at, 0.3, 0.5) for at in (5.0, 9.0, 13.0)],
    ),
    FoundBug(
        PlantedBug(
            "links of a term that is over keep its hub in memory",
            "Accounts are closed when links are forgotten.",
            GatewayContext,
            "end",
            "    for release in self.on_ended:\n        release()\n",
            "",
        ),
        9,
        [Fault("log outage", 6.0, 8.0, 0.23)],
    ),
    FoundBug(
        PlantedBug(
            "peers are disconnected while no ids can be reserved",
            "There are always ids.",
            Intake,
            "produce",
            "except StoreError as error:",
            "except NameError as error:",
        ),
        8,
        [Fault("write error", 2.0, 6.0, 0.9)],
    ),
    FoundBug(
        PlantedBug(
            "a dead letter is stuck while no ids can be reserved",
            "It gets its id as all messages do.",
            Intake,
            "inject",
            "self._store.reserve_in_group(1)",
            "self._store.reserve(1)",
        ),
        8,
        [Fault("write error", 2.0, 6.0, 0.9)],
    ),
]
