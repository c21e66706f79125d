"""The events of an Epoxy connection."""

from __future__ import annotations

from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event

__all__ = [
    "ConnectionClosed",
    "ConnectionFailed",
    "ConnectionOpened",
    "EventReceived",
    "PeerFinished",
    "RequestReceived",
    "ResponseReceived",
]


class RequestReceived(Event, frozen=True, gc=False):
    """A request, to be answered in any order. `payload` and `layer_data` are marshalled Bond."""

    conversation_id: int
    service_name: str
    method_name: str
    payload: bytes
    layer_data: bytes | None


class ResponseReceived(Event, frozen=True, gc=False):
    """The response to our request: a `payload`, or an `error`, which is a marshalled Error."""

    conversation_id: int
    payload: bytes | None
    error: bytes | None
    layer_data: bytes | None


class EventReceived(Event, frozen=True, gc=False):
    """An event, which has no response. `conversation_id` is for diagnosis only."""

    conversation_id: int
    service_name: str
    method_name: str
    payload: bytes
    layer_data: bytes | None


class PeerFinished(Event, frozen=True, gc=False):
    """The peer has closed its half of the connection; its requests can still be answered."""
