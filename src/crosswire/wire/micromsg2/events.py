"""What a MicroMsg2 connection reports to its owner, and how commands are read into events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from crosswire.errors import MalformedFrame
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.micromsg2.values import Extension, Value

__all__ = [
    "COMMANDS",
    "ConnectionClosed",
    "ConnectionFailed",
    "ConnectionOpened",
    "ExtensionReceived",
    "MessageReceived",
    "MessagesAcknowledged",
    "Opened",
    "ServeReceived",
    "SubscribeReceived",
    "UnsubscribeReceived",
]


class Opened(ConnectionOpened, frozen=True):
    """The agreement: `extensions` in the order of their numbers, and the window: how many frames
    may wait for an acknowledgement. None if none are sent; a message is then settled when it is
    written."""

    version: tuple[int, int]
    identity: str
    extensions: tuple[Extension, ...]
    window: int | None

    @property
    def token(self) -> str | None:
        """The peer's credential (extension `x-auth`); None if it sent none."""
        for extension in self.extensions:
            if extension.name.lower() == "x-auth":
                properties = {key.lower(): value for key, value in extension.properties.items()}
                return properties.get("token")
        return None


class MessageReceived(Event, frozen=True, gc=False):
    """A complete message; acknowledge `sequence`, its last frame's, when it is safe."""

    sequence: int
    destination: str
    properties: dict[str, Value]
    payload: bytes


class MessagesAcknowledged(Event, frozen=True, gc=False):
    """The peer acknowledged these messages of ours, numbered as `send_message` returned them."""

    sequences: list[int]


class SubscribeReceived(Event, frozen=True, gc=False):
    """The client subscribes to `destination`. `arguments` has the unknown ones, too."""

    destination: str
    filter: str | None
    name: str | None
    start: str | None
    window: int | None
    arguments: dict[str, str]


class UnsubscribeReceived(Event, frozen=True, gc=False):
    """The client ends a subscription."""

    destination: str
    name: str | None
    arguments: dict[str, str]


class ServeReceived(Event, frozen=True, gc=False):
    """The client offers to answer the requests to `destination`, a service."""

    destination: str
    window: int | None
    arguments: dict[str, str]


class ExtensionReceived(Event, frozen=True, gc=False):
    """A frame of an agreed vendor's extension for which the offer has no class."""

    name: str
    payload: bytes


# -------------------------------------------------------------------------------------- commands

_MAX_DELIVERY_WINDOW: Final = 65_535
"""The largest `window` that a command may ask for."""


def _destination(arguments: dict[str, str]) -> str:
    if not arguments.get("destination"):
        raise MalformedFrame("a command without a destination")
    return arguments["destination"]


def _window(arguments: dict[str, str]) -> int | None:
    text = arguments.get("window")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise MalformedFrame("a window that is no number")
    if not 1 <= int(text) <= _MAX_DELIVERY_WINDOW:
        raise MalformedFrame(f"a window is 1 to {_MAX_DELIVERY_WINDOW}")
    return int(text)


def _read_subscribe(arguments: dict[str, str]) -> Event:
    return SubscribeReceived(
        _destination(arguments),
        arguments.get("filter"),
        arguments.get("name"),
        arguments.get("from"),
        _window(arguments),
        arguments,
    )


def _read_unsubscribe(arguments: dict[str, str]) -> Event:
    return UnsubscribeReceived(_destination(arguments), arguments.get("name"), arguments)


def _read_serve(arguments: dict[str, str]) -> Event:
    return ServeReceived(_destination(arguments), _window(arguments), arguments)


COMMANDS: Final[dict[str, Callable[[dict[str, str]], Event]]] = {
    "subscribe": _read_subscribe,
    "unsubscribe": _read_unsubscribe,
    "serve": _read_serve,
}
"""By name in lower case: the event of a command's arguments. Raise MalformedFrame."""
