"""Capture files up to their packets: opening, decompressing, and what their headers describe."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Literal

from crosswire.capture.layout import (
    BLOCK_BODY,
    BLOCK_ENVELOPE_BYTES,
    BYTE_ORDER_MAGICS,
    CLASSIC_MAGICS,
    DESCRIPTION_BLOCK_BYTES,
    FILE_HEADER_BYTES,
    FILE_HEADER_LINK,
    GZIP_MAGIC,
    LINK_MASK,
    LINKS,
    MAGIC_BYTES,
    MICROSECONDS,
    MOST_DESCRIPTION_BYTES,
    MOST_INTERFACES,
    OPTION_END,
    OPTION_TIME_OFFSET,
    OPTION_TIME_UNIT,
    SECTION_MAGIC,
    UNREADABLE_LINK,
    ZSTD_MAGIC,
)
from crosswire.errors import InvalidInput

__all__ = [
    "CaptureLayout",
    "Interface",
    "damaged",
    "decompressed",
    "describe_block",
    "describe_file",
    "is_capture",
    "is_compressed",
    "open_capture",
    "refused",
    "truncated",
]

_INTERFACE_OPTIONS: Final = 8
"""Where they begin in the body of an interface description."""
_OPTION_HEADER_BYTES: Final = 4


@dataclass(frozen=True)
class Interface:
    """Where packets were captured. `unit` above 0 is a power of ten per second, below 0 a power of
    two; `snap_length` is the most that was captured of a packet, 0 for all of it."""

    link: int
    unit: int = MICROSECONDS
    offset_s: int = 0
    snap_length: int = 0


@dataclass(frozen=True)
class CaptureLayout:
    """What a reader that begins in the middle of a file must know of what precedes.

    Streams store it in their checkpoints: the names of the fields are a stored format.
    """

    ng: bool
    little: bool
    nanoseconds: bool = False
    interfaces: tuple[Interface, ...] = ()
    time_ns: int = 0
    """The previous packet's time: pcapng's simple packet blocks have none of their own."""

    @property
    def byte_order(self) -> Literal["little", "big"]:
        """For `int.from_bytes`."""
        return "little" if self.little else "big"


def is_capture(path: Path) -> bool:
    """Whether a file begins like a capture, or is compressed and so may contain one."""
    with path.open("rb") as file:
        magic = file.read(MAGIC_BYTES)
    return magic in CLASSIC_MAGICS or magic == SECTION_MAGIC or is_compressed(magic)


def is_compressed(head: bytes) -> bool:
    """Whether these first bytes are those of gzip or zstd."""
    return head.startswith((GZIP_MAGIC, ZSTD_MAGIC))


def open_capture(path: str) -> BinaryIO:
    """The file as it is, unbuffered: readers ask for large blocks. Raises InvalidInput."""
    try:
        return Path(path).open("rb", buffering=0)
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from error


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """The content of a file that `open_capture` opened, from its beginning."""
    file.seek(0)
    magic = file.read(MAGIC_BYTES)
    file.seek(0)
    if magic.startswith(GZIP_MAGIC):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if magic == ZSTD_MAGIC:
        # Python's own library has no zstd; Arrow is imported only by those who need it.
        import pyarrow as pa

        # One that Arrow has opened is in a store that only Arrow knows.
        opened = file if isinstance(file, pa.NativeFile) else path
        return pa.CompressedInputStream(opened, "zstd")  # type: ignore[no-any-return]
    return file


def damaged(path: str, position: int) -> InvalidInput:
    """The error for a position that holds no record."""
    return InvalidInput(f"{path} is damaged at byte {position}")


def truncated(path: str, position: int) -> InvalidInput:
    """The error for a record that the file ends in, as a killed capture program leaves it."""
    return InvalidInput(f"{path} ends in the middle of a record, at byte {position}")


def refused(fault: InvalidInput) -> InvalidInput:
    """The error for a fault after which nobody asked to go on."""
    return InvalidInput(f"{fault}; --skip-damaged reads what precedes it")


def describe_file(head: bytes, path: str) -> tuple[CaptureLayout, int]:
    """The layout that a file's first FILE_HEADER_BYTES describe, and where the first record or
    block begins. Raises InvalidInput for what is no capture, or has packets of an unknown kind."""
    if head.startswith(SECTION_MAGIC):
        # Its first block is the section header, which is read as every later one.
        return CaptureLayout(ng=True, little=True), 0
    if head[:MAGIC_BYTES] in CLASSIC_MAGICS and len(head) < FILE_HEADER_BYTES:
        raise truncated(path, 0)
    if head[:MAGIC_BYTES] not in CLASSIC_MAGICS:
        raise InvalidInput(f"{path} is no capture file: neither pcap nor pcapng")
    little, nanoseconds = CLASSIC_MAGICS[head[:MAGIC_BYTES]]
    layout = CaptureLayout(ng=False, little=little, nanoseconds=nanoseconds)
    link = int.from_bytes(head[FILE_HEADER_LINK:FILE_HEADER_BYTES], layout.byte_order) & LINK_MASK
    if link not in LINKS:
        # Unlike in pcapng, all packets are of this kind: nothing would be left to read.
        raise InvalidInput(f"{path} has packets of link type {link}, which can't be read")
    return replace(layout, interfaces=(Interface(link),)), FILE_HEADER_BYTES


def describe_block(
    layout: CaptureLayout, data: memoryview, path: str, position: int
) -> tuple[CaptureLayout, int]:
    """The layout after a section header or an interface description, which `data` begins with, and
    the block's length: 0 if `data` ends before it does, and more has to be read.

    `data` has at least BLOCK_ENVELOPE_BYTES; `position` is the block's in the file, for errors.
    Raises InvalidInput for a damaged block.
    """
    head = bytes(data[:BLOCK_ENVELOPE_BYTES])
    if head.startswith(SECTION_MAGIC):
        little = BYTE_ORDER_MAGICS.get(head[BLOCK_BODY:])
        if little is None:
            raise damaged(path, position)
        # A new section has interfaces of its own, numbered from 0.
        described = CaptureLayout(ng=True, little=little, time_ns=layout.time_ns)
    else:
        described = layout
    length = int.from_bytes(head[4:8], described.byte_order)
    if length < DESCRIPTION_BLOCK_BYTES or length % 4 or length > MOST_DESCRIPTION_BYTES:
        raise damaged(path, position)
    if length > len(data):
        return layout, 0
    if described is layout:
        interface = _interface(bytes(data[BLOCK_BODY : length - 4]), layout.byte_order)
        if len(layout.interfaces) == MOST_INTERFACES:
            raise InvalidInput(f"{path} describes more than {MOST_INTERFACES} interfaces")
        described = replace(layout, interfaces=(*layout.interfaces, interface))
    return described, length


def _interface(body: bytes, order: Literal["little", "big"]) -> Interface:
    """Link type 2 · reserved 2 · snap length 4 · options: code 2, length 2, value, padding to 4."""
    link, snap_length = int.from_bytes(body[:2], order), int.from_bytes(body[4:8], order)
    unit, offset_s, at = MICROSECONDS, 0, _INTERFACE_OPTIONS
    while at + _OPTION_HEADER_BYTES <= len(body):
        code = int.from_bytes(body[at : at + 2], order)
        size = int.from_bytes(body[at + 2 : at + 4], order)
        value = body[at + _OPTION_HEADER_BYTES : at + _OPTION_HEADER_BYTES + size]
        if code == OPTION_TIME_UNIT and len(value) == size == 1:
            unit = -(value[0] & 0x7F) if value[0] & 0x80 else value[0]
        elif code == OPTION_TIME_OFFSET and size == 8:
            offset_s = int.from_bytes(value, order, signed=True)
        elif code == OPTION_END:
            break
        at += _OPTION_HEADER_BYTES + (size + 3 & -4)
    # An interface that can't be read is no error: others of the file may be of use.
    return Interface(link if link in LINKS else UNREADABLE_LINK, unit, offset_s, snap_length)
