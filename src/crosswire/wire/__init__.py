"""The wire protocols, without I/O, and their registry, which imports a protocol on first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from crosswire.errors import UnknownProtocol
from crosswire.wire.contract import Protocol

__all__ = ["PROTOCOL_NAMES", "protocol"]

PROTOCOL_NAMES = ("emp", "emqp", "relink", "epoxy", "micromsg2")


@cache
def protocol(name: str) -> Protocol:
    """A protocol's entry, by its name. Raises UnknownProtocol."""
    if name not in PROTOCOL_NAMES:
        raise UnknownProtocol(
            f"no protocol is named {name!r}; there are {', '.join(PROTOCOL_NAMES)}"
        )
    entry = import_module(f"crosswire.wire.{name}").PROTOCOL
    assert isinstance(entry, Protocol)
    return entry
