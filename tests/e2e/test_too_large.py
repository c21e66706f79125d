"""A message that is too large for a consumer's protocol: never a connection that ends, again and
again, but a cause to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from crosswire.client.message import BYTES, Message
from crosswire.config import ProtocolLimits
from crosswire.envelope import Envelope, message_kind
from crosswire.errors import HubError
from crosswire.hub.policies import QueuePolicy, Retry
from crosswire.server.server import Server
from crosswire.wire.emp.frames import EmpLimits
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.epoxy.frames import EpoxyLimits
from crosswire.wire.micromsg2.frames import MicroMsg2Limits
from crosswire.wire.relink.frames import Message as RelinkMessage
from crosswire.wire.relink.frames import RelinkLimits, message_bytes, serialize
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.zmtp.frames import message_bytes as zmtp_message_bytes
from crosswire.wire.zmtp.frames import serialize_message
from tests.e2e.bridging import ports_of, until
from tests.e2e.parties import PARTIES, Party
from tests.gateways.conftest import StartServer

LIMIT = 100_000
SMALL = b'"small"'
LIMITS = {
    "EMP": ProtocolLimits(emp=EmpLimits(frame_bytes=LIMIT)),
    "eMQP": ProtocolLimits(emqp=EmqpLimits(frame_bytes=LIMIT)),
    "Relink": ProtocolLimits(relink=RelinkLimits(frame_bytes=LIMIT)),
    "Epoxy": ProtocolLimits(epoxy=EpoxyLimits(frame_bytes=LIMIT)),
    "MicroMsg2": ProtocolLimits(micromsg2=MicroMsg2Limits(message_bytes=LIMIT)),
}
SIZES = [LIMIT * 3 // 4, LIMIT - 40, LIMIT - 8, LIMIT, LIMIT + 1, 3 * LIMIT]
"""Some of them fit as they are, or would but for what goes with them, or in base64."""

QUICK = QueuePolicy(retry=Retry(max_attempts=3, first_delay_s=0.001, longest_delay_s=0.002))


@asynccontextmanager
async def party_of(server: Server, name: str) -> AsyncIterator[Party]:
    (kind,) = (each for each in PARTIES if each.name == name)
    async with kind(ports_of(server)) as party:
        yield party


def message(destination: str, payload: bytes, content_type: str = BYTES) -> Envelope:
    kind: Any = message_kind(destination)
    return Envelope(destination=destination, kind=kind, payload=payload, content_type=content_type)


def failed_connections(server: Server) -> int:
    return sum(count for key, count in server.context.counters.items() if key[0] == "failed")


@pytest.mark.parametrize("name", LIMITS)
async def test_a_consumer_gets_what_fits_and_the_rest_dies_with_a_cause(
    start_server: StartServer, name: str
) -> None:
    server = await start_server(limits=LIMITS[name], queues={"q": QUICK})
    payloads = [bytes([number]) * size for number, size in enumerate(SIZES)]
    payloads += [b'"' + b"x" * (size - 2) + b'"' for size in SIZES]
    async with party_of(server, name) as consumer:
        inbox = await consumer.consume("queue/q")
        await server.hub.produce([message("queue/q", each) for each in payloads], 1.0)
        await server.hub.produce([message("queue/q", SMALL)], 1.0)
        dead = server.hub.queue("queue/q/dead")
        queue = server.hub.queue("queue/q")
        await until(lambda: not queue.length)
        got = [inbox.get_nowait() for _ in range(inbox.qsize())]
        await server.hub.committed()
        letters = server.hub.dead_letters.list("queue/q/dead")
        assert len(got) + dead.length == len(payloads) + 1
        assert letters and all("allowed" in each.cause for each in letters), letters[0].cause
        assert {len(each.attempts) for each in letters} == {3}
        assert {each.payload for each in got} <= {*payloads, SMALL}
        assert not {each.payload for each in got} & {each.envelope.payload for each in letters}
        assert SMALL in {each.payload for each in got}
        assert payloads[0] in {each.payload for each in got} or name == "EMP"
        assert payloads[6] in {each.payload for each in got}
        assert not failed_connections(server)


@pytest.mark.parametrize("name", LIMITS)
async def test_who_has_no_such_limit_takes_it(start_server: StartServer, name: str) -> None:
    """What one consumer can't be given is left to another."""
    server = await start_server(limits=LIMITS[name])
    other = "Relink" if name == "MicroMsg2" else "MicroMsg2"
    async with party_of(server, name) as limited, party_of(server, other) as able:
        await limited.consume("queue/q")
        inbox = await able.consume("queue/q")
        await until(lambda: len(server.hub.queue("queue/q").consumers) == 2)
        await server.hub.produce([message("queue/q", bytes(3 * LIMIT))], 1.0)
        assert len((await asyncio.wait_for(inbox.get(), 10)).payload) == 3 * LIMIT


