"""What an EMP connection reports to its owner."""

from __future__ import annotations

from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event

__all__ = [
    "ConnectionClosed",
    "ConnectionFailed",
    "ConnectionOpened",
    "RequestReceived",
    "ResponseReceived",
]


class RequestReceived(Event, frozen=True, gc=False):
    """A request of the peer, to be answered in order. `data` is a JSON object, unparsed."""

    id: int
    op: str
    data: bytes


class ResponseReceived(Event, frozen=True, gc=False):
    """The response to our request `id`. A failure has a description and may have a code."""

    id: int
    succeeded: bool
    code: str
    description: str
    data: bytes
