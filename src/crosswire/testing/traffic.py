"""Realistic traffic of all registered protocols, the same for the same seed.

Conversations are made with the protocols' own serializers and come as rows of the lake's `wire/`,
as tap files, or as capture files with real packets. For tests and benchmarks:

    python -m crosswire.testing.traffic tap  DIR  --connections 100 --messages 1000
    python -m crosswire.testing.traffic pcap FILE --messages 10 --protocols emp epoxy
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from struct import pack

import pyarrow as pa

from crosswire.lake.files import write
from crosswire.lake.schemas import BACKWARD, DATA, FIN, FORWARD, OPEN, WIRE
from crosswire.wire import PROTOCOL_NAMES, protocol

__all__ = ["Conversation", "SampleTraffic", "packets", "write_pcap"]

Chunk = tuple[bool, bytes]
"""Whether the side that opened the connection sent it, and the bytes."""

_START_US = 1_790_000_000_000_000


@dataclass(frozen=True)
class Conversation:
    """A connection from its opening to its end: chunks of bytes (time, forward, data)."""

    number: int
    protocol: str
    listener: str
    port: int
    chunks: tuple[tuple[int, bool, bytes], ...]

    @property
    def connector(self) -> tuple[str, int]:
        """Host and port of the side that opened the connection."""
        return f"10.0.{self.number >> 8 & 255}.{self.number & 255}", 40_000 + self.number % 20_000

    @property
    def acceptor(self) -> tuple[str, int]:
        """Host and port of the side that accepted it."""
        return "10.1.0.1", self.port


@dataclass(frozen=True)
class SampleTraffic:
    """`messages` is per connection; `payload_bytes` the mean size of what they carry."""

    seed: int = 1
    protocols: Sequence[str] = PROTOCOL_NAMES
    connections: int = 10
    messages: int = 20
    payload_bytes: int = 512
    node: str = "bench"

    def conversations(self) -> Iterator[Conversation]:
        """One after the other, protocols in turn; none depends on those before it."""
        for number in range(self.connections):
            name = self.protocols[number % len(self.protocols)]
            yield self.conversation(number, name)

    def conversation(self, number: int, name: str) -> Conversation:
        """The one with this number, in a protocol; other numbers don't matter for it."""
        random = Random(f"{self.seed}/{number}/{name}")
        listener, port = next(iter(protocol(name).ports.items()))
        time = _START_US + number * 1000
        chunks = []
        for forward, data in _TALKS[name](random, self.messages, self.payload_bytes):
            time += random.randrange(20, 2000)
            chunks.append((time, forward, data))
        return Conversation(number, name, listener, port, tuple(chunks))

    def wire(self, most_rows: int = 50_000) -> Iterator[pa.Table]:
        """Rows of `wire/`, in pieces; a connection's stand together."""
        rows: list[tuple[object, ...]] = []
        seq = 0
        for conversation in self.conversations():
            for row in _wire_rows(conversation, self.node, seq):
                rows.append(row)
                seq += 1
            if len(rows) >= most_rows:
                yield _table(rows)
                rows = []
        if rows:
            yield _table(rows)

    def write_tap(self, lake: Path) -> int:
        """Into `lake/wire`; returns the number of bytes sent."""
        total = 0
        for table in self.wire():
            total += sum(table["length"].to_pylist())
            write(lake, "wire", table)
        return total


def _wire_rows(conversation: Conversation, node: str, seq: int) -> Iterator[tuple[object, ...]]:
    offsets = {True: 0, False: 0}
    ends = (*conversation.connector, *conversation.acceptor)
    constants = (False, conversation.protocol, conversation.listener, *ends)
    name = f"{conversation.protocol}-{conversation.number}"

    def row(forward: bool, kind: str, time: int, data: bytes | None) -> tuple[object, ...]:
        nonlocal seq
        length = len(data or b"")
        made = (
            node,
            seq,
            name,
            FORWARD if forward else BACKWARD,
            kind,
            offsets[forward],
            length,
            time,
            data,
            *constants,
        )
        offsets[forward] += length
        seq += 1
        return made

    yield row(True, OPEN, conversation.chunks[0][0] - 10, None)
    for time, forward, data in conversation.chunks:
        yield row(forward, DATA, time, data)
    last = conversation.chunks[-1][0]
    yield row(True, FIN, last + 10, None)
    yield row(False, FIN, last + 20, None)


