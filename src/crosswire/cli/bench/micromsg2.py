"""MicroMsg2's load: batches of SEND frames; acknowledged in batches if durable."""

from __future__ import annotations

from crosswire.cli.bench.contract import BenchConsumer, BenchEnd, BenchProducer, Line
from crosswire.wire.contract import Connection, Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived, MessagesAcknowledged, Opened
from crosswire.wire.micromsg2.extensions import Offer, batch_ack, token
from crosswire.wire.micromsg2.frames import Extension, message_prefix

__all__ = ["consumer", "producer"]

_LARGEST_WINDOW = 32_767


class _BenchPeer(BenchEnd):
    listener = "micromsg2"
    _connection: MicroMsg2Connection

    def connect(self, now: float) -> Connection:
        required = [Extension("pub-sub", {})]
        if self.work.durable:
            required.append(batch_ack(min(self.work.window, _LARGEST_WINDOW)))
        if self.work.target.token is not None:
            required.append(token(self.work.target.token))
        self._connection = MicroMsg2Connection("client", now, offer=Offer(required=tuple(required)))
        return self._connection

    def open(self, line: Line) -> None:
        line.wait_for(Opened)
        line.write()


class _BenchProducer(_BenchPeer, BenchProducer):
    def open(self, line: Line) -> None:
        super().open(line)
        self.is_answered = self.work.durable
        prefix = message_prefix(self.work.destination.encode(), b"")
        self._message = (prefix, self.work.payload)

    @property
    def window(self) -> int:
        return min(self.work.window, _LARGEST_WINDOW)

    def send(self, count: int) -> None:
        self._connection.send_run([self._message] * count)

    def answered(self, events: list[Event]) -> int:
        return sum(len(each.sequences) for each in events if type(each) is MessagesAcknowledged)


class _BenchConsumer(_BenchPeer, BenchConsumer):
    def open(self, line: Line) -> None:
        super().open(line)
        self._connection.send_subscribe(self.work.destination)
        line.write()

    def take(self, events: list[Event]) -> int:
        sequences = [event.sequence for event in events if type(event) is MessageReceived]
        if self.work.durable:
            self._connection.acknowledge(*sequences)
        return len(sequences)


producer = _BenchProducer
consumer = _BenchConsumer