@pytest.mark.parametrize("name", LIMITS)
async def test_a_subscriber_goes_on_without_it(start_server: StartServer, name: str) -> None:
    server = await start_server(limits=LIMITS[name])
    async with party_of(server, name) as subscriber:
        inbox = await subscriber.consume("topic/t")
        await until(lambda: any(each.attachments for each in server.context.gateways.values()))
        for _ in range(3):
            payloads = [bytes(3 * LIMIT), SMALL]
            await server.hub.produce([message("topic/t", each) for each in payloads], 1.0)
            assert (await asyncio.wait_for(inbox.get(), 10)).payload == SMALL
        assert not failed_connections(server)


async def answer_large(_asked: Message) -> Any:
    return {"large": "x" * 3 * LIMIT}


async def echo(asked: Message) -> Any:
    return asked.body


async def code_of(caller: Party, service: str, payload: bytes) -> str:
    try:
        answer = await asyncio.wait_for(caller.call(service, payload), 10)
    except HubError as failure:
        return str(failure)
    return answer.payload.decode()


@pytest.mark.parametrize("name", LIMITS)
async def test_a_call_that_is_too_large_fails_with_a_cause(
    start_server: StartServer, name: str
) -> None:
    """As a request to a provider, and as the answer to a caller; both go on."""
    server = await start_server(limits=LIMITS[name])
    other = "Relink" if name == "MicroMsg2" else "MicroMsg2"
    large = b'{"large":"' + b"x" * 3 * LIMIT + b'"}'
    async with party_of(server, name) as limited, party_of(server, other) as able:
        await limited.serve("service/limited", echo)
        await able.serve("service/able", answer_large)
        for service in ("service/limited", "service/able"):
            await until(lambda: server.hub.is_served(service))  # noqa: B023  awaited here
        for _ in range(300 if name == "eMQP" else 3):
            assert "allowed" in await code_of(able, "service/limited", large)
        assert await code_of(able, "service/limited", b'{"a":1}') == '{"a":1}'
        assert "allowed" in await code_of(limited, "service/able", b"{}")
        assert not failed_connections(server)


@pytest.mark.parametrize("id_sizes", [(0, 0), (1, 1), (2, 2), (3, 5), (8, 8)])
@pytest.mark.parametrize("role", ["listener", "connector"])
def test_the_size_of_a_relink_packet_is_known_before(id_sizes: tuple[int, int], role: str) -> None:
    ours = packet_layout(role, *id_sizes)
    for sizes in ([], [0], [7], [65535], [65536], [1, 65536], [3] * 255, [3] * 256, [70000] * 300):
        parts = tuple(bytes(size) for size in sizes)
        packet = serialize(RelinkMessage((0,), False, parts), ours)
        assert message_bytes(parts, ours) == sum(map(len, packet))


def test_the_size_of_a_zmtp_message_is_known_before() -> None:
    for sizes in ([0], [255], [256], [255, 256, 0], [1] * 7 + [70000]):
        assert zmtp_message_bytes(sizes) == len(serialize_message([bytes(each) for each in sizes]))
