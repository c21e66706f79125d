"""A producer and consumers in processes of their own, started together and timed.

Whatever is not durable can get lost on its way to a subscriber that is slower than its publisher:
a topic's producer never gets further ahead of its consumers than they have room for.
"""

from __future__ import annotations

import multiprocessing
import selectors
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import msgspec

from crosswire.cli.bench.contract import Line, Work, consumer_of, producer_of
from crosswire.errors import ClientError, CrosswireError

__all__ = ["Figures", "Latency", "load", "one_at_a_time"]

_BATCHES: Final = 4
_NAP_S: Final = 0.0002
_WARM_UP: Final = 0.1

_processes = multiprocessing.get_context("fork")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`deliveries` counts each consumer's. CPU time is the hub's, where it is one of ours."""

    messages: int
    deliveries: int
    seconds: float
    hub_cpu_s: float | None = None

    @property
    def per_second(self) -> float:
        return self.deliveries / self.seconds

    @property
    def cpu_us(self) -> float | None:
        """Of the hub, for each delivery."""
        return None if self.hub_cpu_s is None else 1e6 * self.hub_cpu_s / self.deliveries


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Medians, one message at a time: until it is acknowledged, and until it is delivered."""

    answered_us: float
    delivered_us: float


def load(work: Work, count: int, cpu_s: Callable[[], float] | None = None) -> Figures:
    """Send `count` messages as fast as possible, after some for warming up. Raises ClientError."""
    taken: Any = _processes.RawValue("q", 0)
    with _running(_consume, work, taken) as consumer, _running(_produce, work, taken) as producer:
        _round(producer, consumer, max(int(count * _WARM_UP), 1))
        before = cpu_s() if cpu_s is not None else 0.0
        started, ended = _round(producer, consumer, count)
        used = None if cpu_s is None else cpu_s() - before
    deliveries = count * work.consumers if work.is_topic else count
    return Figures(messages=count, deliveries=deliveries, seconds=ended - started, hub_cpu_s=used)


def _round(producer: Pipe, consumer: Pipe, count: int) -> tuple[float, float]:
    """When the first was sent and the last was both delivered and acknowledged."""
    consumer.send(count)
    producer.send(count)
    answered, delivered = _receive_result(producer), _receive_result(consumer)
    return answered[0], max(answered[1], delivered[1])


def _receive_result(pipe: Pipe) -> Any:
    try:
        result = pipe.recv()
    except EOFError:
        raise ClientError("a load process ended before its time") from None
    if isinstance(result, str):
        raise ClientError(result)
    return result


# ------------------------------------------------------------------------------------- processes


@contextmanager
def _running(body: Callable[[Work, Any, Pipe], None], work: Work, taken: Any) -> Iterator[Pipe]:
    """A process that has connected; it does a round for each number it is sent."""
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_guarded, args=(body, work, taken, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        _receive_result(ours)
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


def _guarded(body: Callable[[Work, Any, Pipe], None], work: Work, taken: Any, pipe: Pipe) -> None:
    try:
        body(work, taken, pipe)
    except CrosswireError as error:
        pipe.send(str(error))
    except EOFError:
        return


def _produce(work: Work, taken: Any, pipe: Pipe) -> None:
    producer = producer_of(work)
    line = Line(work, producer)
    pipe.send(True)
    total = 0
    while True:
        count = pipe.recv()
        started = time.perf_counter()
        window = producer.window
        least = max(window // _BATCHES, 1)
        sent = answered = 0
        while answered < count:
            room = min(window - (sent - answered), count - sent)
            if work.is_topic:
                room = min(room, window - (total + sent - taken.value))
            if room >= min(least, count - sent) > 0:
                producer.send(room)
                line.write()
                sent += room
                if not producer.is_answered:
                    answered = sent
            elif sent > answered:
                answered += producer.answered(line.read())
            else:
                time.sleep(_NAP_S)
        total += count
        pipe.send((started, time.perf_counter()))


def _consume(work: Work, taken: Any, pipe: Pipe) -> None:
    """All consumers in one process. `taken` is what the slowest has, or what all have together."""
    lines = []
    for _ in range(work.consumers):
        consumer = consumer_of(work)
        lines.append((Line(work, consumer), consumer))
    counts = [0] * work.consumers
    pipe.send(True)
    total = 0
    with selectors.DefaultSelector() as selector:
        for index, (line, _) in enumerate(lines):
            selector.register(line.socket, selectors.EVENT_READ, index)
        while True:
            total += pipe.recv()
            started = time.perf_counter()
            while taken.value < total:
                ready = [key.data for key, _ in selector.select(0 if _early(lines) else None)]
                for index in ready or range(work.consumers):
                    line, consumer = lines[index]
                    if ready or line.has_early:
                        counts[index] += consumer.take(line.read())
                        line.write()
                taken.value = min(counts) if work.is_topic else sum(counts)
            pipe.send((started, time.perf_counter()))


def _early(lines: list[tuple[Line, Any]]) -> bool:
    return any(line.has_early for line, _ in lines)


# -------------------------------------------------------------------------------------- latency


def one_at_a_time(work: Work, count: int) -> Latency:
    """Send, wait for the acknowledgement and for the delivery, and again. Raises ClientError."""
    consumer, producer = consumer_of(work), producer_of(work)
    taking, sending = Line(work, consumer), Line(work, producer)
    answered_s, delivered_s = [], []
    for _ in range(count):
        started = time.perf_counter()
        producer.send(1)
        sending.write()
        while producer.is_answered and not producer.answered(sending.read()):
            pass
        answered_s.append(time.perf_counter() - started)
        while not consumer.take(taking.read()):
            pass
        delivered_s.append(time.perf_counter() - started)
        taking.write()
    taking.close()
    sending.close()
    return Latency(
        answered_us=1e6 * statistics.median(answered_s),
        delivered_us=1e6 * statistics.median(delivered_s),
    )
