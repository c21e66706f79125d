"""The gate in front of the intake."""

from __future__ import annotations

import asyncio

import pytest

from crosswire.errors import NotLeading
from crosswire.hub.intake_gate import IntakeGate


class Pending:
    def __init__(self) -> None:
        self.size_bytes = 0
        self.gate = IntakeGate(lambda: self.size_bytes, 100)

    def set(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.gate.look()


def test_it_closes_above_the_limit_and_opens_at_half_of_it() -> None:
    pending = Pending()
    gate = pending.gate
    pending.set(100)
    assert not gate.is_closed()
    pending.set(101)
    assert gate.is_closed()
    for size_bytes in (100, 51):
        pending.set(size_bytes)
        assert gate.is_closed()
    pending.set(50)
    assert not gate.is_closed() and gate.closings == 1


def test_those_who_wait_are_called_once() -> None:
    pending = Pending()
    calls: list[int] = []
    pending.set(101)
    assert pending.gate.is_closed()
    pending.gate.when_open(lambda: calls.append(1))
    pending.set(60)
    assert calls == [] and pending.gate.waiting == 1
    pending.set(0)
    pending.set(0)
    assert calls == [1] and pending.gate.waiting == 0


async def test_a_task_waits_until_it_is_open() -> None:
    pending = Pending()
    await pending.gate.passed()
    pending.set(101)
    waiting = asyncio.ensure_future(pending.gate.passed())
    left = asyncio.ensure_future(pending.gate.passed())
    await asyncio.sleep(0)
    assert pending.gate.waiting == 2 and not waiting.done()
    left.cancel()
    pending.set(0)
    await waiting
    with pytest.raises(asyncio.CancelledError):
        await left


async def test_who_waits_gets_the_error_when_the_hub_stops() -> None:
    pending = Pending()
    pending.set(101)
    waiting = asyncio.ensure_future(pending.gate.passed())
    await asyncio.sleep(0)
    pending.gate.end(NotLeading("no more"))
    with pytest.raises(NotLeading):
        await waiting
