"""Our ZMTP and the real libzmq: every socket type and mechanism, from both sides."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

import pytest
import zmq
import zmq.asyncio
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from crosswire.errors import ConnectionRejected, IncompatiblePeer, PeerError
from crosswire.session import Session
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.zmtp import (
    Mechanism,
    MessageReceived,
    NullMechanism,
    PeerReady,
    PlainClient,
    PlainServer,
    Subscribed,
    Unsubscribed,
    ZmtpConnection,
    ZmtpLimits,
)
from crosswire.wire.zmtp.curve import CurveClient, CurveServer, decode_key
from crosswire.wire.zmtp.routing import PrefixSubscriptions, Router

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:zmq")

TIMEOUT_S = 20.0
E_ = TypeVar("E_", bound=Event)


class Peer:
    """One of our connections on a socket."""

    session: Session

    def __init__(self, on_events: Callable[[Peer, list[Event]], None] | None = None) -> None:
        self._on_events = on_events
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    @property
    def connection(self) -> ZmtpConnection:
        connection = self.session.connection
        assert isinstance(connection, ZmtpConnection)
        return connection

    def handle_events(self, events: list[Event]) -> None:
        if self._on_events:
            self._on_events(self, events)
        for event in events:
            self._events.put_nowait(event)

    def handle_drain(self) -> None:
        pass

    def send(self, *parts: bytes) -> None:
        self.connection.send_message(parts)
        self.session.wake()

    async def take(self, kind: type[E_]) -> E_:
        """The next event, which is of this kind."""
        async with asyncio.timeout(TIMEOUT_S):
            event = await self._events.get()
        assert isinstance(event, kind), event
        return event


class Binder:
    """A listening socket of ours and its peers."""

    def __init__(self, **options: Any) -> None:
        self.arrived: asyncio.Queue[Peer] = asyncio.Queue()
        self.on_events = options.pop("on_events", None)
        self.kind: type[ZmtpConnection] = options.pop("kind", ZmtpConnection)
        self.options = options
        self.sessions: list[Session] = []

    def make(self) -> Session:
        peer = Peer(self.on_events)
        session = Session(lambda now: self.kind("binder", now, **self.options), peer)
        self.sessions.append(session)
        self.arrived.put_nowait(peer)
        return session

    async def peer(self) -> Peer:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.arrived.get()


@asynccontextmanager
async def bound(**options: Any) -> AsyncIterator[tuple[Binder, str]]:
    binder = Binder(**options)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(binder.make, "127.0.0.1", 0, backlog=4096)
    try:
        yield binder, "tcp://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for session in binder.sessions:
            session.transport.abort()


@asynccontextmanager
async def connected(endpoint: str, **options: Any) -> AsyncIterator[Peer]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    peer = Peer()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(
        lambda: Session(lambda now: ZmtpConnection("connector", now, **options), peer), host, port
    )
    try:
        yield peer
    finally:
        transport.abort()


@pytest.fixture
async def context() -> AsyncIterator[Any]:
    """With somebody who knows our users: a PLAIN server of libzmq asks."""
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.LINGER, 0)
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_plain(passwords={"user": "secret"})
    authenticator.configure_curve(location=CURVE_ALLOW_ANY)
    yield context
    authenticator.stop()
    context.destroy(linger=0)


# ------------------------------------------------------------------------------------ mechanisms

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
CLIENT_PUBLIC, CLIENT_SECRET = zmq.curve_keypair()


class Security:
    """A mechanism set up on both kinds of sockets."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ours(self, *, server: bool) -> Mechanism:
        if self.name == "PLAIN":
            if server:
                return PlainServer(lambda user, password: (user, password) == ("user", "secret"))
            return PlainClient("user", "secret")
        if self.name == "CURVE":
            if server:
                secret = decode_key(SERVER_SECRET.decode())
                client = decode_key(CLIENT_PUBLIC.decode())
                return CurveServer(secret, os.urandom, lambda key: key == client)
            return CurveClient(
                decode_key(SERVER_PUBLIC.decode()),
                decode_key(CLIENT_SECRET.decode()),
                os.urandom,
            )
        return NullMechanism()

    def theirs(self, socket: Any, *, server: bool) -> None:
        if self.name == "PLAIN":
            if server:
                socket.plain_server = True
            else:
                socket.plain_username, socket.plain_password = b"user", b"secret"
        if self.name == "CURVE":
            if server:
                socket.curve_server = True
                socket.curve_secretkey = SERVER_SECRET
            else:
                socket.curve_serverkey = SERVER_PUBLIC
                socket.curve_publickey = CLIENT_PUBLIC
                socket.curve_secretkey = CLIENT_SECRET


