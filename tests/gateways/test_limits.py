"""Limits on lists, names and texts in every protocol: what is just within passes, one more gets the
protocol's own refusal."""

from __future__ import annotations

from typing import Any

import pytest

from crosswire.bond import hub_module, marshal
from crosswire.envelope import PROPERTIES, PROPERTIES_BYTES
from crosswire.gateways.emp.messages import SERVED_AT_ONCE
from crosswire.server.server import Server
from crosswire.wire.contract import ConnectionFailed
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.epoxy import events as epoxy_events
from crosswire.wire.epoxy.comm import unmarshal_error
from crosswire.wire.micromsg2.frames import MicroMsg2Limits, serialize_message
from crosswire.wire.micromsg2.values import MAX_CALL_BYTES
from tests.gateways.wire_peers import total, until
from tests.gateways.wires import emp, emqp, epoxy, micromsg2

_HUB = hub_module()


def many(count: int) -> dict[str, int]:
    return {f"p{number}": number for number in range(count)}


# ------------------------------------------------------------------------------------------- EMP


@pytest.mark.parametrize("op", ["$publish", "$schedule"])
async def test_emp_properties(server: Server, op: str) -> None:
    message: dict[str, Any] = {"destination": "queue/q", "text": "x"}
    if op == "$schedule":
        message["interval_s"] = 3600
    async with emp(server) as peer:
        assert (await peer.ask(op, **message, properties=many(PROPERTIES))).succeeded
        answer = await peer.ask(op, **message, properties=many(PROPERTIES + 1))
        assert answer.code == "invalid_request"
        assert answer.description == "a message has at most 1000 properties, not 1001"
        text = "x" * (PROPERTIES_BYTES - 8)
        assert (await peer.ask(op, **message, properties={"a": text})).succeeded
        answer = await peer.ask(op, **message, properties={"a": text + "xx"})
        assert answer.code == "invalid_request"
        assert "properties have at most 65536 bytes" in answer.description


async def test_emp_payloads_may_be_larger(server: Server) -> None:
    async with emp(server) as peer:
        asked = {"destination": "queue/q", "text": "x" * 1_000_000, "properties": many(PROPERTIES)}
        assert (await peer.ask("$publish", **asked)).succeeded


async def test_emp_services(server: Server) -> None:
    async with emp(server) as peer:
        names = [f"{number:0>200}" for number in range(SERVED_AT_ONCE)]
        assert (await peer.ask("$serve", services=names)).succeeded
        answer = await peer.ask("$serve", services=[*names, "one-more"])
        assert answer.code == "invalid_request"
        assert "length <= 1000" in answer.description
        answer = await peer.ask("$serve", services=["x" * 600_000])
        assert answer.code == "invalid_request"
        assert "the data of $serve has at most 524288 bytes" in answer.description


@pytest.mark.parametrize("op", ["$subscribe", "$publish"])
async def test_names_that_are_refused_are_not_sent_back(server: Server, op: str) -> None:
    async with emp(server) as peer:
        answer = await peer.ask(op, destination="queue/" + "x" * 100_000, text="x")
        assert answer.code == "invalid_request"
        assert answer.description == "a destination has at most 255 bytes, not 100006"


# ------------------------------------------------------------------------------------------ eMQP


@pytest.mark.parametrize(
    ("queue", "headers", "is_taken"),
    [
        ("q", ",".join(f"h{number}:1" for number in range(EmqpLimits().headers)), True),
        ("q", ",".join(f"h{number}:1" for number in range(EmqpLimits().headers + 1)), False),
        ("q", "a:" + "x" * (EmqpLimits().header_bytes - 2), True),
        ("q", "a:" + "x" * (EmqpLimits().header_bytes - 1), False),
        ("q" * (EmqpLimits().name_bytes + 1), "", False),
    ],
)
@pytest.mark.parametrize("command", ["request", "publish", "schedule"])
async def test_emqp_headers(
    server: Server, command: str, queue: str, headers: str, is_taken: bool
) -> None:
    def ignored() -> int:
        return total(server.context.counters, "ignored", "emqp")

    async with emqp(server, "client") as peer:
        if command == "request":
            peer.wire.send_request(queue, headers, b"x")
        elif command == "publish":
            peer.wire.send_publish(queue, b"x", headers)
        else:
            peer.wire.send_schedule(queue, headers, b"x", interval_s=3600)
        peer.session.wake()
        if not is_taken:
            await until(ignored)
        elif command == "request":
            await until(lambda: server.hub.queue("queue/q").length)
        elif command == "publish":
            await until(lambda: "topic/q" in server.hub.topics_by_name())
        else:
            await until(server.hub.schedules.all)
        assert bool(ignored()) is not is_taken


