"""A link: what two peers owe one another, whatever becomes of the connections between them.

A link is a set of channels in each direction. It takes the packets that a connection received and
gives those that are to be sent, and it can be used while there is no connection: what is sent then
is kept, what is acknowledged then is told later. So a reconnection is no special case:

    acknowledgements   are not queued but read off the marks of each channel: `packets` tells what
                       the peer wasn't told yet, which after a reconnection is everything
    messages and       are kept until they are acknowledged; when the peer has resumed, those that
    operations         are left are sent again, in the order in which they were sent first

`save` and `restore` carry a link over a restart of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any

from crosswire.errors import LimitExceeded, LocalProtocolError, UnexpectedFrame
from crosswire.wire.contract import Event, Frame, one_of
from crosswire.wire.relink.channels import (
    Kept,
    Parts,
    ReceivingChannel,
    SendingChannel,
    ahead,
    named,
    on_the_wire,
    operation,
)
from crosswire.wire.relink.events import (
    Acknowledged,
    ChannelClosed,
    CloseReceived,
    CommitReceived,
    LinkResumed,
    MessageReceived,
    RollbackReceived,
    ShutdownReceived,
)
from crosswire.wire.relink.frames import (
    DEFAULTS,
    Acknowledgement,
    Buffer,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    RelinkLimits,
    Resume,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
    Zeros,
)
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.saved import SavedLink, decode, encode

__all__ = ["Link", "Phase"]


class Phase(Enum):
    DETACHED = "detached"
    """No connection."""
    RESUMING = "resuming"
    """A connection, but the peer hasn't said yet what it got before the cut."""
    OPEN = "open"
    """Messages flow."""


