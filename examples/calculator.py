"""The Epoxy specification's calculator: a service, a client, and 67 × 87 over loopback.

python examples/calculator.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from crosswire.bond import idl
from crosswire.client.native.epoxy import EpoxyClient, EpoxyServer, offer
from crosswire.errors import CallFailed

module = idl.load(Path(__file__).with_name("calc.bond"))
Calc = module.service("examples.calc.Calc")
Params = module.struct("examples.calc.Params").python_class
Result = module.struct("examples.calc.Result").python_class
Operation: Any = module.enum("examples.calc.Operation").python_class

DIVIDE_BY_ZERO = 1


class Calculator:
    """The service's methods, found by their names."""

    async def calculate(self, params: Any) -> Any:
        match params.operation:
            case Operation.Add:
                return Result(z=params.x + params.y)
            case Operation.Sub:
                return Result(z=params.x - params.y)
            case Operation.Mul:
                return Result(z=params.x * params.y)
            case Operation.Div if params.y:
                return Result(z=params.x // params.y)
        raise CallFailed(DIVIDE_BY_ZERO, "can't divide by zero")

    async def note(self, params: Any) -> None:
        print(f"noted: {params.x} and {params.y}")


async def main() -> None:
    server = EpoxyServer(offer(Calc, Calculator()))
    port = await server.listen("127.0.0.1")
    async with EpoxyClient("127.0.0.1", port) as client:
        result = await client.call(Calc, "Calculate", Params(x=67, y=87, operation=Operation.Mul))
        print(f"67 × 87 = {result.z}")
        await client.send_event(Calc, "Note", Params(x=67, y=87))
        try:
            await client.call(Calc, "Calculate", Params(x=1, operation=Operation.Div))
        except CallFailed as failure:
            print(f"1 ÷ 0: {failure.description} (error {failure.error_code})")
    await server.close()


if __name__ == "__main__":
    asyncio.run(main())
