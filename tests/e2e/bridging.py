"""What survives each crossing from one protocol to another: tried out, and written down.

`python -m tests.e2e.bridging --write` fills the tables of docs/bridging.md; the test of the same
name compares them with what happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from crosswire.client.message import BYTES, JSON, TEXT, Message, OutgoingMessage
from crosswire.client.native.micromsg2 import MicroMsg2Client, MicroMsg2Delivery
from crosswire.config import PLAIN_LISTENERS, BondFiles, Config
from crosswire.envelope import Property
from crosswire.errors import CallFailed, ProviderFailed, RequestFailed
from crosswire.hub.policies import ServicePolicy
from crosswire.server.server import GATEWAYS, Server
from tests.e2e.native_peers import MARKING, NATIVE
from tests.e2e.parties import PARTIES, Inbox, Party

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "bridging.md"
_WAIT_S: Final = 10.0
_DEADLINE_S: Final = 1.0
_PATIENCE_S: Final = 2.0
YES: Final = "✓"
NOTHING: Final = "–"

Judge = Callable[["Letter", Message], str]


# ------------------------------------------------------------------------------ what is sent


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and what is looked at when it has arrived: columns of the table."""

    payload: bytes = b"."
    content_type: str = BYTES
    properties: dict[str, Property] = {}
    columns: dict[str, Judge]


def payload(message: Letter, got: Message) -> str:
    return YES if got.payload == message.payload else "**changed**"


def content_type(message: Letter, got: Message) -> str:
    return YES if got.content_type == message.content_type else _TYPES[got.content_type]


def properties(*names: str) -> Judge:
    """Do they have the same values, of the same types?"""

    def judge(message: Letter, got: Message) -> str:
        if not got.properties:
            return NOTHING
        for name in names:
            sent, came = message.properties[name], got.properties.get(name)
            if came is None:
                return "lost"
            if type(came) is not type(sent):
                return f"→ {_KINDS[type(came)]}"
            if came != sent:
                return "**changed**"
        return YES

    return judge


def names(message: Letter, got: Message) -> str:
    if not got.properties:
        return NOTHING
    if got.properties == message.properties:
        return YES
    return "→ " + " ".join(f"`{name}`" for name in sorted(got.properties))


_TYPES: Final = {JSON: "JSON", TEXT: "text", BYTES: "bytes"}
_KINDS: Final = {int: "`int`", float: "`float`", bool: "`bool`", str: "`str`"}

_INTEGERS: Final = {"zero": 0, "negative": -1, "odd": 2**53 + 1, "most": 2**63 - 1}
_FLOATS: Final = {"half": 0.5, "whole": 3.0, "small": -1.25e-7, "large": 1e300}
_TRUTHS: Final = {"yes": True, "no": False}
_TEXTS: Final = {
    "nothing": "",
    "words": "Grüße, 世界 🎈",
    "escapes": "a:b;c,d=e&f%20g+h/i?\"j'\\k<l>\r\n\t",
    "digits": "42",
    "decimal": "1.5",
}

LETTERS: Final = (
    Letter(
        payload=b'{ "n": 12345678901234567890, "s": "\\u00e9\xc3\xa9", "l": [1.5, null, true] }',
        content_type=JSON,
        columns={"JSON": payload, "type of JSON": content_type},
    ),
    Letter(
        payload="Grüße,\r\n\0 世界 🎈".encode(),
        content_type=TEXT,
        columns={"text": payload, "type of text": content_type},
    ),
    Letter(payload=b"[2]", columns={"untyped JSON": payload, "type of untyped JSON": content_type}),
    Letter(columns={"empty": payload}, payload=b""),
    Letter(columns={"1 MiB": payload}, payload=bytes(range(256)) * 4096),
    Letter(
        payload=b"\x89PNG\r\n",
        content_type="image/png",
        columns={"type `image/png`": content_type},
    ),
    Letter(
        properties={**_INTEGERS, **_FLOATS, **_TRUTHS, **_TEXTS, "said": "true"},
        columns={
            "`int`": properties(*_INTEGERS),
            "`float`": properties(*_FLOATS),
            "`bool`": properties(*_TRUTHS),
            "`str`": properties(*_TEXTS),
            '`"true"`': properties("said"),
        },
    ),
    Letter(properties={"Größe_in cm": 1}, columns={"any name": names}),
    Letter(
        properties={"correlation-id": "c-7"}, columns={"correlation": properties("correlation-id")}
    ),
)

