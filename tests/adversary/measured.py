"""An attack, and an uninvolved neighbour, each in a process of its own beside the hub's.

The neighbour is an EMP peer that sends one `$echo` after another, and now and then publishes to a
queue of its own, which nobody may refuse. An attack is a generator: what it does before its first
`yield` (connecting, building frames) is not measured, the rest is.

Machines that run the tests are loaded. So an attack is judged by the hub's own measurement first:
`crosswire_loop_turn_seconds` is by the clock of the event loop's thread, which stands still while
that thread waits for a processor. The 99th percentile of the neighbour's round trips is compared
with what a polite peer costs it that keeps the hub as busy.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from tests.adversary.harness import ATTEMPTS, PATIENCE_S, PAUSE_S, Attacker, Target

PUBLISH_EVERY = 50
"""Pings between two publications of the neighbour."""
PING_S = 0.05
"""The 99th percentile of the neighbour's round trips during an attack, unless a polite peer costs
it nearly as much."""
TIMES = 2
TURN_S = 0.03
"""No turn of the hub's event loop is longer: 20 ms are promised, and this is the histogram's next
bound, for processors that are slow because others use the same caches."""
KEPT_BYTES = 128 * 1024 * 1024
"""What the hub may keep after an attack: queues, subscriptions and schedules that it was told to
keep, and memory that the allocator returns late."""

_fork = multiprocessing.get_context("fork")


class ChildTask:
    """A function in a process of its own, at the other end of a pipe."""

    def __init__(self, work: Callable[[Pipe], object]) -> None:
        self._pipe, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_run, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def expect(self) -> Any:
        """The next thing that it sends. Raises AssertionError with its error."""
        assert self._pipe.poll(PATIENCE_S), "no answer from another process"
        kind, value = self._pipe.recv()
        assert kind != "error", value
        return value

    def send(self) -> None:
        self._pipe.send(None)

    def stop(self) -> None:
        self._pipe.close()
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()


def _run(work: Callable[[Pipe], object], pipe: Pipe) -> None:
    try:
        work(pipe)
    except BaseException as error:
        pipe.send(("error", repr(error)))
    # Without the clean-up of the test process, whose copy this is.
    os._exit(0)


class MeasuredPeer(Attacker):
    """An attacker that counts answers."""

    def bytes_to_send(self) -> bytes:
        return b"".join(self.connection.data_to_send())

    def answers(self, count: int) -> None:
        """Read this many events more, and forget them."""
        self.until(lambda: len(self.events) >= count)
        assert len(self.events) >= count, "the hub disconnected an attacker"
        self.events.clear()

    def ready(self) -> MeasuredPeer:
        """After the handshake."""
        self.opened()
        self.events.clear()
        return self


class AttackCost(NamedTuple):
    """What an attack costs: round trips of the neighbour, the hub's turns, memory that it kept."""

    trips_s: list[float]
    long_turns: int
    worst_turn_s: float
    """The upper bound of the histogram's bucket."""
    kept_bytes: int
    seconds: float

    @property
    def ping_s(self) -> float:
        """The 99th percentile."""
        return self.trips_s[-1 - len(self.trips_s) // 100]

    def __str__(self) -> str:
        return (
            f"ping {1e3 * self.ping_s:.0f} ms (worst {1e3 * self.trips_s[-1]:.0f} ms of"
            f" {len(self.trips_s)}), turn {1e3 * self.worst_turn_s:.0f} ms"
            f" ({self.long_turns} long), kept {self.kept_bytes >> 20} MiB, {self.seconds:.1f} s"
        )


class MeasuredTarget(Target):
    """A hub without users, as attacks of `growth` see it."""

    # Peers, after their handshakes.

    def peer(self) -> MeasuredPeer:
        return MeasuredPeer(self.port("emp"), EmpConnection("client", 0.0)).ready()

    def emqp_peer(self, role: str, **options: Any) -> MeasuredPeer:
        port = self.port(f"emqp-{role}s")
        return MeasuredPeer(port, EmqpConnection(role, 0.0, **options)).ready()

    def epoxy_peer(self) -> MeasuredPeer:
        return MeasuredPeer(self.port("epoxy"), EpoxyConnection("client", 0.0)).ready()

    def relink_peer(self, endpoint: str, **terms: Any) -> MeasuredPeer:
        link = Link("connector", LinkTerms(endpoint=endpoint, **terms))
        return MeasuredPeer(
            self.port("relink"), RelinkConnection("connector", 0.0, link=link)
        ).ready()

    # Measuring.

    def longer_turns(self) -> dict[float, int]:
        """How many turns were longer than each bound of the hub's histogram."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as response:
            text = response.read().decode()
        name = "crosswire_loop_turn_seconds_bucket"
        found = re.findall(rf'^{name}{{le="([^"]+)"}} (\d+)$', text, re.MULTILINE)
        counts = {float(bound): int(count) for bound, count in found}
        return {bound: counts[float("inf")] - count for bound, count in counts.items()}

    def _ping(self, pipe: Pipe) -> None:
        """Ping until something arrives at the pipe, and send all round trips in seconds."""
        with self.peer() as peer:
            trips: list[float] = []

            def ask(op: str, data: bytes) -> Any:
                peer.connection.send_request(op, data)
                peer.until(lambda: bool(peer.events))
                assert peer.events, "the hub disconnected the neighbour"
                return peer.events.pop()

            pipe.send(("ready", None))
            # The ping that runs when the attack ends is finished: it may be the worst.
            while not pipe.poll(PAUSE_S):
                began = time.perf_counter()
                ask("$echo", b'{"n":1}')
                trips.append(time.perf_counter() - began)
                if len(trips) % PUBLISH_EVERY == 0:
                    answer = ask("$publish", b'{"destination":"queue/neighbour","text":"x"}')
                    assert answer.succeeded, f"the neighbour is refused: {answer}"
            pipe.send(("trips", trips))

    def measure(self, attack: Attack) -> AttackCost:
        """Run an attack in a process, and measure while it runs."""

        def work(pipe: Pipe) -> None:
            steps = attack(self)
            next(steps)
            pipe.send(("ready", None))
            pipe.recv()
            for _ in steps:
                pass
            pipe.send(("done", None))
            pipe.recv()

        attacker = ChildTask(work)
        neighbour: ChildTask | None = None
        try:
            attacker.expect()
            neighbour = ChildTask(self._ping)
            neighbour.expect()
            memory, before = self.resident_bytes(), self.longer_turns()
            began = time.perf_counter()
            attacker.send()
            attacker.expect()
            seconds = time.perf_counter() - began
            neighbour.send()
            trips = sorted(neighbour.expect())
            after = self.longer_turns()
            attacker.send()
        finally:
            attacker.stop()
            if neighbour is not None:
                neighbour.stop()
        longer = {bound: count - before.get(bound, 0) for bound, count in after.items()}
        worst = min((bound for bound, count in longer.items() if not count), default=0.0)
        kept_bytes = self.resident_bytes() - memory
        return AttackCost(trips, longer.get(TURN_S, 0), worst, kept_bytes, seconds)

    def assert_served(self, attack: Attack, polite: Attack) -> None:
        """No turn of the hub is long during the attack, the neighbour is served as beside a polite
        peer, and memory returns.

        An attack that works does so each time; a machine that stalls, once. So one of a few
        attempts is enough.
        """
        found = []
        for _ in range(ATTEMPTS):
            cost = self.measure(attack)
            found.append(str(cost))
            limit_s = PING_S
            if cost.ping_s > limit_s:
                beside = self.measure(polite)
                found.append(f"polite: {beside}")
                limit_s = max(limit_s, TIMES * beside.ping_s)
            if cost.ping_s <= limit_s and not cost.long_turns and cost.kept_bytes <= KEPT_BYTES:
                return
        raise AssertionError("\n".join(found))


Attack = Callable[[MeasuredTarget], Iterator[None]]
