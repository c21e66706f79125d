"""How fast MicroMsg2 is decoded and encoded, compared with the same frames in `construct`.

A batch is the data of one read of a socket. Framing leaves a message's properties as bytes, on both
sides; the lines below it add the work of a live connection: it parses them, keeps the window and
acknowledges. The last table measures compiled filters.
"""

from __future__ import annotations

import construct as c
from measure import line, rate

from crosswire.hub.filters import Filter
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.decoder import MicroMsg2Decoder
from crosswire.wire.micromsg2.events import MessageReceived
from crosswire.wire.micromsg2.extensions import Offer, batch_ack
from crosswire.wire.micromsg2.frames import Message, serialize

READ_BYTES = 256 * 1024
HINT = {"next_sequence": 1}
DESTINATION = "queue/orders"
PROPERTIES = {"price": 10, "name": "acme"}
RAW_PROPERTIES = b"price:N10;name:Tacme;"
SIZES = {"small: no properties, 20 B of payload": (b"", 20), "128 B": (RAW_PROPERTIES, 87)}

CONSTRUCT = c.GreedyRange(
    c.Struct(
        "flags" / c.Int8ub,
        "sequence" / c.Int16ub,
        "destination" / c.PascalString(c.Int8ub, "utf8"),
        "properties" / c.Prefixed(c.Int16ub, c.GreedyBytes),
        "payload"
        / c.IfThenElse(
            c.this.flags & 8,
            c.Prefixed(c.Int32ub, c.GreedyBytes),
            c.Prefixed(c.Int8ub, c.GreedyBytes),
        ),
    )
)


def framing(label: str, properties: bytes, payload_bytes: int) -> None:
    payload = b"x" * payload_bytes
    size = len(serialize(Message(1, DESTINATION, properties, payload)))
    frames = [
        Message(number, DESTINATION, properties, payload)
        for number in range(1, READ_BYTES // size + 1)
    ]
    wire = b"".join(map(serialize, frames))
    few_wire = b"".join(map(serialize, frames[:100]))
    few = [
        {
            "flags": 0,
            "sequence": frame.sequence,
            "destination": DESTINATION,
            "properties": properties,
            "payload": payload,
        }
        for frame in frames[:100]
    ]
    assert CONSTRUCT.build(few) == few_wire
    assert [item for _, _, item in MicroMsg2Decoder("client", hints=HINT).feed(wire)] == frames

    print(f"MicroMsg2, {label} ({size} B on the wire)")
    ours = rate(lambda: MicroMsg2Decoder("client", hints=HINT).feed(wire), len(frames))
    theirs = rate(lambda: CONSTRUCT.parse(few_wire), len(few))
    line("decode, crosswire", ours, size, ours / theirs)
    line("decode, construct", theirs, size, 1)
    ours = rate(lambda: [serialize(frame) for frame in frames], len(frames))
    theirs = rate(lambda: CONSTRUCT.build(few), len(few))
    line("encode, crosswire", ours, size, ours / theirs)
    line("encode, construct", theirs, size, 1)


def connections(window: int = 1000) -> None:
    """A client sends a full window, the server receives and acknowledges it, repeatedly."""
    client = MicroMsg2Connection("client", 0.0, offer=Offer(required=(batch_ack(window),)))
    server = MicroMsg2Connection("server", 0.0)

    def carry(sender: MicroMsg2Connection, receiver: MicroMsg2Connection) -> None:
        receiver.receive_data(b"".join(sender.data_to_send()), 0.0)

    for sender, receiver in ((client, server), (server, client), (client, server)):
        carry(sender, receiver)
    client.events()
    server.events()
    payload = b"x" * 87

    def round_trip() -> None:
        for _ in range(window):
            client.send_message(DESTINATION, payload, PROPERTIES)
        carry(client, server)
        for event in server.events():
            if isinstance(event, MessageReceived):
                server.acknowledge(event.sequence)
        carry(server, client)
        client.events()

    print("MicroMsg2, two connections, 128 B with two properties")
    line("sent, received, acknowledged", rate(round_trip, window), 128, 1)


def filters() -> None:
    print("Filters, one message with three properties")
    message = {"price": 12, "name": "the acme corporation", "urgent": True}
    for text in ("price>N10", "name&Tacme", "price>N10;name&Tacme;urgent=Ttrue"):
        holds = Filter.parse(text).compile()
        assert holds(message)
        line(text, rate(lambda holds=holds: holds(message), 1), len(text), 1)


def main() -> None:
    for label, (properties, payload_bytes) in SIZES.items():
        framing(label, properties, payload_bytes)
    connections()
    filters()


if __name__ == "__main__":
    main()
