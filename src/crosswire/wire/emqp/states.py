"""Who stands where in eMQP, and what each may say and hear in which state."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from crosswire.wire.contract import Frame
from crosswire.wire.emqp.frames import (
    Ack,
    Admin,
    DeliveryFrame,
    Disconnect,
    Heartbeat,
    Inform,
    Kbai,
    Publish,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
)

__all__ = [
    "KNOWN_STATES",
    "LISTENERS",
    "NOTHING",
    "RECEIVES",
    "REGISTERS",
    "ROLES",
    "SENDS",
    "SOCKETS",
    "State",
]

ROLES: Final = ("client", "worker", "scheduler", "publisher", "subscriber", "admin", "broker")

LISTENERS: Final = {
    "emqp-clients": 47291,
    "emqp-workers": 47290,
    "emqp-admin": 47293,
    "emqp-publishers": 47298,
    "emqp-subscribers": 47299,
}
"""The broker's doors. Schedulers come to the clients' door; clients may publish there too."""


SOCKETS: Final = {
    **dict.fromkeys(LISTENERS, "ROUTER"),
    **dict.fromkeys(ROLES, "DEALER"),
    "emqp-subscribers": "PUB",
    "subscriber": "SUB",
}


REGISTERS: Final = {"emqp-clients": "scheduler", "emqp-workers": "worker"}
"""Who introduces itself at which door."""


class State(Enum):
    """`informed`: INFORM was sent or received, and ACK not yet. `leaving`: one side said KBAI."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    INFORMED = "informed"
    REGISTERED = "registered"
    LEAVING = "leaving"
    CLOSED = "closed"


Table = dict[tuple[str, State], frozenset[type[Frame]]]
_FAREWELL: Final = (Heartbeat, Kbai, Disconnect)
_FROM_CLIENTS: Final = (Request, Publish, ScheduleFrame, UnscheduleFrame, Inform, *_FAREWELL)


def _table(*rows: tuple[str, Iterable[State], Iterable[type[Frame]]]) -> Table:
    return {(seat, state): frozenset(kinds) for seat, states, kinds in rows for state in states}


KNOWN_STATES: Final = (State.INFORMED, State.REGISTERED)

RECEIVES: Final = _table(
    # The broker, by door.
    ("emqp-clients", (State.OPEN, *KNOWN_STATES), _FROM_CLIENTS),
    ("emqp-clients", (State.LEAVING,), (Inform, *_FAREWELL)),
    ("emqp-workers", (State.OPEN,), (Inform, Kbai, Disconnect)),
    ("emqp-workers", KNOWN_STATES, (Inform, Ready, Reply, *_FAREWELL)),
    ("emqp-workers", (State.LEAVING,), (Reply, Inform, *_FAREWELL)),
    ("emqp-admin", (State.OPEN,), (Admin, *_FAREWELL)),
    ("emqp-publishers", (State.OPEN,), (Publish, *_FAREWELL)),
    # Those who come to it, by role.
    ("client", (State.OPEN, State.LEAVING), (Reply, Ack, *_FAREWELL)),
    ("worker", (State.INFORMED,), (Ack, *_FAREWELL)),
    ("worker", (State.REGISTERED, State.LEAVING), (Ack, Request, *_FAREWELL)),
    ("scheduler", (State.INFORMED,), (Ack, *_FAREWELL)),
    ("scheduler", (State.REGISTERED,), (Ack, ScheduleFrame, UnscheduleFrame, Reply, *_FAREWELL)),
    ("publisher", (State.OPEN,), (Ack, *_FAREWELL)),
    ("admin", (State.OPEN,), (Ack, Reply, *_FAREWELL)),
    ("subscriber", (State.OPEN,), (DeliveryFrame,)),
)
"""What has an effect when it is received. Whatever is not in here is ignored and counted."""

SENDS: Final = _table(
    ("emqp-clients", (State.OPEN,), (Reply,)),
    ("emqp-clients", (State.INFORMED,), (Reply, Ack)),
    ("emqp-clients", (State.REGISTERED,), (Reply, Ack, ScheduleFrame, UnscheduleFrame, *_FAREWELL)),
    ("emqp-workers", (State.OPEN,), (Disconnect,)),
    ("emqp-workers", (State.INFORMED,), (Ack, Disconnect)),
    ("emqp-workers", (State.REGISTERED,), (Ack, Request, *_FAREWELL)),
    ("emqp-admin", (State.OPEN,), (Reply, Ack)),
    ("emqp-subscribers", (State.OPEN,), (DeliveryFrame,)),
    ("client", (State.OPEN,), (Request, Publish, ScheduleFrame, UnscheduleFrame)),
    ("worker", (State.OPEN,), (Inform,)),
    ("worker", (State.INFORMED,), (Heartbeat, Kbai)),
    ("worker", (State.REGISTERED,), (Ready, Reply, *_FAREWELL)),
    ("worker", (State.LEAVING,), (Reply,)),
    ("scheduler", (State.OPEN,), (Inform,)),
    ("scheduler", (State.INFORMED,), (Heartbeat, Kbai)),
    ("scheduler", (State.REGISTERED,), (Request, *_FAREWELL)),
    ("publisher", (State.OPEN,), (Publish,)),
    ("admin", (State.OPEN,), (Admin, Disconnect)),
)
"""What may be sent when."""

NOTHING: Final[frozenset[type[Frame]]] = frozenset()
