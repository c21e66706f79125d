"""The client: the same tests over all five protocols, against a real hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

import crosswire
from crosswire.cli.hub import Api
from crosswire.client.connect import connect
from crosswire.errors import BadRequest, InvalidDestination, RequestFailed
from crosswire.testing import RunningHub

PROTOCOLS = ("emp", "emqp", "relink", "epoxy", "micromsg2")
KNOW_IDS = ("emp", "epoxy")
_names = count(1)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def hub(crosswire_hub: RunningHub, protocol: str) -> AsyncIterator[crosswire.Client]:
    async with connect(crosswire_hub.url(protocol), timeout_s=10) as client:
        yield client


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"test-{next(_names)}"


def length(hub: RunningHub, queue: str) -> int:
    return int(Api(hub.url("http")).get(f"/v1/queues/{queue}")["length"])


async def until_empty(hub: RunningHub, queue: str) -> None:
    """Protocols that settle by an acknowledgement have no answer to it."""
    async with asyncio.timeout(10):
        while await asyncio.to_thread(length, hub, queue):
            await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------ publishing


async def test_bodies_and_properties_arrive_as_they_were_sent(
    hub: crosswire.Client, name: str
) -> None:
    properties = {"count": 12, "ratio": 1.5, "text": "a b&c=d", "yes": True, "no": False}
    bodies: list[Any] = [{"item": "tea", "ä": [1, None]}, [1, 2], "plain text", b"\x00\xff"]
    ids = await hub.publish_many(f"queue/{name}", bodies, properties=properties)
    assert len(ids) == len(bodies)
    assert all(isinstance(each, int) == (hub.protocol in KNOW_IDS) for each in ids)
    async with hub.subscribe(f"queue/{name}") as messages:
        got = [await messages.receive(10) for _ in bodies]
        assert [each.body for each in got] == bodies
        assert [each.properties for each in got] == [properties] * len(bodies)
        assert [each.id for each in got] == ids
        assert {each.destination for each in got} == {f"queue/{name}"}


async def test_messages_with_properties_of_their_own(hub: crosswire.Client, name: str) -> None:
    own = crosswire.OutgoingMessage(
        body=b"<a/>", properties={"n": 2}, content_type="application/xml"
    )
    await hub.publish_many(f"queue/{name}", [own, "b"], properties={"all": 1})
    async with hub.subscribe(f"queue/{name}") as messages:
        first, second = await messages.receive(10), await messages.receive(10)
    if hub.protocol != "emp":  # which has JSON, text and base64, and no other type
        assert first.content_type == "application/xml"
    assert (first.payload, first.properties) == (b"<a/>", {"n": 2, "all": 1})
    assert second.properties == {"all": 1}


async def test_thousands_at_once_stay_in_order(hub: crosswire.Client, name: str) -> None:
    await hub.publish_many(f"queue/{name}", range(2500))
    async with hub.subscribe(f"queue/{name}", window=500) as messages:
        for number in range(2500):
            message = await messages.receive(10)
            assert message.json() == number
            await message.settle()


async def test_what_is_no_destination(hub: crosswire.Client) -> None:
    for wrong in ("orders", "queue/", "topic/a/#"):
        with pytest.raises(InvalidDestination):
            await hub.publish(wrong, "x")
    with pytest.raises(InvalidDestination, match="use call"):
        await hub.publish("service/a", "x")
    with pytest.raises(InvalidDestination, match="use publish"):
        await hub.call("queue/a", "x")
    with pytest.raises(TypeError):
        await hub.publish("queue/a", object())


# ------------------------------------------------------------------------------------- consuming


async def test_a_settled_message_does_not_come_again(
    hub: crosswire.Client, crosswire_hub: RunningHub, name: str
) -> None:
    await hub.publish_many(f"queue/{name}", [1, 2, 3])
    async for message in hub.subscribe(f"queue/{name}"):
        await message.settle()
        await message.settle()  # does nothing
        if message.json() == 3:
            break
    await until_empty(crosswire_hub, name)


async def test_a_refused_message_comes_again(hub: crosswire.Client, name: str) -> None:
    await hub.publish(f"queue/{name}", "x")
    async with hub.subscribe(f"queue/{name}") as messages:
        await (await messages.receive(10)).refuse("not now")
        again = await messages.receive(10)
        assert again.attempt == (2 if hub.protocol in KNOW_IDS else None)
        await again.settle()


async def test_a_message_that_is_refused_too_often_is_a_dead_letter_with_the_reason(
    hub: crosswire.Client, crosswire_hub: RunningHub, name: str
) -> None:
    await hub.publish(f"queue/{name}", "x")
    async with hub.subscribe(f"queue/{name}") as messages:
        for _ in range(5):
            await (await messages.receive(10)).refuse("out of tea")
        api = Api(crosswire_hub.url("http"))
        dead: list[Any] = []
        async with asyncio.timeout(10):
            while not dead:
                with suppress(RequestFailed):  # there are none
                    answer = await asyncio.to_thread(api.get, "/v1/dead/letters", queue=name)
                    dead = answer["letters"]
    if hub.protocol in ("emp", "epoxy", "micromsg2"):  # the others can't carry a reason
        assert "out of tea" in dead[0]["cause"]


async def test_the_window_holds_messages_back(hub: crosswire.Client, name: str) -> None:
    await hub.publish_many(f"queue/{name}", [1, 2, 3])
    async with hub.subscribe(f"queue/{name}", window=2) as messages:
        first, _second = await messages.receive(10), await messages.receive(10)
        with pytest.raises(crosswire.RequestTimeout):
            await messages.receive(0.1)
        await first.settle()
        assert (await messages.receive(10)).json() == 3


async def test_closing_settles_what_is_done_and_gives_back_the_rest(
    hub: crosswire.Client, name: str
) -> None:
    """Out of order, too, although some protocols settle in order only."""
    await hub.publish_many(f"queue/{name}", [1, 2, 3, 4])
    async with hub.subscribe(f"queue/{name}") as messages:
        got = [await messages.receive(10) for _ in range(4)]
        await got[2].settle()
        await got[1].settle()
    async with hub.subscribe(f"queue/{name}") as messages:
        left = [await messages.receive(10), await messages.receive(10)]
        assert sorted(each.json() for each in left) == [1, 4]
        with pytest.raises(crosswire.RequestTimeout):
            await messages.receive(0.2)


async def test_subscribers_of_a_topic_get_it_and_need_not_settle(
    hub: crosswire.Client, name: str
) -> None:
    async with (
        hub.subscribe(f"topic/{name}/+", window=2) as one,
        hub.subscribe(f"topic/{name}/#") as other,
    ):
        await hub.publish(f"topic/{name}x/a", "of another topic")
        for number in range(5):
            await hub.publish(f"topic/{name}/a", [number])
        for subscription in (one, other):
            got = [await subscription.receive(10) for _ in range(5)]
            assert [each.json() for each in got] == [[number] for number in range(5)]
            assert all(each.settled for each in got)


async def test_a_named_subscription_a_filter_and_a_start(hub: crosswire.Client, name: str) -> None:
    for number in (5, 20, 30):
        await hub.publish(f"topic/{name}", {"n": number}, properties={"n": number})
    options = {"name": name, "filter": "n>N10", "start": "earliest"}
    if hub.protocol == "emqp":
        with pytest.raises(crosswire.Unsupported, match="no filters"):
            await hub.subscribe(f"topic/{name}", **options).receive()
        return
    async with hub.subscribe(f"topic/{name}", **options) as messages:
        message = await messages.receive(10)
        assert message.json() == {"n": 20}
        await message.settle()
    async with hub.subscribe(f"topic/{name}", name=name, filter="n>N10") as messages:
        assert (await messages.receive(10)).json() == {"n": 30}


async def test_only_topics_have_named_subscriptions(hub: crosswire.Client) -> None:
    with pytest.raises(InvalidDestination, match="only subscriptions to topics"):
        hub.subscribe("queue/q", name="x")
    with pytest.raises(ValueError, match="window"):
        hub.subscribe("queue/q", window=0)


async def test_a_name_that_is_in_use_for_something_else(hub: crosswire.Client, name: str) -> None:
    if hub.protocol == "emqp":
        pytest.skip("eMQP has no named subscriptions")
    async with hub.subscribe(f"topic/{name}", name=name, filter="n>N10"):
        expected = {"micromsg2": crosswire.Forbidden, "relink": crosswire.HubError}
        with pytest.raises(expected.get(hub.protocol, crosswire.SubscriptionConflict)):
            await hub.subscribe(f"topic/{name}", name=name, filter="n>N99").receive(10)


async def test_extending_a_lease(hub: crosswire.Client, name: str) -> None:
    await hub.publish(f"queue/{name}", "x")
    async with hub.subscribe(f"queue/{name}") as messages:
        message = await messages.receive(10)
        if hub.protocol in KNOW_IDS:
            await message.extend(30)
            await message.settle()
        else:
            with pytest.raises(crosswire.Unsupported):
                await message.extend(30)


async def test_a_loop_that_is_left_unsubscribes(
    hub: crosswire.Client, crosswire_hub: RunningHub, name: str
) -> None:
    await hub.publish_many(f"queue/{name}", [1, 2])
    async for message in hub.subscribe(f"queue/{name}"):
        await message.settle()
        break
    async with hub.subscribe(f"queue/{name}") as messages:
        assert (await messages.receive(10)).json() == 2


async def test_closing_waits_for_a_loop_that_was_left(
    crosswire_hub: RunningHub, protocol: str, name: str
) -> None:
    """Leaving the loop closes the subscription in a task: none of it outlives the client."""
    async with connect(crosswire_hub.url(protocol), timeout_s=10) as client:
        await client.publish(f"queue/{name}", 1)
        async for message in client.subscribe(f"queue/{name}"):
            await message.settle()
            break
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_closed_subscription_ends_the_iteration(hub: crosswire.Client, name: str) -> None:
    async with hub.subscribe(f"queue/{name}") as messages:
        reading = asyncio.create_task(_read(messages))
        await asyncio.sleep(0)
        await messages.close()
        assert await reading == []


async def _read(messages: crosswire.client.ClientSubscription) -> list[crosswire.Message]:
    return [message async for message in messages]


# ----------------------------------------------------------------------------- calls and services


async def test_a_call_is_answered(hub: crosswire.Client, name: str) -> None:
    async def double(call: crosswire.Message) -> Any:
        return {"twice": call.json()["n"] * 2}

    method = "" if hub.protocol == "emqp" else "/double"
    async with await hub.serve(f"service/{name}", double):
        answers = await asyncio.gather(
            *(hub.call(f"service/{name}{method}", {"n": n}) for n in range(20))
        )
    assert [each.body for each in answers] == [{"twice": n * 2} for n in range(20)]


async def test_a_provider_that_fails(hub: crosswire.Client, name: str) -> None:
    async def fail(call: crosswire.Message) -> Any:
        if call.json()["n"]:
            raise crosswire.ProviderFailed("sold_out", "no tea today")
        raise ZeroDivisionError

    async with await hub.serve(f"service/{name}", fail):
        with pytest.raises(crosswire.ProviderFailed, match="no tea today") as caught:
            await hub.call(f"service/{name}", {"n": 1})
        if hub.protocol in ("emp", "relink", "micromsg2"):  # the others have no codes of ours
            assert caught.value.code == "sold_out"
        with pytest.raises(crosswire.ProviderFailed, match="the service failed"):
            await hub.call(f"service/{name}", {"n": 0})


async def test_nobody_provides_it(hub: crosswire.Client, name: str) -> None:
    expected = crosswire.RequestTimeout if hub.protocol == "emqp" else crosswire.NoProvider
    with pytest.raises(expected):
        await hub.call(f"service/{name}/method", {}, timeout_s=0.3)


async def test_a_provider_that_takes_too_long_and_one_that_leaves(
    hub: crosswire.Client, crosswire_hub: RunningHub, name: str
) -> None:
    begun = asyncio.Event()

    async def never(_call: crosswire.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    provider = connect(crosswire_hub.url("epoxy"))
    await provider.__aenter__()
    service = await provider.serve(f"service/{name}", never)
    with pytest.raises(crosswire.RequestTimeout):
        await hub.call(f"service/{name}", {}, timeout_s=0.3)
    begun.clear()
    call = asyncio.create_task(hub.call(f"service/{name}", {}, timeout_s=10))
    await begun.wait()
    await service.close(grace_s=0)
    with pytest.raises(crosswire.ProviderLost):
        await call
    await provider.close()


# -------------------------------------------------------------------------------------- schedules


async def test_a_schedule(hub: crosswire.Client, name: str) -> None:
    if hub.protocol not in ("emp", "emqp"):
        with pytest.raises(crosswire.Unsupported, match="no schedules"):
            await hub.schedule(f"queue/{name}", "x", interval_s=1)
        with pytest.raises(crosswire.Unsupported, match="no schedules"):
            await hub.unschedule("x")
        return
    schedule = await hub.schedule(f"queue/{name}", "due", interval_s=0.1, properties={"n": 1})
    async with hub.subscribe(f"queue/{name}") as messages:
        for _ in range(2):
            message = await messages.receive(10)
            assert (message.text, message.properties) == ("due", {"n": 1})
            await message.settle()
        await hub.unschedule(schedule)
        with pytest.raises(crosswire.RequestTimeout):
            while True:
                await (await messages.receive(0.4)).settle()
    with pytest.raises(ValueError, match="either"):
        await hub.schedule(f"queue/{name}", "x")
    if hub.protocol == "emp":
        with pytest.raises(BadRequest):
            await hub.unschedule(schedule)


# ------------------------------------------------------------------------------------- connecting


async def test_several_addresses(crosswire_hub: RunningHub, protocol: str, name: str) -> None:
    """The first has no listener. eMQP's other listeners are on the same hosts."""
    url = crosswire_hub.url(protocol).replace("://", "://127.0.0.1:1,")
    async with connect(url) as client:
        await client.publish(f"queue/{name}", "x")
    assert await asyncio.to_thread(length, crosswire_hub, name) == 1