@asynccontextmanager
async def pair(
    context: Any, ours: str, theirs: str, security: str, we_bind: bool, **options: Any
) -> AsyncIterator[tuple[Peer, Any, PeerReady]]:
    """Our peer, their socket, and how they introduced themselves.

    Whoever binds is the mechanism's server, but never a REQ: as one, libzmq 4.3.5 loses the answers
    that it gets, those of libzmq too.
    """
    secure = Security(security)
    we_serve = we_bind or theirs == "REQ"
    options |= {"socket_type": ours, "mechanism": secure.ours(server=we_serve)}
    socket = context.socket(getattr(zmq, theirs))
    secure.theirs(socket, server=not we_serve)
    if theirs in ("DEALER", "ROUTER", "REQ", "REP"):
        socket.routing_id = b"them"
    with socket:
        if we_bind:
            async with bound(**options) as (binder, endpoint):
                socket.connect(endpoint)
                peer = await binder.peer()
                yield peer, socket, await peer.take(PeerReady)
        else:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            async with connected(f"tcp://127.0.0.1:{port}", **options) as peer:
                yield peer, socket, await peer.take(PeerReady)


async def receive(socket: Any) -> list[bytes]:
    async with asyncio.timeout(TIMEOUT_S):
        parts: list[bytes] = await socket.recv_multipart()
    return parts


SECURITIES = ["NULL", "PLAIN", "CURVE"]
SIDES = pytest.mark.parametrize("we_bind", [True, False], ids=["binder", "connector"])
ALL_SECURITIES = pytest.mark.parametrize("security", SECURITIES)

BODIES = [
    (b"x",),
    (b"",),
    (b"", b"eMQP/1.0", b"REQUEST", b"id", b"default", b"", b"[]"),
    (b"a" * 255, b"b" * 256, b"c" * 70000),
    (os.urandom(1024 * 1024),),
]


@ALL_SECURITIES
@SIDES
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("ROUTER", "DEALER"),
        ("ROUTER", "REQ"),
        ("ROUTER", "ROUTER"),
        ("DEALER", "ROUTER"),
        ("DEALER", "REP"),
        ("DEALER", "DEALER"),
    ],
)
async def test_messages_go_both_ways(
    context: Any, ours: str, theirs: str, security: str, we_bind: bool
) -> None:
    identity = b"us" if ours == "DEALER" or theirs == "ROUTER" else b""
    options: Any = {"identity": identity}
    async with pair(context, ours, theirs, security, we_bind, **options) as (peer, socket, ready):
        assert (ready.socket_type, ready.identity) == (theirs, b"" if theirs == "REP" else b"them")
        delimiter = (b"",) if theirs in ("REQ", "REP") else ()
        address = (b"us",) if theirs == "ROUTER" else ()

        async def to_them(body: tuple[bytes, ...]) -> None:
            peer.send(*delimiter, *body)
            assert tuple(await receive(socket)) == (*address, *body)

        async def to_us(body: tuple[bytes, ...]) -> None:
            await socket.send_multipart([*address, *body])
            assert (await peer.take(MessageReceived)).parts == (*delimiter, *body)

        # A ROUTER knows us, and a REP may speak, only when we have spoken; a REQ must speak first.
        order = (to_us, to_them) if theirs == "REQ" else (to_them, to_us)
        for body in BODIES:
            for direction in order:
                await direction(body)