class Link:
    """One peer's view of a link. `role` is "connector" or "listener".

    `epoch` and `id` are zero until the handshake of the first connection has given them. `start` is
    the sequence number of a channel's first message; the protocol knows only 0.
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
        self.guarded = False
        """The owner has to keep what it acknowledges before the peer may hear of it: nothing is
        acknowledged, no rollback and no closure either, until it calls `adopt`."""
        pair = (terms.connector_transactions, terms.listener_transactions)
        self._transactions, self._peer_transactions = pair if role == "connector" else pair[::-1]
        self._window = self.limits.window
        self.phase = Phase.DETACHED
        self.ended = False
        """By shutdown, by a violation, or because the other side forgot it: it can't be resumed."""
        self.shut_down = False
        self.peer_shut_down = False
        self.held_bytes = 0
        """Of messages that arrived and are not consumed …"""
        self.undecided_bytes = 0
        """… and of those among them that the peer hasn't committed yet."""
        self._shut_down_first = False
        self._shutdown_received = False
        self._order = 0
        self._sending: dict[int, SendingChannel] = {}
        self._receiving: dict[int, ReceivingChannel] = {}
        # Channels that have been closed: by the peer, as long as it may not have heard our
        # `closed`, and by us. The peer's memory of what it closed must not be the longer one.
        self._closed: dict[int, ReceivingChannel] = {}
        self._used: dict[int, None] = {}
        self._queue: list[Frame] = []
        self._untold: dict[int, ReceivingChannel] = {}
        self._closed_again: dict[int, None] = {}
        self._announce_resume = False
        self._reports: dict[int, list[ChannelAcknowledgement | SequenceAcknowledgement]] = {}
        self._handlers: dict[type[Frame], Callable[..., None]] = {
            Message: self._on_message,
            ChannelOperation: self._on_operation,
            SequenceOperation: self._on_operation,
            ChannelAcknowledgement: self._on_acknowledgement,
            SequenceAcknowledgement: self._on_acknowledgement,
            Resume: self._on_resume,
            Shutdown: self._on_shutdown,
        }

    @property
    def transactions(self) -> bool:
        """Do the channels that we send on use transactions?"""
        return self._transactions

    @property
    def peer_transactions(self) -> bool:
        """Do the channels that we receive on use transactions?"""
        return self._peer_transactions

    # Sending: each may be called at any time, connection or not. On a link that has ended, what
    # gives a sequence number raises LocalProtocolError, and all else is ignored: the end may have
    # come in the same read as what is being answered.

    def room(self, channel: int) -> int:
        """How many messages the channel's window has room for."""
        if self.ended or self.shut_down:
            return 0
        sending = self._sending.get(channel)
        if sending is None:
            return self.limits.window
        return 0 if sending.close_order is not None else self.limits.window - sending.outstanding

    def send(self, channel: int, parts: Sequence[Buffer]) -> int:
        """Send a message; gives its sequence number. Opens the channel if it is not open."""
        return self._send((channel,), tuple(parts), multicast=False)[0]

    def send_run(self, channel: int, run: Sequence[Parts]) -> None:
        """`send`, for many messages on one channel."""
        self._require_sendable(channel, len(run))
        sending = self._sending.get(channel) or self._open_sending(channel)
        self._order = sending.add_run(self._order, run)
        if self.phase is Phase.OPEN:
            channels = (channel,)
            self._queue += [Message(channels, False, parts) for parts in run]

    def send_multicast(self, channels: Sequence[int], parts: Sequence[Buffer]) -> list[int]:
        """Send a message to several channels; a channel that is named twice gets it twice."""
        return self._send(tuple(channels), tuple(parts), multicast=True)

    def commit(self, channel: int, sequence: int | None = None) -> None:
        """Have the messages up to `sequence`, or all that were sent, processed."""
        self._decide(channel, sequence, is_commit=True)

    def rollback(self, channel: int, sequence: int | None = None) -> None:
        """Have the messages up to `sequence`, or all that were sent, ignored."""
        self._decide(channel, sequence, is_commit=False)

    def close(self, channel: int) -> None:
        """Close a channel. It can be opened again when ChannelClosed has come."""
        if self.ended:
            return
        sending = self._require_sending(channel)
        if sending.close_order is not None:
            raise LocalProtocolError(f"channel {channel} is being closed already")
        sending.close_order = self._next_order()
        if not sending.close_waits:
            self._enqueue(ChannelOperation("close", (channel,)))

    def shutdown(self) -> None:
        """Say that we send no more messages. When both peers have, the link ends; harmless twice.

        What was received before is still to be consumed, and what was sent is still acknowledged.
        """
        if self.shut_down or self.ended:
            return
        if self.transactions and any(
            sending.decided < sending.next for sending in self._sending.values()
        ):
            raise LocalProtocolError("there are messages to be committed or rolled back")
        self.shut_down = True
        self._shut_down_first = not self.peer_shut_down
        self._enqueue(Shutdown())

    # Acknowledging: each covers everything up to `sequence`, and may be called at any time.

    def is_receiving(self, channel: int) -> bool:
        """Has the peer opened this channel, and have we not told it that it is closed?"""
        return channel in self._receiving

    def mark_received(self, channel: int, sequence: int) -> None:
        """The messages are safe with us: the peer need not keep them."""
        if self.ended:
            return
        self._require_receiving(channel).receive(sequence)
        self._untold[channel] = self._receiving[channel]

    def consume(self, channel: int, sequence: int) -> None:
        """The application is done with the messages; implies received."""
        if self.ended:
            return
        if self.peer_transactions:
            raise LocalProtocolError("the outcome of a commit is `settle`d")
        receiving = self._require_receiving(channel)
        held_bytes = receiving.held_bytes
        receiving.consume(sequence)
        self._freed(channel, receiving, held_bytes)

    def settle(self, channel: int, sequence: int, *, committed: bool = True) -> None:
        """The application is done with messages that the peer committed: did it succeed?"""
        if self.ended:
            return
        if not self.peer_transactions:
            raise LocalProtocolError("the peer's channels don't use transactions")
        receiving = self._require_receiving(channel)
        held_bytes = receiving.held_bytes
        receiving.settle(sequence, committed)
        self._freed(channel, receiving, held_bytes)

    # Acknowledging what is guarded: first it is tried on a copy, which the owner keeps somewhere
    # safe; then the peer may hear of it.

    def foresee(self, channel: int) -> ReceivingChannel | None:
        """A copy of a channel that the peer has opened, on which marks can be tried."""
        receiving = self._receiving.get(channel)
        return None if receiving is None else receiving.copy()

    def adopt(self, channel: int, tried: ReceivingChannel) -> None:
        """Make the marks, and if it was closed the closure, that were tried on a copy."""
        if self.ended:
            return
        receiving = self._require_receiving(channel)
        held_bytes = receiving.held_bytes
        receiving.adopt(tried)
        self._freed(channel, receiving, held_bytes)
        if tried.closed:
            self._close(channel, receiving)

    # What a connection does with it.

    def attach(self, *, resumed: bool) -> None:
        """A connection has agreed on this link."""
        if self.phase is not Phase.DETACHED or self.ended:
            raise LocalProtocolError("the link has a connection, or has ended")
        self._shutdown_received = False
        if not resumed:
            self.phase = Phase.OPEN
            self._repeat()
            return
        self.phase = Phase.RESUMING
        self._announce_resume = True
        for channel, receiving in (self._receiving | self._closed).items():
            receiving.resume()
            self._untold[channel] = receiving

    def detach(self, *, ended: bool = False) -> None:
        """The connection is gone; `ended` says that the link is gone with it."""
        self.phase = Phase.DETACHED
        self.ended = self.ended or ended
        self._queue.clear()
        self._untold.clear()
        self._closed_again.clear()
        self._reports.clear()
        self._announce_resume = False

    def receive(self, packet: Frame, events: list[Event]) -> None:
        """Take a packet; say in `events` what it means. Raises RemoteProtocolError."""
        self._handlers[type(packet)](packet, events)

    def receive_run(self, packets: Sequence[Message], events: list[Event]) -> None:
        """`receive`, for messages in a row."""
        index, count = 0, len(packets)
        while index < count:
            channels = packets[index].channels
            start = index
            index += 1
            while index < count and packets[index].channels == channels:
                index += 1
            run = packets[start:index]
            if not self._take_run(channels, run, events):
                for packet in run:
                    self._on_message(packet, events)

    def packets(self) -> list[Frame]:
        """What is to be sent since the last call, in order."""
        if self.phase is Phase.DETACHED:
            return []
        packets: list[Frame] = []
        for channel, receiving in self._untold.items():
            packets += receiving.report(channel, fully=self._announce_resume)
            if receiving.closed:
                packets.append(ChannelAcknowledgement("closed", (channel,)))
        packets += [ChannelAcknowledgement("closed", (channel,)) for channel in self._closed_again]
        if self._announce_resume:
            self._announce_resume = False
            packets.append(Resume())
        packets += self._queue
        self._untold.clear()
        self._closed_again.clear()
        self._queue.clear()
        return packets

    @property
    def finished(self) -> bool:
        """Both peers have shut down, and the one who did it first has heard of all it sent."""
        return (
            self.shut_down
            and self.peer_shut_down
            and self.phase is Phase.OPEN
            and all(self._is_consumed(channel) for channel in self._receiving.values())
            and not (self._shut_down_first and self.unconsumed)
        )

    @property
    def unconsumed(self) -> int:
        """How many of our messages the peer has not consumed."""
        return sum(sending.outstanding for sending in self._sending.values())

    @property
    def closures(self) -> dict[int, ReceivingChannel]:
        """The closed channels of which the peer may not have heard that they are."""
        return dict(self._closed)

    def confirm(self, closures: dict[int, ReceivingChannel]) -> None:
        """The peer has heard of these: it has answered a ping that was sent behind them."""
        for channel, receiving in closures.items():
            if self._closed.get(channel) is receiving:
                del self._closed[channel]

    def save(self) -> bytes:
        """The whole link, as `restore` of the same version reads it.

        Of what has arrived it holds what was marked as received: the rest will be repeated.
        """
        whole = all(channel.received == channel.arrived for channel in self._receiving.values())
        receiving = {
            number: channel.durable()
            for number, channel in self._receiving.items()
            if channel.received > channel.start
        }
        return encode(
            SavedLink(
                role=self.role,
                terms=self.terms,
                epoch=self.epoch,
                id=self.id,
                start=self.start,
                order=self._order,
                ended=self.ended,
                shut_down=self.shut_down,
                shut_down_first=self._shut_down_first,
                peer_shut_down=self.peer_shut_down and whole,
                sending=self._sending,
                receiving=receiving,
                closed={number: channel.durable() for number, channel in self._closed.items()},
                used=list(self._used),
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
        link._order = saved.order
        link.ended = saved.ended
        link.shut_down, link._shut_down_first = saved.shut_down, saved.shut_down_first
        link.peer_shut_down = saved.peer_shut_down
        link._sending, link._receiving = saved.sending, saved.receiving
        link._closed = saved.closed
        link._used = dict.fromkeys(saved.used)
        for channel in link._receiving.values():
            link.held_bytes += channel.held_bytes
            link.undecided_bytes += channel.undecided_bytes
        return link

    # Receiving.

    def _on_message(self, packet: Message, events: list[Event]) -> None:
        parts = packet.parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        for channel in packet.channels:
            receiving = self._receiving.get(channel) or self._open_receiving(channel)
            if not receiving.arrive(size, self._window):
                continue
            self.held_bytes += size
            if self._peer_transactions:
                self._hold_undecided(receiving, size)
            events.append(MessageReceived(channel, on_the_wire(receiving.arrived - 1), parts))

    def _take_run(
        self, channels: Sequence[int], run: Sequence[Message], events: list[Event]
    ) -> bool:
        """Messages on one channel, if there is nothing special about any of them."""
        receiving = self._receiving.get(channels[0]) if len(channels) == 1 else None
        if receiving is None or self._peer_transactions:
            return False
        sizes = [
            len(each.parts[0]) if len(each.parts) == 1 else sum(map(len, each.parts))
            for each in run
        ]
        first = receiving.arrive_run(sizes, self._window)
        if first is None:
            return False
        self.held_bytes += sum(sizes)
        channel = channels[0]
        events += [
            MessageReceived(channel, on_the_wire(number), each.parts)
            for number, each in enumerate(run, first)
        ]
        return True

    def _open_receiving(self, channel: int) -> ReceivingChannel:
        if self._shutdown_received:
            raise UnexpectedFrame(f"channel {channel} was opened after the shutdown")
        if len(self._receiving) >= self.limits.channels:
            raise LimitExceeded(f"more than {self.limits.channels} channels")
        self._closed.pop(channel, None)
        receiving = self._receiving[channel] = ReceivingChannel.open(self.start)
        return receiving

    def _hold_undecided(self, receiving: ReceivingChannel, size: int) -> None:
        """We can't stop reading as long as it is the peer who has to decide."""
        receiving.undecided_sizes.append(size)
        receiving.undecided_bytes += size
        self.undecided_bytes += size
        if self.undecided_bytes > self.limits.unconsumed_bytes:
            raise LimitExceeded(
                f"more than {self.limits.unconsumed_bytes} bytes in undecided transactions"
            )

    def _on_operation(
        self, packet: ChannelOperation | SequenceOperation, events: list[Event]
    ) -> None:
        for channel in _targets(packet):
            if packet.operation == "close":
                self._on_close(channel, events)
            else:
                self._on_decision(channel, packet, events)

    def _on_close(self, channel: int, events: list[Event]) -> None:
        receiving = self._receiving.get(channel)
        if receiving is None:
            self._closed_again[channel] = None
        elif not receiving.closing:
            receiving.closing = True
            if not receiving.close_reported:
                receiving.close_reported = True
                events.append(CloseReceived(channel))
            self._close_if_consumed(channel, receiving)

    def _on_decision(
        self, channel: int, packet: ChannelOperation | SequenceOperation, events: list[Event]
    ) -> None:
        if not self.peer_transactions:
            raise UnexpectedFrame(f"{packet.operation} without transactions")
        # One that is repeated may find its channel closed, where it can't name anything new.
        receiving = self._receiving.get(channel) or self._closed.get(channel)
        if receiving is None:
            raise UnexpectedFrame(f"{packet.operation} on channel {channel}, which is not open")
        is_commit = packet.operation == "commit"
        undecided_bytes, held_bytes = receiving.undecided_bytes, receiving.held_bytes
        count = _count(packet, receiving.cursor)
        decided = receiving.decide(count, is_commit, guarded=self.guarded)
        if decided is None:
            return
        self.undecided_bytes += receiving.undecided_bytes - undecided_bytes
        first, last = on_the_wire(decided[0]), on_the_wire(decided[1] - 1)
        kind = CommitReceived if is_commit else RollbackReceived
        events.append(kind(channel, first, last))
        if not is_commit and not self.guarded:
            self._freed(channel, receiving, held_bytes)

    def _on_acknowledgement(
        self, packet: ChannelAcknowledgement | SequenceAcknowledgement, events: list[Event]
    ) -> None:
        """Before its `resume` the peer tells of channels one by one. What it tells of a channel
        that it then calls closed may be about an earlier life of it: see `_on_reported_closed`."""
        for channel in _targets(packet):
            if channel not in self._sending and channel not in self._used:
                raise UnexpectedFrame(
                    f"{packet.acknowledgement} on channel {channel}, which was never opened"
                )
            if self.phase is Phase.OPEN:
                self._acknowledge(channel, packet, events)
            elif packet.acknowledgement == "closed":
                self._on_reported_closed(channel, packet, events)
            else:
                self._report(channel, packet)

    def _report(
        self, channel: int, packet: ChannelAcknowledgement | SequenceAcknowledgement
    ) -> None:
        """The window bounds how much there can be to tell: of each message, four things."""
        reports = self._reports.setdefault(channel, [])
        if len(reports) > 4 * self._window:
            raise LimitExceeded(f"more is told of channel {channel} than was ever sent")
        reports.append(packet)

    def _on_reported_closed(
        self, channel: int, packet: ChannelAcknowledgement | SequenceAcknowledgement, events: Any
    ) -> None:
        """The peer can't know whether we heard its `closed`, so it says it again. If the channel is
        being closed now, that is what it means; if not, it has been opened again since."""
        reports = self._reports.pop(channel, [])
        sending = self._sending.get(channel)
        if sending is not None and sending.close_order is not None and not sending.close_waits:
            for report in (*reports, packet):
                self._acknowledge(channel, report, events)

    def _acknowledge(
        self,
        channel: int,
        packet: ChannelAcknowledgement | SequenceAcknowledgement,
        events: list[Event],
    ) -> None:
        sending = self._sending.get(channel)
        if sending is None:  # it has been closed since, so this names nothing new
            return
        kind: Acknowledgement = packet.acknowledgement
        close_waited = sending.close_waits
        explicit = isinstance(packet, SequenceAcknowledgement)
        if kind == "closed":
            ranges = sending.closed()
        elif kind in ("committed", "uncommitted"):
            if not self.transactions:
                raise UnexpectedFrame(f"{kind} without transactions")
            count = _count(packet, sending.settled)
            ranges = sending.settle(count, kind == "committed", explicit)
        else:
            cursor = sending.received if kind == "received" else sending.consumed
            ranges = sending.mark(kind, _count(packet, cursor))
        name: Acknowledgement = "consumed" if kind == "closed" else kind
        for first, bound in ranges:
            events.append(Acknowledged(name, channel, on_the_wire(first), on_the_wire(bound - 1)))
        if kind == "closed":
            del self._sending[channel]
            self._used[channel] = None
            events.append(ChannelClosed(channel))
            _keep_newest(self._used, 2 * self.limits.channels)
        elif close_waited and sending.close_order is not None and not sending.close_waits:
            self._enqueue(ChannelOperation("close", (channel,)))

    def _on_resume(self, _packet: Resume, events: list[Event]) -> None:
        for channel, reports in self._reports.items():
            for report in reports:
                self._acknowledge(channel, report, events)
        self.phase = Phase.OPEN
        self._repeat()
        self._reports.clear()
        events.append(LinkResumed())

    def _repeat(self) -> None:
        """Queue all that is not acknowledged.

        A peer that had received something of a channel and doesn't tell of it has closed it.
        """
        kept: list[Kept] = []
        for channel, sending in self._sending.items():
            silent = sending.received > sending.start and channel not in self._reports
            kept += sending.repeated(channel, close_only=silent and sending.close_order is not None)
        kept.sort(key=itemgetter(0))
        self._queue = [packet for _, packet in kept]
        if self.shut_down:
            self._queue.append(Shutdown())

    def _on_shutdown(self, _packet: Shutdown, events: list[Event]) -> None:
        if self._shutdown_received:
            raise UnexpectedFrame("a second shutdown")
        self._shutdown_received = True
        if not self.peer_shut_down:
            self.peer_shut_down = True
            events.append(ShutdownReceived())

    # In common.

    def _send(self, channels: tuple[int, ...], parts: Parts, *, multicast: bool) -> list[int]:
        for channel, count in (Counter(channels) if multicast else {channels[0]: 1}).items():
            self._require_sendable(channel, count)
        new = set(channels) - self._sending.keys()
        if new and len(self._sending) + len(new) > self.limits.channels:
            raise LocalProtocolError(f"more than {self.limits.channels} channels")
        sequences = []
        for channel in channels:
            sending = self._sending.get(channel) or self._open_sending(channel)
            sequences.append(on_the_wire(sending.add(self._next_order(), parts)))
        self._enqueue(Message(channels, multicast, parts))
        return sequences

    def _open_sending(self, channel: int) -> SendingChannel:
        if len(self._sending) >= self.limits.channels:
            raise LocalProtocolError(f"more than {self.limits.channels} channels")
        sending = SendingChannel.open(self.start, reopened=channel in self._used)
        self._sending[channel] = sending
        return sending

    def _require_sendable(self, channel: int, count: int) -> None:
        self._require_alive()
        if self.shut_down:
            raise LocalProtocolError("the link was shut down: no more messages")
        self._require_id(channel)
        if self.room(channel) < count:
            raise LocalProtocolError(f"channel {channel} {self._why_no_room(channel)}")

    def _why_no_room(self, channel: int) -> str:
        sending = self._sending.get(channel)
        closing = sending is not None and sending.close_order is not None
        return "is being closed" if closing else "has no room in its window"

    def _decide(self, channel: int, sequence: int | None, *, is_commit: bool) -> None:
        if self.ended:
            return
        if not self.transactions:
            raise LocalProtocolError("our channels don't use transactions")
        sending = self._require_sending(channel)
        bound = sending.next
        if sequence is not None:
            bound = sending.decided + named(sequence, sending.decided, sending.next)
        if bound == sending.decided:
            raise LocalProtocolError("there is no message to be committed or rolled back")
        sending.decide(bound, is_commit, self._next_order())
        self._enqueue(operation(channel, sending.decisions[-1]))

    def _enqueue(self, packet: Frame) -> None:
        """For now if it can be sent; else what it stands for is kept, and queued by `_repeat`."""
        if self.phase is Phase.OPEN:
            self._queue.append(packet)

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _freed(self, channel: int, receiving: ReceivingChannel, held_bytes: int) -> None:
        self.held_bytes += receiving.held_bytes - held_bytes
        self._untold[channel] = receiving
        self._close_if_consumed(channel, receiving)

    def _close_if_consumed(self, channel: int, receiving: ReceivingChannel) -> None:
        if self.guarded:
            return
        if receiving.closing and receiving.consumed == receiving.arrived:
            self._close(channel, receiving)

    def _close(self, channel: int, receiving: ReceivingChannel) -> None:
        receiving.closed = True
        del self._receiving[channel]
        self._closed[channel] = receiving
        self._untold[channel] = receiving
        _keep_newest(self._closed, self.limits.channels)

    def _is_consumed(self, receiving: ReceivingChannel) -> bool:
        end = receiving.decided if self.peer_transactions else receiving.arrived
        return receiving.consumed == end

    def _require_alive(self) -> None:
        if self.ended:
            raise LocalProtocolError("the link has ended")

    def _require_id(self, channel: int) -> None:
        terms = self.terms
        size = terms.connector_id_size if self.role == "connector" else terms.listener_id_size
        if not 0 <= channel < 1 << 8 * size:
            raise LocalProtocolError(f"channel {channel} does not fit into ids of {size} bytes")

    def _require_sending(self, channel: int) -> SendingChannel:
        self._require_alive()
        sending = self._sending.get(channel)
        if sending is None:
            raise LocalProtocolError(f"channel {channel} is not open")
        return sending

    def _require_receiving(self, channel: int) -> ReceivingChannel:
        receiving = self._receiving.get(channel)
        if receiving is None:
            raise LocalProtocolError(f"nothing was received on channel {channel}")
        return receiving


def _count(packet: Any, mark: int) -> int:
    """How many messages from `mark` on an operation or acknowledgement names."""
    return ahead(packet.sequence, mark) if hasattr(packet, "sequence") else 1


def _targets(packet: Any) -> Sequence[int]:
    """The channels to deal with. What is said twice with a number means nothing new."""
    if isinstance(packet.channels, Zeros) and (hasattr(packet, "sequence") or _closes(packet)):
        return (0,)
    channels: Sequence[int] = packet.channels
    return channels


def _closes(packet: Any) -> bool:
    return isinstance(packet, ChannelOperation) and packet.operation == "close"


def _keep_newest(memory: dict[int, Any], count: int) -> None:
    while len(memory) > count:
        del memory[next(iter(memory))]
