"""eMQP's roles and listeners, and what each may send and receive in which state.

A `side` of a connection is a role, or for the broker the listener that the peer connected to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from crosswire.wire.contract import Frame, Transitions
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
    "TRANSITIONS",
    "UNREGISTERED",
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
"""The broker's listeners and their default ports. Schedulers connect to the clients' listener, at
which clients may publish, too."""

SOCKETS: Final = {
    **dict.fromkeys(LISTENERS, "ROUTER"),
    **dict.fromkeys(ROLES, "DEALER"),
    "emqp-subscribers": "PUB",
    "subscriber": "SUB",
}
"""The type of the ZeroMQ socket of each side."""

REGISTERS: Final = {"emqp-clients": "scheduler", "emqp-workers": "worker"}
"""The role that registers with INFORM at a listener."""

UNREGISTERED: Final = ("emqp-clients", "emqp-publishers", "emqp-admin")
"""Listeners whose peers are served without having registered."""


class State(Enum):
    """`informed`: INFORM was sent or received, ACK not yet. `leaving`: one side has sent KBAI."""

    HANDSHAKE = "handshake"
    OPEN = "open"
    INFORMED = "informed"
    REGISTERED = "registered"
    LEAVING = "leaving"
    CLOSED = "closed"


KNOWN_STATES: Final = (State.INFORMED, State.REGISTERED)

# ------------------------------------------------------------------------------------- receiving

_After = Mapping[type[Frame], tuple[State | None, ...]]
"""The states that may follow a frame; None is the state in which it was received."""


def _stay(*kinds: type[Frame]) -> _After:
    return dict.fromkeys(kinds, (None,))


def _transitions(*rows: tuple[Iterable[State], _After]) -> Transitions[State]:
    return {
        (state, kind): tuple(dict.fromkeys(state if each is None else each for each in after))
        for states, kinds in rows
        for state in states
        for kind, after in kinds.items()
    }


# An INFORM of another role, or with unreadable queues, is ignored: the state stays.
_REGISTER: Final[_After] = {Inform: (State.INFORMED, None)}
_REGISTERED: Final[_After] = {Ack: (State.REGISTERED, None)}
_ENDS: Final[_After] = {Heartbeat: (None,), Disconnect: (State.CLOSED,)}
_LEAVES: Final[_After] = {**_ENDS, Kbai: (State.LEAVING,)}
# At these listeners a peer's KBAI has no effect, as in the deployed broker, but that a scheduler is
# a client like any other afterwards.
_STAYS_CLIENT: Final[_After] = {**_ENDS, Kbai: (State.OPEN,)}
_FROM_CLIENTS: Final[_After] = {
    **_stay(Request, Publish, ScheduleFrame, UnscheduleFrame),
    **_REGISTER,
    **_STAYS_CLIENT,
}

TRANSITIONS: Final[dict[str, Transitions[State]]] = {
    # The broker, by listener.
    "emqp-clients": _transitions(
        ((State.OPEN, *KNOWN_STATES), _FROM_CLIENTS),
        ((State.LEAVING,), {**_REGISTER, **_LEAVES}),
    ),
    "emqp-workers": _transitions(
        ((State.OPEN,), {**_REGISTER, Kbai: (State.LEAVING,), Disconnect: (State.CLOSED,)}),
        (KNOWN_STATES, {**_REGISTER, **_stay(Ready, Reply), **_LEAVES}),
        # A worker finishes its jobs while it leaves, so results are still accepted.
        ((State.LEAVING,), {**_stay(Reply), **_REGISTER, **_LEAVES}),
    ),
    # DISCONNECT asks the broker to stop: its owner decides.
    "emqp-admin": _transitions(((State.OPEN,), _stay(Admin, Heartbeat, Kbai, Disconnect))),
    "emqp-publishers": _transitions(((State.OPEN,), {**_stay(Publish), **_STAYS_CLIENT})),
    # The broker's peers, by role.
    "client": _transitions(((State.OPEN, State.LEAVING), {**_stay(Reply, Ack), **_LEAVES})),
    "worker": _transitions(
        ((State.INFORMED,), {**_REGISTERED, **_LEAVES}),
        # A job that was sent before the broker received our KBAI is done: nobody else has it.
        ((State.REGISTERED, State.LEAVING), {**_stay(Ack, Request), **_LEAVES}),
    ),
    "scheduler": _transitions(
        ((State.INFORMED,), {**_REGISTERED, **_LEAVES}),
        ((State.REGISTERED,), {**_stay(Ack, ScheduleFrame, UnscheduleFrame, Reply), **_LEAVES}),
    ),
    "publisher": _transitions(((State.OPEN,), {**_stay(Ack), **_LEAVES})),
    "admin": _transitions(((State.OPEN,), {**_stay(Ack, Reply), **_LEAVES})),
    "subscriber": _transitions(((State.OPEN,), _stay(DeliveryFrame))),
}
"""By side. Unlike in the other protocols, a frame that is not in the table is ignored and counted.

Three transitions are not caused by a received frame: ZMTP's handshake opens, sending INFORM leads a
peer to `informed`, and sending ACK leads the broker from there to `registered`."""

RECEIVES: Final[dict[tuple[str, State], frozenset[type[Frame]]]] = {
    (side, state): frozenset(kind for before, kind in table if before is state)
    for side, table in TRANSITIONS.items()
    for state, _ in table
}
"""The frames that have an effect."""

# --------------------------------------------------------------------------------------- sending


def _table(
    *rows: tuple[str, State, Iterable[type[Frame]]],
) -> dict[tuple[str, State], frozenset[type[Frame]]]:
    return {(side, state): frozenset(kinds) for side, state, kinds in rows}


_GOODBYES: Final = (Heartbeat, Kbai, Disconnect)

SENDS: Final = _table(
    ("emqp-clients", State.OPEN, (Reply,)),
    ("emqp-clients", State.INFORMED, (Reply, Ack)),
    ("emqp-clients", State.REGISTERED, (Reply, Ack, ScheduleFrame, UnscheduleFrame, *_GOODBYES)),
    ("emqp-workers", State.OPEN, (Disconnect,)),
    ("emqp-workers", State.INFORMED, (Ack, Disconnect)),
    ("emqp-workers", State.REGISTERED, (Ack, Request, *_GOODBYES)),
    ("emqp-admin", State.OPEN, (Reply, Ack)),
    ("emqp-subscribers", State.OPEN, (DeliveryFrame,)),
    ("client", State.OPEN, (Request, Publish, ScheduleFrame, UnscheduleFrame)),
    ("worker", State.OPEN, (Inform,)),
    ("worker", State.INFORMED, (Heartbeat, Kbai)),
    ("worker", State.REGISTERED, (Ready, Reply, *_GOODBYES)),
    ("worker", State.LEAVING, (Reply,)),
    ("scheduler", State.OPEN, (Inform,)),
    ("scheduler", State.INFORMED, (Heartbeat, Kbai)),
    ("scheduler", State.REGISTERED, (Request, *_GOODBYES)),
    ("publisher", State.OPEN, (Publish,)),
    ("admin", State.OPEN, (Admin, Disconnect)),
)
"""The frames that may be sent."""

NOTHING: Final[frozenset[type[Frame]]] = frozenset()
