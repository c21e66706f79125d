"""Epoxy: requests and responses by conversation, events as publications.

The hub's own service carries messages to queues and topics, and its events carry deliveries.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

from crosswire.bond import hub_module, marshal
from crosswire.errors import BondError
from crosswire.pipeline.decode.meanings.contract import (
    ACKNOWLEDGEMENT,
    HANDSHAKE,
    PUBLISH,
    REQUEST,
    RESPONSE,
    SUBSCRIPTION,
    Described,
    PendingRequests,
    ProtocolMemory,
    json_text,
    kind_of_destination,
)
from crosswire.wire.epoxy.comm import unmarshal_credentials, unmarshal_error
from crosswire.wire.epoxy.frames import ConfigFrame, MessageType

__all__ = [
    "CONFIG",
    "MEMORY",
    "UNASKED",
    "EpoxyMemory",
    "Method",
    "asked",
    "content_type_of",
    "describe_layer",
    "error_name",
    "method_of",
]

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


_MOST_NAMES: Final = 256
"""Bytes of a service's and a method's name: longer ones are not worth caching."""

_MAGIC_BYTES: Final = 4
CONFIG: Final = Described(json_text(ConfigFrame().fields()), HANDSHAKE)
UNASKED: Final = (RESPONSE, None)


class Method(NamedTuple):
    """What messages of one type share that have the same service and method.

    `fields` is what the JSON has after the conversation's id, up to what only some messages have.
    `answer` is the kind and destination of the response to a request; `carrier` is the struct in
    which the hub's methods carry a message.
    """

    fields: str
    kind: str | None
    destination: str | None
    answer: tuple[str, str] | None
    carrier: Any
    is_response: bool


def method_of(message_type: int, service: str, method: str) -> Method:
    """What messages of this type to this method share."""
    known = _method if len(service) + len(method) <= _MOST_NAMES else _method.__wrapped__
    return known(message_type, service, method)


@lru_cache(maxsize=1024)
def _method(message_type: int, service: str, method: str) -> Method:
    name = MessageType(message_type).name.lower()
    named = "".join(
        f',"{field}":{json_text(value)}'
        for field, value in (("service_name", service), ("method_name", method))
        if value
    )
    fields = f'"message_type":"{name}"{named}'
    if message_type == MessageType.RESPONSE:
        return Method(fields, None, None, None, None, True)
    path = f"{service}/{method}" if method else service
    if message_type == MessageType.EVENT:
        destination = f"topic/{path}"
        kind = _AROUND.get(destination, PUBLISH)
        return Method(fields, kind, destination, None, _CARRIERS.get(destination), False)
    destination = f"service/{path}"
    kind = _AROUND.get(destination, REQUEST)
    answer = (RESPONSE if kind == REQUEST else ACKNOWLEDGEMENT, destination)
    return Method(fields, kind, destination, answer, _CARRIERS.get(destination), False)


def asked(
    number: int, named: Method, more: str, content: bytes
) -> tuple[Described, tuple[str, str] | None]:
    """The description of a request or event, and its answer; `more` are the last members of
    `fields`."""
    fields, kind, destination, answer, carrier, _ = named
    payload, content_type = content, content_type_of(content)
    properties = message_id = None
    if carrier is not None and (carried := _carried(carrier, content)) is not None:
        destination = carried.destination
        kind = kind_of_destination(destination)
        if answer is not None:
            answer = (RESPONSE if kind == REQUEST else ACKNOWLEDGEMENT, destination)
        payload, content_type = carried.payload, carried.content_type or _BINARY
        properties = json_text(_values(carried.properties))
        message_id = getattr(carried, "id", None)
    described = Described(
        f'{{"conversation_id":{number},{fields}{more}}}',
        kind,
        str(number),
        destination,
        payload_size=len(content),
        payload=payload,
        content_type=content_type,
        properties=properties,
        message_id=message_id,
    )
    return described, answer


class EpoxyMemory(ProtocolMemory):
    """By request, kind and destination of its response, which has no method on the wire."""

    def __init__(self) -> None:
        self.asked: PendingRequests[tuple[str, str]] = PendingRequests()

    def _save(self) -> Any:
        return self.asked.save()

    def _restore(self, own: Any) -> None:
        self.asked.restore(own)


def content_type_of(content: bytes) -> str:
    """By the first bytes of marshalled Bond."""
    return _BY_MAGIC.get(content[:_MAGIC_BYTES], _BINARY)


def describe_layer(layer_data: bytes | None) -> str:
    """Layer data as a member of `fields`; empty for credentials."""
    if layer_data is None:
        return ""
    try:
        if unmarshal_credentials(layer_data):
            return ""
    except BondError:
        pass  # not credentials: a layer of an application
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


def error_name(error: bytes) -> str:
    """The name of the code of a marshalled error."""
    try:
        return unmarshal_error(error).error_name
    except BondError:
        return "failure"


MEMORY = EpoxyMemory
