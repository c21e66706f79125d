"""What describes a message beside its payload, made to fit after somebody changed the message.

Some of a message's `native` entries and properties say what form its payload has or where it was
sent. The payload of a dead letter can be edited, and the letter replayed to another destination:
then these have to follow, or a consumer would read the new payload by the old description.

    relink.parts                the sizes of the parts: dropped with another payload, which is one
    content-type (a property)   follows the content type of the envelope
    dotnet-type (a property)    dropped when the content type changes: the class that it names
                                describes the old form
    emqp.headers                follow the properties and the content type; what the protocol itself
                                understands (guarantee, timeout, …) stays
    emqp.queue                  the queue's frame: dropped at another destination

An eMQP message id, the identity of the client and Epoxy's layer data describe neither and stay.
"""

from __future__ import annotations

from typing import Final

from crosswire.envelope import Envelope, Property
from crosswire.gateways.emqp.messages import HEADERS, QUEUE
from crosswire.gateways.relink.messages import PARTS
from crosswire.wire.emqp.headers import KNOWN, Headers
from crosswire.wire.micromsg2.connection import DOTNET_TYPE

__all__ = ["refit"]

_CONTENT_TYPE: Final = "content-type"


def refit(before: Envelope, after: Envelope) -> Envelope:
    """`after`, a changed copy of `before`, without the descriptions that fit only `before`.

    Properties that the change itself has set are taken as they are.
    """
    properties, native = dict(after.properties), dict(after.native)
    new_type = after.content_type != before.content_type
    if new_type and after.properties == before.properties:
        properties.pop(DOTNET_TYPE, None)
        if _CONTENT_TYPE in properties:
            properties[_CONTENT_TYPE] = after.content_type
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
    content_type = after.content_type if new_type else headers.get(_CONTENT_TYPE)
    if content_type:
        properties = {**properties, _CONTENT_TYPE: content_type}
    known = [item for item in headers.items if item.strip().partition(":")[0] in KNOWN]
    return str(Headers([*known, *Headers.of(properties=properties).items])).encode()
