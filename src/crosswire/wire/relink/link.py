"""A link: the state that two peers share, independent of the connections between them.

A link is a set of channels in each direction. It takes the packets that a connection received and
gives those that are to be sent. It can be used while there is no connection: what is sent then is
kept, and what is acknowledged then is reported later.

**Identity.** The listener names a link by a link id and its epoch, which changes when the listener
has lost its links (specification 1). A connector that reconnects offers both; if the listener
answers with the same ones, the link is resumed, otherwise the connector starts a new one.

**Halves.** `SendingHalf` has our channels: messages are numbered, fill the window of their channel
until the peer has consumed them, and are kept until it has received them. `ReceivingHalf` has the
peer's channels: what arrived, what is acknowledged, what was committed. Where a direction uses
transactions, its sender decides on each message, commit or rollback, and the receiver settles what
was committed. `Link` joins the halves to connections.

**Resumption** (specification 3.5). On a new connection of an old link, both peers do the same:

    1. report     every channel that they receive on: received, committed or uncommitted, consumed,
                  closed; then `resume`. Acknowledgements are derived from the channels' marks, so
                  that reporting everything is the ordinary case with nothing reported yet.
    2. wait       for the peer's `resume`. Until then nothing new is sent: it could be a repetition.
    3. repeat     every message and operation that the peer did not report, in the order of their
                  first sending; then `shutdown`, if it had been sent.

A receiver passes over repeated messages and operations that it had before, so that each message is
given to its owner once.

**Shutdown** (specification 3.6). Each peer sends it once on each connection, and opens no channel
after it. A link ends when both have sent theirs and nothing is left to be consumed (`finished`),
by a violation, or when the listener has forgotten it. An ended link is never resumed.

`save` and `restore` carry a link over a restart of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from crosswire.errors import LocalProtocolError, UnexpectedFrame
from crosswire.wire.contract import Event, Frame, one_of
from crosswire.wire.relink.channels import Parts, ReceivingChannel
from crosswire.wire.relink.events import LinkResumed, ShutdownReceived
from crosswire.wire.relink.frames import (
    DEFAULTS,
    Buffer,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    RelinkLimits,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
)
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.receiving import ReceivingHalf
from crosswire.wire.relink.saved import SavedLink, decode, encode
from crosswire.wire.relink.sending import SendingHalf

__all__ = ["Link", "Phase"]


class Phase(Enum):
    """What a link can do at the moment."""

    DETACHED = "detached"
    """There is no connection."""
    RESUMING = "resuming"
    """There is a connection, but the peer hasn't reported yet what it received before."""
    OPEN = "open"
    """Messages are sent and received."""


