"""Messages as programs send and receive them, the same in all five protocols."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from crosswire.envelope import Property
from crosswire.errors import DeliveryLost, Unsupported

__all__ = [
    "BYTES",
    "JSON",
    "TEXT",
    "DeliveryHandle",
    "Message",
    "OutgoingMessage",
    "encode_body",
    "outgoing",
]

JSON: Final = "application/json"
TEXT: Final = "text/plain"
BYTES: Final = "application/octet-stream"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class OutgoingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to be sent, where a body alone is not enough: with properties or another type.

    `body` is bytes, text, or anything that JSON can express. `content_type` is the body's, unless
    given: `application/octet-stream`, `text/plain` or `application/json`.
    """

    body: Any
    properties: Mapping[str, Property] = {}
    content_type: str = ""

    def encoded(self) -> tuple[bytes, str]:
        """Payload and content type. Raises TypeError for a body that JSON can't express."""
        payload, content_type = encode_body(self.body)
        return payload, self.content_type or content_type


def encode_body(body: Any) -> tuple[bytes, str]:
    """Payload and content type of a body. Raises TypeError."""
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), BYTES
    if isinstance(body, str):
        return body.encode(), TEXT
    return msgspec.json.encode(body), JSON


def outgoing(body: Any, properties: Mapping[str, Property] | None = None) -> OutgoingMessage:
    """The body as a message, unless it is one; `properties` are added to its own."""
    if not isinstance(body, OutgoingMessage):
        return OutgoingMessage(body=body, properties=properties or {})
    if not properties:
        return body
    return msgspec.structs.replace(body, properties={**properties, **body.properties})


class DeliveryHandle(ABC):
    """How a protocol settles one delivery."""

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether its connection has ended: it can't be settled, and is delivered again."""

    @abstractmethod
    def settle(self) -> None:
        """The message is done; that the hub has it is not awaited."""

    @abstractmethod
    async def refuse(self, reason: str) -> None:
        """The message can't be processed. Raises what the hub answered."""

    async def extend(self, lease_s: float) -> None:
        """The message needs more time. Raises Unsupported, or what the hub answered."""
        del lease_s
        raise Unsupported("this protocol can't extend a lease: EMP and Epoxy can")


class Message:
    """A received message: a delivery, a call for a handler of `serve`, or the answer to a `call`.

    `payload` is what was sent, byte for byte, and `body` the same as a value: of JSON, as text, or
    bytes. `id` and `attempt` are None where the protocol doesn't carry them. A delivery of a queue
    or of a named subscription is to be settled or refused.
    """

    __slots__ = (
        "_done",
        "_handle",
        "_on_done",
        "attempt",
        "content_type",
        "destination",
        "id",
        "payload",
        "properties",
    )

    def __init__(
        self,
        destination: str,
        payload: bytes,
        *,
        content_type: str = BYTES,
        properties: Mapping[str, Property] | None = None,
        id: int | None = None,  # noqa: A002  what the envelope calls it
        attempt: int | None = None,
        handle: DeliveryHandle | None = None,
    ) -> None:
        self.destination = destination
        self.payload = payload
        self.content_type = content_type
        self.properties: dict[str, Property] = dict(properties or {})
        self.id = id
        self.attempt = attempt
        self._handle = handle
        self._done = handle is None
        self._on_done: Callable[[Message], None] | None = None

    def __repr__(self) -> str:
        number = "" if self.id is None else f" #{self.id}"
        attempt = f" attempt {self.attempt}" if (self.attempt or 1) > 1 else ""
        lost = " lost" if self.lost else ""
        properties = f" {_short.repr(self.properties)}" if self.properties else ""
        try:
            body = _short.repr(self.body)
        except ValueError:
            body = _short.repr(self.payload)
        return f"<Message {self.destination}{number}{attempt}{lost} {body}{properties}>"

    @property
    def body(self) -> Any:
        """The payload as its content type has it. Raises ValueError for a payload that is not."""
        if self.content_type.partition(";")[0].strip() == JSON:
            return self.json()
        if self.content_type.startswith("text/"):
            return self.text
        return self.payload

    @property
    def text(self) -> str:
        """The payload as text, whatever its type. Raises UnicodeDecodeError, a ValueError."""
        return self.payload.decode()

    def json(self) -> Any:
        """The payload as a value of JSON, whatever its type. Raises ValueError."""
        try:
            return msgspec.json.decode(self.payload)
        except msgspec.DecodeError as error:
            raise ValueError(f"the payload is not JSON: {error}") from None

    # Settling.

    @property
    def settled(self) -> bool:
        """Whether it was settled or refused, or needs neither."""
        return self._done

    @property
    def lost(self) -> bool:
        """Whether its connection ended before it was settled: the hub delivers it again."""
        return not self._done and self._handle is not None and self._handle.lost

    async def settle(self) -> None:
        """The message is done: the hub doesn't deliver it again. A second call does nothing.

        It returns when that is on its way; closing the subscription waits until the hub has it.
        Raises DeliveryLost if its connection has ended: then it is delivered again.
        """
        if not self._done:
            self._finish().settle()

    async def refuse(self, reason: str = "") -> None:
        """The message can't be processed: the hub retries it later, and keeps it as a dead letter
        with the reason when it gives up. Raises as `settle`."""
        if not self._done:
            await self._finish().refuse(reason)

    async def extend(self, lease_s: float) -> None:
        """Processing takes longer: the hub waits `lease_s` from now on. Raises as `settle`, and
        Unsupported in eMQP, Relink and MicroMsg2."""
        if self._handle is not None and not self._done:
            await self._still_there().extend(lease_s)

    def _settle_soon(self) -> None:
        if not self._done and self._handle is not None:
            self._done = True
            if not self._handle.lost:
                self._handle.settle()

    def _finish(self) -> DeliveryHandle:
        handle = self._still_there()
        self._done = True
        if self._on_done is not None:
            self._on_done(self)
        return handle

    def _still_there(self) -> DeliveryHandle:
        assert self._handle is not None
        if self._handle.lost:
            raise DeliveryLost(
                f"{self!r}: its connection ended before it was settled, it is delivered again"
            )
        return self._handle