async def test_nobody_there(protocol: str) -> None:
    with pytest.raises(crosswire.ConnectFailed, match=r"can't connect to 127\.0\.0\.1:1"):
        await connect(f"{protocol}://127.0.0.1:1").__aenter__()


@pytest.mark.parametrize("other", [*PROTOCOLS, "http"])
async def test_a_port_of_another_protocol(
    crosswire_hub: RunningHub, protocol: str, other: str
) -> None:
    if other == protocol:
        return
    port = crosswire_hub.port("emqp-clients" if other == "emqp" else other)
    with pytest.raises(crosswire.HandshakeFailed) as caught:
        await connect(f"{protocol}://127.0.0.1:{port}", connect_timeout_s=1).__aenter__()
    if isinstance(caught.value, crosswire.WrongProtocol):
        assert caught.value.found.lower().replace("bond ", "") == other
    else:  # Relink has no goodbye, and others close without one too
        assert f"127.0.0.1:{port}" in str(caught.value)


def test_the_client_without_asyncio(crosswire_hub: RunningHub, protocol: str, name: str) -> None:
    with crosswire.connect_sync(crosswire_hub.url(protocol)) as hub:
        hub.publish(f"queue/{name}", {"n": 1}, properties={"p": 2})
        hub.publish_many(f"queue/{name}", [2, 3])
        with hub.subscribe(f"queue/{name}") as messages:
            first = messages.receive(10)
            assert (first.body, first.properties) == ({"n": 1}, {"p": 2})
            first.settle()
            for expected, message in zip((2, 3), messages, strict=False):
                assert message.json() == expected
                message.settle()
                if expected == 3:
                    break
        with (
            hub.serve(f"service/{name}", lambda call: {"got": call.json()}),
        ):
            assert hub.call(f"service/{name}", {"x": 1}).body == {"got": {"x": 1}}
        with pytest.raises(crosswire.RequestTimeout):
            hub.subscribe(f"queue/{name}").receive(0.1)
    with pytest.raises(crosswire.ConnectionLost, match="closed"):
        hub.publish(f"queue/{name}", 1)
