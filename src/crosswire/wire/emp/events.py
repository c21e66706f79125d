"""What an EMP connection tells its owner."""

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
    """The peer asks; answer in the order of arrival. `data` is a JSON object, as it came."""

    id: int
    op: str
    data: bytes


class ResponseReceived(Event, frozen=True, gc=False):
    """The answer to our request `id`. A failure has a description and may have a code."""

    id: int
    succeeded: bool
    code: str
    description: str
    data: bytes
