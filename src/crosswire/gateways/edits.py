"""Native entries and properties of a message, adapted after the message was edited.

Some of them describe the form of the payload, or the destination. The payload of a dead letter can
be edited, and the letter replayed to another destination: these must follow, or a consumer would
read the new payload by the old description.

    relink.parts                the sizes of the parts: dropped with another payload, which is one
                                part
    content-type (a property)   follows the content type of the envelope
    dotnet-type (a property)    dropped when the content type changes: the class that it names
                                describes the old form
    emqp.headers                follow the properties and the content type; what the protocol itself
                                understands (guarantee, timeout, …) stays
    emqp.queue                  the queue's frame: dropped at another destination

An eMQP message id, the identity of the client and Epoxy's layer data describe neither and stay.
"""

from __future__ import annotations

from crosswire.envelope import Envelope, Property
from crosswire.gateways.emqp.messages import HEADERS, QUEUE
from crosswire.gateways.properties import CONTENT_TYPE
from crosswire.gateways.relink.messages import PARTS
from crosswire.wire.emqp.headers import KNOWN, Headers
from crosswire.wire.micromsg2.connection import DOTNET_TYPE

__all__ = ["refit"]


def refit(before: Envelope, after: Envelope) -> Envelope:
    """`after`, an edited copy of `before`, without what describes only `before`.

    Properties that were edited stay as they are.
    """
    properties, native = dict(after.properties), dict(after.native)
    new_type = after.content_type != before.content_type
    if new_type and after.properties == before.properties:
        properties.pop(DOTNET_TYPE, None)
        if CONTENT_TYPE in properties:
            properties[CONTENT_TYPE] = after.content_type
    if after.payload != before.payload:
        native.pop(PARTS, None)
    if HEADERS in native and (new_type or properties != before.properties):
        native[HEADERS] = _headers(native[HEADERS], properties, after, new_type=new_type)
    if after.destination != before.destination:
        native.pop(QUEUE, None)
    if (properties, native) == (after.properties, after.native):
        return after
    return after.replace(properties=properties, native=native)


def _headers(
    text: bytes, properties: dict[str, Property], after: Envelope, *, new_type: bool
) -> bytes:
    """The text of an eMQP message's headers, with other properties."""
    headers = Headers.parse(text.decode())
    content_type = after.content_type if new_type else headers.get(CONTENT_TYPE)
    if content_type:
        properties = {**properties, CONTENT_TYPE: content_type}
    known = [item for item in headers.items if item.strip().partition(":")[0] in KNOWN]
    return str(Headers([*known, *Headers.of(properties=properties).items])).encode()
