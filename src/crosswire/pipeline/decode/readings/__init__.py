"""Descriptions of frames one by one: a module for each protocol, imported when it is needed.

They serve connections that can't be read in columns, and single frames within the columns.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from crosswire.pipeline.decode.readings.contract import Reading
from crosswire.wire import protocol

__all__ = ["reading_of"]


@cache
def reading_of(name: str) -> type[Reading]:
    """The class that describes the frames of a protocol. Raises UnknownProtocol."""
    protocol(name)
    reading = import_module(f"crosswire.pipeline.decode.readings.{name}").READING
    assert issubclass(reading, Reading)
    return reading  # type: ignore[no-any-return]
