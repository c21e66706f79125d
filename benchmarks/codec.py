"""How fast EMP is decoded and encoded, compared with the same frames in `construct`.

Framing only: the JSON in a message is neither parsed nor written, by either side. A batch is the
data of one read of a socket. The last table shows the cost of parsing the JSON, with msgspec (which
we use), orjson and the standard library.
"""

from __future__ import annotations

import json

import construct as c
import msgspec
import orjson
from measure import line, rate

from crosswire.wire.emp.decoder import EmpDecoder
from crosswire.wire.emp.frames import Request, serialize

READ_BYTES = 256 * 1024
SIZES = {"128 B": 128, "4 KiB": 4096}

CONSTRUCT = c.GreedyRange(
    c.Prefixed(
        c.Int32ub,
        c.Struct(
            "type"
            / c.Enum(c.Int8ub, hello=0, bye=1, ping=2, pong=3, error=4, request=5, response=6),
            c.Padding(3),
            "id" / c.Int64ub,
            "data" / c.GreedyBytes,
        ),
    )
)


def framing(label: str, size: int) -> None:
    frames = [Request(number, b"x" * (size - 16)) for number in range(1, READ_BYTES // size + 1)]
    wire = b"".join(map(serialize, frames))
    few = [{"type": "request", "id": frame.id, "data": frame.body} for frame in frames[:100]]
    few_wire = b"".join(map(serialize, frames[:100]))
    assert CONSTRUCT.build(few) == few_wire
    assert [item for _, _, item in EmpDecoder("client").feed(wire)] == frames

    print(f"EMP, {label} on the wire")
    ours = rate(lambda: EmpDecoder("client").feed(wire), len(frames))
    theirs = rate(lambda: CONSTRUCT.parse(few_wire), len(few))
    line("decode, crosswire", ours, size, ours / theirs)
    line("decode, construct", theirs, size, 1)
    ours = rate(lambda: [serialize(frame) for frame in frames], len(frames))
    theirs = rate(lambda: CONSTRUCT.build(few), len(few))
    line("encode, crosswire", ours, size, ours / theirs)
    line("encode, construct", theirs, size, 1)


def application_data() -> None:
    body = b'{"op":"$publish","data":{"destination":"queue/orders","json":{"id":17,"item":"tea"}}}'
    request = Request(1, body)
    print("EMP, the JSON of a request of 85 bytes")
    slowest = rate(lambda: json.loads(body), 1)
    for name, work in {
        "msgspec, as we read it": request.call,
        "msgspec, to Python values": lambda: msgspec.json.decode(body),
        "orjson, to Python values": lambda: orjson.loads(body),
        "json, to Python values": lambda: json.loads(body),
    }.items():
        done = rate(work, 1)
        line(name, done, len(body), done / slowest)


def main() -> None:
    for label, size in SIZES.items():
        framing(label, size)
    application_data()


if __name__ == "__main__":
    main()
