"""What the store keeps of a link, so that a killed hub can restore it.

    head         what was agreed, and with whom
    receiving    of each channel of the peer: what we have of it, as far as the peer may know
    marks        of each channel of ours: the numbers of messages sent, and done with
    sent         messages of ours that are not done with: their ids where the store has them
                 anyway, else the messages
    undecided    messages of the peer whose transaction is open

Messages are numbered from 0 in the life of a channel. Unlike sequence numbers on the wire, which
have 32 bits, these numbers don't wrap.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from struct import Struct as Layout
from typing import Any, Final

import msgspec

from crosswire.envelope import LARGEST_INTEGER
from crosswire.errors import LinkStateError, RecordDamaged
from crosswire.hub.hub import Hub
from crosswire.store.contract import Store
from crosswire.store.records import Count, reader
from crosswire.wire.relink.channels import ReceivingChannel
from crosswire.wire.relink.handshake import LinkTerms

__all__ = [
    "Head",
    "LinkRecords",
    "LoadedLink",
    "Marks",
    "Outbound",
    "SentRun",
    "encode_runs",
    "heads",
    "wipe",
]

HEADS: Final = "relink-link"
_ROWS: Final = "relink-row"
_KEY: Final = Layout(">QcQQ")
_END: Final = b"\xff"
_LINK_BYTES: Final = 8
_ID_BYTES: Final = 8

Parts = tuple[bytes, ...]


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What a link was agreed on, and whose it is."""

    terms: LinkTerms
    principal: str


class Marks(msgspec.Struct, array_like=True, frozen=True):
    """Where a channel of ours is: see `Outbound`, which it is saved from."""

    next: Count
    done: Count
    last_id: Count = 0
    answered: Count = 0
    reopened: bool = False
    closing: bool = False


