"""What every gateway does: who the peer is, what it may do, what it holds, and letting go."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, ParamSpec

from crosswire.access import ANONYMOUS, Right
from crosswire.envelope import LARGEST_INTEGER, Envelope, Property
from crosswire.errors import (
    DestinationFull,
    Forbidden,
    InternalError,
    InvalidDestination,
    InvalidEnvelope,
    PeerTimeout,
    ServiceUnavailable,
)
from crosswire.gateways.context import GatewayContext, Leftover, TapSource
from crosswire.hub.attachment import Attachment, Consumer, Delivery, Notice, Window
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.receipt import Receipt
from crosswire.hub.services import Answer, Call, Provider
from crosswire.hub.subscriptions import AtId, AtTime, Start
from crosswire.logs import log_event
from crosswire.session import Session
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event

__all__ = ["LARGEST_WINDOW", "Gateway", "check_timeout", "guarded", "parse_start"]

_log = logging.getLogger("crosswire.gateways")

P = ParamSpec("P")

_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_OURS: Final = "service/crosswire."
LARGEST_WINDOW: Final = 65_535
"""So many messages may be on their way to one consumer that says how many it wants."""
_ID_DIGITS: Final = 19
_LONGEST_CALL_S: Final = 10 * 365 * 86_400


class Gateway(ABC):
    """One peer's door to the hub; a session's owner, and the hub's receiver of deliveries.

    A protocol derives it with `connect`, `receive`, `deliver` and `request`. Everything that it
    sends on its connection outside of `receive` is followed by `self.session.wake()`.
    """

    protocol: ClassVar[str]
    session: Session

    def __init__(self, context: GatewayContext, listener: str) -> None:
        self.context = context
        self.hub = context.hub
        self.listener = listener
        self.host = ""
        self.address = ""
        self.id = context.name_connection(listener)
        self.since = context.now()
        self.principal = ANONYMOUS
        self.left = False
        self.peer = LedgerPeer(self.protocol, self.id, self.principal)
        self.attachments: set[Attachment] = set()
        self.providers: set[Provider] = set()
        self.calls: dict[int, Call] = {}
        self._taken: list[tuple[Window, int]] = []
        self._breached: set[str] = set()

    # What a protocol fills in.

    @classmethod
    def prepare(cls, context: GatewayContext) -> None:
        """The hub is there, nobody is connected yet: take up what outlived the last run."""

    @classmethod
    def leftovers(cls, context: GatewayContext) -> Iterable[Leftover]:  # noqa: ARG003
        """What this protocol holds for peers that may be gone, beside what every gateway has."""
        return ()

    @abstractmethod
    def connect(self, now: float) -> Connection:
        """The protocol's connection, in the role of who accepts."""

    @abstractmethod
    def receive(self, events: list[Event]) -> None:
        """Act on what one read brought, the end of the connection excepted."""

    @abstractmethod
    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:
        """Send these to the peer, and settle or refuse them as it answers."""

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """A gap, or the end of a subscription. Told to the peer where its protocol can."""
        self.log(logging.INFO, "notice", destination=attachment.destination, notice=str(notice))

    @abstractmethod
    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Send these calls to the peer, which said that it serves them."""

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Nobody waits for these calls any more. Most protocols have no word for it."""

    def leave(self) -> None:
        """The peer is gone: let go of what only this protocol knows."""

    def broken(self, error: Exception) -> None:  # noqa: ARG002  it is logged
        """What the peer sent, what the hub has for it, or an answer to it could not be handled:
        the connection ends with the protocol's goodbye, and what it holds goes to others."""
        if not self.left:
            self.session.connection.fail(InternalError("internal error"))
            self.session.wake()

    def owned(self, callback: Callable[P, None]) -> Callable[P, None]:
        """A callback for the hub whose failure ends this connection: its peer would wait for ever
        for what the callback was to send."""

        return guarded(callback, self.broken)

    def log(self, level: int, what: str, **fields: object) -> None:
        """A line about this connection; never about a message."""
        log_event(
            _log,
            level,
            what,
            connection=self.id,
            protocol=self.protocol,
            address=self.address,
            principal=self.principal,
            **fields,
        )

    # Who it is.

    def identify(self, principal: str) -> None:
        """The peer has shown who it is."""
        self.principal = principal
        self.peer = LedgerPeer(self.protocol, self.id, principal)

    def require(self, right: Right, destination: str) -> None:
        """Raises Forbidden."""
        if not self.context.access.may(self.principal, right, destination):
            self.context.count("forbidden", self.protocol)
            raise Forbidden(f"{self.principal or 'a stranger'} may not {right} {destination}")

    def open(self, now: float) -> Connection:
        """Called by the session when the socket is there."""
        name: Any = self.session.transport.get_extra_info("peername")
        if name:
            self.host, self.address = str(name[0]), f"{name[0]}:{name[1]}"
        try:
            return self._enter(now)
        except Exception:
            # There is no connection yet, so nobody else will ever end it.
            self._leave(ConnectionFailed(InternalError("internal error")))
            raise

    def _enter(self, now: float) -> Connection:
        context, transport = self.context, self.session.transport
        certificate = transport.get_extra_info("peercert")
        known = context.access.by_certificate(_common_name(certificate)) if certificate else None
        if known is not None:
            self.identify(known)
        transport.set_write_buffer_limits(context.config.connections.congested_bytes)
        self.session.on_congestion = self.hold_back
        _keep_alive(transport)
        if context.tap is not None:
            self._run("tap", self._open_tap, context.tap)
        context.gateways[self.id] = self
        context.count("connections", self.protocol)
        self.log(logging.INFO, "connected")
        connection = self.connect(now)
        if not context.connection_slots.enter(self, self.host) or context.draining:
            context.count("rejected", self.protocol)
            connection.fail(ServiceUnavailable("the hub has no room for another connection"))
        return connection

    def _open_tap(self, tap: TapSource) -> None:
        self.session.tap = tap.open(self)

    # What it does. All raise HubError, Forbidden included.

    def produce(self, envelopes: Sequence[Envelope]) -> Receipt:
        """Hand a batch over. Messages that the peer may not send must be left out before."""
        self.context.count("produced", self.protocol, by=len(envelopes))
        return self.hub.produce(envelopes, self.context.now())

    def consume(
        self,
        destination: str,
        *,
        window: Window | int | None = None,
        weight: int = 10,
        filter: str = "",  # noqa: A002  what the protocols call it
        name: str = "",
        start: Start = "latest",
        holding: Sequence[int] = (),
    ) -> Attachment:
        """Take messages from a queue, or what is published to a topic or a pattern of them.

        Deliveries may come before this returns.
        """
        self.require("consume", destination)
        if len(self.attachments) >= self.context.config.connections.subscriptions:
            raise self.breach("subscriptions")
        room = self.context.config.connections.window if window is None else window
        now = self.context.now()
        if destination.startswith("queue/"):
            attachment: Attachment = self.hub.consume(
                destination,
                self,
                now,
                peer=self.peer,
                window=room,
                weight=weight,
                filter=filter,
                holding=holding,
            )
        elif destination.startswith("topic/"):
            attachment = self.hub.subscribe(
                destination,
                self,
                now,
                peer=self.peer,
                window=room,
                weight=weight,
                filter=filter,
                name=name,
                start=start,
                holding=holding,
            )
        else:
            raise InvalidDestination(f"{destination!r} is neither a queue nor a topic")
        self.attachments.add(attachment)
        if self.session.congested:
            self.hold_back(True)
        return attachment

    def serve(self, services: Sequence[str], *, window: Window | int = 256) -> Provider:
        """Answer the calls of these services."""
        served = sum(len(each.names) for each in self.providers) + len(services)
        if served > self.context.config.connections.subscriptions:
            raise self.breach("services")
        for service in services:
            if service.startswith(_OURS):
                raise Forbidden(f"{service} is the hub's own")
            self.require("serve", service)
        provider = self.hub.provide(
            services, self, self.context.now(), peer=self.peer, window=window
        )
        self.providers.add(provider)
        return provider

    def call(
        self,
        envelope: Envelope,
        answered: Callable[[Answer], None],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Ask a service; `answered` is called once, unless the peer leaves before."""
        self.require("call", envelope.destination)
        self.call_all([envelope], lambda _, answer: answered(answer), timeout_s=timeout_s)

    def call_all(
        self,
        envelopes: Sequence[Envelope],
        answered: Callable[[Envelope, Answer], None],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Ask services; `answered` is called once for each request, with it and its answer. What
        the peer may not call must be left out before."""

        def finish(call: Call, answer: Answer) -> None:
            self.calls.pop(call.id, None)
            if not self.left:
                if isinstance(answer, Envelope):
                    answer = self.context.schemas.answer(call.envelope, answer)
                answered(call.envelope, answer)

        for call in self.hub.call(
            envelopes,
            self.context.now(),
            answered=self.owned(finish),
            peer=self.peer,
            timeout_s=timeout_s,
        ):
            if not call.is_done:
                self.calls[call.id] = call

    def breach(self, what: str) -> DestinationFull:
        """What to raise for too many of these; counted each time, told once a connection."""
        self.context.count("limited", self.protocol, what)
        if what not in self._breached:
            self._breached.add(what)
            self.log(logging.WARNING, "limited", limit=what)
        return DestinationFull(f"too many {what} on one connection")

    def hold_back(self, held: bool) -> None:
        """The peer doesn't read: what else there is for it stays in the hub until it does."""
        if held:
            windows = [each.window for each in self.attachments]
            windows += [each.window for each in self.providers]
            for window in windows:
                if window.free > 0:
                    self._taken.append((window, window.free))
                    window.free = 0
        else:
            taken, self._taken = self._taken, []
            now = self.context.now()
            for window, count in taken:
                window.grant(count, now)

    def detach(self, attachment: Attachment) -> None:
        self.attachments.discard(attachment)
        attachment.close(self.context.now())

    @property
    def is_busy(self) -> bool:
        """Has it been given messages or calls that it has not answered yet?"""
        held = any(isinstance(each, Consumer) and each.held for each in self.attachments)
        return held or bool(self.calls) or any(each.calls for each in self.providers)

    def close_idle(self, idle_s: float, loop_time: float) -> None:
        """End a connection that says nothing, and waits for nothing, for so long."""
        waits = self.attachments or self.providers or self.calls
        if not waits and loop_time - self.session.read_at > idle_s:
            self.session.connection.fail(PeerTimeout(f"idle for {idle_s:g} s"))
            self.session.wake()

    def disconnect(self) -> bool:
        """Say goodbye and go, in time even if the peer does not answer; False if it is gone.

        For others than the peer's own doing: not to be called while events are handled.
        """
        if self.is_gone:
            self.abandon()
            return False
        # Some protocols wait for the peer's own goodbye: it gets nothing new meanwhile.
        self._run("drain", self.drain)
        self.session.close()
        if self.session.connection.closed and not self.left:
            self.abandon()
        return True

    def abandon(self) -> None:
        """Leave, in case nobody told it that its connection is over."""
        self._leave(ConnectionFailed(InternalError("the connection was left over")))
        self.context.gateways.pop(self.id, None)
        self.context.connection_slots.leave(self)
        self.session.abort()

    @property
    def is_gone(self) -> bool:
        """Has it left, or lost its socket without anybody noticing?"""
        return self.left or self.session.gone.done()

    def drain(self) -> None:
        """The hub is about to stop: nothing new for this peer."""
        for attachment in self.attachments:
            attachment.window.close()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        end = events[-1]
        if not isinstance(end, ConnectionClosed | ConnectionFailed):
            self._receive(events)
            return
        try:
            if len(events) > 1:
                self._receive(events[:-1])
        finally:
            self._leave(end)

    def _receive(self, events: list[Event]) -> None:
        error = self._run("receive", self.receive, events)
        if error is not None:
            self.broken(error)

    def _run(
        self, kind: str, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> Exception | None:
        """What a step raises is logged and counted, and the next one is taken all the same."""
        return self.hub.callbacks.run(f"{self.protocol} {kind}", step, *args, **kwargs)

    def handle_drain(self) -> None:
        """The peer reads again."""

    def _leave(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """What it held goes to others at once; what it asked for is no longer waited for."""
        if self.left:
            return
        self.left = True
        now = self.context.now()
        # First what others could be locked out by. Every step is taken, whatever another raises.
        self.context.gateways.pop(self.id, None)
        self.context.connection_slots.leave(self)
        self._run("leave", self.leave)
        for attachment in list(self.attachments):
            self._run("detach", attachment.close, now)
        for provider in list(self.providers):
            self._run("detach", provider.close, now)
        self._run("cancel", self.hub.cancel, list(self.calls.values()), now)
        self.attachments.clear()
        self.providers.clear()
        self.calls.clear()
        if isinstance(end, ConnectionFailed):
            kind = type(end.error).__name__
            self.context.count("failed", self.protocol, kind)
            self.log(logging.WARNING, "failed", error=kind, description=str(end.error))
        else:
            self.log(logging.INFO, "closed")


def guarded(callback: Callable[P, None], broken: Callable[[Exception], None]) -> Callable[P, None]:
    """A callback that, if it raises, tells its owner before whoever called it."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            broken(error)
            raise

    return run


def _keep_alive(transport: asyncio.Transport) -> None:
    """Half-open sockets are found by TCP, for protocols without a ping of their own."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # the peer has reset it already: the session will find out
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _common_name(certificate: dict[str, Any]) -> str:
    """What a verified certificate calls its owner; nothing for one without a name."""
    parts = [pair for part in certificate.get("subject", ()) for pair in part]
    return str(dict(parts).get("commonName", ""))


def parse_start(text: str) -> Start:
    """`earliest`, `latest`, a message's id, or a time as ISO 8601. Raises InvalidDestination.

    An id has at most 63 bits, and no message is older than 1970: what is outside of that would be
    kept with a subscription or a link and could not be read again.
    """
    if text in ("", "latest"):
        return "latest"
    if text == "earliest":
        return "earliest"
    # Thousands of digits are not converted: Python refuses to, with an error of its own.
    if text.isascii() and text.isdecimal() and len(text) <= _ID_DIGITS:
        identifier = int(text)
        if identifier <= LARGEST_INTEGER:
            return AtId(identifier)
    else:
        try:
            moment = datetime.fromisoformat(text)
            time_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            time_s = -1.0
        if time_s >= 0:
            return AtTime(time_s)
    raise InvalidDestination(
        f"{text[:80]!r} is no start: earliest, latest, an id of 63 bits or a time since 1970"
    )


def check_timeout(timeout_s: Property | None) -> float | None:
    """How long a call may take by its property `timeout`; None for the default, as for 0.

    A property that is no number is the application's own. Raises InvalidEnvelope.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s:
        return None
    if not 0 < timeout_s <= _LONGEST_CALL_S:
        raise InvalidEnvelope(f"a timeout is 0 to {_LONGEST_CALL_S} s, not {timeout_s}")
    return float(timeout_s)
