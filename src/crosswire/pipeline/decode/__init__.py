"""How the rows of a protocol's columnar scanner become rows of silver.frames, many connections at
once: a module a protocol, which says the same as `pipeline.protocols` does frame by frame."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from crosswire.pipeline.decode.contract import Describe
from crosswire.wire import protocol

__all__ = ["describe_of"]


@cache
def describe_of(name: str) -> Describe:
    """What describes the rows of a registered protocol. Raises UnknownProtocol."""
    protocol(name)
    describe: Describe = import_module(f"crosswire.pipeline.decode.{name}").describe
    return describe