Row = tuple[str, str, dict[str, str]]
"""Producer, consumer, and what the columns hold."""

Results = dict[str, list[Row]]
"""The rows of every table, by its name."""

_SIDES: Final = {
    "queues": ("from", "to"),
    "topics": ("from", "to"),
    "calls": ("caller", "provider"),
    "failures": ("caller",),
}


# ---------------------------------------------------------------------------------------- a hub


@asynccontextmanager
async def running_server(data: Path) -> AsyncIterator[Server]:
    """With the calculator's schema, and little patience with providers."""
    config = Config(
        data=str(data),
        listen={name: "127.0.0.1:0" if name in GATEWAYS else "off" for name in PLAIN_LISTENERS},
        drain_s=0.2,
        bond=BondFiles(files=(str(ROOT / "examples" / "calc.bond"),)),
        services=ServicePolicy(deadline_s=_DEADLINE_S),
    )
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def ports_of(server: Server) -> dict[str, int]:
    return {name: listener.address.port for name, listener in server.listeners.items()}


async def until(true: Callable[[], bool], *, within_s: float = _WAIT_S) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def everybody(server: Server) -> AsyncIterator[list[Party]]:
    """One party of each protocol."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(party(ports_of(server))) for party in PARTIES]


# ------------------------------------------------------------------------- queues and topics


async def cross_all(server: Server, kind: str) -> list[Row]:
    """Every letter from every protocol to every protocol, through queues or topics."""
    rows: list[Row] = []
    async with everybody(server) as producers, everybody(server) as consumers:
        for consumer in consumers:
            destination = f"{kind}/to-{consumer.name}"
            inbox = await consumer.consume(destination)
            for producer in producers:
                cells = await _cross(producer, destination, inbox)
                cells["its own"] = NOTHING
                rows.append((producer.name, consumer.name, cells))
    for producer, consumer, cells in rows:
        if consumer in MARKING:
            cells["its own"] = await _cross_marked(server, kind, producer, consumer)
    return sorted(rows, key=lambda row: [party.name for party in PARTIES].index(row[0]))


def _attached(server: Server) -> int:
    """Not all native clients wait until they are subscribed."""
    return sum(len(gateway.attachments) for gateway in server.context.gateways.values())


async def _cross(producer: Party, destination: str, inbox: Inbox) -> dict[str, str]:
    cells: dict[str, str] = {}
    for message in LETTERS:
        await producer.produce(
            destination, message.payload, message.content_type, message.properties
        )
        async with asyncio.timeout(_WAIT_S):
            got = await inbox.get()
        for column, judge in message.columns.items():
            cells[column] = judge(message, got)
    return cells


async def _cross_marked(server: Server, kind: str, producer: str, consumer: str) -> str:
    """The mark of a producer's protocol that a consumer's sees."""
    ports, before = ports_of(server), _attached(server)
    destination = f"{kind}/{producer}-to-{consumer}"
    async with MARKING[consumer](ports) as peer:
        marks = await peer.marks(destination)
        await until(lambda: _attached(server) > before)
        if producer in MARKING:
            async with MARKING[producer](ports) as sender:
                await sender.send_marked(destination)
        else:
            (party,) = (each for each in PARTIES if each.name == producer)
            async with party(ports) as plain:
                await plain.produce(destination, b"plain")
        async with asyncio.timeout(_WAIT_S):
            return await marks.get() or NOTHING


# ------------------------------------------------------------------------------------- services

_QUESTIONS: Final = (
    ("JSON object", b'{"x":[1,"\xc3\xa9"]}', JSON),
    ("text", "Grüße".encode(), TEXT),
    ("bytes", bytes(range(256)), BYTES),
    ("nothing", b"", BYTES),
)


async def _echo(asked: Message) -> OutgoingMessage:
    return OutgoingMessage(body=asked.payload, content_type=asked.content_type)


async def _fail(_asked: Message) -> None:
    raise ProviderFailed("1234", "no, thanks")


async def call_all(server: Server) -> list[Row]:
    """Every caller asks every provider, which gives back what it got, or fails, or is silent."""
    rows: list[Row] = []
    async with everybody(server) as callers, everybody(server) as providers:
        for provider in providers:
            service, failing = f"service/echo-{provider.name}", f"service/fail-{provider.name}"
            await provider.serve(service, _echo)
            await provider.serve(failing, _fail)
            for caller in callers:
                cells = {}
                for column, question, kind in _QUESTIONS:
                    cells[column] = await _ask(caller, service, question, kind)
                cells["a method"] = await _ask(caller, f"{service}/Method", b'{"m":1}', JSON)
                cells["failure"] = await _failure(server, caller.name, failing)
                rows.append((caller.name, provider.name, cells))
    return sorted(rows, key=lambda row: [party.name for party in PARTIES].index(row[0]))


async def _ask(caller: Party, service: str, question: bytes, kind: str) -> str:
    if caller.name == "EMP" and kind != JSON:
        return NOTHING
    got = await caller.call(service, question, kind)
    if got.payload == question:
        return YES if got.content_type == kind else _TYPES[got.content_type]
    shape = json.loads(got.payload)
    return f"in `{{{', '.join(shape)}}}`"


async def _failure(server: Server, name: str, service: str) -> str:
    """What a native caller gets.

    A request of eMQP for a queue that nobody consumes waits there: nothing is answered.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S), NATIVE[name](ports_of(server)) as caller:
            await caller.call(service)
    except RequestFailed as failure:
        if isinstance(failure, CallFailed):
            return f"{failure.code}: {failure.description}"
        return f"`{failure.code}`: {failure.description}"
    except TimeoutError:
        return "waits in its queue"
    return "**no failure**"


