"""Relink's consumers: deliveries on channel 0, which a link holds until it has consumed them.

The link is the consumer, not its connection. While it is disconnected, what it holds goes to nobody
else, and a subscriber without a name stays subscribed. Queues and named subscriptions give it
nothing new meanwhile, so that others can have it. A subscriber without a name gets a publication
once, when it is published: a burst waits here until the channel's window has room.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from typing import Final

import msgspec

from crosswire.envelope import Envelope
from crosswire.errors import (
    CrosswireError,
    InvalidRequest,
    LimitExceeded,
    TooLargeToSend,
)
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.relink.link_end import LinkEnd, LinkWindow
from crosswire.gateways.relink.link_records import LoadedLink, Outbound, Parts, SentRun, encode_runs
from crosswire.gateways.relink.messages import count_of, to_parts
from crosswire.hub.attachment import LEFT, UNSUBSCRIBED, Attachment, Delivery, Ended, Notice
from crosswire.hub.subscribers import Subscriber
from crosswire.hub.subscriptions import AtId, Start
from crosswire.wire.contract import Event
from crosswire.wire.relink.events import (
    Acknowledged,
    LinkResumed,
    MessageReceived,
    ShutdownReceived,
)

__all__ = ["ConsumeEnd"]

_CHANNEL: Final = 0
_BURST: Final = 65536
"""Publications that may wait here for a subscriber without a name."""
_HELD_BYTES: Final = 16 << 20
"""A consumer with more than this outstanding gets nothing more until it has consumed."""


class _EncodedCopies:
    """The last batch of envelopes as messages and as a row of the store.

    The subscribers of a topic get the same batch one after the other: it is encoded once.
    """

    def __init__(self, _context: GatewayContext) -> None:
        self.envelopes: list[Envelope] = []
        self.messages: list[Parts] = []

    def keep(self, envelopes: list[Envelope], messages: list[Parts], row: msgspec.Raw) -> None:
        """Replace the batch."""
        self.envelopes = envelopes
        self.messages = messages
        self.row = row
        self.ids = [each.id for each in envelopes]
        self.size_bytes = sum([len(each.payload) for each in envelopes])
        self.part_bytes = sum([len(part) for parts in messages for part in parts])


class ConsumeEnd(LinkEnd):
    """A consumer of a queue or of a topic, with a name or without."""

    attachment: Attachment | None = None

    def attach(self) -> None:
        """Consume, and hold what the link held before a restart. Raises HubError."""
        endpoint = self.endpoint
        out = self.outbound.setdefault(_CHANNEL, Outbound())
        self._out = out
        self._ids: deque[int] = deque()
        self._waiting: list[Envelope] = []
        self._unnoted: list[Envelope] = []
        """What an unnamed subscriber was given while the link had no connection: the ledger has it
        as delivered when a connection carries it, not before."""
        self._received = out.done
        self._held_bytes = sum(row[2] for row in out.rows)
        self._missing: set[int] = set()
        self._is_topic = endpoint.destination.startswith("topic/")
        self._is_unnamed = self._is_topic and not endpoint.name
        self._is_pattern = self._is_topic and bool({"+", "#"} & set(endpoint.destination))
        loaded = self._loaded
        if loaded is not None:
            self._remember(loaded)
        most = _BURST if self._is_unnamed else self.limits.window
        self._room = LinkWindow(max(most - out.outstanding, 0))
        self.attachment = self._attach()
        if isinstance(self.attachment, Subscriber):
            # Not before `joined`: a link is attached before its connection has agreed on it.
            self.attachment.is_connected = False
        # The hub takes what the link holds off the window; it is taken off above already, along
        # with messages that the hub no longer has.
        self._room.window.free = 0
        if loaded is None and self._is_unnamed and endpoint.start == "latest":
            # Saved, so that after a restart it continues here and not at the newest message then.
            out.last_id = self.hub.store.newest_id
            self.rows.save_marks(_CHANNEL, out)
        self.steer()

    def _attach(self) -> Attachment:
        hub, endpoint, now = self.hub, self.endpoint, self.context.now()
        if not self._is_topic:
            return hub.consume(
                endpoint.destination,
                self,
                now,
                peer=self.peer,
                window=self._room.window,
                filter=endpoint.filter,
                holding=list(self._ids),
            )
        return hub.subscribe(
            endpoint.destination,
            self,
            now,
            peer=self.peer,
            window=self._room.window,
            filter=endpoint.filter,
            name=endpoint.name,
            start=self._start(),
            holding=list(self._ids),
        )

    def _start(self) -> Start:
        """Where it starts; after a restart an unnamed one follows the last that it got."""
        last = self._ids[-1] if self._ids else self._out.last_id
        return AtId(last + 1) if last and self._is_unnamed else self.endpoint.start

    def _remember(self, loaded: LoadedLink) -> None:
        """Restore the ids of messages that the peer has, or is to get again."""
        for first, runs in loaded.sent.get(_CHANNEL, []):
            ids = [each for run in runs for each in array("q", run.ids)]
            self._ids += ids[max(0, self._out.done - first) :]

    # Connections.

    @property
    def is_busy(self) -> bool:
        """Whether the peer has messages that it has not consumed."""
        return bool(self._ids)

    def joined(self) -> None:
        """Give it what has waited; the ledger names the new connection."""
        attachment = self.attachment
        assert attachment is not None
        attachment.peer = self.peer
        if isinstance(attachment, Subscriber):
            attachment.is_connected = True
            if self._unnoted:
                attachment.note_delivered(self._unnoted)
                self._unnoted = []
        self.steer()

    def left(self) -> None:
        """Give it nothing new until it is connected again, unless it is an unnamed subscriber."""
        if isinstance(self.attachment, Subscriber):
            self.attachment.is_connected = False
        self.steer()

    def ended(self) -> None:
        """Give back what the peer has not consumed."""
        attachment = self.attachment
        if attachment is None:
            return
        if isinstance(attachment, Subscriber) and attachment.is_open:
            unnoted = {each.id for each in self._unnoted}
            given = [*self._ids, *(each.id for each in self._waiting)]
            returned = [each for each in given if each not in unnoted]
            if returned:
                attachment.note_returned(returned)
        has_shut_down = self._link is not None and self._link.peer_shut_down
        attachment.close(self.context.now(), cause=UNSUBSCRIBED if has_shut_down else LEFT)

    # Sending.

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send deliveries, once they are written, connected or not: a resume repeats them."""
        envelopes = [each.envelope for each in deliveries]
        self._held_bytes += sum([len(each.payload) for each in envelopes])
        if self._held_bytes > _HELD_BYTES:
            self.steer()
        if isinstance(attachment, Subscriber):
            if not attachment.is_connected:
                self._unnoted += envelopes
            self._waiting += envelopes
            self._send_waiting()
        else:
            self._send_on(envelopes)

    def _send_waiting(self) -> None:
        """Send as many waiting publications as the channel's window has room for."""
        room = self.limits.window - self._out.outstanding
        if self._waiting and room > 0:
            envelopes = self._waiting[:room]
            del self._waiting[:room]
            self._send_on(envelopes)

    def _send_on(self, envelopes: list[Envelope]) -> None:
        """Save which messages are about to be sent, then send them."""
        self._require_link()
        copies = (
            self.context.shared(_EncodedCopies)
            if self._is_unnamed
            else _EncodedCopies(self.context)
        )
        # Compared by value, which is quick: equal batches hold the same envelope objects.
        if envelopes != copies.envelopes:
            messages = [to_parts(each) for each in envelopes]
            copies.keep(envelopes, messages, encode_runs(self._runs(envelopes, messages)))
        messages = copies.messages
        if copies.part_bytes > self.limits.frame_bytes // 2:
            fitting = self._fitting(envelopes, messages)
            if len(fitting) < len(envelopes):
                if fitting:
                    self._send_on(fitting)
                return
        self._ids += copies.ids
        # The row first, the message after its write: a hub that is killed in between resumes the
        # link with the same numbers, and repeats what the peer did not get.
        self.plan(_CHANNEL, copies.row, len(messages), copies.size_bytes)
        self.once_written(lambda: self.send(_CHANNEL, messages))

    def _fitting(self, envelopes: list[Envelope], messages: list[Parts]) -> list[Envelope]:
        """Those that a packet can carry. The others are refused: another consumer may take them."""
        fitting: list[Envelope] = []
        unfit: list[tuple[Envelope, str]] = []
        for envelope, parts in zip(envelopes, messages, strict=True):
            try:
                self.require_room(parts)
            except TooLargeToSend as error:
                unfit.append((envelope, f"too large for Relink: {error}"))
            else:
                fitting.append(envelope)
        now = self.context.now()
        for envelope, cause in unfit:
            self._held_bytes -= len(envelope.payload)
            self._room.free(1)
            if self.attachment is not None:
                self.attachment.refuse([envelope.id], now, cause=cause)
        if unfit:
            self.steer()
        return fitting

    def _runs(self, envelopes: list[Envelope], messages: list[Parts]) -> list[SentRun]:
        """The row that finds these again: one run for each destination that they have."""
        if not self._is_pattern:
            return [self._run(envelopes, messages)]
        runs: list[SentRun] = []
        start = 0
        for index in range(1, len(envelopes) + 1):
            if (
                index == len(envelopes)
                or envelopes[index].destination != envelopes[start].destination
            ):
                runs.append(self._run(envelopes[start:index], messages[start:index]))
                start = index
        return runs

    def _run(self, envelopes: list[Envelope], messages: list[Parts]) -> SentRun:
        destination = envelopes[0].destination
        ids = array("q", [each.id for each in envelopes]).tobytes()
        if self._is_topic and not self.hub.topic(destination).policy.durable:
            # The store doesn't have them: the row keeps the messages themselves.
            return SentRun(destination, ids, messages)
        return SentRun(destination, ids)

    def recall(self, runs: list[SentRun]) -> list[Parts | None]:
        """The messages of a row, read from their queue or topic; None for one that is gone."""
        messages: list[Parts | None] = []
        for run in runs:
            if run.parts:
                messages += run.parts
            else:
                found = self.hub.fetch(run.destination, array("q", run.ids).tolist())
                messages += [None if each is None else to_parts(each) for each in found]
        return messages

    def _recalled(self, out: Outbound, rows: list[tuple[int, list[SentRun]]]) -> list[Parts | None]:
        messages = super()._recalled(out, rows)
        self._missing = {number for number, parts in enumerate(messages, out.done) if parts is None}
        return messages

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """End the link with a subscription that ended; Relink can't report a gap."""
        if isinstance(notice, Ended):
            self.end(LimitExceeded(f"{attachment.destination}: {notice.reason}"))
        elif self.gateway is not None:
            self.gateway.log(
                logging.INFO, "notice", destination=attachment.destination, notice=str(notice)
            )

    @property
    def held_bytes(self) -> int:
        """What it keeps in memory: messages that the peer has not consumed."""
        return super().held_bytes + self._held_bytes

    # Acknowledgements.

    def receive(self, events: list[Event]) -> None:
        """Settle or refuse what the peer has acknowledged.

        Without transactions `consumed` settles. With them `committed` settles and `uncommitted`
        refuses, and `consumed` means nothing. Acknowledgements come in the order of messages.
        """
        settled: list[int] = []
        refused: list[int] = []
        finished = 0
        shut_down = False
        transactions = self.link.transactions
        for event in events:
            if type(event) is Acknowledged:
                count = count_of(event)
                kind = event.acknowledgement
                if self._missing:
                    self._received = max(self._received, self._number(event.last) + 1)
                if kind != "received" and (kind == "consumed") is not transactions:
                    ids = [self._ids.popleft() for _ in range(count)]
                    (refused if kind == "uncommitted" else settled).extend(ids)
                    finished += count
            elif type(event) is MessageReceived:
                self.end(InvalidRequest("a consumer's endpoint takes no messages"))
                return
            elif type(event) is LinkResumed:
                # The peer has named by now what it received before the cut.
                if not self._is_complete():
                    return
            elif type(event) is ShutdownReceived:
                shut_down = True
        if finished:
            self._finish(finished, settled, refused)
        if shut_down:
            self.link.shutdown()

    def _finish(self, count: int, settled: list[int], refused: list[int]) -> None:
        attachment, now = self.attachment, self.context.now()
        assert attachment is not None
        # Before `done`, which saves it: where an unnamed subscriber continues after a restart.
        self._out.last_id = max(settled[-1:] + refused[-1:])
        self._held_bytes -= self.done(_CHANNEL, count)
        self._room.free(count)
        if settled:
            attachment.settle(settled, now)
        if refused:
            attachment.refuse(refused, now)
        if self._waiting:
            self._send_waiting()
        self.steer()

    def _number(self, sequence: int) -> int:
        """The number of the message that a sequence number of the wire names."""
        last = self._out.next - 1
        return last - (last - sequence) % (1 << 32)

    def _is_complete(self) -> bool:
        """Whether everything that the peer did not receive before a restart can be repeated.

        Messages may have expired or been deleted; a link with a hole in it ends.
        """
        if any(number >= self._received for number in self._missing):
            self.end(CrosswireError("messages that this link holds are gone"))
            return False
        self._missing.clear()
        return True

    # Room.

    def steer(self) -> None:
        """Give the hub room while the peer reads and has not too much outstanding.

        An unnamed subscriber gets publications while it is disconnected too: they come only once.
        """
        gateway = self.gateway
        can_send = self._is_unnamed if gateway is None else not gateway.session.congested
        has_room = self._held_bytes <= _HELD_BYTES and not self.forgotten
        self._room.steer(can_send and has_room, self.context.now())
