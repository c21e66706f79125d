"""The base of all gateways: identity, rights, what a peer holds of the hub, and its release.

A gateway connects one peer to the hub. The session calls it with events of the wire connection
(`handle_events`), the hub with messages (`deliver`) and calls (`request`); it calls the hub with
`produce`, `consume`, `call` and `serve`, and the connection with its `send_` methods.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, ParamSpec

from crosswire.access import ANONYMOUS, Right
from crosswire.budget import MemoryAccount
from crosswire.commitlog.contract import Receipt
from crosswire.envelope import NAME_BYTES, NAMED_CHARACTERS, Envelope
from crosswire.errors import (
    CrosswireError,
    DestinationFull,
    Forbidden,
    InternalError,
    InvalidDestination,
    PeerTimeout,
    ServiceUnavailable,
)
from crosswire.gateways.certificates import PeerCertificate, read_certificate
from crosswire.gateways.context import ClosedConnection, GatewayContext, Leftover, TapSource
from crosswire.hub.attachment import (
    UNSUBSCRIBED,
    Attachment,
    Consumer,
    Delivery,
    DeliveryReceiver,
    Notice,
    Window,
)
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.services import Answer, Call, Provider
from crosswire.hub.subscriptions import Start
from crosswire.logs import log_event
from crosswire.session import Session, use_keep_alive
from crosswire.wire.contract import Connection, ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.registry import begins_as_expected, recognize

__all__ = ["HUB_SERVICES", "NEWCOMER_FRAME_BYTES", "Gateway", "WithheldRoom", "guarded"]

_log = logging.getLogger("crosswire.gateways")

P = ParamSpec("P")

HUB_SERVICES: Final = "service/crosswire."
"""Services whose names start with this are the hub's own: no peer can serve them."""

NEWCOMER_FRAME_BYTES: Final = 64 * 1024
"""The largest frame of a peer that has not identified itself, once there are users."""

_EVICTED_S: Final = 1.0
"""How long a peer that is disconnected for its memory may take to read the goodbye."""


