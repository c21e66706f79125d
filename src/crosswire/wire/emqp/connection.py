"""eMQP's connection: ZeroMQ messages in, state, events and ZeroMQ messages out.

Workers and schedulers register with INFORM, which the broker acknowledges; from then on both sides
send heartbeats, and a silent peer is gone. All other roles are served without registering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from crosswire.errors import (
    CrosswireError,
    FrameTooLarge,
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
from crosswire.wire.emqp.headers import format_number
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
    TRANSITIONS,
    UNREGISTERED,
    State,
)
from crosswire.wire.zmtp.connection import ZmtpConnection
from crosswire.wire.zmtp.events import MessageReceived
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["TRANSITIONS", "EmqpConnection", "State"]

_AWAITED: Final = (Admin, Publish, Request, ScheduleFrame, UnscheduleFrame)
"""Commands whose `send_` method returns a msgid: after the end it raises instead."""


class EmqpConnection(Connection):
    """One end of an eMQP connection, on a ZMTP connection of its own.

    `role` is ours; for a broker `listener` is the one that the peer connected to. A worker and a
    scheduler register as soon as the connection is open; when the broker is gone the connection
    ends, and the owner makes a new one. Message ids come from `next_id`; `unix_offset_s` added to
    `now` is the time since 1970, which heartbeats contain.

    Invalid and unexpected commands are ignored, reported as CommandIgnored and counted in
    `ignored`: deployed peers send some.
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
            raise ValueError(f"eMQP has no role {role} at {listener}")
        self.limits = one_of(limits, DEFAULTS)
        self.side = listener if role == "broker" else role
        self._zmtp = ZmtpConnection(
            "binder" if role == "broker" else "connector",
            now,
            socket_type=SOCKETS[self.side],
            identity=identity,
            mechanism=mechanism,
            limits=self.limits,
        )
        # ZMTP's decoder, not EmqpDecoder: with CURVE only ZMTP's connection can decrypt messages,
        # so commands are parsed here, from its events.
        super().__init__(role, self._zmtp.decoder)
        self._zmtp.decoder.take = taker_at(self.side, self.limits)
        self.state = State.HANDSHAKE
        self.peer: PeerReady | None = None
        self.free_slots = 0
        """Jobs that the worker can take: of the peer, or ours if we are the worker."""
        self.ignored = 0
        self.paused = False
        """Set by an owner that can't take more for now. A peer that is not read can't be silent."""
        self.goodbye = COMMAND_KBYE.decode()
        """How KBAI is spelled: as the peer did, as deployed peers do until it has."""
        self._queues = tuple(queues)
        self._next_id = next_id or _counter()
        self._unix_offset_s = unix_offset_s
        self._now = self._last_received_at = now
        self._beat_at = now
        self._left_at = now
        self._inform = ""
        self._sent_disconnect = False
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
        """Register the peer that sent this INFORM, or confirm an admin's DISCONNECT."""
        self._send(Ack(self._next_id(), msgid))
        if self.state is State.INFORMED and msgid == self._inform:
            self._enter(State.REGISTERED)
            self._beat_at = self._now + self.limits.heartbeat_interval_s
            # A deployed job manager starts its processes when it receives the first heartbeat.
            self._send_heartbeat(self._now)

    def send_receipt(self, request: str) -> None:
        """Confirm to a client that its request was accepted."""
        self._send(Reply(self._next_id(), request.encode()))

    def send_receipts(self, requests: Sequence[bytes]) -> None:
        """`send_receipt` for many requests at a time, by their msgids as bytes."""
        if self.closed:
            return
        # One piece of bytes for all, unless each has to be encrypted or refused.
        if Reply not in self._sends or self._zmtp.seals:
            for request in requests:
                self.send_receipt(request.decode())
        elif not self._zmtp.closed:
            next_id = self._next_id
            msgids = [next_id().encode() for _ in requests]
            self._zmtp.send_serialized(serialize_receipts(msgids, requests))

    def send_result(self, message: bytes, request: str) -> None:
        """Send a client the result of its request. Raises TooLargeToSend."""
        self._send_large(Reply(self._next_id(), message, request), message)

    def send_answer(self, message: bytes) -> None:
        """Answer an admin; `message` is JSON."""
        self._send(Reply(self._next_id(), message))

    def send_publication(self, topic: str, message: bytes) -> None:
        """Send a published message to a subscriber. Raises TooLargeToSend."""
        self._send_large(DeliveryFrame(topic, message), message)

    # Sending: both sides.

    def send_request(
        self, queue: str, headers: str, message: bytes, *, msgid: str | None = None
    ) -> str:
        """Send the broker a job; or, as the broker, send it to a worker under its `msgid`.

        Returns the msgid. Raises LocalProtocolError if the worker has no free slot.
        """
        to_worker = self.side == "emqp-workers"
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
        # A character has at most 4 bytes: nearly always nothing needs to be encoded to decide.
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
        """Send a worker many jobs at a time: msgid as bytes, queue, headers and message of each.

        Raises LocalProtocolError if the worker has fewer free slots.
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
        """Send the broker a schedule, or as the broker send it to a scheduler; in the 9 parts that
        deployed peers know. Returns the msgid."""
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
        """End the schedule of this message. Returns the msgid."""
        return self._send_timed(UnscheduleFrame, queue, headers, message, interval_s, cron, msgid)

    def leave(self) -> None:
        """Send KBAI: from now on no jobs are sent or accepted, only a worker's results.

        No effect for sides that don't register.
        """
        if Kbai in self._sends:
            self._send_kbai()
            self._enter(State.LEAVING)

    def send_disconnect(self) -> None:
        """As an admin: ask the broker to stop. As the broker: make a worker register again."""
        self._send(Disconnect(self._next_id()))

    # Sending: the others.

    def send_publish(self, topic: str, message: bytes, headers: str | None = None) -> str:
        """Publish a message; without headers in a publisher's 6 parts. Returns the msgid."""
        msgid = self._next_id()
        self._send(Publish(msgid, topic, headers, message))
        return msgid

    def send_ready(self) -> None:
        """Offer to take one more job."""
        self._send(Ready(self._next_id()))
        self.free_slots += 1

    def send_reply(self, message: bytes, request: str) -> None:
        """Send the broker the result of a job."""
        self._send(Reply(self._next_id(), message, request))

    def send_admin(self, command: str) -> str:
        """Send the broker one of ADMIN_COMMANDS. Returns the msgid."""
        msgid = self._next_id()
        self._send(Admin(msgid, command))
        return msgid

    def send_subscribe(self, topic: str) -> None:
        """Subscribe to all topics that begin with `topic`."""
        if self.closed:
            return
        self._require(self.side == "subscriber", "subscribe")
        self._zmtp.send_subscribe(topic.encode())

    def send_unsubscribe(self, topic: str) -> None:
        """Cancel one subscription."""
        if self.closed:
            return
        self._require(self.side == "subscriber", "unsubscribe")
        self._zmtp.send_cancel(topic.encode())

    def send_ping(self, context: bytes) -> bool:
        """Send ZMTP's PING; its PongReceived shows that all before it was read.

        False if the peer's ZMTP is older than that.
        """
        self._require(not self.closed, "PING")
        if not self._zmtp.knows_pings:
            return False
        self._zmtp.send_ping(context=context)
        return True

    # Receiving.

    @property
    def last_received_at(self) -> float:
        """When the peer's last valid command was received."""
        return self._last_received_at

    @property
    def held_bytes(self) -> int:
        """What ZMTP keeps."""
        return self._zmtp.held_bytes

    def completed_bytes(self, count: int) -> int:
        """As ZMTP's connection."""
        return self._zmtp.completed_bytes(count)

    @property
    def missing_bytes(self) -> int:
        """As ZMTP's connection."""
        return self._zmtp.missing_bytes

    def release(self) -> None:
        """Drop what ZMTP keeps, too."""
        self._zmtp.release()

    @property
    def wants_data(self) -> bool:
        """False while `paused`."""
        return not self.paused and self._zmtp.wants_data

    def receive_eof(self) -> None:
        """Clean only after KBAI, if the peer has registered."""
        if not self.closed:
            self._zmtp.receive_eof()
            self._take(self._zmtp.events())

    def data_to_send(self) -> list[bytes | memoryview]:
        """All bytes are ZMTP's."""
        return self._zmtp.data_to_send()

    def next_deadline(self) -> float | None:
        """ZMTP's, or that of the next heartbeat, of the peer's silence or of its leaving."""
        if self.closed:
            return None
        # This is called after every read: hence no list of candidates and no `min`.
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
                # In order: what ZMTP makes of this frame must be reported before the next run.
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
            # Not allowed now: each counts as ignored, as if it had been read alone.
            for _ in run.events:
                self._refuse(run.kind)

    def _take(self, events: list[Event]) -> None:
        """Process ZMTP's events, in which messages are commands."""
        read = parse_delivery if self.side == "subscriber" else parse
        handlers = self._handlers
        for event in events:
            if type(event) is MessageReceived:
                frame = read(event.parts)
                kind = type(frame)
                if kind in self._receives:
                    # Only a valid command is a sign of life: a peer that sends others is as good as
                    # gone.
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
            # The broker's silence counts from here.
            self._last_received_at = self._now
            self._enter(State.INFORMED)

    def _ignore(self, frame: Frame) -> None:
        if isinstance(frame, Malformed):
            self._report_ignored(frame.error())
        else:
            self._refuse(type(frame))

    def _refuse(self, kind: type[Frame]) -> None:
        # A worker that sends commands without having registered was registered with a broker
        # before us: DISCONNECT makes it register again. It is sent once, since a deployed job
        # manager fails on a second one.
        if self.side == "emqp-workers" and self.state is State.OPEN and not self._sent_disconnect:
            self._sent_disconnect = True
            self.send_disconnect()
        self._report_ignored(
            UnexpectedFrame(
                f"unexpected command: {kind.frame_name} at {self.side} in {self.state.value}"
            )
        )

    def _report_ignored(self, error: RemoteProtocolError) -> None:
        self.ignored += 1
        self._events.append(CommandIgnored(error))

    # Receiving: one method per command.

    def _is_too_long(self, frame: Request | Publish | ScheduleFrame | UnscheduleFrame) -> bool:
        """Whether a name or the headers pass a limit; if so, the command is reported as ignored.

        Checked before headers are split: a text of commas only would become as many entries. Only
        by the broker: it may send a worker more, when properties of another protocol are encoded.
        """
        if not self.side.startswith("emqp-"):
            return False
        limits = self.limits
        name = frame.topic if isinstance(frame, Publish) else frame.queue
        headers = frame.headers or ""
        if len(name) <= limits.name_bytes and len(frame.msgid) <= limits.name_bytes:
            if len(headers) < limits.headers:
                return False
            if len(headers) <= limits.header_bytes and headers.count(",") < limits.headers:
                return False
            what = f"headers of {len(headers)} characters and {headers.count(',') + 1} entries"
        else:
            what = f"a name of {max(len(name), len(frame.msgid))} characters"
        self._report_ignored(FrameTooLarge(f"{frame.frame_name} has {what}"))
        return True

    def _on_request(self, frame: Request) -> None:
        if self._is_too_long(frame):
            return
        # Of a worker; other sides have none.
        if self.free_slots:
            self.free_slots -= 1
        self._events.append(RequestReceived(frame.msgid, frame.queue, frame.headers, frame.message))

    def _on_reply(self, frame: Reply) -> None:
        if frame.request is None and self.side == "emqp-workers":
            self._report_ignored(MalformedFrame("a worker's reply that names no request"))
        else:
            self._events.append(ReplyReceived(frame.msgid, frame.message, frame.request))

    def _on_ready(self, _frame: Ready) -> None:
        self.free_slots += 1
        self._events.append(OFFERED)

    def _on_publish(self, frame: Publish) -> None:
        if self._is_too_long(frame):
            return
        self._events.append(
            PublishReceived(frame.msgid, frame.topic, frame.headers or "", frame.message)
        )

    def _on_schedule(self, frame: ScheduleFrame | UnscheduleFrame) -> None:
        if self._is_too_long(frame):
            return
        interval_s, cron = frame.timing()
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
        """Being received is all its effect: see `last_received_at`."""

    def _on_inform(self, frame: Inform) -> None:
        if frame.peer != REGISTERS[self.side]:
            self._report_ignored(
                UnexpectedFrame(f"only a {REGISTERS[self.side]} can register here")
            )
            return
        try:
            if len(frame.queues) > self.limits.header_bytes:
                raise FrameTooLarge(f"a list of queues of {len(frame.queues)} characters")
            queues = parse_queues(frame.queues) if frame.peer == "worker" else ()
        except (MalformedFrame, FrameTooLarge) as error:
            self._report_ignored(error)
            return
        # A worker that registers again has restarted, or lost its broker: its slots are void.
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
        """An admin's asks the broker to stop; any other ends this connection only."""
        if self.side == "emqp-admin":
            self._events.append(ShutdownRequested(frame.msgid))
        else:
            self.close()

    def _on_kbai(self, frame: Kbai) -> None:
        """A registered peer leaves. From a client, a publisher or an admin it has no effect: what
        they ask for later is served. So is a scheduler that has left: it is a client then."""
        self.goodbye = frame.spelling
        if self.state is State.LEAVING:
            return
        if self.state is State.OPEN and self.side in UNREGISTERED:
            return
        self._enter(State.OPEN if self.side == "emqp-clients" else State.LEAVING)
        self._events.append(PeerLeaving())

    # Time.

    def _expire(self, now: float) -> None:
        self._now = now
        if self.paused or self.unread:
            # Its signs of life may be among the bytes that we don't read.
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
        """Send KBAI if we or the peer are registered, and end. A worker with unfinished jobs calls
        `leave` first."""
        if self.closed:
            return
        if Kbai in self._sends:
            self._send_kbai()
        self._goodbye_sent = True
        self._zmtp.close()
        self._take(self._zmtp.events())

    def fail(self, error: CrosswireError) -> None:
        """Send KBAI or ZMTP's ERROR, and end."""
        if self.closed:
            return
        error.__traceback__ = None
        self._send_goodbye(error)
        self._zmtp.fail(error)
        self._take(self._zmtp.events())

    def _send_goodbye(self, error: CrosswireError) -> None:
        """KBAI for our own errors. A peer that timed out or violated ZMTP is sent no command; for
        the latter ZMTP sends its ERROR."""
        if not isinstance(error, RemoteProtocolError) and Kbai in self._sends:
            self._send_kbai()

    def _finish(self, event: ConnectionClosed | ConnectionFailed) -> None:
        """The end of a registered peer's connection is clean only after KBAI."""
        if isinstance(event, ConnectionClosed):
            has_left = self._goodbye_sent or self.state not in KNOWN_STATES
            event = ConnectionClosed(clean=event.clean and has_left)
        self._enter(State.CLOSED)
        self._end(event)

    # In common.

    def _enter(self, state: State) -> None:
        self.state = state
        self._receives = RECEIVES.get((self.side, state), NOTHING)
        self._sends = SENDS.get((self.side, state), NOTHING)
        if state is State.LEAVING:
            self._left_at = self._now
            self.free_slots = 0

    def _send(self, frame: Frame) -> None:
        if type(frame) not in self._sends:
            if self.closed and type(frame) not in _AWAITED:
                return
            self._require(False, frame.frame_name)
        # ZMTP may have failed in the same read as the command that is answered here.
        if not self._zmtp.closed:
            self._zmtp.send_message(serialize(frame))

    def _send_large(self, frame: Frame, message: bytes) -> None:
        """`_send`, for a frame that is too large only if its message is."""
        if len(message) > self._zmtp.surely_bytes:
            self._zmtp.require_room(map(len, serialize(frame)))
        self._send(frame)

    def _require(self, allowed: bool, what: str) -> None:
        if not allowed:
            raise LocalProtocolError(
                f"{what} can't be sent by {self.side} in state {self.state.value}"
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
    """Ids that are unique on one connection only."""
    numbers = count(1)
    return lambda: str(next(numbers))
