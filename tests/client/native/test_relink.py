"""The Relink client on real sockets, with a small listener and many cuts."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import pytest

from crosswire.client.native.dial import Backoff
from crosswire.client.native.relink import Received, RelinkClient
from crosswire.errors import (
    ConnectFailed,
    ConnectionLost,
    LinkLost,
    LocalProtocolError,
    RequestFailed,
    RequestTimeout,
)
from crosswire.session import Session
from crosswire.wire.contract import Event
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.events import (
    Acknowledged,
    CommitReceived,
    ConnectionClosed,
    ConnectionFailed,
    HandshakeReceived,
    MessageReceived,
    ShutdownReceived,
)
from crosswire.wire.relink.frames import RelinkLimits
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.conftest import TlsPair

SOON = Backoff(0.01, 0.02)


class Listener:
    """Keeps links over connections, logs what comes and consumes it unless set not to."""

    def __init__(self) -> None:
        self.epoch = 1_700_000_000_000_000
        self.links: dict[int, Link] = {}
        self.lines: set[Line] = set()
        self.log: dict[int, list[bytes]] = defaultdict(list)
        self.undecided: dict[tuple[int, int], bytes] = {}
        self.acknowledged: list[tuple[str, int]] = []
        self.consumes = True
        self.commits = True
        self.answers_shutdown = True
        self.limits: RelinkLimits | None = None
        self.changed = asyncio.Event()
        self._ids = count(1)
        self._server: asyncio.Server | None = None
        self.port = 0

    async def listen(self, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Line(self).made, "127.0.0.1", 0, ssl=tls)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Cut all connections, without a goodbye."""
        for line in list(self.lines):
            line.session.transport.abort()
        await self.until(lambda: not self.lines)

    def restart(self) -> None:
        """Save and restore all links; there must be no connection."""
        self.links = {link.id: Link.restore(link.save()) for link in self.links.values()}

    def forget(self) -> None:
        self.links.clear()
        self.epoch += 1

    def link_for(self, event: HandshakeReceived) -> Link | None:
        hello = event.hello
        if hello.epoch == self.epoch and hello.link in self.links:
            return self.links[hello.link]
        if hello.require_old_link:
            return None
        terms = LinkTerms.of(hello)
        new_id = next(self._ids)
        link = Link("listener", terms, epoch=self.epoch, id=new_id, limits=self.limits)
        self.links[new_id] = link
        return link

    @property
    def link(self) -> Link:
        (link,) = self.links.values()
        return link

    def send(self, channel: int, *parts: bytes) -> None:
        self.link.send(channel, parts)
        if self.link.transactions:
            self.link.commit(channel)
        self.wake()

    def wake(self) -> None:
        for line in self.lines:
            line.session.wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Line:
    """One connection of the listener."""

    session: Session

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        limits = listener.limits
        self.made = Session(lambda now: RelinkConnection("listener", now, limits=limits), self)
        listener.lines.add(self)

    def handle_drain(self) -> None: ...

    def handle_events(self, events: list[Event]) -> None:
        listener, connection = self.listener, self.session.connection
        assert isinstance(connection, RelinkConnection)
        for event in events:
            match event:
                case HandshakeReceived():
                    if event.hello.endpoint == "unknown":
                        connection.refuse("no such endpoint")
                    elif link := listener.link_for(event):
                        connection.accept(link)
                    else:
                        connection.deny_link(listener.epoch)
                case MessageReceived(channel=channel, sequence=sequence, parts=parts):
                    if connection.link.peer_transactions:
                        listener.undecided[channel, sequence] = b"|".join(parts)
                        connection.send_received(channel, sequence)
                    else:
                        listener.log[channel].append(b"|".join(parts))
                        if listener.consumes:
                            connection.send_consumed(channel, sequence)
                case CommitReceived(channel=channel, first=first, last=last):
                    taken = [listener.undecided[channel, at] for at in range(first, last + 1)]
                    if listener.commits:
                        listener.log[channel] += taken
                    connection.link.settle(channel, last, committed=listener.commits)
                case Acknowledged(acknowledgement=kind, first=first, last=last):
                    listener.acknowledged += [(kind, at) for at in range(first, last + 1)]
                case ShutdownReceived():
                    if listener.answers_shutdown:
                        connection.send_shutdown()
                case ConnectionClosed() | ConnectionFailed():
                    listener.lines.discard(self)
        listener.changed.set()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.listen()
    yield listener
    await listener.close()


