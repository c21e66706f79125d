"""However much a peer sends in one go, and whatever becomes of it, the call stack stays as it is.

Peers of every protocol pipeline operations that succeed at once, fail at once, are refused, or are
answered by peers of other protocols, in an order that a seed decides. With 10 of them and with
2,000 the code of the hub and its gateways is called from the same depth, give or take a few frames.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import repeat
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, TypeVar

import msgspec
import pytest

from crosswire.bond import hub_module, marshal
from crosswire.config import BondFiles
from crosswire.hub.policies import QueuePolicy, Retry, TopicPolicy
from crosswire.server.server import Server
from crosswire.wire.emp import events as emp_events
from crosswire.wire.emqp import events as emqp_events
from crosswire.wire.epoxy import events as epoxy_events
from crosswire.wire.epoxy.comm import Error, ErrorCode
from crosswire.wire.micromsg2 import events as micro_events
from crosswire.wire.relink import events as relink_events
from tests.gateways.conftest import StartServer
from tests.gateways.wires import Peer, emp, emqp, epoxy, micromsg2, relink

FEW, MANY = 10, 2000
MOST_DIFFERENCE = 12
CALC = Path(__file__).parents[2] / "examples" / "calc.bond"
OURS = (
    "/crosswire/hub/",
    "/crosswire/gateways/",
    "/crosswire/store/",
    "/crosswire/wire/",
    "/crosswire/session.py",
)

Operation = Callable[[Any], None]


class Depth:
    """The deepest call of a function of the hub or of a gateway, from where this was entered."""

    def __init__(self) -> None:
        self.most = 0
        self.where = ""
        self._depth = 0
        self._is_ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Depth:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            self._depth += 1
            if self._depth > self.most and self._counts(frame.f_code):
                self.most = self._depth
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        elif event == "return":
            self._depth -= 1

    def _counts(self, code: CodeType) -> bool:
        ours = self._is_ours.get(code)
        if ours is None:
            ours = any(part in code.co_filename for part in OURS)
            self._is_ours[code] = ours
        return ours


def struct(name: str, **values: Any) -> bytes:
    """One of the hub's own, marshalled."""
    found = hub_module().struct(f"crosswire.{name}")
    return marshal.marshal(found.python_class(**values), found)


# ------------------------------------------------------------------------- who else takes part


def answer_emp(peer: Peer, event: Any) -> None:
    """Every other delivery is refused, and every other call fails."""
    if isinstance(event, emp_events.RequestReceived):
        if event.id % 2:
            peer.wire.send_success(event.id, b'{"n":1}')
        else:
            peer.wire.send_failure(event.id, "busy", "not now")


def answer_epoxy(peer: Peer, event: Any) -> None:
    if isinstance(event, epoxy_events.RequestReceived):
        number = event.conversation_id
        if number % 4:
            peer.wire.send_response(number, event.payload)
        else:
            peer.wire.send_error(number, Error(ErrorCode.METHOD_NOT_FOUND, "no"))


def answer_micromsg2(peer: Peer, event: Any) -> None:
    if isinstance(event, micro_events.MessageReceived):
        peer.wire.acknowledge(event.sequence)
        reply_to = event.properties.get("reply-to")
        if reply_to is not None:
            peer.wire.send_message(reply_to, b"{}", {"error": "busy"} if event.sequence % 2 else {})


def answer_relink(peer: Peer, event: Any) -> None:
    if isinstance(event, relink_events.MessageReceived):
        peer.wire.send_consumed(event.channel, event.sequence)
        peer.wire.send_message(event.channel, b"", b"!")


def consume_relink(peer: Peer, event: Any) -> None:
    if isinstance(event, relink_events.MessageReceived):
        peer.wire.send_consumed(event.channel, event.sequence)


def answer_emqp(peer: Peer, event: Any) -> None:
    if isinstance(event, emqp_events.RequestReceived):
        peer.wire.send_reply(b'{"value": 1}', event.msgid)
        peer.wire.send_ready()


def reacts(peer: Peer, answer: Callable[[Peer, Any], None]) -> None:
    peer.react = lambda event: answer(peer, event)


