"""Messages for one MicroMsg2 peer: sent while window and socket allow, else queued in order.

A delivery is settled by the acknowledgement of its last frame; where no acknowledgements were
agreed, by being written, as long as the peer reads. What waits is limited: above the limit the hub
is given no room, so that queues keep their messages and topics go on without this peer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from crosswire.envelope import Envelope, Property
from crosswire.errors import LocalProtocolError
from crosswire.gateways.gateway import Gateway, WithheldRoom
from crosswire.gateways.micromsg2.messages import MessageFormat
from crosswire.gateways.payloads import BYTES
from crosswire.hub.attachment import Attachment, Delivery, Notice, Window
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.frames import message_prefix
from crosswire.wire.micromsg2.values import serialize_properties

__all__ = ["DirectMessage", "Outbox"]

_SMALL_BYTES: Final = 65536
"""Payloads up to this size are sent in runs: one call of the connection for many messages."""
_BURST: Final = 65536
"""Publications that may wait here for a subscriber without a name."""
_OVERHEAD_BYTES: Final = 64
"""What a waiting delivery counts beside its payload."""
_PROPERTIES_BYTES: Final = 65535
"""The most that the 16 bit length of a MESSAGE's properties allows."""

_REFUSALS: Final = 32_767
"""As many as frames can be outstanding: a peer can't have more of them refused."""

_PREFIXES: Final = 1024
_PREFIX_BYTES: Final = 4096
_prefixes: Final[dict[int, tuple[Envelope, bytes]]] = {}
"""Serialized heads of recent publications: a topic's subscribers all get the same one."""


