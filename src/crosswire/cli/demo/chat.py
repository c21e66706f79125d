"""Scene: a chat over Relink, whose links resume after their connections are cut."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec

from crosswire.cli.demo.scene import HOST, Scene, quick_backoff
from crosswire.client.native.relink import RelinkClient
from crosswire.errors import ConnectFailed
from crosswire.plurals import plural

__all__ = ["Chat"]

_BURST = 10
_PAUSE_S = 0.05
_TIMEOUT_S = 20.0
_PEOPLE = ("ann", "bob", "eve")
_LINES = ("hello", "anybody there?", "tea?", "always", "who has the keys?", "I do", "bye then")


class Chat(Scene):
    """A writer and a named subscription, each on a link of its own."""

    title: ClassVar[str] = "chat"
    route: ClassVar[str] = "Relink → topic → Relink"
    description: ClassVar[str] = "links that resume; their connections are cut twice"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._links: tuple[RelinkClient, ...] = ()
        self._cuts = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Write until `ending`; read until cancelled."""
        port = self.ports["relink"]
        reading = "topic/chat?subscribe&name=chat-window&from=earliest"
        async with (
            RelinkClient(HOST, port, reading, backoff=quick_backoff()) as reader,
            RelinkClient(HOST, port, "topic/chat", backoff=quick_backoff()) as writer,
        ):
            self._links = (writer, reader)
            await asyncio.gather(self._write(writer, ending), self._read(reader))

    async def cut(self) -> None:
        """Abort both connections, while messages are unacknowledged if possible.

        Raises ConnectFailed if the links are not connected within 20 s.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not (self._links and all(link.connected for link in self._links)):
                    await asyncio.sleep(_PAUSE_S)
                while not self.under_way:
                    await asyncio.sleep(0)
        except TimeoutError:
            raise ConnectFailed(f"the chat did not reconnect within {_TIMEOUT_S:g} s") from None
        self._cuts += 1
        for link in self._links:
            link.session.transport.abort()

    async def _write(self, writer: RelinkClient, ending: asyncio.Event) -> None:
        """A link resends what a cut connection lost; `consumed` means on the hub's disk."""
        channel = writer.sender(0)
        while not ending.is_set():
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

    def remarks(self) -> str:
        """Cuts of the connections."""
        return f"{plural(self._cuts, 'cut')}, links resumed"
