"""The hub's end of a link: what stays when a connection is lost, and is there after a restart.

Whatever the peer hears of a link is written to the store before. What leaves the hub waits for a
write without fsync, which a killed process survives; that its messages are safe the peer hears
after the fsync. So a link that is taken up again is never behind what the peer knows of it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from crosswire.access import Right
from crosswire.envelope import Kind, parse_destination, parse_pattern
from crosswire.errors import (
    CrosswireError,
    InternalError,
    InvalidDestination,
    LinkStateError,
    TooLargeToSend,
)
from crosswire.gateways.gateway import guarded
from crosswire.gateways.options import parse_start
from crosswire.gateways.relink.link_records import (
    Head,
    LinkRecords,
    LoadedLink,
    Outbound,
    Parts,
    SentRun,
)
from crosswire.gateways.relink.messages import Origin
from crosswire.hub.commits import OpenGroup
from crosswire.hub.ledger import LedgerPeer
from crosswire.hub.receipt import Receipt
from crosswire.hub.subscriptions import Start, predicate
from crosswire.wire.contract import Event
from crosswire.wire.relink.channels import Decision, ReceivingChannel, SendingChannel
from crosswire.wire.relink.frames import message_bytes
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.relink.link import Link
from crosswire.wire.relink.saved import SavedLink, encode

if TYPE_CHECKING:
    from crosswire.gateways.relink.gateway import RelinkGateway
    from crosswire.gateways.relink.links import Links

__all__ = ["Endpoint", "LinkEnd", "parse_endpoint"]

_RIGHTS: Final[dict[tuple[str, str], tuple[Right, frozenset[str]]]] = {
    ("queue", ""): ("produce", frozenset()),
    ("topic", ""): ("produce", frozenset()),
    ("service", ""): ("call", frozenset()),
    ("queue", "consume"): ("consume", frozenset({"filter"})),
    ("topic", "subscribe"): ("consume", frozenset({"filter", "from", "name"})),
    ("service", "serve"): ("serve", frozenset()),
}
_KINDS: Final[dict[str, Kind]] = {"queue": "send", "topic": "publish", "service": "request"}


class Endpoint(msgspec.Struct, frozen=True):
    """What a link is for: its endpoint's name, understood."""

    right: Right
    destination: str
    filter: str = ""
    name: str = ""
    start: Start = "latest"

    @property
    def kind(self) -> Kind:
        return _KINDS[self.destination.partition("/")[0]]


def parse_endpoint(text: str) -> Endpoint:
    """`queue/Q`, `topic/T?subscribe&name=N`, …; values are URL-encoded.

    Raises InvalidDestination or InvalidFilter.
    """
    destination, mark, query = text.partition("?")
    word, *options = query.split("&")
    found = _RIGHTS.get((destination.partition("/")[0], word))
    if found is None or (mark and not word):
        raise InvalidDestination(f"there is no endpoint {text!r}")
    right, allowed = found
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in allowed or name in given:
            raise InvalidDestination(f"{option!r} is no option of {destination}?{word}")
        given[name] = unquote(value)
    (parse_pattern if word == "subscribe" else parse_destination)(destination)
    predicate(given.get("filter", ""))
    return Endpoint(
        right,
        destination,
        given.get("filter", ""),
        given.get("name", ""),
        parse_start(given.get("from", "")),
    )


