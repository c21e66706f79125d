"""MicroMsg2: messages to destinations, put together where they come in several frames."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

from crosswire.errors import FrameError
from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    HANDSHAKE,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
    Rows,
    json_text,
    kind_of_destination,
    quoted,
)
from crosswire.wire.contract import Frame
from crosswire.wire.micromsg2.frames import (
    FRAME_BYTES,
    Command,
    Error,
    ExtensionFrame,
    Handshake,
    Message,
    parse,
    parse_handshake,
)
from crosswire.wire.micromsg2.values import Value, parse_properties

__all__ = ["READING"]

_ACKS: Final = ("ack", "batch-ack")
_SECRET: Final = "x-auth"
_SUBSCRIBERS: Final = ("subscribe", "unsubscribe", "serve")
_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_BINARY: Final = "application/octet-stream"
_MOST_KNOWN: Final = 512
"""Bytes of a handshake or command: what is longer hardly comes again."""

# What the scanner calls frames.
_HANDSHAKE, _MESSAGE, _EXTENSION = 0, 1, 3


class _Begun:
    """A message of which more frames are to come."""

    def __init__(self, destination: str, properties: dict[str, Value], offset: int) -> None:
        self.destination = destination
        self.properties = properties
        self.offset = offset
        self.size_bytes = 0
        self.payloads: list[bytes] = []

    def save(self) -> Any:
        return self.destination, self.properties, self.offset, self.size_bytes, self.payloads

    @classmethod
    def restored(cls, saved: Any) -> _Begun:
        destination, properties, offset, size_bytes, payloads = saved
        begun = cls(destination, properties, offset)
        begun.payloads = [bytes(payload) for payload in payloads]
        begun.size_bytes = size_bytes
        return begun


class MicroMsg2Reading(Reading):
    """An answer is known by its destination: the `reply-to` of a request from the other side."""

    def __init__(self) -> None:
        self._begun: dict[bool, _Begun | None] = {True: None, False: None}
        self._extensions: list[str] = []
        self._asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message():
                return self._message(
                    forward,
                    offset,
                    frame.sequence,
                    frame.destination,
                    frame.properties(),
                    frame.continued,
                    len(frame.payload),
                    frame.payload,
                )
            case ExtensionFrame():
                return self._extension(frame.id, frame.payload)
            case Handshake():
                if forward:
                    self._extensions = _extensions(frame)
        return _small(frame)

    def describe_rows(self, rows: Rows, start: int, stop: int) -> Iterator[Described | FrameError]:
        data, payloads, numbers = rows.data, rows.payloads, rows.number
        (at, sizes), (name_at, name_sizes), (more_at, more_sizes) = rows.slices
        for index in range(start, stop):
            code, forward = rows.frame[index], rows.forward[index]
            begin, size = at[index], sizes[index]
            if code == _EXTENSION:
                yield self._extension(numbers[index], data[begin : begin + size])
                continue
            if code != _MESSAGE:
                yield self._in_full(rows, index, forward, code)
                continue
            name, more, length = name_at[index], more_at[index], more_sizes[index]
            try:
                properties = parse_properties(data[more : more + length]) if length else {}
            except FrameError as error:
                self.interrupt(forward)
                yield error
                continue
            yield self._message(
                forward,
                rows.offset[index],
                rows.sequence[index],
                data[name : name + name_sizes[index]].decode(),
                properties,
                rows.detail[index] == 1,
                size,
                data[begin : begin + size] if payloads else b"",
            )

    def _in_full(self, rows: Rows, index: int, forward: bool, code: int) -> Described:
        """What there is less of, and always the same."""
        at, length = rows.position[index], rows.length[index]
        read = _read_small if length <= _MOST_KNOWN else _read_small.__wrapped__
        described, extensions = read(rows.data[at : at + length], code == _HANDSHAKE)
        if forward and extensions is not None:
            self._extensions = extensions
        return described

    def interrupt(self, forward: bool) -> None:
        self._begun[forward] = None

    def _save(self) -> Any:
        begun = [each and each.save() for each in (self._begun[True], self._begun[False])]
        return begun, self._extensions, self._asked.save()

    def _restore(self, own: Any) -> None:
        (forward, backward), extensions, asked = own
        self._begun = {
            True: forward and _Begun.restored(forward),
            False: backward and _Begun.restored(backward),
        }
        self._extensions = list(extensions)
        self._asked.restore(asked)

    def _message(
        self,
        forward: bool,
        offset: int,
        sequence: int,
        destination: str,
        properties: dict[str, Value],
        continued: bool,
        size: int,
        payload: bytes,
    ) -> Described:
        text = json_text(properties) if properties else "{}"
        fields = (
            f'{{"sequence":{sequence},"destination":{quoted(destination)},"properties":{text},'
            f'"continued":{"true" if continued else "false"}}}'
        )
        begun = self._begun[forward]
        if begun is None:
            if not destination:
                # the rest of a message whose beginning was missed
                return Described(fields, sequence=sequence, payload_size=size)
            if not continued:
                return self._whole(
                    forward, fields, sequence, size, destination, properties, text, payload, offset
                )
            begun = _Begun(destination, properties, offset)
        begun.payloads.append(payload)
        begun.size_bytes += size
        self._begun[forward] = begun if continued else None
        if begun.size_bytes > _MESSAGE_BYTES:
            self._begun[forward] = None
            return Described(fields, sequence=sequence, payload_size=size)
        if continued:
            return Described(
                fields,
                destination=_full_name(begun.destination),
                sequence=sequence,
                payload_size=size,
            )
        return self._whole(
            forward,
            fields,
            sequence,
            size,
            begun.destination,
            begun.properties,
            json_text(begun.properties),
            b"".join(begun.payloads),
            begun.offset,
        )

    def _whole(
        self,
        forward: bool,
        fields: str,
        sequence: int,
        size: int,
        name: str,
        properties: dict[str, Value],
        properties_text: str,
        payload: bytes,
        begun_at: int,
    ) -> Described:
        identifier = reply_to = status = None
        content_type = _BINARY
        destination = _full_name(name)
        kind = kind_of_destination(destination)
        if properties:
            correlation, reply_to = properties.get("correlation-id"), properties.get("reply-to")
            identifier = None if correlation is None else str(correlation)
            content_type = str(properties.get("content-type", _BINARY))
        answers = self._asked.get((not forward, name, identifier))
        if answers is not None:
            kind, destination = RESPONSE, answers[1]
            error = properties.get("error")
            status = "success" if error is None else str(error)
        elif isinstance(reply_to, str):
            self._asked.put((forward, reply_to, identifier), (kind, destination))
        return Described(
            fields,
            kind,
            identifier,
            destination,
            status,
            sequence,
            size,
            0,
            payload,
            content_type,
            properties_text,
            reply_to if isinstance(reply_to, str) else None,
            None,
            begun_at,
        )

    def _extension(self, number: int, payload: bytes) -> Described:
        known = 1 <= number <= len(self._extensions)
        name = self._extensions[number - 1] if known else None
        fields = f'{{"id":{number},"payload":"{payload.hex()}"}}'
        if name in _ACKS and len(payload) == 2:
            sequence = int.from_bytes(payload)
            return Described(fields, ACKNOWLEDGEMENT, None, None, name, sequence)
        return Described(fields, CONTROL, status=name)


def _extensions(handshake: Handshake) -> list[str]:
    return [each.name.lower() for each in (*handshake.required, *handshake.optional)]


def _small(frame: Frame) -> Described:
    """What says the same whatever came before it."""
    match frame:
        case Command():
            kind = SUBSCRIPTION if frame.name.lower() in _SUBSCRIBERS else CONTROL
            destination = frame.arguments.get("destination")
            return Described(json_text(frame.fields()), kind, destination=destination)
        case Handshake():
            return Described(json_text(_without_secrets(frame.fields())), HANDSHAKE)
        case Error():
            return Described(json_text(frame.fields()), ERROR, status=frame.name)
    return Described(json_text(frame.fields()), CONTROL)


@lru_cache(maxsize=1024)
def _read_small(raw: bytes, is_handshake: bool) -> tuple[Described, list[str] | None]:
    """And the extensions that a handshake names."""
    frame, _ = (parse_handshake if is_handshake else parse)(raw, 0, 0, FRAME_BYTES)
    assert frame is not None
    return _small(frame), _extensions(frame) if isinstance(frame, Handshake) else None


def _full_name(destination: str) -> str:
    """A bare name is a queue."""
    known = destination.startswith(("queue/", "topic/", "service/", "reply/"))
    return destination if known else f"queue/{destination}"


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("required", "optional"):
        fields[name] = [
            {**each, "properties": {}} if each["name"].lower() == _SECRET else each
            for each in fields[name]
        ]
    return fields


READING = MicroMsg2Reading
