"""The tap: passes the raw bytes of connections, as they were read and written, to the lake.

On the event loop a row is only appended to a list; spooling and sealing are done in batches, on a
thread. Rows that don't fit into the buffer are dropped and counted: a hub never waits for its tap.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from crosswire.config import LakeSettings
from crosswire.envelope import MICROSECONDS
from crosswire.gateways.context import ConnectedPeer
from crosswire.lake.schemas import BACKWARD, DATA, FIN, FORWARD, OPEN, RESET
from crosswire.lake.tap_spool import Peers, Spool, WireRow
from crosswire.logs import log_event
from crosswire.wire.masking import Mask

__all__ = ["ConnectionTap", "TapFeed", "has_spool"]

_log = logging.getLogger("crosswire.lake")

_FLUSH_S: Final = 0.2
_FLUSH_BYTES: Final = 1 << 20
_SAMPLES: Final = 1 << 32
_MASKS: Final = {
    "emp": "emp.mask:EmpMask",
    "emqp": "zmtp.mask:ZmtpMask",
    "epoxy": "epoxy.mask:EpoxyMask",
    "micromsg2": "micromsg2.mask:MicroMsg2Mask",
}
"""Classes that mask a protocol's secrets; Relink carries none."""


class TapFeed:
    """Collects the rows of all tapped connections and writes them to the spool."""

    def __init__(
        self,
        settings: LakeSettings,
        lake: Path,
        node: str,
        *,
        count: Callable[..., None],
        spool: Callable[..., Spool] = Spool,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._has_room = has_room
        self._lake = lake
        self._node = node
        self._count = count
        self._make_spool = spool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="crosswire-tap")
        self._spool: Spool | None = None
        self._rows: list[WireRow] = []
        self._bytes = 0
        self._lost_bytes = 0
        self._ended: list[str] = []
        self._writing: asyncio.Future[tuple[bool, int]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False
        self._stopped = False

    def open(self, gateway: ConnectedPeer) -> ConnectionTap | None:
        """The tap of a new connection; None if its listener is not tapped or it is not sampled."""
        tap = self._settings.tap
        if gateway.listener not in tap.listeners:
            return None
        if zlib.crc32(gateway.id.encode()) >= tap.sample * _SAMPLES:
            return None
        transport = gateway.session.transport
        connector = _address(transport.get_extra_info("peername"))
        acceptor = _address(transport.get_extra_info("sockname"))
        peers = Peers(gateway.id, gateway.protocol, gateway.listener, *connector, *acceptor)
        return ConnectionTap(self, peers, _mask(gateway.protocol))

    async def start(self) -> None:
        """Seal the spool that an earlier process left."""
        self._flush()
        if self._writing is not None:
            await self._writing

    async def stop(self) -> None:
        """Write and seal everything, and end the thread."""
        if self._stopped:
            return
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await self._writing
        rows, lost, ended = self._take()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._write, rows, lost, ended, True)
        self._thread.shutdown()

    # On the event loop.

    def add(self, row: WireRow) -> None:
        """Buffer a row. Never waits: without room in the buffer the row is dropped and counted."""
        # 100 for the row itself: many small reads fill the memory, too.
        size = row.length + 100
        if self._stopped:
            return
        if self._bytes + size > self._settings.memory_bytes:
            self._lost_bytes += row.length
            self._count("tap", "", "lost")
            return
        self._rows.append(row)
        self._bytes += size
        if self._bytes >= _FLUSH_BYTES and self._writing is None:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    def end(self, connection: str) -> None:
        """No more rows follow for this connection."""
        self._ended.append(connection)

    def _take(self) -> tuple[list[WireRow], int, list[str]]:
        taken = self._rows, self._lost_bytes, self._ended
        self._rows, self._bytes, self._lost_bytes, self._ended = [], 0, 0, []
        return taken

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None or self._stopped:
            return
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._thread, self._write, *self._take(), False)
        self._writing.add_done_callback(self._written)

    def _written(self, done: asyncio.Future[tuple[bool, int]]) -> None:
        self._writing = None
        if done.cancelled():
            return
        unsealed, lost_bytes = done.result()
        self._lost_bytes += lost_bytes
        if self._bytes >= _FLUSH_BYTES:
            self._flush()
        elif (unsealed or self._rows) and self._timer is None and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    # On the tap's thread. One call at a time (`_writing`), so the spool needs no lock.

    def _write(
        self, rows: list[WireRow], lost: int, ended: list[str], closing: bool
    ) -> tuple[bool, int]:
        """Write the rows to the spool, and seal it when it is large or old enough.

        Returns whether unsealed rows are left, and the number of bytes that could not be spooled.
        """
        now_us = int(time.time() * MICROSECONDS)
        settings, spool = self._settings, self._spool
        if not closing and not self._has_room():
            self._fail("the remaining disk space is reserved for the store")
            if spool is not None:
                spool.forget(ended)
            return True, lost + sum(row.length for row in rows)
        try:
            if spool is None:
                memory = settings.memory_bytes
                spool = self._make_spool(self._lake, self._node, memory_bytes=memory)
                self._spool = spool
            spool.add(rows, now_us, lost_bytes=lost)
            spool.forget(ended)
            # `abs`: a clock that was set back must not delay the seal.
            age_s = abs(now_us - spool.first_time) / MICROSECONDS
            if closing:
                spool.close(now_us)
            elif spool.size_bytes >= settings.seal_bytes or age_s >= settings.seal_s:
                spool.seal()
        except OSError as error:
            self._fail(str(error))
            return True, 0 if spool else lost + sum(row.length for row in rows)
        if spool.lost_bytes:
            self._fail("rows can't be spooled")
        elif self._is_failing:
            self._is_failing = False
            log_event(_log, logging.WARNING, "the tap can be written again")
        return spool.size_bytes > 0 or spool.is_lossy, 0

    def _fail(self, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            log_event(_log, logging.ERROR, "the tap can't be written", error=reason)


class ConnectionTap:
    """The tap of one connection; a session's `Tap`."""

    __slots__ = ("_ended", "_feed", "_mask", "_offsets", "_peers", "_reads")

    def __init__(self, feed: TapFeed, peers: Peers, mask: Mask | None) -> None:
        self._feed = feed
        self._peers = peers
        self._mask = mask
        self._offsets = {FORWARD: 0, BACKWARD: 0}
        self._reads: list[tuple[int, int]] = []
        self._ended: set[str] = set()
        feed.add(WireRow(peers, FORWARD, OPEN, 0, 0, _now_us()))

    def received(self, data: bytes) -> None:
        """Record bytes from the peer, with secrets masked.

        A mask holds bytes back until it knows whether they are secret.
        """
        now_us = _now_us()
        mask = self._mask
        if mask is None:
            self._add(FORWARD, data, now_us)
            return
        self._reads.append((now_us, len(data)))
        self._record(mask.feed(data))
        if mask.is_done:
            self._mask = None

    def _record(self, shown: bytes) -> None:
        """Record unmasked bytes, each with the time of the read that brought it."""
        position = 0
        while position < len(shown):
            time_us, length = self._reads[0]
            some = shown[position : position + length]
            self._add(FORWARD, some, time_us)
            position += length
            if len(some) < length:
                self._reads[0] = (time_us, length - len(some))
            else:
                del self._reads[0]

    def sent(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Record bytes to the peer; the hub sends no secrets."""
        self._add(BACKWARD, b"".join(chunks), _now_us())

    def _add(self, direction: str, data: bytes, time_us: int) -> None:
        offset = self._offsets[direction]
        self._offsets[direction] = offset + len(data)
        self._feed.add(WireRow(self._peers, direction, DATA, offset, len(data), time_us, data))

    def peer_finished(self) -> None:
        """Record that the peer sends no more."""
        self._end(FORWARD, FIN)

    def finished(self) -> None:
        """Record that the hub sends no more."""
        self._end(BACKWARD, FIN)

    def closed(self, error: Exception | None) -> None:
        """Record the end of the connection: a reset if there is an error, else a FIN."""
        if error is not None:
            self._end(FORWARD, RESET)
            self._end(BACKWARD, RESET)
        else:
            # Whichever side closed it: no more bytes follow in either direction.
            self._end(BACKWARD, FIN)
            self._end(FORWARD, FIN)
        self._feed.end(self._peers.connection)

    def _end(self, direction: str, kind: str) -> None:
        if direction in self._ended:
            return
        self._ended.add(direction)
        if direction == FORWARD:
            self._record_rest()
        offset = self._offsets[direction]
        self._feed.add(WireRow(self._peers, direction, kind, offset, 0, _now_us()))

    def _record_rest(self) -> None:
        if self._mask is not None:
            self._record(self._mask.rest())


def has_spool(lake: Path) -> bool:
    """Whether an earlier process left a spool that is not sealed."""
    return any((lake / ".spool").glob("*.spool")) or any((lake / ".spool").glob("*.running"))


def _mask(protocol: str) -> Mask | None:
    if protocol not in _MASKS:
        return None
    module, name = _MASKS[protocol].split(":")
    mask: Mask = getattr(import_module(f"crosswire.wire.{module}"), name)()
    return mask


def _address(name: Any) -> tuple[str, int]:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else ("", 0)


def _now_us() -> int:
    return int(time.time() * MICROSECONDS)
