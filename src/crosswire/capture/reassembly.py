"""TCP reassembly: takes the segments of a flow and gives runs of bytes in the order of sending.

A flow is all traffic between two ends (address and port); it may hold several connections, one
after the other. Segments come sorted by the time of capture, which is not quite the order of
sending. Each direction is put in order on its own, by offset: the number of bytes since the
connection's first.

- Offset known already: the segment is a retransmission and dropped.
- Overlaps known bytes: the known part is cut off. The first capture of a byte counts, so that
  the result does not depend on how the sender cut its retransmissions.
- Beyond the next expected offset: there is a hole, and the segment waits for it to be filled.

A hole becomes a gap, a run without data, when it can't be filled any more: the receiver has
acknowledged bytes after it (so it got them, and the capture did not), too many bytes wait, or the
flow is over. So do bytes at the end that were on the wire and that the capture cut off. Segments
long after a connection's end belong to the next one.

The offset of a direction's bytes is known from its SYN. Where bytes come before it, they are held
for a while, and the other direction with them, so that requests stay before their answers: captures
are out of order, and the SYN may follow. If it does not, the direction is late; a SYN that comes
even later and precedes its first byte opens no other connection.

`pipeline.sources.flow_kernel` does the same for the usual cases, compiled; tests compare the two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from crosswire.capture.tcp import ACK, RST, SEQUENCE_SPACE, SYN
from crosswire.capture.tcp import FIN as FIN_FLAG
from crosswire.wire.runs import DATA, FIN, GAP, OPEN, RESET

__all__ = ["LINGER_NS", "REORDER_BYTES", "REORDER_NS", "Flow", "ReassembledRun", "Segment"]

REORDER_BYTES: Final = 8 * 1024 * 1024
"""How many bytes may wait for a hole to be filled before it becomes a gap."""

REORDER_NS: Final = 200_000_000
"""How long to wait for bytes that the receiver has acknowledged: a capture on several queues or
interfaces may record a segment after the acknowledgement of it."""

LINGER_NS: Final = 120_000_000_000
"""How long after a connection's end its segments may still come: as long as systems keep it in
TIME-WAIT, at most, before the same two ends may connect again."""

_REORDER_SEGMENTS: Final = 16
"""How many segments of a connection wait for a SYN however long they take: tools that write times
anew move packets of quiet connections apart by seconds."""

_MOST_HELD: Final = 4096
"""Segments that wait for a SYN: those whose bytes the capture cut have none that count."""

_SPECIAL: Final = FIN_FLAG | SYN | RST
_FAR: Final = 1 << 30
"""A segment farther than this from the expected one belongs to another connection, whose SYN was
not captured. No window is that large (RFC 7323 allows less than 2**30 bytes)."""


class Segment(NamedTuple):
    """A TCP segment. `forward` means sent by the flow's lower end. `length` is the payload's on the
    wire: more than `payload` has where the capture cut the packet."""

    forward: bool
    time_ns: int
    number: int
    acknowledgement: int
    flags: int
    length: int
    payload: bytes


class ReassembledRun(NamedTuple):
    """What happened next in a connection: bytes, a gap, or its opening or end.

    `connection` counts the connections of the flow from 0. `forward` is the flow's direction, not
    the connection's; `opener` is whether the forward end opened the connection, None where its SYN
    was not captured. `late`: the direction's first bytes were not captured, offsets count from the
    first that were.
    """

    connection: int
    opener: bool | None
    forward: bool
    kind: str
    offset: int
    length: int
    time_ns: int
    data: bytes | None
    late: bool


class _Half:
    """One direction of a connection.

    `base` is the sequence number of offset 0, `next` the next expected offset, `reach` the offset
    after the last byte that was on the wire, captured or not. `synchronized`: the SYN of this
    direction was captured; without it the base is that of the peer's answer, or a guess where the
    direction is `late`. `fin_at` is the offset of the FIN
    once that was seen; `ended` is set when all bytes before it were given out. `waiting` has
    segments after a hole, by offset, without overlaps: (offset, time, bytes). `held` has segments
    that came before anything revealed the base of this direction, or of the other one.
    """

    __slots__ = (
        "base",
        "ended",
        "fin_at",
        "held",
        "late",
        "next",
        "reach",
        "synchronized",
        "time",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self) -> None:
        self.base: int | None = None
        self.next = 0
        self.reach = 0
        self.late = False
        self.synchronized = False
        self.fin_at: int | None = None
        self.ended = False
        self.time = 0
        self.waiting: list[tuple[int, int, bytes]] = []
        self.waiting_bytes = 0
        self.held: list[Segment] = []

    @property
    def may_have_ended(self) -> bool:
        """Whether it has ended, or its end is held."""
        return self.ended or any(each.flags & FIN_FLAG for each in self.held)

    @property
    def last_time(self) -> int:
        """The time of what was given out or held last."""
        return max(self.time, self.held[-1].time_ns if self.held else 0)

    def first_held(self) -> int:
        """The lowest sequence number of the segments that are held."""
        origin = self.held[0].number
        return min(
            (each.number for each in self.held),
            key=lambda number: (number - origin + SEQUENCE_SPACE // 2) % SEQUENCE_SPACE,
        )

    def may_begin_with(self, number: int) -> bool:
        """Whether what is held can follow a SYN after which this is the first byte's number."""
        return not self.held or (self.first_held() - number) % SEQUENCE_SPACE <= _FAR

    def offset_of(self, number: int) -> int:
        """The offset of a sequence number. Numbers wrap around every 4 GiB, so there are many: the
        one nearest to the expected offset counts, up to 2 GiB before or after it."""
        assert self.base is not None
        distance = (number - self.base - self.next) % SEQUENCE_SPACE
        return self.next + (
            distance if distance < SEQUENCE_SPACE // 2 else distance - SEQUENCE_SPACE
        )

    def save(self) -> Any:
        """As in `Flow.save`."""
        return (
            self.base,
            self.next,
            self.late,
            self.fin_at,
            self.ended,
            self.time,
            self.waiting,
            self.reach,
            self.held,
            self.synchronized,
        )

    @classmethod
    def restored(cls, saved: Any) -> _Half:
        """As in `Flow.restore`."""
        half = cls()
        base, following, late, fin_at, ended, time, waiting, reach, held, synchronized = saved
        half.base, half.next, half.late, half.fin_at, half.ended = (
            base,
            following,
            late,
            fin_at,
            ended,
        )
        half.time, half.reach, half.synchronized = time, reach, synchronized
        half.held = [Segment(*each) for each in held]
        half.waiting = [(at, time_ns, bytes(data)) for at, time_ns, data in waiting]
        half.waiting_bytes = sum(len(data) for _, _, data in half.waiting)
        return half


