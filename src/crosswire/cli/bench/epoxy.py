"""Epoxy's load: `crosswire.Hub.Publish` one way, events and `crosswire.Hub.Settle` the other."""

from __future__ import annotations

from typing import Any

from crosswire.bond import hub_module, marshal
from crosswire.cli.bench.contract import BenchConsumer, BenchEnd, BenchProducer, Line
from crosswire.errors import RequestFailed
from crosswire.wire.contract import Connection, ConnectionOpened, Event
from crosswire.wire.epoxy.comm import marshal_credentials, unmarshal_error
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.epoxy.events import EventReceived, ResponseReceived

__all__ = ["consumer", "producer"]

_HUB = "crosswire.Hub"
_LARGEST_WINDOW = 65_535


class _BenchPeer(BenchEnd):
    listener = "epoxy"
    _connection: EpoxyConnection

    def connect(self, now: float) -> Connection:
        token = self.work.target.token
        self._credentials = None if token is None else marshal_credentials(token)
        self._connection = EpoxyConnection("client", now)
        return self._connection

    def open(self, line: Line) -> None:
        line.wait_for(ConnectionOpened)

    def _ask(self, method: str, payload: bytes) -> None:
        self._connection.send_request(_HUB, method, payload, layer_data=self._credentials)


def _marshalled(name: str, **fields: Any) -> bytes:
    struct = hub_module().struct(f"crosswire.{name}")
    return marshal.marshal(struct.python_class(**fields), struct)


def _check(response: ResponseReceived) -> bytes:
    if response.error is not None:
        error = unmarshal_error(response.error)
        raise RequestFailed(error.error_name, error.message)
    return response.payload or b""


class _BenchProducer(_BenchPeer, BenchProducer):
    def open(self, line: Line) -> None:
        super().open(line)
        self._publication = _marshalled(
            "Publication", destination=self.work.destination, payload=self.work.payload
        )

    def send(self, count: int) -> None:
        publication = self._publication
        for _ in range(count):
            self._ask("Publish", publication)

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
        work = self.work
        self._ask(
            "Subscribe",
            _marshalled(
                "Subscription",
                destination=work.destination,
                window=min(2 * work.window, _LARGEST_WINDOW),
            ),
        )
        line.write()
        subscribed = hub_module().struct("crosswire.Subscribed")
        answer = marshal.unmarshal(_check(line.wait_for(ResponseReceived)), subscribed)
        self._subscription = answer.subscription
        self._delivery = hub_module().struct("crosswire.Delivery")

    def take(self, events: list[Event]) -> int:
        read, kind = marshal.unmarshal, self._delivery
        ids = [read(event.payload, kind).id for event in events if type(event) is EventReceived]
        if ids:
            self._ask("Settle", _marshalled("Settlement", subscription=self._subscription, ids=ids))
        return len(ids)


producer = _BenchProducer
consumer = _BenchConsumer
