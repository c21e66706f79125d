"""Epoxy, frame by frame."""

from __future__ import annotations

from crosswire.pipeline.decode.meanings.contract import CONTROL, ERROR, Described, json_text
from crosswire.pipeline.decode.meanings.epoxy import (
    CONFIG,
    UNASKED,
    EpoxyMemory,
    asked,
    content_type_of,
    describe_layer,
    error_name,
    method_of,
)
from crosswire.wire.contract import Frame
from crosswire.wire.epoxy.frames import ConfigFrame, Message, ProtocolError


class EpoxyReading(EpoxyMemory):
    """A response has no service or method on the wire: it has the destination of its request."""

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """Remembers the answer to a request."""
        match frame:
            case Message():
                return self._message(forward, frame)
            case ConfigFrame():
                return CONFIG
            case ProtocolError():
                return Described(json_text(frame.fields()), ERROR, status=frame.error_name)
        return Described(json_text(frame.fields()), CONTROL)

    def _message(self, forward: bool, frame: Message) -> Described:
        number, error = frame.conversation_id, frame.error
        content = frame.payload if frame.payload is not None else error or b""
        named = method_of(frame.message_type, frame.service_name, frame.method_name)
        more = describe_layer(frame.layer_data)
        if error is not None:
            more = f'{more},"error":"{error.hex()}"'
        if not named.is_response:
            described, answer = asked(number, named, more, content)
            if answer is not None:
                self.asked.put((forward, number), answer)
            return described
        kind, destination = self.asked.take((not forward, number)) or UNASKED
        return Described(
            f'{{"conversation_id":{number},{named.fields}{more}}}',
            kind,
            str(number),
            destination,
            "success" if error is None else error_name(error),
            payload_size=len(content),
            payload=content,
            content_type=content_type_of(content),
        )


READING = EpoxyReading