class Gateway(ABC):
    """One peer's adapter to the hub: owner of its session, receiver of its deliveries and calls.

    A protocol derives it with `connect` and `receive`; with `deliver`, unless it names another
    receiver when it consumes; and with `request` if its peers can serve. Whatever it sends on its
    connection outside of `receive` is followed by `self.session.wake()`: the session flushes after
    `receive` anyway, but does not know of anything else.
    """

    protocol: ClassVar[str]
    session: Session
    account: MemoryAccount
    counts_calls: ClassVar[bool] = True
    """Whether calls in progress are counted here; False where the connection counts requests that
    are not answered."""

    def __init__(self, context: GatewayContext, listener: str) -> None:
        self.context = context
        self.hub = context.hub
        self.listener = listener
        self.host = ""
        self.address = ""
        self.id = context.name_connection(listener)
        self.since = context.now()
        self.principal = ANONYMOUS
        self.client_name = ""
        """What the peer calls itself, where its protocol has a name for it."""
        self.certificate: PeerCertificate | None = None
        """What identified it, if that was a certificate."""
        self.left = False
        """Whether all that it held is given back; callbacks that come later do nothing."""
        self.peer = LedgerPeer(self.protocol, self.id, self.principal)
        self.attachments: set[Attachment] = set()
        self.providers: set[Provider] = set()
        self.calls: dict[int, Call] = {}
        self._withheld = WithheldRoom()
        self._limits_reported: set[str] = set()
        self._end_reason = ""
        self._granted: object = None
        """The last right that `require` found, by the users that it was decided for."""

    # For protocols to define.

    @classmethod
    def prepare(cls, context: GatewayContext) -> None:
        """Restore what outlived the last run; called before the first peer connects."""

    @classmethod
    def leftovers(cls, context: GatewayContext) -> Iterable[Leftover]:  # noqa: ARG003
        """What this protocol holds for peers that may be gone, beside what every gateway has."""
        return ()

    @classmethod
    def revocations(
        cls,
        context: GatewayContext,  # noqa: ARG003
        is_revoked: Callable[[str, str], bool],  # noqa: ARG003
    ) -> Iterable[Callable[[], None]]:
        """Short steps, which together forget what this protocol keeps without a connection, and
        `context.access` no longer allows; `is_revoked` is whether a principal, or a connection by
        its id, lost its credentials."""
        return ()

    @abstractmethod
    def connect(self, now: float) -> Connection:
        """The protocol's connection, in the role of the accepting side."""

    @abstractmethod
    def receive(self, events: list[Event]) -> None:
        """Act on the events of one read, the end of the connection excepted."""

    def deliver(self, attachment: Attachment, deliveries: list[Delivery]) -> None:  # noqa: ARG002
        """Send these to the peer, and settle or refuse them as it answers."""
        raise TypeError(f"nothing is delivered to {self.listener}")

    def notice(self, attachment: Attachment, notice: Notice) -> None:
        """A gap in a subscription, or its end. Protocols that can do so report it to the peer."""
        self.log(logging.INFO, "notice", destination=attachment.destination, notice=str(notice))

    def request(self, provider: Provider, requests: list[Delivery]) -> None:  # noqa: ARG002
        """Send these calls to the peer, which serves them."""
        raise TypeError(f"nobody serves at {self.listener}")

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Nobody waits for these calls any more. Most protocols can't report that to a provider."""

    def leave(self) -> None:
        """Release what only this protocol holds for the peer; called once, when it is gone."""

    # Failures and the log.

    def broken(self, error: Exception) -> None:  # noqa: ARG002  it is logged
        """Disconnect with the protocol's goodbye for an internal error.

        Called when an event of the peer, a delivery or an answer could not be handled: the peer
        would wait for ever for what was to follow, and what it holds must go to others.
        """
        if not self.left:
            self.session.connection.fail(InternalError("internal error"))
            self.session.wake()

    def owned(self, callback: Callable[P, None]) -> Callable[P, None]:
        """A callback for the hub whose failure ends this connection, and no other."""

        return guarded(callback, self.broken)

    def _run(
        self, kind: str, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> Exception | None:
        """Call a step; gives what it raised, logged and counted, so that the next step follows."""
        return self.hub.callbacks.run(f"{self.protocol} {kind}", step, *args, **kwargs)

    def log(self, level: int, what: str, **fields: object) -> None:
        """A line about this connection; never one for each message."""
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

    # Identity and rights.

    def identify(self, principal: str) -> None:
        """The peer has proved to be this user."""
        self.principal = principal
        self.certificate = None
        self.peer = LedgerPeer(self.protocol, self.id, principal)
        if self in self.context.newcomers:
            self.context.newcomers.remove(self)
            self.session.connection.limit_frames(None)
        owner = self.context.owner_of(principal, self.host)
        self.account.move(owner)
        self.session.share_time(owner)
        self._claim_slot()

    def _claim_slot(self) -> None:
        """Its slot counts for its user, or its address; the peer is disconnected if others need it
        more."""
        context = self.context
        owner, share = context.owner_of(self.principal, self.host), context.config.limits.share
        if owner and not context.connection_slots.assign(self, owner, share):
            context.count("rejected", self.protocol)
            crowded = ServiceUnavailable(
                "the hub has no room for another connection of one user or address"
            )
            asyncio.get_running_loop().call_soon(self.turn_away, crowded)

    def identify_by_token(self, token: str) -> str | None:
        """The user with this token, whom the peer is from now on; None if there is none, or if it
        can't become that one."""
        principal = self.find_user(token)
        if principal is None or not self.may_become(principal):
            return None
        self.identify(principal)
        return principal

    def find_user(self, token: str) -> str | None:
        """The user with this token; None if there is none. If that can't be found out now, the peer
        is disconnected: it may connect again."""
        try:
            return self.context.by_token(token, self.host)
        except ServiceUnavailable as error:
            # Before the refusal, which is delayed at such an address.
            asyncio.get_running_loop().call_soon(self.turn_away, error)
            return None

    def may_become(self, principal: str) -> bool:
        """Whether it may be this user: one that has something as another user stays that one, or
        what it has would outlive the other's rights."""
        if self.principal in (ANONYMOUS, principal):
            return True
        return not (self.attachments or self.providers or self.calls)

    def refuse_sign_in(self, answer: Callable[[], None]) -> None:
        """Count a failed sign-in, and call `answer`, the later the more of them its address has
        had; until then nothing is read from the peer."""
        self.context.count("unauthenticated", self.protocol)
        delay_s = self.context.sign_ins.fail(self.host, self.context.now())
        if not delay_s:
            answer()
            return

        def refuse() -> None:
            if not self.left:
                self.session.hold_reading(False)
                answer()
                self.session.wake()

        self.context.count("delayed", self.protocol, "sign-in")
        self.session.hold_reading(True)
        asyncio.get_running_loop().call_later(delay_s, self.owned(refuse))

    def require_anywhere(self, right: Right) -> None:
        """Raises Forbidden for a peer that has this right to no destination.

        Asked before a body is parsed that names the destination: who may do nothing can't make the
        hub parse anything.
        """
        if not self.context.access.may_anywhere(self.principal, right):
            self.context.count("forbidden", self.protocol)
            name = self.principal or "a peer without identity"
            raise Forbidden(f"{name} may not {right} anything")

    def require(self, right: Right, destination: str) -> None:
        """Raises Forbidden, and InvalidDestination for a name that no destination can have."""
        access = self.context.access
        # Messages of one peer mostly go where its last one went. A reload makes other `access`.
        asked = (access, self.principal, right, destination)
        if asked == self._granted:
            return
        if len(destination) > NAMED_CHARACTERS:
            # Before it is looked up, remembered, logged or sent back.
            raise InvalidDestination(
                f"a destination has at most {NAME_BYTES} bytes, not {len(destination)}"
            )
        if not access.may(self.principal, right, destination):
            self.context.count("forbidden", self.protocol)
            name = self.principal or "a peer without identity"
            raise Forbidden(f"{name} may not {right} {destination}")
        self._granted = asked

    # Connecting.

    def open(self, now: float) -> Connection:
        """Called by the session when the socket, and TLS if there is any, is ready."""
        name: Any = self.session.transport.get_extra_info("peername")
        if name:
            self.host, self.address = str(name[0]), f"{name[0]}:{name[1]}"
        try:
            return self._enter(now)
        except Exception:
            # Without a connection there will be no event that ends it: release everything here.
            self._leave(ConnectionFailed(InternalError("internal error")))
            raise

    def _enter(self, now: float) -> Connection:
        context, transport = self.context, self.session.transport
        owner = context.owner_of(ANONYMOUS, self.host)
        if owner:
            self.hub.holders.add(self.id, owner)
        self.account = self.session.account = context.budget.open(self, owner)
        self.session.share_time(owner)
        certificate = read_certificate(transport)
        known = context.by_certificate(certificate)
        if known is not None:
            self.identify(known)
            self.certificate = certificate
        transport.set_write_buffer_limits(context.config.connections.congested_bytes)
        self.session.on_congestion = self.hold_back
        use_keep_alive(transport)
        if context.tap is not None:
            self._run("tap", self._open_tap, context.tap)
        context.gateways[self.id] = self
        context.count("connections", self.protocol)
        self.log(logging.INFO, "connected")
        connection = self.connect(now)
        if not context.access.open and not self.principal:
            context.newcomers.add(self)
            connection.limit_frames(NEWCOMER_FRAME_BYTES)
            context.make_room_for_newcomer()
        if not context.connection_slots.enter(self, self.host) or context.draining:
            context.count("rejected", self.protocol)
            # The connection is made all the same: only it knows its protocol's refusal.
            connection.fail(ServiceUnavailable("the hub has no room for another connection"))
        else:
            self._claim_slot()
        return connection

    def _open_tap(self, tap: TapSource) -> None:
        self.session.tap = tap.open(self)

    # Produce. All of these raise HubError, Forbidden included.

    def produce(self, envelopes: Sequence[Envelope]) -> Receipt:
        """Give a batch to the hub. The caller has left out what the peer may not send.

        The receipt is done when the batch is durable: only then may the peer be acknowledged.
        """
        self.context.counters["produced", self.protocol] += len(envelopes)
        return self.hub.produce(envelopes, self.context.now())

    # Consume.

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
        receiver: DeliveryReceiver | None = None,
    ) -> Attachment:
        """Take messages from a queue, or from a topic or a pattern of topics.

        `receiver` gets the deliveries, by default this gateway; they may come before this returns.
        """
        self.require("consume", destination)
        if len(self.attachments) >= self.context.config.connections.subscriptions:
            raise self.breach("subscriptions")
        room = self.context.config.connections.window if window is None else window
        now = self.context.now()
        if destination.startswith("queue/"):
            attachment: Attachment = self.hub.consume(
                destination,
                receiver or self,
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
                receiver or self,
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
            # It was congested before this window existed, so nobody has closed it yet.
            self.hold_back(True)
        return attachment

    def detach(self, attachment: Attachment, *, cause: str = UNSUBSCRIBED) -> None:
        """End a subscription; what its peer has not settled goes to others."""
        self.attachments.discard(attachment)
        attachment.close(self.context.now(), cause=cause)

    def withdraw(self, provider: Provider) -> None:
        """End what it serves; calls that it has not answered fail as lost."""
        self.providers.discard(provider)
        provider.close(self.context.now())

    def hold_back(self, held: bool) -> None:
        """Stop, or resume, what the hub sends to a peer that doesn't read: it stays in the hub."""
        if held:
            self._withheld.take([each.window for each in self.attachments])
            self._withheld.take([each.window for each in self.providers])
        else:
            self._withheld.give_back(self.context.now())

    # Call and serve.

    def call(
        self,
        envelope: Envelope,
        answered: Callable[[Answer], None],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Call a service; `answered` is called once, unless the peer leaves before."""
        self.require("call", envelope.destination)
        self.call_all([envelope], lambda _, answer: answered(answer), timeout_s=timeout_s)

    def call_all(
        self,
        envelopes: Sequence[Envelope],
        answered: Callable[[Envelope, Answer], None],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Call services; `answered` is called once for each request, with it and its answer.

        The caller has left out what the peer may not call.
        """

        def finish(call: Call, answer: Answer) -> None:
            if self.calls.pop(call.id, None) is not None and self.counts_calls:
                self.account.add(-call.size_bytes)
            # The caller may have gone while its request was in the hub: nobody to answer.
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
            # Without a provider it is answered before the hub returns; `finish` has run then.
            if not call.is_done:
                self.calls[call.id] = call
                if self.counts_calls:
                    self.account.add(call.size_bytes)

    def serve(self, services: Sequence[str], *, window: Window | int = 256) -> Provider:
        """Have the calls of these services sent to this peer."""
        served = sum(len(each.names) for each in self.providers) + len(services)
        if served > self.context.config.connections.subscriptions:
            raise self.breach("services")
        for service in services:
            if service.startswith(HUB_SERVICES):
                raise Forbidden(f"{service} is the hub's own")
            self.require("serve", service)
        provider = self.hub.provide(
            services, self, self.context.now(), peer=self.peer, window=window
        )
        self.providers.add(provider)
        return provider

    def response(self, payload: bytes, content_type: str) -> Envelope:
        """An answer of this peer to a call; the hub knows which."""
        return Envelope(
            destination="",
            kind="response",
            payload=payload,
            protocol=self.protocol,
            connection=self.id,
            principal=self.principal,
            content_type=content_type,
            crc=zlib.crc32(payload),
        )

    def breach(self, what: str) -> DestinationFull:
        """The error for too many of something; counted each time, logged once a connection."""
        self.context.count("limited", self.protocol, what)
        if what not in self._limits_reported:
            self._limits_reported.add(what)
            self.log(logging.WARNING, "limited", limit=what)
        return DestinationFull(f"too many {what} on one connection")

    # Called by the server.

    @property
    def is_busy(self) -> bool:
        """Whether it has messages or calls that it has not answered yet."""
        held = any(isinstance(each, Consumer) and each.held for each in self.attachments)
        return held or bool(self.calls) or any(each.calls for each in self.providers)

    @property
    def is_gone(self) -> bool:
        """Whether it has left, or lost its socket without being notified."""
        return self.left or self.session.gone.done()

    def drain(self) -> None:
        """Give it nothing new: the hub is about to stop."""
        for attachment in self.attachments:
            attachment.window.close()

    def close_idle(self, idle_s: float, loop_time: float) -> None:
        """Disconnect it if it was silent, and waits for nothing, for `idle_s`."""
        waits = self.attachments or self.providers or self.calls
        if not waits and loop_time - self.session.read_at > idle_s:
            self.session.connection.fail(PeerTimeout(f"idle for {idle_s:g} s"))
            self.session.wake()

    def turn_away(self, error: CrosswireError) -> None:
        """Disconnect it with the protocol's goodbye for this error. Not to be called while its
        events are handled."""
        if not self.left:
            self.session.connection.fail(error)
            self.session.wake()

    def measure_memory(self) -> None:
        """Report what it holds now."""
        self.session.measure_memory()

    def restrain(self, restrained: bool) -> None:
        """Read nothing more from it, or continue: memory is short."""
        if restrained:
            self.context.count("restrained", self.protocol)
            self.log(logging.WARNING, "not read from", held_bytes=self.account.held_bytes)
        self.session.restrain(restrained)

    def evict(self) -> None:
        """Disconnect it: memory is short, and it holds most of it."""
        held_bytes = self.account.held_bytes
        self.context.count("evicted", self.protocol)
        self.turn_away(
            ServiceUnavailable(
                f"the hub is short of memory, and {held_bytes} bytes are this peer's"
            )
        )
        # What is not written may be most of it, and its peer need not read it.
        asyncio.get_running_loop().call_later(_EVICTED_S, self.session.abort)

    def disconnect(self, reason: str = "") -> bool:
        """Disconnect it with the protocol's goodbye, in time even if the peer doesn't answer that.

        False if it was gone already. The `reason` is for operators. Not to be called while its
        events are handled.
        """
        if self.is_gone:
            self.abandon()
            return False
        self._end_reason = reason
        # Some protocols wait for the peer's own goodbye: it gets nothing new meanwhile.
        self._run("drain", self.drain)
        self.session.close()
        if self.session.connection.closed and not self.left:
            self.abandon()
        return True

    def abandon(self) -> None:
        """Give back all that it holds, whatever state its connection is in."""
        self._leave(ConnectionFailed(InternalError("the connection was left over")))
        # `_leave` runs once; entries that somebody made after it are removed here.
        self.context.gateways.pop(self.id, None)
        self.context.connection_slots.leave(self)
        self.session.abort()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        """Act on the events of one read; the end of the connection comes last, and once."""
        end = events[-1]
        if not isinstance(end, ConnectionClosed | ConnectionFailed):
            self._receive(events)
            return
        try:
            if len(events) > 1:
                # What came before the end counts: a peer may send and disconnect in one packet.
                self._receive(events[:-1])
        finally:
            self._leave(end)

    def _receive(self, events: list[Event]) -> None:
        try:
            self.receive(events)
        except Exception as error:
            # Not through `_run`: it happens for every read, and only a failure should cost more.
            self.hub.callbacks.note(f"{self.protocol} receive", error)
            self.broken(error)

    def handle_drain(self) -> None:
        """The peer reads again; for gateways that kept something back meanwhile."""

    def _leave(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Give back what the peer holds, and cancel its calls.

        Runs once, whether the connection ended, could not be made, or is found left over.
        """
        if self.left:
            return
        # Set first: callbacks of the steps below find that there is nobody to send to.
        self.left = True
        now = self.context.now()
        # First what keeps others out, a slot and a name. Each step runs even if another raises.
        self.context.gateways.pop(self.id, None)
        self.context.connection_slots.leave(self)
        self.context.note_departure(self.session)
        self.context.newcomers.remove(self)
        self.hub.holders.remove(self.id)
        self._run("leave", self.leave)
        # There may be a thousand of each: a part of them, or all, in this turn of the event loop.
        held: list[Attachment | Provider] = [*self.attachments, *self.providers]
        for each in held:
            self.hub.defer(f"{self.protocol} detach", each.close, now)
        self._run("cancel", self.hub.cancel, list(self.calls.values()), now)
        self.attachments.clear()
        self.providers.clear()
        self.calls.clear()
        wrong = self._other_protocol()
        if isinstance(end, ConnectionFailed):
            kind = type(end.error).__name__
            self.context.count("failed", self.protocol, kind)
            described = "; ".join(filter(None, (str(end.error), wrong)))
            self.log(logging.WARNING, "failed", error=kind, description=described)
            self._note_end(self._end_reason or described)
        elif wrong is not None:
            self.log(logging.WARNING, "closed", description=wrong)
            self._note_end(self._end_reason or wrong)
        else:
            self.log(logging.INFO, "closed")
            closed = "closed" if end.clean else "closed without the protocol's goodbye"
            self._note_end(
                self._end_reason or ("the hub stopped" if self.context.draining else closed)
            )

    def _note_end(self, reason: str) -> None:
        session = self.session
        self.context.closed.append(
            ClosedConnection(
                self.id,
                self.protocol,
                self.listener,
                self.address,
                self.principal,
                self.client_name,
                self.since,
                self.context.now(),
                reason,
                session.received_bytes,
                session.sent_bytes,
            )
        )

    def _other_protocol(self) -> str | None:
        """The protocol of a peer that speaks another than ours, for people."""
        first = self.session.first_bytes
        if not first or begins_as_expected(self.session.connection, first):
            return None
        return f"the peer speaks {recognize(first)}: it may have the wrong port"


class WithheldRoom:
    """Free room of windows, taken away while their peer can't receive, and given back later."""

    def __init__(self) -> None:
        self._taken: list[tuple[Window, int]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, windows: Iterable[Window]) -> None:
        """Leave no free room in these; a window that is shared, and named twice, counts once."""
        for window in windows:
            if window.free > 0:
                self._taken.append((window, window.free))
                window.free = 0

    def give_back(self, now: float) -> None:
        """Grant all that was taken: the hub sends what has waited."""
        taken, self._taken = self._taken, []
        for window, count in taken:
            window.grant(count, now)


def guarded(callback: Callable[P, None], broken: Callable[[Exception], None]) -> Callable[P, None]:
    """A callback that reports an exception to `broken` before it raises it to its caller."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            broken(error)
            raise

    return run