@asynccontextmanager
async def company(server: Server) -> AsyncIterator[None]:
    """Providers and consumers of every protocol, who answer, fail, settle and refuse at once."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        peer = await enter(emp(server))
        await peer.ask("$serve", services=["emp"])
        for destination in ("queue/emp", "topic/#", "topic/unstored"):
            await peer.ask("$subscribe", destination=destination, window=50)
        await peer.ask("$subscribe", destination="topic/t", name="n")
        reacts(peer, answer_emp)
        peer = await enter(epoxy(server))
        services = struct("Services", services=["epoxy", "examples.calc.Calc"])
        peer.wire.send_request("crosswire.Hub", "Serve", services)
        subscription = struct("Subscription", destination="topic/t", window=10)
        peer.wire.send_request("crosswire.Hub", "Subscribe", subscription)
        peer.session.wake()
        await peer.several(epoxy_events.ResponseReceived, 2)
        reacts(peer, answer_epoxy)
        peer = await enter(micromsg2(server, acks=20_000))
        peer.wire.send_serve("service/micromsg2", window=20)
        peer.wire.send_subscribe("queue/micromsg2")
        peer.session.wake()
        reacts(peer, answer_micromsg2)
        reacts(await enter(relink(server, "service/relink?serve")), answer_relink)
        reacts(await enter(relink(server, "queue/relink?consume")), consume_relink)
        peer = await enter(emqp(server, "worker", queues=[(10, "emqp")]))
        await peer.several(emqp_events.Registered, 1)
        reacts(peer, answer_emqp)
        for _ in range(200):
            peer.wire.send_ready()
        peer.session.wake()
        served = ("emp", "epoxy", "micromsg2", "relink", "emqp")
        async with asyncio.timeout(10):
            while not all(server.hub.is_served(f"service/{name}") for name in served):
                await asyncio.sleep(0)
        yield


# ------------------------------------------------------------------------------- what peers do

DESTINATIONS = (
    "queue/emp",
    "queue/relink",
    "queue/micromsg2",
    "queue/emqp",
    "queue/idle",
    "queue/full",
    "topic/t",
    "topic/unstored",
    "nowhere",
    "service/x",
)
SERVICES = ("emp", "epoxy", "micromsg2", "relink", "emqp", "nobody", "examples.calc.Calc/Calculate")


T = TypeVar("T")
RUNS = (1, 1, 1, 2, 30, 800)


def mixed(random: Random, kinds: Sequence[T], number: int) -> Iterator[T]:
    """This number of them in any order, now and then many of a kind in a row."""
    left = number
    while left:
        kind = random.choice(kinds)
        run = min(random.choice(RUNS), left)
        left -= run
        yield from repeat(kind, run)


def asks_emp(op: str, **data: Any) -> Operation:
    body = msgspec.json.encode(data)
    return lambda wire: wire.send_request(op, body)


def asks_epoxy(service: str, method: str, payload: bytes) -> Operation:
    return lambda wire: wire.send_request(service, method, payload)


EMP: list[Operation] = [
    *(asks_emp("$publish", destination=each, text="x") for each in DESTINATIONS),
    asks_emp("nobody"),
    asks_emp("examples.calc.Calc/Calculate", x="?"),
    asks_emp("$publish"),
    asks_emp("$echo", n=1),
    asks_emp("$nonsense"),
    asks_emp("$get_op", op_name="nobody"),
    asks_emp("$subscribe", destination="nowhere"),
    asks_emp("$unsubscribe", subscription=99),
    asks_emp("$unschedule", schedule="none"),
    asks_emp("$serve", services=["$x"]),
    asks_emp("$authenticate", token="x"),
]


async def drive_emp(server: Server, random: Random, number: int) -> None:
    """One call at a time is under way: those of somebody who answers are few, and in between."""
    async with emp(server) as peer:
        for each, operation in enumerate(mixed(random, EMP, number)):
            if each % 40 == 5:
                operation = asks_emp(random.choice(SERVICES), n=1)
            operation(peer.wire)
        peer.session.wake()
        await peer.several(emp_events.ResponseReceived, number)


EPOXY: list[Operation] = [
    *(
        asks_epoxy(
            "crosswire.Hub", "Publish", struct("Publication", destination=each, payload=b"x")
        )
        for each in DESTINATIONS
    ),
    *(asks_epoxy(each.partition("/")[0], each.partition("/")[2], b"?") for each in SERVICES),
    *(asks_epoxy(each.partition("/")[0], "", struct("Services", services=[])) for each in SERVICES),
    asks_epoxy("crosswire.Hub", "Publish", b"\xff"),
    asks_epoxy("crosswire.Hub", "Nonsense", b"?"),
    asks_epoxy("crosswire.Hub", "Unsubscribe", struct("Subscribed", subscription=9)),
    asks_epoxy("crosswire.Hub", "Settle", struct("Settlement", subscription=9)),
    asks_epoxy("crosswire.Hub", "Subscribe", struct("Subscription", destination="nowhere")),
    asks_epoxy("crosswire.Hub", "Serve", struct("Services", services=["crosswire.x"])),
]


async def drive_epoxy(server: Server, random: Random, number: int) -> None:
    async with epoxy(server) as peer:
        for each, operation in enumerate(mixed(random, EPOXY, number)):
            operation(peer.wire)
            if not each % 5:
                peer.wire.send_event("t", "", struct("Services", services=[]))
                peer.wire.send_event("crosswire.Hub", "Publish", b"?")
        peer.session.wake()
        await peer.several(epoxy_events.ResponseReceived, number)


async def drive_micromsg2(server: Server, random: Random, number: int) -> None:
    """What can't be refused in any other way ends a connection: that is left out."""
    destinations = [each for each in DESTINATIONS if each.startswith(("queue/", "topic/"))]
    destinations.remove("queue/full")
    async with micromsg2(server, acks=20_000) as peer:
        replies = 0
        services = [f"service/{name}" for name in SERVICES]
        for destination in mixed(random, [*services, *services, *destinations], number):
            properties = {"n": 1}
            if destination.startswith("service/"):
                reply_to = random.choice(("reply/r", "queue/idle", "queue/emp", "topic/t", ""))
                properties = {"reply-to": reply_to} if reply_to else {}
                replies += reply_to == "reply/r"
            peer.wire.send_message(destination, b"?", properties)
        peer.session.wake()

        def acknowledge(event: Any) -> None:
            if isinstance(event, micro_events.MessageReceived):
                peer.wire.acknowledge(event.sequence)

        peer.react = acknowledge
        await peer.several(micro_events.MessageReceived, replies)
        await peer.until(lambda: not peer.wire.unacknowledged)


