"""Relink's load: one channel each way, one `consumed` for all messages of a read."""

from __future__ import annotations

from crosswire.cli.bench.contract import BenchConsumer, BenchEnd, BenchProducer, Line
from crosswire.errors import ClientError
from crosswire.wire.contract import Connection, Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import Acknowledged, LinkOpened, MessageReceived
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link

__all__ = ["consumer", "producer"]


class _BenchPeer(BenchEnd):
    listener = "relink"
    _link: Link

    def _endpoint(self) -> str:
        return self.work.destination

    def connect(self, now: float) -> Connection:
        if self.work.target.token is not None:
            raise ClientError("Relink identifies peers by certificates only: use --cert and --key")
        self._link = Link("connector", LinkTerms(endpoint=self._endpoint()))
        return RelinkConnection("connector", now, link=self._link)

    def open(self, line: Line) -> None:
        line.wait_for(LinkOpened)


class _BenchProducer(_BenchPeer, BenchProducer):
    def open(self, line: Line) -> None:
        super().open(line)
        self._parts = (self.work.payload,)

    @property
    def window(self) -> int:
        return min(self.work.window, self._link.limits.window)

    def send(self, count: int) -> None:
        self._link.send_run(0, [self._parts] * count)

    def answered(self, events: list[Event]) -> int:
        count = 0
        for event in events:
            if type(event) is Acknowledged and event.acknowledgement == "consumed":
                count += (event.last - event.first) % (1 << 32) + 1
        return count


class _BenchConsumer(_BenchPeer, BenchConsumer):
    def _endpoint(self) -> str:
        return f"{self.work.destination}?{'subscribe' if self.work.is_topic else 'consume'}"

    def take(self, events: list[Event]) -> int:
        sequences = [event.sequence for event in events if type(event) is MessageReceived]
        if sequences:
            self._link.consume(0, sequences[-1])
        return len(sequences)


producer = _BenchProducer
consumer = _BenchConsumer