def client_of(listener: Listener, **options: Any) -> RelinkClient:
    return RelinkClient("127.0.0.1", listener.port, "e", backoff=SOON, **options)


async def take(client: RelinkClient, channel: int, number: int) -> list[Received]:
    receiver = client.receiver(channel)
    return [await asyncio.wait_for(anext(receiver), 10) for _ in range(number)]


# --------------------------------------------------------------------------------------- sending


async def test_messages_are_sent_and_consumed(listener: Listener) -> None:
    async with client_of(listener) as client:
        await client.sender(3).send(b"a", b"b")
        await client.sender(3).send(b"c")
        await client.sender(3).consumed(timeout_s=5)
        assert listener.log[3] == [b"a|b", b"c"]


async def test_the_window_holds_the_sender_back(listener: Listener) -> None:
    listener.consumes = False
    async with client_of(listener, limits=RelinkLimits(window=2)) as client:
        sender = client.sender()
        await sender.send(b"1")
        await sender.send(b"2")
        third = asyncio.create_task(sender.send(b"3"))
        await listener.until(lambda: len(listener.log[0]) == 2)
        assert not third.done()
        listener.link.consume(0, 0)
        listener.wake()
        assert await third == 3
        await listener.until(lambda: len(listener.log[0]) == 3)
        listener.link.consume(0, 2)
        listener.wake()
        await sender.consumed(timeout_s=5)


async def test_consumption_can_be_waited_for_in_vain(listener: Listener) -> None:
    listener.consumes = False
    async with client_of(listener, close_timeout_s=5) as client:
        await client.sender().send(b"x")
        with pytest.raises(RequestTimeout, match="not consumed"):
            await client.sender().consumed(timeout_s=0.05)
        await listener.until(lambda: bool(listener.log[0]))
        listener.link.consume(0, 0)


async def test_multicast_reaches_every_channel(listener: Listener) -> None:
    async with client_of(listener) as client:
        await client.multicast([1, 1, 2], b"all")
        await client.sender(1).consumed(timeout_s=5)
        await client.sender(2).consumed(timeout_s=5)
        assert dict(listener.log) == {1: [b"all", b"all"], 2: [b"all"]}


async def test_a_channel_is_closed_and_opened_again(listener: Listener) -> None:
    async with client_of(listener) as client:
        sender = client.sender()
        for text in (b"first", b"second"):
            await sender.send(text)
            await sender.close(timeout_s=5)
        assert listener.log[0] == [b"first", b"second"]


async def test_a_large_message_arrives_whole(listener: Listener) -> None:
    part = bytes(range(256)) * 65536
    async with client_of(listener) as client:
        await client.sender().send(b"head", part)
        await client.sender().consumed(timeout_s=10)
        assert listener.log[0] == [b"head|" + part]


# ---------------------------------------------------------------------------------- transactions


async def test_a_transaction_is_committed(listener: Listener) -> None:
    async with client_of(listener, connector_transactions=True) as client:
        async with client.sender().transaction() as transaction:
            await transaction.send(b"1")
            await transaction.send(b"2")
            assert listener.log[0] == []
        assert listener.log[0] == [b"1", b"2"]


async def test_a_transaction_that_raises_is_rolled_back(listener: Listener) -> None:
    async with client_of(listener, connector_transactions=True) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.sender().transaction() as transaction:
                await transaction.send(b"1")
                raise ZeroDivisionError
        async with client.sender().transaction() as transaction:
            await transaction.send(b"2")
        assert listener.log[0] == [b"2"]


