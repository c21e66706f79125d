"""What frames are about: their destination, and which request an answer belongs to."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NamedTuple

import msgspec

from crosswire.bond import hub_module, marshal
from crosswire.errors import BondError, FrameError
from crosswire.wire.contract import Frame
from crosswire.wire.emp.frames import Request as EmpRequest
from crosswire.wire.emp.frames import Response as EmpResponse
from crosswire.wire.emqp import frames as emqp
from crosswire.wire.epoxy import frames as epoxy
from crosswire.wire.micromsg2 import frames as micromsg2
from crosswire.wire.relink import frames as relink
from crosswire.wire.relink.handshake import ConnectorHello, ListenerHello

__all__ = ["Conversations", "Subject"]

_MOST_PENDING: Final = 8192
"""Requests of a connection whose destination is remembered until they are answered."""
_MOST_CHANNELS: Final = 1024
_CARRIED_BYTES: Final = 1 << 20
"""A larger payload is not decoded to find the destination that it names."""


class Subject(NamedTuple):
    """`conversation` is the same for a request and its answers; empty where there is none. It is
    unique in its connection, and begins with `=` where other connections may share it."""

    destination: str = ""
    conversation: str = ""


_NOTHING: Final = Subject()


class _Carried(msgspec.Struct, gc=False):
    destination: str = ""


_CARRIED: Final = msgspec.json.Decoder(_Carried)


class Conversations:
    """Both directions of one connection, frame by frame."""

    def __init__(self) -> None:
        self._pending: OrderedDict[str, Subject] = OrderedDict()
        self._endpoint = ""
        self._old_link = 0
        self._is_counted = False
        self._channels: dict[tuple[bool, int], int] = {}
        self._continued: dict[bool, Subject] = {}
        self._ack_ids: frozenset[int] = frozenset()

    def subject(self, frame: Frame | FrameError, forward: bool) -> Subject:
        """What this frame is about; `forward` if the side that connected has sent it."""
        match frame:
            case EmpRequest():
                return self._asked(_key(forward, frame.id), _emp_destination(frame))
            case EmpResponse():
                return self._answered(_key(not forward, frame.id))
            case epoxy.Message():
                return self._epoxy(frame, forward)
            case ConnectorHello():
                self._endpoint, self._old_link = frame.endpoint.partition("?")[0], frame.link
                return Subject(self._endpoint)
            case ListenerHello():
                # Messages don't carry numbers: they are counted on a link that is new.
                self._is_counted = frame.link not in (0, self._old_link)
                return Subject(self._endpoint)
            case relink.Message():
                return self._relink_message(frame, forward)
            case relink.SequenceOperation() | relink.SequenceAcknowledgement():
                return self._channel(frame.channels, frame.sequence)
            case relink.ChannelOperation() | relink.ChannelAcknowledgement():
                return self._channel(frame.channels, None)
        if type(frame).__module__ == emqp.__name__:
            return self._emqp(frame)
        if type(frame).__module__ == micromsg2.__name__:
            return self._micromsg2(frame, forward)
        return _NOTHING

    def interrupt(self) -> None:
        """Bytes are missing: messages can't be counted any more."""
        self._is_counted = False
        self._continued.clear()

    def _asked(self, key: str, destination: str) -> Subject:
        return self._remembered(key, Subject(destination, key))

    def _remembered(self, key: str, subject: Subject) -> Subject:
        self._pending[key] = subject
        if len(self._pending) > _MOST_PENDING:
            self._pending.popitem(last=False)
        return subject

    def _answered(self, key: str) -> Subject:
        return self._pending.get(key) or Subject("", key)

    # Protocols.

    def _epoxy(self, frame: epoxy.Message, forward: bool) -> Subject:
        if frame.message_type is epoxy.MessageType.RESPONSE:
            return self._answered(_key(not forward, frame.conversation_id))
        path = "/".join(filter(None, (frame.service_name, frame.method_name)))
        is_event = frame.message_type is epoxy.MessageType.EVENT
        destination = f"topic/{path}" if is_event else f"service/{path}"
        destination = _epoxy_carried(destination, frame.payload) or destination
        return self._asked(_key(forward, frame.conversation_id), destination)

    def _relink_message(self, frame: relink.Message, forward: bool) -> Subject:
        if not self._is_counted or not frame.channels:
            return self._channel(frame.channels, None)
        numbers = []
        for channel in frame.channels[:_MOST_CHANNELS]:
            numbers.append(self._channels.get((forward, channel), 0))
            self._channels[forward, channel] = numbers[-1] + 1
        if len(self._channels) > _MOST_CHANNELS:
            self._is_counted = False
            self._channels.clear()
        return self._channel(frame.channels, numbers[0])

    def _channel(self, channels: relink.Channels, number: int | None) -> Subject:
        if not channels:
            return Subject(self._endpoint)
        key = f"{channels[0]}" if number is None else f"{channels[0]}:{number}"
        return Subject(self._endpoint, key)

    def _emqp(self, frame: Any) -> Subject:
        """A broker hands a request over under its own id, so that ids connect connections."""
        match frame:
            case emqp.Request() | emqp.ScheduleFrame() | emqp.UnscheduleFrame():
                return self._asked(f"={frame.msgid}", f"queue/{frame.queue}")
            case emqp.Publish():
                return self._asked(f"={frame.msgid}", f"topic/{frame.topic}")
            case emqp.DeliveryFrame():
                return Subject(f"topic/{frame.topic}")
            case emqp.Reply():
                # A receipt has the request's id as its message.
                request = frame.request
                if request is None:
                    request = frame.message[:256].decode(errors="replace")
                return self._answered(f"={request}")
            case emqp.Ack():
                return self._answered(f"={frame.acknowledged}")
            case emqp.Inform():
                return self._asked(f"={frame.msgid}", "")
        return _NOTHING

    def _micromsg2(self, frame: Any, forward: bool) -> Subject:
        match frame:
            case micromsg2.Handshake():
                named = [each.name.lower() for each in (*frame.required, *frame.optional)]
                # Numbers are those of the client's last handshake.
                if forward:
                    acks = (1 + at for at, name in enumerate(named) if name in ("ack", "batch-ack"))
                    self._ack_ids = frozenset(acks)
            case micromsg2.Message():
                return self._micromsg2_message(frame, forward)
            case micromsg2.ExtensionFrame() if frame.id in self._ack_ids:
                number = int.from_bytes(frame.payload[:2])
                return self._answered(_key(not forward, number))
            case micromsg2.Command():
                return Subject(frame.arguments.get("destination", ""))
        return _NOTHING

    def _micromsg2_message(self, frame: micromsg2.Message, forward: bool) -> Subject:
        subject = self._continued.pop(forward, _NOTHING)
        if frame.destination:
            try:
                correlation = frame.properties().get("correlation-id", "")
            except FrameError:
                correlation = ""
            key = f"correlation {correlation}" if correlation != "" else ""
            subject = Subject(frame.destination, key or _key(forward, frame.sequence))
        if frame.continued:
            self._continued[forward] = subject
        # An acknowledgement names the frame's own number.
        return self._remembered(_key(forward, frame.sequence), subject)


def _key(from_connector: bool, number: int) -> str:
    """By who asked, since each side has numbers of its own."""
    return f"{'>' if from_connector else '<'}{number}"


def _emp_destination(frame: EmpRequest) -> str:
    try:
        call = frame.call()
    except FrameError:
        return ""
    if call.op in ("$publish", "$deliver", "$subscribe", "$schedule"):
        try:
            return _CARRIED.decode(bytes(call.data)).destination
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ""
    return "" if call.op.startswith("$") else f"service/{call.op}"


_CARRIERS: Final = {
    "service/crosswire.Hub/Publish": "crosswire.Publication",
    "topic/crosswire.Subscriber/Deliver": "crosswire.Delivery",
}


def _epoxy_carried(destination: str, payload: bytes | None) -> str:
    """The destination of the message that the hub's own methods carry."""
    name = _CARRIERS.get(destination)
    if name is None or payload is None or len(payload) > _CARRIED_BYTES:
        return ""
    try:
        return str(marshal.unmarshal(payload, hub_module().struct(name)).destination)
    except BondError:
        return ""
