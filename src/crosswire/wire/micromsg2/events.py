"""What a MicroMsg2 connection tells its owner."""

from __future__ import annotations

from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, ConnectionOpened, Event
from crosswire.wire.micromsg2.values import Extension, Value

__all__ = [
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
    """What was agreed: `extensions` in the order of their numbers, and the window of frames that
    may wait for an acknowledgement, None where none are sent: then writing settles."""

    version: tuple[int, int]
    identity: str
    extensions: tuple[Extension, ...]
    window: int | None

    @property
    def token(self) -> str | None:
        """What the peer said to prove who it is (`x-auth`)."""
        for extension in self.extensions:
            if extension.name.lower() == "x-auth":
                properties = {key.lower(): value for key, value in extension.properties.items()}
                return properties.get("token")
        return None


class MessageReceived(Event, frozen=True, gc=False):
    """A whole message; acknowledge `sequence`, its last frame's, when it is safe."""

    sequence: int
    destination: str
    properties: dict[str, Value]
    payload: bytes


class MessagesAcknowledged(Event, frozen=True, gc=False):
    """The peer has these messages of ours safe; each is what `send_message` gave."""

    sequences: list[int]


class SubscribeReceived(Event, frozen=True, gc=False):
    """The client wants what comes to `destination`. `arguments` has all that it said."""

    destination: str
    filter: str | None
    name: str | None
    start: str | None
    window: int | None
    arguments: dict[str, str]


class UnsubscribeReceived(Event, frozen=True, gc=False):
    """The client wants no more of it."""

    destination: str
    name: str | None
    arguments: dict[str, str]


class ServeReceived(Event, frozen=True, gc=False):
    """The client answers what is asked of `destination`, a service."""

    destination: str
    window: int | None
    arguments: dict[str, str]


class ExtensionReceived(Event, frozen=True, gc=False):
    """A frame of a vendor's extension that was agreed by name and has no class of its own here."""

    name: str
    payload: bytes
