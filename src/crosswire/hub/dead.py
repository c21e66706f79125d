"""Dead letters: messages that could not be delivered, and how they are replayed.

A dead letter is a message in `queue/NAME/dead`, like any other: it can be consumed. Why it is
there is in its properties, which every protocol shows; its full history is in `native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from crosswire.envelope import ONLY_FOR, Envelope, Property, encode, message_kind
from crosswire.errors import UnknownMessage
from crosswire.hub.core import SendEnvelope
from crosswire.hub.cursor import FailedDelivery
from crosswire.hub.dispatch import DispatchLoop
from crosswire.hub.ledger import Step
from crosswire.store.keys import MAX_ID

__all__ = [
    "DeadLetter",
    "DeadLetters",
    "Refit",
    "bury",
    "origin_of",
    "sent_again_as",
    "sent_as_detail",
]

_NATIVE: Final = "crosswire.dead"
_SENT_AS: Final = "sent again as "
_MARKS: Final = ("dead-cause", "dead-attempts", "dead-origin", "dead-id")

Refit: TypeAlias = Callable[[Envelope, Envelope], Envelope]
"""Given a message and a changed copy of it, returns the copy without metadata that describes only
the original: which that is, the protocols know, not the hub."""


class _DeadLetterHistory(msgspec.Struct, array_like=True, frozen=True):
    id: int
    destination: str
    time: int
    cause: str
    attempts: Sequence[FailedDelivery]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_DeadLetterHistory).decode


class DeadLetter(msgspec.Struct, frozen=True):
    """`id` is its id in the dead letter queue; `origin_id` the one that it had before.

    A message that a peer sent to the dead letter queue has no origin.
    """

    id: int
    envelope: Envelope
    origin_id: int
    origin: str
    time: int
    cause: str
    attempts: Sequence[FailedDelivery]


class DeadLetterQueue(Protocol):
    """A queue, as far as dead letters need it: see `Backlog`."""

    def browse_page(self, after: int, count: int, most_bytes: int) -> tuple[list[Envelope], bool]:
        """Unsettled messages after an id, and whether there may be more."""

    def exchange(self, envelope: Envelope, record: bytes) -> None:
        """Replace the message that has this envelope's id."""

    def is_free(self, identifier: int) -> bool:
        """Whether it is not settled, and no consumer holds it."""

    def remove(
        self, ids: Iterable[int], step: Step, now: float, *, detail: str = ""
    ) -> Sequence[int]:
        """Settle these. Returns those that were there."""


