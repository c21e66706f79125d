"""Slots for reading the log: how many of each kind a user has."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from crosswire.errors import ServiceUnavailable
from crosswire.server import log_slots
from crosswire.server.log_slots import LogSlots


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> LogSlots:
    monkeypatch.setattr(log_slots, "_WAIT_S", 0.01)
    return LogSlots()


async def test_a_user_searches_one_at_a_time_beside_what_it_streams(slots: LogSlots) -> None:
    async with slots.search("anna"):
        with pytest.raises(ServiceUnavailable):
            async with slots.search("anna"):
                pass
        async with slots.search("bob"), slots.stream("anna"):
            pass


async def test_a_user_has_a_share_of_the_streams(slots: LogSlots) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(log_slots._STREAMS_EACH):
            await stack.enter_async_context(slots.stream("anna"))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.stream("anna"))
        await stack.enter_async_context(slots.stream("bob"))


async def test_searches_and_streams_share_one_total(slots: LogSlots) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(log_slots._READERS):
            await stack.enter_async_context(slots.search(""))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.stream("bob"))