async def fail_all(server: Server) -> list[Row]:
    """What callers get when nobody provides, when the provider is silent, and when it leaves."""
    asked = asyncio.Semaphore(0)

    async def stay_silent(_: MicroMsg2Delivery) -> tuple[bytes, dict[str, Property]]:
        asked.release()
        never: asyncio.Future[tuple[bytes, dict[str, Property]]] = asyncio.Future()
        return await never

    async def all_asked() -> None:
        async with asyncio.timeout(_WAIT_S):
            for _ in NATIVE:
                await asked.acquire()

    def call_by_all(service: str) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(_failure(server, name, service)) for name in NATIVE]

    unknown = await asyncio.gather(*call_by_all("service/nobody"))
    # A native one: the library answers what it has begun before it leaves.
    async with MicroMsg2Client("127.0.0.1", ports_of(server)["micromsg2"]) as provider:
        await provider.serve("service/silent", stay_silent)
        await until(lambda: server.hub.is_served("service/silent"))
        silent = await asyncio.gather(*call_by_all("service/silent"))
        await all_asked()
        calls = call_by_all("service/silent")
        await all_asked()
    lost = await asyncio.gather(*calls)
    return [
        (name, "", {"nobody": nobody, "silent": late, "left": left})
        for name, nobody, late, left in zip(NATIVE, unknown, silent, lost, strict=True)
    ]


# ----------------------------------------------------------------------------------- the page


def tables(results: Results) -> dict[str, str]:
    return {name: _table(_SIDES[name], rows) for name, rows in results.items()}


def _table(sides: tuple[str, ...], rows: Iterable[Row]) -> str:
    lines: list[str] = []
    for first, second, cells in rows:
        if not lines:
            lines.append("| " + " | ".join([*sides, *cells]) + " |")
            lines.append("|" + "---|" * (len(sides) + len(cells)))
        heads = [first, second][: len(sides)]
        lines.append("| " + " | ".join([*heads, *cells.values()]) + " |")
    return "\n".join(lines)


async def measure(data: Path) -> Results:
    async with running_server(data) as server:
        return {
            "queues": await cross_all(server, "queue"),
            "topics": await cross_all(server, "topic"),
            "calls": await call_all(server),
            "failures": await fail_all(server),
        }


def filled(page: str, results: Results) -> str:
    """The page with its tables between their marks."""
    for name, text in tables(results).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        if not tail:
            raise ValueError(f"the page has no section for {name}")
        page = head + f"{begin}\n{text}\n\n{end}" + tail
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="fill the tables of the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        results = uvloop.run(measure(Path(data)))
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(), results))
    else:
        sys.stdout.write("\n\n".join(tables(results).values()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
