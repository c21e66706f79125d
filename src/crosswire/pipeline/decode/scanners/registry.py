"""The scanner of each protocol, imported when it is needed: kernels take a while to load."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from crosswire.wire import protocol

if TYPE_CHECKING:
    from crosswire.pipeline.decode.scanners.scanner import BulkScanner

__all__ = ["scanner_of"]


@cache
def scanner_of(name: str) -> BulkScanner:
    """The scanner of a protocol, with its default limits. Raises UnknownProtocol."""
    protocol(name)
    scanner: BulkScanner = import_module(f"crosswire.pipeline.decode.scanners.{name}").SCANNER()
    return scanner