class DeadLetters:
    """Lists, edits, replays and purges dead letters.

    `queue` is the dead letter queue itself: `queue/NAME/dead`.
    """

    def __init__(
        self,
        queue: Callable[[str], DeadLetterQueue],
        check: Callable[[str], object],
        send: SendEnvelope,
        way_back: Callable[[str], SendEnvelope | None],
        loop: DispatchLoop,
    ) -> None:
        """`queue` finds a queue by its destination, `check` raises InvalidDestination. `way_back`
        gives, for the dead letters of a named subscription, what sends them to it alone."""
        self._queue = queue
        self._check = check
        self._send = send
        self._way_back = way_back
        self._loop = loop

    def list(
        self, queue: str, *, after: int = 0, count: int = 100, most_bytes: int = MAX_ID
    ) -> Sequence[DeadLetter]:
        """In order of ids, of `most_bytes` together or one that is larger; for more, continue after
        the last one, until there is none."""
        found, _ = self._queue(queue).browse_page(after, count, most_bytes)
        return [_read(envelope) for envelope in found]

    def get(self, queue: str, identifier: int) -> DeadLetter:
        """One dead letter. Raises UnknownMessage."""
        found, _ = self._queue(queue).browse_page(identifier - 1, 1, MAX_ID)
        if not found or found[0].id != identifier:
            raise UnknownMessage(f"{queue} has no message {identifier}")
        return _read(found[0])

    def edit(
        self,
        queue: str,
        identifier: int,
        *,
        payload: bytes | None = None,
        properties: Mapping[str, Property] | None = None,
        content_type: str | None = None,
        refit: Refit | None = None,
    ) -> DeadLetter:
        """Change a dead letter before it is replayed. Raises UnknownMessage."""
        dead_letter = self.get(queue, identifier)
        changes: dict[str, object] = {}
        if payload is not None:
            changes["payload"] = payload
        if properties is not None:
            merged = dict(properties)
            for key in _MARKS:
                if key in dead_letter.envelope.properties:
                    merged[key] = dead_letter.envelope.properties[key]
            changes["properties"] = merged
        if content_type is not None:
            changes["content_type"] = content_type
        envelope = dead_letter.envelope.replace(**changes)
        if refit is not None:
            # Without the properties that describe its death: they are removed when it is replayed.
            plain = _unmarked(envelope)
            fitted = refit(_unmarked(dead_letter.envelope), plain)
            if fitted is not plain:
                marked: dict[str, Property] = dict(fitted.properties)
                for key in _MARKS:
                    if key in envelope.properties:
                        marked[key] = envelope.properties[key]
                envelope = fitted.replace(properties=marked)
        self._queue(queue).exchange(envelope, encode(envelope))
        return _read(envelope)

    def replay(
        self,
        queue: str,
        ids: Sequence[int],
        now: float,
        *,
        destination: str = "",
        refit: Refit | None = None,
    ) -> Sequence[int]:
        """Send these again, by default to where they came from: to their queue, or to the named
        subscription that could not take them, and to no other subscriber of the topic. With a
        `destination`, messages of any queue are moved there.

        Returns the ids of those that were there. Sent and removed in one group: never both, never
        none.
        Raises InvalidDestination, UnknownMessage.
        """
        send = (self._way_back(queue) if not destination else None) or self._send
        replayed = []
        for identifier in ids:
            dead_letter = self.get(queue, identifier)
            target = destination or dead_letter.origin
            self._check(target)
            envelope = _revive(dead_letter.envelope, target)
            if refit is not None and dead_letter.origin:
                envelope = refit(envelope.replace(destination=dead_letter.origin), envelope)
            letters = self._queue(queue)
            if letters.is_free(identifier):
                # Sent first: its new id is noted with the removal, and what can't be sent stays.
                sent = send(envelope, now)
                letters.remove([identifier], Step.REPLAYED, now, detail=sent_as_detail(sent))
                replayed.append(identifier)
        self._loop.pump(now)
        return replayed

    def purge(self, queue: str, ids: Sequence[int], now: float) -> Sequence[int]:
        """Drop these. Returns the ids of those that were there."""
        return self._queue(queue).remove(ids, Step.DROPPED, now, detail="purged")


def bury(
    envelope: Envelope, queue: str, cause: str, attempts: Sequence[FailedDelivery]
) -> Envelope:
    """The dead letter of a message, still to be stamped."""
    history = _DeadLetterHistory(envelope.id, envelope.destination, envelope.time, cause, attempts)
    properties: dict[str, Property] = {
        **_without(envelope.properties),
        "dead-cause": cause,
        "dead-attempts": len(attempts),
        "dead-origin": envelope.destination,
        "dead-id": envelope.id,
    }
    return envelope.replace(
        destination=queue,
        kind="send",
        expires=0,
        durable=True,
        properties=properties,
        native={**envelope.native, _NATIVE: _encode(history)},
    )


def _read(envelope: Envelope) -> DeadLetter:
    try:
        history = _decode(envelope.native[_NATIVE])
    except (KeyError, msgspec.MsgspecError):
        history = _DeadLetterHistory(0, "", envelope.time, "", [])
    return DeadLetter(
        envelope.id,
        envelope,
        history.id,
        history.destination,
        history.time,
        history.cause,
        history.attempts,
    )


def _revive(envelope: Envelope, destination: str) -> Envelope:
    """The message as it was, still to be stamped."""
    native = {k: v for k, v in envelope.native.items() if k not in (_NATIVE, ONLY_FOR)}
    return envelope.replace(
        destination=destination,
        kind=message_kind(destination),
        properties=_without(envelope.properties),
        native=native,
    )


def origin_of(envelope: Envelope) -> tuple[int, str] | None:
    """The id that a dead letter had before, and where; None for a message that is none."""
    letter = _read(envelope)
    return (letter.origin_id, letter.origin) if letter.origin_id else None


def sent_as_detail(identifier: int) -> str:
    """The detail, in the ledger, of a message that was sent again with this id."""
    return f"{_SENT_AS}{identifier}"


def sent_again_as(detail: str) -> int | None:
    """The new id of a message that was sent again, by the detail of that step in the ledger."""
    identifier = detail.removeprefix(_SENT_AS)
    return int(identifier) if identifier != detail and identifier.isdecimal() else None


def _unmarked(envelope: Envelope) -> Envelope:
    return envelope.replace(properties=_without(envelope.properties))


def _without(properties: Mapping[str, Property]) -> dict[str, Property]:
    return {key: value for key, value in properties.items() if key not in _MARKS}
