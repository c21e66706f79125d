"""Scene: a calculator service over Epoxy, called in JSON over EMP."""

from __future__ import annotations

import asyncio
import operator
from pathlib import Path
from typing import Any, ClassVar

from crosswire.bond import hub_module, idl
from crosswire.cli.demo.scene import HOST, Scene, quick_backoff
from crosswire.client.native.emp import EmpClient
from crosswire.client.native.epoxy import EpoxyClient, offer
from crosswire.errors import CallFailed, ClientError, RequestFailed
from crosswire.plurals import plural

__all__ = ["CALCULATOR", "Calculator"]

CALCULATOR = Path(__file__).with_name("calc.bond")

_BURST = 5
_OPERATIONS = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.floordiv,
}
_DIVIDED_BY_ZERO = 1


class _CalculatorService:
    """The service's methods."""

    def __init__(self, module: Any) -> None:
        self._operation = module.enum("examples.calc.Operation").python_class
        self._result = module.struct("examples.calc.Result").python_class

    async def calculate(self, asked: Any) -> Any:
        try:
            z = _OPERATIONS[self._operation(asked.operation).name](asked.x, asked.y)
        except ZeroDivisionError:
            raise CallFailed(_DIVIDED_BY_ZERO, "divided by zero") from None
        return self._result(z=z)

    async def note(self, params: Any) -> None:
        """Events need no answer."""


class Calculator(Scene):
    """Calls that cross from JSON to Bond and back; the callers check the results."""

    title: ClassVar[str] = "sums"
    route: ClassVar[str] = "EMP → service → Epoxy"
    description: ClassVar[str] = "a Bond service called in JSON; some calls divide by zero"

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(ports)
        self._failed = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Call until `ending`; serve until cancelled."""
        module = idl.load(CALCULATOR)
        handlers = offer(module.service("examples.calc.Calc"), _CalculatorService(module))
        async with (
            EpoxyClient(
                HOST, self.ports["epoxy"], handlers=handlers, backoff=quick_backoff()
            ) as server,
            EmpClient(HOST, self.ports["emp"], backoff=quick_backoff()) as caller,
        ):
            await asyncio.gather(
                self._serve(server),
                self.send(ending, lambda number: self._ask(caller, number), burst=_BURST),
            )

    async def _serve(self, server: EpoxyClient) -> None:
        module = hub_module()
        services = module.struct("crosswire.Services").python_class(services=["examples.calc.Calc"])
        while True:
            peer = await server.peer()
            try:
                await peer.call(module.service("crosswire.Hub"), "Serve", services)
            except ClientError:
                continue
            await asyncio.wait([peer.ended])

    async def _ask(self, caller: EmpClient, number: int) -> None:
        """A response acknowledges the call; the call has arrived if the result is right."""
        name = list(_OPERATIONS)[number % 4]
        asked = {"x": number, "y": number % 7, "operation": name}
        try:
            reply = await caller.request("examples.calc.Calc/Calculate", asked, timeout_s=10)
        except RequestFailed:
            self._failed += 1
            raise
        if reply["z"] == _OPERATIONS[name](asked["x"], asked["y"]):
            self.arrived[number] += 1

    def remarks(self) -> str:
        """Calls that the service answered with an error."""
        return f"{plural(self._failed, 'call')} failed"
