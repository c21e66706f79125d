"""What it takes to read a protocol in columns, imported when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import pyarrow as pa

from crosswire.pipeline.decode.arrays import NONE, Numbers
from crosswire.pipeline.decode.contract import Describe
from crosswire.pipeline.decode.decoded_connection import Direction
from crosswire.pipeline.decode.scanners.registry import scanner_of
from crosswire.pipeline.decode.scanners.scanner import HANDSHAKE_END, BulkScanner
from crosswire.wire import PROTOCOL_NAMES, protocol

__all__ = ["ColumnarProtocol", "columnar_protocol"]


@dataclass(frozen=True, eq=False)
class ColumnarProtocol:
    """A protocol's scanner and description; `roles` are the opener's and the acceptor's."""

    name: str
    roles: tuple[str, str]
    scanner: BulkScanner
    describe: Describe
    frames: pa.Array
    layers: Numbers

    @property
    def reads_peer_handshake(self) -> bool:
        """Whether the opener's handshake decides how the other direction is read."""
        return self.scanner.reads_peer_handshake

    def state_of(self, direction: Direction) -> Numbers | None:
        """The scanner's state to continue a direction with; None at its first byte."""
        if direction.decoder is not None:
            return self.scanner.state_of(direction.decoder)
        return None if direction.scanned is None else direction.scanned.state

    def has_handshake_of(self, direction: Direction | None) -> bool:
        """Whether the direction's handshake is complete."""
        state = None if direction is None else self.state_of(direction)
        return state is not None and bool(state[HANDSHAKE_END] != NONE)


@cache
def columnar_protocol(name: str | None) -> ColumnarProtocol | None:
    """The protocol of this name; None for what no scanner reads: TLS, and unknown protocols."""
    if name is None or name not in PROTOCOL_NAMES:
        return None
    scanner = scanner_of(name)
    describe: Describe = import_module(f"crosswire.pipeline.decode.{name}").describe
    roles = protocol(name).roles
    return ColumnarProtocol(
        name,
        (roles[0], roles[-1]),
        scanner,
        describe,
        pa.array(scanner.frame_names),
        np.array(scanner.frame_layers, np.int64),
    )