async def test_a_refused_transaction_raises(listener: Listener) -> None:
    listener.commits = False
    async with client_of(listener, connector_transactions=True) as client:
        with pytest.raises(RequestFailed, match="1 of 1 message refused"):
            async with client.sender().transaction() as transaction:
                await transaction.send(b"1")
        listener.commits = True
        async with client.sender().transaction() as transaction:
            await transaction.send(b"2")
        assert listener.log[0] == [b"2"]


async def test_an_empty_transaction_sends_nothing(listener: Listener) -> None:
    async with client_of(listener, connector_transactions=True) as client:
        async with client.sender().transaction():
            pass
        with pytest.raises(LocalProtocolError, match="in transactions"):
            await client.sender().send(b"outside")


async def test_a_transaction_larger_than_the_window_is_refused(listener: Listener) -> None:
    limits = RelinkLimits(window=2)
    async with client_of(listener, connector_transactions=True, limits=limits) as client:
        with pytest.raises(LocalProtocolError, match="larger than"):
            async with client.sender().transaction() as transaction:
                for _ in range(3):
                    await transaction.send(b"x")


# ------------------------------------------------------------------------------------- receiving


async def test_messages_are_received_and_consumed_in_any_order(listener: Listener) -> None:
    async with client_of(listener) as client:
        for text in (b"1", b"2", b"3"):
            listener.send(5, text)
        one, two, three = await take(client, 5, 3)
        assert [message.parts for message in (one, two, three)] == [(b"1",), (b"2",), (b"3",)]
        three.consume()
        two.consume()
        assert client.link.held_bytes == 3
        one.consume()
        await listener.until(lambda: listener.link.unconsumed == 0)
        with pytest.raises(LocalProtocolError):
            one.refuse()


async def test_a_committed_message_is_consumed_or_refused(listener: Listener) -> None:
    async with client_of(listener, listener_transactions=True) as client:
        listener.send(0, b"good")
        listener.send(0, b"bad")
        good, bad = await take(client, 0, 2)
        good.consume()
        bad.refuse()
        await listener.until(lambda: listener.link.unconsumed == 0)
    decided = [kind for kind in listener.acknowledged if kind[0] != "received"]
    assert decided == [("committed", 0), ("uncommitted", 1)]


async def test_a_rolled_back_message_is_never_seen(listener: Listener) -> None:
    async with client_of(listener, listener_transactions=True) as client:
        listener.link.send(0, [b"no"])
        listener.link.rollback(0)
        listener.send(0, b"yes")
        (message,) = await take(client, 0, 1)
        assert message.parts == (b"yes",)
        message.consume()


async def test_the_iteration_ends_with_the_channel(listener: Listener) -> None:
    async with client_of(listener) as client:
        listener.send(0, b"last")
        listener.link.close(0)
        listener.wake()
        seen = []
        async for message in client.receiver():
            seen.append(message.parts)
            message.consume()
        assert seen == [(b"last",)]


async def test_channels_that_the_listener_opens_are_reported(listener: Listener) -> None:
    async with client_of(listener) as client:
        listener.send(9, b"hello")
        async for receiver in client.opened():
            assert receiver.channel == 9
            (await anext(receiver)).consume()
            break


# ----------------------------------------------------------------------------------------- links


