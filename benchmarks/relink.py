"""How fast Relink is decoded and encoded, compared with the same packets in `construct`.

Short messages and 1 MiB parts: decoded from reads of 256 KiB, received by a connection with a link,
and serialized.
"""

from __future__ import annotations

import construct as c
from measure import line, rate

from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.decoder import RelinkDecoder
from crosswire.wire.relink.events import HandshakeReceived, MessageReceived
from crosswire.wire.relink.frames import Message, RelinkLimits, serialize
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    LinkTerms,
    serialize_handshake,
)
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.relink.link import Link

READ_BYTES = 256 * 1024
LAYOUT = packet_layout("connector", 1, 1)
HELLO = serialize_handshake(ConnectorVersion(0)) + serialize_handshake(ConnectorHello(endpoint="e"))


def aligned(size: int) -> int:
    return (size + 7) & -8


CONSTRUCT = c.GreedyRange(
    c.Aligned(
        8,
        c.Struct(
            "head" / c.Int8ul,
            "length" / c.Int8ul,
            "channel" / c.Int8ul,
            c.Padding(1),
            "sizes"
            / c.IfThenElse(
                c.this.head & 64,
                c.Struct(c.Padding(4), "of" / c.Int64ul[c.this._.length]),
                c.Struct("of" / c.Aligned(4, c.Int16ul[c.this._.length])),
            ),
            "parts" / c.Array(c.this.length, c.Aligned(8, c.Bytes(lambda x: x.sizes.of[x._index]))),
        ),
    )
)


def stream(parts: tuple[bytes, ...], count: int) -> tuple[bytes, list[bytes]]:
    packet = b"".join(serialize(Message((7,), False, parts), LAYOUT))
    wire = packet * count
    return wire, [wire[at : at + READ_BYTES] for at in range(0, len(wire), READ_BYTES)]


def decode(reads: list[bytes]) -> int:
    decoder = RelinkDecoder("connector")
    decoder.feed(HELLO)
    return sum(len(decoder.feed(read)) for read in reads)


def converse(reads: list[bytes]) -> int:
    """Each read's messages are consumed and acknowledged before the next one."""
    limits = RelinkLimits(window=1_000_000)
    connection = RelinkConnection("listener", 0.0, limits=limits)
    connection.receive_data(HELLO, 0.0)
    (asked,) = connection.events()
    assert isinstance(asked, HandshakeReceived)
    connection.accept(Link("listener", LinkTerms.of(asked.hello), epoch=1, id=1, limits=limits))
    got = 0
    for read in reads:
        connection.receive_data(read, 0.0)
        messages = [event for event in connection.events() if isinstance(event, MessageReceived)]
        if messages:
            connection.send_consumed(7, messages[-1].sequence)
            got += len(messages)
        connection.data_to_send()
    return got


def compare(label: str, parts: tuple[bytes, ...], count: int, few: int) -> None:
    wire, reads = stream(parts, count)
    few_wire, _ = stream(parts, few)
    message = Message((7,), False, parts)
    size = len(wire) // count
    assert decode(reads) == count and converse(reads) == count
    assert len(CONSTRUCT.parse(few_wire)) == few
    described = {
        "head": few_wire[0],
        "length": len(parts),
        "channel": 7,
        "sizes": {"of": [len(part) for part in parts]},
        "parts": list(parts),
    }
    print(f"\n{label}, {size:,} bytes each")
    yardstick = rate(lambda: CONSTRUCT.parse(few_wire), few)
    line("construct parses", yardstick, size, 1.0)
    for name, work in (("decoder", decode), ("connection and link", converse)):
        speed = rate(lambda work=work: work(reads), count)  # type: ignore[misc]
        line(name, speed, size, speed / yardstick)
    yardstick = rate(lambda: CONSTRUCT.build([described] * few), few)
    line("construct builds", yardstick, size, 1.0)
    speed = rate(lambda: [serialize(message, LAYOUT) for _ in range(count)], count)
    line("serialize", speed, size, speed / yardstick)


if __name__ == "__main__":
    compare("short messages, one part of 20 bytes", (b"x" * 20,), 20_000, 100)
    compare("short messages, two parts", (b'{"a":1}', b"x" * 20), 20_000, 100)
    compare("1 MiB parts", (bytes(1 << 20),), 48, 8)