@ALL_SECURITIES
@SIDES
@pytest.mark.parametrize(
    ("ours", "theirs"), [("PUB", "SUB"), ("PUB", "XSUB"), ("XPUB", "SUB"), ("XPUB", "XSUB")]
)
async def test_we_publish(
    context: Any, ours: str, theirs: str, security: str, we_bind: bool
) -> None:
    async with pair(context, ours, theirs, security, we_bind) as (peer, socket, ready):
        assert (ready.socket_type, ready.identity) == (theirs, b"")
        for topic in (b"news", b""):
            await _subscribe(socket, theirs, topic)
        # libzmq's socket does its part only while somebody uses it.
        first = asyncio.ensure_future(receive(socket))
        assert {await peer.take(Subscribed), await peer.take(Subscribed)} == {
            Subscribed(b"news"),
            Subscribed(b""),
        }
        peer.send(b"news/0")
        assert await first == [b"news/0"]
        for body in BODIES:
            peer.send(b"news/1", *body)
            assert tuple(await receive(socket)) == (b"news/1", *body)
        await _subscribe(socket, theirs, b"", cancel=True)
        assert await peer.take(Unsubscribed) == Unsubscribed(b"")
        assert peer.connection.subscriptions == {b"news": 1}


async def _subscribe(socket: Any, kind: str, topic: bytes, *, cancel: bool = False) -> None:
    if kind == "XSUB":
        await socket.send((b"\0" if cancel else b"\1") + topic)
    elif cancel:
        socket.unsubscribe(topic)
    else:
        socket.subscribe(topic)


@ALL_SECURITIES
@SIDES
@pytest.mark.parametrize(("ours", "theirs"), [("SUB", "PUB"), ("SUB", "XPUB"), ("XSUB", "XPUB")])
async def test_we_subscribe(
    context: Any, ours: str, theirs: str, security: str, we_bind: bool
) -> None:
    async with pair(context, ours, theirs, security, we_bind) as (peer, socket, ready):
        assert ready.socket_type == theirs
        peer.connection.send_subscribe(b"news")
        peer.session.wake()
        if theirs == "XPUB":
            assert await receive(socket) == [b"\1news"]
        else:
            await _publish_until_heard(socket, peer)
        for body in BODIES:
            await socket.send_multipart([b"other", *body])
            await socket.send_multipart([b"news/1", *body])
            assert (await peer.take(MessageReceived)).parts == (b"news/1", *body)
        if theirs == "XPUB":
            peer.connection.send_cancel(b"news")
            peer.session.wake()
            assert await receive(socket) == [b"\0news"]


async def _publish_until_heard(socket: Any, peer: Peer) -> None:
    """A PUB doesn't say when it knows of a subscription."""
    for number in count():
        await socket.send(b"news%d" % number)
        try:
            async with asyncio.timeout(0.05):
                event = await peer._events.get()
        except TimeoutError:
            continue
        assert isinstance(event, MessageReceived)
        last = b"news%d" % number
        while event.parts != (last,):
            event = await peer.take(MessageReceived)
        return


# ------------------------------------------------------------------------------------- refusals


async def test_who_they_are_reaches_the_owner(context: Any) -> None:
    async with pair(context, "ROUTER", "DEALER", "PLAIN", True) as (_, _, ready):
        assert (ready.user, ready.public_key) == ("user", None)
    async with pair(context, "ROUTER", "DEALER", "CURVE", True) as (_, _, ready):
        assert (ready.user, ready.public_key) == (None, decode_key(CLIENT_PUBLIC.decode()))


async def _monitored(socket: Any, wanted: int) -> int:
    """The value of the first event of this kind."""
    with socket.get_monitor_socket(zmq.EVENT_ALL) as monitor:
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] == wanted:
                value: int = event["value"]
                socket.disable_monitor()
                return value


@pytest.mark.parametrize("security", ["PLAIN", "CURVE"])
async def test_we_refuse_a_stranger(context: Any, security: str) -> None:
    """libzmq's PLAIN misspells ERROR and does not know the right one; it ends all the same."""
    told = {
        "PLAIN": (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_UNEXPECTED_COMMAND),
        "CURVE": (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400),
    }
    event, value = told[security]
    secure = Security(security)
    with context.socket(zmq.DEALER) as socket:
        secure.theirs(socket, server=False)
        if security == "PLAIN":
            socket.plain_password = b"wrong"
        else:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        async with bound(socket_type="ROUTER", mechanism=secure.ours(server=True)) as (
            binder,
            endpoint,
        ):
            heard = asyncio.ensure_future(_monitored(socket, event))
            await asyncio.sleep(0)
            socket.connect(endpoint)
            failed = await (await binder.peer()).take(ConnectionFailed)
            assert isinstance(failed.error, ConnectionRejected)
            assert await heard == value


