"""Relink's handshake: which endpoint the connector wants, on which terms, and by which link.

The peers take turns (specification 1); `layout.py` has the layout.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from crosswire.errors import MalformedFrame
from crosswire.wire.contract import Frame
from crosswire.wire.relink.layout import (
    ALIGNMENT,
    CONNECTOR_ID_SIZE_OFFSET,
    ENDPOINT_OFFSET,
    HELLO_FIELDS_SIZE,
    HELLO_FLAG_CONNECTOR_TRANSACTIONS,
    HELLO_FLAG_LISTENER_TRANSACTIONS,
    HELLO_FLAG_REQUIRE_OLD_LINK,
    HELLO_FLAGS_OFFSET,
    LINK_STRUCT,
    LISTENER_HELLO_SIZE,
    LISTENER_ID_SIZE_OFFSET,
    MAX_ID_SIZE,
    MAX_LINK,
    VERSION_OFFSET,
    VERSION_SIZE,
    VERSION_STRUCT,
    align,
)

__all__ = [
    "ConnectorHello",
    "ConnectorVersion",
    "LinkTerms",
    "ListenerHello",
    "ListenerVersion",
    "parse_hello",
    "parse_version",
    "serialize_handshake",
]


class ConnectorVersion(Frame, frozen=True, gc=False):
    """The highest version that the connector supports."""

    frame_name: ClassVar[str] = "connector-version"
    version: int


class ListenerVersion(Frame, frozen=True, gc=False):
    """The version that is used: the connector's or a lower one."""

    frame_name: ClassVar[str] = "listener-version"
    version: int


class ConnectorHello(Frame, frozen=True, gc=False, kw_only=True):
    """The endpoint and the terms that the connector asks for; epoch and link are zero for a new
    link."""

    frame_name: ClassVar[str] = "connector-hello"
    endpoint: str
    connector_id_size: int = 1
    listener_id_size: int = 1
    connector_transactions: bool = False
    listener_transactions: bool = False
    require_old_link: bool = False
    epoch: int = 0
    link: int = 0


class ListenerHello(Frame, frozen=True, gc=False):
    """The link that is used, an old or a new one; zero if a required old one is unknown."""

    frame_name: ClassVar[str] = "listener-hello"
    epoch: int
    link: int


class LinkTerms(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the connector asks for in the handshake; unchanged for the life of the link."""

    endpoint: str
    connector_id_size: int = 1
    listener_id_size: int = 1
    connector_transactions: bool = False
    listener_transactions: bool = False

    @classmethod
    def of(cls, hello: ConnectorHello) -> LinkTerms:
        """The terms that a hello asks for."""
        return cls(**{name: getattr(hello, name) for name in cls.__struct_fields__})


# ------------------------------------------------------------------------------ parse, serialize


def parse_version(sender: str, buffer: bytes, position: int) -> tuple[Frame | None, int]:
    """A frame and its length; or None, and how many bytes are needed to continue."""
    if len(buffer) - position < VERSION_SIZE:
        return None, VERSION_SIZE
    kind = ConnectorVersion if sender == "connector" else ListenerVersion
    return kind(buffer[position + VERSION_OFFSET]), VERSION_SIZE


def parse_hello(sender: str, buffer: bytes, position: int, offset: int) -> tuple[Frame | None, int]:
    """Like `parse_version`. Raises FrameError; `offset` is the hello's offset in the stream."""
    if sender == "connector":
        return _parse_connector_hello(buffer, position, offset)
    if len(buffer) - position < LISTENER_HELLO_SIZE:
        return None, LISTENER_HELLO_SIZE
    epoch, link = LINK_STRUCT.unpack_from(buffer, position)
    _check_link(link, offset, LISTENER_HELLO_SIZE)
    return ListenerHello(epoch, link), LISTENER_HELLO_SIZE


def _parse_connector_hello(
    buffer: bytes, position: int, offset: int
) -> tuple[ConnectorHello | None, int]:
    available = len(buffer) - position
    if not available:
        return None, ENDPOINT_OFFSET
    name_end = ENDPOINT_OFFSET + buffer[position]
    fixed_end = name_end + HELLO_FIELDS_SIZE
    if available < fixed_end:
        return None, fixed_end
    fields = buffer[position + name_end : position + fixed_end]
    connector_id_size = fields[CONNECTOR_ID_SIZE_OFFSET]
    listener_id_size = fields[LISTENER_ID_SIZE_OFFSET]
    flags = fields[HELLO_FLAGS_OFFSET]
    if connector_id_size > MAX_ID_SIZE or listener_id_size > MAX_ID_SIZE:
        raise MalformedFrame(
            f"channel ids of {connector_id_size} and {listener_id_size} bytes; {MAX_ID_SIZE} is "
            "the most",
            offset=offset,
            length=fixed_end,
        )
    try:
        endpoint = buffer[position + ENDPOINT_OFFSET : position + name_end].decode()
    except UnicodeDecodeError as error:
        raise MalformedFrame(
            f"the endpoint's name is not UTF-8: {error.reason}", offset=offset, length=fixed_end
        ) from None
    # Aligned in the connector's stream as well: what precedes the hello there is one version.
    epoch_at = align(fixed_end, ALIGNMENT)
    end = epoch_at + LINK_STRUCT.size
    if available < end:
        return None, end
    epoch, link = LINK_STRUCT.unpack_from(buffer, position + epoch_at)
    _check_link(link, offset, end)
    hello = ConnectorHello(
        endpoint=endpoint,
        connector_id_size=connector_id_size,
        listener_id_size=listener_id_size,
        connector_transactions=bool(flags & HELLO_FLAG_CONNECTOR_TRANSACTIONS),
        listener_transactions=bool(flags & HELLO_FLAG_LISTENER_TRANSACTIONS),
        require_old_link=bool(flags & HELLO_FLAG_REQUIRE_OLD_LINK),
        epoch=epoch,
        link=link,
    )
    return hello, end


def _check_link(link: int, offset: int, length: int) -> None:
    if link > MAX_LINK:
        raise MalformedFrame(f"link id {link} is not below 2^63", offset=offset, length=length)


def serialize_handshake(frame: Frame) -> bytes:
    """The bytes of a handshake message."""
    match frame:
        case ConnectorVersion(version=version) | ListenerVersion(version=version):
            return VERSION_STRUCT.pack(version)
        case ListenerHello(epoch=epoch, link=link):
            return LINK_STRUCT.pack(epoch, link)
        case ConnectorHello():
            name = frame.endpoint.encode()
            flags = (
                frame.connector_transactions * HELLO_FLAG_CONNECTOR_TRANSACTIONS
                | frame.listener_transactions * HELLO_FLAG_LISTENER_TRANSACTIONS
                | frame.require_old_link * HELLO_FLAG_REQUIRE_OLD_LINK
            )
            sizes = (frame.connector_id_size, frame.listener_id_size)
            fixed = bytes((len(name), *name, *sizes, flags))
            return (
                fixed + bytes(-len(fixed) % ALIGNMENT) + LINK_STRUCT.pack(frame.epoch, frame.link)
            )
    raise TypeError(f"{type(frame).__name__} is not a Relink handshake message")
