"""A small broker for the tests: our connections on real sockets, and just enough logic.

It keeps nothing on disk and retries nothing; it hands jobs to workers, results to clients,
schedules to schedulers and publications to subscribers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.emqp.events import (
    AdminRequested,
    CommandIgnored,
    PeerInformed,
    PublishReceived,
    ReplyReceived,
    RequestReceived,
    ScheduleReceived,
    ShutdownRequested,
    SlotOffered,
    UnscheduleReceived,
)
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.states import LISTENERS, State
from crosswire.wire.zmtp.events import Subscribed, Unsubscribed
from crosswire.wire.zmtp.mechanisms import Mechanism


class Guest:
    """A peer at one of the broker's doors."""

    session: Session

    def __init__(self, broker: TestBroker, listener: str) -> None:
        self._broker = broker
        self.listener = listener
        self.queues: set[str] = set()
        self.prefixes: set[bytes] = set()
        self.role = ""

    @property
    def connection(self) -> EmqpConnection:
        connection = self.session.connection
        assert isinstance(connection, EmqpConnection)
        return connection

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            self._broker.seen.append(event)
            self._broker.handle(self, event)
        self._broker.changed.set()

    def handle_drain(self) -> None: ...


class TestBroker:
    """`seen` are all events of all guests; `until` waits for something to become true."""

    __test__ = False

    def __init__(
        self, *, limits: EmqpLimits | None = None, mechanism: Mechanism | None = None
    ) -> None:
        self._limits = limits
        self._mechanism = mechanism
        self._servers: list[asyncio.Server] = []
        self.ports: dict[str, int] = {}
        self.guests: list[Guest] = []
        self._sessions: list[Session] = []
        self.seen: list[Event] = []
        self.changed = asyncio.Event()
        self.jobs: deque[tuple[Guest, RequestReceived]] = deque()
        self.asked: dict[str, tuple[Guest, bool]] = {}
        self.refuse_workers = False

    async def __aenter__(self) -> TestBroker:
        for listener in LISTENERS:
            await self.listen(listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        # A connection that has ended may have its socket open for a moment longer.
        for session in self._sessions:
            session.abort()
        if open_sockets := [each.gone for each in self._sessions if each.opened]:
            await asyncio.wait(open_sockets)
        assert not self.guests

    async def listen(self, listener: str, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: self._accept(listener), "127.0.0.1", port)
        self._servers.append(server)
        self.ports[listener] = server.sockets[0].getsockname()[1]

    def _accept(self, listener: str) -> Session:
        guest = Guest(self, listener)
        self.guests.append(guest)

        def connect(now: float) -> EmqpConnection:
            return EmqpConnection(
                "broker",
                now,
                listener=listener,
                limits=self._limits,
                mechanism=self._mechanism,
                next_id=lambda: str(uuid4()),
                unix_offset_s=time.time() - now,
            )

        session = Session(connect, guest)
        self._sessions.append(session)
        return session

    def at(self, listener: str) -> list[Guest]:
        return [guest for guest in self.guests if guest.listener == listener]

    @property
    def workers(self) -> list[Guest]:
        return [guest for guest in self.at("emqp-workers") if guest.role == "worker"]

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    async def until(self, true: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        async with asyncio.timeout(timeout_s):
            while not (answer := true()):
                self.changed.clear()
                await self.changed.wait()
        return answer

    # What a broker does.

    def handle(self, guest: Guest, event: Event) -> None:
        connection = guest.connection
        match event:
            case PeerInformed(msgid=msgid, peer=peer, queues=queues):
                if not self.refuse_workers:
                    guest.role = peer
                    guest.queues = {name for _, name in queues} or {"default"}
                    connection.send_ack(msgid)
            case RequestReceived(msgid=msgid, headers=headers):
                self.asked[msgid] = guest, Headers.parse(headers).reply_requested
                connection.send_receipt(msgid)
                self.jobs.append((guest, event))
                self._hand_out()
            case SlotOffered():
                self._hand_out()
            case ReplyReceived(message=message, request=str(request)):
                client, wanted = self.asked.pop(request, (None, False))
                if client is not None and wanted and not client.connection.closed:
                    client.connection.send_result(message, request)
                    client.session.wake()
            case PublishReceived(topic=topic, message=message):
                self.publish(topic, message)
            case Subscribed(topic=prefix):
                guest.prefixes.add(prefix)
            case Unsubscribed(topic=prefix):
                guest.prefixes.discard(prefix)
            case ScheduleReceived() | UnscheduleReceived():
                self._forward(event)
            case AdminRequested(command=command):
                if command != "HELLO":
                    connection.send_answer(b'{"command": "%s"}' % command.encode())
            case ShutdownRequested(msgid=msgid):
                connection.send_ack(msgid)
            case CommandIgnored():
                pass
            case ConnectionClosed() | ConnectionFailed():
                self.guests.remove(guest)

    def publish(self, topic: str, message: bytes) -> None:
        for guest in self.at("emqp-subscribers"):
            if any(topic.encode().startswith(prefix) for prefix in guest.prefixes):
                guest.connection.send_publication(topic, message)
                guest.session.wake()

    def _hand_out(self) -> None:
        for _ in range(len(self.jobs)):
            client, event = self.jobs.popleft()
            for worker in self.workers:
                connection = worker.connection
                free = connection.state is State.REGISTERED and connection.free_slots
                if free and event.queue in worker.queues:
                    connection.send_request(
                        event.queue, event.headers, event.message, msgid=event.msgid
                    )
                    worker.session.wake()
                    break
            else:
                self.jobs.append((client, event))

    def _forward(self, event: ScheduleReceived | UnscheduleReceived) -> None:
        for guest in self.at("emqp-clients"):
            if guest.role == "scheduler" and guest.connection.state is State.REGISTERED:
                send = guest.connection.send_schedule
                if isinstance(event, UnscheduleReceived):
                    send = guest.connection.send_unschedule
                send(
                    event.queue,
                    event.headers,
                    event.message,
                    interval_s=event.interval_s,
                    cron=event.cron,
                    msgid=event.msgid,
                )
                guest.session.wake()
