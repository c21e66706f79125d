"""What goes to one MicroMsg2 peer: at once while its window and its socket allow, else in turn.

A delivery is settled by the acknowledgement of its last frame; where no acknowledgements were
agreed, by being written, as long as the peer reads. What waits is bounded: beyond that the hub is
given no room, so that queues keep their messages and topics go on without this peer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from crosswire.envelope import Envelope, Property
from crosswire.errors import LocalProtocolError
from crosswire.gateways.payloads import BYTES
from crosswire.hub.attachment import Attachment, Delivery, Window
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.frames import message_prefix
from crosswire.wire.micromsg2.values import serialize_properties

if TYPE_CHECKING:
    from crosswire.gateways.gateway import Gateway

__all__ = ["DirectMessage", "Outbox", "Translate"]

_SMALL: Final = 65536
_BURST: Final = 65536
_OVERHEAD_BYTES: Final = 64

_PREFIXES: Final = 1024
_PREFIX_BYTES: Final = 4096
_prefixes: Final[dict[int, tuple[Envelope, bytes]]] = {}
"""What was published last goes to many peers with the same properties, written once."""

Translate = Callable[[Envelope], tuple[bytes, Mapping[str, Property]]]
"""Payload and properties, as this peer is to see them."""


class DirectMessage:
    """A message that no subscription asked for: an answer, or a call for a provider.

    `sent` is told when it went out, and what kept it from doing so.
    """

    __slots__ = ("destination", "is_wanted", "payload", "properties", "sent")

    def __init__(
        self,
        destination: str,
        payload: bytes,
        properties: Mapping[str, Property],
        sent: Callable[[LocalProtocolError | None], None],
    ) -> None:
        self.destination = destination
        self.payload = payload
        self.properties = properties
        self.sent = sent
        self.is_wanted = True


class _Waiting:
    """Deliveries from `index` on, in their turn."""

    __slots__ = ("attachment", "deliveries", "index")

    def __init__(self, attachment: Attachment, deliveries: list[Delivery], index: int) -> None:
        self.attachment = attachment
        self.deliveries = deliveries
        self.index = index


class Outbox:
    """`short` has the destinations that the peer calls by their bare name."""

    def __init__(
        self, gateway: Gateway, connection: MicroMsg2Connection, translate: Translate
    ) -> None:
        limits = gateway.context.config.connections
        self.short: set[str] = set()
        self._gateway = gateway
        self._connection = connection
        self._translate = translate
        self._most_bytes = limits.congested_bytes
        self._has_acks = connection.agreement.window is not None
        self._plain_type = BYTES if connection.carries_anything else None
        self._shared = Window(connection.agreement.window or limits.window)
        self._burst = Window(_BURST)
        self._waiting: deque[_Waiting | DirectMessage] = deque()
        self._waiting_bytes = 0
        self._sent: deque[tuple[Attachment | None, list[int]]] = deque()
        self._settled: dict[Attachment, list[int]] = {}
        self._settle_planned = False
        self._unfit: list[tuple[Attachment, int, str]] = []
        self._taken: list[tuple[Window, int]] = []

    # Room.

    def window(self, destination: str, name: str, asked: int | None) -> Window:
        """What a new subscription may have on its way.

        All share the frames that may wait for an acknowledgement, unless one asks for less. What
        is published to subscribers without a name comes once, at its own pace: the hub's window
        leaves room for a burst, which waits here.
        """
        if destination.startswith("topic/") and not name:
            return self._burst if asked is None else Window(min(asked, _BURST))
        if asked is not None:
            most = self._connection.agreement.window or _BURST
            return Window(min(asked, most))
        return self._shared if self._has_acks else Window(self._shared.free)

    def _limit_waiting(self) -> None:
        """Too much waits: no more until half of it is gone."""
        if not self._taken and self._waiting_bytes > self._most_bytes:
            windows = {each.window: None for each in self._gateway.attachments}
            self._taken = [(window, window.free) for window in windows if window.free > 0]
            for window, _ in self._taken:
                window.free = 0
        elif self._taken and self._waiting_bytes <= self._most_bytes // 2:
            taken, self._taken = self._taken, []
            now = self._gateway.context.now()
            for window, count in taken:
                window.grant(count, now)

    # Out.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        index = 0
        if not self._waiting and not self._gateway.session.congested:
            index = self._send(attachment, deliveries, 0)
        if index < len(deliveries):
            self._waiting.append(_Waiting(attachment, deliveries, index))
            self._waiting_bytes += _size(deliveries[index:])
            self._limit_waiting()
        self._gateway.session.wake()
        self._refuse_unfit()

    def send(self, message: DirectMessage) -> None:
        if self._waiting or not self._connection.credit or self._gateway.session.congested:
            self._waiting.append(message)
        else:
            self._post(message)
        self._gateway.session.wake()

    def flush(self) -> None:
        """All that the peer's window and its socket take now; called by the session's turn."""
        waiting, session = self._waiting, self._gateway.session
        while waiting and self._connection.credit and not session.congested:
            first = waiting[0]
            if isinstance(first, DirectMessage):
                waiting.popleft()
                self._post(first)
                continue
            before, deliveries = first.index, first.deliveries
            first.index = self._send(first.attachment, deliveries, before)
            self._waiting_bytes -= _size(deliveries[before : first.index])
            if first.index == len(deliveries):
                waiting.popleft()
        if self._taken:
            self._limit_waiting()
        self._refuse_unfit()

    def _post(self, message: DirectMessage) -> None:
        if not message.is_wanted:
            return
        try:
            self._connection.send_message(message.destination, message.payload, message.properties)
        except LocalProtocolError as error:
            message.sent(error)
            return
        if self._has_acks:
            self._sent.append((None, [0]))
        message.sent(None)

    def _send(self, attachment: Attachment, deliveries: list[Delivery], index: int) -> int:
        """Send from `index` on while there is credit; gives the place behind."""
        connection, plain_type = self._connection, self._plain_type
        credit = connection.credit
        run: list[tuple[bytes, bytes]] = []
        ids: list[int] = []
        name, prefix = "", b""
        properties: Mapping[str, Property]
        end = len(deliveries)
        while index < end and len(run) < credit:
            envelope = deliveries[index].envelope
            index += 1
            payload, properties = envelope.payload, envelope.properties
            try:
                if envelope.content_type != plain_type or envelope.correlation or envelope.reply_to:
                    payload, properties = self._translate(envelope)
                if plain_type is not None and len(payload) <= _SMALL:
                    if properties or envelope.destination != name:
                        name = "" if properties else envelope.destination
                        prefix = self._prefix(envelope, properties)
                    run.append((prefix, payload))
                else:
                    if run:
                        connection.send_run(run)
                        run = []
                        credit = connection.credit
                        if not credit:
                            index -= 1
                            break
                    connection.send_message(self._name(envelope), payload, properties)
                    credit = connection.credit
            except LocalProtocolError as error:
                cause = f"can't be sent in MicroMsg2: {error}"
                self._unfit.append((attachment, envelope.id, cause))
                continue
            ids.append(envelope.id)
        if run:
            connection.send_run(run)
        if ids:
            self._note_sent(attachment, ids)
        return index

    def _name(self, envelope: Envelope) -> str:
        name = envelope.destination
        return name.removeprefix("queue/") if name in self.short else name

    def _prefix(self, envelope: Envelope, properties: Mapping[str, Property]) -> bytes:
        if not properties:
            return message_prefix(self._name(envelope).encode(), b"")
        if envelope.kind != "publish":
            return self._write_prefix(envelope, properties)
        known = _prefixes.get(envelope.id)
        if known is not None and known[0] is envelope:
            return known[1]
        prefix = self._write_prefix(envelope, properties)
        if len(prefix) + len(envelope.payload) <= _PREFIX_BYTES:
            if len(_prefixes) >= _PREFIXES:
                _prefixes.clear()
            _prefixes[envelope.id] = (envelope, prefix)
        return prefix

    def _write_prefix(self, envelope: Envelope, properties: Mapping[str, Property]) -> bytes:
        head = serialize_properties(properties)
        if len(head) > 65535:
            raise LocalProtocolError("properties of more than 65535 bytes")
        return message_prefix(self._name(envelope).encode(), head)

    def _refuse_unfit(self) -> None:
        """What this protocol can't carry goes the way of refused messages: others may take it."""
        unfit, self._unfit = self._unfit, []
        for attachment, identifier, cause in unfit:
            attachment.refuse([identifier], self._gateway.context.now(), cause=cause)

    # Settled.

    def _note_sent(self, attachment: Attachment, ids: list[int]) -> None:
        sent = self._sent
        if not self._has_acks:
            self._settled.setdefault(attachment, []).extend(ids)
            if not self._settle_planned:
                self._settle_planned = True
                self._gateway.session.wake()
                # Behind the write: only then it shows whether the peer keeps up.
                settle = self._gateway.owned(self._settle_written)
                asyncio.get_running_loop().call_soon(settle)
        elif sent and sent[-1][0] is attachment:
            sent[-1][1].extend(ids)
        else:
            sent.append((attachment, ids))

    def _settle_written(self) -> None:
        self._settle_planned = False
        if not self._gateway.session.congested:
            self.settle()

    def drained(self) -> None:
        """The peer reads again."""
        if not self._has_acks:
            self.settle()
        self.flush()

    def acknowledged(self, count: int) -> None:
        """The peer has the oldest so many messages safe; `settle` tells the hub."""
        sent = self._sent
        while count:
            attachment, ids = sent[0]
            if len(ids) <= count:
                sent.popleft()
                done = ids
            else:
                done = ids[:count]
                del ids[:count]
            count -= len(done)
            if attachment is not None:
                known = self._settled.get(attachment)
                if known is None:
                    self._settled[attachment] = done
                else:
                    known.extend(done)

    def settle(self) -> None:
        if self._settled and not self._gateway.left:
            settled, self._settled = self._settled, {}
            now = self._gateway.context.now()
            for attachment, ids in settled.items():
                attachment.settle(ids, now)

    def forget(self, attachment: Attachment) -> None:
        """It was closed: what still waits for it is not sent. What was sent and not settled is
        somebody else's by now, whatever is acknowledged later."""
        kept: deque[_Waiting | DirectMessage] = deque()
        unsent: list[int] = []
        for each in self._waiting:
            if isinstance(each, _Waiting) and each.attachment is attachment:
                rest = each.deliveries[each.index :]
                unsent += [delivery.envelope.id for delivery in rest]
                self._waiting_bytes -= _size(rest)
            else:
                kept.append(each)
        self._waiting = kept
        if unsent:
            # The room of a subscriber without a name is its own to give back.
            attachment.settle(unsent, self._gateway.context.now())
        if self._taken:
            self._limit_waiting()


def _size(deliveries: list[Delivery]) -> int:
    payloads = sum([len(each.envelope.payload) for each in deliveries])
    return payloads + _OVERHEAD_BYTES * len(deliveries)