LONG = (msgspec.json.encode({"long": "x" * 65_600}), b"?")
"""More than fits into a frame of MicroMsg2."""


def parts_for(endpoint: str) -> list[tuple[bytes, ...]]:
    parts: list[tuple[bytes, ...]] = [(b"?",), (b"{}", b"?"), ()]
    if endpoint.startswith("service/"):
        parts += [(b'{"timeout":5}', b"?"), (b"?", b"?")]
    return [*parts, LONG] if endpoint == "service/micromsg2" else parts


async def drive_relink(server: Server, random: Random, number: int) -> None:
    async with AsyncExitStack() as stack:
        endpoints = [f"service/{name}" for name in SERVICES]
        endpoints += [each for each in DESTINATIONS if each.startswith(("queue/", "topic/"))]
        endpoints.remove("queue/full")
        peers: list[tuple[Peer, str]] = []
        for endpoint in endpoints:
            peer = await stack.enter_async_context(relink(server, endpoint))
            peers.append((peer, endpoint))
            reacts(peer, consume_relink)
        sent = dict.fromkeys(endpoints, 0)
        parts = {endpoint: parts_for(endpoint) for endpoint in endpoints}
        for each, (peer, endpoint) in enumerate(mixed(random, peers, number)):
            sent[endpoint] += 1
            peer.wire.send_message(each % 250, *random.choice(parts[endpoint]))
        for peer, _ in peers:
            peer.session.wake()
        for peer, endpoint in peers:
            if endpoint.startswith("service/"):
                await peer.several(relink_events.MessageReceived, sent[endpoint])
            else:
                await peer.until(lambda peer=peer: not peer.wire.link.unconsumed)


async def drive_emqp(server: Server, random: Random, number: int) -> None:
    queues = ("emp", "relink", "micromsg2", "emqp", "idle", "epoxy", "nobody", "", "a//b")
    headers = ("", "guarantee", "reply-requested", "reply-requested,retry-count:3", "timeout:x")
    async with emqp(server, "client") as peer:
        receipts = 0
        for kind in mixed(random, ("PUBLISH", "SCHEDULE", *queues), number):
            if kind == "PUBLISH":
                peer.wire.send_publish(random.choice(("t", "unstored", "")), b"x")
            elif kind == "SCHEDULE":
                peer.wire.send_schedule("idle", "run_count:0", b"{}", interval_s=-1.0)
            else:
                receipts += kind != "a//b"
                peer.wire.send_request(kind, random.choice(headers), b'["run", {}]')
        peer.session.wake()
        await peer.until(
            lambda: (
                len([each for each in peer.all(emqp_events.ReplyReceived) if each.request is None])
                >= receipts
            )
        )


DRIVERS = {
    "emp": drive_emp,
    "emqp": drive_emqp,
    "epoxy": drive_epoxy,
    "micromsg2": drive_micromsg2,
    "relink": drive_relink,
}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", DRIVERS)
async def test_the_stack_does_not_grow_with_what_peers_send(
    start_server: StartServer, protocol: str
) -> None:
    quick = QueuePolicy(retry=Retry(first_delay_s=0.0, longest_delay_s=0.0, max_attempts=2))
    server = await start_server(
        bond=BondFiles(files=(str(CALC),)),
        queues={"full": QueuePolicy(max_length=1), "emp": quick},
        topics={"unstored": TopicPolicy(durable=False)},
    )
    drive = DRIVERS[protocol]
    async with company(server):
        await drive(server, Random(1), FEW)
        found: dict[int, Depth] = {}
        for number in (FEW, MANY):
            with Depth() as depth:
                await drive(server, Random(number), number)
            found[number] = depth
    few, many = found[FEW], found[MANY]
    assert many.most <= few.most + MOST_DIFFERENCE, (few.most, many.most, many.where)
    assert not server.hub.callbacks.failed
