"""What the columns must give, written the plain way: decoders, and a description frame by frame."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from crosswire.pipeline.decode.meanings.contract import Described
from crosswire.wire.contract import Frame


class Reading(Protocol):
    """Both directions of one connection, frame by frame, in order."""

    def describe(self, forward: bool, frame: Frame, offset: int, length: int) -> Described:
        """Describe a frame. Raises FrameError if its content is not valid."""
        ...

    def interrupt(self, forward: bool) -> None:
        """Bytes of this direction are missing or are no frame."""

    def dump(self) -> bytes:
        """What is remembered."""
        ...


def reading_of(name: str) -> type[Any]:
    """The class that describes the frames of a protocol."""
    return import_module(f"tests.pipeline.decode.oracle.{name}").READING  # type: ignore[no-any-return]
