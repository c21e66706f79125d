"""An attack, and an uninvolved neighbour, each in a process of its own beside the hub's.

The hub has users: the attacker is one with rights to everything, the neighbour another. It is an
EMP peer that sends one `$echo` after another, and now and then publishes to a queue of its own,
which nobody may refuse. An attack is a generator: what it does before its first `yield`
(connecting, building frames) is not measured, the rest is.

Machines that run the tests are loaded. So an attack is judged by the hub's own measurement first:
`crosswire_loop_turn_seconds` is by the clock of the event loop's thread, which stands still while
that thread waits for a processor. The 99th percentile of the neighbour's round trips is compared
with what a polite peer costs it that keeps the hub as busy.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import secrets
import signal
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

from crosswire.wire.contract import Connection
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emqp.connection import EmqpConnection
from crosswire.wire.epoxy.comm import marshal_credentials
from crosswire.wire.epoxy.connection import EpoxyConnection
from crosswire.wire.relink.connection import RelinkConnection
from crosswire.wire.relink.handshake import LinkTerms
from crosswire.wire.relink.link import Link
from crosswire.wire.zmtp.curve import CurveClient, encode_key, public_key_of
from tests.adversary.harness import PATIENCE_S, PAUSE_S, Attacker, Target
from tests.certificates import Authority, make_certificate
from tests.cli.conftest import RunningHub

ATTACKER_TOKEN = "the-secret-of-the-attacker"
NEIGHBOUR_TOKEN = "the-secret-of-the-neighbour"
OBSERVER_TOKEN = "the-secret-of-the-observer"
EVERYTHING = """
produce = ["queue/#", "topic/#"]
consume = ["queue/#", "topic/#"]
call = ["service/#"]
serve = ["service/#"]
"""

REVOKED_TOKEN = "the-secret-of-the-revoked"
REVOKED_USER = f"""
[[users]]
name = "revoked"
token = "{REVOKED_TOKEN}"
{EVERYTHING}
"""

PUBLISH_EVERY = 50
"""Pings between two publications of the neighbour."""
PING_S = 0.05
"""The 99th percentile of the neighbour's round trips during an attack, unless a polite peer costs
it nearly as much."""
TIMES = 2
ATTEMPTS = 4
POLITE_S = 0.5
"""A polite peer is there for so long at least, or the neighbour would ping too few times."""
WORST = 2.5
TURN_S = 0.02
"""No turn of the hub's event loop is longer, from frames of up to a MiB."""
LARGE_S = 0.006
"""What each MiB of a larger frame may add."""
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

    def __init__(
        self, port: int, connection: Connection, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(port, connection)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")

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
    longer_turns: dict[float, int]
    """How many turns were longer than each bound of the hub's histogram."""
    kept_bytes: int
    seconds: float

    @property
    def ping_s(self) -> float:
        """The 99th percentile."""
        return self.trips_s[-1 - len(self.trips_s) // 100]

    @property
    def turn_s(self) -> float:
        """The bound below which all turns were."""
        return min((bound for bound, count in self.longer_turns.items() if not count), default=0.0)

    def turns_over(self, limit_s: float) -> int:
        """How many were longer; the histogram has few bounds, so it may be by the next one."""
        return self.longer_turns[min(bound for bound in self.longer_turns if bound >= limit_s)]

    def __str__(self) -> str:
        return (
            f"ping {1e3 * self.ping_s:.0f} ms (worst {1e3 * self.trips_s[-1]:.0f} ms of"
            f" {len(self.trips_s)}), turn {1e3 * self.turn_s:.0f} ms"
            f" ({self.longer_turns.get(TURN_S, 0)} over {1e3 * TURN_S:.0f} ms),"
            f" kept {self.kept_bytes >> 20} MiB, {self.seconds:.1f} s"
        )


class MeasuredTarget(Target):
    """A hub with users, as attacks of `growth` see it."""

    def __init__(self, folder: Path) -> None:
        self._secret_key, hub_key = secrets.token_bytes(32), secrets.token_bytes(32)
        self._hub_key = public_key_of(hub_key)
        authority = Authority(folder, "authority")
        certificate, key = make_certificate(folder, "hub")
        self.tls = ssl.create_default_context(cafile=certificate)
        self.tls.load_cert_chain(authority.sign("/CN=attacker"))
        file = self._file = folder / "crosswire.toml"
        file.touch(mode=0o600)
        self._settings = f"""
[tls]
certificate = "{certificate}"
key = "{key}"
client_ca = "{authority.certificate}"
[emqp]
curve_secret_key = "{encode_key(hub_key)}"
[[users]]
name = "attacker"
token = "{ATTACKER_TOKEN}"
certificate = "attacker"
curve_key = "{encode_key(public_key_of(self._secret_key))}"
{EVERYTHING}
[[users]]
name = "neighbour"
token = "{NEIGHBOUR_TOKEN}"
{EVERYTHING}
[[users]]
name = "observer"
token = "{OBSERVER_TOKEN}"
observe = true
administer = true
"""
        file.write_text(self._settings + REVOKED_USER)
        unused = ("emp-tls", "epoxy-tls", "micromsg2-tls", "https")
        others = [f"--listen={each}=off" for each in unused]
        hub = RunningHub(
            folder / "data", "--config", str(file), "--listen=relink-tls=127.0.0.1:0", *others
        )
        super().__init__(hub, NEIGHBOUR_TOKEN)

    def reload(self, *, revoked: bool) -> None:
        """Have the hub read its configuration again, with the user that can be taken away or
        without it."""
        self._file.write_text(self._settings + ("" if revoked else REVOKED_USER))
        # Not by `Popen`: this may be another process than the one that started the hub.
        os.kill(self.hub.process.pid, signal.SIGHUP)

    # Peers of the attacker, after their handshakes.

    def peer(self, token: str = ATTACKER_TOKEN) -> MeasuredPeer:
        peer = MeasuredPeer(self.port("emp"), EmpConnection("client", 0.0)).ready()
        peer.connection.send_request("$authenticate", b'{"token":"%b"}' % token.encode())
        peer.answers(1)
        return peer

    def emqp_peer(self, role: str, **options: Any) -> MeasuredPeer:
        port = self.port(f"emqp-{role}s")
        curve = CurveClient(self._hub_key, self._secret_key, secrets.token_bytes)
        connection = EmqpConnection(role, 0.0, mechanism=curve, **options)
        return MeasuredPeer(port, connection).ready()

    def epoxy_peer(self) -> MeasuredPeer:
        peer = MeasuredPeer(self.port("epoxy"), EpoxyConnection("client", 0.0)).ready()
        peer.connection.send_request(
            "crosswire.Hub",
            "Authenticate",
            b"CB\x01\x00\x00",
            layer_data=marshal_credentials(ATTACKER_TOKEN),
        )
        peer.answers(1)
        return peer

    def relink_peer(self, endpoint: str, **terms: Any) -> MeasuredPeer:
        link = Link("connector", LinkTerms(endpoint=endpoint, **terms))
        connection = RelinkConnection("connector", 0.0, link=link)
        return MeasuredPeer(self.port("relink-tls"), connection, self.tls).ready()

    # Measuring.

    def longer_turns(self) -> dict[float, int]:
        """How many turns were longer than each bound of the hub's histogram."""
        request = urllib.request.Request(f"{self.url}/metrics")
        request.add_header("authorization", f"Bearer {OBSERVER_TOKEN}")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read().decode()
        name = "crosswire_loop_turn_seconds_bucket"
        found = re.findall(rf'^{name}{{le="([^"]+)"}} (\d+)$', text, re.MULTILINE)
        counts = {float(bound): int(count) for bound, count in found}
        return {bound: counts[float("inf")] - count for bound, count in counts.items()}

    def _ping(self, pipe: Pipe) -> None:
        """Ping until something arrives at the pipe, and send all round trips in seconds."""
        with self.peer(NEIGHBOUR_TOKEN) as peer:
            trips: list[float] = []

            def ask(op: str, data: bytes) -> Any:
                peer.connection.send_request(op, data)
                peer.until(lambda: bool(peer.events))
                assert peer.events, "the hub disconnected the neighbour"
                return peer.events.pop()

            pipe.send(("ready", None))
            # The ping that runs when the attack ends is finished: it may be the worst.
            while not trips or not pipe.poll(PAUSE_S):
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
        kept_bytes = self.resident_bytes() - memory
        return AttackCost(trips, longer, kept_bytes, seconds)

    def assert_served(
        self, attack: Attack, polite: Callable[[float], Attack], largest_mib: int = 0
    ) -> None:
        """No turn of the hub is long during the attack, the neighbour is served as beside a polite
        peer, and memory returns. A frame of `largest_mib` may take longer; the neighbour may wait
        for two turns of it.

        Turns are measured by the clock of the hub's thread, which stands still while others have
        the processor, but runs faster than its work while they share its caches. So one of a few
        attempts has to be without a longer turn, and none may have one of `WORST` times as long. A
        round trip has no such clock: it may be as long as beside a polite peer that keeps the hub
        busy for as long, right after the attack, since what the machine alone does to a neighbour
        is not the attack's.
        """
        large_s = LARGE_S * largest_mib
        found: list[str] = []
        pings: list[float] = []
        limit_s = PING_S
        is_short = False
        for _ in range(ATTEMPTS):
            cost = self.measure(attack)
            found.append(str(cost))
            text = "\n".join(found)
            assert not cost.turns_over(WORST * (TURN_S + large_s)), text
            assert cost.kept_bytes <= KEPT_BYTES, text
            is_short = is_short or not cost.turns_over(TURN_S + large_s)
            pings.append(cost.ping_s - 2 * large_s)
            if min(pings) > limit_s:
                beside = self.measure(polite(max(cost.seconds, POLITE_S)))
                found.append(f"polite: {beside}")
                limit_s = max(limit_s, TIMES * beside.ping_s)
            if is_short and min(pings) <= limit_s:
                return
        raise AssertionError("\n".join(found))


Attack = Callable[[MeasuredTarget], Iterator[None]]


@contextlib.contextmanager
def measured_hub(folder: Path) -> Iterator[MeasuredTarget]:
    """A hub with users, as `crosswire serve` runs it."""
    target = MeasuredTarget(folder)
    try:
        yield target
    finally:
        target.hub.process.kill()
        target.hub.process.communicate(timeout=30)
