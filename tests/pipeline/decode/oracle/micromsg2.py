"""MicroMsg2, frame by frame."""

from __future__ import annotations

from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    RESPONSE,
    Described,
    json_text,
    kind_of_destination,
    quoted,
)
from crosswire.pipeline.decode.meanings.micromsg2 import (
    ACKS,
    BINARY,
    MESSAGE_BYTES,
    SUCCESS,
    MicroMsg2Memory,
    PartialMessage,
    describe_properties,
    describe_small,
    extensions_of,
    full_name,
)
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.frames import ExtensionFrame, Handshake, Message


class MicroMsg2Reading(MicroMsg2Memory):
    """A response is recognized by its destination: the `reply-to` of a request."""

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """Collects the frames of a message; the last one has its payload."""
        match frame:
            case Message():
                return self._message(forward, frame, offset)
            case ExtensionFrame():
                return self._extension(frame.id, frame.payload)
        described = describe_small(frame)
        if isinstance(frame, Handshake) and forward:
            self.extensions = extensions_of(frame)
        return described

    def _message(self, forward: bool, frame: Message, offset: int) -> Described:
        properties = frame.properties()
        sequence, size = frame.sequence, len(frame.payload)
        fields = (
            f'{{"sequence":{sequence},"destination":{quoted(frame.destination)},'
            f'"properties":{json_text(properties)},'
            f'"continued":{"true" if frame.continued else "false"}}}'
        )
        begun = self.begun[forward]
        if begun is None:
            if not frame.destination:
                # The rest of a message whose first frame was missed.
                return Described(fields, sequence=sequence, payload_size=size)
            begun = PartialMessage(frame.destination, properties, offset)
        begun.add(frame.payload, size)
        too_large = begun.size_bytes > MESSAGE_BYTES
        self.begun[forward] = begun if frame.continued and not too_large else None
        if too_large:
            return Described(fields, sequence=sequence, payload_size=size)
        if frame.continued:
            return Described(
                fields,
                destination=full_name(begun.destination),
                sequence=sequence,
                payload_size=size,
            )
        return self._whole(forward, fields, sequence, size, begun)

    def _whole(
        self, forward: bool, fields: str, sequence: int, size: int, message: PartialMessage
    ) -> Described:
        status = None
        destination = full_name(message.destination)
        kind = kind_of_destination(destination)
        text, identifier, reply_to, content_type, error = describe_properties(message.properties)
        answers = self.asked.get((not forward, message.destination, identifier))
        if answers is not None:
            kind, destination = RESPONSE, answers[1]
            status = SUCCESS if error is None else error
        elif reply_to is not None:
            self.asked.put((forward, reply_to, identifier), (kind, destination))
        return Described(
            fields,
            kind,
            identifier,
            destination,
            status,
            sequence,
            size,
            0,
            b"".join(message.payloads),
            BINARY if content_type is None else content_type,
            text,
            reply_to,
            None,
            message.offset,
        )

    def _extension(self, number: int, payload: bytes) -> Described:
        known = 1 <= number <= len(self.extensions)
        name = self.extensions[number - 1] if known else None
        fields = f'{{"id":{number},"payload":"{payload.hex()}"}}'
        if name in ACKS and len(payload) == 2:
            sequence = int.from_bytes(payload)
            return Described(fields, ACKNOWLEDGEMENT, None, None, name, sequence)
        return Described(fields, CONTROL, status=name)


READING = MicroMsg2Reading
