"""eMQP's connection: ZeroMQ messages → commands → state → events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from crosswire.errors import (
    CrosswireError,
    LocalProtocolError,
    MalformedFrame,
    PeerTimeout,
    RemoteProtocolError,
    UnexpectedFrame,
)
from crosswire.wire.contract import (
    Connection,
    ConnectionClosed,
    ConnectionFailed,
    Event,
    Frame,
    Limits,
    Placed,
    one_of,
)
from crosswire.wire.emqp.events import (
    Acknowledged,
    AdminRequested,
    CommandIgnored,
    PeerInformed,
    PeerLeaving,
    PeerReady,
    PublicationReceived,
    PublishReceived,
    Registered,
    ReplyReceived,
    RequestReceived,
    ScheduleReceived,
    ShutdownRequested,
    UnscheduleReceived,
)
from crosswire.wire.emqp.frames import (
    DEFAULTS,
    Ack,
    Admin,
    DeliveryFrame,
    Disconnect,
    Heartbeat,
    Inform,
    Kbai,
    Malformed,
    Publish,
    Queue,
    Ready,
    Reply,
    Request,
    ScheduleFrame,
    UnscheduleFrame,
    parse,
    parse_delivery,
    parse_queues,
    serialize,
    serialize_queues,
    serialize_receipts,
    serialize_requests,
)
from crosswire.wire.emqp.headers import Headers, format_number
from crosswire.wire.emqp.layout import COMMAND_KBYE, COMMAND_REQUEST, NO_INTERVAL, VERSION
from crosswire.wire.emqp.runs import OFFERED, MessageRun, taker_at
from crosswire.wire.emqp.states import (
    KNOWN_STATES,
    LISTENERS,
    NOTHING,
    RECEIVES,
    REGISTERS,
    ROLES,
    SENDS,
    SOCKETS,
    State,
)
from crosswire.wire.zmtp.connection import ZmtpConnection
from crosswire.wire.zmtp.events import MessageReceived
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["EmqpConnection"]

_AWAITED: Final = (Admin, Publish, Request, ScheduleFrame, UnscheduleFrame)
"""What is sent under an id that its sender is given: not to be ignored after the end."""


_VISITED: Final = ("emqp-clients", "emqp-publishers", "emqp-admin")
"""Doors at which a peer is served without having registered."""


class EmqpConnection(Connection):
    """One end of an eMQP connection, on a ZMTP connection of its own.

    `role` is who we are. A broker says with `listener` at which of its doors the peer stands. A
    worker and a scheduler introduce themselves as soon as they can; when the broker is gone the
    connection ends, and the owner restarts the conversation on a new one. Message ids come from
    `next_id`; `unix_offset_s` added to `now` is the time since 1970, for heartbeats to tell.

    Commands that make no sense are ignored, told as CommandIgnored and counted in `ignored`.
    """

    def __init__(
        self,
        role: str,
        now: float,
        *,
        limits: Limits | None = None,
        listener: str = "emqp-clients",
        queues: Sequence[Queue] = (),
        identity: bytes = b"",
        mechanism: Mechanism | None = None,
        next_id: Callable[[], str] | None = None,
        unix_offset_s: float = 0.0,
    ) -> None:
        if role not in ROLES or listener not in LISTENERS:
            raise ValueError(f"{role} at {listener} is no place in eMQP")
        self.limits = one_of(limits, DEFAULTS)
        self.seat = listener if role == "broker" else role
        self._zmtp = ZmtpConnection(
            "binder" if role == "broker" else "connector",
            now,
            socket_type=SOCKETS[self.seat],
            identity=identity,
            mechanism=mechanism,
            limits=self.limits,
        )
        # One decoder for both: ZMTP's, whose messages we parse as they come out of it, since with
        # CURVE only it can read them.
        super().__init__(role, self._zmtp.decoder)
        self._zmtp.decoder.take = taker_at(self.seat, self.limits)
        self.state = State.HANDSHAKE
        self.peer: PeerReady | None = None
        self.free_slots = 0
        """Jobs that may be sent to this worker, or that we, a worker, have offered to take."""
        self.ignored = 0
        self.paused = False
        """Set by an owner that can't take more for now; a peer that isn't read isn't silent."""
        self.goodbye = COMMAND_KBYE.decode()
        """How the peer spells it: KBAI once it has, KBYE until then."""
        self._queues = tuple(queues)
        self._next_id = next_id or _counter()
        self._unix_offset_s = unix_offset_s
        self._now = self._last_received_at = now
        self._beat_at = now
        self._left_at = now
        self._inform = ""
        self._stranger_answered = False
        self._goodbye_sent = False
        self._receives = self._sends = NOTHING
        self._handlers: dict[type[Frame], Callable[..., None]] = {
            Request: self._on_request,
            Reply: self._on_reply,
            Ready: self._on_ready,
            Publish: self._on_publish,
            ScheduleFrame: self._on_schedule,
            UnscheduleFrame: self._on_schedule,
            Heartbeat: self._on_heartbeat,
            Inform: self._on_inform,
            Ack: self._on_ack,
            Admin: self._on_admin,
            Disconnect: self._on_disconnect,
            Kbai: self._on_kbai,
            DeliveryFrame: self._on_delivery,
        }

    # Sending: the broker.

    def send_ack(self, msgid: str) -> None:
        """Let in who informed us, or confirm what administration asked for."""
        self._send(Ack(self._next_id(), msgid))
        if self.state is State.INFORMED and msgid == self._inform:
            self._enter(State.REGISTERED)
            self._beat_at = self._now + self.limits.heartbeat_interval_s
            # A deployed job manager starts its processes when it hears the first heartbeat.
            self._send_heartbeat(self._now)

    def send_receipt(self, request: str) -> None:
        """Tell a client that its request was taken."""
        self._send(Reply(self._next_id(), request.encode()))

    def send_receipts(self, requests: Sequence[bytes]) -> None:
        """`send_receipt` for many at a time: ids as they stood on the wire."""
        if self.closed:
            return
        if Reply not in self._sends or self._zmtp.seals:
            for request in requests:
                self.send_receipt(request.decode())
        elif not self._zmtp.closed:
            next_id = self._next_id
            msgids = [next_id().encode() for _ in requests]
            self._zmtp.send_serialized(serialize_receipts(msgids, requests))

    def send_result(self, message: bytes, request: str) -> None:
        """Tell a client what became of its request. Raises TooLargeToSend."""
        self._send_large(Reply(self._next_id(), message, request), message)

    def send_answer(self, message: bytes) -> None:
        """Answer administration; `message` is JSON."""
        self._send(Reply(self._next_id(), message))

    def send_publication(self, topic: str, message: bytes) -> None:
        """Hand something published to a subscriber that wants it. Raises TooLargeToSend."""
        self._send_large(DeliveryFrame(topic, message), message)

    # Sending: both sides.

    def send_request(
        self, queue: str, headers: str, message: bytes, *, msgid: str | None = None
    ) -> str:
        """Ask the broker; or, as the broker, give a worker a job under the id that it has already.

        Gives the id. Raises LocalProtocolError if the worker has no free slot.
        """
        to_worker = self.seat == "emqp-workers"
        if to_worker and not self.free_slots:
            raise LocalProtocolError("the worker has no free slot")
        if msgid is None:
            msgid = self._next_id()
        self._send(Request(msgid, queue, headers, message))
        if to_worker:
            self.free_slots -= 1
        return msgid

    def require_room(self, msgid: bytes, queue: str, headers: str, message: bytes) -> None:
        """Raises TooLargeToSend for a REQUEST that would be too large."""
        zmtp = self._zmtp
        if len(message) + 4 * (len(headers) + len(queue)) + len(msgid) > zmtp.surely_bytes:
            parts = (
                b"",
                VERSION,
                COMMAND_REQUEST,
                msgid,
                queue.encode(),
                headers.encode(),
                message,
            )
            zmtp.require_room(map(len, parts))

    def send_requests(self, requests: Sequence[tuple[bytes, str, str, bytes]]) -> None:
        """Give a worker many jobs at a time: id, queue, headers and message of each, the id as it
        stands on the wire.

        Raises LocalProtocolError if the worker has not that many free slots.
        """
        if self.closed:
            return
        if Request not in self._sends or self._zmtp.seals or self.free_slots < len(requests):
            for msgid, queue, headers, message in requests:
                self.send_request(queue, headers, message, msgid=msgid.decode())
        elif not self._zmtp.closed:
            self.free_slots -= len(requests)
            self._zmtp.send_serialized(serialize_requests(requests))

    def send_schedule(
        self,
        queue: str,
        headers: str,
        message: bytes,
        *,
        interval_s: float | None = None,
        cron: str | None = None,
        msgid: str | None = None,
    ) -> str:
        """Ask the broker, or have a scheduler do it; in the 9 frames that deployed peers know."""
        return self._send_timed(ScheduleFrame, queue, headers, message, interval_s, cron, msgid)

    def send_unschedule(
        self,
        queue: str,
        headers: str,
        message: bytes,
        *,
        interval_s: float | None = None,
        cron: str | None = None,
        msgid: str | None = None,
    ) -> str:
        """End the schedule of this message."""
        return self._send_timed(UnscheduleFrame, queue, headers, message, interval_s, cron, msgid)

    def leave(self) -> None:
        """Say KBAI: nothing new is taken or given; a worker's results still get through.

        Harmless where there is nobody to part from."""
        if Kbai in self._sends:
            self._send_kbai()
            self._enter(State.LEAVING)

    def send_disconnect(self) -> None:
        """As administration: ask the broker to stop. As the broker: send a worker away."""
        self._send(Disconnect(self._next_id()))

    # Sending: the others.

    def send_publish(self, topic: str, message: bytes, headers: str | None = None) -> str:
        """Without headers in the 6 frames of a publisher, with them in 7."""
        msgid = self._next_id()
        self._send(Publish(msgid, topic, headers, message))
        return msgid

    def send_ready(self) -> None:
        """Offer room for one more job."""
        self._send(Ready(self._next_id()))
        self.free_slots += 1

    def send_reply(self, message: bytes, request: str) -> None:
        """Give the broker the result of a job."""
        self._send(Reply(self._next_id(), message, request))

    def send_admin(self, command: str) -> str:
        """Ask the broker how it is."""
        msgid = self._next_id()
        self._send(Admin(msgid, command))
        return msgid

    def send_subscribe(self, topic: str) -> None:
        """Want every topic that starts so."""
        if self.closed:
            return
        self._require(self.seat == "subscriber", "subscribe")
        self._zmtp.send_subscribe(topic.encode())

    def send_unsubscribe(self, topic: str) -> None:
        """Take one subscription back."""
        if self.closed:
            return
        self._require(self.seat == "subscriber", "unsubscribe")
        self._zmtp.send_cancel(topic.encode())

    # Receiving.

    @property
    def last_received_at(self) -> float:
        """When the peer gave its last sign of life."""
        return self._last_received_at

    @property
    def wants_data(self) -> bool:
        return not self.paused and self._zmtp.wants_data

    def receive_eof(self) -> None:
        if not self.closed:
            self._zmtp.receive_eof()
            self._take(self._zmtp.events())

    def data_to_send(self) -> list[bytes | memoryview]:
        return self._zmtp.data_to_send()

    def next_deadline(self) -> float | None:
        if self.closed:
            return None
        below = self._zmtp.next_deadline()
        state = self.state
        if state is State.OPEN:
            return below
        if state is State.REGISTERED or state is State.INFORMED:
            own = self._last_received_at + self.limits.silence_s
            if state is State.REGISTERED and self._beat_at < own:
                own = self._beat_at
        elif state is State.LEAVING:
            own = self._left_at + self.limits.leaving_s
        else:
            return below
        return own if below is None or own < below else below

    def _receive(self, placed: list[Placed], now: float) -> None:
        self._now = now
        zmtp = self._zmtp
        if zmtp.decoder.take is None:
            zmtp._receive(placed, now)
            self._take(zmtp.events())
            return
        zmtp.note_received()
        for item in placed:
            frame = item[2]
            if type(frame) is MessageRun:
                self._take_run(frame)
            else:
                zmtp._receive([item], now)
                self._take(zmtp.events())
            if self.closed:
                return

    def _take_run(self, run: MessageRun) -> None:
        if run.kind in self._receives:
            self._last_received_at = self._now
            self._events += run.events
            if run.kind is Ready:
                self.free_slots += len(run.events)
        else:
            for _ in run.events:
                self._refuse(run.kind)

    def _take(self, events: list[Event]) -> None:
        """What ZMTP told us."""
        read = parse_delivery if self.seat == "subscriber" else parse
        handlers = self._handlers
        for event in events:
            if type(event) is MessageReceived:
                frame = read(event.parts)
                kind = type(frame)
                if kind in self._receives:
                    self._last_received_at = self._now
                    handlers[kind](frame)
                else:
                    self._ignore(frame)
            elif isinstance(event, ConnectionClosed | ConnectionFailed):
                self._finish(event)
            else:
                self._events.append(event)
                if isinstance(event, PeerReady):
                    self._open(event)
            if self.closed:
                return

    def _open(self, event: PeerReady) -> None:
        self.peer = event
        self._enter(State.OPEN)
        if self.role in ("worker", "scheduler"):
            self._inform = self._next_id()
            self._send(Inform(self._inform, serialize_queues(self._queues), self.role))
            self._last_received_at = self._now
            self._enter(State.INFORMED)

    def _ignore(self, frame: Frame) -> None:
        if isinstance(frame, Malformed):
            self._report_ignored(frame.error())
        else:
            self._refuse(type(frame))

    def _refuse(self, kind: type[Frame]) -> None:
        self._meet_stranger()
        self._report_ignored(
            UnexpectedFrame(
                f"unexpected command: {kind.frame_name} at {self.seat} in {self.state.value}"
            )
        )

    def _meet_stranger(self) -> None:
        """A worker that a broker before us knew registers again when it is told to go.

        It is told once: a deployed one would fall over a second time.
        """
        if self.seat == "emqp-workers" and self.state is State.OPEN and not self._stranger_answered:
            self._stranger_answered = True
            self.send_disconnect()

    def _report_ignored(self, error: RemoteProtocolError) -> None:
        self.ignored += 1
        self._events.append(CommandIgnored(error))

    # Receiving: one method a command.

    def _on_request(self, frame: Request) -> None:
        if self.free_slots:
            self.free_slots -= 1
        self._events.append(RequestReceived(frame.msgid, frame.queue, frame.headers, frame.message))

    def _on_reply(self, frame: Reply) -> None:
        if frame.request is None and self.seat == "emqp-workers":
            self._report_ignored(MalformedFrame("a worker's reply that names no request"))
        else:
            self._events.append(ReplyReceived(frame.msgid, frame.message, frame.request))

    def _on_ready(self, _frame: Ready) -> None:
        self.free_slots += 1
        self._events.append(OFFERED)

    def _on_publish(self, frame: Publish) -> None:
        self._events.append(
            PublishReceived(frame.msgid, frame.topic, frame.headers or "", frame.message)
        )

    def _on_schedule(self, frame: ScheduleFrame | UnscheduleFrame) -> None:
        headers = Headers.parse(frame.headers)
        if frame.interval is None:
            interval_s, cron = headers.interval_s, headers.cron
        else:
            interval_s, cron = _interval(frame.interval), frame.cron or None
        if interval_s is not None:
            cron = None
        if isinstance(frame, UnscheduleFrame):
            event_type: type[ScheduleReceived | UnscheduleReceived] = UnscheduleReceived
        elif interval_s is None and cron is None:
            self._report_ignored(MalformedFrame("a schedule without an interval or a cron"))
            return
        else:
            event_type = ScheduleReceived
        self._events.append(
            event_type(frame.msgid, frame.queue, frame.headers, interval_s, cron, frame.message)
        )

    def _on_heartbeat(self, _frame: Heartbeat) -> None:
        """That it was heard is all there is to it."""

    def _on_inform(self, frame: Inform) -> None:
        if frame.peer != REGISTERS[self.seat]:
            self._report_ignored(
                UnexpectedFrame(f"only a {REGISTERS[self.seat]} can register here")
            )
            return
        try:
            queues = parse_queues(frame.queues) if frame.peer == "worker" else ()
        except MalformedFrame as error:
            self._report_ignored(error)
            return
        self.free_slots = 0
        self._inform = frame.msgid
        self._enter(State.INFORMED)
        self._events.append(PeerInformed(frame.msgid, frame.peer, queues))

    def _on_ack(self, frame: Ack) -> None:
        if self.state is State.INFORMED and frame.acknowledged == self._inform:
            self._enter(State.REGISTERED)
            self._beat_at = self._now + self.limits.heartbeat_interval_s
            self._events.append(Registered())
        else:
            self._events.append(Acknowledged(frame.acknowledged))

    def _on_admin(self, frame: Admin) -> None:
        self._events.append(AdminRequested(frame.msgid, frame.command))

    def _on_delivery(self, frame: DeliveryFrame) -> None:
        self._events.append(PublicationReceived(frame.topic, frame.message))

    def _on_disconnect(self, frame: Disconnect) -> None:
        """Administration stops the broker; anybody else's ends this connection only."""
        if self.seat == "emqp-admin":
            self._events.append(ShutdownRequested(frame.msgid))
        else:
            self.close()

    def _on_kbai(self, frame: Kbai) -> None:
        """The leave-taking of who has registered. From a client, a publisher or administration it
        has no effect: what they ask for later is served. So is a scheduler that has taken its
        leave, which is a client like any other then."""
        self.goodbye = frame.spelling
        if self.state is State.LEAVING or self._is_visited:
            return
        parting = State.OPEN if self.seat == "emqp-clients" else State.LEAVING
        self._enter(parting)
        self._events.append(PeerLeaving())

    @property
    def _is_visited(self) -> bool:
        """Are we the broker to somebody who has not registered, and need not?"""
        return self.state is State.OPEN and self.seat in _VISITED

    # Time.

    def _expire(self, now: float) -> None:
        self._now = now
        if self.paused or self.unread:
            self._last_received_at = now
            self._zmtp._receive([], now)
        self._zmtp.handle_deadline(now)
        self._take(self._zmtp.events())
        if self.state is State.LEAVING:
            if now >= self._left_at + self.limits.leaving_s:
                self.close()
        elif self.state in KNOWN_STATES:
            if now >= self._last_received_at + self.limits.silence_s:
                raise PeerTimeout(f"the peer was silent for {self.limits.silence_s:g} s")
            if self.state is State.REGISTERED and now >= self._beat_at:
                self._beat_at = now + self.limits.heartbeat_interval_s
                self._send_heartbeat(now)

    # Ending.

    def close(self) -> None:
        """Say KBAI where it is due, and end. A worker with jobs at hand calls `leave` first."""
        if self.closed:
            return
        if Kbai in self._sends:
            self._send_kbai()
        self._goodbye_sent = True
        self._zmtp.close()
        self._take(self._zmtp.events())

    def fail(self, error: CrosswireError) -> None:
        if self.closed:
            return
        error.__traceback__ = None
        self._send_goodbye(error)
        self._zmtp.fail(error)
        self._take(self._zmtp.events())

    def _send_goodbye(self, error: CrosswireError) -> None:
        """Whoever is gone is sent nothing more; what broke ZMTP gets ZMTP's own ERROR."""
        if not isinstance(error, RemoteProtocolError) and Kbai in self._sends:
            self._send_kbai()

    def _finish(self, event: ConnectionClosed | ConnectionFailed) -> None:
        """For who has registered, only KBAI makes the end a clean one."""
        if isinstance(event, ConnectionClosed):
            parted = self._goodbye_sent or self.state not in KNOWN_STATES
            event = ConnectionClosed(clean=event.clean and parted)
        self._enter(State.CLOSED)
        self._end(event)

    # In common.

    def _enter(self, state: State) -> None:
        self.state = state
        self._receives = RECEIVES.get((self.seat, state), NOTHING)
        self._sends = SENDS.get((self.seat, state), NOTHING)
        if state is State.LEAVING:
            self._left_at = self._now
            self.free_slots = 0

    def _send(self, frame: Frame) -> None:
        if type(frame) not in self._sends:
            if self.closed and type(frame) not in _AWAITED:
                return
            self._require(False, frame.frame_name)
        # What is sent in answer to the last words of a connection that then failed goes nowhere.
        if not self._zmtp.closed:
            self._zmtp.send_message(serialize(frame))

    def _send_large(self, frame: Frame, message: bytes) -> None:
        """`_send` for what may be too large: its other parts are short."""
        if len(message) > self._zmtp.surely_bytes:
            self._zmtp.require_room(map(len, serialize(frame)))
        self._send(frame)

    def _require(self, allowed: bool, what: str) -> None:
        if not allowed:
            raise LocalProtocolError(
                f"{what} can't be sent by {self.seat} in state {self.state.value}"
            )

    def _send_heartbeat(self, now: float) -> None:
        self._send(Heartbeat(self._next_id(), str(self._unix_offset_s + now)))

    def _send_kbai(self) -> None:
        self._send(Kbai(self._next_id(), self.goodbye))
        self._goodbye_sent = True

    def _send_timed(
        self,
        kind: type[ScheduleFrame | UnscheduleFrame],
        queue: str,
        headers: str,
        message: bytes,
        interval_s: float | None,
        cron: str | None,
        msgid: str | None,
    ) -> str:
        if (interval_s is None) == (cron is None) and kind is ScheduleFrame:
            raise LocalProtocolError("a schedule has either an interval or a cron")
        msgid = msgid or self._next_id()
        interval = NO_INTERVAL if interval_s is None else format_number(interval_s)
        self._send(kind(msgid, queue, headers, interval, message, cron or ""))
        return msgid


def _counter() -> Callable[[], str]:
    """Ids that are unique on one connection: enough where nobody looks further."""
    numbers = count(1)
    return lambda: str(next(numbers))


def _interval(text: str) -> float | None:
    """Seconds, above zero; None for -1 and whatever else is none."""
    return Headers((f"interval:{text}",)).interval_s or None
