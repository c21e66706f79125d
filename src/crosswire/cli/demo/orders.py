"""Orders in EMP: a shop sends, a warehouse takes, and one order is nobody's."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from crosswire.cli.demo.scene import HOST, Scene, keep_asking, soon
from crosswire.clients.emp import EmpClient, Json
from crosswire.errors import RequestFailed

__all__ = ["Orders"]

_POISON = 13
_BURST = 20


class Orders(Scene):
    title: ClassVar[str] = "orders"
    way: ClassVar[str] = "EMP → queue → EMP"
    story: ClassVar[str] = "a warehouse refuses some orders at first, and number 13 for ever"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._refused = 0
        self._dead = 0

    async def play(self, curtain: asyncio.Event) -> None:
        port = self.ports["emp"]
        take, bury = {"$deliver": self._take}, {"$deliver": self._bury}
        async with (
            EmpClient(HOST, port, backoff=soon()) as shop,
            EmpClient(HOST, port, handlers=take, backoff=soon()) as warehouse,
            EmpClient(HOST, port, handlers=bury, backoff=soon()) as undertaker,
        ):
            await asyncio.gather(
                self.send(curtain, lambda number: self._order(shop, number), burst=_BURST),
                self._subscribe(warehouse, "queue/orders"),
                self._subscribe(undertaker, "queue/orders/dead"),
            )

    async def _subscribe(self, client: EmpClient, queue: str) -> None:
        await keep_asking(client, lambda peer: peer.request("$subscribe", {"destination": queue}))

    async def _order(self, shop: EmpClient, number: int) -> None:
        order = {"order": number, "item": "tea", "amount": number % 5 + 1}
        asked = {"destination": "queue/orders", "json": order, "properties": {"express": False}}
        await shop.request("$publish", asked, timeout_s=10)

    async def _take(self, data: Json) -> None:
        number = data["json"]["order"]
        if number == _POISON or (number % 29 == 0 and data["attempt"] == 1):
            self._refused += 1
            raise RequestFailed("out_of_stock", "come again")
        self.arrived[number] += 1

    async def _bury(self, data: Json) -> None:
        self._dead += 1
        self.arrived[data["json"]["order"]] += 1

    def aside(self) -> str:
        return f"{self._refused} refusals, {self._dead} dead letter"
