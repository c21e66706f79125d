"""ZMTP 3.1, ZeroMQ's wire protocol: greeting, security mechanisms, commands, multipart messages.

It is not a protocol of the hub by itself: eMQP stands on it, live and in captures. CURVE lives in
`crosswire.wire.zmtp.curve` and needs the extra `curve`.
"""

from __future__ import annotations

from crosswire.wire.contract import Sniff
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


def sniff(data: bytes) -> Sniff:
    """Both sides open with a signature and a version; eight bytes of it may be anything."""
    if data[:1] not in (b"\xff", b"") or data[9:10] not in (b"\x7f", b""):
        return Sniff.NO
    if len(data) < 11:
        return Sniff.MORE
    return Sniff.YES if 3 <= data[10] < 16 else Sniff.NO
