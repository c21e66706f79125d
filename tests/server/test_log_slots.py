"""Slots for reading the log: nobody has all of them, and none is left behind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from crosswire.errors import ServiceUnavailable
from crosswire.server import log_slots
from crosswire.server.log_slots import LogSlots


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> LogSlots:
    monkeypatch.setattr(log_slots, "_WAIT_S", 0.01)
    return LogSlots()


async def test_a_user_searches_one_at_a_time_and_others_do_not_wait(slots: LogSlots) -> None:
    async with slots.search("anna"):
        with pytest.raises(ServiceUnavailable):
            async with slots.search("anna"):
                pass
        async with slots.search("bob"), slots.stream("anna"):
            pass
    async with slots.search("anna"):
        pass


async def test_a_user_has_a_share_of_the_streams(slots: LogSlots) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(log_slots._STREAMS_EACH):
            await stack.enter_async_context(slots.stream("anna"))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.stream("anna"))
        await stack.enter_async_context(slots.stream("bob"))


async def test_without_users_there_is_no_share_below_the_total(slots: LogSlots) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(log_slots._READERS):
            await stack.enter_async_context(slots.search(""))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.stream("bob"))


async def test_nobody_is_remembered(slots: LogSlots) -> None:
    async with slots.search("anna"), slots.stream("bob"):
        waiting = asyncio.ensure_future(slots.search("anna").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not slots._own and not slots._users
