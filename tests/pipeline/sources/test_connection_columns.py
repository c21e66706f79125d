"""What connections have in common, for many at once as for each."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crosswire.capture.classify import DetectedProtocol, PortMap, classify
from crosswire.capture.flows import FLOW_BYTES, connection_name, end_of
from crosswire.capture.reassembly import ReassembledRun
from crosswire.pipeline.sources.connection_columns import UNKNOWN, BatchConnections, Ports

PORTS = PortMap({9000: "emqp", 0: "relink", 65535: "tls"})
NUMBERS = (0, 1, 5040, 5041, 9000, 9999, 40_000, 47_291, 47_298, 65535)
TIMES = (0, 999, 1000, 10**9 - 1, 10**9, 1_700_000_000_000_001_999, -1, -(10**9) - 1)


def some_flow(random: Random) -> bytes:
    ends = []
    for _ in range(2):
        prefix = random.choice((bytes(10) + b"\xff\xff", b"\xfd" + bytes(11), random.randbytes(12)))
        port = random.choice(NUMBERS).to_bytes(2)
        ends.append(prefix + random.choice((bytes(4), random.randbytes(4))) + port)
    return b"".join(sorted(ends))


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_the_same_as_for_each_alone(random: Random) -> None:
    count = random.randrange(1, 8)
    flows = [some_flow(random) for _ in range(count)]
    openers = [random.choice((-1, 0, 1)) for _ in flows]
    times = [random.choice(TIMES) for _ in flows]
    ports = Ports(PORTS)
    found = BatchConnections.of(
        np.arange(count),
        np.frombuffer(b"".join(flows), np.uint8).reshape(count, FLOW_BYTES),
        np.zeros(count, np.int64),
        np.array(times),
        np.array(openers),
        ports,
    )
    which = np.array(sorted(random.choices(range(count), k=20)), np.int32)
    columns = found.columns(which, ports.known)
    rows = list(zip(*(column.to_pylist() for column in columns.values()), strict=True))
    expected = []
    for flow, opener, time_ns in zip(flows, openers, times, strict=True):
        ends = end_of(flow[:18]), end_of(flow[18:])
        run = ReassembledRun(
            0, None if opener < 0 else opener == 1, True, "data", 0, 0, time_ns, b"", True
        )
        (classified,) = classify([run], ends[0][1], ends[1][1], PORTS)
        connector, acceptor = ends if classified.opener_is_forward else ends[::-1]
        name = connection_name(connector, acceptor, time_ns)
        expected.append((name, *classified.detected, *connector, *acceptor))
    assert rows == [expected[index] for index in which.tolist()]
    assert [found.ports(index) for index in range(count)] == [
        (end_of(flow[:18])[1], end_of(flow[18:])[1]) for flow in flows
    ]


def test_what_ports_don_t_reveal() -> None:
    ports = Ports(PORTS)
    assert ports.known[UNKNOWN] == DetectedProtocol(None, None)
    found = DetectedProtocol("emp", None)
    assert ports.code(found) == ports.code(found) and ports.known[ports.code(found)] == found
