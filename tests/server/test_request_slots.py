"""Slots of requests: nobody has all, who waits holds none of others, none is left behind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from crosswire.errors import ServiceUnavailable
from crosswire.server.request_slots import RequestSlots


@pytest.fixture
def slots() -> RequestSlots:
    return RequestSlots(3, 0.01, "too many")


async def test_a_holder_has_its_own_and_others_do_not_wait(slots: RequestSlots) -> None:
    async with slots.slot("anna", 1):
        with pytest.raises(ServiceUnavailable, match=r"^too many$"):
            async with slots.slot("anna", 1):
                pass
        async with slots.slot("bob", 1), slots.slot("anna", 2):
            pass
    async with slots.slot("anna", 1):
        pass


async def test_there_are_as_many_as_the_total(slots: RequestSlots) -> None:
    async with AsyncExitStack() as stack:
        for holder in ("anna", "bob", "carl"):
            await stack.enter_async_context(slots.slot(holder, 2))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.slot("dora", 2))
    async with slots.slot("dora", 2):
        pass


async def test_nobody_in_particular_has_no_share_below_the_total(slots: RequestSlots) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(slots.slot("", 1))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.slot("", 1))


async def test_who_waits_for_its_own_occupies_nothing_of_others() -> None:
    slots = RequestSlots(2, 60.0, "too many")
    async with slots.slot("anna", 1):
        waiting = [asyncio.ensure_future(slots.slot("anna", 1).__aenter__()) for _ in range(5)]
        await asyncio.sleep(0)
        async with slots.slot("bob", 1):
            pass
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_slot_is_given_to_who_waits_for_it() -> None:
    slots = RequestSlots(1, 60.0, "too many")
    entered: list[str] = []

    async def enter(holder: str) -> None:
        async with slots.slot(holder, 1):
            entered.append(holder)

    async with slots.slot("anna", 1):
        waiting = [asyncio.ensure_future(enter(holder)) for holder in ("bob", "anna")]
        await asyncio.sleep(0)
        assert entered == []
    await asyncio.gather(*waiting)
    assert entered == ["bob", "anna"]


async def test_nobody_is_remembered(slots: RequestSlots) -> None:
    async with slots.slot("anna", 1), slots.slot("bob", 2):
        waiting = asyncio.ensure_future(slots.slot("anna", 1).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(ServiceUnavailable):
            async with slots.slot("anna", 1):
                pass
    assert not slots._own and not slots._users
