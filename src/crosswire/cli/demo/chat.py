"""A chat over Relink: links that go on where they were cut."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec

from crosswire.cli.demo.scene import HOST, Scene, soon
from crosswire.client.native.relink import RelinkClient
from crosswire.errors import ConnectFailed

__all__ = ["Chat"]

_BURST = 10
_PAUSE_S = 0.05
_PATIENCE_S = 20.0
_PEOPLE = ("ann", "bob", "eve")
_LINES = ("hello", "anybody there?", "tea?", "always", "who has the keys?", "I do", "bye then")


class Chat(Scene):
    title: ClassVar[str] = "chat"
    way: ClassVar[str] = "Relink → topic → Relink"
    story: ClassVar[str] = "links that are cut twice, besides the kill, and go on"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._links: tuple[RelinkClient, ...] = ()
        self._cuts = 0

    async def play(self, curtain: asyncio.Event) -> None:
        port = self.ports["relink"]
        reading = "topic/chat?subscribe&name=chat-window&from=earliest"
        async with (
            RelinkClient(HOST, port, reading, backoff=soon()) as reader,
            RelinkClient(HOST, port, "topic/chat", backoff=soon()) as writer,
        ):
            self._links = (writer, reader)
            await asyncio.gather(self._write(writer, curtain), self._read(reader))

    async def cut(self) -> None:
        """Break off the connections of both sides, with something on its way if possible."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not (self._links and all(link.connected for link in self._links)):
                    await asyncio.sleep(_PAUSE_S)
                while not self.under_way:
                    await asyncio.sleep(0)
        except TimeoutError:
            raise ConnectFailed(f"the chat was not back within {_PATIENCE_S:g} s") from None
        self._cuts += 1
        for link in self._links:
            link.session.transport.abort()

    async def _write(self, writer: RelinkClient, curtain: asyncio.Event) -> None:
        """A link repeats by itself what was cut off: consumed means that the hub has it on disk."""
        channel = writer.sender(0)
        while not curtain.is_set():
            self.under_way = _BURST
            for number in range(self.tried, self.tried + _BURST):
                message = {
                    "number": number,
                    "from": _PEOPLE[number % len(_PEOPLE)],
                    "text": _LINES[number % len(_LINES)],
                }
                await channel.send(msgspec.json.encode(message))
            self.tried += _BURST
            await channel.consumed()
            self.under_way = 0
            self.acknowledged.update(range(self.tried))
            await asyncio.sleep(_PAUSE_S)
        self.is_busy = False

    async def _read(self, reader: RelinkClient) -> None:
        async for message in reader.receiver(0):
            line = msgspec.json.decode(bytes(message.parts[-1]))
            self.arrived[line["number"]] += 1
            message.consume()

    def aside(self) -> str:
        return f"{self._cuts} cuts, none noticed"
