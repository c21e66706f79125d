"""Epoxy: requests and responses by conversation, events as publications.

The hub's own service carries messages to queues and topics, and its events carry deliveries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from crosswire.bond import hub_module, marshal
from crosswire.errors import BondError, FrameError
from crosswire.pipeline.protocols.contract import (
    ACKNOWLEDGEMENT,
    CONTROL,
    ERROR,
    HANDSHAKE,
    PUBLISH,
    REQUEST,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    Memory,
    Reading,
    Rows,
    json_text,
    kind_of_destination,
)
from crosswire.wire.contract import Frame
from crosswire.wire.epoxy.comm import unmarshal_credentials, unmarshal_error
from crosswire.wire.epoxy.frames import Config, Message, MessageType, ProtocolError

__all__ = ["READING"]

_BINARY: Final = "application/octet-stream"
_BY_MAGIC: Final = {
    b"CB\x01\x00": "application/vnd.bond.compact",
    b"CB\x02\x00": "application/vnd.bond.compact",
    b"MF\x01\x00": "application/vnd.bond.fast",
}
_PUBLISH: Final = "service/crosswire.Hub/Publish"
_DELIVER: Final = "topic/crosswire.Subscriber/Deliver"
_AROUND: Final = {
    "service/crosswire.Hub/Subscribe": SUBSCRIPTION,
    "service/crosswire.Hub/Unsubscribe": SUBSCRIPTION,
    "service/crosswire.Hub/Serve": SUBSCRIPTION,
    "service/crosswire.Hub/Settle": ACKNOWLEDGEMENT,
}
_CARRIERS: Final = {
    _PUBLISH: hub_module().struct("crosswire.Publication"),
    _DELIVER: hub_module().struct("crosswire.Delivery"),
}


# What the scanner calls a frame, and what it says of a message.
_CONFIG_ROW: Final = 0
_HAS_ERROR: Final = 4

_MOST_NAMES: Final = 256
"""Bytes of a service's and a method's name: what is longer hardly comes again."""

_MAGIC_BYTES: Final = 4
_CONFIG: Final = Described(json_text(Config().fields()), HANDSHAKE)
_UNASKED: Final = (RESPONSE, None)


class _Method(NamedTuple):
    """What messages of one type share that name the same service and method.

    `fields` is what the JSON has behind the conversation's id, up to what only some messages have.
    A request remembers its `answer`; `carrier` is the struct in which the hub's own take others'
    messages along.
    """

    fields: str
    kind: str | None
    destination: str | None
    answer: tuple[str, str] | None
    carrier: Any
    is_response: bool


@lru_cache(maxsize=1024)
def _method(message_type: int, service: str, method: str) -> _Method:
    name = MessageType(message_type).name.lower()
    named = "".join(
        f',"{field}":{json_text(value)}'
        for field, value in (("service_name", service), ("method_name", method))
        if value
    )
    fields = f'"message_type":"{name}"{named}'
    if message_type == MessageType.RESPONSE:
        return _Method(fields, None, None, None, None, True)
    path = f"{service}/{method}" if method else service
    if message_type == MessageType.EVENT:
        destination = f"topic/{path}"
        kind = _AROUND.get(destination, PUBLISH)
        return _Method(fields, kind, destination, None, _CARRIERS.get(destination), False)
    destination = f"service/{path}"
    kind = _AROUND.get(destination, REQUEST)
    answer = (RESPONSE if kind == REQUEST else ACKNOWLEDGEMENT, destination)
    return _Method(fields, kind, destination, answer, _CARRIERS.get(destination), False)


@lru_cache(maxsize=1024)
def _method_in(message_type: int, names: bytes, service_bytes: int, method_bytes: int) -> _Method:
    """On the wire the method's name follows the service's, with its length between them."""
    service, method = names[:service_bytes], names[len(names) - method_bytes :]
    return _method.__wrapped__(message_type, service.decode(), method.decode())


class EpoxyReading(Reading):
    """A response has no names on the wire: it gets the destination of its request."""

    def __init__(self) -> None:
        self._asked: Memory[tuple[str, str]] = Memory()

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:  # noqa: ARG002
        match frame:
            case Message(number, message_type, service, method, layer_data, payload, error):
                content = payload if payload is not None else error or b""
                is_short = len(service) + len(method) <= _MOST_NAMES
                known = _method if is_short else _method.__wrapped__
                named = known(message_type, service, method)
                failed = error is not None
                return self._message(
                    forward, number, named, layer_data, failed, content, len(content), True
                )
            case Config():
                return _CONFIG
            case ProtocolError():
                return Described(json_text(frame.fields()), ERROR, status=frame.error_name)
        return Described(json_text(frame.fields()), CONTROL)

    def describe_rows(self, rows: Rows, start: int, stop: int) -> Iterator[Described | FrameError]:
        data, payloads = rows.data, rows.payloads
        forwards, frames, numbers, details = rows.forward, rows.frame, rows.number, rows.detail
        (contents, content_lengths), (services, service_lengths) = rows.slices[:2]
        (methods, method_lengths), (layers, layer_lengths) = rows.slices[2:]
        for row in range(start, stop):
            if frames[row] == _CONFIG_ROW:
                yield _CONFIG
                continue
            at, detail, method_bytes = services[row], details[row], method_lengths[row]
            end = methods[row] + method_bytes
            known = _method_in if end - at <= _MOST_NAMES else _method_in.__wrapped__
            named = known(detail & 3, data[at:end], service_lengths[row], method_bytes)

            at, size, layer_bytes = contents[row], content_lengths[row], layer_lengths[row]
            failed = detail >= _HAS_ERROR
            wanted = payloads or failed or named.carrier is not None
            content = data[at : at + (size if wanted else min(size, _MAGIC_BYTES))]
            layer_data = None
            if layer_bytes >= 0:
                layer_data = data[layers[row] : layers[row] + layer_bytes]
            yield self._message(
                forwards[row], numbers[row], named, layer_data, failed, content, size, payloads
            )

    def _save(self) -> Any:
        return self._asked.save()

    def _restore(self, own: Any) -> None:
        self._asked.restore(own)

    def _message(
        self,
        forward: bool,
        number: int,
        named: _Method,
        layer_data: bytes | None,
        failed: bool,
        content: bytes,
        size: int,
        payloads: bool,
    ) -> Described:
        """`content` is an error if it `failed`; at least its magic, where nobody wants more."""
        fields, kind, destination, answer, carrier, is_response = named
        identifier = str(number)
        more = "" if layer_data is None else _told(layer_data)
        if failed:
            more = f'{more},"error":"{content.hex()}"'
        payload: bytes | None = content if payloads else None
        content_type = _BY_MAGIC.get(content[:_MAGIC_BYTES], _BINARY)
        status = properties = message_id = None
        if is_response:
            kind, destination = self._asked.take((not forward, identifier)) or _UNASKED
            status = _error_name(content) if failed else "success"
        elif carrier is not None and (carried := _carried(carrier, content)) is not None:
            destination = carried.destination
            kind = kind_of_destination(destination)
            if answer is not None:
                answer = (RESPONSE if kind == REQUEST else ACKNOWLEDGEMENT, destination)
            payload, content_type = carried.payload, carried.content_type or _BINARY
            properties = json_text(_values(carried.properties))
            message_id = getattr(carried, "id", None)
        if answer is not None:
            self._asked.put((forward, identifier), answer)
        return Described(
            f'{{"conversation_id":{identifier},{fields}{more}}}',
            kind,
            identifier,
            destination,
            status,
            None,
            size,
            0,
            payload,
            content_type,
            properties,
            None,
            message_id,
            None,
        )


def _told(layer_data: bytes) -> str:
    """In the fields, but for what lets somebody in."""
    try:
        if unmarshal_credentials(layer_data):
            return ""
    except BondError:
        pass  # somebody else's: no secret that we would know of
    return f',"layer_data":"{layer_data.hex()}"'


def _carried(carrier: Any, payload: bytes) -> Any:
    try:
        return marshal.unmarshal(payload, carrier)
    except BondError:
        return None  # the hub refuses it: a request like any other


def _values(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: next((each for each in members if each is not None), None)
        for name, value in values.items()
        for members in [(value.text, value.integer, value.real, value.truth)]
    }


def _error_name(error: bytes) -> str:
    try:
        return unmarshal_error(error).error_name
    except BondError:
        return "failure"


READING = EpoxyReading
