"""The hub's end of a link: it outlives its connections, and restarts of the hub.

What the peer can know of a link is written to the store before it is sent. Messages of the hub
leave after a write without fsync, which a killed process survives; acknowledgements of the peer's
messages leave after the fsync. So a link that is restored never knows less than its peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from crosswire.commitlog.contract import CommitGroup, Receipt
from crosswire.errors import (
    CrosswireError,
    InternalError,
    LinkStateError,
    TooLargeToSend,
)
from crosswire.gateways.context import GatewayContext
from crosswire.gateways.failures import for_peers
from crosswire.gateways.gateway import guarded
from crosswire.gateways.relink.endpoints import Endpoint
from crosswire.gateways.relink.link_records import (
    Head,
    LinkRecords,
    LoadedLink,
    Outbound,
    Parts,
    SentRun,
)
from crosswire.gateways.relink.messages import Origin
from crosswire.hub.attachment import Window
from crosswire.hub.ledger import LedgerPeer
from crosswire.session import Session
from crosswire.wire.contract import Event
from crosswire.wire.relink.channels import Decision, ReceivingChannel, SendingChannel
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.frames import message_bytes
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.relink.link import Link
from crosswire.wire.relink.saved import SavedLink, encode

__all__ = ["LinkConnection", "LinkEnd", "LinkOwner", "LinkWindow"]


class LinkOwner(Protocol):
    """The registry that a link's end belongs to."""

    context: GatewayContext
    epoch: int

    def forget(self, end: LinkEnd) -> None:
        """Remove the link for good; what it holds goes to others."""


class LinkConnection(Protocol):
    """The gateway of a link's current connection, as its end sees it."""

    id: str
    peer: LedgerPeer
    connection: RelinkConnection
    session: Session

    def log(self, level: int, what: str, **fields: object) -> None:
        """A line about this connection."""

    def holds(self, end: LinkEnd) -> bool:
        """Whether the link is still connected by this gateway."""

    def give_way(self) -> None:
        """Disconnect: the link has a new connection."""


class LinkWindow:
    """The hub's window of a link: it has room only while the link can send.

    The room is granted here, not by settling: what the link holds survives its connections.
    """

    def __init__(self, size: int) -> None:
        self.window = Window(0, granted=True)
        self._owed = size

    def free(self, count: int) -> None:
        """Room for `count` more, granted by the next `steer` that may."""
        self._owed += count

    def steer(self, can_send: bool, now: float) -> None:
        """Grant what is owed if the link can send; else take the free room back."""
        window = self.window
        if can_send:
            if self._owed:
                # Cleared before the grant: the hub may deliver, and steer again, within it.
                count, self._owed = self._owed, 0
                window.grant(count, now)
        elif window.free > 0:
            self._owed += window.free
            window.free = 0