class SentRun(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive messages that we sent: ids in a destination's log, or the messages' parts."""

    destination: str
    ids: bytes = b""
    parts: list[Parts] = []


class Outbound:
    """A channel of ours: numbers below `done` are done with, those below `next` were sent.

    `last_id` is the newest id that is done with; `answered` is the number of requests that the peer
    has answered; `reopened`: the channel was closed before and may be used again.
    """

    __slots__ = ("answered", "closing", "done", "last_id", "next", "reopened", "rows")

    def __init__(self, *, reopened: bool = False) -> None:
        self.next = 0
        self.done = 0
        self.last_id = 0
        self.answered = 0
        self.reopened = reopened
        self.closing = False
        self.rows: deque[tuple[int, int, int]] = deque()
        """First number, number after the last, and bytes of each row of `sent`."""

    @property
    def outstanding(self) -> int:
        """Messages that were sent and are not done with."""
        return self.next - self.done

    def marks(self) -> Marks:
        """What is saved of it."""
        return Marks(self.next, self.done, self.last_id, self.answered, self.reopened, self.closing)


class LoadedLink:
    """All rows of a link, by channel; those with a number in order."""

    def __init__(self) -> None:
        self.receiving: dict[int, ReceivingChannel] = {}
        self.marks: dict[int, Marks] = {}
        self.sent: dict[int, list[tuple[int, list[SentRun]]]] = {}
        self.undecided: dict[int, list[tuple[int, list[Parts]]]] = {}


_encode = msgspec.msgpack.Encoder().encode
_read_head: Callable[[bytes], Head] = reader(Head, "a link's head")
_READERS: Final[dict[bytes, Callable[[bytes], Any]]] = {
    b"r": reader(ReceivingChannel, "a channel that is received on"),
    b"m": reader(Marks, "a channel that is sent on"),
    b"s": reader(list[SentRun], "what was sent"),
    b"u": reader(list[Parts], "what is undecided"),
}


def _read_row(kind: bytes, value: bytes) -> Any:
    """Raises RecordDamaged."""
    read = _READERS.get(kind)
    if read is None:
        raise RecordDamaged(f"there is no row of kind {kind!r}")
    row = read(value)
    if kind == b"r":
        numbers = [each for each in msgspec.structs.astuple(row) if isinstance(each, int)]
        if min(numbers) < 0 or max(numbers) > LARGEST_INTEGER:
            raise RecordDamaged("a channel that is received on has numbers out of range")
    elif kind == b"s" and any(_has_bad_ids(run) for run in row):
        raise RecordDamaged("what was sent has invalid ids")
    return row


def _has_bad_ids(run: SentRun) -> bool:
    return len(run.ids) % _LINK_BYTES != 0 or min(array("q", run.ids), default=0) < 0


def encode_runs(runs: list[SentRun]) -> msgspec.Raw:
    """A row of `sent`, encoded once for the many links that save the same one."""
    return msgspec.Raw(_encode(runs))


def heads(hub: Hub) -> dict[int, Head]:
    """The heads of all stored links, by id. One that can't be read is set aside."""
    found = {}
    for key, value in hub.store.load(HEADS):
        try:
            if len(key) != _LINK_BYTES:
                raise RecordDamaged("a link's id has 8 bytes")
            head = _read_head(value)
            sizes = (head.terms.connector_id_size, head.terms.listener_id_size)
            if min(sizes) < 0 or max(sizes) > _ID_BYTES:
                raise RecordDamaged("a link's channel ids have 0 to 8 bytes")
            found[int.from_bytes(key)] = head
        except RecordDamaged as error:
            hub.damage.set_aside_state(HEADS, key, value, error)
            if len(key) == _LINK_BYTES:
                LinkRecords(hub, int.from_bytes(key)).drop_all()
    return found


def wipe(store: Store) -> None:
    """Remove all links from the store."""
    for space in (HEADS, _ROWS):
        store.drop_range(space, b"", _END)


class LinkRecords:
    """The rows of one link. What is saved is written with the open commit group."""

    def __init__(self, hub: Hub, link: int) -> None:
        self._hub = hub
        self._store = hub.store
        self._link = link

    def save_head(self, head: Head) -> None:
        """Save that the link exists."""
        self._store.save(HEADS, self._link.to_bytes(8), _encode(head))

    def save_receiving(self, channel: int, state: ReceivingChannel) -> None:
        """Save what we have of a channel of the peer."""
        self._save(b"r", channel, 0, state)

    def drop_receiving(self, channel: int) -> None:
        """Forget that a channel of the peer existed."""
        self._drop(b"r", channel, 0)

    def save_marks(self, channel: int, out: Outbound) -> None:
        """Save where a channel of ours is."""
        self._save(b"m", channel, 0, out.marks())

    def drop_marks(self, channel: int) -> None:
        """Forget that a channel of ours existed."""
        self._drop(b"m", channel, 0)

    def save_sent(self, channel: int, number: int, runs: list[SentRun] | msgspec.Raw) -> None:
        """Save messages that are about to be sent; `number` is the first one's."""
        self._save(b"s", channel, number, runs)

    def drop_sent(self, channel: int, number: int) -> None:
        """Drop the row of messages that starts with `number`: all are done with."""
        self._drop(b"s", channel, number)

    def save_undecided(self, channel: int, number: int, messages: list[Parts]) -> None:
        """Save messages of an open transaction; `number` is the first one's."""
        self._save(b"u", channel, number, messages)

    def drop_undecided(self, channel: int, number: int) -> None:
        """Drop the row of messages that starts with `number`: all are decided."""
        self._drop(b"u", channel, number)

    def drop_all(self) -> None:
        """Remove the link from the store."""
        self._store.drop(HEADS, self._link.to_bytes(8))
        first, end = self._link.to_bytes(8), (self._link + 1).to_bytes(8)
        self._store.drop_range(_ROWS, first, end)
        self._hub.commits.request(sync=False, urgent=False)

    def load(self) -> LoadedLink:
        """All rows of the link. Raises LinkStateError if one, which is set aside, can't be read."""
        loaded = LoadedLink()
        for key, value in self._store.load(_ROWS, self._link.to_bytes(8)):
            try:
                if len(key) != _KEY.size:
                    raise RecordDamaged(f"the key of a row has {_KEY.size} bytes, not {len(key)}")
                _, kind, channel, number = _KEY.unpack(key)
                row = _read_row(kind, value)
            except RecordDamaged as error:
                self._hub.damage.set_aside_state(_ROWS, key, value, error)
                raise LinkStateError(f"a link's row can't be read: {error}") from None
            if kind == b"r":
                loaded.receiving[channel] = row
            elif kind == b"m":
                loaded.marks[channel] = row
            elif kind == b"s":
                loaded.sent.setdefault(channel, []).append((number, row))
            else:
                loaded.undecided.setdefault(channel, []).append((number, row))
        return loaded

    def _save(self, kind: bytes, channel: int, number: int, row: object) -> None:
        self._store.save(_ROWS, _KEY.pack(self._link, kind, channel, number), _encode(row))

    def _drop(self, kind: bytes, channel: int, number: int) -> None:
        self._store.drop(_ROWS, _KEY.pack(self._link, kind, channel, number))