class Flow:
    """Reassembles one flow: call `add` for each segment, then `finish`; both give runs."""

    def __init__(self, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._reorder_bytes = reorder_bytes
        self._number = -1
        self._opener: bool | None = None
        self._halves = {True: _Half(), False: _Half()}
        self._reset = False
        self._begun = False
        self._given = False

    def add(self, segment: Segment) -> Iterable[ReassembledRun]:
        """The runs that this segment completes; consume them before adding the next one."""
        forward, time_ns, number, _, flags, length, payload = segment
        half, other = self._halves[forward], self._halves[not forward]
        if (
            half.base is not None
            and number == (half.base + half.next) % SEQUENCE_SPACE
            and payload
            and len(payload) == length
            and not flags & _SPECIAL
            and not self._reset
            and half.fin_at is None
            and not half.waiting
            and not other.waiting
            and not other.held
        ):
            # Nearly all segments are the expected ones: this path takes no generator and no checks
            # beyond these.
            return (self._data(forward, half, payload, time_ns),)
        return self._add(segment)

    def _add(self, segment: Segment) -> Iterator[ReassembledRun]:
        if self.is_settled(segment.time_ns):
            # The connection is over for so long that the ports may be in use again.
            yield from self._drain()
            self._begun = False
        yield from self._release_held(segment)
        if segment.flags & SYN:
            yield from self._synchronize(segment)
        elif not self._begun or self._is_foreign(segment):
            yield from self._drain()
            self._begin(None)
            if segment.flags & RST and segment.flags & ACK and not segment.number:
                yield self._refused(segment)
        half, other = self._halves[segment.forward], self._halves[not segment.forward]
        if (half.base is None or other.held) and not segment.flags & RST:
            # No SYN of this direction, or of the other, was captured, or not yet.
            half.held.append(segment)
            half.waiting_bytes += len(segment.payload)
            if half.waiting_bytes > self._reorder_bytes or len(half.held) == _MOST_HELD:
                yield from self._begin_with_held()
            return
        yield from self._sort_in(segment)

    def _sort_in(self, segment: Segment) -> Iterator[ReassembledRun]:
        """A segment of a direction whose base is known, or a reset."""
        number, flags = segment.number, segment.flags
        half, other = self._halves[segment.forward], self._halves[not segment.forward]
        # SYN takes a sequence number of its own, before the first byte.
        number += 1 if flags & SYN else 0
        if flags & RST:
            # No SYN comes after it. Without anything before it, it defines offset 0.
            yield from self._begin_with_held()
        if half.base is None:
            half.base = number % SEQUENCE_SPACE
            half.late = True
        at = half.offset_of(number)
        if segment.length:
            half.reach = max(half.reach, at + segment.length)
        if segment.payload:
            yield from self._take(segment.forward, half, at, segment.time_ns, segment.payload)
        if flags & FIN_FLAG and half.fin_at is None:
            # By the length on the wire: a capture that cut the payload leaves a gap before the end.
            half.fin_at = at + segment.length
        yield from self._end(segment.forward, half, segment.time_ns)
        if half.waiting and half.waiting_bytes > self._reorder_bytes:
            yield from self._give_up(segment.forward, half)
        # An acknowledgement beyond the hole: the receiver has the bytes, the capture has not. They
        # may still follow for a short time, if the capture is out of order.
        if other.waiting and flags & ACK and other.base is not None:
            first, since, _ = other.waiting[0]
            acknowledged = other.offset_of(segment.acknowledgement)
            if acknowledged > first and segment.time_ns - since > REORDER_NS:
                yield from self._give_up(not segment.forward, other)
        if flags & RST and not self._reset:
            # Nothing is retransmitted after it: holes stay holes.
            yield from self._drain()
            self._reset = True
            yield self._run(segment.forward, half, RESET, half.next, 0, segment.time_ns, None)

    def finish(self) -> Iterator[ReassembledRun]:
        """The remaining runs of a flow that has no more segments: holes become gaps."""
        yield from self._drain()

    def is_settled(self, now_ns: int) -> bool:
        """Whether the connection ended more than LINGER_NS ago, so that nothing more belongs to
        it."""
        halves = self._halves.values()
        if not self._begun or not (self._over or all(half.may_have_ended for half in halves)):
            return False
        return now_ns - max(half.last_time for half in halves) > LINGER_NS

    @property
    def is_waiting(self) -> bool:
        """Whether segments wait for a hole to be filled, or for a SYN."""
        return any(half.waiting or half.held for half in self._halves.values())

    def save(self) -> Any:
        """The whole state in types that msgpack has, for `restore`."""
        halves = [self._halves[True].save(), self._halves[False].save()]
        return self._number, self._opener, halves, self._reset, self._begun, self._given

    def restore(self, saved: Any) -> None:
        """Continue where `save` was called. Raises TypeError or ValueError for damaged state."""
        self._number, self._opener, (forward, backward), reset, begun, given = saved
        self._reset, self._begun, self._given = reset, begun, given
        self._halves = {True: _Half.restored(forward), False: _Half.restored(backward)}

    # Connections.

    def _synchronize(self, segment: Segment) -> Iterator[ReassembledRun]:
        """SYN opens a connection; a repeated one changes nothing."""
        half, other = self._halves[segment.forward], self._halves[not segment.forward]
        first = (segment.number + 1) % SEQUENCE_SPACE
        answers = bool(segment.flags & ACK)
        # One of an ended connection that comes a moment later is out of order: no system uses a
        # number again at once (RFC 6191). So is one that was missing until now.
        is_recent = segment.time_ns - max(half.time, other.time) <= REORDER_NS
        repeats = half.base == first and (not self._over or is_recent or not half.synchronized)
        # One that answers this connection's SYN belongs to it, however much of its direction was
        # given out before.
        belongs = (
            half.late and answers and other.synchronized and other.base == segment.acknowledgement
        )
        if self._begun and (repeats or belongs):
            half.synchronized = True
            return
        # A SYN that does not fit what is known opens another connection: this direction has begun
        # already, or it answers a SYN with another number. Else it completes the handshake.
        fresh = (
            not self._begun
            or half.base is not None
            or self._over
            or not half.may_begin_with(first)
            or (answers and other.base is not None and other.base != segment.acknowledgement)
            or (
                answers and other.base is None and not other.may_begin_with(segment.acknowledgement)
            )
        )
        # SYN with ACK answers the peer's SYN, which may be missing: the peer is the opener.
        opener = segment.forward is not answers
        if fresh:
            yield from self._drain()
            self._begin(opener)
            half, other = self._halves[segment.forward], self._halves[not segment.forward]
        # Also if bytes came before it and are held: nothing was given out of the connection yet.
        if fresh or (self._opener is None and not self._given):
            self._opener = opener
            yield self._run(opener, self._halves[opener], OPEN, 0, 0, segment.time_ns, None)
            if answers and other.base is None:
                other.base = segment.acknowledgement
        half.base, half.synchronized = first, True
        yield from self._sort_in_held()

    def _refused(self, segment: Segment) -> ReassembledRun:
        """The opening that a refusal answers, whose SYN was not captured, or is out of order: a
        reset with number 0 acknowledges the SYN of the other end (RFC 9293, 3.5.2)."""
        self._opener = not segment.forward
        self._halves[self._opener].base = segment.acknowledgement
        opener = self._halves[self._opener]
        return self._run(self._opener, opener, OPEN, 0, 0, segment.time_ns, None)

    def _release_held(self, segment: Segment) -> Iterator[ReassembledRun]:
        """Stop waiting for a SYN if segments were held for REORDER_NS, and are many."""
        held = [each for half in self._halves.values() for each in half.held]
        if len(held) >= _REORDER_SEGMENTS:
            since = min(each.time_ns for each in held)
            if segment.time_ns - since > REORDER_NS:
                yield from self._begin_with_held()

    def _begin_with_held(self) -> Iterator[ReassembledRun]:
        """Directions with held segments and no base are late: the lowest number is that of offset
        0."""
        for half in self._halves.values():
            if half.held and half.base is None:
                half.base, half.late = half.first_held(), True
        yield from self._sort_in_held()

    def _sort_in_held(self) -> Iterator[ReassembledRun]:
        """Sort in what is held if no SYN is missing any more: in the order of capture, so that an
        answer stays after its request."""
        held: list[Segment] = []
        halves = self._halves.values()
        if any(half.base is None and half.held for half in halves):
            return
        for half in halves:
            held += half.held
            half.waiting_bytes -= sum(len(each.payload) for each in half.held)
            half.held = []
        for each in sorted(held, key=lambda segment: segment.time_ns):
            yield from self._sort_in(each)

    def _is_foreign(self, segment: Segment) -> bool:
        """Whether a segment is too far away to belong to this connection: it belongs to another
        one, whose SYN was not captured."""
        half = self._halves[segment.forward]
        if half.base is None or not segment.length:
            return False
        return abs(half.offset_of(segment.number) - half.next) > _FAR

    def _begin(self, opener: bool | None) -> None:
        self._number += 1
        self._opener = opener
        self._halves = {True: _Half(), False: _Half()}
        self._reset = False
        self._begun = True
        self._given = False

    @property
    def _over(self) -> bool:
        return self._reset or all(half.ended for half in self._halves.values())

    # Bytes.

    def _take(
        self, forward: bool, half: _Half, at: int, time_ns: int, payload: bytes
    ) -> Iterator[ReassembledRun]:
        if at < half.next:
            if at + len(payload) <= half.next:
                return
            payload = payload[half.next - at :]
            at = half.next
        if at > half.next:
            self._keep(half, at, time_ns, payload)
            return
        if half.waiting and at + len(payload) > half.waiting[0][0]:
            # It overlaps what waits, which was captured first and so counts: only the part that
            # fills the hole is used.
            self._keep(half, at, time_ns, payload)
        else:
            yield self._data(forward, half, payload, time_ns)
        yield from self._release(forward, half)

    def _keep(self, half: _Half, at: int, time_ns: int, payload: bytes) -> None:
        """Let those of the bytes wait that are not waiting already: between and around the pieces
        that are."""
        end = at + len(payload)
        pieces = []
        # The piece before this offset may reach into it.
        first = max(0, bisect_left(half.waiting, (at,)) - 1)
        for index in range(first, len(half.waiting)):
            start, _, data = half.waiting[index]
            if start >= end:
                break
            stop = start + len(data)
            if stop <= at:
                continue
            if start > at:
                pieces.append((at, start))
            at = stop
        if at < end:
            pieces.append((at, end))
        begin = end - len(payload)
        for start, stop in pieces:
            insort(half.waiting, (start, time_ns, payload[start - begin : stop - begin]))
            half.waiting_bytes += stop - start

    def _release(self, forward: bool, half: _Half) -> Iterator[ReassembledRun]:
        released = 0
        for at, time_ns, payload in half.waiting:
            if at != half.next:
                break
            released += 1
            half.waiting_bytes -= len(payload)
            yield self._data(forward, half, payload, time_ns)
        del half.waiting[:released]

    def _give_up(self, forward: bool, half: _Half) -> Iterator[ReassembledRun]:
        """Report the first hole as a gap, and what waited for it."""
        at, time_ns, _ = half.waiting[0]
        yield self._gap(forward, half, at - half.next, time_ns)
        yield from self._release(forward, half)
        yield from self._end(forward, half, time_ns)

    def _end(self, forward: bool, half: _Half, time_ns: int) -> Iterator[ReassembledRun]:
        if half.fin_at is not None and not half.ended and half.next >= half.fin_at:
            half.ended = True
            yield self._run(forward, half, FIN, half.next, 0, time_ns, None)

    def _drain(self) -> Iterator[ReassembledRun]:
        """Give out all that waits, with gaps for the holes: of both directions the earlier first,
        so that rows stay in about the order of capture."""
        if not self._begun:
            return
        yield from self._begin_with_held()
        while waiting := [
            (half.waiting[0][1], forward) for forward, half in self._halves.items() if half.waiting
        ]:
            forward = min(waiting)[1]
            yield from self._give_up(forward, self._halves[forward])
        for forward, half in self._halves.items():
            # The last bytes were on the wire, or precede the FIN, and were not captured.
            end = half.reach if half.fin_at is None else half.fin_at
            if not half.ended and end > half.next:
                yield self._gap(forward, half, end - half.next, half.time)
            yield from self._end(forward, half, half.time)

    def _data(self, forward: bool, half: _Half, payload: bytes, time_ns: int) -> ReassembledRun:
        run = self._run(forward, half, DATA, half.next, len(payload), time_ns, payload)
        half.next += len(payload)
        return run

    def _gap(self, forward: bool, half: _Half, length: int, time_ns: int) -> ReassembledRun:
        run = self._run(forward, half, GAP, half.next, length, time_ns, None)
        half.next += length
        return run

    def _run(
        self,
        forward: bool,
        half: _Half,
        kind: str,
        offset: int,
        length: int,
        time_ns: int,
        data: bytes | None,
    ) -> ReassembledRun:
        """A run with the direction's time, which never decreases: bytes that waited are given out
        after the later segment that filled the hole, and a clock may be set back."""
        half.time = max(half.time, time_ns)
        self._given = True
        return ReassembledRun(
            self._number,
            self._opener,
            forward,
            kind,
            offset,
            length,
            half.time,
            data,
            half.late,
        )