class LinkEnd(ABC):
    """The state of one link: its rows in the store, and its connection while there is one.

    After a restart `link` is made from the rows when it is first needed.
    """

    def __init__(self, links: LinkOwner, identifier: int, head: Head, endpoint: Endpoint) -> None:
        self.links = links
        self.context = links.context
        self.hub = links.context.hub
        self.id = identifier
        self.head = head
        self.endpoint = endpoint
        self.limits = self.context.config.limits.relink
        self.rows = LinkRecords(self.hub, identifier)
        self.gateway: LinkConnection | None = None
        self.forgotten = False
        self.cuts = 0
        """How many connections were lost: a timer of an earlier loss must not end this link."""
        self.outbound: dict[int, Outbound] = {}
        self.peer = LedgerPeer("relink", "", head.principal)
        self.holder = head.principal
        """Whose share it counts for: its user's, or, of a link made since the start without users,
        its address's."""
        self.origin = Origin(endpoint.destination, endpoint.kind, "", head.principal)
        self._link: Link | None = None
        self._loaded: LoadedLink | None = None
        self._is_held = False
        self._closed: dict[int, None] = {}
        self._pending: deque[tuple[CommitGroup, list[Callable[[], None]]]] = deque()
        self.awaits_commit = False
        """Whether its first connection waits until its named subscription is durable."""

    # For each kind of end to define.

    def attach(self) -> None:
        """Consume, or get ready to. Raises HubError."""

    @abstractmethod
    def receive(self, events: list[Event]) -> None:
        """Act on the events of one read."""

    def joined(self) -> None:
        """The link has a connection, or has one again."""

    def left(self) -> None:
        """The connection is lost; the link stays."""

    def steer(self) -> None:
        """The peer has stopped reading, or reads again."""

    def ended(self) -> None:
        """Give back what the link holds: it is forgotten."""

    def recall(self, runs: list[SentRun]) -> list[Parts | None]:
        """The messages of a row of `sent`; None for one that the hub no longer has."""
        return [parts for run in runs for parts in run.parts]

    def restored(self, loaded: LoadedLink) -> None:
        """The link was made from its rows, for the first connection after a restart."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that a stopping hub should wait for."""
        return bool(self._pending)

    @property
    def is_gone(self) -> bool:
        """Whether what it held is given back: it must not be given anything more."""
        return self.forgotten

    @property
    def held_bytes(self) -> int:
        """What it keeps in memory: messages that arrived and are not consumed."""
        return 0 if self._link is None else self._link.held_bytes

    @property
    def awaits_write(self) -> bool:
        """Whether actions wait for the store to write, or to sync."""
        return self.awaits_commit or bool(self._pending)

    # Connections.

    def join(self, gateway: LinkConnection) -> None:
        """A connection is about to agree on this link. Raises LinkStateError."""
        self._require_link()
        self.gateway = gateway
        self.peer = gateway.peer
        self.origin = msgspec.structs.replace(self.origin, connection=gateway.id)
        gateway.connection.hold(self._is_held)

    def part(self) -> None:
        """The connection is lost."""
        self.gateway = None
        self.cuts += 1

    def forget(self) -> None:
        """Remove the link for good; `LinkOwner.forget` calls this."""
        # Set first: actions that wait for the store find that there is nothing to do.
        self.forgotten = True
        self.gateway = None
        if self._link is not None:
            self._link.detach(ended=True)
        self.hub.callbacks.run("relink forget", self.ended)
        self.rows.drop_all()
        self._pending.clear()

    def end(self, error: CrosswireError) -> None:
        """End the connection with an error, and the link with it."""
        gateway = self.gateway
        self.links.forget(self)
        if gateway is not None:
            gateway.connection.fail(for_peers(error))
            gateway.session.wake()

    def broken(self, error: Exception) -> None:  # noqa: ARG002  the hub has logged it
        """End the link: a callback for it raised, and its peer would wait for ever."""
        if not self.forgotten:
            self.end(InternalError("internal error"))

    def wake(self) -> None:
        """Have what was sent on the link written, if it is connected."""
        if self.gateway is not None:
            self.gateway.session.wake()

    def hold(self, held: bool) -> None:
        """Stop reading from the peer, or resume; holds for later connections too."""
        if held != self._is_held:
            self._is_held = held
            if self.gateway is not None:
                self.gateway.connection.hold(held)
                self.wake()

    # The store.

    def once_written(self, action: Callable[[], None]) -> None:
        """Call `action` when all that was saved so far is written.

        Actions of one commit group share a callback, and run in the order in which they came.
        """
        group, pending = self.hub.commits.group, self._pending
        if pending and pending[-1][0] is group:
            pending[-1][1].append(action)
            return
        pending.append((group, [action]))
        self._await_write()

    def _await_write(self) -> None:
        self.hub.written().add_done_callback(guarded(self._on_written, self.broken))

    def _on_written(self, receipt: Receipt) -> None:
        if self.forgotten:
            return
        if receipt.error is not None:
            # The store keeps what was saved for the next group: wait for that.
            self._await_write()
            return
        # Groups are written in order, so the oldest entry belongs to this receipt.
        for action in self._pending.popleft()[1]:
            action()
        self.wake()

    def save_receiving(self, channel: int, state: ReceivingChannel) -> None:
        """Save the acknowledgements of a channel that the peer may get once they are written.

        Decisions and a close that are not answered are left out: the peer repeats them.
        """
        kept = state.durable()
        kept.close_reported = state.closed
        if self.link.peer_transactions:
            kept.decided = kept.settled
            kept.decisions = []
            kept.undecided_sizes, kept.undecided_bytes = kept.held_sizes, kept.held_bytes
        self.rows.save_receiving(channel, kept)
        if state.closed:
            # As many closed channels are remembered as may be open: a peer repeats a close that
            # it had no answer to, and must get `closed` instead of a violation.
            self._closed[channel] = None
            if len(self._closed) > self.limits.channels:
                oldest = next(iter(self._closed))
                del self._closed[oldest]
                self.rows.drop_receiving(oldest)
        else:
            self._closed.pop(channel, None)

    def adopt(self, states: dict[int, ReceivingChannel]) -> None:
        """Have the link send the acknowledgements of these states, which are written now."""
        for channel, state in states.items():
            self.link.adopt(channel, state)

    # Our channels.

    def require_room(self, parts: Parts) -> None:
        """Raises TooLargeToSend for a message whose packet would be too large.

        The exact size, with headers and padding, is worked out only for one that comes near.
        """
        limit = self.limits.frame_bytes
        if sum(map(len, parts)) > limit // 2:
            terms = self.head.terms
            ours = packet_layout("listener", terms.connector_id_size, terms.listener_id_size)
            size = message_bytes(parts, ours)
            if size > limit:
                raise TooLargeToSend(size, limit)

    def plan(
        self, channel: int, runs: list[SentRun] | msgspec.Raw, count: int, size_bytes: int
    ) -> None:
        """Save messages that will be sent on a channel `once_written`: numbers are taken here."""
        out = self.outbound.get(channel)
        if out is None:
            out = self.outbound[channel] = Outbound()
        self.rows.save_sent(channel, out.next, runs)
        out.rows.append((out.next, out.next + count, size_bytes))
        out.next += count

    def done(self, channel: int, count: int) -> int:
        """The peer is done with `count` more; gives the bytes of rows that are no longer kept.

        A row holds a batch: it is dropped with the last of its messages.
        """
        out = self.outbound[channel]
        out.done += count
        freed = 0
        while out.rows and out.rows[0][1] <= out.done:
            first, _, size_bytes = out.rows.popleft()
            freed += size_bytes
            self.rows.drop_sent(channel, first)
        self.rows.save_marks(channel, out)
        self.hub.commits.request(sync=False, urgent=False)
        return freed

    def send(self, channel: int, messages: list[Parts]) -> None:
        """Send messages that were planned and are written.

        On a link with transactions each is committed right away, so that the peer's `committed`
        settles it and `uncommitted` refuses it.
        """
        link = self.link
        if link.ended or link.shut_down:
            return
        if not link.transactions:
            link.send_run(channel, messages)
            return
        for parts in messages:
            link.send(channel, parts)
            link.commit(channel)

    # After a restart.

    @property
    def link(self) -> Link:
        """The wire's state of the link; only once it was connected, or has begun."""
        assert self._link is not None
        return self._link

    def begin(self) -> Link:
        """Make the state of a new link, and save that it exists."""
        self._link = Link(
            "listener", self.head.terms, epoch=self.links.epoch, id=self.id, limits=self.limits
        )
        # Guarded: it acknowledges nothing by itself, only what was saved and is adopted.
        self._link.guarded = True
        self.rows.save_head(self.head)
        return self._link

    def load(self) -> LoadedLink:
        """Read the rows of the link, and with them what was sent and is not done with.

        Raises LinkStateError if rows are missing or don't fit together.
        """
        loaded = self._loaded = self.rows.load()
        for channel, marks in loaded.marks.items():
            out = self.outbound[channel] = Outbound(reopened=marks.reopened)
            out.next, out.done = marks.next, marks.done
            out.last_id, out.answered, out.closing = marks.last_id, marks.answered, marks.closing
        for channel, rows in loaded.sent.items():
            out = self.outbound.setdefault(channel, Outbound())
            for first, runs in rows:
                count = sum(len(run.ids) // 8 or len(run.parts) for run in runs)
                # Rows are consecutive, and the first one begins at or before what is done with: a
                # hole would shift the numbers of all messages after it.
                if (out.rows and first != out.rows[-1][1]) or first > max(out.next, out.done):
                    raise LinkStateError("messages that were sent are missing")
                out.rows.append((first, first + count, _size(runs)))
                out.next = max(out.next, first + count)
            if out.rows[0][0] > out.done or out.rows[-1][1] < out.next:
                raise LinkStateError("messages that were sent are missing")
        for channel, out in self.outbound.items():
            if out.done > out.next or (out.done < out.next and channel not in loaded.sent):
                raise LinkStateError("messages that were sent are missing")
        self._closed = dict.fromkeys(
            channel for channel, state in loaded.receiving.items() if state.closed
        )
        return loaded

    def discard(self) -> None:
        """Free what `load` read: it is read again for the first connection."""
        self._loaded = None
        self.outbound.clear()

    def _require_link(self) -> Link:
        if self._link is None:
            loaded = self._loaded or self.load()
            try:
                self._link = self._restore(loaded)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise LinkStateError(f"what is stored of the link does not fit: {error}") from error
            self._loaded = None
            self.restored(loaded)
        return self._link

    def _restore(self, loaded: LoadedLink) -> Link:
        receiving: dict[int, ReceivingChannel] = {}
        closed: dict[int, ReceivingChannel] = {}
        for channel, state in loaded.receiving.items():
            (closed if state.closed else receiving)[channel] = state
        order = 0
        sending: dict[int, SendingChannel] = {}
        for channel, out in self.outbound.items():
            # A channel without a message since it was opened has nothing to restore.
            if out.next:
                messages = self._recalled(out, loaded.sent.get(channel, []))
                sending[channel] = self._sending(out, messages, order)
                order += 2 * len(messages) + 1
        saved = SavedLink(
            role="listener",
            terms=self.head.terms,
            epoch=self.links.epoch,
            id=self.id,
            start=0,
            order=order,
            ended=False,
            shut_down=False,
            shut_down_first=False,
            peer_shut_down=False,
            sending=sending,
            receiving=receiving,
            closed=closed,
            used=[channel for channel, out in self.outbound.items() if out.reopened],
        )
        link = Link.restore(encode(saved), limits=self.limits)
        link.guarded = True
        return link

    def _recalled(self, out: Outbound, rows: list[tuple[int, list[SentRun]]]) -> list[Parts | None]:
        messages: list[Parts | None] = []
        for first, runs in rows:
            messages += self.recall(runs)[max(0, out.done - first) :]
        return messages

    def _sending(self, out: Outbound, messages: list[Parts | None], order: int) -> SendingChannel:
        """A channel of ours, as if the peer had received nothing that it isn't done with.

        The peer names what it has received before it resumes; the rest is repeated.
        """
        kept: list[tuple[int, Parts]] = []
        decisions: list[Decision] = []
        for number, parts in enumerate(messages, out.done + 1):
            kept.append((order + 1, parts or ()))
            if self.head.terms.listener_transactions:
                decisions.append(Decision(number, True, order + 2))
            order += 2
        decided = out.next if self.head.terms.listener_transactions else 0
        return SendingChannel(
            start=0,
            next=out.next,
            received=out.done,
            consumed=out.done,
            decided=decided,
            settled=out.done if decided else 0,
            kept=kept,
            decisions=decisions,
            close_order=order + 1 if out.closing else None,
            reopened=out.reopened,
        )


def _size(runs: list[SentRun]) -> int:
    return sum(len(part) for run in runs for parts in run.parts for part in parts)
