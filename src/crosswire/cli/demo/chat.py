"""A chat over Relink: links that go on where they were cut."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from crosswire.cli.demo.scene import HOST, Scene, soon
from crosswire.clients.relink import RelinkClient

__all__ = ["Chat"]

_BURST = 10
_CUT_AFTER = (300, 600)


class Chat(Scene):
    title: ClassVar[str] = "chat"
    way: ClassVar[str] = "Relink → topic → Relink"
    story: ClassVar[str] = "a link that is cut twice on purpose, and once by the kill"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._cuts = 0

    async def play(self, curtain: asyncio.Event) -> None:
        port = self.ports["relink"]
        reading = "topic/chat?subscribe&name=archive&from=earliest"
        async with (
            RelinkClient(HOST, port, reading, backoff=soon()) as reader,
            RelinkClient(HOST, port, "topic/chat", backoff=soon()) as writer,
        ):
            await asyncio.gather(self._write(writer, reader, curtain), self._read(reader))

    async def _write(
        self, writer: RelinkClient, reader: RelinkClient, curtain: asyncio.Event
    ) -> None:
        """A link repeats by itself what was cut off: consumed means that the hub has it on disk."""
        channel = writer.sender(0)
        while not curtain.is_set():
            for number in range(self.tried, self.tried + _BURST):
                await channel.send(b"%d" % number)
            self.tried += _BURST
            await channel.consumed()
            self.acknowledged.update(range(self.tried))
            if self._cuts < len(_CUT_AFTER) and self.tried >= _CUT_AFTER[self._cuts]:
                self._cuts += 1
                for client in (writer, reader):
                    if client.connected:
                        client.session.transport.abort()
            await asyncio.sleep(0.05)
        self.is_busy = False

    async def _read(self, reader: RelinkClient) -> None:
        async for message in reader.receiver(0):
            self.arrived[int(bytes(message.parts[-1]))] += 1
            message.consume()

    def aside(self) -> str:
        return f"{self._cuts} cuts, none noticed"