# ----------------------------------------------------------------------------------------- Epoxy


def struct(name: str, **values: Any) -> bytes:
    found = _HUB.struct(f"crosswire.{name}")
    return marshal.marshal(found.python_class(**values), found)


async def ask_epoxy(peer: Any, method: str, payload: bytes) -> str:
    """The error's text, empty if there is none."""
    peer.wire.send_request("crosswire.Hub", method, payload)
    peer.session.wake()
    (answer,) = await peer.several(epoxy_events.ResponseReceived, 1)
    return unmarshal_error(answer.error).message if answer.error else ""


async def test_epoxy_properties(server: Server) -> None:
    value = _HUB.struct("crosswire.Value").python_class

    def publication(count: int, text: str = "x") -> bytes:
        properties = {name: value(text=text) for name in many(count)}
        return struct("Publication", destination="queue/q", payload=b"x", properties=properties)

    async with epoxy(server) as peer:
        assert await ask_epoxy(peer, "Publish", publication(PROPERTIES)) == ""
        refused = await ask_epoxy(peer, "Publish", publication(PROPERTIES + 1))
        assert refused == "invalid_request: a message has at most 1000 properties, not 1001"
        refused = await ask_epoxy(peer, "Publish", publication(2, "x" * 40_000))
        assert "properties have at most 65536 bytes" in refused


async def test_epoxy_services(server: Server) -> None:
    names = [f"s{number}" for number in range(SERVED_AT_ONCE)]
    async with epoxy(server) as peer:
        assert await ask_epoxy(peer, "Serve", struct("Services", services=names)) == ""
        refused = await ask_epoxy(peer, "Serve", struct("Services", services=[*names, "more"]))
        assert refused == "invalid_request: at most 1000 names at once, not 1001"


async def test_epoxy_ids_in_one_settlement(server: Server) -> None:
    async with epoxy(server) as peer:
        asked = struct("Subscription", destination="queue/q", window=65_535)
        assert await ask_epoxy(peer, "Subscribe", asked) == ""
        ids = list(range(1 << 40, (1 << 40) + 20_000))
        settlement = struct("Settlement", subscription=1, ids=ids[:10_000])
        assert await ask_epoxy(peer, "Settle", settlement) == ""
        settlement = struct("Settlement", subscription=1, ids=ids)
        assert "more values than the limit allows" in await ask_epoxy(peer, "Settle", settlement)


async def test_epoxy_unknown_fields(server: Server) -> None:
    """Some are skipped, as Bond asks for; a struct of nothing else is refused."""
    whole = struct("Publication", destination="queue/q", payload=b"x")
    unknown = b"\xc2\x14\x01"  # field 20, a bool
    async with epoxy(server) as peer:
        assert await ask_epoxy(peer, "Publish", whole[:-1] + unknown * 1000 + b"\x00") == ""
        for repeated in (unknown, b"\x01"):  # fields, and ends of bases
            refused = await ask_epoxy(peer, "Publish", whole[:-1] + repeated * 100_000 + b"\x00")
            assert "more values than the limit allows" in refused


# ------------------------------------------------------------------------------------- MicroMsg2


async def test_micromsg2_properties(server: Server) -> None:
    def message(sequence: int, count: int) -> bytes:
        properties = b"".join(b"p%d:N1;" % number for number in range(count))
        return b"".join(serialize_message(sequence, b"queue/q", properties, b"x"))

    most = MicroMsg2Limits().properties
    async with micromsg2(server) as peer:
        peer.session.transport.write(message(1, most))
        await until(lambda: server.hub.queue("queue/q").length)
        peer.session.transport.write(message(2, most + 1))
        await until(lambda: peer.end)
        assert isinstance(peer.end, ConnectionFailed)
        assert peer.end.error.code == "limit"


@pytest.mark.parametrize(
    "call",
    [
        b"subscribe;destination=queue/q,filter=" + b"a" * MAX_CALL_BYTES,
        b"subscribe;" + b"a=1," * 1001 + b"destination=queue/q",
    ],
)
async def test_micromsg2_commands(server: Server, call: bytes) -> None:
    async with micromsg2(server) as peer:
        peer.session.transport.write(b"\x09" + len(call).to_bytes(4) + call)
        await until(lambda: peer.end)
        assert isinstance(peer.end, ConnectionFailed)
        assert peer.end.error.code == "limit"
