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

__all__ = ["PROTOCOL_NAMES", "Hint", "Protocol", "Sniff", "protocol", "sniff"]

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