def _table(rows: list[tuple[object, ...]]) -> pa.Table:
    columns = [
        pa.array(column, kind.type)
        for column, kind in zip(zip(*rows, strict=True), WIRE, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=WIRE)


# ----------------------------------------------------------------------------------------- talks


def _payload(random: Random, mean: int) -> bytes:
    return random.randbytes(random.randrange(mean // 2, mean + mean // 2 + 1))


def _object(random: Random, mean: int) -> bytes:
    text = random.randbytes(random.randrange(mean // 4, mean * 3 // 4 + 1)).hex()
    return json.dumps({"text": text, "number": random.randrange(1000)}).encode()


def _emp(random: Random, messages: int, mean: int) -> Iterator[Chunk]:
    from crosswire.wire.emp.frames import (
        Bye,
        Hello,
        Ping,
        Pong,
        Request,
        Response,
        Result,
        serialize,
        serialize_call,
        serialize_result,
    )

    yield True, serialize(Hello(1))
    yield False, serialize(Hello(1))
    for number in range(1, messages + 1):
        if random.random() < 0.3:
            data = b'{"destination":"queue/orders","json":' + _object(random, mean) + b"}"
            call = serialize_call("$publish", data)
        else:
            call = serialize_call(random.choice(["price", "stock"]), _object(random, mean))
        yield True, serialize(Request(number, call))
        if random.random() < 0.05:
            result = Result("failure", code="out_of_stock", description="none left")
            answer = serialize_result(result)
        else:
            answer = serialize_result(Result("success"))
        yield False, serialize(Response(number, answer))
        if random.random() < 0.02:
            yield True, serialize(Ping())
            yield False, serialize(Pong())
    yield True, serialize(Bye())


def _emqp(random: Random, messages: int, mean: int) -> Iterator[Chunk]:
    from crosswire.wire.emqp.frames import Kbai, Publish, Reply, Request, serialize
    from crosswire.wire.zmtp.frames import (
        Greeting,
        serialize_command,
        serialize_message,
        serialize_metadata,
    )
    from crosswire.wire.zmtp.frames import serialize as serialize_zmtp

    for forward, socket in ((True, b"DEALER"), (False, b"ROUTER")):
        yield forward, serialize_zmtp(Greeting("NULL"))
        ready = serialize_metadata({"Socket-Type": socket, "Identity": b"c1" if forward else b""})
        yield forward, serialize_command("READY", ready)
    for number in range(messages):
        name = f"{number:08x}"
        if random.random() < 0.2:
            note = Publish(name, "news", None, _payload(random, mean))
            yield True, serialize_message(serialize(note))
            continue
        job = Request(name, "jobs", "reply-requested,guarantee", _payload(random, mean))
        yield True, serialize_message(serialize(job))
        yield False, serialize_message(serialize(Reply(f"r{name}", name.encode())))
        result = Reply(f"s{name}", b'{"value": 1}', name)
        yield False, serialize_message(serialize(result))
    yield True, serialize_message(serialize(Kbai("bye")))


def _relink(random: Random, messages: int, mean: int) -> Iterator[Chunk]:
    from crosswire.wire.relink.frames import Message, SequenceAcknowledgement, Shutdown, serialize
    from crosswire.wire.relink.handshake import (
        ConnectorHello,
        ConnectorVersion,
        ListenerHello,
        ListenerVersion,
        serialize_handshake,
    )
    from crosswire.wire.relink.layout import packet_layout

    here, there = packet_layout("connector", 1, 1), packet_layout("listener", 1, 1)
    yield True, serialize_handshake(ConnectorVersion(0))
    yield False, serialize_handshake(ListenerVersion(0))
    yield True, serialize_handshake(ConnectorHello(endpoint="service/price"))
    yield False, serialize_handshake(ListenerHello(_START_US, random.randrange(1, 1 << 62)))
    counts = [0] * 4
    for _ in range(messages):
        channel = random.randrange(4)
        asked = Message((channel,), False, (_payload(random, mean),))
        yield True, b"".join(serialize(asked, here))
        answered = Message((channel,), False, (_payload(random, mean),))
        done = SequenceAcknowledgement("consumed", (channel,), counts[channel])
        yield False, b"".join((*serialize(done, there), *serialize(answered, there)))
        yield True, b"".join(serialize(done, here))
        counts[channel] += 1
    yield True, b"".join(serialize(Shutdown(), here))
    yield False, b"".join(serialize(Shutdown(), there))


def _epoxy(random: Random, messages: int, mean: int) -> Iterator[Chunk]:
    from crosswire.wire.epoxy.frames import ConfigFrame, Message, MessageType, serialize

    def payload() -> bytes:
        # A struct with one blob, in Compact Binary.
        blob = _payload(random, mean)[:16_000]
        size = bytes((len(blob) & 127 | 128, len(blob) >> 7))
        return b"CB\x01\x00\x0b\x0e" + size + blob + b"\x00"

    yield True, serialize(ConfigFrame())
    yield False, serialize(ConfigFrame())
    for number in range(messages):
        conversation = 2 * number + 1
        if random.random() < 0.2:
            event = Message(conversation, MessageType.EVENT, "Feed", "Tick", payload=payload())
            yield True, serialize(event)
            continue
        asked = Message(conversation, MessageType.REQUEST, "Calc", "Add", payload=payload())
        yield True, serialize(asked)
        yield False, serialize(Message(conversation, MessageType.RESPONSE, payload=payload()))


def _micromsg2(random: Random, messages: int, mean: int) -> Iterator[Chunk]:
    from crosswire.wire.micromsg2.frames import (
        Command,
        Extension,
        ExtensionFrame,
        Handshake,
        Message,
        following,
        serialize,
    )
    from crosswire.wire.micromsg2.values import serialize_properties

    acks = (Extension("batch-ack", {"max-count": "10"}), Extension("pub-sub", {}))
    yield True, serialize(Handshake(1, 0, 0, "client", (), acks))
    yield False, serialize(Handshake(1, 0, 0, "server", (), acks))
    yield True, serialize(Handshake(1, 0, 0, "client", acks, ()))
    yield True, serialize(Command("subscribe", {"destination": "topic/prices"}))
    here = there = 1
    begun = False
    for number in range(messages):
        if random.random() < 0.5:
            properties = serialize_properties({"reply-to": "reply/me", "correlation-id": number})
            asked = Message(here, "service/price", properties, _payload(random, mean))
            yield True, serialize(asked)
            yield False, serialize(ExtensionFrame(1, here.to_bytes(2)))
            here = following(here)
            properties = serialize_properties({"correlation-id": number})
            answered = Message(there, "reply/me", properties, _payload(random, mean))
            yield False, serialize(answered)
            yield True, serialize(ExtensionFrame(1, there.to_bytes(2)))
            there = following(there)
        else:
            for continued in random.choice([(False,), (True, False)]):
                # Only a message's first frame names its destination.
                first = continued or not begun
                begun = continued
                name = "queue/orders" if first else ""
                yield True, serialize(Message(here, name, b"", _payload(random, mean), continued))
                yield False, serialize(ExtensionFrame(1, here.to_bytes(2)))
                here = following(here)


_TALKS: dict[str, Callable[[Random, int, int], Iterator[Chunk]]] = {
    "emp": _emp,
    "emqp": _emqp,
    "relink": _relink,
    "epoxy": _epoxy,
    "micromsg2": _micromsg2,
}


# --------------------------------------------------------------------------------------- packets

_SYN, _FIN, _PSH, _ACK = 2, 1, 8, 16


def packets(
    conversation: Conversation,
    *,
    segment_bytes: int = 1448,
    isn: tuple[int, int] = (7, 4_000_000_000),
) -> list[tuple[int, bytes]]:
    """Ethernet packets of a whole TCP connection and their times in ns."""
    made: list[tuple[int, bytes]] = []
    sent = {True: isn[0], False: isn[1]}

    def packet(time_us: int, forward: bool, flags: int, data: bytes = b"") -> None:
        source, target = conversation.connector, conversation.acceptor
        if not forward:
            source, target = target, source
        acknowledged = sent[not forward] if flags & _ACK else 0
        made.append(
            (time_us * 1000, _packet(source, target, sent[forward], acknowledged, flags, data))
        )
        sent[forward] = (sent[forward] + len(data) + bool(flags & (_SYN | _FIN))) % 2**32

    first, last = conversation.chunks[0][0], conversation.chunks[-1][0]
    packet(first - 3, True, _SYN)
    packet(first - 2, False, _SYN | _ACK)
    packet(first - 1, True, _ACK)
    for time, forward, data in conversation.chunks:
        for start in range(0, len(data), segment_bytes):
            packet(time, forward, _PSH | _ACK, data[start : start + segment_bytes])
    packet(last + 1, True, _FIN | _ACK)
    packet(last + 2, False, _FIN | _ACK)
    packet(last + 3, True, _ACK)
    return made


def _packet(
    source: tuple[str, int],
    target: tuple[str, int],
    number: int,
    acknowledged: int,
    flags: int,
    data: bytes,
) -> bytes:
    tcp = pack(">HHIIBBHHH", source[1], target[1], number, acknowledged, 5 << 4, flags, 65535, 0, 0)
    addresses = b"".join(bytes(map(int, end[0].split("."))) for end in (source, target))
    size = 40 + len(data)
    ip = pack(">BBHHHBBH", 0x45, 0, size, 0, 0, 64, 6, 0) + addresses
    return bytes(12) + b"\x08\x00" + ip + tcp + data


def write_pcap(path: Path, records: Iterator[tuple[int, bytes]] | list[tuple[int, bytes]]) -> int:
    """Write a classic capture file, little-endian, with nanoseconds; returns its size."""
    with path.open("wb") as file:
        file.write(pack("<IHHIIII", 0xA1B23C4D, 2, 4, 0, 0, 262_144, 1))
        for time_ns, packet in records:
            seconds, rest = divmod(time_ns, 1_000_000_000)
            file.write(pack("<IIII", seconds, rest, len(packet), len(packet)) + packet)
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate traffic.")
    parser.add_argument("form", choices=("tap", "pcap"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--messages", type=int, default=1000, help="per connection")
    parser.add_argument("--payload-bytes", type=int, default=512, help="on average")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOL_NAMES, default=PROTOCOL_NAMES)
    options = parser.parse_args()
    traffic = SampleTraffic(
        options.seed,
        options.protocols,
        options.connections,
        options.messages,
        options.payload_bytes,
    )
    if options.form == "tap":
        size = traffic.write_tap(options.path)
    else:
        size = write_pcap(
            options.path,
            (packet for each in traffic.conversations() for packet in packets(each)),
        )
    print(f"{size:,} bytes in {options.path}")


if __name__ == "__main__":
    main()
