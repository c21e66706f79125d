"""TCP reassembly: the segments of a flow in, runs of bytes in the order they were sent out.

A flow is all that two ends (address and port) ever said to one another; it may hold several
connections after one another. Segments come sorted by time. Each direction is put in order on its
own: what came before is dropped, what overlaps is cut (the first bytes seen hold), what is ahead
waits. A hole becomes a gap when it can't be filled any more: the receiver acknowledged what lies
behind it, too much waits, or the flow is over. What comes long after a connection's end is of
another one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from crosswire.capture.tcp import ACK, RST, SYN
from crosswire.capture.tcp import FIN as FIN_FLAG
from crosswire.wire.runs import DATA, FIN, GAP, OPEN, RESET

__all__ = ["LINGER_NS", "REORDER_BYTES", "REORDER_NS", "Flow", "ReassembledRun", "Segment"]

REORDER_BYTES: Final = 8 * 1024 * 1024
"""How much may wait behind a hole."""

REORDER_NS: Final = 200_000_000
"""How long a hole stays open that the receiver says it does not have: captures shuffle a little."""

LINGER_NS: Final = 120_000_000_000
"""How long after its end a connection's segments may still come: TCP's own TIME-WAIT, at most."""

_SPACE: Final = 1 << 32
_SPECIAL: Final = FIN_FLAG | SYN | RST
_FAR: Final = 1 << 30
"""Farther than this from what is expected, a segment belongs to another connection."""


class Segment(NamedTuple):
    """`length` is the payload's on the wire: more than `payload` has where the capture cut it."""

    forward: bool
    time_ns: int
    number: int
    acknowledgement: int
    flags: int
    length: int
    payload: bytes


