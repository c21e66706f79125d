"""Streams of server-sent events: a bounded buffer a client, its rights, and the end of both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from crosswire.errors import Forbidden
from crosswire.web.contract import OperationRequest
from crosswire.web.stream_slots import StreamSlots

__all__ = ["EventBuffer", "stream_events"]

_KEEP_ALIVE_S: Final = 10.0
_AT_ONCE_BYTES: Final = 64 << 10

_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


class EventBuffer:
    """Events that a client has not read yet. What does not fit into its part of the memory for all
    streams is dropped, and counted."""

    def __init__(self, streams: StreamSlots) -> None:
        self._streams = streams
        self._chunks: deque[bytes] = deque()
        self._size_bytes = 0
        self._lost = 0
        self._number = 0
        self._wake = asyncio.Event()
        self.is_ended = False

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly for any more."""
        return self._size_bytes >= self._streams.room_bytes

    def put(self, event: str, data: object) -> None:
        """Add an event, unless the client reads too slowly."""
        self._number += 1
        if self.is_full:
            self._lost += 1
            return
        self._add(event, data)

    def _add(self, event: str, data: object) -> None:
        # JSON on one line: no text of a peer can end the event.
        chunk = b"id: %d\nevent: %s\ndata: %s\n\n" % (self._number, event.encode(), _encode(data))
        self._chunks.append(chunk)
        self._size_bytes += len(chunk)
        self._wake.set()

    def lose(self, count: int = 1) -> None:
        """Events that are left out."""
        self._number += count
        self._lost += count
        self._wake.set()

    def end(self, event: str, data: object) -> None:
        """The last event."""
        if not self.is_ended:
            self.is_ended = True
            self._add(event, data)

    def wake(self) -> None:
        """Have the stream check whether it may continue."""
        self._wake.set()

    async def wait(self, within_s: float) -> None:
        """Returns when there is something to send or to check, or the time is up."""
        try:
            async with asyncio.timeout(within_s):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    def take(self) -> bytes:
        """Some of what is buffered; b"" if nothing is."""
        taken, size_bytes = [], 0
        while self._chunks and size_bytes < _AT_ONCE_BYTES:
            taken.append(self._chunks.popleft())
            size_bytes += len(taken[-1])
        self._size_bytes -= size_bytes
        if self._lost and not self._chunks:
            lost, self._lost = self._lost, 0
            self._add("lost", {"events": lost})
        return b"".join(taken)


async def stream_events(
    ask: OperationRequest,
    buffer: EventBuffer,
    check: Callable[[], None],
    begin: Callable[[], Callable[[], None]],
) -> AsyncGenerator[bytes, None]:
    """The stream of a buffer. `check` raises Forbidden: now, and whenever the users are changed,
    which ends the stream. `begin` starts what fills the buffer, and returns what ends that."""
    check()
    context = ask.server.context
    ask.streams.enter(ask.holder)
    end: Callable[[], None] | None = None
    context.on_reconfigured.append(buffer.wake)
    try:
        end = begin()
        access = context.access
        yield b": connected\n\n"
        while True:
            if chunk := buffer.take():
                yield chunk
                continue
            if buffer.is_ended:
                return
            await buffer.wait(_KEEP_ALIVE_S)
            if context.access is not access:
                access = context.access
                try:
                    if not ask.is_identified:
                        raise Forbidden("the credentials of this request are no longer valid")
                    check()
                except Forbidden as error:
                    # Without what is buffered: it may be what was taken away.
                    data = {"reason": str(error)}
                    yield b"event: end\ndata: " + _encode(data) + b"\n\n"
                    return
            if context.draining:
                buffer.end("end", {"reason": "the hub is stopping"})
            elif chunk := buffer.take():
                yield chunk
            else:
                yield b": keep-alive\n\n"
    finally:
        context.on_reconfigured.remove(buffer.wake)
        ask.streams.leave(ask.holder)
        if end is not None:
            end()
