"""Scene: orders in EMP, from a shop to a service, and from there to a warehouse's queue."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from crosswire.cli.demo.scene import HOST, Scene, quick_backoff, repeat_on_connect
from crosswire.client.native.emp import EmpClient, Json
from crosswire.errors import RequestFailed
from crosswire.plurals import plural

__all__ = ["Orders"]

_ITEMS = ("tea", "coffee", "cocoa", "sugar", "milk")
_BURST = 10
_MISTAKE = 40
_SOLD_OUT = 29
_UNSHIPPABLE = 997


class Orders(Scene):
    """A shop, an order service, and a warehouse that refuses some orders once and a few always."""

    title: ClassVar[str] = "orders"
    route: ClassVar[str] = "EMP → service, queue → EMP"
    description: ClassVar[str] = "an order service, and a warehouse that refuses some"
    queue: ClassVar[str] = "orders"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._invalid = 0
        self._refused = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Order until `ending`; serve and ship until cancelled."""
        port = self.ports["emp"]
        async with (
            EmpClient(HOST, port, backoff=quick_backoff()) as shop,
            EmpClient(HOST, port, backoff=quick_backoff()) as sender,
            EmpClient(
                HOST, port, handlers={"$deliver": self._ship}, backoff=quick_backoff()
            ) as warehouse,
        ):

            async def submit(order: Json) -> Json:
                return await self._submit(sender, order)

            handlers = {"orders/submit": submit}
            async with EmpClient(HOST, port, handlers=handlers, backoff=quick_backoff()) as service:
                serve, subscribe = {"services": ["orders"]}, {"destination": "queue/orders"}
                await asyncio.gather(
                    repeat_on_connect(service, lambda peer: peer.request("$serve", serve)),
                    repeat_on_connect(
                        warehouse, lambda peer: peer.request("$subscribe", subscribe)
                    ),
                    self.send(ending, lambda number: self._order(shop, number), burst=_BURST),
                )

    async def _order(self, shop: EmpClient, number: int) -> None:
        amount = number % 5 + 1 if (number + 1) % _MISTAKE else 0
        order = {"order": number, "item": _ITEMS[number % len(_ITEMS)], "amount": amount}
        await shop.request("orders/submit", order, timeout_s=10)

    async def _submit(self, sender: EmpClient, order: Json) -> Json:
        """Answer after the hub has acknowledged the order, when it is on disk."""
        if not order["amount"]:
            self._invalid += 1
            raise RequestFailed("invalid_order", "an order of nothing")
        sent = {
            "destination": "queue/orders",
            "json": order,
            "properties": {"item": order["item"], "amount": order["amount"]},
        }
        accepted = await sender.request("$publish", sent, timeout_s=10)
        return {"order": order["order"], "receipt": accepted["id"]}

    async def _ship(self, delivery: Json) -> None:
        number = delivery["json"]["order"]
        is_first = delivery["attempt"] == 1
        if number % _UNSHIPPABLE == 13 or (number % _SOLD_OUT == 0 and is_first):
            self._refused += 1
            raise RequestFailed("out_of_stock", f"no {delivery['json']['item']} left")
        self.arrived[number] += 1

    def number_in(self, body: Any) -> int:
        """The field `order`."""
        return int(body["order"])

    def remarks(self) -> str:
        """Refusals of the warehouse, and invalid orders."""
        return f"{plural(self._refused, 'refusal')}, {self._invalid:,} invalid"
