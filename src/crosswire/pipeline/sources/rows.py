"""Rows of bronze.wire from the segments of a flow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Any, Final

import msgspec

from crosswire.errors import DecoderStateError
from crosswire.lake.schemas import BACKWARD, FORWARD
from crosswire.pipeline.sources.classify import Classified, Classifier, PortMap
from crosswire.pipeline.sources.reassembly import REORDER_BYTES, Flow, Segment

__all__ = ["NODE", "End", "FlowRows", "address_of", "end_of", "name_of"]

NODE: Final = "pcap"
"""What stands for the hub's node where there is none."""

End = tuple[str, int]
"""Address and port."""

_IPV4: Final = bytes(10) + b"\xff\xff"
"""What an IPv4 address is mapped into."""
_MOST_ADDRESSES: Final = 65_536


def end_of(end: bytes) -> End:
    """Of a half of a flow's key."""
    return address_of(end[:16]), int.from_bytes(end[16:])


@lru_cache(_MOST_ADDRESSES)
def address_of(address: bytes) -> str:
    """As people write it."""
    if address[:12] == _IPV4:
        return ".".join(map(str, address[12:]))
    return str(IPv6Address(address))


class _FlowState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `FlowRows.dump()`."""

    version: int
    flow: Any
    classifier: Any
    number: int
    seq: int
    name: str


_STATE: Final = msgspec.msgpack.Decoder(_FlowState)
_STATE_VERSION: Final = 1


class FlowRows:
    """Turns the segments of one flow, given in order, into rows of bronze.wire."""

    def __init__(self, flow: bytes, ports: PortMap, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._forward, self._backward = end_of(flow[:18]), end_of(flow[18:])
        self._flow = Flow(reorder_bytes=reorder_bytes)
        self._classifier = Classifier(self._forward[1], self._backward[1], ports)
        self._number, self._seq = -1, 0
        self._name = ""

    def add(self, segment: Segment) -> Iterator[tuple[Any, ...]]:
        """To be used up before the next one is added."""
        for run in self._flow.add(segment):
            for item in self._classifier.add(run):
                yield self._row(item)

    def finish(self) -> Iterator[tuple[Any, ...]]:
        """The flow has no more segments."""
        for run in self._flow.finish():
            for item in self._classifier.add(run):
                yield self._row(item)
        for item in self._classifier.finish():
            yield self._row(item)

    def is_settled(self, now_ns: int) -> bool:
        """Nothing more can come of what was seen of it."""
        return self._flow.is_settled(now_ns)

    def _row(self, item: Classified) -> tuple[Any, ...]:
        run = item.run
        ends = (self._forward, self._backward)
        connector, acceptor = ends if item.opener_is_forward else ends[::-1]
        if run.connection != self._number:
            self._number, self._seq = run.connection, 0
            self._name = name_of(connector, acceptor, run.time_ns)
        row = _wire_row(item, self._name, self._seq, connector, acceptor)
        self._seq += 1
        return row

    def dump(self) -> bytes:
        """The whole state between two segments, to be given to `load`: small, versioned."""
        return msgspec.msgpack.encode(
            _FlowState(
                _STATE_VERSION,
                self._flow.save(),
                self._classifier.save(),
                self._number,
                self._seq,
                self._name,
            )
        )

    def load(self, state: bytes) -> None:
        """Go on where `dump` was called. Raises DecoderStateError."""
        try:
            saved = _STATE.decode(state)
            if saved.version != _STATE_VERSION:
                raise ValueError(f"it has version {saved.version}, this is {_STATE_VERSION}")
            self._flow.restore(saved.flow)
            self._classifier.restore(saved.classifier)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise DecoderStateError(f"state of a flow is damaged: {error}") from None
        self._number, self._seq, self._name = saved.number, saved.seq, saved.name


def _wire_row(
    item: Classified,
    name: str,
    seq: int,
    connector: End,
    acceptor: End,
) -> tuple[Any, ...]:
    run = item.run
    return (
        NODE,
        seq,
        name,
        FORWARD if item.forward else BACKWARD,
        run.kind,
        run.offset,
        run.length,
        run.time_ns // 1000,
        run.data,
        run.late,
        item.detected.protocol,
        item.detected.listener,
        *connector,
        *acceptor,
    )


def name_of(connector: End, acceptor: End, time_ns: int) -> str:
    """Unique, since two connections between the same ends can't begin at once."""
    (here, here_port), (there, there_port) = connector, acceptor
    seconds, rest = divmod(time_ns // 1000, 1_000_000)
    return f"{here}:{here_port}-{there}:{there_port}@{seconds}.{rest:06}"
