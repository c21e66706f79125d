"""EMP's load: `$publish` requests one way, `$deliver` requests and their answers the other."""

from __future__ import annotations

from typing import Final

import msgspec

from crosswire.cli.bench.contract import BenchConsumer, BenchEnd, BenchProducer, Line
from crosswire.errors import RequestFailed
from crosswire.wire.contract import Connection, ConnectionOpened, Event
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.events import RequestReceived, ResponseReceived

__all__ = ["consumer", "producer"]

_encode: Final = msgspec.json.encode
_LARGEST_WINDOW: Final = 65_535


class _BenchPeer(BenchEnd):
    listener = "emp"
    _connection: EmpConnection

    def connect(self, now: float) -> Connection:
        self._connection = EmpConnection("client", now)
        return self._connection

    def open(self, line: Line) -> None:
        line.wait_for(ConnectionOpened)
        if self.work.target.token is not None:
            self._ask(line, "$authenticate", token=self.work.target.token)

    def _ask(self, line: Line, op: str, **data: object) -> None:
        self._connection.send_request(op, _encode(data))
        line.write()
        _check(line.wait_for(ResponseReceived))


def _check(response: ResponseReceived) -> None:
    if not response.succeeded:
        raise RequestFailed(response.code, response.description)


class _BenchProducer(_BenchPeer, BenchProducer):
    def open(self, line: Line) -> None:
        super().open(line)
        body = {"destination": self.work.destination, "text": self.work.payload.decode()}
        self._data = _encode(body)

    def send(self, count: int) -> None:
        ask, data = self._connection.send_request, self._data
        for _ in range(count):
            ask("$publish", data)

    def answered(self, events: list[Event]) -> int:
        count = 0
        for event in events:
            if type(event) is ResponseReceived:
                _check(event)
                count += 1
        return count


class _BenchConsumer(_BenchPeer, BenchConsumer):
    def open(self, line: Line) -> None:
        super().open(line)
        # Twice the producer's window: deliveries stay in it until their answers have returned.
        self._ask(
            line,
            "$subscribe",
            destination=self.work.destination,
            window=min(2 * self.work.window, _LARGEST_WINDOW),
        )

    def take(self, events: list[Event]) -> int:
        answer = self._connection.send_success
        count = 0
        for event in events:
            if type(event) is RequestReceived:
                answer(event.id)
                count += 1
        return count


producer = _BenchProducer
consumer = _BenchConsumer