class Link:
    """One peer's view of a link. `role` is "connector" or "listener".

    `epoch` and `id` are zero until the handshake of the first connection has set them. `start` is
    the sequence number of a channel's first message: 0 in the protocol, others for tests of the
    wrap-around.
    """

    def __init__(
        self,
        role: str,
        terms: LinkTerms,
        *,
        epoch: int = 0,
        id: int = 0,  # noqa: A002
        limits: RelinkLimits | None = None,
        start: int = 0,
    ) -> None:
        self.role = role
        self.terms = terms
        self.epoch = epoch
        self.id = id
        self.limits = one_of(limits, DEFAULTS)
        self.start = start
        self.phase = Phase.DETACHED
        self.ended = False
        """By shutdown, by a violation, or because the listener forgot it: it can't be resumed."""
        self.shut_down = False
        self.peer_shut_down = False
        is_connector = role == "connector"
        ours, theirs = terms.connector_transactions, terms.listener_transactions
        self._sending = SendingHalf(
            self.limits,
            id_size=terms.connector_id_size if is_connector else terms.listener_id_size,
            transactions=ours if is_connector else theirs,
            start=start,
        )
        self._receiving = ReceivingHalf(
            self.limits, transactions=theirs if is_connector else ours, start=start
        )
        self._shut_down_first = False
        self._announce_resume = False
        self._handlers: dict[type[Frame], Callable[..., None]] = {
            Message: self._receiving.receive_message,
            ChannelOperation: self._receiving.receive_operation,
            SequenceOperation: self._receiving.receive_operation,
            ChannelAcknowledgement: self._sending.receive_acknowledgement,
            SequenceAcknowledgement: self._sending.receive_acknowledgement,
            Resume: self._on_resume,
            Shutdown: self._on_shutdown,
        }

    @property
    def transactions(self) -> bool:
        """Whether the channels that we send on use transactions."""
        return self._sending.transactions

    @property
    def peer_transactions(self) -> bool:
        """Whether the channels that we receive on use transactions."""
        return self._receiving.transactions

    @property
    def guarded(self) -> bool:
        """Whether the owner stores acknowledgements before the peer may receive them.

        Then nothing is acknowledged, not even a rollback or a closure, until it calls `adopt`.
        """
        return self._receiving.guarded

    @guarded.setter
    def guarded(self, guarded: bool) -> None:
        self._receiving.guarded = guarded

    @property
    def held_bytes(self) -> int:
        """Bytes of messages that have arrived and are not consumed."""
        return self._receiving.held_bytes

    @property
    def unconsumed_bytes(self) -> int:
        """Those of them that the peer has committed, so that the owner can consume them."""
        return self._receiving.held_bytes - self._receiving.undecided_bytes

    # Sending: each may be called at any time, connection or not. On a link that has ended, what
    # gives a sequence number raises LocalProtocolError, and all else is ignored: the end may have
    # been received in the same read as what is being answered.

    def room(self, channel: int) -> int:
        """How many messages the channel's window has room for."""
        return 0 if self.ended or self.shut_down else self._sending.room(channel)

    def send(self, channel: int, parts: Sequence[Buffer]) -> int:
        """Send a message; gives its sequence number. Opens the channel if it is not open.

        Raises LocalProtocolError if the window is full or the link was shut down.
        """
        self._require_sendable()
        return self._sending.send((channel,), tuple(parts), multicast=False)[0]

    def send_run(self, channel: int, run: Sequence[Parts]) -> None:
        """`send`, for many messages on one channel."""
        self._require_sendable()
        self._sending.send_run(channel, run)

    def send_multicast(self, channels: Sequence[int], parts: Sequence[Buffer]) -> list[int]:
        """Send a message to several channels; a channel that is named twice gets it twice."""
        self._require_sendable()
        return self._sending.send(tuple(channels), tuple(parts), multicast=True)

    def commit(self, channel: int, sequence: int | None = None) -> None:
        """Have the messages up to `sequence`, or all that were sent, processed."""
        if not self.ended:
            self._sending.decide(channel, sequence, is_commit=True)

    def rollback(self, channel: int, sequence: int | None = None) -> None:
        """Have the messages up to `sequence`, or all that were sent, ignored."""
        if not self.ended:
            self._sending.decide(channel, sequence, is_commit=False)

    def close(self, channel: int) -> None:
        """Close a channel. It can be opened again after the event ChannelClosed."""
        if not self.ended:
            self._sending.close(channel)

    def shutdown(self) -> None:
        """Send no more messages. When both peers have shut down, the link ends; harmless twice.

        What was received before is still to be consumed, and what was sent is still acknowledged.
        """
        if self.shut_down or self.ended:
            return
        if self._sending.undecided:
            raise LocalProtocolError("there are messages to be committed or rolled back")
        self.shut_down = True
        self._shut_down_first = not self.peer_shut_down
        self._sending.enqueue(Shutdown())

    @property
    def unconsumed(self) -> int:
        """How many of our messages the peer has not consumed."""
        return self._sending.unconsumed

    # Acknowledging: each covers everything up to `sequence`, may be called at any time, and is
    # ignored on a link that has ended.

    def is_receiving(self, channel: int) -> bool:
        """Whether the peer has opened this channel and we have not acknowledged its closure."""
        return channel in self._receiving.channels

    def mark_received(self, channel: int, sequence: int) -> None:
        """The messages are stored: the peer need not keep them."""
        if not self.ended:
            self._receiving.mark_received(channel, sequence)

    def consume(self, channel: int, sequence: int) -> None:
        """The application has processed the messages; implies received."""
        if not self.ended:
            self._receiving.consume(channel, sequence)

    def settle(self, channel: int, sequence: int, *, committed: bool = True) -> None:
        """The application has processed committed messages; `committed` if it succeeded."""
        if not self.ended:
            self._receiving.settle(channel, sequence, committed=committed)

    # Acknowledging on a guarded link: the owner makes the marks on a copy, stores that, and adopts
    # it when it is durable. Were it the other way round, a crash in between would leave a peer that
    # has dropped messages of which we know nothing.

    def copy_channel(self, channel: int) -> ReceivingChannel | None:
        """A copy of a channel that the peer has opened, on which marks can be made."""
        receiving = self._receiving.channels.get(channel)
        return None if receiving is None else receiving.copy()

    def adopt(self, channel: int, changed: ReceivingChannel) -> None:
        """Apply the marks, and the closure, that were made on a copy: the peer may receive them."""
        if not self.ended:
            self._receiving.adopt(channel, changed)

    # For the connection.

    def attach(self, *, resumed: bool) -> None:
        """A connection has agreed on this link, which is new to the peer or resumed."""
        if self.phase is not Phase.DETACHED or self.ended:
            raise LocalProtocolError("the link has a connection, or has ended")
        self._receiving.accepts_channels = True
        if not resumed:
            # There is nothing to report, but messages may have been sent before the connection.
            self._open()
            return
        self.phase = Phase.RESUMING
        self._announce_resume = True
        self._receiving.resume()

    def detach(self, *, ended: bool = False) -> None:
        """The connection is gone; if `ended`, so is the link."""
        self.phase = Phase.DETACHED
        self.ended = self.ended or ended
        self._sending.detach()
        self._receiving.detach()
        self._announce_resume = False

    def check_multicast(self, packet: Message) -> None:
        """Raises LimitExceeded for a message whose copies would take too much memory."""
        self._receiving.check_multicast(packet)

    def receive(self, packet: Frame, events: list[Event]) -> None:
        """Apply a packet; add events. Raises RemoteProtocolError."""
        self._handlers[type(packet)](packet, events)

    def receive_run(self, packets: Sequence[Message], events: list[Event]) -> None:
        """`receive`, for consecutive messages."""
        self._receiving.receive_run(packets, events)

    def packets(self) -> list[Frame]:
        """What is to be sent since the last call, in order.

        Acknowledgements precede `resume`, which declares them complete, and our own messages: they
        make room in the peer's windows.
        """
        if self.phase is Phase.DETACHED:
            return []
        packets = self._receiving.take_packets(fully=self._announce_resume)
        if self._announce_resume:
            self._announce_resume = False
            packets.append(Resume())
        packets += self._sending.take_packets()
        return packets

    @property
    def finished(self) -> bool:
        """Both peers have shut down, and the first to do so knows that all it sent was consumed.

        The second one does not wait for that: a consumer that leaves will not consume what it
        holds, and waiting would only delay the redelivery.
        """
        return (
            self.shut_down
            and self.peer_shut_down
            and self.phase is Phase.OPEN
            and self._receiving.is_consumed
            and not (self._shut_down_first and self.unconsumed)
        )

    @property
    def closures(self) -> dict[int, ReceivingChannel]:
        """The closed channels of which the peer may not have received our `closed`."""
        return dict(self._receiving.closed)

    def confirm(self, closures: dict[int, ReceivingChannel]) -> None:
        """The peer has received `closed` for these: it has answered a ping that was sent later."""
        closed = self._receiving.closed
        for channel, receiving in closures.items():
            # Another object is a later life of the channel, which the pong does not cover.
            if closed.get(channel) is receiving:
                del closed[channel]

    def _on_resume(self, _packet: Resume, events: list[Event]) -> None:
        self._sending.apply_reports(events)
        self._open()
        events.append(LinkResumed())

    def _on_shutdown(self, _packet: Shutdown, events: list[Event]) -> None:
        # Once on each connection; that the link is shut down stays known, and is reported once.
        if not self._receiving.accepts_channels:
            raise UnexpectedFrame("a second shutdown")
        self._receiving.accepts_channels = False
        if not self.peer_shut_down:
            self.peer_shut_down = True
            events.append(ShutdownReceived())

    def _open(self) -> None:
        self.phase = Phase.OPEN
        self._sending.repeat()
        if self.shut_down:
            self._sending.enqueue(Shutdown())

    def _require_sendable(self) -> None:
        if self.ended:
            raise LocalProtocolError("the link has ended")
        if self.shut_down:
            raise LocalProtocolError("the link was shut down: no more messages")

    # Saving.

    def save(self) -> bytes:
        """The whole link, as `restore` of the same version reads it.

        Of what has arrived it contains what was marked as received: the rest will be repeated. So
        will be a shutdown that followed it, which is saved only if nothing of that kind is left.
        """
        sending, receiving = self._sending, self._receiving
        is_whole = all(each.received == each.arrived for each in receiving.channels.values())
        return encode(
            SavedLink(
                role=self.role,
                terms=self.terms,
                epoch=self.epoch,
                id=self.id,
                start=self.start,
                order=sending.order,
                ended=self.ended,
                shut_down=self.shut_down,
                shut_down_first=self._shut_down_first,
                peer_shut_down=self.peer_shut_down and is_whole,
                sending=sending.channels,
                receiving={
                    number: channel.durable()
                    for number, channel in receiving.channels.items()
                    if channel.received > channel.start
                },
                closed={number: channel.durable() for number, channel in receiving.closed.items()},
                used=list(sending.used),
            )
        )

    @classmethod
    def restore(cls, data: bytes, *, limits: RelinkLimits | None = None) -> Link:
        """The link that `save` was called on, without a connection. Raises LinkStateError."""
        saved = decode(data)
        link = cls(
            saved.role,
            saved.terms,
            epoch=saved.epoch,
            id=saved.id,
            limits=limits,
            start=saved.start,
        )
        link.ended = saved.ended
        link.shut_down, link._shut_down_first = saved.shut_down, saved.shut_down_first
        link.peer_shut_down = saved.peer_shut_down
        sending, receiving = link._sending, link._receiving
        sending.order, sending.channels = saved.order, saved.sending
        sending.used = dict.fromkeys(saved.used)
        receiving.channels, receiving.closed = saved.receiving, saved.closed
        for channel in receiving.channels.values():
            receiving.held_bytes += channel.held_bytes
            receiving.undecided_bytes += channel.undecided_bytes
        return link