class DirectMessage:
    """A message without a subscription: an answer, or a call for a provider.

    `sent` is called when it was sent, with the error if it can't be. One that is no longer
    `is_wanted` is dropped when its turn comes.
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
    """Deliveries of an attachment, of which those from `index` on are not sent."""

    __slots__ = ("attachment", "deliveries", "index")

    def __init__(self, attachment: Attachment, deliveries: list[Delivery], index: int) -> None:
        self.attachment = attachment
        self.deliveries = deliveries
        self.index = index


class Outbox:
    """What one peer is to be sent, and what it was sent and has not acknowledged.

    It is the hub's receiver of the deliveries of all subscriptions of the connection.
    """

    def __init__(
        self, gateway: Gateway, connection: MicroMsg2Connection, message_format: MessageFormat
    ) -> None:
        limits = gateway.context.config.connections
        self._short: set[str] = set()
        """Destinations that the peer calls by their bare name."""
        self._bare_prefixes: dict[tuple[str, str], bytes] = {}
        """Serialized heads of messages without properties of their own, by destination and content
        type, on which alone they depend."""
        self._gateway = gateway
        self._connection = connection
        self._to_message = message_format.to_message
        self._most_bytes = limits.congested_bytes
        self._has_acks = connection.agreement.window is not None
        self._plain_type = BYTES if connection.carries_anything else None
        self._shared = Window(connection.agreement.window or limits.window)
        self._burst = Window(_BURST)
        self._waiting: deque[_Waiting | DirectMessage] = deque()
        self._waiting_bytes = 0
        self._sent: deque[tuple[Attachment | None, list[int]]] = deque()
        """Messages in the order of their frames, which acknowledgements follow."""
        self._settled: dict[Attachment, list[int]] = {}
        self._refusals: dict[int, str] = {}
        """Reasons by sequence number, of messages whose acknowledgement will refuse them."""
        self._settle_planned = False
        self._unfit: list[tuple[Attachment, int, str]] = []
        self._withheld = WithheldRoom()

    # Room.

    def window(self, destination: str, name: str, requested: int | None) -> Window:
        """The hub's window for a new subscription.

        All subscriptions share the frames that may wait for an acknowledgement, unless one asks
        for less. A subscriber without a name gets a publication once, when it is published: its
        window is large, so that a burst waits here instead of being lost.
        """
        if destination.startswith("topic/") and not name:
            return self._burst if requested is None else Window(min(requested, _BURST))
        if requested is not None:
            most = self._connection.agreement.window or _BURST
            return Window(min(requested, most))
        return self._shared if self._has_acks else Window(self._shared.free)

    def _limit_waiting(self) -> None:
        """Take all room from the hub while too much waits; give it back at half of that."""
        if not self._withheld and self._waiting_bytes > self._most_bytes:
            self._withheld.take([each.window for each in self._gateway.attachments])
        elif self._withheld and self._waiting_bytes <= self._most_bytes // 2:
            self._withheld.give_back(self._gateway.context.now())

    def use_short_name(self, destination: str) -> None:
        """From now on this queue is called by its bare name, as the peer has called it."""
        self._short.add(destination)
        self._bare_prefixes.clear()

    # Sending.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send deliveries, or queue those that the peer has no credit for."""
        if self._connection.closed:
            return
        index = 0
        # Only if nothing waits: deliveries of one connection are sent in the order of the hub.
        if not self._waiting and not self._gateway.session.congested:
            index = self._send(attachment, deliveries, 0)
        if index < len(deliveries):
            self._waiting.append(_Waiting(attachment, deliveries, index))
            self._waiting_bytes += _size(deliveries[index:])
            self._limit_waiting()
        self._gateway.session.wake()
        self._refuse_unfit()

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """The gateway ends the connection with a subscription that ended, and logs a gap."""
        self._gateway.notice(attachment, notice)

    @property
    def is_gone(self) -> bool:
        """Whether the peer is gone: then it must not hold anything of the hub."""
        return self._gateway.is_gone

    def broken(self, error: Exception) -> None:
        """End the connection: a delivery could not be handled."""
        self._gateway.broken(error)

    def send(self, message: DirectMessage) -> None:
        """Send a message, after all that waits."""
        if self._waiting or not self._connection.credit or self._gateway.session.congested:
            self._waiting.append(message)
        else:
            self._post(message)
        self._gateway.session.wake()

    def flush(self) -> None:
        """Send as much of what waits as the peer's window and its socket take now.

        Called at the end of each read, which may have brought acknowledgements.
        """
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
        if self._withheld:
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
            # It takes a turn in the order of acknowledgements, but settles nothing.
            self._sent.append((None, [0]))
        message.sent(None)

    def _send(self, attachment: Attachment, deliveries: list[Delivery], index: int) -> int:
        """Send from `index` on while there is credit; gives the index after the last one.

        The credit is checked before each message: a peer ends the connection with ERROR `limit` if
        more frames are outstanding than were agreed. A message of several frames uses more than
        one, so small ones are collected in a run and the others sent one by one.
        """
        connection, plain_type = self._connection, self._plain_type
        credit = connection.credit
        run: list[tuple[bytes, bytes]] = []
        ids: list[int] = []
        name, content_type, prefix = "", "", b""
        properties: Mapping[str, Property]
        end = len(deliveries)
        while index < end and len(run) < credit:
            envelope = deliveries[index].envelope
            index += 1
            payload, properties = envelope.payload, envelope.properties
            try:
                is_small = plain_type is not None and len(payload) <= _SMALL_BYTES
                if is_small and not (properties or envelope.correlation or envelope.reply_to):
                    if envelope.destination != name or envelope.content_type != content_type:
                        key = (envelope.destination, envelope.content_type)
                        prefix = self._bare_prefixes.get(key) or self._bare_prefix(envelope)
                        # After it: if it raises, `prefix` is still that of the old name.
                        name, content_type = key
                    run.append((prefix, payload))
                    ids.append(envelope.id)
                    continue
                if envelope.content_type != plain_type or envelope.correlation or envelope.reply_to:
                    payload, properties = self._to_message(envelope)
                if is_small:
                    run.append((self._prefix(envelope, properties), payload))
                else:
                    if run:
                        connection.send_run(run)
                        run = []
                        credit = connection.credit
                        if not credit:
                            # The run took the last of it: this message waits.
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
        return name.removeprefix("queue/") if name in self._short else name

    def _bare_prefix(self, envelope: Envelope) -> bytes:
        """The head of a message that has no properties but what its content type adds."""
        _, properties = self._to_message(envelope)
        prefix = self._write_prefix(envelope, properties)
        if len(prefix) <= _PREFIX_BYTES:
            if len(self._bare_prefixes) >= _PREFIXES:
                self._bare_prefixes.clear()
            self._bare_prefixes[envelope.destination, envelope.content_type] = prefix
        return prefix

    def _prefix(self, envelope: Envelope, properties: Mapping[str, Property]) -> bytes:
        if envelope.kind != "publish":
            return self._write_prefix(envelope, properties)
        known = _prefixes.get(envelope.id)
        # The id alone is not enough: another hub in this process may use the same.
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
        if len(head) > _PROPERTIES_BYTES:
            raise LocalProtocolError(f"properties of more than {_PROPERTIES_BYTES} bytes")
        return message_prefix(self._name(envelope).encode(), head)

    def _refuse_unfit(self) -> None:
        """Refuse messages that MicroMsg2 can't carry: another consumer may be able to take them.

        Called after sending, since refusing frees room and may deliver more at once.
        """
        unfit, self._unfit = self._unfit, []
        for attachment, identifier, cause in unfit:
            attachment.refuse([identifier], self._gateway.context.now(), cause=cause)

    # Settling.

    def _note_sent(self, attachment: Attachment, ids: list[int]) -> None:
        sent = self._sent
        if not self._has_acks:
            self._settled.setdefault(attachment, []).extend(ids)
            if not self._settle_planned:
                self._settle_planned = True
                self._gateway.session.wake()
                # After the write, which `wake` has planned: only then it is known whether the peer
                # keeps up.
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
        """The peer reads again: settle what was written, and send more."""
        if not self._has_acks:
            self.settle()
        self.flush()

    def refuse(self, sequence: int, reason: str) -> None:
        """The peer can't process a message: its acknowledgement refuses it.

        Only then, because acknowledgements are in the order of messages.
        """
        if len(self._refusals) < _REFUSALS:
            self._refusals[sequence] = reason

    def acknowledged(self, sequences: Sequence[int]) -> None:
        """The peer has acknowledged the oldest messages; `settle` passes it on."""
        if not self._refusals:
            self._pop(len(sequences))
            return
        now = self._gateway.context.now()
        for sequence in sequences:
            reason = self._refusals.pop(sequence, None)
            attachment, ids = self._sent[0]
            if reason is None or attachment is None:
                self._pop(1)
                continue
            identifier = ids.pop(0)
            if not ids:
                self._sent.popleft()
            attachment.refuse([identifier], now, cause=reason)

    def _pop(self, count: int) -> None:
        sent = self._sent
        # Acknowledgements name frames in order, so the oldest messages are the ones acknowledged.
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
        """Settle acknowledged messages with the hub, in one call for each attachment."""
        if self._settled and not self._gateway.left:
            settled, self._settled = self._settled, {}
            now = self._gateway.context.now()
            for attachment, ids in settled.items():
                attachment.settle(ids, now)

    def forget(self, attachment: Attachment) -> None:
        """Drop what waits for an attachment that was closed.

        What was sent and not acknowledged went to others when it closed; a later acknowledgement
        settles nothing, since attachments ignore ids that they don't hold.
        """
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
            # A burst window may be shared with other subscribers: only settling frees its room.
            attachment.settle(unsent, self._gateway.context.now())
        if self._withheld:
            self._limit_waiting()


def _size(deliveries: list[Delivery]) -> int:
    payloads = sum([len(each.envelope.payload) for each in deliveries])
    return payloads + _OVERHEAD_BYTES * len(deliveries)
