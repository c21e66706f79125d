"""Scene: market ticks in MicroMsg2, for a subscriber with a filter and an archive in EMP."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from crosswire.cli.demo.scene import HOST, Scene, quick_backoff, repeat_on_connect
from crosswire.client.native.emp import EmpClient, Json
from crosswire.client.native.micromsg2 import MicroMsg2Client
from crosswire.envelope import Property

__all__ = ["Ticks"]

_BURST = 10
_SYMBOLS = ("ACME", "GLOBEX", "INITECH")
_LIMIT = 150
_ARCHIVE = {"destination": "topic/ticks", "name": "ticks-archive", "from": "earliest"}
_FILTER = f"symbol=TACME;price>N{_LIMIT}"


class Ticks(Scene):
    """A publisher, a filtered subscriber, and a named subscription that gets everything."""

    title: ClassVar[str] = "ticks"
    route: ClassVar[str] = "MicroMsg2 → topic → EMP"
    description: ClassVar[str] = f"a trader with a filter (ACME above {_LIMIT}), an archive of all"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._passed = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Publish until `ending`; receive until cancelled."""
        port = self.ports["micromsg2"]
        archive = EmpClient(
            HOST, self.ports["emp"], handlers={"$deliver": self._file}, backoff=quick_backoff()
        )
        async with (
            archive,
            MicroMsg2Client(HOST, port, backoff=quick_backoff()) as trader,
            MicroMsg2Client(HOST, port, backoff=quick_backoff()) as market,
        ):
            await asyncio.gather(
                self.send(ending, lambda number: self._tick(market, number), burst=_BURST),
                repeat_on_connect(archive, lambda peer: peer.request("$subscribe", _ARCHIVE)),
                self._trade(trader),
            )

    async def _tick(self, market: MicroMsg2Client, number: int) -> None:
        price = 100 + number * 37 % 100
        symbol = _SYMBOLS[number % len(_SYMBOLS)]
        properties: dict[str, Property] = {"symbol": symbol, "price": price, "number": number}
        await market.send("topic/ticks", b"%s %d" % (symbol.encode(), price), properties)

    async def _file(self, delivery: Json) -> None:
        self.arrived[delivery["properties"]["number"]] += 1

    async def _trade(self, trader: MicroMsg2Client) -> None:
        async with trader.subscribe("topic/ticks", filter=_FILTER) as ticks:
            async for _ in ticks:
                self._passed += 1

    def remarks(self) -> str:
        """Deliveries to the trader."""
        return f"{self._passed:,} passed the filter"
