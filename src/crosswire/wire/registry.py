"""The registry of protocols: their entries, found by name or by a connection's first bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Final
from typing import Protocol as Shape

import msgspec

from crosswire.errors import UnknownProtocol
from crosswire.wire.contract import Connection, Decoder, Limits

__all__ = [
    "PROTOCOL_NAMES",
    "Hint",
    "Protocol",
    "Sniff",
    "begins_as_expected",
    "protocol",
    "recognize",
    "sniff",
    "title_of",
]

PROTOCOL_NAMES: Final = ("emp", "emqp", "relink", "epoxy", "micromsg2")


class Sniff(Enum):
    """Are these first bytes those of a protocol? MORE: as far as they go."""

    NO = "no"
    MORE = "more"
    YES = "yes"


class Hint(msgspec.Struct, frozen=True):
    """A value that a decoder can be given if the capture does not contain what it follows from."""

    name: str
    help: str


class DecoderFactory(Shape):
    """How a protocol's decoder is made; see Protocol for the arguments."""

    def __call__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,
        hints: Mapping[str, int] | None = None,
    ) -> Decoder: ...


class ConnectionFactory(Shape):
    """How a protocol's connection is made; its class may take more arguments."""

    def __call__(self, role: str, now: float, *, limits: Limits | None = None) -> Connection: ...


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """A protocol's entry in the registry.

    `roles` begins with those that connect and ends with the one that accepts; a decoder's `sender`
    is one of them. `ports` maps a listener's name to its default port. A `decoder` takes the `peer`
    decoder of the other direction if one side's handshake determines how the other is read, or
    `hints` instead.
    """

    name: str
    title: str
    roles: tuple[str, ...]
    ports: dict[str, int]
    limits: Limits
    connection: ConnectionFactory
    decoder: DecoderFactory
    sniff: Callable[[bytes], Sniff]
    hints: tuple[Hint, ...] = ()


@cache
def protocol(name: str) -> Protocol:
    """A protocol's entry, by its name. Raises UnknownProtocol."""
    if name not in PROTOCOL_NAMES:
        raise UnknownProtocol(
            f"no protocol is named {name!r}; there are {', '.join(PROTOCOL_NAMES)}"
        )
    # On first use: a client of one protocol does not load the others.
    entry = import_module(f"crosswire.wire.{name}").PROTOCOL
    assert isinstance(entry, Protocol)
    return entry


def sniff(data: bytes) -> str | None:
    """Name of the protocol whose first bytes, from either side, these are.

    None if no protocol matches, or while more than one still may.
    """
    hints = {name: protocol(name).sniff(data) for name in PROTOCOL_NAMES}
    sure = [name for name, answer in hints.items() if answer is Sniff.YES]
    undecided = [name for name, answer in hints.items() if answer is Sniff.MORE]
    return sure[0] if len(sure) == 1 and not undecided else None


_HTTP: Final = (b"HTTP/", b"GET ", b"POST ", b"HEAD ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PRI *")
_TLS: Final = (b"\x16\x03", b"\x15\x03")
"""A handshake record, and an alert."""


def recognize(data: bytes) -> str | None:
    """What these first bytes of a peer are, for people: a protocol's title, "TLS", "HTTP" or None.

    Fewer bytes than a protocol's handshake are enough if no other protocol begins so.
    """
    if data.startswith(_TLS):
        return "TLS"
    if data.startswith(_HTTP):
        return "HTTP"
    if not data:
        return None
    hints = {name: protocol(name).sniff(data) for name in PROTOCOL_NAMES}
    sure = [name for name, answer in hints.items() if answer is Sniff.YES]
    likely = sure or [name for name, answer in hints.items() if answer is Sniff.MORE]
    return protocol(likely[0]).title if len(likely) == 1 else None


def title_of(connection: Connection) -> str:
    """The title of a connection's protocol."""
    return _entry_of(connection).title


def begins_as_expected(connection: Connection, data: bytes) -> bool:
    """Whether a peer's first bytes are not those of another protocol than the connection's."""
    entry = _entry_of(connection)
    return entry.sniff(data) is not Sniff.NO or recognize(data) in (None, entry.title)


def _entry_of(connection: Connection) -> Protocol:
    # The module's path has the name: only this protocol is loaded.
    return protocol(type(connection).__module__.split(".")[2])
