"""Relink's handshake: who wants to talk to what, and which link it is about.

The peers take turns (specification 1); integers are little-endian:

    connector-version   version 1 · padding 7
    listener-version    version 1 · padding 7
    connector-hello     name length 1 · name · connector's id size 1 · listener's id size 1 ·
                        flags 1 · padding to 8, from the hello's start · epoch 8 · link 8
    listener-hello      epoch 8 · link 8
"""

from __future__ import annotations

from struct import Struct
from typing import ClassVar, Final

import msgspec

from crosswire.errors import MalformedFrame
from crosswire.wire.contract import Frame

__all__ = [
    "VERSION",
    "ConnectorHello",
    "ConnectorVersion",
    "LinkTerms",
    "ListenerHello",
    "ListenerVersion",
    "parse_hello",
    "parse_version",
    "serialize_handshake",
]

VERSION: Final = 0


class ConnectorVersion(Frame, frozen=True, gc=False):
    """The highest version that the connector speaks."""

    frame_name: ClassVar[str] = "connector-version"
    version: int


class ListenerVersion(Frame, frozen=True, gc=False):
    """The version that both will speak: the connector's or a lower one."""

    frame_name: ClassVar[str] = "listener-version"
    version: int


class ConnectorHello(Frame, frozen=True, gc=False, kw_only=True):
    """What the connector wants to talk to, and how; epoch and link are zero for a new link."""

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
    """The link that was agreed on; zero if the old one was required and is not known."""

    frame_name: ClassVar[str] = "listener-hello"
    epoch: int
    link: int


class LinkTerms(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the connector asks for in the handshake, and what holds for the life of the link."""

    endpoint: str
    connector_id_size: int = 1
    listener_id_size: int = 1
    connector_transactions: bool = False
    listener_transactions: bool = False

    @classmethod
    def of(cls, hello: ConnectorHello) -> LinkTerms:
        return cls(**{name: getattr(hello, name) for name in cls.__struct_fields__})


# ------------------------------------------------------------------------------ parse, serialize

_VERSION: Final = Struct("<B7x")
_TWO: Final = Struct("<QQ")
_LINK_END = 1 << 63
_MAX_ID_SIZE = 8


def parse_version(sender: str, buffer: bytes, position: int) -> tuple[Frame | None, int]:
    """A frame and its length, or None and how many bytes it takes to know more."""
    if len(buffer) - position < 8:
        return None, 8
    version = buffer[position]
    return ConnectorVersion(version) if sender == "connector" else ListenerVersion(version), 8


def parse_hello(sender: str, buffer: bytes, position: int, offset: int) -> tuple[Frame | None, int]:
    """Like `parse_version`. Raises FrameError, placed at `offset`."""
    if sender == "connector":
        return _parse_connector_hello(buffer, position, offset)
    if len(buffer) - position < 16:
        return None, 16
    epoch, link = _TWO.unpack_from(buffer, position)
    _check_link(link, offset, 16)
    return ListenerHello(epoch, link), 16


def _parse_connector_hello(
    buffer: bytes, position: int, offset: int
) -> tuple[ConnectorHello | None, int]:
    available = len(buffer) - position
    if not available:
        return None, 1
    name_end = 1 + buffer[position]
    fixed_end = name_end + 3
    if available < fixed_end:
        return None, fixed_end
    connector_id_size, listener_id_size, flags = buffer[position + name_end : position + fixed_end]
    if connector_id_size > _MAX_ID_SIZE or listener_id_size > _MAX_ID_SIZE:
        raise MalformedFrame(
            f"channel ids of {connector_id_size} and {listener_id_size} bytes; 8 is the most",
            offset=offset,
            length=fixed_end,
        )
    try:
        endpoint = buffer[position + 1 : position + name_end].decode()
    except UnicodeDecodeError as error:
        raise MalformedFrame(
            f"the endpoint's name is not UTF-8: {error.reason}", offset=offset, length=fixed_end
        ) from None
    epoch_at = fixed_end + -fixed_end % 8
    if available < epoch_at + 16:
        return None, epoch_at + 16
    epoch, link = _TWO.unpack_from(buffer, position + epoch_at)
    _check_link(link, offset, epoch_at + 16)
    hello = ConnectorHello(
        endpoint=endpoint,
        connector_id_size=connector_id_size,
        listener_id_size=listener_id_size,
        connector_transactions=bool(flags & 1),
        listener_transactions=bool(flags & 2),
        require_old_link=bool(flags & 4),
        epoch=epoch,
        link=link,
    )
    return hello, epoch_at + 16


def _check_link(link: int, offset: int, length: int) -> None:
    if link >= _LINK_END:
        raise MalformedFrame(f"link id {link} is not below 2^63", offset=offset, length=length)


def serialize_handshake(frame: Frame) -> bytes:
    """The bytes of a handshake message."""
    match frame:
        case ConnectorVersion(version=version) | ListenerVersion(version=version):
            return _VERSION.pack(version)
        case ListenerHello(epoch=epoch, link=link):
            return _TWO.pack(epoch, link)
        case ConnectorHello():
            name = frame.endpoint.encode()
            flags = (
                frame.connector_transactions
                | frame.listener_transactions << 1
                | frame.require_old_link << 2
            )
            sizes = (frame.connector_id_size, frame.listener_id_size)
            fixed = bytes((len(name), *name, *sizes, flags))
            return fixed + bytes(-len(fixed) % 8) + _TWO.pack(frame.epoch, frame.link)
    raise TypeError(f"{type(frame).__name__} is not a Relink handshake message")
