"""IP fragments put together again."""

from __future__ import annotations

from typing import Final

__all__ = ["Fragments"]

_TIMEOUT_NS: Final = 30 * 1_000_000_000
_MOST_OPEN: Final = 4096
_MOST_HELD_BYTES: Final = 2 * 65_536
"""Of a datagram: fragments may overlap, but not without end."""


class _Datagram:
    __slots__ = ("first", "held", "parts", "started", "total")

    def __init__(self, started: int) -> None:
        self.started = started
        self.first = b""
        self.parts: dict[int, bytes] = {}
        self.held = 0
        self.total: int | None = None


class Fragments:
    """Takes fragments in any order and gives the packet back when the last one has come.

    A datagram that is not whole after 30 s of the capture's time is forgotten, as a host would do;
    what it carried is then a gap. So is the oldest one when too many are open at once, and one of
    which far more came than it can hold.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[bytes, bytes], _Datagram] = {}

    def open(self, now_ns: int) -> int:
        """Datagrams that wait for more of their fragments."""
        for key in [key for key, each in self._open.items() if now_ns - each.started > _TIMEOUT_NS]:
            del self._open[key]
        return len(self._open)

    def add(self, packet: bytes, time_ns: int) -> bytes | None:
        """`packet` starts with its IP header; the whole one, as if it had never been cut."""
        if packet[0] >> 4 == 4:
            header = (packet[0] & 15) * 4
            end = int.from_bytes(packet[2:4])
            key = (packet[12:20], packet[4:6] + packet[9:10])
            flags_and_offset = int.from_bytes(packet[6:8])
            more, offset = bool(flags_and_offset & 0x2000), (flags_and_offset & 0x1FFF) * 8
        else:
            header = _fragment_header(packet) + 8
            end = 40 + int.from_bytes(packet[4:6])
            key = (packet[8:40], packet[header - 4 : header])
            flags_and_offset = int.from_bytes(packet[header - 6 : header - 4])
            more, offset = bool(flags_and_offset & 1), flags_and_offset & 0xFFF8
        if end > len(packet) or end <= header:
            return None  # cut by the capture's own limit: it can never be whole
        datagram = self._open.get(key)
        if datagram is None:
            if self.open(time_ns) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            datagram = self._open[key] = _Datagram(time_ns)
        part = packet[header:end]
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
        return _unfragmented(datagram.first, body)


def _join(datagram: _Datagram) -> bytes | None:
    assert datagram.total is not None
    body = bytearray()
    for offset in sorted(datagram.parts):
        if offset > len(body):
            return None
        body += datagram.parts[offset][len(body) - offset :]
    return bytes(body[: datagram.total]) if len(body) >= datagram.total else None


def _fragment_header(packet: bytes) -> int:
    """Where IPv6's fragment header begins."""
    kind, at = packet[6], 40
    while kind != 44:
        units = packet[at + 1]
        # The authentication header counts in another way.
        kind, at = packet[at], at + ((units + 2) * 4 if kind == 51 else (units + 1) * 8)
    return at


def _unfragmented(head: bytes, body: bytes) -> bytes:
    if head[0] >> 4 == 4:
        total = min(len(head) + len(body), 0xFFFF)
        return head[:2] + total.to_bytes(2) + head[4:6] + b"\0\0" + head[8:] + body
    # Without its extension headers: they hold nothing that we need.
    size = min(len(body), 0xFFFF)
    return head[:4] + size.to_bytes(2) + head[-8:-7] + head[7:40] + body
