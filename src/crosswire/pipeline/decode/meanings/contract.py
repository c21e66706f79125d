"""What the tables have of a frame, in terms that all protocols share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import ItemsView, Iterable
from functools import lru_cache
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from crosswire.errors import DecoderStateError

__all__ = [
    "ACKNOWLEDGEMENT",
    "CONTROL",
    "ERROR",
    "GOODBYE",
    "HANDSHAKE",
    "HEARTBEAT",
    "MESSAGE_KINDS",
    "MOST_ASKED",
    "PUBLISH",
    "REQUEST",
    "RESPONSE",
    "SEND",
    "SUBSCRIPTION",
    "Described",
    "PendingRequests",
    "ProtocolMemory",
    "json_text",
    "kind_of_destination",
    "quoted",
]

# Kinds of frames: the four kinds of an envelope, and those that protocols need around them.
SEND: Final = "send"
PUBLISH: Final = "publish"
REQUEST: Final = "request"
RESPONSE: Final = "response"
ACKNOWLEDGEMENT: Final = "acknowledgement"
SUBSCRIPTION: Final = "subscription"
HANDSHAKE: Final = "handshake"
HEARTBEAT: Final = "heartbeat"
GOODBYE: Final = "goodbye"
ERROR: Final = "error"
CONTROL: Final = "control"

MESSAGE_KINDS: Final = (SEND, PUBLISH, REQUEST, RESPONSE)


class Described(msgspec.Struct, frozen=True, gc=False):
    """A frame's row, as far as its protocol knows it; `fields` and `properties` are JSON.

    `identifier` connects frames: a response has its request's. `payload_end` is how many bytes of
    the frame follow the payload. A frame that completes a message of several frames has all their
    payloads in `payload`, and in `begun_at` the offset of the first one.
    """

    fields: str
    kind: str | None = None
    identifier: str | None = None
    destination: str | None = None
    status: str | None = None
    sequence: int | None = None
    payload_size: int | None = None
    payload_end: int = 0
    payload: bytes | None = None
    content_type: str | None = None
    properties: str | None = None
    reply_to: str | None = None
    message_id: int | None = None
    begun_at: int | None = None


class _MemoryState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `ProtocolMemory.dump()`; `own` is what the protocol adds."""

    version: int
    own: Any


_STATE: Final = msgspec.msgpack.Decoder(_MemoryState)


class ProtocolMemory(ABC):
    """What later frames of a connection depend on: pending requests, messages that are not whole.

    It is the same for both directions, and is saved with the state of the connection.
    """

    state_version: ClassVar[int] = 1

    def interrupt(self, forward: bool) -> None:
        """Bytes of this direction are missing or are no frame: give up what is incomplete."""

    def dump(self) -> bytes:
        """The state between two frames, for `load`: small, with a version."""
        return msgspec.msgpack.encode(_MemoryState(self.state_version, self._save()))

    def load(self, state: bytes) -> None:
        """Set the state of `dump`. Raises DecoderStateError."""
        try:
            saved = _STATE.decode(state)
        except msgspec.MsgspecError as error:
            raise DecoderStateError(f"memory of a connection is damaged: {error}") from None
        if saved.version != self.state_version:
            raise DecoderStateError(
                f"memory of a connection has version {saved.version}, this is version "
                f"{self.state_version}"
            )
        try:
            self._restore(saved.own)
        except (TypeError, ValueError, KeyError) as error:
            raise DecoderStateError(f"memory of a connection is damaged: {error}") from None

    @abstractmethod
    def _save(self) -> Any:
        """What is remembered, in types that msgpack has."""

    @abstractmethod
    def _restore(self, own: Any) -> None:
        """Set what `_save` gave; raises TypeError, ValueError or KeyError if it is damaged."""


def json_text(value: Any) -> str:
    """A value as JSON."""
    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=4096)
def quoted(text: str) -> str:
    """A text as JSON; for names, of which there are few."""
    return json_text(text)


V = TypeVar("V")


MOST_ASKED: Final = 8192
"""Requests of a connection that are remembered."""


class PendingRequests(Generic[V]):
    """The requests of a connection that may be answered: the latest `MOST_ASKED` of them, since a
    stream stores them with each batch. Keys are tuples; the first element is the direction."""

    def __init__(self) -> None:
        self._held: OrderedDict[Any, V] = OrderedDict()

    def put(self, key: Any, value: V) -> None:
        """Remember a request, and forget the oldest if there are too many."""
        self._held[key] = value
        if len(self._held) > MOST_ASKED:
            self._held.popitem(last=False)

    def take(self, key: Any) -> V | None:
        """Remove a request that is answered; None if there is none."""
        return self._held.pop(key, None)

    def get(self, key: Any) -> V | None:
        """A request that may be answered again; None if there is none."""
        return self._held.get(key)

    def items(self) -> ItemsView[Any, V]:
        """All requests, the oldest first."""
        return self._held.items()

    def renew(self, entries: Iterable[tuple[Any, V]]) -> None:
        """Replace all requests."""
        self._held = OrderedDict(entries)

    def save(self) -> list[Any]:
        """All requests, for `restore`."""
        return list(self._held.items())

    def restore(self, saved: list[Any]) -> None:
        """Set what `save` gave. msgpack gives lists for the tuples of keys and values."""
        entries: list[Any] = [
            (tuple(key), tuple(value) if isinstance(value, list) else value) for key, value in saved
        ]
        self.renew(entries)


def kind_of_destination(destination: str) -> str:
    """The kind of a message to a destination, for protocols that have no kinds."""
    if destination.startswith("topic/"):
        return PUBLISH
    return REQUEST if destination.startswith("service/") else SEND
