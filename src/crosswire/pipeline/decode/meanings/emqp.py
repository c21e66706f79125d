"""eMQP: jobs to queues, publications to topics, replies; and the frames of ZMTP on layer 0."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from crosswire.pipeline.decode.meanings.contract import (
    CONTROL,
    ERROR,
    HANDSHAKE,
    HEARTBEAT,
    PUBLISH,
    REQUEST,
    SEND,
    SUBSCRIPTION,
    Described,
    PendingRequests,
    ProtocolMemory,
    json_text,
)
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.zmtp.frames import Command, Greeting

__all__ = [
    "BINARY",
    "MARKS",
    "MEMORY",
    "MESSAGE",
    "OPENINGS",
    "EmqpMemory",
    "MessageRoute",
    "address_of",
    "describe_below",
    "outcome_of",
]

_COMMANDS: Final = {
    "READY": HANDSHAKE,
    "HELLO": HANDSHAKE,
    "WELCOME": HANDSHAKE,
    "INITIATE": HANDSHAKE,
    "ERROR": ERROR,
    "PING": HEARTBEAT,
    "PONG": HEARTBEAT,
    "SUBSCRIBE": SUBSCRIPTION,
    "CANCEL": SUBSCRIPTION,
}

BINARY: Final = "application/octet-stream"

MESSAGE: Final = Described("{}")
"""A ZeroMQ message: the command in it has a description of its own."""

_MOST_ADDRESS: Final = 256
"""Characters of a queue's or topic's name and of headers: longer ones are not worth caching."""


# ------------------------------------------------------------------------------------ descriptions


class _JobOutcome(msgspec.Struct, gc=False):
    value: Any = None
    error: str | None = None


_OUTCOME: Final = msgspec.json.Decoder(_JobOutcome)
OPENINGS: Final = b"{ \t\n\r"
MARKS: Final = (b'"error"', b'"TimeoutError"', b"\\u00")
"""An object with none of these is a success: names have their letters as they are, or escaped."""


def outcome_of(message: bytes) -> str:
    """The outcome of a job: its manager reports exceptions as results, with one of two forms."""
    if message[:1] not in OPENINGS or not any(mark in message for mark in MARKS):
        return "success"
    try:
        outcome = _OUTCOME.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "success"
    if outcome.error is not None:
        return "failure"
    return "timeout" if outcome.value == "TimeoutError" else "success"


class MessageRoute(NamedTuple):
    """What messages share that go to the same queue or topic with the same headers.

    `fields` is what the JSON has after the message's id.
    """

    fields: str
    kind: str
    destination: str
    properties: str


def address_of(is_queue: bool, name: str, headers: str | None) -> MessageRoute:
    """The route of messages to this queue or topic with these headers."""
    known = _address if len(name) + len(headers or "") <= _MOST_ADDRESS else _address.__wrapped__
    return known(is_queue, name, headers)


@lru_cache(maxsize=1024)
def _address(is_queue: bool, name: str, headers: str | None) -> MessageRoute:
    what = "queue" if is_queue else "topic"
    headers_text = "" if headers is None else f',"headers":{json_text(headers)}'
    read = Headers.parse(headers or "")
    sent = REQUEST if read.reply_requested else SEND
    return MessageRoute(
        f'"{what}":{json_text(name)}{headers_text}',
        sent if is_queue else PUBLISH,
        f"{what}/{name}",
        json_text(read.properties()),
    )


def describe_below(frame: Greeting | Command) -> Described:
    """Describe a frame of ZMTP. Raises FrameError."""
    kind = HANDSHAKE if isinstance(frame, Greeting) else _COMMANDS.get(frame.name, CONTROL)
    return Described(json_text(frame.fields()), kind)


# ------------------------------------------------------------------------------------------ memory


class EmqpMemory(ProtocolMemory):
    """By request, its destination, which is that of the reply too."""

    def __init__(self) -> None:
        self.asked: PendingRequests[str] = PendingRequests()

    def _save(self) -> Any:
        return self.asked.save()

    def _restore(self, own: Any) -> None:
        self.asked.restore(own)


MEMORY = EmqpMemory