class LinkEnd(ABC):
    """What every end has: its rows in the store, and its connection while there is one.

    `link` is made anew from the rows when it is first needed after a restart.
    """

    def __init__(self, links: Links, identifier: int, head: Head, endpoint: Endpoint) -> None:
        self.links = links
        self.context = links.context
        self.hub = links.context.hub
        self.id = identifier
        self.head = head
        self.endpoint = endpoint
        self.limits = self.context.config.limits.relink
        self.rows = LinkRecords(self.hub, identifier)
        self.gateway: RelinkGateway | None = None
        self.forgotten = False
        self.cuts = 0
        """How often its connection was lost: a clock that runs for one cut is not for the next."""
        self.outbound: dict[int, Outbound] = {}
        self.peer = LedgerPeer("relink", "", head.principal)
        self.origin = Origin(endpoint.destination, endpoint.kind, "", head.principal)
        self._link: Link | None = None
        self._loaded: LoadedLink | None = None
        self._holds = False
        self._closed: dict[int, None] = {}
        self._pending: deque[tuple[OpenGroup, list[Callable[[], None]]]] = deque()
        self.awaits_commit = False
        """Its first connection is told of it when its named subscription is durable."""

    # What a kind of end fills in.

    def attach(self) -> None:
        """Take part in the hub. Raises HubError."""

    @abstractmethod
    def receive(self, events: list[Event]) -> None:
        """Act on what one read brought."""

    def joined(self) -> None:
        """There is a connection again."""

    def left(self) -> None:
        """The connection is gone; the link stays."""

    def steer(self) -> None:
        """The peer stopped to read, or reads again."""

    def ended(self) -> None:
        """The link is forgotten: give back what it holds."""

    def recall(self, runs: list[SentRun]) -> list[Parts | None]:
        """The messages that were sent and are kept in a row; None for one that is gone."""
        return [parts for run in runs for parts in run.parts]

    @property
    def is_busy(self) -> bool:
        """Has it something under way that a stopping hub should wait for?"""
        return bool(self._pending)

    @property
    def is_gone(self) -> bool:
        """What it held is given back: it must not be given anything more."""
        return self.forgotten

    @property
    def awaits_write(self) -> bool:
        """Is there something to be done as soon as the store has written, or synced?"""
        return self.awaits_commit or bool(self._pending)

    # Connections.

    def join(self, gateway: RelinkGateway) -> None:
        """A connection is about to agree on this link. Raises LinkStateError."""
        self._require_link()
        self.gateway = gateway
        self.peer = gateway.peer
        self.origin = msgspec.structs.replace(self.origin, connection=gateway.id)
        gateway.connection.hold(self._holds)

    def part(self) -> None:
        """The connection is gone."""
        self.gateway = None
        self.cuts += 1

    def forget(self) -> None:
        """The link is gone for good."""
        self.forgotten = True
        self.gateway = None
        if self._link is not None:
            self._link.detach(ended=True)
        self.hub.callbacks.run("relink forget", self.ended)
        self.rows.drop_all()
        self._pending.clear()

    def end(self, error: CrosswireError) -> None:
        """It can't go on: the connection ends, and the link with it."""
        gateway = self.gateway
        self.links.forget(self)
        if gateway is not None:
            gateway.connection.fail(error)
            gateway.session.wake()

    def broken(self, error: Exception) -> None:  # noqa: ARG002  the hub has logged it
        """What was to be done for the peer raised: it would wait for ever."""
        if not self.forgotten:
            self.end(InternalError("internal error"))

    def wake(self) -> None:
        if self.gateway is not None:
            self.gateway.session.wake()

    def hold(self, held: bool) -> None:
        """Stop reading from the peer, or go on."""
        if held != self._holds:
            self._holds = held
            if self.gateway is not None:
                self.gateway.connection.hold(held)
                self.wake()

    def log(self, what: str, **fields: object) -> None:
        if self.gateway is not None:
            self.gateway.log(logging.INFO, what, **fields)

    # The store.

    def once_written(self, action: Callable[[], None]) -> None:
        """Do it when what was saved so far has been written."""
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
            # What was saved goes into the next group.
            self._await_write()
            return
        for action in self._pending.popleft()[1]:
            action()
        self.wake()

    def save_receiving(self, channel: int, state: ReceivingChannel) -> None:
        """Save what the peer may hear of its channel once it is written.

        Decisions and a close that wait are left out: the peer repeats what it wasn't answered.
        """
        kept = state.durable()
        kept.close_reported = state.closed
        if self.link.peer_transactions:
            kept.decided = kept.settled
            kept.decisions = []
            kept.undecided_sizes, kept.undecided_bytes = kept.held_sizes, kept.held_bytes
        self.rows.save_receiving(channel, kept)
        if state.closed:
            self._closed[channel] = None
            if len(self._closed) > self.limits.channels:
                oldest = next(iter(self._closed))
                del self._closed[oldest]
                self.rows.drop_receiving(oldest)
        else:
            self._closed.pop(channel, None)

    # Our channels.

    def require_room(self, parts: Parts) -> None:
        """Raises TooLargeToSend for a message whose packet would be too large."""
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
        """Save messages that will be sent on a channel `once_written`."""
        out = self.outbound.get(channel)
        if out is None:
            out = self.outbound[channel] = Outbound()
        self.rows.save_sent(channel, out.next, runs)
        out.rows.append((out.next, out.next + count, size_bytes))
        out.next += count

    def done(self, channel: int, count: int) -> int:
        """The peer is done with so many more; gives the bytes of rows that are no longer kept."""
        out = self.outbound[channel]
        out.done += count
        freed = 0
        while out.rows and out.rows[0][1] <= out.done:
            first, _, size_bytes = out.rows.popleft()
            freed += size_bytes
            self.rows.drop_sent(channel, first)
        self.rows.save_marks(channel, out)
        self.hub.store.request(sync=False, urgent=False)
        return freed

    def send(self, channel: int, messages: list[Parts]) -> None:
        """Hand messages, which were planned and are written, to the link."""
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
        assert self._link is not None
        return self._link

    def begin(self) -> Link:
        """A new one."""
        self._link = Link(
            "listener", self.head.terms, epoch=self.links.epoch, id=self.id, limits=self.limits
        )
        self._link.guarded = True
        self.rows.save_head(self.head)
        return self._link

    def load(self) -> LoadedLink:
        """Read the rows: what was sent and is not done with is known then.

        Raises LinkStateError.
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
        """What was read is not needed before there is a connection, and can be read again."""
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

    def restored(self, loaded: LoadedLink) -> None:
        """The link is there again."""

    def _restore(self, loaded: LoadedLink) -> Link:
        receiving: dict[int, ReceivingChannel] = {}
        closed: dict[int, ReceivingChannel] = {}
        for channel, state in loaded.receiving.items():
            (closed if state.closed else receiving)[channel] = state
        order = 0
        sending: dict[int, SendingChannel] = {}
        for channel, out in self.outbound.items():
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
        """The peer will say what of it was received; until then all of it is to be repeated."""
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