async def test_they_refuse_us(context: Any) -> None:
    with context.socket(zmq.ROUTER) as socket:
        socket.plain_server = True
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        options: Any = {"socket_type": "DEALER", "mechanism": PlainClient("user", "wrong")}
        async with connected(f"tcp://127.0.0.1:{port}", **options) as peer:
            failed = await peer.take(ConnectionFailed)
            assert isinstance(failed.error, PeerError)
            assert failed.error.reason == "400"


async def test_a_wrong_type_is_refused(context: Any) -> None:
    with context.socket(zmq.SUB) as socket:
        async with bound(socket_type="ROUTER") as (binder, endpoint):
            socket.connect(endpoint)
            failed = await (await binder.peer()).take(ConnectionFailed)
            assert isinstance(failed.error, IncompatiblePeer)


@pytest.mark.parametrize("security", ["PLAIN", "CURVE"])
async def test_a_wrong_mechanism_never_opens(context: Any, security: str) -> None:
    """libzmq may leave before it has told us its own."""
    with context.socket(zmq.DEALER) as socket:
        Security(security).theirs(socket, server=False)
        async with bound(socket_type="ROUTER") as (binder, endpoint):
            socket.connect(endpoint)
            event = await (await binder.peer()).take(Event)
            assert isinstance(event, ConnectionFailed | ConnectionClosed)


# ------------------------------------------------------------------------------ many, and the end

PEERS = 2000


