"""The server at the far end of a MicroMsg2 connection, and the messages that it sends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from crosswire.client.native.remote import RemotePeer
from crosswire.envelope import Property
from crosswire.errors import ConnectionLost, LocalProtocolError, PeerError
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.micromsg2.connection import MicroMsg2Connection
from crosswire.wire.micromsg2.events import MessageReceived, MessagesAcknowledged, Opened
from crosswire.wire.micromsg2.extensions import REFUSE, refusal
from crosswire.wire.micromsg2.values import Value

__all__ = ["MicroMsg2Delivery", "MicroMsg2Peer"]


class MicroMsg2Delivery:
    """A message of the server. `acknowledge` it when it is safe, unless the subscription does."""

    __slots__ = ("_acknowledged", "destination", "payload", "peer", "properties", "sequence")

    def __init__(self, peer: MicroMsg2Peer, message: MessageReceived) -> None:
        self._acknowledged = False
        self.peer = peer
        self.sequence = message.sequence
        self.destination = message.destination
        self.properties: Mapping[str, Value] = message.properties
        self.payload = message.payload

    def acknowledge(self) -> None:
        """Acknowledge this message, in any order; further calls do nothing.

        After the end of its connection this has no effect, and the message may come again.
        """
        if not self._acknowledged:
            self._acknowledged = True
            self.peer.acknowledge(self.sequence)

    def refuse(self, reason: str) -> None:
        """The message can't be processed: the hub retries it, or makes it a dead letter.

        Raises LocalProtocolError if the server did not agree to `x-refuse`.
        """
        if not self._acknowledged and self.peer.end is None:
            # In this order: when the acknowledgement arrives, the hub knows what it means.
            self.peer.connection.send_extension(REFUSE, refusal(self.sequence, reason))
            self.acknowledge()


class MicroMsg2Peer(RemotePeer):
    """The server at the far end of one connection."""

    def __init__(
        self,
        route: Callable[[MicroMsg2Delivery], None],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._route = route
        self._on_event = on_event
        self._to_send: deque[tuple[str, bytes, Mapping[str, Property], asyncio.Future[None]]] = (
            deque()
        )
        self._unsettled: dict[int, asyncio.Future[None]] = {}
        self.agreed: Opened | None = None

    @property
    def connection(self) -> MicroMsg2Connection:
        """The session's connection."""
        connection = self.session.connection
        assert isinstance(connection, MicroMsg2Connection)
        return connection

    @property
    def error(self) -> PeerError | None:
        """The ERROR with which the server ended the connection, if it did."""
        match self.end:
            case ConnectionFailed(error=PeerError() as error):
                return error
        return None

    def send(
        self, destination: str, payload: bytes, properties: Mapping[str, Property] | None = None
    ) -> asyncio.Future[None]:
        """Send as soon as the window allows.

        The future is done when the message is acknowledged; where no acknowledgements were agreed,
        when it is given to the socket.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        if self.end is not None:
            future.set_exception(ConnectionLost(f"nothing was sent: {self.why()}"))
            return future
        self._to_send.append((destination, payload, properties or {}, future))
        self._send_waiting()
        return future

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge a message, unless the connection has ended."""
        if self.end is None:
            self.connection.acknowledge(sequence)
            self.session.wake()

    # Called by the session.

    def handle_events(self, events: list[Event]) -> None:
        """Route messages, resolve what was acknowledged, and send what the window takes now."""
        for event in events:
            match event:
                case MessageReceived():
                    self._route(MicroMsg2Delivery(self, event))
                case MessagesAcknowledged(sequences=sequences):
                    for sequence in sequences:
                        _settle(self._unsettled.pop(sequence))
                case Opened():
                    self.agreed = event
                    self.open()
                case ConnectionClosed() | ConnectionFailed():
                    self.finish(event)
                case _ if self._on_event is not None:
                    self._on_event(event)
        # Once for all acknowledgements of a read, each of which has freed a part of the window.
        self._send_waiting()

    def handle_drain(self) -> None:
        """Send what waits: the server reads again."""
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send as much of what waits as the window and the socket take now."""
        waiting = self._to_send
        if not waiting or self.end is not None:
            return
        connection = self.connection
        # Before each message: a large one is several frames, and each takes its part of the window.
        while waiting and connection.credit and not self.session.congested:
            destination, payload, properties, future = waiting.popleft()
            if future.done():
                continue  # the caller has given up, by a timeout or a cancelled task
            try:
                sequence = connection.send_message(destination, payload, properties)
            except LocalProtocolError as error:
                future.set_exception(error)
                continue
            if connection.agreement.window is None:
                _settle(future)
            else:
                self._unsettled[sequence] = future
        self.session.wake()

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        """Fail what is not acknowledged, and what was not sent."""
        # Two errors: what was not sent may be sent again without arriving twice.
        self.end = end
        why = self.why()
        for future in self._unsettled.values():
            if not future.done():
                future.set_exception(
                    ConnectionLost(f"{why}; the message may or may not have arrived")
                )
        for _, _, _, future in self._to_send:
            if not future.done():
                future.set_exception(ConnectionLost(f"{why}; the message was not sent"))
        self._unsettled.clear()
        self._to_send.clear()
        super().finish(end)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
