"""What single values of a protocol mean (an operation, an address, a method), and what a connection
has to remember between two frames: a module for each protocol, imported when it is needed.

`describe` of a protocol asks for each distinct value once.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from crosswire.pipeline.decode.meanings.contract import ProtocolMemory
from crosswire.wire import protocol

__all__ = ["memory_of"]


@cache
def memory_of(name: str) -> type[ProtocolMemory]:
    """The class that remembers for a protocol. Raises UnknownProtocol."""
    protocol(name)
    memory = import_module(f"crosswire.pipeline.decode.meanings.{name}").MEMORY
    assert issubclass(memory, ProtocolMemory)
    return memory  # type: ignore[no-any-return]
