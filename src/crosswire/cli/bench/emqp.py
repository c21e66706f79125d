"""eMQP's load: REQUESTs to a worker, or PUBLISHes to a subscriber."""

from __future__ import annotations

import secrets

from crosswire.cli.bench.contract import BenchConsumer, BenchEnd, BenchProducer, Line, Work
from crosswire.client.adapters.emqp import mechanism_of
from crosswire.errors import ClientError
from crosswire.wire.contract import Connection, Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import (
    PeerReady,
    PublicationReceived,
    Registered,
    ReplyReceived,
    RequestReceived,
)

__all__ = ["consumer", "producer"]


class _BenchPeer(BenchEnd):
    role: str
    _connection: EmqpConnection

    def connect(self, now: float) -> Connection:
        target = self.work.target
        if target.token is not None or target.tls is not None:
            raise ClientError(
                "eMQP has neither tokens nor TLS: its peers are identified by CURVE keys"
            )
        try:
            mechanism = mechanism_of(target.curve_server, target.curve_secret)
        except ValueError as error:
            raise ClientError(str(error)) from None
        self._connection = EmqpConnection(
            self.role,
            now,
            queues=((10, self.work.name),),
            identity=secrets.token_hex(8).encode(),
            mechanism=mechanism,
        )
        return self._connection

    def open(self, line: Line) -> None:
        line.wait_for(PeerReady)


class _BenchClient(_BenchPeer, BenchProducer):
    listener = "emqp-clients"
    role = "client"

    def send(self, count: int) -> None:
        ask, work = self._connection.send_request, self.work
        name, headers, payload = work.name, "guarantee" if work.durable else "", work.payload
        for _ in range(count):
            ask(name, headers, payload)

    def answered(self, events: list[Event]) -> int:
        return sum(type(event) is ReplyReceived for event in events)


class _BenchWorker(_BenchPeer, BenchConsumer):
    listener = "emqp-workers"
    role = "worker"

    def open(self, line: Line) -> None:
        super().open(line)
        line.wait_for(Registered)
        for _ in range(2 * self.work.window):
            self._connection.send_ready()
        line.write()

    def take(self, events: list[Event]) -> int:
        connection = self._connection
        count = 0
        for event in events:
            if type(event) is RequestReceived:
                if "reply-requested" in event.headers:
                    connection.send_reply(b'{"value": 1}', event.msgid)
                connection.send_ready()
                count += 1
        return count


class _BenchPublisher(_BenchPeer, BenchProducer):
    listener = "emqp-publishers"
    role = "publisher"
    is_answered = False

    def send(self, count: int) -> None:
        publish, name, payload = self._connection.send_publish, self.work.name, self.work.payload
        for _ in range(count):
            publish(name, payload)

    def answered(self, events: list[Event]) -> int:  # noqa: ARG002  a PUBLISH has no answer
        return 0


class _BenchSubscriber(_BenchPeer, BenchConsumer):
    listener = "emqp-subscribers"
    role = "subscriber"

    def open(self, line: Line) -> None:
        super().open(line)
        self._connection.send_subscribe(self.work.name)
        line.write()

    def take(self, events: list[Event]) -> int:
        return sum(type(event) is PublicationReceived for event in events)


def producer(work: Work) -> BenchProducer:
    """A publisher for a topic, a client for a queue."""
    return _BenchPublisher(work) if work.is_topic else _BenchClient(work)


def consumer(work: Work) -> BenchConsumer:
    """A subscriber for a topic, a worker for a queue."""
    return _BenchSubscriber(work) if work.is_topic else _BenchWorker(work)
