"""ZMTP 3.1, ZeroMQ's wire protocol: greeting, security mechanisms, commands, multipart messages.

The hub has no listener for it alone: eMQP uses it, live and in captures. CURVE is in
`crosswire.wire.zmtp.curve` and needs the extra `curve`.
"""

from __future__ import annotations

from typing import Final

from crosswire.wire.registry import Sniff
from crosswire.wire.zmtp.connection import COMPATIBLE, ZmtpConnection
from crosswire.wire.zmtp.decoder import ZmtpDecoder
from crosswire.wire.zmtp.events import (
    MessageReceived,
    PeerReady,
    PongReceived,
    Subscribed,
    Unsubscribed,
)
from crosswire.wire.zmtp.frames import (
    DEFAULTS,
    Command,
    Greeting,
    Message,
    NestedCommand,
    Sealed,
    ZmtpLimits,
    serialize,
    serialize_message,
)
from crosswire.wire.zmtp.layout import (
    MAJOR_OFFSET,
    MIN_MAJOR,
    SIGNATURE_END,
    SIGNATURE_END_OFFSET,
    SIGNATURE_START,
)
from crosswire.wire.zmtp.mechanisms import Mechanism, NullMechanism, PlainClient, PlainServer

__all__ = [
    "COMPATIBLE",
    "DEFAULTS",
    "Command",
    "Greeting",
    "Mechanism",
    "Message",
    "MessageReceived",
    "NestedCommand",
    "NullMechanism",
    "PeerReady",
    "PlainClient",
    "PlainServer",
    "PongReceived",
    "Sealed",
    "Subscribed",
    "Unsubscribed",
    "ZmtpConnection",
    "ZmtpDecoder",
    "ZmtpLimits",
    "serialize",
    "serialize_message",
    "sniff",
]


_SNIFFED_VERSIONS: Final = 16


def sniff(data: bytes) -> Sniff:
    """Both sides begin with a signature, whose padding may be any bytes, and a version below 16."""
    size = len(data)
    if size and data[0] != SIGNATURE_START:
        return Sniff.NO
    if size > SIGNATURE_END_OFFSET and data[SIGNATURE_END_OFFSET] != SIGNATURE_END:
        return Sniff.NO
    if size <= MAJOR_OFFSET:
        return Sniff.MORE
    return Sniff.YES if MIN_MAJOR <= data[MAJOR_OFFSET] < _SNIFFED_VERSIONS else Sniff.NO
