"""A link's receiving half: the channels that the peer sends on.

It gives each message to the owner once, in order, whatever a reconnection repeats, and derives our
acknowledgements. Those are not queued: every channel has marks of what is received, consumed and
settled, and `take_packets` reports what changed since the last call. A thousand consumed messages
are one packet, and after a reconnection everything is reported, without a special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from crosswire.errors import LimitExceeded, LocalProtocolError, UnexpectedFrame
from crosswire.wire.contract import Event, Frame
from crosswire.wire.relink.channels import (
    ReceivingChannel,
    count_named,
    forget_oldest,
    sequence_of,
    targets,
)
from crosswire.wire.relink.events import (
    CloseReceived,
    CommitReceived,
    MessageReceived,
    RollbackReceived,
)
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    RelinkLimits,
    SequenceOperation,
)

__all__ = ["ReceivingHalf"]

_MESSAGE_BYTES: Final = 512
"""What a message takes in memory beside its parts, roughly."""

_AnyOperation: TypeAlias = ChannelOperation | SequenceOperation


class ReceivingHalf:
    """The channels that the peer sends on, by number.

    `closed` has channels that the peer closed, while it may not have received our `closed`: if the
    connection is lost, that has to be repeated. `accepts_channels` is false from the peer's
    shutdown on: after it, the peer opens no channels.
    """

    def __init__(self, limits: RelinkLimits, *, transactions: bool, start: int) -> None:
        self.transactions = transactions
        self.channels: dict[int, ReceivingChannel] = {}
        self.closed: dict[int, ReceivingChannel] = {}
        self.accepts_channels = True
        self.guarded = False
        self.held_bytes = 0
        self.undecided_bytes = 0
        self._limits = limits
        self._start = start
        self._unreported: dict[int, ReceivingChannel] = {}
        self._closed_again: dict[int, None] = {}

    # Receiving.

    def receive_message(self, packet: Message, events: list[Event]) -> None:
        """Deliver a message to each of its channels; add events. Raises RemoteProtocolError."""
        parts = packet.parts
        size = self.check_multicast(packet)
        for channel in packet.channels:
            receiving = self.channels.get(channel) or self._open_channel(channel)
            if not receiving.arrive(size, self._limits.window):
                continue
            self.held_bytes += size
            if self.transactions:
                self._hold_undecided(receiving, size)
            events.append(MessageReceived(channel, sequence_of(receiving.arrived - 1), parts))

    def check_multicast(self, packet: Message) -> int:
        """What a message takes on each of its channels. Raises LimitExceeded if that is too much in
        all."""
        parts = packet.parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if len(packet.channels) > 1:
            # The parts are shared, but the owner makes a message of its own for each target: a
            # small packet may become a lot of memory and, stored, of disk.
            size += _MESSAGE_BYTES
            if size * len(packet.channels) > self._limits.unconsumed_bytes:
                raise LimitExceeded(
                    f"a multicast of {size} bytes to {len(packet.channels)} channels is more than"
                    f" {self._limits.unconsumed_bytes} bytes"
                )
        return size

    def receive_run(self, packets: Sequence[Message], events: list[Event]) -> None:
        """`receive_message`, for consecutive messages.

        Those on one channel are counted together: most reads bring many small ones.
        """
        index, count = 0, len(packets)
        while index < count:
            channels = packets[index].channels
            start = index
            index += 1
            while index < count and packets[index].channels == channels:
                index += 1
            run = packets[start:index]
            if not self._receive_together(channels, run, events):
                for packet in run:
                    self.receive_message(packet, events)

    def _receive_together(
        self, channels: Sequence[int], run: Sequence[Message], events: list[Event]
    ) -> bool:
        """Messages on one open channel; false, with nothing done, if they need separate checks."""
        receiving = self.channels.get(channels[0]) if len(channels) == 1 else None
        if receiving is None or self.transactions:
            return False
        sizes = [
            len(each.parts[0]) if len(each.parts) == 1 else sum(map(len, each.parts))
            for each in run
        ]
        first = receiving.arrive_run(sizes, self._limits.window)
        if first is None:
            return False
        self.held_bytes += sum(sizes)
        channel = channels[0]
        events += [
            MessageReceived(channel, sequence_of(number), each.parts)
            for number, each in enumerate(run, first)
        ]
        return True

    def _open_channel(self, channel: int) -> ReceivingChannel:
        if not self.accepts_channels:
            raise UnexpectedFrame(f"channel {channel} was opened after the shutdown")
        if len(self.channels) >= self._limits.channels:
            raise LimitExceeded(f"more than {self._limits.channels} channels")
        # A message that opens the channel again proves that the peer received our `closed`.
        self.closed.pop(channel, None)
        receiving = self.channels[channel] = ReceivingChannel.open(self._start)
        return receiving

    def _hold_undecided(self, receiving: ReceivingChannel, size: int) -> None:
        """A hard limit: if we stopped reading instead, the decision could not be read either."""
        receiving.undecided_sizes.append(size)
        receiving.undecided_bytes += size
        self.undecided_bytes += size
        if self.undecided_bytes > self._limits.unconsumed_bytes:
            raise LimitExceeded(
                f"more than {self._limits.unconsumed_bytes} bytes in undecided transactions"
            )

    def receive_operation(self, packet: _AnyOperation, events: list[Event]) -> None:
        """Apply a commit, rollback or close; add events. Raises RemoteProtocolError."""
        for channel in targets(packet):
            if packet.operation == "close":
                self._receive_close(channel, events)
            else:
                self._receive_decision(channel, packet, events)

    def _receive_close(self, channel: int, events: list[Event]) -> None:
        receiving = self.channels.get(channel)
        if receiving is None:
            # Repeated after a reconnection, since our `closed` was lost: it is answered again.
            self._closed_again[channel] = None
        elif not receiving.closing:
            receiving.closing = True
            if not receiving.close_reported:
                receiving.close_reported = True
                events.append(CloseReceived(channel))
            self._close_if_consumed(channel, receiving)

    def _receive_decision(self, channel: int, packet: _AnyOperation, events: list[Event]) -> None:
        if not self.transactions:
            raise UnexpectedFrame(f"{packet.operation} without transactions")
        # One that is repeated may find its channel closed, where it can't name anything new.
        receiving = self.channels.get(channel) or self.closed.get(channel)
        if receiving is None:
            raise UnexpectedFrame(f"{packet.operation} on channel {channel}, which is not open")
        is_commit = packet.operation == "commit"
        undecided_bytes, held_bytes = receiving.undecided_bytes, receiving.held_bytes
        count = count_named(packet, receiving.cursor)
        decided = receiving.decide(count, is_commit, guarded=self.guarded)
        if decided is None:
            return
        self.undecided_bytes += receiving.undecided_bytes - undecided_bytes
        first, last = sequence_of(decided[0]), sequence_of(decided[1] - 1)
        kind = CommitReceived if is_commit else RollbackReceived
        events.append(kind(channel, first, last))
        if not is_commit and not self.guarded:
            self._marked(channel, receiving, held_bytes)

    # Acknowledging.

    def mark_received(self, channel: int, sequence: int) -> None:
        """Messages up to `sequence` are stored: the peer need not keep them."""
        receiving = self._require_channel(channel)
        receiving.receive(sequence)
        self._unreported[channel] = receiving

    def consume(self, channel: int, sequence: int) -> None:
        """The application has processed the messages up to `sequence`."""
        if self.transactions:
            raise LocalProtocolError("messages with transactions are settled, not consumed")
        receiving = self._require_channel(channel)
        held_bytes = receiving.held_bytes
        receiving.consume(sequence)
        self._marked(channel, receiving, held_bytes)

    def settle(self, channel: int, sequence: int, *, committed: bool) -> None:
        """The application has processed committed messages, with or without success."""
        if not self.transactions:
            raise LocalProtocolError("the peer's channels don't use transactions")
        receiving = self._require_channel(channel)
        held_bytes = receiving.held_bytes
        receiving.settle(sequence, committed)
        self._marked(channel, receiving, held_bytes)

    def adopt(self, channel: int, changed: ReceivingChannel) -> None:
        """Apply the marks, and the closure, that the owner made on a copy and has stored."""
        receiving = self._require_channel(channel)
        held_bytes = receiving.held_bytes
        receiving.adopt(changed)
        self._marked(channel, receiving, held_bytes)
        if changed.closed:
            self._close(channel, receiving)

    def take_packets(self, *, fully: bool) -> list[Frame]:
        """What is to be acknowledged since the last call; `fully` after a reconnection."""
        packets: list[Frame] = []
        for channel, receiving in self._unreported.items():
            packets += receiving.report(channel, fully=fully)
            if receiving.closed:
                packets.append(ChannelAcknowledgement("closed", (channel,)))
        packets += [ChannelAcknowledgement("closed", (channel,)) for channel in self._closed_again]
        self._unreported.clear()
        self._closed_again.clear()
        return packets

    @property
    def is_consumed(self) -> bool:
        """Whether nothing is left to be consumed, of what the peer committed or sent."""
        return all(
            receiving.consumed == (receiving.decided if self.transactions else receiving.arrived)
            for receiving in self.channels.values()
        )

    # Reconnection.

    def resume(self) -> None:
        """Report all channels again: the peer may have missed any part of it."""
        for channel, receiving in (self.channels | self.closed).items():
            receiving.resume()
            self._unreported[channel] = receiving

    def detach(self) -> None:
        """The connection is gone; `resume` makes the reports again."""
        self._unreported.clear()
        self._closed_again.clear()

    # Shared.

    def _marked(self, channel: int, receiving: ReceivingChannel, held_bytes: int) -> None:
        """Marks have changed; before, the channel held `held_bytes`."""
        self.held_bytes += receiving.held_bytes - held_bytes
        self._unreported[channel] = receiving
        self._close_if_consumed(channel, receiving)

    def _close_if_consumed(self, channel: int, receiving: ReceivingChannel) -> None:
        if self.guarded:  # the owner has to store the closure first: see `adopt`
            return
        if receiving.closing and receiving.consumed == receiving.arrived:
            self._close(channel, receiving)

    def _close(self, channel: int, receiving: ReceivingChannel) -> None:
        receiving.closed = True
        del self.channels[channel]
        self.closed[channel] = receiving
        self._unreported[channel] = receiving
        forget_oldest(self.closed, self._limits.channels)

    def _require_channel(self, channel: int) -> ReceivingChannel:
        receiving = self.channels.get(channel)
        if receiving is None:
            raise LocalProtocolError(f"nothing was received on channel {channel}")
        return receiving