async def test_thousands_of_peers(context: Any) -> None:
    """Everyone is answered by its identity, those without one too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 5 * PEERS:
        pytest.skip(f"needs {5 * PEERS} open files (ulimit -Hn)")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 5 * PEERS), hard))
    names = count()
    router: Router[Peer] = Router(lambda: next(names).to_bytes(4))

    def serve(peer: Peer, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, PeerReady):
                router.join(peer, event.identity)
            elif isinstance(event, MessageReceived):
                identity = router.identity(peer)
                assert identity is not None
                addressee = router.get(identity)
                assert addressee is not None
                addressee.send(*event.parts, identity)

    def clients(endpoint: str) -> int:
        with zmq.Context() as many:
            many.max_sockets = PEERS + 10
            many.linger = 0
            sockets = [many.socket(zmq.DEALER) for _ in range(PEERS)]
            for number, socket in enumerate(sockets):
                if number % 2:
                    socket.routing_id = b"peer %d" % number
                socket.rcvtimeo = int(TIMEOUT_S * 1000)
                socket.connect(endpoint)
                socket.send(b"from %d" % number)
            right = 0
            for number, socket in enumerate(sockets):
                body, identity = socket.recv_multipart()
                named = identity == b"peer %d" % number if number % 2 else identity[0] == 0
                right += body == b"from %d" % number and named
                socket.close()
            return right

    try:
        async with bound(socket_type="ROUTER", on_events=serve) as (_, endpoint):
            assert await asyncio.to_thread(clients, endpoint) == PEERS
            assert len(router) == PEERS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_killed_peer_leaves_and_its_successor_replaces_it(context: Any) -> None:
    code = (
        "import sys, zmq\n"
        "socket = zmq.Context().socket(zmq.DEALER)\n"
        "socket.routing_id = b'worker'\n"
        "socket.connect(sys.argv[1])\n"
        "while True: socket.send_multipart([b'', bytes(1024 * 1024)])\n"
    )
    router: Router[Peer] = Router(lambda: b"")
    async with bound(socket_type="ROUTER") as (binder, endpoint):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, endpoint)
        first = await binder.peer()
        router.join(first, (await first.take(PeerReady)).identity)
        assert (await first.take(MessageReceived)).parts == (b"", bytes(1024 * 1024))
        with context.socket(zmq.DEALER) as socket:
            socket.routing_id = b"worker"
            socket.connect(endpoint)
            second = await binder.peer()
            joined = router.join(second, (await second.take(PeerReady)).identity)
            assert joined == (b"worker", first)
        process.kill()
        await process.wait()
        while isinstance(event := await first.take(Event), MessageReceived):
            pass
        assert isinstance(event, ConnectionClosed)
        assert router.leave(first) is None
        assert router.get(b"worker") is second


async def test_libzmq_comes_back_when_we_end_abruptly(context: Any) -> None:
    with context.socket(zmq.DEALER) as socket:
        async with bound(socket_type="ROUTER") as (binder, endpoint):
            socket.connect(endpoint)
            first = await binder.peer()
            await first.take(PeerReady)
            first.session.transport.abort()
            assert await first.take(ConnectionClosed) == ConnectionClosed(clean=True)
            second = await binder.peer()
            await second.take(PeerReady)
            await socket.send(b"again")
            assert (await second.take(MessageReceived)).parts == (b"again",)


# ------------------------------------------------------------------------------------ heartbeats


class Heard(ZmtpConnection):
    """Counts heartbeats; `deaf` ones are not answered."""

    deaf = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.beats: asyncio.Queue[None] = asyncio.Queue()

    def _on_ping(self, body: bytes, now: float) -> None:
        if not self.deaf:
            super()._on_ping(body, now)
        self.beats.put_nowait(None)

    def _on_pong(self, context: bytes, now: float) -> None:
        super()._on_pong(context, now)
        self.beats.put_nowait(None)


class Deaf(Heard):
    deaf = True


async def _beats(peer: Peer, number: int) -> None:
    connection = peer.connection
    assert isinstance(connection, Heard)
    async with asyncio.timeout(TIMEOUT_S):
        for _ in range(number):
            await connection.beats.get()


@ALL_SECURITIES
async def test_libzmqs_heartbeats_are_answered(context: Any, security: str) -> None:
    secure = Security(security)
    with context.socket(zmq.DEALER) as socket:
        secure.theirs(socket, server=False)
        socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = 20, 5000, 5000
        options: Any = {"socket_type": "ROUTER", "mechanism": secure.ours(server=True)}
        async with bound(kind=Heard, **options) as (binder, endpoint):
            socket.connect(endpoint)
            peer = await binder.peer()
            await peer.take(PeerReady)
            await _beats(peer, 5)
            await socket.send(b"still there")
            assert (await peer.take(MessageReceived)).parts == (b"still there",)


async def test_libzmq_gives_up_on_a_side_that_does_not_answer(context: Any) -> None:
    """Otherwise the test above would prove nothing."""
    with context.socket(zmq.DEALER) as socket:
        socket.heartbeat_ivl = 20
        async with bound(kind=Deaf, socket_type="ROUTER") as (binder, endpoint):
            socket.connect(endpoint)
            first = await binder.peer()
            await first.take(PeerReady)
            assert await first.take(ConnectionClosed) == ConnectionClosed(clean=True)
            second = await binder.peer()
            await second.take(PeerReady)
            assert second is not first


@ALL_SECURITIES
async def test_libzmq_answers_our_heartbeats(context: Any, security: str) -> None:
    secure = Security(security)
    limits = ZmtpLimits(ping_interval_s=0.02, ping_timeout_s=TIMEOUT_S, ping_ttl_s=TIMEOUT_S)
    with context.socket(zmq.DEALER) as socket:
        secure.theirs(socket, server=False)
        options: Any = {"socket_type": "ROUTER", "mechanism": secure.ours(server=True)}
        async with bound(kind=Heard, limits=limits, **options) as (binder, endpoint):
            socket.connect(endpoint)
            peer = await binder.peer()
            await peer.take(PeerReady)
            await _beats(peer, 5)
            assert not peer.connection.closed


# ------------------------------------------------------------------------------------- publishing


async def test_a_publisher_serves_each_subscriber_its_topics(context: Any) -> None:
    wanted: PrefixSubscriptions[Peer] = PrefixSubscriptions()
    subscribed: asyncio.Queue[Subscribed] = asyncio.Queue()

    def note(peer: Peer, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Subscribed):
                wanted.add(peer, event.topic)
                subscribed.put_nowait(event)

    async with bound(socket_type="PUB", on_events=note) as (_, endpoint):
        with context.socket(zmq.SUB) as apples, context.socket(zmq.SUB) as everything:
            apples.subscribe(b"apple")
            everything.subscribe(b"")
            apples.connect(endpoint)
            everything.connect(endpoint)
            async with asyncio.timeout(TIMEOUT_S):
                await subscribed.get()
                await subscribed.get()
            for topic in (b"pear", b"apples", b"apple"):
                for peer in wanted.match(topic):
                    peer.send(topic, b"body")
            assert [(await receive(apples))[0] for _ in range(2)] == [b"apples", b"apple"]
            assert [(await receive(everything))[0] for _ in range(3)] == [
                b"pear",
                b"apples",
                b"apple",
            ]
