"""Joining IP fragments into the packets that they were cut from."""

from __future__ import annotations

from typing import Final

from crosswire.capture.layout import (
    IPV4_FRAGMENT,
    IPV4_HEADER_BYTES,
    IPV4_IDENTIFICATION,
    IPV4_LENGTH,
    IPV4_MORE,
    IPV4_OFFSET,
    IPV4_PROTOCOL,
    IPV4_SOURCE,
    IPV6_AUTHENTICATION,
    IPV6_EXTENSION_BYTES,
    IPV6_FRAGMENT,
    IPV6_HEADER_BYTES,
    IPV6_LENGTH,
    IPV6_MORE,
    IPV6_NEXT,
    IPV6_OFFSET,
    IPV6_SOURCE,
)

__all__ = ["Fragments"]

_TIMEOUT_NS: Final = 30 * 1_000_000_000
_MOST_OPEN: Final = 4096
"""A capture of an attack must not fill the memory with fragments that are never completed."""
_MOST_HELD_BYTES: Final = 2 * 65_536
"""Of one datagram, which has at most 64 KiB: fragments may overlap, but not without limit."""


class _Datagram:
    """Fragments by offset; `first` is the header of the fragment with offset 0, `total` the length
    of the whole, which only the last fragment reveals."""

    __slots__ = ("captured", "count", "first", "held", "parts", "started", "total")

    def __init__(self, started: int) -> None:
        self.started = started
        self.first = b""
        self.parts: dict[int, bytes] = {}
        self.held = 0
        self.total: int | None = None
        self.count = 0
        self.captured = 0


class Fragments:
    """Takes fragments in any order and gives the packet when its last fragment was added.

    A datagram that is not complete after 30 s of the capture's time is dropped, as a host does; its
    bytes are then a gap of the connection. So is the oldest when too many are incomplete, and one
    whose fragments have far more bytes than a datagram can.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[bytes, bytes], _Datagram] = {}
        self.last_joined = (0, 0)
        """How many fragments made the last packet, and the sum of their `captured_bytes`."""

    def open(self, now_ns: int) -> int:
        """The number of datagrams that are incomplete at this time."""
        for key in [key for key, each in self._open.items() if now_ns - each.started > _TIMEOUT_NS]:
            del self._open[key]
        return len(self._open)

    def add(self, packet: bytes, time_ns: int, captured_bytes: int = 0) -> bytes | None:
        """The packet that this fragment completes, as if it had never been cut, else None. Both
        begin with the IP header. `captured_bytes` is what the capture has of this one, with the
        headers before IP."""
        if packet[0] >> 4 == 4:
            header = (packet[0] & 15) * 4
            end = _u16(packet, IPV4_LENGTH)
            # Fragments of one datagram have its addresses, identification and protocol.
            addresses = packet[IPV4_SOURCE:IPV4_HEADER_BYTES]
            identification = packet[IPV4_IDENTIFICATION:IPV4_FRAGMENT]
            key = (addresses, identification + packet[IPV4_PROTOCOL : IPV4_PROTOCOL + 1])
            flags_and_offset = _u16(packet, IPV4_FRAGMENT)
            more = bool(flags_and_offset & IPV4_MORE)
            offset = (flags_and_offset & IPV4_OFFSET) * 8
        else:
            header = _fragment_header(packet) + IPV6_EXTENSION_BYTES
            end = IPV6_HEADER_BYTES + _u16(packet, IPV6_LENGTH)
            # The identification is the last 4 bytes of the fragment header.
            key = (packet[IPV6_SOURCE:IPV6_HEADER_BYTES], packet[header - 4 : header])
            flags_and_offset = _u16(packet, header - 6)
            more, offset = bool(flags_and_offset & IPV6_MORE), flags_and_offset & IPV6_OFFSET
        if end > len(packet) or end <= header:
            return None  # cut by the capture's snap length: it can never be complete
        datagram = self._open.get(key)
        if datagram is None:
            if self.open(time_ns) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            datagram = self._open[key] = _Datagram(time_ns)
        datagram.count += 1
        datagram.captured += captured_bytes
        part = packet[header:end]
        # The first of several with the same offset counts, as in the reassembly of TCP.
        if offset not in datagram.parts:
            datagram.parts[offset] = part
            datagram.held += len(part)
        if not offset:
            datagram.first = packet[:header]
        if not more:
            datagram.total = offset + len(part)
        if datagram.held > _MOST_HELD_BYTES:
            del self._open[key]
            return None
        if not datagram.first or datagram.total is None or datagram.held < datagram.total:
            return None
        body = _join(datagram)
        if body is None:
            return None
        del self._open[key]
        self.last_joined = datagram.count, datagram.captured
        return _unfragmented(datagram.first, body)


def _u16(packet: bytes, at: int) -> int:
    return int.from_bytes(packet[at : at + 2])


def _join(datagram: _Datagram) -> bytes | None:
    """The datagram's body; None if bytes are missing, which overlaps may have hidden."""
    assert datagram.total is not None
    body = bytearray()
    for offset in sorted(datagram.parts):
        if offset > len(body):
            return None
        body += datagram.parts[offset][len(body) - offset :]
    return bytes(body[: datagram.total]) if len(body) >= datagram.total else None


def _fragment_header(packet: bytes) -> int:
    """Where IPv6's fragment header begins: extension headers may precede it."""
    kind, at = packet[IPV6_NEXT], IPV6_HEADER_BYTES
    while kind != IPV6_FRAGMENT:
        units = packet[at + 1]
        # The authentication header counts its length in units of 4 bytes, less 2.
        kind, at = (
            packet[at],
            at + ((units + 2) * 4 if kind == IPV6_AUTHENTICATION else (units + 1) * 8),
        )
    return at


def _unfragmented(head: bytes, body: bytes) -> bytes:
    """A packet with the header of its first fragment, without the marks of one."""
    if head[0] >> 4 == 4:
        total = min(len(head) + len(body), 0xFFFF)
        return head[:2] + total.to_bytes(2) + head[4:6] + b"\0\0" + head[8:] + body
    # Without extension headers, none of which matters to TCP: the fragment header is the last, and
    # its first byte is the protocol that follows.
    size = min(len(body), 0xFFFF)
    return head[:4] + size.to_bytes(2) + head[-8:-7] + head[7:40] + body