class ReassembledRun(NamedTuple):
    """What happened next in a connection. `connection` counts those of the flow from 0.

    `forward` is the flow's, not the connection's; `opener` says whether the forward end opened it,
    None where that was not seen.
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
    """One direction of a connection."""

    __slots__ = ("base", "ended", "fin_at", "late", "next", "time", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.base: int | None = None
        self.next = 0
        self.late = False
        self.fin_at: int | None = None
        self.ended = False
        self.time = 0
        self.waiting: list[tuple[int, int, bytes]] = []
        self.waiting_bytes = 0

    def offset_of(self, number: int) -> int:
        """Offset of a sequence number: the one nearest to what is expected."""
        assert self.base is not None
        distance = (number - self.base - self.next) % _SPACE
        return self.next + (distance if distance < _SPACE // 2 else distance - _SPACE)

    def save(self) -> Any:
        return (
            self.base,
            self.next,
            self.late,
            self.fin_at,
            self.ended,
            self.time,
            self.waiting,
        )

    @classmethod
    def restored(cls, saved: Any) -> _Half:
        half = cls()
        half.base, half.next, half.late, half.fin_at, half.ended, half.time, waiting = saved
        half.waiting = [(at, time_ns, bytes(data)) for at, time_ns, data in waiting]
        half.waiting_bytes = sum(len(data) for _, _, data in half.waiting)
        return half


class Flow:
    """Feed it the segments of one flow with `add`, then call `finish`; both give runs."""

    def __init__(self, *, reorder_bytes: int = REORDER_BYTES) -> None:
        self._reorder_bytes = reorder_bytes
        self._number = -1
        self._opener: bool | None = None
        self._halves = {True: _Half(), False: _Half()}
        self._reset = False
        self._begun = False

    def add(self, segment: Segment) -> Iterable[ReassembledRun]:
        """The runs that this segment completes; to be used up before the next one is added."""
        forward, time_ns, number, _, flags, _, payload = segment
        half, other = self._halves[forward], self._halves[not forward]
        if (
            half.base is not None
            and number == (half.base + half.next) % _SPACE
            and payload
            and not flags & _SPECIAL
            and not self._reset
            and half.fin_at is None
            and not half.waiting
            and not other.waiting
        ):
            # Nearly all segments are the ones that were expected.
            return (self._data(forward, half, payload, time_ns),)
        return self._add(segment, half, other)

    def _add(self, segment: Segment, half: _Half, other: _Half) -> Iterator[ReassembledRun]:
        number, flags = segment.number, segment.flags
        if self.is_settled(segment.time_ns):
            yield from self._drain()
            self._begun = False
        if flags & SYN:
            yield from self._synchronize(segment)
            half, other = self._halves[segment.forward], self._halves[not segment.forward]
            number += 1
        elif not self._begun or self._is_foreign(half, segment):
            yield from self._start_late()
            half, other = self._halves[segment.forward], self._halves[not segment.forward]
        if half.base is None:
            half.base = number % _SPACE
            half.late = True
        at = half.offset_of(number)
        if segment.payload:
            yield from self._take(segment.forward, half, at, segment.time_ns, segment.payload)
        if flags & FIN_FLAG and half.fin_at is None:
            half.fin_at = at + segment.length
        yield from self._end(segment.forward, half, segment.time_ns)
        if half.waiting and half.waiting_bytes > self._reorder_bytes:
            yield from self._give_up(segment.forward, half)
        if other.waiting and flags & ACK and other.base is not None:
            first, since, _ = other.waiting[0]
            acknowledged = other.offset_of(segment.acknowledgement)
            if acknowledged > first and segment.time_ns - since > REORDER_NS:
                yield from self._give_up(not segment.forward, other)
        if flags & RST and not self._reset:
            yield from self._drain()
            self._reset = True
            yield self._run(segment.forward, half, RESET, half.next, 0, segment.time_ns, None)

    def finish(self) -> Iterator[ReassembledRun]:
        """No more segments will come."""
        yield from self._drain()

    def is_settled(self, now_ns: int) -> bool:
        """The connection ended so long ago that nothing more can come of it."""
        if not self._begun or not self._over:
            return False
        return now_ns - max(half.time for half in self._halves.values()) > LINGER_NS

    @property
    def is_waiting(self) -> bool:
        """There is a hole in what came."""
        return any(half.waiting for half in self._halves.values())

    def save(self) -> Any:
        """The whole state, as msgpack can hold it, to be given to `restore`."""
        halves = [self._halves[True].save(), self._halves[False].save()]
        return self._number, self._opener, halves, self._reset, self._begun

    def restore(self, saved: Any) -> None:
        """Go on where `save` was called. Raises TypeError or ValueError if it's damaged."""
        self._number, self._opener, (forward, backward), self._reset, self._begun = saved
        self._halves = {True: _Half.restored(forward), False: _Half.restored(backward)}

    # Connections.

    def _synchronize(self, segment: Segment) -> Iterator[ReassembledRun]:
        """SYN opens a connection; a repeated one changes nothing."""
        half, other = self._halves[segment.forward], self._halves[not segment.forward]
        first = (segment.number + 1) % _SPACE
        answers = bool(segment.flags & ACK)
        if half.base == first and not half.late and not self._over:
            return
        fresh = (
            not self._begun
            or half.base is not None
            or self._over
            or (answers and other.base is not None and other.base != segment.acknowledgement)
        )
        if fresh:
            yield from self._drain()
            self._begin(segment.forward is not answers)
            half, other = self._halves[segment.forward], self._halves[not segment.forward]
            if answers:
                other.base = segment.acknowledgement
            opener = segment.forward is not answers
            side = self._halves[opener]
            yield self._run(opener, side, OPEN, 0, 0, segment.time_ns, None)
        half.base = first

    def _is_foreign(self, half: _Half, segment: Segment) -> bool:
        """Far from all that this connection could say: its SYN was not captured."""
        if half.base is None or not segment.payload:
            return False
        return abs(half.offset_of(segment.number) - half.next) > _FAR

    def _start_late(self) -> Iterator[ReassembledRun]:
        yield from self._drain()
        self._begin(None)

    def _begin(self, opener: bool | None) -> None:
        self._number += 1
        self._opener = opener
        self._halves = {True: _Half(), False: _Half()}
        self._reset = False
        self._begun = True

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
            # What waits came first: it holds.
            self._keep(half, at, time_ns, payload)
        else:
            yield self._data(forward, half, payload, time_ns)
        yield from self._release(forward, half)

    def _keep(self, half: _Half, at: int, time_ns: int, payload: bytes) -> None:
        """Put aside those of the bytes that are not waiting already."""
        end = at + len(payload)
        pieces = []
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
        """The hole in front of what waits will not be filled."""
        at, time_ns, _ = half.waiting[0]
        yield self._gap(forward, half, at - half.next, time_ns)
        yield from self._release(forward, half)
        yield from self._end(forward, half, time_ns)

    def _end(self, forward: bool, half: _Half, time_ns: int) -> Iterator[ReassembledRun]:
        if half.fin_at is not None and not half.ended and half.next >= half.fin_at:
            half.ended = True
            yield self._run(forward, half, FIN, half.next, 0, time_ns, None)

    def _drain(self) -> Iterator[ReassembledRun]:
        """Give out all that waits, the earliest first, with gaps where there are holes."""
        if not self._begun:
            return
        while waiting := [
            (half.waiting[0][1], forward) for forward, half in self._halves.items() if half.waiting
        ]:
            forward = min(waiting)[1]
            yield from self._give_up(forward, self._halves[forward])
        for forward, half in self._halves.items():
            if half.fin_at is not None and not half.ended and half.fin_at > half.next:
                yield self._gap(forward, half, half.fin_at - half.next, half.time)
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
        """A direction's time never runs backwards."""
        half.time = max(half.time, time_ns)
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
