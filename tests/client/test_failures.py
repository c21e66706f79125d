"""The client when things go wrong: hubs that die, rights, full queues, certificates and keys."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

import crosswire
from crosswire.client.connect import connect
from crosswire.client.native.dial import Backoff
from crosswire.testing import RunningHub, running_hub
from crosswire.wire.zmtp.curve import encode_key, public_key_of
from tests.conftest import TlsPair

PROTOCOLS = ("emp", "emqp", "relink", "epoxy", "micromsg2")
TOKEN = "a token that is long enough"


def soon() -> Backoff:
    return Backoff(0.02, 0.2)


# -------------------------------------------------------------------------------------- restarts


@pytest.fixture(scope="module")
def mortal_hub() -> Iterator[RunningHub]:
    """A hub that tests kill."""
    with running_hub(config="drain_s = 0.2\n") as hub:
        yield hub


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
async def test_everything_goes_on_after_a_restart(mortal_hub: RunningHub, kill: bool) -> None:
    """All five protocols at once: a restart takes a second."""
    clients = [await connect(mortal_hub.url(name), backoff=soon).__aenter__() for name in PROTOCOLS]
    lives = [_Life(client, f"{client.protocol}-{kill}") for client in clients]
    await asyncio.gather(*(life.before() for life in lives))
    await asyncio.to_thread(mortal_hub.restart, kill=kill)
    await asyncio.gather(*(life.after() for life in lives))
    for client in clients:
        await client.close()


class _Life:
    """A consumer, a subscriber and a service of one client."""

    def __init__(self, client: crosswire.Client, name: str) -> None:
        self.client = client
        self.name = name
        # eMQP has no named subscriptions, and an unnamed one misses what it was not there for.
        self.named = {} if client.protocol == "emqp" else {"name": name}

    async def before(self) -> None:
        client, name = self.client, self.name
        await client.publish_many(f"queue/{name}", [1, 2])
        self.queue = await client.subscribe(f"queue/{name}").__aenter__()
        self.topic = await client.subscribe(f"topic/{name}", **self.named).__aenter__()
        self.unsettled = await self.queue.receive(10)
        self.other = await self.queue.receive(10)
        assert (self.unsettled.json(), self.other.json()) == (1, 2)

        async def echo(call: crosswire.Message) -> Any:
            return {"got": call.json()}

        # Another name than the queue's: eMQP's worker of a queue provides the service of its name.
        await client.serve(f"service/{name}-echo", echo)

    async def after(self) -> None:
        client, name = self.client, self.name
        answer = await self._retry(lambda: client.call(f"service/{name}-echo", {"n": 1}))
        assert answer.body == {"got": {"n": 1}}
        await self._retry(lambda: client.publish(f"queue/{name}", 3))
        if client.protocol == "relink":
            # A link survives: what it holds is neither lost nor delivered again.
            assert not self.unsettled.lost
            await self.unsettled.settle()
            await self.other.settle()
            assert (await self.queue.receive(10)).json() == 3
        else:
            got = set()
            while got != {1, 2, 3}:
                got.add((await self.queue.receive(10)).json())
            assert self.unsettled.lost and "lost" in repr(self.unsettled)
            with pytest.raises(crosswire.DeliveryLost, match="delivered again"):
                await self.unsettled.settle()
        await self._retry(lambda: client.publish(f"topic/{name}", [4]))
        if client.protocol != "emqp":
            assert (await self.topic.receive(10)).json() == [4]

    async def _retry(self, work: Any) -> Any:
        """What was on its way when the connection ended may or may not have been done."""
        async with asyncio.timeout(20):
            while True:
                try:
                    return await work()
                except (crosswire.ConnectionLost, crosswire.NoProvider, crosswire.ProviderLost):
                    await asyncio.sleep(0.05)


async def test_what_was_under_way_has_an_unknown_outcome(mortal_hub: RunningHub) -> None:
    begun = asyncio.Event()

    async def never(_call: crosswire.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with (
        connect(mortal_hub.url("epoxy"), backoff=soon) as client,
        connect(mortal_hub.url("micromsg2"), backoff=soon) as provider,
    ):
        service = await provider.serve("service/never", never)
        call = asyncio.create_task(client.call("service/never"))
        await begun.wait()
        await asyncio.to_thread(mortal_hub.restart, kill=True)
        with pytest.raises(crosswire.ConnectionLost, match="may or may not"):
            await call
        await service.close(grace_s=0)


# ---------------------------------------------------------------------------- rights and refusals


@pytest.fixture(scope="module")
def keys() -> tuple[bytes, bytes]:
    """The hub's secret CURVE key, and anna's."""
    return secrets.token_bytes(32), secrets.token_bytes(32)


@pytest.fixture(scope="module")
def strict_hub(tls: TlsPair, keys: tuple[bytes, bytes]) -> Iterator[RunningHub]:
    """Only anna, who may use what begins with `hers`; a queue for one message."""
    config = f"""
        [tls]
        certificate = '{tls.certificate}'
        key = '{tls.key}'
        client_ca = '{tls.certificate}'
        [emqp]
        curve_secret_key = '{encode_key(keys[0])}'
        [queues.hers-small]
        max_length = 1
        [[users]]
        name = 'anna'
        token = '{TOKEN}'
        certificate = 'localhost'
        curve_key = '{encode_key(public_key_of(keys[1]))}'
        produce = ['queue/hers', 'queue/hers-small', 'topic/hers']
        consume = ['queue/hers', 'topic/hers']
        call = ['service/hers']
        serve = ['service/hers']
    """
    with running_hub(config=config, tls=True) as hub:
        yield hub


@pytest.fixture(params=PROTOCOLS)
def anna(
    request: pytest.FixtureRequest,
    strict_hub: RunningHub,
    tls: TlsPair,
    keys: tuple[bytes, bytes],
) -> crosswire.Client:
    """Identified by a token, a certificate or a CURVE key, over TLS where that exists."""
    options: dict[str, Any] = {"timeout_s": 2.0, "connect_timeout_s": 1.0}
    name = request.param
    if name == "emqp":
        options |= {
            "curve_server": encode_key(public_key_of(keys[0])),
            "curve_secret": encode_key(keys[1]),
        }
        return connect(strict_hub.url("emqp"), **options)
    options["ca"] = tls.certificate
    if name == "relink":
        options |= {"certificate": tls.certificate, "key": tls.key}
    else:
        options["token"] = TOKEN
    return connect(strict_hub.url(f"{name}+tls"), **options)


async def test_who_is_known_may_do_what_is_allowed(anna: crosswire.Client) -> None:
    async with anna as hub:
        await hub.publish("queue/hers", {"n": hub.protocol}, timeout_s=10)
        async with hub.subscribe("queue/hers") as messages:
            message = await messages.receive(10)
            assert message.json() == {"n": hub.protocol}
            await message.settle()


async def test_what_is_forbidden(anna: crosswire.Client) -> None:
    """eMQP ignores it without a word; Relink closes the link without a reason."""
    by_protocol = {"emqp": crosswire.RequestTimeout, "relink": crosswire.HubError}
    expected = by_protocol.get(anna.protocol, crosswire.Forbidden)
    async with anna as hub:
        with pytest.raises(expected):
            await hub.publish("queue/others", "x")
        with pytest.raises(crosswire.HandshakeFailed if hub.protocol == "emqp" else expected):
            await hub.subscribe("queue/others").receive(5)
        with pytest.raises(expected):
            await hub.call("service/others", {})


async def test_a_full_queue(anna: crosswire.Client) -> None:
    """eMQP and MicroMsg2 withhold the acknowledgement until there is room."""
    waits = anna.protocol in ("emqp", "micromsg2")
    async with anna as hub:
        with pytest.raises(crosswire.RequestTimeout if waits else crosswire.DestinationFull):
            await hub.publish_many("queue/hers-small", ["x", "y", "z"])


@pytest.mark.parametrize("name", ["emp", "epoxy", "micromsg2"])
async def test_a_token_that_nobody_has(strict_hub: RunningHub, name: str) -> None:
    with pytest.raises(crosswire.Forbidden, match="nobody has this token"):
        await connect(strict_hub.url(name), token="nobody's token, but long").__aenter__()


async def test_a_certificate_that_we_do_not_trust(strict_hub: RunningHub) -> None:
    with pytest.raises(crosswire.HandshakeFailed, match="no TLS with"):
        await connect(strict_hub.url("emp+tls")).__aenter__()


async def test_tls_where_there_is_none(strict_hub: RunningHub, tls: TlsPair) -> None:
    url = f"emp+tls://127.0.0.1:{strict_hub.port('emp')}"
    with pytest.raises(crosswire.WrongProtocol, match="does not speak TLS"):
        await connect(url, ca=tls.certificate).__aenter__()


async def test_no_tls_where_there_is_some(strict_hub: RunningHub) -> None:
    url = f"epoxy://127.0.0.1:{strict_hub.port('epoxy-tls')}"
    with pytest.raises(crosswire.HandshakeFailed):
        await connect(url, connect_timeout_s=2).__aenter__()


async def test_the_hub_logs_what_knocked_at_the_wrong_port(mortal_hub: RunningHub) -> None:
    with pytest.raises(crosswire.HandshakeFailed):
        url = f"epoxy://127.0.0.1:{mortal_hub.port('emp')}"
        await connect(url, connect_timeout_s=2).__aenter__()
    async with asyncio.timeout(10):
        while "the peer speaks Bond Epoxy" not in mortal_hub.log():
            await asyncio.sleep(0.05)
