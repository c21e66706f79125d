"""Orders in EMP: a shop asks a service, which sends them to a warehouse; some ship at no time."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from crosswire.cli.demo.scene import HOST, Scene, keep_asking, soon
from crosswire.client.native.emp import EmpClient, Json
from crosswire.errors import RequestFailed

__all__ = ["Orders"]

_ITEMS = ("tea", "coffee", "cocoa", "sugar", "milk")
_BURST = 10
_MISTAKE = 40
_SOLD_OUT = 29
_UNSHIPPABLE = 997


class Orders(Scene):
    title: ClassVar[str] = "orders"
    way: ClassVar[str] = "EMP → service, queue → EMP"
    story: ClassVar[str] = "an order service, and a warehouse that refuses some"
    queue: ClassVar[str] = "orders"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._invalid = 0
        self._refused = 0

    async def play(self, curtain: asyncio.Event) -> None:
        port = self.ports["emp"]
        async with (
            EmpClient(HOST, port, backoff=soon()) as shop,
            EmpClient(HOST, port, backoff=soon()) as till,
            EmpClient(HOST, port, handlers={"$deliver": self._ship}, backoff=soon()) as warehouse,
        ):

            async def place(order: Json) -> Json:
                return await self._place(till, order)

            handlers = {"orders/place": place}
            async with EmpClient(HOST, port, handlers=handlers, backoff=soon()) as desk:
                serve, subscribe = {"services": ["orders"]}, {"destination": "queue/orders"}
                await asyncio.gather(
                    keep_asking(desk, lambda peer: peer.request("$serve", serve)),
                    keep_asking(warehouse, lambda peer: peer.request("$subscribe", subscribe)),
                    self.send(curtain, lambda number: self._order(shop, number), burst=_BURST),
                )

    async def _order(self, shop: EmpClient, number: int) -> None:
        amount = number % 5 + 1 if (number + 1) % _MISTAKE else 0
        order = {"order": number, "item": _ITEMS[number % len(_ITEMS)], "amount": amount}
        await shop.request("orders/place", order, timeout_s=10)

    async def _place(self, till: EmpClient, order: Json) -> Json:
        """An order is taken when the hub has it on disk, not before."""
        if not order["amount"]:
            self._invalid += 1
            raise RequestFailed("invalid_order", "an order of nothing")
        sent = {
            "destination": "queue/orders",
            "json": order,
            "properties": {"item": order["item"], "amount": order["amount"]},
        }
        accepted = await till.request("$publish", sent, timeout_s=10)
        return {"order": order["order"], "receipt": accepted["id"]}

    async def _ship(self, delivery: Json) -> None:
        number = delivery["json"]["order"]
        is_first = delivery["attempt"] == 1
        if number % _UNSHIPPABLE == 13 or (number % _SOLD_OUT == 0 and is_first):
            self._refused += 1
            raise RequestFailed("out_of_stock", f"no {delivery['json']['item']} left")
        self.arrived[number] += 1

    def number_in(self, body: Any) -> int:
        return int(body["order"])

    def aside(self) -> str:
        return f"{self._refused} refusals, {self._invalid} invalid"
