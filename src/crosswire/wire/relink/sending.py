"""A link's sending half: the channels that we send on.

It numbers messages, keeps them until the peer has acknowledged them, and repeats what is left after
a reconnection. Three limits apply to what is under way: each channel's window (messages that the
peer hasn't consumed), the number of open channels, and the size of channel ids.

Packets are queued only while the connection is open in both directions (`is_open`). At other times
nothing is lost: messages, decisions and closes are part of the channels' state, from which `repeat`
makes the packets again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import TypeAlias

from crosswire.errors import LimitExceeded, LocalProtocolError, UnexpectedFrame
from crosswire.wire.contract import Event, Frame
from crosswire.wire.relink.channels import (
    NumberedPacket,
    Parts,
    SendingChannel,
    checked_count,
    count_named,
    forget_oldest,
    operation,
    sequence_of,
    targets,
)
from crosswire.wire.relink.events import Acknowledged, ChannelClosed
from crosswire.wire.relink.frames import (
    Acknowledgement,
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    RelinkLimits,
    SequenceAcknowledgement,
)

__all__ = ["SendingHalf"]

_FACTS_PER_MESSAGE = 4
"""What a peer can report of a message: received, consumed, committed, uncommitted."""

_AnyAcknowledgement: TypeAlias = ChannelAcknowledgement | SequenceAcknowledgement


class SendingHalf:
    """The channels that we send on, by number.

    `order` numbers messages, decisions and closes of all channels in the order of their first
    sending, in which they are repeated: a commit follows its messages, and what the owner did on
    several channels keeps its order. `used` has the channels that we have closed and may open
    again, oldest first.
    """

    def __init__(
        self, limits: RelinkLimits, *, id_size: int, transactions: bool, start: int
    ) -> None:
        self.transactions = transactions
        self.channels: dict[int, SendingChannel] = {}
        self.used: dict[int, None] = {}
        self.order = 0
        self.is_open = False
        self._limits = limits
        self._id_size = id_size
        self._start = start
        self._queue: list[Frame] = []
        # What the peer has reported since the reconnection, until its `resume`.
        self._reports: dict[int, list[_AnyAcknowledgement]] = {}

    # Sending.

    def room(self, channel: int) -> int:
        """How many messages the channel's window has room for."""
        sending = self.channels.get(channel)
        if sending is None:
            return self._limits.window
        return 0 if sending.close_order is not None else self._limits.window - sending.outstanding

    def send(self, channels: tuple[int, ...], parts: Parts, *, multicast: bool) -> list[int]:
        """Send a message; gives its sequence number on each channel.

        Raises LocalProtocolError, before anything is changed, if one channel can't take it.
        """
        for channel, count in (Counter(channels) if multicast else {channels[0]: 1}).items():
            self._require_room(channel, count)
        new = set(channels) - self.channels.keys()
        if new and len(self.channels) + len(new) > self._limits.channels:
            raise LocalProtocolError(f"more than {self._limits.channels} channels")
        sequences = []
        for channel in channels:
            sending = self.channels.get(channel) or self._open_channel(channel)
            sequences.append(sequence_of(sending.add(self._next_order(), parts)))
        self.enqueue(Message(channels, multicast, parts))
        return sequences

    def send_run(self, channel: int, run: Sequence[Parts]) -> None:
        """`send`, for many messages on one channel."""
        self._require_room(channel, len(run))
        sending = self.channels.get(channel) or self._open_channel(channel)
        self.order = sending.add_run(self.order, run)
        if self.is_open:
            channels = (channel,)
            self._queue += [Message(channels, False, parts) for parts in run]

    def decide(self, channel: int, sequence: int | None, *, is_commit: bool) -> None:
        """Commit or roll back the messages up to `sequence`, or all that were sent."""
        if not self.transactions:
            raise LocalProtocolError("our channels don't use transactions")
        sending = self._require_channel(channel)
        bound = sending.next
        if sequence is not None:
            bound = sending.decided + checked_count(sequence, sending.decided, sending.next)
        if bound == sending.decided:
            raise LocalProtocolError("there is no message to be committed or rolled back")
        sending.decide(bound, is_commit, self._next_order())
        self.enqueue(operation(channel, sending.decisions[-1]))

    def close(self, channel: int) -> None:
        """Close a channel; the peer answers when it has consumed all of it."""
        sending = self._require_channel(channel)
        if sending.close_order is not None:
            raise LocalProtocolError(f"channel {channel} is being closed already")
        sending.close_order = self._next_order()
        if not sending.close_waits:
            self.enqueue(ChannelOperation("close", (channel,)))

    def enqueue(self, packet: Frame) -> None:
        """Queue a packet if it can be sent now; if not, `repeat` makes it from the channels."""
        if self.is_open:
            self._queue.append(packet)

    def take_packets(self) -> list[Frame]:
        """What is to be sent since the last call, in order."""
        packets, self._queue = self._queue, []
        return packets

    @property
    def undecided(self) -> bool:
        """Whether messages were sent that are neither committed nor rolled back."""
        return self.transactions and any(
            sending.decided < sending.next for sending in self.channels.values()
        )

    @property
    def unconsumed(self) -> int:
        """How many of our messages the peer has not consumed."""
        return sum(sending.outstanding for sending in self.channels.values())

    # Acknowledgements.

    def receive_acknowledgement(self, packet: _AnyAcknowledgement, events: list[Event]) -> None:
        """Apply an acknowledgement; add events. Raises RemoteProtocolError.

        Before its `resume` the peer reports its channels one by one, and only the last report of a
        channel shows which life of the channel they are about: after `closed`, it may be an earlier
        one. So they are kept until then.
        """
        for channel in targets(packet):
            if channel not in self.channels and channel not in self.used:
                raise UnexpectedFrame(
                    f"{packet.acknowledgement} on channel {channel}, which was never opened"
                )
            if self.is_open:
                self._acknowledge(channel, packet, events)
            elif packet.acknowledgement == "closed":
                self._receive_reported_closed(channel, packet, events)
            else:
                self._keep_report(channel, packet)

    def _keep_report(self, channel: int, packet: _AnyAcknowledgement) -> None:
        """Bounded by what there can be to report: the window's messages."""
        reports = self._reports.setdefault(channel, [])
        if len(reports) > _FACTS_PER_MESSAGE * self._limits.window:
            raise LimitExceeded(f"more reports of channel {channel} than messages were sent")
        reports.append(packet)

    def _receive_reported_closed(
        self, channel: int, packet: _AnyAcknowledgement, events: list[Event]
    ) -> None:
        """The peer repeats `closed`, since it can't know whether we received it.

        If we are closing the channel now, the reports are about that. If not, we had received the
        first `closed` and have opened the channel again: the reports are about its earlier life.
        """
        reports = self._reports.pop(channel, [])
        sending = self.channels.get(channel)
        if sending is not None and sending.close_order is not None and not sending.close_waits:
            for report in (*reports, packet):
                self._acknowledge(channel, report, events)

    def _acknowledge(self, channel: int, packet: _AnyAcknowledgement, events: list[Event]) -> None:
        sending = self.channels.get(channel)
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
            count = count_named(packet, sending.settled)
            ranges = sending.settle(count, kind == "committed", explicit)
        else:
            cursor = sending.received if kind == "received" else sending.consumed
            ranges = sending.mark(kind, count_named(packet, cursor))
        name: Acknowledgement = "consumed" if kind == "closed" else kind
        for first, bound in ranges:
            events.append(Acknowledged(name, channel, sequence_of(first), sequence_of(bound - 1)))
        if kind == "closed":
            del self.channels[channel]
            self.used[channel] = None
            events.append(ChannelClosed(channel))
            # The peer remembers as many channels as it may have open; ours must be the longer
            # memory, or what it reports of a closed channel would be a violation.
            forget_oldest(self.used, 2 * self._limits.channels)
        elif close_waited and sending.close_order is not None and not sending.close_waits:
            self.enqueue(ChannelOperation("close", (channel,)))

    # Reconnection.

    def apply_reports(self, events: list[Event]) -> None:
        """The peer has reported everything. Before `repeat`, which repeats what is left."""
        for channel, reports in self._reports.items():
            for report in reports:
                self._acknowledge(channel, report, events)

    def repeat(self) -> None:
        """Open, and queue everything that is not acknowledged, in the order of its first sending.

        A channel of which the peer had received messages, and which it did not report, has been
        closed on its side: its `closed` was lost, and we are still closing. Only the close is
        repeated then; the messages would open the channel again.
        """
        self.is_open = True
        kept: list[NumberedPacket] = []
        for channel, sending in self.channels.items():
            unreported = sending.received > sending.start and channel not in self._reports
            close_only = unreported and sending.close_order is not None
            kept += sending.repeated(channel, close_only=close_only)
        kept.sort(key=itemgetter(0))
        self._queue = [packet for _, packet in kept]
        self._reports.clear()

    def detach(self) -> None:
        """The connection is gone, and with it what was queued for it."""
        self.is_open = False
        self._queue.clear()
        self._reports.clear()

    # Shared.

    def _open_channel(self, channel: int) -> SendingChannel:
        if len(self.channels) >= self._limits.channels:
            raise LocalProtocolError(f"more than {self._limits.channels} channels")
        sending = SendingChannel.open(self._start, reopened=channel in self.used)
        self.channels[channel] = sending
        return sending

    def _require_room(self, channel: int, count: int) -> None:
        if not 0 <= channel < 1 << 8 * self._id_size:
            raise LocalProtocolError(
                f"channel {channel} does not fit into ids of {self._id_size} bytes"
            )
        if self.room(channel) < count:
            sending = self.channels.get(channel)
            closing = sending is not None and sending.close_order is not None
            reason = "is being closed" if closing else "has no room in its window"
            raise LocalProtocolError(f"channel {channel} {reason}")

    def _require_channel(self, channel: int) -> SendingChannel:
        sending = self.channels.get(channel)
        if sending is None:
            raise LocalProtocolError(f"channel {channel} is not open")
        return sending

    def _next_order(self) -> int:
        self.order += 1
        return self.order
