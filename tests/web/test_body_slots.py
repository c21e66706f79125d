"""Slots for large bodies: a user has one, and four have them all."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from crosswire.errors import ServiceUnavailable
from crosswire.web import body_slots
from crosswire.web.body_slots import BodySlots
from crosswire.web.contract import failure_of


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> BodySlots:
    monkeypatch.setattr(body_slots, "_WAIT_S", 0.01)
    return BodySlots()


async def test_a_user_has_one_at_a_time(slots: BodySlots) -> None:
    async with slots.slot("anna"), slots.slot("bob"):
        with pytest.raises(ServiceUnavailable) as refused:
            async with slots.slot("anna"):
                pass
    status, failure = failure_of(refused.value)
    assert (status, failure.error) == (503, "unavailable")
    assert failure.description == "too many large bodies at a time: retry later"


async def test_there_is_a_total(slots: BodySlots) -> None:
    async with AsyncExitStack() as stack:
        for number in range(body_slots._SLOTS):
            await stack.enter_async_context(slots.slot(f"user{number}"))
        with pytest.raises(ServiceUnavailable):
            await stack.enter_async_context(slots.slot("another"))
