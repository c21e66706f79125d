"""The MicroMsg2 client on real sockets, against a small server made of connections."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from crosswire.client.native.dial import Backoff
from crosswire.client.native.micromsg2 import (
    MicroMsg2Client,
    MicroMsg2Delivery,
    MicroMsg2Subscription,
    client_offer,
)
from crosswire.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectionRejected,
    InvalidFilter,
    LocalProtocolError,
    RequestFailed,
    RequestTimeout,
)
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import (
    ExtensionReceived,
    MessageReceived,
    MessagesAcknowledged,
    Opened,
    ServeReceived,
    SubscribeReceived,
    UnsubscribeReceived,
)
from crosswire.wire.micromsg2.extensions import Offer, VendorExtension
from crosswire.wire.micromsg2.frames import Extension
from tests.conftest import TlsPair

SOON = Backoff(0.01, 0.02)


class Desk:
    """The server's end of one connection."""

    session: Session

    def __init__(self, board: Board) -> None:
        self.board = board
        self.events: list[Event] = []
        self.token: str | None = None
        self.to_send: deque[tuple[str, bytes, dict[str, Any]]] = deque()
        self.acknowledged: list[int] = []

    @property
    def connection(self) -> MicroMsg2Connection:
        connection = self.session.connection
        assert isinstance(connection, MicroMsg2Connection)
        return connection

    def push(self, destination: str, payload: bytes, **properties: Any) -> None:
        named = {key.replace("_", "-"): value for key, value in properties.items()}
        self.to_send.append((destination, payload, named))
        self.send_waiting()

    def send_waiting(self) -> None:
        while self.to_send and self.connection.credit and not self.session.congested:
            self.connection.send_message(*self.to_send.popleft())
        self.session.wake()

    def handle_events(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Opened():
                    self.token = event.token
                case MessageReceived():
                    self.board.receive(self, event)
                case MessagesAcknowledged(sequences=sequences):
                    self.acknowledged += sequences
                case SubscribeReceived(destination="topic/forbidden"):
                    self.connection.fail(ConnectionRejected("not for you"))
                case SubscribeReceived(filter="broken"):
                    self.connection.fail(InvalidFilter("no operator"))
                case ServeReceived(destination=destination):
                    self.board.providers[destination] = self
                case ConnectionClosed() | ConnectionFailed():
                    self.board.desks.discard(self)
        self.send_waiting()
        self.board.changed.set()

    def handle_drain(self) -> None:
        self.send_waiting()


class Board:
    """Takes what is sent, hands calls to providers and answers to callers."""

    def __init__(self, offer: Offer | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.offer = offer or Offer(identity="board")
        self.tls = tls
        self.port = 0
        self.desks: set[Desk] = set()
        self.received: list[MessageReceived] = []
        self.providers: dict[str, Desk] = {}
        self.callers: dict[str, Desk] = {}
        self.withhold = False
        self.changed = asyncio.Event()

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(self.accept, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]

    def accept(self) -> Session:
        desk = Desk(self)
        self.desks.add(desk)
        return Session(lambda now: MicroMsg2Connection("server", now, offer=self.offer), desk)

    def receive(self, desk: Desk, message: MessageReceived) -> None:
        if not self.withhold:
            desk.connection.acknowledge(message.sequence)
        number = str(message.properties.get("correlation-id"))
        if message.destination.startswith("reply/"):
            caller = self.callers.pop(number)
            caller.to_send.append((message.destination, message.payload, message.properties))
            caller.send_waiting()
        elif message.destination in self.providers:
            self.callers[number] = desk
            provider = self.providers[message.destination]
            provider.to_send.append((message.destination, message.payload, message.properties))
            provider.send_waiting()
        elif message.destination.startswith("service/"):
            desk.push(
                str(message.properties["reply-to"]), b"", correlation_id=number, error="unknown_op"
            )
        else:
            self.received.append(message)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def desk_with(self, kind: type[Event]) -> Desk:
        """The connected one that had such an event."""

        def found() -> list[Desk]:
            return [
                desk for desk in self.desks if any(isinstance(event, kind) for event in desk.events)
            ]

        await self.until(found)
        return found()[0]

    def close(self) -> None:
        self.server.close()
        for desk in list(self.desks):
            desk.connection.close()
            desk.session.wake()


@pytest.fixture
async def board() -> AsyncIterator[Board]:
    board = Board()
    await board.listen()
    yield board
    board.close()


def client_of(board: Board, **options: Any) -> MicroMsg2Client:
    return MicroMsg2Client("127.0.0.1", board.port, backoff=SOON, **options)


async def take(subscription: MicroMsg2Subscription, count: int) -> list[MicroMsg2Delivery]:
    async with asyncio.timeout(10):
        return [await anext(subscription) for _ in range(count)]


# --------------------------------------------------------------------------------------- sending


async def test_a_message_is_sent_and_acknowledged(board: Board) -> None:
    async with client_of(board) as client:
        await client.send("queue/q", b"hello", {"price": 12, "ok": True})
    (message,) = board.received
    assert (message.destination, message.payload) == ("queue/q", b"hello")
    assert message.properties == {"price": 12, "ok": "true"}


async def test_many_at_once_keep_their_order_and_the_window(board: Board) -> None:
    async with client_of(board, offer=client_offer(window=7)) as client:
        await asyncio.gather(*(client.send("queue/q", str(n).encode()) for n in range(500)))
    assert [int(message.payload) for message in board.received] == list(range(500))


async def test_a_large_payload_is_split(board: Board) -> None:
    payload = bytes(range(256)) * 20_000
    async with client_of(board, offer=client_offer(window=2)) as client:
        await client.send("queue/q", payload)
    assert board.received[0].payload == payload


async def test_no_acknowledgement_is_a_timeout(board: Board) -> None:
    board.withhold = True
    async with client_of(board) as client:
        with pytest.raises(RequestTimeout, match="no acknowledgement"):
            await client.send("queue/q", b"", timeout_s=0.05)


async def test_without_acks_writing_settles(board: Board) -> None:
    board.withhold = True
    async with client_of(board, offer=client_offer(window=None)) as client:
        await client.send("queue/q", b"x")
        await board.until(lambda: board.received)
    assert [message.payload for message in board.received] == [b"x"]


async def test_what_cannot_be_sent_is_reported_to_the_sender_alone(board: Board) -> None:
    async with client_of(board) as client:
        with pytest.raises(LocalProtocolError, match="255"):
            await client.send("q" * 256, b"")
        await client.send("queue/q", b"")


async def test_a_lost_connection_is_reported(board: Board) -> None:
    board.withhold = True
    async with client_of(board, offer=client_offer(window=1)) as client:
        sends = [asyncio.create_task(client.send("queue/q", b"")) for _ in range(2)]
        desk = await board.desk_with(MessageReceived)
        desk.session.transport.abort()
        results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionLost, ConnectionLost]
    assert "may or may not" in str(results[0]) and "was not sent" in str(results[1])


async def test_a_closed_client_raises(board: Board) -> None:
    async with client_of(board) as client:
        pass
    with pytest.raises(ConnectionLost, match="closed"):
        await client.send("queue/q", b"")


# --------------------------------------------------------------------------------- subscriptions


async def test_a_subscription_is_requested_with_all_its_options(board: Board) -> None:
    async with client_of(board) as client:
        async with client.subscribe(
            "topic/t", filter="price>N10;name&Ta b", name="n", start="earliest", window=5
        ):
            desk = await board.desk_with(SubscribeReceived)
        await board.until(lambda: isinstance(desk.events[-1], UnsubscribeReceived))
    (event,) = [event for event in desk.events if isinstance(event, SubscribeReceived)]
    assert event.arguments == {
        "destination": "topic/t",
        "filter": "price>N10;name&Ta b",
        "name": "n",
        "from": "earliest",
        "window": "5",
    }


async def test_deliveries_are_acknowledged_as_the_iteration_goes_on(board: Board) -> None:
    async with client_of(board) as client, client.subscribe("queue/q") as queue:
        desk = await board.desk_with(SubscribeReceived)
        for n in range(3):
            desk.push("queue/q", str(n).encode(), n=n)
        first, second = await take(queue, 2)
        assert (first.payload, second.properties) == (b"0", {"n": 1})
        await board.until(lambda: desk.acknowledged == [1])
        await take(queue, 1)
        await board.until(lambda: desk.acknowledged == [1, 2])


async def test_by_hand_in_any_order(board: Board) -> None:
    async with client_of(board) as client, client.subscribe("queue/q", manual=True) as queue:
        desk = await board.desk_with(SubscribeReceived)
        for _ in range(3):
            desk.push("queue/q", b"")
        first, second, third = await take(queue, 3)
        third.acknowledge()
        second.acknowledge()
        await client.send("queue/other", b"")
        assert desk.acknowledged == []
        first.acknowledge()
        first.acknowledge()
        await board.until(lambda: desk.acknowledged == [1, 2, 3])


async def test_the_server_waits_for_the_window(board: Board) -> None:
    async with (
        client_of(board, offer=client_offer(window=2)) as client,
        client.subscribe("queue/q", manual=True) as queue,
    ):
        desk = await board.desk_with(SubscribeReceived)
        for _ in range(5):
            desk.push("queue/q", b"")
        first, _ = await take(queue, 2)
        await client.send("queue/other", b"")
        assert (queue.held, len(desk.to_send)) == (0, 3)
        first.acknowledge()
        await take(queue, 1)


async def test_leaving_the_block_acknowledges_the_last(board: Board) -> None:
    async with client_of(board) as client:
        async with client.subscribe("queue/q") as queue:
            desk = await board.desk_with(SubscribeReceived)
            desk.push("queue/q", b"")
            async for _ in queue:
                break
        await board.until(lambda: desk.acknowledged == [1])
        kinds = [type(event) for event in desk.events]
        assert kinds.index(MessagesAcknowledged) < kinds.index(UnsubscribeReceived)


async def test_leaving_it_with_an_exception_unsubscribes_first(board: Board) -> None:
    async with client_of(board) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.subscribe("queue/q") as queue:
                desk = await board.desk_with(SubscribeReceived)
                desk.push("queue/q", b"")
                async for _ in queue:
                    raise ZeroDivisionError
        await board.until(lambda: desk.acknowledged == [1])
        kinds = [type(event) for event in desk.events]
        assert kinds.index(UnsubscribeReceived) < kinds.index(MessagesAcknowledged)


async def test_each_subscription_gets_its_own(board: Board) -> None:
    async with (
        client_of(board) as client,
        client.subscribe("topic/a/+/c") as level,
        client.subscribe("topic/b/#") as deep,
        client.subscribe("orders") as bare,
    ):
        desk = await board.desk_with(SubscribeReceived)
        for name in ("topic/b/x/y", "queue/orders", "topic/a/x/c", "topic/nobody", "topic/b"):
            desk.push(name, name.encode())
        assert [item.payload for item in await take(level, 1)] == [b"topic/a/x/c"]
        assert [item.payload for item in await take(deep, 2)] == [b"topic/b/x/y", b"topic/b"]
        assert [item.payload for item in await take(bare, 1)] == [b"queue/orders"]


async def test_overlapping_ones_are_refused(board: Board) -> None:
    async with client_of(board) as client, client.subscribe("topic/a"):
        with pytest.raises(ValueError, match="overlaps"):
            await client.subscribe("topic/#").__aenter__()


async def test_a_subscription_outlives_its_connection(board: Board) -> None:
    async with client_of(board) as client, client.subscribe("queue/q") as queue:
        desk = await board.desk_with(SubscribeReceived)
        desk.push("queue/q", b"before")
        assert [item.payload for item in await take(queue, 1)] == [b"before"]
        desk.session.transport.abort()
        await board.until(lambda: desk not in board.desks)
        desk = await board.desk_with(SubscribeReceived)
        desk.push("queue/q", b"after")
        assert [item.payload for item in await take(queue, 1)] == [b"after"]


@pytest.mark.parametrize(
    ("destination", "chosen", "code"),
    [("topic/forbidden", None, "forbidden"), ("topic/t", "broken", "malformed")],
)
async def test_one_that_is_refused_raises_the_reason_and_is_not_repeated(
    board: Board, destination: str, chosen: str | None, code: str
) -> None:
    async with client_of(board) as client:
        subscription = client.subscribe(destination, filter=chosen)
        async with subscription:
            with pytest.raises(RequestFailed, match=code):
                await take(subscription, 1)
        await client.send("queue/q", b"")
        (desk,) = board.desks
        assert not any(isinstance(event, SubscribeReceived) for event in desk.events)


async def test_closing_a_subscription_ends_its_iteration(board: Board) -> None:
    async with client_of(board) as client, client.subscribe("queue/q") as queue:
        task = asyncio.create_task(anext(queue, None))
        await asyncio.sleep(0)
        queue.close()
        assert await task is None


async def test_without_acks_a_slow_reader_holds_the_server_back(board: Board) -> None:
    async with (
        client_of(board, offer=client_offer(window=None)) as client,
        client.subscribe("queue/q") as queue,
    ):
        desk = await board.desk_with(SubscribeReceived)
        for _ in range(20_000):
            desk.to_send.append(("queue/q", bytes(1000), {}))
        desk.send_waiting()
        await take(queue, 1)
        peer = await client.peer()
        async with asyncio.timeout(10):
            while peer.connection.reading:
                await asyncio.sleep(0)
        assert queue.held < 3000
        await take(queue, 19_999)


# -------------------------------------------------------------------------------- calls, services


async def double(asked: MicroMsg2Delivery) -> bytes:
    return asked.payload * 2


async def refuse(asked: MicroMsg2Delivery) -> bytes:
    raise RequestFailed("no_stock", "sold out", data=b"{}")


async def crash(asked: MicroMsg2Delivery) -> bytes:
    raise ZeroDivisionError


async def with_properties(asked: MicroMsg2Delivery) -> tuple[bytes, dict[str, int]]:
    return b"", {"total": int(asked.properties["n"]) + 1}


@pytest.fixture
async def caller(board: Board) -> AsyncIterator[MicroMsg2Client]:
    async with client_of(board) as provider, client_of(board) as caller:
        await provider.serve("service/double", double)
        await provider.serve("service/refuse", refuse)
        await provider.serve("service/crash", crash)
        await provider.serve("service/with-properties", with_properties)
        await board.until(lambda: len(board.providers) == 4)
        yield caller


async def test_a_call_is_answered(caller: MicroMsg2Client) -> None:
    answer = await caller.call("service/double", b"ab")
    assert answer.payload == b"abab"


async def test_many_calls_get_each_their_own_answer(caller: MicroMsg2Client) -> None:
    answers = await asyncio.gather(
        *(caller.call("service/double", str(n).encode()) for n in range(300))
    )
    assert [answer.payload for answer in answers] == [str(n).encode() * 2 for n in range(300)]


async def test_properties_go_both_ways(caller: MicroMsg2Client) -> None:
    answer = await caller.call("service/with-properties", b"", {"n": 41})
    assert answer.properties["total"] == 42


async def test_a_failure_is_an_error_property(caller: MicroMsg2Client) -> None:
    with pytest.raises(RequestFailed) as caught:
        await caller.call("service/refuse", b"")
    failure = caught.value
    assert (failure.code, failure.description, failure.data) == ("no_stock", "sold out", b"{}")


async def test_a_crashing_responder_is_an_internal_failure(caller: MicroMsg2Client) -> None:
    with pytest.raises(RequestFailed, match="internal"):
        await caller.call("service/crash", b"")


async def test_nobody_serves_it(caller: MicroMsg2Client) -> None:
    with pytest.raises(RequestFailed, match="unknown_op"):
        await caller.call("service/nobody", b"")


async def test_a_call_times_out(board: Board) -> None:
    async with client_of(board) as client:
        with pytest.raises(RequestTimeout, match="no answer from queue/q"):
            await client.call("queue/q", b"", timeout_s=0.05)


async def test_a_call_fails_with_its_connection(board: Board) -> None:
    async with client_of(board) as client:
        call = asyncio.create_task(client.call("queue/q", b""))
        desk = await board.desk_with(MessageReceived)
        desk.session.transport.abort()
        with pytest.raises(ConnectionLost, match="may or may not"):
            await call


async def test_a_service_is_offered_again_after_a_reconnect(board: Board) -> None:
    async with client_of(board) as provider, client_of(board) as caller:
        await provider.serve("service/double", double)
        desk = await board.desk_with(ServeReceived)
        desk.session.transport.abort()
        await board.until(lambda: board.providers["service/double"] is not desk)
        assert (await caller.call("service/double", b"x")).payload == b"xx"


# -------------------------------------------------------------------------- handshake, extensions


async def test_a_token_reaches_the_server(board: Board) -> None:
    async with client_of(board, offer=client_offer(auth="secret")):
        desk = await board.desk_with(Opened)
        assert desk.token == "secret"


async def test_an_extension_that_the_server_lacks_fails_the_handshake(board: Board) -> None:
    client = client_of(board, offer=Offer(required=(Extension("x-nobody", {}),)))
    with pytest.raises(ConnectFailed, match="not supported: x-nobody"):
        await client.__aenter__()


class Bell(VendorExtension):
    name = "x-bell"

    def receive(self, payload: bytes) -> Iterable[Event]:
        return [ExtensionReceived("rung", payload)]


async def test_a_vendor_extension_speaks_through_the_client() -> None:
    board = Board(Offer(vendor=(Bell,)))
    await board.listen()
    rung: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    offer = Offer(optional=(Extension("x-bell", {}),), vendor=(Bell,))
    async with client_of(board, offer=offer, on_event=rung.set_result):
        desk = await board.desk_with(Opened)
        desk.connection.vendor("x-bell").send(b"ding")
        desk.session.wake()
        assert await asyncio.wait_for(rung, 10) == ExtensionReceived("rung", b"ding")
    board.close()


async def test_nobody_listening_is_reported_at_once() -> None:
    board = Board()
    await board.listen()
    board.close()
    with pytest.raises(ConnectFailed, match=f"can't connect to 127.0.0.1:{board.port}"):
        await client_of(board).__aenter__()


async def test_tls(tls: TlsPair) -> None:
    board = Board(tls=tls.server)
    await board.listen()
    async with client_of(board, tls=tls.client) as client:
        await client.send("queue/q", bytes(300_000))
    assert board.received[0].payload == bytes(300_000)
    board.close()
