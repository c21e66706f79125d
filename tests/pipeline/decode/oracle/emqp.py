"""eMQP, frame by frame."""

from __future__ import annotations

from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    GOODBYE,
    HEARTBEAT,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    json_text,
)
from crosswire.pipeline.decode.meanings.emqp import (
    BINARY,
    MESSAGE,
    EmqpMemory,
    MessageRoute,
    address_of,
    describe_below,
    outcome_of,
)
from crosswire.wire.contract import Frame
from crosswire.wire.emqp.frames import (
    Ack,
    DeliveryFrame,
    Disconnect,
    Heartbeat,
    Inform,
    Kbai,
    Publish,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
)
from crosswire.wire.zmtp.frames import Command, Greeting, Message


class EmqpReading(EmqpMemory):
    """A reply has the destination of the request that it answers."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: tuple[bytes, ...] = ()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """A command follows the ZeroMQ message that it is in, whose parts are kept for it."""
        match frame:
            case Message(parts=parts):
                self._parts = parts
                return MESSAGE
            case Request(msgid, queue, headers, body):
                address = address_of(True, queue, headers)
                self.asked.put((forward, msgid), address.destination)
                return _addressed(msgid, address, body, self._payload_end(6, length))
            case Reply():
                return self._reply(forward, frame, self._payload_end(4, length))
            case Publish(msgid, topic, headers, body):
                payload_end = self._payload_end(5 if headers is None else 6, length)
                return _addressed(msgid, address_of(False, topic, headers), body, payload_end)
            case DeliveryFrame(topic, body):
                return _addressed(None, address_of(False, topic, None), body, 0)
            case Ack():
                return Described(json_text(frame.fields()), ACKNOWLEDGEMENT, frame.acknowledged)
            case ScheduleFrame() | UnscheduleFrame():
                return self._schedule(frame, length)
            case Inform():
                return Described(json_text(frame.fields()), SUBSCRIPTION, frame.msgid)
            case Heartbeat():
                return Described(json_text(frame.fields()), HEARTBEAT, frame.msgid)
            case Disconnect() | Kbai():
                return Described(json_text(frame.fields()), GOODBYE, frame.msgid)
            case Greeting() | Command():
                return describe_below(frame)
        fields = frame.fields()
        return Described(json_text(fields), CONTROL, fields.get("msgid"))

    def _reply(self, forward: bool, frame: Reply, payload_end: int) -> Described:
        msgid, body, request = frame.msgid, frame.message, frame.request
        if request is not None:
            fields = f'{{"msgid":{json_text(msgid)},"request":{json_text(request)}}}'
            destination = self.asked.take((not forward, request))
            status = outcome_of(body)
            return _with_body(fields, RESPONSE, request, destination, status, body, payload_end)
        # The receipt for a request: its body is the request's id.
        fields = f'{{"msgid":{json_text(msgid)}}}'
        identifier = body.decode(errors="replace")
        destination = self.asked.get((not forward, identifier))
        if destination is None:
            return _with_body(fields, CONTROL, msgid, None, None, body, payload_end)
        return Described(fields, ACKNOWLEDGEMENT, identifier, destination, "success")

    def _schedule(self, frame: ScheduleFrame | UnscheduleFrame, length: int) -> Described:
        fields = frame.fields()
        del fields["message"]
        payload_end = self._payload_end(6 if frame.interval is None else 7, length)
        queue = f"queue/{frame.queue}"
        return _with_body(
            json_text(fields), CONTROL, frame.msgid, queue, None, frame.message, payload_end
        )

    def _payload_end(self, index: int, length: int) -> int:
        """How many bytes of the ZeroMQ message follow the body. Few peers write the
        lengths of short parts in 8 bytes, and those always do."""
        parts = self._parts[index + 1 :]
        if not parts:
            return 0
        size = sum(map(len, parts))
        if length == sum(map(len, self._parts)) + 9 * len(self._parts):
            return size + 9 * len(parts)
        return size + sum(2 if len(part) < 256 else 9 for part in parts)


def _addressed(
    msgid: str | None, address: MessageRoute, body: bytes, payload_end: int
) -> Described:
    fields, kind, destination, properties = address
    headers_text = "{" if msgid is None else f'{{"msgid":{json_text(msgid)},'
    return _with_body(
        f"{headers_text}{fields}}}", kind, msgid, destination, None, body, payload_end, properties
    )


def _with_body(
    fields: str,
    kind: str,
    identifier: str | None,
    destination: str | None,
    status: str | None,
    body: bytes,
    payload_end: int,
    properties: str | None = None,
) -> Described:
    return Described(
        fields,
        kind,
        identifier,
        destination,
        status,
        payload_size=len(body),
        payload_end=payload_end,
        payload=body,
        content_type=BINARY,
        properties=properties,
    )


READING = EmqpReading
