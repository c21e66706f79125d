"""How the frames of each protocol become rows: a module a protocol, imported when it is needed."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from crosswire.pipeline.decode.readings.contract import Reading
from crosswire.wire import protocol

__all__ = ["reading_of"]


@cache
def reading_of(name: str) -> type[Reading]:
    """What reads the frames of a registered protocol. Raises UnknownProtocol."""
    protocol(name)
    reading = import_module(f"crosswire.pipeline.decode.readings.{name}").READING
    assert issubclass(reading, Reading)
    return reading  # type: ignore[no-any-return]
