"""Rows of bronze.wire from the segments of one flow, with state that a stream can keep.

The batch pipeline makes the same rows of many flows at once: `assembler`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from crosswire.capture.classify import Classified, Classifier, PortMap
from crosswire.capture.flows import END_BYTES, FlowEnd, connection_name, end_of
from crosswire.capture.reassembly import REORDER_BYTES, Flow, Segment
from crosswire.errors import DecoderStateError
from crosswire.wire.runs import BACKWARD, FORWARD

__all__ = ["NODE", "FlowRows"]

NODE: Final = "pcap"
"""The column `node` of captured connections, which belong to no hub."""


class _FlowState(msgspec.Struct, array_like=True, frozen=True):
    """Layout of `FlowRows.dump()`."""

    version: int
    flow: Any
    classifier: Any
    number: int
    seq: int
    name: str


_STATE: Final = msgspec.msgpack.Decoder(_FlowState)
_STATE_VERSION: Final = 3


class FlowRows:
    """Turns the segments of one flow, in the order of time, into rows of bronze.wire."""

    def __init__(self, flow: bytes, ports: PortMap, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._forward, self._backward = end_of(flow[:END_BYTES]), end_of(flow[END_BYTES:])
        self._flow = Flow(reorder_bytes=reorder_bytes)
        self._classifier = Classifier(self._forward[1], self._backward[1], ports)
        self._number, self._seq = -1, 0
        self._name = ""

    def add(self, segment: Segment) -> Iterator[tuple[Any, ...]]:
        """The rows that this segment completes; consume them before adding the next one."""
        for run in self._flow.add(segment):
            for item in self._classifier.add(run):
                yield self._row(item)

    def finish(self) -> Iterator[tuple[Any, ...]]:
        """The remaining rows of a flow that has no more segments."""
        for run in self._flow.finish():
            for item in self._classifier.add(run):
                yield self._row(item)
        for item in self._classifier.finish():
            yield self._row(item)

    def is_settled(self, now_ns: int) -> bool:
        """Whether the flow's last connection ended so long ago that its state can be dropped."""
        return self._flow.is_settled(now_ns)

    def _row(self, item: Classified) -> tuple[Any, ...]:
        run = item.run
        ends = (self._forward, self._backward)
        connector, acceptor = ends if item.opener_is_forward else ends[::-1]
        if run.connection != self._number:
            self._number, self._seq = run.connection, 0
            self._name = connection_name(connector, acceptor, run.time_ns)
        row = _wire_row(item, self._name, self._seq, connector, acceptor)
        self._seq += 1
        return row

    def dump(self) -> bytes:
        """The whole state between two segments, versioned, for `load`."""
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
        """Continue where `dump` was called. Raises DecoderStateError for damaged state, or that of
        another version."""
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
    connector: FlowEnd,
    acceptor: FlowEnd,
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
