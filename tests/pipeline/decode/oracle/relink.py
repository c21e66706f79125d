"""Relink, frame by frame."""

from __future__ import annotations

from crosswire.pipeline.decode.meanings.contract import (
    CONTROL,
    GOODBYE,
    HANDSHAKE,
    HEARTBEAT,
    Described,
    json_text,
)
from crosswire.pipeline.decode.meanings.relink import (
    MOST_CHANNELS,
    RelinkMemory,
    RequestedLink,
    about_channels,
    message,
)
from crosswire.wire.contract import Frame
from crosswire.wire.relink.frames import (
    ChannelAcknowledgement,
    ChannelOperation,
    Message,
    Nop,
    Ping,
    Pong,
    SequenceAcknowledgement,
    SequenceOperation,
    Shutdown,
)
from crosswire.wire.relink.handshake import ConnectorHello, ListenerHello


class RelinkReading(RelinkMemory):
    """Counts the messages of each channel."""

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """Counts messages by channel."""
        match frame:
            case Message():
                numbers = [self._count(forward, channel) for channel in frame.channels]
                return message(frame, forward, numbers, self.wanted, self.counted)
            case ChannelAcknowledgement() | SequenceAcknowledgement() | SequenceOperation():
                return about_channels(frame, self.wanted)
            case ChannelOperation():
                if frame.operation == "close":
                    for channel in frame.channels:
                        self.following.pop((forward, channel), None)
                return about_channels(frame, self.wanted)
            case ConnectorHello():
                self.wanted = RequestedLink.of(frame)
                return Described(
                    json_text(frame.fields()), HANDSHAKE, destination=self.wanted.destination
                )
            case ListenerHello(epoch=epoch, link=link):
                self.counted = self.wanted.is_new(link)
                session = f"{epoch:x}/{link:x}" if link else None
                fields = json_text(frame.fields())
                return Described(fields, HANDSHAKE, session, self.wanted.destination)
            case Ping() | Pong() | Nop():
                return Described(json_text(frame.fields()), HEARTBEAT)
            case Shutdown():
                return Described(json_text(frame.fields()), GOODBYE)
        kind = HANDSHAKE if frame.frame_name.endswith("-version") else CONTROL
        return Described(json_text(frame.fields()), kind)

    def _count(self, forward: bool, channel: int) -> int:
        number = self.following.get((forward, channel), 0)
        if not number and len(self.following) >= MOST_CHANNELS:
            self.following, self.counted = {}, False
        self.following[forward, channel] = number + 1
        return number


READING = RelinkReading