async def test_nothing_is_lost_or_doubled_over_many_cuts(listener: Listener) -> None:
    texts = [b"%d" % number for number in range(300)]

    async def produce(client: RelinkClient) -> None:
        for text in texts:
            await client.sender().send(text)
            await asyncio.sleep(0)

    async def cut() -> None:
        for _ in range(8):
            await listener.until(lambda: bool(listener.lines))
            await listener.cut()
            listener.restart()

    async def consume(client: RelinkClient) -> list[bytes]:
        got = []
        async for message in client.receiver(1):
            got.append(bytes(message.parts[0]))
            message.consume()
            if len(got) == len(texts):
                return got
        raise AssertionError

    async with client_of(listener) as client:
        for text in texts:
            listener.send(1, text)
        async with asyncio.TaskGroup() as group:
            group.create_task(produce(client))
            group.create_task(cut())
            consuming = group.create_task(consume(client))
        await client.sender().consumed(timeout_s=10)
        assert consuming.result() == texts
        assert listener.log[0] == texts


async def test_a_commit_is_answered_over_a_cut(listener: Listener) -> None:
    async with client_of(listener, connector_transactions=True) as client:
        async with client.sender().transaction() as transaction:
            await transaction.send(b"1")
            await listener.until(lambda: bool(listener.undecided))
            await listener.cut()
        assert listener.log[0] == [b"1"]


async def test_a_forgotten_link_is_an_explicit_error(listener: Listener) -> None:
    listener.consumes = False
    async with client_of(listener) as client:
        await client.sender().send(b"x")
        waiting = asyncio.create_task(client.sender().consumed())
        reading = asyncio.create_task(anext(client.receiver()))
        await listener.until(lambda: bool(listener.log[0]))
        listener.forget()
        await listener.cut()
        with pytest.raises(LinkLost, match="1 message may not have been processed"):
            await waiting
        with pytest.raises(LinkLost):
            await reading
        with pytest.raises(LinkLost):
            await client.sender().send(b"y")


async def test_a_violation_costs_the_link(listener: Listener) -> None:
    async with client_of(listener) as client:
        waiting = asyncio.create_task(anext(client.receiver()))
        await listener.until(lambda: bool(listener.lines))
        (line,) = listener.lines
        line.session.transport.write(b"\xff" * 8)
        with pytest.raises(LinkLost, match="not defined"):
            await waiting


async def test_leaving_shuts_the_link_down(listener: Listener) -> None:
    async with client_of(listener) as client:
        await client.sender().send(b"last words")
    assert listener.log[0] == [b"last words"]
    await listener.until(lambda: listener.link.ended)
    assert client.was_shut_down
    with pytest.raises(ConnectionLost):
        await client.sender().send(b"more")


async def test_the_listener_shuts_down_and_is_answered_when_all_is_consumed(
    listener: Listener,
) -> None:
    async with client_of(listener) as client:
        listener.send(0, b"last")
        listener.link.shutdown()
        listener.wake()
        seen = []
        async for message in client.receiver():
            seen.append(message.parts)
            message.consume()
        assert seen == [(b"last",)]
        assert client.was_shut_down
        assert [receiver async for receiver in client.opened()] == []


async def test_a_listener_that_does_not_answer_the_shutdown_is_left(listener: Listener) -> None:
    listener.answers_shutdown = False
    client = client_of(listener, close_timeout_s=0.05)
    await client.__aenter__()
    with pytest.raises(RequestTimeout, match="did not end"):
        await client.close()
    await listener.until(lambda: not listener.lines)
    await client.close()


async def test_an_unknown_endpoint_shows_at_once(listener: Listener) -> None:
    with pytest.raises(ConnectFailed):
        async with RelinkClient("127.0.0.1", listener.port, "unknown"):
            raise AssertionError


async def test_nobody_there_shows_at_once(listener: Listener) -> None:
    port = listener.port
    await listener.close()
    with pytest.raises(ConnectFailed):
        async with RelinkClient("127.0.0.1", port, "e"):
            raise AssertionError


async def test_over_tls(tls: TlsPair) -> None:
    listener = Listener()
    await listener.listen(tls.server)
    async with client_of(listener, tls=tls.client) as client:
        await client.sender().send(b"secret")
        await client.sender().consumed(timeout_s=5)
    assert listener.log[0] == [b"secret"]
    await listener.close()
