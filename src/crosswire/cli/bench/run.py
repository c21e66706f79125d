"""Runs a producer and consumers in two processes and times them.

A hub drops messages for subscribers that are slower than the publisher, unless they are durable.
A topic's producer is therefore never more than a window ahead of its slowest consumer.
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
_PAUSE_S: Final = 0.0002
_WARM_UP: Final = 0.1

_processes = multiprocessing.get_context("fork")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a load; `deliveries` is the sum over all consumers.

    The CPU time is that of the hub, None for a hub that was not started here.
    """

    messages: int
    deliveries: int
    seconds: float
    hub_cpu_s: float | None = None

    @property
    def per_second(self) -> float:
        """Deliveries per second."""
        return self.deliveries / self.seconds

    @property
    def cpu_us(self) -> float | None:
        """The hub's CPU time per delivery."""
        return None if self.hub_cpu_s is None else 1e6 * self.hub_cpu_s / self.deliveries


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the times until a message is acknowledged and until it is delivered."""

    answered_us: float
    delivered_us: float


def load(
    work: Work,
    count: int,
    cpu_s: Callable[[], float] | None = None,
    wait: Callable[[], None] | None = None,
) -> Figures:
    """Send `count` messages as fast as possible, after a warm-up. Raises ClientError.

    `cpu_s` reads the hub's CPU time; before that, `wait` returns when the hub has no work left.
    """
    taken: Any = _processes.RawValue("q", 0)
    with _running(_consume, work, taken) as consumer, _running(_produce, work, taken) as producer:
        _round(producer, consumer, max(int(count * _WARM_UP), 1))
        if wait is not None:
            wait()
        before = cpu_s() if cpu_s is not None else 0.0
        started, ended = _round(producer, consumer, count)
        if wait is not None:
            wait()
        used = None if cpu_s is None else cpu_s() - before
    deliveries = count * work.consumers if work.is_topic else count
    return Figures(messages=count, deliveries=deliveries, seconds=ended - started, hub_cpu_s=used)


def _round(producer: Pipe, consumer: Pipe, count: int) -> tuple[float, float]:
    """When the first message was sent, and when the last was delivered and acknowledged."""
    consumer.send(count)
    producer.send(count)
    answered, delivered = _receive_result(producer), _receive_result(consumer)
    return answered[0], max(answered[1], delivered[1])


def _receive_result(pipe: Pipe) -> Any:
    try:
        result = pipe.recv()
    except EOFError:
        raise ClientError("a load process ended early") from None
    if isinstance(result, str):
        raise ClientError(result)
    return result


# ------------------------------------------------------------------------------------- processes


@contextmanager
def _running(body: Callable[[Work, Any, Pipe], None], work: Work, taken: Any) -> Iterator[Pipe]:
    """A connected process; it runs a round for each count that it is sent."""
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
            # A quarter of the window at a time: single messages would cost a system call each.
            if room >= min(least, count - sent) > 0:
                producer.send(room)
                line.write()
                sent += room
                if not producer.is_answered:
                    answered = sent
            elif sent > answered:
                answered += producer.answered(line.read())
            else:
                # Only the consumers hold the producer back: there is no socket to wait on.
                time.sleep(_PAUSE_S)
        total += count
        pipe.send((started, time.perf_counter()))


def _consume(work: Work, taken: Any, pipe: Pipe) -> None:
    """All consumers in one process.

    `taken` is the count of the slowest consumer of a topic, or the sum over those of a queue.
    """
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
    """Send `count` messages, each after the delivery of the one before. Raises ClientError."""
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
