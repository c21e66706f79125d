"""What a protocol tells the tables about its frames, in words that all protocols share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import ItemsView, Iterable
from functools import lru_cache
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from crosswire.errors import DecoderStateError
from crosswire.wire.contract import Frame

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
    "Memory",
    "Reading",
    "json_text",
    "kind_of_destination",
    "quoted",
]

# What a frame is about: the four kinds of an envelope, and what is needed around them.
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

    `identifier` ties frames together: a response has its request's. `payload_end` is how many bytes
    stand behind the payload in the frame. A frame that completes a message of several has them all
    in `payload`, and in `begun_at` the offset where the first one began.
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


class _ReadingState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `Reading.dump()`; `own` is what the protocol adds."""

    version: int
    own: Any


_STATE: Final = msgspec.msgpack.Decoder(_ReadingState)


class Reading(ABC):
    """Both directions of one connection, frame by frame, in order."""

    state_version: ClassVar[int] = 1

    @abstractmethod
    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """`forward`: sent by who opened the connection. Raises FrameError where only a closer look
        shows that the content is not what it should be."""

    def interrupt(self, forward: bool) -> None:
        """Bytes of this direction were missing or no frame: what was half read is not completed."""

    def dump(self) -> bytes:
        """The whole state between two reads, to be given to `load`: small, versioned."""
        return msgspec.msgpack.encode(_ReadingState(self.state_version, self._save()))

    def load(self, state: bytes) -> None:
        """Go on where `dump` was called. Raises DecoderStateError."""
        try:
            saved = _STATE.decode(state)
        except msgspec.MsgspecError as error:
            raise DecoderStateError(f"state of a reading is damaged: {error}") from None
        if saved.version != self.state_version:
            raise DecoderStateError(
                f"state of a reading has version {saved.version}, this is version "
                f"{self.state_version}"
            )
        try:
            self._restore(saved.own)
        except (TypeError, ValueError, KeyError) as error:
            raise DecoderStateError(f"state of a reading is damaged: {error}") from None

    @abstractmethod
    def _save(self) -> Any:
        """What is remembered, as msgpack can hold it."""

    @abstractmethod
    def _restore(self, own: Any) -> None:
        """Take back what `_save` gave; raise TypeError, ValueError or KeyError if it's damaged."""


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=4096)
def quoted(text: str) -> str:
    """As JSON; for names, which come again and again."""
    return json_text(text)


V = TypeVar("V")


MOST_ASKED: Final = 8192


class Memory(Generic[V]):
    """What is remembered of requests until they are answered: the latest `MOST_ASKED` of them,
    since a stream writes them down with each batch. Keys are tuples that begin with who asked."""

    def __init__(self) -> None:
        self._held: OrderedDict[Any, V] = OrderedDict()

    def put(self, key: Any, value: V) -> None:
        self._held[key] = value
        if len(self._held) > MOST_ASKED:
            self._held.popitem(last=False)

    def take(self, key: Any) -> V | None:
        return self._held.pop(key, None)

    def get(self, key: Any) -> V | None:
        return self._held.get(key)

    def items(self) -> ItemsView[Any, V]:
        """All that is remembered, in order."""
        return self._held.items()

    def renew(self, entries: Iterable[tuple[Any, V]]) -> None:
        """Remember this, and nothing else."""
        self._held = OrderedDict(entries)

    def save(self) -> list[Any]:
        return list(self._held.items())

    def restore(self, saved: list[Any]) -> None:
        """Keys are tuples; so are values, unless they are plain."""
        entries: list[Any] = [
            (tuple(key), tuple(value) if isinstance(value, list) else value) for key, value in saved
        ]
        self.renew(entries)


def kind_of_destination(destination: str) -> str:
    """What a message to it is, where the protocol does not say."""
    if destination.startswith("topic/"):
        return PUBLISH
    return REQUEST if destination.startswith("service/") else SEND
