"""How fast Epoxy is decoded and encoded, compared with the same frames in `construct`.

A frame is a request as real peers write it: headers with conversation id, type and two names, and a
payload that stays bytes. Both sides read the headers, down to the names. A batch is the data of
one read of a socket.
"""

from __future__ import annotations

from typing import Any

import construct as c
from measure import line, rate

from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.decoder import EpoxyDecoder
from crosswire.wire.epoxy.frames import ConfigFrame, Message, MessageType, serialize

READ_BYTES = 256 * 1024
SIZES = {"128 B": 128, "4 KiB": 4096}
NAMES = "examples.calc.Calc", "Calculate"

_HEADERS = c.Struct(
    c.Const(bytes((6, 0, 0))),
    "conversation_id" / c.Int64ul,
    c.Const(bytes((16, 1, 0))),
    "message_type" / c.Enum(c.Int32sl, request=1, response=2, event=3),
    c.Const(bytes((9, 2, 0))),
    "service_name" / c.PascalString(c.VarInt, "utf8"),
    c.Const(bytes((9, 3, 0))),
    "method_name" / c.PascalString(c.VarInt, "utf8"),
    c.Const(b"\x00"),
)
CONSTRUCT = c.GreedyRange(
    c.Struct(
        c.Const(2, c.Int16ul),
        c.Const(b"HR"),
        "headers" / c.Prefixed(c.Int32ul, _HEADERS),
        c.Const(b"PD"),
        "payload" / c.Prefixed(c.Int32ul, c.GreedyBytes),
    )
)


def described(message: Message) -> dict[str, Any]:
    return {
        "headers": {
            "conversation_id": message.conversation_id,
            "message_type": "request",
            "service_name": message.service_name,
            "method_name": message.method_name,
        },
        "payload": message.payload,
    }


def framing(label: str, size: int) -> None:
    frames = [
        Message(number * 2 + 1, MessageType.REQUEST, *NAMES, payload=b"x" * size)
        for number in range(READ_BYTES // size)
    ]
    wire = b"".join(map(serialize, frames))
    frame_bytes = len(wire) // len(frames)
    few = [described(frame) for frame in frames[:100]]
    few_wire = wire[: frame_bytes * len(few)]
    assert CONSTRUCT.build(few) == few_wire
    assert [item for _, _, item in EpoxyDecoder("client").feed(wire)] == frames

    print(f"Epoxy, payload of {label}, {frame_bytes} bytes on the wire")
    ours = rate(lambda: EpoxyDecoder("client").feed(wire), len(frames))
    theirs = rate(lambda: CONSTRUCT.parse(few_wire), len(few))
    line("decode, crosswire", ours, frame_bytes, ours / theirs)
    line("decode, construct", theirs, frame_bytes, 1)
    ours = rate(lambda: [serialize(frame) for frame in frames], len(frames))
    theirs = rate(lambda: CONSTRUCT.build(few), len(few))
    line("encode, crosswire", ours, frame_bytes, ours / theirs)
    line("encode, construct", theirs, frame_bytes, 1)


def conversation(label: str, size: int) -> None:
    """All work of a server: decode, state, event, response, serialize."""
    count = READ_BYTES // size
    wire = b"".join(
        serialize(Message(number * 2 + 1, MessageType.REQUEST, *NAMES, payload=b"x" * size))
        for number in range(count)
    )
    connection = EpoxyConnection("server", 0.0)
    connection.receive_data(serialize(ConfigFrame()), 0.0)
    connection.events()
    connection.data_to_send()

    def work() -> None:
        connection.receive_data(wire, 0.0)
        for event in connection.events():
            connection.send_response(event.conversation_id, event.payload)  # type: ignore[attr-defined]
        connection.data_to_send()

    done = rate(work, count)
    print(f"  payload of {label:<19}{done:>14,.0f}/s")


def main() -> None:
    for label, size in SIZES.items():
        framing(label, size)
    print("Epoxy, requests answered by one connection, without a socket")
    for label, size in SIZES.items():
        conversation(label, size)


if __name__ == "__main__":
    main()
