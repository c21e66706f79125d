"""Two EMP peers talk over loopback; the bytes between them are recorded and decoded."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec

from crosswire.cli.table import harmless, in_short, print_table
from crosswire.clients.emp import EmpClient, EmpServer, Json
from crosswire.errors import RequestFailed
from crosswire.wire import protocol

__all__ = ["configure", "run"]

Recorded = tuple[float, str, bytes]


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a frame")


def run(options: argparse.Namespace) -> int:
    print("An order service and its customer, both EMP peers, on loopback …", file=sys.stderr)
    recorded = asyncio.run(_converse())
    rows = _decode(recorded)
    if options.json:
        for row in rows:
            names = ("time_ms", "sender", "offset", "length", "frame", "fields")
            print(msgspec.json.encode(dict(zip(names, row, strict=True))).decode())
    else:
        head = ("ms", "sender", "offset", "length", "frame", "fields")
        print_table(head, [(*row[:5], harmless(in_short(row[5]))) for row in rows])
    size = sum(len(data) for _, _, data in recorded)
    print(f"{len(rows)} frames in {size:,} bytes, every byte accounted for.", file=sys.stderr)
    return 0


async def _converse() -> list[Recorded]:
    """What both sides sent, in the order in which it passed a relay between them."""
    stock = {"tea": 3}
    confirmed: list[Json] = []

    async def order(data: Json) -> Json:
        item, wanted = data["item"], data["amount"]
        if stock.get(item, 0) < wanted:
            raise RequestFailed("out_of_stock", f"no {wanted} of {item} left")
        stock[item] -= wanted
        return {"left": stock[item]}

    async def confirm(data: Json) -> Json:
        confirmed.append(data)
        return {}

    server = EmpServer({"order": order})
    await server.listen()
    relay = Relay(server.port)
    await relay.listen()
    async with EmpClient("127.0.0.1", relay.port, handlers={"confirm": confirm}) as client:
        print("  the customer orders twice and is told what is left", file=sys.stderr)
        replies = [await client.request("order", {"item": "tea", "amount": 2})]
        try:
            await client.request("order", {"item": "tea", "amount": 2})
        except RequestFailed as failure:
            replies.append({"refused": failure.code})
        print("  the service asks back on the same connection", file=sys.stderr)
        (peer,) = server.peers
        await peer.request("confirm", {"order": 1})
    assert replies == [{"left": 1}, {"refused": "out_of_stock"}] and confirmed == [{"order": 1}]
    await relay.close()
    await server.close()
    return relay.recorded


class Relay:
    """Passes bytes on between a client and a server, and keeps a copy."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._passing: set[asyncio.Task[None]] = set()
        self.port = 0
        self.recorded: list[Recorded] = []

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        await asyncio.gather(*self._passing)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._passing = {
            asyncio.create_task(self._pass("client", reader, far_writer)),
            asyncio.create_task(self._pass("server", far_reader, writer)),
        }

    async def _pass(
        self, sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            self.recorded.append((time.perf_counter(), sender, data))
            writer.write(data)
            await writer.drain()
        writer.close()


def _decode(recorded: list[Recorded]) -> list[tuple[str, str, int, int, str, Json]]:
    entry = protocol("emp")
    decoders = {sender: entry.decoder(sender) for sender in entry.roles}
    start = recorded[0][0]
    rows = [
        (f"{(at - start) * 1000:.2f}", sender, row.offset, row.length, row.frame, row.fields)
        for at, sender, data in recorded
        for row in decoders[sender].rows(data)
    ]
    seen = sum(row[3] for row in rows)
    assert seen == sum(len(data) for _, _, data in recorded)
    return [
        (at, sender, o, n, str(frame), fields or {}) for at, sender, o, n, frame, fields in rows
    ]
