"""How fast the columnar scanners read captures, compared with the decoders, on one core.

The scanner gives boundaries, fixed fields and slices as columns; the decoder an object for every
frame. Messages carry 512 bytes. `many` has the same bytes in connections of one message each, with
their handshakes. A plain copy of the bytes shows the memory's bandwidth. Times are CPU times, so
that other programs on the machine matter less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from measure import line

from crosswire.pipeline.decode.scanners.emp import EmpScanner
from crosswire.pipeline.decode.scanners.emqp import EmqpScanner
from crosswire.pipeline.decode.scanners.epoxy import EpoxyScanner
from crosswire.pipeline.decode.scanners.micromsg2 import MicroMsg2Scanner
from crosswire.pipeline.decode.scanners.relink import RelinkScanner
from crosswire.pipeline.decode.scanners.scanner import END, STOP_REASON, BulkScanner
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.emp import frames as emp
from crosswire.wire.emqp import frames as emqp
from crosswire.wire.epoxy import frames as epoxy
from crosswire.wire.micromsg2 import frames as micromsg2
from crosswire.wire.micromsg2.layout import LAST_SEQUENCE
from crosswire.wire.relink import frames as relink
from crosswire.wire.relink import handshake as relink_handshake
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.zmtp import frames as zmtp

BYTES = 512
WIRE_BYTES = 64 * 1024 * 1024
DECODED_BYTES = 1024 * 1024
PAYLOAD = bytes(range(256)) * (BYTES // 256)

Message = Callable[[int], bytes]
"""The n-th message of a connection, from 0."""


def of_emp() -> tuple[bytes, Message]:
    body = emp.serialize_call("$publish", b'{"destination":"queue/q","text":"%s"}' % (b"x" * BYTES))
    hello = emp.serialize(emp.Hello(1))
    return hello, lambda number: emp.serialize(emp.Request(number + 1, body))


def of_emqp() -> tuple[bytes, Message]:
    metadata = zmtp.serialize_metadata({"Socket-Type": b"DEALER", "Identity": b"me"})
    opening = zmtp.serialize(zmtp.Greeting("NULL")) + zmtp.serialize_command("READY", metadata)

    def message(number: int) -> bytes:
        request = emqp.Request(f"{number:036}", "default", "reply-requested", PAYLOAD)
        return zmtp.serialize_message(emqp.serialize(request))

    return opening, message


def of_relink() -> tuple[bytes, Message]:
    hello = relink_handshake.ConnectorHello(endpoint="queue/orders", connector_id_size=4)
    version = relink_handshake.ConnectorVersion(0)
    opening = b"".join(map(relink_handshake.serialize_handshake, (version, hello)))
    layout = packet_layout("connector", 4, 1)

    def message(number: int) -> bytes:
        packet = relink.Message((number % 16,), False, (PAYLOAD,))
        return b"".join(relink.serialize(packet, layout))

    return opening, message


def of_epoxy() -> tuple[bytes, Message]:
    def message(number: int) -> bytes:
        kind = epoxy.MessageType.REQUEST
        return epoxy.serialize(
            epoxy.Message(2 * number + 1, kind, "shop.Orders", "Place", payload=PAYLOAD)
        )

    return epoxy.serialize(epoxy.ConfigFrame()), message


def of_micromsg2() -> tuple[bytes, Message]:
    opening = 2 * micromsg2.serialize(micromsg2.Handshake(1, 0, 0, "me"))
    properties = b"content-type:Tapplication/json;priority:N4;"

    def message(number: int) -> bytes:
        sequence = number % LAST_SEQUENCE + 1
        frame = micromsg2.Message(sequence, "queue/orders", properties, PAYLOAD)
        return micromsg2.serialize(frame)

    return opening, message


CASES: dict[str, tuple[BulkScanner, Callable[[], tuple[bytes, Message]]]] = {
    "emp": (EmpScanner(), of_emp),
    "emqp": (EmqpScanner(), of_emqp),
    "relink": (RelinkScanner(), of_relink),
    "epoxy": (EpoxyScanner(), of_epoxy),
    "micromsg2": (MicroMsg2Scanner(), of_micromsg2),
}


def rate(work: Callable[[], object], amount: int, *, seconds: float = 1.0) -> float:
    """Units in a second of one core."""
    work()
    rounds, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        work()
        rounds += 1
    return rounds * amount / spent


def scan(scanner: BulkScanner, sender: str, data: np.ndarray, ends: np.ndarray) -> int:
    at = np.concatenate(([0], ends[:-1]))
    states = scanner.new_states(sender, len(ends))
    columns = scanner.scan(data, at, ends, states)
    assert (states[:, STOP_REASON] == END).all()
    return len(columns)


def bench(name: str) -> None:
    scanner, make = CASES[name]
    entry = protocol(name)
    sender = entry.roles[0]
    opening, message = make()
    size = len(message(0))
    count = WIRE_BYTES // size
    messages = [message(number) for number in range(count)]
    few = opening + b"".join(messages[: DECODED_BYTES // size])
    data = np.frombuffer(opening + b"".join(messages), np.uint8)
    small = opening + messages[0]
    connections = WIRE_BYTES // len(small)
    many = np.frombuffer(small * connections, np.uint8)
    many_ends = np.arange(1, connections + 1) * len(small)
    rows = scan(scanner, sender, data, np.array([len(data)]))

    print(f"{entry.title}, {BYTES} B in messages of {size} B; {rows:,} rows of {count:,} messages")
    decoded = rate(lambda: entry.decoder(sender).feed(few), len(few))
    scanned = rate(partial(scan, scanner, sender, data, np.array([len(data)])), len(data))
    split = rate(partial(scan, scanner, sender, many, many_ends), len(many))
    copied = rate(data.copy, len(data))
    for title, done in {
        "bulk scanner": scanned,
        f"bulk scanner, many of {len(small)} B": split,
        "decoder": decoded,
        "copy of the bytes": copied,
    }.items():
        line(title, done / size, size, done / decoded)


def main() -> None:
    for name in PROTOCOL_NAMES:
        bench(name)


if __name__ == "__main__":
    main()
